"""`Group` over `torch.distributed`: NCCL between cards, gloo between CPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from speedtronic.errors import RankError
from speedtronic.parallel.watch import Watch
from speedtronic.ranks import Number, Reduction, Value

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessGroup:
    """The default group of `torch.distributed`, which must have started.

    Numbers and values travel through the memory of the host, tensors from where they are.

    Args:
        watch: told when this rank waits for others; None where nobody watches.

    Raises:
        RankError: from any operation, if another rank has gone.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.lost = False

    def reduce(self, number: Number, how: Reduction = "sum") -> Number:
        # float64 holds every integer up to 2^53.
        if isinstance(number, Tensor):
            reduced = number.detach().clone()
        else:
            reduced = torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
        with self._waiting("a number"):
            dist.all_reduce(reduced, _OPERATIONS["max" if how == "max" else "sum"])
        if how == "mean":
            reduced = reduced / self.size
        return reduced if isinstance(number, Tensor) else type(number)(reduced.item())

    def reduce_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self._waiting("a sum"):
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None, "this process is in the group"

        def wait() -> Tensor:
            with self._waiting("a sum"):
                work.wait()
            return tensor

        return wait

    def stack(self, tensor: Tensor) -> Tensor:
        stacked = tensor.new_empty((self.size, *tensor.shape))
        with self._waiting("tensors"):
            dist.all_gather(list(stacked.unbind()), tensor.contiguous())
        return stacked

    def gather(self, value: Value) -> list[Value]:
        # As JSON, so that nothing from another process is ever unpickled. First how long each is, then all.
        data = _to_bytes(value)
        sizes = self.stack(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        return [_from_bytes(row[:size]) for row, size in zip(self.stack(padded), sizes, strict=True)]

    def broadcast(self, value: Value) -> Value:
        if isinstance(value, Tensor):
            # The bytes alone: no backend knows all dtypes.
            data = value.detach().contiguous().reshape(-1).view(torch.uint8)
            with self._waiting("a tensor of rank 0"):
                dist.broadcast(data, src=0)
            if self.rank:
                with torch.no_grad():
                    value.copy_(data.view(value.dtype).reshape(value.shape))
            return value
        data = _to_bytes(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(data)])
        with self._waiting("a value of rank 0"):
            dist.broadcast(size, src=0)
            if self.rank:
                data = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(data, src=0)
        return value if self.rank == 0 else _from_bytes(data)

    def note(self, place: str) -> None:
        if self._watch is not None:
            self._watch.note(place)

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        with self._watch.waiting(what) if self._watch is not None else nullcontext():
            try:
                yield
            except RuntimeError as error:  # what torch raises when a connection is lost, or nothing came in time
                self.lost = True
                # gloo begins with its own source file, and ends with advice.
                reason = str(error).splitlines()[0].split("] ", 1)[-1].partition(". ")[0]
                raise RankError(
                    f"rank {self.rank} waited for {what} of the other ranks, and one of them has gone or does not "
                    f"answer; its own output says why ({reason})"
                ) from error


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode("ascii")), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
