"""What nodes exchange of a model: its schema, CPU copies of its tensors, and the step onto a new base.

Between machines, floating-point values are float32 and complex ones complex64, whatever dtype a node trains in.
Integers and bools keep their dtype.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Tensors = dict[str, Tensor]

Kind = Literal["trained", "frozen", "average", "newest"]
"""Trained and frozen parameters; persistent buffers of floating-point or complex numbers, which are averaged; those of
integers or bools, which are taken from the newest delta."""

_COMPILED = "_orig_mod."  # what `torch.compile` puts into the names of a module and of those inside


class TensorType(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model, as it is exchanged."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Schema:
    """Names, kinds, shapes and dtypes of everything that a model exchanges. Nodes can train together if and only if
    their schemas are equal.

    Attributes:
        entries: by plain name (without what `torch.compile` adds), in the model's order. A tied tensor is listed once,
            under the first of its names.
    """

    entries: Mapping[str, TensorSpec]

    @staticmethod
    def of(model: nn.Module) -> Schema:
        """The schema of a model, on any device, in any precision.

        Raises:
            ValueError: a tensor has no values yet, or is not dense; the message names it.
        """
        entries: dict[str, TensorSpec] = {}
        for name, kind, tensor in _exchanged_tensors(model):
            if is_lazy(tensor) or tensor.is_meta:
                raise ValueError(f"{name} has no values yet: initialise the model before it trains with others")
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise ValueError(f"{name} is not a dense tensor and cannot be exchanged")
            entries[name] = TensorSpec(kind, tuple(tensor.shape), exchanged_dtype(tensor.dtype))
        return Schema(MappingProxyType(entries))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all names, kinds, shapes and dtypes, in any order."""
        facts = [[name, spec.kind, list(spec.shape), str(spec.dtype)] for name, spec in sorted(self.entries.items())]
        return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()

    def names(self, *kinds: Kind) -> tuple[str, ...]:
        """The names of these kinds, in the model's order; without an argument, of all."""
        return tuple(name for name, spec in self.entries.items() if not kinds or spec.kind in kinds)

    def types(self, *kinds: Kind) -> dict[str, TensorType]:
        """Dtype and shape of the tensors of these kinds; without an argument, of all."""
        return {name: TensorType(self.entries[name].dtype, self.entries[name].shape) for name in self.names(*kinds)}


def snapshot(model: nn.Module, into: Tensors | None = None, *, names: Collection[str] | None = None) -> Tensors:
    """Copy what a model exchanges to the CPU, in the dtypes of `Schema`.

    Training may continue as soon as this returns. From a CUDA device all copies are queued, and waited for once.

    Args:
        into: the result of an earlier call with the same names. Its memory is reused, and it is returned.
        names: which tensors; None means all.
    """
    wanted = None if names is None else frozenset(names)
    chosen = {
        name: tensor.detach() for name, _, tensor in _exchanged_tensors(model) if wanted is None or name in wanted
    }
    copies = into
    if copies is None:
        copies = {
            name: torch.empty(tensor.shape, dtype=exchanged_dtype(tensor.dtype), pin_memory=tensor.is_cuda)
            for name, tensor in chosen.items()
        }
    for name, tensor in chosen.items():
        copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in chosen.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


@torch.no_grad()
def rebase_(model: nn.Module, new_base: Tensors, base: Mapping[str, Tensor], *, adopt: bool) -> None:
    """Move a model to a new base, in place and on its device, and keep what it learned since the old one.

    A parameter that is in `base` becomes new_base + (local - base): exactly new_base where local and base are equal.
    Every other tensor takes its value from `new_base`.

    Where a parameter has fewer bits than float32, its entry of `new_base` is replaced by the value rounded to them. The
    base is then again what the model holds where it learned nothing, and rounding is not mistaken for progress.

    Args:
        new_base: float32, complex64 or integer tensors on the CPU, for every name of the model's `Schema`.
        base: the base that the model was on; of the trained parameters at least.
        adopt: whether to drop what was learned since, and take the new base as it is.

    Raises:
        ValueError: a name is missing, or a shape differs. The model is unchanged.
    """
    entries = list(_exchanged_tensors(model))

    # Check everything before the first write, so that an error leaves the model as it was.
    for name, _, tensor in entries:
        if name not in new_base:
            raise ValueError(f"{name} is not in the new base")
        for values in (new_base, base):
            if name in values and values[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} in the model, {list(values[name].shape)} in a base"
                )

    for name, kind, tensor in entries:
        if kind in {"trained", "frozen"} and name in base and has_fractions(tensor.dtype):
            target = new_base[name]
            if torch.promote_types(tensor.dtype, target.dtype) != tensor.dtype:
                target = new_base[name] = target.to(tensor.dtype).to(target.dtype)
            if not adopt:
                # The difference is taken in the wider of the two dtypes: no bit of progress is lost.
                wide = torch.promote_types(tensor.dtype, base[name].dtype)
                learned = tensor.to(wide) - base[name].to(tensor.device)
                tensor.copy_(learned.add_(target.to(tensor.device)))
                continue
        tensor.copy_(new_base[name])


def exchanged_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a value travels between machines."""
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else dtype


def has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def plain_name(name: str) -> str:
    """A name of a model's state without what `torch.compile` adds."""
    return name.replace(_COMPILED, "")


def check_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with the first difference, unless both have the same names and shapes."""
    if different := sorted(left.keys() ^ right.keys()):
        raise ValueError(f"only one of the two has {different[0]} (of {len(different)} such names)")
    for name, tensor in left.items():
        if tensor.shape != right[name].shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)} in one and {list(right[name].shape)} in the other")


def _exchanged_tensors(model: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    """All parameters and persistent buffers, each once, under plain names."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), "trained" if parameter.requires_grad else "frozen", parameter
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for short, buffer in module._buffers.items():
            if buffer is None or short in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = plain_name(f"{prefix}.{short}" if prefix else short)
            yield name, "average" if has_fractions(buffer.dtype) else "newest", buffer
