"""What all tokenizers say about ids and text that they cannot take."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from speedtronic.errors import DataError

IdArray = npt.NDArray[np.unsignedinteger[Any]]

UNMAPPED = b"\xff"
"""Stands for an id without a meaning: a byte that UTF-8 never has, so that it decodes to U+FFFD."""


def check_id(token: int, vocab_size: int) -> None:
    """Raise DataError for an id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise DataError(f"token id {token} is outside the tokenizer's vocabulary of {vocab_size}")


def utf8(text: str) -> bytes:
    """The text in UTF-8. Raises DataError for a lone surrogate, which no encoding of Unicode can hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the text has a lone surrogate at character {error.start}: not Unicode") from error
