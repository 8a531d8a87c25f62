"""Reads the numbers of finished updates back from the device, without making the loop wait for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Update:
    """One finished update: what the host knows, and what is still on the device.

    Attributes:
        step: cumulative global step after the update.
        lr: learning rate of the first parameter group after the scheduler advanced.
        lr_applied: the one that produced this update.
        samples: samples of this update.
        tokens: tokens of this update; a 0-dim tensor where a mask was summed.
        micro_batches: micro batches of this update.
        loss, grad_norm, bad: 0-dim tensors; `bad` is 1.0 where the update was not applied.
        at: host clock in seconds. On CUDA it is when the device was done, once the numbers were read.
        losses: those of several optimizers, by their names; empty where there is one.
    """

    step: int
    lr: float
    lr_applied: float
    samples: int
    tokens: int | Tensor
    micro_batches: int
    loss: Tensor
    grad_norm: Tensor
    bad: Tensor
    at: float
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an update after they were read from the device."""

    update: Update
    loss: float
    grad_norm: float
    bad: bool
    tokens: int


class Readback:
    """Collects updates and reads them back one window at a time.

    A window closes every `every` steps. On CUDA the copy of its numbers to the host is then queued behind the work that
    produces them. They are returned as soon as they have arrived, at the latest when the next window closes. On the CPU
    they are returned at once.

    The host runs ahead of a card by as much as a window. So the times of a window there are those of the card: of its
    end, and in even steps before it.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self._device = device
        self._every = every
        self._clock = _CardClock(device) if device.type == "cuda" else None
        self._open: list[Update] = []
        self._copying: list[_Window] = []

    def add(self, update: Update) -> list[Numbers]:
        """Add an update; return those whose numbers have arrived, oldest first."""
        self._open.append(update)
        if update.step % self._every == 0:
            # The windows before this one are a whole window old, so they have most likely arrived.
            overdue = self._take(self._copying)
            self._close_window()
            return overdue + self._take_arrived()
        return self._take_arrived()

    def drain(self) -> list[Numbers]:
        """Wait for everything that was added and return it, oldest first."""
        self._close_window()
        return self._take(self._copying)

    def _close_window(self) -> None:
        if self._open:
            self._copying.append(_Window(self._open, self._device, self._clock))
            self._open = []

    def _take_arrived(self) -> list[Numbers]:
        return self._take([window for window in self._copying if window.arrived()])

    def _take(self, windows: list[_Window]) -> list[Numbers]:
        self._copying = [window for window in self._copying if window not in windows]
        return [numbers for window in windows for numbers in window.read()]


class _Window:
    """The device's numbers of some updates, stacked into one tensor whose copy to the host has started.

    Those of a CPU are on the host already, and are read one by one.
    """

    def __init__(self, updates: list[Update], device: torch.device, clock: _CardClock | None) -> None:
        self._updates = updates
        self._clock = clock
        self._event: Any = None
        self._on_host = device.type == "cpu"
        if self._on_host:
            return
        # MPS has no float64; elsewhere a float64 model's loss arrives as it was.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # One stack and one copy for the whole window. Masked token counts are int64, so they get a tensor of their own.
        rows = torch.stack([n.to(dtype) for u in updates for n in (u.loss, u.grad_norm, u.bad)]).view(-1, 3)
        masked = [u.tokens for u in updates if isinstance(u.tokens, Tensor)]
        tokens = torch.stack(masked) if masked else None
        if device.type == "cuda":
            self._rows, self._tokens = _to_pinned(rows), _to_pinned(tokens)
            self._event = _event_of_now(device)
        else:
            self._rows, self._tokens = rows, tokens

    def arrived(self) -> bool:
        if self._event is not None:
            return bool(self._event.query())
        return self._on_host

    def read(self) -> list[Numbers]:
        if self._on_host:
            return [
                Numbers(
                    update=update,
                    loss=_number(update.loss),
                    grad_norm=_number(update.grad_norm),
                    bad=bool(_number(update.bad)),
                    tokens=_number(update.tokens) if isinstance(update.tokens, Tensor) else update.tokens,
                )
                for update in self._updates
            ]
        if self._event is not None:
            self._event.synchronize()
            assert self._clock is not None
            self._updates = self._clock.corrected(self._updates, self._event)
        assert self._rows is not None
        masked = iter(self._tokens.tolist() if self._tokens is not None else [])
        return [
            Numbers(
                update=update,
                loss=loss,
                grad_norm=norm,
                bad=bool(bad),
                tokens=next(masked) if isinstance(update.tokens, Tensor) else update.tokens,
            )
            for update, (loss, norm, bad) in zip(self._updates, self._rows.tolist(), strict=True)
        ]


class _CardClock:
    """Tells when a card was done with updates, in seconds of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._began = _event_of_now(device)
        self._began.synchronize()
        self._origin = self._last = time.perf_counter()

    def corrected(self, updates: Sequence[Update], end: Any) -> list[Update]:
        """The updates of a window with the card's times. `end` is the event behind the last one, which has happened."""
        done = self._origin + 1e-3 * self._began.elapsed_time(end)
        # The card cannot have begun before the host had queued the first one, as after an evaluation.
        began = min(done, max(self._last, updates[0].at))
        self._last = done
        share = (done - began) / len(updates)
        return [replace(update, at=began + share * number) for number, update in enumerate(updates, start=1)]


def _event_of_now(device: torch.device) -> Any:
    """An event behind all that is queued on a card, whichever is the current one.

    On the stream of another card it would be over at once, and the host would read memory that no copy has filled yet.
    """
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _number(value: Tensor) -> Any:
    """The number in a 0-dim tensor on the host. Unlike `item`, no trace shows this as a wait for a device."""
    return value.tolist()


def _to_pinned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
