"""Evaluation counts every target alike and leaves no trace."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from speedtronic.checkpoint import capture_rng_state
from speedtronic.errors import ConfigError, DataError, ModelError
from speedtronic.evaluation import HeldOutLoss
from speedtronic.precision import resolve_precision
from speedtronic.trainer.loss import loss_by_name

CPU = torch.device("cpu")


class Model(nn.Module):
    """The loss is the mean of the labels that count; its dropout draws random numbers even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.modes.append((self.training, torch.is_grad_enabled()))
        torch.rand(3)
        random.random()
        return {"loss": labels[labels != -100].float().mean()}


def batch(*labels: int) -> dict[str, Tensor]:
    ids = torch.tensor([labels])
    return {"input_ids": ids, "labels": ids}


def evaluator(held_out: list[Any], **options: Any) -> HeldOutLoss:
    return HeldOutLoss(lambda: held_out, device=CPU, precision=resolve_precision("fp32", CPU), **options)


def test_batches_weigh_by_their_targets() -> None:
    numbers = evaluator([batch(1, 1, 1), batch(5, -100, -100)])(Model())
    assert numbers["loss"] == pytest.approx((3 * 1 + 1 * 5) / 4)
    assert (numbers["targets"], numbers["batches"]) == (4, 2)


def test_no_weight_is_copied_to_the_device_while_batches_are_evaluated() -> None:
    """A copy of one number from the host would wait for all that the device still has to do."""
    copies: list[tuple[int, ...]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("meta"):
                copies.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    class Mean(nn.Module):
        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            return (inputs + labels).mean()

    held_out = [{"inputs": torch.ones(3, 2), "labels": torch.ones(3, 2, dtype=torch.long)}] * 3
    device = torch.device("meta")  # computes nothing, so the losses cannot be read in the end
    measure = HeldOutLoss(lambda: held_out, device=device, precision=resolve_precision("fp32", CPU))
    with Copies(), pytest.raises(NotImplementedError):
        measure(Mean())
    assert copies == [(3, 2)] * 6


def test_batches_without_labels_weigh_by_their_samples() -> None:
    class Mean(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.mean()

    numbers = evaluator([{"inputs": torch.ones(3, 2)}, {"inputs": torch.full((1, 2), 5.0)}])(Mean())
    assert numbers["loss"] == pytest.approx(2.0)


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        predicted: Tensor = self.linear(x)
        return predicted if y is None else ((predicted - y) ** 2).mean()


def in_batches(x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    return [{"x": a, "y": b} for a, b in zip(x.split(5), y.split(5), strict=True)]


def test_samples_of_any_layout_count_alike_where_the_last_batch_is_short() -> None:
    """23 samples in batches of 5; counted as one sample each, the last three would weigh as much as five."""
    model, x = Regressor(), torch.randn(23, 3)
    y = torch.arange(23.0).unsqueeze(1) ** 2
    right = model(x, y).item()
    batches = in_batches(x, y)
    mean_of_means = sum(model(**batch).item() for batch in batches) / 5
    assert abs(mean_of_means - right) > 0.01 * right
    numbers = evaluator(batches)(model)
    assert (numbers["loss"], numbers["targets"]) == (pytest.approx(right), 23)
    pairs = [((batch["x"],), batch["y"]) for batch in batches]
    nested = evaluator(pairs, loss_fn=lambda output, batch: ((output - batch[1]) ** 2).mean())

    class Nested(Regressor):
        def forward(self, x: Any, y: Any = None) -> Tensor:
            return super().forward(x[0])

    assert nested(Nested())["loss"] == pytest.approx(right)


def test_a_floating_target_of_minus_100_is_a_target() -> None:
    """With batches weighed by the targets that are not -100.0, most of this loss would be left out."""
    model, x = Regressor(), torch.randn(12, 3)
    y = torch.full((12, 1), -100.0)
    y[::5] = 1.0
    right = ((model(x) - y) ** 2).mean().item()
    batches = [{"x": a, "labels": b} for a, b in zip(x.split(5), y.split(5), strict=True)]
    assert evaluator(batches, loss_fn=loss_by_name("mse"))(model)["loss"] == pytest.approx(right)
    pairs = [(batch["x"], batch["labels"]) for batch in batches]
    assert evaluator(pairs)(model)["loss"] == pytest.approx(right)
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.zero_()
    # Nine of 100², three of 1².
    numbers = evaluator(batches, loss_fn=loss_by_name("mse"))(model)
    assert (numbers["loss"], numbers["targets"]) == (pytest.approx(7500.25), 12)


def test_integers_of_minus_100_that_a_loss_fn_predicts_weigh_like_all_others() -> None:
    """Four squares: 1, 100², 100² and 9. By the labels that are not -100, the first batch would weigh 1 of 2."""

    class Zero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.0 * x

    def squares(output: Tensor, batch: Any) -> Tensor:
        return (output - batch["labels"]) ** 2

    targets = [torch.tensor([1, -100, -100]), torch.tensor([3])]
    batches = [{"x": torch.zeros(len(labels)), "labels": labels} for labels in targets]
    numbers = evaluator(batches, loss_fn=squares)(Zero())
    assert (numbers["loss"], numbers["targets"]) == (pytest.approx((1 + 2 * 100**2 + 9) / 4), 4)
    # A batch of nothing but these has its weight too.
    batches = [{"x": torch.zeros(2), "labels": torch.full((2,), -100)}, batches[1]]
    numbers = evaluator(batches, loss_fn=squares)(Zero())
    assert (numbers["loss"], numbers["targets"]) == (pytest.approx((2 * 100**2 + 9) / 3), 3)


def test_losses_of_samples_with_rows_of_labels_weigh_by_the_samples() -> None:
    """A loss of each sequence, whatever its length: 1, 2 and 6. By the labels it would be (4 · 1.5 + 6) / 5."""

    class Zero(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    rows = [torch.tensor([[1, 1], [1, 1]]), torch.tensor([[1, -100]])]
    batches = [
        {"x": x, "labels": r} for x, r in zip((torch.tensor([1.0, 2.0]), torch.tensor([6.0])), rows, strict=True)
    ]
    numbers = evaluator(batches, loss_fn=lambda output, batch: output)(Zero())
    assert (numbers["loss"], numbers["targets"]) == (3.0, 3)


@pytest.mark.parametrize("name", ["labels", "label", "targets", "target"])
def test_batches_weigh_by_their_targets_under_any_name_of_labels(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(23, 3, generator=generator), torch.randint(0, 1, (23,), generator=generator)
    y[3:9] = -100
    model = Regressor()

    def loss_of(output: Tensor, batch: Any) -> Tensor:
        scores = torch.cat([output, -output], dim=1)
        return nn.functional.cross_entropy(scores, batch[name])

    batches = [{"x": a, name: b} for a, b in zip(x.split(5), y.split(5), strict=True)]
    right = loss_of(model(x), {name: y}).item()
    numbers = evaluator(batches, loss_fn=loss_of)(model)
    assert (numbers["loss"], numbers["targets"]) == (pytest.approx(right), 17)


def test_a_batch_without_a_target_has_no_weight_even_if_its_loss_is_nan() -> None:
    """A model that returns its own mean: of three batches, the middle one has no target."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 11)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.embed(input_ids).flatten(0, 1), labels.flatten())

    model, ids = Mean(), torch.arange(24).view(6, 4) % 11
    labels = (ids + 1) % 11
    labels[2:4] = -100
    labels[0, 1:] = -100
    right = model(ids, labels).item()
    batches = [{"input_ids": a, "labels": b} for a, b in zip(ids.split(2), labels.split(2), strict=True)]
    assert model(**batches[1]).isnan()
    numbers = evaluator(batches)(model)
    assert numbers["loss"] == pytest.approx(right)
    assert (numbers["targets"], numbers["batches"]) == (13, 3)


def test_of_three_held_out_batches_the_middle_one_all_ignored_the_mean_is_that_of_the_other_two() -> None:
    """The model's own mean of the middle one is NaN: (1 + 2 + 6) / 3 = 3 is right."""
    batches = [batch(1, 2), batch(-100, -100), batch(6, -100)]
    assert Model()(**batches[1])["loss"].isnan()
    numbers = evaluator(batches)(Model())
    assert (numbers["loss"], numbers["targets"], numbers["batches"]) == (3.0, 3, 3)


def test_a_loss_that_is_nan_at_a_target_is_nan() -> None:
    class Broken(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return torch.tensor(float("nan"))

    assert math.isnan(evaluator([batch(1, 2), batch(1, -100)])(Broken())["loss"])


def test_what_looks_wrong_is_said_once_in_all_evaluations() -> None:
    class Graph(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return torch.ones(2, 3)

    said: list[str] = []
    evaluate = evaluator([{"x": torch.zeros(2, 3), "edges": torch.zeros(9)}], warn=said.append)
    for _ in range(2):
        evaluate(Graph())
    assert [message.split()[1] for message in said] == ["model", "tensors"]


def test_losses_of_each_label_are_averaged_over_the_targets() -> None:
    class Each(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return input_ids.float()

    batches = [
        {"input_ids": torch.tensor([[1, 2, 9]]), "labels": torch.tensor([[1, 1, -100]])},
        {"input_ids": torch.tensor([[3, 9, 9]]), "labels": torch.tensor([[1, -100, -100]])},
    ]
    assert evaluator(batches)(Each())["loss"] == pytest.approx((1 + 2 + 3) / 3)


def test_only_the_asked_number_of_batches_is_read() -> None:
    assert evaluator([batch(1), batch(3), batch(100)], batches=2)(Model())["loss"] == pytest.approx(2.0)


def test_every_pass_starts_from_the_beginning() -> None:
    evaluate, model = evaluator([batch(1), batch(3)], batches=1), Model()
    assert evaluate(model)["loss"] == evaluate(model)["loss"] == 1.0


def test_the_model_is_evaluated_in_eval_mode_without_gradients() -> None:
    model = Model()
    evaluator([batch(1)])(model)
    assert model.modes == [(False, False)]


def test_a_pass_is_given_up_when_it_should_stop() -> None:
    model = Model()
    answers = iter([False, True, True])
    assert evaluator([batch(1), batch(2), batch(3)])(model, lambda: next(answers)) is None
    assert len(model.modes) == 1


def test_each_modules_own_flag_comes_back() -> None:
    model = Model()
    model.train()
    model.inner.eval()
    evaluator([batch(1)])(model)
    assert (model.training, model.inner.training) == (True, False)


class Normed(nn.Module):
    """Its batch norm has seen the data that it is evaluated on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.norm.running_mean.fill_(float("nan"))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.norm(x).sum(-1) - y) ** 2).mean()


class Counting(Normed):
    """Counts its calls in a buffer, which is another tensor after each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(5.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x, y)


@pytest.mark.filterwarnings("ignore:.torch.jit.", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(
    ("kind", "changed"), [("plain", ""), ("traced", "norm."), ("counting", "calls"), ("script", "")]
)
def test_no_buffer_is_changed_even_by_a_module_that_was_traced_in_training_mode(kind: str, changed: str) -> None:
    x, y = torch.randn(8, 3) + 2, torch.zeros(8)
    model: nn.Module = Counting() if kind == "counting" else Normed()
    if kind == "script":
        model = torch.jit.script(model)
    elif kind == "traced":
        model.norm.running_mean.zero_()
        model = torch.jit.trace(model, (x, y), check_trace=False)
        model.norm.running_mean.zero_()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    said: list[str] = []
    evaluate = evaluator([(x, y), (x + 1, y)], warn=said.append)
    for _ in range(2):
        evaluate(model)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)
    assert len(said) == bool(changed)
    assert all(f"put back: {changed}" in message for message in said)


def test_the_random_state_is_as_before() -> None:
    model = Model()
    before = capture_rng_state()
    evaluator([batch(1)])(model)
    after = capture_rng_state()
    assert before["python"] == after["python"]
    assert torch.equal(before["torch"], after["torch"])


def test_unshifted_labels_are_aligned_first() -> None:
    assert evaluator([batch(9, 1, 3)], labels="unshifted")(Model())["loss"] == pytest.approx(2.0)


@pytest.mark.parametrize("batches", [[], [batch(-100, -100)]])
def test_held_out_data_without_a_target_is_an_error(batches: list[Any]) -> None:
    class Zero(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return torch.tensor(0.0)

    with pytest.raises(DataError, match="no target|gave no batch"):
        evaluator(batches)(Zero())


def test_an_iterator_that_was_read_before_is_told_from_data_without_targets() -> None:
    batches = iter([batch(1, 1, 1)])
    once = HeldOutLoss(lambda: batches, device="cpu", precision=resolve_precision("fp32", CPU))
    assert once(Model()) is not None
    with pytest.raises(DataError, match="gave no batch: .*an iterator that an earlier evaluation has read"):
        once(Model())


def test_batches_in_place_of_a_function_that_returns_them_are_refused() -> None:
    passes: Any = [batch(1, 1, 1)]
    with pytest.raises(ConfigError, match="^passes: must be a function .* such as lambda: batches, not a list"):
        HeldOutLoss(passes, device=CPU, precision=resolve_precision("fp32", CPU))


def test_gradients_of_the_model_itself_are_refused_with_what_to_do() -> None:
    class Penalized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad((x**2).sum(), x, create_graph=True)
            return gradient.norm()

    with pytest.raises(ModelError, match=r"penalty on gradients.*torch.is_grad_enabled\(\)"):
        evaluator([{"x": torch.ones(2, 3)}])(Penalized())
