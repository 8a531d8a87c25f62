"""The forward pass: a batch moves to the device, is counted, and a model turns it into a loss.

Nothing here reads a number from the device: losses and counts stay tensors until the trainer logs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.precision import PrecisionPlan, autocast_context
from speedtronic.trainer.loss import LossFunction, looks_like_logits, resolve_loss


def move_batch(batch: Any, device: torch.device) -> Any:
    """Copy the tensors in `batch` (nested dicts, tuples and lists) to `device`, without waiting for the copy."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move_batch(value, device) for value in batch)
    return batch


def batch_size_and_tokens(batch: Any) -> tuple[int, int | Tensor]:
    """Number of samples and of tokens in a batch.

    Counted on a mapping's `input_ids`, else its `inputs`, or on the first field of a tuple or list. Where the mapping
    also has an `attention_mask`, and what is counted has more than one dimension, the number of tokens is the sum of
    the mask: a 0-dim tensor, so that counting does not wait for the device. A batch that cannot be counted is one
    sample of one token.
    """
    counted: Any = None
    mask: Any = None
    if isinstance(batch, Mapping):
        counted = batch.get("inputs") if batch.get("input_ids") is None else batch["input_ids"]
        mask = batch.get("attention_mask")
    elif isinstance(batch, (tuple, list)) and batch:
        counted = batch[0]
    if not isinstance(counted, Tensor) or counted.ndim == 0:
        return 1, 1
    if counted.ndim > 1 and isinstance(mask, Tensor):
        return counted.shape[0], mask.sum(dtype=torch.int64)
    return counted.shape[0], counted.numel()


class Forward:
    """Calls a model on a batch, and turns what it returns into a scalar loss under the precision plan.

    A mapping calls `model(**batch)`, a tuple or list of at least two calls `model(batch[0], batch[1])`. With a
    `loss_fn`, the model gets only the keys and fields that its `forward` asks for, since the targets may be for
    `loss_fn` alone. A model whose `forward` takes `shift_labels`, as Hugging Face's causal models do, also gets the
    aligned labels under that name, so that it does not shift them a second time.

    Args:
        model: the module that is not compiled; the signature of its `forward` decides what it gets.
        loss_fn: `loss_fn(output, batch)`, or None for the rules of `resolve_loss`.
        warn: called once when a bare output tensor has the shape of logits.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PrecisionPlan,
        *,
        loss_fn: LossFunction | None = None,
        warn: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._loss_fn = loss_fn
        self._warn: Callable[[str], None] | None = warn
        parameters = _parameters_of(model)
        self._names = {p.name for p in parameters}
        self._takes_any_key = any(p.kind is p.VAR_KEYWORD for p in parameters)
        # Hugging Face models pass further keywords to their `loss_function`, which takes shift_labels.
        self._takes_shift_labels = "shift_labels" in self._names or (
            self._takes_any_key and hasattr(model, "loss_function")
        )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in parameters if p.kind in positional and p.default is p.empty]
        self._takes_second = loss_fn is None or len(required) >= 2

    def __call__(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return the scalar mean loss of `batch`, attached to the graph.

        Raises:
            TypeError: the batch is neither a mapping nor a tuple or list of at least two, or no loss is found.
        """
        with autocast_context(self._plan):
            output = self._call(model, batch)
            if self._warn and self._loss_fn is None and looks_like_logits(output, batch):
                self._warn(
                    f"the model returned a bare tensor of shape {tuple(output.shape)}, which is averaged as the loss; "
                    "if it holds logits, return {'logits': ...} or pass loss_fn to the Trainer"
                )
                self._warn = None
            return resolve_loss(output, batch, self._loss_fn)

    def _call(self, model: Callable[..., Any], batch: Any) -> Any:
        if isinstance(batch, Mapping):
            if self._takes_shift_labels and "labels" in batch and "shift_labels" not in batch:
                batch = {**batch, "shift_labels": batch["labels"].contiguous()}
            if self._loss_fn is not None and not self._takes_any_key:
                batch = {key: value for key, value in batch.items() if key in self._names}
            return model(**batch)
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            return model(batch[0], batch[1]) if self._takes_second else model(batch[0])
        raise TypeError(
            f"a batch must be a mapping of forward's arguments or a tuple or list of at least two, not "
            f"{type(batch).__name__}: check the collate function of the data loader"
        )


def _parameters_of(model: nn.Module) -> Collection[inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters.values()
    except ValueError:
        # A scripted module has no Python signature. It gets every key of the batch.
        return [inspect.Parameter("batch", inspect.Parameter.VAR_KEYWORD)]
