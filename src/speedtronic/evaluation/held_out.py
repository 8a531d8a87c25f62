"""Measures a model on held-out data, and leaves it as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.errors import ConfigError, DataError, ModelError
from speedtronic.evaluation.metrics import Metric, computed, predictions_and_targets
from speedtronic.evaluation.tokens import TokenMeasures
from speedtronic.model import evaluation_mode
from speedtronic.precision import PrecisionPlan
from speedtronic.ranks import Group, SingleProcess
from speedtronic.trainer.forward import Forward, Once, batch_size_and_tokens, move_batch
from speedtronic.trainer.loss import LossFunction, MeanLoss, align_labels, batch_labels, count_labels
from speedtronic.trainer.nonfinite import running_statistics


class HeldOutLoss:
    """An evaluator for `Trainer` on one set of batches: the mean loss, in which every target counts alike, and metrics.

    The weight of a batch is its number of labels that are targets, or of its samples where it has no labels; or of the
    values of its loss, where `resolve_loss` says so, as in training. A batch without a target has no weight, whatever
    its loss is. A scalar is taken for a mean over the targets. Where it is a sum, a mean with weights of classes, or
    one that ignores another label than -100, return one value for each sample or label instead.

    Args:
        passes: called for each evaluation; returns the batches of one pass, from the first one on.
        device: where the model is.
        precision: the plan under which the forward runs.
        batches: at most this many batches; None for all.
        loss_fn: as for `Trainer`, which gives its own to an evaluator without one.
        labels: "aligned" or "unshifted", as in `data.labels`.
        metrics: by name; each is given what `predictions_and_targets` returns, and is reset after a pass.
        tokens: what the loss says of text; None where it is not the mean cross-entropy of tokens.
        group: the ranks that measure together. Each has a part of the batches; but with metrics, which need all of them
            in one process, each has all.
        warn: called once with what looks wrong with the model's output, and with the batches.

    Raises:
        ConfigError: `passes` cannot be called.

    Attributes:
        loss_fn: the argument; may be set until the first evaluation.
    """

    def __init__(
        self,
        passes: Callable[[], Iterable[Any]],
        *,
        device: str | torch.device,
        precision: PrecisionPlan,
        batches: int | None = None,
        loss_fn: LossFunction | None = None,
        labels: str = "aligned",
        metrics: Mapping[str, Metric] | None = None,
        tokens: TokenMeasures | None = None,
        group: Group | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        if not callable(passes):
            raise ConfigError(
                f"passes: must be a function that returns the batches of one pass, such as lambda: batches, not a "
                f"{type(passes).__name__}"
            )
        self.loss_fn = loss_fn
        self._passes = passes
        self._device = torch.device(device)
        self._precision = precision
        self._group = group or SingleProcess()
        self._divided = self._group.size > 1 and not metrics
        self._limit = batches
        if batches is not None and self._divided:
            # Batch n is that of rank n modulo the number of ranks.
            self._limit = max(0, -((self._group.rank - batches) // self._group.size))
        self._labels = labels
        self._metrics = dict(metrics or {})
        for metric in self._metrics.values():
            # Those of torchmetrics would add up what every rank has seen, and each has seen everything.
            if hasattr(metric, "sync_on_compute"):
                metric.sync_on_compute = False
        self._tokens = tokens
        self._once = Once(warn)

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Return `loss` (nats per target), `targets`, `batches` and `duration_s` of one pass, and each metric.

        A language model has `perplexity`, and `bits_per_byte` where the tokenizer tells the bytes of a token.

        `should_stop` is called between two batches; when it returns true, the pass ends early and returns None.

        Raises:
            DataError: the pass has no batch, or no target; or a metric has no labels.
            ConfigError: a metric computes no number.
            ModelError: the model needs gradients of its own, or returns no predictions for a metric.
        """
        try:
            return self._pass(model, should_stop)
        finally:
            for metric in self._metrics.values():
                metric.reset()

    def _pass(self, model: nn.Module, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        started = time.perf_counter()
        forward = Forward(
            model, self._precision, loss_fn=self.loss_fn, warn=lambda message: self._once(message, message)
        )
        # Losses stay on the device until the end, and weights where they were counted, which is mostly the host. So no
        # batch waits for the one before it, as a copy of one number to the device would.
        losses: list[Tensor] = []
        weights: list[int | Tensor] = []
        text_bytes: list[Tensor] = []
        of_tokens = self._tokens is not None
        with evaluation_mode(model), keep_random_state(), torch.no_grad(), _keep_buffers(model, self._once):
            for batch in takewhile(lambda _: not should_stop(), islice(self._passes(), self._limit)):
                if batch is None:
                    continue  # other ranks have the last samples
                aligned = align_labels(batch) if self._labels == "unshifted" else batch
                moved = move_batch(aligned, self._device)
                output, (loss, weight) = _without_gradients(forward, model, moved)
                # A loss with a weight of its own is no mean over tokens.
                of_tokens = of_tokens and weight is None and batch_labels(aligned) is not None
                if weight is None and batch_labels(aligned) is not None:
                    weight = count_labels(aligned)
                elif weight is None:
                    weight = batch_size_and_tokens(aligned, self._once)[0]
                losses.append(loss)
                weights.append(weight)
                if self._tokens is not None and (size := self._tokens.bytes_of(moved)) is not None:
                    text_bytes.append(size)
                self._update_metrics(output, moved, aligned)
                del output
        forward.settle()
        if self._group.reduce(int(should_stop()), "max"):
            return None
        counts = torch.tensor([int(weight) for weight in weights], dtype=torch.float64)
        # The mean over no target is NaN, and 0 · NaN would be too.
        summed = float(torch.where(counts > 0, torch.stack(losses).cpu() * counts, 0.0).sum()) if losses else 0.0
        total, batches = int(counts.sum()), len(weights)
        read = int(torch.stack(text_bytes).sum()) if text_bytes else 0
        if self._divided:
            own = torch.tensor([summed, total, batches, read, not of_tokens], dtype=torch.float64)
            summed, *whole = self._group.reduce(own).tolist()
            total, batches, read, of_tokens = int(whole[0]), int(whole[1]), int(whole[2]), not whole[3]
        if batches == 0:
            raise DataError(
                "the held-out data gave no batch: it is empty, or it is an iterator that an earlier evaluation has read"
            )
        if total == 0:
            raise DataError(f"the held-out data has no target to evaluate on ({batches} batches)")
        numbers = {"loss": summed / total}
        if self._tokens is not None and of_tokens:
            numbers |= self._tokens.measures(summed, total, read or None)
        with keep_random_state():
            for name, metric in self._metrics.items():
                numbers |= computed(name, metric.compute())
        return {
            **numbers,
            "targets": total,
            "batches": batches,
            "duration_s": time.perf_counter() - started,
        }

    def _update_metrics(self, output: Any, batch: Any, on_host: Any) -> None:
        if not self._metrics:
            return
        predictions, targets = predictions_and_targets(output, batch, on_host, output_is_loss=self.loss_fn is None)
        if len(targets):
            for metric in self._metrics.values():
                metric.update(predictions, targets)


def _without_gradients(forward: Forward, model: nn.Module, batch: Any) -> tuple[Any, MeanLoss]:
    try:
        return forward.output_and_loss(model, batch)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise ModelError(
            "the model or its loss computes gradients, as a penalty on gradients does, and an evaluation runs without "
            "them; leave this part out unless torch.is_grad_enabled(), or unless the model is in training mode "
            "(self.training)"
        ) from error


@contextmanager
def keep_random_state() -> Iterator[None]:
    rng = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(rng)


@contextmanager
def _keep_buffers(model: nn.Module, once: Once) -> Iterator[None]:
    """Put back running statistics that were changed although the model is in evaluation mode, and say so."""
    kept = [
        (full_name, owner, name, buffer, buffer.clone())
        for full_name, owner, name in running_statistics(model)
        if (buffer := owner._buffers[name]) is not None
    ]
    try:
        yield
    finally:
        changed = []
        for full_name, owner, name, buffer, copy in kept:
            now = owner._buffers[name]
            if now is None or now.shape != copy.shape or not _equal(now, copy):
                changed.append(full_name)
                # A forward pass may also have put another tensor in its place.
                setattr(owner, name, buffer.copy_(copy))
        if changed:
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            once(
                "buffers",
                f"the evaluation has changed buffers of the model, which are put back: {', '.join(changed[:4])}{more}. "
                "A part of it acts as in training even after eval(), as a module does that torch.jit.trace has seen in "
                "training mode, so the loss is not that of evaluation mode; use the module itself, or torch.jit.script",
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have equal values, where NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
