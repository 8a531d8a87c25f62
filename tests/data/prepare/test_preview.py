from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from speedtronic.data.prepare import preview as module
from speedtronic.data.prepare.prepare import prepare
from speedtronic.data.prepare.preview import preview
from speedtronic.data.prepare.records import PromptRecords
from speedtronic.data.shards import ShardSet
from speedtronic.errors import DataError
from tests.support.tokenizers import byte_level_bpe


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_a_preview_is_what_prepare_writes(tmp_path: Path, tokenizer: str) -> None:
    if tokenizer == "bpe":
        (tmp_path / "bpe.json").write_text(byte_level_bpe().spec()["json"])
        tokenizer = str(tmp_path / "bpe.json")
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(f"text {name} é字")

    shown = list(preview([tmp_path], 2, tokenizer=tokenizer, patterns=["*.txt"], seed=3))
    prepare([tmp_path], tmp_path / "out", tokenizer=tokenizer, patterns=["*.txt"], seed=3)

    shards = ShardSet(tmp_path / "out")
    ids = np.empty(len(shards), np.int64)
    shards.read(0, ids)
    text = shards.tokenizer.decode(ids.tolist())
    assert len(shown) == 2
    assert text.startswith("".join(piece for parts in shown for piece, _ in parts))
    assert all(target for parts in shown for _, target in parts)


def test_targets_are_told_from_what_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "é?", "completion": "字"}) + "\n{}\n")

    shown = preview([tmp_path / "a.jsonl"], 5, records=PromptRecords(), skip_bad_records=True)

    assert list(shown) == [[("é?", False), ("字\0", True)]]


def test_of_a_long_document_the_beginning_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_TOKENS", 10)
    (tmp_path / "a.txt").write_text("0123456789" * 10)

    assert list(preview([tmp_path / "a.txt"], 5)) == [[("0123456789", True)]]


def test_where_all_documents_are_empty_there_is_nothing_to_show(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')

    with pytest.raises(DataError, match="all documents are empty"):
        list(preview([tmp_path / "a.jsonl"], 1))
