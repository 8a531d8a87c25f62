"""What a checkpoint holds of a run, and how a run resumes from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.checkpoint.sharing import gather_states
from speedtronic.config import EvalConfig, SpeedtronicConfig
from speedtronic.data import BatchStream
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.loader import TokenLoader
from speedtronic.data.loading.sampler import derive_seed
from speedtronic.errors import CheckpointError, DataError
from speedtronic.metrics import MetricLogger
from speedtronic.model.wrappers import unwrapped
from speedtronic.optimizers.optimizer_set import OptimizerSet
from speedtronic.precision import PrecisionPlan, make_grad_scaler
from speedtronic.ranks import Group
from speedtronic.trainer.ema import WeightAverage
from speedtronic.trainer.monitor import Monitor
from speedtronic.trainer.reporting import Counters
from speedtronic.trainer.schedule import Schedule, recompute_learning_rates
from speedtronic.trainer.sync import SyncCoordinator


class Run(Protocol):
    """The public attributes of a `Trainer` that a checkpoint is made of."""

    config: SpeedtronicConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Schedule | None
    coordinator: SyncCoordinator | None
    device: torch.device
    precision: PrecisionPlan
    logger: MetricLogger
    step: int

    @property
    def averaged_model(self) -> nn.Module | None: ...


class TrainerState:
    """The rest of what a checkpoint holds, and the checkpoint's tree of both.

    Attributes:
        batches: the stream of batches, which knows its position.
        counters: cumulative samples and tokens.
        average: the average of the weights; None without `optimizer.ema`, and before it starts.
        scaler: the state of the gradient scaler between two calls of `fit`.
        coordinator: the saved state that the next `fit` gives to the coordinator.
        monitor: the best evaluation so far, and how many there were since.
    """

    def __init__(
        self,
        dataloader: Any,
        metadata: Mapping[str, Any],
        evaluation: EvalConfig,
        group: Group,
        *,
        warn: Callable[[str], None],
    ) -> None:
        self._metadata = dict(metadata)
        self._group = group
        self._keeps_position = isinstance(dataloader, TokenLoader | StreamLoader)
        self._randomized = False
        self.monitor = Monitor(evaluation)
        self.batches = BatchStream(dataloader, capture_rng=capture_rng_state, restore_rng=restore_rng_state, warn=warn)
        self.counters = Counters()
        self.average: WeightAverage | None = None
        self._said_what_it_lacks = False
        self.scaler: dict[str, Any] | None = None
        self.coordinator: dict[str, Any] | None = None

    def new_scaler(self, plan: PrecisionPlan) -> torch.amp.GradScaler:
        """A gradient scaler that continues from the state of the one before it."""
        scaler = make_grad_scaler(plan)
        if self.scaler:
            scaler.load_state_dict(self.scaler)
        self.scaler = None
        return scaler

    def randomize_rank(self) -> None:
        """Give each rank random numbers of its own, once for a run. Rank 0 keeps those that one process would have."""
        if self._group.rank and not self._randomized:
            seed_rank(self._group.rank)
        self._randomized = True

    def tree(
        self,
        run: Run,
        *,
        scaler: dict[str, Any] | None,
        callbacks: dict[str, Any] | None,
        loss: float | None,
        eval_loss: float | None,
    ) -> dict[str, Any]:
        """What `Trainer.state_dict` returns. `scaler` and the losses are those of the `fit` that is running, if any."""
        coordinator = run.coordinator.state_dict() if run.coordinator is not None else None
        # What differs between ranks; all else is alike. Rank 0's stands where that of one process does.
        first, *others = gather_states(
            self._group, {"rng": capture_rng_state(), "data": self.batches.state_dict(), "step": run.step}
        )
        if wrong := [rank for rank, other in enumerate(others, start=1) if other["step"] != run.step]:
            raise CheckpointError(f"ranks {wrong} are at another step than rank 0: they cannot be saved as one state")
        return {
            **self._metadata,
            "step": run.step,
            "samples": self.counters.samples,
            "tokens": self.counters.tokens,
            "model": unwrapped(run.model).state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scheduler": run.scheduler.state_dict() if run.scheduler is not None else None,
            "scaler": scaler or None,
            "ema": self.average.state_dict() if self.average is not None else None,
            "coordinator": coordinator if coordinator is not None else self.coordinator,
            "callbacks": callbacks,
            "rng": first["rng"],
            "data": first["data"],
            **({"ranks": others} if others else {}),
            "metrics": {"loss": loss, "eval_loss": eval_loss, "monitored": self.monitor.measured_at(run.step)},
            "monitor": self.monitor.state_dict(),
            "precision": run.precision.mode,
            "config": run.config.to_dict(redact_secrets=True),
        }

    def load(self, run: Run, state: Mapping[str, Any]) -> None:
        """What `Trainer.resume` does."""
        needed = ("model", "optimizer", "step", "samples", "tokens")
        if not isinstance(state, Mapping) or any(key not in state for key in needed):
            raise CheckpointError(
                f"cannot resume from a {type(state).__name__} that is no trainer's state. A checkpoint manager's "
                "load_latest() returns one, or None where there is no checkpoint yet; weights alone are for "
                "model.load_state_dict, or run.init_from"
            )
        run.model.to(run.device)
        model = unwrapped(run.model)
        load_model(model, state["model"])
        self.average = load_average(model, run.config.optimizer.ema, state.get("ema"), run.logger)
        load_optimizer(run.optimizer, state["optimizer"])
        if run.scheduler is not None and state.get("scheduler") is not None:
            run.scheduler.load_state_dict(dict(state["scheduler"]))
        # The saved LR may come from a schedule of another length.
        recompute_learning_rates(run.optimizer, run.scheduler)
        run.step = state["step"]
        self.counters.samples, self.counters.tokens = state["samples"], state["tokens"]
        # Scaler and coordinator do not exist yet. `fit` gives them their state when it starts them.
        self.scaler, self.coordinator = state.get("scaler"), state.get("coordinator")
        self.monitor.load_state_dict(state.get("monitor"), inform=run.logger.info)
        ranks = [state, *state.get("ranks", ())]
        rank, as_before = self._group.rank, len(ranks) == self._group.size
        if state.get("data") is not None:
            if not as_before and not self._keeps_position:
                raise DataError(
                    f"the checkpoint is of {len(ranks)} ranks, and here are {self._group.size}: only the loaders of "
                    "speedtronic.data can go on at the same sample; use one of them, or as many ranks"
                )
            # The position of rank 0 counts the samples of all ranks, so any number of ranks goes on from there.
            self.batches.load_state_dict(ranks[rank if as_before else 0]["data"])
        # Last, so that nothing above moves the random numbers of the resumed run.
        if rank < len(ranks) and ranks[rank].get("rng") is not None:
            restore_rng_state(ranks[rank]["rng"], warn=run.logger.warning)
        elif rank:
            seed_rank(rank, run.step)
        self._randomized = True

    def start_average(self, run: Run) -> None:
        """Start the average of the weights where `optimizer.ema` is on, unless there is one of these very weights."""
        model, decay = unwrapped(run.model), run.config.optimizer.ema
        if self.average is not None and not self.average.is_of(model):
            run.logger.warning("optimizer.ema: the set of trained weights has changed, so their average starts over")
            self.average = None
        if self.average is None and decay is not None:
            self.average = WeightAverage(model, decay)

    def update_average(self, run: Run, refused: Tensor | None) -> None:
        """Move the average of the weights, if there is one, as `WeightAverage.update` does."""
        if self.average is None:
            return
        self.average.update(refused)
        if not self._said_what_it_lacks and self.average.lacks_weights():
            self._said_what_it_lacks = True
            run.logger.warning(
                "optimizer.ema: weights are trained that were frozen when the average began: they are in it as they "
                "are, not averaged; freeze them in a callback's on_train_start instead, and all are averaged"
            )


def seed_rank(*parts: int) -> None:
    """Seed the generators from torch's own seed and these numbers: a rank, and the step where it begins."""
    seed = derive_seed(torch.initial_seed(), *parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load all of `state`.

    Raises:
        CheckpointError: the state is of another model. Every tensor that is missing, extra or of another shape is
            named.
    """
    own = model.state_dict()
    problems = [f"{name} is missing in the checkpoint" for name in own.keys() - state.keys()]
    problems += [f"{name} is not in this model" for name in state.keys() - own.keys()]
    problems += [
        f"{name} has shape {tuple(state[name].shape)} in the checkpoint and {tuple(own[name].shape)} in this model"
        for name in own.keys() & state.keys()
        # A lazy module takes its shape from the state.
        if isinstance(own[name], Tensor) and not is_lazy(own[name]) and own[name].shape != state[name].shape
    ]
    if problems:
        raise CheckpointError(
            "\n  ".join(["the checkpoint is of another model:", *sorted(problems)])
            + "\nGive the model the sizes that it was trained with (config.yaml in the run's folder has them), or start"
            " another run with run.init_from and run.init_strict: false, which takes what fits"
        )
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint is of another model: {error}") from error


def load_average(
    model: nn.Module, decay: float | None, state: Mapping[str, Tensor] | None, logger: MetricLogger
) -> WeightAverage | None:
    """The average of the weights (`optimizer.ema`) that the state has, or one that starts with the model's weights.

    Raises:
        CheckpointError: the average is of other weights.
        ConfigError: the model cannot be copied.
    """
    if decay is None:
        if state is not None:
            logger.warning("optimizer.ema is off: the checkpoint's average of the weights is dropped")
        return None
    average = WeightAverage(model, decay)
    if state is None:
        logger.info("optimizer.ema: the checkpoint has no average of the weights, so it starts with its weights")
    else:
        average.load_state_dict(state)
    return average


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer.

    torch would load any state whose groups have as many tensors, so algorithms and parameter names are compared first.

    Raises:
        CheckpointError: the state is of another optimizer, or of other parameters.
    """
    if isinstance(optimizer, OptimizerSet):
        saved, own = state.get("optimizers", {}), optimizer.optimizers
        if saved.keys() != own.keys():
            raise CheckpointError(
                f"the checkpoint has the optimizers {', '.join(saved) or 'of a run with one'}, and this run has "
                f"{', '.join(own)}: continue with those that wrote it, or start from its weights alone"
            )
        for name, one in own.items():
            load_optimizer(one, saved[name])
        return
    try:
        _check_algorithms(state["param_groups"], optimizer.param_groups)
        _check_names(state["param_groups"], optimizer.param_groups)
        optimizer.load_state_dict(dict(state))
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint's optimizer state does not fit this optimizer: {error}. Train with the optimizer that "
            "wrote it, or start from its weights alone"
        ) from error


def _check_algorithms(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Refuse the state of another algorithm; `HybridOptimizer` writes the algorithm into each group."""
    theirs, ours = ([group.get("algorithm") for group in groups] for groups in (saved, own))
    if theirs == ours:
        return
    if any(theirs) and any(ours):
        there, here = (", ".join(map(str, algorithms)) for algorithms in (theirs, ours))
        raise CheckpointError(
            f"the checkpoint's optimizer divides the weights as {there}, and this one as {here}: continue with the "
            "model and the optimizer options that wrote it, or start over from its weights with run.init_from"
        )
    writer = "muon" if any(theirs) else "adamw"
    raise CheckpointError(
        f"the checkpoint was written by another optimizer than this run's: continue with optimizer.name: {writer}, or "
        "start over from its weights with run.init_from"
    )


def _check_names(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Raise ValueError for the state of other parameters. Groups without names are not compared."""
    # The names of a compiled module have one more part.
    theirs, ours = (
        [[name.replace("_orig_mod.", "") for name in group.get("param_names", ())] for group in groups]
        for groups in (saved, own)
    )
    if theirs == ours or not any(theirs) or not any(ours):
        return
    there, here = ({name for group in groups for name in group} for groups in (theirs, ours))
    problems = [f"{name} was not trained there" for name in sorted(here - there)]
    problems += [f"{name} is not trained here" for name in sorted(there - here)]
    raise ValueError("; ".join(problems) or "it has the same parameters in other groups or in another order")
