"""What the position of a stream is worth: some libraries save one that does not lead back to the same place."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from speedtronic.errors import DataError

# The steps of a stream of Hugging Face's `datasets` that keep items which its state does not hold: a shuffle buffer is
# filled anew on resume, and a batched map over tables may leave a batch out (the library's own documentation, and
# https://github.com/huggingface/datasets/pull/8408).
_BUFFERS = "BufferShuffledExamplesIterable"
_MAPS = "MappedExamplesIterable"


def restores_exactly(dataset: Any) -> bool:
    """Whether a dataset with `state_dict` and `load_state_dict` continues where it was.

    A dataset of the user's own does. A stream of Hugging Face's `datasets`, or one that a dataset holds, may not.
    """
    return all(_stream_restores_exactly(stream) for stream in streams_in(dataset))


def order_of(dataset: Any) -> str | None:
    """A checksum of the random generators that order a stream of `datasets`; None for others.

    A stream that was shuffled without a seed has another order in each process. It shows by this checksum only.
    """
    states = [
        step.generator.bit_generator.state
        for stream in streams_in(dataset)
        for step in _steps(stream)
        if hasattr(getattr(step, "generator", None), "bit_generator")
    ]
    if not states:
        return None
    return hashlib.sha256(json.dumps(states, sort_keys=True, default=str).encode()).hexdigest()


def check_order(dataset: Any, saved: str | None) -> None:
    """Raise DataError if the order that a saved `order_of` stands for cannot come again."""
    if saved is not None and saved != order_of(dataset):
        raise DataError(
            "the stream is shuffled in another order than when the checkpoint was written, so it cannot continue "
            "there; give shuffle() the seed that it had. Without a seed the order changes with each process"
        )


def give_own_epoch(dataset: Any) -> None:
    """Let a worker's streams of `datasets` have epochs that no other process changes.

    The library keeps the epoch of a stream in memory that all processes share, and adds to it what it lacks. If two
    workers do that at once, each adds it, and the epoch is too high.
    """
    for stream in streams_in(dataset):
        stream._epoch = int(stream._epoch)


def streams_in(dataset: Any) -> list[Any]:
    """The streams of `datasets` that an object is or holds."""
    library = sys.modules.get("datasets")  # not imported, so the object has none
    kind = getattr(library, "IterableDataset", None)
    if kind is None:
        return []
    return [value for value in (dataset, *getattr(dataset, "__dict__", {}).values()) if isinstance(value, kind)]


def _stream_restores_exactly(stream: Any) -> bool:
    steps = list(_steps(stream))
    formatting = getattr(stream, "_formatting", None)
    tables = formatting is not None and getattr(formatting, "is_table", True)
    batched = any(type(step).__name__ == _MAPS and getattr(step, "batched", True) for step in steps)
    return bool(steps) and not any(type(step).__name__ == _BUFFERS for step in steps) and not (tables and batched)


def _steps(stream: Any) -> Iterator[Any]:
    """The steps of a stream, which the library keeps one inside the other."""
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        step = waiting.pop()
        if step is None:
            continue
        yield step
        waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]
