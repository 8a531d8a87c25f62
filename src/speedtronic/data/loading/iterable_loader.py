"""The loader of an `IterableDataset`: each item once, for any number of workers and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any, Protocol, cast, runtime_checkable

from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from speedtronic.data.loading.collate import collate_batch
from speedtronic.data.loading.epochs import epoch_aware_parts, tell
from speedtronic.data.loading.loader import Collate, Fingerprinted
from speedtronic.data.loading.sampler import GlobalBatch, derive_seed
from speedtronic.data.loading.streams import check_order, give_own_epoch, order_of, restores_exactly
from speedtronic.data.loading.workers import BatchMaker, Fetcher, OwnGenerators, blame, seed_generators, type_name
from speedtronic.errors import DataError, warn

_DIVIDED_DIFFERENTLY = (
    "; the epoch is divided differently than before, so until it ends some items may come twice and others not at all"
)


@runtime_checkable
class StatefulStream(Protocol):
    """A dataset that knows its own position."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the last item that was taken, as a tree that a checkpoint can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next `iter` continue at a saved position."""


@dataclass(frozen=True)
class _BatchRequest:
    """Asks for batch `number` of this rank. `run` tells apart the iterations of one loader over its requests.

    The batches begin `offset` items after the beginning of the epoch.
    """

    run: int
    epoch: int
    number: int
    wanted: bool
    offset: int = 0


@dataclass(frozen=True)
class _EndOfStream:
    """No batch is left: in the whole stream, or in the part that one worker reads."""

    worker: int | None


class StreamLoader:
    """Batches of an iterable dataset, with a position that can be saved and restored.

    `iter(loader)` continues at the loader's position and ends with the epoch, that is where the dataset's
    iterator ends. Items come in the dataset's order and each once, with workers and ranks too:

    - A dataset that *shards itself* is recognised by its behaviour: before its first item it reads `id` or
      `num_workers` of `torch.utils.data.get_worker_info()`. There it sees the workers of all ranks. Its items are
      batched in the worker that reads them, and the workers' batches alternate.
    - Every worker reads any other dataset from the beginning and keeps the batches that it has to make. The order is
      the same as without workers. This saves only the cost of collating: a dataset with expensive items should shard
      itself.

    Ranks share a stream as they share a map-style dataset (see `TokenLoader`). Only the shards of a dataset that
    shards itself may end at different times; then each rank begins its next epoch on its own.

    The dataset runs with Python's, NumPy's and torch's CPU generators seeded from (seed, epoch), and from (seed,
    epoch, worker) once it has asked which worker it is in. The process's own states are neither used nor changed. So
    random numbers differ between items and between epochs, and repeat with the seed. A generator that belongs to the
    dataset must have the same seed in all workers, unless the dataset shards itself. A dataset with `set_epoch` is
    told the epoch.

    On resume without workers, a dataset with `state_dict` and `load_state_dict` continues at its own position. Any
    other dataset is read again up to the batch, with a warning; so is a stream of Hugging Face's `datasets` with a
    shuffle buffer, which its state does not hold. It is recognised by its `fingerprint` if it has one, otherwise by its
    type.

    Attributes:
        warn: told where a saved position is not continued exactly, or by reading again. A run sets it.

    Args:
        dataset: an `IterableDataset`, or anything that starts over with every `iter`; must pickle unless workers
            are forked.
        batch_size: B, items per batch (the micro batch).
        seed: the seed of the random numbers that the dataset draws.
        drop_last: leave out a batch at the end of an epoch that is not full; in each worker if the dataset shards
            itself; with ranks, a global batch.
        num_workers, prefetch_factor, pin_memory, collate, multiprocessing_context, rank, world_size, in_step: as
            for `TokenLoader`.

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
        in_step: int = 1,
    ) -> None:
        if isinstance(dataset, Iterator):
            raise DataError(
                f"{type_name(dataset)} is an iterator, which can be read only once; give a dataset whose __iter__ "
                f"starts over for each epoch"
            )
        self.warn: Callable[[str], None] = warn
        self.dataset = dataset
        self.fingerprint = dataset.fingerprint if isinstance(dataset, Fingerprinted) else type_name(dataset)
        self._seed = seed
        self._global_batch = GlobalBatch(
            batch_size, rank=rank, world_size=world_size, drop_last=drop_last, in_step=in_step
        )
        self._position = _Position(num_workers)
        self._ended: set[int | None] = set()
        self._delivered = False
        self._offset = 0  # items of the epoch before its batch 0, where batches of another size came first
        self._shards_itself = False
        self._batches = _StreamBatches(dataset, self._global_batch, collate, seed)
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
        return self._global_batch.batch_size

    @property
    def division(self) -> tuple[int, int]:
        """Which part of the data this loader reads, and of how many."""
        return self._global_batch.rank, self._global_batch.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position.epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self.epoch == epoch:
            reply = self._fetcher.next()
            if reply is None:
                continue  # a request that was not wanted
            self._position.number += 1
            if not isinstance(reply, _EndOfStream):
                batch, self._shards_itself = reply
                self._delivered = True
                yield batch
                continue
            self._ended.add(reply.worker)
            if reply.worker is not None and len(self._ended) < self._position.workers:
                continue  # other workers still have batches
            if not self._delivered:
                raise DataError(
                    f"epoch {self.epoch} of {type_name(self.dataset)} has no batch: the dataset gives nothing, less "
                    f"than a batch with drop_last, or its __iter__ does not start over"
                )
            self._seek(self.epoch + 1, 0)

    def restart(self) -> None:
        """Go back to the first batch of the first epoch, so that every evaluation sees the same batches."""
        if (self.epoch, self._position.number, self._offset) != (0, 0, 0):
            self._seek(0, 0)

    def _seek(self, epoch: int, number: int, offset: int = 0, position: Mapping[str, Any] | None = None) -> None:
        self._position.epoch, self._position.number, self._offset = epoch, number, offset
        self._ended = set()
        self._delivered = number > 0 or offset > 0
        self._batches.start_at(position)
        self._position.offset = offset
        self._fetcher.restart()

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch, and what the data and their division into batches are."""
        return {
            "epoch": self.epoch,
            "batches": self._position.number,
            "offset": self._offset,
            "position": self._batches.position() if self._position.number or self._offset else None,
            "batch_size": self._global_batch.batch_size,
            "world_size": self._global_batch.world_size,
            "num_workers": self._position.workers,
            "shards_itself": self._shards_itself,
            "seed": self._seed,
            "fingerprint": self.fingerprint,
            "order": order_of(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Another number of ranks or items in a batch goes on at the same item. There is a warning for a changed seed, and
        when another number of workers or ranks changes what a dataset that shards itself gives to each.

        Raises:
            DataError: the state comes from other data.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data is not that of the checkpoint: {self.fingerprint} now, {state['fingerprint']} then; give "
                f"back the same dataset, or start a new run"
            )
        before = int(state.get("offset", 0))
        if state["batches"] or before:
            check_order(self.dataset, state.get("order"))
        if state["seed"] != self._seed:
            self.warn("the random numbers that the dataset draws have changed (data.seed)")
        self._shards_itself = bool(state["shards_itself"])
        epoch, items = int(state["epoch"]), before + int(state["batches"] * state["batch_size"] * state["world_size"])
        number, offset = divmod(items, self._global_batch.size)
        if self._shards_itself:  # there each worker counts its own items
            offset = 0
        knows_its_position = isinstance(self.dataset, StatefulStream)
        trusted = knows_its_position and not self._position.workers and restores_exactly(self.dataset)
        position = state["position"] if trusted else None
        if items and position is None:
            # A dataset that shards itself reads other items in each worker when the number of workers changes.
            then, now = (
                (state["num_workers"], state["world_size"]),
                (self._position.workers, self._global_batch.world_size),
            )
            same_division = not self._shards_itself or (then == now and items % self._global_batch.size == 0)
            why = "cannot continue at its own position" if knows_its_position else "keeps no position of its own"
            self.warn(
                f"{type_name(self.dataset)} {why}: reading the first {number} batches of epoch {epoch} again to "
                f"continue after them{'' if same_division else _DIVIDED_DIFFERENTLY}"
            )
        self._seek(epoch, number, offset, position)

    def close(self) -> None:
        """End the worker processes. Iterating again starts new ones."""
        self._fetcher.close()


class _Position:
    """Which batch comes next. Each `iter`, by torch's loader, requests batches from the current position on."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.epoch = 0
        self.number = 0
        self.offset = 0
        self._run = 0

    def __iter__(self) -> Iterator[_BatchRequest]:
        self._run += 1
        run, epoch, start, offset = self._run, self.epoch, self.number, self.offset
        # torch's loader sends the first request to worker 0. So start at a batch of worker 0, wanted or not.
        for number in count(start - start % max(1, self.workers)):
            yield _BatchRequest(run, epoch, number, wanted=number >= start, offset=offset)


class _StreamBatches(BatchMaker):
    """Makes the batches of a stream. A process must request those of one run in their order."""

    def __init__(self, dataset: Iterable[Any], global_batch: GlobalBatch, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._global_batch = global_batch
        self._collate = collate
        self._seed = seed
        self._start: Mapping[str, Any] | None = None
        self._reader: _EpochReader | None = None
        self._worker_info: _WatchedWorkerInfo | None = None

    def start_at(self, position: Mapping[str, Any] | None) -> None:
        """Let epochs in this process start at a saved `position`, or with None at the dataset's beginning."""
        self._start = position
        self._reader = None

    def position(self) -> Mapping[str, Any] | None:
        """Where this process is in the dataset; None where workers read, or the dataset cannot say."""
        return self._start if self._reader is None else self._reader.position()

    def make(self, request: _BatchRequest) -> tuple[Any, bool] | _EndOfStream | None:
        """The batch, and whether the dataset shards itself; None for a request that is not wanted."""
        if not request.wanted:
            return None
        if self._reader is None or self._reader.run != request.run:
            if self._worker_info is None and get_worker_info() is not None:
                self._worker_info = _WatchedWorkerInfo(self._dataset, self._global_batch)
                for part in epoch_aware_parts(self._dataset):
                    give_own_epoch(part)
            self._reader = _EpochReader(
                self._dataset,
                self._global_batch,
                request,
                seed=self._seed,
                worker_info=self._worker_info,
                start=self._start,
            )
        try:
            items = self._reader.take(request.number)
        except BaseException:  # it is raised on
            # The dataset is somewhere within a batch, where no position is saved.
            self._reader = None
            raise
        if items is None:
            return self._reader.end
        try:
            return (self._collate(items) if items else None), self._reader.shards_itself
        except Exception as error:  # noqa: BLE001 - a collate function of the user's may raise anything
            raise blame(f"batch {request.number} of {type_name(self._dataset)}", error) from error


class _WatchedWorkerInfo:
    """What `get_worker_info()` returns in a worker of ours: it counts the workers of all ranks, and notices questions.

    A worker process belongs to one loader, so it takes the place of torch's object for good. A dataset finds it
    wherever it has imported `get_worker_info` from.
    """

    def __init__(self, dataset: Iterable[Any], global_batch: GlobalBatch) -> None:
        info = get_worker_info()
        assert info is not None
        self.dataset = dataset
        self.worker, self.workers = info.id, info.num_workers
        self.shard = global_batch.rank * info.num_workers + info.id
        self.shards = global_batch.world_size * info.num_workers
        self.when_asked: Callable[[], None] | None = None
        self._torch_info = info
        torch_worker._worker_info = cast(torch_worker.WorkerInfo, self)

    @property
    def id(self) -> int:
        if self.when_asked is not None:
            self.when_asked()
        return self.shard

    @property
    def num_workers(self) -> int:
        if self.when_asked is not None:
            self.when_asked()
        return self.shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch_info, name)  # such as `seed`


class _EpochReader:
    """Reads the dataset once, from start to end, in one process."""

    def __init__(
        self,
        dataset: Iterable[Any],
        global_batch: GlobalBatch,
        request: _BatchRequest,
        *,
        seed: int,
        worker_info: _WatchedWorkerInfo | None,
        start: Mapping[str, Any] | None,
    ) -> None:
        self.run = request.run
        self.shards_itself = False
        self._dataset = dataset
        self._global_batch = global_batch
        self._seed = seed
        self._epoch = request.epoch
        self._offset = request.offset
        self._worker_info = worker_info
        self._asked = False
        self._items: Iterator[Any] | None = None
        self._start = start
        self._taken = 0 if start is None else int(start["items"])
        self._generators = OwnGenerators(derive_seed(seed, request.epoch) if start is None else start["generators"])

    def position(self) -> Mapping[str, Any] | None:
        """Where the dataset and its generators are, after how many items; None when the dataset cannot say."""
        if not isinstance(self._dataset, StatefulStream) or not restores_exactly(self._dataset):
            return None
        return {"dataset": self._dataset.state_dict(), "generators": self._generators.states, "items": self._taken}

    @property
    def end(self) -> _EndOfStream:
        """The reply when no batch is left."""
        return _EndOfStream(self._worker_info.worker if self._worker_info is not None and self.shards_itself else None)

    def take(self, number: int) -> list[Any] | None:
        """The items of batch `number`, which must come after those taken before; None when it does not exist.

        There are none where other ranks in step have the last items.
        """
        info = self._worker_info
        if info is not None:
            info.when_asked = self._note_question
        try:
            with self._generators.in_use():
                if self._items is None:
                    self._items = self._read()
                    if info is not None:
                        # The dataset decides before its first item whether it shards itself.
                        first = list(islice(self._items, 1))
                        self._items = chain(first, self._items)
                        self.shards_itself = self._asked
                        if self.shards_itself:  # then all items here belong to this rank
                            self._global_batch = replace(self._global_batch, rank=0, world_size=1, in_step=1)
                if info is not None and self.shards_itself:
                    number //= info.workers  # this worker makes every n-th batch of the rank
                # Pass over the batches that other workers make, then take a global batch and keep this rank's share.
                skipped = max(0, self._offset + number * self._global_batch.size - self._taken)
                for _ in islice(self._items, skipped):
                    pass
                items = list(islice(self._items, self._global_batch.size))
                self._taken += skipped + len(items)
        finally:
            if info is not None:
                info.when_asked = None
        if info is not None and info.shards > 1 and self._asked and not self.shards_itself:
            raise DataError(
                f"{type_name(self._dataset)} called get_worker_info() after its first item, too late to shard itself; "
                f"call it at the beginning of __iter__"
            )
        if not self._global_batch.goes_on(len(items)):
            return None
        share = self._global_batch.share(len(items))
        return items[share.start : share.stop]

    def _note_question(self) -> None:
        assert self._worker_info is not None
        if not self._asked and self._worker_info.shards > 1:
            seed_generators(derive_seed(self._seed, self._epoch, self._worker_info.shard))
        self._asked = True

    def _read(self) -> Iterator[Any]:
        number = self._taken
        try:
            for part in epoch_aware_parts(self._dataset):
                tell(part, self._epoch)
            if self._start is not None and isinstance(self._dataset, StatefulStream):
                self._dataset.load_state_dict(self._start["dataset"])
            for item in self._dataset:
                yield item
                number += 1
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - a dataset of the user's may raise anything
            raise blame(f"item {number} of {type_name(self._dataset)}", error) from error
