"""A safetensors file in memory: tensors are copied to their places in the file, and written later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from speedtronic.durable.tensor_file import file_order, safetensors_header
from speedtronic.errors import CheckpointError

# Bytes. A power of two, because pinned memory is allocated in powers of two: larger blocks would waste more of it.
_BLOCK = 2**28


class _Slot(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: torch.Size


class StagingBuffer:
    """Memory for copies of tensors. The next `fill` with the same names, shapes and dtypes uses it again.

    It is as large as the tensors, until `release` or the end of the object. If one of them is on a CUDA device, it is
    pinned: the first `fill` then waits until the system has locked so many pages, in blocks that are powers of two.
    """

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._pinned = False
        self._blocks: list[Tensor] = []
        self._places: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        self._header: bytes | None = None

    def fill(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Copy all tensors, from any device. They may change as soon as this returns.

        Args:
            tensors, metadata: as for `tensor_chunks`.

        Raises:
            CheckpointError: there is not enough memory.
        """
        slots = [_Slot(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        if (slots, pinned) != (self._slots, self._pinned):
            self._arrange(slots, tensors, pinned)
        if metadata != self._metadata:
            self._metadata, self._header = dict(metadata), None
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file."""
        if self._header is None:
            self._header = safetensors_header(self._places, self._metadata)
        yield self._header
        for block in self._blocks:
            yield block.numpy().data

    def release(self) -> None:
        """Free the memory, and give pinned memory back to the system."""
        self._slots, self._blocks, self._places, self._header = [], [], {}, None
        if self._pinned:
            self._pinned = False
            _empty_host_cache()

    def _arrange(self, slots: list[_Slot], tensors: Mapping[str, Tensor], pinned: bool) -> None:
        self.release()
        blocks: list[Tensor] = []
        places: dict[str, Tensor] = {}
        for names in _in_blocks(tensors):
            block = _allocate(sum(tensors[name].nbytes for name in names), pinned)
            begin = 0
            for name in names:
                tensor, end = tensors[name], begin + tensors[name].nbytes
                places[name] = block[begin:end].view(tensor.dtype).view(tensor.shape)
                begin = end
            blocks.append(block)
        self._slots, self._pinned, self._blocks, self._places = slots, pinned, blocks, places


def _in_blocks(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names in the order of the file, in groups of at most `_BLOCK` bytes. A larger tensor is alone."""
    names: list[str] = []
    size = 0
    for name in file_order(tensors):
        if names and size + tensors[name].nbytes > _BLOCK:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensors[name].nbytes
    if names:
        yield names


def _empty_host_cache() -> None:
    """Unlock the pinned memory that nobody uses. torch would keep it for later, and no other process could have it."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # torch 2.9 has none, and keeps it
    if empty is not None:
        empty()


def _allocate(size: int, pinned: bool) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise CheckpointError(
            f"there is no memory for a copy of the state ({size} bytes more); checkpoint.background: false saves "
            f"without a copy: {error}"
        ) from error
