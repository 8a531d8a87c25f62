"""Where a text may be cut so that its parts, encoded by themselves, give the ids of the whole.

Word rule
---------
Most tokenizers of text first split it into pieces, which they encode one by one. The cuts of the rule `words` fall
between two pieces, whatever stands farther away. They are, for visible characters `a` and letters or digits `b`,

    a | space b        before the only space between a and b
    a newline | b      behind the only newline between a and b

GPT-2, cl100k_base, o200k_base, Llama 3, Qwen 2
    split from left to right: the first alternative of a regular expression that matches at the end of the last
    match gives the next one. None looks back, and every character is part of a match, so it is enough that a match of
    the whole text ends at the cut, and that each match before the cut ends where it does when the text ends at the
    cut.

    Before `a`: an alternative that matches letters, digits or punctuation takes white space only as its first
    character, apart from newlines (and `/`) behind punctuation. It cannot pass a space, nor a newline into `b`, which
    is none of these. An alternative of white space alone, and its look ahead `(?!\\S)` or `$`, ends before `a`. So
    nothing that begins up to `a` sees as far as `b`.

    `a | space b`: no match goes from `a` into the space, as it is no newline. So one ends at the cut.

    `a newline | b`: newlines behind punctuation may belong to its match, which ends at `b`. Else a match begins with
    the newline: no alternative takes it together with a letter or digit (`[^\\r\\n\\p{L}\\p{N}]?` leaves it out);
    `\\s+(?!\\S)` finds nothing between it and `b`; the next alternatives of white space give the newline. When the text
    ends there, the first of them that matches, `\\s++$`, `\\s*[\\r\\n]+` or `\\s+(?!\\S)`, gives the newline as well.

    Of `\\r\\n` GPT-2 makes two pieces before a `b`, and one at the end of a text; hence the only newline.

Whitespace, WhitespaceSplit, BertPreTokenizer
    never put white space into a piece, and what they do between two white spaces depends on nothing else.

Digits, Punctuation, splits at `\\p{N}` or `\\p{N}{1,3}`
    end pieces beside digits or punctuation, and neither looks farther than the run it is in, which a space or a newline
    ends. What lies around the cut may remain together, and is divided there by one of the above, before or after it.

Normalizers NFC, NFD, NFKC, NFKD, Lowercase
    A space or a newline neither joins with its neighbours nor lets characters change places across it, and letters
    become lower case one by one. `a` remains visible; of letters that decompose into a space and a mark `b` is none.

Tokens added to a vocabulary
    are looked for in the text before it is split. One without white space cannot lie across a cut, as a space or a
    newline stands next to it; the text between two of them is split by itself, for which the above holds.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Literal

import numpy as np

from speedtronic.data.tokenizers.base import LONGEST_CHARACTER, CharacterwiseTokenizer, IdArray, Tokenizer, encode_texts
from speedtronic.data.tokenizers.huggingface import JsonTokenizer
from speedtronic.data.tokenizers.tiktoken import RankTokenizer

CutRule = Literal["characters", "words", "never"]

_BLOCK = 16 * 2**10
_ENCODED_AT_ONCE = 2**16  # characters
_CANDIDATE = re.compile(r"(?<=\S)(?:\n| )(?=\w)")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_SPLITS = {
    _GPT2,
    rf"{_CONTRACTION}|{_PREFIX}\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}",  # cl100k_base, Llama 3
    rf"{_CONTRACTION}|{_PREFIX}\p{{L}}+|\p{{N}}{_TAIL}",  # Qwen 2
    rf"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # o200k_base
}
_DIGIT_SPLITS = {r"\p{N}", r"\p{N}{1,3}"}

_MODELS = {"BPE", "WordLevel", "WordPiece"}
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}


def cut_rule(tokenizer: Tokenizer) -> CutRule:
    """Where a text for this tokenizer may be cut.

    Returns:
        "characters": between any two; "words": as this module describes; "never": nothing is known.
    """
    if isinstance(tokenizer, CharacterwiseTokenizer):
        return "characters"
    if isinstance(tokenizer, RankTokenizer):
        return "words"
    if isinstance(tokenizer, JsonTokenizer) and _splits_words(tokenizer.structure):
        return "words"
    return "never"


def find_cut(file: BinaryIO, position: int, rule: CutRule) -> int | None:
    """The first place at or behind `position` where a UTF-8 file may be cut: an offset in bytes.

    The file is read from shortly before `position` to shortly behind the cut. What is not UTF-8 is passed over.

    Returns:
        None when there is none before the end of the file.
    """
    match rule:
        case "characters":
            return _next_character(file, position)
        case "words":
            return _next_word(file, position)
        case "never":
            return None


def encode_long(tokenizer: Tokenizer, text: str) -> IdArray:
    """The ids of a text of any length, encoded part by part where the tokenizer allows that.

    The `tokenizers` library needs some 100 bytes of memory for each byte of the text that it encodes at once.

    Raises:
        DataError: text that the vocabulary cannot hold.
    """
    parts = _parts(text) if cut_rule(tokenizer) == "words" else [text]
    return np.concatenate([encode_texts(tokenizer, [part])[0] for part in parts])


def _parts(text: str) -> Iterator[str]:
    start = 0
    while (stop := next(_cuts(text, start + _ENCODED_AT_ONCE), None)) is not None:
        yield text[start:stop]
        start = stop
    yield text[start:]


def _cuts(text: str, start: int = 0) -> Iterator[int]:
    """The cuts of the word rule from `start` on, in order."""
    for found in _CANDIDATE.finditer(text, start):
        before, after = text[found.start() - 1], text[found.end()]
        # Python counts as letters some that decompose into a space and a mark.
        if before.isprintable() and unicodedata.normalize("NFKD", after)[0].isalnum():
            yield found.end() if found[0] == "\n" else found.start()


def _next_character(file: BinaryIO, position: int) -> int | None:
    file.seek(position)
    for byte in file.read(LONGEST_CHARACTER):
        if byte & 0xC0 != 0x80:
            return position
        position += 1
    return None


def _next_word(file: BinaryIO, position: int) -> int | None:
    # The character before a cut, and the newline before it, may begin so far before `position`.
    base = max(0, position - 2 * LONGEST_CHARACTER)
    file.seek(base)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = ""
    while block := file.read(_BLOCK):
        text += decoder.decode(block)
        for cut in _cuts(text):
            offset = base + len(text[:cut].encode("utf-8", "surrogateescape"))
            if offset >= position:
                return offset
        # A cut shows from the character before its space or newline to the one behind.
        base += len(text[:-2].encode("utf-8", "surrogateescape"))
        text = text[-2:]
    return None


def _splits_words(structure: Mapping[str, Any]) -> bool:
    model = structure["model"]
    return (
        model.get("type") in _MODELS
        and not model.get("dropout")
        and all(map(_is_whole_word, structure["added_tokens"]))
        and all(each.get("type") in _NORMALIZERS for each in _steps(structure.get("normalizer"), "normalizers"))
        and _ends_pieces_at_words(_steps(structure.get("pre_tokenizer"), "pretokenizers"))
    )


def _is_whole_word(token: Mapping[str, Any]) -> bool:
    """Whether an added token neither has white space in it nor takes that around it.

    A special one is not looked for in text, yet hides others that begin inside what spells it.
    """
    visible = not re.search(r"\s", unicodedata.normalize("NFKD", token["content"]))
    return visible and (token["special"] or not (token["lstrip"] or token["rstrip"]))


def _steps(step: Any, several: str) -> list[Mapping[str, Any]]:
    """A normalizer's or pre-tokenizer's steps; one that is not spelled as usual is without a type, so unknown."""
    match step:
        case None:
            return []
        case {"type": "Sequence"}:
            return [inner for each in step[several] for inner in _steps(each, several)]
        case {"type": _}:
            return [step]
    return [{}]


def _ends_pieces_at_words(steps: list[Mapping[str, Any]]) -> bool:
    ended = False
    for step in steps:
        if _ends_at_words(step):
            ended = True
        # Spelling bytes as characters hides white space from the steps behind it.
        elif not (_looks_at_digits_or_punctuation(step) or (ended and _only_spells_bytes(step))):
            return False
    return ended


def _ends_at_words(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer"}:
            return True
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return bool(step.get("use_regex", True))
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern in _SPLITS
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
            return pattern in _SPLITS
    return False


def _looks_at_digits_or_punctuation(step: Mapping[str, Any]) -> bool:
    match step:
        case {"type": "Digits" | "Punctuation"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern in _DIGIT_SPLITS
    return False


def _only_spells_bytes(step: Mapping[str, Any]) -> bool:
    return (
        step.get("type") == "ByteLevel" and not step.get("add_prefix_space", True) and not step.get("use_regex", True)
    )
