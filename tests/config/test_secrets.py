from __future__ import annotations

import traceback

import pytest

from speedtronic.config import ConfigError, DistributedConfig, ModelConfig, SpeedtronicConfig, load_config
from speedtronic.config.base import Section
from speedtronic.config.secrets import is_secret, may_be_shown, redacted, without_redacted

SECRET = "hf_verysecret123"


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "access_token",
        "secret",
        "aws_secret_access_key",
        "clientSecret",
        "password",
        "db-password",
        "passwords_secret_1",
        "apiKey",
        "api_key",
        "APIKEY",
        "key",
        "credentials",
        "credential_file",
        "api_keys",
        "accessKeys",
        "tokens",
        "access_tokens",
        "db_passwords",
        "pwd",
        "basic_auth",
        "Authorization",
        "bearer",
        "session_cookie",
        "creds",
        "hf_token",
        "wandb_key",
        "WANDB_API_KEY",
        "sasToken",
        "ssh_keys",
    ],
)
def test_a_key_that_names_a_secret_is_recognised(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        *(
            "num_tokens",
            "special_tokens",
            "tokenizer",
            "key_dim",
            "token_dim",
            "endpoint",
            "keys_per_page",
            "author",
            "",
        ),
        *("pad_token", "eosToken", "mask_token", "sort_key", "primary_key", "image_token", "label_key", "monkey"),
        *("valid_key", "thread_key", "robotToken", "restore_key"),
    ],
)
def test_other_keys_are_not(key: str) -> None:
    assert not is_secret(key)


def test_a_token_of_a_model_is_kept_whatever_it_is_called() -> None:
    extra = {"pad_token": "<pad>", "eos_token": 2, "sort_key": "length", "my_token": "[CLS]", "group_key": None}
    config = SpeedtronicConfig(model={"extra": extra})
    assert config.to_dict(redact_secrets=True)["model"]["extra"] == extra
    assert load_config(config.to_yaml(redact_secrets=True)).model.extra == extra


@pytest.mark.parametrize(
    "value",
    ["hf_abcdefghijKLMNOP", "sk-proj-abcdefgh12345678", "AKIAABCDEFGHIJKLMNOP", "0123456789abcdef" * 2, f" {SECRET} "],
)
def test_a_credential_under_any_token_or_key_is_hidden(value: str) -> None:
    config = SpeedtronicConfig(model={"extra": {"my_token": value, "some_key": [value], "x_keys": value}})
    assert config.to_dict(redact_secrets=True)["model"]["extra"]["my_token"] == "<redacted>"
    assert value.strip() not in config.to_yaml(redact_secrets=True)


def test_an_error_about_any_token_or_key_leaves_its_value_out() -> None:
    assert not may_be_shown(("model", "extra", "my_token"))
    assert not may_be_shown(("model", "extra", "sort_keys"))
    assert may_be_shown(("data", "num_workers"))


def test_among_the_known_keys_only_the_token_is_secret() -> None:
    known = {key for keys in Section.known_keys.values() for key in keys}
    assert {key for key in known if is_secret(key)} == {"token"}


def test_redaction_reaches_into_lists_and_mappings_and_leaves_the_rest() -> None:
    tree = {"a": [{"password": SECRET, "port": 5}], "token": None, "use_key": True, "key": 12345}
    assert redacted(tree) == {
        "a": [{"password": "<redacted>", "port": 5}],
        "token": None,
        "use_key": True,
        "key": "<redacted>",
    }
    assert without_redacted(redacted(tree))["a"] == [{"password": None, "port": 5}]


def _secretive() -> SpeedtronicConfig:
    return SpeedtronicConfig(
        model={"extra": {"api_key": SECRET}},
        distributed={"token": SECRET, "store_options": {"client": {"secret": SECRET}, "region": "eu"}},
    )


def test_secrets_are_absent_from_repr_str_and_redacted_output() -> None:
    config = _secretive()
    shown = [repr(config), str(config), repr(config.distributed), f"{config.model}"]
    shown += [config.to_yaml(redact_secrets=True), config.to_json(True), str(config.to_dict(True))]
    for text in shown:
        assert SECRET not in text
    assert "eu" in config.to_yaml(redact_secrets=True)


def test_secrets_are_there_for_who_asks() -> None:
    config = _secretive()
    assert config.distributed.token is not None
    assert config.distributed.token.get_secret_value() == SECRET
    assert config.to_dict()["distributed"]["token"] == SECRET
    assert SpeedtronicConfig.from_dict(config.to_dict()) == config


def test_a_redacted_secret_loads_as_null() -> None:
    loaded = load_config(_secretive().to_yaml(redact_secrets=True))
    assert loaded.distributed.token is None
    assert loaded.distributed.store_options == {"client": {"secret": None}, "region": "eu"}
    assert loaded.model.extra == {"api_key": None}
    loaded.distributed.token = "<redacted>"  # type: ignore[assignment]
    assert loaded.distributed.token is None


@pytest.mark.parametrize(
    "values",
    [
        {"token": [SECRET]},
        {"token": {"value": SECRET}},
        {"token": SECRET.encode()},
        {"token": SECRET, "nodeid": "x"},
        {"store_options": SECRET},
        {"store_options": [SECRET]},
        {"repo_id": [SECRET]},
        {"trusted_nodes": [{"key": SECRET}]},
        {"store_options": {"secret": {SECRET.encode(): 1}}},
        {"store_options": {"secret": SECRET.encode()}},
    ],
)
def test_errors_and_their_tracebacks_do_not_show_secrets(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**values)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_wrong_text_under_a_secret_key_is_not_echoed() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({}, [f"distributed.token=[{SECRET}]"])
    assert SECRET not in str(caught.value)


def test_model_extra_is_whole_for_the_factory() -> None:
    assert ModelConfig(extra={"special_token": "<eos>"}).extra == {"special_token": "<eos>"}


def test_of_the_options_of_a_store_only_harmless_ones_are_shown() -> None:
    names = ("pass", "sas_url", "session", "connection_string", "private_key_pem", "anything_at_all")
    config = SpeedtronicConfig(
        distributed={
            "store_options": {
                **dict.fromkeys(names, SECRET),
                "pin": 1234,
                "headers": {"Authorization": SECRET, "X-Other": [SECRET]},
                "endpoint": f"https://user:{SECRET}@host:9000/path",
                "endpoint_url": f"https://host/path?sig={SECRET}",
                "profile": ["work", SECRET],
                "client": {"region": "eu", "id": SECRET},
                "use_ssl": True,
                "verify": False,
            },
        }
    )
    for text in (repr(config), str(config.distributed), config.to_yaml(True), config.to_json(True)):
        assert SECRET not in text
    assert config.to_dict(True)["distributed"]["store_options"] == {
        **dict.fromkeys(names, "<redacted>"),
        "pin": "<redacted>",
        "headers": {"Authorization": "<redacted>", "X-Other": "<redacted>"},
        "endpoint": "https://host:9000/path",
        "endpoint_url": "<redacted>",
        "profile": "<redacted>",
        "client": {"region": "eu", "id": "<redacted>"},
        "use_ssl": True,
        "verify": False,
    }


def test_no_address_is_shown_with_its_password() -> None:
    config = SpeedtronicConfig(distributed={"repo_id": f"s3://me:{SECRET}@host/bucket/model@v1"})
    assert SECRET not in repr(config)
    assert config.to_dict(True)["distributed"]["repo_id"] == "s3://host/bucket/model@v1"


@pytest.mark.parametrize("section", ["distributed", "hub", "diloco"])
def test_a_text_in_place_of_the_section_with_secrets_is_not_echoed(section: str) -> None:
    with pytest.raises(ConfigError, match="^<string>:1: distributed: must be a mapping of keys$"):
        load_config(f"{section}: {SECRET}\n")


def test_a_wrong_value_of_a_harmless_key_beside_secrets_is_said() -> None:
    with pytest.raises(ConfigError, match="must be a whole number, not the text 'ten'"):
        DistributedConfig(inner_steps="ten")
