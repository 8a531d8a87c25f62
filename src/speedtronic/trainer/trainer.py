"""The training loop.

`Trainer.fit` is the page to read first; what it calls follows in order. The update of the weights is in `step.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from speedtronic.checkpoint import CheckpointManager, RunLock, check
from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError, NonFiniteError
from speedtronic.metrics import MetricLogger
from speedtronic.model.modes import PartsSetApart
from speedtronic.parallel.start import join_group
from speedtronic.precision import PrecisionPlan, resolve_precision, use_device
from speedtronic.ranks import share_weights
from speedtronic.shapes import ShapeReport, validate_startup_shapes
from speedtronic.trainer import unsupported
from speedtronic.trainer.between_steps import BetweenSteps, Evaluator
from speedtronic.trainer.callbacks import Callbacks
from speedtronic.trainer.compile import Compilation
from speedtronic.trainer.fit import Fit
from speedtronic.trainer.forward import Forward, Once, batch_size_and_tokens, move_batch
from speedtronic.trainer.freezing import freezing_schedule
from speedtronic.trainer.gradient_checkpointing import enable_gradient_checkpointing
from speedtronic.trainer.group_sync import share_coordinator
from speedtronic.trainer.lazy_modules import initialize, uninitialized
from speedtronic.trainer.loss import LossFunction, lend_loss, loss_by_name
from speedtronic.trainer.merging import check_merging
from speedtronic.trainer.nonfinite import nonfinite_error
from speedtronic.trainer.out_of_memory import advice_if_out_of_memory
from speedtronic.trainer.ranks import check_alike, logger_of_rank, share_updates
from speedtronic.trainer.readback import Numbers, Readback, Update
from speedtronic.trainer.reporting import StepReporter
from speedtronic.trainer.result import TrainResult
from speedtronic.trainer.saving import CheckpointSaver
from speedtronic.trainer.schedule import advance, move_schedule
from speedtronic.trainer.signals import SignalWatch
from speedtronic.trainer.state import TrainerState
from speedtronic.trainer.sync import SyncCoordinator, start_with_state, with_defaults
from speedtronic.trainer.throughput import flop_utilisation
from speedtronic.trainer.training_step import TrainingStep, updater_for
from speedtronic.trainer.unused import unused_keys, with_known_sizes


class Trainer:
    """Trains a module on the batches of a loader, one global step at a time.

    A global step is one optimizer update over `config.accumulation_steps` micro batches, which the processes that
    torchrun has started share (`config.parallel`). Rank 0's logger, checkpoints and callback states count.

    Args:
        model: the module. `trainer.loss.resolve_loss` says what it may return.
        optimizer: any `torch.optim.Optimizer` over its parameters; beside a `training_step` also a dict of several.
        dataloader: an iterable of batches: mappings of forward's arguments, or tuples or lists of at least two.
        device: where to train; "auto" chooses CUDA, then MPS, then the CPU.
        config: a `SpeedtronicConfig`, or a dict of one; the defaults without it. A warning names what nothing acts on.
        scheduler: advanced at each global step, a `ReduceLROnPlateau` by evaluations; a dict beside one of optimizers.
        precision, logger: a resolved plan, and what receives all events; made from the config without them.
        checkpoint_manager: without it nothing is saved.
        coordinator: keeps the model in step with other machines. It is started, called after each step, and stopped.
        max_steps: default target of `fit`; `config.data.max_steps` or `config.run.max_steps` without it.
        start_step: the global step at which counting begins.
        loss_fn: `loss_fn(output, batch)` gives the loss, for models that do not; what `config.loss` names without it.
            It is the `loss_fn` of the evaluator too, while this trainer trains, if that has one which is None.
        evaluator: called at the cadence of `config.eval` with the model, or with the averaged model where
            `config.optimizer.ema` keeps one, and with a function that says whether the run is being interrupted.
        lock_directory: a folder that belongs to this run while it trains, as that of the checkpoints always does.
        on_lock: called by `fit` as soon as the folders belong to it.
        metadata: more entries for the checkpoints, such as the tokenizer that a model needs to write.
        shape_report: of an earlier startup shape validation; without it `fit` validates.
        callbacks: objects with methods of `trainer.Callback`, called in this order; `build_runtime` builds a YAML's.
        training_step: a `trainer.training_step.TrainingStep`, for several losses; `loss_fn` is the evaluator's then.
        merged_micro_batches: how many run as one forward pass; of a model that declares `supports_merged_microbatches`.

    Raises:
        ConfigError: a part, or what `config.loss` names, cannot be used; micro batches cannot be merged.
        DeviceError: the device does not exist here.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer],
        dataloader: Any,
        *,
        device: str | torch.device,
        config: SpeedtronicConfig | dict[str, Any] | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | dict[str, torch.optim.lr_scheduler.LRScheduler] | None = None,
        precision: PrecisionPlan | None = None,
        logger: MetricLogger | None = None,
        checkpoint_manager: CheckpointManager | None = None,
        coordinator: SyncCoordinator | None = None,
        max_steps: int | None = None,
        start_step: int = 0,
        loss_fn: LossFunction | None = None,
        evaluator: Evaluator | None = None,
        lock_directory: Path | None = None,
        on_lock: Callable[[], None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        shape_report: ShapeReport | None = None,
        callbacks: Iterable[object] = (),
        training_step: TrainingStep | None = None,
        merged_micro_batches: int = 1,
    ) -> None:
        parts = dict[str, Any](model=model, loss_fn=loss_fn, evaluator=evaluator, logger=logger, precision=precision)
        parts |= dict(checkpoint_manager=checkpoint_manager, callbacks=callbacks, training_step=training_step)
        unsupported.refuse_wrong_parts(parts)
        config = SpeedtronicConfig() if config is None else config
        self.config = SpeedtronicConfig.from_dict(config) if isinstance(config, dict) else config.validate()
        given = optimizer, scheduler, training_step, evaluator, merged_micro_batches
        self.optimizer, self.scheduler = unsupported.drivable(self.config, *given)
        self._new_updater = partial(updater_for, training_step)
        self.model, self.dataloader = model, dataloader
        self._group, self.device = join_group(self.config.parallel, device)
        self._micro_batches = share_updates(self.config, self._group, model, dataloader, self.optimizer)
        self.logger = logger_of_rank(self._group, logger, self.config)
        self.precision = precision or resolve_precision(self.config.precision, self.device, warn=self.logger.warning)
        self.checkpoint_manager = checkpoint_manager
        self.coordinator = coordinator
        configured = self.config.data.max_steps or self.config.run.max_steps
        self.max_steps = configured if max_steps is None else max_steps
        self.shape_report = shape_report
        self.step = start_step
        self._evaluator = evaluator
        freezing = freezing_schedule(model, self.config.optimizer, self.optimizer)
        self._callbacks = Callbacks([*callbacks, *freezing], warn=self.logger.warning)
        self._lock_directory = lock_directory.absolute() if lock_directory is not None else None
        self._on_lock = on_lock
        self._state = TrainerState(dataloader, metadata or {}, self.config.eval, self._group, warn=self.logger.warning)
        parts |= {"dataloader": dataloader, "optimizer": self.optimizer, "scheduler": scheduler}
        parts |= dict(coordinator=coordinator, callbacks=callbacks or None, metadata=metadata)
        for problem in (*unused_keys(self.config, parts), *unsupported.weights_elsewhere(model, self.optimizer)):
            self.logger.warning(problem)
        loss_fn = loss_fn if loss_fn is not None else loss_by_name(self.config.loss)
        lend_loss(evaluator, loss_fn)
        self._merged = check_merging(model, loss_fn, self._micro_batches, merged_micro_batches)
        self._forward = Forward(model, self.precision, loss_fn=loss_fn, warn=self.logger.warning)
        self._count = partial(batch_size_and_tokens, once=Once(self.logger.warning))
        self._parts = PartsSetApart(model, inform=self.logger.info, warn=self.logger.warning)
        self._fit: Fit | None = None
        if self.config.gradient_checkpointing:
            enable_gradient_checkpointing(model, self.logger)
        passes = self._micro_batches // self._merged
        self._compilation = Compilation(model, self.config, self.logger, self.device, passes, loss_fn)

    @property
    def samples(self) -> int:
        """Cumulative number of samples trained on."""
        self._settle()
        return self._state.counters.samples

    @property
    def tokens(self) -> int:
        """Cumulative number of tokens trained on."""
        self._settle()
        return self._state.counters.tokens

    @property
    def averaged_model(self) -> nn.Module | None:
        """A copy of the model with the averaged weights of `config.optimizer.ema`, to read from and not to train.

        It is in evaluation mode, and training continues to change it. None without an average, and before the first
        `fit` or `resume`, where the average starts.
        """
        return self._state.average.model() if self._state.average is not None else None

    # ------------------------------------------------------------------ the loop

    def fit(self, max_steps: int | None = None) -> TrainResult:
        """Train until the global step reaches the target, and return what happened.

        The target is `max_steps`, else the constructor's, else the config's; a run past it trains nothing. Ctrl-C,
        SIGTERM and SIGHUP finish the current step and end the run with a checkpoint. What a callback raises ends it
        too, after a checkpoint that was due.

        Raises:
            ConfigError: the target is not positive or beyond the scheduler's end, or `optimizer.ema` cannot copy it.
            RunLockedError: another process is training in this folder.
            NonFiniteError: a loss or gradient is not finite, and `run.on_nonfinite` is stop.
            ScalerOverflowError: the gradient scaler skipped too many updates in a row.
            RankError: another rank has gone.
        """
        with ExitStack() as stack, advice_if_out_of_memory(self.config, self.device):
            fit = self._begin(max_steps, stack)
            self._validate_shapes()
            self._start_coordinator(fit, stack)
            self._skip_finished_work(fit)
            self._state.start_average(self)
            fit.announce(self, self._micro_batches)
            # The average has started by now: a callback may freeze weights again that were averaged before the save.
            fit.between.begin()
            fit.reporter.begin(compiles=self._compilation.model is not None)
            while fit.wants_more(self.step):
                if self._train_step(fit):
                    self._act_between_steps(fit)
            return self._finish(fit)

    train = fit

    def _begin(self, max_steps: int | None, stack: ExitStack) -> Fit:
        """Lock the folders, put the model on the device, and build what this call of `fit` needs."""
        requested = self.max_steps if max_steps is None else max_steps
        if not isinstance(cast(object, requested), Integral) or requested <= 0:
            raise ConfigError(f"max_steps must be positive and whole, not {requested!r}")
        unsupported.refuse_exhausted(self.scheduler, requested - self.step)
        unsupported.refuse_autocast(self.device)
        leads = self._group.rank == 0
        manager = self.checkpoint_manager if leads else None
        checkpoints = manager.directory if manager is not None and manager.enabled else None
        saves = check_alike(self._group, checkpoints is not None, self._evaluator)
        for folder in filter(None, (self._lock_directory if leads else None, checkpoints)):
            stack.enter_context(RunLock(folder))
        if manager is not None and isinstance(self.logger, MetricLogger):  # a user's own may have no such attribute
            self.logger.run_id = manager.run_id
        if self._on_lock is not None and leads:
            self._on_lock()
        use_device(self.device, self.config.precision.tf32)
        self.model.to(self.device)
        self._parts.train()
        lend_loss(self._evaluator, self._forward.loss_fn)
        if uninitialized(self.model):
            initialize(self.model, lambda: self._forward.call(self.model, self._move_batch(self._state.batches.peek())))
        share_weights(self.model, self._group)
        self.coordinator = share_coordinator(self.coordinator, self._group, self.model, self.config)
        self._state.randomize_rank()
        scaler = self._state.new_scaler(self.precision)
        saver = None
        if saves:
            # A state that a checkpoint cannot hold is an error now, and not at the first save hours later.
            check(self.state_dict())
            background = self.config.checkpoint.background
            saver = CheckpointSaver(manager, self.logger, background=background, group=self._group)
            stack.callback(saver.close)
        length, ranks = self.config.data.block_size, self._group.size
        utilisation = flop_utilisation(self.model, self.device, self.precision.dtype, length, ranks)
        target = max(self.step, requested)
        every = getattr(self.logger, "every_steps", 1)  # a user's own logger may have no cadence: it gets every step
        reporter = StepReporter(self.logger, self._state.counters, self.device, utilisation, target=target, every=every)
        signals = stack.enter_context(SignalWatch(self._group))
        self._fit = fit = Fit(
            first_step=self.step,
            target=target,
            updater=self._new_updater(
                self.model,
                compilation=self._compilation,
                forward=self._forward,
                move_batch=self._move_batch,
                optimizer=self.optimizer,
                scaler=scaler,
                group=self._group,
                micro_batches=self._micro_batches,
                config=self.config,
                logger=self.logger,
                merged=self._merged,
            ),
            readback=Readback(self.device, every),
            reporter=reporter,
            saver=saver,
            coordinator=with_defaults(self.coordinator, self.config) if self.coordinator is not None else None,
            signals=signals,
            between=BetweenSteps(
                self,
                target=target,
                callbacks=self._callbacks,
                evaluator=self._evaluator,
                monitor=self._state.monitor,
                saver=saver,
                group=self._group,
                signals=signals,
                reporter=reporter,
                settle=self._settle,
                state_dict=self.state_dict,
            ),
            show_step=getattr(self.logger, "show_step", lambda step: None),
            log_last_step=getattr(self.logger, "log_last_step", lambda: None),
        )
        stack.callback(self._leave)
        return fit

    def _leave(self) -> None:
        """Report the steps before a failure, and keep the scaler's state for the next `fit`, which makes a new one."""
        # The device may be what failed. Then the numbers are lost; the error that is on its way is what matters.
        with suppress(Exception):
            self._settle()
        if self._fit is not None:
            self._fit.between.close()
            self._fit.updater.close()
            if self._fit.updater.scaler.is_enabled():
                self._state.scaler = self._fit.updater.scaler.state_dict()
        self._fit = None

    def _validate_shapes(self) -> None:
        if self.shape_report is None:
            config = with_known_sizes(self.config)
            self.shape_report = validate_startup_shapes(config, self.model, self.device, self.precision, self.logger)

    def _start_coordinator(self, fit: Fit, stack: ExitStack) -> None:
        if fit.coordinator is not None:
            stack.callback(fit.coordinator.stop)
            start_with_state(fit.coordinator, self._state.coordinator)
            self._state.coordinator = None

    # ------------------------------------------------------------------ one global step

    def _train_step(self, fit: Fit) -> bool:
        """Run one global step; false when the gradient scaler skipped its update."""
        self._group.note(f"step {self.step + 1}, its data")
        batches = fit.updater.take(self._state.batches)
        self._group.note(f"step {self.step + 1}")
        sizes = [self._count(batch) for batch in batches if batch is not None]
        work = fit.exchange(self._group, self.step + 1, batches, sizes)
        self._parts.stay_in_training()
        loss, norm, bad, applied = fit.updater.run(batches, self.step + 1, lambda: work().weight)
        fit.act_on(work())
        if fit.updater.guard.refused and self.config.run.on_nonfinite == "stop":
            # The host knows already, so the run ends here and not at the next log.
            self._settle()
            self._refuse(self.step + 1, loss.item(), norm.item())
        fit.updater.clear_gradients()
        if not applied:
            return False
        # The update is done. Advance the schedule, the step, the coordinator and the average of the weights.
        group = self.optimizer.param_groups[0]
        lr_applied = float(group["lr"])
        advance(self.scheduler)
        self.step += 1
        samples, tokens = work().samples, work().tokens
        if (coordinator := fit.coordinator) is not None:
            coordinator.count(samples, tokens)
            if coordinator.after_optimizer_step(self.model, self.step) and coordinator.reset_inner_optimizer:
                self.optimizer.state.clear()
        # Of the weights that the next update starts from, which the coordinator may have replaced just now.
        self._state.update_average(self, bad if self.config.run.on_nonfinite != "ignore" else None)
        update = Update(
            step=self.step,
            lr=float(group["lr"]),
            lr_applied=lr_applied,
            samples=samples,
            tokens=tokens,
            micro_batches=len(batches),
            loss=loss,
            grad_norm=norm,
            bad=bad,
            at=time.perf_counter(),
            losses=fit.updater.losses,
        )
        fit.between.view.note_update(update)
        self._report(fit, fit.readback.add(update))
        fit.show_step(self.step)
        self._skip_finished_work(fit)
        return True

    def _move_batch(self, batch: Any) -> Any:
        return move_batch(batch, self.device)

    def _skip_finished_work(self, fit: Fit) -> None:
        """Skip the work that the coordinator knows to be done: its data, its steps, its learning rates."""
        position = fit.coordinator.continue_at() if fit.coordinator is not None else None
        if position is None or position.step <= self.step:
            return
        self._settle()
        steps = position.step - self.step
        what_follows = "training continues after them" if position.step < fit.target else "nothing is left to train"
        self.logger.info(f"steps {self.step + 1} to {position.step} were trained before: {what_follows}")
        self._state.batches.skip(steps * self._micro_batches)
        move_schedule(self.optimizer, self.scheduler, steps)
        self.step = position.step
        fit.reporter.move_to(position.samples, position.tokens)

    # ------------------------------------------------------------------ after a step

    def _settle(self) -> None:
        """Wait for the numbers of all updates so far, and report them. Raises for one that is not finite."""
        if self._fit is not None:
            self._report(self._fit, self._fit.readback.drain())

    def _report(self, fit: Fit, arrived: list[Numbers]) -> None:
        if arrived:
            self._forward.settle()
            fit.reporter.read_device()
        for numbers in arrived:
            if numbers.bad:
                self._refuse(numbers.update.step, numbers.loss, numbers.grad_norm)
            fit.reporter.report(numbers)

    def _refuse(self, step: int, loss: float, norm: float) -> None:
        policy = self.config.run.on_nonfinite
        self.logger.emit("nonfinite", {"step": step, "loss": loss, "grad_norm": norm, "action": policy})
        if policy != "stop":
            return
        # By now the loop may have counted later updates too. None of them was applied, so none is counted.
        move_schedule(self.optimizer, self.scheduler, step - 1 - self.step)
        self.step = step - 1
        no_target = self.config.data.loss_normalization != "tokens" and self._forward.met_no_target()
        raise nonfinite_error(step, loss=loss, norm=norm, no_target=no_target)

    def _act_between_steps(self, fit: Fit) -> None:
        """Let the callbacks act, evaluate, and save what the others did and measured, even if one of them fails."""
        try:
            fit.between.tell_of_step()
            last = not fit.wants_more(self.step)
            if last:
                # The last step, so its line comes now, before those of its evaluation and its checkpoint.
                self._settle()
                fit.log_last_step()
                self._hand_over(fit)
            fit.between.evaluate_if_due(last=last)
        except NonFiniteError:
            # An update was found to be not finite when its numbers were read. Nothing of it is saved.
            raise
        except BaseException:
            fit.between.save_if_due()
            raise
        fit.between.save_if_due()

    def _hand_over(self, fit: Fit) -> None:
        if fit.coordinator is not None:
            # A step that is not finite raises here, before other machines get it.
            self._settle()
            fit.coordinator.hand_over()

    def _finish(self, fit: Fit) -> TrainResult:
        """Evaluate and save a last time, and say what the run came to."""
        self._settle()
        fit.log_last_step()
        self._hand_over(fit)
        fit.between.finish(made_progress=self.step > fit.first_step)
        if (signal := fit.signals.received) is not None:
            self.logger.emit("interrupted", {"step": self.step, "signal": signal.name})
        return fit.reporter.end(
            self.step,
            eval_loss=fit.between.eval_loss,
            interrupted_by=None if signal is None else int(signal),
            save_error=fit.saver.error if fit.saver is not None else None,
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as a tree that a `CheckpointManager` can save."""
        self._settle()
        fit, callbacks = self._fit, self._callbacks.state_dict()
        if fit is None:
            return self._state.tree(self, scaler=self._state.scaler, callbacks=callbacks, loss=None, eval_loss=None)
        return self._state.tree(
            self,
            scaler=fit.updater.scaler.state_dict(),
            callbacks=callbacks,
            loss=fit.reporter.final_loss,
            eval_loss=fit.between.eval_loss if fit.between.evaluated_at == self.step else None,
        )

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpointed state.

        Scaler, coordinator and callbacks are restored when `fit` starts them, all else at once. Only model, optimizer
        and counters must be there: another part that the state lacks stays as it is, and an average starts with the
        saved weights. The saved precision and config are informational.

        Raises:
            CheckpointError: the state does not fit this model, optimizer or data; the tensors are named.
            ConfigError: `optimizer.ema` is on and the model cannot be copied.
        """
        self._state.load(self, state)
        self._callbacks.load_state_dict(state.get("callbacks"))


TrainingEngine = SpeedtronicTrainer = Trainer
