"""Orthogonalisation by Newton–Schulz iterations: every singular value of a matrix moves to about one.

An odd polynomial of X acts on its singular values alone, and needs products only (Bernstein & Newhouse, arXiv
2409.20325):

    A = X Xᵀ,   P = a I + b A + c A²,   X ← P X,   which maps each singular value  σ ← a σ + b σ³ + c σ⁵

X starts divided by its Frobenius norm, so that no singular value exceeds one. A tall X multiplies from the other side,
with A = Xᵀ X, so that A is always the smaller of the two. The coefficients, with where they bring singular values that
start at 0.005 of the norm or above:

    quintic        (3.4445, -4.7750, 2.0315) in every step (Keller Jordan, "Muon", 2024). It does not converge:
                   [0.68, 1.16] after five steps, [0.68, 1.14] after more.
    polar_express  the best for each step in turn (Amsel et al., arXiv 2505.16932, for singular values from 0.001 of the
                   norm): [0.87, 1.13] after five steps, within 0.002 of one after six, then the polar factor itself.

Five steps multiply smaller ones by 485 (quintic) or 1025 (polar_express) at most.

In bf16 the bands are wider by 0.02, for singular values from 0.02 of the norm. What lies below bf16's rounding, 0.004
of the norm, ends anywhere in [0, 1.3]: the directions that a matrix of low rank lacks are filled with amplified noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Coefficients = Literal["quintic", "polar_express"]
Triple = tuple[float, float, float]

_QUINTIC: tuple[Triple, ...] = ((3.4445, -4.7750, 2.0315),)
# arXiv 2505.16932, for singular values in [0.001, 1]; the last one is the Newton–Schulz polynomial of degree five.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)

# Polar Express's polynomials run away above the interval that each is made for: a norm that is too small by 5e-6, as
# fp32's is for large matrices, would make 1 into 8000 in eight steps. All but the last are stretched by a margin for
# what rounding adds, p(σ / margin) in place of p(σ); in bf16 it is the paper's.
_COARSE_MARGIN = 1.01
_FINE_MARGIN = 1.0001

# How large the Gram matrix's rounding error may grow while it is iterated on by itself, relative to its norm of one.
_GRAM_NOISE = 0.03


@torch.no_grad()
def newton_schulz(
    matrix: Tensor, steps: int = 5, eps: float = 1e-7, *, coefficients: Coefficients = "quintic"
) -> Tensor:
    """Move every singular value of one matrix to about one; the bands are in the module's docstring.

    Args:
        matrix: (m, n), real and floating. It is not changed.
        steps: Newton–Schulz iterations.
        eps: the matrix is divided by max(its Frobenius norm, eps), so one with a smaller norm ends smaller.
        coefficients: "quintic" or "polar_express".

    Returns:
        A new tensor of the shape and dtype of `matrix`, without a gradient history. A zero matrix stays zero; one with
        an entry that is not finite becomes NaN as a whole.

    Raises:
        ValueError: `matrix` is not 2-D, or an argument is out of range.
        TypeError: it is not real floating.
    """
    if matrix.ndim != 2:
        raise ValueError(f"newton_schulz takes one matrix, not a tensor of shape {tuple(matrix.shape)}")
    return orthogonalize(matrix, steps, eps, coefficients=coefficients)


@torch.no_grad()
def orthogonalize(
    matrices: Tensor,
    steps: int = 5,
    eps: float = 1e-7,
    *,
    coefficients: Coefficients = "quintic",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`newton_schulz` of many matrices at once; none has an effect on another, not even where it is not finite.

    Matrices whose one side is longer than the other by half are iterated on by their smaller Gram side, in fp32 and
    fp64. In fp32 the result differs from that of the ordinary form, in spectral norm, by less than 5e-5 where all
    singular values are above 0.02 of the norm; where some are below, or zero, by less than 0.01 after five steps and
    0.03 after eight.

    Args:
        matrices: (..., m, n), real and floating. They are not changed.
        steps, eps, coefficients: as in `newton_schulz`.
        dtype: of the products; None is fp64 for fp64 matrices, and else `orthogonalization_dtype` of their device.

    Returns:
        A new tensor of the shape and dtype of `matrices`.

    Raises:
        ValueError: there are fewer than two dimensions, or an argument is out of range.
        TypeError: they are not real floating.
    """
    _check(matrices, steps, eps)
    if matrices.numel() == 0:
        return matrices.clone()
    dtype = dtype or (torch.float64 if matrices.dtype == torch.float64 else orthogonalization_dtype(matrices.device))
    coarse = _rounds_coarsely(dtype, matrices.device)
    schedule = _schedule(coefficients, steps, _COARSE_MARGIN if coarse else _FINE_MARGIN)
    # Under autocast the products would be rounded to 16 bits, which the Gram form does not survive.
    with torch.autocast(matrices.device.type, enabled=False):
        x = _of_unit_norm(matrices, eps).to(dtype)
        if not coarse and _gram_form_is_cheaper(x):
            return _gram_form(x, schedule).to(matrices.dtype)
        return _ordinary_form(x, schedule).to(matrices.dtype)


def orthogonalization_dtype(device: torch.device) -> torch.dtype:
    """The dtype to orthogonalise fp32 matrices in: bf16 on CUDA devices that compute in it, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" and _computes_bf16(device) else torch.float32


@lru_cache
def _computes_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        # Older GPUs emulate bfloat16, slower than float32.
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _check(matrices: Tensor, steps: int, eps: float) -> None:
    if matrices.ndim < 2:
        raise ValueError(f"only matrices can be orthogonalised, not a tensor of shape {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"only real floating matrices can be orthogonalised, not {matrices.dtype}")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, not {steps}")
    if not eps > 0:
        raise ValueError(f"eps must be positive, not {eps}")


def _schedule(coefficients: Coefficients, steps: int, margin: float) -> tuple[Triple, ...]:
    """The (a, b, c) of each step."""
    if coefficients == "quintic":
        return _QUINTIC * steps
    if coefficients != "polar_express":
        raise ValueError(f"coefficients must be one of {', '.join(get_args(Coefficients))}, not {coefficients!r}")
    *first, last = _POLAR_EXPRESS
    stretched = [(a / margin, b / margin**3, c / margin**5) for a, b, c in first]
    return tuple((stretched + [last] * steps)[:steps])


def _rounds_coarsely(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products lose more than fp32 does: in 16 bits, or in fp32 where torch was told to compute in fewer."""
    if dtype != torch.float32:
        return dtype != torch.float64
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


def _of_unit_norm(matrices: Tensor, eps: float) -> Tensor:
    """Each divided by max(its Frobenius norm, eps), at least in fp32."""
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    # Entries of at most one first: squares of huge and of tiny ones would leave the range.
    largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    largest = largest.masked_fill(largest == 0, 1.0)
    x = x / largest
    # By rows first: one sum over all of a large matrix would be off by a percent in fp32.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1, keepdim=True), dim=-2, keepdim=True)
    return x.div_(torch.maximum(norm, eps / largest))


def _ordinary_form(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    for a, b, c in schedule:
        gram = _gram(x)
        change = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, change, x, beta=a) if _is_wide(x) else torch.baddbmm(x, x, change, beta=a)
    return x.reshape(shape)


def _gram_form(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """The same polynomial, with A ← P A P and Q ← P Q in place of X ← P X, and X ← Q X at the end.

    A's rounding error, which for singular values below its square root is all that A knows of them, grows like their
    squares. Before it counts, A is computed anew from X.
    """
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    for segment in _segments(schedule, torch.finfo(x.dtype).eps):
        product = _product(_gram(x), segment)
        x = torch.bmm(product, x) if _is_wide(x) else torch.bmm(x, product)
    return x.reshape(shape)


def _product(gram: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """P_k … P_2 P_1, all of which are polynomials of `gram`, so that their order is free."""
    product: Tensor | None = None
    for step, (a, b, c) in enumerate(schedule, start=1):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else torch.bmm(polynomial, product)
        if step < len(schedule):
            gram = torch.bmm(torch.bmm(polynomial, gram), polynomial)
    assert product is not None, "there is at least one step"
    return product


def _segments(schedule: Sequence[Triple], rounding: float) -> Iterator[Sequence[Triple]]:
    """Cut a schedule before the Gram matrix's error, which a step multiplies by a² at most, outgrows `_GRAM_NOISE`."""
    start, noise = 0, rounding
    for position, (a, _, _) in enumerate(schedule):
        if noise > _GRAM_NOISE:
            yield schedule[start:position]
            start, noise = position, rounding
        noise *= a * a
    yield schedule[start:]


def _gram_form_is_cheaper(x: Tensor) -> bool:
    """Whether the Gram form takes fewer operations, for m the shorter side of `x`, n the longer, and k steps.

    The ordinary form takes k (4 m² n + 2 m³). The Gram form takes 4 m² n around the steps and 8 m³ in each, the first
    and last together 6 m³ less: 4 m² n + (8 k - 6) m³. That is less where n > 1.5 m, for any k above one; for one step,
    and so for a segment of one, both are the same.
    """
    shorter, longer = sorted(x.shape[-2:])
    return 2 * longer > 3 * shorter


def _gram(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT) if _is_wide(x) else torch.bmm(x.mT, x)


def _is_wide(x: Tensor) -> bool:
    return x.shape[-2] <= x.shape[-1]
