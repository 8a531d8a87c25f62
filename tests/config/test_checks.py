"""What the configuration alone shows to be wrong or doubtful."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from speedtronic.config import ConfigError, SpeedtronicConfig, load_config
from speedtronic.config.checks import BUILT_IN_MODELS, REGISTERED, doubts, limits, refuse_what_cannot_be_trained
from tests.support.cases import case


def test_what_is_certain_to_stop_a_run_is_refused_all_at_once() -> None:
    config = load_config(
        {
            "model": {"max_seq_len": 16, "vocab_size": 50},
            "data": {"block_size": 32, "vocab_size": 60, "labels": "unshifted", "synthetic": False},
            "eval": {"every_steps": 5},
            "checkpoint": {"keep_best": 1},
        }
    )
    config.data.validation_fraction = 0.0
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_be_trained(config)
    keys = [line.split(":")[0].split(" ")[0] for line in str(caught.value).splitlines()]
    assert keys == ["data.block_size", "data.vocab_size", "data", "data.labels", "eval.every_steps"]


def test_a_dataset_of_the_users_decides_for_itself() -> None:
    section = {"dataset": "mine:make", "labels": "unshifted", "synthetic": False}
    refuse_what_cannot_be_trained(load_config({"data": section, "eval": {"every_steps": 5}}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"name": "gtp"}}, "no model is registered as 'gtp'; did you mean 'gpt'"),
        ({"model": {"name": "gtp"}, "plugins": ["mine"]}, None),
        ({"model": {"name": "gtp"}, "data": {"dataset": "mine:make"}}, None),
        ({"model": {"extra": {"a": 1, "b": 2}}}, "model.extra.a, model.extra.b: the reference transformer takes no"),
        ({"model": {"name": "mine", "d_model": 6, "n_head": 2, "extra": {"a": 1}}, "plugins": ["mine"]}, None),
        ({"model": {"d_model": 6, "n_head": 2}}, "model.d_model 6 / model.n_head 2 is an odd head width, 3"),
        ({"loss": "mse"}, "loss: mse compares numbers"),
        ({"loss": "mse", "data": {"dataset": "mine:make"}}, None),
        ({"loss": "cross_entropy"}, None),
        ({"scheduler": {"name": "cosine", "decay_steps": 3}}, "scheduler.decay_steps: only wsd has a decay of its own"),
        ({"scheduler": {"name": "wsd", "decay_steps": 3}}, None),
        ({"data": {"block_size": 8, "num_tokens": 7, "micro_batch_size": 1}}, "7 tokens are 0 blocks of 8"),
        ({"data": {"block_size": 8, "num_tokens": 16, "micro_batch_size": 2}}, None),
        ({"data": {"block_size": 8, "num_tokens": 15, "micro_batch_size": 2}}, "training needs at least 2"),
        ({"data": {"block_size": 8, "num_tokens": 15, "micro_batch_size": 2, "drop_last": False}}, None),
        (
            {"data": {"block_size": 8, "num_tokens": 16, "micro_batch_size": 2, "validation_fraction": 0.1}},
            "2 blocks of 8, of which 1 are held out",
        ),
        ({"data": {"block_size": 8, "num_tokens": 7, "text_path": "text.txt"}}, None),
    ],
)
def test_what_needs_neither_data_nor_a_plugin_to_be_seen_is_refused(sections: dict[str, Any], said: str | None) -> None:
    data = {"target_batch_size": 2, **sections.get("data", {})}
    config = load_config({**sections, "data": data | {"micro_batch_size": data.get("micro_batch_size", 2)}})
    if said is None:
        refuse_what_cannot_be_trained(config)
    else:
        with pytest.raises(ConfigError, match=re.escape(said)):
            refuse_what_cannot_be_trained(config)


def test_a_model_that_is_registered_already_needs_no_plugin() -> None:
    config = load_config({"model": {"name": "mine"}})
    refuse_what_cannot_be_trained(config, {"mine", "gpt"})
    with pytest.raises(ConfigError, match="Known: gpt, hf, reference_transformer"):
        refuse_what_cannot_be_trained(config)


def test_the_built_in_models_are_those_of_the_registry() -> None:
    code = "from speedtronic.registry import registry; print(*registry.names())"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert set(names) == REGISTERED == {*BUILT_IN_MODELS, "hf"}


@pytest.mark.parametrize(
    ("sections", "shown"),
    [
        ({}, None),
        ({"max_steps": 1, "scheduler": {"warmup_steps": 1}}, None),
        ({"max_steps": 51, "scheduler": {"warmup_steps": 50}}, None),
        (
            {"max_steps": 50, "scheduler": {"warmup_steps": 100}},
            "warmup_steps is 100, but the run ends after 50 ",
        ),
        ({"max_steps": 50, "scheduler": {"warmup_steps": 50}}, "warmup_steps is 50, but the run ends after 50 "),
        ({"data": {"max_steps": 50}}, "warmup_steps is 100, but the run ends after 50 "),
        (
            {"max_steps": 900, "scheduler": {"max_steps": 60, "warmup_steps": 80}},
            r"warmup_steps is 80, but the schedule \(scheduler.max_steps\) ends after 60 updates",
        ),
        (
            {"max_steps": 200, "data": {"max_steps": 150}},
            r"run.max_steps \(--max-steps\) is 200, but data.max_steps is 150 .* the run takes 150 updates",
        ),
        ({"data": {"max_steps": 150}}, None),
        ({"max_steps": 150, "data": {"max_steps": 150}}, None),
    ],
)
def test_what_is_most_likely_not_meant_is_said(sections: dict[str, Any], shown: str | None) -> None:
    found = doubts(load_config(sections))
    if shown is None:
        assert found == []
    else:
        assert len(found) == 1
        assert re.search(shown, found[0]), found[0]


def test_a_target_given_beside_the_configuration_goes_before_both() -> None:
    config = load_config({"max_steps": 200, "data": {"max_steps": 150}, "scheduler": {"warmup_steps": 100}})
    assert len(doubts(config)) == 1
    assert doubts(config, max_steps=120) == []
    (found,) = doubts(config, max_steps=90)
    assert "the run ends after 90 updates" in found


def test_the_warmup_follows_the_length_of_the_schedule_until_it_is_given() -> None:
    config = SpeedtronicConfig.from_dict({"max_steps": 50})
    assert config.scheduler.warmup_steps == 5
    config.run.max_steps = 300
    assert config.validate().scheduler.warmup_steps == 30
    config.scheduler.max_steps = 5000
    assert config.validate().scheduler.warmup_steps == 100
    config.scheduler.warmup_steps = 7
    config.scheduler.max_steps = 40
    assert config.validate().scheduler.warmup_steps == 7
    assert load_config(config.to_yaml()).scheduler.warmup_steps == 7
    config.scheduler.warmup_steps = None  # type: ignore[assignment]
    assert config.validate().scheduler.warmup_steps == 4


def test_a_tokenizer_that_nothing_would_use_is_refused() -> None:
    for section, why in (
        ({"shards": "prepared"}, "shards have their own"),
        ({}, "there is no text to encode"),
        ({"dataset": "mine:make", "tokenizer": "chars"}, "name a tokenizer file"),
    ):
        with case(section), pytest.raises(ConfigError, match=rf"^data\.tokenizer: .*{why}"):
            SpeedtronicConfig(data={"tokenizer": "tokenizer.json", **section})
    for section in ({"text_path": "a.txt"}, {"dataset": "mine:make"}):
        assert SpeedtronicConfig(data={"tokenizer": "tokenizer.json", **section}).data.tokenizer == "tokenizer.json"


def test_only_runs_of_tokens_have_no_form_elsewhere() -> None:
    for section, is_limited in (
        ({"ngram_order": 3}, True),
        ({"ngram_order": 3, "name": "gpt"}, True),
        ({"ngram_order": 3, "name": "mine"}, False),  # the keys of a custom model mean what it makes of them
        ({"qk_norm": True}, False),
        ({}, False),
    ):
        with case(section):
            found = limits(SpeedtronicConfig.from_dict({"model": section}))
            assert len(found) == is_limited
            assert all("model.ngram_order is 3, and no model of Hugging Face's" in limit for limit in found)


def test_a_hugging_face_model_needs_a_folder_and_adapters_one_machine() -> None:
    refuse_what_cannot_be_trained(load_config({"model": {"name": "hf"}, "run": {"init_from": "folder"}}))
    with pytest.raises(ConfigError, match=r"^model\.name: hf builds what the config\.json .*; set run\.init_from, or"):
        refuse_what_cannot_be_trained(load_config({"model": {"name": "hf"}}))
    several = {"enabled": True, "repo_id": "dir:///store"}
    adapters = {"name": "hf", "hf_folder": "folder", "lora": {"r": 4}}
    with pytest.raises(ConfigError, match=r"^model\.lora: nodes exchange whole models"):
        refuse_what_cannot_be_trained(load_config({"model": adapters, "distributed": several}))
