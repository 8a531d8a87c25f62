from __future__ import annotations

import pickle

import pytest

from speedtronic.config import ConfigError, SpeedtronicConfig
from speedtronic.config.base import Section
from speedtronic.config.problems import (
    COMMON_NAMES,
    InvalidConfigError,
    Place,
    Problem,
    dotted,
    in_words,
    unknown_key,
)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), ""),
        (("run",), "run"),
        (("run", "seed"), "run.seed"),
        (("optimizer", "betas", 1), "optimizer.betas[1]"),
    ],
)
def test_a_path_is_written_with_dots_and_brackets(path: tuple[str | int, ...], text: str) -> None:
    assert dotted(path) == text


def test_a_problem_is_one_line_of_place_key_and_message() -> None:
    assert str(Problem(("run", "seed"), "wrong", Place("a.yaml", 3))) == "a.yaml:3: run.seed: wrong"
    assert str(Problem((), "wrong", Place("a.yaml"))) == "a.yaml: wrong"
    assert str(Problem(("run",), "wrong")) == "run: wrong"


def test_the_error_pickles() -> None:
    error = InvalidConfigError([Problem(("run",), "wrong"), Problem(("data",), "wrong too")])
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error) == "run: wrong\ndata: wrong too"
    assert isinstance(twin, ConfigError)
    assert twin.exit_code == 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (10.7, "10.7"),
        ("no", "the text 'no'"),
        ("x" * 200, "the text '" + "x" * 58 + "…"),
        ([1], "a list"),
        ((1,), "a list"),
        ({}, "a mapping"),
        (b"x", "a bytes"),
        pytest.param(10**5000, "a number that large", id="large"),
    ],
)
def test_values_are_named_as_yaml_names_them(value: object, words: str) -> None:
    assert in_words(value) == words


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("data.micro_batchsize", "unknown key; did you mean data.micro_batch_size?"),
        ("data.batch_size", "unknown key; did you mean data.micro_batch_size?"),
        ("data.lr", "unknown key; did you mean optimizer.lr?"),
        ("lr", "unknown key; did you mean optimizer.lr?"),
        ("optimizer.learning_rate", "unknown key; did you mean optimizer.lr?"),
        ("learning_rate", "unknown key; did you mean optimizer.lr?"),
        ("optimizer.beta", "unknown key; did you mean optimizer.betas?"),
        ("trainer.gradclip", "unknown key; did you mean optimizer.grad_clip?"),
        ("checkpoints", "unknown key; did you mean checkpoint?"),
        ("model.compile", "unknown key; did you mean compile?"),
        (
            "run.every_steps",
            "unknown key; did you mean checkpoint.every_steps, logging.every_steps or eval.every_steps?",
        ),
        ("run.zzz", "unknown key"),
        ("distributed.cache_dir", "was removed after 2.0: use distributed.state_dir"),
        (
            "distributed.collaborators",
            "was removed after 2.0: the nodes are those whose deltas lie under `in/` in the store; "
            "set distributed.expected_nodes to say how many there should be",
        ),
        (
            "distributed.delta_upload_queue_size",
            "was removed after 2.0: the spool holds one delta; no size is needed",
        ),
        (
            "distributed.delta_upload_overflow",
            "was removed after 2.0: a boundary that meets a full spool skips, and the next delta is cumulative; "
            "no policy is needed",
        ),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(key: str, remedy: str) -> None:
    assert unknown_key(tuple(key.split(".")), Section.known_keys).message == remedy


def test_what_others_call_our_keys_leads_to_keys_that_exist() -> None:
    tree = SpeedtronicConfig().to_dict()
    for full in COMMON_NAMES.values():
        section, key = full.split(".")
        assert key in tree[section]
