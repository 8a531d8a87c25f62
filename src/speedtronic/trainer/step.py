"""One optimizer update: gradients over its micro batches, clipping, and the step unless it must not be applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError, DataError, InputError, ModelError, RankError, ScalerOverflowError
from speedtronic.metrics import MetricLogger
from speedtronic.model.wrappers import unwrapped
from speedtronic.ranks import Group
from speedtronic.scheduling import StageStreamScheduler
from speedtronic.trainer.compile import Compilation
from speedtronic.trainer.forward import Forward, tensors_in
from speedtronic.trainer.gradients import accumulate, clip_gradients
from speedtronic.trainer.loss import MeanLoss, align_labels, count_targets
from speedtronic.trainer.merging import Merged, merge
from speedtronic.trainer.nonfinite import NonFiniteGuard, running_statistics
from speedtronic.trainer.out_of_memory import is_out_of_memory
from speedtronic.trainer.profiling import phase
from speedtronic.trainer.reduction import average_buffers
from speedtronic.trainer.unsupported import needs_closure

# A scaler starts at 2¹⁶ and halves at each overflow. A run that still overflows after this many halvings in a row
# multiplies its loss by less than 2⁻⁴⁸ and will not recover.
MAX_CONSECUTIVE_OVERFLOWS = 64

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}

# What torch says of the fused attention kernels of each device. No forward pass can know that it will be asked for.
_NO_SECOND_DERIVATIVE = re.compile(r"derivative for aten::_scaled_dot_product_\w+ is not implemented")


class Outcome(NamedTuple):
    """What one update came to: 0-dim tensors on the device, and whether the gradient scaler applied it.

    Attributes:
        loss: the loss of the update.
        grad_norm: the 2-norm of its gradients before clipping.
        bad: 1.0 where loss or norm is not finite.
        applied: false where the gradient scaler skipped the update. A bad one counts as applied, since the host may
            not know of it yet.
    """

    loss: Tensor
    grad_norm: Tensor
    bad: Tensor
    applied: bool


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """The parameters that an optimizer trains."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class Updater:
    """Runs the updates of one `fit`.

    Attributes:
        losses: those of the last update by the names of several optimizers; empty where there is one.

    Args:
        model: the module that is not compiled; `compilation` has the compiled one, if any.
        forward: gives the scalar mean loss of a batch on the device.
        move_batch: copies a batch to the device.
        optimizer: applies the updates. Its `step` is looked up each time, so that it can be wrapped.
        scaler: scales losses under float16; disabled otherwise.
        group: the ranks that share an update.
        micro_batches: how many this rank computes of an update.
        config: how the loss is normalised, gradients are clipped, and updates that are not finite are treated.
        logger: receives the event of an overflow, and is told of parameters that nothing trains.
        merged: how many micro batches run as one forward pass, where they fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        compilation: Compilation,
        forward: Forward,
        move_batch: Callable[[Any], Any],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        group: Group,
        micro_batches: int,
        config: SpeedtronicConfig,
        logger: MetricLogger,
        merged: int = 1,
    ) -> None:
        self._has_closure = needs_closure(optimizer)
        if self._has_closure and scaler.is_enabled():
            raise ConfigError(
                f"precision: {type(optimizer).__name__} calls the model several times in one step, and the gradient "
                "scaler of fp16 does not know which of them counts; use bf16 or fp32"
            )
        if self._has_closure and group.size > 1:
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__} calls the model several times in one step, which is for a run "
                "of one process; train with one, or use an optimizer such as AdamW"
            )
        self.losses: dict[str, float] = {}
        self.scaler = scaler
        self.guard = NonFiniteGuard(config.run.on_nonfinite, optimizer, unwrapped(model))
        self._model = model
        self._compilation = compilation
        self._forward = forward
        self._move_batch = move_batch
        self._optimizer = optimizer
        self._group = group
        self._micro_batches = micro_batches
        self._reduce_dtype = _DTYPES[config.parallel.reduce_dtype]
        self._statistics = running_statistics(unwrapped(model)) if group.size > 1 else []
        self._unshifted = config.data.labels == "unshifted"
        self._by_tokens = config.data.loss_normalization == "tokens"
        self._max_norm, self._max_value = config.optimizer.grad_clip, config.optimizer.grad_clip_value
        self._logger = logger
        self._merged = merged
        self._ooo_streams = config.ooo_streams if config.ooo_backprop else None
        self._stages: StageStreamScheduler | None = None
        self._scale = scaler.get_scale() if scaler.is_enabled() else 1.0
        self._overflows = 0
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._not_owned = [(name, p) for name, p in unwrapped(model).named_parameters() if id(p) not in owned]
        self._named: set[str] = set()
        self._weight: Callable[[], int] | None = None
        self._clear()  # what was left from before

    def take(self, batches: Iterator[Any]) -> list[Any]:
        """The next micro batches of one update, with labels that are aligned.

        Raises:
            DataError: the loader has written one of them over another, or the labels cannot be aligned.
        """
        with phase("data"):
            taken, versions = [], []
            for _ in range(self._micro_batches):
                taken.append(next(batches))
                versions += [(tensor, tensor._version) for tensor in tensors_in(taken[-1]) if not tensor.is_inference()]
            if any(tensor._version != version for tensor, version in versions):
                raise DataError(
                    "the data loader has written into a batch that it gave before, and an update takes "
                    f"{self._micro_batches} of them at once; give each batch memory of its own, such as a clone"
                )
            return [align_labels(batch) for batch in taken] if self._unshifted else taken

    def weight_of(self, batches: Sequence[Any]) -> int:
        """What the micro batches of this rank weigh in an update: their targets, or as many as there are."""
        present = [batch for batch in batches if batch is not None]
        return sum(count_targets(present)) if self._by_tokens and present else len(present)

    def run(self, batches: Sequence[Any], step: int, weight: Callable[[], int] | None = None) -> Outcome:
        """Run the update that makes global step `step`. `weight` waits for what all ranks' micro batches weigh.

        Raises:
            ModelError: the loss needs a second derivative that attention does not have.
            ScalerOverflowError: the gradient scaler skipped too many updates in a row.
        """
        self.guard.keep_buffers()
        if self._ooo_streams is not None and self._stages is None:
            # Only now, so that the average of the weights is a copy of a model without it.
            self._stages = StageStreamScheduler(
                self._model,
                next(self._model.parameters()).device,
                num_streams=self._ooo_streams,
                logger=self._logger,
                compiled=self._compilation.model is not None,
            )
        self._weight = weight
        if self._has_closure:
            return Outcome(*self.guard.step_with_closure(partial(self._evaluate, batches)), applied=True)
        loss = self._backward(batches)
        with phase("update"):
            return self._update(loss, step, self._optimizer, self.guard)

    def close(self) -> None:
        """Leave the model as it was before."""
        if self._stages is not None:
            self._stages.dispose()

    def clear_gradients(self) -> None:
        """Clear the gradients of the optimizer and of the model, and warn of parameters that nothing trains.

        These have a gradient, and the optimizer does not have them: such as a layer that was frozen when the optimizer
        was built, and no longer is. Each is named once.
        """
        untrained = [name for name in self._clear() if name not in self._named]
        if untrained:
            self._named.update(untrained)
            more = f" and {len(untrained) - 4} more" if len(untrained) > 4 else ""
            self._logger.warning(
                f"not trained, although gradients are computed for them: {', '.join(untrained[:4])}{more}. The "
                "optimizer does not have these parameters, as it has none that are frozen when it is built: build it "
                "before they are frozen, or add them with optimizer.add_param_group; or freeze them, to save the work"
            )

    def _clear(self) -> list[str]:
        """Clear all gradients, and return the names of the parameters that had one and are not the optimizer's."""
        # What has been added to the optimizer since is cleared by it.
        self._optimizer.zero_grad(set_to_none=True)
        with_gradient = [(name, p) for name, p in self._not_owned if p.grad is not None]
        for _, parameter in with_gradient:
            parameter.grad = None
        return [name for name, _ in with_gradient]

    def _backward(self, batches: Sequence[Any]) -> Tensor:
        """Accumulate the gradients of the update, and average what the ranks' forward passes have written."""
        loss = self._compiled_or_not(batches)
        if self._statistics:
            average_buffers([owner.get_buffer(name) for _, owner, name in self._statistics], self._group)
        return loss

    def _compiled_or_not(self, batches: Sequence[Any]) -> Tensor:
        """Accumulate the gradients; if compiled code fails, once more without it."""
        if self._compilation.model is None:
            return self._accumulate(self._model, batches)
        self._compilation.states.keep()
        try:
            loss = self._accumulate(self._compilation.model, batches)
        except Exception as error:  # noqa: BLE001 - compilers fail in any way; what the eager rerun raises is raised
            # A batch or a loss that cannot be used, or a rank that has gone, is no fault of the compiler.
            if is_out_of_memory(error) or isinstance(error, InputError | RankError):
                raise
            self._compilation.abandon("runtime_fallback", error)
        else:
            self._compilation.states.note_success()
            return loss
        # Rewind what the failed attempt moved: random numbers, running statistics and the gradients so far.
        self._compilation.states.restore()
        self.guard.put_buffers_back()
        self._clear()
        return self._accumulate(self._model, batches)

    def _accumulate(self, model: Callable[..., Any], batches: Sequence[Any]) -> Tensor:
        parts: Sequence[Any] = batches
        if self._merged > 1:
            parts = merge(batches, self._merged, by_tokens=self._by_tokens) or batches
        targets = None
        if self._by_tokens:
            present = [part.batch if isinstance(part, Merged) else part for part in parts if part is not None]
            counts = iter(count_targets(present) if present else [])
            targets = [0 if part is None else next(counts) for part in parts]
        try:
            return accumulate(
                lambda part: self._loss(model, part),
                parts,
                parameters_of(self._optimizer),
                targets=targets,
                group=self._group,
                scaler=self.scaler,
                stages=self._stages,
                expected=self._weight if self._group.size > 1 else None,
                reduce_dtype=self._reduce_dtype,
            )
        except RuntimeError as error:
            if _NO_SECOND_DERIVATIVE.search(str(error)) is None:
                raise
            raise ModelError(
                "the loss needs a second derivative, as a penalty on gradients does, and the attention kernel that "
                "torch has chosen has none; let torch take the one that has: call fit(), or the model in your loss, "
                "inside `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):`"
            ) from error

    def _loss(self, model: Callable[..., Any], part: Any) -> MeanLoss:
        """The mean loss of a micro batch, or the mean of the mean losses of merged ones."""
        if not isinstance(part, Merged):
            return self._forward(model, self._move_batch(part))
        batch = self._move_batch(part.batch)
        return self._forward(model, batch) if part.even else self._forward.mean_of_means(model, batch, part.samples)

    def _evaluate(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm for the weights of now; the gradients stay, clipped."""
        self._clear()
        loss = self._backward(batches)
        return loss, self._clip(self._optimizer)

    def _update(self, loss: Tensor, step: int, optimizer: torch.optim.Optimizer, guard: NonFiniteGuard) -> Outcome:
        """Let an optimizer apply its gradients, unless they must not be applied."""
        if self.scaler.is_enabled():
            return self._scaled_update(loss, step, optimizer)
        return self._guarded_update(loss, optimizer, guard)

    def _guarded_update(self, loss: Tensor, optimizer: torch.optim.Optimizer, guard: NonFiniteGuard) -> Outcome:
        """Apply the update unless it is not finite."""
        norm = self._clip(optimizer)
        # A tensor: a fused optimizer obeys it on the device, so that the host reads nothing.
        bad = guard.inspect(loss, norm)
        guard.step(bad)
        return Outcome(loss, norm, bad, applied=True)

    def _scaled_update(self, loss: Tensor, step: int, optimizer: torch.optim.Optimizer) -> Outcome:
        """Update through the gradient scaler, which skips an update with gradients that overflowed."""
        # The norm and the clipping are of the gradients themselves, so these come first.
        self.scaler.unscale_(optimizer)
        norm = self._clip(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        # A scaler lowers its scale after an overflow, and only then.
        before, self._scale = self._scale, self.scaler.get_scale()
        applied = self._scale >= before
        if applied:
            self._overflows = 0
        else:
            self.guard.put_buffers_back()
            self._count_overflow(step)
        return Outcome(loss, norm, torch.zeros_like(loss), applied=applied)

    def _clip(self, optimizer: torch.optim.Optimizer) -> Tensor:
        return clip_gradients(list(parameters_of(optimizer)), self._max_norm, self._max_value)

    def _count_overflow(self, step: int) -> None:
        self._overflows += 1
        self._logger.emit("optimizer_step_skipped", {"step": step, "reason": "overflow", "scale": self._scale})
        if self._overflows >= MAX_CONSECUTIVE_OVERFLOWS:
            raise ScalerOverflowError(
                f"step {step}: the gradients overflowed {self._overflows} times in a row, down to a loss scale "
                f"of {self._scale:g}; lower the learning rate, look for non-finite data, or use precision bf16 or fp32"
            )
