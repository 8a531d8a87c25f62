"""What other programs need of tensors and deltas: state dicts on the CPU, safetensors files, pseudo-gradients."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from speedtronic.distributed.delta import average_deltas, compute_pseudo_gradient
from speedtronic.distributed.packed_tensors import TensorFormatError, pack_tensors, unpack_tensors
from speedtronic.distributed.schema import Tensors, plain_name
from speedtronic.durable.files import FileSystem, replace_file

__all__ = ["average_deltas", "compute_pseudo_gradient", "cpu_state_dict", "load_safetensors", "save_safetensors"]


def cpu_state_dict(source: nn.Module | Mapping[str, Any]) -> Tensors:
    """Copies on the CPU of the tensors of a model, or of a state dict, in their own dtypes and under plain names.

    A tied tensor is copied under each of its names. Entries that are not tensors are left out.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return {
        plain_name(name): value.detach().to("cpu", copy=True).contiguous()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def save_safetensors(
    state: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, whole and durable, or not at all. A tied tensor is written under each of its names.

    Raises:
        ValueError: a tensor or an entry of the metadata cannot be stored; the message names it.
        OSError: the disk is full, or failed; a file that was there before stays.
    """
    replace_file(FileSystem(), Path(path), pack_tensors(state, metadata or {}))


def load_safetensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        TensorFormatError: it is not a safetensors file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        count = file.readinto(data)
    try:
        return unpack_tensors(memoryview(data)[:count])[0]
    except TensorFormatError as error:
        raise TensorFormatError(f"{path}: {error}", torn=error.torn) from error
