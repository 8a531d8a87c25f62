"""Data: tokenizers, datasets, token shards, and loaders whose position can be saved.

A name is imported when it is first asked for, so that preparing data needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers and editors; `_EXPORTS` says the same to the interpreter.
if TYPE_CHECKING:
    from speedtronic.data.build import TrainingData as TrainingData
    from speedtronic.data.build import build_data as build_data
    from speedtronic.data.build import build_dataloader as build_dataloader
    from speedtronic.data.loading.batch_stream import BatchStream as BatchStream
    from speedtronic.data.loading.batch_stream import infinite_batches as infinite_batches
    from speedtronic.data.loading.collate import collate_batch as collate_batch
    from speedtronic.data.loading.collate import collate_causal as collate_causal
    from speedtronic.data.loading.datasets import ShardDataset as ShardDataset
    from speedtronic.data.loading.datasets import SyntheticTokenDataset as SyntheticTokenDataset
    from speedtronic.data.loading.datasets import TextFileTokenDataset as TextFileTokenDataset
    from speedtronic.data.loading.datasets import TokenDataset as TokenDataset
    from speedtronic.data.loading.iterable_loader import StreamLoader as StreamLoader
    from speedtronic.data.loading.loader import TokenLoader as TokenLoader
    from speedtronic.data.shard_writer import ShardWriter as ShardWriter
    from speedtronic.data.shards import ShardSet as ShardSet
    from speedtronic.data.tokenizers.base import StreamDecoder as StreamDecoder
    from speedtronic.data.tokenizers.base import Tokenizer as Tokenizer
    from speedtronic.data.tokenizers.chars import CharTokenizer as CharTokenizer
    from speedtronic.data.tokenizers.chars import CorpusCharTokenizer as CorpusCharTokenizer
    from speedtronic.data.tokenizers.from_file import tokenizer_from_spec as tokenizer_from_spec

_EXPORTS = {
    "build": ("TrainingData", "build_data", "build_dataloader"),
    "loading.collate": ("collate_batch", "collate_causal"),
    "loading.datasets": ("ShardDataset", "SyntheticTokenDataset", "TextFileTokenDataset", "TokenDataset"),
    "loading.iterable_loader": ("StreamLoader",),
    "loading.loader": ("TokenLoader",),
    "shards": ("ShardSet",),
    "shard_writer": ("ShardWriter",),
    "loading.batch_stream": ("BatchStream", "infinite_batches"),
    "tokenizers.chars": ("CharTokenizer", "CorpusCharTokenizer"),
    "tokenizers.base": ("StreamDecoder", "Tokenizer"),
    "tokenizers.from_file": ("tokenizer_from_spec",),
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
