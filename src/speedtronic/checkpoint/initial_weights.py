"""Weights to start a model from: safetensors files, our own checkpoints, Hugging Face folders.

Headers are read first and compared with the model. Then tensors go from their files into the model one at a time, so
that memory never holds the weights twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.checkpoint.entries import scan
from speedtronic.checkpoint.manager import LATEST, CheckpointManager
from speedtronic.checkpoint.manifest import MANIFEST, MODEL_TENSORS, read_manifest, reading
from speedtronic.checkpoint.snapshot import check_files, read_trees, saved_parts, stored_average
from speedtronic.durable.files import FileSystem, fill, where_looked
from speedtronic.durable.tensor_file import StoredTensor, TensorPlace, read_header, read_tensor
from speedtronic.errors import CheckpointError, warn

HUGGING_FACE_WEIGHTS = "model.safetensors"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
HUGGING_FACE_CONFIG = "config.json"

_LARGEST_JSON = 256 * 2**20  # bytes
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_WRAPPERS = ("_orig_mod.", "module.")  # what torch.compile and DistributedDataParallel put before a model's names

Translation = Callable[[Mapping[str, Any], list[str]], Mapping[str, str | None]]
"""Gives the model's name of each tensor in a Hugging Face folder, from its `config.json` and its own names. None stands
for a tensor that the model does not have, because it is always of ones there."""


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a model started from.

    Attributes:
        source: the file or folder that was read.
        loaded: names of the model's tensors that were loaded, in the order of its `state_dict`.
        tokenizer: the `spec` of the tokenizer that they were trained with; None if the source does not say.
        averaged: whether they are the averaged weights of a run with `optimizer.ema`.
        model: the `model` section of the configuration that they were trained with; None if the source does not say.
        base: of adapters, the sums of the files of the frozen weights beside them; else None.
    """

    source: Path
    loaded: tuple[str, ...]
    tokenizer: dict[str, Any] | None
    averaged: bool
    model: dict[str, Any] | None
    base: dict[str, str] | None


def load_initial_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    translate: Translation | None = None,
    warn: Callable[[str], None] = warn,
    advice: str = "Change the model, or set run.init_strict: false to load what fits",
) -> InitialWeights:
    """Copy weights into a model, converted to its dtypes and devices.

    Names must be equal, with two exceptions. If all names of the source share the prefix of a wrapper (`_orig_mod.`,
    `module.`) and the model's names do not have it, it is removed. If then no name is one of the model's and the model
    has a `base_model_prefix`, as models of Hugging Face do, that is put before the names. A name may be missing in the
    source if the model ties its tensor to one that is there.

    Args:
        model: parameters and persistent buffers are loaded, in place.
        path: a `.safetensors` file; one of our checkpoints; a folder of checkpoints or of a run, from which the newest
            sound one is taken; or a Hugging Face folder, with its weights in one file or several. From a checkpoint
            the averaged weights are taken if the run kept an average (`optimizer.ema`).
        strict: whether every name must be there with its shape. Otherwise what fits is loaded.
        translate: names the tensors of a Hugging Face folder as the model does. One that it leaves out is not loaded,
            and one that it names None must be of ones. None keeps the names.
        warn: told what did not fit if `strict` is false, and of damaged checkpoints that were passed over.
        advice: what to do if they do not fit and `strict` is true.

    Raises:
        CheckpointError: there are no weights at the path, or they are damaged, or in a format that can run code; they
            do not fit, and every mismatch is listed; or nothing fits. The model is unchanged, unless a file is cut
            while it is read, holds two different tensors for a tied one, or values that are too large for a dtype.
    """
    while True:
        try:
            source = _find(Path(path), warn)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            return _load(source, model, strict, translate, warn, advice)
        except CheckpointError:
            if source.path.exists():
                raise
            # A run that saves there has removed the checkpoint, and has saved another one before.


def _load(
    source: _Source,
    model: nn.Module,
    strict: bool,
    translate: Translation | None,
    warn: Callable[[str], None],
    advice: str,
) -> InitialWeights:
    own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}

    tensors = source.tensors
    if translate is not None and source.is_hugging_face:
        file = source.path / HUGGING_FACE_CONFIG
        config = _read_json(file) if file.exists() else {}
        with reading(source.path):
            names = translate(config, list(tensors))
        _check_ones(source.path, {theirs: tensors[theirs] for theirs, name in names.items() if name is None})
        tensors = {name: tensors[theirs] for theirs, name in names.items() if name is not None}
    offered = _renamed(tensors, own, getattr(model, "base_model_prefix", ""))

    _check_fit(source.path, offered, own, strict, warn, advice)
    fitting = {name: stored for name, stored in offered.items() if name in own and _fits(stored.place, own[name])}
    _copy(fitting, own)
    return InitialWeights(
        source=source.path,
        loaded=tuple(name for name in own if name in fitting),
        tokenizer=source.tokenizer,
        averaged=source.averaged,
        model=source.model,
        base=source.base,
    )


def is_hugging_face_folder(path: Path) -> bool:
    """Whether a path is a folder with weights as `save_pretrained` writes them, and no checkpoint of ours."""
    files = (HUGGING_FACE_CONFIG, HUGGING_FACE_WEIGHTS, HUGGING_FACE_INDEX, MANIFEST)
    config, weights, index, manifest = ((path / name).exists() for name in files)
    return config and (weights or index) and not manifest


# ---------------------------------------------------------------------- finding


@dataclass(frozen=True)
class _Source:
    path: Path
    tensors: Mapping[str, StoredTensor]
    tokenizer: dict[str, Any] | None = None
    is_hugging_face: bool = False
    averaged: bool = False
    model: dict[str, Any] | None = None
    base: dict[str, str] | None = None


def _find(path: Path, warn: Callable[[str], None]) -> _Source:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder to take weights from{where_looked(path)}")
    if path.is_file():
        if _is_pickle(path):
            raise CheckpointError(_pickle_refused(path))
        return _Source(path, _tensors_of_file(path))
    if (path / MANIFEST).exists():
        return _from_checkpoint(path, verify=True)
    for folder in (path, path / "checkpoints"):
        if (folder / LATEST).exists() or scan(FileSystem(), folder):
            source = CheckpointManager(folder, warn=warn).use_newest(partial(_from_checkpoint, verify=False))
            if source is None:
                raise CheckpointError(f"{folder}: there is no checkpoint here to take weights from")
            return source
    if (path / HUGGING_FACE_WEIGHTS).exists():
        return _Source(path, _tensors_of_file(path / HUGGING_FACE_WEIGHTS), is_hugging_face=True)
    if (path / HUGGING_FACE_INDEX).exists():
        return _Source(path, _tensors_of_index(path / HUGGING_FACE_INDEX), is_hugging_face=True)
    pickles = sorted(file for folder in (path, path / "checkpoints") for file in folder.glob("*") if _is_pickle(file))
    if pickles:
        raise CheckpointError(_pickle_refused(pickles[0]))
    raise CheckpointError(
        f"{path}: no weights here; name a .safetensors file, a checkpoint, the folder of a run, or a Hugging Face "
        f"folder with {HUGGING_FACE_WEIGHTS} or {HUGGING_FACE_INDEX}"
    )


def _is_pickle(path: Path) -> bool:
    return path.suffix in _PICKLES


def _pickle_refused(path: Path) -> str:
    return (
        f"{path}: a pickle, which could run code when it is loaded, so it is not read. Convert it once: "
        f"model.load_state_dict(torch.load({path.name!r}, weights_only=True)); "
        "safetensors.torch.save_model(model, 'weights.safetensors'). A Hugging Face model writes safetensors with "
        "save_pretrained"
    )


def _from_checkpoint(path: Path, *, verify: bool) -> _Source:
    fs = FileSystem()
    with reading(path):
        manifest = read_manifest(fs, path)
        if verify:
            check_files(fs, path, manifest)
        trees = read_trees(fs, path, manifest)
        average = stored_average(path, trees)
        tokenizer, config, base = saved_parts(trees, "tokenizer", "config", "base")
    section = config.get("model") if isinstance(config, dict) else None
    return _Source(
        path,
        _tensors_of_file(path / MODEL_TENSORS) | average,
        tokenizer=tokenizer,
        averaged=bool(average),
        model=section if isinstance(section, dict) else None,
        base=base,
    )


def _tensors_of_index(index: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder with its weights in several files, each from the file that the index names."""
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CheckpointError(f"{index}: not an index of safetensors files: it has no weight_map from names to files")
    for file in sorted(set(files.values())):
        # Printable, because no file system accepts a null character or half of a surrogate pair in a name.
        if Path(file).name != file or file in {"", ".."} or "\\" in file or not file.isprintable():
            raise CheckpointError(f"{index}: names {file!r}, which is not a file of its own folder")
    held = {file: _tensors_of_file(index.parent / file) for file in sorted(set(files.values()))}
    missing = [f"{name} is not in {file}" for name, file in files.items() if name not in held[file]]
    if missing:
        raise CheckpointError(f"{index}: does not agree with its files:\n  " + "\n  ".join(missing))
    return {name: held[file][name] for name, file in files.items()}


def _tensors_of_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, also under the names that its metadata gives to tied ones."""
    with reading(path):
        header = read_header(path)
    stored = header.stored(path)
    aliases = {name: stored[kept] for name, kept in header.metadata.items() if name not in stored and kept in stored}
    return stored | aliases


def _read_json(path: Path) -> dict[str, Any]:
    with reading(path):
        with FileIO(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_JSON:
                raise CheckpointError(f"it is larger than {_LARGEST_JSON} bytes")
            text = file.readall()
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"it is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError("it does not hold an object")
    return values


# ---------------------------------------------------------------------- comparing


def _renamed(stored: Mapping[str, StoredTensor], own: Collection[str], base_prefix: str) -> dict[str, StoredTensor]:
    """The stored tensors under the model's names for them."""
    names = {name: name for name in stored}
    while prefix := next((p for p in _WRAPPERS if names and all(name.startswith(p) for name in names.values())), None):
        if any(name.startswith(prefix) for name in own):
            break
        names = {name: wrapped.removeprefix(prefix) for name, wrapped in names.items()}
    if base_prefix and not any(name in own for name in names.values()):
        names = {name: f"{base_prefix}.{shorter}" for name, shorter in names.items()}
    return {names[name]: tensor for name, tensor in stored.items()}


def _fits(place: TensorPlace, tensor: Tensor) -> bool:
    return list(tensor.shape) == place.shape and tensor.is_floating_point() == place.dtype.is_floating_point


def _check_fit(
    path: Path,
    offered: Mapping[str, StoredTensor],
    own: Mapping[str, Tensor],
    strict: bool,
    warn: Callable[[str], None],
    advice: str,
) -> None:
    # A tied tensor is there if it has a value under any of its names.
    there = {id(tensor) for name, tensor in own.items() if name in offered}
    problems = [f"{name} is missing there" for name, tensor in own.items() if id(tensor) not in there]
    problems += [f"{name} is not in this model" for name in offered if name not in own]
    fits = {name: _fits(stored.place, own[name]) for name, stored in offered.items() if name in own}
    for name in (name for name, is_fit in fits.items() if not is_fit):
        theirs, ours = offered[name].place, own[name]
        problems.append(
            f"{name} has shape {tuple(theirs.shape)} {theirs.dtype} there and {tuple(ours.shape)} {ours.dtype} in this "
            "model"
        )
    if not problems:
        return

    listed = "\n  ".join(problems)
    if strict:
        raise CheckpointError(f"{path}: these weights are not those of this model:\n  {listed}\n{advice}")
    if not any(fits.values()):
        raise CheckpointError(f"{path}: none of these weights fits this model:\n  {listed}")
    warn(f"{path}: not all of these weights are those of this model; the rest is loaded:\n  {listed}")


def _check_ones(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError unless each tensor is of ones."""
    for name, stored in tensors.items():
        with reading(path), FileIO(stored.file) as file:
            file.seek(stored.begin)
            if bool((read_tensor(partial(fill, file), stored.place) != 1).any()):
                raise CheckpointError(f"{name} is not all ones there, and this model has no such weights")


# ---------------------------------------------------------------------- copying


def _copy(fitting: Mapping[str, StoredTensor], own: Mapping[str, Tensor]) -> None:
    """Fill the model's tensors. Each file is read once from its start to its end."""
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, stored in sorted(fitting.items(), key=lambda item: item[1].begin):
        by_file.setdefault(stored.file, []).append((name, stored))

    filled_by: dict[int, str] = {}
    for path, entries in by_file.items():
        with reading(path), FileIO(path) as file, torch.no_grad():
            for name, stored in entries:
                file.seek(stored.begin)
                tensor, target = read_tensor(partial(fill, file), stored.place), own[name]
                former = filled_by.setdefault(id(target), name)
                if former == name:
                    target.copy_(tensor)
                    _check_range(name, tensor, target)
                elif not torch.equal(tensor.to(target), target):
                    raise CheckpointError(
                        f"{name} and {former} differ there, and are one tied tensor in this model; build the model "
                        "untied (model.tie_weights: false)"
                    )


def _check_range(name: str, tensor: Tensor, filled: Tensor) -> None:
    """Raise CheckpointError if a finite value became infinite in the model's dtype."""
    if filled.dtype != tensor.dtype and bool((infinite := filled.isinf()).any()):
        were_infinite = tensor.double().isinf().to(filled.device)
        if bool((infinite & ~were_infinite).any()):
            raise CheckpointError(
                f"{name} has values that are too large for {filled.dtype}; build the model in bfloat16 or float32"
            )
