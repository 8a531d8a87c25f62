"""The contents of one checkpoint: a state on its way into three files, and back out of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from speedtronic.checkpoint.files import FileRecord, FileSystem, verified, write_file
from speedtronic.checkpoint.manifest import FILES, MODEL_TENSORS, STATE_TENSORS, STATE_TREE, Manifest
from speedtronic.checkpoint.tensors import read_tensors, tensor_chunks
from speedtronic.checkpoint.tree import EncodedTree, decode, encode
from speedtronic.errors import CheckpointError

_LARGEST_TREE = 256 * 2**20  # bytes


class Snapshot(NamedTuple):
    """A state, encoded. The model's tensors stay apart: they get a file that other tools can read."""

    model: EncodedTree | None
    rest: EncodedTree
    loss: float | None
    config_sha256: str | None


def take_snapshot(state: Any, *, copy: bool) -> Snapshot:
    """Encode a state; `copy` makes it independent of what training does to the tensors next.

    Raises:
        CheckpointError: something in the state cannot be saved; the message names its path.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"state: a checkpoint's state is a dict, got {type(state).__name__}")
    model = encode(state["model"], root="model") if "model" in state else None
    rest = encode({key: value for key, value in state.items() if key != "model"})
    if copy:
        model = model and _copied(model)
        rest = _copied(rest)
    return Snapshot(model, rest, _loss_of(state), _fingerprint(rest.tree.get("config")))


def write_snapshot(fs: FileSystem, directory: Path, snapshot: Snapshot) -> dict[str, FileRecord]:
    """Write the three files into an existing empty directory; they are on the disk on return.

    Raises:
        OSError: the disk is full, or failed.
        CheckpointError: what is not tensors in the state is too large to be loaded again.
    """
    trees = {"state": snapshot.rest.tree}
    if snapshot.model is not None:
        trees["model"] = snapshot.model.tree
    text = json.dumps(trees, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > _LARGEST_TREE:
        raise CheckpointError(
            f"state: all that is not tensors takes {len(text)} bytes, the limit is {_LARGEST_TREE}; "
            "keep large data in tensors or arrays"
        )
    model_tensors = snapshot.model.tensors if snapshot.model else {}
    aliases = snapshot.model.aliases if snapshot.model else {}
    # Aliases stand in the header as the safetensors library's own `save_model` puts them there.
    model_chunks = tensor_chunks(model_tensors, {"format": "pt", **aliases})
    return {
        MODEL_TENSORS: write_file(fs, directory / MODEL_TENSORS, model_chunks),
        STATE_TENSORS: write_file(fs, directory / STATE_TENSORS, tensor_chunks(snapshot.rest.tensors, {})),
        STATE_TREE: write_file(fs, directory / STATE_TREE, [text]),
    }


def read_state(fs: FileSystem, directory: Path, manifest: Manifest) -> dict[str, Any]:
    """The state, on the CPU, after every byte was compared with the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or not what the manifest says.
        OSError: the disk failed.
    """
    rest_tensors = _read_tensor_file(fs, directory / STATE_TENSORS, manifest.files[STATE_TENSORS])
    model_tensors = _read_tensor_file(fs, directory / MODEL_TENSORS, manifest.files[MODEL_TENSORS])
    try:
        trees = _read_tree_file(fs, directory / STATE_TREE, manifest.files[STATE_TREE])
        state = decode(trees["state"], rest_tensors)
        if "model" in trees:
            state["model"] = decode(trees["model"], model_tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE_TREE} is malformed: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE_TREE} does not hold a state")
    return state


def check_files(fs: FileSystem, directory: Path, manifest: Manifest) -> None:
    """Read every file and compare it with the manifest, without keeping any of it.

    Raises:
        CheckpointError: a file is missing, damaged, or not what the manifest says.
        OSError: the disk failed.
    """
    buffer = memoryview(bytearray(2**20))
    for name in FILES:
        record = manifest.files[name]
        with verified(fs, directory / name, record) as reader:
            for start in range(0, record.size, len(buffer)):
                reader.read_into(buffer[: record.size - start])


def _copied(encoded: EncodedTree) -> EncodedTree:
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in encoded.tensors.items()}
    return encoded._replace(tensors=tensors)


def _loss_of(state: Mapping[str, Any]) -> float | None:
    metrics = state.get("metrics")
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None


def _fingerprint(config: Any) -> str | None:
    """SHA-256 of an encoded configuration, whatever the order of its keys."""
    if config is None:
        return None
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode("ascii")).hexdigest()


def _read_tensor_file(fs: FileSystem, path: Path, record: FileRecord) -> dict[str, Tensor]:
    with verified(fs, path, record) as reader:
        return read_tensors(reader.read_into, record.size)


def _read_tree_file(fs: FileSystem, path: Path, record: FileRecord) -> Any:
    if record.size > _LARGEST_TREE:
        raise CheckpointError(f"{path.name} is damaged: it is larger than {_LARGEST_TREE} bytes")
    text = bytearray(record.size)
    with verified(fs, path, record) as reader:
        reader.read_into(memoryview(text))
    return json.loads(text)
