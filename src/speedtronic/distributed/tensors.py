"""What of a model the nodes exchange, the CPU copies of it, and its safetensors form.

Between machines, floating-point values are float32 and complex ones complex64, whatever dtype a node trains in;
integers and bools stay as they are. In files a complex tensor is its real and imaginary parts in a last dimension of 2.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from speedtronic.distributed.stores.base import Buffer
from speedtronic.durable.files import DamagedFileError, FileSystem, replace_file
from speedtronic.durable.tensor_file import (
    DTYPE_NAMES,
    RESERVED_NAME,
    bytes_of,
    check_tensor_bytes,
    file_order,
    parse_header,
    safetensors_header,
)
from speedtronic.errors import InputError

Tensors = dict[str, Tensor]

Kind = Literal["trained", "frozen", "average", "newest"]
"""Parameters that are trained, and those that are not; persistent buffers of floating-point or complex numbers, which
are averaged, and those of integers or bools, of which the newest are taken."""

METADATA_LIMIT = 64 * 2**10  # bytes of a header, beyond what the tensors take in it
LONGEST_HEADER = 16 * 2**20  # bytes; a tensor takes about 100

_COMPILED = "_orig_mod."  # what `torch.compile` puts into the names of a module and of those inside
_COMPLEX_DTYPES = frozenset({torch.complex64, torch.complex128})
_COMPLEX = "complex"  # metadata: which tensors are complex, as a JSON list of names


class TensorFormatError(InputError, ValueError):
    """Bytes are not the safetensors data that they should be.

    Attributes:
        torn: whether an upload or a write that broke off can have left them so.
    """

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


class Form(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


# --- Models


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model, as it is exchanged."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def form(self) -> Form:
        return Form(self.dtype, self.shape)


@dataclass(frozen=True)
class Schema:
    """Names, kinds and forms of all that a model exchanges. Nodes train one model if and only if theirs are equal.

    Attributes:
        entries: by plain name (without what `torch.compile` adds), in the model's order; what is tied stands there
            once, under the first of its names.
    """

    entries: Mapping[str, TensorSpec]

    @staticmethod
    def of(model: nn.Module) -> Schema:
        """The schema of a model: of its parameters and persistent buffers, on any device, in any precision.

        Raises:
            ValueError: a tensor has no values yet, or is not dense; the message names it.
        """
        return Schema(MappingProxyType({name: _spec(name, kind, tensor) for name, kind, tensor in _tensors_of(model)}))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all names, kinds, shapes and dtypes, whatever their order."""
        facts = [[name, spec.kind, list(spec.shape), str(spec.dtype)] for name, spec in sorted(self.entries.items())]
        return hashlib.sha256(json.dumps(facts).encode("ascii")).hexdigest()

    def names(self, *kinds: Kind) -> tuple[str, ...]:
        """The names of these kinds, in the model's order; without an argument, of all."""
        return tuple(name for name, spec in self.entries.items() if not kinds or spec.kind in kinds)

    def forms(self, *kinds: Kind) -> dict[str, Form]:
        """The forms of the tensors of these kinds; without an argument, of all."""
        return {name: self.entries[name].form for name in self.names(*kinds)}


def snapshot(model: nn.Module, into: Tensors | None = None, *, names: Collection[str] | None = None) -> Tensors:
    """Copy what a model exchanges to the CPU, in the dtypes of `Schema`.

    Training may go on as soon as this returns. From a CUDA device all copies are queued, and waited for once.

    Args:
        into: the result of an earlier call with the same names, whose memory is used again and which is returned.
        names: which tensors; None means all.
    """
    wanted = None if names is None else frozenset(names)
    chosen = {name: tensor.detach() for name, _, tensor in _tensors_of(model) if wanted is None or name in wanted}
    copies = {name: _room_for(tensor) for name, tensor in chosen.items()} if into is None else into
    for name, tensor in chosen.items():
        copies[name].copy_(tensor, non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in chosen.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


@torch.no_grad()
def rebase_(model: nn.Module, new_base: Tensors, base: Mapping[str, Tensor], *, adopt: bool) -> None:
    """Put a model on a new base, in place and on its device, and keep what it has learnt since the old one.

    A parameter that is in `base` becomes new_base + (local - base): exactly new_base where local and base are equal.
    Every other tensor takes its value from `new_base`.

    Where a parameter has fewer bits than float32, its entry of `new_base` is replaced by the value rounded to them. So
    the base is again what the model holds where nothing was learnt, and rounding is not mistaken for progress.

    Args:
        new_base: float32, complex64 or integer tensors on the CPU, for every name of the model's `Schema`.
        base: the base that the model was on; of the trained parameters at least.
        adopt: whether to drop what was learnt since, and take the new base as it is.

    Raises:
        ValueError: a name is missing, or a shape differs. The model is unchanged.
    """
    entries = list(_tensors_of(model))
    for name, _, tensor in entries:
        _check_shapes(name, tensor, new_base, base)
    for name, kind, tensor in entries:
        if kind in {"trained", "frozen"} and name in base and _has_fractions(tensor.dtype):
            new_base[name] = _rounded(new_base[name], tensor.dtype)
            if not adopt:
                _move(tensor, new_base[name], base[name])
                continue
        tensor.copy_(new_base[name])


def _move(parameter: Tensor, new_base: Tensor, base: Tensor) -> None:
    wide = torch.promote_types(parameter.dtype, base.dtype)
    learnt = parameter.to(wide) - base.to(parameter.device)
    parameter.copy_(learnt.add_(new_base.to(parameter.device)))


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value if torch.promote_types(dtype, value.dtype) == dtype else value.to(dtype).to(value.dtype)


def _check_shapes(name: str, tensor: Tensor, new_base: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> None:
    if name not in new_base:
        raise ValueError(f"{name} is not in the new base")
    for values in (new_base, base):
        if name in values and values[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} in the model, {list(values[name].shape)} in a base"
            )


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Kind, Tensor]]:
    for name, parameter in model.named_parameters():
        yield _plain(name), "trained" if parameter.requires_grad else "frozen", parameter
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for short, buffer in module._buffers.items():
            if buffer is None or short in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = _plain(f"{prefix}.{short}" if prefix else short)
            yield name, "average" if _has_fractions(buffer.dtype) else "newest", buffer


def _plain(name: str) -> str:
    return name.replace(_COMPILED, "")


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _spec(name: str, kind: Kind, tensor: Tensor) -> TensorSpec:
    if is_lazy(tensor) or tensor.is_meta:
        raise ValueError(f"{name} has no values yet: initialise the model before it is trained with others")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{name} is not a dense tensor, and cannot be exchanged")
    return TensorSpec(kind, tuple(tensor.shape), _exchanged(tensor.dtype))


def _exchanged(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex64
    return torch.float32 if dtype.is_floating_point else dtype


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=_exchanged(tensor.dtype), pin_memory=tensor.is_cuda)


# --- Differences


def compute_pseudo_gradient(baseline: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Tensors:
    """Baseline minus current, of the floating-point (in float32) and the complex entries (in complex64).

    Integers and bools have no gradient and are left out.

    Raises:
        ValueError: the two differ in their names or in a shape.
    """
    check_same(baseline, current)
    return {
        name: start.detach().to(_exchanged(start.dtype)) - current[name].detach().to(_exchanged(start.dtype))
        for name, start in baseline.items()
        if _has_fractions(start.dtype)
    }


def average_deltas(deltas: Iterable[Mapping[str, Tensor]]) -> Tensors:
    """The mean of deltas, in float32 or complex64, added up in the order in which they come.

    Raises:
        ValueError: there is none, or two differ in their names or in a shape.
    """
    total: Tensors = {}
    count = 0
    for delta in deltas:
        if count == 0:
            total = {name: tensor.detach().to(_exchanged(tensor.dtype), copy=True) for name, tensor in delta.items()}
        else:
            check_same(total, delta)
            for name, tensor in delta.items():
                total[name] += tensor.detach()
        count += 1
    if count == 0:
        raise ValueError("there is no delta to average")
    return {name: tensor.div_(count) for name, tensor in total.items()}


def check_same(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> None:
    """Raise ValueError, with the first difference, unless both have the same names and shapes."""
    if different := sorted(these.keys() ^ those.keys()):
        raise ValueError(f"{different[0]} is in one of the two alone (of {len(different)} such names)")
    for name, tensor in these.items():
        if tensor.shape != those[name].shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)} in one and {list(those[name].shape)} in the other")


def cpu_state_dict(source: nn.Module | Mapping[str, Any]) -> Tensors:
    """Copies on the CPU of the tensors of a model, or of a state dict, in their own dtypes and under plain names.

    What is tied is copied under each of its names. Entries that are not tensors are left out.
    """
    state = source.state_dict() if isinstance(source, nn.Module) else source
    return {
        _plain(name): value.detach().to("cpu", copy=True).contiguous()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


# --- Bytes


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Tensors in the safetensors format. The bytes depend on names, values, dtypes and metadata alone.

    Args:
        tensors: dense tensors of any shape, strides and device; of a name that is a key of the format, none.
        metadata: text that goes into the header.

    Raises:
        ValueError: a tensor or a piece of metadata cannot be stored; the message names it.
    """
    for key, text in metadata.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise ValueError(f"metadata {key!r}: a name and a text are needed, not {text!r}")
    real, notes = _as_real(tensors)
    return b"".join([safetensors_header(real, _in_order({**metadata, **notes})), *_chunks(real)])


def content_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of what follows the header in `pack_tensors`. Raises ValueError as that does."""
    digest = hashlib.sha256()
    for chunk in _chunks(_as_real(tensors)[0]):
        digest.update(chunk)
    return digest.hexdigest()


def _chunks(real: Tensors) -> Iterator[memoryview]:
    return (bytes_of(real[name].cpu().contiguous()) for name in file_order(real))


def _as_real(tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, str]]:
    """The tensors with the parts of complex ones in a last dimension, and the metadata that says which those are."""
    real: Tensors = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg()
        real[name] = torch.view_as_real(plain) if plain.dtype in _COMPLEX_DTYPES else plain
        if real[name].dtype not in DTYPE_NAMES or plain.layout != torch.strided or name == RESERVED_NAME:
            raise ValueError(f"{name}, a {plain.layout} tensor of {plain.dtype}, cannot be stored in this format")
    return real, _notes(name for name, tensor in tensors.items() if tensor.is_complex())


def _notes(complex_names: Iterable[str]) -> dict[str, str]:
    names = sorted(complex_names)
    return {_COMPLEX: json.dumps(names)} if names else {}


def _own(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in metadata.items() if key != _COMPLEX}


def _in_order(metadata: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(metadata.items()))


class _Place(NamedTuple):
    begin: int
    form: Form  # as it is stored
    is_complex: bool


class PackedTensors(Mapping[str, Tensor]):
    """The tensors in the bytes of `pack_tensors`, each made when it is asked for.

    Of a writable buffer they are views, which keep it alive; of `bytes`, copies.

    Args:
        data: the whole object.
        expected: the form of every tensor. Given, nothing but exactly what `pack_tensors` writes for these is taken,
            and no more of a hostile header is read than these and `METADATA_LIMIT` allow. Otherwise any safetensors
            data is.

    Attributes:
        metadata: the text in the header.
        content: the bytes after it.

    Raises:
        TensorFormatError: the bytes are anything else; no tensor was made.
    """

    def __init__(self, data: Buffer, expected: Mapping[str, Form] | None = None) -> None:
        self._data = memoryview(data)
        self._places, self.metadata = (
            _places_of(self._data) if expected is None else _expected_places(self._data, expected)
        )
        self.content = self._data[min((place.begin for place in self._places.values()), default=len(data)) :]

    def only(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Some of the tensors, each still made when it is asked for."""
        chosen = copy(self)
        chosen._places = {name: self._places[name] for name in names}
        return chosen

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = _tensor(self._data, place.begin, place.form)
        return torch.view_as_complex(tensor) if place.is_complex else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def unpack_tensors(data: Buffer, expected: Mapping[str, Form] | None = None) -> tuple[Tensors, dict[str, str]]:
    """All tensors of `PackedTensors(data, expected)`, and the metadata. Raises TensorFormatError as that does."""
    packed = PackedTensors(data, expected)
    return dict(packed), packed.metadata


def packed_size(expected: Mapping[str, Form]) -> int:
    """The most bytes that `pack_tensors` can need for tensors of these forms."""
    return 8 + longest_header(expected) + sum(_size(_stored(form)) for form in expected.values())


def longest_header(expected: Mapping[str, Form]) -> int:
    """The most bytes of JSON that `PackedTensors` reads where tensors of these forms are expected."""
    stored = {name: _stored(form) for name, form in expected.items()}
    return len(_canonical_header(stored, {})) + METADATA_LIMIT


def metadata_of(data: Buffer, *, limit: int) -> dict[str, str]:
    """The text in the header of safetensors data, of which nothing else is looked at.

    Args:
        data: the object, or its beginning.
        limit: the most bytes of JSON to read.

    Raises:
        TensorFormatError: the header is malformed or longer.
    """
    return _own(_metadata(_json_object(_header_text(memoryview(data), limit))))


def save_safetensors(
    state: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file, whole and durable, or not at all. What is tied is written under each of its names.

    Raises:
        ValueError: a tensor or a piece of metadata cannot be stored; the message names it.
        OSError: the disk is full, or failed; a file that was there before stays.
    """
    replace_file(FileSystem(), Path(path), pack_tensors(state, metadata or {}))


def load_safetensors(path: str | os.PathLike[str]) -> Tensors:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        TensorFormatError: it is no safetensors file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = bytearray(os.fstat(file.fileno()).st_size)
        count = file.readinto(data)
    try:
        return unpack_tensors(memoryview(data)[:count])[0]
    except TensorFormatError as error:
        raise TensorFormatError(f"{path}: {error}", torn=error.torn) from error


def _tensor(data: memoryview, begin: int, form: Form) -> Tensor:
    size = _size(form)
    if size == 0:
        return torch.empty(form.shape, dtype=form.dtype)
    part = data[begin : begin + size]
    if part.readonly or begin % form.dtype.itemsize:
        part = memoryview(bytearray(part))
    if form.dtype == torch.bool:  # any byte but 0 is true, as it is not in the memory of a bool tensor
        return torch.frombuffer(part, dtype=torch.uint8).ne(0).view(form.shape)
    return torch.frombuffer(part, dtype=form.dtype).view(form.shape)


def _size(form: Form) -> int:
    count = 1
    for length in form.shape:
        count *= length
    return count * form.dtype.itemsize


def _stored(form: Form) -> Form:
    return Form(form.dtype.to_real(), (*form.shape, 2)) if form.dtype.is_complex else form


def _header_text(data: memoryview, limit: int) -> memoryview:
    """The JSON header of safetensors data, when it has at most `limit` bytes."""
    if len(data) < 8:
        raise TensorFormatError(f"it ends after {len(data)} bytes", torn=True)
    (length,) = struct.unpack_from("<Q", data)
    if length > limit:
        raise TensorFormatError(f"it claims a header of {length} bytes, where at most {limit} are possible")
    if 8 + length > len(data):
        raise TensorFormatError("it ends within its header", torn=True)
    return data[8 : 8 + length]


def _json_object(text: memoryview) -> dict[str, Any]:
    try:
        entries = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        # Zeros are what a torn write may leave where its bytes should be.
        raise TensorFormatError(f"its header is not JSON ({type(error).__name__})", torn=True) from error
    if not isinstance(entries, dict):
        raise TensorFormatError("its header is not a JSON object")
    return entries


def _metadata(entries: Mapping[str, Any]) -> dict[str, str]:
    metadata = entries.get(RESERVED_NAME, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise TensorFormatError("the metadata of its header is not a mapping from text to text")
    return metadata


def _expected_places(data: memoryview, expected: Mapping[str, Form]) -> tuple[dict[str, _Place], dict[str, str]]:
    """Hold a header against the one that `pack_tensors` writes for tensors of these forms."""
    stored = {name: _stored(form) for name, form in expected.items()}
    text = _header_text(data, longest_header(expected))
    entries = _json_object(text)
    metadata = _metadata(entries)
    notes = _notes(name for name, form in expected.items() if form.dtype.is_complex)
    own = _own(metadata)
    if bytes(text) != _canonical_header(stored, _in_order({**own, **notes}))[8:]:
        raise TensorFormatError(_first_difference(entries, stored))
    begin = 8 + len(text)
    places: dict[str, _Place] = {}
    for name in file_order(_shapes_only(stored)):
        places[name] = _Place(begin, stored[name], expected[name].dtype.is_complex)
        begin += _size(stored[name])
    if len(data) < begin:
        raise TensorFormatError(f"it has {len(data)} of its {begin} bytes", torn=True)
    if len(data) > begin:
        raise TensorFormatError(f"{len(data) - begin} bytes follow its tensors")
    return places, own


def _canonical_header(stored: Mapping[str, Form], metadata: Mapping[str, str]) -> bytes:
    return safetensors_header(_shapes_only(stored), metadata)


def _shapes_only(forms: Mapping[str, Form]) -> Tensors:
    return {name: torch.empty(form.shape, dtype=form.dtype, device="meta") for name, form in forms.items()}


def _first_difference(entries: Mapping[str, Any], stored: Mapping[str, Form]) -> str:
    """Why a header is not the one expected. Of foreign names no more is shown than a log can bear."""
    names = entries.keys() - {RESERVED_NAME}
    if missing := sorted(stored.keys() - names):
        return f"it lacks the tensor {missing[0]}"
    if extra := sorted(names - stored.keys()):
        return f"it has a tensor {ascii(extra[0])[:80]}, which does not belong there"
    for name, form in sorted(stored.items()):
        entry = entries[name]
        if not isinstance(entry, dict) or entry.get("dtype") != DTYPE_NAMES[form.dtype]:
            return f"{name} is not of {form.dtype}"
        if entry.get("shape") != list(form.shape):
            return f"{name} does not have shape {list(form.shape)}"
    return "its header is not written as it should be: places that overlap, repeated or further keys, or another order"


def _places_of(data: memoryview) -> tuple[dict[str, _Place], dict[str, str]]:
    """The places in safetensors data from anywhere, complex tensors among them where the metadata says so."""
    try:
        check_tensor_bytes(bytes(data))
        header = parse_header(bytes(_header_text(data, len(data))))
    except DamagedFileError as error:
        raise TensorFormatError(str(error)) from error
    complex_names = _complex_names(header.metadata.get(_COMPLEX, "[]"))
    places: dict[str, _Place] = {}
    for place in header.places:
        form = Form(place.dtype, tuple(place.shape))
        is_complex = place.name in complex_names and _can_be_complex(form)
        places[place.name] = _Place(header.size + place.begin, form, is_complex)
    return places, _own(header.metadata)


def _can_be_complex(form: Form) -> bool:
    return form.dtype in {torch.float32, torch.float64} and form.shape[-1:] == (2,)


def _complex_names(text: str) -> Collection[Any]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) else []
