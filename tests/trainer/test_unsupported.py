"""What the loop cannot drive is refused at construction, and no weight has changed."""

from __future__ import annotations

import logging
from io import StringIO
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.optimizers import CautiousOptimizer
from speedtronic.trainer import Trainer
from tests.support.models import SCALED

BATCHES = [(torch.ones(4, 2), torch.ones(4, 1))]


def trainer(optimizer: Any, model: torch.nn.Module, scheduler: Any = None) -> Trainer:
    return Trainer(model, optimizer, BATCHES, device="cpu", scheduler=scheduler, loss_fn=mean_square)


def with_training_step(model: torch.nn.Module, optimizer: Any, scheduler: Any = None, **options: Any) -> Trainer:
    return Trainer(
        model, optimizer, BATCHES, device="cpu", scheduler=scheduler, training_step=lambda *_: torch.ones(()), **options
    )


def mean_square(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, batch[1])


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(2, 1)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_that_needs_a_closure_is_refused_beside_a_scaler_and_a_training_step(
    model: torch.nn.Linear,
) -> None:
    lbfgs = torch.optim.LBFGS(model.parameters())
    for optimizer in (lbfgs, CautiousOptimizer(lbfgs)):
        scaled = Trainer(model, optimizer, BATCHES, device="cpu", precision=SCALED, loss_fn=mean_square)
        with pytest.raises(ConfigError, match=r"^precision: \w+ calls the model several times .*use bf16 or fp32"):
            scaled.fit(1)
    for several in (lbfgs, {"one": lbfgs}):
        with pytest.raises(
            ConfigError, match=r"^optimizer: LBFGS calls the model several times in one step, and a trai"
        ):
            with_training_step(model, several)


@pytest.mark.parametrize(
    ("several", "shown"), [(lambda one: [one, one], "list of 2"), (lambda one: {"all": one}, "dict of 1")]
)
def test_several_optimizers_are_refused(several: Any, shown: str, model: torch.nn.Linear) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer: a {shown} cannot be used; .*HybridOptimizer; with a training"):
        trainer(several(sgd(model)), model)


def test_what_is_no_optimizer_is_refused(model: torch.nn.Linear) -> None:
    for wrong, shown in ((torch.optim.AdamW, "the class AdamW"), (None, "a NoneType"), (model, "a Linear")):
        with pytest.raises(ConfigError, match=rf"must be a torch\.optim\.Optimizer, not {shown}"):
            trainer(wrong, model)


def test_a_scheduler_of_another_optimizer_is_refused(model: torch.nn.Linear) -> None:
    optimizer, other = sgd(model), sgd(model)
    step = lr_scheduler.StepLR(other, 1)
    for wrong in (step, lr_scheduler.ChainedScheduler([step]), lr_scheduler.SequentialLR(other, [step], [])):
        with pytest.raises(ConfigError, match=r"^scheduler: the \w+ was made for another optimizer"):
            trainer(optimizer, model, wrong)
    trainer(CautiousOptimizer(optimizer), model, lr_scheduler.StepLR(optimizer, 1))


def test_a_scheduler_that_needs_the_loss_is_refused(model: torch.nn.Linear) -> None:
    optimizer = sgd(model)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    chained = lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 1)])
    chained._schedulers.append(plateau)  # type: ignore[arg-type]  # torch would take it in this way
    with pytest.raises(ConfigError, match=r"^scheduler: ReduceLROnPlateau needs metrics at each .*by itself"):
        trainer(optimizer, model, chained)
    for wrong, shown in (
        ([plateau], "a list of 1"),
        (lr_scheduler.LambdaLR, "not the class LambdaLR"),
        (0.1, "not a float"),
    ):
        with pytest.raises(ConfigError, match=rf"^scheduler: .*{shown}"):
            trainer(optimizer, model, wrong)


def test_a_scheduler_that_would_end_before_the_run_is_refused_before_the_first_update(model: torch.nn.Linear) -> None:
    optimizer = sgd(model)
    before = model.weight.clone()
    one_cycle = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    runs = trainer(optimizer, model, one_cycle)
    with pytest.raises(ConfigError, match=r"OneCycleLR has 4 of its 4 steps left, and 5 updates"):
        runs.fit(5)
    assert torch.equal(model.weight, before)
    assert runs.fit(4).steps == 4
    with pytest.raises(ConfigError, match=r"OneCycleLR has 0 of its 4 steps left, and 1 updates"):
        runs.fit(5)


def test_torchs_own_optimizers_and_schedulers_are_taken(model: torch.nn.Linear) -> None:
    kinds = (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam)
    for kind in kinds:
        optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[operator]
        warm = lr_scheduler.LinearLR(optimizer)
        for scheduler in (
            lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
            lr_scheduler.ChainedScheduler([warm, lr_scheduler.ExponentialLR(optimizer, 0.9)]),
            lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.StepLR(optimizer, 2)], [2]),
        ):
            trainer(optimizer, model, scheduler)


class OneMethod:
    def on_step_end(self, run: Any) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": torch.nn.Linear}, "a torch.nn.Module, not the class Linear"),
        ({"model": "gpt2"}, "a torch.nn.Module, not a str"),
        ({"loss_fn": "mse"}, "a function of the model's output and the batch, not a str"),
        ({"loss_fn": torch.nn.MSELoss}, "not the class MSELoss"),
        ({"loss_fn": lambda output: output.mean()}, "not a function"),
        ({"evaluator": BATCHES}, "makes one of batches, not a list"),
        ({"evaluator": lambda model: {"loss": 1.0}}, "not a function"),
        ({"logger": logging.getLogger()}, "a speedtronic.MetricLogger, or act as one, not a RootLogger"),
        ({"precision": "bf16"}, "a plan of speedtronic.resolve_precision"),
        ({"checkpoint_manager": "runs"}, r"a speedtronic.CheckpointManager\(folder\), not a str"),
        ({"callbacks": OneMethod()}, "a list of callbacks, not a OneMethod"),
        ({"callbacks": {"mine": OneMethod()}}, "a list of callbacks, not a dict"),
    ],
)
def test_a_part_of_another_kind_is_refused_with_what_is_needed(wrong: Any, said: str, model: torch.nn.Linear) -> None:
    parts = {"model": model, "loss_fn": mean_square} | wrong
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"^{name}: must be .*{said}"):
        Trainer(parts.pop("model"), sgd(model), BATCHES, device="cpu", **parts)


@pytest.mark.parametrize("target", [2.5, "2"])
def test_a_target_that_is_no_whole_number_is_refused(target: Any, model: torch.nn.Linear) -> None:
    with pytest.raises(ConfigError, match="max_steps must be positive and whole"):
        trainer(sgd(model), model).fit(target)


def test_a_fit_inside_autocast_is_refused_since_its_casts_of_the_weights_grow_old(model: torch.nn.Linear) -> None:
    before = model.weight.clone()
    ours = trainer(sgd(model), model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ConfigError, match=r"outside, and set precision\.mode"):
        ours.fit(2)
    assert torch.equal(model.weight, before)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert ours.fit(2).steps == 2


def test_weights_that_are_trained_and_not_in_the_model_are_said(model: torch.nn.Linear) -> None:
    criterion = torch.nn.Linear(1, 1)

    def warnings_of(*modules: torch.nn.Module) -> str:
        stream = StringIO()
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
        logger = MetricLogger(stream=stream)
        Trainer(model, optimizer, BATCHES, device="cpu", loss_fn=mean_square, logger=logger)
        return stream.getvalue()

    assert warnings_of(model) == ""
    assert "trains 2 tensors that are not in the model: no checkpoint" in warnings_of(model, criterion)
    assert "has no weight of this model, so nothing of it is trained" in warnings_of(criterion)


def test_a_plateau_without_evaluations_or_with_another_mode_is_refused(model: torch.nn.Linear) -> None:
    optimizer = sgd(model)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    evaluated = {"evaluator": lambda model, should_stop: {"loss": 1.0}}
    for config, options in (({"eval": {"every_steps": 1}}, {}), ({}, evaluated)):
        with pytest.raises(
            ConfigError, match=r"^scheduler: ReduceLROnPlateau lowers .* and this run has none: set eval"
        ):
            Trainer(model, optimizer, BATCHES, device="cpu", scheduler=plateau, config=config, **options)  # type: ignore[arg-type]
    config = {"eval": {"every_steps": 1, "monitor": "accuracy", "mode": "max", "metrics": ACCURACY}}
    with pytest.raises(
        ConfigError, match=r"^scheduler: ReduceLROnPlateau has mode min, and of eval\.monitor: accuracy the "
    ):
        Trainer(model, optimizer, BATCHES, device="cpu", scheduler=plateau, config=config, **evaluated)  # type: ignore[arg-type]


ACCURACY = [{"name": "accuracy", "factory": "torchmetrics:Accuracy"}]


def test_schedulers_of_several_optimizers_are_named_as_these_are(model: torch.nn.Linear) -> None:
    optimizer = sgd(model)
    step = lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(
        ConfigError, match=r"^scheduler: must be a dict .*names of those that it is for \(one\), not a StepLR"
    ):
        with_training_step(model, {"one": optimizer}, step)
    with pytest.raises(ConfigError, match=r"^scheduler: there is no optimizer two; the optimizers are one"):
        with_training_step(model, {"one": optimizer}, {"two": step})
    with pytest.raises(ConfigError, match=r"^scheduler: must be a torch.optim.lr_scheduler.LRScheduler, not a float"):
        with_training_step(model, {"one": optimizer}, {"one": 0.1})
    with pytest.raises(ConfigError, match=r"^optimizer: must be a torch.optim.Optimizer, not a float"):
        with_training_step(model, {"one": 0.1})
    with_training_step(model, {"one": optimizer}, {"one": step})


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"compile": True}, "compile"),
        ({"ooo_backprop": True}, "ooo_backprop"),
        ({"data": {"loss_normalization": "tokens"}}, "data.loss_normalization: tokens"),
    ],
)
def test_what_needs_the_loop_to_call_the_model_is_refused_beside_a_training_step(
    config: dict[str, Any], shown: str, model: torch.nn.Linear
) -> None:
    with pytest.raises(ConfigError, match=rf"^{shown}: a training_step calls the model in its own way"):
        with_training_step(model, sgd(model), config=config)


@pytest.mark.parametrize("wrong", [lambda model, batch: torch.ones(()), torch.nn.MSELoss, "train"])
def test_a_training_step_that_cannot_be_called_is_refused(wrong: Any, model: torch.nn.Linear) -> None:
    with pytest.raises(
        ConfigError, match=r"^training_step: must be a function of the model, a batch and the step, not "
    ):
        Trainer(model, sgd(model), BATCHES, device="cpu", training_step=wrong)
