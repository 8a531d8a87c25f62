"""Byte-pair encodings of tiktoken rank files."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from speedtronic.data.tokenizers.token_ids import UNMAPPED, check_id, utf8
from speedtronic.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import tiktoken

SEPARATOR = "<|endoftext|>"

# The patterns split text before bytes are merged. GPT-2's, cl100k_base's and o200k_base's are those of tiktoken's
# `openai_public.py`; Llama 3's is that of its published `tokenizer.py`.
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_LLAMA3 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@dataclass(frozen=True)
class RankEncoding:
    """What a rank file leaves out.

    Attributes:
        name: as it is published.
        pattern: the regular expression that splits text before bytes are merged.
        separator_id: of the end of a text.
        vocab_size: highest id + 1, special tokens included.
    """

    name: str
    pattern: str
    separator_id: int
    vocab_size: int


ENCODINGS = {
    50256: RankEncoding("gpt2", _GPT2, 50256, 50257),
    50257: RankEncoding("whisper multilingual", _GPT2, 50257, 50258),
    100256: RankEncoding("cl100k_base", _CL100K, 100257, 100277),
    199998: RankEncoding("o200k_base", _O200K, 199999, 200019),
    128000: RankEncoding("Llama 3", _LLAMA3, 128001, 128256),
}
"""The known encodings by their number of ranks."""


class RankTokenizer:
    """Byte-pair encoding by ranks: of the pairs of adjacent tokens, the one of the lowest rank is merged first.

    Text is always encoded as ordinary text: one that spells a special token does not get its id.

    Args:
        tokens: the bytes of each token, in order of rank; the index is the id.

    Raises:
        DataError: the number of ranks is that of no known encoding, a token repeats, or a single byte is not among
            them.
        MissingExtraError: tiktoken is not installed.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        if len(tokens) not in ENCODINGS:
            known = ", ".join(f"{size} ({encoding.name})" for size, encoding in ENCODINGS.items())
            raise DataError(
                f"{len(tokens)} ranks are those of no encoding whose split pattern is known: {known}; "
                f"use the tokenizer.json of this tokenizer instead"
            )
        self._tokens = list(tokens)
        self._encoding = ENCODINGS[len(tokens)]
        self._encoder = _encoder(self._encoding, _ranks(tokens))

    @property
    def vocab_size(self) -> int:
        return self._encoding.vocab_size

    @property
    def separator_id(self) -> int:
        return self._encoding.separator_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text, uint32. Raises DataError as `encode` does."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> npt.NDArray[np.uint32]:
        try:
            return self._encoder.encode_to_numpy(text, disallowed_special=())
        except ValueError as error:
            utf8(text)
            raise DataError(
                f"tiktoken cannot split the text ({error}); runs of a million spaces or so are too long for it"
            ) from error

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; DataError for an id outside the vocabulary."""
        check_id(token, self.vocab_size)
        if token < len(self._tokens):
            return self._tokens[token]
        return SEPARATOR.encode() if token == self.separator_id else UNMAPPED

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def spec(self) -> dict[str, Any]:
        lines = (f"{_as_base64(token)} {rank}\n" for rank, token in enumerate(self._tokens))
        return {"type": "tiktoken", "ranks": "".join(lines)}

    def __reduce__(self) -> tuple[type[RankTokenizer], tuple[list[bytes]]]:
        return RankTokenizer, (self._tokens,)

    def __repr__(self) -> str:
        return f"RankTokenizer({self._encoding.name}, vocab_size={self.vocab_size})"


def tokens_of_rank_file(text: str) -> list[bytes]:
    """The tokens of a rank file, in order of rank: each line is a token in base64, a space and its rank.

    Raises:
        DataError: naming the first line that is wrong.
    """
    tokens: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        match line.split():
            case []:
                continue
            case [token, rank] if rank == str(len(tokens)):
                tokens.append(_from_base64(token, number))
            case [_, rank] if rank.isascii() and rank.isdigit():
                raise DataError(f"line {number}: rank {rank} stands where {len(tokens)} must follow")
            case _:
                raise DataError(f"line {number}: not a token in base64, a space and its rank")
    return tokens


def _as_base64(token: bytes) -> str:
    return base64.b64encode(token).decode("ascii") or "="


def _from_base64(text: str, line: int) -> bytes:
    # A published file, that of Whisper's multilingual models, writes an empty token so.
    if text == "=":
        return b""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise DataError(f"line {line}: {text[:40]!r} is not base64") from error


def _ranks(tokens: Sequence[bytes]) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for rank, token in enumerate(tokens):
        if ranks.setdefault(token, rank) != rank:
            raise DataError(f"rank {rank} repeats the token of rank {ranks[token]}")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise DataError(f"the byte 0x{byte:02x} is not among the {len(tokens)} tokens, so not every text has ids")
    return ranks


def _encoder(encoding: RankEncoding, ranks: dict[bytes, int]) -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError as error:
        raise MissingExtraError("a tiktoken rank file needs tiktoken; install speedtronic[tiktoken]") from error
    return tiktoken.Encoding(
        encoding.name,
        pat_str=encoding.pattern,
        mergeable_ranks=ranks,
        special_tokens={SEPARATOR: encoding.separator_id},
    )
