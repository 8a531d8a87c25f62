"""An update reads nothing back that it can leave on the device, and survives gradients that overflow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from speedtronic.checkpoint import CheckpointManager
from speedtronic.errors import DataError, ModelError, NonFiniteError, ScalerOverflowError
from speedtronic.metrics import MetricLogger
from speedtronic.model import ReferenceTransformer
from speedtronic.scheduling import SameStream, StageStreamScheduler
from speedtronic.trainer import Trainer, step
from speedtronic.trainer.callbacks import Callback, RunView
from speedtronic.trainer.step import Updater
from tests.support.models import (
    SCALED,
    Coordinator,
    Events,
    OnlyLogits,
    Overflowing,
    Regression,
    config_of,
    make_trainer,
    regression_batches,
    successor_batches,
)


def test_the_optimizers_step_is_looked_up_at_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_trainer()
    steps: list[int] = []
    original = ours.optimizer.step
    monkeypatch.setattr(ours.optimizer, "step", lambda: (steps.append(ours.step), original()))
    ours.fit(3)
    assert steps == [0, 1, 2]


def test_out_of_order_backprop_trains_the_same_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is off, with the reason in an event; through the same queue without streams, no bit changes."""
    data = {"micro_batch_size": 4, "target_batch_size": 8}
    runs: dict[str, list[Tensor]] = {}
    for kind in ("ordinary", "on a cpu", "put off"):
        if kind == "put off":
            put_off = partial(StageStreamScheduler, lanes=SameStream(), min_gain=None)
            monkeypatch.setattr(step, "StageStreamScheduler", put_off)
        torch.manual_seed(0)
        model, events = ReferenceTransformer(vocab_size=16, block_size=8, n_layer=2, n_head=2, d_model=16), Events()
        config = config_of(data=data, ooo_backprop=kind != "ordinary", optimizer={"ema": 0.9, "grad_clip": 0.5})
        ours = make_trainer(model, successor_batches(), config=config, events=events)
        ours.fit(3)
        heard = events.of("ooo_backprop")
        enabled = {"ordinary": [], "on a cpu": [False], "put off": [True]}
        assert [payload["enabled"] for payload in heard] == enabled[kind]
        assert kind != "on a cpu" or "this run is on cpu" in heard[0]["reason"]
        assert not any("forward" in module.__dict__ for module in model.modules())
        runs[kind] = [*model.parameters()]
    for kind in ("on a cpu", "put off"):
        assert all(map(torch.equal, runs["ordinary"], runs[kind]))


def scalar_reads(accumulation: int, optimizer_kind: str, ema: float | None = None) -> list[str]:
    """Where numbers were read from tensors over four updates, as the names of the trainer's parts."""
    torch.manual_seed(0)
    model = OnlyLogits()
    kinds: Mapping[str, Callable[[], torch.optim.Optimizer]] = {
        "fused": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    data = {"micro_batch_size": 4, "target_batch_size": 4 * accumulation}
    config = config_of(data=data, optimizer={"ema": ema})
    ours = make_trainer(model, successor_batches(), optimizer=kinds[optimizer_kind](), config=config)
    ours.fit(1)
    with (
        mock.patch.object(Updater, "_guarded_update", spanned(Updater._guarded_update)),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        ours.fit(5)
    return [place(event) for event in profile.events() if event.name == "aten::_local_scalar_dense"]


def spanned(update: Any) -> Any:
    def spanning(*args: Any) -> Any:
        with torch.profiler.record_function("update"):
            return update(*args)

    return spanning


def place(event: Any) -> str:
    parents = []
    while event is not None:
        parents.append(event.name)
        event = event.cpu_parent
    if any(name.startswith("Optimizer.step") for name in parents):
        return "optimizer"
    return "update" if "update" in parents else "elsewhere"


def test_of_an_ordinary_optimizer_one_number_is_read_per_update_and_none_elsewhere() -> None:
    assert scalar_reads(4, "sgd") == ["update"] * 4


def test_of_a_fused_optimizer_nothing_is_read_outside_its_own_kernel() -> None:
    assert set(scalar_reads(4, "fused")) <= {"optimizer"}


@pytest.mark.parametrize("optimizer_kind", ["fused", "sgd"])
def test_an_average_of_the_weights_reads_nothing_more(optimizer_kind: str) -> None:
    assert scalar_reads(1, optimizer_kind, ema=0.9) == scalar_reads(1, optimizer_kind)


@pytest.mark.parametrize("optimizer_kind", ["fused", "sgd"])
def test_the_reads_per_update_do_not_grow_with_the_micro_batches(optimizer_kind: str) -> None:
    assert scalar_reads(1, optimizer_kind) == scalar_reads(8, optimizer_kind)


def test_an_overflow_leaves_step_scheduler_and_coordinator_alone() -> None:
    """Seed: "A GradScaler may skip an overflowing optimizer update; the trainer emits an event and keeps the global
    step unchanged for that attempt".
    """
    events = Events()
    torch.manual_seed(0)
    model = Overflowing(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    ours = make_trainer(
        model,
        events=events,
        optimizer=optimizer,
        scheduler=scheduler,
        precision=SCALED,
        coordinator=Coordinator(events),
    )
    ours.fit(2)
    assert model.calls == 3
    assert [p["step"] for p in events.of("optimizer_step_skipped")] == [2]
    assert [p["step"] for p in events.of("coordinator.step")] == [1, 2]
    assert (ours.step, scheduler.last_epoch, ours.samples) == (2, 2, 8)


def test_an_endless_overflow_ends_in_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "MAX_CONSECUTIVE_OVERFLOWS", 5)
    model = Overflowing(-1)
    ours = make_trainer(model, precision=SCALED)
    with pytest.raises(ScalerOverflowError, match=r"step 1: the gradients overflowed 5 times"):
        ours.fit(3)
    assert model.calls == 5


def test_a_scaled_run_equals_an_unscaled_one() -> None:
    scaled, plain = make_trainer(precision=SCALED), make_trainer()
    scaled.fit(5)
    plain.fit(5)
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(scaled.model.get_parameter(name), parameter)


class TwoParts(Regression):
    """A frozen part before the trained one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(self.body(x), y)


def part_trainer(model: nn.Module, act: Callable[[RunView], None], console: StringIO) -> Trainer:
    class Acting(Callback):
        def on_step_end(self, run: RunView) -> None:
            act(run)

    trained = [p for p in model.parameters() if p.requires_grad]
    return make_trainer(
        model,
        optimizer=torch.optim.SGD(trained, lr=0.01),
        callbacks=[Acting()],
        logger=MetricLogger(stream=console),
    )


def test_what_is_unfrozen_after_the_optimizer_was_built_is_named_once_and_keeps_no_gradient() -> None:
    """Its gradients would add up from step to step, and nothing would say that it is not trained."""
    model, console = TwoParts(), StringIO()
    before = model.body.weight.clone()
    gradients: list[Tensor | None] = []

    def act(run: RunView) -> None:
        gradients.append(model.body.weight.grad)
        if run.step == 2:
            assert "not trained" not in console.getvalue()
            run.model.requires_grad_(True)

    part_trainer(model, act, console).fit(6)
    assert gradients == [None] * 6
    assert torch.equal(model.body.weight, before)
    said = console.getvalue()
    assert said.count("not trained") == 1
    assert "body.weight, body.bias. " in said
    assert "add_param_group" in said


def test_what_is_unfrozen_and_added_to_the_optimizer_is_trained_without_a_word() -> None:
    model, console = TwoParts(), StringIO()
    before = model.body.weight.clone()

    def act(run: RunView) -> None:
        if run.step == 2:
            model.body.requires_grad_(True)
            run.optimizer.add_param_group({"params": list(model.body.parameters())})

    part_trainer(model, act, console).fit(4)
    assert not torch.equal(model.body.weight, before)
    assert "not trained" not in console.getvalue()


def test_each_layer_that_is_unfrozen_later_is_named_and_a_gradient_from_before_the_run_is_not() -> None:
    model, console = TwoParts(), StringIO()
    model.body.weight.grad = torch.ones(3, 3)

    def act(run: RunView) -> None:
        if run.step == 2:
            assert "not trained" not in console.getvalue()
        model.body.weight.requires_grad_(run.step >= 2)
        model.body.bias.requires_grad_(run.step >= 4)

    part_trainer(model, act, console).fit(6)
    named = re.findall(r"computed for them: (.*?)\. ", console.getvalue())
    assert named == ["body.weight", "body.bias"]


def penalised(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    def loss_fn(output: Any, batch: Any) -> Tensor:
        gradients = torch.autograd.grad(output["loss"], list(model.parameters()), create_graph=True)
        return output["loss"] + sum(gradient.square().sum() for gradient in gradients)

    return loss_fn


def test_a_penalty_on_gradients_through_attention_names_the_kernel_that_can_and_trains_with_it() -> None:
    torch.manual_seed(0)
    model = ReferenceTransformer(vocab_size=11, block_size=6, n_layer=1, n_head=2, d_model=16)
    ours = make_trainer(model, successor_batches(), loss_fn=penalised(model))
    before = model.lm_head.weight.clone()
    with pytest.raises(ModelError, match=r"sdpa_kernel\(torch\.nn\.attention\.SDPBackend\.MATH\)"):
        ours.fit(2)
    assert torch.equal(model.lm_head.weight, before)
    with sdpa_kernel(SDPBackend.MATH):
        assert ours.fit(2).steps == 2


def test_other_errors_of_a_loss_are_raised_as_they_are() -> None:
    def loss_fn(output: Any, batch: Any) -> Tensor:
        raise RuntimeError("derivative for aten::mine is not implemented")

    with pytest.raises(RuntimeError, match="aten::mine"):
        make_trainer(loss_fn=loss_fn).fit(1)


class OneBuffer:
    """Gives each batch in the same memory, as some loaders do to save it."""

    def __init__(self) -> None:
        self.x = torch.empty(4, 3)

    def __iter__(self) -> Any:
        for number in range(4):
            yield self.x.fill_(number), torch.zeros(4, 1)


def test_a_loader_that_writes_over_a_batch_of_the_same_update_is_refused() -> None:
    """The first micro batch would be trained on the numbers of the second."""

    def trainer(micro_batches: int) -> Trainer:
        config = config_of(data={"micro_batch_size": 4, "target_batch_size": 4 * micro_batches})
        return make_trainer(
            nn.Linear(3, 1), OneBuffer(), config=config, loss_fn=lambda output, _: output.square().mean()
        )

    with pytest.raises(DataError, match="an update takes 2 of them at once; give each batch memory of its own"):
        trainer(2).fit(1)
    assert trainer(1).fit(4).steps == 4


# ---------------------------------------------------------------- optimizers with a closure


def lbfgs_trainer(batches: Any = None, model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or Regression()
    return make_trainer(
        model, batches, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3), **options
    )


def test_lbfgs_makes_the_steps_that_torchs_own_loop_makes() -> None:
    data = {"micro_batch_size": 4, "target_batch_size": 8}
    trainer = lbfgs_trainer(config={"run": {"max_steps": 3}, "data": data})
    losses = [record["loss"] for record in trainer.fit().metrics]
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)
    batches = regression_batches()
    by_hand = []
    for number in range(3):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            parts = [model(*batch)["loss"] / 2 for batch in batches[2 * number : 2 * number + 2]]
            for part in parts:
                part.backward()
            return parts[0].detach() + parts[1].detach()

        by_hand.append(float(optimizer.step(closure)))
    assert losses == pytest.approx(by_hand, rel=1e-6)
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert losses[-1] < 0.2 * losses[0]


def test_lbfgs_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = lbfgs_trainer(config={"run": {"max_steps": 4}})
    straight.fit()
    manager = CheckpointManager(tmp_path)
    first = lbfgs_trainer(config={"run": {"max_steps": 4}}, checkpoint_manager=manager)
    first.fit(2)
    resumed, state = lbfgs_trainer(config={"run": {"max_steps": 4}}), manager.load_latest()
    assert state is not None
    resumed.resume(state)
    resumed.fit()
    for ours, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_step_of_lbfgs_that_meets_a_nan_on_its_way_is_undone(policy: str) -> None:
    class FailsOnItsWay(Regression):
        calls = 0

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            factor = float("nan") if self.calls == 7 else 1.0  # in the second step, which calls from the fifth on
            return {"loss": super().forward(x, y)["loss"] * factor}

    model = FailsOnItsWay()
    kept: list[list[Tensor]] = []

    class Keep(Callback):
        def on_step_end(self, run: RunView) -> None:
            kept.append([p.detach().clone() for p in run.model.parameters()])

    config = {"run": {"max_steps": 3, "on_nonfinite": policy}}
    trainer = lbfgs_trainer(model=model, config=config, callbacks=[Keep()])
    if policy == "stop":
        with pytest.raises(NonFiniteError, match="^step 2: .*the weights are those of the step before"):
            trainer.fit()
        assert all(torch.equal(now, before) for now, before in zip(model.parameters(), kept[0], strict=True))
    else:
        assert trainer.fit().steps == 3
        assert all(torch.equal(one, two) for one, two in zip(kept[0], kept[1], strict=True))
        assert not torch.equal(kept[2][0], kept[1][0])
