from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from speedtronic.distributed.outer import (
    DelayedNesterovOuterOptimizer,
    NesterovOuterOptimizer,
    OuterOptimizer,
    SgdOuterOptimizer,
    make_outer,
)
from speedtronic.distributed.packed_tensors import pack_tensors, unpack_tensors
from speedtronic.distributed.schema import Tensors

NAMES = ["nesterov", "sgd", "delayed_nesterov"]
MOMENTUM_NAMES = ["nesterov", "delayed_nesterov"]
Make = Callable[..., OuterOptimizer]


def values(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 7, generator=generator, dtype=dtype),
        "scalar": torch.randn((), generator=generator, dtype=dtype),
        "empty": torch.randn(0, 3, generator=generator, dtype=dtype),
    }


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def float64(value: float) -> Tensors:
    return {"w": torch.tensor([value], dtype=torch.float64)}


# --- DiLoCo


@pytest.mark.parametrize("name", MOMENTUM_NAMES)
@pytest.mark.parametrize(("mu", "dtype"), [(0.9, torch.float32), (0.5, torch.float32), (0.2, torch.float64)])
def test_in_whole_rounds_it_is_diloco_bit_for_bit(name: str, mu: float, dtype: torch.dtype) -> None:
    state = values(0, dtype)
    outer = make_outer(name, state, 0.7, mu)
    parameters = {key: nn.Parameter(tensor.clone()) for key, tensor in state.items()}
    # DiLoCo's outer optimizer (arXiv 2311.08105): SGD with Nesterov's momentum, whose gradients are the deltas.
    torchs = torch.optim.SGD(parameters.values(), lr=0.7, momentum=mu, nesterov=True)

    for round_number in range(1, 9):
        delta = values(round_number, dtype)
        outer.step(state, delta, 1.0)
        for key, parameter in parameters.items():
            parameter.grad = delta[key].clone()
        torchs.step()

        assert_equal(state, {key: parameter.detach() for key, parameter in parameters.items()})
        momenta = {key: torchs.state[parameter]["momentum_buffer"] for key, parameter in parameters.items()}
        assert_equal({key: outer.tensors()[f"momentum.{key}"] for key in state}, momenta)


def test_the_first_effective_step_is_the_gradient_and_its_momentum() -> None:
    state = {"w": torch.tensor([10.0])}

    NesterovOuterOptimizer(state, lr=1.0, momentum=0.5).step(state, {"w": torch.tensor([2.0])})

    assert state["w"].item() == 10.0 - (2.0 + 0.5 * 2.0)


@pytest.mark.parametrize("name", MOMENTUM_NAMES)
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_without_momentum_it_is_plain_sgd(name: str, fraction: float) -> None:
    state, other = values(0), values(0)
    outer, plain = make_outer(name, state, 0.5, 0.0), SgdOuterOptimizer(other, 0.5)

    for round_number in range(1, 5):
        outer.step(state, values(round_number), fraction)
        plain.step(other, values(round_number), fraction)

        assert_equal(state, other)


def test_sgd_moves_by_the_learning_rate_and_the_fraction() -> None:
    state = {"w": torch.tensor([1.0])}

    make_outer("sgd", state, 0.5, 0.9).step(state, {"w": torch.tensor([4.0])}, 0.25)

    assert state["w"].item() == 1.0 - 0.5 * 0.25 * 4.0


# --- Fractions of rounds


def total_displacement(name: str, mu: float, fractions: list[float], lr: float = 0.8) -> float:
    """How far a gradient of 1 in each of these parts of one round moves a weight, the rounds after it included."""
    state = float64(0.0)
    outer = make_outer(name, state, lr, mu)
    for fraction in fractions:
        outer.step(state, float64(1.0), fraction)
    for _ in range(400 * len(fractions)):  # 0.9^400 is less than what a float64 can show beside 1
        outer.step(state, float64(0.0), fractions[-1])
    return -state["w"].item()


@pytest.mark.parametrize("name", MOMENTUM_NAMES)
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_slices_of_a_round_move_the_weights_as_far_as_the_whole_tail_included(
    name: str, mu: float, slices: int
) -> None:
    moved = total_displacement(name, mu, [1 / slices] * slices)

    assert moved == pytest.approx(0.8 / (1 - mu), rel=1e-9)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(mu=st.floats(0.0, 0.99), slices=st.integers(1, 8), rounds=st.integers(1, 4))
def test_for_any_momentum_slices_and_their_remaining_tail_equal_whole_rounds(
    mu: float, slices: int, rounds: int
) -> None:
    """What a momentum m still moves in rounds of f without a gradient is, by the update,

    sum over j >= 1 of mu * (1 - mu^f) / (1 - mu) * mu^(f * j) * m = mu^(1 + f) / (1 - mu) * m.
    """
    lr, gradient = 0.8, 1.5

    def displaced(f: float, steps: int) -> float:
        state = float64(0.0)
        outer = NesterovOuterOptimizer(state, lr, mu)
        for _ in range(steps):
            outer.step(state, float64(gradient), f)
        tail = mu ** (1 + f) / (1 - mu) * outer.tensors()["momentum.w"].item()
        return -state["w"].item() + lr * tail

    whole, sliced = displaced(1.0, rounds), displaced(1 / slices, rounds * slices)

    assert sliced == pytest.approx(whole, rel=1e-10)
    assert sliced == pytest.approx(rounds * lr * gradient / (1 - mu), rel=1e-10)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mu=st.floats(0.0, 0.95), fractions=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12))
def test_delayed_momentum_moves_each_gradient_alike_however_a_round_is_cut(mu: float, fractions: list[float]) -> None:
    """The momentum's tail is mu / (1 - mu) of what was gathered, whether it is in the buffer or, decayed, in m."""
    state = float64(0.0)
    outer = DelayedNesterovOuterOptimizer(state, 0.8, mu)
    for fraction in fractions:
        outer.step(state, float64(1.0), fraction)

    tail = mu / (1 - mu) * (outer.tensors()["buffer.w"].item() + mu * outer.tensors()["momentum.w"].item())

    assert -state["w"].item() + 0.8 * tail == pytest.approx(0.8 * sum(fractions) / (1 - mu), rel=1e-9)


def test_delayed_momentum_waits_for_a_whole_round_despite_rounding() -> None:
    state = float64(0.0)
    outer = DelayedNesterovOuterOptimizer(state, 1.0, 0.5)
    for _ in range(9):
        outer.step(state, float64(1.0), 0.1)
    assert state["w"].item() == pytest.approx(-0.9)

    outer.step(state, float64(1.0), 0.1)  # ten tenths add up to 0.9999999999999999

    assert state["w"].item() == pytest.approx(-(1.0 + 0.5))
    assert outer.tensors()["buffer.w"].item() == 0.0


def test_delayed_momentum_moves_once_for_each_whole_round() -> None:
    state = float64(0.0)
    outer = DelayedNesterovOuterOptimizer(state, 1.0, 0.5)
    gathered = []
    for _ in range(5):
        outer.step(state, float64(1.0), 0.6)
        gathered.append(outer.tensors()["buffer.w"].item())

    assert gathered == pytest.approx([0.6, 0.0, 0.6, 0.0, 0.0])  # as 0.6, 1.2, 1.8, 2.4 and 3 rounds have come


def test_a_fraction_of_a_round_moves_by_the_formula() -> None:
    mu, f, lr = 0.9, 0.25, 0.7
    state, outer = float64(1.0), NesterovOuterOptimizer(float64(1.0), 0.7, 0.9)
    theta, m = 1.0, 0.0
    for gradient in (2.0, -1.0, 0.5):
        outer.step(state, float64(gradient), f)
        m = mu**f * m + f * gradient
        theta -= lr * (f * gradient + mu * (1 - mu**f) / (1 - mu) * m)

    assert state["w"].item() == pytest.approx(theta, rel=1e-14)
    assert outer.tensors()["momentum.w"].item() == pytest.approx(m, rel=1e-14)


# --- State


@pytest.mark.parametrize("name", NAMES)
def test_it_continues_bit_for_bit_from_its_state(name: str) -> None:
    state = values(0)
    outer = make_outer(name, state, 0.7, 0.9)
    for number in range(1, 4):
        outer.step(state, values(number), 0.4)
    saved, scalars, other_state = pack_tensors(outer.tensors(), {}), outer.scalars(), copied(state)

    other = make_outer(name, other_state, 0.7, 0.9)
    other.load(unpack_tensors(saved)[0], scalars)
    for number in range(4, 8):
        outer.step(state, values(number), 0.4)
        other.step(other_state, values(number), 0.4)

    assert_equal(state, other_state)
    assert_equal(outer.tensors(), other.tensors())
    assert outer.scalars() == other.scalars()


@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_another_optimizer_is_refused_and_changes_nothing(name: str) -> None:
    state = values(0)
    outer = make_outer(name, state, 0.7, 0.9)
    outer.step(state, values(1))
    before = copied(outer.tensors())
    others: list[tuple[Tensors, dict[str, float]]] = [
        ({**copied(outer.tensors()), "more": torch.ones(1)}, outer.scalars()),
        (copied(outer.tensors()), {"steps": 3.0}),
    ]
    if before:
        others += [({}, outer.scalars()), ({key: torch.ones(9) for key in before}, outer.scalars())]

    for tensors, scalars in others:
        with pytest.raises(ValueError, match=f"outer optimizer {name}"):
            outer.load(tensors, scalars)

    assert_equal(outer.tensors(), before)


@pytest.mark.parametrize("count", [float("nan"), 2.0, -7.0])
def test_an_impossible_count_of_gathered_rounds_is_refused(count: float) -> None:
    outer = DelayedNesterovOuterOptimizer(values(0), 1.0, 0.5)

    with pytest.raises(ValueError, match="rounds"):
        outer.load(outer.tensors(), {"count": count})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_an_invalid_fraction_changes_nothing(name: str, fraction: float) -> None:
    state = values(0)
    outer = make_outer(name, state, 0.7, 0.9)

    with pytest.raises(ValueError, match="fraction"):
        outer.step(state, values(1), fraction)

    assert_equal(state, values(0))
    assert all(not tensor.count_nonzero() for tensor in outer.tensors().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_delta_that_does_not_fit_changes_nothing(name: str) -> None:
    state = values(0)
    outer = make_outer(name, state, 0.7, 0.9)
    lacking = {key: tensor for key, tensor in values(1).items() if key != "scalar"}

    for delta in (lacking, {**values(1), "scalar": torch.ones(2)}, {**values(1), "more": torch.ones(1)}):
        with pytest.raises(ValueError, match="scalar|more"):
            outer.step(state, delta)
    with pytest.raises(ValueError, match="scalar"):
        outer.step(lacking, values(1))

    assert_equal(state, values(0))
    assert outer.scalars() == make_outer(name, state, 0.7, 0.9).scalars()


@pytest.mark.parametrize("name", NAMES)
def test_a_step_leaves_the_delta_and_what_it_does_not_name_alone(name: str) -> None:
    state: Tensors = {"w": torch.ones(2), "frozen": torch.ones(3), "count": torch.tensor(4)}
    delta = {"w": torch.tensor([0.5, -0.5])}
    outer = make_outer(name, {"w": state["w"], "count": state["count"]}, 0.7, 0.9)

    outer.step(state, delta, 0.5)
    outer.step(state, delta, 0.5)

    assert_equal(delta, {"w": torch.tensor([0.5, -0.5])})
    assert torch.equal(state["frozen"], torch.ones(3))
    assert state["count"].item() == 4


def test_complex_weights_move_as_their_parts_do() -> None:
    state, parts = {"z": torch.tensor([1 + 2j])}, {"z": torch.tensor([[1.0, 2.0]])}
    outer, of_parts = NesterovOuterOptimizer(state, 0.7, 0.9), NesterovOuterOptimizer(parts, 0.7, 0.9)

    for fraction in (0.5, 1.0):
        outer.step(state, {"z": torch.tensor([0.25 - 1j])}, fraction)
        of_parts.step(parts, {"z": torch.tensor([[0.25, -1.0]])}, fraction)

    torch.testing.assert_close(torch.view_as_real(state["z"]), parts["z"])


def test_weights_of_half_precision_have_momentum_of_full() -> None:
    state: dict[str, Tensor] = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    outer = NesterovOuterOptimizer(state, 0.5, 0.5)

    outer.step(state, {"w": torch.tensor([0.001])})

    assert outer.tensors()["momentum.w"].item() == pytest.approx(0.001, rel=1e-6)
    assert state["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("make", [NesterovOuterOptimizer, DelayedNesterovOuterOptimizer])
@pytest.mark.parametrize(("lr", "momentum"), [(0.0, 0.5), (-1.0, 0.5), (float("inf"), 0.5), (1.0, 1.0), (1.0, -0.1)])
def test_settings_that_cannot_work_are_refused(make: Make, lr: float, momentum: float) -> None:
    with pytest.raises(ValueError, match="outer"):
        make(values(0), lr, momentum)


def test_an_unknown_outer_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'sparse_loco'; there are nesterov"):
        make_outer("sparse_loco", values(0), 1.0, 0.5)
