"""From the `data` section to loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset, Subset

from speedtronic.config import DataConfig, SpeedtronicConfig
from speedtronic.config.checks import BUILT_IN_MODELS, LABELS_ARE_ALIGNED, NO_SOURCE, beyond_the_model
from speedtronic.data.loading.collate import CollateForModel, collate_batch
from speedtronic.data.loading.datasets import (
    PackedDataset,
    ShardDataset,
    SyntheticTokenDataset,
    TextFileTokenDataset,
    TokenDataset,
)
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.loader import Collate, TokenLoader
from speedtronic.data.loading.mixture import JoinedDataset, MixtureDataset
from speedtronic.data.prepare.chat_template import load_chat_template
from speedtronic.data.prepare.records import ChatRecords
from speedtronic.data.prepare.text_cache import cached_tokens
from speedtronic.data.shards import ShardSet
from speedtronic.data.text import check_text_file, read_text
from speedtronic.data.tokenizers.base import Tokenizer
from speedtronic.data.tokenizers.chars import BYTE_VALUES, CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.errors import ConfigError, DataError, warn
from speedtronic.registry import import_factory

Loader = TokenLoader | StreamLoader


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Attributes:
        train: batches without end, epoch after epoch.
        validation: the held-out part, sequential and complete; or a rank's part of it, where the ranks measure
            together. None when nothing is held out.
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


def build_data(
    config: SpeedtronicConfig,
    *,
    pin_memory: bool,
    rank: int = 0,
    world_size: int = 1,
    order_seed: int | None = None,
    in_step: int = 1,
    warn: Callable[[str], None] = warn,
) -> TrainingData:
    """The training and validation loaders of a configuration.

    Args:
        config: its `data` section is used, with the resolved vocabulary, block size and seed, and the sizes of a
            built-in model.
        pin_memory: what `data.pin_memory: null` means on the device of this run.
        rank, world_size: this reader's number, and how many readers share the training part.
        order_seed: the seed of the training part's order and of its samples' randomness; `data.seed` without it.
        in_step: how many of the readers are ranks that train one model together, from a multiple of it on. They divide
            what is held out, unless `eval.metrics` need all of it in one place.
        warn: told where the data cannot be kept in the cache.

    Raises:
        ConfigError: no source of data, options that exclude each other, or sizes beyond a built-in model's.
        DataError: the data cannot be used as configured.
        MissingExtraError: the library that reads the tokenizer is not installed.
    """
    data = config.data
    seed = _resolved(data.seed, "seed")
    if problems := list(beyond_the_model(config)):
        raise ConfigError("\n".join(problems))
    source = _hold_out(_open_source(data, warn=warn), data)
    collate = _collate(config)
    train = _loader(
        source.train,
        data,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        seed=seed if order_seed is None else order_seed,
        rank=rank,
        world_size=world_size,
        in_step=in_step,
        collate=collate,
        pin_memory=pin_memory,
    )
    validation = None
    if source.validation is not None:
        validation = _loader(
            source.validation,
            data,
            shuffle=False,
            drop_last=False,
            seed=seed,
            **_division_of_held_out(config, rank, in_step),
            collate=collate,
            pin_memory=pin_memory,
        )
    return TrainingData(train, validation, source.tokenizer)


def build_set(
    config: SpeedtronicConfig,
    name: str,
    tokenizer: Tokenizer | None,
    *,
    pin_memory: bool,
    rank: int = 0,
    in_step: int = 1,
    warn: Callable[[str], None] = warn,
) -> tuple[Loader, Tokenizer | None]:
    """The loader of one of `eval.sets`: sequential, with every sample.

    Args:
        config: a resolved configuration.
        name: of the set.
        tokenizer: that of the training data, with which a text is encoded.
        pin_memory: what `data.pin_memory: null` means on the device of this run.
        rank, in_step: as for `build_data`, which divides the set alike.
        warn: told where the data cannot be kept in the cache.

    Returns:
        The loader, and the tokenizer of its ids.

    Raises:
        ConfigError: the set does not fit the training data or the model.
        DataError: its data cannot be used as configured; the message names the set.
        MissingExtraError: the library that reads the tokenizer is not installed.
    """
    section = config.eval.sets[name]
    given = {key: value for key, value in section if value is not None}
    sources = dict.fromkeys(("text_path", "shards", "mixture", "chat", "dataset"))
    where = {**sources, "document_mask": False, "validation_fraction": 0.0}
    data = config.data.model_copy(update={**where, **given})
    settings = config.model_copy(update={"data": data})
    if problems := list(beyond_the_model(settings)):
        raise ConfigError("\n".join(f"eval.sets.{name}: {problem}" for problem in problems))
    if data.text_path is not None and tokenizer is None:
        raise ConfigError(
            f"eval.sets.{name}.text_path: the training data has no tokenizer to encode a text with; name "
            "shards or a dataset instead"
        )
    try:
        source = _open_source(data, tokenizer if data.text_path is not None else None, warn=warn)
    except DataError as error:
        raise DataError(f"eval.sets.{name}: {error}") from error
    if source.validation is not None:
        raise ConfigError(
            f"eval.sets.{name}.dataset: {data.dataset} returned a pair (training, validation), and a set is one "
            "Dataset; let the factory return the one to evaluate on"
        )
    if data.labels == "unshifted" and isinstance(source.train, TokenDataset):
        raise ConfigError(f"eval.sets.{name}: {LABELS_ARE_ALIGNED}")
    own = source.tokenizer
    if data.shards is not None and tokenizer is not None and own is not None and own.spec() != tokenizer.spec():
        raise DataError(
            f"eval.sets.{name}.shards: {data.shards} was made with another tokenizer than the training data, so its "
            "ids mean something else to the model; prepare it with the same one"
        )
    loader = _loader(
        source.train,
        data,
        shuffle=False,
        drop_last=False,
        seed=_resolved(data.seed, "seed"),
        **_division_of_held_out(config, rank, in_step),
        collate=_collate(settings),
        pin_memory=pin_memory,
    )
    return loader, own


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
        rank, world_size: this reader's number, and how many readers share the data, each sample once.

    Raises:
        ConfigError, DataError, MissingExtraError: as `build_data`.
    """
    data = config if isinstance(config, DataConfig) else config.validate().data
    if None in (data.vocab_size, data.block_size, data.seed):
        data = SpeedtronicConfig(data=data).data
    if vocab_size is not None:
        data = data.model_copy(update={"vocab_size": vocab_size})
    if tokenizer is not None and (dataset is not None or data.text_path is None):
        raise ConfigError("tokenizer: is for data.text_path, and nothing else would be encoded with it; leave it out")
    source = _open_source(data, tokenizer) if dataset is None else _Source(dataset)
    return _loader(
        _hold_out(source, data).train,
        data,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        seed=_resolved(data.seed, "seed"),
        rank=rank,
        world_size=world_size,
        collate=collate_batch if isinstance(config, DataConfig) else _collate(config),
        pin_memory=pin_memory_device,
    )


def open_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer of the data that a section names, without its tokens; None where it has no text.

    Raises:
        DataError: what it is read from cannot be used: the shards, the tokenizer's file, or of `chars` the text itself.
        MissingExtraError: the library that reads it is not installed.
    """
    if data.dataset is not None:
        tokenizer, origin = None if data.tokenizer == "bytes" else load_tokenizer(data.tokenizer), data.tokenizer
    elif data.shards is not None:
        tokenizer, origin = ShardSet(data.shards).tokenizer, data.shards
    elif data.chat is not None:
        tokenizer, origin = load_tokenizer(data.tokenizer), data.tokenizer
    elif data.mixture is not None:
        origin = next(iter(data.mixture))
        tokenizer = ShardSet(origin).tokenizer
    elif data.text_path is not None:
        tokenizer, origin = _tokenizer_of_text(data, Path(data.text_path)), data.text_path
    else:
        return None
    if tokenizer is not None:
        _check_vocabulary(tokenizer, origin, _resolved(data.vocab_size, "vocab_size"))
    return tokenizer


def _collate(config: SpeedtronicConfig) -> Collate:
    """Batches for a built-in model are checked. Only other models know what they can take."""
    if config.model.name not in BUILT_IN_MODELS:
        return collate_batch
    return CollateForModel(config.model.vocab_size, config.model.max_seq_len)


def _loader(
    dataset: Dataset[Any],
    data: DataConfig,
    *,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    rank: int,
    world_size: int,
    collate: Collate,
    pin_memory: bool,
    in_step: int = 1,
) -> Loader:
    options: dict[str, Any] = {
        "seed": seed,
        "drop_last": drop_last,
        "num_workers": data.num_workers,
        "prefetch_factor": data.prefetch_factor,
        "pin_memory": pin_memory if data.pin_memory is None else data.pin_memory,
        "collate": collate,
        "rank": rank,
        "world_size": world_size,
        "in_step": in_step,
    }
    if not isinstance(dataset, IterableDataset):
        return TokenLoader(dataset, data.micro_batch_size, shuffle=shuffle, **options)
    if shuffle:
        raise ConfigError("data.shuffle: an IterableDataset sets its own order; leave this false")
    return StreamLoader(dataset, data.micro_batch_size, **options)


def _division_of_held_out(config: SpeedtronicConfig, rank: int, in_step: int) -> dict[str, int]:
    """How ranks in step share what is held out. A metric of a user's own must see all of it in one process."""
    ranks = 1 if config.eval.metrics else in_step
    return {"rank": rank % ranks, "world_size": ranks, "in_step": ranks}


def _resolved(value: int | None, key: str) -> int:
    if value is None:
        raise ConfigError(f"data.{key}: not resolved; take the section from a validated SpeedtronicConfig")
    return value


# ---------------------------------------------------------------------- sources


def _open_source(data: DataConfig, tokenizer: Tokenizer | None = None, warn: Callable[[str], None] = warn) -> _Source:
    """The data that the section names. `tokenizer` is used in place of `data.tokenizer`."""
    if data.dataset is not None:
        return _from_factory(data.dataset, data)
    block_size = _resolved(data.block_size, "block_size")
    vocab_size = _resolved(data.vocab_size, "vocab_size")
    if data.shards is not None:
        dataset = _documents(ShardSet(data.shards), data)
        return _Source(dataset, tokenizer=dataset.shards.tokenizer)
    if data.chat is not None:
        records = ChatRecords(load_chat_template(data.tokenizer))
        dataset = _documents(
            cached_tokens(Path(data.chat), load_tokenizer(data.tokenizer), chats=records, warn=warn), data
        )
        return _Source(dataset, tokenizer=dataset.shards.tokenizer)
    if data.mixture is not None:
        return _mixture(data, data.mixture)
    if data.text_path is not None:
        path = Path(data.text_path)
        check_text_file(path)
        if tokenizer is None:
            tokenizer = _tokenizer_of_text(data, path)
        _check_vocabulary(tokenizer, str(path), vocab_size)
        return _Source(TextFileTokenDataset(path, block_size, tokenizer, warn=warn), tokenizer=tokenizer)
    if data.synthetic:
        if data.num_tokens < block_size:
            raise DataError(
                f"synthetic data: data.num_tokens is {data.num_tokens}, less than one block of {block_size} tokens"
            )
        samples = data.num_tokens // block_size
        return _Source(SyntheticTokenDataset(samples, block_size, vocab_size, _resolved(data.seed, "seed")))
    raise ConfigError(NO_SOURCE)


def _documents(shards: ShardSet, data: DataConfig) -> ShardDataset | PackedDataset:
    """The samples of a prepared folder."""
    kind = PackedDataset if data.packing == "best_fit" else ShardDataset
    dataset = kind(shards, _resolved(data.block_size, "block_size"), data.document_mask)
    _check_vocabulary(shards.tokenizer, str(data.chat or shards.folder), _resolved(data.vocab_size, "vocab_size"))
    return dataset


def _mixture(data: DataConfig, weights: Mapping[str, float]) -> _Source:
    """Prepared folders, mixed by weights. What is held out is the end of each, so that no sample of it is repeated."""
    datasets = {folder: _documents(ShardSet(folder), data) for folder in weights}
    tokenizers = {folder: dataset.shards.tokenizer for folder, dataset in datasets.items()}
    (first, tokenizer), *others = tokenizers.items()
    for folder, other in others:
        if other.spec() != tokenizer.spec():
            raise DataError(
                f"data.mixture: {folder} was made with another tokenizer than {first}, so the same id means different "
                "text in them; prepare one of them again"
            )
    train: dict[str, TokenDataset] = {}
    held_out: list[TokenDataset] = []
    for folder, dataset in datasets.items():
        part = _hold_out(_Source(dataset), data)
        assert isinstance(part.train, TokenDataset), "as the whole is"
        train[folder] = part.train
        if isinstance(part.validation, TokenDataset):
            held_out.append(part.validation)
    mixed = MixtureDataset(train, weights, _resolved(data.seed, "seed"))
    return _Source(mixed, JoinedDataset(held_out) if held_out else None, tokenizer)


def _tokenizer_of_text(data: DataConfig, path: Path) -> Tokenizer:
    """What `data.tokenizer` means for the text at a path."""
    if data.tokenizer == "bytes":
        return CharTokenizer(min(BYTE_VALUES, _resolved(data.vocab_size, "vocab_size")))
    if data.tokenizer == "chars":
        check_text_file(path)
        return CorpusCharTokenizer.from_texts(read_text(path))
    return load_tokenizer(data.tokenizer)


def _check_vocabulary(tokenizer: Tokenizer, origin: str, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{origin}: its tokenizer has a vocabulary of {tokenizer.vocab_size}, but data.vocab_size is "
            f"{vocab_size}; set model.vocab_size to {tokenizer.vocab_size} or more"
        )


def _from_factory(name: str, data: DataConfig) -> _Source:
    factory = import_factory(name, key="data.dataset")
    try:
        made = factory(data)
    except Exception as error:  # the factory is the user's code; the error is raised on, and names it
        error.add_note(f"raised by the factory {name} that data.dataset names")
        raise
    # Check what it returned.
    train, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for part in (train,) if validation is None else (train, validation):
        # A class has the methods of its instances, and a tuple, or a list of datasets, would be one of its members.
        wrong = isinstance(part, type | tuple | Mapping | str | bytes)
        wrong = wrong or (isinstance(part, list) and any(isinstance(member, Dataset) for member in part))
        indexable = hasattr(part, "__getitem__") and hasattr(part, "__len__") and not wrong
        if not (indexable or isinstance(part, IterableDataset)):
            found = f"the class {part.__name__}" if isinstance(part, type) else type(part).__name__
            raise ConfigError(
                f"data.dataset: {name} must return a Dataset with __len__ and __getitem__, an IterableDataset or a "
                f"pair (training, validation), not {found}"
            )
    # The samples are what they are. The tokenizer is that of their ids, so that what is trained on them can write.
    if data.tokenizer == "bytes":
        return _Source(train, validation)
    tokenizer = load_tokenizer(data.tokenizer)
    _check_vocabulary(tokenizer, data.tokenizer, _resolved(data.vocab_size, "vocab_size"))
    return _Source(train, validation, tokenizer)


# ---------------------------------------------------------------------- the held-out part


def _hold_out(source: _Source, data: DataConfig) -> _Source:
    if data.labels == "unshifted" and any(isinstance(part, TokenDataset) for part in (source.train, source.validation)):
        raise ConfigError(LABELS_ARE_ALIGNED)
    if not data.validation_fraction or isinstance(source.train, MixtureDataset):  # its parts have been divided
        return source
    if source.validation is not None:
        raise ConfigError("data.validation_fraction: data.dataset already has a validation part; leave this at 0")
    if isinstance(source.train, IterableDataset):
        raise ConfigError("data.validation_fraction: needs data with a length; an IterableDataset has none")
    size = len(source.train)  # type: ignore[arg-type]  # all others were checked to have a length, or will be
    held_out = max(1, int(size * data.validation_fraction))
    if held_out >= size:
        raise DataError(
            f"data.validation_fraction: {size} sample{'' if size == 1 else 's'} cannot be divided into a "
            f"training and a validation part; use more data or a smaller data.block_size"
        )
    cut = size - held_out
    return _Source(_part(source.train, 0, cut), _part(source.train, cut, size), source.tokenizer)


def _part(dataset: Dataset[Any], start: int, stop: int) -> Dataset[Any]:
    if isinstance(dataset, TokenDataset):
        return dataset.part(start, stop)
    return Subset(dataset, range(start, stop))
