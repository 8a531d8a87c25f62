"""The training loop.

`Trainer.fit` is the page to read first; what it calls stands below it in the order of the call, and the arithmetic of
a step is in `step.py`.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager, RunLock, capture_rng_state, check, restore_rng_state
from speedtronic.config import SpeedtronicConfig
from speedtronic.data import BatchStream
from speedtronic.errors import CheckpointError, ConfigError, NonFiniteError, ScalerOverflowError
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan, make_grad_scaler, resolve_device, resolve_precision
from speedtronic.shapes import ShapeReport, validate_startup_shapes
from speedtronic.trainer.compile import CompiledModel, is_out_of_memory
from speedtronic.trainer.ema import WeightAverage
from speedtronic.trainer.loss import LossFunction, align_labels
from speedtronic.trainer.nonfinite import NonFiniteGuard
from speedtronic.trainer.readback import Numbers, Readback, Update
from speedtronic.trainer.reporting import Counters, StepReporter
from speedtronic.trainer.result import TrainResult
from speedtronic.trainer.saving import CheckpointSaver
from speedtronic.trainer.signals import SignalWatch
from speedtronic.trainer.step import (
    Forward,
    accumulate,
    batch_size_and_tokens,
    clip_gradients,
    equal_parts,
    move_batch,
    token_parts,
)
from speedtronic.trainer.sync import CountsWork, DecidesOnReset, HandsOver, MovesOn, PreparesState, SyncCoordinator
from speedtronic.trainer.throughput import device_peak_flops, training_flops_per_token

# A scaler starts at 2¹⁶ and halves at each overflow: a run that still overflows after this many halvings in a row
# multiplies its loss by less than 2⁻⁴⁸ and will not recover.
MAX_CONSECUTIVE_OVERFLOWS = 64

# What Hugging Face's models call their hook for gradient checkpointing, and called it before.
_HUGGING_FACE_CHECKPOINTING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


class Evaluator(Protocol):
    """Measures a model on held-out data, and leaves its train/eval flags and the RNG as it found them."""

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Return the numbers of the `eval` event, `loss` among them; None when it gave up because it should stop."""


@dataclass
class _Fit:
    """What one invocation of `fit` works with."""

    target: int
    scaler: torch.amp.GradScaler
    guard: NonFiniteGuard
    readback: Readback
    reporter: StepReporter
    saver: CheckpointSaver | None
    signals: SignalWatch
    scale: float
    overflows: int = 0
    evaluated_at: int | None = None
    eval_loss: float | None = None
    moved_on: bool = False

    @property
    def came_further(self) -> bool:
        """Whether steps were made, or passed over since they are done already."""
        return self.moved_on or bool(self.reporter.records)

    def wants_more(self, step: int) -> bool:
        return step < self.target and self.signals.received is None


class Trainer:
    """Trains a module on the batches of a loader, one global step at a time.

    A global step is one optimizer update over `config.accumulation_steps` micro batches.

    Args:
        model: the module. What it may return is said in `trainer.loss.resolve_loss`.
        optimizer: any `torch.optim.Optimizer` over its parameters.
        dataloader: an iterable of batches: mappings of forward's arguments, or tuples or lists of at least two.
        device: where to train; "auto" chooses CUDA, then MPS, then the CPU.
        config: a `SpeedtronicConfig`, or a dict of one; the defaults without it.
        scheduler: advanced once per global step.
        precision: a resolved plan; from `config.precision` without it.
        logger: receives all events; one that prints to the terminal without it.
        checkpoint_manager: without it nothing is saved.
        coordinator: keeps the model in step with other machines; started, told of each step, and stopped.
        max_steps: default target of `fit`; `config.data.max_steps` or `config.run.max_steps` without it.
        start_step: the global step at which counting begins.
        loss_fn: `loss_fn(output, batch)` gives the loss, for models that do not.
        evaluator: called on the plain model at the cadence of `config.eval`, or on the one with the averaged weights
            where `config.optimizer.ema` keeps an average, and told how to find out that the run is being interrupted.
        lock_directory: a folder that belongs to this run while it trains, as that of the checkpoints does anyway.
        metadata: more entries for the checkpoints, such as the tokenizer that a model needs to write.
        shape_report: what a startup shape validation found; `fit` validates where there was none.

    Raises:
        DeviceError: the device does not exist here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataloader: Any,
        *,
        device: str | torch.device,
        config: SpeedtronicConfig | dict[str, Any] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        precision: PrecisionPlan | None = None,
        logger: MetricLogger | None = None,
        checkpoint_manager: CheckpointManager | None = None,
        coordinator: SyncCoordinator | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        loss_fn: LossFunction | None = None,
        evaluator: Evaluator | None = None,
        lock_directory: Path | None = None,
        metadata: Mapping[str, Any] | None = None,
        shape_report: ShapeReport | None = None,
    ) -> None:
        self.config = _as_config(config)
        self.model = model
        self.optimizer = optimizer
        self.dataloader = dataloader
        self.device = resolve_device(device)
        self.scheduler = scheduler
        self.logger = logger or MetricLogger(
            level=self.config.logging.level, every_steps=self.config.logging.every_steps or 1
        )
        self.precision = precision or resolve_precision(self.config.precision, self.device)
        self.checkpoint_manager = checkpoint_manager
        self.coordinator = coordinator
        self.max_steps = max_steps
        self.shape_report = shape_report
        self.step = start_step
        self._counters = Counters()
        self._evaluator = evaluator
        self._lock_directory = lock_directory
        self._metadata = dict(metadata or {})
        self._batches = BatchStream(
            dataloader,
            capture_rng=capture_rng_state,
            restore_rng=restore_rng_state,
            warn=self.logger.warning,
        )
        self._forward = Forward(model, self.precision, loss_fn=loss_fn, warn=self.logger.warning)
        self._scaler_state: dict[str, Any] | None = None
        self._coordinator_state: dict[str, Any] | None = None
        self._average: WeightAverage | None = None
        self._fit: _Fit | None = None
        self._configure_gradient_checkpointing()
        self._compiled = self._compile() if self.config.compile else None

    @property
    def samples(self) -> int:
        """Cumulative number of samples trained on."""
        self._settle()
        return self._counters.samples

    @property
    def tokens(self) -> int:
        """Cumulative number of tokens trained on."""
        self._settle()
        return self._counters.tokens

    @property
    def averaged_model(self) -> nn.Module | None:
        """A copy of the model with the averaged weights of `config.optimizer.ema`, to read from and not to train.

        In evaluation mode, and as of now: training goes on in it. None without an average, and before there is one: it
        begins with the first `fit` or with `resume`.
        """
        return self._average.model() if self._average is not None else None

    # ------------------------------------------------------------------ the loop

    def fit(self, max_steps: int | None = None) -> TrainResult:
        """Train until the global step reaches the target, and return what happened.

        The target is `max_steps`, else the constructor's, else the config's; a run that is already past it trains
        nothing. Ctrl-C and SIGTERM finish the step in hand and end the run with a checkpoint.

        Raises:
            ConfigError: the target is not positive, or `optimizer.ema` is on and the model cannot be copied.
            RunLockedError: another process is training in this folder.
            NonFiniteError: a loss or gradient is not finite, and `run.on_nonfinite` is stop.
            ScalerOverflowError: the gradient scaler skips without end.
        """
        with ExitStack() as stack:
            fit = self._begin(max_steps, stack)
            self._validate_shapes()
            self._start_coordinator(stack)
            self._move_on(fit)
            self._begin_average()
            self._announce(fit)
            while fit.wants_more(self.step):
                if self._train_step(fit):
                    self._evaluate_and_save_if_due(fit)
            return self._finish(fit)

    train = fit

    def _begin(self, max_steps: int | None, stack: ExitStack) -> _Fit:
        target = self._resolve_target(max_steps)
        for folder in self._folders():
            stack.enter_context(RunLock(folder))
        self.model.to(self.device)
        self.model.train()
        scaler = self._new_scaler()
        self.optimizer.zero_grad(set_to_none=True)
        saver = self._new_saver()
        if saver is not None:
            stack.callback(saver.close)
        fit = _Fit(
            target=target,
            scaler=scaler,
            guard=NonFiniteGuard(self.config.run.on_nonfinite, self.optimizer, _plain(self.model)),
            # A logger of the user's may have no cadence; then each step is one to log.
            readback=Readback(self.device, getattr(self.logger, "every_steps", 1)),
            reporter=StepReporter(self.logger, self._counters, self.device, self._utilisation()),
            saver=saver,
            signals=stack.enter_context(SignalWatch()),
            scale=scaler.get_scale() if scaler.is_enabled() else 1.0,
        )
        self._fit = fit
        stack.callback(self._leave)
        return fit

    def _resolve_target(self, max_steps: int | None) -> int:
        requested = max_steps if max_steps is not None else self.max_steps
        if requested is None:
            requested = self.config.data.max_steps or self.config.run.max_steps
        if requested <= 0:
            raise ConfigError(f"max_steps must be positive, not {requested}")
        return max(self.step, requested)

    def _folders(self) -> list[Path]:
        """The folders that belong to this run alone while it trains."""
        manager = self.checkpoint_manager
        checkpoints = manager.directory if manager is not None and manager.enabled else None
        return [folder for folder in (self._lock_directory, checkpoints) if folder is not None]

    def _new_scaler(self) -> torch.amp.GradScaler:
        scaler = make_grad_scaler(self.precision)
        if self._scaler_state:
            scaler.load_state_dict(self._scaler_state)
        self._scaler_state = None
        return scaler

    def _new_average(self) -> WeightAverage | None:
        decay = self.config.optimizer.ema
        return WeightAverage(_plain(self.model), decay) if decay is not None else None

    def _new_saver(self) -> CheckpointSaver | None:
        if self.checkpoint_manager is None or not self.checkpoint_manager.enabled:
            return None
        # What a checkpoint cannot hold is said now, rather than at the first save hours later.
        check(self.state_dict())
        return CheckpointSaver(self.checkpoint_manager, self.logger, background=self.config.checkpoint.background)

    def _utilisation(self) -> Callable[[float], float] | None:
        peak = device_peak_flops(self.device, self.precision.dtype)
        length = self.config.data.block_size
        if peak is None or length is None:
            return None
        flops = training_flops_per_token(self.model, length)
        return lambda tokens_per_sec: tokens_per_sec * flops / peak

    def _leave(self) -> None:
        if self._fit is not None and self._fit.scaler.is_enabled():
            self._scaler_state = self._fit.scaler.state_dict()
        self._fit = None

    def _validate_shapes(self) -> None:
        if self.shape_report is None:
            config = _with_checks_of_what_is_known(self.config)
            self.shape_report = validate_startup_shapes(config, self.model, self.device, self.precision, self.logger)

    def _start_coordinator(self, stack: ExitStack) -> None:
        if self.coordinator is None:
            return
        stack.callback(self.coordinator.stop)
        staged = self._coordinator_state
        if staged is not None and isinstance(self.coordinator, PreparesState):
            self.coordinator.prepare_state(staged)
        self.coordinator.start()
        if staged is not None:
            self.coordinator.load_state_dict(staged)
        self._coordinator_state = None

    def _begin_average(self) -> None:
        """Begin it, where there is none yet, with the weights that a coordinator may have installed as it started."""
        if self._average is not None and not self._average.is_of(_plain(self.model)):
            self.logger.warning(
                "optimizer.ema: other weights are trained than before, so their average begins anew, with them"
            )
            self._average = None
        if self._average is None:
            self._average = self._new_average()

    def _announce(self, fit: _Fit) -> None:
        self.logger.emit(
            "train_start",
            {
                "step": self.step,
                "target_steps": fit.target,
                "device": str(self.device),
                "precision": self.precision.mode,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "micro_batches": self.config.accumulation_steps,
            },
        )

    # ------------------------------------------------------------------ one global step

    def _train_step(self, fit: _Fit) -> bool:
        """Run one global step; false when the gradient scaler skipped its update."""
        batches = self._take_micro_batches()
        fit.guard.keep_buffers()
        loss = self._backward(fit, batches)
        if fit.scaler.is_enabled():
            norm, bad, applied = self._scaled_update(fit, loss)
        else:
            norm, bad, applied = self._guarded_update(fit, loss)
        self.optimizer.zero_grad(set_to_none=True)
        if not applied:
            return False
        update = self._advance(batches, loss, norm, bad)
        self._report(fit, fit.readback.add(update))
        self._move_on(fit)
        return True

    def _take_micro_batches(self) -> list[Any]:
        batches = [next(self._batches) for _ in range(self.config.accumulation_steps)]
        return [align_labels(batch) for batch in batches] if self.config.data.labels == "unshifted" else batches

    def _backward(self, fit: _Fit, batches: list[Any]) -> Tensor:
        """Accumulate the gradients of one update; on a failure of compiled code, once more without it."""
        if self._compiled is None:
            return self._accumulate(self.model, batches, fit.scaler)
        rng = capture_rng_state()
        try:
            return self._accumulate(self._compiled, batches, fit.scaler)
        except Exception as error:  # noqa: BLE001 - compilers fail in any way; what the eager rerun raises is raised
            if is_out_of_memory(error):
                raise
            self._abandon_compilation("runtime_fallback", error)
            restore_rng_state(rng)
            fit.guard.put_buffers_back()
            self.optimizer.zero_grad(set_to_none=True)
        return self._accumulate(self.model, batches, fit.scaler)

    def _accumulate(self, model: Callable[..., Any], batches: list[Any], scaler: torch.amp.GradScaler) -> Tensor:
        by_tokens = self.config.data.loss_normalization == "tokens"
        parts = token_parts(batches) if by_tokens else equal_parts(len(batches))
        return accumulate(lambda batch: self._forward(model, self._move_batch(batch)), batches, parts, scaler=scaler)

    def _move_batch(self, batch: Any) -> Any:
        return move_batch(batch, self.device)

    _batch_size_and_tokens = staticmethod(batch_size_and_tokens)

    def _guarded_update(self, fit: _Fit, loss: Tensor) -> tuple[Tensor, Tensor, bool]:
        norm = clip_gradients(self._parameters(), self.config.optimizer.grad_clip)
        bad = fit.guard.inspect(loss, norm)
        fit.guard.step(bad)
        if fit.guard.refused and self.config.run.on_nonfinite == "stop":
            # Known on the host already, so the run ends here and not at the next log.
            self._settle()
            self._refuse(self.step + 1, loss.item(), norm.item())
        return norm, bad, True

    def _scaled_update(self, fit: _Fit, loss: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Update through the gradient scaler, which skips an update whose scaled gradients overflowed."""
        fit.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self._parameters(), self.config.optimizer.grad_clip)
        fit.scaler.step(self.optimizer)
        fit.scaler.update()
        before, fit.scale = fit.scale, fit.scaler.get_scale()
        if fit.scale < before:
            fit.guard.put_buffers_back()
            self._note_overflow(fit)
        else:
            fit.overflows = 0
        return norm, torch.zeros_like(loss), fit.scale >= before

    def _note_overflow(self, fit: _Fit) -> None:
        fit.overflows += 1
        self.logger.emit("optimizer_step_skipped", {"step": self.step + 1, "reason": "overflow", "scale": fit.scale})
        if fit.overflows >= MAX_CONSECUTIVE_OVERFLOWS:
            raise ScalerOverflowError(
                f"step {self.step + 1}: the gradients overflowed {fit.overflows} times in a row, down to a loss scale "
                f"of {fit.scale:g}; lower the learning rate, look for non-finite data, or use precision bf16 or fp32"
            )

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _advance(self, batches: list[Any], loss: Tensor, norm: Tensor, bad: Tensor) -> Update:
        """Move scheduler, step, coordinator and average on, and note what the update was."""
        lr_applied = self._learning_rate()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1
        sizes = [self._batch_size_and_tokens(batch) for batch in batches]
        samples, tokens = sum(samples for samples, _ in sizes), sum(tokens for _, tokens in sizes)
        self._synchronise(samples, tokens)
        self._average_weights(bad)
        return Update(
            step=self.step,
            lr=self._learning_rate(),
            lr_applied=lr_applied,
            samples=samples,
            tokens=tokens,
            micro_batches=len(batches),
            loss=loss,
            grad_norm=norm,
            bad=bad,
            at=time.perf_counter(),
        )

    def _learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _synchronise(self, samples: int, tokens: int | Tensor) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            return
        if isinstance(coordinator, CountsWork):
            coordinator.count(samples, tokens)
        if not coordinator.after_optimizer_step(self.model, self.step):
            return
        if self._is_to_reset(coordinator):
            self.optimizer.state.clear()

    def _is_to_reset(self, coordinator: SyncCoordinator) -> bool:
        """Whether a coordinator that answered true asked for a reset of the optimizer's state."""
        if isinstance(coordinator, DecidesOnReset):
            return coordinator.reset_inner_optimizer
        distributed = self.config.distributed
        return distributed.reset_inner_optimizer or not distributed.enabled

    def _move_on(self, fit: _Fit) -> None:
        """Pass over the work that the coordinator knows to be done: its data, its steps, its learning rates."""
        if self.coordinator is None or not isinstance(self.coordinator, MovesOn):
            return
        position = self.coordinator.continue_at()
        if position is None or position.step <= self.step:
            return
        self._settle()
        steps = position.step - self.step
        what_follows = "going on behind them" if position.step < fit.target else "nothing is left to train"
        self.logger.info(f"steps {self.step + 1} to {position.step} were trained before: {what_follows}")
        self._batches.skip(steps * self.config.accumulation_steps)
        self._advance_scheduler(steps)
        self.step = position.step
        fit.moved_on = True
        fit.reporter.move_to(position.samples, position.tokens)

    def _advance_scheduler(self, steps: int) -> None:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.LambdaLR):
            self.scheduler.last_epoch += steps
            self._recompute_learning_rates()
        elif self.scheduler is not None:
            with warnings.catch_warnings():
                # It takes a step for forgotten where the optimizer has made none.
                warnings.simplefilter("ignore")
                for _ in range(steps):
                    self.scheduler.step()

    def _average_weights(self, bad: Tensor) -> None:
        """Take in the weights that the next update starts from, which a coordinator may have replaced."""
        if self._average is not None:
            self._average.update(bad if self.config.run.on_nonfinite != "ignore" else None)

    # ------------------------------------------------------------------ after a step

    def _report(self, fit: _Fit, arrived: list[Numbers]) -> None:
        for numbers in arrived:
            if numbers.bad:
                self._refuse(numbers.update.step, numbers.loss, numbers.grad_norm)
            fit.reporter.report(numbers)

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        policy = self.config.run.on_nonfinite
        self.logger.emit("nonfinite", {"step": step, "loss": loss, "grad_norm": norm, "action": policy})
        if policy == "stop":
            self._go_back(step - 1)
            raise NonFiniteError(
                f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; the weights "
                "are those of the step before. Lower the learning rate, set optimizer.grad_clip, or look at the data; "
                "run.on_nonfinite: skip leaves such updates out",
                step=step,
            )

    def _go_back(self, step: int) -> None:
        """Count no update that was not applied: when one is found to be bad, others may have been tried after it."""
        if isinstance(self.scheduler, torch.optim.lr_scheduler.LambdaLR):
            self.scheduler.last_epoch -= self.step - step
            self._recompute_learning_rates()
        self.step = step

    def _settle(self) -> None:
        """Wait for the numbers of all updates so far, and report them."""
        if self._fit is not None:
            self._report(self._fit, self._fit.readback.drain())

    def _evaluate_and_save_if_due(self, fit: _Fit) -> None:
        """Evaluate first, so that a checkpoint of this step knows its loss; it is written even if that fails."""
        if not fit.wants_more(self.step):
            self._hand_over()
        every = self.config.eval.every_steps
        if every is None or self.step % every != 0:
            self._save_if_due(fit)
            return
        # Raises for a non-finite step now, and not on the way to saving it.
        self._settle()
        try:
            self._evaluate(fit)
        finally:
            self._save_if_due(fit)

    def _hand_over(self) -> None:
        if self.coordinator is not None and isinstance(self.coordinator, HandsOver):
            # Raises for a non-finite step now, and not after others have it.
            self._settle()
            self.coordinator.hand_over()

    def _evaluate(self, fit: _Fit) -> None:
        if self._evaluator is None or fit.evaluated_at == self.step:
            return
        self._settle()
        averaged = self.averaged_model
        model = averaged if averaged is not None else self.model
        numbers = self._evaluator(model, lambda: fit.signals.received is not None)
        if numbers is not None:
            fit.evaluated_at, fit.eval_loss = self.step, numbers["loss"]
            self.logger.emit("eval", {"step": self.step, **numbers})

    def _save_if_due(self, fit: _Fit) -> None:
        if fit.saver is None:
            return
        fit.saver.poll()
        if fit.saver.due(self.step):
            self._save(fit.saver)

    def _save(self, saver: CheckpointSaver) -> None:
        if not saver.holds(self.step):
            # Raises for a non-finite step first, so that it never becomes a checkpoint.
            self._settle()
            saver.save(self.step, self.state_dict())

    def _finish(self, fit: _Fit) -> TrainResult:
        self._settle()
        self._hand_over()
        try:
            if self.config.eval.at_end and fit.came_further and fit.signals.received is None:
                self._evaluate(fit)
        finally:
            if fit.saver is not None and fit.came_further:
                self._save(fit.saver)
                fit.saver.wait()
        if (signal := fit.signals.received) is not None:
            self.logger.emit("interrupted", {"step": self.step, "signal": signal.name})
        result = TrainResult(
            steps=self.step,
            samples=self._counters.samples,
            tokens=self._counters.tokens,
            final_loss=fit.reporter.final_loss,
            elapsed_s=fit.reporter.elapsed(),
            metrics=fit.reporter.records,
            eval_loss=fit.eval_loss,
            interrupted_by=None if signal is None else int(signal),
            save_error=fit.saver.error if fit.saver is not None else None,
        )
        self._conclude(result)
        return result

    def _conclude(self, result: TrainResult) -> None:
        self.logger.emit(
            "train_end",
            {
                "step": result.steps,
                "samples": result.samples,
                "tokens": result.tokens,
                "final_loss": result.final_loss,
                "eval_loss": result.eval_loss,
                "duration_s": result.elapsed_s,
            },
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as a tree that a `CheckpointManager` can save."""
        scaler = self._fit.scaler.state_dict() if self._fit is not None else self._scaler_state
        coordinator = self.coordinator.state_dict() if self.coordinator is not None else None
        return {
            **self._metadata,
            "step": self.step,
            "samples": self.samples,
            "tokens": self.tokens,
            "model": _plain(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": scaler or None,
            "ema": self._average.state_dict() if self._average is not None else None,
            "coordinator": coordinator if coordinator is not None else self._coordinator_state,
            "rng": capture_rng_state(),
            "data": self._batches.state_dict(),
            "metrics": self._metrics(),
            "precision": self.precision.mode,
            "config": self.config.to_dict(redact_secrets=True),
        }

    def _metrics(self) -> dict[str, float | None]:
        """What a checkpoint says of its weights; `eval_loss` only where they were evaluated as they are."""
        fit = self._fit
        if fit is None:
            return {"loss": None, "eval_loss": None}
        return {
            "loss": fit.reporter.final_loss,
            "eval_loss": fit.eval_loss if fit.evaluated_at == self.step else None,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpointed state.

        Model, average, optimizer, scheduler, counters, data position and RNG are restored at once; scaler and
        coordinator when `fit` starts them. The saved precision and config are informational. Only model, optimizer and
        counters must be there: a part that the state lacks stays as it is. An average that it lacks begins with its
        weights.

        Raises:
            CheckpointError: the state does not fit this model, optimizer or data; the tensors are named.
            ConfigError: `optimizer.ema` is on and the model cannot be copied.
        """
        self.model.to(self.device)
        _load_model(_plain(self.model), state["model"])
        self._load_average(state.get("ema"))
        self._load_optimizer(state["optimizer"])
        if self.scheduler is not None and state.get("scheduler") is not None:
            self.scheduler.load_state_dict(dict(state["scheduler"]))
        self._recompute_learning_rates()
        self.step = state["step"]
        self._counters.samples = state["samples"]
        self._counters.tokens = state["tokens"]
        self._scaler_state = state.get("scaler")
        self._coordinator_state = state.get("coordinator")
        if state.get("data") is not None:
            self._batches.load_state_dict(state["data"])
        if state.get("rng") is not None:
            restore_rng_state(state["rng"])

    def _load_average(self, state: Mapping[str, Tensor] | None) -> None:
        self._average = self._new_average()
        if self._average is None and state is not None:
            self.logger.warning("optimizer.ema is off: the checkpoint's average of the weights is dropped")
        elif self._average is not None and state is None:
            self.logger.info("optimizer.ema: the checkpoint has no average of the weights, so it begins with them")
        elif self._average is not None and state is not None:
            self._average.load_state_dict(state)

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        try:
            _check_algorithms(state["param_groups"], self.optimizer.param_groups)
            _check_names(state["param_groups"], self.optimizer.param_groups)
            self.optimizer.load_state_dict(dict(state))
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint's optimizer state does not fit this optimizer: {error}. Train with the optimizer that "
                "wrote it, or start from its weights alone"
            ) from error

    def _recompute_learning_rates(self) -> None:
        """Take the LR from the schedule at the restored step: the checkpoint's may come from another horizon."""
        scheduler = self.scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            return
        for group, base, factor in zip(
            self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(scheduler.last_epoch)

    # ------------------------------------------------------------------ set-up of features

    def _configure_gradient_checkpointing(self) -> None:
        if not self.config.gradient_checkpointing:
            return
        try:
            _enable_gradient_checkpointing(self.model)
        except Exception as error:  # noqa: BLE001 - the hook is the user's code, and the feature only saves memory
            self.logger.warning(f"gradient checkpointing is not available for this model: {error}")

    def _compile(self) -> CompiledModel | None:
        options = self.config.compile_options
        try:
            compiled = CompiledModel(self.model, mode=options.mode, dynamic=options.dynamic)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the eager model can train
            self._abandon_compilation("construction_failed", error)
            return None
        self.logger.emit("compile", {"status": "enabled"})
        return compiled

    def _abandon_compilation(self, status: str, error: Exception) -> None:
        self._compiled = None
        self.logger.emit("compile", {"status": status, "error": f"{type(error).__name__}: {error}"})
        trace = "".join(traceback.format_exception(error))
        self.logger.warning(f"compilation failed, and training goes on without it:\n{trace}")


TrainingEngine = Trainer
SpeedtronicTrainer = Trainer


def _as_config(config: SpeedtronicConfig | dict[str, Any] | None) -> SpeedtronicConfig:
    if config is None:
        return SpeedtronicConfig()
    return SpeedtronicConfig.from_dict(config) if isinstance(config, dict) else config.validate()


def _with_checks_of_what_is_known(config: SpeedtronicConfig) -> SpeedtronicConfig:
    """Without the shape checks of batches whose size nobody gave: a loader's own is not that of the defaults."""
    if "micro_batch_size" in config.data.model_fields_set:
        return config
    checks = config.shape_validation.model_copy(update={"check_batch": False, "check_sequence": False})
    return config.model_copy(update={"shape_validation": checks})


def _enable_gradient_checkpointing(model: Any) -> None:
    foreign = [name for name in _HUGGING_FACE_CHECKPOINTING if hasattr(model, name)]
    if foreign and not hasattr(model, "set_gradient_checkpointing"):
        getattr(model, foreign[0])()
    else:
        model.set_gradient_checkpointing(True)


def _check_algorithms(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Refuse the state of another algorithm, which torch would load wherever the groups have as many tensors."""
    theirs, ours = ([group.get("algorithm") for group in groups] for groups in (saved, own))
    if theirs == ours:
        return
    if any(theirs) and any(ours):
        raise CheckpointError(
            f"the checkpoint's optimizer divides the weights as {_listed(theirs)}, and this one as {_listed(ours)}: "
            "train on with the model and the optimizer options that wrote it, or start anew from its weights with "
            "run.init_from"
        )
    writer = "muon" if any(theirs) else "adamw"
    raise CheckpointError(
        f"the checkpoint was written by another optimizer than this run's: train on with optimizer.name: {writer}, or "
        "start anew from its weights with run.init_from"
    )


def _check_names(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Raise ValueError for the state of other parameters, which torch would load wherever they are as many.

    Groups that were not built with names are not looked at.
    """
    theirs, ours = _names(saved), _names(own)
    if theirs == ours or not any(theirs) or not any(ours):
        return
    there, here = ({name for group in groups for name in group} for groups in (theirs, ours))
    problems = [f"{name} was not trained there" for name in sorted(here - there)]
    problems += [f"{name} is not trained here" for name in sorted(there - here)]
    raise ValueError("; ".join(problems) or "it has the same parameters in other groups or in another order")


def _names(groups: list[dict[str, Any]]) -> list[list[str]]:
    # Those of a compiled module have one part more.
    return [[name.replace("_orig_mod.", "") for name in group.get("param_names", ())] for group in groups]


def _listed(algorithms: list[str | None]) -> str:
    return ", ".join(str(algorithm) for algorithm in algorithms)


def _plain(model: nn.Module) -> nn.Module:
    """The module inside a `torch.compile`d one, so that saved names are the plain ones."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


def _load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load `state` whole, or raise CheckpointError naming every tensor that is missing, extra or of another shape."""
    own = model.state_dict()
    problems = [f"{name} is missing in the checkpoint" for name in own.keys() - state.keys()]
    problems += [f"{name} is not in this model" for name in state.keys() - own.keys()]
    problems += [
        f"{name} has shape {tuple(state[name].shape)} in the checkpoint and {tuple(own[name].shape)} in this model"
        for name in own.keys() & state.keys()
        if isinstance(own[name], Tensor) and own[name].shape != state[name].shape
    ]
    if problems:
        raise CheckpointError("the checkpoint is of another model:\n  " + "\n  ".join(sorted(problems)))
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint is of another model: {error}") from error
