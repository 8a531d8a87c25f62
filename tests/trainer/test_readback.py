"""Numbers of updates come to the host in windows, complete and in order."""

from __future__ import annotations

import pytest
import torch

from speedtronic.trainer import readback as module
from speedtronic.trainer.readback import Numbers, Readback, Update
from tests.support.cuda import RecordedCuda


def update(step: int, tokens: int | torch.Tensor = 8, at: float = 0.0) -> Update:
    return Update(
        step=step,
        lr=0.1,
        lr_applied=0.2,
        samples=2,
        tokens=tokens,
        micro_batches=1,
        loss=torch.tensor(float(step)),
        grad_norm=torch.tensor(step * 10.0),
        bad=torch.tensor(float(step == 2)),
        at=at,
    )


def facts(numbers: list[Numbers]) -> list[tuple[int, float, float, bool, int]]:
    return [(n.update.step, n.loss, n.grad_norm, n.bad, n.tokens) for n in numbers]


def test_every_step_comes_back_at_once_on_the_cpu() -> None:
    readback = Readback(torch.device("cpu"), every=1)
    assert facts(readback.add(update(1))) == [(1, 1.0, 10.0, False, 8)]
    assert facts(readback.add(update(2))) == [(2, 2.0, 20.0, True, 8)]
    assert readback.drain() == []


def test_a_window_comes_back_when_its_last_step_is_a_multiple() -> None:
    readback = Readback(torch.device("cpu"), every=3)
    assert readback.add(update(1)) == readback.add(update(2)) == []
    assert [n.update.step for n in readback.add(update(3))] == [1, 2, 3]


def test_drain_returns_the_open_window_once() -> None:
    readback = Readback(torch.device("cpu"), every=10)
    readback.add(update(1))
    readback.add(update(2))
    assert [n.update.step for n in readback.drain()] == [1, 2]
    assert readback.drain() == []


def test_masked_token_counts_are_read_from_their_tensors() -> None:
    readback = Readback(torch.device("cpu"), every=3)
    readback.add(update(1, tokens=torch.tensor(5)))
    readback.add(update(2))
    assert [n.tokens for n in readback.add(update(3, tokens=torch.tensor(7)))] == [5, 8, 7]


def test_float64_losses_keep_their_precision() -> None:
    readback = Readback(torch.device("cpu"), every=1)
    exact = 1.0 + 2.0**-40
    entry = update(1)
    object.__setattr__(entry, "loss", torch.tensor(exact, dtype=torch.float64))
    assert readback.add(entry)[0].loss == exact


def test_the_event_is_on_the_stream_of_the_card_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another card's stream it would be over before the copy has begun, and the host would read zeros."""
    cuda = RecordedCuda(monkeypatch)
    monkeypatch.setattr(module, "_to_pinned", lambda tensor: tensor)  # page-locked memory needs a card
    readback = Readback(torch.device("cuda:1"), every=1)
    assert facts(readback.add(update(1))) == [(1, 1.0, 10.0, False, 8)]
    assert ("record", "stream of card 1") in cuda.calls
    assert ("record", "stream of card 0") not in cuda.calls


def test_on_a_card_the_times_are_those_of_the_card_and_not_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host queues a window of two updates in 0.02 s, and the card needs a second for each."""
    cuda = RecordedCuda(monkeypatch)
    monkeypatch.setattr(module, "_to_pinned", lambda tensor: tensor)
    monkeypatch.setattr(module.time, "perf_counter", lambda: 100.0)
    readback = Readback(torch.device("cuda:1"), every=2)
    times: list[float] = []

    def add(step: int, at: float, milliseconds: float) -> None:
        cuda.milliseconds = milliseconds
        times.extend(n.update.at for n in readback.add(update(step, at=at)))

    add(1, at=100.0, milliseconds=0.0)
    add(2, at=100.02, milliseconds=2000.0)
    add(3, at=100.03, milliseconds=2000.0)
    add(4, at=102.1, milliseconds=4000.0)
    assert times == pytest.approx([101.0, 102.0, 103.0, 104.0])
    # An evaluation of 10 s: the card did nothing of the next window before the host had queued it.
    add(5, at=114.0, milliseconds=4000.0)
    add(6, at=114.01, milliseconds=16000.0)
    assert times[4:] == pytest.approx([115.0, 116.0])
