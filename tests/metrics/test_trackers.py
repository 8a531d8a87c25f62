"""The numbers that trackers get, and the hook around one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.errors import MissingExtraError
from speedtronic.metrics import TensorboardHook, WandbHook
from speedtronic.metrics.trackers import Point, TrackerHook, point_of, require_tracker
from tests.support.cases import case
from tests.support.tracking import BEGAN


def test_a_point_has_the_finite_numbers_of_an_event() -> None:
    payload = {
        "step": 3,
        "loss": 2.5,
        "samples": 8,
        "nan": float("nan"),
        "inf": -float("inf"),
        "none": None,
        "flag": True,
        "text": "2.5",
        "list": [1.0],
        "sets": {"a": {"loss": 1.5, "name": "x"}, "b": 2},
        "elapsed_s": 9.0,
        "run_id": "ab",
    }
    shared = {"loss": 2.5, "samples": 8.0, "sets/a/loss": 1.5, "sets/b": 2.0}
    for event, group in (("train_step", "train"), ("eval", "eval"), ("mine", "mine")):
        with case(event):
            numbers = {f"{group}/{key}": value for key, value in shared.items()}
            assert point_of(event, payload, BEGAN) == Point(event, 3, numbers, BEGAN)


def test_what_has_no_place_on_a_curve_is_no_point() -> None:
    for event, payload in (
        ("train_start", {"step": 0, "parameters": 9}),
        ("train_end", {"step": 9, "final_loss": 1.0}),
        ("interrupted", {"step": 9, "signal": "SIGTERM"}),
        ("checkpoint", {"step": 9, "path": "x"}),
        ("log", {"level": "INFO", "message": "x"}),
        ("mine", {"loss": 1.0}),
        ("mine", {"step": None, "loss": 1.0}),
        ("mine", {"step": 2.5, "loss": 1.0}),
    ):
        with case(event, payload):
            assert point_of(event, payload, BEGAN) is None


class Keeping:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, point: Point) -> None:
        self.calls.append((point.event, point.step, dict(point.numbers)))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def test_a_hook_opens_its_tracker_at_the_first_number_and_again_after_it_was_closed() -> None:
    opened: list[Keeping] = []

    def open_tracker() -> Keeping:
        opened.append(Keeping())
        return opened[-1]

    hook = TrackerHook(open_tracker)
    hook.on_event("train_start", {"step": 0, "target_steps": 2})
    hook.on_event("train_end", {"step": 0})
    hook.close()
    assert opened == []
    hook.on_event("train_step", {"step": torch.tensor(1), "loss": torch.tensor(2.5)})
    hook.on_event("train_end", {"step": 1})
    hook.close()
    hook.on_event("eval", {"step": 1, "loss": 1.5})
    assert [keeping.calls for keeping in opened] == [
        [("train_step", 1, {"train/loss": 2.5}), "flush", "flush", "close"],
        [("eval", 1, {"eval/loss": 1.5})],
    ]


def test_a_hook_whose_package_is_not_installed_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtronic.metrics.trackers.find_spec", lambda package: None)
    for hook, extra in ((WandbHook, "wandb"), (TensorboardHook, "tensorboard")):
        with pytest.raises(MissingExtraError, match=rf"install speedtronic\[{extra}\]"):
            hook()


def test_a_folder_with_the_name_of_a_tracker_is_not_taken_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError):
        require_tracker("no_such_tracker")
