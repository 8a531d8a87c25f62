"""Merged micro batches: the gradients, losses and counts of single ones, from fewer forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.model.transformer import ReferenceTransformer
from speedtronic.trainer import Trainer
from speedtronic.trainer.merging import merge
from tests.support.models import Coordinator, Events, make_trainer

MICRO = 2


def model_of(dropout: float = 0.0) -> ReferenceTransformer:
    torch.manual_seed(0)
    return ReferenceTransformer(vocab_size=11, block_size=6, n_layer=1, n_head=2, d_model=8, dropout=dropout)


def batch_of(samples: int = MICRO, *, seed: int = 0, ignored: int = 0, length: int = 6) -> dict[str, Tensor]:
    """A batch whose first `ignored` labels are no targets."""
    rows = torch.randint(0, 11, (samples, length + 1), generator=torch.Generator().manual_seed(seed))
    labels = rows[:, 1:].clone()
    labels.view(-1)[:ignored] = -100
    return {"input_ids": rows[:, :-1].clone(), "labels": labels}


def masked(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


UPDATES: dict[str, list[dict[str, Tensor]]] = {
    "equal": [batch_of(seed=seed) for seed in range(4)],
    "unequal valid counts": [batch_of(seed=seed, ignored=ignored) for seed, ignored in enumerate((0, 9, 3, 11))],
    "equal valid counts in other places": [batch_of(seed=0, ignored=5), batch_of(seed=1, ignored=5)] * 2,
    "no target in one": [batch_of(seed=seed, ignored=ignored) for seed, ignored in enumerate((0, 12, 3, 0))],
    "a short last one": [batch_of(seed=0), batch_of(seed=1), batch_of(seed=2), batch_of(1, seed=3)],
    "masks": [masked(batch_of(seed=seed, ignored=2 * seed)) for seed in range(4)],
    "other lengths": [batch_of(seed=0), batch_of(seed=1, length=4), batch_of(seed=2), batch_of(seed=3)],
}


def trainer_of(
    batches: list[Any], at_once: int, normalization: str = "micro_batch", lr: float = 0.05, **options: Any
) -> Trainer:
    data = {"micro_batch_size": MICRO, "target_batch_size": MICRO * 4, "loss_normalization": normalization}
    model = options.pop("model", None) or model_of()
    config = SpeedtronicConfig(data=data, precision={"mode": "fp32"})
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return make_trainer(model, batches, config=config, optimizer=optimizer, merged_micro_batches=at_once, **options)


def calls_of(trainer: Trainer) -> list[int]:
    """The samples of each forward pass from now on."""
    calls: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    return calls


@pytest.mark.parametrize("normalization", ["micro_batch", "tokens"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("at_once", [2, 4])
def test_merged_updates_are_those_of_single_micro_batches(update: str, normalization: str, at_once: int) -> None:
    single, merged = (trainer_of(UPDATES[update], number, normalization, lr=1.0) for number in (1, at_once))
    one, other = (trainer.fit(3) for trainer in (single, merged))
    for record, same in zip(one.metrics, other.metrics, strict=True):
        assert {key: record[key] for key in ("samples", "tokens", "micro_batches")} == {
            key: same[key] for key in ("samples", "tokens", "micro_batches")
        }
        assert record["loss"] == pytest.approx(same["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)
    for mine, theirs in zip(single.model.parameters(), merged.model.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-6)


def test_the_mean_of_merged_losses_is_not_that_of_all_tokens() -> None:
    losses = [
        trainer_of(UPDATES["unequal valid counts"], 4, kind).fit(1).final_loss for kind in ("micro_batch", "tokens")
    ]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("update", "at_once", "samples"),
    [
        ("equal", 4, [8]),
        ("equal", 2, [4, 4]),
        ("unequal valid counts", 4, [8]),
        ("a short last one", 4, [7]),
        ("other lengths", 4, [2, 2, 2, 2]),
    ],
)
def test_so_many_micro_batches_run_as_one_where_they_fit_together(
    update: str, at_once: int, samples: list[int]
) -> None:
    trainer = trainer_of(UPDATES[update], at_once)
    calls = calls_of(trainer)
    trainer.fit(1)
    assert calls == samples


def test_a_coordinator_counts_the_samples_and_tokens_of_single_micro_batches() -> None:
    class Counting(Coordinator):
        def count(self, samples: int, tokens: Any) -> None:
            self._note("count", samples=samples, tokens=int(tokens))

    counts = []
    for at_once in (1, 4):
        events = Events()
        trainer_of(UPDATES["masks"], at_once, coordinator=Counting(events)).fit(2)
        counts.append(events.of("coordinator.count"))
    assert counts[0] == counts[1] == [{"samples": 8, "tokens": 36}] * 2


@pytest.mark.parametrize(
    ("options", "at_once", "message"),
    [
        ({}, 3, "merged_micro_batches: 3 does not divide the 4 micro batches of an update"),
        ({}, 0, "merged_micro_batches: 0 does not divide"),
        ({"model": model_of(dropout=0.1)}, 2, "ReferenceTransformer has no supports_merged_microbatches that is true"),
        ({"model": nn.Linear(2, 2)}, 2, "Linear has no supports_merged_microbatches"),
        ({"loss_fn": lambda output, batch: output["loss"]}, 2, "a loss function of your own"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_reason(options: dict[str, Any], at_once: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(UPDATES["equal"], at_once, **options)


@pytest.mark.parametrize(
    "other",
    [
        {"input_ids": torch.zeros(2, 6, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "labels": torch.zeros(3, 6, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 6, dtype=torch.int32), "labels": torch.zeros(2, 6, dtype=torch.int64)},
        {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "labels": torch.tensor(1)},
        {"input_ids": ["a", "b"], "labels": torch.zeros(2, 6, dtype=torch.int64)},
        (torch.zeros(2, 6), torch.zeros(2, 6)),
    ],
)
def test_batches_of_other_kinds_are_left_alone(other: Any) -> None:
    assert merge([batch_of(), other], 2, by_tokens=False) is None


def test_merged_batches_keep_the_order_of_samples_and_their_sizes() -> None:
    first, second = batch_of(2, seed=0), batch_of(1, seed=1)
    merged = merge([first, second], 2, by_tokens=False)
    assert merged is not None
    assert (merged[0].samples, merged[0].even) == ((2, 1), False)
    torch.testing.assert_close(merged[0].batch["labels"], torch.cat([first["labels"], second["labels"]]))
