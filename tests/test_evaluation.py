"""Evaluation counts every target alike and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import capture_rng_state
from speedtronic.errors import DataError
from speedtronic.evaluation import HeldOutLoss
from speedtronic.precision import resolve_precision

CPU = torch.device("cpu")


class Model(nn.Module):
    """The loss is the mean of the labels that count; its dropout draws random numbers even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.modes.append((self.training, torch.is_grad_enabled()))
        torch.rand(3)
        random.random()
        return {"loss": labels[labels != -100].float().mean()}


def batch(*labels: int) -> dict[str, Tensor]:
    ids = torch.tensor([labels])
    return {"input_ids": ids, "labels": ids}


def evaluator(held_out: list[Any], **options: Any) -> HeldOutLoss:
    return HeldOutLoss(lambda: held_out, device=CPU, precision=resolve_precision("fp32", CPU), **options)


def test_batches_weigh_by_their_targets() -> None:
    numbers = evaluator([batch(1, 1, 1), batch(5, -100, -100)])(Model())
    assert numbers["loss"] == pytest.approx((3 * 1 + 1 * 5) / 4)
    assert (numbers["targets"], numbers["batches"]) == (4, 2)


def test_batches_without_labels_weigh_by_their_samples() -> None:
    class Mean(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.mean()

    numbers = evaluator([{"inputs": torch.ones(3, 2)}, {"inputs": torch.full((1, 2), 5.0)}])(Mean())
    assert numbers["loss"] == pytest.approx(2.0)


def test_only_the_asked_number_of_batches_is_read() -> None:
    assert evaluator([batch(1), batch(3), batch(100)], batches=2)(Model())["loss"] == pytest.approx(2.0)


def test_every_pass_starts_from_the_beginning() -> None:
    evaluate, model = evaluator([batch(1), batch(3)], batches=1), Model()
    assert evaluate(model)["loss"] == evaluate(model)["loss"] == 1.0


def test_the_model_is_evaluated_in_eval_mode_without_gradients() -> None:
    model = Model()
    evaluator([batch(1)])(model)
    assert model.modes == [(False, False)]


def test_a_pass_is_given_up_when_it_should_stop() -> None:
    model = Model()
    answers = iter([False, True, True])
    assert evaluator([batch(1), batch(2), batch(3)])(model, lambda: next(answers)) is None
    assert len(model.modes) == 1


def test_each_modules_own_flag_comes_back() -> None:
    model = Model()
    model.train()
    model.inner.eval()
    evaluator([batch(1)])(model)
    assert (model.training, model.inner.training) == (True, False)


def test_the_random_state_is_as_before() -> None:
    model = Model()
    before = capture_rng_state()
    evaluator([batch(1)])(model)
    after = capture_rng_state()
    assert before["python"] == after["python"]
    assert torch.equal(before["torch"], after["torch"])


def test_unshifted_labels_are_aligned_first() -> None:
    assert evaluator([batch(9, 1, 3)], labels="unshifted")(Model())["loss"] == pytest.approx(2.0)


@pytest.mark.parametrize("batches", [[], [batch(-100, -100)]])
def test_held_out_data_without_a_target_is_an_error(batches: list[Any]) -> None:
    class Zero(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return torch.tensor(0.0)

    with pytest.raises(DataError, match="no target"):
        evaluator(batches)(Zero())
