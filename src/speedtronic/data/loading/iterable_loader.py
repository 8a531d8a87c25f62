"""The loader of an `IterableDataset`: each item once, whatever the number of workers and ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset, get_worker_info

from speedtronic.data.loading.collate import collate_batch
from speedtronic.data.loading.loader import Collate, Fingerprinted
from speedtronic.data.loading.sampler import Deal, derive_seed
from speedtronic.data.loading.workers import Fetcher, OwnGenerators, blame, seed_generators, type_name
from speedtronic.errors import DataError

_log = logging.getLogger(__name__)

_DIVIDED_OTHERWISE = (
    "; the epoch is divided otherwise than before, so until it ends some items may come twice and others not at all"
)


@runtime_checkable
class StatefulStream(Protocol):
    """A dataset that knows its own position."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last item that was taken, as a tree that a checkpoint can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `iter` continue at a saved position."""


@runtime_checkable
class EpochAware(Protocol):
    """A dataset whose order depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Told the epoch before each pass."""


@dataclass(frozen=True)
class _BatchKey:
    """Batch `number` of this rank in a pass; `run` tells the passes of one loader apart."""

    run: int
    epoch: int
    number: int
    wanted: bool


@dataclass(frozen=True)
class _End:
    """No batch is left: in the whole stream, or in the part that one worker reads."""

    worker: int | None


class StreamLoader:
    """Batches of an iterable dataset, with a position that can be saved and restored.

    `iter(loader)` continues at the loader's position and ends with the epoch, that is where the dataset's
    iterator ends. Items come in the dataset's order and each once, with workers and ranks too:

    - A dataset that *shards itself* is known by what it does: by the time its first item comes it has asked
      `torch.utils.data.get_worker_info()` for `id` or `num_workers`. There it sees all workers of all ranks, and
      what it gives in each worker is batched there; the workers' batches alternate.
    - Any other is read from its beginning by every worker, which keeps the batches that are its own to make. The
      order is that without workers. This saves the cost of collating alone: a dataset whose items are expensive
      should shard itself.

    Ranks share a stream as they do a map-style dataset (see `TokenLoader`).

    The dataset runs with Python's, NumPy's and torch's CPU generators seeded from (seed, epoch), and from (seed,
    epoch, worker) once it has asked which worker it is in; the process's own states of them are neither drawn from nor
    changed. What it draws so differs between items and between epochs, and repeats with the seed. A generator of
    its own must be seeded alike in all workers, unless it shards itself. A dataset with `set_epoch` is told
    the epoch.

    On resume, a dataset with `state_dict` and `load_state_dict` continues at its own position when there are no
    workers. Any other is read again up to the batch, with a warning. It is recognised by its `fingerprint` if it has
    one, otherwise by its type.

    Args:
        dataset: an `IterableDataset`, or anything whose every `iter` begins anew; must pickle unless workers
            are forked.
        batch_size: B, items per batch (the micro batch).
        seed: of the random numbers that the dataset draws.
        drop_last: leave out a batch at the end of an epoch that is not full; of a dataset that shards itself, in
            each worker; with ranks, a round.
        num_workers, prefetch_factor, pin_memory, collate, multiprocessing_context, rank, world_size: as for
            `TokenLoader`.

    Raises:
        DataError: an iterator, which can be read only once; while iterating, an epoch without a batch, an item or
            batch that cannot be made, a dataset that asks for its worker too late, or one that cannot be sent to a
            worker.
        SpeedtronicError: while iterating, a worker process has ended.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        collate: Collate = collate_batch,
        multiprocessing_context: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if isinstance(dataset, Iterator):
            raise DataError(
                f"{type_name(dataset)} is an iterator, which can be read only once; give a dataset whose __iter__ "
                f"begins anew for each epoch"
            )
        self.dataset = dataset
        self.fingerprint = dataset.fingerprint if isinstance(dataset, Fingerprinted) else type_name(dataset)
        self._seed = seed
        self._deal = Deal(batch_size, rank, world_size, drop_last)
        self._position = _Position(num_workers)
        self._ended: set[int | None] = set()
        self._delivered = False
        self._shards_itself = False
        self._batches = _Batches(dataset, self._deal, collate, seed)
        self._fetcher = Fetcher(
            self._batches,
            self._position,
            name=type_name(dataset),
            seed=derive_seed(seed),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context,
        )

    @property
    def batch_size(self) -> int:
        """Items per batch."""
        return self._deal.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position.epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self.epoch == epoch:
            reply = self._fetcher.next()
            if isinstance(reply, _End):
                self._take_end(reply)
            elif reply is not None:
                batch, self._shards_itself = reply
                self._position.number += 1
                self._delivered = True
                yield batch

    def _take_end(self, end: _End) -> None:
        self._position.number += 1
        self._ended.add(end.worker)
        if end.worker is not None and len(self._ended) < self._position.workers:
            return
        if not self._delivered:
            raise DataError(
                f"epoch {self.epoch} of {type_name(self.dataset)} has no batch: the dataset gives nothing, less than a "
                f"batch with drop_last, or its __iter__ does not begin anew"
            )
        self._seek(self.epoch + 1, 0)

    def restart(self) -> None:
        """Go back to the first batch of the first epoch, so that every evaluation sees the same batches."""
        if (self.epoch, self._position.number) != (0, 0):
            self._seek(0, 0)

    def _seek(self, epoch: int, number: int, position: Mapping[str, Any] | None = None) -> None:
        self._position.epoch, self._position.number = epoch, number
        self._ended = set()
        self._delivered = number > 0
        self._batches.start_at(position)
        self._fetcher.restart()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch, and what the data and their division into batches are."""
        return {
            "epoch": self.epoch,
            "batches": self._position.number,
            "position": self._batches.position() if self._position.number else None,
            "batch_size": self._deal.batch_size,
            "world_size": self._deal.world_size,
            "num_workers": self._position.workers,
            "shards_itself": self._shards_itself,
            "seed": self._seed,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Taken with a warning are a changed seed, and a number of workers, ranks or items in a batch that divides the
        epoch otherwise.

        Raises:
            DataError: the state comes from other data.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data is not that of the checkpoint: {self.fingerprint} now, {state['fingerprint']} then; give "
                f"back the same dataset, or start a new run"
            )
        if state["seed"] != self._seed:
            _log.warning("the random numbers that the dataset draws have changed (data.seed)")
        self._shards_itself = bool(state["shards_itself"])
        epoch, items = int(state["epoch"]), int(state["batches"] * state["batch_size"] * state["world_size"])
        number, rest = divmod(items, self._deal.round_size)
        knows_its_position = isinstance(self.dataset, StatefulStream)
        position = state["position"] if knows_its_position and not self._position.workers else None
        if items and position is None:
            _log.warning(
                "%s %s: reading the first %d batches of epoch %d again to continue after them%s",
                type_name(self.dataset),
                "cannot continue at its own position" if knows_its_position else "keeps no position of its own",
                number,
                epoch,
                "" if rest == 0 and self._reads_as(state) else _DIVIDED_OTHERWISE,
            )
        self._seek(epoch, number, position)

    def _reads_as(self, state: Mapping[str, Any]) -> bool:
        """Whether each worker reads what it read when `state` was saved."""
        then = (state["num_workers"], state["world_size"])
        return not self._shards_itself or then == (self._position.workers, self._deal.world_size)

    def close(self) -> None:
        """End the worker processes. Iterating again starts new ones."""
        self._fetcher.close()


class _Position:
    """Which batch comes next; each `iter`, by the library, begins at the position of that moment."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.epoch = 0
        self.number = 0
        self._run = 0

    def __iter__(self) -> Iterator[_BatchKey]:
        self._run += 1
        run, epoch, start = self._run, self.epoch, self.number
        # Key 0 goes to worker 0, who must then be asked for a batch of its own.
        for number in count(start - start % max(1, self.workers)):
            yield _BatchKey(run, epoch, number, wanted=number >= start)


class _Batches(Dataset[Any]):
    """A dataset whose items are batches of a stream. A process must ask for those of one run in their order."""

    def __init__(self, dataset: Iterable[Any], deal: Deal, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._deal = deal
        self._collate = collate
        self._seed = seed
        self._start: Mapping[str, Any] | None = None
        self._pass: _Pass | None = None
        self._watch: _WorkerWatch | None = None

    def start_at(self, position: Mapping[str, Any] | None) -> None:
        """Begin passes in this process at what `position` gave, or with None at the dataset's beginning."""
        self._start = position
        self._pass = None

    def position(self) -> Mapping[str, Any] | None:
        """Where the pass of this process is; None where workers read, or the dataset cannot say."""
        return self._start if self._pass is None else self._pass.position()

    def __getitem__(self, key: _BatchKey) -> tuple[Any, bool] | _End | None:
        if not key.wanted:
            return None
        if self._pass is None or self._pass.run != key.run:
            if self._watch is None and get_worker_info() is not None:
                self._watch = _WorkerWatch(self._dataset, self._deal)
            self._pass = _Pass(self._dataset, self._deal, self._seed, key, self._watch, self._start)
        try:
            items = self._pass.take(key.number)
        except BaseException:
            # The dataset is somewhere within a batch, where no position is saved.
            self._pass = None
            raise
        if not items:
            return self._pass.end
        try:
            return self._collate(items), self._pass.shards_itself
        except Exception as error:  # noqa: BLE001 - a collate function of the user's may raise anything
            raise blame(f"batch {key.number} of {type_name(self._dataset)}", error) from error


class _WorkerWatch:
    """Shows a dataset in a worker the workers of all ranks as its fellows, and notices when it asks for them."""

    def __init__(self, dataset: Iterable[Any], deal: Deal) -> None:
        info = get_worker_info()
        assert info is not None
        self.worker, self.workers = info.id, info.num_workers
        self.shard, self.shards = deal.rank * info.num_workers + info.id, deal.world_size * info.num_workers
        self._when_asked: Callable[[], None] | None = None
        watch = self

        class Watched(type(info)):  # type: ignore[misc]
            __slots__ = ()

            def __getattribute__(self, name: str) -> Any:
                match name:
                    case "id":
                        return watch.answer(watch.shard)
                    case "num_workers":
                        return watch.answer(watch.shards)
                    case "dataset":
                        return dataset
                return super().__getattribute__(name)

        # The dataset comes to this object by `get_worker_info`, which it may have imported from anywhere.
        object.__setattr__(info, "__class__", Watched)

    def answer(self, number: int) -> int:
        if self._when_asked is not None:
            self._when_asked()
        return number

    @contextmanager
    def listening(self, when_asked: Callable[[], None]) -> Iterator[None]:
        """Call `when_asked` at each question."""
        self._when_asked = when_asked
        try:
            yield
        finally:
            self._when_asked = None


class _Pass:
    """One reading of the dataset in one process."""

    def __init__(
        self,
        dataset: Iterable[Any],
        deal: Deal,
        seed: int,
        key: _BatchKey,
        watch: _WorkerWatch | None,
        start: Mapping[str, Any] | None,
    ) -> None:
        self.run = key.run
        self.shards_itself = False
        self._dataset = dataset
        self._deal = deal
        self._seed = seed
        self._epoch = key.epoch
        self._watch = watch
        self._asked = False
        self._items: Iterator[Any] | None = None
        self._start = start
        self._taken = 0 if start is None else int(start["items"])
        self._generators = OwnGenerators(derive_seed(seed, key.epoch) if start is None else start["generators"])

    def position(self) -> Mapping[str, Any] | None:
        """Where the dataset and its generators are, after how many items; None when the dataset cannot say."""
        if not isinstance(self._dataset, StatefulStream):
            return None
        return {"dataset": self._dataset.state_dict(), "generators": self._generators.states, "items": self._taken}

    @property
    def end(self) -> _End:
        """What is to be said when no batch is left."""
        return _End(self._watch.worker if self._watch is not None and self.shards_itself else None)

    def take(self, number: int) -> list[Any]:
        """The items of batch `number`, which must come after those taken before; none when it does not exist."""
        listening = nullcontext() if self._watch is None else self._watch.listening(self._note_question)
        with self._generators.in_use(), listening:
            if self._items is None:
                self._items = self._opened()
            items = self._share(self._items, number)
        if self._asked and not self.shards_itself and self._watch is not None and self._watch.shards > 1:
            raise DataError(
                f"{type_name(self._dataset)} asked which worker it is in after its first item had come, too late to "
                f"shard itself; call get_worker_info() at the beginning of __iter__"
            )
        return items

    def _note_question(self) -> None:
        assert self._watch is not None
        if not self._asked and self._watch.shards > 1:
            seed_generators(derive_seed(self._seed, self._epoch, self._watch.shard))
        self._asked = True

    def _opened(self) -> Iterator[Any]:
        items = self._read()
        if self._watch is None:
            return items
        # What it has asked when its first item comes decides.
        first = list(islice(items, 1))
        self.shards_itself = self._asked
        if self.shards_itself:
            self._deal = replace(self._deal, rank=0, world_size=1)
        return chain(first, items)

    def _read(self) -> Iterator[Any]:
        number = self._taken
        try:
            if isinstance(self._dataset, EpochAware):
                self._dataset.set_epoch(self._epoch)
            if self._start is not None and isinstance(self._dataset, StatefulStream):
                self._dataset.load_state_dict(self._start["dataset"])
            for item in self._dataset:
                yield item
                number += 1
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - a dataset of the user's may raise anything
            raise blame(f"item {number} of {type_name(self._dataset)}", error) from error

    def _share(self, items: Iterator[Any], number: int) -> list[Any]:
        if self._watch is not None and self.shards_itself:
            number //= self._watch.workers
        skipped = max(0, number * self._deal.round_size - self._taken)
        for _ in islice(items, skipped):
            pass
        taken = list(islice(items, self._deal.round_size))
        self._taken += skipped + len(taken)
        share = self._deal.share(len(taken))
        return taken[share.start : share.stop]
