"""Endless batches over any loader, with a position that can be saved and restored exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from speedtronic.data.loading.epochs import epoch_aware_parts, epoch_aware_parts_of_loader, tell
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.loader import TokenLoader
from speedtronic.data.loading.streams import check_order, order_of, restores_exactly, streams_in
from speedtronic.data.loading.workers import type_name, worker_exits
from speedtronic.errors import DataError, warn

_END = object()


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that knows its own position."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `iter` continue at a saved position."""


@runtime_checkable
class SeekingLoader(StatefulLoader, Protocol):
    """A stateful loader that can also pass over batches without reading them."""

    def skip_batches(self, batches: int) -> None:
        """Move the position on by `batches`, also across the ends of epochs; the next `iter` continues there."""


def infinite_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches of `loader`, pass after pass. Raises DataError when a whole pass yields nothing."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise _empty_pass(loader)


def _empty_pass(loader: Iterable[Any]) -> DataError:
    if isinstance(loader, Iterator):
        return DataError(
            f"the data loader yielded no batch: it is an iterator ({type(loader).__name__}), which can be read only "
            f"once; give an object whose __iter__ starts over, or train for fewer steps"
        )
    return DataError(
        "a whole pass over the data loader yielded no batch: the data is empty or smaller than a batch, or its "
        "__iter__ does not start over"
    )


def _own_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a `DataLoader` or its samplers were given, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    given = [getattr(owner, "generator", None) for owner in owners]
    return list({id(found): found for found in given if isinstance(found, torch.Generator)}.values())


class BatchStream:
    """The endless source of batches for a training loop, resumable at any batch.

    A loader with `state_dict` and `load_state_dict` keeps its own position. For any other loader the stream counts
    batches and remembers the random number generators as they were at the start of the epoch: the global ones, and
    those that a `DataLoader` or its samplers were given. To resume, it starts the epoch again with them and drops the
    batches that were already used.

    So the order of the batches continues exactly, and so do the random numbers of this process. The random numbers in
    the workers of a user's loader continue only where they depend on the start of the epoch alone: not with
    `persistent_workers` after the first epoch, nor in an epoch in which a loader continued at its own position.

    A loader that iterates a stream whose state does not lead back to the same place (`restores_exactly`) is read again
    like one without a position. The loader, its samplers and its dataset are told each epoch if they have `set_epoch`.

    Args:
        loader: any iterable of batches.
        capture_rng: returns the state of all global random number generators, as a tree that a checkpoint can hold.
        restore_rng: restores such a state.
        warn: is called when an epoch has to be read again, and by one of our own loaders from now on.

    Raises:
        DataError: `loader` cannot be iterated.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        capture_rng: Callable[[], dict[str, Any]],
        restore_rng: Callable[[dict[str, Any]], None],
        warn: Callable[[str], None] = warn,
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise DataError(
                f"the data loader must be an iterable of batches, not {type(loader).__name__}; in place of a function "
                f"that yields batches, give an object whose __iter__ calls it"
            )
        self._loader = loader
        self._capture_rng = capture_rng
        self._restore_rng = restore_rng
        self._warn = warn
        # Our own loaders know which of their datasets to trust, and tell them the epoch, in their workers too. What
        # another loader says of its position is worth as much as what its dataset says.
        ours = isinstance(loader, TokenLoader | StreamLoader)
        if isinstance(loader, TokenLoader | StreamLoader):
            loader.warn = warn
        trusted = ours or restores_exactly(getattr(loader, "dataset", None))
        self._stateful = loader if isinstance(loader, StatefulLoader) and trusted else None
        self._epoch_aware = [] if ours else epoch_aware_parts_of_loader(loader)
        persistent = not ours and getattr(loader, "persistent_workers", False)
        inside = epoch_aware_parts(getattr(loader, "dataset", None)) if persistent else []
        self._unreached = [part for part in inside if not streams_in(part)]  # those share their epoch with the workers
        self._warned = False
        # Our own loaders handle workers that have exited, and say more.
        self._waiting = worker_exits.may_raise if isinstance(loader, DataLoader) else nullcontext
        self._batches: Iterator[Any] | None = None
        self._rng_at_start: dict[str, Any] | None = None
        self._own_at_start: list[Tensor] = []
        self._epoch = 0
        self._delivered = 0
        self._resumed: dict[str, Any] | None = None  # the state of the loader at which this pass was resumed
        self._peeked: Any = _END
        self._before_peek: dict[str, Any] = {}

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        """The next batch. Raises DataError when a whole pass over the loader yields nothing."""
        if self._peeked is not _END:
            batch, self._peeked = self._peeked, _END
            return batch
        while True:
            with self._waiting():
                if self._batches is None:
                    self._batches = self._start_pass()
                batch = next(self._batches, _END)
            if batch is not _END:
                self._delivered += 1
                return batch
            # The pass has ended. It may be empty only where a loader was restored at the very end of its epoch.
            if not self._delivered and self._resumed is None:
                raise _empty_pass(self._loader)
            self._batches = None
            self._epoch += 1
            self._delivered = 0
            self._resumed = None

    def peek(self) -> Any:
        """The batch that the next `next` returns. The position stays where it is."""
        if self._peeked is _END:
            self._before_peek = self.state_dict()
            self._peeked = next(self)
        return self._peeked

    def skip(self, batches: int) -> None:
        """Continue after the next `batches` batches; a loader that cannot seek has to read them."""
        if self._peeked is not _END and batches:
            next(self)
            batches -= 1
        if isinstance(self._loader, SeekingLoader):
            self._batches = None
            self._resumed = None
            self._loader.skip_batches(batches)
            return
        self._warn(f"the data loader cannot seek: reading {batches} batches to continue behind them")
        for _ in range(batches):
            next(self)

    def _start_pass(self) -> Iterator[Any]:
        self._tell_epoch()
        if self._resumed is not None:
            # On the way to its position a loader may draw again what it drew before the position was saved.
            now = self._capture_rng()
            batches = iter(self._loader)
            self._restore_rng(now)
            self._restore_own()
            return batches
        if self._stateful is None:
            self._rng_at_start = self._capture_rng()
            self._own_at_start = self._own_states()
        return iter(self._loader)

    def _tell_epoch(self) -> None:
        for part in self._epoch_aware:
            tell(part, self._epoch)
        if self._epoch and self._unreached and not self._warned:
            self._warned = True
            names = ", ".join(type_name(part) for part in self._unreached)
            self._warn(
                f"the workers of the data loader persist, so they keep their copies of {names}, which set_epoch "
                f"reaches in this process only; with persistent_workers=False each epoch has workers that know it"
            )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that `next` returned."""
        if self._peeked is not _END:
            return self._before_peek
        if self._stateful is not None:
            if self._resumed is not None and self._batches is None:
                return self._resumed
            return {"loader": self._stateful.state_dict(), "epoch": self._epoch, "generators": self._own_states()}
        return {
            "epoch": self._epoch,
            "order": order_of(getattr(self._loader, "dataset", None)),
            "batches": self._delivered,
            "batch_size": getattr(self._loader, "batch_size", None),
            "rng": self._rng_at_start,
            "generators": self._own_states() if self._batches is None else self._own_at_start,
        }

    def _own_states(self) -> list[Tensor]:
        return [generator.get_state() for generator in _own_generators(self._loader)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called.

        The global generators stay as they are. The loader's own generators are restored.

        Raises:
            DataError: the state was saved for another kind of loader, or the loader has become shorter.
        """
        if "loader" in state and isinstance(self._loader, StatefulLoader) and self._stateful is None:
            raise DataError(
                "the checkpoint holds a position that its data loader cannot restore: the shuffle buffer of its stream "
                "is not part of it; start a new run, from these weights with run.init_from if you like"
            )
        if (self._stateful is not None) != ("loader" in state):
            raise DataError(
                "the checkpoint's data position was saved for another kind of loader (one has its own state, the "
                "other has not); use the same kind again"
            )
        self._peeked = _END
        self._batches = None
        self._delivered = 0
        self._own_at_start = list(state.get("generators", ()))
        if self._stateful is not None:
            self._epoch = int(state.get("epoch", 0))
            self._restore_own()
            self._stateful.load_state_dict(state["loader"])
            self._resumed = dict(state)
            return
        self._epoch = int(state["epoch"])
        self._rng_at_start = state["rng"]
        if state["batches"]:
            check_order(getattr(self._loader, "dataset", None), state.get("order"))
            self._replay(self._in_batches_of_now(int(state["batches"]), state.get("batch_size")))
        else:
            self._restore_own()

    def _restore_own(self) -> None:
        generators = _own_generators(self._loader)
        if len(generators) != len(self._own_at_start):
            raise DataError(
                f"the data loader has {len(generators)} random generators of its own, but the checkpoint was saved "
                f"with {len(self._own_at_start)}: the order of its batches cannot continue; make the loader as it was "
                f"made then"
            )
        for generator, state in zip(generators, self._own_at_start, strict=True):
            generator.set_state(state)

    def _in_batches_of_now(self, batches: int, size: Any) -> int:
        """How many batches hold as many samples as so many of another size."""
        now = getattr(self._loader, "batch_size", None)
        if not isinstance(size, int) or not isinstance(now, int) or size == now:
            return batches
        whole, rest = divmod(batches * size, now)
        with suppress(TypeError):  # a stream has no length
            if whole >= len(self._loader):  # type: ignore[arg-type]
                whole, rest = len(self._loader), 0  # type: ignore[arg-type]  # the last batch was not full
        self._warn(
            f"the batch size of the data loader was {size} and is {now}: {batches} batches of then are {whole} of now"
            + (f", and {rest} samples come twice in this epoch" if rest else "")
        )
        return whole

    def _replay(self, batches: int) -> None:
        self._warn(
            f"the data loader keeps no position of its own: reading the first {batches} batches of epoch "
            f"{self._epoch} again to continue after them"
        )
        now = self._capture_rng()
        assert self._rng_at_start is not None
        self._tell_epoch()
        try:
            if self._epoch and getattr(self._loader, "persistent_workers", False):
                # Such a loader draws its workers' seed only in the first epoch: let it do so before the replay.
                iter(self._loader)
            # Start the epoch as it was started then, and drop what was delivered.
            self._restore_rng(self._rng_at_start)
            self._restore_own()
            self._batches = iter(self._loader)
            for number in range(batches):
                if next(self._batches, _END) is _END:
                    raise DataError(
                        f"the data loader ends after {number} batches, but the checkpoint was made after "
                        f"{batches} of the same epoch: the data has changed"
                    )
        finally:
            self._restore_rng(now)
        self._delivered = batches
