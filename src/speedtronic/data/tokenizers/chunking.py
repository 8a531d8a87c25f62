"""Where a text may be cut so that its parts, encoded separately, give the ids of the whole text.

Word rule
---------
Most tokenizers first split a text into pieces and encode each piece separately. The rule `words` cuts only where two
pieces always meet, whatever stands farther away. With a visible character `a` and a letter or digit `b`, it cuts

    a | space b        before the only space between a and b
    a newline | b      behind the only newline between a and b

This is why it holds, tokenizer by tokenizer.

GPT-2, cl100k_base, o200k_base, Llama 3, Qwen 2
    A regular expression splits the text from left to right. At the end of each match, the first alternative that
    matches gives the next piece. No alternative looks back, and every character is part of a match. So it is enough
    to show two things: one match of the whole text ends at the cut, and each match before the cut ends at the same
    place when the text ends at the cut.

    Matches before `a`: an alternative for letters, digits or punctuation takes white space only as its first
    character, apart from newlines (and `/`) behind punctuation. So it cannot pass a space, nor a newline that stands
    before `b`. An alternative of white space alone, with its look ahead `(?!\\S)` or `$`, ends before `a`. So no match
    that begins at `a` or earlier depends on `b`.

    `a | space b`: no match goes from `a` into the space, because the space is not a newline. So one ends at the cut.

    `a newline | b`: if the newline belongs to a match of punctuation before it, that match ends at `b`. Otherwise a
    match begins with the newline. No alternative takes a newline together with a letter or digit
    (`[^\\r\\n\\p{L}\\p{N}]?` excludes it); `\\s+(?!\\S)` finds nothing between the newline and `b`; the next
    alternatives of white space match the newline. When the text ends there, the first alternative that matches,
    `\\s++$`, `\\s*[\\r\\n]+` or `\\s+(?!\\S)`, matches the newline as well.

    GPT-2 makes two pieces of `\\r\\n` before a `b`, but one piece at the end of a text. So the newline must be alone.

Whitespace, WhitespaceSplit, BertPreTokenizer
    never put white space into a piece. What they do between two white spaces depends on nothing else.

Digits, Punctuation, splits at `\\p{N}` or `\\p{N}{1,3}`
    end pieces beside digits or punctuation. They look no farther than the run of digits or punctuation, and a space or
    a newline ends that run. They may leave the two sides of the cut together: then one of the above divides them.

Normalizers NFC, NFD, NFKC, NFKD, Lowercase
    A space or a newline does not join with its neighbours, and characters do not change places across it. Letters
    become lower case one by one. `a` stays visible. A letter that decomposes into a space and a mark is not a `b`.

Tokens added to a vocabulary
    are searched for in the text before it is split. Next to the cut stands a space or a newline, so a token without
    white space cannot lie across it. The text between two such tokens is split separately, and the above holds for it.
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
from speedtronic.data.tokenizers.tiktoken import LLAMA3_PATTERN, O200K_PATTERN, RankTokenizer

CutRule = Literal["characters", "words", "never"]

_BLOCK = 16 * 2**10
_ENCODED_AT_ONCE = 2**16  # characters
_CANDIDATE = re.compile(r"(?<=\S)(?:\n| )(?=\w)")

# What published tokenizer.json files split at. Llama 3's file has the pattern of cl100k_base.
_GPT2_JSON = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2_JSON = LLAMA3_PATTERN.replace("{1,3}", "")
_WORD_PATTERNS = {_GPT2_JSON, LLAMA3_PATTERN, _QWEN2_JSON, O200K_PATTERN}
_DIGIT_PATTERNS = {r"\p{N}", r"\p{N}{1,3}"}

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
    if isinstance(tokenizer, JsonTokenizer) and _follows_word_rule(tokenizer.structure):
        return "words"
    return "never"


def find_cut(file: BinaryIO, position: int, rule: CutRule) -> int | None:
    """The first place at or behind `position` where a UTF-8 file may be cut: an offset in bytes.

    The file is read from shortly before `position` to shortly behind the cut. Bytes that are not UTF-8 are no error.

    Returns:
        None when there is none before the end of the file.
    """
    match rule:
        case "characters":
            # A character begins at the first byte that is not a continuation byte (10xxxxxx).
            file.seek(position)
            for offset, byte in enumerate(file.read(LONGEST_CHARACTER), position):
                if byte & 0xC0 != 0x80:
                    return offset
            return None
        case "words":
            return _next_word_cut(file, position)
        case "never":
            return None


def _next_word_cut(file: BinaryIO, position: int) -> int | None:
    # Start early enough to see the character before a cut, and the newline between that character and the cut.
    base = max(0, position - 2 * LONGEST_CHARACTER)
    file.seek(base)
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text = ""
    while block := file.read(_BLOCK):
        text += decoder.decode(block)
        for cut in _word_cuts(text):
            offset = base + len(text[:cut].encode("utf-8", "surrogateescape"))
            if offset >= position:
                return offset
        # A cut is recognised by three characters. Two of them may be the last of this block.
        base += len(text[:-2].encode("utf-8", "surrogateescape"))
        text = text[-2:]
    return None


def _word_cuts(text: str, start: int = 0) -> Iterator[int]:
    """The cuts of the word rule from `start` on, in order."""
    for found in _CANDIDATE.finditer(text, start):
        before, after = text[found.start() - 1], text[found.end()]
        # For Python some characters are letters that decompose into a space and a mark.
        if before.isprintable() and unicodedata.normalize("NFKD", after)[0].isalnum():
            yield found.end() if found[0] == "\n" else found.start()


def encode_long(tokenizer: Tokenizer, text: str) -> IdArray:
    """The ids of a text of any length, encoded part by part where the tokenizer allows that.

    The `tokenizers` library needs some 100 bytes of memory for each byte of a text that it encodes at once.

    Raises:
        DataError: text that the vocabulary cannot hold.
    """
    parts = []
    start = 0
    if cut_rule(tokenizer) == "words":
        while (stop := next(_word_cuts(text, start + _ENCODED_AT_ONCE), None)) is not None:
            parts.append(text[start:stop])
            start = stop
    parts.append(text[start:])
    return np.concatenate([encode_texts(tokenizer, [part])[0] for part in parts])


# ---------------------------------------------------------------------- which JSON tokenizers follow the word rule


def _follows_word_rule(structure: Mapping[str, Any]) -> bool:
    model = structure["model"]
    return (
        model.get("type") in _MODELS
        and not model.get("dropout")
        and all(map(_is_whole_word, structure["added_tokens"]))
        and all(step.get("type") in _NORMALIZERS for step in _steps(structure.get("normalizer"), "normalizers"))
        and _ends_pieces_at_words(_steps(structure.get("pre_tokenizer"), "pretokenizers"))
    )


def _is_whole_word(token: Mapping[str, Any]) -> bool:
    """Whether an added token contains no white space and takes none of the white space around it.

    A special token is not searched for in text. But it hides other tokens that begin inside its spelling.
    """
    visible = not re.search(r"\s", unicodedata.normalize("NFKD", token["content"]))
    return visible and (token["special"] or not (token["lstrip"] or token["rstrip"]))


def _steps(step: Any, sequence_key: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer. A step without a type is unknown, and becomes an empty one."""
    match step:
        case None:
            return []
        case {"type": "Sequence"}:
            return [inner for each in step[sequence_key] for inner in _steps(each, sequence_key)]
        case {"type": _}:
            return [step]
    return [{}]


def _ends_pieces_at_words(steps: list[Mapping[str, Any]]) -> bool:
    """Whether the pre-tokenizer's steps together end a piece at every cut, and all steps are known."""
    ended = False
    for step in steps:
        match step:
            case {"type": "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer"}:
                ended = True
            case {"type": "ByteLevel", "add_prefix_space": False}:
                # It spells bytes as characters, which hides white space from later steps. Unless it also splits,
                # an earlier step must have split the text.
                ended = ended or bool(step.get("use_regex", True))
                if not ended:
                    return False
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": behavior, "invert": invert}:
                if pattern in _WORD_PATTERNS and (behavior, invert) in (("Isolated", False), ("Removed", True)):
                    ended = True
                elif not (pattern in _DIGIT_PATTERNS and (behavior, invert) == ("Isolated", False)):
                    return False
            case {"type": "Digits" | "Punctuation"}:
                pass  # these may cut more, but never join what another step has divided
            case _:
                return False
    return ended
