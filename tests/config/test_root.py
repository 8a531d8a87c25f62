from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import speedtronic.config as package
from speedtronic.config import (
    Config,
    ConfigError,
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SpeedtronicConfig,
    changed_keys,
    load_config,
    load_yaml_config,
)
from speedtronic.config.base import Section
from speedtronic.durable.files import FileSystem


def test_config_is_speedtronic_config() -> None:
    assert Config is SpeedtronicConfig


def test_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_the_public_names_exist() -> None:
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


# --- keys that follow others ---


def test_keys_that_follow_others_are_resolved_on_load() -> None:
    config = SpeedtronicConfig(
        run={"max_steps": 50, "seed": 7, "log_every": 10}, model={"vocab_size": 99, "max_seq_len": 33}
    )
    assert config.scheduler.max_steps == 50
    assert (config.data.vocab_size, config.data.block_size, config.data.seed) == (99, 33, 7)
    assert config.logging.every_steps == 10
    assert config.data.max_steps is None


def test_given_keys_do_not_follow() -> None:
    config = SpeedtronicConfig(
        run={"max_steps": 50, "seed": 7, "log_every": 10},
        scheduler={"max_steps": 1000},
        data={"vocab_size": 5, "block_size": 6, "seed": 8},
        logging={"every_steps": 1},
    )
    assert config.scheduler.max_steps == 1000
    assert (config.data.vocab_size, config.data.block_size, config.data.seed) == (5, 6, 8)
    assert config.logging.every_steps == 1


def test_null_is_not_a_value_of_its_own() -> None:
    config = SpeedtronicConfig(model={"vocab_size": 99, "n_kv_head": None}, data={"vocab_size": None})
    assert (config.data.vocab_size, config.model.n_kv_head) == (99, 8)
    config.model.vocab_size = 100
    assert config.validate().data.vocab_size == 100


def test_validate_returns_the_config_and_lets_keys_follow_again() -> None:
    config = SpeedtronicConfig()
    config.run.max_steps = 20
    config.run.seed = 5
    config.run.log_every = 4
    config.model.vocab_size = 64
    config.model.max_seq_len = 16
    assert config.validate() is config
    assert (config.scheduler.max_steps, config.logging.every_steps) == (20, 4)
    assert (config.data.vocab_size, config.data.block_size, config.data.seed) == (64, 16, 5)
    config.run.log_every = None
    assert config.validate().logging.every_steps == 1


def test_an_edited_key_does_not_follow() -> None:
    config = SpeedtronicConfig()
    config.scheduler.max_steps = 77
    config.run.max_steps = 20
    assert config.validate().scheduler.max_steps == 77


def test_validate_finds_contradictions_made_by_editing_and_changes_nothing() -> None:
    config = SpeedtronicConfig()
    config.data.micro_batch_size = 3
    config.run.max_steps = 20
    with pytest.raises(ConfigError, match=r"^data\.target_batch_size: 1 must be a multiple"):
        config.validate()
    assert config.scheduler.max_steps == 1000


def test_validate_checks_lists_and_mappings_that_were_changed_in_place() -> None:
    config = SpeedtronicConfig()
    config.optimizer.betas.append(0.5)
    with pytest.raises(ConfigError, match=r"^optimizer\.betas: must have 2 items, not 3$"):
        config.validate()


def test_validate_makes_an_enabled_single_node_master() -> None:
    config = SpeedtronicConfig()
    config.distributed.repo_id = "a/b"
    config.distributed.enabled = True
    assert config.validate().distributed.role == "master"


# --- sections and shorthands ---


def test_sections_are_taken_as_objects_mappings_and_null() -> None:
    config = SpeedtronicConfig(run=RunConfig(max_steps=5), model={"n_layer": 2}, data=None)
    assert (config.run.max_steps, config.model.n_layer, config.scheduler.max_steps) == (5, 2, 5)
    assert config.data.micro_batch_size == 1


def test_a_section_object_is_copied_and_still_follows() -> None:
    data = DataConfig()
    small, large = (SpeedtronicConfig(model=ModelConfig(vocab_size=size), data=data) for size in (10, 20))
    assert (small.data.vocab_size, large.data.vocab_size, data.vocab_size) == (10, 20, None)


def test_a_mapping_changed_in_place_is_kept_when_a_section_is_copied() -> None:
    model = ModelConfig()
    model.extra["width"] = 3
    config = load_config(SpeedtronicConfig(model=model), ["max_steps=5"])
    assert config.model.extra == {"width": 3}


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ({"name": "x"}, {"run": {"name": "x"}}),
        ({"seed": 1}, {"run": {"seed": 1}}),
        ({"device": "cpu"}, {"run": {"device": "cpu"}}),
        ({"max_steps": 9}, {"run": {"max_steps": 9}}),
        ({"output_dir": "o"}, {"run": {"output_dir": "o"}}),
        ({"log_every": 2}, {"run": {"log_every": 2}}),
        ({"hub": {"repo_id": "a/b"}}, {"distributed": {"repo_id": "a/b"}}),
        ({"diloco": {"repo_id": "a/b"}}, {"distributed": {"repo_id": "a/b"}}),
        ({"optimizer": "muon"}, {"optimizer": {"name": "muon"}}),
        ({"optimizer": "muon", "muon_plus": True}, {"optimizer": {"name": "muon", "muon_plus": True}}),
        ({"cautious": True}, {"optimizer": {"cautious": True}}),
        ({"precision": "bf16"}, {"precision": {"mode": "bf16"}}),
        ({"compile": {"enabled": True}}, {"compile": True}),
        ({"max_steps": 9, "run": {"max_steps": 9, "seed": 3}}, {"run": {"max_steps": 9, "seed": 3}}),
        ({"max_steps": 9, "run": RunConfig(seed=3)}, {"run": {"max_steps": 9, "seed": 3}}),
    ],
)
def test_a_shorthand_is_its_full_form(short: dict[str, object], full: dict[str, object]) -> None:
    assert SpeedtronicConfig(**short) == SpeedtronicConfig(**full)
    assert SpeedtronicConfig.from_dict(short) == SpeedtronicConfig(**full)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_steps": 9, "run": {"max_steps": 8}},
            "max_steps: contradicts run.max_steps; give one of the two",
        ),
        (
            {"cautious": True, "optimizer": {"cautious": False}},
            "cautious: contradicts optimizer.cautious; give one of the two",
        ),
        ({"hub": {}, "diloco": {}}, "diloco: distributed is given twice, under two names"),
        ({"hub": {}, "distributed": {}}, "distributed: distributed is given twice, under two names"),
        ({"compile": {}}, "compile: must be true or false, or a mapping with enabled: true or false"),
        (
            {"compile": "false"},
            "compile: must be true or false, not the text 'false'; write true or false without quotes",
        ),
        ({"run": 5}, "run: must be a mapping of keys, not 5"),
        ({"run": ModelConfig()}, "run: must be a mapping of keys, not a ModelConfig"),
        ({"scheduler": "cosine"}, "scheduler: must be a mapping of keys, not the text 'cosine'"),
        ({"run": {1: 2}}, "run.1: a key must be text"),
        ({"run": {"self": 2}}, "run.self: unknown key"),
        ({"muon_plus": True}, "optimizer.muon_plus: needs optimizer.name: muon, not adamw"),
        ({"ooo_streams": 9}, "ooo_streams: must be at most 8, not 9"),
        ({"tune": "on"}, "tune: must be off, auto, or the path of a plan that ends in .json, not the text 'on'"),
        (
            {"data": {"micro_batch_size": "auto"}},
            "data.micro_batch_size: auto needs tune: auto, or a plan; else give a whole number",
        ),
        ({"plugins": "my_model"}, "plugins: must be a list, not the text 'my_model'"),
        ({"plugins": ["a", ""]}, "plugins[1]: must not be empty"),
    ],
)
def test_a_wrong_whole_is_one_message(values: dict[str, object], message: str) -> None:
    for build in (lambda: SpeedtronicConfig(**values), lambda: SpeedtronicConfig.from_dict(values)):
        with pytest.raises(ConfigError) as caught:
            build()
        assert str(caught.value) == message


def test_an_extra_key_under_compile_points_to_the_options() -> None:
    with pytest.raises(
        ConfigError, match=r"^compile\.regional: unknown key; did you mean compile_options\.regional\?$"
    ):
        SpeedtronicConfig(compile={"enabled": True, "regional": True})


def test_problems_of_all_sections_come_together() -> None:
    with pytest.raises(ConfigError) as caught:
        SpeedtronicConfig(max_steps=0, model={"n_layer": "2"}, optimizer={"lr": -1}, compile=1, wat=2)
    assert sorted(line.split(":")[0] for line in str(caught.value).splitlines()) == [
        "compile",
        "model.n_layer",
        "optimizer.lr",
        "run.max_steps",
        "wat",
    ]


def test_a_section_is_assigned_as_mapping_object_or_name() -> None:
    config = SpeedtronicConfig()
    config.optimizer = "muon"  # type: ignore[assignment]
    assert config.optimizer == OptimizerConfig(name="muon")
    config.run = {"max_steps": 3}  # type: ignore[assignment]
    config.distributed = DistributedConfig(enabled=True, repo_id="a/b")
    assert config.validate().scheduler.max_steps == 3
    with pytest.raises(ConfigError, match=r"^run\.max_step: unknown key; did you mean run\.max_steps\?$"):
        config.run = {"max_step": 3}  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"^compile: must be true or false, not 1$"):
        config.compile = 1  # type: ignore[assignment]


def test_a_shorthand_is_not_an_attribute() -> None:
    config = SpeedtronicConfig()
    with pytest.raises(ConfigError, match=r"^log_every: unknown key; did you mean run\.log_every\?$"):
        config.log_every = 3  # type: ignore[attr-defined]


def test_accumulation_steps_is_target_over_micro_batch() -> None:
    assert SpeedtronicConfig(data={"micro_batch_size": 4, "target_batch_size": 32}).accumulation_steps == 8


def test_a_size_of_auto_stays_auto_through_copies_and_files() -> None:
    config = SpeedtronicConfig(data={"micro_batch_size": "auto", "target_batch_size": 6}, tune="plans/a.json")
    for one in (config, config.model_copy(deep=True).validate(), SpeedtronicConfig.from_yaml(config.to_yaml())):
        assert one.to_dict()["data"]["micro_batch_size"] == "auto"
        assert one.data.micro_batch_size == 1


def test_what_only_the_engine_can_know_is_not_checked() -> None:
    SpeedtronicConfig(
        model={"name": "not_registered_yet"},
        scheduler={"warmup_steps": 10**6},
        optimizer="muon",
        precision="fp8",
        ooo_backprop=True,
    )


# --- round trips ---


def _elaborate() -> SpeedtronicConfig:
    return SpeedtronicConfig(
        run={"name": "no", "output_dir": "2024-01-01", "init_from": "1e-4"},
        model={"extra": {"a": [1, 2.5, None, {"b": "ü 🙂"}], "off": "on", "0x1f": "0o17"}},
        optimizer={"lr": 1e-4, "betas": (0.8, 0.9), "name": "muon"},
        distributed={
            "enabled": True,
            "repo_id": "dir:///tmp/x",
            "token": "abc",
            "store_options": {"port": 1},
        },
        compile=True,
        plugins=["my_model"],
    )


def test_to_dict_is_plain_json() -> None:
    tree = _elaborate().to_dict()
    assert json.loads(json.dumps(tree, allow_nan=False)) == tree


@pytest.mark.parametrize("config", [SpeedtronicConfig(), _elaborate()], ids=["defaults", "elaborate"])
def test_a_config_survives_every_round_trip(config: SpeedtronicConfig) -> None:
    assert SpeedtronicConfig.from_dict(config.to_dict()) == config
    assert SpeedtronicConfig.from_yaml(config.to_yaml()) == config
    assert SpeedtronicConfig.load(config.to_json()) == config
    assert SpeedtronicConfig.load(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert copy.copy(config) == config
    assert config.model_copy() == config


@pytest.mark.parametrize("twin", [copy.deepcopy, load_config, lambda config: config.model_copy(deep=True)])
def test_a_copy_keeps_what_was_given(twin: object) -> None:
    config = SpeedtronicConfig(scheduler={"max_steps": 7})
    copied = twin(config)  # type: ignore[operator]
    copied.run.max_steps = 20
    copied.model.vocab_size = 30
    copied.validate()
    assert (copied.scheduler.max_steps, copied.data.vocab_size) == (7, 30)
    assert (config.run.max_steps, config.data.vocab_size) == (1000, 512)


texts = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(max_examples=12)
@given(
    name=texts,
    lr=st.floats(0, 1e300),
    extra=st.dictionaries(
        texts,
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    ),
)
def test_any_values_survive_yaml_and_json(name: str, lr: float, extra: dict[str, object]) -> None:
    config = SpeedtronicConfig(name=name, optimizer={"lr": lr}, model={"extra": extra})
    assert load_config(config.to_yaml()) == config
    assert load_config(config.to_json()) == config


leaves = st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=3)
keys = st.sampled_from(
    [*{key for names in Section.known_keys.values() for key in names}, "hub", "enabled", "self", "", "a.b"]
)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys | st.integers(0, 2), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.dictionaries(keys, trees, max_size=4))
def test_any_mapping_is_a_config_or_a_config_error(tree: dict[str, object]) -> None:
    try:
        config = SpeedtronicConfig.from_dict(tree)
    except ConfigError:
        return
    assert SpeedtronicConfig.from_dict(config.to_dict()) == config


# --- files ---


def test_save_writes_a_redacted_file_that_loads(tmp_path: Path) -> None:
    config = _elaborate()
    for name in ("deep/er/config.yaml", "config.json"):
        config.save(tmp_path / name)
        assert "abc" not in (tmp_path / name).read_text(encoding="utf-8")
        loaded = load_yaml_config(tmp_path / name)
        assert loaded.distributed.token is None
        loaded.distributed.token = "abc"  # type: ignore[assignment]
        loaded.distributed.store_options = config.distributed.store_options
        assert loaded == config
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["compile"] is True


def test_a_save_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "config.yaml"
    SpeedtronicConfig(name="old").save(target)

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(FileSystem, "rename", refuse)
    with pytest.raises(OSError, match="disk full"):
        SpeedtronicConfig(name="new").save(target)
    monkeypatch.undo()
    assert load_config(target).run.name == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


# --- changes ---


def test_changed_keys_names_each_leaf_with_both_values() -> None:
    old = SpeedtronicConfig(model={"extra": {"a": 1, "b": {"c": 2}}}).to_dict()
    new = SpeedtronicConfig(optimizer={"lr": 1.0, "betas": [0.5, 0.6]}, model={"extra": {"b": {"c": 3}}}).to_dict()
    assert changed_keys(old, new) == [
        ("model.extra.a", 1, None),
        ("model.extra.b.c", 2, 3),
        ("optimizer.lr", 3e-4, 1.0),
        ("optimizer.betas", [0.9, 0.95], [0.5, 0.6]),
        ("optimizer.muon_lr", 3e-4, 1.0),
    ]
    assert changed_keys(old, old) == []
