from __future__ import annotations

import os
from pathlib import Path

import pytest

from speedtronic.config import ConfigError, SpeedtronicConfig, load_config, load_yaml_config


def _message(source: object, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides or [])  # type: ignore[arg-type]
    return str(caught.value)


# --- sources ---


@pytest.mark.parametrize(
    "text",
    [
        "run:\n  max_steps: 7\n",
        "run: {max_steps: 7}",
        '{"run": {"max_steps": 7}}',
        '{\n\t"run": {\n\t\t"max_steps": 7\n\t}\n}',
        "max_steps: 7",
        "\ufeffmax_steps: 7\n",
        "%YAML 1.2\n---\nmax_steps: 7\n...\n",
    ],
)
def test_yaml_and_json_load_from_text_and_from_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    sources = [file, str(file)] if text.startswith("\ufeff") else [file, str(file), text]
    for source in sources:
        assert load_config(source) == SpeedtronicConfig(max_steps=7)
        assert SpeedtronicConfig.from_yaml(source).run.max_steps == 7
        assert load_yaml_config(source).scheduler.max_steps == 7


def test_a_json_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"optimizer": {"lr": 1e-4}}', encoding="utf-8")
    assert load_config(file).optimizer.lr == 1e-4


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "{}", "run:\ndata:\n"])
def test_an_empty_file_is_all_defaults(text: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_config(file) == SpeedtronicConfig()


def test_a_path_with_a_colon_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run: b").write_text("max_steps: 3", encoding="utf-8")
    assert load_config("run: b").run.max_steps == 3


def test_a_loaded_config_is_a_copy() -> None:
    config = SpeedtronicConfig()
    loaded = load_config(config)
    loaded.run.max_steps = 3
    assert config.run.max_steps == 1000


def test_a_mapping_is_not_changed_by_loading() -> None:
    source = {"model": {"extra": {"a": [1]}}, "max_steps": 5}
    config = load_config(source, ["model.extra.b=1", "max_steps=6"])
    config.model.extra["a"].append(2)
    assert source == {"model": {"extra": {"a": [1]}}, "max_steps": 5}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert _message(tmp_path / "none.yaml") == f"{tmp_path / 'none.yaml'}: no such file"
    assert _message(str(tmp_path)) == f"{tmp_path}: is a folder; name the YAML or JSON file in it"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: caf\xe9\n")
    assert _message(latin) == f"{latin}: not UTF-8 text: invalid byte at offset 9"
    assert _message("a\0b.yaml") == "a\0b.yaml: cannot be read: embedded null byte"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.touch(mode=0)
    assert _message(file) == f"{file}: cannot be read: Permission denied"


def test_sources_of_another_kind() -> None:
    assert _message(5).startswith("cannot load a configuration from 5; give a path")
    assert _message(None).startswith("cannot load a configuration from null")
    assert _message("- a\n- b\n") == "<string>: the top level must be a mapping of sections, not a list"
    assert _message("just\nwords\n").startswith("<string>: the top level must be a mapping of sections, not the text")


# --- places ---


def test_problems_come_in_the_order_of_the_file_and_the_command_line_last(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "compile: 'false'\n"
        "max_steps: 10.7\n"
        "data:\n"
        "  shuffle: no\n"
        "  micro_batchsize: 4\n"
        "  micro_batch_size: 4\n"
        "hub:\n"
        "  enabled: true\n"
        "  poll_interval: fast\n"
        "optimizer: adam\n"
        "model: {n_head: 3}\n",
        encoding="utf-8",
    )
    assert _message(file, ["optimizer.lr=big"]).replace(f"{file}", "c.yaml").splitlines() == [
        "c.yaml:1: compile: must be true or false, not the text 'false'; write true or false without quotes",
        "c.yaml:2: run.max_steps: must be a whole number, not 10.7",
        "c.yaml:3: data.target_batch_size: 1 must be a multiple of data.micro_batch_size (4), such as 4",
        "c.yaml:4: data.shuffle: must be true or false, not the text 'no'; write true or false without quotes",
        "c.yaml:5: data.micro_batchsize: unknown key; did you mean data.micro_batch_size?",
        "c.yaml:7: distributed.repo_id: needed when distributed.enabled is true; "
        "name a store, such as dir:///path or org/name",
        "c.yaml:9: distributed.poll_interval: must be a number, not the text 'fast'",
        "c.yaml:10: optimizer.name: must be adamw, adamw8bit, muon, or an importable class or function, written "
        "package.module:class, not the text 'adam'",
        "c.yaml:11: model.d_model: 256 must be divisible by model.n_head, which is 3",
        "command line: optimizer.lr: must be a number, not the text 'big'",
    ]


def test_a_mapping_has_no_places() -> None:
    assert _message({"max_steps": 0}) == "run.max_steps: must be greater than 0, not 0"


# --- overrides ---


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.max_steps=5", "run.max_steps", 5),
        ("max_steps=5", "run.max_steps", 5),
        ("max_steps=5", "scheduler.max_steps", 5),
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", [0.8, 0.9]),
        ("optimizer=muon", "optimizer.name", "muon"),
        ("precision=bf16", "precision.mode", "bf16"),
        ("compile=true", "compile", True),
        ("compile.enabled=true", "compile", True),
        ("checkpoint.keep_last=null", "checkpoint.keep_last", None),
        ("checkpoint.keep_last=", "checkpoint.keep_last", None),
        ("run.name=a=b", "run.name", "a=b"),
        ("run.name='1'", "run.name", "1"),
        ("hub.repo_id=s3://a/b", "distributed.repo_id", "s3://a/b"),
        ("model.extra={c: 3}", "model.extra", {"c": 3}),
        ("model.extra.b.d=4", "model.extra", {"a": 1, "b": {"c": 2, "d": 4}}),
        ("model={n_layer: 1}", "model.extra", {"a": 1, "b": {"c": 2}}),
        ("plugins=[x]", "plugins", ["x"]),
        ("eval.every_steps=3", "eval.every_steps", 3),
    ],
)
def test_an_override_goes_before_the_file(override: str, key: str, value: object) -> None:
    source = "run: {max_steps: 1}\nmodel: {extra: {a: 1, b: {c: 2}}}\neval:\n"
    found: object = load_config(source, [override]).to_dict()
    for part in key.split("."):
        assert isinstance(found, dict)
        found = found[part]
    assert found == value


def test_the_last_override_wins() -> None:
    assert load_config({}, ["max_steps=5", "run.max_steps=6"]).run.max_steps == 6


def test_an_override_of_a_config_lets_the_rest_follow() -> None:
    config = load_config(SpeedtronicConfig(), ["max_steps=20"])
    assert config.scheduler.max_steps == 20


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("max_steps", "command line: 'max_steps': write section.key=value"),
        ("=5", "command line: '': write section.key=value"),
        ("run..seed=5", "command line: 'run..seed': write section.key=value"),
        ("optimizer.lrr=1", "command line: optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("optimiser.lr=1", "command line: optimiser: unknown key; did you mean optimizer?"),
        ("run.max_steps=ten", "command line: run.max_steps: must be a whole number, not the text 'ten'"),
        ("max_steps=ten", "command line: run.max_steps: must be a whole number, not the text 'ten'"),
        ("run=5", "command line: run: must be a mapping of keys, not 5"),
        ("model.n_head.x=5", "command line: model.n_head: must be a whole number, not a mapping"),
        (
            "optimizer.betas=[1,",
            "command line: optimizer.betas: the syntax is wrong: while parsing a flow node ",
        ),
        ("model.extra={a: 1, a: 2}", "command line: model.extra.a: given twice"),
        ("run.seed=!x 3", "command line: run.seed: the tag !x is not read; write a plain value"),
    ],
)
def test_a_wrong_override_says_so(override: str, message: str) -> None:
    assert _message({}, [override]).startswith(message)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("name: x\n", "command line"),
        ("data:\n  shuffle: true\n", "{file}:1"),
        ("data:\n  target_batch_size: 4\n", "{file}:2"),
    ],
)
def test_a_contradiction_stands_at_the_nearest_place_that_was_given(text: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    start = f"{place.format(file=file)}: data.target_batch_size: "
    assert _message(file, ["data.micro_batch_size=3"]).startswith(start)


@pytest.mark.parametrize(
    "key",
    [
        "run.output_dir",
        "data.text_path",
        "data.tokenizer",
        "checkpoint.directory",
        "logging.file",
        "run.name",
        "plugins",
    ],
)
def test_a_nul_character_in_a_name_or_a_path_is_refused(key: str) -> None:
    value = '["a\\0b"]' if key == "plugins" else '"a\\0b"'
    with pytest.raises(ConfigError, match=rf"^command line: {key}(\[0\])?: must not contain a NUL character$"):
        load_config({}, [f"{key}={value}"])


@pytest.mark.parametrize("key", ["run.output_dir", "model.extra.file"])
def test_a_path_that_is_not_utf8_is_refused_with_a_remedy(key: str) -> None:
    name = os.fsdecode(b"caf\xe9")
    with pytest.raises(ConfigError) as caught:
        load_config({}, [f"{key}={name}"])
    assert str(caught.value) == (
        f"command line: {key}: must be valid Unicode text, not the text 'caf\\udce9'; rename a file or folder whose "
        "name is not UTF-8, or make a link to it"
    )
    section, _, rest = key.partition(".")
    value: object = name
    for part in reversed(rest.split(".")):
        value = {part: value}
    with pytest.raises(ConfigError, match="must be valid Unicode text"):
        load_config({section: value})


def test_a_path_that_begins_with_a_tilde_lies_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands it in a file, nor behind `run.output_dir=`."""
    monkeypatch.setenv("HOME", "/home/anna")
    config = load_config("data: {text_path: ~/a.txt}\nrun: {output_dir: ~/runs}")
    assert (config.data.text_path, config.run.output_dir) == ("/home/anna/a.txt", "/home/anna/runs")
    assert load_config({}, ["logging.file=~/b.log"]).logging.file == "/home/anna/b.log"
    assert load_config({}, ["run.output_dir=a~b"]).run.output_dir == "a~b"
