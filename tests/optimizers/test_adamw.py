"""AdamW and cautious AdamW: the formula, torch's own optimizer, memory, state and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from speedtronic.optimizers import adamw
from speedtronic.optimizers.adamw import CautiousAdamW, adamw_step
from tests.support.cases import case

OPTIONS: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["ordinary", "fused"])
RESCALE = pytest.mark.parametrize("rescale", [False, True], ids=["", "rescale"])


class PlainAdamW:
    """The formula of AdamW in float64, one parameter after another."""

    def __init__(
        self, weights: Sequence[Tensor], *, cautious: bool, rescale: bool = False, maximize: bool = False
    ) -> None:
        self.weights = [weight.detach().double().clone() for weight in weights]
        self.first = [torch.zeros_like(weight) for weight in self.weights]
        self.second = [torch.zeros_like(weight) for weight in self.weights]
        self.steps = 0
        self.cautious, self.rescale, self.maximize = cautious, rescale, maximize

    def step(self, gradients: Sequence[Tensor]) -> None:
        lr, (beta1, beta2), eps, decay = (OPTIONS[name] for name in ("lr", "betas", "eps", "weight_decay"))
        self.steps += 1
        for i, gradient in enumerate(gradients):
            g = -gradient.double() if self.maximize else gradient.double()
            self.first[i] = beta1 * self.first[i] + (1 - beta1) * g
            self.second[i] = beta2 * self.second[i] + (1 - beta2) * g * g
            direction = self.first[i] / (1 - beta1**self.steps)
            direction = direction / ((self.second[i] / (1 - beta2**self.steps)).sqrt() + eps)
            if self.cautious:
                kept = (direction * g > 0).double()
                direction = direction * kept
                if self.rescale:
                    direction = direction * g.numel() / (kept.sum() + 1)
            self.weights[i] = (1 - lr * decay) * self.weights[i] - lr * direction


def weights_of_all_kinds(dtype: torch.dtype) -> list[nn.Parameter]:
    """No dimension, no elements, one piece, several pieces, other memory orders, and gaps in the memory."""
    draw = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    layouts = [
        normal(),
        normal(0),
        normal(3, 0),
        normal(1),
        normal(5),
        normal(9, 13),
        normal(11, 7).T,
        normal(2, 3, 4, 5).to(memory_format=torch.channels_last),
        normal(6, 10)[:, ::2],
    ]
    return [nn.Parameter(layout) for layout in layouts]


def draw_gradients(weights: Sequence[Tensor], step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    gradients = [torch.randn(w.shape, generator=draw, dtype=torch.float64).to(w.dtype) for w in weights]
    for gradient in gradients:
        # Rows without a gradient, like those of tokens that are not in the batch.
        if gradient.ndim == 2:
            gradient[step % 2 :: 2, :1] = 0.0
    return gradients


def give_gradients(weights: Sequence[Tensor], step: int, scale: float = 1.0) -> list[Tensor]:
    gradients = draw_gradients(weights, step)
    for weight, gradient in zip(weights, gradients, strict=True):
        # Autograd gives a gradient the memory layout of its parameter.
        weight.grad = torch.empty_like(weight).copy_(gradient * scale)
    return gradients


def train(optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for step in range(first, first + steps):
        give_gradients(weights, step)
        optimizer.step()


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = [tensor for weight in weights for _, tensor in sorted(optimizer.state[weight].items())]
    return [tensor.detach().clone() for tensor in [*weights, *state]]


def bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as bytes: there, 0 and -0 differ, and NaN equals itself."""
    return [tensor.detach().reshape(-1).view(torch.uint8).clone() for tensor in tensors]


def assert_same_bits(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(bits(got), bits(wanted), strict=True))


# ---------------------------------------------------------------------- the formula


@RESCALE
@FUSED
def test_twenty_cautious_steps_are_the_formula(monkeypatch: pytest.MonkeyPatch, fused: bool, rescale: bool) -> None:
    for piece in (3, 40, 2**18):
        with case(piece):
            monkeypatch.setattr(adamw, "CPU_PIECE", piece)
            weights = weights_of_all_kinds(torch.float64)
            plain = PlainAdamW(weights, cautious=True, rescale=rescale)
            optimizer = CautiousAdamW(weights, **OPTIONS, fused=fused, rescale=rescale)
            for step in range(20):
                plain.step(give_gradients(weights, step))
                optimizer.step()
            torch.testing.assert_close(weights, plain.weights, rtol=1e-12, atol=1e-13, check_stride=False)


@FUSED
def test_twenty_steps_in_smaller_dtypes_are_the_formula_within_their_precision(fused: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rescale in (False, True):
            with case(dtype, rescale):
                weights = weights_of_all_kinds(dtype)
                plain = PlainAdamW(weights, cautious=True, rescale=rescale)
                optimizer = CautiousAdamW(weights, **OPTIONS, fused=fused, rescale=rescale)
                for step in range(20):
                    plain.step(give_gradients(weights, step))
                    optimizer.step()
                # A 16-bit moment may cross zero at another step than the formula does, so a few entries may differ.
                tolerance = {torch.float32: 2e-6, torch.bfloat16: 0.03, torch.float16: 0.004}[dtype]
                for weight, wanted in zip(weights, plain.weights, strict=True):
                    assert weight.dtype == dtype
                    distance = (weight.double() - wanted).abs() / (wanted.abs() + 1)
                    assert (distance > tolerance).sum() <= (0 if dtype is torch.float32 else 0.03 * weight.numel() + 1)


@FUSED
def test_maximize_climbs_by_the_same_formula(fused: bool) -> None:
    weights = weights_of_all_kinds(torch.float64)
    plain = PlainAdamW(weights, cautious=True, rescale=True, maximize=True)
    optimizer = CautiousAdamW(weights, **OPTIONS, fused=fused, maximize=True, rescale=True)
    for step in range(20):
        plain.step(give_gradients(weights, step))
        optimizer.step()
    torch.testing.assert_close(weights, plain.weights, rtol=1e-12, atol=1e-13, check_stride=False)


@RESCALE
@FUSED
def test_the_size_of_the_pieces_changes_nothing_but_the_last_digit(
    monkeypatch: pytest.MonkeyPatch, fused: bool, rescale: bool
) -> None:
    def trained(piece: int) -> list[Tensor]:
        monkeypatch.setattr(adamw, "CPU_PIECE", piece)
        optimizer = CautiousAdamW(weights_of_all_kinds(torch.float32), **OPTIONS, fused=fused, rescale=rescale)
        train(optimizer, 5)
        return everything(optimizer)

    torch.testing.assert_close(trained(8), trained(2**18), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["transposed", "with gaps"])
def test_a_gradient_may_have_another_memory_layout_than_its_parameter(layout: str) -> None:
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    plain = PlainAdamW([weight], cautious=True)
    optimizer = CautiousAdamW([weight], **OPTIONS, fused=True)
    for step in range(5):
        gradient = draw_gradients([weight], step)[0]
        weight.grad = torch.empty(6, 4).double().T if layout == "transposed" else torch.empty(4, 12).double()[:, ::2]
        weight.grad.copy_(gradient)
        plain.step([gradient])
        optimizer.step()
    torch.testing.assert_close(weight.detach(), plain.weights[0], rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------------- mask and decay


@FUSED
def test_only_entries_that_go_down_the_gradient_move(fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = CautiousAdamW([weight], lr=0.1, weight_decay=0.0, fused=fused)
    for step in range(4):
        before = weight.detach().clone()
        (gradient,) = give_gradients([weight], step)
        gradient[::3] = 0.0
        weight.grad = gradient
        optimizer.step()
        moved = weight.detach() - before
        assert torch.all(moved * gradient <= 0)
        assert torch.all(moved[::3] == 0)
        against = optimizer.state[weight]["exp_avg"] * gradient <= 0
        assert torch.equal(moved == 0, against)
        assert 0 < int((against & (gradient != 0)).sum()) < 500 or step == 0


@FUSED
def test_weight_decay_is_not_masked(fused: bool) -> None:
    weight = nn.Parameter(torch.full((8,), 2.0))
    optimizer = CautiousAdamW([weight], lr=0.1, weight_decay=0.5, fused=fused)
    weight.grad = torch.zeros(8)
    optimizer.step()
    assert torch.equal(weight.detach(), torch.full((8,), 2.0) * (1 - 0.1 * 0.5))


@FUSED
def test_a_tiny_gradient_counts_although_its_product_with_the_update_is_zero(fused: bool) -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = CautiousAdamW([weight], lr=1e-3, weight_decay=0.0, fused=fused)
    weight.grad = torch.tensor([1e-25, -1e-25, 1e-25])
    optimizer.step()
    assert torch.equal(weight.detach().sign(), torch.tensor([-1.0, 1.0, -1.0]))


@FUSED
def test_if_all_signs_agree_it_equals_torchs_adamw(fused: bool) -> None:
    own, theirs = (nn.Parameter(torch.linspace(-1, 1, 999).reshape(27, 37)) for _ in range(2))
    optimizer, torchs = (
        CautiousAdamW([own], **OPTIONS, fused=fused),
        torch.optim.AdamW([theirs], **OPTIONS, fused=fused),
    )
    gradient = torch.randn(27, 37, generator=torch.Generator().manual_seed(0))
    for step in range(20):
        own.grad, theirs.grad = (gradient * (1 + step % 3) for _ in range(2))
        optimizer.step()
        torchs.step()
    torch.testing.assert_close(own, theirs, rtol=1e-6, atol=1e-7)
    assert_same_bits(
        [optimizer.state[own][name] for name in ("exp_avg", "exp_avg_sq", "step")],
        [torchs.state[theirs][name] for name in ("exp_avg", "exp_avg_sq", "step")],
    )


def test_a_nan_gradient_shows_in_the_weight() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = CautiousAdamW([weight], lr=0.1)
    weight.grad = torch.tensor([float("nan"), 1.0])
    optimizer.step()
    assert weight[0].isnan()
    assert weight[1].isfinite()


@FUSED
def test_a_parameter_without_a_gradient_is_left_alone(fused: bool) -> None:
    idle, busy = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = CautiousAdamW([idle, busy], **OPTIONS, fused=fused)
    busy.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(idle.detach(), torch.ones(3))
    assert idle not in optimizer.state
    assert not torch.equal(busy.detach(), torch.ones(3))


@FUSED
def test_parameters_of_several_dtypes_step_together(fused: bool) -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 5, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    plain = PlainAdamW(weights, cautious=True)
    optimizer = CautiousAdamW(weights, **OPTIONS, fused=fused)
    for step in range(5):
        plain.step(give_gradients(weights, step))
        optimizer.step()
    for weight, wanted in zip(weights, plain.weights, strict=True):
        torch.testing.assert_close(weight.detach().double(), wanted, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- scaler, guard


def test_found_inf_changes_no_bit_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CPU_PIECE", 16)
    weights = weights_of_all_kinds(torch.float32)
    optimizer = CautiousAdamW(weights, **OPTIONS, fused=True, rescale=True)
    train(optimizer, 2)
    with torch.no_grad():
        for weight in weights:
            weight[..., :1].fill_(-0.0) if weight.ndim else weight.fill_(-0.0)
    before = everything(optimizer)
    for poison in (float("nan"), float("inf"), -float("inf"), 1.0, -1.0):
        for weight in weights:
            weight.grad = torch.full_like(weight, poison)
        vars(optimizer)["found_inf"] = torch.tensor(1.0)
        optimizer.step()
        del vars(optimizer)["found_inf"]
        assert_same_bits(everything(optimizer), before)


@RESCALE
def test_found_inf_of_zero_and_a_grad_scale_give_the_same_bits_as_without(rescale: bool) -> None:
    def trained(scale: float | None) -> list[Tensor]:
        weights = weights_of_all_kinds(torch.float32)
        optimizer: Any = CautiousAdamW(weights, **OPTIONS, fused=True, rescale=rescale)
        for step in range(5):
            give_gradients(weights, step, scale or 1.0)
            if scale is not None:
                optimizer.found_inf, optimizer.grad_scale = torch.zeros(1), torch.tensor([scale])
            optimizer.step()
        return everything(optimizer)

    assert_same_bits(trained(1024.0), trained(None))


def test_grad_scale_and_found_inf_without_the_fused_kernel_are_refused() -> None:
    for name in ("grad_scale", "found_inf"):
        for cautious in (False, True):
            with case(name, cautious):
                weight = nn.Parameter(torch.ones(2))
                weight.grad = torch.ones(2)
                groups = torch.optim.AdamW([weight]).param_groups
                verdict: dict[str, Any] = {name: torch.ones(())}
                with pytest.raises(ValueError, match="fused=True"):
                    adamw_step(groups, {}, fused=False, cautious=cautious, rescale=False, **verdict)
                assert torch.equal(weight.detach(), torch.ones(2))


def test_it_supports_scaling_only_if_every_group_is_fused() -> None:
    def supports(optimizer: torch.optim.Optimizer) -> bool:
        return bool(vars(optimizer)["_step_supports_amp_scaling"])

    def weight() -> nn.Parameter:
        return nn.Parameter(torch.ones(2))

    assert supports(CautiousAdamW([weight()], fused=True))
    assert not supports(CautiousAdamW([weight()]))
    assert not supports(CautiousAdamW([{"params": [weight()]}, {"params": [weight()], "fused": False}], fused=True))
    optimizer = CautiousAdamW([weight()], fused=True)
    assert supports(copy.deepcopy(optimizer))
    optimizer.load_state_dict(CautiousAdamW([weight()]).state_dict())
    assert not supports(optimizer)
    optimizer.load_state_dict(torch.optim.AdamW([weight()], fused=True).state_dict())
    assert supports(optimizer)
    optimizer.add_param_group({"params": [weight()], "fused": None})
    assert not supports(optimizer)


@FUSED
def test_a_gradient_scaler_trains_and_skips_an_overflow(fused: bool) -> None:
    def trained(scaler: torch.amp.GradScaler | None) -> tuple[Tensor, float]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = CautiousAdamW(model.parameters(), lr=0.01, fused=fused)
        for step in range(6):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(x).square().mean()
            overflow = step == 3
            if scaler is not None:
                scaler.scale(loss * float("inf") if overflow else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            elif not overflow:
                loss.backward()
                optimizer.step()
        return model.weight.detach(), float(optimizer.state[model.weight]["step"])

    (scaled, steps), (plain, wanted) = trained(torch.amp.GradScaler("cpu", init_scale=256.0)), trained(None)
    assert steps == wanted == 5
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------- a real optimizer


@FUSED
def test_its_state_dict_and_torchs_are_interchangeable(fused: bool) -> None:
    def built(kind: type[torch.optim.AdamW]) -> torch.optim.AdamW:
        weights = weights_of_all_kinds(torch.float32)
        return kind([{"params": weights[:4]}, {"params": weights[4:], "lr": 0.01}], **OPTIONS, fused=fused)

    for source, target in ((CautiousAdamW, torch.optim.AdamW), (torch.optim.AdamW, CautiousAdamW)):
        old, new = built(source), built(target)
        train(old, 3)
        state = old.state_dict()
        new.load_state_dict(state)
        again = new.state_dict()
        assert again["param_groups"] == state["param_groups"]
        assert again["state"].keys() == state["state"].keys()
        for own, other in zip(again["state"].values(), state["state"].values(), strict=True):
            assert own.keys() == other.keys()
            assert_same_bits([own[key] for key in own], [other[key] for key in own])
        train(new, 1, first=3)
        assert all(float(own["step"]) == 4 for own in new.state.values())


@RESCALE
@FUSED
def test_a_reloaded_optimizer_goes_on_bit_for_bit(fused: bool, rescale: bool) -> None:
    def built() -> CautiousAdamW:
        return CautiousAdamW(weights_of_all_kinds(torch.float32), **OPTIONS, fused=fused, rescale=rescale)

    through, first, second = built(), built(), built()
    train(through, 7)
    train(first, 3)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for weight, saved in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            weight.copy_(saved)
    train(second, 4, first=3)
    assert_same_bits(everything(second), everything(through))


def test_a_fused_optimizer_continues_from_an_ordinary_ones_state() -> None:
    weight = nn.Parameter(torch.ones(3))
    groups = CautiousAdamW([weight]).param_groups
    state: dict[Tensor, dict[str, Any]] = {}
    weight.grad = torch.ones(3)
    adamw_step(groups, state, fused=False, cautious=True, rescale=False)
    state[weight]["step"] = state[weight]["step"].double()
    adamw_step(groups, state, fused=True, cautious=True, rescale=False)
    assert float(state[weight]["step"]) == 2
    assert state[weight]["step"].dtype == torch.float32


@FUSED
def test_clearing_the_state_starts_over(fused: bool) -> None:
    weights = weights_of_all_kinds(torch.float32)
    optimizer = CautiousAdamW(weights, **OPTIONS, fused=fused)
    train(optimizer, 4)
    optimizer.state.clear()
    fresh = CautiousAdamW(copy.deepcopy(weights), **OPTIONS, fused=fused)
    train(optimizer, 3)
    train(fresh, 3)
    assert_same_bits(everything(optimizer), everything(fresh))


def test_a_deep_copy_trains_the_same_way_and_separately() -> None:
    optimizer = CautiousAdamW(weights_of_all_kinds(torch.float32), **OPTIONS, fused=True, rescale=True)
    train(optimizer, 2)
    before = everything(optimizer)
    twin = copy.deepcopy(optimizer)
    train(twin, 2, first=2)
    assert_same_bits(everything(optimizer), before)
    train(optimizer, 2, first=2)
    assert_same_bits(everything(twin), everything(optimizer))


@FUSED
def test_a_schedule_and_a_tensor_learning_rate_give_the_same_weights(fused: bool) -> None:
    factors = [1.0, 0.5, 0.25, 2.0]

    def trained(build: Callable[[Tensor], tuple[CautiousAdamW, Callable[[int], None]]]) -> Tensor:
        weight = nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer, before_step = build(weight)
        for step in range(4):
            before_step(step)
            give_gradients([weight], step)
            optimizer.step()
        return weight.detach()

    def scheduled(weight: Tensor) -> tuple[CautiousAdamW, Callable[[int], None]]:
        optimizer = CautiousAdamW([weight], **OPTIONS, fused=fused)
        schedule = LambdaLR(optimizer, lambda step: factors[min(step, 3)])
        return optimizer, lambda step: schedule.step() if step else None

    def with_tensor(weight: Tensor) -> tuple[CautiousAdamW, Callable[[int], None]]:
        lr = torch.tensor(0.0)
        optimizer = CautiousAdamW([weight], **{**OPTIONS, "lr": lr}, fused=fused)
        return optimizer, lambda step: lr.fill_(OPTIONS["lr"] * factors[step]) and None

    torch.testing.assert_close(trained(scheduled), trained(with_tensor), rtol=1e-6, atol=1e-7)


def test_the_closure_is_called_once_with_gradients_on_and_hooks_run() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = CautiousAdamW([weight], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 2.0
    assert calls == ["before", "closure", "after"]
    assert torch.all(weight < 1)


# ---------------------------------------------------------------------- the plain step


@FUSED
def test_the_plain_step_is_torchs_adamw_bit_for_bit(fused: bool) -> None:
    for foreach in (None, False, True):
        for amsgrad in (False, True):
            with case(foreach, amsgrad):
                kernel = {"fused": True} if fused else {"foreach": foreach}
                weights = weights_of_all_kinds(torch.float32)[:6]
                torchs = torch.optim.AdamW(copy.deepcopy(weights), **OPTIONS, amsgrad=amsgrad, **kernel)
                groups = torch.optim.AdamW(weights, **OPTIONS, amsgrad=amsgrad, **kernel).param_groups
                state: dict[Tensor, dict[str, Any]] = {}
                train(torchs, 5)
                for step in range(5):
                    give_gradients(weights, step)
                    adamw_step(groups, state, fused=fused, cautious=False, rescale=False)
                own = [tensor for weight in weights for _, tensor in sorted(state[weight].items())]
                assert_same_bits([*weights, *own], everything(torchs))
                assert [list(held) for held in state.values()] == [list(held) for held in torchs.state.values()]


def test_the_plain_step_obeys_found_inf_and_grad_scale_as_torchs_does() -> None:
    own, theirs = (nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    torchs: Any = torch.optim.AdamW([theirs], **OPTIONS, fused=True)
    groups = torch.optim.AdamW([own], **OPTIONS, fused=True).param_groups
    state: dict[Tensor, dict[str, Any]] = {}
    for step, bad in enumerate((0.0, 1.0, 0.0)):
        give_gradients([own], step, 64.0)
        give_gradients([theirs], step, 64.0)
        torchs.found_inf, torchs.grad_scale = torch.tensor(bad), torch.tensor(64.0)
        torchs.step()
        adamw_step(
            groups,
            state,
            fused=True,
            cautious=False,
            rescale=False,
            found_inf=torch.tensor(bad),
            grad_scale=torch.tensor(64.0),
        )
    assert_same_bits([own.detach(), state[own]["step"]], [theirs.detach(), torchs.state[theirs]["step"]])


# ---------------------------------------------------------------------- memory


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that `step` holds at one time, above those held before, as torch's own allocator counts them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@RESCALE
@FUSED
def test_a_step_holds_no_second_copy_of_the_parameters(
    monkeypatch: pytest.MonkeyPatch, fused: bool, rescale: bool
) -> None:
    piece = 2**12
    monkeypatch.setattr(adamw, "CPU_PIECE", piece)
    weights = [nn.Parameter(torch.randn(300, 1000)), *(nn.Parameter(torch.randn(700)) for _ in range(9))]
    optimizer = CautiousAdamW(weights, **OPTIONS, fused=fused, rescale=rescale)
    train(optimizer, 1)
    give_gradients(weights, 1)
    peak = peak_of(optimizer.step)
    # Two buffers, and the temporaries of the passes over one piece.
    assert 2 * 4 * piece <= peak <= 7 * 4 * piece
    assert peak_of(lambda: [weight.detach().clone() for weight in weights]) > 10 * peak


# ---------------------------------------------------------------------- compiled


# torch's compiler imports a module that torch itself has deprecated.
COMPILER_WARNS = pytest.mark.filterwarnings("ignore:.*torch.jit")


@pytest.fixture
def compiles_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not 1: the compiler compiles again for a size of one.
    monkeypatch.setattr(adamw, "COMPILED_FROM", 2)


@pytest.mark.slow
@COMPILER_WARNS
@pytest.mark.usefixtures("compiles_small_weights")
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
@RESCALE
def test_the_compiled_step_is_the_formula(rescale: bool, maximize: bool) -> None:
    weights = weights_of_all_kinds(torch.float64)
    plain = PlainAdamW(weights, cautious=True, rescale=rescale, maximize=maximize)
    optimizer = CautiousAdamW(weights, **OPTIONS, rescale=rescale, maximize=maximize, compiled=True)
    for step in range(20):
        plain.step(give_gradients(weights, step))
        optimizer.step()
    torch.testing.assert_close(weights, plain.weights, rtol=1e-12, atol=1e-13, check_stride=False)
    assert all(float(optimizer.state[weight]["step"]) == 20 for weight in weights)


@pytest.mark.slow
@COMPILER_WARNS
@pytest.mark.usefixtures("compiles_small_weights")
def test_one_compilation_serves_all_shapes_steps_and_learning_rates() -> None:
    torch._dynamo.reset()
    train(CautiousAdamW([nn.Parameter(torch.ones(3, 5))], **OPTIONS, compiled=True), 1)
    others = CautiousAdamW(weights_of_all_kinds(torch.float32), **{**OPTIONS, "lr": 0.5}, compiled=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        train(others, 3)
        others.param_groups[0]["lr"] = 0.1
        train(others, 1, first=3)


@pytest.mark.slow
@COMPILER_WARNS
@pytest.mark.usefixtures("compiles_small_weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_step_is_near_the_step_in_pieces(dtype: torch.dtype) -> None:
    def trained(*, compiled: bool) -> list[Tensor]:
        optimizer = CautiousAdamW(weights_of_all_kinds(dtype), **OPTIONS, fused=True, compiled=compiled)
        train(optimizer, 3)
        return everything(optimizer)

    tolerance = 2e-6 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(trained(compiled=True), trained(compiled=False), rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@COMPILER_WARNS
@pytest.mark.usefixtures("compiles_small_weights")
def test_the_compiled_step_obeys_a_gradient_scaler() -> None:
    scale = 1024.0
    scaled, plain = (
        CautiousAdamW(weights_of_all_kinds(torch.float32), **OPTIONS, fused=True, compiled=True) for _ in range(2)
    )
    weights = scaled.param_groups[0]["params"]
    verdict = vars(scaled)
    verdict["grad_scale"] = torch.tensor(scale)
    for step in range(3):
        verdict["found_inf"] = torch.tensor(0.0)
        give_gradients(weights, step, scale)
        scaled.step()
        before = everything(scaled)
        verdict["found_inf"] = torch.tensor(1.0)
        for weight in weights:
            weight.grad = torch.full_like(weight, float("nan"))
        scaled.step()
        assert_same_bits(everything(scaled), before)
    train(plain, 3)
    torch.testing.assert_close(everything(scaled), everything(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@COMPILER_WARNS
def test_the_compiled_step_of_a_large_weight_holds_nothing_of_its_size_and_hides_no_nan() -> None:
    weight = nn.Parameter(torch.randn(500, 1000))
    optimizer = CautiousAdamW([weight], **OPTIONS, compiled=True)
    train(optimizer, 1)
    give_gradients([weight], 1)
    workspace = 2 * 4 * adamw.CPU_PIECE
    assert peak_of(optimizer.step) <= workspace + 2**16
    assert weight.grad is not None
    weight.grad[3, 4] = float("nan")
    optimizer.step()
    assert weight.isnan().nonzero().tolist() == [[3, 4]]


# ---------------------------------------------------------------------- refusals


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    for cautious in (False, True):
        with case(cautious):
            table, other = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
            table(torch.tensor([1])).sum().backward()
            other.grad = torch.ones(2)
            groups = torch.optim.AdamW([other, table.weight]).param_groups
            state: dict[Tensor, dict[str, Any]] = {}
            with pytest.raises(RuntimeError, match=r"shape \(4, 2\) is sparse.*sparse=False"):
                adamw_step(groups, state, fused=False, cautious=cautious, rescale=False)
            assert torch.equal(other.detach(), torch.ones(2))
            assert not state


def test_a_complex_parameter_is_refused_before_anything_changes() -> None:
    other, weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.complex64))
    other.grad, weight.grad = torch.ones(2), torch.ones(3, dtype=torch.complex64)
    for groups in ([{"params": [other, weight]}], [{"params": [other]}, {"params": [weight]}]):
        optimizer = CautiousAdamW(groups)
        with pytest.raises(TypeError, match=r"shape \(3,\) is complex"):
            optimizer.step()
        assert torch.equal(other.detach(), torch.ones(2))
        assert not optimizer.state


def test_an_option_that_is_not_supported_is_refused_by_name() -> None:
    for option in ("amsgrad", "capturable", "differentiable"):
        with case(option):
            weight = nn.Parameter(torch.ones(2))
            unsupported: dict[str, Any] = {option: True}
            with pytest.raises(ValueError, match=option):
                CautiousAdamW([weight], **unsupported)
            with pytest.raises(ValueError, match=option):
                CautiousAdamW([{"params": [weight], option: True}])
            optimizer = CautiousAdamW([weight])
            optimizer.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.ones(2))], **unsupported).state_dict())
            weight.grad = torch.ones(2)
            with pytest.raises(ValueError, match=option):
                optimizer.step()


def test_an_option_out_of_range_is_refused() -> None:
    for bad in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}):
        with case(bad), pytest.raises(ValueError, match="Invalid"):
            CautiousAdamW([nn.Parameter(torch.ones(2))], **bad)
