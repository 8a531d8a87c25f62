"""What users of trainers report, each with what must happen. The faults that a module's own tests hold are listed in
docs/reliability.md; here is what shows in a whole run only."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.durable.files import FileSystem
from speedtronic.errors import NonFiniteError, SpeedtronicError
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan
from speedtronic.runtime import build_runtime, train_from_config
from speedtronic.trainer import Trainer
from tests.support.configs import tiny
from tests.support.models import Endless, Events, Regression, Silence, make_trainer, regression_batches


def final_model(folder: Path) -> dict[str, Tensor]:
    state = CheckpointManager(folder / "checkpoints").load_latest()
    assert state is not None
    return dict(state["model"])


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines, read as strictly as the standard is."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


# --- stopping and resuming ---


@pytest.mark.parametrize("shuffle", [False, True])
def test_four_steps_and_four_more_after_a_resume_equal_eight(shuffle: bool, tmp_path: Path) -> None:
    def config(name: str) -> dict[str, Any]:
        data = {"num_tokens": 11 * 16, "micro_batch_size": 2, "target_batch_size": 4, "shuffle": shuffle}
        return tiny(tmp_path / name, run={"max_steps": 8}, model={"dropout": 0.2}, data=data)

    whole = train_from_config(config("whole"))
    train_from_config(config("parts"), max_steps=4)
    rest = train_from_config(config("parts"), resume=True)
    assert [record["loss"] for record in rest.metrics] == [record["loss"] for record in whole.metrics[4:]]
    expected, resumed = final_model(tmp_path / "whole"), final_model(tmp_path / "parts")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_a_cosine_of_four_steps_extended_to_eight_goes_on_with_the_new_curve(tmp_path: Path) -> None:
    def config(horizon: int) -> dict[str, Any]:
        schedule = {"warmup_steps": 0, "max_steps": horizon, "min_lr_ratio": 0.0}
        return tiny(tmp_path, run={"max_steps": horizon}, optimizer={"lr": 1e-3}, scheduler=schedule)

    first = train_from_config(config(4))
    assert first.metrics[-1]["lr"] == 0.0
    rest = train_from_config(config(8), resume=True)
    applied = [record["lr_applied"] for record in rest.metrics]
    assert applied == pytest.approx([1e-3 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in (4, 5, 6, 7)])


# --- numbers that are none ---


def nan_at(step: int) -> Endless:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = regression_batches()[number % 8]
        return (x * float("nan"), y) if number == step - 1 else (x, y)

    return Endless(batch)


def test_nan_at_step_3_stops_there_with_finite_weights_a_good_checkpoint_and_strict_json(tmp_path: Path) -> None:
    with MetricLogger(stream=Silence(), json_file=tmp_path / "metrics.jsonl") as logger:
        manager = CheckpointManager(tmp_path / "checkpoints", every_steps=1)
        trainer = make_trainer(batches=nan_at(3), logger=logger, checkpoint_manager=manager)
        with pytest.raises(NonFiniteError, match="step 3"):
            trainer.fit(8)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    state = CheckpointManager(tmp_path / "checkpoints").load_latest()
    assert state is not None
    assert state["step"] == 2
    lines = lines_of(tmp_path / "metrics.jsonl")
    (event,) = [line for line in lines if line["event"] == "nonfinite"]
    assert (event["step"], event["loss"], event["nonfinite"]) == (3, None, ["loss", "grad_norm"])
    assert [line["step"] for line in lines if line["event"] == "train_step"] == [1, 2]


# --- disks ---


class Broken(FileSystem):
    """Fails with `error` while it is set."""

    def __init__(self) -> None:
        self.error: int | None = None

    def write(self, file: FileIO, data: memoryview) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        super().write(file, data)

    def make_directory(self, path: Path) -> None:
        if self.error == errno.EROFS:
            raise OSError(self.error, os.strerror(self.error))
        super().make_directory(path)


@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_for_a_while_costs_checkpoints_and_no_step(
    error: int, background: bool, tmp_path: Path
) -> None:
    disk, events = Broken(), Events()

    def batch(number: int) -> tuple[Tensor, Tensor]:
        disk.error = error if 3 <= number < 6 else None
        return regression_batches()[number % 8]

    manager = CheckpointManager(tmp_path, every_steps=2, fs=disk)
    trainer = make_trainer(
        batches=Endless(batch),
        events=events,
        config={"checkpoint": {"background": False}},
        checkpoint_manager=_waiting(manager) if background else manager,
    )
    result = trainer.fit(9)
    assert (result.steps, result.save_error) == (9, None)
    failed = [payload["step"] for payload in events.of("checkpoint") if payload["path"] is None]
    assert failed == [4, 6]
    assert [entry.step for entry in manager.entries()] == [2, 8, 9]


def _waiting(manager: CheckpointManager) -> CheckpointManager:
    """Let each save take the way through the background thread, and end before the disk changes."""

    def save(step: int, state: dict[str, Any]) -> Path:
        manager.save_async(step, state)
        manager.wait()
        path = manager.latest_path()
        assert path is not None
        return path

    manager.save = save  # type: ignore[method-assign]
    return manager


def test_a_clock_that_jumps_back_does_not_make_an_old_checkpoint_the_newest(tmp_path: Path) -> None:
    clock = iter(datetime(2030, 1, 1, tzinfo=UTC) - timedelta(days=day) for day in range(100))
    manager = CheckpointManager(tmp_path, every_steps=1, keep_last=2, now=lambda: next(clock))
    make_trainer(checkpoint_manager=manager).fit(5)
    assert [entry.step for entry in manager.entries()] == [4, 5]
    (tmp_path / "latest.json").unlink()
    state = CheckpointManager(tmp_path, warn=lambda message: None).load_latest()
    assert state is not None
    assert state["step"] == 5


def test_a_clock_that_jumps_back_does_not_choose_between_runs(tmp_path: Path) -> None:
    """Without `latest.json`, the run that saved last is continued: by the count of saves, whatever the time was."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    first = CheckpointManager(tmp_path, now=lambda: noon)
    make_trainer(checkpoint_manager=first).fit(3)
    second = CheckpointManager(tmp_path, now=lambda: noon - timedelta(days=1))
    make_trainer(checkpoint_manager=second).fit(2)
    (tmp_path / "latest.json").unlink()
    found = CheckpointManager(tmp_path, warn=lambda message: None)
    state = found.load_latest()
    assert state is not None
    assert (state["step"], found.run_id) == (2, second.run_id)

    # The first one goes on, and has then saved last.
    resumed = CheckpointManager(tmp_path, now=lambda: noon - timedelta(days=2))
    resumed.run_id = first.run_id
    make_trainer(checkpoint_manager=resumed).fit(4)
    (tmp_path / "latest.json").unlink()
    assert found.latest_path() == tmp_path / "step_000000000004"


# --- the working directory ---


def test_relative_folders_of_a_run_survive_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between building and training, as a script of the user's may do it, with workers that start later."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be " * 100, encoding="utf-8")
    data = {"text_path": "text.txt", "num_workers": 1, "validation_fraction": 0.2}
    logs = {"json_file": "m.jsonl", "file": "l.txt"}
    model = {"vocab_size": 256}
    trainer, _ = build_runtime(tiny("run", data=data, logging=logs, model=model, checkpoint={"every_steps": 2}))
    os.chdir("elsewhere")
    trainer.fit()
    assert not list(Path().iterdir())
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert there >= {"checkpoints", "config.yaml", "run.json", "m.jsonl", "l.txt"}
    assert (tmp_path / "run/checkpoints/step_000000000004").is_dir()


def test_a_plugin_that_changes_the_working_directory_moves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/plugin_that_moves.py").write_text("import os\nos.chdir('code')\n", encoding="utf-8")
    config = tmp_path / "code/my.yaml"
    config.write_text(json.dumps(tiny("run", plugins=["plugin_that_moves"])), encoding="utf-8")
    assert main(["train", str(config)]) == 0
    assert (tmp_path / "run/checkpoints/step_000000000004").is_dir()
    assert Path.cwd() == tmp_path


# --- hooks ---


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """An event that does not come, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_hook_that_hangs_does_not_stop_training(never: threading.Event, tmp_path: Path) -> None:
    logger = MetricLogger(
        stream=Silence(),
        json_file=tmp_path / "metrics.jsonl",
        hooks=[lambda event, payload: never.wait()],
        hook_patience=0.05,
    )
    with logger:
        result = make_trainer(logger=logger).fit(20)
    assert result.steps == 20
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["event"] == "train_step"] == list(range(1, 21))
    warnings = [line["message"] for line in lines if line["event"] == "log"]
    assert "takes too long, now on" in warnings[0]
    assert "has not returned" in warnings[1]


def test_a_hook_that_fails_each_time_does_not_stop_training(tmp_path: Path) -> None:
    def failing(event: str, payload: dict[str, Any]) -> None:
        raise ConnectionError("no network")

    with MetricLogger(stream=Silence(), json_file=tmp_path / "metrics.jsonl", hooks=[failing]) as logger:
        assert make_trainer(logger=logger).fit(5).steps == 5
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if line["event"] == "train_step"] == [1, 2, 3, 4, 5]
    assert all("ConnectionError: no network" in line["message"] for line in lines if line["event"] == "log")


# --- files that would run code ---


class Evil:
    """What a stranger's pickle may hold: it writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self._mark, "it ran")


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"dataset": "{file}"}},
        {"data": {"dataset": "{file}:load"}},
        {"data": {"text_path": "{file}"}},
        {"data": {"shards": "{folder}"}},
        {"run": {"init_from": "{file}"}},
        {"run": {"init_from": "{folder}"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["data.pt", "model.bin", "data.pkl", "tokens.npy"])
def test_a_pickle_is_refused_wherever_a_file_may_be_named_and_does_not_run(
    sections: dict[str, dict[str, str]], name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    filled = {
        section: {key: value.format(file=folder / name, folder=folder) for key, value in keys.items()}
        for section, keys in sections.items()
    }
    with pytest.raises(SpeedtronicError, match=r"given|data\.dataset: must be an importable factory"):
        build_runtime(tiny(tmp_path / "run", **filled))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_a_pickle_in_place_of_a_checkpoints_file_does_not_run(file: str, tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path / "run"))
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step_*")
    (checkpoint / file).write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    with pytest.raises(SpeedtronicError, match=file):
        train_from_config(tiny(tmp_path / "run"), resume=True)
    assert not (tmp_path / "mark").exists()


# --- what a refused update leaves ---


class Normed(nn.Module):
    """A model with running statistics, which its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.regression = Regression()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return self.regression(self.norm(x), y)  # type: ignore[no-any-return]


def trained(policy: str, batches: Any, steps: int, *, fused: bool, every_steps: int = 1) -> Trainer:
    torch.manual_seed(0)
    model = Normed()
    trainer = make_trainer(
        model,
        batches,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused),
        config={"run": {"on_nonfinite": policy}},
        logger=MetricLogger(stream=Silence(), every_steps=every_steps),
    )
    with contextlib.suppress(NonFiniteError):
        trainer.fit(steps)
    return trainer


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("every_steps", [1, 10])
def test_a_refused_update_leaves_running_statistics_as_they_were(fused: bool, every_steps: int) -> None:
    before = trained("stop", regression_batches(), 2, fused=fused)
    refused = trained("stop", nan_at(3), 9, fused=fused, every_steps=every_steps)
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(refused.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_update_leaves_no_trace_in_the_model(fused: bool) -> None:
    batches = regression_batches()

    def without_the_third(number: int) -> tuple[Tensor, Tensor]:
        return batches[(number if number < 2 else number + 1) % 8]

    skipped = trained("skip", nan_at(3), 5, fused=fused)
    expected = trained("skip", Endless(without_the_third), 4, fused=fused)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(skipped.model.state_dict()[name], tensor), name


class Reassigning(Regression):
    """Puts another tensor in the place of its buffers, one of them longer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.seen = torch.cat((self.seen, x[:1, 0]))
        return super().forward(x, y)


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_update_leaves_no_trace_in_buffers_that_the_model_replaces(fused: bool) -> None:
    torch.manual_seed(0)
    model, batches = Reassigning(), regression_batches()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    make_trainer(model, nan_at(2), optimizer=optimizer, config={"run": {"on_nonfinite": "skip"}}).fit(3)
    expected = torch.zeros(3)
    for number in (0, 2):
        expected = 0.9 * expected + 0.1 * batches[number][0].mean(0)
    torch.testing.assert_close(model.mean, expected)
    assert model.seen.tolist() == [batches[number][0][0, 0].item() for number in (0, 2)]


@pytest.mark.parametrize("every_steps", [1, 10])
def test_a_refusal_that_is_noticed_late_takes_step_and_schedule_back_to_the_weights(every_steps: int) -> None:
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=True)
    trainer = make_trainer(
        model,
        nan_at(3),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        logger=MetricLogger(stream=Silence(), every_steps=every_steps),
    )
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer.fit(9)
    assert (trainer.step, trainer.samples) == (2, 8)
    assert trainer.scheduler is not None
    assert trainer.scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1 / 3)
    assert optimizer.state[model.linear.bias]["step"] == 2


def test_an_update_that_runs_twice_writes_running_statistics_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when compiled code fails, and the update is run again without it."""

    def breaks(model: nn.Module, **options: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            model(*args)
            raise RuntimeError("broken kernel")

        return run

    monkeypatch.setattr(torch, "compile", breaks)
    states = []
    for compiled in (True, False):
        torch.manual_seed(0)
        trainer = make_trainer(Normed(), config={"compile": compiled})
        trainer.fit(3)
        states.append(trainer.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_an_update_that_overflows_leaves_running_statistics_as_they_were() -> None:
    class Overflowing(Normed):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            return super().forward(x * float("inf") if self.calls == 2 else x, y)

    torch.manual_seed(0)
    plan = PrecisionPlan("fp16", torch.float32, use_scaler=True, autocast_enabled=False, device_type="cpu")
    model = Overflowing()
    trainer = make_trainer(model, precision=plan)
    assert trainer.fit(3).steps == 3
    assert model.calls == 4
    assert trainer.model.get_buffer("norm.num_batches_tracked") == 3
    assert all(torch.isfinite(tensor).all() for tensor in trainer.model.state_dict().values())
