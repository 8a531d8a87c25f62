"""A state tree as JSON plus named tensors, and back, equal.

Values that JSON has (None, bool, str, lists, dicts with string keys, finite floats, integers of 64 bits) stay as they
are. Everything else is a dict with one key that starts with `$`:

    {"$tuple": [item, …]}                a tuple
    {"$dict": [[key, value], …]}         a dict with integer keys, or with string keys that start with `$`
    {"$float": "nan" | "inf" | "-inf"}   a float that JSON lacks
    {"$int": "-0x1f…"}                   an integer beyond 64 bits
    {"$bytes": "…"}                      base64
    {"$tensor": name}                    a tensor of the named ones
    {"$complex": name}                   a complex tensor: real and imaginary parts in a last dimension of 2
    {"$ndarray": [name, dtype, shape]}   a numpy array: its bytes as a named uint8 tensor, its dtype as
                                         numpy's .npy files describe it, its shape

Reading a tree builds these types and no others, so nothing in it can name code.
"""

from __future__ import annotations

import base64
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtronic.durable.tensor_file import DTYPE_NAMES, RESERVED_NAME
from speedtronic.errors import CheckpointError

_INT64 = range(-(2**63), 2**63)


class EncodedTree(NamedTuple):
    """A tree that is ready to be written.

    Attributes:
        tree: JSON values only.
        tensors: the tensors that the tree names, detached, on their own devices, sharing the memory of the originals.
        aliases: from the path of a tensor that is the same memory as an earlier one, to the name of that one.
    """

    tree: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def encode(tree: Any, *, root: str = "") -> EncodedTree:
    """Encode a tree. A tensor's name is its path with dots; memory that appears twice has one name.

    Args:
        tree: dicts (string or integer keys), lists, tuples, None, bool, int, float, str, bytes, tensors and
            numpy arrays. Subclasses of the plain types count as those: an `OrderedDict` comes back as a dict.
        root: stands before the paths in error messages.

    Raises:
        CheckpointError: something in the tree has another type, or cannot be stored; the message names its path.
    """
    encoder = _Encoder(root)
    try:
        encoded = encoder.encode(tree, "")
    except RecursionError:
        raise CheckpointError(f"{root or 'state'}: nested too deeply, or it contains itself") from None
    return EncodedTree(encoded, encoder.tensors, encoder.aliases)


def check(tree: Any) -> None:
    """Find out whether a tree can be stored, without copying a tensor.

    Raises:
        CheckpointError: as `encode` does.
    """
    encode(tree)


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that was given to `encode`. A name that stands in several places becomes one tensor again.

    Raises:
        CheckpointError: this is not an encoded tree, or a tensor that it names is missing.
    """
    try:
        return _decode(encoded, tensors)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"malformed state tree: {type(error).__name__}: {error}") from error


class _Encoder:
    """Paths are dotted names, those of the tensors. A state may have tens of thousands of nodes, and training waits
    for this, so nothing is computed for a node that does not need it."""

    def __init__(self, root: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._root = root
        self._seen: dict[int, list[tuple[Tensor, str]]] = {}  # tensors by their address, with their names

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            number = int(value)  # without a subclass
            return number if number in _INT64 else {"$int": hex(number)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, list):
            return self._items(value, path)
        if isinstance(value, tuple):
            return {"$tuple": self._items(value, path)}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if type(value) is np.ndarray:
            return self._array(value, path)
        raise self._error(
            path,
            f"a {_type_name(value)} cannot be saved; a state holds dicts, lists, tuples, None, bool, int, "
            "float, str, bytes, tensors and numpy arrays",
        )

    def _items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(item, _below(path, index)) for index, item in enumerate(values)]

    def _dict(self, values: dict[Any, Any], path: str) -> dict[str, Any]:
        for key in values:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise self._error(path, f"the key {key!r} is a {_type_name(key)}; keys are strings or integers")
        if all(isinstance(key, str) and not key.startswith("$") for key in values):
            return {str.__str__(key): self.encode(item, _below(path, key)) for key, item in values.items()}
        pairs = [[self.encode(key, path), self.encode(item, _below(path, key))] for key, item in values.items()]
        return {"$dict": pairs}

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        tensor = value.detach() if value.requires_grad else value
        is_complex = tensor.dtype.is_complex
        self._check_storable(tensor, path)

        # A tensor that is the same memory as an earlier one, shown in the same way, gets the name of that one.
        same_address = self._seen.get(tensor.data_ptr(), []) if tensor.numel() > 0 else []
        name = next((name for other, name in same_address if _is_same(tensor, other)), None)
        if name is not None:
            self.aliases[_printable(path)] = name
        elif is_complex:
            name = self._add(torch.view_as_real(tensor.resolve_conj()), path)
        else:
            name = self._add(tensor.resolve_neg() if tensor.is_neg() else tensor, path)
        if tensor.numel() > 0:
            self._seen.setdefault(tensor.data_ptr(), []).append((tensor, name))
        return {"$complex" if is_complex else "$tensor": name}

    def _check_storable(self, tensor: Tensor, path: str) -> None:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise self._error(path, f"a tensor of layout {tensor.layout} cannot be saved; make it dense")
        if tensor.is_meta:
            raise self._error(path, "a tensor on the meta device has no values to save")
        if tensor.dtype not in DTYPE_NAMES and not tensor.dtype.is_complex:
            raise self._error(path, f"a tensor of {tensor.dtype} cannot be saved; safetensors has no such dtype")

    def _array(self, array: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        # The dtype is described as in .npy files, if numpy makes an equal dtype from the description.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                description = np.lib.format.dtype_to_descr(array.dtype)
                faithful = not array.dtype.hasobject and np.lib.format.descr_to_dtype(description) == array.dtype
            except (TypeError, ValueError):
                faithful = False
        if not faithful:
            raise self._error(path, f"a numpy array of dtype {array.dtype} cannot be saved; only plain data can")
        name = self._add(_array_bytes(array), path)
        return {"$ndarray": [name, self.encode(description, path), list(array.shape)]}

    def _add(self, tensor: Tensor, path: str) -> str:
        base = name = _printable(path)
        number = 2
        while name in self.tensors or name == RESERVED_NAME:
            name = f"{base}#{number}"
            number += 1
        self.tensors[name] = tensor
        return name

    def _error(self, path: str, message: str) -> CheckpointError:
        place = _below(self._root, path) if self._root and path else self._root or path or "state"
        return CheckpointError(f"{_printable(place)}: {message}")


def _below(path: str, key: str | int) -> str:
    return f"{path}.{key}" if path else str(key)


def _printable(path: str) -> str:
    """A path as valid UTF-8, as safetensors keys must be."""
    return path if path.isascii() else path.encode("utf-8", "backslashreplace").decode("utf-8")


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors at the same address show the same memory in the same way."""
    return (
        left.device == right.device
        and left.dtype == right.dtype
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.is_conj() == right.is_conj()
        and left.is_neg() == right.is_neg()
    )


def _array_bytes(array: np.ndarray[Any, Any]) -> Tensor:
    if array.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, held),) = value.items()
        if key.startswith("$"):
            return _DECODERS[key](held, tensors)
    return {key: _decode(item, tensors) for key, item in value.items()}


def _decode_dict(pairs: Any, tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}


def _decode_array(held: Any, tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    """An array that shows the tensor's memory, so that a tree may name a tensor often without using more memory."""
    name, description, shape = held
    dtype = np.lib.format.descr_to_dtype(_decode(description, tensors))
    flat = tensors[name].numpy()
    if dtype.hasobject:
        raise ValueError(f"{name!r} claims to hold Python objects")
    if flat.dtype != np.uint8 or _element_count(shape, flat.size) * dtype.itemsize != flat.size:
        raise ValueError(f"{name!r} does not hold as many bytes as its shape and dtype say")
    return flat.view(dtype).reshape(shape) if flat.size else np.ndarray(shape, dtype)


def _element_count(shape: Any, most: int) -> int:
    """The number of elements of a shape from a file. It stops counting beyond `most`: the number may be absurd."""
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("a shape is a list of counts")
    count = int(0 not in shape)
    for length in shape:
        count *= length
        if count > most:
            break
    return count


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tuple": lambda held, tensors: tuple(_decode(item, tensors) for item in held),
    "$dict": _decode_dict,
    "$float": lambda held, tensors: float(held),
    "$int": lambda held, tensors: int(held, 16),
    "$bytes": lambda held, tensors: base64.b64decode(held, validate=True),
    "$tensor": lambda held, tensors: tensors[held],
    "$complex": lambda held, tensors: torch.view_as_complex(tensors[held]),
    "$ndarray": _decode_array,
}
