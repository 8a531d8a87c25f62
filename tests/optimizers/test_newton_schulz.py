"""Orthogonalisation: the bands of the singular values, the polar factor, hard inputs, batches, and the Gram form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedtronic.optimizers.newton_schulz import newton_schulz, orthogonalization_dtype, orthogonalize
from tests.support.cases import case

# An import by name would give the function that the package exports under this name.
module = import_module("speedtronic.optimizers.newton_schulz")

Name = Literal["quintic", "polar_express"]
NAMES: tuple[Name, ...] = ("quintic", "polar_express")

# (coefficients, steps, low, high): singular values that start at 0.005 of the norm or above end between low and high.
BANDS: list[tuple[Name, int, float, float]] = [
    ("quintic", 5, 0.68, 1.16),
    ("quintic", 6, 0.68, 1.14),
    ("quintic", 8, 0.68, 1.14),
    ("polar_express", 5, 0.87, 1.13),
    ("polar_express", 6, 0.998, 1.002),
    ("polar_express", 8, 1 - 1e-5, 1 + 1e-5),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_singular_values(values: Tensor, columns: int, seed: int = 0) -> Tensor:
    """A matrix (len(values), columns) in fp64."""
    rows = len(values)
    left = torch.linalg.qr(normal(rows, rows, seed=seed, dtype=torch.float64))[0]
    right = torch.linalg.qr(normal(columns, rows, seed=seed + 1, dtype=torch.float64))[0]
    return left @ torch.diag(values.double()) @ right.T


def polar_factor(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return left @ right


def plain(matrix: Tensor, steps: int) -> Tensor:
    """The formula of the quintic iteration, in fp64."""
    x = matrix.double()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / max(float(x.norm()), 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_the_default_is_the_quintic_iteration() -> None:
    for shape in ((24, 24), (16, 40), (40, 16), (1, 9), (9, 1), (1, 1)):
        for steps in (1, 5):
            with case(shape, steps):
                matrix = normal(*shape)
                torch.testing.assert_close(
                    newton_schulz(matrix, steps).double(), plain(matrix, steps), atol=1e-5, rtol=0
                )
                in_fp64 = newton_schulz(matrix.double(), steps)
                torch.testing.assert_close(in_fp64, plain(matrix, steps), atol=1e-12, rtol=0)


def test_singular_values_end_in_the_band() -> None:
    for name, steps, low, high in BANDS:
        for columns in (32, 100):
            with case(name, steps, low, high, columns):
                start = torch.logspace(0, -2, 32)
                assert start[-1] / start.norm() > 0.005
                matrix = with_singular_values(start, columns).float()
                for turned in (matrix, matrix.T):
                    values = torch.linalg.svdvals(newton_schulz(turned, steps, coefficients=name))
                    assert low - 2e-5 < values[-1]
                    assert values[0] < high + 2e-5


def test_the_polynomials_map_the_whole_interval_into_the_band() -> None:
    for name, steps, low, high in BANDS:
        with case(name, steps, low, high):
            values = np.geomspace(0.005, 1.0, 200_000)
            for a, b, c in module._schedule(name, steps, module._FINE_MARGIN):
                values = a * values + b * values**3 + c * values**5
            assert low <= values.min()
            assert values.max() <= high


def test_polar_express_converges_to_the_polar_factor() -> None:
    for shape in ((20, 20), (12, 50), (50, 12), (1, 7), (7, 1)):
        with case(shape):
            matrix = normal(*shape, dtype=torch.float64)
            for steps, tolerance in ((6, 2e-3), (9, 1e-9), (12, 1e-12)):
                result = newton_schulz(matrix, steps, coefficients="polar_express")
                torch.testing.assert_close(result, polar_factor(matrix), atol=tolerance, rtol=0)
            single = newton_schulz(matrix.float(), 9, coefficients="polar_express")
            torch.testing.assert_close(single.double(), polar_factor(matrix), atol=1e-5, rtol=0)


def test_missing_directions_of_a_low_rank_matrix_stay_missing() -> None:
    for name in NAMES:
        for shape in ((18, 18), (12, 40), (40, 12)):
            with case(name, shape):
                rows, columns = shape
                for rank in (1, 3):
                    matrix = normal(rows, rank, seed=rank) @ normal(rank, columns, seed=rank + 1)
                    # The product is rounded to fp32, so even in fp64 the missing singular values are about 1e-8.
                    for dtype in (torch.float32, torch.float64):
                        values = torch.linalg.svdvals(newton_schulz(matrix.to(dtype), 8, coefficients=name))
                        assert values[:rank].min() > 0.68
                        assert values[:rank].max() < 1.21
                        assert values[rank:].max() < 3e-3


def test_a_zero_matrix_stays_zero() -> None:
    for name in NAMES:
        with case(name):
            for shape in ((4, 4), (3, 9), (9, 3)):
                assert not newton_schulz(torch.zeros(shape), coefficients=name).any()


def test_the_result_does_not_depend_on_the_size_of_the_entries() -> None:
    for name in NAMES:
        for shape in ((12, 12), (8, 30), (30, 8)):
            with case(name, shape):
                matrix = normal(*shape)
                expected = newton_schulz(matrix, coefficients=name)
                for scale, eps in ((1e30, 1e-7), (1e38, 1e-7), (1e-4, 1e-7), (1e-30, 1e-38), (1e-36, 1e-38)):
                    torch.testing.assert_close(
                        newton_schulz(matrix.clamp(-3, 3) * scale, eps=eps, coefficients=name),
                        newton_schulz(matrix.clamp(-3, 3), coefficients=name),
                        atol=2e-5,
                        rtol=0,
                    )
                huge = newton_schulz(matrix.double() * 1e300, coefficients=name)
                torch.testing.assert_close(huge.float(), expected, atol=2e-5, rtol=0)


def test_a_matrix_with_a_norm_below_eps_is_divided_by_eps() -> None:
    matrix = normal(6, 6, dtype=torch.float64)
    matrix *= 1e-12 / matrix.norm()
    result = newton_schulz(matrix)
    torch.testing.assert_close(result, plain(matrix, 5), atol=0, rtol=1e-9)
    assert result.norm() < 1e-2


def test_the_smallest_numbers_stay_finite() -> None:
    assert torch.isfinite(newton_schulz(torch.full((3, 3), 1e-45))).all()
    assert torch.isfinite(newton_schulz(torch.full((3, 3), 1e-45), eps=1e-45)).all()
    assert torch.isfinite(newton_schulz(torch.full((3, 3), torch.finfo(torch.float32).max))).all()


def test_a_nonfinite_matrix_becomes_nan_and_its_neighbours_do_not() -> None:
    for name in NAMES:
        for bad in (float("nan"), float("inf"), -float("inf")):
            for shape in ((5, 5), (4, 12)):
                with case(name, bad, shape):
                    stack = normal(3, *shape)
                    stack[1, 2, 3] = bad
                    result = orthogonalize(stack, coefficients=name)
                    assert result[1].isnan().all()
                    for index in (0, 2):
                        torch.testing.assert_close(
                            result[index], newton_schulz(stack[index], coefficients=name), atol=1e-6, rtol=0
                        )


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(
    batch=st.lists(st.integers(1, 3), min_size=0, max_size=2),
    rows=st.integers(1, 12),
    columns=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_a_batch_equals_its_matrices_one_by_one(
    name: Name, batch: list[int], rows: int, columns: int, seed: int
) -> None:
    stack = normal(*batch, rows, columns, seed=seed)
    result = orthogonalize(stack, coefficients=name)
    assert result.shape == stack.shape
    singles = [newton_schulz(one, coefficients=name) for one in stack.reshape(-1, rows, columns)]
    # While small singular values of an ill-conditioned matrix grow, rounding depends on the blocks of the products.
    torch.testing.assert_close(result.reshape(-1, rows, columns), torch.stack(singles), atol=5e-5, rtol=0)


def test_a_batch_of_random_matrices_equals_them_one_by_one_to_a_millionth() -> None:
    for shape in ((64, 64), (64, 172), (172, 64)):
        stack = normal(5, *shape)
        singles = torch.stack([newton_schulz(one) for one in stack])
        torch.testing.assert_close(orthogonalize(stack), singles, atol=1e-6, rtol=0)


GRAM_INPUTS = {
    "well conditioned": (normal(32, 96, dtype=torch.float64), 5e-5),
    "from 1 to 1e-2": (with_singular_values(torch.logspace(0, -2, 32), 96), 1e-3),
    "from 1 to 1e-6": (with_singular_values(torch.logspace(0, -6, 32), 96), 0.01),
    "one large": (with_singular_values(torch.cat([torch.ones(1), torch.full((31,), 3e-4)]), 96), 0.03),
    "rank one": (torch.ones(32, 96, dtype=torch.float64), 0.01),
    "rank three": ((normal(32, 3) @ normal(3, 96, seed=1)).double(), 0.01),
    "zero": (torch.zeros(32, 96, dtype=torch.float64), 0.0),
}


@contextmanager
def ordinary_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_gram_form_is_cheaper", lambda x: False)
        yield


def test_the_gram_form_equals_the_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        for kind in GRAM_INPUTS:
            for steps in (1, 5, 8):
                with case(name, kind, steps):
                    matrix, bound = GRAM_INPUTS[kind]
                    assert module._gram_form_is_cheaper(matrix)
                    for turned in (matrix, matrix.T):
                        for dtype, tolerance in ((torch.float32, bound), (torch.float64, 1e-6 * bound)):
                            gram = newton_schulz(turned.to(dtype), steps, coefficients=name)
                            with ordinary_form(monkeypatch):
                                ordinary = newton_schulz(turned.to(dtype), steps, coefficients=name)
                            assert torch.linalg.matrix_norm((gram - ordinary).double(), 2) <= tolerance


def test_the_gram_form_stays_bounded_after_many_steps() -> None:
    for matrix, _ in GRAM_INPUTS.values():
        for name in NAMES:
            values = torch.linalg.svdvals(newton_schulz(matrix.float(), 30, coefficients=name))
            assert values.max() < 1.21


def test_the_gram_form_is_used_if_one_side_is_more_than_1_5_times_the_other() -> None:
    assert [module._gram_form_is_cheaper(torch.empty(1, 4, n)) for n in (4, 6, 7)] == [False, False, True]
    assert module._gram_form_is_cheaper(torch.empty(1, 7, 4))


@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")  # torch 2.9
def test_the_gram_form_is_not_used_if_products_are_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: Tensor, schedule: object) -> Tensor:
        raise AssertionError("the Gram form was taken")

    monkeypatch.setattr(module, "_gram_form", refuse)
    orthogonalize(normal(4, 12), dtype=torch.bfloat16)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        orthogonalize(normal(4, 12))
    finally:
        torch.set_float32_matmul_precision(before)
    with pytest.raises(AssertionError, match="the Gram form was taken"):
        orthogonalize(normal(4, 12))


def test_autocast_does_not_reach_the_products() -> None:
    matrix = normal(4, 12)
    expected = newton_schulz(matrix)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(newton_schulz(matrix), expected)


def test_bf16_is_close_for_singular_values_above_its_rounding() -> None:
    for name, low, high in (("quintic", 0.66, 1.18), ("polar_express", 0.85, 1.15)):
        with case(name, low, high):
            for values in (torch.logspace(0, -1, 12), torch.ones(12)):
                matrix = with_singular_values(values, 20).float()
                result = orthogonalize(matrix, coefficients=name, dtype=torch.bfloat16)
                assert result.dtype == torch.float32
                end = torch.linalg.svdvals(result)
                assert low < end.min()
                assert end.max() < high


def test_polar_express_in_bf16_stays_bounded_if_a_singular_value_is_the_norm() -> None:
    for columns in (20, 21, 22, 23):
        ones = orthogonalize(torch.ones(12, columns), 8, coefficients="polar_express", dtype=torch.bfloat16)
        assert torch.linalg.svdvals(ones)[0] < 1.02


def test_the_result_has_the_dtype_of_the_input_and_the_input_is_not_changed() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        with case(dtype):
            matrix = normal(6, 10).to(dtype)
            before = matrix.clone()
            result = newton_schulz(matrix)
            assert result.dtype == dtype
            assert torch.equal(matrix, before)
            torch.testing.assert_close(
                result.double(), plain(matrix, 5), atol=2 * torch.finfo(dtype).eps + 1e-5, rtol=0
            )


def test_a_16_bit_matrix_of_large_entries_does_not_overflow() -> None:
    matrix = (normal(6, 10).clamp(-2, 2) * 3e4).half()
    torch.testing.assert_close(newton_schulz(matrix).double(), plain(matrix, 5), atol=2e-3, rtol=0)


def test_a_large_matrix_is_normalised_exactly_enough_for_polar_express() -> None:
    large = torch.full((1, 2048, 4096), 0.3)
    excess = float(module._divide_by_norm(large, 1e-7).double().norm()) - 1
    assert abs(excess) < 2e-5
    value = 1 + 2e-5
    for a, b, c in module._schedule("polar_express", 8, module._FINE_MARGIN):
        value = a * value + b * value**3 + c * value**5
    assert abs(value - 1) < 1e-3


def test_transposing_and_strides_make_no_difference() -> None:
    matrix = normal(8, 20)
    expected = newton_schulz(matrix)
    torch.testing.assert_close(newton_schulz(matrix.T), expected.T, atol=1e-6, rtol=0)
    torch.testing.assert_close(newton_schulz(torch.stack([matrix, matrix], dim=2)[:, :, 1]), expected)


def test_an_input_with_a_gradient_history_is_left_alone() -> None:
    matrix = normal(4, 4).requires_grad_()
    result = newton_schulz(matrix)
    assert not result.requires_grad
    assert matrix.grad is None


def test_an_empty_matrix_stays_empty() -> None:
    assert newton_schulz(torch.zeros(0, 4)).shape == (0, 4)
    assert orthogonalize(torch.zeros(0, 3, 4)).shape == (0, 3, 4)


def test_a_tensor_that_is_not_a_matrix_is_refused_and_the_error_names_its_shape() -> None:
    for shape in ((), (3,), (2, 3, 3)):
        with pytest.raises(ValueError, match=rf"shape {str(shape)}".replace("(", r"\(").replace(")", r"\)")):
            newton_schulz(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        orthogonalize(torch.zeros(3))


def test_a_dtype_that_is_not_real_floating_is_refused_by_name() -> None:
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with case(dtype), pytest.raises(TypeError, match=str(dtype)):
            newton_schulz(torch.zeros(3, 3, dtype=dtype))


def test_an_argument_that_is_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, not 0"):
        newton_schulz(torch.zeros(3, 3), 0)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, not 2.5"):
        newton_schulz(torch.zeros(3, 3), 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps must be positive"):
        newton_schulz(torch.zeros(3, 3), eps=0.0)
    with pytest.raises(ValueError, match="coefficients must be one of quintic, polar_express, not 'cubic'"):
        newton_schulz(torch.zeros(3, 3), coefficients="cubic")  # type: ignore[arg-type]


def test_the_cpu_orthogonalises_in_fp32() -> None:
    assert orthogonalization_dtype(torch.device("cpu")) == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_agrees_with_the_cpu(name: Name) -> None:
    stack = normal(4, 64, 172)
    expected = orthogonalize(stack, 8, coefficients=name)
    exact = orthogonalize(stack.cuda(), 8, coefficients=name, dtype=torch.float32).cpu()
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=0)
    values = torch.linalg.svdvals(orthogonalize(stack.cuda(), 8, coefficients=name))
    assert values.min() > 0.66
    assert values.max() < 1.18
