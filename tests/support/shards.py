"""Small folders of shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from speedtronic.data.shard_writer import ShardWriter
from speedtronic.data.shards import ShardSet
from speedtronic.data.tokenizers.chars import CharTokenizer

TEXT = "The quick brown fox. " * 5


def make(folder: Path, text: str = TEXT, shard_tokens: int = 16) -> Path:
    """Write one document."""
    tokenizer = CharTokenizer()
    with ShardWriter(folder, tokenizer=tokenizer, shard_tokens=shard_tokens) as writer:
        writer.write(tokenizer.encode_array(text))
        writer.end_document()
    return folder


def read(shards: ShardSet, start: int, count: int) -> list[int]:
    out = np.empty(count, np.int64)
    shards.read(start, out)
    return out.tolist()
