"""A checkpoint's weights for other programs: a plain safetensors file, or a Hugging Face folder.

If the run kept an average of the weights (`optimizer.ema`), the average is exported, because it was evaluated.

An export is written beside its place, flushed to the disk and renamed, so that it is complete or absent. Tensors go
from the checkpoint to the copy one at a time, so that memory never holds more than a few of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from speedtronic.checkpoint.export.llama import hugging_face_config, to_llama, weights_of_ones
from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.checkpoint.manifest import MANIFEST, MODEL_TENSORS, STATE_TREE, read_manifest, reading
from speedtronic.checkpoint.snapshot import check_files, read_trees, saved_parts, stored_average
from speedtronic.config import ModelConfig
from speedtronic.config.checks import BUILT_IN_MODELS
from speedtronic.durable.files import FileSystem, fill, write_file
from speedtronic.durable.folders import publish_folder, recover, temporary_beside
from speedtronic.durable.tensor_file import (
    StoredTensor,
    TensorHeader,
    TensorPlace,
    bytes_of,
    file_order,
    read_header,
    read_tensor,
    safetensors_header,
)
from speedtronic.errors import CheckpointError, ConfigError, SpeedtronicError

WEIGHTS = "model.safetensors"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# What peft writes of adapters, beside a card for a page of a hub that does not belong to an export.
_ADAPTER_FILES = frozenset({"adapter_model.safetensors", "adapter_config.json"})
_MODEL_CARD = "README.md"
_FOLDER_FILES = _ADAPTER_FILES | {WEIGHTS, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE}
# Large weights of a model that writes itself are in several files.
_PART_OF_WEIGHTS = re.compile(r"model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json")


class ExportError(SpeedtronicError):
    """The export could not be written: the disk is full, failed, or may not be written to."""


@dataclass(frozen=True)
class SavedModel:
    """The model in a checkpoint. Every byte was compared with the manifest.

    Attributes:
        path: the checkpoint's folder.
        step: the global step.
        header: of its file of weights, with the model's own names, tied tensors once.
        config: the configuration in it, secrets hidden; None when it has none.
        tokenizer: the `spec` of the run's tokenizer; None when the run was trained on token ids alone.
        base: of adapters (`model.lora`), the sums of the files of the frozen weights beside them; else None.
        average: where the averaged weights are, by the same names; empty if the run kept no average.
    """

    path: Path
    step: int
    header: TensorHeader
    config: Mapping[str, Any] | None
    tokenizer: Mapping[str, Any] | None
    base: Mapping[str, str] | None = None
    average: Mapping[str, StoredTensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors to export, tied ones once: averaged weights, and unchanged what has no average."""
        own = self.header.stored(self.path / MODEL_TENSORS)
        return {name: self.average.get(name, tensor) for name, tensor in own.items()}


class HuggingFaceTokenizer(NamedTuple):
    """A tokenizer as it is described in a Hugging Face folder.

    Attributes:
        json: the text of a `tokenizer.json`, or None when the tokenizer has no such form.
        separator_id: the token that ends a document.
        settings: of the folder that it came from, such as the names of special tokens and a chat template.
        chat_template: the file of that folder; None where it has none.
    """

    json: str | None
    separator_id: int
    settings: Mapping[str, Any] = MappingProxyType({})
    chat_template: bytes | None = None


def open_model(checkpoint: str | os.PathLike[str], *, verify: bool = True, fs: FileSystem | None = None) -> SavedModel:
    """Verify a checkpoint and read everything about its model except the weights.

    Args:
        checkpoint: its folder, which may have any name.
        verify: False if every byte was just compared.

    Raises:
        CheckpointError: it is damaged, or its model has something that is not a plain tensor, or its average does not
            belong to its model.
    """
    fs, path = fs or FileSystem(), Path(checkpoint)
    with reading(path):
        manifest = read_manifest(fs, path)
        if verify:
            check_files(fs, path, manifest)
        trees = read_trees(fs, path, manifest)
        header = read_header(path / MODEL_TENSORS)
        _check_plain(trees.get("model"), header)
        average = stored_average(path, trees)
        _check_average(average, header)
        config, tokenizer, base = saved_parts(trees, "config", "tokenizer", "base")
    return SavedModel(path, manifest.step, header, config, tokenizer, base, average)


def export_safetensors(
    model: SavedModel,
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    fs: FileSystem | None = None,
) -> Path:
    """Write a plain safetensors file: the model's own names, each tied tensor once.

    `safetensors.torch.load_model` loads it: the metadata names the other names of tied tensors.

    Args:
        target: the file, if it ends in `.safetensors`; otherwise a folder, in which it will be `model.safetensors`.
        dtype: of the floating-point tensors; None leaves each as the model has it.
        replace: whether to replace an existing file.

    Returns:
        The file.

    Raises:
        CheckpointError: there is something already, or a value is too large for `dtype`.
        ExportError: it could not be written; no partial file is left.
    """
    fs, path = fs or FileSystem(), Path(target).resolve()
    file = path if path.suffix == ".safetensors" else path / WEIGHTS
    metadata = {"format": "pt", "step": str(model.step), **model.header.metadata}
    names = {place.name: place.name for place in model.header.places}
    with _writing(file):
        recover(fs, file)
        check_replaceable_file(file, replace)
    with _writing(file), temporary_beside(fs, file) as temporary:
        write_file(fs, temporary, _stream(fs, model, names, metadata, dtype))
        fs.rename(temporary, file)
        fs.sync_directory(file.parent)
    return file


def export_hugging_face(
    model: SavedModel,
    target: str | os.PathLike[str],
    *,
    norm_eps: float,
    tokenizer: HuggingFaceTokenizer | None,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    fs: FileSystem | None = None,
) -> Path:
    """Write a Hugging Face folder of the reference transformer. `transformers` loads it as a Llama or a Qwen3.

    Args:
        target: the folder. An existing one must be empty or, with `replace`, hold nothing but an earlier export.
        norm_eps: what the model adds to the mean square in every RMSNorm.
        tokenizer: that of the run; None when there is none.
        dtype: of the weights; None leaves them as the model has them.
        replace: whether to replace an earlier export.

    Returns:
        The folder.

    Raises:
        CheckpointError: the model is not the reference transformer, the folder cannot be replaced, or a value is too
            large for `dtype`.
        ExportError: it could not be written; no partial folder is left.
    """
    fs, folder = fs or FileSystem(), Path(target).resolve()
    with _writing(folder):
        recover(fs, folder)
        _check_replaceable_folder(folder, replace)
    files = _hugging_face_files(fs, model, norm_eps, tokenizer, dtype)
    with _writing(folder), temporary_beside(fs, folder) as temporary:
        fs.make_directory(temporary)
        for name, chunks in files.items():
            write_file(fs, temporary / name, chunks)
        publish_folder(fs, temporary, folder, replace=replace)
    return folder


def export_pretrained(
    model: SavedModel,
    module: nn.Module,
    target: str | os.PathLike[str],
    *,
    tokenizer: HuggingFaceTokenizer | None,
    merge: Callable[[nn.Module], nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    fs: FileSystem | None = None,
) -> Path:
    """Write the folder that a model of Hugging Face, or one with adapters of `peft`, writes by `save_pretrained`.

    Args:
        module: the model, built as it was for the run. It gets the weights, and the dtype if there is one.
        merge: makes of the module with its weights the one that is written; None writes the module itself.
        target, tokenizer, dtype, replace: as for `export_hugging_face`.

    Returns:
        The folder.

    Raises:
        CheckpointError: the module has no `save_pretrained`, the weights are not those of the module, the folder cannot
            be replaced, or a value is too large for `dtype`.
        ExportError: it could not be written; no partial folder is left.
    """
    written: Any = module
    if not callable(getattr(written, "save_pretrained", None)):
        raise CheckpointError(
            f"{model.path}: only the reference transformer and models with a method save_pretrained have a Hugging "
            f"Face form, and this is {type(module).__name__}; export it with --format safetensors"
        )
    fs, folder = fs or FileSystem(), Path(target).resolve()
    with _writing(folder):
        recover(fs, folder)
        _check_replaceable_folder(folder, replace)
    if merge is not None:
        # In the dtypes of the run: rounded weights would lose what the adapters add to them.
        load_initial_weights(module, model.path)
        written = _converted(merge(module), dtype)
    else:
        load_initial_weights(module.to(dtype) if dtype is not None else module, model.path)
    with _writing(folder), temporary_beside(fs, folder) as temporary:
        fs.make_directory(temporary)
        written.save_pretrained(temporary)
        (temporary / _MODEL_CARD).unlink(missing_ok=True)
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                with FileIO(path, "r+") as file:
                    fs.sync(file)
        for name, chunks in _tokenizer_files(tokenizer, None).items():
            write_file(fs, temporary / name, chunks)
        publish_folder(fs, temporary, folder, replace=replace)
    return folder


# ---------------------------------------------------------------------- checking the checkpoint


def _check_plain(tree: Any, header: TensorHeader) -> None:
    """Raise CheckpointError unless the model's state has one tensor for each name, and nothing else."""
    if not isinstance(tree, dict):
        raise CheckpointError("it has no model")
    names = {place.name for place in header.places}
    others = [
        name
        for name, value in tree.items()
        if value != {"$tensor": name if name in names else header.metadata.get(name)}
    ]
    if others:
        raise CheckpointError(
            f"the model's state has entries that are not real tensors under their own names ({', '.join(others[:5])}), "
            f"which a plain file cannot hold; {MODEL_TENSORS} in the checkpoint holds the tensors alone"
        )


def _check_average(average: Mapping[str, StoredTensor], header: TensorHeader) -> None:
    shapes = {place.name: place.shape for place in header.places}
    foreign = [
        name
        for name, stored in average.items()
        if shapes.get(header.metadata.get(name, name)) != stored.place.shape or not stored.place.dtype.is_floating_point
    ]
    if foreign:
        raise CheckpointError(f"the averaged weights (optimizer.ema) are not those of its model: {foreign[0]!r}")


# ---------------------------------------------------------------------- a Hugging Face folder


def _hugging_face_files(
    fs: FileSystem,
    model: SavedModel,
    norm_eps: float,
    tokenizer: HuggingFaceTokenizer | None,
    dtype: torch.dtype | None,
) -> dict[str, Iterable[bytes | memoryview]]:
    section = _reference_section(model)
    places = model.header.places
    dtypes = {_target_dtype(place, dtype) for place in places}
    if len(dtypes) != 1:
        raise CheckpointError(
            "its weights are of several dtypes, which a Hugging Face model has not; choose one with --dtype"
        )
    (of_weights,) = dtypes
    with reading(model.path):
        config = hugging_face_config(
            section,
            {place.name: place.shape for place in places},
            norm_eps=norm_eps,
            token_id=tokenizer and tokenizer.separator_id,
            dtype=str(of_weights).removeprefix("torch."),
        )
    token_ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    names = to_llama(place.name for place in places)
    ones = {name: torch.ones(shape, dtype=of_weights) for name, shape in weights_of_ones(section).items()}
    files: dict[str, Iterable[bytes | memoryview]] = {
        WEIGHTS: _stream(fs, model, names, {"format": "pt"}, dtype, ones),
        CONFIG: [_json(config)],
        GENERATION_CONFIG: [_json({"_from_model_config": True, **token_ids})],
    }
    return files | _tokenizer_files(tokenizer, section.max_seq_len)


def _reference_section(model: SavedModel) -> ModelConfig:
    given = (model.config or {}).get("model")
    if not isinstance(given, dict) or given.get("name") not in BUILT_IN_MODELS:
        kind = f"the model {given.get('name')!r}" if isinstance(given, dict) else "a model without a configuration"
        raise CheckpointError(
            f"{model.path}: the reference transformer has a Hugging Face form, and this is {kind}; export it with "
            "--format safetensors, or, if it has a method save_pretrained, name the run's folder or YAML, since its "
            "plugins define it"
        )
    try:
        return ModelConfig(**given)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{model.path}: its configuration cannot be used: {error}") from error


def _tokenizer_files(
    tokenizer: HuggingFaceTokenizer | None, longest: int | None
) -> dict[str, Iterable[bytes | memoryview]]:
    """The tokenizer as it is, with what keeps `transformers` from taking that of the model's kind instead."""
    if tokenizer is None or tokenizer.json is None:
        return {}
    tokens = {token["id"]: token["content"] for token in json.loads(tokenizer.json)["added_tokens"]}
    separator = tokens[tokenizer.separator_id]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": separator,
        "eos_token": separator,
        "clean_up_tokenization_spaces": False,
        **({} if longest is None else {"model_max_length": longest}),
        **tokenizer.settings,
    }
    files: dict[str, Iterable[bytes | memoryview]] = {
        TOKENIZER: [tokenizer.json.encode()],
        TOKENIZER_CONFIG: [_json(config)],
    }
    return files if tokenizer.chat_template is None else {**files, CHAT_TEMPLATE: [tokenizer.chat_template]}


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, allow_nan=False).encode("ascii") + b"\n"


# ---------------------------------------------------------------------- weights


def _stream(
    fs: FileSystem,
    model: SavedModel,
    names: Mapping[str, str],
    metadata: Mapping[str, str],
    dtype: torch.dtype | None,
    further: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file with the model's tensors under new names, and further ones."""
    tensors = model.tensors()
    places = {names[place.name]: place for place in model.header.places}
    outlines = {
        name: torch.empty(place.shape, dtype=_target_dtype(place, dtype), device="meta")
        for name, place in places.items()
    } | dict(further)
    yield safetensors_header(outlines, metadata)
    with reading(model.path), ExitStack() as stack:
        files = {path: stack.enter_context(fs.open(path)) for path in sorted({s.file for s in tensors.values()})}
        for name in file_order(outlines):
            if name in further:
                yield bytes_of(further[name])
                continue
            own_name = places[name].name
            stored = tensors[own_name]
            file = files[stored.file]
            file.seek(stored.begin)
            tensor = read_tensor(partial(fill, file), stored.place)
            converted = tensor.to(outlines[name].dtype)
            infinite = converted.isinf()
            if infinite.any() and bool((infinite & ~tensor.isinf()).any()):
                raise CheckpointError(
                    f"{own_name} has values that are too large for {converted.dtype}; choose bfloat16 or float32"
                )
            yield bytes_of(converted)


def _converted(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The module in a dtype. Raises CheckpointError for a weight that becomes infinite."""
    if dtype is None:
        return module
    module = module.to(dtype)
    for name, weight in module.named_parameters():
        if bool(weight.isinf().any()):
            raise CheckpointError(f"{name} has values that are too large for {dtype}; choose bfloat16 or float32")
    return module


def _target_dtype(place: TensorPlace, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and place.dtype.is_floating_point else place.dtype


# ---------------------------------------------------------------------- checking the target


def _check_outside_checkpoints(target: Path) -> None:
    """Raise CheckpointError if the target is inside a checkpoint, this one or another."""
    for folder in (target, *target.parents):
        if (folder / MANIFEST).is_file() and (folder / STATE_TREE).is_file():
            raise CheckpointError(f"{target} is inside the checkpoint {folder.name}; name another place")


def check_replaceable_file(file: Path, replace: bool) -> None:
    """Raise CheckpointError unless the file may be written without losing something."""
    _check_outside_checkpoints(file)
    if file.is_dir():
        raise CheckpointError(f"{file} is a folder; name a file")
    if file.exists() and not replace:
        raise CheckpointError(f"{file} is there already; --force replaces it")


def _check_replaceable_folder(folder: Path, replace: bool) -> None:
    """Raise CheckpointError unless the folder may be written without losing something."""
    _check_outside_checkpoints(folder)
    if folder.suffix == ".safetensors":
        raise CheckpointError(f"{folder} has the name of a file; name a folder")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name a folder")
    there = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in there if name not in _FOLDER_FILES and not _PART_OF_WEIGHTS.fullmatch(name)]
    if foreign:
        raise CheckpointError(f"{folder} holds {foreign[0]!r}, which is not part of an export; name another folder")
    if there and not replace:
        raise CheckpointError(f"{folder} holds an export already; --force replaces it")


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"{target}: cannot be written: {error.strerror or error}") from error
