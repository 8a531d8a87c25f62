"""Metrics of a user's own: the protocol, and which predictions and targets they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speedtronic.config.sections import EvalMetric
from speedtronic.errors import ConfigError, DataError, ModelError
from speedtronic.model import IGNORE_INDEX
from speedtronic.registry import import_factory
from speedtronic.trainer.loss import LABELS, batch_labels, by_name, has_ids, sizes_but_ones


class Metric(Protocol):
    """Gathers what it needs of each batch, and computes a number at the end, as the classes of torchmetrics do."""

    def update(self, preds: Tensor, target: Tensor) -> object:
        """Take in one batch: what `predictions_and_targets` returns."""

    def compute(self) -> Any:
        """A number, or a mapping of numbers by name, over the batches since the last `reset`."""

    def reset(self) -> object:
        """Forget all batches."""


def build_metrics(sections: Sequence[EvalMetric], device: torch.device) -> dict[str, Metric]:
    """Call the factories of `eval.metrics`. A metric that is a module is moved to the device.

    Raises:
        ConfigError: there is no such factory, it does not take the arguments, or what it returns is no metric.
    """
    built: dict[str, Metric] = {}
    for section in sections:
        factory = import_factory(section.factory, key="eval.metrics")
        try:
            metric = factory(**section.args)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"eval.metrics: {section.factory} does not take args {section.args}: {error}") from error
        if lacks := [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]:
            raise ConfigError(
                f"eval.metrics: {section.factory} returned {type(metric).__name__}, which has no {', '.join(lacks)}; "
                "a metric has update(preds, target), compute() and reset()"
            )
        if isinstance(metric, nn.Module):
            metric.to(device)
        built[section.name] = metric
    return built


def predictions_and_targets(output: Any, batch: Any, on_host: Any, *, output_is_loss: bool) -> tuple[Tensor, Tensor]:
    """What a metric is given of one batch: predictions, floating ones in float32 at least, and their targets.

    The targets are the labels of the batch: a mapping's first tensor under `labels`, `label`, `targets` or `target`,
    or the second field of a tuple or list. The predictions are `"predictions"` of a mapping, or else its `"logits"`;
    the model's output itself, where that is a tensor and no loss; or of a tuple or list the first field that is a
    tensor and no loss.

    Integer labels (…) with scores of classes (…, C), or (B, C, …) as torch has them, become targets (N,) with
    predictions (N, C), where N counts the labels that are not -100. So a language model's (B, T, V) and (B, T) become
    (N, V) and (N,). A score of one class, as of yes or no, is one number for each label. Predictions that differ from
    the labels by dimensions of 1 alone take their shape: (B, 1) and (B,) would else be compared each with each. All
    other shapes stay as they are; but where some integer labels are -100, and the predictions have their shape,
    both are the rest in one row. Labels of floating point are all targets.

    Args:
        output: what the model returned.
        batch: on the model's device.
        on_host: the same batch as the loader gave it: which labels are targets is read there, without waiting for the
            device.
        output_is_loss: whether a tensor that the model returns alone, or first and with less than two dimensions, is
            its loss, as it is without a loss function.

    Raises:
        DataError: the batch has no labels, or some are -100 and the shapes do not tell which predictions are theirs.
        ModelError: the model returns no predictions.
    """
    predictions, labels, seen = _predictions(output, output_is_loss), batch_labels(batch), batch_labels(on_host)
    if labels is None or seen is None:
        raise DataError(
            f"eval.metrics: a metric compares predictions with the labels of a batch, which are its "
            f"{', '.join(LABELS)} or its second field, and this batch has none"
        )
    labels = labels.to(predictions.device)  # those of an array are still on the host
    if predictions.is_floating_point():
        predictions = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    if predictions.shape != labels.shape and sizes_but_ones(predictions) == sizes_but_ones(labels):
        predictions = predictions.reshape(labels.shape)
    if labels.is_floating_point() or labels.dtype in (torch.bool, torch.uint8):
        return predictions, labels

    last = predictions.shape[:-1] == labels.shape
    if predictions.ndim == 3 and labels.shape == (predictions.shape[0], predictions.shape[1] - 1):
        # The last position of a language model has no label.
        predictions, last = predictions[:, :-1], True
    second = predictions.ndim > 2 and labels.shape == (predictions.shape[0], *predictions.shape[2:])
    if last and second and not has_ids(batch, predictions):
        raise DataError(
            f"eval.metrics: predictions of shape {tuple(predictions.shape)} with labels of shape "
            f"{tuple(labels.shape)} do not tell which dimension has the classes; let the model return predictions with "
            "the classes in the last one, and one position more or fewer than classes"
        )
    ignored = seen == IGNORE_INDEX
    if last or second:
        rows = predictions if last else predictions.movedim(1, -1)
        predictions, labels = rows.reshape(-1, rows.shape[-1]), labels.reshape(-1)
    elif not ignored.any():
        return predictions, labels
    elif predictions.shape == labels.shape:
        predictions, labels = predictions.reshape(-1), labels.reshape(-1)
    else:
        raise DataError(
            f"eval.metrics: some labels are {IGNORE_INDEX}, and predictions of shape {tuple(predictions.shape)} with "
            f"labels of shape {tuple(labels.shape)} do not tell which predictions to leave out"
        )
    if ignored.any():
        # Their places in order, without a look at the device, since their number is known.
        places = torch.argsort((labels == IGNORE_INDEX).byte(), stable=True)
        kept = places[: int((~ignored).sum())]
        predictions, labels = predictions.index_select(0, kept), labels.index_select(0, kept)
    return predictions, labels


def _predictions(output: Any, output_is_loss: bool) -> Tensor:
    output = by_name(output)
    fields: list[Any] = [None if output_is_loss else output]
    if isinstance(output, Mapping):
        fields = [output.get("predictions"), output.get("logits")]
    elif isinstance(output, tuple | list):
        fields = list(output)
        if output_is_loss and isinstance(output[0], Tensor) and output[0].ndim < 2:
            fields = fields[1:]
    for field in fields:
        if isinstance(field, Tensor) and field.ndim:
            return field
    raise ModelError(
        "eval.metrics: the model returns its loss and no predictions, which metrics need; return a mapping with 'loss' "
        "and 'predictions' (or 'logits'), or name the loss in the configuration (loss: cross_entropy) and return the "
        "predictions alone"
    )


def computed(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """The numbers of a metric, by name: its own, or `NAME.key` for each key of a mapping.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from computed(f"{name}.{key}", item)
        return
    try:
        if isinstance(value, str | bytes):
            raise ValueError
        yield name, float(value)
    except (TypeError, ValueError, RuntimeError):  # the last from tensors of several elements
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ConfigError(
            f"eval.metrics: {name} computed a {type(value).__name__}{shape}, and a record needs a number, or a mapping "
            "of numbers; for a class of torchmetrics, choose an average"
        ) from None
