"""Gradients of an update: accumulated over micro batches, by micro batch or by token, and clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.errors import ModelError, NonFiniteError
from speedtronic.ranks import Group, SingleProcess
from speedtronic.trainer.gradients import accumulate, clip_gradients
from speedtronic.trainer.loss import MeanLoss, count_targets, resolve_loss
from tests.support.models import Overflowing, make_trainer
from tests.support.thread_group import ThreadGroup, on_ranks

OFF = torch.amp.GradScaler("cpu", enabled=False)
ALONE = SingleProcess()


def update(
    forward: Callable[[Any], Tensor | MeanLoss],
    batches: Sequence[Any],
    parameters: Sequence[Tensor],
    *,
    by_target: bool = False,
    group: Group = ALONE,
) -> float:
    """The loss of one update over the micro batches."""

    def mean_loss(batch: Any) -> MeanLoss:
        loss = forward(batch)
        return MeanLoss(loss) if isinstance(loss, Tensor) else loss

    targets = count_targets(batches) if by_target else None
    loss = accumulate(mean_loss, batches, list(parameters), targets=targets, group=group, scaler=OFF)  # type: ignore[arg-type]
    assert not loss.requires_grad
    return loss.item()


def quadratic(weight: Tensor) -> Any:
    return lambda batch: ((weight * batch["x"]) ** 2).mean()


def test_accumulation_backpropagates_each_loss_divided_by_k() -> None:
    """Seed: "Backpropagate loss / K immediately"; "the arithmetic mean of the K unscaled microbatch losses"."""
    weight = torch.tensor(2.0, requires_grad=True)
    batches = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([3.0])}]
    assert update(quadratic(weight), batches, [weight]) == pytest.approx((4.0 + 36.0) / 2)
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx((2 * 2 * 1 + 2 * 2 * 9) / 2)


def test_micro_batches_of_nine_and_one_token_train_like_one_batch_of_ten() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    inputs = torch.randn(2, 9, 4, dtype=torch.float64)
    labels = torch.randint(0, 5, (2, 9))
    labels[1, 1:] = -100

    def mean_loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    batches = [{"x": inputs[i], "labels": labels[i : i + 1]} for i in range(2)]
    loss = update(
        lambda batch: mean_loss(batch["x"], batch["labels"]), batches, list(model.parameters()), by_target=True
    )
    gradient = model.weight.grad
    model.zero_grad()
    whole = mean_loss(inputs, labels)
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-5, atol=1e-7)


def test_losses_of_each_token_train_by_tokens_like_one_batch() -> None:
    """A model that returns `reduction="none"`: what it says of ignored positions counts nowhere."""
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    inputs, labels = torch.randn(2, 9, 4, dtype=torch.float64), torch.randint(0, 5, (2, 9))
    labels[1, 1:] = -100

    def losses(batch: Any) -> Tensor:
        """Those of ignored positions are not 0, as they are with torch's own `ignore_index`."""
        scores = model(batch["x"]).log_softmax(-1)
        return -scores.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1)).squeeze(-1)

    batches = [{"x": inputs[i : i + 1], "labels": labels[i : i + 1]} for i in range(2)]
    loss = update(lambda batch: resolve_loss(losses(batch), batch), batches, list(model.parameters()), by_target=True)
    gradient = model.weight.grad
    model.weight.grad = None
    whole = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-5, atol=1e-12)


def test_floating_targets_of_minus_100_count_like_all_others() -> None:
    batches = [
        {"x": torch.ones(2), "labels": torch.tensor([-100.0, 3.0])},
        {"x": torch.ones(1), "labels": torch.ones(1)},
    ]
    assert count_targets(batches) == [2, 1]


def test_a_micro_batch_without_a_target_takes_no_part_even_if_its_loss_is_nan() -> None:
    weight = torch.tensor(2.0, requires_grad=True)

    def forward(batch: dict[str, Tensor]) -> Tensor:
        targets = batch["labels"][batch["labels"] != -100]
        return (weight * targets).mean()

    batches = [{"labels": torch.tensor([[-100, -100]])}, {"labels": torch.tensor([[3, -100]])}]
    assert update(forward, batches, [weight], by_target=True) == 6.0
    assert weight.grad is not None
    assert weight.grad.item() == 3.0


def test_a_loss_without_a_gradient_is_refused_with_the_reason() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    for loss in (weight.detach(), torch.tensor(3), weight * 1j):
        with pytest.raises(ModelError, match="has no gradient: it was detached"):
            update(lambda batch, loss=loss: loss, [{}], [weight])


def test_an_update_without_any_target_has_loss_zero_and_no_gradient() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    batches = [{"labels": torch.full((1, 3), -100)}] * 2
    assert update(lambda batch: weight * float("nan"), batches, [weight], by_target=True) == 0.0
    assert weight.grad is None


@pytest.mark.parametrize(("by_target", "right"), [(True, (1 + 2 + 3 + 5 * 4) / 8), (False, (1.5 + 3 + 4 + 4) / 4)])
def test_with_more_ranks_losses_are_divided_by_all_their_micro_batches_or_targets(
    by_target: bool, right: float
) -> None:
    labels = [[[1, 2, -100], [3, -100, -100]], [[4, 4, 4], [4, 4, -100]]]

    def mean(weight: Tensor, batch: Any) -> Tensor:
        return weight * batch["labels"][batch["labels"] != -100].float().mean()

    def one_of_two(group: ThreadGroup) -> tuple[float, float]:
        weight = torch.tensor(1.0, requires_grad=True)
        batches = [{"labels": torch.tensor([row])} for row in labels[group.rank]]
        loss = update(partial(mean, weight), batches, [weight], by_target=by_target, group=group)
        assert weight.grad is not None
        return loss, weight.grad.item()

    assert on_ranks(2, one_of_two) == [(pytest.approx(right), pytest.approx(right))] * 2


def test_losses_that_say_of_how_many_values_they_are_the_mean_weigh_by_these() -> None:
    """Of 1 + 2 targets, a loss function has 3 + 2 values, since it took the integer -100 for a number to predict."""
    batches = [{"labels": torch.tensor([7, -100, -100])}, {"labels": torch.tensor([1, 2])}]
    values, right = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0])], (1 + 2 + 3 + 10 + 20) / 5
    for weights in ((3, 2), (torch.tensor(3), torch.tensor(2)), (torch.tensor(3), None)):
        weight = torch.tensor(1.0, requires_grad=True)
        losses = iter([MeanLoss(weight * v.mean(), n) for v, n in zip(values, weights, strict=True)])
        assert update(lambda batch, losses=losses: next(losses), batches, [weight], by_target=True) == pytest.approx(
            right
        )
        assert weight.grad is not None
        assert weight.grad.item() == pytest.approx(right)
    # Where each micro batch counts alike, that is so whatever it has: (2 + 15) / 2.
    weight = torch.tensor(1.0, requires_grad=True)
    losses = iter([MeanLoss(weight * v.mean(), n) for v, n in zip(values, (3, 2), strict=True)])
    assert update(lambda batch: next(losses), batches, [weight]) == 8.5


def test_a_loss_of_no_value_has_no_part_even_if_it_is_nan() -> None:
    batches = [{"labels": torch.tensor([-100, -100])}, {"labels": torch.tensor([-100, -100])}]
    weight = torch.tensor(1.0, requires_grad=True)
    losses = iter([MeanLoss(weight * torch.nan, torch.tensor(0)), MeanLoss(weight * 4, torch.tensor(2))])
    assert update(lambda batch: next(losses), batches, [weight], by_target=True) == 4.0


def test_with_more_ranks_values_are_those_of_all() -> None:
    def one_of_two(group: ThreadGroup) -> tuple[float, float]:
        weight = torch.tensor(1.0, requires_grad=True)
        # Rank 0 has 1 target, and 2 values; rank 1 has 3, and 4.
        labels, values = (torch.tensor([7, -100]), 2) if group.rank == 0 else (torch.tensor([7, 7, 7]), 4)
        batches = [{"labels": labels}]
        loss = update(lambda _: MeanLoss(weight * 3, values), batches, [weight], by_target=True, group=group)
        assert weight.grad is not None
        return loss, weight.grad.item()

    assert on_ranks(2, one_of_two) == [(pytest.approx(3), pytest.approx(3))] * 2


def test_a_rank_without_a_batch_has_the_gradient_of_the_others() -> None:
    def one_of_two(group: ThreadGroup) -> tuple[float, float, bool]:
        weight, unused = torch.tensor(2.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        batches = [{"x": torch.tensor([3.0])}, {"x": torch.tensor([1.0])}] if group.rank == 0 else [None, None]
        loss = update(quadratic(weight), batches, [weight, unused], group=group)
        assert weight.grad is not None
        return loss, weight.grad.item(), unused.grad is None

    # The mean of the two micro batches that there are.
    assert on_ranks(2, one_of_two) == [((36 + 4) / 2, (36 + 4) / 2, True)] * 2


def test_the_gradient_norm_is_that_over_all_parameters() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([4.0])
    assert clip_gradients(parameters, None).item() == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == [3.0, 0.0]


def test_sparse_gradients_have_a_norm_too() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    # Row 1 was used twice: its gradient is (2, 2), that of row 3 is (1, 1).
    assert clip_gradients([embedding.weight], None).item() == pytest.approx(10**0.5)


def test_clipping_scales_gradients_down_to_the_norm_and_never_up() -> None:
    """Seed: "On the final microbatch, optionally unscale and clip"."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], 1.0).item() == pytest.approx(5.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    clip_gradients([parameter], 10.0)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("max_norm", [None, 0.5, 1e9])
@pytest.mark.parametrize("dtypes", [[torch.float32] * 5, [torch.float32, torch.float64]])
def test_norm_and_clipping_are_those_of_torch_to_the_last_bit(
    max_norm: float | None, dtypes: list[torch.dtype]
) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.zeros(3, 2 + size, dtype=dtype)) for size, dtype in enumerate(dtypes)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for mine, other in zip(ours, theirs, strict=True):
        mine.grad = torch.randn(mine.shape, dtype=mine.dtype, generator=generator)
        other.grad = mine.grad.clone()
    expected = nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(theirs, max_norm, expected)
    assert torch.equal(clip_gradients(ours, max_norm), expected)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_clipping_by_value_bounds_each_entry_and_returns_the_norm_before() -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([3.0, -4.0, 0.5])
    assert clip_gradients([weight], None, 1.0).item() == pytest.approx(25.25**0.5)
    assert weight.grad.tolist() == [1.0, -1.0, 0.5]


def test_a_gradient_that_is_infinite_is_refused_although_its_clipped_value_is_finite() -> None:
    trainer = make_trainer(
        Overflowing(2),
        config={"run": {"max_steps": 3}, "optimizer": {"grad_clip_value": 0.1}},
    )
    with pytest.raises(NonFiniteError, match=r"^step 2"):
        trainer.fit()


def test_a_run_clips_by_value_where_the_configuration_says_so() -> None:
    trainer = make_trainer(config={"run": {"max_steps": 1}, "optimizer": {"grad_clip_value": 1e-3}})
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.fit()
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(
            (tensor - before[name]).abs(), torch.full_like(tensor, 0.05 * 1e-3), rtol=1e-2, atol=0
        )


def test_gradients_that_have_a_graph_of_their_own_are_clipped() -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    (weight.grad,) = torch.autograd.grad((weight**2 / 2).sum(), [weight], create_graph=True)
    norm = clip_gradients([weight], 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert not norm.requires_grad
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])
