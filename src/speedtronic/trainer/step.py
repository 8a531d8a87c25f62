"""One global step in parts that can be tested alone: move a batch, forward, accumulate, clip.

Nothing here reads a number from the device. Losses, counts and norms stay tensors until the trainer logs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.precision import PrecisionPlan, autocast_context
from speedtronic.trainer.loss import LossFunction, count_labels, looks_like_logits, resolve_loss


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

    Counted on a mapping's `input_ids`, else its `inputs`, or on the first field of a tuple or list. Where a mapping
    has more than one dimension and an `attention_mask`, its sum is the number of tokens: a 0-dim tensor, so that
    counting does not wait for the device. What cannot be counted is one sample of one token.
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

    A mapping calls `model(**batch)`, a tuple or list of at least two calls `model(batch[0], batch[1])`. Where there
    is a `loss_fn`, targets are its business: a key or a second field that `forward` does not ask for is kept from
    the model. A model whose `forward` takes `shift_labels`, as Hugging Face's causal models do, is given the aligned
    labels under that name too, so that it does not shift them once more.

    Args:
        model: the plain module; its `forward` decides what it is given.
        loss_fn: `loss_fn(output, batch)`, or None for the rules of `resolve_loss`.
        warn: told once when a bare output tensor has the shape of logits.
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
        # Hugging Face models hand further keywords on to their `loss_function`, which knows shift_labels.
        self._takes_shift_labels = "shift_labels" in self._names or (
            self._takes_any_key and hasattr(model, "loss_function")
        )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in parameters if p.kind in positional and p.default is p.empty]
        self._keeps_second = loss_fn is not None and len(required) < 2

    def __call__(self, model: Callable[..., Any], batch: Any) -> Tensor:
        """Return the scalar mean loss of `batch`, attached to the graph.

        Raises:
            TypeError: the batch is neither a mapping nor a tuple or list of at least two, or no loss is found.
        """
        with autocast_context(self._plan):
            output = self._call(model, batch)
            if self._warn and self._loss_fn is None and looks_like_logits(output, batch):
                self._warn_once(tuple(output.shape))
            return resolve_loss(output, batch, self._loss_fn)

    def _call(self, model: Callable[..., Any], batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return model(**self._keywords(batch))
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            return model(batch[0]) if self._keeps_second else model(batch[0], batch[1])
        raise TypeError(
            f"a batch must be a mapping of forward's arguments or a tuple or list of at least two, not "
            f"{type(batch).__name__}: check the collate function of the data loader"
        )

    def _keywords(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._takes_shift_labels and "labels" in batch and "shift_labels" not in batch:
            batch = {**batch, "shift_labels": batch["labels"].contiguous()}
        if self._loss_fn is None or self._takes_any_key:
            return batch
        return {key: value for key, value in batch.items() if key in self._names}

    def _warn_once(self, shape: tuple[int, ...]) -> None:
        assert self._warn is not None
        self._warn(
            f"the model returned a bare tensor of shape {shape}, which is averaged as the loss; if it holds logits, "
            "return {'logits': ...} or pass loss_fn to the Trainer"
        )
        self._warn = None


def _parameters_of(model: nn.Module) -> Collection[inspect.Parameter]:
    try:
        return inspect.signature(model.forward).parameters.values()
    except ValueError:
        # Scripted modules have no Python signature; they are given whatever the batch holds.
        return [inspect.Parameter("batch", inspect.Parameter.VAR_KEYWORD)]


def equal_parts(micro_batches: int) -> list[float | None]:
    """Every micro batch counts alike: the loss of the update is the mean of micro-batch means."""
    return [micro_batches] * micro_batches


def token_parts(batches: Sequence[Any]) -> list[float | None]:
    """Every target counts alike: a micro batch counts by its share of all labels that are not -100.

    The update's gradient is then that of one batch which holds all of them. The labels are counted where the loader
    put them, on the host, so that counting does not wait for the device.
    """
    counts: list[int] = torch.stack([count_labels(batch) for batch in batches]).tolist()
    return [sum(counts) / count if count else None for count in counts]


def accumulate(
    forward: Callable[[Any], Tensor],
    batches: Sequence[Any],
    parts: Sequence[float | None],
    *,
    scaler: torch.amp.GradScaler,
) -> Tensor:
    """Run forward and backward over the micro batches of one update.

    Args:
        forward: from a batch to its scalar mean loss.
        batches: the micro batches.
        parts: what each mean loss is divided by. None takes no part and is not backpropagated: the mean over no
            target may be NaN.
        scaler: scales a loss before its backward pass.

    Returns:
        The loss of the update, the sum of the divided losses: a detached 0-dim tensor on the device. Each is
        backpropagated at once, so that only one micro batch's graph is alive.
    """
    total: Tensor | None = None
    for batch, part in zip(batches, parts, strict=True):
        loss = forward(batch)
        if part is None:
            loss = torch.zeros_like(loss)
        else:
            loss = loss / part
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "an update has at least one micro batch"
    return total


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Return the 2-norm over all gradients, a 0-dim tensor; scale them down to `max_norm` where it is given."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
