from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint import manager as manager_module
from speedtronic.checkpoint.manifest import FILES, MANIFEST, read_manifest, seal
from speedtronic.checkpoint.throttle import Throttle
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError


def scored(step: int, value: float, name: str = "accuracy", mode: str = "max") -> dict[str, Any]:
    state = state_of(step, eval_loss=float(step))
    state["metrics"]["monitored"] = {"name": name, "mode": mode, "value": value}
    return state


def state_of(step: int, eval_loss: float | None = None) -> dict[str, Any]:
    weight = torch.full((4, 3), float(step))
    return {
        "model": {"wte.weight": weight, "head.weight": weight, "norm": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.zeros(4, 3)}}},
        "step": step,
        "config": {"run": {"seed": 1}},
        "metrics": {"loss": 2.5, "eval_loss": eval_loss},
    }


def step_of(state: dict[str, Any] | None) -> int:
    assert state is not None
    assert float(state["model"]["wte.weight"][0, 0]) == state["step"]
    return int(state["step"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(file: Path) -> None:
    """Flip one bit in the middle; the size stays."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.fixture
def warned() -> list[str]:
    return []


# --- saving and loading ---


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = state_of(500)
    path = CheckpointManager(tmp_path).save(500, state)
    back = CheckpointManager(tmp_path).load_latest()
    assert path == tmp_path / "step_000000000500"
    assert back is not None
    assert back.keys() == state.keys()
    assert torch.equal(back["model"]["norm"], state["model"]["norm"])
    assert back["optimizer"]["state"][0].keys() == {"step", "exp_avg"}
    assert back["config"] == state["config"]


def test_the_folder_holds_four_files_and_latest_names_it(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(500, state_of(500))
    assert names(tmp_path) == ["latest.json", "step_000000000500"]
    assert names(tmp_path / "step_000000000500") == sorted([*FILES, MANIFEST])
    assert json.loads((tmp_path / "latest.json").read_text())["checkpoint"] == "step_000000000500"


def test_the_models_file_has_plain_names_and_tied_weights_once(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path).save(1, state_of(1))
    with safetensors.safe_open(path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["norm", "wte.weight"]
        assert file.metadata() == {"format": "pt", "head.weight": "wte.weight"}
    back = CheckpointManager(tmp_path).load_latest()
    assert back is not None
    assert back["model"]["head.weight"] is back["model"]["wte.weight"]


def test_a_tied_model_loads_by_the_safetensors_librarys_own_call(tmp_path: Path) -> None:
    def tied() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
        model["b"].weight = model["a"].weight
        return model

    model, other = tied(), tied()
    path = CheckpointManager(tmp_path).save(1, {"model": model.state_dict()})
    safetensors.torch.load_model(other, path / "model.safetensors")
    assert torch.equal(other["b"].weight, model["a"].weight)


def test_the_manifest_tells_step_loss_run_versions_and_fingerprint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manifest = read_manifest(FileSystem(), manager.save(7, state_of(7, eval_loss=3.0)))
    assert (manifest.step, manifest.loss, manifest.eval_loss, manifest.run_id) == (7, 2.5, 3.0, manager.run_id)
    assert manifest.versions["torch"] == torch.__version__
    reordered = {**state_of(8), "config": {"run": {"seed": 1}}}
    assert read_manifest(FileSystem(), manager.save(8, reordered)).config_sha256 == manifest.config_sha256
    changed = {**state_of(9), "config": {"run": {"seed": 2}}}
    assert read_manifest(FileSystem(), manager.save(9, changed)).config_sha256 != manifest.config_sha256


def test_a_loss_that_is_not_finite_is_left_out_of_the_manifest(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path).save(1, {"metrics": {"loss": float("nan")}})
    assert read_manifest(FileSystem(), path).loss is None


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path).load_latest() is None
    assert CheckpointManager(tmp_path / "absent").load_latest() is None
    assert CheckpointManager(tmp_path / "absent").latest_path() is None
    assert not (tmp_path / "absent").exists()


def test_what_cannot_be_saved_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=r"^model\.x: a object cannot"):
        manager.save(1, {"model": {"x": object()}})
    with pytest.raises(CheckpointError, match="a state is a dict|state is a dict"):
        manager.save(1, [1])  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_should_save_follows_the_cadence() -> None:
    manager = CheckpointManager("unused", every_steps=3)
    assert [step for step in range(10) if manager.should_save(step)] == [3, 6, 9]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_minutes_make_a_save_due_besides_the_steps(tmp_path: Path) -> None:
    clock = Clock()
    manager = CheckpointManager(tmp_path, every_steps=10, every_minutes=0.5, clock=clock)
    assert not manager.should_save(1)
    clock.time += 29.9
    assert not manager.should_save(2)
    assert manager.should_save(10)
    clock.time += 0.1
    assert manager.should_save(3)
    assert manager.should_save(3), "asking changes nothing"
    assert not manager.should_save(0)


def test_every_save_that_starts_restarts_the_minutes(tmp_path: Path) -> None:
    clock = Clock()
    manager = CheckpointManager(tmp_path, every_steps=10, every_minutes=1, clock=clock)
    clock.time += 50
    manager.save(10, state_of(10))
    clock.time += 59
    assert not manager.should_save(11)
    clock.time += 1
    assert manager.should_save(11)
    manager.save_async(11, state_of(11))
    assert not manager.should_save(12)
    manager.wait()


def test_a_failed_save_is_due_again_only_at_the_next_cadence(tmp_path: Path) -> None:
    clock = Clock()
    manager = CheckpointManager(tmp_path, every_steps=10, every_minutes=1, clock=clock, fs=FailingFileSystem(1))
    clock.time += 60
    assert manager.should_save(3)
    with pytest.raises(OSError, match="No space"):
        manager.save(3, state_of(3))
    assert not manager.should_save(4)
    clock.time += 60
    assert manager.should_save(5)


def test_a_disabled_manager_saves_nothing_and_still_loads(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, state_of(1))
    manager = CheckpointManager(tmp_path, every_steps=1, enabled=False)
    assert not manager.should_save(1)
    for save in (manager.save, manager.save_async):
        with pytest.raises(CheckpointError, match=r"checkpoint\.enabled"):
            save(2, state_of(2))
    assert step_of(manager.load_latest()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_steps": 0},
        {"keep_last": 0},
        {"every_minutes": 0},
        {"every_minutes": float("nan")},
        {"keep_every": 0},
        {"keep_best": -1},
    ],
    ids=str,
)
def test_counts_that_are_too_small_are_errors(arguments: dict[str, float]) -> None:
    with pytest.raises(CheckpointError, match=next(iter(arguments))):
        CheckpointManager("unused", **arguments)  # type: ignore[arg-type]


def test_a_negative_step_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 0, got -1"):
        CheckpointManager(tmp_path).save(-1, state_of(1))
    assert names(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {**state_of(1), "note": "first"})
    path = manager.save(1, {**state_of(1), "note": "second"})
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["note"] == "second"
    assert names(tmp_path) == ["latest.json", path.name]


# --- background saving ---


class Gate(FileSystem):
    """Holds every write until the gate opens."""

    def __init__(self) -> None:
        self.open_gate = threading.Event()

    def write(self, file: FileIO, data: memoryview) -> None:
        assert self.open_gate.wait(10)
        super().write(file, data)


def test_a_background_save_holds_the_values_of_its_moment(tmp_path: Path) -> None:
    fs = Gate()
    manager = CheckpointManager(tmp_path, fs=fs)
    state = state_of(1)
    saved = manager.save_async(1, state)
    state["model"]["wte.weight"].fill_(99.0)
    state["optimizer"]["state"][0]["exp_avg"].fill_(99.0)
    assert not saved.done()
    fs.open_gate.set()
    manager.wait()
    assert saved.result() == tmp_path / "step_000000000001"
    back = manager.load_latest()
    assert step_of(back) == 1
    assert back is not None
    assert back["optimizer"]["state"][0]["exp_avg"].sum() == 0


def test_a_save_waits_for_the_one_before_it(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    first = manager.save_async(1, state_of(1))
    second = manager.save_async(2, state_of(2))
    assert first.done()
    manager.save(3, state_of(3))
    assert second.done()
    assert step_of(manager.load_latest()) == 3


def test_a_save_that_is_waited_for_is_hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Throttled to a billionth of a processor, these saves would take years."""
    monkeypatch.setattr(manager_module, "background_share", lambda training_on_cpu: 1e-9)
    large = {"model": {"x": torch.zeros(3 * 2**20)}}
    manager = CheckpointManager(tmp_path)
    first = manager.save_async(1, large)
    assert not first.done()
    second = manager.save_async(2, large)
    assert first.done()
    manager.wait()
    assert second.done()
    assert [entry.problem for entry in manager.entries()] == [None, None]


def test_a_cadence_that_overtakes_the_writer_ends_its_throttle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def throttle(share: float) -> Throttle:
        shares.append(share)
        return Throttle(1.0)

    fs = Gate()
    manager = CheckpointManager(tmp_path, fs=fs)
    monkeypatch.setattr(manager_module, "Throttle", throttle)
    monkeypatch.setattr(manager_module, "background_share", lambda training_on_cpu: 0.5 if training_on_cpu else 0.9)
    manager.save_async(1, state_of(1))
    threading.Timer(0.05, fs.open_gate.set).start()
    manager.save_async(2, state_of(2))
    manager.wait()
    manager.save_async(3, state_of(3))
    manager.wait()
    assert shares == [0.5, 1.0, 1.0]


def test_closing_waits_gives_the_memory_back_and_allows_more(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    first = manager.save_async(1, state_of(1))
    manager.close()
    assert first.done()
    assert not any(thread.name.startswith("checkpoint-writer") for thread in threading.enumerate())
    manager.save_async(2, state_of(2))
    manager.close()
    manager.close()
    assert step_of(manager.load_latest()) == 2


def test_closing_leaves_a_failure_for_wait(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, fs=FailingFileSystem(3))
    manager.save_async(1, state_of(1))
    manager.close()
    with pytest.raises(OSError, match="No space left"):
        manager.wait()


class FailingFileSystem(FileSystem):
    """Lets the n-th operation fail, or end the process there."""

    def __init__(self, fail_at: int, *, kill: bool = False) -> None:
        self.fail_at = fail_at
        self.kill = kill
        self.operations = 0

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self.fail_at:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: Path) -> FileIO:
        self._count()
        return super().create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        super().write(file, data[: len(data) // 2])
        self._count()
        super().write(file, data[len(data) // 2 :])

    def sync(self, file: FileIO) -> None:
        self._count()
        super().sync(file)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def remove_tree(self, path: Path) -> None:
        self._count()
        super().remove_tree(path)


def test_wait_raises_what_a_background_save_raised_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, fs=FailingFileSystem(3))
    manager.save_async(1, state_of(1))
    manager.save_async(2, state_of(2))
    with pytest.raises(OSError, match="No space left"):
        manager.wait()
    manager.wait()
    assert step_of(manager.load_latest()) == 2


# --- damage ---


@pytest.mark.parametrize("file", [*FILES, MANIFEST])
@pytest.mark.parametrize("kind", ["flipped", "cut", "gone", "empty"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning_that_names_it(
    tmp_path: Path, file: str, kind: str, warned: list[str]
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    bad = manager.save(8, state_of(8)) / file
    if kind == "flipped":
        damage(bad)
    elif kind == "cut":
        os.truncate(bad, bad.stat().st_size // 2)
    elif kind == "gone":
        bad.unlink()
    else:
        bad.write_bytes(b"")
    assert step_of(CheckpointManager(tmp_path, warn=warned.append).load_latest()) == 4
    assert len(warned) == 1
    assert "step_000000000008" in warned[0]
    assert file in warned[0]


def test_the_default_warning_is_a_python_warning(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    damage(manager.save(8, state_of(8)) / "model.safetensors")
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert step_of(CheckpointManager(tmp_path).load_latest()) == 4


def test_if_no_checkpoint_is_sound_the_error_gives_every_reason(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    damage(manager.save(4, state_of(4)) / "state.json")
    (manager.save(8, state_of(8)) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"step_000000000004: state\.json .*step_000000000008: manifest\.json"):
        CheckpointManager(tmp_path).load_latest()


def spoil_permission(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing in it be opened, as for another user; root would be let in."""
    open_file = FileSystem.open

    def guarded(fs: FileSystem, path: Path) -> FileIO:
        if path.parent == checkpoint:
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(fs, path)

    monkeypatch.setattr(FileSystem, "open", guarded)


def spoil_by_a_folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / "state.safetensors").unlink()
    (checkpoint / "state.safetensors").mkdir()


def spoil_by_a_folder_as_manifest(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).mkdir()


def spoil_by_a_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_bytes(b"")


def spoil_by_another_steps_manifest(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(checkpoint.with_name("step_000000000004") / MANIFEST, checkpoint / MANIFEST)


def spoil_by_another_steps_files(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(checkpoint.with_name("step_000000000004") / "model.safetensors", checkpoint / "model.safetensors")


def spoil_listing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_symlink = Path.is_symlink

    def failing(path: Path) -> bool:
        if path == checkpoint:
            raise OSError(errno.EIO, "Input/output error")
        return is_symlink(path)

    monkeypatch.setattr(Path, "is_symlink", failing)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_permission, "manifest.json cannot be read: Permission denied"),
        (spoil_by_a_folder, "state.safetensors is damaged: it is not a plain file"),
        (spoil_by_a_folder_as_manifest, "manifest.json is damaged: it is not a plain file"),
        (spoil_by_a_file, "it is not a folder named as checkpoints are"),
        (spoil_by_another_steps_manifest, "manifest.json says step 4"),
        (spoil_by_another_steps_files, "model.safetensors is damaged: its contents do not match their checksum"),
        (spoil_listing, "it cannot be read: Input/output error"),
    ],
)
def test_if_the_newest_is_spoiled_the_one_before_is_loaded_with_the_reason(
    tmp_path: Path,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    newest = manager.save(8, state_of(8))
    spoil(newest, monkeypatch)
    assert step_of(CheckpointManager(tmp_path, warn=warned.append).load_latest()) == 4
    assert warned == [f"checkpoint {newest} was passed over for step_000000000004: {reason}"]
    shutil.rmtree(tmp_path / "step_000000000004")
    with pytest.raises(CheckpointError, match=f"{newest.name}: {reason}"):
        CheckpointManager(tmp_path, warn=warned.append).load_latest()


def test_a_folder_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    monkeypatch.setattr(Path, "iterdir", failing)
    for read in (manager.load_latest, manager.latest_path, manager.entries, manager.verified_path):
        with pytest.raises(CheckpointError, match=f"{tmp_path}: cannot be read: Permission denied"):
            read()


def test_a_latest_that_names_a_checkpoint_which_is_gone_costs_only_that_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    shutil.rmtree(manager.save(8, state_of(8)))
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 4


def test_a_clock_that_jumps_back_does_not_change_the_order_of_a_run(tmp_path: Path, warned: list[str]) -> None:
    times = iter([datetime(2030, 1, day, tzinfo=UTC) for day in (9, 5, 1)])
    manager = CheckpointManager(tmp_path, keep_last=2, now=lambda: next(times))
    for step in (8, 4, 6):
        manager.save(step, state_of(step))
    assert [entry.step for entry in manager.entries()] == [4, 6]
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 6
    (tmp_path / "latest.json").unlink()
    assert step_of(CheckpointManager(tmp_path, warn=warned.append).load_latest()) == 6


def test_after_a_fallback_the_run_goes_on_from_there(tmp_path: Path, warned: list[str]) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    damage(manager.save(8, state_of(8)) / "model.safetensors")
    resumed = CheckpointManager(tmp_path, warn=warned.append)
    resumed.load_latest()
    resumed.save(6, state_of(6))
    assert resumed.run_id == manager.run_id
    assert step_of(CheckpointManager(tmp_path, warn=warned.append).load_latest()) == 6


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", seal({"format": 1, "checkpoint": "../x"})])
def test_without_a_readable_latest_the_newest_sound_checkpoint_is_found(
    tmp_path: Path, content: bytes | None, warned: list[str]
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    manager.save(8, state_of(8))
    if content is None:
        (tmp_path / "latest.json").unlink()
    else:
        (tmp_path / "latest.json").write_bytes(content)
    assert step_of(CheckpointManager(tmp_path, warn=warned.append).load_latest()) == 8
    assert len(warned) == 1
    assert "latest.json" in warned[0]


def test_a_checkpoint_that_latest_does_not_name_yet_is_loaded(tmp_path: Path) -> None:
    """As a kill between the rename and the writing of `latest.json` leaves it."""
    manager = CheckpointManager(tmp_path)
    manager.save(4, state_of(4))
    latest = (tmp_path / "latest.json").read_bytes()
    manager.save(8, state_of(8))
    (tmp_path / "latest.json").write_bytes(latest)
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 8


def test_a_newer_format_is_an_error_not_damage(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(4, state_of(4))
    (tmp_path / "latest.json").write_bytes(seal({"format": 2}))
    with pytest.raises(CheckpointError, match="format 2.*update it"):
        CheckpointManager(tmp_path).load_latest()


def test_checkpoints_of_version_2_are_refused_and_the_error_says_how_to_convert_them(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.write_text, (tmp_path / "ran", "code")

    (tmp_path / "step_8.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"step_8\.pt.*save_file"):
        CheckpointManager(tmp_path).load_latest()
    assert not (tmp_path / "ran").exists()


def test_links_in_a_checkpoint_are_not_followed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "a")
    path = manager.save(4, state_of(4))
    shutil.move(path / "state.json", tmp_path / "elsewhere")
    (path / "state.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: it is not a plain file"):
        CheckpointManager(tmp_path / "a").load_latest()


def test_a_linked_checkpoint_folder_is_not_followed(tmp_path: Path) -> None:
    path = CheckpointManager(tmp_path / "a").save(4, state_of(4))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="not a folder"):
        CheckpointManager(tmp_path / "b", warn=lambda message: None).load_latest()


# --- faults while saving ---


def operations_of_a_save(folder: Path, step: int) -> int:
    fs = FailingFileSystem(-1)
    shutil.copytree(folder, folder.with_name("rehearsal"))
    manager = CheckpointManager(folder.with_name("rehearsal"), keep_last=1, fs=fs)
    manager.load_latest()
    manager.save(step, state_of(step))
    shutil.rmtree(folder.with_name("rehearsal"))
    return fs.operations


@pytest.mark.parametrize("step", [4, 8], ids=["same step again", "next step"])
def test_whichever_operation_fails_a_sound_checkpoint_stays_and_the_next_save_works(
    tmp_path: Path, step: int, warned: list[str]
) -> None:
    CheckpointManager(tmp_path / "start").save(4, state_of(4))
    for fail_at in range(1, operations_of_a_save(tmp_path / "start", step) + 1):
        folder = tmp_path / f"fails_at_{fail_at}"
        shutil.copytree(tmp_path / "start", folder)
        fs = FailingFileSystem(fail_at)
        manager = CheckpointManager(folder, keep_last=1, fs=fs, warn=warned.append)
        manager.load_latest()
        with contextlib.suppress(OSError):
            manager.save(step, state_of(step))
        assert step_of(CheckpointManager(folder, warn=warned.append).load_latest()) in (4, step)
        manager.save(12, state_of(12))
        assert step_of(CheckpointManager(folder).load_latest()) == 12
        assert names(folder) == ["latest.json", "step_000000000012"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.checkpoint.test_manager import FailingFileSystem, state_of
from speedtronic.checkpoint import CheckpointManager
folder, step = Path(sys.argv[1]), int(sys.argv[2])
for fail_at in map(int, sys.argv[3].split(",")):
    child = os.fork()
    if child == 0:
        fs = FailingFileSystem(fail_at, kill=True)
        manager = CheckpointManager(folder / str(fail_at), keep_last=1, fs=fs)
        manager.load_latest()
        manager.save(step, state_of(step))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (fail_at, status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 8], ids=["same step again", "next step"])
def test_killed_at_any_operation_leaves_a_sound_checkpoint_and_its_leftovers_are_cleaned(
    tmp_path: Path, step: int, warned: list[str]
) -> None:
    CheckpointManager(tmp_path / "start").save(4, state_of(4))
    moments = range(1, operations_of_a_save(tmp_path / "start", step) + 1)
    for moment in moments:
        shutil.copytree(tmp_path / "start", tmp_path / str(moment))
    arguments = [str(tmp_path), str(step), ",".join(map(str, moments))]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, *arguments], check=True, cwd=Path(__file__).parents[2]
    )
    for moment in moments:
        manager = CheckpointManager(tmp_path / str(moment), keep_last=1, warn=warned.append)
        assert step_of(manager.load_latest()) in (4, step)
        manager.save(12, state_of(12))
        assert names(tmp_path / str(moment)) == ["latest.json", "step_000000000012"]
    assert warned == []


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    dead, living = f".tmp-step_000000000001-{process.pid}", f".tmp-step_000000000002-{os.getppid()}"
    for name in (dead, living, f".tmp-step_000000000003-{os.getpid()}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / f".tmp-latest.json-{process.pid}").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    before = names(tmp_path)
    manager = CheckpointManager(tmp_path)
    assert manager.load_latest() is None
    assert names(tmp_path) == before  # a reader may be where the writer's process cannot be seen
    manager.save(4, state_of(4))
    assert names(tmp_path) == [living, "latest.json", "notes.txt", "step_000000000004"]


class Refusing(FileSystem):
    """Refuses one kind of operation with an error of the system's."""

    def __init__(self, operation: str, code: int) -> None:
        self.refused = True

        def refuse(*arguments: Any) -> Any:
            if self.refused:
                raise OSError(code, os.strerror(code))
            return getattr(FileSystem, operation)(self, *arguments)

        setattr(self, operation, refuse)


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        ("make_directory", errno.EROFS),
        ("create", errno.EACCES),
        ("write", errno.ENOSPC),
        ("write", errno.EIO),
        ("sync", errno.EIO),
        ("sync_directory", errno.EIO),
        ("rename", errno.EROFS),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_error_costs_only_that_save(tmp_path: Path, operation: str, code: int, background: bool) -> None:
    CheckpointManager(tmp_path).save(1, state_of(1))
    fs = Refusing(operation, code)
    manager = CheckpointManager(tmp_path, fs=fs)
    manager.load_latest()
    save = manager.save_async if background else manager.save
    with pytest.raises(OSError, match=os.strerror(code)):  # noqa: PT012 - in the background it is raised by wait
        save(2, state_of(2))
        manager.wait()
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 1
    fs.refused = False
    save(3, state_of(3))
    manager.wait()
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 3
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


class ShortWrites(FileSystem):
    """Takes a few bytes at a time, as a disk may that is full or slow."""

    def create(self, path: Path) -> FileIO:
        class Short(FileIO):
            def write(self, data: Any) -> int:
                return super().write(memoryview(data)[:100])

        return Short(path, "xb")


def test_short_writes_lose_no_byte(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, fs=ShortWrites())
    manager.save(1, state_of(1))
    manager.save_async(2, state_of(2))
    manager.wait()
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 2
    for entry in manager.entries():
        CheckpointManager(tmp_path).verify(entry.path)


def test_a_disk_that_takes_nothing_and_says_nothing_is_an_error(tmp_path: Path) -> None:
    class Stuck(FileSystem):
        def create(self, path: Path) -> FileIO:
            class Nothing(FileIO):
                def write(self, data: Any) -> int:
                    return 0

            return Nothing(path, "xb")

    with pytest.raises(OSError, match="takes no more bytes"):
        CheckpointManager(tmp_path, fs=Stuck()).save(1, state_of(1))


def test_only_the_next_save_waits_for_a_slow_flush(tmp_path: Path) -> None:
    class SlowFlush(Gate):
        def write(self, file: FileIO, data: memoryview) -> None:
            FileSystem.write(self, file, data)

        def sync(self, file: FileIO) -> None:
            assert self.open_gate.wait(10)
            super().sync(file)

    fs = SlowFlush()
    manager = CheckpointManager(tmp_path, fs=fs)
    saved = manager.save_async(1, state_of(1))
    assert not saved.done()
    fs.open_gate.set()
    manager.save_async(2, state_of(2))
    assert saved.done()
    manager.wait()


# --- pruning ---


def test_only_the_newest_stay(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in range(1, 6):
        manager.save(step, state_of(step))
    assert [entry.step for entry in manager.entries()] == [4, 5]


def test_null_keeps_all(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in range(1, 6):
        manager.save(step, state_of(step))
    assert len(manager.entries()) == 5
    assert manager.prune() == []


def test_pruning_never_removes_the_newest_sound_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in range(1, 5):
        manager.save(step, state_of(step))
    for step in (3, 4):
        damage(tmp_path / f"step_{step:012d}" / "model.safetensors")
    other = CheckpointManager(tmp_path, keep_last=1, warn=lambda message: None)
    other.load_latest()
    assert [path.name for path in other.prune()] == ["step_000000000003", "step_000000000001"]
    assert [entry.step for entry in other.entries()] == [2, 4]


def steps_left(manager: CheckpointManager) -> list[int]:
    return [entry.step for entry in manager.entries()]


def test_milestones_stay_for_good(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_every=4)
    for step in range(1, 11):
        manager.save(step, state_of(step))
    assert steps_left(manager) == [4, 8, 10]


def test_the_best_stay_besides_the_newest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=2)
    for step, loss in enumerate([3.0, 1.0, 2.0, None, 4.0, 5.0], start=1):
        manager.save(step, state_of(step, eval_loss=loss))
    assert steps_left(manager) == [2, 3, 6]
    manager.save(7, state_of(7, eval_loss=0.0))
    manager.save(8, state_of(8))
    assert steps_left(manager) == [2, 7, 8]


def test_of_equally_good_ones_the_newer_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    for step in range(1, 4):
        manager.save(step, state_of(step, eval_loss=1.0))
    manager.save(4, state_of(4, eval_loss=2.0))
    assert steps_left(manager) == [3, 4]


def test_without_keep_best_the_best_goes(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2):
        manager.save(step, state_of(step, eval_loss=float(step)))
    assert steps_left(manager) == [2]


def test_a_damaged_one_takes_no_place_among_the_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in range(1, 5):
        manager.save(step, state_of(step, eval_loss=float(step)))
    damage(tmp_path / "step_000000000001" / "model.safetensors")
    other = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    other.load_latest()
    other.prune()
    assert steps_left(other) == [2, 4]


def test_the_best_of_another_run_stay_and_are_not_counted(tmp_path: Path) -> None:
    former = CheckpointManager(tmp_path, keep_last=None)
    former.save(1, state_of(1, eval_loss=0.1))
    former.save(4, state_of(4, eval_loss=0.2))
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, keep_every=4)
    for step, loss in ((5, 3.0), (6, 4.0), (7, 5.0)):
        manager.save(step, state_of(step, eval_loss=loss))
    assert steps_left(manager) == [1, 4, 5, 7]


def test_a_resumed_run_knows_its_best(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    first.save(1, state_of(1, eval_loss=1.0))
    first.save(2, state_of(2, eval_loss=2.0))
    second = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    second.load_latest()
    second.save(3, state_of(3, eval_loss=3.0))
    assert steps_left(second) == [1, 3]


def test_a_checkpoint_that_the_disk_cannot_read_is_not_pruned(tmp_path: Path) -> None:
    """It may be the newest sound one: an error of the disk says nothing about it."""
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in (1, 2, 3, 4):
        manager.save(step, state_of(step))
    damage(tmp_path / "step_000000000004" / "model.safetensors")

    class Ailing(FileSystem):
        def open(self, path: Path) -> FileIO:
            if path.parent.name == "step_000000000003" and path.suffix == ".safetensors":
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path)

    other = CheckpointManager(tmp_path, keep_last=1, fs=Ailing(), warn=lambda message: None)
    assert step_of(other.load_latest()) == 2
    assert [path.name for path in other.prune()] == ["step_000000000001"]
    assert steps_left(other) == [2, 3, 4]


def test_a_checkpoint_that_cannot_be_removed_is_a_warning_and_the_save_stands(
    tmp_path: Path, warned: list[str]
) -> None:
    class Stuck(FileSystem):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    manager = CheckpointManager(tmp_path, keep_last=1, fs=Stuck(), warn=warned.append)
    manager.save(1, state_of(1))
    assert manager.save(2, state_of(2)).name == "step_000000000002"
    assert "Permission denied" in warned[0]


# --- several runs in one folder ---


def test_a_fresh_run_touches_nothing_of_a_former_one(tmp_path: Path) -> None:
    former = CheckpointManager(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        former.save(step, state_of(step))
    fresh = CheckpointManager(tmp_path, keep_last=1)
    assert fresh.save(1, state_of(1)).name == f"step_000000000001-{fresh.run_id[:8]}"
    assert fresh.save(2, state_of(2)).name == f"step_000000000002-{fresh.run_id[:8]}"
    assert fresh.save(2, state_of(2)).name == f"step_000000000002-{fresh.run_id[:8]}"
    kept = [entry.path.name for entry in fresh.entries()]
    assert kept == [
        "step_000000000001",
        "step_000000000002",
        f"step_000000000002-{fresh.run_id[:8]}",
        "step_000000000003",
    ]


def test_resuming_continues_the_run_that_saved_last(tmp_path: Path) -> None:
    former = CheckpointManager(tmp_path)
    former.save(9, state_of(9))
    fresh = CheckpointManager(tmp_path)
    fresh.save(2, state_of(2))
    resumed = CheckpointManager(tmp_path)
    assert step_of(resumed.load_latest()) == 2
    assert resumed.run_id == fresh.run_id
    assert resumed.latest_path() == tmp_path / "step_000000000002"


def test_another_runs_checkpoint_is_no_substitute_for_a_damaged_one(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(9, state_of(9))
    damage(CheckpointManager(tmp_path).save(2, state_of(2)) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step_000000000002: model\.safetensors"):
        CheckpointManager(tmp_path).load_latest()


def test_without_latest_another_runs_checkpoint_is_no_substitute_either(tmp_path: Path, warned: list[str]) -> None:
    CheckpointManager(tmp_path, now=lambda: datetime(2026, 1, 1, tzinfo=UTC)).save(9, state_of(9))
    later = CheckpointManager(tmp_path, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
    damage(later.save(2, state_of(2)) / "model.safetensors")
    (tmp_path / "latest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_000000000002: model\.safetensors"):
        CheckpointManager(tmp_path, warn=warned.append).load_latest()


class UnreadableLatest(FileSystem):
    """A disk that fails for the moment where `latest.json` lies."""

    def open(self, path: Path) -> FileIO:
        if path.name == "latest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().open(path)


def test_a_latest_that_the_disk_refuses_is_an_error_and_no_other_run_is_loaded(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(9, state_of(9))
    CheckpointManager(tmp_path).save(2, state_of(2))
    with pytest.raises(CheckpointError, match=r"latest\.json cannot be read: Input/output error"):
        CheckpointManager(tmp_path, fs=UnreadableLatest()).load_latest()
    assert step_of(CheckpointManager(tmp_path).load_latest()) == 2


def test_a_named_run_whose_checkpoints_are_gone_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(9, state_of(9))
    shutil.rmtree(CheckpointManager(tmp_path).save(2, state_of(2)))
    with pytest.raises(CheckpointError, match=r"remove latest\.json"):
        CheckpointManager(tmp_path).load_latest()


def test_an_unreadable_leftover_of_another_run_is_not_warned_about(tmp_path: Path, warned: list[str]) -> None:
    CheckpointManager(tmp_path).save(9, state_of(9))
    fresh = CheckpointManager(tmp_path)
    (fresh.save(9, state_of(9)) / MANIFEST).unlink()
    last = CheckpointManager(tmp_path)
    last.save(2, state_of(2))
    assert step_of(CheckpointManager(tmp_path, warn=warned.append).load_latest()) == 2
    assert warned == []


def test_run_ids_do_not_come_from_the_seeded_generators() -> None:
    ids = set()
    for _ in range(2):
        torch.manual_seed(0)
        ids.add(CheckpointManager("unused").run_id)
    assert len(ids) == 2


# --- looking and copying ---


def test_verify_reads_everything(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, state_of(1))
    assert manager.verify(path).step == 1
    damage(path / "state.safetensors")
    assert manager.entries()[0].problem is None
    with pytest.raises(CheckpointError, match=r"state\.safetensors is damaged"):
        manager.verify(path)
    (path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        manager.verify(path)


def test_entries_tell_step_size_run_and_problem(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    os.truncate(path / "model.safetensors", 10)
    bad, good = manager.entries()
    assert (good.step, good.run_id, good.problem) == (2, manager.run_id, None)
    assert good.size == sum(file.stat().st_size for file in good.path.iterdir())
    assert bad.problem is not None
    assert bad.problem.startswith("model.safetensors has 10 bytes instead of")
    assert manager.latest_path() == good.path


def test_latest_path_passes_over_what_is_cut(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1))
    (manager.save(2, state_of(2)) / "state.json").unlink()
    assert manager.latest_path() == tmp_path / "step_000000000001"


def test_a_copy_is_loaded_by_a_manager_of_its_folder(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "a")
    manager.save(1, state_of(1))
    manager.save(2, state_of(2))
    damage(tmp_path / "a" / "step_000000000002" / "model.safetensors")
    fresh = CheckpointManager(tmp_path / "a")
    assert fresh.copy_to(tmp_path / "b" / "c") == tmp_path / "b" / "c" / "step_000000000001"
    other = CheckpointManager(tmp_path / "b" / "c")
    assert step_of(other.load_latest()) == 1
    assert other.run_id == manager.run_id
    assert fresh.copy_to(tmp_path / "b" / "c") == tmp_path / "b" / "c" / "step_000000000001"


def test_nothing_to_copy_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no sound checkpoint to copy"):
        CheckpointManager(tmp_path).copy_to(tmp_path / "b")


# --- a reader while a run saves ---


class Overtaken(FileSystem):
    """A file system on which a run saves again, and removes what was there, just before a file is read."""

    def __init__(self, folder: Path, before: str, saves: int = 1) -> None:
        self.writer = CheckpointManager(folder, keep_last=1)
        self.step = 1
        self.writer.save(self.step, state_of(self.step))
        self.before = before
        self.saves = saves

    def open(self, path: Path) -> FileIO:
        if path.name == self.before and self.saves:
            self.saves -= 1
            self.step += 1
            self.writer.save(self.step, state_of(self.step))
        return super().open(path)


EACH_FILE = pytest.mark.parametrize("name", [*FILES, MANIFEST, "latest.json"])


@EACH_FILE
@pytest.mark.parametrize("saves", [1, 2, 7])
def test_a_reader_beside_a_run_finds_its_newest_checkpoint(
    tmp_path: Path, warned: list[str], name: str, saves: int
) -> None:
    fs = Overtaken(tmp_path, name, saves)
    reader = CheckpointManager(tmp_path, fs=fs, warn=warned.append)

    assert step_of(reader.load_latest()) == fs.step == 1 + saves
    assert reader.loaded_path == tmp_path / f"step_{1 + saves:012d}"
    assert warned == []


@EACH_FILE
def test_every_way_to_look_finds_what_is_there(tmp_path: Path, name: str) -> None:
    def reader(part: str) -> CheckpointManager:
        return CheckpointManager(tmp_path / part, fs=Overtaken(tmp_path / part, name))

    def newest_or_first(path: Path | None) -> bool:
        return path is not None and path.name in ("step_000000000001", "step_000000000002")

    assert newest_or_first(reader("verified").verified_path())
    assert newest_or_first(reader("latest").latest_path())
    assert len(reader("entries").entries()) == 1
    assert newest_or_first(reader("copied").copy_to(tmp_path / "copy"))
    assert step_of(CheckpointManager(tmp_path / "copy").load_latest()) in (1, 2)


def test_what_is_done_with_the_newest_is_done_again_if_a_run_removes_it(tmp_path: Path) -> None:
    writer = CheckpointManager(tmp_path, keep_last=1)
    writer.save(1, state_of(1))
    used = []

    def use(path: Path) -> str:
        used.append(path.name)
        if len(used) == 1:
            writer.save(2, state_of(2))
        CheckpointManager(tmp_path).verify(path)
        return path.name

    assert CheckpointManager(tmp_path).use_newest(use) == "step_000000000002"
    assert used == ["step_000000000001", "step_000000000002"]


def test_an_error_of_what_is_done_with_the_newest_is_not_tried_again(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, state_of(1))
    used = []

    def use(path: Path) -> None:
        used.append(path)
        raise CheckpointError("not for this model")

    with pytest.raises(CheckpointError, match="not for this model"):
        CheckpointManager(tmp_path).use_newest(use)
    assert len(used) == 1
    assert CheckpointManager(tmp_path / "none").use_newest(use) is None


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, warned: list[str]) -> None:
    class Replaced(Overtaken):
        def open(self, path: Path) -> FileIO:
            if path.name == self.before and self.saves:
                self.saves -= 1
                self.writer.save(1, {**state_of(1), "note": "replaced"})
            return super(Overtaken, self).open(path)

    fs = Replaced(tmp_path, FILES[0])
    loaded = CheckpointManager(tmp_path, fs=fs, warn=warned.append).load_latest()
    assert loaded is not None
    assert loaded["note"] == "replaced"
    assert warned == []


def test_a_run_that_is_faster_than_every_reader_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"before it can be read; raise its checkpoint\.keep_last"):
        CheckpointManager(tmp_path, fs=Overtaken(tmp_path, FILES[0], saves=10**9)).load_latest()


def test_the_first_save_of_a_run_is_not_taken_for_damage(tmp_path: Path, warned: list[str]) -> None:
    class BeforeLatest(FileSystem):
        """Finds no `latest.json` the first time, as a reader does that looks before it is written."""

        looked = False

        def open(self, path: Path) -> FileIO:
            if path.name == "latest.json" and not self.looked:
                self.looked = True
                raise FileNotFoundError(path)
            return super().open(path)

    CheckpointManager(tmp_path).save(1, state_of(1))
    assert step_of(CheckpointManager(tmp_path, fs=BeforeLatest(), warn=warned.append).load_latest()) == 1
    assert warned == []


def test_the_best_is_the_best_by_the_number_that_the_newest_was_measured_by(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.keep_best = 2
    for step, value in ((1, 0.5), (2, 0.9), (3, 0.7), (4, math.nan), (5, 0.6)):
        manager.save(step, scored(step, value))
    assert steps_left(manager) == [2, 3, 5]
    assert manager.best_path().name == "step_000000000002"
    # Another number cannot be compared with that one, nor with the loss.
    manager.save(6, scored(6, 8.0, "words", "min"))
    assert manager.best_path().name == "step_000000000006"
    manager.save(7, scored(7, math.nan, "words", "min"))
    assert manager.best_path().name == "step_000000000006"
    manager.save(8, state_of(8, eval_loss=99.0))
    assert manager.best_path().name == "step_000000000008"
