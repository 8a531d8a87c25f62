"""The loop: targets, order, counters, records, features, faults."""

from __future__ import annotations

import errno
import signal
import warnings
from collections.abc import Callable
from io import FileIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import ConfigError, SpeedtronicConfig
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError, DeviceError, ModelError, RunFolderError
from speedtronic.evaluation import HeldOutLoss
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan, resolve_device, resolve_precision
from speedtronic.shapes import ShapeReport, resolve_shape_profile
from speedtronic.trainer import SpeedtronicTrainer, Trainer, TrainingEngine
from speedtronic.trainer.result import MetricRecords
from tests.support.cuda import RecordedCuda
from tests.support.models import (
    ACCUMULATE_TWO,
    Coordinator,
    Endless,
    Events,
    OnlyLogits,
    Regression,
    Silence,
    config_of,
    make_trainer,
    regression_batches,
    successor_batches,
)

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


def test_the_card_that_trains_is_the_current_one_before_the_model_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordedCuda(monkeypatch, bf16={1})

    class Moved(Regression):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            cuda.calls.append(("to", *args))
            raise torch.OutOfMemoryError("the test ends here")

    model = Moved()
    ours = Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), regression_batches(), device="cuda:1")
    assert ours.precision.mode == "bf16"
    with pytest.raises(torch.OutOfMemoryError):
        ours.fit(1)
    assert cuda.calls == [("set_device", 1), ("to", torch.device("cuda:1"))]


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


class Plain(nn.Module):
    """A module that knows nothing of losses: two classes of x (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.norm(pixels))
        return scores


def classes(count: int = 4) -> list[dict[str, Tensor]]:
    pixels = torch.randn(count, 8, 3, generator=torch.Generator().manual_seed(0))
    return [{"pixels": x, "labels": (x.sum(-1) > 0).long()} for x in pixels]


def losses_by_hand(model: nn.Module, steps: int) -> list[float]:
    """Of stochastic gradient descent on the cross-entropy of `classes`, as torch's own functions compute it."""
    optimizer, losses, batches = torch.optim.SGD(model.parameters(), lr=0.05), [], classes()
    model.train()
    for step in range(steps):
        batch = batches[step % len(batches)]
        loss = nn.functional.cross_entropy(model(batch["pixels"]), batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made_by(kind: str, model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "script":
            return torch.jit.script(model)
        if kind == "trace":
            return torch.jit.trace(model.train(), (classes()[0]["pixels"],), check_trace=False)
    return torch.compile(model, backend="eager") if kind == "compiled" else model


@pytest.mark.parametrize("kind", ["plain", "script", "trace", "compiled"])
def test_a_module_of_any_making_trains_as_the_loop_written_by_hand_and_resumes(kind: str, tmp_path: Path) -> None:
    expected = losses_by_hand(made_by(kind, Plain()), 6)
    config = config_of(loss="cross_entropy", optimizer={"ema": 0.9}, eval={"every_steps": 2})
    manager = CheckpointManager(tmp_path, every_steps=3)

    def trainer(**options: Any) -> Trainer:
        plan = resolve_precision("fp32", torch.device("cpu"))
        held_out = HeldOutLoss(lambda: classes(1), device=torch.device("cpu"), precision=plan)
        return make_trainer(made_by(kind, Plain()), classes(), config=config, evaluator=held_out, **options)

    first = trainer(checkpoint_manager=manager).fit(3)
    state = manager.load_latest()
    assert state is not None
    assert set(state["model"]) == set(Plain().state_dict())
    second = trainer()
    second.resume(state)
    rest = second.fit(6)
    assert rest.samples == 48
    assert [r["loss"] for r in (*first.metrics, *rest.metrics)] == pytest.approx(expected, rel=1e-5)
    assert rest.eval_loss is not None


def test_a_configured_loss_trains_a_plain_module_and_loss_fn_comes_before_it() -> None:
    named = make_trainer(Plain(), classes(), config=config_of(loss="cross_entropy")).fit(4)
    assert [r["loss"] for r in named.metrics] == pytest.approx(losses_by_hand(Plain(), 4), rel=1e-5)
    given = make_trainer(
        Plain(), classes(), config=config_of(loss="mse"), loss_fn=lambda output, batch: 0 * output.sum() + 7.0
    ).fit(1)
    assert given.final_loss == 7.0


def test_the_loss_reaches_an_evaluator_that_has_none_and_no_other() -> None:
    plan, cpu = resolve_precision("fp32", torch.device("cpu")), torch.device("cpu")

    def seven(output: Tensor, batch: Any) -> Tensor:
        return 0 * output.sum() + 7.0

    def eight(output: Tensor, batch: Any) -> Tensor:
        return 0 * output.sum() + 8.0

    for own, expected in ((None, 7.0), (eight, 8.0)):
        held_out = HeldOutLoss(lambda: classes(1), device=cpu, precision=plan, loss_fn=own)
        assert make_trainer(Plain(), classes(), loss_fn=seven, evaluator=held_out).fit(1).eval_loss == expected


def test_an_evaluator_that_two_trainers_share_uses_the_loss_of_the_one_that_trains() -> None:
    plan, cpu = resolve_precision("fp32", torch.device("cpu")), torch.device("cpu")
    held_out = HeldOutLoss(lambda: classes(1), device=cpu, precision=plan)
    first, second = (
        make_trainer(
            Plain(), classes(), evaluator=held_out, loss_fn=lambda output, batch, value=value: 0 * output.sum() + value
        )
        for value in (7.0, 8.0)
    )
    assert (second.fit(1).eval_loss, first.fit(1).eval_loss, second.fit(2).eval_loss) == (8.0, 7.0, 8.0)


def test_a_callback_that_leaves_the_model_in_evaluation_mode_changes_no_update() -> None:
    class Looks:
        def on_step_end(self, run: Any) -> None:
            run.model.eval()

    result = make_trainer(Plain(), classes(), config=config_of(loss="cross_entropy"), callbacks=[Looks()]).fit(5)
    assert [r["loss"] for r in result.metrics] == pytest.approx(losses_by_hand(Plain(), 5), rel=1e-5)


def test_an_evaluator_of_ones_own_leaves_modes_and_random_numbers_as_they_were() -> None:
    """Also one that calls eval() and train(), which would put a frozen backbone in training mode."""
    seen: list[bool] = []

    def losses(evaluator: Any) -> list[float]:
        model = Plain()
        model.norm.eval()
        torch.manual_seed(0)
        trainer = make_trainer(
            nn.Sequential(model, nn.Dropout(0.5)),
            [(batch["pixels"], batch["labels"]) for batch in classes()],
            config=config_of(loss="cross_entropy", eval={"every_steps": 1}),
            evaluator=evaluator,
        )
        return [r["loss"] for r in trainer.fit(4).metrics]

    def own(model: nn.Module, should_stop: Any) -> dict[str, float]:
        seen.append(any(module.training for module in model.modules()))
        torch.rand(3)
        model.train()
        return {"loss": 1.0}

    assert losses(own) == losses(None)
    assert seen == [False] * 4


def test_unequal_batches_weigh_alike_in_training_by_tokens_and_in_evaluation() -> None:
    """Targets 1, -100, -100 and 3 beside predictions of w: by the labels that are no -100, a third of it was lost."""
    batches = [(torch.ones(n, 1), torch.tensor(y)) for n, y in ((3, [1, -100, -100]), (1, [3]))]
    everything = torch.tensor([1, -100, -100, 3])
    data = {"micro_batch_size": 1, "target_batch_size": 2, "loss_normalization": "tokens"}
    plan = resolve_precision("fp32", torch.device("cpu"))
    right = ((2.0 - everything) ** 2).mean().item()
    for squares in (lambda p, b: (p[:, 0] - b[1]) ** 2, lambda p, b: (p - b[1][:, None]) ** 2):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 2.0)
        held_out = HeldOutLoss(lambda: batches, device=torch.device("cpu"), precision=plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        result = make_trainer(
            model, batches, optimizer=optimizer, config=config_of(data=data), loss_fn=squares, evaluator=held_out
        ).fit(1)
        assert (result.final_loss, result.eval_loss) == (pytest.approx(right), pytest.approx(right))
        gradient = (2 * (2.0 - everything)).mean().abs().item()
        assert result.metrics[0]["grad_norm"] == pytest.approx(gradient)


def test_a_frozen_backbone_keeps_its_statistics_while_the_rest_is_trained_and_evaluated() -> None:
    """Put into training mode, its batch norm would drift: by 2.57 in 20 steps, users found."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(False).eval()
    console = StringIO()
    batches = [(1.0 + x, y) for x, y in regression_batches()]
    plan = resolve_precision("fp32", torch.device("cpu"))
    held_out = HeldOutLoss(lambda: batches, device=torch.device("cpu"), precision=plan)
    ours = make_trainer(
        model,
        batches,
        config=config_of(loss="mse", eval={"every_steps": 5}),
        evaluator=held_out,
        logger=MetricLogger(stream=console),
    )
    before = model[1].weight.clone()
    ours.fit(20)
    model.eval()
    ours.fit(25)
    assert model[0].running_mean.abs().max() == 0.0
    assert model[0].running_var.tolist() == [1.0] * 3
    assert model[0].num_batches_tracked == 0
    assert [part.training for part in model] == [False, True]
    assert not torch.equal(model[1].weight, before)
    assert console.getvalue().count("in evaluation mode while the rest is trained: 0") == 1


def test_a_batch_that_a_model_cannot_take_ends_the_run_at_once_also_if_it_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: lambda *args, **keywords: model(*args, **keywords))
    for compiled in (False, True):
        console = StringIO()
        ours = make_trainer(
            nn.Sequential(nn.Linear(3, 1)),
            regression_batches(),
            config=config_of(compile=compiled),
            logger=MetricLogger(stream=console),
        )
        with pytest.raises(ModelError, match=r"Sequential\.forward\(input\)"):
            ours.fit(1)
        assert "compilation failed" not in console.getvalue()


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


def test_fit_continues_where_the_last_one_ended() -> None:
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
    config = config_of(data=ACCUMULATE_TWO)
    record = make_trainer(OnlyLogits(), successor_batches(), config=config).fit(2).metrics[-1]
    assert record.keys() >= SEED_METRIC_KEYS | {"grad_norm", "lr_applied", "peak_memory_bytes"}
    assert (record["step"], record["samples"], record["tokens"], record["micro_batches"]) == (2, 16, 96, 2)
    assert all(record[key] > 0 for key in ("steps_per_sec", "samples_per_sec", "tokens_per_sec"))


def test_metrics_grow_on_every_step_whatever_the_cadence() -> None:
    """Seed: "metrics grows on every step even when the logger suppresses output by cadence"."""
    from speedtronic.metrics import MetricLogger
    from tests.support.models import (
        Silence,
        make_trainer,
    )

    result = make_trainer(logger=MetricLogger(stream=Silence(), every_steps=4)).fit(10)
    assert type(vars(result)["metrics"]) is MetricRecords  # a few numbers a step, until somebody asks for dicts
    assert [record["step"] for record in result.metrics] == list(range(1, 11))


class Distance(nn.Module):
    """A mapping of `x` (B, 3) and `y` (B, 1); returns the mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.linear(x) - y) ** 2).mean()


def test_mappings_of_features_count_their_samples_and_no_tokens() -> None:
    """Seen as one sample and one token each: 3 in three updates, where 18 is right."""
    console = StringIO()
    batch = {"x": torch.randn(6, 3), "y": torch.randn(6, 1)}
    ours = make_trainer(Distance(), [batch], logger=MetricLogger(stream=console))
    result = ours.fit(3)
    assert (result.samples, result.tokens, ours.samples) == (18, 0, 18)
    last = result.metrics[-1]
    assert (last["samples"], last["tokens"], last["tokens_per_sec"]) == (18, 0, 0.0)
    assert last["samples_per_sec"] == pytest.approx(6 * last["steps_per_sec"])
    assert ours.state_dict()["samples"] == 18
    lines = console.getvalue()
    assert "samples/s" in lines
    assert "tok/s" not in lines


def test_a_list_of_one_mapping_of_six_rows_gives_eighteen_samples_in_three_updates() -> None:
    """The batch of classes, `[{"x": X(6, 3), "y": Y}]`: 18 samples, and no token."""

    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x), y)

    result = make_trainer(Classes(), [{"x": torch.randn(6, 3), "y": torch.tensor([0, 1, 0, 1, 0, 1])}]).fit(3)
    assert (result.steps, result.samples, result.tokens) == (3, 18, 0)


def test_samples_that_have_to_be_guessed_are_warned_about_once() -> None:
    class Graph(Distance):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    console = StringIO()
    batch = {"x": torch.randn(6, 3), "edges": torch.zeros(2, 9)}
    result = make_trainer(Graph(), [batch], logger=MetricLogger(stream=console)).fit(3)
    assert result.samples == 18
    assert console.getvalue().count("warning: the tensors of a batch") == 1


class TimeMajor(nn.Module):
    """Returns a loss for each of (T, B) labels, while those of the batch are (B, T)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 11)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        scores, targets = self.embed(input_ids.T).flatten(0, 1), labels.T.flatten()
        return nn.functional.cross_entropy(scores, targets, ignore_index=-100, reduction="none").view(labels.T.shape)


def test_losses_of_tokens_in_the_order_of_time_train_and_evaluate_as_their_mean_and_that_is_said_once() -> None:
    ids = torch.arange(16).view(4, 4) % 11
    labels = (ids + 1) % 11
    labels[1:, 1:] = -100
    labels[3] = -100
    batch, console, cpu = {"input_ids": ids, "labels": labels}, StringIO(), torch.device("cpu")
    model = TimeMajor()
    right = nn.functional.cross_entropy(model.embed(ids).flatten(0, 1), labels.flatten()).item()
    logger = MetricLogger(stream=console)
    held_out = HeldOutLoss(
        lambda: [batch], device=cpu, precision=resolve_precision("fp32", cpu), warn=lambda message: evaluated.append(1)
    )
    evaluated: list[int] = []
    assert held_out(model)["loss"] == pytest.approx(right)
    assert held_out(model)["loss"] == pytest.approx(right)
    assert sum(evaluated) == 1
    result = make_trainer(model, [batch], logger=logger).fit(3)
    assert result.metrics[0]["loss"] == pytest.approx(right)
    assert console.getvalue().count("in another order") == 1


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


def test_fit_does_not_check_a_batch_size_that_nobody_gave() -> None:
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
