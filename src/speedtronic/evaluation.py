"""Measures the loss of a model on held-out data, and leaves the model as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.errors import DataError
from speedtronic.model import evaluation_mode
from speedtronic.precision import PrecisionPlan
from speedtronic.trainer.forward import Forward, Once, batch_size_and_tokens, move_batch
from speedtronic.trainer.loss import LossFunction, align_labels, batch_labels, count_labels


class HeldOutLoss:
    """An evaluator for `Trainer`: the mean loss over held-out batches, in which every target counts alike.

    The weight of a batch is its number of labels that are targets, or of its samples where it has no labels. A batch
    without a target has no weight, whatever its loss is.

    Args:
        passes: called for each evaluation; returns the batches of one pass, from the first one on.
        device: where the model is.
        precision: the plan under which the forward runs.
        batches: at most this many batches; None for all.
        loss_fn: as for `Trainer`, which gives its own to an evaluator without one.
        labels: "aligned" or "unshifted", as in `data.labels`.
        warn: called once with what looks wrong with the model's output, and with the batches.

    Attributes:
        loss_fn: the argument; may be set until the first evaluation.
    """

    def __init__(
        self,
        passes: Callable[[], Iterable[Any]],
        *,
        device: torch.device,
        precision: PrecisionPlan,
        batches: int | None = None,
        loss_fn: LossFunction | None = None,
        labels: str = "aligned",
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.loss_fn = loss_fn
        self._passes = passes
        self._device = device
        self._precision = precision
        self._limit = batches
        self._labels = labels
        self._once = Once(warn)

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Return `loss` (nats per target), `targets`, `batches` and `duration_s` of one pass.

        `should_stop` is called between two batches; when it returns true, the pass ends early and returns None.

        Raises:
            DataError: the pass has no batch, or no target.
        """
        started = time.perf_counter()
        forward = Forward(
            model, self._precision, loss_fn=self.loss_fn, warn=lambda message: self._once(message, message)
        )
        # Summed losses and weights stay on the device until the end, so that no batch waits for the one before it.
        losses: list[Tensor] = []
        weights: list[Tensor] = []
        with evaluation_mode(model), _keep_random_state(), torch.no_grad():
            for batch in takewhile(lambda _: not should_stop(), islice(self._passes(), self._limit)):
                aligned = align_labels(batch) if self._labels == "unshifted" else batch
                labelled = batch_labels(aligned) is not None
                if labelled:
                    targets = count_labels(aligned)
                else:
                    targets = torch.tensor(batch_size_and_tokens(aligned, self._once)[0])
                weight = targets.to(self._device)
                loss = forward(model, move_batch(aligned, self._device)).float()
                # The mean over no target is NaN, and 0 · NaN would be too.
                losses.append(torch.where(weight > 0, loss * weight, 0.0))
                weights.append(weight)
        forward.settle()
        if should_stop():
            return None
        total = int(torch.stack(weights).sum()) if weights else 0
        if total == 0:
            raise DataError(f"the held-out data has no target to evaluate on ({len(weights)} batches)")
        return {
            "loss": float(torch.stack(losses).sum()) / total,
            "targets": total,
            "batches": len(weights),
            "duration_s": time.perf_counter() - started,
        }


@contextmanager
def _keep_random_state() -> Iterator[None]:
    rng = capture_rng_state()
    try:
        yield
    finally:
        restore_rng_state(rng)
