from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from speedtronic.data.prepare.encode import (
    BEGINNING,
    Position,
    characters_of_unit,
    checksum_unit,
    encode_unit,
    plan_units,
)
from speedtronic.data.prepare.sources import find_inputs
from speedtronic.data.tokenizers.base import Tokenizer
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.chunking import CutRule, cut_rule
from speedtronic.errors import DataError
from tests.support.tokenizers import byte_level_bpe


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat. " * 20)
    for name in "bcdefg":
        (folder / f"{name}.txt").write_text(f"{name}: the mat\n" * (ord(name) - ord("a")))
    records = [{"text": f"line {number} of a cat"} for number in range(30)]
    (folder / "h.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def encoded(folder: Path, tokenizer: Tokenizer, size: int) -> tuple[list[int], list[int]]:
    """All ids, and the positions behind the documents."""
    ids: list[int] = []
    ends: list[int] = []
    for unit in plan_units(find_inputs([folder]), cut_rule(tokenizer), size=size):
        found = encode_unit(unit, tokenizer)
        ends += (found.ends + len(ids)).tolist()
        ids += found.ids.tolist()
    return ids, ends


@pytest.mark.parametrize("size", [1, 30, 100, 5000])
@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe"])
def test_units_of_any_size_give_the_ids_of_whole_documents(corpus: Path, size: int, kind: str) -> None:
    tokenizer: Tokenizer = {"bytes": CharTokenizer, "chars": alphabet, "bpe": byte_level_bpe}[kind]()
    documents = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    documents += [json.loads(line)["text"] for line in (corpus / "h.jsonl").read_text().splitlines()]
    expected = [[*tokenizer.encode(document), tokenizer.separator_id] for document in documents]

    ids, ends = encoded(corpus, tokenizer, size)

    assert ids == [token for document in expected for token in document]
    assert ends == np.cumsum([len(document) for document in expected]).tolist()


def alphabet() -> CorpusCharTokenizer:
    return CorpusCharTokenizer("abcdefghijklmnopqrstuvwxyz0123456789 .:\n")


@pytest.mark.parametrize("rule", ["characters", "words", "never"])
@pytest.mark.parametrize("size", [13, 30, 100, 5000])
def test_the_plan_continues_behind_any_unit(corpus: Path, rule: CutRule, size: int) -> None:
    inputs = find_inputs([corpus])
    units = list(plan_units(inputs, rule, size=size))

    assert units[-1].next.number == len(inputs) or units[-1].next.offset == inputs[-1].length
    for number, unit in enumerate(units):
        assert list(plan_units(inputs, rule, start=unit.next, size=size)) == units[number + 1 :]


def test_small_documents_are_gathered_and_large_ones_divided(corpus: Path) -> None:
    units = list(plan_units(find_inputs([corpus]), "characters", size=100))
    sizes = [sum(chunk.size for chunk in unit.chunks) for unit in units]

    assert all(100 <= size < 200 for size in sizes[:-1])
    assert len({chunk.path for unit in units for chunk in unit.chunks}) == 8  # type: ignore[attr-defined]
    assert any(len(unit.chunks) > 1 for unit in units)


def test_a_checksum_is_of_the_content_and_its_division_into_documents(tmp_path: Path) -> None:
    def checksum(*texts: str) -> bytes:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
        (unit,) = plan_units(find_inputs([folder]), "characters", start=BEGINNING)
        assert checksum_unit(unit) == encode_unit(unit, CharTokenizer()).checksum
        return checksum_unit(unit)

    first = checksum("ab", "c")

    assert checksum("ab", "c") == first
    assert len({first, checksum("ab", "d"), checksum("a", "bc"), checksum("abc"), checksum("c", "ab")}) == 5


def test_a_unit_tells_its_text_in_bytes_and_its_characters(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "éé!"}\n{"text": "a"}\n', encoding="utf-8")
    (unit,) = plan_units(find_inputs([tmp_path]), "characters")

    assert encode_unit(unit, CharTokenizer()).size == 6
    assert characters_of_unit(unit) == "!aé"
    assert unit.next == Position(1)


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [("b.txt", "ab\nabx", "b.txt, from byte 0 on"), ("b.jsonl", '\n{"text": "x"}\n', "b.jsonl, from line 1 on")],
)
def test_text_that_a_tokenizer_cannot_encode_is_named(tmp_path: Path, name: str, content: str, place: str) -> None:
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / name).write_text(content)
    (unit,) = plan_units(find_inputs([tmp_path]), "characters")

    with pytest.raises(DataError, match=f"{place}: character 'x'"):
        encode_unit(unit, CorpusCharTokenizer("ab\n"))
