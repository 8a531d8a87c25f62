"""The loop: targets, order, counters, records, features, faults."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import ConfigError, SpeedtronicConfig
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError, DeviceError, NonFiniteError, RunFolderError, ScalerOverflowError
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan, resolve_device
from speedtronic.shapes import ShapeReport, resolve_shape_profile
from speedtronic.trainer import SpeedtronicTrainer, SyncCoordinator, Trainer, TrainingEngine, step
from speedtronic.trainer.step import Updater
from tests.support.listening import Listening
from tests.support.models import Endless, Events, Regression, Silence, make_trainer, regression_batches

SEED_METRIC_KEYS = {
    "step",
    "loss",
    "lr",
    "steps_per_sec",
    "samples_per_sec",
    "tokens_per_sec",
    "samples",
    "tokens",
    "micro_batches",
}


def config_of(**sections: Any) -> SpeedtronicConfig:
    return SpeedtronicConfig.from_dict(sections)


ACCUMULATE_TWO = {"micro_batch_size": 4, "target_batch_size": 8}


# ---------------------------------------------------------------- by hand


def by_hand(steps: int, accumulation: int = 1, clip: float | None = None) -> tuple[list[float], nn.Module]:
    """The same training as a loop that anyone would write."""
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = regression_batches()
    losses, position = [], 0
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulation):
            loss = model(*batches[position % len(batches)])["loss"]
            (loss / accumulation).backward()
            total += loss.item() / accumulation
            position += 1
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, None), (2, 0.5)])
def test_fit_equals_the_loop_written_by_hand(accumulation: int, clip: float | None) -> None:
    """Seed: "For K = accumulation_steps: 1. Run each of K microbatches. … 5. Perform one optimizer update."."""
    config = config_of(
        data={"micro_batch_size": 4, "target_batch_size": 4 * accumulation}, optimizer={"grad_clip": clip}
    )
    ours = make_trainer(config=config)
    result = ours.fit(12)
    losses, model = by_hand(12, accumulation, clip)
    assert [record["loss"] for record in result.metrics] == pytest.approx(losses, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours.model.get_parameter(name), parameter)


def test_gradients_are_cleared_to_none() -> None:
    """Seed: "Clear gradients with set_to_none=True"."""
    ours = make_trainer()
    ours.fit(2)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_fit_trains_a_model_that_was_left_in_eval_mode() -> None:
    """Seed: "The trainer explicitly switches the model to train() mode before fitting"."""
    ours = make_trainer()
    ours.model.eval()
    ours.fit(1)
    assert ours.model.training


# ---------------------------------------------------------------- models of others


class BareLoss(Regression):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y)["loss"]


class NoScalarLoss(Regression):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x) - y) ** 2}


class OnlyLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


def successor_batches() -> list[dict[str, Tensor]]:
    ids = torch.arange(24).reshape(4, 6) % 11
    return [{"input_ids": ids, "labels": (ids + 1) % 11}]


@pytest.mark.parametrize("model", [Regression, BareLoss, NoScalarLoss])
def test_custom_modules_with_tuple_batches_train(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    result = make_trainer(model()).fit(60)
    assert result.metrics[-1]["loss"] < 0.1 * result.metrics[0]["loss"]


def test_the_device_may_be_left_to_the_machine_and_a_missing_one_is_named() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, regression_batches(), device="auto", logger=MetricLogger(stream=Silence()))
    assert trainer.device == resolve_device("auto")
    assert trainer.fit(2).steps == 2
    for missing, why in (("cuda:99", "not available"), ("quantum", "unknown device")):
        with pytest.raises(DeviceError, match=why):
            Trainer(model, optimizer, regression_batches(), device=missing)


def test_a_model_that_returns_only_logits_trains() -> None:
    torch.manual_seed(0)
    model = OnlyLogits()
    result = make_trainer(model, successor_batches(), optimizer=torch.optim.Adam(model.parameters(), lr=0.05)).fit(60)
    assert result.metrics[-1]["loss"] < 0.1 * result.metrics[0]["loss"]


def test_a_classifier_trains_with_loss_fn() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    inputs = torch.randn(64, 2)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()

    def loss_fn(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    result = make_trainer(
        model,
        [(inputs, targets)],
        optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        loss_fn=loss_fn,
    ).fit(80)
    assert result.metrics[-1]["loss"] < 0.3 * result.metrics[0]["loss"]


def test_a_mapping_may_hold_more_than_a_classifier_with_loss_fn_asks_for() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, pixels: Tensor) -> Tensor:
            out: Tensor = self.linear(pixels)
            return out

    batch = {"pixels": torch.randn(4, 3), "label": torch.tensor([0, 1, 0, 1])}
    result = make_trainer(
        Classifier(), [batch], loss_fn=lambda out, batch: nn.functional.cross_entropy(out, batch["label"])
    ).fit(2)
    assert result.steps == 2


# ---------------------------------------------------------------- constructor


def test_aliases_name_the_same_class() -> None:
    """Seed: "TrainingEngine = Trainer; SpeedtronicTrainer = Trainer"; "Trainer.train is an alias for fit"."""
    assert TrainingEngine is SpeedtronicTrainer is Trainer
    assert Trainer.train is Trainer.fit


def test_a_dict_becomes_a_config() -> None:
    """Seed: "converts a dictionary config"."""
    ours = make_trainer(config={"run": {"max_steps": 3}})
    assert isinstance(ours.config, SpeedtronicConfig)
    assert ours.fit().steps == 3


def test_parts_are_kept_and_defaults_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Seed: "stores the model/optimizer/loader/device; creates a default logger; resolves a precision plan"."""
    model, batches = Regression(), regression_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = Trainer(model, optimizer, batches, device="cpu")
    assert (ours.model, ours.optimizer, ours.dataloader) == (model, optimizer, batches)
    assert ours.device == torch.device("cpu")
    assert isinstance(ours.precision, PrecisionPlan)
    assert ours.precision.mode == "fp32"
    ours.fit(1)
    assert "step 1" in capsys.readouterr().out


def test_counting_begins_at_start_step() -> None:
    ours = make_trainer(start_step=5)
    assert (ours.step, ours.samples, ours.tokens) == (5, 0, 0)
    assert ours.fit(7).steps == 7
    assert ours.samples == 8


def test_gradient_checkpointing_calls_the_models_hook() -> None:
    """Seed: "If enabled, the trainer calls: model.set_gradient_checkpointing(True)"."""

    class Hooked(Regression):
        enabled: bool | None = None

        def set_gradient_checkpointing(self, enabled: bool) -> None:
            self.enabled = enabled

    model = Hooked()
    make_trainer(model)
    assert model.enabled is None
    make_trainer(model, config=config_of(gradient_checkpointing=True))
    assert model.enabled is True


@pytest.mark.parametrize("names", [("activation",), ("gradient",), ("activation", "gradient")])
def test_gradient_checkpointing_has_other_names_in_hugging_face_models(names: tuple[str, ...]) -> None:
    model: Any = Regression()
    called: list[str] = []
    for name in names:
        setattr(model, f"{name}_checkpointing_enable", lambda name=name: called.append(name))
    make_trainer(model, config={"gradient_checkpointing": True})
    assert called == [names[0]]


@pytest.mark.parametrize("error", [None, AttributeError("gone"), RuntimeError("broken")])
def test_a_missing_or_failing_checkpointing_hook_is_a_warning(error: Exception | None) -> None:
    """Seed: "A missing hook, attribute error, or any hook exception logs a warning and continues"."""

    class Failing(Regression):
        def set_gradient_checkpointing(self, enabled: bool) -> None:
            assert error is not None
            raise error

    events = Events()
    model = Regression() if error is None else Failing()
    ours = make_trainer(model, config=config_of(gradient_checkpointing=True), events=events)
    assert ours.fit(1).steps == 1


# ---------------------------------------------------------------- target and lifecycle


@pytest.mark.parametrize("target", [0, -3])
def test_the_target_must_be_positive(target: int) -> None:
    """Seed: "Validate positive target"."""
    with pytest.raises(ConfigError, match="positive"):
        make_trainer().fit(target)


def test_the_target_is_never_behind_the_current_step() -> None:
    """Seed: "The target is max(self.step, requested_target)"."""
    ours = make_trainer()
    ours.fit(4)
    result = ours.fit(2)
    assert (result.steps, len(result.metrics), result.final_loss) == (4, 0, None)


def test_fit_goes_on_where_the_last_one_ended() -> None:
    straight = make_trainer().fit(6)
    ours = make_trainer()
    first, second = ours.fit(2), ours.fit(6)
    assert [r["loss"] for r in (*first.metrics, *second.metrics)] == [r["loss"] for r in straight.metrics]


def test_the_target_comes_from_fit_then_constructor_then_data_then_run() -> None:
    """Seed: "max_steps if provided else (data.max_steps or run.max_steps)"."""
    config = config_of(run={"max_steps": 4}, data={"max_steps": 3})
    assert make_trainer(config=config, max_steps=2).fit(1).steps == 1
    assert make_trainer(config=config, max_steps=2).fit().steps == 2
    assert make_trainer(config=config).fit().steps == 3
    assert make_trainer(config=config_of(run={"max_steps": 4})).fit().steps == 4


class Coordinator:
    """A SyncCoordinator that writes down what happens to it, among the events."""

    def __init__(self, events: Events, *, reset: bool = False, fail_at: str | None = None) -> None:
        self._events = events
        self._reset = reset
        self._fail_at = fail_at

    def _note(self, what: str, **payload: Any) -> None:
        self._events.on_event(f"coordinator.{what}", payload)
        if what == self._fail_at:
            raise RuntimeError(f"{what} failed")

    def start(self) -> None:
        self._note("start")

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        self._note("step", model=model, step=step)
        return self._reset

    def stop(self) -> None:
        self._note("stop")

    def state_dict(self) -> dict[str, Any] | None:
        return {"baseline": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._note("load", state=state)


def test_a_coordinator_is_a_runtime_checkable_protocol() -> None:
    assert isinstance(Coordinator(Events()), SyncCoordinator)
    assert not isinstance(object(), SyncCoordinator)


def test_fit_starts_tells_and_stops_the_coordinator_in_order() -> None:
    """Seed: "8. Start coordinator if needed. 9. Apply deferred coordinator checkpoint state after startup. 10. Emit
    train_start. 11. Run complete global steps. 12. Emit train_end and return."
    """
    events = Events()
    first = make_trainer(coordinator=Coordinator(Events()))
    first.fit(1)
    ours = make_trainer(events=events, coordinator=Coordinator(events))
    ours.resume(first.state_dict())
    ours.fit(3)
    assert events.names() == [
        "shape_profile",
        "coordinator.start",
        "coordinator.load",
        "train_start",
        "coordinator.step",
        "train_step",
        "coordinator.step",
        "train_step",
        "train_end",
        "coordinator.stop",
    ]
    assert events.of("coordinator.load") == [{"state": {"baseline": 7}}]
    assert [(p["model"], p["step"]) for p in events.of("coordinator.step")] == [
        (ours.model, 2),
        (ours.model, 3),
    ]


def test_a_coordinator_that_prepares_gets_its_state_before_it_starts() -> None:
    """Seed: "v2 coordinators can apply prepared baseline state during startup before any remote refresh"."""

    class Preparing(Coordinator):
        def prepare_state(self, state: dict[str, Any]) -> None:
            self._note("prepare")

    events = Events()
    first = make_trainer(coordinator=Coordinator(Events()))
    first.fit(1)
    ours = make_trainer(events=events, coordinator=Preparing(events))
    ours.resume(first.state_dict())
    ours.fit(2)
    assert events.names()[1:4] == ["coordinator.prepare", "coordinator.start", "coordinator.load"]


def test_a_coordinator_that_counts_hears_what_a_step_was_trained_on_before_it_hears_of_the_step() -> None:
    class Counting(Coordinator):
        def count(self, samples: int, tokens: int | Tensor) -> None:
            self._note("count", samples=samples, tokens=int(tokens))

    events = Events()
    make_trainer(coordinator=Counting(events), config=config_of(data=ACCUMULATE_TWO)).fit(1)
    assert events.names() == [f"coordinator.{name}" for name in ("start", "count", "step", "stop")]
    assert events.of("coordinator.count") == [{"samples": 8, "tokens": 24}]


@pytest.mark.parametrize("every", [2, 100])
def test_a_coordinator_hands_over_its_last_work_before_the_last_checkpoint(every: int, tmp_path: Path) -> None:
    class HandingOver(Coordinator):
        handed_over = False

        def hand_over(self) -> None:
            self.handed_over = True

        def state_dict(self) -> dict[str, Any] | None:
            return {"handed_over": self.handed_over}

    manager = CheckpointManager(tmp_path, every_steps=every)
    make_trainer(coordinator=HandingOver(Events()), checkpoint_manager=manager).fit(4)
    state = manager.load_latest()
    assert state is not None
    assert state["coordinator"] == {"handed_over": True}


class Position(NamedTuple):
    step: int
    samples: int
    tokens: int


class Knowing(Coordinator):
    """Knows, once it was told of step `after`, that the steps up to `position` are done."""

    def __init__(self, events: Events, position: Position, after: int) -> None:
        super().__init__(events)
        self._position: Position | None = position
        self._step, self._after = 0, after

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        self._step = step
        return super().after_optimizer_step(model, step)

    def continue_at(self) -> Position | None:
        if self._step < self._after:
            return None
        known, self._position = self._position, None
        return known


def numbered(number: int) -> tuple[Tensor, Tensor]:
    return torch.full((2, 3), float(number)), torch.zeros(2, 1)


@pytest.mark.parametrize("after", [0, 2])
def test_work_that_a_coordinator_knows_to_be_done_is_passed_over(after: int) -> None:
    """Its data is not read again, and steps, schedule and counters are where they would be."""
    seen: list[float] = []

    class Watching(Regression):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            seen.append(x[0, 0].item())
            return super().forward(x, y)

    torch.manual_seed(0)
    model = Watching()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    events = Events()
    ours = make_trainer(
        model,
        Endless(numbered),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 100),
        coordinator=Knowing(events, Position(5, samples=500, tokens=900), after),
        config=config_of(data={"micro_batch_size": 2, "target_batch_size": 4}),
    )
    result = ours.fit(7)
    done = [0.0, 1.0, 2.0, 3.0][: 2 * after]
    assert seen == [*done, 10.0, 11.0, 12.0, 13.0]
    assert [p["step"] for p in events.of("coordinator.step")] == [*range(1, after + 1), 6, 7]
    assert [record["lr_applied"] for record in result.metrics][-2:] == pytest.approx([0.95e-3, 0.94e-3])
    assert (result.steps, result.samples, result.tokens) == (7, 508, 924)
    assert result.metrics[-1]["samples_per_sec"] < 1.001 * result.metrics[-1]["steps_per_sec"] * 4


def test_any_scheduler_moves_on_with_the_work_that_is_passed_over() -> None:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make_trainer(
        model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        coordinator=Knowing(Events(), Position(5, 20, 60), after=0),
    ).fit(6)
    assert optimizer.param_groups[0]["lr"] == 0.5**6


def test_a_run_whose_work_is_all_done_trains_nothing() -> None:
    ours = make_trainer(coordinator=Knowing(Events(), Position(9, 36, 108), after=0))
    result = ours.fit(7)
    assert (result.steps, list(result.metrics)) == (9, [])


def test_a_run_whose_work_is_all_done_says_so_and_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """The final step of a successful `fit` is always checkpointed: the weights are those of all nodes."""
    log = Listening()
    manager = CheckpointManager(tmp_path, every_steps=100)
    knowing = Knowing(Events(), Position(9, 36, 108), after=0)
    make_trainer(coordinator=knowing, checkpoint_manager=manager, logger=log).fit(7)
    assert log.said("steps 1 to 9 were trained before: nothing is left to train")
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert (state["step"], state["samples"], state["metrics"]["loss"]) == (9, 36, None)


def test_work_behind_the_run_is_no_reason_to_move() -> None:
    ours = make_trainer(coordinator=Knowing(Events(), Position(2, 8, 24), after=3))
    assert ours.fit(4).samples == 16


@pytest.mark.parametrize("fail_at", ["start", "step"])
def test_the_coordinator_is_stopped_also_on_failure(fail_at: str) -> None:
    """Seed: "fit() always calls coordinator stop() in finally, even on failure"."""
    events = Events()
    ours = make_trainer(events=events, coordinator=Coordinator(events, fail_at=fail_at))
    with pytest.raises(RuntimeError, match=f"{fail_at} failed"):
        ours.fit(2)
    assert events.names()[-1] == "coordinator.stop"


def test_a_later_fit_starts_the_coordinator_again() -> None:
    """Seed: "a later fit() can start fresh background lanes"."""
    events = Events()
    ours = make_trainer(coordinator=Coordinator(events))
    ours.fit(1)
    ours.fit(2)
    assert [name for name in events.names() if name != "coordinator.step"] == [
        "coordinator.start",
        "coordinator.stop",
    ] * 2


@pytest.mark.parametrize(
    ("distributed", "cleared"),
    [
        ({}, True),
        ({"enabled": True, "repo_id": "a/b"}, False),
        ({"enabled": True, "repo_id": "a/b", "reset_inner_optimizer": True}, True),
    ],
)
def test_true_from_the_coordinator_resets_the_inner_optimizer(distributed: dict[str, Any], cleared: bool) -> None:
    """Seed: "after_optimizer_step() may return true to request inner optimizer state reset"."""
    torch.manual_seed(0)
    model = Regression()
    ours = make_trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters()),
        coordinator=Coordinator(Events(), reset=True),
        config=config_of(distributed=distributed),
    )
    ours.fit(2)
    assert (len(ours.optimizer.state) == 0) is cleared


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("distributed", [{}, {"enabled": True, "repo_id": "a/b"}])
def test_a_coordinator_that_decides_on_the_reset_is_obeyed_in_any_trainer(
    distributed: dict[str, Any], reset: bool
) -> None:
    class Deciding(Coordinator):
        reset_inner_optimizer = reset

    torch.manual_seed(0)
    model = Regression()
    ours = make_trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters()),
        coordinator=Deciding(Events(), reset=True),
        config=config_of(distributed=distributed),
    )
    ours.fit(2)
    assert (len(ours.optimizer.state) == 0) is reset


def test_the_optimizers_step_is_looked_up_at_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_trainer()
    steps: list[int] = []
    original = ours.optimizer.step
    monkeypatch.setattr(ours.optimizer, "step", lambda: (steps.append(ours.step), original()))
    ours.fit(3)
    assert steps == [0, 1, 2]


def test_the_scheduler_advances_once_per_global_step() -> None:
    """Seed: "The scheduler advances once per global optimizer update, not per microbatch"; "The reported LR is one
    scheduler position ahead of the LR that produced the just-completed update".
    """
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    ours = make_trainer(model, optimizer=optimizer, scheduler=scheduler, config=config_of(data=ACCUMULATE_TWO))
    result = ours.fit(3)
    assert [r["lr"] for r in result.metrics] == pytest.approx([1 / 2, 1 / 3, 1 / 4])
    assert [r["lr_applied"] for r in result.metrics] == pytest.approx([1, 1 / 2, 1 / 3])


# ---------------------------------------------------------------- numbers


def test_every_record_has_the_documented_keys_and_more() -> None:
    """Seed: "Per-step metrics"."""
    record = make_trainer(config=config_of(data=ACCUMULATE_TWO)).fit(2).metrics[-1]
    assert record.keys() >= SEED_METRIC_KEYS | {"grad_norm", "lr_applied", "peak_memory_bytes"}
    assert (record["step"], record["samples"], record["tokens"], record["micro_batches"]) == (2, 16, 48, 2)
    assert all(record[key] > 0 for key in ("steps_per_sec", "samples_per_sec", "tokens_per_sec"))


def test_metrics_grow_on_every_step_whatever_the_cadence() -> None:
    """Seed: "metrics grows on every step even when the logger suppresses output by cadence"."""
    from speedtronic.metrics import MetricLogger
    from tests.support.models import Silence

    result = make_trainer(logger=MetricLogger(stream=Silence(), every_steps=4)).fit(10)
    assert [record["step"] for record in result.metrics] == list(range(1, 11))


def test_counters_are_cumulative_over_a_resume() -> None:
    first = make_trainer()
    first.fit(3)
    second = make_trainer()
    second.resume(first.state_dict())
    result = second.fit(5)
    assert (result.steps, result.samples, result.tokens) == (5, 20, 60)
    assert [record["samples"] for record in result.metrics] == [16, 20]


def test_masked_tokens_are_counted_by_their_mask() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)

    class Masked(OnlyLogits):
        def forward(  # type: ignore[override]
            self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor
        ) -> dict[str, Tensor]:
            return super().forward(input_ids)

    ids = torch.zeros(2, 3, dtype=torch.long)
    ours = make_trainer(Masked(), [{"input_ids": ids, "labels": ids, "attention_mask": mask}])
    assert (ours.fit(2).tokens, ours.tokens) == (8, 8)


def test_the_final_loss_is_that_of_the_last_update() -> None:
    """Seed: "Mean final-update loss for this invocation, or null when no update ran"."""
    result = make_trainer().fit(3)
    assert result.final_loss == result.metrics[-1]["loss"]


def test_elapsed_time_is_that_of_the_invocation() -> None:
    """Seed: "Duration of this invocation"."""
    ours = make_trainer()
    first, second = ours.fit(50), ours.fit(51)
    assert 0 < second.elapsed_s < first.elapsed_s


def test_token_normalisation_equals_one_big_batch() -> None:
    torch.manual_seed(0)
    model = OnlyLogits().double()
    ids = torch.randint(0, 11, (2, 9))
    labels = torch.randint(0, 11, (2, 9))
    labels[1, 1:] = -100
    rows = [{"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(2)]
    whole = [{"input_ids": ids, "labels": labels}]
    weights = {}
    for name, batches, target in (("rows", rows, 2), ("whole", whole, 1)):
        torch.manual_seed(0)
        model = OnlyLogits().double()
        data = {"micro_batch_size": 1, "target_batch_size": target, "loss_normalization": "tokens"}
        make_trainer(model, batches, config=config_of(data=data)).fit(3)
        weights[name] = model.head.weight.detach()
    torch.testing.assert_close(weights["rows"], weights["whole"], rtol=1e-5, atol=1e-8)


# ---------------------------------------------------------------- no synchronisation


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


# ---------------------------------------------------------------- non-finite values and overflow


def poisoned(step: int) -> Endless:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = regression_batches()[number % 8]
        return x * float("nan") if number == step - 1 else x, y

    return Endless(batch)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("every_steps", [1, 10])
def test_a_nan_loss_stops_at_its_step_with_the_weights_before_it(fused: bool, every_steps: int, tmp_path: Path) -> None:
    from speedtronic.metrics import MetricLogger
    from tests.support.models import Silence

    def train(batches: Any, steps: int) -> Trainer:
        torch.manual_seed(0)
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        ours = make_trainer(
            model,
            batches,
            optimizer=optimizer,
            logger=MetricLogger(stream=Silence(), every_steps=every_steps),
            checkpoint_manager=CheckpointManager(tmp_path / str(steps), every_steps=2),
        )
        return ours if steps > 2 else _fitted(ours, steps)

    good = train(regression_batches(), 2)
    bad = train(poisoned(3), 9)
    with pytest.raises(NonFiniteError, match="step 3") as caught:
        bad.fit(9)
    assert caught.value.step == 3
    # An ordinary optimizer's refusal is known at once; a fused one's when the step is logged.
    assert bad.step == 2
    for name, parameter in good.model.named_parameters():
        torch.testing.assert_close(bad.model.get_parameter(name), parameter, rtol=0, atol=0)
    latest = CheckpointManager(tmp_path / "9").load_latest()
    assert latest is not None
    assert latest["step"] == 2


def _fitted(ours: Trainer, steps: int) -> Trainer:
    ours.fit(steps)
    return ours


def test_a_nan_loss_is_an_event_and_the_record_of_its_step_is_null() -> None:
    events = Events()
    ours = make_trainer(batches=poisoned(2), events=events)
    with pytest.raises(NonFiniteError):
        ours.fit(5)
    (event,) = events.of("nonfinite")
    assert (event["step"], event["action"]) == (2, "stop")


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_other_policies_go_on(policy: str) -> None:
    events = Events()
    ours = make_trainer(batches=poisoned(2), events=events, config=config_of(run={"on_nonfinite": policy}))
    result = ours.fit(4)
    assert result.steps == 4
    assert events.of("nonfinite")[0]["action"] == policy
    finite = all(torch.isfinite(parameter).all() for parameter in ours.model.parameters())
    assert finite is (policy == "skip")


SCALED = PrecisionPlan(mode="fp16", dtype=torch.float32, use_scaler=True, autocast_enabled=False, device_type="cpu")


class Overflowing(Regression):
    """Gradients of the given steps are infinite under any loss scale."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self._bad = bad
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        loss = super().forward(x, y)["loss"]
        return {"loss": loss * float("inf")} if self.calls in self._bad or self._bad == (-1,) else {"loss": loss}


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


def test_the_scalers_state_is_restored_when_fit_makes_a_new_one() -> None:
    """Seed: "Create a new GradScaler and restore deferred scaler state"."""
    first = make_trainer(Overflowing(1), precision=SCALED)
    first.fit(1)
    second = make_trainer(Overflowing(2), precision=SCALED)
    second.resume(first.state_dict())
    second.fit(2)
    assert first.state_dict()["scaler"]["scale"] == second.state_dict()["scaler"]["scale"] == 2.0**15


# ---------------------------------------------------------------- compilation


def test_a_failing_construction_leaves_the_eager_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "torch.compile construction failure leaves the eager model active"."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    events = Events()
    ours = make_trainer(config=config_of(compile=True), events=events)
    assert ours.fit(2).steps == 2
    assert events.of("compile")[0]["status"] == "construction_failed"
    assert "no compiler" in events.of("compile")[0]["error"]


class Breakable:
    """A stand-in for torch.compile: runs the module eagerly, and fails in the given calls."""

    def __init__(self, model: nn.Module, fail_at: set[int], error: Exception) -> None:
        self._model, self._fail_at, self._error = model, fail_at, error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        output = self._model(*args, **kwargs)
        if self.calls in self._fail_at:
            raise self._error
        return output


class Dropping(Regression):
    """Draws random numbers in its forward, so that a rerun shows whether they were rewound."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(nn.functional.dropout(x, 0.5, self.training), y)


def breakable_trainer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, events: Events | None = None, fail_at: int = 4
) -> Trainer:
    monkeypatch.setattr(torch, "compile", lambda model, **options: Breakable(model, {fail_at}, error))
    torch.manual_seed(0)
    return make_trainer(Dropping(), events=events, config=config_of(compile=True, data=ACCUMULATE_TWO))


def test_a_compiled_failure_reruns_the_update_eagerly_as_if_nothing_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed: "Any exception from a compiled forward disables compilation and reruns that batch eagerly"."""
    events = Events()
    ours = breakable_trainer(monkeypatch, RuntimeError("broken kernel"), events)
    torch.manual_seed(1)
    losses = [record["loss"] for record in ours.fit(4).metrics]
    assert [payload["status"] for payload in events.of("compile")] == ["enabled", "runtime_fallback"]
    torch.manual_seed(0)
    eager = make_trainer(Dropping(), config=config_of(data=ACCUMULATE_TWO))
    torch.manual_seed(1)
    assert losses == [record["loss"] for record in eager.fit(4).metrics]


def test_the_eager_error_is_raised_when_the_rerun_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = breakable_trainer(monkeypatch, RuntimeError("compiled"), fail_at=1)

    class Broken(Regression):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            raise ValueError("the model's own mistake")

    ours.model = Broken()
    with pytest.raises(ValueError, match="own mistake"):
        ours.fit(1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_never_swallowed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = breakable_trainer(monkeypatch, error)
    with pytest.raises(type(error)):
        ours.fit(4)


def test_a_batch_smaller_than_the_first_does_not_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Breakable] = []

    def fake_compile(model: nn.Module, **options: Any) -> Breakable:
        made.append(Breakable(model, set(), RuntimeError()))
        return made[0]

    monkeypatch.setattr(torch, "compile", fake_compile)
    x, y = regression_batches()[0]
    make_trainer(batches=[(x, y), (x[:2], y[:2])], config=config_of(compile=True)).fit(4)
    assert made[0].calls == 2


@pytest.mark.slow
def test_a_really_compiled_model_trains_and_saves_plain_names() -> None:
    ours, eager = make_trainer(config=config_of(compile=True)), make_trainer()
    compiled_losses = [record["loss"] for record in ours.fit(4).metrics]
    assert compiled_losses == pytest.approx([record["loss"] for record in eager.fit(4).metrics], rel=1e-5)
    assert ours.state_dict()["model"].keys() == eager.state_dict()["model"].keys()


def test_a_model_that_was_compiled_by_hand_saves_plain_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self._orig_mod(x, y)

    ours = make_trainer(Wrapper(Regression()))
    ours.fit(1)
    assert set(ours.state_dict()["model"]) == {"linear.weight", "linear.bias"}


# ---------------------------------------------------------------- checkpoints


def test_the_final_step_is_always_saved_once(tmp_path: Path) -> None:
    events = Events()
    ours = make_trainer(events=events, checkpoint_manager=CheckpointManager(tmp_path, every_steps=2))
    result = ours.fit(5)
    assert [payload["step"] for payload in events.of("checkpoint")] == [2, 4, 5]
    assert result.save_error is None
    ours.fit(6)
    assert [payload["step"] for payload in events.of("checkpoint")] == [2, 4, 5, 6]


def test_a_final_step_on_the_cadence_is_saved_once(tmp_path: Path) -> None:
    events = Events()
    make_trainer(events=events, checkpoint_manager=CheckpointManager(tmp_path, every_steps=2)).fit(4)
    assert [payload["step"] for payload in events.of("checkpoint")] == [2, 4]


class FullDisk(FileSystem):
    """Runs out of space while `full`."""

    def __init__(self) -> None:
        self.full = False

    def write(self, file: FileIO, data: memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)


def test_a_failing_save_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    disk, events = FullDisk(), Events()

    def batch(number: int) -> tuple[Tensor, Tensor]:
        disk.full = number == 1
        return regression_batches()[number % 8]

    result = make_trainer(
        batches=Endless(batch),
        events=events,
        config=config_of(checkpoint={"background": False}),
        checkpoint_manager=CheckpointManager(tmp_path, every_steps=2, fs=disk),
    ).fit(5)
    assert [(p["step"], "error" in p) for p in events.of("checkpoint")] == [(2, True), (4, False), (5, False)]
    assert (result.steps, result.save_error) == (5, None)


def test_a_failing_final_save_is_in_the_result(tmp_path: Path) -> None:
    disk = FullDisk()
    disk.full = True
    result = make_trainer(checkpoint_manager=CheckpointManager(tmp_path, fs=disk)).fit(2)
    assert result.save_error is not None
    assert "No space left" in result.save_error


def test_state_that_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    class Odd(Coordinator):
        def state_dict(self) -> dict[str, Any]:
            return {"peer": object()}

    ours = make_trainer(coordinator=Odd(Events()), checkpoint_manager=CheckpointManager(tmp_path, every_steps=1))
    with pytest.raises(CheckpointError, match=r"coordinator\.peer"):
        ours.fit(1)
    assert ours.step == 0


def test_resume_restores_everything_at_once() -> None:
    """Seed: "Trainer.resume(state) immediately restores: model state; optimizer state; scheduler state; global
    step/sample/token counters; RNG state".
    """

    def adam_trainer() -> Trainer:
        torch.manual_seed(3)
        model = Regression()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return make_trainer(model, optimizer=optimizer, scheduler=scheduler)

    first = adam_trainer()
    first.fit(3)
    state = first.state_dict()
    expected = torch.rand(2)
    second = adam_trainer()
    second.resume(state)
    assert torch.equal(torch.rand(2), expected)
    assert (second.step, second.samples, second.tokens) == (3, 12, 36)
    assert torch.equal(second.model.get_parameter("linear.weight"), first.model.get_parameter("linear.weight"))
    weight = second.model.get_parameter("linear.weight")
    assert second.optimizer.state[weight]["step"] == 3
    assert second.scheduler is not None
    assert second.scheduler.last_epoch == 3
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_another_model_is_an_error_that_names_the_tensors() -> None:
    class Wider(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.extra = nn.Linear(1, 1)

    state = make_trainer().state_dict()
    with pytest.raises(CheckpointError) as caught:
        make_trainer(Wider()).resume(state)
    message = str(caught.value)
    assert "linear.weight has shape (1, 3) in the checkpoint and (1, 4) in this model" in message
    assert "extra.bias is missing in the checkpoint" in message


def test_another_optimizer_is_a_clear_error() -> None:
    state = make_trainer().state_dict()
    model = Regression()
    other = torch.optim.SGD([{"params": [model.linear.weight]}, {"params": [model.linear.bias]}], lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer"):
        make_trainer(model, optimizer=other).resume(state)


def by_algorithm(*algorithms: str | None) -> Trainer:
    """Groups as `HybridOptimizer` has them, one tensor each; None is a group of an ordinary optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in algorithms))
    keys: list[dict[str, Any]] = [{} if algorithm is None else {"algorithm": algorithm} for algorithm in algorithms]
    groups = [{"params": list(layer.parameters()), **key} for layer, key in zip(model, keys, strict=True)]
    return make_trainer(model, optimizer=torch.optim.AdamW(groups))


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (("muon", "adamw"), (None, None), "written by another optimizer .* continue with optimizer.name: muon, or"),
        ((None, None), ("muon", "adamw"), "written by another optimizer .* continue with optimizer.name: adamw, or"),
        (("muon", "adamw"), ("adamw", "adamw"), "divides the weights as muon, adamw, and this one as adamw, adamw: "),
    ],
)
def test_the_state_of_another_algorithm_is_refused_with_the_remedy(
    saved: tuple[str | None, ...], own: tuple[str | None, ...], message: str
) -> None:
    state = by_algorithm(*saved).state_dict()
    with pytest.raises(CheckpointError, match=f"{message}.*run.init_from") as caught:
        by_algorithm(*own).resume(state)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("algorithms", [("muon", "adamw"), (None, None)])
def test_the_state_of_the_same_algorithms_is_taken(algorithms: tuple[str | None, ...]) -> None:
    by_algorithm(*algorithms).resume(by_algorithm(*algorithms).state_dict())


def test_a_longer_horizon_recomputes_the_lr_from_the_step() -> None:
    def scheduled(horizon: int) -> Trainer:
        torch.manual_seed(0)
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - min(step / horizon, 1))
        return make_trainer(model, optimizer=optimizer, scheduler=scheduler)

    first = scheduled(4)
    first.fit(4)
    second = scheduled(8)
    second.resume(first.state_dict())
    result = second.fit(5)
    assert result.metrics[0]["lr_applied"] == pytest.approx(0.5e-3)
    assert result.metrics[0]["lr"] == pytest.approx(0.375e-3)


def test_saved_precision_and_config_are_informational() -> None:
    """Seed: "Saved precision and config copies are informational; they are not compared with or applied"."""
    state = make_trainer(config=config_of(run={"name": "first"})).state_dict()
    state["precision"] = "bf16"
    ours = make_trainer(config=config_of(run={"name": "second"}))
    ours.resume(state)
    assert ours.config.run.name == "second"
    assert ours.precision.mode == "fp32"


# ---------------------------------------------------------------- evaluation and signals


def test_evaluation_runs_at_its_cadence_and_at_the_end_once() -> None:
    events = Events()
    ours = make_trainer(
        events=events,
        evaluator=lambda model, should_stop: {"loss": 0.25},
        config=config_of(eval={"every_steps": 2}),
    )
    result = ours.fit(4)
    assert [payload["step"] for payload in events.of("eval")] == [2, 4]
    assert result.eval_loss == 0.25


def test_evaluation_at_the_end_can_be_switched_off() -> None:
    events = Events()
    config = config_of(eval={"at_end": False})
    make_trainer(events=events, evaluator=lambda model, should_stop: {"loss": 1.0}, config=config).fit(2)
    assert events.of("eval") == []


def test_a_signal_ends_an_evaluation_early(tmp_path: Path) -> None:
    asked: list[bool] = []

    def evaluate(model: nn.Module, should_stop: Callable[[], bool]) -> dict[str, float] | None:
        asked.append(should_stop())
        signal.raise_signal(signal.SIGTERM)
        asked.append(should_stop())
        return None

    events = Events()
    result = make_trainer(events=events, evaluator=evaluate, config=config_of(eval={"every_steps": 2})).fit(100)
    assert asked == [False, True]
    assert (result.steps, result.interrupted_by, result.eval_loss) == (2, signal.SIGTERM, None)
    assert events.of("eval") == []


def test_a_signal_during_the_last_evaluation_is_reported(tmp_path: Path) -> None:
    def evaluate(model: nn.Module, should_stop: Callable[[], bool]) -> None:
        signal.raise_signal(signal.SIGTERM)

    result = make_trainer(evaluator=evaluate, checkpoint_manager=CheckpointManager(tmp_path)).fit(2)
    assert result.interrupted_by == signal.SIGTERM
    assert (tmp_path / "step_000000000002").is_dir()


def test_a_checkpoint_folder_that_cannot_be_used_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    ours = make_trainer(checkpoint_manager=CheckpointManager(tmp_path / "file"))
    with pytest.raises(RunFolderError, match="file"):
        ours.fit(1)
    assert ours.step == 0


def test_a_signal_finishes_the_step_saves_and_returns(tmp_path: Path) -> None:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return regression_batches()[number % 8]

    events = Events()
    coordinator = Coordinator(events)
    ours = make_trainer(
        batches=Endless(batch),
        events=events,
        coordinator=coordinator,
        checkpoint_manager=CheckpointManager(tmp_path),
    )
    result = ours.fit(100)
    assert (result.steps, result.interrupted_by) == (3, signal.SIGTERM)
    assert events.of("interrupted") == [{"step": 3, "signal": "SIGTERM"}]
    assert events.names()[-4:] == ["checkpoint", "interrupted", "train_end", "coordinator.stop"]
    latest = CheckpointManager(tmp_path).load_latest()
    assert latest is not None
    assert latest["step"] == 3


# ---------------------------------------------------------------- startup shapes


def test_fit_validates_the_shapes_once_however_often_it_is_called() -> None:
    events = Events()
    sizes = {"micro_batch_size": 4, "target_batch_size": 4}
    config = {"run": {"max_steps": 2}, "data": sizes, "shape_validation": {"alignment": 8, "warn_on_cpu": True}}
    ours = make_trainer(events=events, config=config)
    assert ours.shape_report is None
    ours.fit(1)
    ours.fit(2)
    assert ours.shape_report is not None
    assert [warning["field"] for warning in events.of("shape_warning")] == [
        "data.micro_batch_size",
        "linear.in_features",
        "linear.out_features",
    ]
    assert events.of("shape_profile") == [
        {"device_type": "cpu", "precision": "fp32", "alignment": 8, "warning_count": 3}
    ]
    assert events.names().index("shape_profile") < events.names().index("train_start")


def test_fit_warns_of_no_batch_whose_size_nobody_gave() -> None:
    events = Events()
    ours = make_trainer(events=events, config={"shape_validation": {"alignment": 8, "warn_on_cpu": True}})
    ours.fit(1)
    assert [warning["field"] for warning in events.of("shape_warning")] == ["linear.in_features", "linear.out_features"]
    assert ours.config.shape_validation.check_batch


def test_fit_leaves_a_report_that_it_was_given_alone() -> None:
    events = Events()
    report = ShapeReport(resolve_shape_profile("cpu", "fp32"))
    ours = make_trainer(events=events, shape_report=report)
    ours.fit(1)
    assert ours.shape_report is report
    assert "shape_profile" not in events.names()
