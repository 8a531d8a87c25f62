"""Cards that are not there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class RecordedCuda:
    """Stands in for `torch.cuda` on a machine without a card, and records what was asked of which card.

    Args:
        patch: takes the stand-in back after the test.
        cards: how many there are.
        bf16: the numbers of those that compute in bfloat16.

    Attributes:
        current: the number of the current card.
        milliseconds: what the clock of the cards shows; a test moves it on.
        calls: what was done, in order, and with which device.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, cards: int = 2, bf16: Collection[int] = ()) -> None:
        self.current = 0
        self.milliseconds = 0.0
        self.calls: list[tuple[str, Any]] = []
        self._bf16 = bf16
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: cards)
        patch.setattr(torch.cuda, "manual_seed_all", lambda seed: None)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: self.current in self._bf16)
        patch.setattr(torch.cuda, "set_device", self._set_device)
        patch.setattr(torch.cuda, "device", self._device)
        patch.setattr(torch.cuda, "current_stream", self._stream)
        patch.setattr(torch.cuda, "Event", lambda **options: RecordedEvent(self))

    def _number(self, device: Any) -> int:
        index = torch.device(device).index
        return self.current if index is None else index

    def _set_device(self, device: Any) -> None:
        self.current = self._number(device)
        self.calls.append(("set_device", self.current))

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, self._number(device)
        try:
            yield
        finally:
            self.current = before

    def _stream(self, device: Any = None) -> str:
        return f"stream of card {self.current if device is None else self._number(device)}"


class RecordedEvent:
    """An event that has happened already, at `RecordedCuda.milliseconds` of the card's clock."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self._cuda = cuda
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._cuda.calls.append(("record", self._cuda._stream() if stream is None else stream))
        self._at = self._cuda.milliseconds

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: RecordedEvent) -> float:
        return end._at - self._at


# ---------------------------------------------------------------- cards that are there

REHEARSAL = os.environ.get("SPEEDTRONIC_GPU_TESTS") == "cpu"
"""Whether tests for a card run on the CPU, so that they are known to be right before a card is there."""

DEVICE = "cpu" if REHEARSAL else "cuda"

HAS_CARD = torch.cuda.is_available() and not REHEARSAL

needs_card = pytest.mark.skipif(not HAS_CARD, reason="needs a CUDA device")
needs_card_or_rehearsal = pytest.mark.skipif(not (HAS_CARD or REHEARSAL), reason="needs a CUDA device")


@contextmanager
def nothing_synchronises() -> Iterator[None]:
    """An error where the host waits for the card. Does nothing without a card."""
    if not HAS_CARD:
        yield
        return
    _watch_synchronisation("error")
    try:
        yield
    finally:
        _watch_synchronisation("default")


def _watch_synchronisation(mode: str) -> None:
    with warnings.catch_warnings():
        # torch says each time that this is a prototype. As an error, that would leave the mode on for all that follows.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
