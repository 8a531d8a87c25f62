"""Files to read documents from, and the documents of an input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from speedtronic.data.prepare.inputs import Input
from speedtronic.data.tokenizers.chunking import CutRule


def texts_of(each: Input, size: int, rule: CutRule = "characters", offset: int = 0) -> Iterator[tuple[str, bool, int]]:
    """Each text with whether it ends a document, and the offset behind its chunk."""
    for chunk, behind in each.chunks(offset, size, rule):
        for text in chunk.documents(chunk.raw()):
            assert isinstance(text, str)
            yield text, chunk.ends_documents, behind


def documents_of(each: Input, size: int, rule: CutRule = "characters") -> list[str]:
    documents = [""]
    for text, ended, _ in texts_of(each, size, rule):
        documents[-1] += text
        if ended:
            documents.append("")
    assert documents.pop() == ""
    return documents


def json_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)
    return path
