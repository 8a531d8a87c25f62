from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.cli import main
from speedtronic.cli.diloco_master import Evaluations, _has_reached
from speedtronic.config import DataConfig, EvalConfig, load_config
from speedtronic.data import build_data
from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.protocol import DeltaId, Manifest
from speedtronic.distributed.records import NodeMark, SessionMark
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.status import store_status
from speedtronic.distributed.stores import MemoryStore, open_store
from speedtronic.evaluation import Evaluation
from speedtronic.metrics import MetricLogger
from speedtronic.model.transformer import build_reference_transformer
from tests.support.exchanged import buffers_of
from tests.support.masters import packed_delta
from tests.support.published import MARK, publish

MODEL = "{vocab_size: 16, max_seq_len: 8, n_layer: 1, n_head: 2, d_model: 8}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose store is the folder `store` beside it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    distributed = f"{{enabled: true, role: worker, repo_id: 'dir://{tmp_path}/store', poll_interval: 0.05}}"
    file.write_text(f"model: {MODEL}\ndistributed: {distributed}\n", encoding="utf-8")
    return file


@contextmanager
def signalled_once(log: Path, word: str, number: signal.Signals) -> Iterator[None]:
    """Send this process a signal as soon as a word is in a log, or much later; not if the block ends before."""
    over = threading.Event()

    def watch() -> None:
        until = time.monotonic() + 30
        while not (log.exists() and word in log.read_text(encoding="utf-8")) and time.monotonic() < until:
            if over.wait(0.01):
                return
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def run(config: Path, *words: str, number: signal.Signals = signal.SIGTERM) -> int:
    """Let a master run until it has said that it is ready, and end it."""
    log = config.parent / "metrics.jsonl"
    log.unlink(missing_ok=True)
    with signalled_once(log, "averaging", number):
        return main(["diloco", "master", str(config), "run.output_dir=.", "logging.json_file=metrics.jsonl", *words])


def model_of(config: Path) -> torch.nn.Module:
    return build_reference_transformer(load_config(config).model)


def test_a_master_makes_the_initial_weights_version_0(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "run.seed=7") == 128 + signal.SIGTERM

    assert store_status(open_store(f"dir://{config.parent}/store"), now=0.0).version == 0
    assert main(["diloco", "pull", "store"]) == 0
    pulled = model_of(config)
    load_initial_weights(pulled, "model.safetensors")
    torch.manual_seed(7)
    expected = model_of(config).state_dict()
    for name, value in pulled.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_it_says_which_store_and_which_version(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)

    said = capsys.readouterr().out
    assert f"at version 0, averaging what the nodes put into dir://{config.parent}/store" in said
    assert "ended by SIGTERM at version 0" in said


def test_ctrl_c_ends_it_too(config: Path) -> None:
    assert run(config, number=signal.SIGINT) == 128 + signal.SIGINT


def test_a_master_goes_on_with_what_is_in_the_store(config: Path) -> None:
    run(config, "run.seed=1")
    first = (config.parent / "store/head/00000000.json").read_bytes()

    run(config, "run.seed=2")

    assert (config.parent / "store/head/00000000.json").read_bytes() == first
    assert [path.name for path in (config.parent / "store/head").iterdir()] == ["00000000.json"]


def refused_master(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["diloco", "master", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    return said.err


def test_a_store_of_another_model_is_refused_at_the_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)
    capsys.readouterr()

    assert "another model" in refused_master(capsys, config, "model.d_model=16")


def test_a_configuration_without_a_store_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {MODEL}\n", encoding="utf-8")

    assert "distributed.repo_id: needed" in refused_master(capsys, file)


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_what_this_version_cannot_do_is_refused(config: Path, enabled: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"distributed.enabled={enabled}", "distributed.codec=int4"]
    assert "distributed.codec" in refused_master(capsys, config, *words)
    assert not (config.parent / "store").exists()


def test_a_folder_in_which_another_run_logs_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["logging.json_file=metrics.jsonl", "run.output_dir=out"]
    (config.parent / "out").mkdir()
    code = (
        "import fcntl, sys\nfile = open('out/.lock', 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert "out is in use by another process" in refused_master(capsys, config, *words)
        holder.kill()


def test_its_words_are_in_its_log_and_the_folder_is_free_afterwards(config: Path) -> None:
    run(config)

    assert "ended by SIGTERM" in (config.parent / "metrics.jsonl").read_text(encoding="utf-8")
    assert (config.parent / ".lock").read_bytes() == b""


# ---------------------------------------------------------------------- the end

DATA = "{synthetic: true, num_tokens: 256, validation_fraction: 0.25, micro_batch_size: 4, target_batch_size: 4}"


def send_deltas(config: Path, step: int, *nodes: str) -> None:
    """Make version 0, and let nodes send what they learned in so many steps."""
    run(config)
    model = model_of(config)
    schema = Schema.of(model)
    moved = {name: torch.full(kind.shape, 0.01) for name, kind in schema.types("trained").items()}
    for node in nodes:
        delta = DeltaId(node, "00000001-0000000a", 1)
        data = packed_delta(delta, moved, schema=schema, step=step, buffers=buffers_of(model))
        open_store(f"dir://{config.parent}/store").put_if_absent(delta.name, data)


def run_until(config: Path, step: int, *words: str) -> int:
    files = ("run.output_dir=.", "logging.json_file=metrics.jsonl")
    options = ("distributed.grace=0", "--until", str(step))
    return main(["diloco", "master", str(config), *files, *options, *words])


def test_a_master_ends_when_the_versions_contain_the_steps_of_all_nodes(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send_deltas(config, 10, "ann", "bob")

    assert run_until(config, 10) == 0
    assert "ended by --until 10 at version " in capsys.readouterr().out
    status = store_status(open_store(f"dir://{config.parent}/store"), now=0.0)
    assert [(node.name, node.step) for node in status.nodes] == [("ann", 10), ("bob", 10)]

    assert run_until(config, 10) == 0  # and at once where they are there already


def test_until_names_a_step(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("0", "x", "2.5"):
        said = refused_master(capsys, config, "--until", word)
        assert said == f"error: --until must be a whole number of steps, at least 1, not {word}\n"


def mark_at(step: int, silent: float) -> NodeMark:
    """Of a node with so many steps, which was silent for so long at `NOW`."""
    session = SessionMark(seq=1, last=None, position=(step, step, step))
    return MARK.model_copy(update={"sessions": {"00000001-0000000a": session}, "time": int(NOW - silent)})


NOW = 2e9
RUNNING, LATE, GONE = 30.0, 300.0, 3000.0


@pytest.mark.parametrize(
    ("nodes", "reached"),
    [
        ({}, False),
        ({"a": (100, RUNNING), "b": (100, RUNNING)}, True),
        ({"a": (100, RUNNING), "b": (101, GONE)}, True),
        ({"a": (100, RUNNING), "b": (99, RUNNING)}, False),
        ({"a": (100, GONE), "b": (99, LATE)}, False),
        ({"a": (100, RUNNING), "b": (99, GONE)}, True),
        ({"a": (99, GONE), "b": (99, GONE)}, False),
    ],
)
def test_until_waits_for_every_node_that_is_not_gone(nodes: dict[str, tuple[int, float]], reached: bool) -> None:
    marks = {name: mark_at(*of_node) for name, of_node in nodes.items()}
    assert _has_reached(publish(MemoryStore(), nodes=marks), 100, NOW) == reached


def test_until_waits_for_a_first_version() -> None:
    assert not _has_reached(None, 100, NOW)


# ---------------------------------------------------------------------- evaluation


def evaluated(config: Path) -> list[dict[str, Any]]:
    lines = (config.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "eval"]


def test_the_global_weights_are_evaluated_on_the_held_out_data(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text(encoding="utf-8") + f"data: {DATA}\n", encoding="utf-8")
    send_deltas(config, 10, "ann")

    assert run_until(config, 10, "eval.every_steps=10") == 0

    *_, last = evaluated(config)
    assert (last["version"], last["step"], last["best_version"]) == (1, 10, 1)
    assert "the best was version 1" in capsys.readouterr().out
    assert main(["diloco", "pull", "store"]) == 0
    model = model_of(config).eval()
    load_initial_weights(model, "model.safetensors")
    held_out = build_data(load_config(config), pin_memory=False).validation
    assert held_out is not None
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                model(batch["input_ids"])["logits"].flatten(0, 1), batch["labels"].flatten()
            )
            for batch in held_out
        ]
    assert last["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("data", ["{shards: nowhere}", "{dataset: 'tests.cli.test_diloco_master:no_file'}"])
def test_a_master_without_the_data_says_so_and_averages(
    config: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    send_deltas(config, 10, "ann")
    config.write_text(config.read_text(encoding="utf-8") + f"data: {data}\n", encoding="utf-8")

    assert run_until(config, 10, "eval.every_steps=10") == 0

    assert "nothing is evaluated, since the data cannot be read on this machine" in capsys.readouterr().out
    assert evaluated(config) == []


def no_file(data: DataConfig) -> Any:
    """A factory of `data.dataset`."""
    return Path("nowhere").read_bytes()


def test_a_master_of_a_configuration_without_data_evaluates_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    send_deltas(config, 10, "ann")

    assert run_until(config, 10, "eval.every_steps=10", "data.synthetic=false") == 0
    assert "evaluated" not in capsys.readouterr().out
    assert evaluated(config) == []


class Published:
    """A master with the versions that a test gives it."""

    def __init__(self) -> None:
        self.newest: Manifest | None = None
        self.busy = False
        self.store = MemoryStore()

    def step(self, step: int) -> None:
        self.newest = publish(self.store, self.newest, nodes={"a": mark_at(step, 0)})

    def published(self) -> tuple[Manifest, dict[str, torch.Tensor]] | None:
        assert self.newest is not None
        return None if self.busy else (self.newest, {"weight": torch.tensor([float(self.newest.version)])})


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


class Watching:
    """Evaluations of a `Published`, whose losses a test gives."""

    def __init__(self, *losses: float, every: int | None = 10, at_end: bool = False) -> None:
        self.master = Published()
        self.sent: list[dict[str, Any]] = []
        self.seen: list[float] = []
        self.warned: list[str] = []
        remaining = iter(losses)

        def evaluate(model: Any, should_stop: Any) -> dict[str, Any] | None:
            self.seen.append(model.weight.item())
            return None if should_stop() else {"loss": next(remaining)}

        logger = SimpleNamespace(emit=lambda event, payload: self.sent.append(payload), warning=self.warned.append)
        section = EvalConfig(every_steps=every)
        self.evaluations = Evaluations(
            cast(Evaluation, evaluate), Weight(), cast(MetricLogger, logger), section, at_end
        )

    def at(self, step: int, *, is_over: bool = False, stopping: bool = False) -> None:
        self.master.step(step)
        self.again(is_over=is_over, stopping=stopping)

    def again(self, *, is_over: bool = False, stopping: bool = False) -> None:
        self.evaluations.advance(cast(MasterOuterLoop, self.master), is_over, lambda: stopping)


def test_an_evaluation_is_due_when_the_furthest_node_has_made_so_many_steps() -> None:
    watching = Watching(3.0, 2.0, 2.5)

    for step in (25, 29, 30, 39, 55, 60):  # a master that starts at 25 does not evaluate again what another one did
        watching.at(step)
        watching.again()

    assert [sent["step"] for sent in watching.sent] == [30, 55, 60]
    assert watching.seen == [2.0, 4.0, 5.0]
    assert [(sent["version"], sent["best_version"]) for sent in watching.sent] == [(2, 2), (4, 4), (5, 4)]
    assert watching.evaluations.best == 4


def test_an_evaluation_does_not_wait_for_a_look_of_the_master() -> None:
    watching = Watching(3.0)
    watching.at(0)
    watching.master.busy = True
    watching.at(10)
    assert watching.sent == []

    watching.master.busy = False
    watching.again()
    assert [sent["version"] for sent in watching.sent] == [1]


def test_the_last_version_is_evaluated_once() -> None:
    watching = Watching(3.0, 2.0, every=None, at_end=True)
    watching.at(10)
    watching.at(20, is_over=True)
    watching.again(is_over=True)
    assert [sent["step"] for sent in watching.sent] == [20]

    without = Watching(every=10, at_end=False)
    without.at(10, is_over=True)
    assert without.sent == []


def test_a_signal_ends_an_evaluation_without_a_result() -> None:
    watching = Watching()
    watching.at(0)
    watching.at(10, stopping=True)
    assert (watching.seen, watching.sent) == ([1.0], [])


def test_after_an_evaluation_that_failed_there_are_no_more() -> None:
    watching = Watching()  # no loss: the evaluator raises
    watching.at(0)
    watching.at(10)
    watching.at(20)
    assert len(watching.seen) == 1
    assert "the evaluation of version 1 failed; there will be no more" in watching.warned[0]


def test_rounds_go_on_during_an_evaluation(config: Path) -> None:
    """An evaluation holds nothing that a look of the master needs."""
    model = model_of(config)
    schema = Schema.of(model)
    loop = MasterOuterLoop(MemoryStore(), snapshot(model), schema=schema)
    loop.sync_once()
    looked = []

    def evaluate(model: Any, should_stop: Any) -> dict[str, Any]:
        looked.append(loop.sync_once())
        return {"loss": 1.0}

    logger = SimpleNamespace(emit=lambda event, payload: None)
    evaluations = Evaluations(cast(Evaluation, evaluate), model, cast(MetricLogger, logger), EvalConfig(), True)
    evaluations.advance(loop, True, lambda: False)
    assert looked == [0]
