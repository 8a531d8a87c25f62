"""Batches from shards beside batches from text that is read and encoded on the way."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from speedtronic.bench.figures import Figure, LeftOutError, Settings, interleaved, ratios, seconds_of
from speedtronic.config import SpeedtronicConfig
from speedtronic.data import build_dataloader, infinite_batches
from speedtronic.data.prepare.prepare import prepare
from speedtronic.data.prepare.sources import library_sources, texts
from speedtronic.data.prepare.train_tokenizer import train_tokenizer

BLOCK = 128


class StreamedText(IterableDataset[dict[str, torch.Tensor]]):
    """Blocks of a text whose documents are read and encoded one after the other, again and again."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self._folder, self._tokenizer = folder, tokenizer

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._tokenizer))
        rest: list[int] = []
        while True:
            for path in sorted(self._folder.iterdir()):
                rest += tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
                ids = torch.tensor(rest)
                whole = max(0, len(rest) - 1) // BLOCK * BLOCK
                for start in range(0, whole, BLOCK):
                    block = ids[start : start + BLOCK + 1]
                    yield {"input_ids": block[:-1], "labels": block[1:]}
                rest = rest[whole:]


def shards_beside_text(settings: Settings) -> Iterator[Figure]:
    """The rate of batches from memory-mapped shards over that of text streamed through a tokenizer."""
    if find_spec("tokenizers") is None:
        raise LeftOutError("needs tokenizers: install speedtronic[tokenizers]")
    size, vocab_size = (200_000, 300) if settings.quick else (10**7, 8192)
    with tempfile.TemporaryDirectory() as name:
        corpus, tokenizer, shards = (Path(name) / part for part in ("corpus", "tokenizer.json", "shards"))
        corpus.mkdir()
        written = 0
        for number, text in enumerate(texts(library_sources()[0])):
            (corpus / f"{number:05d}.py").write_text(text, encoding="utf-8")
            written += len(text)
            if written > size:
                break
        train_tokenizer([corpus], tokenizer, vocab_size=vocab_size)
        prepare([corpus], shards, tokenizer=str(tokenizer), processes=1)
        for batch, goal in ((8, 15.0), (256, 76.0)):
            data = {"shards": str(shards), "block_size": BLOCK, "micro_batch_size": batch, "target_batch_size": batch}
            model = {"vocab_size": vocab_size, "max_seq_len": BLOCK}
            config = SpeedtronicConfig.from_dict({"model": model, "data": data})
            sources: dict[str, Iterator[Any]] = {
                "shards": infinite_batches(build_dataloader(config)),
                "text": iter(DataLoader(StreamedText(corpus, tokenizer), batch_size=batch)),
            }
            batches = 2 if settings.quick else 4096 // batch
            clocks = {one: partial(seconds_of, partial(_take, source, batches)) for one, source in sources.items()}
            interleaved(clocks, 1)  # opens files
            seconds = interleaved(clocks, settings.rounds_or(5))
            yield Figure(
                name=f"rate of shards ÷ rate of text, batch {batch}",
                rounds=ratios(seconds["text"], seconds["shards"]),
                at_least=goal,
            )


def _take(source: Iterator[Any], batches: int) -> None:
    for _ in range(batches):
        next(source)
