"""Muon and AdamW as one optimizer: its arithmetic, and everything else that torch expects of an optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.optimizers.hybrid import HybridOptimizer
from speedtronic.optimizers.muon import Muon
from tests.support.cases import case

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fused": {"fused": True},
    "its own rate for Muon": {"muon_lr": 0.3},
    "other hyperparameters": {
        **{"betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.4, "momentum": 0.5, "nesterov": False, "ns_steps": 3},
        **{"muon_eps": 1e-5, "norm_eps": 1e-6, "scale": "match_rms_adamw"},
    },
    "muon plus": {"muon_plus": True},
    "polar express": {"coefficients": "polar_express"},
    "cautious": {"cautious": True},
    "cautious and fused": {"cautious": True, "fused": True},
    "cautious, rescaled": {"cautious": True, "cautious_rescale": True},
}


class Weights:
    """Two matrices for Muon, a matrix and a vector for AdamW, and gradients that depend only on the step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        shapes = {"wide": (3, 5), "tall": (6, 4), "table": (7, 3), "bias": (5,)}
        self.by_name = {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}

    @property
    def all(self) -> list[nn.Parameter]:
        return list(self.by_name.values())

    def groups(self) -> list[dict[str, Any]]:
        return [
            {"params": [self.by_name["table"]], "algorithm": "adamw"},
            {"params": [self.by_name["bias"]], "algorithm": "adamw", "weight_decay": 0.0},
            {"params": [self.by_name["wide"], self.by_name["tall"]], "algorithm": "muon"},
        ]

    def set_gradients(self, step: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in self.all:
            gradient = torch.randn(parameter.shape, generator=generator) + 0.3
            parameter.grad = (gradient * scale).to(parameter.dtype)

    def copies(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.by_name.items()}


def train(weights: Weights, optimizer: torch.optim.Optimizer, steps: range = range(20)) -> dict[str, Tensor]:
    for step in steps:
        weights.set_gradients(step)
        optimizer.step()
    return weights.copies()


def build(**options: Any) -> tuple[Weights, HybridOptimizer]:
    weights = Weights()
    return weights, HybridOptimizer(weights.groups(), **{"lr": 0.05, **options})


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# ---------------------------------------------------------------- the arithmetic


def plain_muon(weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float) -> Tensor:
    """Muon in fp64: momentum 0.95 with Nesterov, five quintic iterations, scale sqrt(max(1, rows / columns))."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = 0.95 * momentum + 0.05 * gradient
        x = direction / direction.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = (1 - lr * decay) * weight - lr * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1])) * x
    return weight


def plain_adamw(weight: Tensor, gradients: list[Tensor], *, lr: float, decay: float) -> Tensor:
    """AdamW in fp64 with betas 0.9 and 0.95 and eps 1e-8."""
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        weight = (1 - lr * decay) * weight
        weight = weight - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize("fused", [False, True])
def test_twenty_steps_equal_a_plain_implementation_in_double_precision(fused: bool) -> None:
    weights, optimizer = build(lr=0.02, muon_lr=0.1, weight_decay=0.3, fused=fused)
    before = {name: tensor.double() for name, tensor in weights.copies().items()}
    gradients: dict[str, list[Tensor]] = {name: [] for name in before}
    for step in range(20):
        weights.set_gradients(step)
        for name, parameter in weights.by_name.items():
            assert parameter.grad is not None
            gradients[name].append(parameter.grad.double())
        optimizer.step()
    expected = {
        "wide": plain_muon(before["wide"], gradients["wide"], lr=0.1, decay=0.3),
        "tall": plain_muon(before["tall"], gradients["tall"], lr=0.1, decay=0.3),
        "table": plain_adamw(before["table"], gradients["table"], lr=0.02, decay=0.3),
        "bias": plain_adamw(before["bias"], gradients["bias"], lr=0.02, decay=0.0),
    }
    for name, tensor in weights.copies().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_it_equals_muon_and_torchs_adamw_side_by_side(fused: bool) -> None:
    weights, hybrid = build(muon_lr=0.2, fused=fused)
    twin = Weights()
    table, bias, matrices = (group["params"] for group in twin.groups())
    muon = Muon(matrices, 0.2, weight_decay=0.1)
    decay = [{"params": table}, {"params": bias, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decay, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)
    for step in range(20):
        twin.set_gradients(step)
        muon.step()
        adamw.step()
    assert_same(train(weights, hybrid), twin.copies())


def test_every_option_reaches_its_algorithm() -> None:
    for name in OPTIONS:
        with case(name):
            weights, hybrid = build(**OPTIONS[name])
            twin = Weights()
            options = dict(OPTIONS[name])
            expected = {**Muon([torch.zeros(1, 1)], 0.05).defaults, "weight_decay": 0.1}
            expected["lr"] = options.get("muon_lr", 0.05)
            expected["eps"] = options.get("muon_eps", 1e-7)
            expected |= {key: value for key, value in options.items() if key in expected and key not in ("lr", "eps")}
            group = hybrid.param_groups[2]
            assert {key: group[key] for key in expected} == expected
            adamw = hybrid.param_groups[0]
            given = {
                "lr": 0.05,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "weight_decay": 0.1,
                "fused": False,
                "cautious": False,
            }
            given |= {key: value for key, value in options.items() if key in given}
            assert {key: adamw[key] for key in given} == given
            after = train(weights, hybrid, range(2))
            assert all(
                not torch.equal(tensor, parameter) for tensor, parameter in zip(after.values(), twin.all, strict=True)
            )


def test_the_pieces_of_a_fused_weight_are_orthogonalised_on_their_own() -> None:
    torch.manual_seed(0)
    fused = nn.Parameter(torch.randn(6, 4))
    pieces = [nn.Parameter(piece.detach().clone()) for piece in fused.split([2, 4])]
    gradient = torch.randn(6, 4)
    whole = HybridOptimizer([{"params": [fused], "algorithm": "muon", "split": (2, 4)}])
    apart = HybridOptimizer([{"params": pieces, "algorithm": "muon"}])
    for _ in range(3):
        fused.grad = gradient
        pieces[0].grad, pieces[1].grad = gradient[:2], gradient[2:]
        whole.step()
        apart.step()
    torch.testing.assert_close(fused.detach(), torch.cat(pieces).detach(), rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_is_left_alone() -> None:
    weights, optimizer = build()
    weights.set_gradients(0)
    weights.by_name["tall"].grad = weights.by_name["bias"].grad = None
    before = weights.copies()
    optimizer.step()
    after = weights.copies()
    assert [name for name in before if torch.equal(before[name], after[name])] == ["tall", "bias"]
    assert len(optimizer.state) == 2


def test_a_sparse_gradient_is_refused_before_anything_changes() -> None:
    for name in ("wide", "table", "bias"):
        with case(name):
            weights, optimizer = build()
            before = weights.copies()
            weights.set_gradients(0)
            weights.by_name[name].grad = torch.ones_like(weights.by_name[name]).to_sparse()
            with pytest.raises(RuntimeError, match="sparse"):
                optimizer.step()
            assert_same(weights.copies(), before)
            assert not optimizer.state


def test_a_complex_parameter_of_a_cautious_step_is_refused_before_anything_changes() -> None:
    weights, optimizer = build(cautious=True)
    spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer.add_param_group({"params": [spectrum], "algorithm": "adamw"})
    before = weights.copies()
    weights.set_gradients(0)
    spectrum.grad = torch.ones_like(spectrum)
    with pytest.raises(TypeError, match=r"shape \(3,\) is complex"):
        optimizer.step()
    assert_same(weights.copies(), before)
    assert not optimizer.state


# ---------------------------------------------------------------- groups


def test_a_group_without_an_algorithm_is_refused() -> None:
    for algorithm in ({}, {"algorithm": "sgd"}, {"algorithm": None}):
        with case(algorithm):
            weights, optimizer = build()
            with pytest.raises(ValueError, match="algorithm must be 'muon' or 'adamw', not "):
                HybridOptimizer([{"params": weights.all, **algorithm}])
            with pytest.raises(ValueError, match="algorithm must be 'muon' or 'adamw', not "):
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], **algorithm})
            assert len(optimizer.param_groups) == 3


def test_parameters_without_groups_name_no_algorithm_and_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithm must be 'muon' or 'adamw', not None"):
        HybridOptimizer(Weights().all)  # type: ignore[arg-type]


def test_a_parameter_that_muon_cannot_train_is_refused_by_name_and_the_optimizer_stays_as_it_was() -> None:
    named = [("embed.bias", nn.Parameter(torch.zeros(5)))]
    with pytest.raises(ValueError, match=r"embed\.bias has shape \(5,\)"):
        HybridOptimizer([{"params": named, "algorithm": "muon"}])
    _, optimizer = build()
    with pytest.raises(ValueError, match=r"number 1 of its group has shape \(2, 2, 2\)"):
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2, 2, 2))], "algorithm": "muon"}
        )
    complex_matrix = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="torch.complex64"):
        optimizer.add_param_group({"params": [complex_matrix], "algorithm": "muon"})
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_an_added_group_gets_the_defaults_of_its_algorithm_and_is_trained(algorithm: str) -> None:
    _, optimizer = build(muon_lr=0.2, momentum=0.7)
    added = nn.Parameter(torch.ones(2, 3))
    optimizer.add_param_group({"params": added, "algorithm": algorithm, "weight_decay": 0.5})
    group = optimizer.param_groups[-1]
    assert (group["lr"], group["weight_decay"]) == (0.2 if algorithm == "muon" else 0.05, 0.5)
    assert group.get("momentum") == (0.7 if algorithm == "muon" else None)
    added.grad = torch.ones(2, 3)
    optimizer.step()
    assert (added < 1).all()


def test_an_option_out_of_range_is_refused() -> None:
    for wrong in [{"lr": -1.0}, {"muon_lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -0.1}] + [
        {"momentum": 1.0},
        {"ns_steps": 0},
        {"scale": "half"},
        {"coefficients": "cubic"},
    ]:
        with case(wrong), pytest.raises(ValueError, match=r".+"):
            build(**wrong)


# ---------------------------------------------------------------- a real optimizer


def test_it_is_a_torch_optimizer() -> None:
    assert isinstance(build()[1], torch.optim.Optimizer)


def test_a_closure_is_called_once_with_gradients_enabled_and_its_value_returned() -> None:
    weights, optimizer = build()
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in weights.all)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    before = weights.copies()
    value = optimizer.step(closure)
    assert calls == [True]
    assert value.item() == pytest.approx(sum(tensor.square().sum().item() for tensor in before.values()))
    assert not any(torch.equal(before[name], tensor) for name, tensor in weights.copies().items())
    optimizer.zero_grad()
    assert optimizer.step() is None


def test_hooks_run_around_the_step_and_the_state_dict() -> None:
    weights, optimizer = build()
    seen: list[str] = []

    def note(what: str) -> Callable[..., None]:
        return lambda *arguments: seen.append(what)

    optimizer.register_step_pre_hook(note("before step"))
    optimizer.register_step_post_hook(note("after step"))
    optimizer.register_state_dict_pre_hook(note("before saving"))
    optimizer.register_state_dict_post_hook(note("after saving"))
    optimizer.register_load_state_dict_pre_hook(note("before loading"))
    optimizer.register_load_state_dict_post_hook(note("after loading"))
    train(weights, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before step", "after step", "before saving", "after saving", "before loading", "after loading"]


def test_a_schedule_moves_each_group_from_its_own_rate() -> None:
    weights, optimizer = build(muon_lr=0.4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    assert scheduler.base_lrs == [0.05, 0.05, 0.4]
    train(weights, optimizer, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025, 0.2]


def test_a_rate_of_zero_changes_nothing() -> None:
    weights, optimizer = build(lr=0.0)
    before = weights.copies()
    assert_same(train(weights, optimizer, range(2)), before)


def test_zero_grad_clears_all_gradients() -> None:
    weights, optimizer = build(fused=True)
    weights.set_gradients(0)
    optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in weights.all)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in weights.all)


def test_clearing_the_state_forgets_both_algorithms() -> None:
    weights, optimizer = build()
    train(weights, optimizer, range(3))
    assert len(optimizer.state) == 4
    optimizer.state.clear()
    fresh = Weights()
    for own, other in zip(fresh.all, weights.all, strict=True):
        own.data.copy_(other.data)
    beginner = HybridOptimizer(fresh.groups(), lr=0.05)
    assert_same(train(weights, optimizer, range(3, 6)), train(fresh, beginner, range(3, 6)))


def test_a_copy_trains_the_same_way_and_separately() -> None:
    for name in OPTIONS:
        with case(name):
            weights, optimizer = build(**OPTIONS[name])
            train(weights, optimizer, range(3))
            twin, other = copy.deepcopy((weights, optimizer))
            assert vars(other)["_step_supports_amp_scaling"] == vars(optimizer)["_step_supports_amp_scaling"]
            before = weights.copies()
            after = train(twin, other, range(3, 6))
            assert_same(weights.copies(), before)
            assert_same(train(weights, optimizer, range(3, 6)), after)
            other.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "muon"})
            assert len(optimizer.param_groups) == 3


# ---------------------------------------------------------------- state


def test_the_state_is_that_of_muon_and_of_adamw() -> None:
    weights, optimizer = build()
    train(weights, optimizer, range(1))
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert [set(state["state"][number]) for number in range(4)] == [
        *([{"step", "exp_avg", "exp_avg_sq"}] * 2),
        *([{"momentum_buffer"}] * 2),
    ]
    assert [group["algorithm"] for group in state["param_groups"]] == ["adamw", "adamw", "muon"]


def test_a_saved_state_continues_bit_for_bit() -> None:
    for name in OPTIONS:
        with case(name):
            weights, optimizer = build(**OPTIONS[name])
            train(weights, optimizer, range(3))
            state = copy.deepcopy(optimizer.state_dict())
            twin = Weights()
            for own, other in zip(twin.all, weights.all, strict=True):
                own.data.copy_(other.data)
            restored = HybridOptimizer(twin.groups(), **{"lr": 0.05, **OPTIONS[name]})
            restored.load_state_dict(state)
            assert_same(train(twin, restored, range(3, 8)), train(weights, optimizer, range(3, 8)))


def test_the_arguments_give_the_options_that_a_saved_state_lacks() -> None:
    weights, optimizer = build()
    train(weights, optimizer, range(1))
    state = optimizer.state_dict()
    for group, option in zip(state["param_groups"], ("cautious", "betas", "coefficients"), strict=True):
        del group[option]
    _, restored = build(cautious=True, betas=(0.7, 0.8), coefficients="polar_express")
    restored.load_state_dict(state)
    groups = restored.param_groups
    assert (groups[0]["cautious"], groups[1]["betas"], groups[2]["coefficients"]) == (True, (0.7, 0.8), "polar_express")
    assert (groups[1]["cautious"], groups[2]["cautious"]) == (False, False)


def test_hooks_may_change_what_is_loaded() -> None:
    weights, optimizer = build()
    train(weights, optimizer, range(1))
    state = optimizer.state_dict()
    unnamed = {
        **state,
        "param_groups": [{k: v for k, v in g.items() if k != "algorithm"} for g in state["param_groups"]],
    }
    _, restored = build()
    restored.register_load_state_dict_pre_hook(lambda optimizer, loaded: state)
    restored.load_state_dict(unnamed)
    assert_same(restored.state_dict()["state"], state["state"])


def test_momentum_stays_in_single_precision_for_bf16_weights() -> None:
    weights = Weights(torch.bfloat16)
    optimizer = HybridOptimizer(weights.groups(), lr=0.05)
    train(weights, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    twin = Weights(torch.bfloat16)
    restored = HybridOptimizer(twin.groups(), lr=0.05)
    restored.load_state_dict(state)
    buffer = restored.state[twin.by_name["wide"]]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, optimizer.state[weights.by_name["wide"]]["momentum_buffer"])
    assert not torch.equal(buffer, buffer.bfloat16().float())


def test_the_state_of_another_optimizer_is_refused() -> None:
    weights, optimizer = build()
    adamw = torch.optim.AdamW([{"params": group["params"]} for group in weights.groups()])
    train(weights, adamw, range(1))
    with pytest.raises(ValueError, match="another kind.*the groups here by adamw, adamw, muon"):
        optimizer.load_state_dict(adamw.state_dict())
    swapped = HybridOptimizer([{**group, "algorithm": "adamw"} for group in weights.groups()])
    with pytest.raises(ValueError, match="trained by adamw, adamw, adamw"):
        optimizer.load_state_dict(swapped.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("names", [("wide", "tall"), ("table", "tall")], ids=["muon", "muon and adamw"])
def test_the_state_of_parameters_of_other_shapes_is_refused(names: tuple[str, str]) -> None:
    weights, optimizer = build()
    other = Weights()
    first, second = names
    other.by_name[first], other.by_name[second] = other.by_name[second], other.by_name[first]
    swapped = HybridOptimizer(other.groups(), lr=0.05)
    train(other, swapped, range(1))
    with pytest.raises(ValueError, match=r"of a parameter of shape \(., .\) has shape \(., .\)"):
        optimizer.load_state_dict(swapped.state_dict())
    assert not optimizer.state
    assert_same(train(weights, optimizer), train(*build()))


# ---------------------------------------------------------------- overflow


def test_it_obeys_found_inf_on_the_device_only_if_fused() -> None:
    for fused, supported in ((True, True), (False, False)):
        with case(fused, supported):
            assert vars(build(fused=fused)[1])["_step_supports_amp_scaling"] is supported


def test_only_muon_groups_always_obey_found_inf_on_the_device() -> None:
    optimizer = HybridOptimizer([{"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "muon"}])
    assert vars(optimizer)["_step_supports_amp_scaling"] is True


def test_found_inf_on_the_device_skips_the_step_bit_for_bit() -> None:
    for cautious in (False, True):
        with case(cautious):
            weights, optimizer = build(fused=True, cautious=cautious)
            train(weights, optimizer, range(2))
            before, state = weights.copies(), copy.deepcopy(optimizer.state_dict()["state"])
            weights.set_gradients(2)
            for parameter in weights.all:
                assert parameter.grad is not None
                parameter.grad.view(-1)[0] = float("nan")
            optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
            optimizer.step()
            assert_same(weights.copies(), before)
            assert_same(optimizer.state_dict()["state"], state)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_works_and_skips_steps_that_overflowed(fused: bool) -> None:
    for unscaled in (False, True):
        for cautious in (False, True):
            with case(unscaled, cautious):
                weights, optimizer = build(fused=fused, cautious=cautious)
                twin, plain = build(fused=fused, cautious=cautious)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                scaler.scale(torch.zeros(()))
                for step in range(4):
                    weights.set_gradients(step, 1024.0)
                    if step == 2:
                        weights.by_name["table"].grad = torch.full((7, 3), float("inf"))
                    if unscaled:
                        scaler.unscale_(optimizer)
                    before = weights.copies()
                    scaler.step(optimizer)
                    if step == 2:
                        assert_same(weights.copies(), before)
                    else:
                        train(twin, plain, range(step, step + 1))
                    scaler.update(1024.0)
                torch.testing.assert_close(weights.copies(), twin.copies(), rtol=1e-6, atol=1e-7)
