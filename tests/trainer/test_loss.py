"""What a model may return, and the loss that comes of it."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from speedtronic.errors import ConfigError, DataError, ModelError
from speedtronic.trainer.loss import (
    align_labels,
    batch_labels,
    count_labels,
    doubt_about,
    has_no_target,
    loss_by_name,
    resolve_loss,
)

LOGITS = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 7, (2, 4), generator=torch.Generator().manual_seed(1))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1))


def test_a_mapping_with_loss_uses_it_directly() -> None:
    """Seed: "{"loss": tensor} uses the loss directly"."""
    loss = torch.tensor(3.0)
    assert resolve_loss({"loss": loss, "logits": LOGITS}, {"labels": LABELS}).value is loss


def test_a_mapping_with_3d_logits_and_no_loss_gets_causal_cross_entropy() -> None:
    """Seed: "{"logits": 3d_tensor} without loss triggers trainer-side causal cross-entropy"."""
    for output in ({"logits": LOGITS}, {"logits": LOGITS, "loss": None}):
        loss = resolve_loss(output, {"input_ids": LABELS, "labels": LABELS}).value
        torch.testing.assert_close(loss, cross_entropy(LOGITS, LABELS))


def test_a_bare_tensor_is_the_loss_even_if_it_is_3d() -> None:
    """Seed: "A bare tensor is a direct loss, even if it is 3-D"."""
    torch.testing.assert_close(resolve_loss(LOGITS, {"labels": LABELS}).value, LOGITS.mean())


def test_a_scalar_first_field_is_the_loss() -> None:
    """Seed: "A scalar first tensor is a direct loss"."""
    loss = torch.tensor(2.0)
    assert resolve_loss((loss, LOGITS), {"labels": LABELS}).value is loss
    assert resolve_loss([loss], (LABELS, LABELS)).value is loss


def test_a_3d_first_field_is_causal_logits_for_the_labels() -> None:
    """Seed: "A 3-D first tensor is treated as causal logits when labels have compatible shapes"."""
    torch.testing.assert_close(resolve_loss((LOGITS, None), (LABELS, LABELS)).value, cross_entropy(LOGITS, LABELS))


def test_a_named_tuple_says_which_field_is_the_loss_or_the_logits() -> None:
    batch, own = {"labels": LABELS}, torch.tensor(0.25)
    for output in (
        namedtuple("WithLoss", "logits loss")(LOGITS, own),
        namedtuple("WithHidden", "hidden loss")(LOGITS + 1, own),
    ):
        assert resolve_loss(output, batch).value == own
        assert doubts_about(output, batch) == []
    hidden_first = namedtuple("HiddenFirst", "hidden logits")(LOGITS + 1, LOGITS.flip(0))
    expected = cross_entropy(LOGITS.flip(0), LABELS)
    torch.testing.assert_close(resolve_loss(hidden_first, batch).value, expected)
    named = loss_by_name("cross_entropy")
    assert named is not None
    torch.testing.assert_close(named(hidden_first, {"input_ids": LABELS, "labels": LABELS}), expected)
    # Without such names the place counts, as in any tuple.
    other = namedtuple("Other", "scores state")(LOGITS, own)
    torch.testing.assert_close(resolve_loss(other, batch).value, cross_entropy(LOGITS, LABELS))


def test_a_3d_first_field_with_labels_that_do_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="shape"):
        resolve_loss((LOGITS,), {"labels": LABELS[:, :2]})


def test_labels_of_the_same_length_are_aligned_and_use_every_logit() -> None:
    """Seed: "same-length labels are treated as already next-token aligned and use the full logit row"."""
    loss = resolve_loss({"logits": LOGITS}, {"labels": LABELS}).value
    torch.testing.assert_close(loss, cross_entropy(LOGITS, LABELS))


def test_labels_that_are_one_shorter_leave_out_the_last_logit() -> None:
    """Seed: "logits are truncated to logits[:, :-1] only for (B, T-1) labels"."""
    loss = resolve_loss({"logits": LOGITS}, {"labels": LABELS[:, 1:]}).value
    torch.testing.assert_close(loss, cross_entropy(LOGITS[:, :-1], LABELS[:, 1:]))


def test_minus_100_is_ignored() -> None:
    """Seed: "-100 is ignored"."""
    labels = LABELS.clone()
    labels[0] = -100
    torch.testing.assert_close(
        resolve_loss({"logits": LOGITS}, {"labels": labels}).value, cross_entropy(LOGITS[1:], LABELS[1:])
    )


def test_all_ignored_labels_give_a_differentiable_zero() -> None:
    """Seed: "all-ignored labels produce a differentiable zero tied to the logits"."""
    logits = LOGITS.clone().requires_grad_()
    loss = resolve_loss({"logits": logits}, {"labels": torch.full_like(LABELS, -100)}).value
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_loss_that_is_not_a_scalar_is_averaged() -> None:
    """Seed: "Mean any non-scalar loss"."""
    assert resolve_loss({"loss": torch.tensor([1.0, 3.0])}, {}).value.item() == 2.0
    assert resolve_loss(torch.tensor([[1.0], [5.0]]), {}).value.item() == 3.0


def test_one_loss_per_sample_in_a_tuple_is_averaged() -> None:
    assert resolve_loss((torch.tensor([1.0, 3.0]), LOGITS), {"labels": LABELS}).value.item() == 2.0


def test_loss_fn_takes_the_place_of_all_rules() -> None:
    loss = resolve_loss({"loss": torch.tensor(9.0)}, (1, 2), lambda output, batch: output["loss"] * batch[1]).value
    assert loss.item() == 18.0


@pytest.mark.parametrize(
    "output",
    [
        {"hidden": LOGITS},
        {"logits": LOGITS[0]},
        (LOGITS[0],),
        (),
        "loss",
        None,
        ({"loss": LOGITS},),
        {"loss": {"main": LOGITS, "aside": LOGITS}, "logits": LOGITS},
        {"loss": 1.0, "logits": LOGITS},
    ],
    ids=[
        "no known key",
        "2d logits",
        "2d first",
        "empty",
        "string",
        "none",
        "mapping in tuple",
        "several losses beside logits",
        "a number beside logits",
    ],
)
def test_an_output_without_a_loss_is_refused_with_a_remedy(output: Any) -> None:
    with pytest.raises(TypeError, match="loss_fn"):
        resolve_loss(output, {"labels": LABELS})


def test_labels_under_another_name_are_pointed_at_where_a_model_returns_no_loss() -> None:
    with pytest.raises(ModelError, match="computes it where 'label' is named 'labels'$"):
        resolve_loss({"logits": LOGITS[:, 0]}, {"x": LOGITS, "label": CLASSES})


def test_logits_without_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="no labels"):
        resolve_loss({"logits": LOGITS}, {"input_ids": LABELS})


CLASSES = torch.tensor([3, 0])


@pytest.mark.parametrize(
    "batch", [{"labels": CLASSES}, (LOGITS, CLASSES), {"image": LOGITS, "label": CLASSES}, [LOGITS, CLASSES.int()]]
)
def test_a_bare_row_of_scores_for_each_integer_label_is_refused(batch: Any) -> None:
    with pytest.raises(ModelError, match=r"\(2, 7\).*no loss.*'loss'.*set loss.*loss_fn"):
        resolve_loss(LOGITS[:, 0], batch)
    assert resolve_loss({"loss": LOGITS[:, 0]}, batch).value == LOGITS[:, 0].mean()


def doubts_about(output: Any, batch: Any) -> list[str]:
    said: list[str] = []

    def warn(kind: str, message: str, when: Tensor | None = None) -> None:
        if when is None or when.item():
            said.append(message)

    doubt_about(output, batch, warn)
    return said


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (LOGITS, {"labels": LABELS}),
        (LOGITS, (LABELS, LABELS[:, 1:])),
        (LOGITS, {"labels": LABELS.float()}),
        (LOGITS[:, 0], {"x": LOGITS}),
        (LOGITS[0], (LOGITS, LOGITS[0])),
        (torch.zeros(2, 1), (LOGITS, torch.zeros(2))),
        (torch.zeros(2, 1), (LOGITS, CLASSES)),
        (torch.zeros(2), (LOGITS, torch.zeros(2, 1))),
        ((torch.zeros(2), LOGITS), (LOGITS, torch.zeros(2))),
        (torch.zeros(2, 3, 4, 5), (LOGITS, torch.zeros(2, 4, 5, dtype=torch.long))),
        (torch.zeros(2, 1), (LOGITS, torch.zeros(2, 1, dtype=torch.bool))),
        (torch.zeros(2), {"x": LOGITS, "y": torch.zeros(2)}),
        (torch.zeros(2), {"x": LOGITS, "target": torch.zeros(2, 1)}),
        (torch.tensor([1.0, -1.0]), (LOGITS, CLASSES)),
        (torch.tensor([1.0, -1.0]), {"x": LOGITS, "label": CLASSES}),
        ((torch.tensor([1.0, -1.0]),), {"labels": LABELS}),
        (-torch.ones(2, 4), {"labels": LABELS}),
    ],
)
def test_a_tensor_that_may_be_a_prediction_is_doubted(output: Any, batch: Any) -> None:
    (doubt,) = doubts_about(output, batch)
    assert "loss_fn" in doubt


@pytest.mark.parametrize(
    ("output", "batch"),
    [
        (torch.tensor(1.0), (LOGITS, torch.zeros(2))),
        (torch.zeros(2), {"x": LOGITS}),
        (torch.zeros(2), (LOGITS, CLASSES)),
        (torch.zeros(2), {"labels": LABELS}),
        (torch.zeros(2, 4), {"labels": LABELS}),
        (torch.zeros(8), {"labels": LABELS}),
        (torch.zeros(8, 1), {"labels": LABELS}),
        (torch.tensor([1.0, -1.0]), {"x": LOGITS}),
        ((LOGITS,), {"labels": LABELS}),
        ({"loss": LOGITS}, {"labels": LABELS}),
    ],
)
def test_a_loss_for_each_sample_or_integer_label_is_not_doubted(output: Any, batch: Any) -> None:
    assert doubts_about(output, batch) == []


# ---------------------------------------------------------------- a loss for each label


@pytest.mark.parametrize(
    ("make", "flat"),
    [
        (lambda loss: loss, False),
        (lambda loss: loss, True),
        (lambda loss: {"loss": loss}, False),
        (lambda loss: {"loss": loss}, True),
        (lambda loss: (loss,), True),  # the first field of a tuple has at most one dimension
    ],
)
def test_a_loss_for_each_label_is_averaged_over_those_that_are_targets(make: Any, flat: bool) -> None:
    labels = LABELS.clone()
    labels[0, 1:] = -100
    each = F.cross_entropy(LOGITS.transpose(1, 2), labels, reduction="none")
    right = each.sum() / 5
    assert not torch.isclose(right, each.mean())
    output = make(each.flatten() if flat else each)
    torch.testing.assert_close(resolve_loss(output, {"labels": labels}).value, right)
    torch.testing.assert_close(resolve_loss(None, (LOGITS, labels), lambda *_: output_of(output)).value, right)


def output_of(output: Any) -> Tensor:
    found: Tensor = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    return found


def in_doubt(loss: Tensor, labels: Tensor) -> tuple[float, list[str]]:
    """The resolved loss, and the kinds of doubt that turn out to be due."""
    said: list[str] = []

    def warn(kind: str, message: str, when: Tensor | None = None) -> None:
        if when is None or when.item():
            assert "return" in message.lower()
            assert "loss has" in message
            said.append(kind)

    return resolve_loss(None, {"labels": labels}, lambda *_: loss, warn=warn).value.item(), said


# The values at the three targets are 1, 2 and 3, so 2.0 is right. In the order of the labels, those that a transposed
# mask would keep are 1 and 0s.
SQUARE_LABELS = torch.tensor([[5, 6, 4], [-100, -100, -100], [-100, -100, -100]])
SQUARE = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("time_major", [False, True])
def test_a_loss_for_each_label_of_a_square_batch_is_that_of_its_targets_in_either_order(
    time_major: bool, flat: bool
) -> None:
    """By the mask of the labels in their own order, the time-major ones would be 1/3: a third of only the 1."""
    each = SQUARE.T if time_major else SQUARE
    loss, said = in_doubt(each.flatten() if flat else each, SQUARE_LABELS)
    assert loss == 2.0
    assert said == (["order of a loss"] if time_major else [])


def test_a_flat_loss_in_the_order_of_time_is_that_of_its_targets() -> None:
    labels = torch.tensor([[5, -100, -100, -100], [3, 1, -100, -100]])
    each = torch.tensor([[4.0, 0.0, 0.0, 0.0], [3.0, 2.0, 0.0, 0.0]])
    assert in_doubt(each.flatten(), labels) == (3.0, [])
    assert in_doubt(each.T.flatten(), labels) == (3.0, ["order of a loss"])
    # Where the sizes differ, the shape tells.
    assert in_doubt(each.T, labels) == (3.0, [])
    assert in_doubt(each.T + 1, labels) == (4.0, [])


def test_a_loss_of_three_dimensions_in_one_row_may_have_them_in_any_order() -> None:
    labels = torch.full((2, 3, 4), -100)
    labels[0, 1:, 2:] = 1
    each = torch.arange(24.0).view(2, 3, 4).masked_fill(labels == -100, 0.0)
    right = (6 + 7 + 10 + 11) / 4
    assert in_doubt(each.flatten(), labels) == (right, [])
    assert in_doubt(each.permute(2, 0, 1).flatten(), labels) == (right, ["order of a loss"])


def test_a_loss_that_is_not_zero_at_ignored_labels_is_taken_in_their_order_and_that_is_said() -> None:
    doubt = ["order of a loss in doubt"]
    assert in_doubt(SQUARE + 1, SQUARE_LABELS) == (3.0, doubt)
    assert in_doubt((SQUARE + 1).flatten(), SQUARE_LABELS) == (3.0, doubt)
    # Any order gives the same where nothing is ignored, or the same at both places.
    assert in_doubt(SQUARE + 1, SQUARE_LABELS.clamp(min=0))[1] == []
    assert in_doubt(torch.ones(3, 3), torch.tensor([[1, 1, -100], [1, 1, 1], [-100, 1, 1]])) == (1.0, [])
    assert in_doubt(torch.full((2, 2), torch.nan), torch.full((2, 2), -100)) == (0.0, [])


@pytest.mark.parametrize(
    ("shape", "flat_labels"),
    [((3, 5), True), ((15,), True), ((15, 1), False), ((1, 15), False), ((3, 5, 1), False), ((3, 5, 1), True)],
)
def test_a_loss_of_as_many_values_as_labels_is_averaged_over_the_targets_in_any_shape(
    shape: tuple[int, ...], flat_labels: bool
) -> None:
    """The mean over all values would be 3/5 of the right one."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 5, 7, generator=generator), torch.randint(0, 7, (3, 5), generator=generator)
    labels[:, 3:] = -100
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    given = labels.flatten() if flat_labels else labels
    right = pytest.approx(each.sum().item() / 9)
    assert in_doubt(each.view(shape), given) == (right, [])
    # Labels in the order (T, B) of a loss (B, T): its zeros tell.
    assert in_doubt(each.view(3, 5), labels.T.flatten()) == (right, ["order of a loss"])


def test_a_loss_per_sample_of_a_loss_fn_that_does_not_ignore_minus_100_is_averaged_over_all_and_that_is_said() -> None:
    """Targets of a regression may be the integer -100; those of a classifier are left out, as its loss is 0 there."""
    labels, prediction = torch.tensor([150, -100, 7]), torch.tensor([0.0, 2.0, 7.0])
    each = (prediction - labels) ** 2
    for shape in ((3,), (3, 1)):
        assert in_doubt(each.view(shape), labels) == (pytest.approx((150**2 + 102**2) / 3), ["labels of -100"])
    assert in_doubt(torch.tensor([3.0, 0.0, 5.0]), labels) == (4.0, [])
    assert in_doubt(torch.tensor([3.0, torch.nan, 5.0]), labels) == (4.0, [])
    # What a model returns for each label is a loss of labels, of which -100 is none.
    assert resolve_loss({"loss": each}, {"labels": labels}).value == 150**2 / 2


def test_a_loss_of_other_values_than_the_targets_weighs_by_these() -> None:
    """So the mean of unequal batches is that of one batch with all of them. A scalar is a mean over the targets."""
    labels, rows = torch.tensor([150, -100, 7]), torch.tensor([[1, 2], [-100, -100], [3, -100]])

    def weight(loss: Tensor, labels: Tensor) -> Any:
        found = resolve_loss(None, {"labels": labels}, lambda *_: loss).weight
        return found.item() if isinstance(found, Tensor) else found

    # One value for each sample: where it is not 0 at -100, that is a number to predict.
    assert [weight(torch.tensor(loss), labels) for loss in ([1.0, 9.0, 2.0], [1.0, 0.0, 2.0])] == [3, 2]
    # One value for each sample, or several, of rows of labels, or of none that is an integer.
    assert [weight(torch.ones(3), each) for each in (rows, rows.float(), rows[:, :1].float())] == [3, 3, None]
    assert weight(torch.ones(3, 5), labels) == 15
    # A scalar, a value for each label, and values that are none of samples: what the labels tell.
    assert [weight(loss, rows) for loss in (torch.tensor(1.0), torch.ones(3, 2), torch.ones(2))] == [None] * 3


def test_only_values_of_ignored_labels_are_doubted_in_a_mean_over_all() -> None:
    """Values of the targets alone are as many as these. Labels that are no integers are never ignored."""
    labels = torch.tensor([[1, 2, -100], [3, 4, 5]])
    assert in_doubt(torch.ones(2, 3, 2), labels) == (1.0, ["mean of a loss"])
    assert in_doubt(torch.ones(5), labels) == (1.0, [])
    # Shifted inside the loss function: as many values as targets by chance.
    shifted = torch.tensor([[1, 2, -100], [3, 4, -100]])
    assert in_doubt(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), shifted) == (1.0, ["mean of a loss"])
    for others in (labels.float(), labels.abs()):
        assert in_doubt(torch.ones(2, 3, 2), others) == (1.0, [])


def test_a_loss_without_a_value_is_0_without_a_target_and_else_refused() -> None:
    none = torch.ones(0, requires_grad=True)
    loss = resolve_loss(none * 1, {"labels": torch.full((2, 3), -100)}).value
    assert (loss.item(), loss.requires_grad) == (0.0, True)
    for batch in ({"labels": torch.tensor([[1, -100]])}, {"labels": torch.ones(2)}, {"x": torch.ones(2)}):
        with pytest.raises(ModelError, match=r"the loss has the shape \(0,\), so it has no value"):
            resolve_loss({"loss": none}, batch)


def test_labels_in_an_array_are_labels() -> None:
    labels = np.array([[1, -100, 2], [-100, -100, 3]], dtype=">i2")
    labels.setflags(write=False)
    loss = torch.arange(6.0).view(2, 3)
    assert resolve_loss({"loss": loss}, {"labels": labels}).value.item() == pytest.approx(7 / 3)
    assert count_labels((None, labels)) == 3
    assert has_no_target({"label": labels[1:, :2]}) == torch.tensor(True)
    names = np.array(["a", "b"])
    assert batch_labels({"label": names, "target": labels}).tolist() == labels.tolist()  # type: ignore[union-attr]


def test_the_gradient_of_a_loss_in_another_order_reaches_all_its_targets() -> None:
    each = SQUARE.T.clone().requires_grad_()
    resolve_loss(each, {"labels": SQUARE_LABELS}).value.backward()
    assert each.grad is not None
    assert each.grad[:, 0].tolist() == pytest.approx([1 / 3] * 3)


def test_a_loss_for_each_label_without_a_target_is_a_differentiable_zero() -> None:
    each = torch.full((2, 4), float("nan"), requires_grad=True)
    loss = resolve_loss(each, {"labels": torch.full((2, 4), -100)}).value
    loss.backward()
    assert loss.item() == 0.0
    assert each.grad is not None
    assert not each.grad.any()


def test_the_mean_of_half_precision_losses_has_all_digits() -> None:
    """In bfloat16, the mean of these would be 1.0, or 1.0078."""
    each = torch.tensor([1.0] * 255 + [2.0], dtype=torch.bfloat16)
    assert resolve_loss({"loss": each}, {}).value.item() == 257 / 256


def test_many_half_precision_losses_do_not_overflow() -> None:
    each, labels = torch.full((64, 64), 100.0, dtype=torch.float16), torch.zeros(64, 64, dtype=torch.long)
    assert resolve_loss(each, {"labels": labels}).value.item() == 100.0


@pytest.mark.parametrize("labels", [torch.full((2, 4), -100.0), torch.full((2, 4), 156, dtype=torch.uint8)])
def test_labels_that_are_no_signed_integers_are_all_targets(labels: Tensor) -> None:
    """A float of exactly -100.0 is a number to predict. Torch takes the unsigned 156 for equal to -100."""
    each = torch.arange(8.0).view(2, 4)
    assert resolve_loss(each, {"labels": labels}).value.item() == 3.5
    assert count_labels({"labels": labels}).item() == 8


# ---------------------------------------------------------------- losses by name


def test_without_a_name_the_model_returns_its_loss() -> None:
    assert loss_by_name(None) is None


def named(name: str) -> Any:
    loss = loss_by_name(name)
    assert loss is not None
    return loss


@pytest.mark.parametrize("make", [lambda x: x, lambda x: {"logits": x, "loss": None}, lambda x: (x, None)])
def test_cross_entropy_compares_scores_with_the_labels_of_any_batch(make: Any) -> None:
    loss = named("cross_entropy")
    scores = LOGITS[:, 0]
    right = -(scores.log_softmax(-1)[[0, 1], CLASSES]).mean()
    for batch in ({"labels": CLASSES}, (None, CLASSES), [None, CLASSES.int()]):
        torch.testing.assert_close(loss(make(scores), batch), right)
    torch.testing.assert_close(loss(make(LOGITS), {"labels": LABELS}), cross_entropy(LOGITS, LABELS))
    torch.testing.assert_close(
        loss(make(LOGITS), {"labels": LABELS[:, 1:]}), cross_entropy(LOGITS[:, :-1], LABELS[:, 1:])
    )


def test_cross_entropy_takes_classes_in_the_second_dimension_and_leaves_out_minus_100() -> None:
    scores, labels = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    labels[0, 0] = -100
    loss = named("cross_entropy")
    torch.testing.assert_close(loss(scores, (None, labels)), F.cross_entropy(scores, labels))
    ignored = torch.full_like(labels, -100)
    assert loss(scores.requires_grad_(), (None, ignored)).item() == 0.0


def test_cross_entropy_takes_probabilities_of_the_classes() -> None:
    scores, probabilities = LOGITS[:, 0], LOGITS[:, 1].softmax(-1).double()
    right = -(probabilities * scores.log_softmax(-1)).sum(-1).mean().float()
    torch.testing.assert_close(named("cross_entropy")(scores, (None, probabilities)), right)


def test_mse_compares_element_by_element_and_never_each_with_each() -> None:
    prediction, labels = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.0, 0.0, -100.0], dtype=torch.float64)
    right = (0 + 4 + 104**2) / 3
    for targets in (labels, labels[:, None]):
        assert named("mse")(prediction, (None, targets)).item() == pytest.approx(right)
        assert named("mse")(prediction[:, 0], {"labels": targets}).item() == pytest.approx(right)


SQUARE_LOGITS = torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(2))
ONE_MORE = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(2))
SIX = torch.randint(0, 6, (4, 6), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("logits", [SQUARE_LOGITS, ONE_MORE])
def test_cross_entropy_does_not_guess_which_dimension_has_the_classes(logits: Tensor) -> None:
    """(4, 6, 6) and (4, 7, 6) are (B, T, classes) as well as (B, classes, T), for labels (4, 6)."""
    with pytest.raises(DataError, match=r"which dimension has the classes.*package.module:function"):
        named("cross_entropy")(logits, (torch.zeros(4, 6), SIX))


@pytest.mark.parametrize("name", ["input_ids", "inputs", None])
def test_cross_entropy_takes_the_last_dimension_for_the_classes_of_ids_of_tokens(name: str | None) -> None:
    batch: Any = (SIX, SIX) if name is None else {name: SIX, "labels": SIX}
    right = F.cross_entropy(SQUARE_LOGITS.transpose(1, 2), SIX)
    torch.testing.assert_close(named("cross_entropy")(SQUARE_LOGITS, batch), right)


def test_cross_entropy_takes_the_classes_where_they_were_in_the_batch_before() -> None:
    """Batches that are padded to their own length have the same sizes by chance."""
    loss = named("cross_entropy")
    loss(torch.zeros(4, 6, 9), (torch.zeros(4, 9), torch.zeros(4, 9, dtype=torch.long)))
    torch.testing.assert_close(loss(SQUARE_LOGITS, (torch.zeros(4, 6), SIX)), F.cross_entropy(SQUARE_LOGITS, SIX))
    loss(torch.zeros(4, 9, 6), (torch.zeros(4, 9), torch.zeros(4, 9, dtype=torch.long)))
    right = F.cross_entropy(SQUARE_LOGITS.transpose(1, 2), SIX)
    torch.testing.assert_close(loss(SQUARE_LOGITS, (torch.zeros(4, 6), SIX)), right)


@pytest.mark.parametrize("labels", [torch.zeros(3, dtype=torch.long), torch.ones(3, 1)])
def test_cross_entropy_of_one_class_is_refused(labels: Tensor) -> None:
    with pytest.raises(ModelError, match=r"one class is always 0.*binary_cross_entropy_with_logits"):
        named("cross_entropy")(torch.zeros(3, 1), (None, labels))


@pytest.mark.parametrize("wrong", [7, -1])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 3)])
def test_a_label_that_is_no_class_is_an_error_that_names_it(shape: tuple[int, ...], wrong: int) -> None:
    labels = torch.zeros(shape, dtype=torch.long)
    labels[2] = -100
    labels[(1, *[0] * (len(shape) - 1))] = wrong
    logits = torch.zeros(4, 5, *shape[1:])
    with pytest.raises(DataError, match=rf"label {wrong} at \(1,.* is none of the 5 classes .* 0 to 4 \(1 such"):
        named("cross_entropy")(logits, (None, labels))
    if len(shape) == 2:
        with pytest.raises(DataError, match=rf"label {wrong} at \(1, 0\)"):
            resolve_loss({"logits": torch.zeros(4, 3, 5)}, {"labels": labels})


def test_labels_are_found_under_any_of_their_names() -> None:
    for name in ("labels", "label", "targets", "target"):
        batch = {"x": LOGITS, name: torch.tensor([3, -100])}
        assert count_labels(batch) == 1
        assert align_labels({"input_ids": LABELS, name: LABELS}).keys() == {"input_ids", name}
        torch.testing.assert_close(
            named("cross_entropy")(LOGITS[:, 0], batch), F.cross_entropy(LOGITS[:1, 0], CLASSES[:1])
        )
    assert count_labels({"labels": CLASSES, "target": LABELS}) == 2


@pytest.mark.parametrize(
    ("name", "output", "batch", "said"),
    [
        ("mse", torch.zeros(3, 2), (None, torch.zeros(3)), r"\(3, 2\).*\(3,\)"),
        ("mse", torch.zeros(3), (None, torch.zeros(3, dtype=torch.long)), "floating"),
        ("mse", torch.zeros(3), {"x": 1, "y": torch.zeros(3)}, "has x, y: name the column of the targets 'labels'"),
        ("cross_entropy", torch.zeros(3), (None, CLASSES), "classes"),
        ("cross_entropy", torch.zeros(3, 4), (None, CLASSES), "classes"),
        ("cross_entropy", torch.zeros(2, 4), (None, torch.zeros(2)), "probabilities"),
        ("cross_entropy", {"hidden": LOGITS}, (None, CLASSES), "hidden"),
        ("cross_entropy", LOGITS[:, 0], [LOGITS], "no pair"),
    ],
)
def test_what_a_named_loss_cannot_compare_is_refused(name: str, output: Any, batch: Any, said: str) -> None:
    with pytest.raises((DataError, ModelError), match=said):
        named(name)(output, batch)


@pytest.mark.parametrize("batch", [{"x": 0, "labels": LABELS}, [0, LABELS]])
def test_labels_that_a_loss_function_takes_out_of_the_batch_still_say_what_counts(batch: Any) -> None:
    labels = LABELS.clone()
    labels[0, :3] = -100
    batch = {**batch, "labels": labels} if isinstance(batch, dict) else [0, labels]

    def loss_fn(output: Any, batch: Any) -> Tensor:
        taken = batch.pop("labels" if isinstance(batch, dict) else 1)
        return F.cross_entropy(LOGITS.transpose(1, 2), taken, reduction="none")

    assert resolve_loss(None, batch, loss_fn).value.item() == pytest.approx(cross_entropy(LOGITS, labels).item())
    assert len(batch) == 2


@pytest.mark.parametrize("criterion", [F.cross_entropy, nn.CrossEntropyLoss(), nn.MSELoss()])
def test_a_loss_function_that_takes_the_targets_alone_is_told_what_it_is_called_with(criterion: Any) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        resolve_loss(LOGITS[:, 0], (LOGITS, CLASSES), criterion)
    assert "called with the model's output and the whole batch" in caught.value.__notes__[0]


def test_a_loss_may_be_a_function_of_ones_own() -> None:
    assert loss_by_name("torch.nn.functional:mse_loss") is F.mse_loss
    for name in ("no_such_module:f", "torch:no_such_name", "torch:float32"):
        with pytest.raises(ConfigError, match="^loss: "):
            loss_by_name(name)


# ---------------------------------------------------------------- labels


def test_labels_are_counted_without_the_ignored_ones() -> None:
    labels = LABELS.clone()
    labels[0, :3] = -100
    assert count_labels({"labels": labels}).item() == 5
    assert count_labels((LABELS, labels)).item() == 5


def test_a_batch_without_a_target_is_known_by_its_labels() -> None:
    for labels, none in ((LABELS, False), (torch.full_like(LABELS, -100), True), (torch.tensor([-100, 0]), False)):
        assert has_no_target({"labels": labels}) == torch.tensor(none)
    for labels in (torch.full((2,), -100.0), torch.full((2,), 156, dtype=torch.uint8), LABELS[:0]):
        assert has_no_target((None, labels)) is None


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_aligned_labels_can_hold_minus_100(dtype: torch.dtype) -> None:
    assert align_labels({"labels": torch.tensor([[1, 2]], dtype=dtype)})["labels"].tolist() == [[2, -100]]


def test_labels_that_are_no_ids_of_tokens_are_refused() -> None:
    with pytest.raises(DataError, match="unshifted"):
        align_labels({"labels": torch.zeros(2, 3)})
    for batch in (
        {"input_ids": LABELS, "labels": CLASSES},
        {"image": LOGITS, "label": CLASSES},
        (LABELS, CLASSES),
        (LOGITS, CLASSES),
    ):
        with pytest.raises(DataError, match=r"repeat rows of ids.* shape \(2,\), as one class for each sample has"):
            align_labels(batch)
    with pytest.raises(DataError, match="integers"):
        resolve_loss({"logits": LOGITS}, {"labels": LABELS.float()})


def test_values_of_tokens_that_are_not_those_of_the_labels_are_averaged_with_a_warning() -> None:
    labels = torch.tensor([[1, 2, -100], [2, -100, -100]])
    said: list[str] = []

    def resolve(loss: Tensor) -> Tensor:
        def warn(kind: str, message: str, when: Tensor | None = None) -> None:
            if when is None or when.item():
                said.append(message)

        return resolve_loss(None, {"labels": labels}, lambda output, batch: loss, warn=warn).value

    # Shifted inside the loss function: one value less for each row than there are labels.
    assert resolve(torch.tensor([[1.0, 0.0], [0.0, 0.0]])).item() == 0.25
    assert len(said) == 1
    assert "(2, 2)" in said[0]
    assert "(2, 3)" in said[0]
    # One value for each sample, or for each label, says what it means.
    resolve(torch.ones(2))
    resolve(torch.ones(2, 3))
    assert len(said) == 1
