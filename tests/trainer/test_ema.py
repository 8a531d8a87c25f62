"""The average of the weights: its numbers, what it costs, and its place in the loop, in checkpoints and on resume."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import CheckpointError, ConfigError, NonFiniteError
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan
from speedtronic.runtime import build_runtime, train_from_config
from speedtronic.trainer import Trainer, ema
from speedtronic.trainer.ema import WeightAverage
from tests.support.configs import tiny
from tests.support.models import Endless, Regression, Silence, make_trainer, regression_batches

APPLIED, REFUSED = torch.tensor(0.0), torch.tensor(1.0)


class Mixed(nn.Module):
    """A tied pair, a frozen layer and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(self.frozen(self.embed(ids)))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), labels)}


def mixed(dtype: torch.dtype = torch.float32) -> Mixed:
    torch.manual_seed(0)
    return Mixed().to(dtype)


def train(model: nn.Module, updates: int, after_each: Callable[[], None]) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        ids = torch.randint(0, 7, (6,), generator=generator)
        model(ids, (ids + 1) % 7)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        after_each()


@pytest.fixture(params=[True, False], ids=["the verdict is on the host", "the verdict is on a device"])
def host(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def kept(average: WeightAverage) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in average.state_dict().items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("decay", [0.999, 0.9, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("verdict", [APPLIED, None])
def test_the_average_is_that_of_torch_bit_for_bit(
    decay: float, dtype: torch.dtype, verdict: Tensor | None, monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    monkeypatch.setattr(ema, "_is_on_host", lambda tensor: host)
    model = mixed(dtype)
    ours = WeightAverage(model, decay)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    theirs.update_parameters(model)  # its first update copies the initial weights

    def update() -> None:
        ours.update(verdict)
        theirs.update_parameters(model)

    train(model, 20, update)
    assert_same(dict(ours.model().named_parameters()), dict(theirs.module.named_parameters()))


def test_the_average_begins_with_the_initial_weights_and_decays_by_its_formula() -> None:
    model = mixed()
    ours = WeightAverage(model, 0.9)
    by_hand = {name: weight.detach().double() for name, weight in model.named_parameters() if weight.requires_grad}

    def update() -> None:
        ours.update(APPLIED)
        for name in by_hand:
            by_hand[name] = 0.9 * by_hand[name] + 0.1 * model.get_parameter(name).detach().double()

    train(model, 20, update)
    for name, expected in by_hand.items():
        torch.testing.assert_close(ours.state_dict()[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_refused_update_leaves_the_average_bit_for_bit(monkeypatch: pytest.MonkeyPatch, host: bool) -> None:
    monkeypatch.setattr(ema, "_is_on_host", lambda tensor: host)
    model = mixed()
    ours = WeightAverage(model, 0.9)
    train(model, 3, lambda: ours.update(APPLIED))
    before = kept(ours)
    ours.update(REFUSED)
    assert_same(kept(ours), before)


def test_weights_are_averaged_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema, "_CHUNK", 5)
    monkeypatch.setattr(ema, "_is_on_host", lambda tensor: False)
    model = mixed()
    ours = WeightAverage(model, 0.9)
    assert [len(chunk) for chunk in ours._chunks] == [1, 1, 1]
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)
    train(model, 3, lambda: (ours.update(APPLIED), theirs.update_parameters(model)))
    assert_same(dict(ours.model().named_parameters()), dict(theirs.module.named_parameters()))


def test_the_average_of_half_precision_weights_does_not_stand_still() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    model.weight.data.fill_(1.0)
    ours = WeightAverage(model, 0.999)
    model.weight.data.fill_(2.0)
    for _ in range(1000):
        ours.update(APPLIED)
    assert ours.state_dict()["weight"].dtype == torch.float32
    assert ours.state_dict()["weight"].item() == pytest.approx(2 - 0.999**1000, rel=1e-4)
    shown = ours.model().get_parameter("weight")
    assert shown.dtype == torch.bfloat16
    assert torch.equal(shown, ours.state_dict()["weight"].to(torch.bfloat16))


# ---------------------------------------------------------------- the copy


def test_tied_weights_are_averaged_once_and_tied_in_the_copy() -> None:
    ours = WeightAverage(mixed(), 0.9)
    state, copy = ours.state_dict(), ours.model()
    assert state.keys() == {"embed.weight", "head.weight", "norm.weight", "norm.bias"}
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert copy.get_parameter("embed.weight") is copy.get_parameter("head.weight")


def test_frozen_weights_and_buffers_are_the_models_own() -> None:
    model = mixed()
    ours = WeightAverage(model, 0.9)
    assert ours.model().get_parameter("frozen.weight") is model.frozen.weight
    train(model, 2, lambda: ours.update(APPLIED))
    model.norm.running_mean = model.norm.running_mean + 1  # type: ignore[operator]  # another tensor in its place
    copied, own = dict(ours.model().named_buffers()), dict(model.named_buffers())
    assert_same(copied, own)
    assert own["norm.num_batches_tracked"] == 2


def test_the_copy_is_in_evaluation_mode_and_takes_no_gradient() -> None:
    model = mixed()
    copy = WeightAverage(model, 0.9).model()
    assert not any(module.training for module in copy.modules())
    assert all(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert model.embed.weight.requires_grad


def test_a_model_that_moves_its_weights_in_a_forward_shows_the_average_on() -> None:
    """As `flatten_parameters` of a recurrent network does on CUDA."""
    model = nn.Linear(2, 2)
    ours = WeightAverage(model, 0.5)
    copied = ours.model().get_parameter("weight")
    copied.data = copied.data.clone()
    model.weight.data.add_(1.0)
    ours.update(APPLIED)
    torch.testing.assert_close(copied.detach(), model.weight.detach() - 0.5)


def test_an_average_takes_no_number_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema, "_is_on_host", lambda tensor: False)
    model = mixed()
    ours = WeightAverage(model, 0.9)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours.update(APPLIED)
    assert "aten::_local_scalar_dense" not in {event.name for event in profile.events()}


class Unique(Regression):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def __deepcopy__(self, memo: dict[int, Any]) -> Unique:
        raise self._error


def test_a_model_that_cannot_be_copied_is_a_config_error_before_training() -> None:
    ours = make_trainer(Unique(TypeError("a socket")), config={"optimizer": {"ema": 0.9}})
    with pytest.raises(ConfigError, match=r"optimizer\.ema: .*TypeError: a socket.*set optimizer\.ema to null"):
        ours.fit(1)
    assert ours.step == 0


def test_running_out_of_memory_is_not_a_config_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        WeightAverage(Unique(torch.OutOfMemoryError("full")), 0.9)


# ---------------------------------------------------------------- in the loop


def averaging(decay: float | None = 0.9, **options: Any) -> Trainer:
    sections = options.pop("sections", {})
    return make_trainer(config=SpeedtronicConfig.from_dict({"optimizer": {"ema": decay}, **sections}), **options)


def averages(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state_dict()["ema"].items()}


def test_fit_averages_after_each_update_and_leaves_training_as_it_is() -> None:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    for batch in regression_batches()[:6]:
        model(*batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    ours = averaging()
    ours.fit(4)
    ours.fit(6)
    assert_same(averages(ours), {name: p.detach() for name, p in average.module.named_parameters()})
    assert_same(dict(ours.model.named_parameters()), dict(model.named_parameters()))


def test_accumulated_micro_batches_are_one_update_of_the_average() -> None:
    ours = averaging(sections={"data": {"micro_batch_size": 4, "target_batch_size": 8}})
    seen = {name: p.detach().clone() for name, p in ours.model.named_parameters()}
    for step in (1, 2):
        ours.fit(step)
        for name, parameter in ours.model.named_parameters():
            seen[name].lerp_(parameter.detach(), 1 - 0.9)
    assert_same(averages(ours), seen)


def test_without_the_key_there_is_no_average() -> None:
    ours = averaging(None)
    ours.fit(1)
    assert ours.averaged_model is None
    assert ours.state_dict()["ema"] is None


def test_what_is_evaluated_is_the_average() -> None:
    seen: list[nn.Module] = []

    def evaluate(model: nn.Module, should_stop: Callable[[], bool]) -> dict[str, float]:
        seen.append(model)
        return {"loss": model.get_parameter("linear.weight").sum().item()}

    ours = averaging(evaluator=evaluate, sections={"eval": {"every_steps": 2}})
    result = ours.fit(4)
    assert len(seen) == 2
    assert seen[0] is seen[1] is ours.averaged_model
    assert result.eval_loss == averages(ours)["linear.weight"].sum().item()
    assert result.eval_loss != ours.model.get_parameter("linear.weight").sum().item()


def test_the_average_follows_weights_that_a_coordinator_installs() -> None:
    class Installing:
        def start(self) -> None: ...

        def after_optimizer_step(self, model: nn.Module, step: int) -> bool:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            return True

        def stop(self) -> None: ...

        def state_dict(self) -> None: ...

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    ours = averaging(0.5, coordinator=Installing())
    begin = ours.model.get_parameter("linear.bias").item()
    ours.fit(2)
    assert averages(ours)["linear.bias"].item() == pytest.approx(0.25 * begin + 0.25 * 1 + 0.5 * 2)


def test_the_average_begins_with_the_weights_that_a_coordinator_starts_with() -> None:
    class Joining:
        def start(self) -> None:
            nn.init.constant_(ours.model.get_parameter("linear.bias"), 7.0)

        def after_optimizer_step(self, model: nn.Module, step: int) -> bool:
            nn.init.constant_(model.get_parameter("linear.bias"), 8.0)
            return False

        def stop(self) -> None: ...

        def state_dict(self) -> None: ...

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    ours = averaging(0.5, coordinator=Joining())
    ours.fit(1)
    assert averages(ours)["linear.bias"].item() == 7.5


def test_weights_that_are_unfrozen_while_it_runs_are_said_not_to_be_averaged() -> None:
    class Unfreeze:
        def __init__(self, *, freezes: bool) -> None:
            self.freezes = freezes

        def on_train_start(self, run: Any) -> None:
            if self.freezes:
                run.model.linear.weight.requires_grad_(False)

        def on_step_end(self, run: Any) -> None:
            if run.step == 2:
                run.model.linear.weight.requires_grad_(True)

    for freezes in (True, False):
        stream, model = StringIO(), Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model.linear.weight.requires_grad_(freezes)
        callbacks = [Unfreeze(freezes=freezes)]
        ours = averaging(
            model=model, optimizer=optimizer, callbacks=callbacks, logger=MetricLogger(stream=stream, level="WARNING")
        )
        ours.fit(5)
        assert ("linear.weight" in averages(ours)) == freezes
        assert stream.getvalue().count("weights are trained that were frozen") == (not freezes)
        assert ours.averaged_model is not None
        same = torch.equal(ours.averaged_model.get_parameter("linear.weight"), model.linear.weight)
        assert same == (not freezes)


@pytest.mark.parametrize("replaced", [False, True])
def test_the_average_starts_over_with_a_warning_when_other_weights_are_trained_than_before(replaced: bool) -> None:
    stream = StringIO()
    model = Regression()
    model.linear.weight.requires_grad_(replaced)
    ours = averaging(0.5, model=model, logger=MetricLogger(stream=stream))
    ours.fit(1)
    ours.fit(2)
    assert "starts over" not in stream.getvalue()
    if replaced:
        model.linear.weight = nn.Parameter(torch.ones(1, 3))
        ours.optimizer.add_param_group({"params": [model.linear.weight]})
    else:
        model.linear.weight.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours.fit(3)
    assert "starts over" in stream.getvalue()
    assert averages(ours).keys() == before.keys()
    for name, average in averages(ours).items():
        assert torch.equal(average, before[name].lerp(model.get_parameter(name).detach(), 0.5))
    shown = ours.averaged_model
    assert shown is not None
    assert shown.get_parameter("linear.weight") is not model.linear.weight


def test_a_model_that_was_compiled_by_hand_is_averaged_under_its_plain_names() -> None:
    torch.manual_seed(0)
    model = Regression()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ours = averaging(model=compiled, optimizer=optimizer)
    ours.fit(3)
    assert averages(ours).keys() == {"linear.weight", "linear.bias"}
    assert type(ours.averaged_model) is Regression


# ---------------------------------------------------------------- updates that were refused


def poisoned(step: int) -> Endless:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = regression_batches()[number % 8]
        return x * float("nan") if number == step - 1 else x, y

    return Endless(batch)


def adamw_trainer(batches: Any, *, fused: bool, policy: str = "stop", every_steps: int = 10) -> Trainer:
    torch.manual_seed(0)
    model = Regression()
    return averaging(
        model=model,
        batches=batches,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused),
        logger=MetricLogger(stream=Silence(), every_steps=every_steps),
        sections={"run": {"on_nonfinite": policy}},
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("every_steps", [1, 10])
def test_after_a_stop_the_average_is_that_of_the_last_good_step(fused: bool, every_steps: int) -> None:
    good = adamw_trainer(regression_batches(), fused=fused)
    good.fit(2)
    bad = adamw_trainer(poisoned(3), fused=fused, every_steps=every_steps)
    with pytest.raises(NonFiniteError):
        bad.fit(9)
    assert bad.step == 2
    assert_same(averages(bad), averages(good))


def test_training_resumes_exactly_from_the_state_after_a_stop() -> None:
    straight = adamw_trainer(regression_batches(), fused=True)
    straight.fit(4)
    bad = adamw_trainer(poisoned(3), fused=True)
    with pytest.raises(NonFiniteError):
        bad.fit(9)
    state = {**bad.state_dict(), "data": None}
    rest = adamw_trainer(regression_batches()[2:], fused=True)
    rest.resume(state)
    rest.fit(4)
    assert_same(averages(rest), averages(straight))


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_update_leaves_the_average_as_it_is(fused: bool) -> None:
    ours = adamw_trainer(poisoned(3), fused=fused, policy="skip")
    ours.fit(2)
    before = averages(ours)
    ours.fit(3)
    assert_same(averages(ours), before)
    ours.fit(4)
    assert all(torch.isfinite(tensor).all() for tensor in averages(ours).values())
    assert not torch.equal(averages(ours)["linear.weight"], before["linear.weight"])


def test_an_ignored_bad_update_is_averaged_like_any_other() -> None:
    class Infinite(Regression):
        """Its loss is infinite, and its gradient is not."""

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x, y)["loss"] + float("inf")}

    torch.manual_seed(0)
    ours = averaging(0.5, model=Infinite(), sections={"run": {"on_nonfinite": "ignore"}})
    begin = ours.model.get_parameter("linear.bias").item()
    ours.fit(1)
    end = ours.model.get_parameter("linear.bias").item()
    assert begin != end
    assert averages(ours)["linear.bias"].item() == pytest.approx((begin + end) / 2)


def test_an_update_that_overflows_leaves_the_average_as_it_is() -> None:
    scaled = PrecisionPlan(mode="fp16", dtype=torch.float32, use_scaler=True, autocast_enabled=False, device_type="cpu")
    batches = regression_batches()
    overflowing = [batches[0], (batches[1][0] * float("inf"), batches[1][1]), batches[1]]
    ours = averaging(batches=overflowing, precision=scaled)
    ours.fit(2)
    plain = averaging(batches=batches)
    plain.fit(2)
    for name, tensor in averages(plain).items():
        torch.testing.assert_close(averages(ours)[name], tensor)


# ---------------------------------------------------------------- checkpoints and resume

SECTIONS: dict[str, Any] = {
    "run": {"max_steps": 12},
    "data": {"shuffle": True, "validation_fraction": 0.2},
    "model": {"dropout": 0.2},
    "eval": {"every_steps": 4},
}


def config_of(folder: Path, decay: float | None) -> dict[str, Any]:
    return tiny(folder, **SECTIONS, optimizer={"ema": decay, "lr": 1e-2}, logging={"json_file": "log.jsonl"})


def saved(folder: Path) -> dict[str, Any]:
    state = CheckpointManager(folder / "checkpoints").load_latest()
    assert state is not None
    return state


def test_five_steps_and_seven_equal_twelve_bit_for_bit(tmp_path: Path) -> None:
    whole = train_from_config(config_of(tmp_path / "whole", 0.9))
    train_from_config(config_of(tmp_path / "parts", 0.9), max_steps=5)
    rest = train_from_config(config_of(tmp_path / "parts", 0.9), resume=True)
    assert [record["loss"] for record in rest.metrics] == [record["loss"] for record in whole.metrics[5:]]
    assert rest.eval_loss == whole.eval_loss
    first, second = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert_same(first["ema"], second["ema"])
    assert_same(first["model"], second["model"])
    assert first["metrics"] == second["metrics"]


def test_a_checkpoint_holds_the_average_by_the_models_names_in_float32(tmp_path: Path) -> None:
    train_from_config(config_of(tmp_path, 0.9))
    state = saved(tmp_path)
    assert state["ema"].keys() == state["model"].keys()
    assert {tensor.dtype for tensor in state["ema"].values()} == {torch.float32}
    # The embedding and the head are one tensor in both.
    assert state["ema"]["lm_head.weight"] is state["ema"]["transformer.wte.weight"]
    assert not torch.equal(state["ema"]["lm_head.weight"], state["model"]["lm_head.weight"])


def test_the_decay_may_change_on_resume() -> None:
    first = averaging(0.9)
    first.fit(3)
    second = averaging(0.5)
    second.resume(first.state_dict())
    before = averages(second)
    assert_same(before, averages(first))
    second.fit(4)
    expected = before["linear.weight"].lerp(second.model.get_parameter("linear.weight").detach(), 0.5)
    assert torch.equal(averages(second)["linear.weight"], expected)


def resumed_log(folder: Path, before: float | None, after: float | None) -> tuple[Trainer, str]:
    train_from_config(config_of(folder, before), max_steps=3)
    trainer, _ = build_runtime(config_of(folder, after), resume=True)
    with trainer.logger:
        pass
    return trainer, (folder / "log.jsonl").read_text(encoding="utf-8")


def test_an_average_that_is_turned_on_at_a_resume_starts_with_the_restored_weights(tmp_path: Path) -> None:
    trainer, log = resumed_log(tmp_path, None, 0.9)
    assert "the checkpoint has no average of the weights, so it starts with its weights" in log
    assert_same(averages(trainer), saved(tmp_path)["model"])


def test_an_average_that_is_switched_off_is_dropped(tmp_path: Path) -> None:
    trainer, log = resumed_log(tmp_path, 0.9, None)
    assert "the checkpoint's average of the weights is dropped" in log
    assert trainer.state_dict()["ema"] is None


def test_a_state_from_before_there_were_averages_resumes() -> None:
    first = averaging(None)
    first.fit(2)
    state = first.state_dict()
    del state["ema"]
    second = averaging()
    second.resume(state)
    assert_same(averages(second), dict(first.model.named_parameters()))


def test_an_average_of_other_weights_is_an_error_that_lists_them() -> None:
    first = averaging()
    first.fit(1)
    state = first.state_dict()
    state["ema"] = {"linear.weight": torch.zeros(2, 3), "linear.scale": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        averaging().resume(state)
    assert str(caught.value).splitlines() == [
        "the checkpoint's average of the weights (optimizer.ema) is of other weights:",
        "  linear.bias has no average in the checkpoint",
        "  linear.scale is not trained here",
        "  the average of linear.weight has shape (2, 3), and the weight (1, 3)",
        "Set optimizer.ema to null to continue without it",
    ]


def test_a_new_run_begins_with_the_average_of_another_and_says_so(tmp_path: Path) -> None:
    train_from_config(config_of(tmp_path / "first", 0.9))
    config = config_of(tmp_path / "second", None)
    config["run"]["init_from"] = str(tmp_path / "first")
    trainer, _ = build_runtime(config)
    with trainer.logger:
        assert_same(dict(trainer.model.state_dict()), saved(tmp_path / "first")["ema"])
    assert "of its averaged weights (optimizer.ema)" in (tmp_path / "second/log.jsonl").read_text(encoding="utf-8")


def test_the_best_checkpoint_is_that_of_the_best_average(tmp_path: Path) -> None:
    config = config_of(tmp_path, 0.9)
    config["checkpoint"] = {"every_steps": 4, "keep_last": None, "keep_best": 1}
    trainer, manager = build_runtime(config)
    measured: dict[int, float] = {}
    evaluate: Any = trainer._evaluator

    def watched(model: nn.Module, should_stop: Callable[[], bool]) -> Any:
        numbers = evaluate(model, should_stop)
        assert evaluate(trainer.model)["loss"] != numbers["loss"]
        assert evaluate(trainer.averaged_model)["loss"] == numbers["loss"]
        measured[trainer.step] = numbers["loss"]
        return numbers

    trainer._evaluator = watched
    trainer.fit()
    assert {entry.step: entry.eval_loss for entry in manager.entries()} == measured
