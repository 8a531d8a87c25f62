"""Updates by a function of the user's own: several losses and optimizers, and all that the loop does besides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from speedtronic.checkpoint import CheckpointManager
from speedtronic.errors import CheckpointError, ConfigError, ModelError, NonFiniteError
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan
from speedtronic.ranks import SingleProcess
from speedtronic.trainer import Trainer
from speedtronic.trainer.training_step import updater_for
from tests.support.models import (
    ACCUMULATE_TWO,
    SCALED,
    Events,
    Regression,
    Silence,
    config_of,
    make_trainer,
    regression_batches,
)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def gan_step(model: Gan, batch: Any, step: int) -> Iterator[tuple[str, Tensor]]:
    real, _ = batch
    fake = model.generator(torch.randn(len(real), 2))
    told = model.discriminator(torch.cat([real, fake.detach()]))
    truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
    yield "discriminator", F.binary_cross_entropy_with_logits(told, truth)
    if step % 2 == 0:
        yield "generator", F.binary_cross_entropy_with_logits(model.discriminator(fake), torch.ones(len(real), 1))


def optimizers_of(model: Gan, kind: Any = torch.optim.AdamW) -> dict[str, torch.optim.Optimizer]:
    return {
        "discriminator": kind(model.discriminator.parameters(), lr=0.02),
        "generator": kind(model.generator.parameters(), lr=0.01),
    }


def gan_trainer(folder: Path | None = None, seed: int = 0, **options: Any) -> Trainer:
    torch.manual_seed(seed)
    model = Gan()
    optimizers = optimizers_of(model)
    options = {"config": {"run": {"max_steps": 6}, "data": ACCUMULATE_TWO}, **options}
    manager = CheckpointManager(folder, every_steps=100) if folder is not None else None
    return make_trainer(
        model,
        optimizer=optimizers,  # type: ignore[arg-type]
        scheduler={"generator": ExponentialLR(optimizers["generator"], 0.9)},
        training_step=gan_step,
        checkpoint_manager=manager,
        **options,
    )


def same(first: Any, second: Any) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # by hand, in the update without a generator
def test_a_gan_trains_as_the_loop_by_hand_does() -> None:
    clip = {"optimizer": {"grad_clip": 0.2}}
    trainer = gan_trainer(config={"run": {"max_steps": 6}, "data": ACCUMULATE_TWO, **clip})
    result = trainer.fit()

    torch.manual_seed(0)
    model = Gan()
    optimizers = optimizers_of(model)
    schedule = ExponentialLR(optimizers["generator"], 0.9)
    batches = regression_batches() * 2
    totals, each = [], []
    for step in range(1, 7):
        parts = [gan_step(model, batches[2 * step - 2 + number], step) for number in range(2)]
        total, losses = 0.0, {}
        for name in ("discriminator", "generator") if step % 2 == 0 else ("discriminator",):
            parameters = list(optimizers[name].param_groups[0]["params"])
            gradients = [torch.zeros_like(p) for p in parameters]
            for part in parts:
                named, loss = next(part)
                assert named == name
                total += loss.item() / 2
                losses[name] = losses.get(name, 0.0) + loss.item() / 2
                for gradient, more in zip(gradients, torch.autograd.grad(loss / 2, parameters), strict=True):
                    gradient += more
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(parameters, 0.2)
            optimizers[name].step()
        schedule.step()
        totals.append(total)
        each.append(losses)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-7)
    assert [record["loss"] for record in result.metrics] == pytest.approx(totals, rel=1e-5)
    for record, losses in zip(result.metrics, each, strict=True):
        assert record["losses"] == pytest.approx(losses, rel=1e-5)


def test_a_gan_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = gan_trainer(tmp_path / "straight")
    straight.fit()
    gan_trainer(tmp_path / "parts").fit(3)
    manager = CheckpointManager(tmp_path / "parts")
    resumed, saved = gan_trainer(seed=1), manager.load_latest()
    assert saved is not None
    resumed.resume(saved)
    resumed.fit()
    for part in ("model", "optimizer", "scheduler"):
        same(resumed.state_dict()[part], straight.state_dict()[part])
    assert resumed.scheduler is not None
    assert resumed.optimizer.param_groups[1]["lr"] == pytest.approx(0.01 * 0.9**6)


def test_the_state_of_other_optimizers_is_refused_by_name() -> None:
    state = gan_trainer().state_dict()
    one = make_trainer()
    with pytest.raises(CheckpointError, match="optimizer state does not fit"):
        one.resume({**one.state_dict(), "optimizer": state["optimizer"]})
    state["optimizer"]["optimizers"]["critic"] = state["optimizer"]["optimizers"].pop("discriminator")
    with pytest.raises(
        CheckpointError, match="has the optimizers generator, critic, and this run has discriminator, gen"
    ):
        gan_trainer().resume(state)


def test_one_loss_that_is_returned_trains_as_a_loss_fn_does() -> None:
    def step(model: Regression, batch: Any, step: int) -> Tensor:
        return model(*batch)["loss"]

    config = {"run": {"max_steps": 4}, "data": ACCUMULATE_TWO}
    ours, theirs = make_trainer(config=config, training_step=step), make_trainer(config=config)
    losses = [[record["loss"] for record in trainer.fit().metrics] for trainer in (ours, theirs)]
    assert ours.fit(5).metrics[0].keys() == theirs.fit(5).metrics[0].keys()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_the_step_is_that_of_the_update_and_the_batch_lies_where_the_precision_says() -> None:
    seen: list[tuple[int, torch.dtype]] = []

    def step(model: Regression, batch: Any, number: int) -> Tensor:
        loss = model(*batch)["loss"]
        seen.append((number, model.linear(batch[0]).dtype))
        return loss

    plan = PrecisionPlan("bf16", torch.bfloat16, use_scaler=False, autocast_enabled=True, device_type="cpu")
    make_trainer(config={"run": {"max_steps": 2}}, training_step=step, precision=plan).fit()
    assert seen == [(1, torch.bfloat16), (2, torch.bfloat16)]


def test_a_loss_gives_no_gradient_to_the_parameters_of_another_optimizer() -> None:
    torch.manual_seed(0)
    model = Gan()
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step(model: Gan, batch: Any, number: int) -> Iterator[tuple[str, Tensor]]:
        yield "generator", model.discriminator(model.generator(torch.randn(4, 2))).mean()

    make_trainer(
        model,
        optimizer=optimizers_of(model),  # type: ignore[arg-type]
        training_step=step,
        config={"run": {"max_steps": 2}},
    ).fit()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, start[name]) is name.startswith("discriminator")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("give", "shown"),
    [
        (lambda loss, step: loss, "names none; yield pairs of one of 'discriminator', 'generator' and a loss"),
        (lambda loss, step: iter([("critic", loss)]), "names 'critic'; yield pairs"),
        (lambda loss, step: ("generator", loss.detach()), r"not a tensor \(\) of torch.float32"),
        (lambda loss, step: ("generator", 1.0), "not float; take the mean"),
        (lambda loss, step: iter([]), "it has given no loss"),
    ],
)
def test_what_is_no_loss_of_an_optimizer_is_refused(give: Any, shown: str) -> None:
    def step(model: Gan, batch: Any, number: int) -> Any:
        return give(model.generator(torch.zeros(1, 2)).mean(), number)

    torch.manual_seed(0)
    model = Gan()
    trainer = make_trainer(model, optimizer=optimizers_of(model), training_step=step)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=rf"^training_step: .*{shown}"):
        trainer.fit(1)


def test_micro_batches_that_give_other_losses_are_refused() -> None:
    calls: list[int] = []

    def step(model: Gan, batch: Any, number: int) -> Iterator[tuple[str, Tensor]]:
        calls.append(number)
        yield ("discriminator", "generator")[len(calls) % 2], sum(p.mean() for p in model.parameters())

    torch.manual_seed(0)
    model = Gan()
    config = {"run": {"max_steps": 1}, "data": ACCUMULATE_TWO}
    trainer = make_trainer(model, optimizer=optimizers_of(model), training_step=step, config=config)  # type: ignore[arg-type]
    with pytest.raises(
        ModelError, match=r"first micro batch of this update gave one for 'generator', and another one one"
    ):
        trainer.fit()


class Two(SingleProcess):
    size = 2


def test_several_processes_are_refused_by_a_training_step_and_by_lbfgs() -> None:
    model = Regression()
    parts: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", enabled=False), "config": config_of()}
    parts |= {"group": Two(), "micro_batches": 1, "logger": MetricLogger(stream=Silence())}
    parts |= dict.fromkeys(("compilation", "forward", "move_batch"))
    for step, optimizer, shown in (
        (gan_step, torch.optim.SGD(model.parameters(), lr=0.1), "^training_step: is for a run of one process"),
        (None, torch.optim.LBFGS(model.parameters()), "^optimizer: LBFGS calls the model .* for a run of one process"),
    ):
        with pytest.raises(ConfigError, match=shown):
            updater_for(step, model, optimizer=optimizer, **parts)


def poisoned_step(bad: str) -> Any:
    def step(model: Gan, batch: Any, number: int) -> Iterator[tuple[str, Tensor]]:
        for name in ("discriminator", "generator"):
            loss = sum((p**2).mean() for p in getattr(model, name).parameters())
            yield name, loss * float("nan") if name == bad and number == 2 else loss

    return step


@pytest.mark.parametrize("kind", [torch.optim.SGD, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)])
def test_a_loss_that_is_not_finite_stops_the_run_before_a_weight_has_it(kind: Any) -> None:
    for bad, shown in (
        ("discriminator", "step 2: the loss is nan .* the weights are those of the step before"),
        ("generator", "step 2: the loss of generator is nan .*optimizers before it have made their step"),
    ):
        torch.manual_seed(0)
        model, events = Gan(), Events()
        trainer = make_trainer(
            model,
            optimizer=optimizers_of(model, kind),  # type: ignore[arg-type]
            training_step=poisoned_step(bad),
            config={"run": {"max_steps": 4}},
            events=events,
        )
        with pytest.raises(NonFiniteError, match=shown):
            trainer.fit()
        assert trainer.step == 1
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        trainer.logger.close()
        assert [event["action"] for event in events.of("nonfinite")] == ["stop"]


@pytest.mark.parametrize("bad", ["discriminator", "generator"])
def test_a_loss_that_is_not_finite_is_left_out_with_what_follows_it(bad: str) -> None:
    torch.manual_seed(0)
    model = Gan()
    steps: dict[str, int] = {"discriminator": 0, "generator": 0}
    optimizers = optimizers_of(model, torch.optim.SGD)
    for name, optimizer in optimizers.items():
        optimizer.register_step_post_hook(lambda *_, name=name: steps.update({name: steps[name] + 1}))
    trainer = make_trainer(
        model,
        optimizer=optimizers,  # type: ignore[arg-type]
        training_step=poisoned_step(bad),
        config={"run": {"max_steps": 4, "on_nonfinite": "skip"}},
    )
    assert trainer.fit().steps == 4
    assert steps == {"discriminator": 4 - (bad == "discriminator"), "generator": 3}


def test_a_scaler_skips_an_overflow_and_the_step_is_made_with_the_next_batch() -> None:
    calls: list[int] = []

    def step(model: Regression, batch: Any, number: int) -> Tensor:
        calls.append(number)
        loss: Tensor = model(*batch)["loss"]
        return loss * float("inf") if len(calls) == 2 else loss

    events = Events()
    trainer = make_trainer(config={"run": {"max_steps": 3}}, training_step=step, precision=SCALED, events=events)
    assert trainer.fit().steps == 3
    assert calls == [1, 2, 2, 3]
    trainer.logger.close()
    assert len(events.of("optimizer_step_skipped")) == 1
