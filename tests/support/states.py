"""Whether two states of a run are equal to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def difference(one: Any, other: Any, where: str = "state") -> str | None:
    """Where two trees differ first; None where they are equal. A NaN equals a NaN."""
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{where}: keys {sorted(map(str, one.keys() ^ other.keys()))}"
        pairs = [(f"{where}.{key}", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} items"
        pairs = [(f"{where}.{number}", *pair) for number, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
        return None if alike and torch.equal(*bits) else where
    elif isinstance(one, np.ndarray):
        return None if one.dtype == other.dtype and one.tobytes() == other.tobytes() else where
    else:
        return None if one == other or (one != one and other != other) else f"{where}: {one!r} and {other!r}"
    return next((found for name, a, b in pairs if (found := difference(a, b, name)) is not None), None)
