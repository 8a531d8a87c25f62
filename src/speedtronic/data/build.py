"""From the `data` section to loaders."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, Subset

from speedtronic.config import DataConfig, SpeedtronicConfig
from speedtronic.data.loading.collate import CollateForModel, collate_batch
from speedtronic.data.loading.datasets import ShardDataset, SyntheticTokenDataset, TextFileTokenDataset, TokenDataset
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.loader import Collate, TokenLoader
from speedtronic.data.text import check_text_file, read_text
from speedtronic.data.tokenizers.base import Tokenizer
from speedtronic.data.tokenizers.chars import BYTE_VALUES, CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.errors import ConfigError, DataError

Loader = TokenLoader | StreamLoader

_BUILT_IN_MODELS = frozenset({"reference_transformer", "gpt"})


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Attributes:
        train: batches without end, epoch after epoch.
        validation: the held-out part, sequential and complete on every rank; None when nothing is held out.
        tokenizer: turns the data's ids into text; None where the data has no text.
    """

    train: Loader
    validation: Loader | None
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Source:
    train: Dataset[Any]
    validation: Dataset[Any] | None = None
    tokenizer: Tokenizer | None = None


class _Reader(NamedTuple):
    """Which of how many this is that read the data together, and the seed of what it reads."""

    rank: int
    world_size: int
    seed: int


def build_data(
    config: SpeedtronicConfig,
    *,
    pin_memory: bool,
    rank: int = 0,
    world_size: int = 1,
    order_seed: int | None = None,
) -> TrainingData:
    """The training and validation loaders of a configuration.

    Args:
        config: read are `data` with the resolved vocabulary, block size and seed, and what a built-in model
            can take of them.
        pin_memory: what `data.pin_memory: null` means on the device of this run.
        rank, world_size: which of how many readers this is that share the training part.
        order_seed: of the training part's order and of its samples' randomness; `data.seed` without it.

    Raises:
        ConfigError: no source of data, options that exclude each other, or sizes beyond a built-in model's.
        DataError: the data cannot be used as configured.
        MissingExtraError: the library that reads the tokenizer is not installed.
    """
    _check_model_sizes(config)
    source = _held_out(_source(config.data), config.data)
    collate = _collate(config)
    reader = _Reader(rank, world_size, order_seed if order_seed is not None else _seed(config.data))
    train = _training_loader(source.train, config.data, collate, pin_memory, reader)
    validation = None
    if source.validation is not None:
        alone = _Reader(0, 1, _seed(config.data))
        validation = _loader(source.validation, config.data, collate, pin_memory, False, False, alone)
    return TrainingData(train, validation, source.tokenizer)


def build_dataloader(
    config: SpeedtronicConfig | DataConfig,
    *,
    dataset: Dataset[Any] | None = None,
    tokenizer: Tokenizer | None = None,
    pin_memory_device: bool = False,
    vocab_size: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """The training loader of a configuration, without what `data.validation_fraction` holds out.

    Args:
        config: a whole configuration, or its data section.
        dataset: used in place of the configured source; map-style or iterable.
        tokenizer: used in place of `data.tokenizer` for `data.text_path`.
        pin_memory_device: what `data.pin_memory: null` means on the device that the batches go to.
        vocab_size: used in place of `data.vocab_size`.
        rank, world_size: which of how many readers this is that share the data, each sample once.

    Raises:
        ConfigError, DataError, MissingExtraError: as `build_data`.
    """
    data = config if isinstance(config, DataConfig) else config.validate().data
    if None in (data.vocab_size, data.block_size, data.seed):
        data = SpeedtronicConfig(data=data).data
    if vocab_size is not None:
        data = data.model_copy(update={"vocab_size": vocab_size})
    source = _source(data, tokenizer) if dataset is None else _Source(dataset)
    collate = collate_batch if isinstance(config, DataConfig) else _collate(config)
    reader = _Reader(rank, world_size, _seed(data))
    return _training_loader(_held_out(source, data).train, data, collate, pin_memory_device, reader)


def _collate(config: SpeedtronicConfig) -> Collate:
    """What a built-in model cannot take is seen in the batches; what others take is theirs to know."""
    if config.model.name not in _BUILT_IN_MODELS:
        return collate_batch
    return CollateForModel(config.model.vocab_size, config.model.max_seq_len)


def _check_model_sizes(config: SpeedtronicConfig) -> None:
    if config.model.name not in _BUILT_IN_MODELS:
        return
    for key, needed, limit, held in (
        ("block_size", _block_size(config.data), "max_seq_len", config.model.max_seq_len),
        ("vocab_size", _vocab_size(config.data), "vocab_size", config.model.vocab_size),
    ):
        if needed > held:
            raise ConfigError(
                f"data.{key} is {needed}, more than the {held} of model.{limit} that the model can take; raise "
                f"model.{limit} or lower data.{key}"
            )


def _source(data: DataConfig, tokenizer: Tokenizer | None = None) -> _Source:
    if data.dataset is not None:
        return _from_factory(data.dataset, data)
    if data.shards is not None:
        return _from_shards(data.shards, data)
    if data.text_path is not None:
        return _from_text(Path(data.text_path), data, tokenizer)
    if data.synthetic:
        return _synthetic(data)
    raise ConfigError("data: no source; give data.shards, data.text_path or data.dataset, or set data.synthetic: true")


def _from_factory(name: str, data: DataConfig) -> _Source:
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f"data.dataset: {name!r} must name a factory as package.module:function")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"data.dataset: cannot import {module!r}: {error}") from error
    if not hasattr(imported, function):
        raise ConfigError(f"data.dataset: the module {module!r} has no {function!r}")
    factory = getattr(imported, function)
    if not callable(factory):
        raise ConfigError(f"data.dataset: {name} must be a function, not {type(factory).__name__}")
    try:
        made = factory(data)
    except Exception as error:  # the factory is the user's code; the error is raised on, and names it
        error.add_note(f"raised by the factory {name} that data.dataset names")
        raise
    train, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    _check_part(train, name)
    if validation is not None:
        _check_part(validation, name)
    return _Source(train, validation)


def _check_part(part: Any, factory: str) -> None:
    # A class has the methods of its datasets, and a tuple would be a dataset of its members.
    wrong = isinstance(part, type | tuple | Mapping | str | bytes)
    indexable = hasattr(part, "__getitem__") and hasattr(part, "__len__") and not wrong
    if not (indexable or isinstance(part, IterableDataset)):
        found = f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__
        raise ConfigError(
            f"data.dataset: {factory} must return a Dataset with __len__ and __getitem__, an IterableDataset or a pair "
            f"(training, validation), not {found}"
        )


def _from_shards(folder: str, data: DataConfig) -> _Source:
    dataset = ShardDataset(folder, _block_size(data), data.document_mask)
    _check_vocabulary(dataset.shards.tokenizer, folder, data)
    return _Source(dataset, tokenizer=dataset.shards.tokenizer)


def _from_text(path: Path, data: DataConfig, tokenizer: Tokenizer | None) -> _Source:
    tokenizer = tokenizer or _text_tokenizer(path, data)
    _check_vocabulary(tokenizer, str(path), data)
    return _Source(TextFileTokenDataset(path, _block_size(data), tokenizer), tokenizer=tokenizer)


def _text_tokenizer(path: Path, data: DataConfig) -> Tokenizer:
    match data.tokenizer:
        case "bytes":
            return CharTokenizer(min(BYTE_VALUES, _vocab_size(data)))
        case "chars":
            check_text_file(path)
            return CorpusCharTokenizer.from_texts(read_text(path))
        case path_of_tokenizer:
            return load_tokenizer(path_of_tokenizer)


def _check_vocabulary(tokenizer: Tokenizer, origin: str, data: DataConfig) -> None:
    if tokenizer.vocab_size > _vocab_size(data):
        raise DataError(
            f"{origin}: its tokenizer has a vocabulary of {tokenizer.vocab_size}, but data.vocab_size is "
            f"{_vocab_size(data)}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )


def _synthetic(data: DataConfig) -> _Source:
    block_size = _block_size(data)
    if data.num_tokens < block_size:
        raise DataError(
            f"synthetic data: data.num_tokens is {data.num_tokens}, less than one block of {block_size} tokens"
        )
    samples = data.num_tokens // block_size
    return _Source(SyntheticTokenDataset(samples, block_size, _vocab_size(data), _seed(data)))


def _held_out(source: _Source, data: DataConfig) -> _Source:
    _check_labels(source, data)
    if not data.validation_fraction:
        return source
    if source.validation is not None:
        raise ConfigError("data.validation_fraction: data.dataset brings a validation part already; leave this at 0")
    if isinstance(source.train, IterableDataset):
        raise ConfigError("data.validation_fraction: needs data with a length; an IterableDataset has none")
    size = len(source.train)  # type: ignore[arg-type]
    held_out = max(1, int(size * data.validation_fraction))
    if held_out >= size:
        raise DataError(
            f"data.validation_fraction: {size} sample{'' if size == 1 else 's'} cannot be divided into a "
            f"training and a validation part; use more data or a smaller data.block_size"
        )
    cut = size - held_out
    return _Source(_part(source.train, 0, cut), _part(source.train, cut, size), source.tokenizer)


def _check_labels(source: _Source, data: DataConfig) -> None:
    if data.labels == "unshifted" and any(isinstance(part, TokenDataset) for part in (source.train, source.validation)):
        raise ConfigError(
            "data.labels: unshifted is for data whose labels repeat the inputs, as a data.dataset of yours may; text, "
            "shards and synthetic data have next-token labels already: set data.labels to aligned"
        )


def _part(dataset: Dataset[Any], start: int, stop: int) -> Dataset[Any]:
    if isinstance(dataset, TokenDataset):
        return dataset.part(start, stop)
    return Subset(dataset, range(start, stop))


def _training_loader(
    dataset: Dataset[Any], data: DataConfig, collate: Collate, pin_memory: bool, reader: _Reader
) -> Loader:
    if data.shuffle and isinstance(dataset, IterableDataset):
        raise ConfigError("data.shuffle: an IterableDataset sets its own order; leave this false")
    return _loader(dataset, data, collate, pin_memory, data.shuffle, data.drop_last, reader)


def _loader(
    dataset: Dataset[Any],
    data: DataConfig,
    collate: Collate,
    pin_memory: bool,
    shuffle: bool,
    drop_last: bool,
    reader: _Reader,
) -> Loader:
    options: dict[str, Any] = {
        "seed": reader.seed,
        "drop_last": drop_last,
        "num_workers": data.num_workers,
        "prefetch_factor": data.prefetch_factor,
        "pin_memory": pin_memory if data.pin_memory is None else data.pin_memory,
        "collate": collate,
        "rank": reader.rank,
        "world_size": reader.world_size,
    }
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, data.micro_batch_size, **options)
    return TokenLoader(dataset, data.micro_batch_size, shuffle=shuffle, **options)


def _block_size(data: DataConfig) -> int:
    return _resolved(data.block_size, "block_size")


def _vocab_size(data: DataConfig) -> int:
    return _resolved(data.vocab_size, "vocab_size")


def _seed(data: DataConfig) -> int:
    return _resolved(data.seed, "seed")


def _resolved(value: int | None, key: str) -> int:
    if value is None:
        raise ConfigError(f"data.{key}: not resolved; take the section from a validated SpeedtronicConfig")
    return value
