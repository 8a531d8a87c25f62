"""Byte-pair encodings of tiktoken rank files."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speedtronic.data.tokenizers.base import UNMAPPED, check_id, utf8
from speedtronic.errors import DataError, MissingExtraError

SEPARATOR = "<|endoftext|>"

# The patterns split text before bytes are merged. GPT-2's, cl100k_base's and o200k_base's come from tiktoken's
# `openai_public.py`, Llama 3's from its published `tokenizer.py`.
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
    r"""|\s*[\r\n]|\s+(?!\S)|\s"""
)
O200K_PATTERN = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
LLAMA3_PATTERN = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@dataclass(frozen=True)
class RankEncoding:
    """What a rank file does not contain.

    Attributes:
        name: the published name.
        pattern: the regular expression that splits text before bytes are merged.
        separator_id: the id that ends a text.
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
    199998: RankEncoding("o200k_base", O200K_PATTERN, 199999, 200019),
    128000: RankEncoding("Llama 3", LLAMA3_PATTERN, 128001, 128256),
}
"""The known encodings by their number of ranks."""


class RankTokenizer:
    """Byte-pair encoding by ranks: of the pairs of adjacent tokens, the one of the lowest rank is merged first.

    Text is always encoded as ordinary text: text that spells a special token does not get its id.

    Args:
        tokens: the bytes of each token, in order of rank; the index is the id.

    Raises:
        DataError: no known encoding has this number of ranks, a token repeats, or a single byte is missing.
        MissingExtraError: tiktoken is not installed.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        if len(tokens) not in ENCODINGS:
            known = ", ".join(f"{size} ({encoding.name})" for size, encoding in ENCODINGS.items())
            raise DataError(
                f"no known encoding has {len(tokens)} ranks, so its split pattern is unknown; known are {known}; "
                f"use the tokenizer.json of this tokenizer instead"
            )
        ranks: dict[bytes, int] = {}
        for rank, token in enumerate(tokens):
            if ranks.setdefault(token, rank) != rank:
                raise DataError(f"rank {rank} repeats the token of rank {ranks[token]}")
        for byte in range(256):
            if bytes([byte]) not in ranks:
                raise DataError(f"the byte 0x{byte:02x} is not among the {len(tokens)} tokens, so some text has no ids")
        try:
            import tiktoken
        except ImportError as error:
            raise MissingExtraError("a tiktoken rank file needs tiktoken; install speedtronic[tiktoken]") from error
        self._tokens = list(tokens)
        self._encoding = encoding = ENCODINGS[len(tokens)]
        self._encoder = tiktoken.Encoding(
            encoding.name,
            pat_str=encoding.pattern,
            mergeable_ranks=ranks,
            special_tokens={SEPARATOR: encoding.separator_id},
        )

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
                f"tiktoken cannot split the text ({error}); it fails on runs of about a million spaces"
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
        # The published file of Whisper's multilingual models writes an empty token as "=".
        lines = (f"{base64.b64encode(token).decode() or '='} {rank}\n" for rank, token in enumerate(self._tokens))
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
                try:
                    tokens.append(b"" if token == "=" else base64.b64decode(token, validate=True))
                except ValueError as error:
                    raise DataError(f"line {number}: {token[:40]!r} is not base64") from error
            case [_, rank] if rank.isascii() and rank.isdigit():
                raise DataError(f"line {number}: expected rank {len(tokens)}, found rank {rank}")
            case _:
                raise DataError(f"line {number}: not a token in base64, a space and its rank")
    return tokens
