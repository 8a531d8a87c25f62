"""What a model may return, and the loss that comes of it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from speedtronic.trainer.loss import align_labels, count_labels, looks_like_logits, resolve_loss

LOGITS = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(1))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))


def test_a_mapping_with_loss_uses_it_directly() -> None:
    """Seed: "{"loss": tensor} uses the loss directly"."""
    loss = torch.tensor(3.0)
    assert resolve_loss({"loss": loss, "logits": LOGITS}, {"labels": LABELS}) is loss


def test_a_mapping_with_3d_logits_and_no_loss_gets_causal_cross_entropy() -> None:
    """Seed: "{"logits": 3d_tensor} without loss triggers trainer-side causal cross-entropy"."""
    for output in ({"logits": LOGITS}, {"logits": LOGITS, "loss": None}):
        loss = resolve_loss(output, {"input_ids": LABELS, "labels": LABELS})
        torch.testing.assert_close(loss, cross_entropy(LOGITS, LABELS))


def test_a_bare_tensor_is_the_loss_even_if_it_is_3d() -> None:
    """Seed: "A bare tensor is a direct loss, even if it is 3-D"."""
    torch.testing.assert_close(resolve_loss(LOGITS, {"labels": LABELS}), LOGITS.mean())


def test_a_scalar_first_field_is_the_loss() -> None:
    """Seed: "A scalar first tensor is a direct loss"."""
    loss = torch.tensor(2.0)
    assert resolve_loss((loss, LOGITS), {"labels": LABELS}) is loss
    assert resolve_loss([loss], (LABELS, LABELS)) is loss


def test_a_3d_first_field_is_causal_logits_for_the_labels() -> None:
    """Seed: "A 3-D first tensor is treated as causal logits when labels have compatible shapes"."""
    torch.testing.assert_close(resolve_loss((LOGITS, None), (LABELS, LABELS)), cross_entropy(LOGITS, LABELS))


def test_a_3d_first_field_with_labels_that_do_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="shape"):
        resolve_loss((LOGITS,), {"labels": LABELS[:, :2]})


def test_labels_of_the_same_length_are_aligned_and_use_every_logit() -> None:
    """Seed: "same-length labels are treated as already next-token aligned and use the full logit row"."""
    loss = resolve_loss({"logits": LOGITS}, {"labels": LABELS})
    torch.testing.assert_close(loss, cross_entropy(LOGITS, LABELS))


def test_labels_that_are_one_shorter_leave_out_the_last_logit() -> None:
    """Seed: "logits are truncated to logits[:, :-1] only for (B, T-1) labels"."""
    loss = resolve_loss({"logits": LOGITS}, {"labels": LABELS[:, 1:]})
    torch.testing.assert_close(loss, cross_entropy(LOGITS[:, :-1], LABELS[:, 1:]))


def test_minus_100_is_ignored() -> None:
    """Seed: "-100 is ignored"."""
    labels = LABELS.clone()
    labels[0] = -100
    torch.testing.assert_close(
        resolve_loss({"logits": LOGITS}, {"labels": labels}), cross_entropy(LOGITS[1:], LABELS[1:])
    )


def test_all_ignored_labels_give_a_differentiable_zero() -> None:
    """Seed: "all-ignored labels produce a differentiable zero tied to the logits"."""
    logits = LOGITS.clone().requires_grad_()
    loss = resolve_loss({"logits": logits}, {"labels": torch.full_like(LABELS, -100)})
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_loss_that_is_not_a_scalar_is_averaged() -> None:
    """Seed: "Mean any non-scalar loss"."""
    assert resolve_loss({"loss": torch.tensor([1.0, 3.0])}, {}).item() == 2.0
    assert resolve_loss(torch.tensor([[1.0], [5.0]]), {}).item() == 3.0


def test_one_loss_per_sample_in_a_tuple_is_averaged() -> None:
    assert resolve_loss((torch.tensor([1.0, 3.0]), LOGITS), {"labels": LABELS}).item() == 2.0


def test_loss_fn_takes_the_place_of_all_rules() -> None:
    loss = resolve_loss({"loss": torch.tensor(9.0)}, (1, 2), lambda output, batch: output["loss"] * batch[1])
    assert loss.item() == 18.0


@pytest.mark.parametrize(
    "output",
    [{"hidden": LOGITS}, {"logits": LOGITS[0]}, (LOGITS[0],), (), "loss", None, ({"loss": LOGITS},)],
    ids=["no known key", "2d logits", "2d first", "empty", "string", "none", "mapping in tuple"],
)
def test_an_output_without_a_loss_is_refused_with_a_remedy(output: Any) -> None:
    with pytest.raises(TypeError, match="loss_fn"):
        resolve_loss(output, {"labels": LABELS})


def test_logits_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="no labels"):
        resolve_loss({"logits": LOGITS}, {"input_ids": LABELS})


def test_only_a_bare_tensor_of_the_labels_shape_looks_like_logits() -> None:
    assert looks_like_logits(LOGITS, {"labels": LABELS})
    assert looks_like_logits(LOGITS, (LABELS, LABELS[:, 1:]))
    assert not looks_like_logits(LOGITS, {"labels": LABELS.float()})
    assert not looks_like_logits(LOGITS.mean(-1), {"labels": LABELS})
    assert not looks_like_logits((LOGITS,), {"labels": LABELS})


def test_labels_are_counted_without_the_ignored_ones() -> None:
    labels = LABELS.clone()
    labels[0, :3] = -100
    assert count_labels({"labels": labels}).item() == 5
    assert count_labels((LABELS, labels)).item() == 5


def test_counting_labels_of_a_batch_without_any_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="micro_batch"):
        count_labels({"input_ids": LABELS})


def test_unshifted_labels_become_aligned_ones() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = torch.tensor([[2, 3, -100], [5, 6, -100]])
    mapping = align_labels({"input_ids": ids, "labels": ids})
    torch.testing.assert_close(mapping["labels"], expected)
    torch.testing.assert_close(mapping["input_ids"], ids)
    pair = align_labels((ids, ids, "kept"))
    torch.testing.assert_close(pair[1], expected)
    assert pair[2] == "kept"
    named = namedtuple("named", "x y")
    assert isinstance(align_labels(named(ids, ids)), named)
    assert align_labels((ids[0], ids[0]))[1].tolist() == [2, 3, -100]
