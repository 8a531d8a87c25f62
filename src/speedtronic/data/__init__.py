"""Data: tokenizers, datasets, token shards, and loaders whose position can be saved."""

from __future__ import annotations

from speedtronic.data.build import TrainingData, build_data, build_dataloader
from speedtronic.data.collate import collate_batch, collate_causal
from speedtronic.data.datasets import (
    ShardDataset,
    SyntheticTokenDataset,
    TextFileTokenDataset,
    TokenDataset,
)
from speedtronic.data.loader import TokenLoader
from speedtronic.data.shards import ShardSet, ShardWriter
from speedtronic.data.stream import BatchStream, infinite_batches
from speedtronic.data.tokenizers import (
    CharTokenizer,
    CorpusCharTokenizer,
    StreamDecoder,
    Tokenizer,
    tokenizer_from_spec,
)

__all__ = [
    "BatchStream",
    "CharTokenizer",
    "CorpusCharTokenizer",
    "ShardDataset",
    "ShardSet",
    "ShardWriter",
    "StreamDecoder",
    "SyntheticTokenDataset",
    "TextFileTokenDataset",
    "TokenDataset",
    "TokenLoader",
    "Tokenizer",
    "TrainingData",
    "build_data",
    "build_dataloader",
    "collate_batch",
    "collate_causal",
    "infinite_batches",
    "tokenizer_from_spec",
]
