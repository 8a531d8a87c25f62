"""What a metric is given of a batch, and what it may compute."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.config.sections import EvalMetric
from speedtronic.errors import ConfigError, DataError, ModelError
from speedtronic.evaluation import HeldOutLoss, build_metrics, predictions_and_targets
from speedtronic.precision import resolve_precision
from speedtronic.trainer.loss import loss_by_name

CPU = torch.device("cpu")


class Accuracy:
    """The share of predictions whose class of the highest score is the target."""

    def __init__(self, threshold: float | None = None) -> None:
        self.threshold = threshold
        self.reset()

    def update(self, preds: Tensor, target: Tensor) -> None:
        found = preds.argmax(-1) if self.threshold is None else preds > self.threshold
        self.right += (found == target).sum()
        self.count += target.numel()
        random.random()

    def compute(self) -> Tensor:
        random.random()
        return self.right / self.count

    def reset(self) -> None:
        self.right, self.count = torch.tensor(0), 0


class Both(Accuracy):
    def compute(self) -> Any:
        return {"right": self.right, "share": self.right / self.count}


class PerClass(Accuracy):
    def compute(self) -> Tensor:
        return torch.ones(3)


class Classifier(nn.Module):
    """Scores of three classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores


def classes() -> list[dict[str, Tensor]]:
    """23 samples in batches of 5, every sixth without a label."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(23, 4, generator=generator)
    labels = torch.randint(3, (23,), generator=generator)
    labels[::6] = -100
    return [{"x": a, "labels": b} for a, b in zip(x.split(5), labels.split(5), strict=True)]


def measure(batches: list[Any], **options: Any) -> HeldOutLoss:
    options.setdefault("loss_fn", loss_by_name("cross_entropy"))
    return HeldOutLoss(lambda: batches, device=CPU, precision=resolve_precision("fp32", CPU), **options)


def right(model: Classifier, batches: list[dict[str, Tensor]]) -> tuple[int, int]:
    """Counted sample by sample: how many are right, of how many with a label."""
    pairs = [
        (int(model(batch["x"])[row].argmax()), int(label))
        for batch in batches
        for row, label in enumerate(batch["labels"])
        if label != -100
    ]
    return sum(found == label for found, label in pairs), len(pairs)


def test_the_accuracy_of_a_classifier_is_that_by_hand_on_unequal_batches() -> None:
    model, batches = Classifier(), classes()
    hits, count = right(model, batches)
    assert count == 19
    evaluate = measure(batches, metrics={"accuracy": Accuracy(), "again": Both()})
    for _ in range(2):  # what it gathered is forgotten
        numbers = evaluate(model)
        assert numbers is not None
        assert numbers["accuracy"] == pytest.approx(hits / count, abs=1e-6)
        assert (numbers["again.right"], numbers["again.share"]) == (hits, pytest.approx(hits / count))
        assert numbers["targets"] == count
        scores = torch.cat([model(batch["x"]) for batch in batches]).double()
        labels = torch.cat([batch["labels"] for batch in batches])
        by_hand = -scores.log_softmax(-1)[labels >= 0].gather(1, labels[labels >= 0, None]).mean()
        assert numbers["loss"] == pytest.approx(by_hand.item(), abs=1e-6)


@pytest.mark.slow
def test_torchmetrics_accuracy_is_that_by_hand() -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed; it is in speedtronic[dev]")
    model, batches = Classifier(), classes()
    hits, count = right(model, batches)
    args = {"num_classes": 3, "average": "micro"}
    section = EvalMetric(name="accuracy", factory="torchmetrics.classification:MulticlassAccuracy", args=args)
    evaluate = measure(batches, metrics=build_metrics([section], CPU))
    for _ in range(2):
        numbers = evaluate(model)
        assert numbers is not None
        assert numbers["accuracy"] == pytest.approx(hits / count, abs=1e-6)


def test_a_pass_that_is_given_up_leaves_nothing_in_a_metric() -> None:
    metric, model = Accuracy(), Classifier()
    answers = iter([False, False, True, True])
    assert measure(classes(), metrics={"accuracy": metric})(model, lambda: next(answers)) is None
    assert metric.count == 0


def test_metrics_leave_the_random_numbers_alone() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    measure(classes(), metrics={"accuracy": Accuracy()})(Classifier())
    assert random.random() == expected


def both(output: Any, labels: Tensor, *, ids: Tensor | None = None, output_is_loss: bool = False) -> Any:
    batch = {"labels": labels} if ids is None else {"input_ids": ids, "labels": labels}
    return predictions_and_targets(output, batch, batch, output_is_loss=output_is_loss)


def test_a_language_model_gives_rows_of_scores_and_ids_without_those_of_minus_100() -> None:
    logits = torch.arange(24.0).reshape(2, 3, 4)
    labels = torch.tensor([[1, -100, 2], [-100, 3, 0]])
    for output in ({"logits": logits, "loss": None}, (torch.tensor(1.0), logits), [torch.ones(2), logits]):
        preds, target = both(output, labels, ids=labels, output_is_loss=True)
        assert torch.equal(preds, logits.reshape(6, 4)[[0, 2, 4, 5]])
        assert target.tolist() == [1, 2, 3, 0]
    # One label fewer than positions: the last position has none.
    preds, target = both({"logits": logits}, labels[:, :2])
    assert torch.equal(preds, logits[:, :2].reshape(4, 4)[[0, 3]])
    assert target.tolist() == [1, 3]
    # As many positions as classes are no riddle where there are ids of tokens.
    square, some = torch.randn(2, 3, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])
    assert torch.equal(both(square, some, ids=some)[0], square.reshape(6, 3))
    with pytest.raises(DataError, match="do not tell which dimension has the classes"):
        both(square, some)


def test_classes_in_the_second_dimension_are_moved_to_the_last() -> None:
    scores, labels = torch.randn(2, 3, 4, 5), torch.randint(3, (2, 4, 5))
    labels[0, 0] = -100
    preds, target = both(scores, labels)
    kept = labels != -100
    assert torch.equal(preds, scores.permute(0, 2, 3, 1)[kept])
    assert torch.equal(target, labels[kept])


def test_other_shapes_stay_as_they_are_but_for_what_is_no_target() -> None:
    numbers, floats = torch.randn(4, 2), torch.tensor([[1.0, -100.0]] * 4)
    preds, target = both(numbers, floats)
    assert preds is numbers
    assert target is floats
    ids, labels = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, -100], [3, 0]])
    assert both(ids, ids)[0] is ids
    preds, target = both({"predictions": ids, "logits": numbers}, labels)
    assert (preds.tolist(), target.tolist()) == ([1, 3, 4], [1, 3, 0])
    with pytest.raises(DataError, match="do not tell which predictions to leave out"):
        both(torch.randn(7), labels)
    assert both(torch.randn(2, dtype=torch.bfloat16), torch.ones(2))[0].dtype is torch.float32


def test_what_has_no_predictions_or_no_labels_is_refused_with_the_remedy() -> None:
    labels = torch.tensor([0, 1])
    for output in (torch.tensor(1.0), torch.ones(2), (torch.tensor(1.0),), {"loss": torch.tensor(1.0)}):
        with pytest.raises(ModelError, match=r"returns its loss and no predictions.*'predictions'"):
            both(output, labels, output_is_loss=True)
    with pytest.raises(DataError, match="this batch has none"):
        predictions_and_targets(torch.ones(2), {"x": labels}, {"x": labels}, output_is_loss=False)


def test_a_metric_must_compute_numbers() -> None:
    with pytest.raises(ConfigError, match=r"accuracy computed a Tensor of shape \(3,\).*choose an average"):
        measure(classes(), metrics={"accuracy": PerClass()})(Classifier())


def test_factories_that_make_no_metric_are_refused() -> None:
    def built(factory: str, **args: Any) -> Any:
        return build_metrics([EvalMetric(name="one", factory=factory, args=args)], CPU)

    assert built("tests.evaluation.test_metrics:Accuracy", threshold=0.5)["one"].threshold == 0.5
    for factory, args, said in (
        ("nowhere_at_all:Accuracy", {}, "cannot import"),
        ("tests.evaluation.test_metrics:Accuracy", {"shape": 2}, "does not take args"),
        ("collections:Counter", {}, "no compute, reset"),
    ):
        with pytest.raises(ConfigError, match=rf"eval\.metrics: .*{said}"):
            built(factory, **args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
@pytest.mark.parametrize(("predicted", "labelled"), [((5, 1), (5,)), ((5,), (5, 1)), ((5, 1, 2), (5, 2))])
def test_predictions_and_labels_that_differ_by_dimensions_of_1_are_never_compared_each_with_each(
    dtype: torch.dtype, predicted: tuple[int, ...], labelled: tuple[int, ...]
) -> None:
    labels = torch.arange(torch.Size(labelled).numel()).reshape(labelled).to(dtype)
    output = labels.float().reshape(predicted)
    predictions, targets = both(output, labels)
    assert predictions.shape == targets.shape == labelled
    assert torch.equal(predictions, targets.float())


def test_ignored_labels_leave_out_their_one_score() -> None:
    predictions, targets = both(torch.tensor([[0.5], [1.5], [2.5]]), torch.tensor([1, -100, 0]))
    assert predictions.tolist() == [0.5, 2.5]
    assert targets.tolist() == [1, 0]


def test_a_named_tuple_says_which_field_holds_the_predictions() -> None:
    output = namedtuple("Output", "hidden logits")(torch.zeros(2, 5), torch.ones(2, 3))
    predictions, _ = both(output, torch.tensor([0, 1]))
    assert predictions.tolist() == [[1.0] * 3] * 2
