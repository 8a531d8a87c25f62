"""The contents of one checkpoint: a state is written into three files, and read back from them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from speedtronic.checkpoint.manifest import (
    FILES,
    MODEL_TENSORS,
    STATE_TENSORS,
    STATE_TREE,
    Manifest,
    Monitored,
    damage_is_checkpoint_error,
)
from speedtronic.checkpoint.staging import StagingBuffer
from speedtronic.checkpoint.tree import EncodedTree, decode, encode
from speedtronic.durable.files import FileRecord, FileSystem, no_pause, verified, write_file
from speedtronic.durable.tensor_file import StoredTensor, read_header, read_tensors, tensor_chunks
from speedtronic.errors import CheckpointError

_LARGEST_TREE = 256 * 2**20  # bytes


class SnapshotBuffers:
    """Memory for one snapshot, used again for the next. It is as large as the tensors of the state.

    A new snapshot overwrites the one before it, which must be written by then.
    """

    def __init__(self) -> None:
        self.model = StagingBuffer()
        self.rest = StagingBuffer()

    def release(self) -> None:
        """Give the memory back."""
        self.model.release()
        self.rest.release()


class Snapshot(NamedTuple):
    """A state that is ready to be written.

    Attributes:
        trees: everything except tensors, as JSON values.
        model: the bytes of the file of the model's tensors, which other tools can read.
        rest: the bytes of the file of all other tensors.
        loss: that of the state's metrics, if it is finite.
        eval_loss: that of the state's metrics, if it is finite.
        monitored: that of the state's metrics, if there is one.
        config_sha256: the fingerprint of the configuration in the state.
        on_cpu: whether no tensor is on another device.
    """

    trees: dict[str, Any]
    model: Iterable[bytes | memoryview]
    rest: Iterable[bytes | memoryview]
    loss: float | None
    eval_loss: float | None
    monitored: Monitored | None
    config_sha256: str | None
    on_cpu: bool


def take_snapshot(state: Any, buffers: SnapshotBuffers | None = None) -> Snapshot:
    """Encode a state.

    Args:
        state: the tree, `state["model"]` the part that other tools may read.
        buffers: memory for copies of the tensors, so that training may change them as soon as this returns. Without
            it, the tensors are read when they are written.

    Raises:
        CheckpointError: something in the state cannot be saved; the message names its path. Or there is no memory for
            the copies.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"state: a checkpoint's state is a dict, got {type(state).__name__}")
    model = encode(state["model"], root="model") if "model" in state else EncodedTree(None, {}, {})
    rest = encode({key: value for key, value in state.items() if key != "model"})
    trees = {"state": rest.tree, **({"model": model.tree} if "model" in state else {})}
    # The header names tied tensors in the same way as `save_model` of the safetensors library.
    metadata = {"format": "pt", **model.aliases}
    metrics = state.get("metrics")
    config = rest.tree.get("config")
    # The fingerprint does not depend on the order of the keys.
    config_text = None if config is None else json.dumps(config, sort_keys=True).encode("ascii")
    return Snapshot(
        trees=trees,
        model=_bytes_of_file(model.tensors, metadata, buffers.model if buffers else None),
        rest=_bytes_of_file(rest.tensors, {}, buffers.rest if buffers else None),
        loss=_finite(metrics, "loss"),
        eval_loss=_finite(metrics, "eval_loss"),
        monitored=_monitored(metrics),
        config_sha256=None if config_text is None else hashlib.sha256(config_text).hexdigest(),
        on_cpu=all(tensor.is_cpu for tensor in chain(model.tensors.values(), rest.tensors.values())),
    )


def write_snapshot(
    fs: FileSystem, directory: Path, snapshot: Snapshot, pause: Callable[[], None] = no_pause
) -> dict[str, FileRecord]:
    """Write the three files into an existing empty directory; they are on the disk on return.

    Args:
        pause: called after each part of a few megabytes.

    Raises:
        OSError: the disk is full, or failed.
        CheckpointError: the state without its tensors is too large to be loaded again.
    """
    text = json.dumps(snapshot.trees, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > _LARGEST_TREE:
        raise CheckpointError(
            f"state: everything except tensors takes {len(text)} bytes, the limit is {_LARGEST_TREE}; "
            "keep large data in tensors or arrays"
        )
    contents = {MODEL_TENSORS: snapshot.model, STATE_TENSORS: snapshot.rest, STATE_TREE: [text]}
    return {name: write_file(fs, directory / name, chunks, pause) for name, chunks in contents.items()}


def read_state(fs: FileSystem, directory: Path, manifest: Manifest) -> dict[str, Any]:
    """The state, on the CPU. Every byte was compared with the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or not what the manifest says.
        OSError: the disk failed.
    """
    with damage_is_checkpoint_error():
        rest_tensors = _read_tensor_file(fs, directory / STATE_TENSORS, manifest.files[STATE_TENSORS])
        model_tensors = _read_tensor_file(fs, directory / MODEL_TENSORS, manifest.files[MODEL_TENSORS])
    trees = read_trees(fs, directory, manifest)
    try:
        state = decode(trees["state"], rest_tensors)
        model = {"model": decode(trees["model"], model_tensors)} if "model" in trees else {}
    except CheckpointError as error:
        raise CheckpointError(f"{STATE_TREE}: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE_TREE} does not hold a state")
    return {**state, **model}


def read_trees(fs: FileSystem, directory: Path, manifest: Manifest) -> dict[str, Any]:
    """The contents of `state.json`, compared with the manifest: the encoded `state` and, if there is one, `model`.

    Raises:
        CheckpointError: the file is missing, damaged, or does not hold a state.
        OSError: the disk failed.
    """
    record = manifest.files[STATE_TREE]
    if record.size > _LARGEST_TREE:
        raise CheckpointError(f"{STATE_TREE} is damaged: it is larger than {_LARGEST_TREE} bytes")
    text = bytearray(record.size)
    with damage_is_checkpoint_error(), verified(fs, directory / STATE_TREE, record) as reader:
        reader.read_into(memoryview(text))
    try:
        trees = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE_TREE} is damaged: {error}") from error
    if not isinstance(trees, dict) or not isinstance(trees.get("state"), dict):
        raise CheckpointError(f"{STATE_TREE} does not hold a state")
    return trees


def saved_parts(trees: Mapping[str, Any], *names: str) -> list[Any]:
    """Parts of the state that hold no tensors, such as the configuration; None for each that it lacks.

    Raises:
        CheckpointError: a part is malformed, or holds a tensor.
    """
    return [decode(trees["state"].get(name), {}) for name in names]


def stored_average(directory: Path, trees: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Where the averaged weights of `optimizer.ema` are, by the model's names; empty where the run kept no average.

    Args:
        directory: the checkpoint's folder.
        trees: what `read_trees` returned.

    Raises:
        CheckpointError: something in the average is not a plain tensor, or is missing from the file.
        OSError: the disk failed.
    """
    average = trees["state"].get("ema")
    if average is None:
        return {}
    if not isinstance(average, dict) or not all(map(_is_plain_tensor, average.values())):
        raise CheckpointError(f"{STATE_TREE}: the averaged weights (optimizer.ema) are not all plain tensors")
    names = {name: value["$tensor"] for name, value in average.items()}
    if not names:
        return {}
    with damage_is_checkpoint_error():
        stored = read_header(directory / STATE_TENSORS).stored(directory / STATE_TENSORS)
    missing = sorted(name for name in names.values() if name not in stored)
    if missing:
        raise CheckpointError(f"{STATE_TENSORS} lacks the averaged weight {missing[0]!r}")
    return {name: stored[stored_name] for name, stored_name in names.items()}


def check_files(fs: FileSystem, directory: Path, manifest: Manifest) -> None:
    """Read every file and compare it with the manifest, without keeping any of it.

    Raises:
        CheckpointError: a file is missing, damaged, or not what the manifest says.
        OSError: the disk failed.
    """
    for name in FILES:
        record = manifest.files[name]
        with damage_is_checkpoint_error(), verified(fs, directory / name, record) as reader:
            for _ in reader.rest(record.size):
                pass


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"$tensor"} and isinstance(value["$tensor"], str)


def _bytes_of_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], buffer: StagingBuffer | None
) -> Iterable[bytes | memoryview]:
    if buffer is None:
        return tensor_chunks(tensors, metadata)
    buffer.fill(tensors, metadata)
    return buffer.chunks()


def _monitored(metrics: Any) -> Monitored | None:
    found = metrics.get("monitored") if isinstance(metrics, Mapping) else None
    return found and Monitored(name=found["name"], mode=found["mode"], value=_finite(found, "value"))


def _finite(metrics: Any, name: str) -> float | None:
    number = metrics.get(name) if isinstance(metrics, Mapping) else None
    return float(number) if isinstance(number, (int, float)) and math.isfinite(number) else None


def _read_tensor_file(fs: FileSystem, path: Path, record: FileRecord) -> dict[str, Tensor]:
    with verified(fs, path, record) as reader:
        return read_tensors(path, reader.read_into, record.size)
