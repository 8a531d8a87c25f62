"""Muon against a plain fp64 implementation and torch's; stacks, split weights, skipped steps, state and errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from speedtronic.optimizers import muon as module
from speedtronic.optimizers.muon import Muon, muon_step, post_polar_normalize
from speedtronic.optimizers.newton_schulz import newton_schulz
from tests.support.cases import case
from tests.support.cuda import nothing_synchronises
from tests.support.thread_group import ThreadGroup, on_ranks

SHAPES = [(6, 6), (4, 14), (6, 6), (14, 4), (1, 5), (6, 6), (5, 1)]
STEPS = 20


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(shapes: Sequence[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=index).to(dtype)) for index, shape in enumerate(shapes)]


def give_gradients(weights: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
    for index, weight in enumerate(weights):
        weight.grad = (scale * normal(*weight.shape, seed=1000 * step + index)).to(weight.dtype)


def train(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], steps: int = STEPS, start: int = 0) -> None:
    for step in range(start, start + steps):
        give_gradients(weights, step)
        optimizer.step()


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------- the plain implementation

# arXiv 2505.16932; the table below adds the margin of 1.0001.
POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
TABLE = {
    "quintic": [(3.4445, -4.7750, 2.0315)] * 5,
    "polar_express": [(a / 1.0001, b / 1.0001**3, c / 1.0001**5) for a, b, c in POLAR_EXPRESS],
}


class PlainMuon:
    """The formula, one matrix after the other, in fp64, with singular values instead of matrix products."""

    def __init__(self, weights: Sequence[Tensor], **options: Any) -> None:
        self.weights = [weight.detach().double() for weight in weights]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]
        self.options = {
            "lr": 0.02,
            "momentum": 0.95,
            "nesterov": True,
            "weight_decay": 0.0,
            "muon_plus": False,
            "scale": "original",
            "coefficients": "quintic",
            "cautious": False,
            "cautious_rescale": False,
            "split": None,
            **options,
        }

    def step(self, gradients: Sequence[Tensor]) -> None:
        lr, mu, split = (self.options[name] for name in ("lr", "momentum", "split"))
        for index, gradient in enumerate(gradients):
            gradient = gradient.double()
            self.momenta[index] = mu * self.momenta[index] + (1 - mu) * gradient
            blend = self.momenta[index]
            if self.options["nesterov"]:
                blend = gradient + mu * (self.momenta[index] - gradient)
            rows = split or [len(blend)]
            updates = [self.update(*pair) for pair in zip(blend.split(rows), gradient.split(rows), strict=True)]
            weight = self.weights[index]
            self.weights[index] = (1 - lr * self.options["weight_decay"]) * weight - lr * torch.cat(updates)

    def update(self, blend: Tensor, gradient: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(blend, full_matrices=False)
        values = values / values.norm()
        for a, b, c in TABLE[self.options["coefficients"]]:
            values = a * values + b * values**3 + c * values**5
        result = left @ torch.diag(values) @ right
        if self.options["muon_plus"]:
            result = result / result.pow(2).sum(dim=1, keepdim=True).sqrt()
            result = result / result.pow(2).sum(dim=0, keepdim=True).sqrt()
        if self.options["cautious"]:
            mask = (result * gradient > 0).double()
            alpha = mask.numel() / (mask.sum() + 1) if self.options["cautious_rescale"] else 1.0
            result = result * mask * alpha
        rows, columns = blend.shape
        if self.options["scale"] == "original":
            return math.sqrt(max(1, rows / columns)) * result
        return 0.2 * math.sqrt(max(rows, columns)) * result


OPTION_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no nesterov": {"nesterov": False},
    "no momentum": {"momentum": 0.0},
    "weight decay": {"weight_decay": 0.3},
    "muon plus": {"muon_plus": True, "weight_decay": 0.1},
    "match rms": {"scale": "match_rms_adamw"},
    "polar express": {"coefficients": "polar_express"},
    "cautious": {"cautious": True, "weight_decay": 0.2},
    "cautious, rescaled": {"cautious": True, "cautious_rescale": True},
    "all": {
        "muon_plus": True,
        "scale": "match_rms_adamw",
        "cautious": True,
        "cautious_rescale": True,
        "weight_decay": 0.1,
        "nesterov": False,
    },
}


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS.keys())
def test_twenty_steps_equal_the_plain_implementation(options: dict[str, Any]) -> None:
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-10)):
        with case(dtype, tolerance):
            weights = parameters(dtype=dtype)
            plain = PlainMuon(weights, **options)
            optimizer = Muon(weights, 0.02, **options)
            for step in range(STEPS):
                give_gradients(weights, step)
                plain.step([weight.grad for weight in weights if weight.grad is not None])
                optimizer.step()
            for weight, expected, momentum in zip(weights, plain.weights, plain.momenta, strict=True):
                torch.testing.assert_close(weight.detach().double(), expected, atol=tolerance, rtol=0)
                buffer = optimizer.state[weight]["momentum_buffer"]
                assert buffer.dtype == dtype
                torch.testing.assert_close(buffer.double(), momentum, atol=min(1e-6, tolerance), rtol=0)


def test_a_split_weight_steps_like_its_pieces_on_their_own() -> None:
    for name, options in OPTION_SETS.items():
        with case(name):
            whole = nn.Parameter(normal(14, 6))
            plain = PlainMuon([whole], split=[6, 6, 2], **options)
            apart = [nn.Parameter(piece.clone()) for piece in whole.detach().split([6, 6, 2])]
            fused = Muon([{"params": [whole], "split": (6, 6, 2)}], 0.02, **options)
            pieces = Muon(apart, 0.02, **options)
            for step in range(STEPS):
                whole.grad = normal(14, 6, seed=step)
                for piece, gradient in zip(apart, whole.grad.split([6, 6, 2]), strict=True):
                    piece.grad = gradient.clone()
                plain.step([whole.grad])
                fused.step()
                pieces.step()
            torch.testing.assert_close(whole, torch.cat([piece.detach() for piece in apart]), atol=1e-6, rtol=0)
            torch.testing.assert_close(whole.detach().double(), plain.weights[0], atol=2e-5, rtol=0)
            assert fused.state[whole]["momentum_buffer"].shape == (14, 6)


def test_in_fp32_it_equals_torchs_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    for adjust in ("original", "match_rms_adamw"):
        for nesterov in (True, False):
            with case(adjust, nesterov):

                def in_fp32(gradient: Tensor, coefficients: object, steps: int, eps: float) -> Tensor:
                    return newton_schulz(gradient, steps, eps)

                monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_fp32)
                ours, theirs = parameters(), parameters()
                train(Muon(ours, 0.02, weight_decay=0.1, scale=adjust, nesterov=nesterov), ours)
                reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust, nesterov=nesterov)
                train(reference, theirs)
                for own, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(own, other, atol=5e-6, rtol=0)


def test_it_continues_from_the_state_of_torchs_muon_and_back() -> None:
    weights = parameters()
    reference = torch.optim.Muon(weights, lr=0.02, weight_decay=0.1, momentum=0.9)
    train(reference, weights, steps=2)
    optimizer = Muon(weights, 0.5)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[0]["scale"] == "original"
    buffers = [reference.state[weight]["momentum_buffer"] for weight in weights]
    assert all(
        torch.equal(optimizer.state[weight]["momentum_buffer"], buffer)
        for weight, buffer in zip(weights, buffers, strict=True)
    )
    train(optimizer, weights, steps=1)
    state = optimizer.state_dict()
    state["param_groups"] = reference.state_dict()["param_groups"]
    reference.load_state_dict(state)
    train(reference, weights, steps=1)


def test_a_state_of_torchs_muon_sets_the_scale_and_keeps_the_options_that_it_lacks() -> None:
    whole, wide = parameters([(6, 4), (4, 9)])
    groups = [{"params": [whole], "split": (2, 4), "cautious": True}, {"params": [wide], "muon_plus": True}]
    for adjust, scale in ((None, "original"), ("original", "original"), ("match_rms_adamw", "match_rms_adamw")):
        reference = torch.optim.Muon([{"params": [weight]} for weight in (whole, wide)], adjust_lr_fn=adjust)
        optimizer = Muon([dict(group) for group in groups], 0.5, scale="match_rms_adamw")
        optimizer.load_state_dict(reference.state_dict())
        first, second = optimizer.param_groups
        assert (first["split"], first["cautious"], first["muon_plus"]) == ((2, 4), True, False)
        assert (second["split"], second["cautious"], second["muon_plus"]) == (None, False, True)
        assert [group["scale"] for group in optimizer.param_groups] == [scale, scale]
        assert not {"adjust_lr_fn", "ns_coefficients"} & first.keys()


# ---------------------------------------------------------------------- stacks


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setitem(module._STACK_ELEMENTS, "cpu", 1)


@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS.keys())
def test_a_stack_equals_its_matrices_one_at_a_time(one_at_a_time: Callable[[], None], options: dict[str, Any]) -> None:
    stacked, single = parameters(), parameters()
    first, second = Muon(stacked, 0.02, **options), Muon(single, 0.02, **options)
    train(first, stacked)
    one_at_a_time()
    train(second, single)
    for own, other in zip(stacked, single, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=0)


def test_a_state_goes_from_stacked_to_single_and_back(one_at_a_time: Callable[[], None]) -> None:
    throughout, changing = parameters(), parameters()
    train(Muon(throughout, 0.02), throughout, steps=6)
    first = Muon(changing, 0.02)
    train(first, changing, steps=3)
    state = copy.deepcopy(first.state_dict())
    assert [own["momentum_buffer"].shape for own in state["state"].values()] == SHAPES
    one_at_a_time()
    second = Muon(changing, 0.02)
    second.load_state_dict(state)
    train(second, changing, steps=3, start=3)
    for own, other in zip(throughout, changing, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=0)


def stacks_of(groups: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """(members, rows, columns) of each stack that a step would make."""
    defaults = Muon([nn.Parameter(torch.zeros(1, 1))], 0.02).defaults
    state: dict[Tensor, dict[str, Any]] = {}
    matrices = [matrix for group in groups for matrix in module._matrices({**defaults, **group}, state)]
    return [(len(stack), *stack[0].weight.shape) for stack in module._stacks(matrices)]


def test_matrices_of_one_shape_and_pieces_of_another_group_share_a_stack() -> None:
    weights, fused = parameters(), nn.Parameter(normal(14, 6))
    give_gradients([*weights, fused], 0)
    groups = [{"params": weights}, {"params": [fused], "split": (6, 6, 2)}]
    assert stacks_of(groups) == [(5, 6, 6), (1, 4, 14), (1, 14, 4), (1, 1, 5), (1, 5, 1), (1, 2, 6)]


def test_matrices_with_other_options_or_another_dtype_are_in_another_stack() -> None:
    first, second, third = parameters([(6, 6)] * 2), parameters([(6, 6)]), parameters([(6, 6)], torch.bfloat16)
    give_gradients([*first, *second, *third], 0)
    groups = [{"params": first}, {"params": second, "lr": 0.1}, {"params": third}]
    assert stacks_of(groups) == [(2, 6, 6), (1, 6, 6), (1, 6, 6)]


def test_stacks_are_bounded_and_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for elements, sizes in ((36 * 3, [2, 2]), (36 * 2 + 35, [2, 2]), (36, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (999, [4])):
        monkeypatch.setitem(module._STACK_ELEMENTS, "cpu", elements)
        weights = parameters([(6, 6)] * 4)
        give_gradients(weights, 0)
        assert stacks_of([{"params": weights}]) == [(size, 6, 6) for size in sizes]


def test_a_step_makes_no_copy_of_all_parameters() -> None:
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(64)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = Muon(weights, 0.02, weight_decay=0.1, cautious=True)
    optimizer.step()
    held = module._STACK_ELEMENTS["cpu"]
    module._STACK_ELEMENTS["cpu"] = 4 * 64 * 64
    try:
        with torch.profiler.profile(profile_memory=True) as profiled:
            optimizer.step()
    finally:
        module._STACK_ELEMENTS["cpu"] = held
    assert peak_bytes(profiled) <= 8 * 4 * 4 * 64 * 64
    assert peak_bytes(profiled) < 64 * 64 * 64 * 4 * 0.6


def peak_bytes(profiled: torch.profiler.profile) -> int:
    """The most bytes held at one time, above those held at the start."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# ---------------------------------------------------------------------- dtypes


def test_16_bit_weights_have_an_fp32_momentum_and_are_rounded_once() -> None:
    for dtype, resolution in ((torch.bfloat16, 2**-7), (torch.float16, 2**-10)):
        with case(dtype, resolution):
            shapes = [(6, 6), (4, 14)]
            weights = parameters(shapes, dtype)
            optimizer = Muon(weights, 0.02, weight_decay=0.1)
            for step in range(3):
                wide = [nn.Parameter(weight.detach().float()) for weight in weights]
                twin = Muon(wide, 0.02, weight_decay=0.1)
                give_gradients(weights, step)
                for weight, copied in zip(weights, wide, strict=True):
                    assert weight.grad is not None
                    copied.grad = weight.grad.float()
                    if step > 0:
                        twin.state[copied]["momentum_buffer"] = optimizer.state[weight]["momentum_buffer"].clone()
                optimizer.step()
                twin.step()
                for weight, copied in zip(weights, wide, strict=True):
                    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
                    assert torch.equal(
                        optimizer.state[weight]["momentum_buffer"], twin.state[copied]["momentum_buffer"]
                    )
                    torch.testing.assert_close(weight.detach().float(), copied.detach(), atol=0, rtol=resolution)
                    assert torch.equal(weight.detach(), copied.detach().to(dtype))


def test_a_loaded_momentum_keeps_its_bits() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with case(dtype):
            weights = parameters(dtype=dtype)
            optimizer = Muon(weights, 0.02)
            train(optimizer, weights, steps=2)
            state = copy.deepcopy(optimizer.state_dict())
            other = Muon([nn.Parameter(weight.detach().clone()) for weight in weights], 0.02)
            other.load_state_dict(state)
            for own, saved in zip(other.state.values(), state["state"].values(), strict=True):
                assert own["momentum_buffer"].dtype == torch.promote_types(dtype, torch.float32)
                assert bits(own["momentum_buffer"]) == bits(saved["momentum_buffer"])


def test_loading_hooks_can_change_the_state() -> None:
    weights = parameters()
    optimizer = Muon(weights, 0.02)
    train(optimizer, weights, steps=1)

    def double(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        for own in state["state"].values():
            own["momentum_buffer"] = 2 * own["momentum_buffer"]
        return state

    state = copy.deepcopy(optimizer.state_dict())
    before = [own["momentum_buffer"].clone() for own in optimizer.state.values()]
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.load_state_dict(state)
    after = [own["momentum_buffer"] for own in optimizer.state.values()]
    assert all(torch.equal(2 * old, new) for old, new in zip(before, after, strict=True))
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_weights_that_are_not_contiguous_step_alike() -> None:
    plain = nn.Parameter(normal(8, 6))
    strided = nn.Parameter(plain.detach().T.contiguous().T)
    assert not strided.is_contiguous()
    for weight in (plain, strided):
        train(Muon([weight], 0.02, weight_decay=0.1), [weight], steps=3)
    torch.testing.assert_close(plain, strided, atol=1e-6, rtol=0)


def test_an_empty_matrix_is_left_alone() -> None:
    weights = [nn.Parameter(torch.zeros(0, 4)), nn.Parameter(normal(4, 4))]
    train(Muon(weights, 0.02), weights, steps=1)
    assert not torch.equal(weights[1].detach(), normal(4, 4))


# ---------------------------------------------------------------------- skipped steps


@pytest.fixture(params=["host", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where `found_inf` is: the step reads it on the host; on a device it obeys without reading it."""
    if request.param == "device":
        monkeypatch.setattr(module, "_is_on_host", lambda tensor: False)
    return str(request.param)


def test_if_found_inf_is_one_no_bit_changes(place: str) -> None:
    for name, options in OPTION_SETS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            with case(name, dtype):
                weights = parameters(dtype=dtype)
                with torch.no_grad():
                    weights[0].view(-1)[:2] = torch.tensor([-0.0, 0.0])
                optimizer: Any = Muon(weights, 0.02, **options)
                train(optimizer, weights, steps=2)
                with torch.no_grad():
                    weights[0].view(-1)[:2] = torch.tensor([-0.0, 0.0])
                    optimizer.state[weights[0]]["momentum_buffer"].view(-1)[:2] = torch.tensor([-0.0, 0.0])
                before = [bits(weight) for weight in weights]
                momenta = [bits(optimizer.state[weight]["momentum_buffer"]) for weight in weights]
                give_gradients(weights, 5)
                for weight, bad in zip(weights, (math.nan, math.inf, -math.inf), strict=False):
                    assert weight.grad is not None
                    weight.grad.view(-1)[0] = bad
                optimizer.found_inf = torch.ones(())
                optimizer.step()
                assert [bits(weight) for weight in weights] == before
                assert [bits(optimizer.state[weight]["momentum_buffer"]) for weight in weights] == momenta


def test_a_skipped_first_step_changes_nothing(place: str) -> None:
    weights, others = parameters(), parameters()
    optimizer: Any = Muon(weights, 0.02)
    give_gradients(weights, 0, scale=math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    del optimizer.found_inf
    train(optimizer, weights, steps=2)
    train(Muon(others, 0.02), others, steps=2)
    assert all(torch.equal(own, other) for own, other in zip(weights, others, strict=True))


def test_if_found_inf_is_zero_the_step_is_the_ordinary_one_bit_for_bit(place: str) -> None:
    for name, options in OPTION_SETS.items():
        with case(name):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                ordinary, gated = parameters(dtype=dtype), parameters(dtype=dtype)
                first: Any = Muon(ordinary, 0.02, **options)
                second: Any = Muon(gated, 0.02, **options)
                second.found_inf = torch.zeros(1) if place == "device" else torch.zeros(())
                train(first, ordinary, steps=3)
                train(second, gated, steps=3)
                assert [bits(weight) for weight in ordinary] == [bits(weight) for weight in gated]


def test_grad_scale_divides_the_gradients() -> None:
    plain, scaled = parameters(), parameters()
    first: Any = Muon(plain, 0.02)
    second: Any = Muon(scaled, 0.02)
    second.grad_scale = torch.tensor(1024.0)
    for step in range(3):
        give_gradients(plain, step)
        give_gradients(scaled, step, scale=1024.0)
        gradients = [weight.grad.clone() for weight in scaled if weight.grad is not None]
        first.step()
        second.step()
        assert all(torch.equal(weight.grad, kept) for weight, kept in zip(scaled, gradients, strict=True))
    assert all(torch.equal(own, other) for own, other in zip(plain, scaled, strict=True))


def test_a_gradient_scaler_skips_steps_that_overflowed() -> None:
    weights, twins = parameters([(6, 6), (4, 14)]), parameters([(6, 6), (4, 14)])
    optimizer, plain = Muon(weights, 0.02), Muon(twins, 0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert optimizer._step_supports_amp_scaling
    for step, bad in enumerate([False, True, False]):
        before = [bits(weight) for weight in weights]
        optimizer.zero_grad()
        sum((weight * normal(*weight.shape, seed=step)).sum() for weight in weights)
        total = torch.stack([(weight * normal(*weight.shape, seed=step)).sum() for weight in weights]).sum()
        scaler.scale(total * (math.inf if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (before == [bits(weight) for weight in weights]) == bad
        if not bad:
            for twin in twins:
                twin.grad = normal(*twin.shape, seed=step)
            plain.step()
    for own, other in zip(weights, twins, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- an optimizer like any other


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    weights = parameters()
    optimizer = Muon(weights, 0.02, weight_decay=0.5)
    give_gradients(weights, 0)
    weights[2].grad = None
    before = weights[2].detach().clone()
    optimizer.step()
    assert torch.equal(weights[2].detach(), before)
    assert weights[2] not in optimizer.state


def test_every_weight_moves_in_the_first_step() -> None:
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    train(Muon(weights, 0.02), weights, steps=1)
    assert not any(torch.equal(old, new.detach()) for old, new in zip(before, weights, strict=True))


def test_the_closure_is_called_once_with_gradients_on() -> None:
    weights = parameters([(4, 4)])
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        weights[0].grad = torch.ones(4, 4)
        return 3.5

    with torch.no_grad():
        assert Muon(weights, 0.02).step(closure) == 3.5
    assert calls == [True]


def test_a_tensor_learning_rate_steps_like_a_number() -> None:
    for options in ({}, {"weight_decay": 0.3}):
        numbers, tensors = parameters(), parameters()
        rate = torch.tensor(0.01)
        train(Muon(numbers, 0.02, **options), numbers, steps=3)
        optimizer = Muon(tensors, rate, **options)
        rate.fill_(0.02)
        train(optimizer, tensors, steps=3)
        for own, other in zip(numbers, tensors, strict=True):
            torch.testing.assert_close(own, other, atol=1e-6, rtol=0)


def test_a_scheduler_moves_each_groups_own_rate() -> None:
    first, second = parameters([(4, 4)]), parameters([(5, 5)])
    optimizer = Muon([{"params": first}, {"params": second, "lr": 0.1}], 0.02)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    train(optimizer, [*first, *second], steps=1)
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]


def test_a_zero_learning_rate_changes_only_the_momentum() -> None:
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = Muon(weights, 0.0, weight_decay=0.1)
    train(optimizer, weights, steps=1)
    assert all(torch.equal(old, new.detach()) for old, new in zip(before, weights, strict=True))
    assert all(own["momentum_buffer"].any() for own in optimizer.state.values())


def test_a_reloaded_optimizer_continues_bit_for_bit() -> None:
    weights, copied = parameters(), parameters()
    optimizer = Muon(weights, 0.02, weight_decay=0.1, cautious=True)
    train(optimizer, weights, steps=3)
    state = copy.deepcopy(optimizer.state_dict())
    assert set(state) == {"state", "param_groups"}
    assert all(list(own) == ["momentum_buffer"] for own in state["state"].values())
    with torch.no_grad():
        for weight, other in zip(weights, copied, strict=True):
            other.copy_(weight)
    other = Muon(copied, 0.5)
    other.load_state_dict(state)
    train(optimizer, weights, steps=3, start=3)
    train(other, copied, steps=3, start=3)
    assert all(torch.equal(own, twin) for own, twin in zip(weights, copied, strict=True))


def test_a_deep_copy_continues_on_its_own() -> None:
    weights = parameters()
    optimizer = Muon(weights, 0.02)
    train(optimizer, weights, steps=2)
    copied = copy.deepcopy(optimizer)
    twins = copied.param_groups[0]["params"]
    assert vars(copied)["_step_supports_amp_scaling"]
    train(copied, twins, steps=2, start=2)
    assert not torch.equal(weights[0], twins[0])
    train(optimizer, weights, steps=2, start=2)
    assert all(torch.equal(own, twin) for own, twin in zip(weights, twins, strict=True))


def test_clearing_the_state_starts_the_momentum_over() -> None:
    weights = parameters()
    optimizer = Muon(weights, 0.02)
    train(optimizer, weights, steps=2)
    fresh = [nn.Parameter(weight.detach().clone()) for weight in weights]
    optimizer.state.clear()
    train(optimizer, weights, steps=2, start=2)
    train(Muon(fresh, 0.02), fresh, steps=2, start=2)
    assert all(torch.equal(own, other) for own, other in zip(weights, fresh, strict=True))


def test_hooks_run_and_groups_can_be_added() -> None:
    weights = parameters([(4, 4), (5, 5)])
    optimizer = Muon(weights[:1], 0.02, ns_steps=3)
    optimizer.add_param_group({"params": weights[1:], "muon_plus": True})
    assert optimizer.param_groups[1]["ns_steps"] == 3
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(optimizer, weights, steps=1)
    assert seen == ["before", "after"]


def test_the_function_needs_nothing_but_its_arguments() -> None:
    weights, others = parameters(), parameters()
    group = {**Muon([nn.Parameter(torch.zeros(1, 1))], 0.02).defaults, "params": weights}
    state: dict[Tensor, dict[str, Any]] = {}
    for step in range(3):
        give_gradients(weights, step)
        muon_step([group], state)
    train(Muon(others, 0.02), others, steps=3)
    assert all(torch.equal(own, other) for own, other in zip(weights, others, strict=True))
    assert set(state) == set(weights)


# ---------------------------------------------------------------------- errors


def refused(parameter: nn.Parameter, gradient: Tensor, **group: Any) -> Muon:
    """An optimizer over a good parameter and one that it cannot train."""
    good = nn.Parameter(normal(4, 4))
    good.grad = torch.ones(4, 4)
    parameter.grad = gradient
    return Muon([{"params": [good]}, {"params": [parameter], **group}], 0.02)


def test_a_parameter_that_is_not_a_matrix_is_refused_at_the_step_and_the_error_names_its_shape() -> None:
    for shape in ((), (3,), (2, 3, 3)):
        with case(shape):
            optimizer = refused(nn.Parameter(torch.zeros(shape)), torch.ones(shape))
            before = optimizer.param_groups[0]["params"][0].detach().clone()
            with pytest.raises(ValueError, match=r"2-D parameters, not one of shape .*; give it to AdamW") as caught:
                optimizer.step()
            assert str(shape) in str(caught.value)
            assert torch.equal(optimizer.param_groups[0]["params"][0].detach(), before)
            assert not optimizer.state


def test_a_complex_parameter_is_refused_at_the_step() -> None:
    optimizer = refused(nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64)), torch.ones(3, 4, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"complex parameter of shape \(3, 4\)"):
        optimizer.step()


def test_a_sparse_gradient_is_refused_at_the_step() -> None:
    optimizer = refused(nn.Parameter(torch.zeros(3, 4)), torch.eye(3, 4).to_sparse())
    with pytest.raises(RuntimeError, match=r"gradient of a parameter of shape \(3, 4\) is sparse"):
        optimizer.step()


def test_a_split_that_does_not_fit_the_weight_is_refused() -> None:
    for split in ((2, 2), (4, 0), (5, -1), ()):
        with case(split):
            parameter = nn.Parameter(torch.zeros(4, 3)) if split != (2, 2) else nn.Parameter(torch.zeros(5, 3))
            optimizer = refused(parameter, torch.ones_like(parameter), split=split)
            with pytest.raises(ValueError, match=r"split .* must be row counts that add up"):
                optimizer.step()


def test_an_option_that_is_out_of_range_is_named() -> None:
    for option, value in (
        ("lr", -0.1),
        ("lr", math.nan),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("ns_steps", 0),
        ("ns_steps", 2.5),
        ("weight_decay", -1.0),
        ("eps", 0.0),
        ("norm_eps", -1e-8),
        ("scale", "spectral"),
        ("coefficients", "cubic"),
    ):
        with case(option, value):
            with pytest.raises(ValueError, match=f"Muon's {option} must be "):
                Muon(parameters(), **{"lr": 0.02, option: value})
            optimizer = Muon(parameters(), 0.02)
            with pytest.raises(ValueError, match=f"Muon's {option} must be "):
                optimizer.add_param_group({"params": parameters(), option: value})
            assert len(optimizer.param_groups) == 1


def test_a_learning_rate_of_many_elements_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0-dim tensor, not one of shape \(2,\)"):
        Muon(parameters(), torch.ones(2))


def test_the_state_of_another_optimizer_or_of_other_shapes_is_refused() -> None:
    weights = parameters()
    adamw = torch.optim.AdamW(weights)
    train(adamw, weights, steps=1)
    optimizer = Muon(weights, 0.02)
    with pytest.raises(ValueError, match="not that of Muon.*one parameter here has step, exp_avg, exp_avg_sq"):
        optimizer.load_state_dict(adamw.state_dict())
    turned = [nn.Parameter(weight.detach().T.contiguous()) for weight in weights]
    other = Muon(turned, 0.02)
    train(other, turned, steps=1)
    with pytest.raises(ValueError, match=r"of shape \(4, 14\) has shape \(14, 4\)"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(Muon(weights[:2], 0.02).state_dict())
    assert not optimizer.state
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 0


# ---------------------------------------------------------------------- normalisation after the polar factor


def test_the_last_normalised_side_has_unit_norms() -> None:
    for shape in ((4, 6), (6, 4), (3, 4, 6)):
        with case(shape):
            update = normal(*shape)
            for mode, last in (("row", -1), ("col_row", -1), ("col", -2), ("row_col", -2)):
                norms = post_polar_normalize(update, mode=mode).norm(dim=last)  # type: ignore[arg-type]
                torch.testing.assert_close(norms, torch.ones_like(norms))
            assert torch.equal(post_polar_normalize(update, mode="none"), update)


def test_the_name_gives_the_order_of_rows_and_columns() -> None:
    update = normal(4, 6).double()
    rows = update / update.norm(dim=1, keepdim=True)
    torch.testing.assert_close(post_polar_normalize(update), rows / rows.norm(dim=0, keepdim=True))
    columns = update / update.norm(dim=0, keepdim=True)
    expected = columns / columns.norm(dim=1, keepdim=True)
    torch.testing.assert_close(post_polar_normalize(update, mode="col_row"), expected)


def test_normalising_keeps_zeros_dtype_and_input() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        with case(dtype):
            update = normal(4, 6).to(dtype)
            update[1] = 0
            before = update.clone()
            result = post_polar_normalize(update)
            assert result.dtype == dtype
            assert torch.equal(update, before)
            assert not result[1].any()
            assert torch.isfinite(result).all()
            assert post_polar_normalize(update, mode="none").data_ptr() != update.data_ptr()


def test_a_norm_below_eps_is_divided_by_eps() -> None:
    update = torch.full((1, 4), 1e-3)
    torch.testing.assert_close(post_polar_normalize(update, mode="row", eps=0.1), update / 0.1)


def test_an_unknown_mode_or_a_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of none, row, col, row_col, col_row, not 'both'"):
        post_polar_normalize(torch.ones(2, 2), mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        post_polar_normalize(torch.ones(3))


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS.keys())
def test_a_gpu_steps_like_the_cpu_and_obeys_found_inf_on_the_device(options: dict[str, Any]) -> None:
    weights, twins = parameters(), [nn.Parameter(weight.detach().cuda()) for weight in parameters()]
    optimizer: Any = Muon(weights, 0.02, **options)
    on_device: Any = Muon(twins, 0.02, **options)
    for step in range(3):
        give_gradients(weights, step)
        for twin, weight in zip(twins, weights, strict=True):
            assert weight.grad is not None
            twin.grad = weight.grad.cuda()
        optimizer.step()
        on_device.found_inf = torch.zeros((), device="cuda")
        on_device.step()
    # In bf16 the singular values differ by up to 0.02 each. With `cautious`, the sign of a small entry may differ too.
    if not options.get("cautious", False):
        for weight, twin in zip(weights, twins, strict=True):
            torch.testing.assert_close(twin.detach().cpu(), weight.detach(), atol=0.02, rtol=0)
    before = [bits(twin.cpu()) for twin in twins]
    for twin in twins:
        assert twin.grad is not None
        twin.grad.fill_(math.nan)
    on_device.found_inf = torch.ones((), device="cuda")
    with nothing_synchronises():
        on_device.step()
    assert [bits(twin.cpu()) for twin in twins] == before


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize("options", [{}, {"cautious": True, "cautious_rescale": True, "muon_plus": True}])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_work_and_step_like_one(
    options: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    orthogonalized: list[int] = []
    plain = module.orthogonalize

    def counted(matrices: Tensor, *args: Any, **named: Any) -> Tensor:
        orthogonalized.append(len(matrices))
        return plain(matrices, *args, **named)

    monkeypatch.setattr(module, "orthogonalize", counted)
    alone = parameters()
    train(Muon(alone, lr=0.1, weight_decay=0.1, **options), alone, steps=5)
    for_one, orthogonalized[:] = sum(orthogonalized), []

    def one_of(group: ThreadGroup) -> list[nn.Parameter]:
        weights = parameters()
        optimizer = Muon(weights, lr=0.1, weight_decay=0.1, **options)
        optimizer.ranks = group
        train(optimizer, weights, steps=5)
        return weights

    found = on_ranks(ranks, one_of)
    # Each matrix once in each step, wherever it is.
    assert sum(orthogonalized) == for_one == 5 * len(SHAPES)
    for weights in found:
        for own, first, right in zip(weights, found[0], alone, strict=True):
            assert bits(own) == bits(first)
            torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)


def test_the_work_is_shared_by_size() -> None:
    """One large matrix weighs as much as many small ones."""
    shapes = [(4, 4)] * 8 + [(8, 8)]

    def one_of_two(group: ThreadGroup) -> int:
        weights = parameters(shapes)
        optimizer = Muon(weights, lr=0.1)
        optimizer.ranks = group
        give_gradients(weights, 0)
        optimizer.step()
        return len(group.calls)

    # One round of two stacks: (8, 8) on one rank, all (4, 4) on the other.
    assert on_ranks(2, one_of_two) == [1, 1]
