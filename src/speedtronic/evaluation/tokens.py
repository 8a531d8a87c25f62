"""Perplexity and bits per byte: what the loss of a language model says of text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from speedtronic.data.tokenizers.base import BytewiseTokenizer, Tokenizer
from speedtronic.trainer.loss import batch_labels


class TokenMeasures:
    """Turns the mean cross-entropy of tokens into perplexity and bits per byte.

    Perplexity is exp(loss). Bits per byte is the sum of the losses in bits, divided by the bytes of the targets' text,
    so that models with different tokenizers can be compared. The token that ends a document has a loss and no bytes.

    Args:
        tokenizer: of the data; None, or one that does not tell the bytes of a token, gives no bits per byte.
        device: where the batches are counted.
    """

    def __init__(self, tokenizer: Tokenizer | None, device: torch.device) -> None:
        self._bytes: Tensor | None = None
        if isinstance(tokenizer, BytewiseTokenizer):
            sizes = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
            sizes[tokenizer.separator_id] = 0
            # One more, for -100 and for ids outside the vocabulary, which have no text.
            self._bytes = torch.tensor([*sizes, 0], device=device)

    @property
    def names(self) -> list[str]:
        """The names of its measures."""
        return ["perplexity"] if self._bytes is None else ["perplexity", "bits_per_byte"]

    def bytes_of(self, batch: Any) -> Tensor | None:
        """The bytes of the targets of a batch: a 0-dim int64 tensor on the device. None where they cannot be told."""
        labels = batch_labels(batch)
        if self._bytes is None or labels is None or labels.is_floating_point():
            return None
        labels = labels.to(self._bytes.device)  # those of an array are still on the host
        none = len(self._bytes) - 1
        return self._bytes[torch.where(labels < 0, none, labels.clamp(max=none).long())].sum()

    def measures(self, total: float, targets: int, text_bytes: int | None) -> dict[str, float]:
        """`perplexity`, and `bits_per_byte` where the bytes are known.

        Args:
            total: the sum of the losses, in nats.
            targets: how many tokens that is of.
            text_bytes: of their text.
        """
        # The exponential of a tensor is infinite where that of a float is an error.
        found = {"perplexity": torch.tensor(total / targets, dtype=torch.float64).exp().item()}
        if text_bytes:
            found["bits_per_byte"] = total / math.log(2) / text_bytes
        return found
