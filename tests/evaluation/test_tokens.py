"""Perplexity and bits per byte are those of a computation by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.data import CharTokenizer
from speedtronic.data.tokenizers.chars import CorpusCharTokenizer
from speedtronic.evaluation import HeldOutLoss, TokenMeasures
from speedtronic.precision import resolve_precision

CPU = torch.device("cpu")


class Words:
    """A tokenizer of words of one to three bytes; its token 0 ends a document."""

    vocab_size = 4
    separator_id = 0
    text = (b"<|end|>", b"a", "é".encode(), b"abc")

    def token_bytes(self, token: int) -> bytes:
        return self.text[token]

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        raise NotImplementedError

    def spec(self) -> dict[str, Any]:
        return {}


class Table(nn.Module):
    """The scores of the next of five tokens, one of which no text has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(25.0).reshape(5, 5).sin())

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.table(input_ids)}


def batch(ids: list[int], labels: list[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}


def measured(batches: list[Any], tokenizer: Any, **options: Any) -> dict[str, Any]:
    measure = HeldOutLoss(
        lambda: batches,
        device=CPU,
        precision=resolve_precision("fp32", CPU),
        tokens=TokenMeasures(tokenizer, CPU),
        **options,
    )
    numbers = measure(Table())
    assert numbers is not None
    return numbers


def test_perplexity_and_bits_per_byte_are_those_by_hand_on_unequal_batches() -> None:
    batches = [batch([1, 2, 3], [2, -100, 0]), batch([4], [3]), batch([0, 1, 2, 3], [1, 2, 4, 1])]
    pairs = [(1, 2), (3, 0), (4, 3), (0, 1), (1, 2), (2, 4), (3, 1)]
    rows = [[math.sin(5 * given + i) for i in range(5)] for given in range(5)]
    nats = sum(math.log(sum(map(math.exp, rows[given]))) - rows[given][label] for given, label in pairs)
    # é, the end, abc, a, é, an id without text, a.
    text_bytes = 2 + 0 + 3 + 1 + 2 + 0 + 1
    numbers = measured(batches, Words())
    assert numbers["loss"] == pytest.approx(nats / 7, abs=1e-6)
    assert numbers["perplexity"] == pytest.approx(math.exp(nats / 7), rel=1e-6)
    assert numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-6)


def test_bits_of_bytes_are_the_loss_in_bits() -> None:
    numbers = measured([batch([1, 2, 3], [2, 3, 4])], CharTokenizer())
    assert numbers["bits_per_byte"] == pytest.approx(numbers["loss"] / math.log(2))


def test_a_tokenizer_that_does_not_tell_bytes_has_a_perplexity_alone() -> None:
    for tokenizer in (None, CorpusCharTokenizer("abcd")):
        numbers = measured([batch([1, 2], [2, 3])], tokenizer)
        assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
        assert "bits_per_byte" not in numbers


def test_a_loss_that_is_no_mean_over_tokens_has_neither() -> None:
    def each_row(output: Any, batch: Any) -> Tensor:
        logits: Tensor = output["logits"]
        return logits.logsumexp(-1).sum(-1)  # one value for each sample of three tokens

    numbers = measured([batch([1, 2, 3], [2, 3, 4])], Words(), loss_fn=each_row)
    assert {"perplexity", "bits_per_byte"}.isdisjoint(numbers)


def test_a_loss_beyond_the_range_of_its_exponential_is_infinitely_perplexing() -> None:
    assert TokenMeasures(None, CPU).measures(1e5, 1, None) == {"perplexity": math.inf}
