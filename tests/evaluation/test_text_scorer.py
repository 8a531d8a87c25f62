"""Likelihoods of texts are those of a computation by hand, in batches and beyond the context; texts end where asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.config import ModelConfig
from speedtronic.data import CharTokenizer
from speedtronic.errors import ConfigError
from speedtronic.evaluation.text_scorer import TextScorer
from speedtronic.generation import TextGenerator
from speedtronic.registry import build_model

SIZES = {"vocab_size": 128, "max_seq_len": 8, "n_layer": 1, "n_head": 2, "d_model": 16}


def small(context: int = 8) -> TextGenerator:
    torch.manual_seed(0)
    model = build_model(ModelConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # so that some tokens are much likelier than others
    return TextGenerator(model.eval(), CharTokenizer(128), context, None)


def by_hand(generator: TextGenerator, tokens: list[int], first: int) -> tuple[float, bool]:
    """Each token by itself, given the tokens before it in its window."""
    total, greedy, context = 0.0, True, generator.context_length
    start = first
    while start < len(tokens):
        end = min(start + context, len(tokens))
        begin = max(0, end - 1 - context)
        for at in range(start, end):
            with torch.no_grad():
                scores = generator.model(torch.tensor([tokens[begin:at]]))["logits"][0, -1].double()
            total += scores.log_softmax(-1)[tokens[at]].item()
            greedy = greedy and int(scores.argmax()) == tokens[at]
        start = end
    return total, greedy


PAIRS = [("ab", "cd"), ("", "xyz"), ("a longer context ", "than fits"), ("a", ""), ("two words", " here"), ("q", "r")]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_likelihood_of_a_continuation_is_that_by_hand(batch_size: int) -> None:
    generator = small()
    found = TextScorer(generator, batch_size=batch_size).loglikelihood(PAIRS)
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        tokens = list((context + continuation).encode())
        expected = by_hand(generator, tokens, len(context.rstrip())) if context else by_hand(generator, [0, *tokens], 1)
        assert (total, greedy) == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert found[3] == (0.0, True)


def test_the_likelihood_of_a_long_text_takes_each_token_once() -> None:
    generator = small(context=4)
    texts = ["0123456789", "ab", "abcd", "abcde"]
    found = TextScorer(generator, batch_size=3).loglikelihood_rolling(texts)
    for text, total in zip(texts, found, strict=True):
        assert total == pytest.approx(by_hand(generator, [0, *text.encode()], 1)[0], abs=1e-4)


def test_the_likeliest_continuation_is_greedy_and_no_other() -> None:
    scorer = TextScorer(small())
    contexts = [chr(code) for code in range(33, 127)]
    best = scorer.generate_until([(context, {"max_gen_toks": 1}) for context in contexts])
    # A text that ends at once has no likeliest continuation.
    pairs = [(context, text) for context, text in zip(contexts, best, strict=True) if text]
    assert len(pairs) > 50
    assert all(greedy for _, greedy in scorer.loglikelihood(pairs))
    others = [(context, "y" if text != "y" else "z") for context, text in pairs]
    assert not any(greedy for _, greedy in scorer.loglikelihood(others))


class Alphabet(nn.Module):
    """Writes the byte that follows the last one; it has no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(9.0))

    def forward(self, input_ids: Tensor) -> Any:
        return (nn.functional.one_hot((input_ids + 1) % 128, 256).float() * self.scale,)


def test_generated_texts_end_where_asked_and_keep_their_order() -> None:
    scorer = TextScorer(TextGenerator(Alphabet().eval(), CharTokenizer(), 8, None), batch_size=2)
    requests: list[tuple[str, dict[str, Any]]] = [
        ("abc", {"until": ["g", "xy"], "max_gen_toks": 20}),
        ("k", {"until": ["g", "xy"], "max_gen_toks": 20}),
        ("0", {"max_gen_toks": 3}),
        ("ABCDEFGHIJKLMN", {"until": "R", "max_gen_toks": 20}),
        ("m", {"until": ["g", "xy"], "max_gen_toks": 20}),
        # After 127 comes 0, which ends a document.
        ("}", {"max_gen_toks": 20}),
    ]
    assert scorer.generate_until(requests) == ["def", "lmnopqrstuvw", "123", "OPQ", "nopqrstuvw", "~\x7f"]


def test_sampled_texts_are_drawn_by_the_options() -> None:
    scorer = TextScorer(TextGenerator(Alphabet().eval(), CharTokenizer(), 8, None))
    hot = {"do_sample": True, "temperature": 50.0, "max_gen_toks": 6}
    assert scorer.generate_until([("a", hot)]) != ["bcdefg"]
    assert scorer.generate_until([("a", {**hot, "top_k": 1})]) == ["bcdefg"]


def test_options_that_nothing_follows_are_refused() -> None:
    scorer = TextScorer(TextGenerator(Alphabet(), CharTokenizer(), 8, None))
    with pytest.raises(ConfigError, match="generate with num_beams"):
        scorer.generate_until([("a", {"num_beams": 4})])
    with pytest.raises(ConfigError, match="batch size"):
        TextScorer(TextGenerator(Alphabet(), CharTokenizer(), 8, None), batch_size=0)


def test_perplexity_by_likelihoods_is_that_of_the_loss() -> None:
    generator = small()
    text = "abcdefg"
    (total,) = TextScorer(generator).loglikelihood_rolling([text])
    ids = torch.tensor([[0, *text.encode()]])
    loss = generator.model(ids[:, :-1], labels=ids[:, 1:])["loss"].item()
    assert math.exp(-total / 7) == pytest.approx(math.exp(loss), rel=1e-5)
