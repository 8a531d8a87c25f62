"""The loops that are compared do the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtronic.bench.figures import Settings
from speedtronic.bench.loops import SIZES, by_fit, by_hand, measure, metrics_memory

QUICK = SIZES["quick"]


def losses(file: Path) -> list[float]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line.get("event", "train_step") == "train_step"]


def test_fit_and_the_loop_by_hand_log_the_same_losses(tmp_path: Path) -> None:
    with (tmp_path / "hand.jsonl").open("w", encoding="utf-8") as log:
        assert by_hand(QUICK, log=log)(3) > 0
    assert by_fit(QUICK, tmp_path, fused=False, compiled=False)(3) > 0
    hand = losses(tmp_path / "hand.jsonl")
    assert len(hand) == 3
    assert losses(tmp_path / "fit.jsonl") == pytest.approx(hand, rel=1e-5)


def test_merged_micro_batches_train_as_single_ones_do(tmp_path: Path) -> None:
    found = []
    for merged in (False, True):
        file = tmp_path / f"{merged}.jsonl"
        with file.open("w", encoding="utf-8") as log:
            by_hand(QUICK, merged=merged, log=log)(3)
        found.append(losses(file))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_each_loop_keeps_the_threads_that_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [2]
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads[-1])
    seen: list[tuple[str, int]] = []

    def loop(name: str, chosen: int | None):  # type: ignore[no-untyped-def]
        if chosen is not None:
            threads.append(chosen)
        return lambda steps: seen.append((name, threads[-1])) or 1.0

    makers = {"one": lambda: loop("one", 1), "all": lambda: loop("all", None)}
    measure(QUICK, makers, Settings(rounds=1))
    assert seen[2:] == [("one", 1), ("all", 2)]
    assert threads[-1] == 2


@pytest.mark.slow
def test_the_metrics_of_a_step_take_less_than_a_record_would() -> None:
    (figure,) = metrics_memory(Settings(quick=True))
    assert 8 < figure.value < 490
