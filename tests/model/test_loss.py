from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from speedtronic.model import causal_cross_entropy, causal_cross_entropy_sum
from tests.support.cases import case


def plain_nll(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Sum and count in scalar arithmetic, one position after another."""
    total, count = 0.0, 0
    for row, targets in zip(logits.tolist(), labels.tolist(), strict=True):
        for scores, target in zip(row, targets, strict=False):
            if target != -100:
                total += math.log(sum(math.exp(score) for score in scores)) - scores[target]
                count += 1
    return total, count


def random_case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 6, 11, generator=generator)
    labels = torch.randint(0, 11, (3, 6), generator=generator)
    labels[0, 1] = labels[2, 5] = -100
    return logits, labels


def test_aligned_labels_use_every_row_of_logits() -> None:
    """Seed: "same-length labels are treated as already next-token aligned and use the full logit row"."""
    logits, labels = random_case()
    total, count = plain_nll(logits, labels)
    assert causal_cross_entropy(logits, labels).item() == pytest.approx(total / count, rel=1e-5)


def test_labels_one_shorter_do_not_use_the_last_row_of_logits() -> None:
    """Seed: "logits are truncated to logits[:, :-1] only for (B, T-1) labels"."""
    logits, labels = random_case()
    logits.requires_grad_()
    short = labels[:, :-1]
    total, count = plain_nll(logits[:, :-1], short)
    loss = causal_cross_entropy(logits, short)
    loss.backward()
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    assert logits.grad is not None
    assert logits.grad[:, -1].count_nonzero() == 0
    assert logits.grad[:, :-1].count_nonzero() > 0


def test_the_sum_and_the_count_leave_out_ignored_labels() -> None:
    """Seed: "-100 is ignored"."""
    logits, labels = random_case()
    total, count = causal_cross_entropy_sum(logits, labels)
    expected_total, expected_count = plain_nll(logits, labels)
    assert total.item() == pytest.approx(expected_total, rel=1e-5)
    assert count.item() == expected_count == 16


def test_all_ignored_labels_give_a_zero_with_a_gradient_to_the_logits() -> None:
    """Seed: "all-ignored labels produce a differentiable zero tied to the logits"."""
    logits = torch.randn(2, 4, 7, requires_grad=True)
    loss = causal_cross_entropy(logits, torch.full((2, 4), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.count_nonzero() == 0


def test_half_precision_logits_are_normalised_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with case(dtype):
            logits, labels = random_case()
            half = logits.to(dtype)
            loss = causal_cross_entropy(half, labels)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss, causal_cross_entropy(half.float(), labels), rtol=0, atol=0)


def test_the_gradient_is_that_of_the_mean() -> None:
    logits, labels = random_case()
    logits = logits.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: causal_cross_entropy(x, labels), logits)


def test_labels_of_a_narrow_integer_dtype_are_accepted() -> None:
    logits, labels = random_case()
    torch.testing.assert_close(causal_cross_entropy(logits, labels.int()), causal_cross_entropy(logits, labels))


def test_a_label_that_is_not_a_token_is_refused() -> None:
    for label in (11, -1):
        with case(label):
            logits, labels = random_case()
            labels[1, 2] = label
            with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
                causal_cross_entropy(logits, labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_keeps_only_the_logits_at_their_size(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 5, 40, dtype=dtype, requires_grad=True)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        causal_cross_entropy(logits, torch.randint(0, 40, (2, 5)))
    large = [tensor for tensor in kept if tensor.numel() >= logits.numel()]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


def test_the_gradient_is_the_same_under_function_transforms() -> None:
    logits, labels = random_case()
    leaf = logits.clone().requires_grad_()
    (expected,) = torch.autograd.grad(causal_cross_entropy(leaf, labels), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: causal_cross_entropy(x, labels))(logits), expected)


def test_logits_far_from_zero_lose_no_digits() -> None:
    """log Σ exp(x) of two logits of 10⁴ is 10⁴ + ln 2, which float32 rounds to 10⁴ + 0.69336."""
    for height in (1e4, -1e4, 1e6, 1e30):
        with case(height):
            logits = torch.full((1, 1, 2), height, requires_grad=True)
            loss = causal_cross_entropy(logits, torch.tensor([[0]]))
            loss.backward()
            assert loss.item() == pytest.approx(math.log(2), rel=1e-6)
            assert round(loss.item(), 5) == 0.69315
            assert logits.grad is not None
            assert logits.grad.tolist() == [[[-0.5, 0.5]]]
            assert logits.grad.sum() == 0.0


def test_the_gradient_of_each_row_sums_to_zero() -> None:
    logits, labels = random_case()
    for shift in (0.0, 1e4):
        with case(shift):
            leaf = (logits + shift).requires_grad_()
            (gradient,) = torch.autograd.grad(causal_cross_entropy_sum(leaf, labels)[0], leaf)
            torch.testing.assert_close(gradient.sum(-1), torch.zeros(3, 6), rtol=0, atol=1e-6)


def torchs_own(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_derivatives_of_derivatives_equal_torchs() -> None:
    """A penalty on the gradient, and a penalty on the gradient of that."""
    logits, labels = random_case()

    def three_orders(loss: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaf = (3 * logits).requires_grad_()
        (first,) = torch.autograd.grad(9 * loss(leaf, labels), leaf, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaf, create_graph=True)
        return [first, second, *torch.autograd.grad(second.pow(3).sum(), leaf)]

    torch.testing.assert_close(three_orders(causal_cross_entropy), three_orders(torchs_own))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch.func.jacfwd uses it
def test_function_transforms_of_each_order_equal_torchs() -> None:
    logits, labels = random_case()
    logits = logits[:1, :2]
    labels = labels[:1, :2]
    for first in (torch.func.jacrev, torch.func.jacfwd):
        for second in (torch.func.jacrev, torch.func.jacfwd):
            with case(first, second):
                ours, theirs = (
                    first(second(partial(loss, labels=labels)))(logits) for loss in (causal_cross_entropy, torchs_own)
                )
                torch.testing.assert_close(ours, theirs)


def test_labels_of_another_shape_are_refused_and_the_error_names_both_shapes() -> None:
    for shape in ((3, 4), (2, 6), (3, 7), (18,), (3, 6, 1)):
        with case(shape):
            logits, _ = random_case()
            with pytest.raises(ValueError, match=r"\(3, 6, 11\)") as caught:
                causal_cross_entropy(logits, torch.zeros(shape, dtype=torch.long))
            assert str(shape) in str(caught.value)


def test_logits_that_are_not_three_dimensional_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits of shape \(3, 11\)"):
        causal_cross_entropy(torch.zeros(3, 11), torch.zeros(3, dtype=torch.long))
