"""The cautious mask, and the wrapper that makes any optimizer cautious."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from speedtronic.optimizers.adamw import CautiousAdamW
from speedtronic.optimizers.cautious import CautiousOptimizer, agreeing
from speedtronic.optimizers.muon import Muon
from tests.support.cases import case

Base = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

BASES: dict[str, Base] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02, weight_decay=0.3, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02, weight_decay=0.3, decoupled_weight_decay=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.02),
    "muon": lambda p: Muon(p, lr=0.02, weight_decay=0.3),
    "torch_muon": lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.3),
}
DECOUPLED = {"adamw", "adamw_fused", "nadam", "radam", "muon", "torch_muon"}
ANY_BASE = pytest.mark.parametrize("name", BASES)
RESCALE = pytest.mark.parametrize("rescale", [False, True], ids=["", "rescale"])


def some_weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in ((6, 5), (3, 8))]


def give_gradients(weights: list[nn.Parameter], step: int) -> None:
    draw = torch.Generator().manual_seed(50 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)
        weight.grad[0] = 0.0


def train(optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> None:
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for step in range(first, first + steps):
        give_gradients(weights, step)
        optimizer.step()


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight.detach().clone() for group in optimizer.param_groups for weight in group["params"]]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# ---------------------------------------------------------------------- the mask

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
values = st.lists(st.tuples(numbers, numbers), max_size=20)


@settings(max_examples=50)
@given(values)
def test_the_mask_keeps_the_entries_that_oppose_the_gradient(pairs: list[tuple[float, float]]) -> None:
    update, gradient = torch.tensor(pairs, dtype=torch.float32).reshape(-1, 2).unbind(1)
    expected = [
        u if (u < 0 < g) or (g < 0 < u) else 0.0 for u, g in zip(update.tolist(), gradient.tolist(), strict=True)
    ]
    assert agreeing(update, gradient).tolist() == expected


@settings(max_examples=50)
@given(values)
def test_the_rescale_factor_is_all_entries_over_kept_entries_plus_one(pairs: list[tuple[float, float]]) -> None:
    update, gradient = torch.tensor(pairs, dtype=torch.float64).clamp(-1e30, 1e30).reshape(-1, 2).unbind(1)
    kept = agreeing(update, gradient)
    alpha = len(pairs) / (int((kept != 0).sum()) + 1)
    torch.testing.assert_close(agreeing(update, gradient, rescale=True), kept * alpha, rtol=1e-14, atol=0.0)


def test_the_mask_keeps_shape_and_dtype_and_does_not_change_its_arguments() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for rescale in (False, True):
            with case(dtype, rescale):
                update, gradient = (
                    torch.tensor([[1.0, -2.0], [3.0, -4.0]], dtype=dtype),
                    torch.tensor([[1.0, 1.0], [-1.0, 0.0]]),
                )
                before = update.clone()
                kept = agreeing(update, gradient, rescale=rescale)
                assert kept.dtype == dtype
                assert kept.shape == (2, 2)
                expected = torch.tensor([[0.0, -2.0], [3.0, 0.0]]).double() * (4 / 3 if rescale else 1)
                torch.testing.assert_close(kept.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0.0)
                assert torch.equal(update, before)


def test_the_smallest_numbers_still_have_a_sign() -> None:
    update, gradient = torch.tensor([1e-40, -1e-40], dtype=torch.float32), torch.tensor([-1e-40, -1e-40])
    assert torch.equal(agreeing(update, gradient), torch.tensor([1e-40, 0.0]))


def test_a_nan_in_the_update_is_kept() -> None:
    nan = float("nan")
    assert agreeing(torch.tensor([nan, nan, 1.0]), torch.tensor([1.0, 0.0, -1.0])).isnan().tolist() == [
        True,
        True,
        False,
    ]


# ---------------------------------------------------------------------- the wrapper


@ANY_BASE
def test_it_keeps_the_entries_of_any_bases_change_that_oppose_the_gradient(name: str) -> None:
    for rescale in (False, True):
        with case(rescale):
            weights = some_weights()
            optimizer = CautiousOptimizer(BASES[name](weights), rescale=rescale)
            twins = some_weights()
            twin = BASES[name](twins)
            (group,) = twin.param_groups
            decay = group["lr"] * group["weight_decay"] if name in DECOUPLED else 0.0
            if name in DECOUPLED:
                group["weight_decay"] = 0.0
            for step in range(20):
                before = [weight.detach().double() for weight in weights]
                with torch.no_grad():
                    for own, other in zip(weights, twins, strict=True):
                        other.copy_(own)
                give_gradients(weights, step)
                give_gradients(twins, step)
                optimizer.step()
                twin.step()
                for old, new, moved in zip(before, weights, twins, strict=True):
                    change = moved.detach().double() - old
                    assert new.grad is not None
                    kept = (change * new.grad < 0).double()
                    expected = (1 - decay) * old + change * kept * (kept.numel() / (kept.sum() + 1) if rescale else 1.0)
                    torch.testing.assert_close(new.detach().double(), expected, rtol=1e-6, atol=1e-6)


def test_over_adamw_it_is_cautious_adamw() -> None:
    for rescale in (False, True):
        with case(rescale):
            options: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.3}
            own = CautiousOptimizer(torch.optim.AdamW(some_weights(torch.float64), **options), rescale=rescale)
            direct = CautiousAdamW(some_weights(torch.float64), **options, rescale=rescale)
            train(own, 20)
            train(direct, 20)
            torch.testing.assert_close(weights_of(own), weights_of(direct), rtol=1e-11, atol=1e-12)


def test_over_muon_it_is_cautious_muon() -> None:
    own = CautiousOptimizer(Muon(some_weights(), lr=0.02, weight_decay=0.3))
    direct = Muon(some_weights(), lr=0.02, weight_decay=0.3, cautious=True)
    train(own, 20)
    train(direct, 20)
    torch.testing.assert_close(weights_of(own), weights_of(direct), rtol=1e-4, atol=1e-5)


def test_over_sgd_it_is_the_formula() -> None:
    lr, momentum, decay = 0.05, 0.9, 0.1
    weights = some_weights(torch.float64)
    plain = [weight.detach().clone() for weight in weights]
    buffers: list[Tensor | None] = [None, None]
    optimizer = CautiousOptimizer(torch.optim.SGD(weights, lr=lr, momentum=momentum, weight_decay=decay))
    for step in range(20):
        give_gradients(weights, step)
        for i, weight in enumerate(weights):
            assert weight.grad is not None
            slope, held = weight.grad + decay * plain[i], buffers[i]
            buffers[i] = slope if held is None else momentum * held + slope
            direction = buffers[i]
            assert direction is not None
            plain[i] = plain[i] - lr * direction * (direction * weight.grad > 0)
        optimizer.step()
    torch.testing.assert_close(weights_of(optimizer), plain, rtol=1e-12, atol=1e-13)


def test_decoupled_decay_reaches_a_weight_whose_update_is_masked() -> None:
    for name in ("adamw", "muon", "torch_muon", "nadam", "radam"):
        with case(name):
            weights = some_weights()
            optimizer = CautiousOptimizer(BASES[name](weights))
            before = weights_of(optimizer)
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
            optimizer.step()
            assert_equal(weights_of(optimizer), [old * (1 - 0.02 * 0.3) for old in before])
            assert optimizer.param_groups[0]["weight_decay"] == 0.3


def test_the_decay_option_is_restored_after_a_step_that_fails() -> None:
    weights = some_weights()
    base = torch.optim.AdamW(weights, weight_decay=0.3)

    def fail(*_: object) -> None:
        raise FloatingPointError

    base.register_step_pre_hook(fail)
    optimizer = CautiousOptimizer(base)
    give_gradients(weights, 0)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert base.param_groups[0]["weight_decay"] == 0.3


def test_bf16_weights_move_down_their_gradient() -> None:
    weights = some_weights(torch.bfloat16)
    optimizer = CautiousOptimizer(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    for step in range(3):
        before = weights_of(optimizer)
        train(optimizer, 1, first=step)
        for weight, old in zip(weights, before, strict=True):
            assert weight.grad is not None
            assert torch.all((weight.detach() - old) * weight.grad <= 0)
        assert any(not torch.equal(new, old) for new, old in zip(weights_of(optimizer), before, strict=True))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    for name in BASES:
        with case(name):
            weights = some_weights()
            optimizer = CautiousOptimizer(BASES[name](weights))
            give_gradients(weights, 0)
            weights[1].grad = None
            before = weights_of(optimizer)
            optimizer.step()
            after = weights_of(optimizer)
            assert torch.equal(after[1], before[1])
            assert not torch.equal(after[0], before[0])


def test_complex_parameters_and_sparse_gradients_are_refused_before_anything_changes() -> None:
    real, unreal = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, dtype=torch.complex64))
    real.grad, unreal.grad = torch.ones(2), torch.ones(3, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r"shape \(3,\) is complex"):
        CautiousOptimizer(torch.optim.SGD([real, unreal], lr=0.1)).step()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape \(4, 2\) is sparse"):
        CautiousOptimizer(torch.optim.SGD([real, table.weight], lr=0.1)).step()
    assert torch.equal(real.detach(), torch.ones(2))


# ---------------------------------------------------------------------- a real optimizer


def test_it_shares_the_objects_of_its_base() -> None:
    base = torch.optim.AdamW(some_weights())
    optimizer = CautiousOptimizer(base)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults is base.defaults
    base.load_state_dict(base.state_dict())
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state


def test_its_state_dict_is_the_bases() -> None:
    for name in BASES:
        with case(name):
            optimizer, base = CautiousOptimizer(BASES[name](some_weights())), BASES[name](some_weights())
            train(optimizer, 2)
            saved = copy.deepcopy(optimizer.state_dict())
            assert saved.keys() == {"state", "param_groups"}
            base.load_state_dict(saved)
            other = CautiousOptimizer(BASES[name](some_weights()))
            other.load_state_dict(copy.deepcopy(base.state_dict()))
            with torch.no_grad():
                for weight, trained in zip(other.param_groups[0]["params"], weights_of(optimizer), strict=True):
                    weight.copy_(trained)
            train(optimizer, 2, first=2)
            train(other, 2, first=2)
            assert_equal(weights_of(other), weights_of(optimizer))


# Adagrad makes its state when it is built, and cannot step without it.
def test_clearing_the_state_starts_the_base_over() -> None:
    for name in sorted(BASES.keys() - {"adagrad"}):
        with case(name):
            weights = some_weights()
            optimizer = CautiousOptimizer(BASES[name](weights))
            train(optimizer, 3)
            optimizer.state.clear()
            assert not optimizer.base.state
            fresh = CautiousOptimizer(BASES[name](copy.deepcopy(weights)))
            train(optimizer, 2)
            train(fresh, 2)
            assert_equal(weights_of(optimizer), weights_of(fresh))


def test_a_deep_copy_trains_the_same_way_and_separately() -> None:
    for rescale in (False, True):
        with case(rescale):
            optimizer = CautiousOptimizer(torch.optim.AdamW(some_weights()), rescale=rescale)
            train(optimizer, 2)
            before = weights_of(optimizer)
            twin = copy.deepcopy(optimizer)
            train(twin, 2, first=2)
            assert_equal(weights_of(optimizer), before)
            train(optimizer, 2, first=2)
            assert_equal(weights_of(twin), weights_of(optimizer))


def test_a_schedule_sets_the_learning_rate_of_the_base() -> None:
    weights = some_weights()
    optimizer = CautiousOptimizer(torch.optim.SGD(weights, lr=0.1))
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    train(optimizer, 1)
    schedule.step()
    assert optimizer.base.param_groups[0]["lr"] == 0.05
    before = weights_of(optimizer)
    train(optimizer, 1)
    expected = [
        old - 0.05 * weight.grad for old, weight in zip(before, weights, strict=True) if weight.grad is not None
    ]
    torch.testing.assert_close(weights_of(optimizer), expected)


def test_groups_are_added_to_the_base_and_gradients_cleared_through_it() -> None:
    first, second = some_weights()
    optimizer = CautiousOptimizer(torch.optim.SGD([first], lr=0.1))
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    assert [group["lr"] for group in optimizer.base.param_groups] == [0.1, 0.2]
    train(optimizer, 1)
    optimizer.zero_grad()
    assert first.grad is None
    assert second.grad is None


def test_its_hooks_run_and_so_do_those_of_the_base() -> None:
    base = torch.optim.SGD(some_weights(), lr=0.1)
    optimizer = CautiousOptimizer(base)
    calls: list[str] = []
    for owner, name in ((optimizer, "own"), (base, "base")):
        owner.register_step_pre_hook(lambda *_, name=name: calls.append(f"{name} before step"))
        owner.register_step_post_hook(lambda *_, name=name: calls.append(f"{name} after step"))
        owner.register_state_dict_pre_hook(lambda _, name=name: calls.append(f"{name} before saving"))
        owner.register_load_state_dict_post_hook(lambda _, name=name: calls.append(f"{name} after loading"))
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [
        "own before step",
        "base before step",
        "base after step",
        "own after step",
        "own before saving",
        "base before saving",
        "base after loading",
        "own after loading",
    ]


def test_a_hook_may_replace_what_is_saved_and_what_is_loaded() -> None:
    optimizer = CautiousOptimizer(torch.optim.SGD(some_weights(), lr=0.1))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    assert optimizer.state_dict()["extra"] == 1

    def with_lr(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "lr": 0.5} for group in state["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(with_lr)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.base.param_groups[0]["lr"] == 0.5


@ANY_BASE
def test_the_closure_is_called_once_with_gradients_on(name: str) -> None:
    weights = some_weights()
    optimizer = CautiousOptimizer(BASES[name](weights))
    losses: list[Tensor] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([weight.square().sum() for weight in weights]).sum()
        loss.backward()
        losses.append(loss)
        return loss

    before = weights_of(optimizer)
    assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert all(not torch.equal(new, old) for new, old in zip(weights_of(optimizer), before, strict=True))


def test_a_base_that_evaluates_more_than_once_may() -> None:
    weights = some_weights()
    optimizer = CautiousOptimizer(torch.optim.LBFGS(weights, lr=0.1, max_iter=4))
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([(weight - 1).square().sum() for weight in weights]).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(losses) > 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_overshoots_is_kept_because_it_went_down_the_first_gradient(set_to_none: bool) -> None:
    """At 1.0 the slope of x² is 2. LBFGS goes to -0.5, where the slope is -1 and would disagree."""
    weight, twin = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    base = torch.optim.LBFGS([twin], lr=1.5, max_iter=2)
    optimizer = CautiousOptimizer(torch.optim.LBFGS([weight], lr=1.5, max_iter=2))

    def slope_of(parameter: nn.Parameter) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            (optimizer if parameter is weight else base).zero_grad(set_to_none)
            loss = parameter.square().sum()
            loss.backward()
            return loss

        return closure

    base.step(slope_of(twin))
    optimizer.step(slope_of(weight))
    assert weight.item() == pytest.approx(-0.5)
    assert torch.equal(weight, twin)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_base_that_maximises_climbs(kind: Any) -> None:
    def run(maximize: bool, sign: float) -> list[Tensor]:
        weights = some_weights()
        optimizer = CautiousOptimizer(kind(weights, lr=0.1, weight_decay=0.1, maximize=maximize))
        for step in range(5):
            give_gradients(weights, step)
            for weight in weights:
                assert weight.grad is not None
                weight.grad *= sign
            optimizer.step()
        return weights_of(optimizer)

    climbed = run(True, 1.0)
    assert_equal(climbed, run(False, -1.0))
    assert all(not torch.equal(new, old) for new, old in zip(climbed, some_weights(), strict=True))


def test_a_gradient_scaler_skips_an_overflow_on_the_host() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = CautiousOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert "_step_supports_amp_scaling" not in vars(optimizer)
    for overflow in (False, True, False):
        before = weights_of(optimizer)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weights_of(optimizer)[0], before[0]) == overflow
    assert float(optimizer.state[model.weight]["step"]) == 2
