"""Updates by a function of the user's own, with several losses or optimizers, as a GAN has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError, ModelError, NonFiniteError
from speedtronic.optimizers.optimizer_set import OptimizerSet
from speedtronic.trainer.nonfinite import NonFiniteGuard
from speedtronic.trainer.profiling import phase
from speedtronic.trainer.step import Outcome, Updater, parameters_of

TrainingStep = Callable[[nn.Module, Any, int], Any]
"""`training_step(model, batch, step)`: of a micro batch on the device, for the update that makes global step `step`.

It returns the mean loss. Or it is a generator, and yields one loss after the other, with several optimizers each as
`(name, loss)`. The named optimizer takes its step when all micro batches of the update have yielded that loss. Then the
function goes on, and sees the weights after that step. A loss gives gradients to the parameters of its optimizer alone.
"""


def updater_for(training_step: TrainingStep | None, model: nn.Module, **parts: Any) -> Updater:
    """What runs the updates of one `fit`."""
    if training_step is None:
        return Updater(model, **parts)
    return StepwiseUpdater(training_step, model, **parts)


class StepwiseUpdater(Updater):
    """Runs updates by a `training_step`.

    An update comes to the sum of its losses, and to the 2-norm of all gradients together. The host reads after each
    loss whether it is finite: what follows must not be computed from weights that it has spoilt.

    Raises:
        ConfigError: the run has several processes.
    """

    def __init__(self, training_step: TrainingStep, model: nn.Module, **parts: Any) -> None:
        super().__init__(model, **parts)
        if self._group.size > 1:
            raise ConfigError("training_step: is for a run of one process; leave it out, or train with one")
        self._training_step = training_step
        config: SpeedtronicConfig = parts["config"]
        self._policy = config.run.on_nonfinite
        optimizer = self._optimizer
        self._optimizers = optimizer.optimizers if isinstance(optimizer, OptimizerSet) else {"": optimizer}
        self._guards = {name: NonFiniteGuard(self._policy, one, on_host=True) for name, one in self._optimizers.items()}

    def run(self, batches: Sequence[Any], step: int, weight: Callable[[], int] | None = None) -> Outcome:
        """Run the update that makes global step `step`.

        Raises:
            ModelError: what the function gave is no loss, or names no optimizer; or the micro batches differ in which
                optimizers they name.
            NonFiniteError: a loss or gradient is not finite under `stop`, and other optimizers have stepped before it.
            ScalerOverflowError: the gradient scaler skipped too many updates in a row.
        """
        self.guard.keep_buffers()
        self.guard.refused = False
        given = [self._given(batch, step) for batch in batches]
        done: list[Outcome] = []
        self.losses = {}
        while (named := self._accumulate_next(given)) is not None:
            name, loss = named
            optimizer, guard = self._optimizers[name], self._guards[name]
            with phase("update"):
                outcome = self._update(loss, step, optimizer, guard)
                optimizer.zero_grad(set_to_none=True)
            if not outcome.applied and not done:
                return outcome  # nothing was changed, so the step is made again with the next batches
            done.append(outcome)
            if name:
                self.losses[name] = self.losses.get(name, 0.0) + loss.item()
            if guard.refused:
                self.guard.put_buffers_back()
                self.guard.refused = True
                if len(done) > 1 and self._policy == "stop":
                    self._stop(step, name, outcome)
                break
        if not done:
            raise ModelError("training_step: it has given no loss; return one, or yield at least one")
        total = done[0].loss
        for outcome in done[1:]:
            total = total + outcome.loss
        norms = torch.stack([outcome.grad_norm.to(total.device) for outcome in done])
        return Outcome(total, torch.linalg.vector_norm(norms), done[-1].bad, applied=True)

    def _stop(self, step: int, name: str, outcome: Outcome) -> None:
        loss, norm = outcome.loss.item(), outcome.grad_norm.item()
        self._logger.emit("nonfinite", {"step": step, "loss": loss, "grad_norm": norm, "action": self._policy})
        raise NonFiniteError(
            f"step {step}: the loss {f'of {name} ' * bool(name)}is {loss:g} and the gradient norm {norm:g}, and "
            "optimizers before it have made their step: continue from the last checkpoint. Lower the learning rate, "
            "set optimizer.grad_clip, or look at the data; run.on_nonfinite: skip leaves such updates out",
            step=step,
        )

    def _given(self, batch: Any, step: int) -> Iterator[Any]:
        """What the function gives for one micro batch, one after the other."""
        given = self._training_step(self._model, self._move_batch(batch), step)
        if isinstance(given, Iterator):
            yield from given
        else:
            yield given

    def _accumulate_next(self, given: Sequence[Iterator[Any]]) -> tuple[str, Tensor] | None:
        """Take the next loss of each micro batch backward: whose it is, and their mean. None where there is no more."""
        whose: str | None = None
        total: Tensor | None = None
        for number, of_batch in enumerate(given):
            with phase("forward"), self._forward.autocast():
                one = next(of_batch, None)
            name, loss = (None, None) if one is None else self._checked(one)
            if number and name != whose:
                raise ModelError(
                    f"training_step: the first micro batch of this update gave {_loss_of(whose)}, and another one "
                    f"{_loss_of(name)} at the same place; all of an update must give the same losses in the same order"
                )
            whose = name
            if loss is None:
                continue
            assert name is not None, "they come together"
            loss = loss / len(given)
            trained = [p for p in parameters_of(self._optimizers[name]) if p.requires_grad]
            with phase("backward"):
                self.scaler.scale(loss).backward(inputs=trained)  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        return None if whose is None or total is None else (whose, total)

    def _checked(self, given: Any) -> tuple[str, Tensor]:
        """The name of the optimizer and the loss, of what the function gave."""
        is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str)
        name, loss = given if is_pair else ("", given)
        if name not in self._optimizers:
            known = ", ".join(repr(one) for one in self._optimizers)
            said = f"names {name!r}" if name else "names none"
            remedy = (
                f"yield pairs of one of {known} and a loss" if "" not in self._optimizers else "yield the loss alone"
            )
            raise ModelError(
                f"training_step: a loss must name the optimizer that it is for, and this one {said}; {remedy}"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or loss.is_complex():
            found = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(
                f"training_step: a loss must be one real number with a gradient, not {found}; take the mean of the "
                "values, and compute it from what the model returned"
            )
        return name, loss.reshape(())


def _loss_of(name: str | None) -> str:
    return "none" if name is None else f"one for {name!r}" if name else "one"
