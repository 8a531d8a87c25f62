"""Wrong configuration files, each with the one message that it must give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.config import ConfigError, load_config

# name → (text of the file, message with the file's name left out)
WRONG = {
    "unknown key": (
        "data:\n  micro_batchsize: 4\n",
        ":2: data.micro_batchsize: unknown key; did you mean data.micro_batch_size?",
    ),
    "unknown section": ("optimiser:\n  lr: 1e-3\n", ":1: optimiser: unknown key; did you mean optimizer?"),
    "key in the wrong section": (
        "# a run\nmodel:\n  lr: 1e-3\n",
        ":3: model.lr: unknown key; did you mean optimizer.lr?",
    ),
    "key of another trainer": (
        "optimizer:\n  learning_rate: 1e-3\n",
        ":2: optimizer.learning_rate: unknown key; did you mean optimizer.lr?",
    ),
    "key gone since 2.0": (
        "distributed:\n  enabled: false\n  cache_dir: x\n",
        ":3: distributed.cache_dir: was removed after 2.0: use distributed.state_dir",
    ),
    "text for a switch": (
        "compile: 'false'\n",
        ":1: compile: must be true or false, not the text 'false'; write true or false without quotes",
    ),
    "YAML 1.1 word for a switch": (
        "data:\n  shuffle: no\n",
        ":2: data.shuffle: must be true or false, not the text 'no'; write true or false without quotes",
    ),
    "fraction for a whole number": (
        "run:\n  max_steps: 10.7\n",
        ":2: run.max_steps: must be a whole number, not 10.7",
    ),
    "text for a number": (
        "optimizer:\n  lr: '1e-4'\n",
        ":2: optimizer.lr: must be a number, not the text '1e-4'",
    ),
    "number below its bound": (
        "seed: 1\nmax_steps: 0\n",
        ":2: run.max_steps: must be greater than 0, not 0",
    ),
    "number that is not finite": (
        "optimizer:\n  lr: .inf\n",
        ":2: optimizer.lr: must be a finite number, not inf",
    ),
    "unknown choice": (
        "scheduler:\n  name: cosin\n",
        ":2: scheduler.name: must be cosine, constant, linear, wsd, or an importable function, written "
        "package.module:function, not the text 'cosin'",
    ),
    "unknown device": (
        "run: {device: gpu}\n",
        ":1: run.device: must be auto, cpu, mps, cuda or cuda:<index>, not the text 'gpu'",
    ),
    "list of the wrong length": (
        "optimizer:\n  betas: [0.9]\n",
        ":2: optimizer.betas: must have 2 items, not 1",
    ),
    "list with a wrong item": (
        "optimizer:\n  betas:\n    - 0.9\n    - 1.5\n",
        ":4: optimizer.betas[1]: must be less than 1, not 1.5",
    ),
    "null where a value is needed": (
        "model:\n  n_layer:\n",
        ":2: model.n_layer: must be a whole number, not null",
    ),
    "section that is no mapping": (
        "data: corpus.txt\n",
        ":1: data: must be a mapping of keys, not the text 'corpus.txt'",
    ),
    "width that heads do not divide": (
        "model:\n  d_model: 100\n  n_head: 6\n",
        ":2: model.d_model: 100 must be divisible by model.n_head, which is 6",
    ),
    "key and value heads that do not divide": (
        "model:\n  n_kv_head: 3\n",
        ":2: model.n_kv_head: 3 must divide model.n_head, which is 8",
    ),
    "target batch that micro batches do not fill": (
        "data:\n  micro_batch_size: 4\n  target_batch_size: 6\n",
        ":3: data.target_batch_size: 6 must be a multiple of data.micro_batch_size (4), such as 8",
    ),
    "muon_plus without muon": (
        "muon_plus: true\n",
        ":1: optimizer.muon_plus: needs optimizer.name: muon, not adamw",
    ),
    "cautious_rescale without cautious": (
        "optimizer:\n  cautious_rescale: true\n",
        ":2: optimizer.cautious_rescale: needs optimizer.cautious: true; only a cautious update is rescaled",
    ),
    "shorthand that contradicts its section": (
        "run:\n  max_steps: 10\nmax_steps: 20\n",
        ":3: max_steps: contradicts run.max_steps; give one of the two",
    ),
    "distributed without a store": (
        "diloco:\n  enabled: true\n",
        ":1: distributed.repo_id: needed when distributed.enabled is true; "
        "name a store, such as dir:///path or org/name",
    ),
    "node id that leaves its folder": (
        "hub:\n  node_id: ../x\n",
        ":2: distributed.node_id: must be at most 128 letters, digits, '.', '_' and '-', the first a letter or digit, "
        "not the text '../x'",
    ),
    "two sources of data": (
        "data:\n  text_path: a.txt\n  shards: b\n",
        ":3: data.shards: name one source of data, not both data.text_path and data.shards",
    ),
    "dataset that would be unpickled": (
        "data:\n  dataset: data.pt\n",
        ":2: data.dataset: must be an importable factory, written package.module:function, not the text 'data.pt'",
    ),
    "key given twice": (
        "run:\n  seed: 1\n  seed: 1\n",
        ":3: run.seed: given twice; first at {file}:2",
    ),
    "tag that would run code": (
        "name: !!python/object:os.x {}\n",
        ":1: run.name: the tag tag:yaml.org,2002:python/object:os.x is not read; write a plain value",
    ),
    "wrong syntax": (
        "run:\n  name: a: b\n",
        ":2: the syntax is wrong: mapping values are not allowed here; a value that contains ': ' needs quotes",
    ),
    "list at the top": ("- run\n", ": the top level must be a mapping of sections, not a list"),
}


@pytest.fixture(params=WRONG, ids=lambda name: name.replace(" ", "-"))
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    text, message = WRONG[request.param]
    file = tmp_path / "wrong.yaml"
    file.write_text(text, encoding="utf-8")
    return file, f"{file}{message.format(file=file)}"


def test_a_wrong_file_gives_one_message_with_file_line_and_key(wrong: tuple[Path, str]) -> None:
    file, message = wrong
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value) == message


def test_the_command_prints_that_message_and_exits_with_2(
    wrong: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file, message = wrong
    assert main(["validate", str(file)]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


def test_a_process_shows_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("".join(f"{text.split(':')[0]}: {{zzz: 1}}\n" for text in ("run:", "data:")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "speedtronic", "validate", str(file)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {file}:1: run.zzz: unknown key\n{file}:2: data.zzz: unknown key\n"


@pytest.mark.parametrize("levels", [40, 400, pytest.param(4000, marks=pytest.mark.slow)])
def test_deep_nesting_is_a_config_error(levels: int) -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply|must not be nested more than 32 levels deep"):
        load_config(f"model: {{extra: {{a: {'[' * levels}{']' * levels}}}}}\n")


def test_a_mapping_that_holds_itself_is_a_config_error() -> None:
    extra: dict[str, object] = {}
    extra["self"] = extra
    with pytest.raises(ConfigError, match="nested"):
        load_config({"model": {"extra": extra}})


@pytest.mark.parametrize(
    "key",
    [
        *(f"model.{key}" for key in ("vocab_size", "max_seq_len", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff")),
        *("run.threads", "run.max_steps", "data.num_workers", "data.micro_batch_size", "checkpoint.keep_last"),
        *("data.num_tokens", "scheduler.warmup_steps", "distributed.inner_steps", "logging.every_steps"),
    ],
)
def test_no_size_or_count_is_without_bound(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: must be at most"):
        load_config({}, [f"{key}={2**53 + 1}"])


def test_what_follows_the_largest_width_loads_again() -> None:
    config = load_config({"model": {"d_model": (2**31 - 1) // 4, "n_head": 1}})
    assert load_config(config.to_dict()).model.d_ff == config.model.d_ff


def test_two_logs_do_not_share_a_file() -> None:
    with pytest.raises(ConfigError, match=r"logging\.json_file: names the same file as logging\.file"):
        load_config({"logging": {"file": "logs/run", "json_file": "./logs/../logs/run"}})
