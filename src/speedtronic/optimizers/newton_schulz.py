"""Orthogonalisation by Newton–Schulz iterations: every singular value of a matrix moves to about one.

An odd polynomial of X acts on its singular values alone, and needs products only (Bernstein & Newhouse, arXiv
2409.20325):

    A = X Xᵀ,   P = a I + b A + c A²,   X ← P X,   which maps each singular value  σ ← a σ + b σ³ + c σ⁵

X is first divided by its Frobenius norm, so that no singular value exceeds one. A tall X multiplies from the other
side, with A = Xᵀ X, so that A is always the smaller of the two. There are two sets of coefficients. Each moves the
singular values that start at 0.005 of the norm or above into a band around one:

    quintic        (3.4445, -4.7750, 2.0315) in every step (Keller Jordan, "Muon", 2024). It does not converge:
                   [0.68, 1.16] after five steps, [0.68, 1.14] after more.
    polar_express  the best coefficients for each step in turn (Amsel et al., arXiv 2505.16932, for singular values from
                   0.001 of the norm): [0.87, 1.13] after five steps, within 0.002 of one after six. It converges to
                   the polar factor.

Five steps multiply smaller singular values by at most 485 (quintic) or 1025 (polar_express).

In bf16 the bands are wider by 0.02, for singular values from 0.02 of the norm. A singular value below bf16's rounding,
0.004 of the norm, ends anywhere in [0, 1.3]: in a matrix of low rank, amplified noise fills the missing directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from speedtronic.precision import computes_bf16

Coefficients = Literal["quintic", "polar_express"]
Triple = tuple[float, float, float]
"""The coefficients (a, b, c) of one step."""

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

# Each polynomial of Polar Express is made for an interval, and grows without bound above it. fp32 computes the norm of
# a large matrix too small by up to 5e-6, and that is enough to turn 1 into 8000 in eight steps. So all polynomials but
# the last get a margin for rounding: p(σ / margin) in place of p(σ). The margin for bf16 is that of the paper.
_COARSE_MARGIN = 1.01
_FINE_MARGIN = 1.0001

# The Gram form iterates on the Gram matrix, whose norm is one. This is how large its rounding error may grow.
_GRAM_NOISE = 0.03


@torch.no_grad()
def newton_schulz(
    matrix: Tensor, steps: int = 5, eps: float = 1e-7, *, coefficients: Coefficients = "quintic"
) -> Tensor:
    """Move every singular value of one matrix to about one; the module's docstring gives the bands.

    Args:
        matrix: (m, n), real and floating. It is not changed.
        steps: Newton–Schulz iterations.
        eps: the matrix is divided by max(its Frobenius norm, eps), so a smaller matrix ends with a smaller norm.
        coefficients: "quintic" or "polar_express".

    Returns:
        A new tensor of the shape and dtype of `matrix`, without a gradient history. A zero matrix stays zero. A matrix
        with an entry that is NaN or infinite becomes NaN everywhere.

    Raises:
        ValueError: `matrix` is not 2-D, or an argument is out of range.
        TypeError: `matrix` is not real and floating.
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
    """`newton_schulz` of many matrices at once. No matrix affects another one, not even if it holds NaN or infinity.

    In fp32 and fp64, a matrix with one side more than 1.5 times as long as the other takes the Gram form, which
    iterates on the smaller Gram matrix. In fp32 its result differs from that of the ordinary form, in spectral norm, by
    less than 5e-5 if all singular values are above 0.02 of the norm. If some are below that, or zero, it differs by
    less than 0.01 after five steps and 0.03 after eight.

    Args:
        matrices: (..., m, n), real and floating. They are not changed.
        steps, eps, coefficients: as in `newton_schulz`.
        dtype: dtype of the products. None is fp64 for fp64 matrices, and otherwise `orthogonalization_dtype` of their
            device.

    Returns:
        A new tensor of the shape and dtype of `matrices`.

    Raises:
        ValueError: there are fewer than two dimensions, or an argument is out of range.
        TypeError: `matrices` are not real and floating.
    """
    if matrices.ndim < 2:
        raise ValueError(f"only matrices can be orthogonalised, not a tensor of shape {tuple(matrices.shape)}")
    if not matrices.is_floating_point():
        raise TypeError(f"only real floating matrices can be orthogonalised, not {matrices.dtype}")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, not {steps}")
    if not eps > 0:
        raise ValueError(f"eps must be positive, not {eps}")
    if matrices.numel() == 0:
        return matrices.clone()
    dtype = dtype or (torch.float64 if matrices.dtype == torch.float64 else orthogonalization_dtype(matrices.device))
    coarse = _products_are_coarse(dtype, matrices.device)
    schedule = _schedule(coefficients, steps, _COARSE_MARGIN if coarse else _FINE_MARGIN)
    # Autocast would round the products to 16 bits, which is too coarse for the Gram form.
    with torch.autocast(matrices.device.type, enabled=False):
        x = _divide_by_norm(matrices, eps).to(dtype)
        if not coarse and _gram_form_is_cheaper(x):
            return _gram_form(x, schedule).to(matrices.dtype)
        return _ordinary_form(x, schedule).to(matrices.dtype)


def orthogonalization_dtype(device: torch.device) -> torch.dtype:
    """The dtype to orthogonalise fp32 matrices in: bf16 on CUDA devices that compute in it, fp32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" and _computes_bf16(device) else torch.float32


_computes_bf16 = lru_cache(computes_bf16)


def _schedule(coefficients: Coefficients, steps: int, margin: float) -> tuple[Triple, ...]:
    """The (a, b, c) of each step."""
    if coefficients == "quintic":
        return _QUINTIC * steps
    if coefficients != "polar_express":
        raise ValueError(f"coefficients must be one of {', '.join(get_args(Coefficients))}, not {coefficients!r}")
    *first, last = _POLAR_EXPRESS
    with_margin = [(a / margin, b / margin**3, c / margin**5) for a, b, c in first]
    return tuple((with_margin + [last] * steps)[:steps])


def _products_are_coarse(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products lose more than fp32 does: in 16 bits, or in fp32 if torch may compute it with fewer bits."""
    if dtype != torch.float32:
        return dtype != torch.float64
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("none", "ieee")


def _divide_by_norm(matrices: Tensor, eps: float) -> Tensor:
    """Divide each matrix by max(its Frobenius norm, eps), at least in fp32."""
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    # First make the largest entry one: the squares of very large or very small entries would leave the range.
    largest = torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))
    largest = largest.masked_fill(largest == 0, 1.0)
    x = x / largest
    # Then take the norm of the rows' norms: in fp32, one sum over a whole large matrix would be off by a percent.
    norm = torch.linalg.vector_norm(torch.linalg.vector_norm(x, dim=-1, keepdim=True), dim=-2, keepdim=True)
    return x.div_(torch.maximum(norm, eps / largest))


def _ordinary_form(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """X ← P X for each step, as in the module's docstring."""
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    for a, b, c in schedule:
        gram = _gram(x)
        # b A + c A²; the product with X below adds the a I.
        change = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, change, x, beta=a) if _is_wide(x) else torch.baddbmm(x, x, change, beta=a)
    return x.reshape(shape)


def _gram_form(x: Tensor, schedule: Sequence[Triple]) -> Tensor:
    """The same polynomial, with A ← P A P and Q ← P Q in place of X ← P X, and X ← Q X at the end.

    A has a rounding error, and knows nothing of the singular values below the square root of that error. The error
    grows as fast as the squares of these values do. Before it matters, a segment ends and A is computed from X again.
    """
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    for segment in _segments(schedule, torch.finfo(x.dtype).eps):
        gram, product = _gram(x), None
        for step, (a, b, c) in enumerate(segment, start=1):
            # P = a I + b A + c A²
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            # Q ← P Q. All P are polynomials of the segment's first A, so they commute.
            product = polynomial if product is None else torch.bmm(polynomial, product)
            # A ← P A P, the Gram matrix of P X. The last step of a segment does not need it.
            if step < len(segment):
                gram = torch.bmm(torch.bmm(polynomial, gram), polynomial)
        assert product is not None, "a segment has at least one step"
        # X ← Q X: all steps of the segment at once.
        x = torch.bmm(product, x) if _is_wide(x) else torch.bmm(x, product)
    return x.reshape(shape)


def _segments(schedule: Sequence[Triple], rounding: float) -> Iterator[Sequence[Triple]]:
    """Cut a schedule where the Gram matrix's error, which a step multiplies by at most a², exceeds `_GRAM_NOISE`."""
    start, noise = 0, rounding
    for position, (a, _, _) in enumerate(schedule):
        if noise > _GRAM_NOISE:
            yield schedule[start:position]
            start, noise = position, rounding
        noise *= a * a
    yield schedule[start:]


def _gram_form_is_cheaper(x: Tensor) -> bool:
    """Whether the Gram form takes fewer operations, for m the shorter side of `x`, n the longer, and k steps.

    The ordinary form takes k (4 m² n + 2 m³). The Gram form takes 4 m² n around the steps and 8 m³ in each step, less
    6 m³ in the first and last: 4 m² n + (8 k - 6) m³. That is less if n > 1.5 m, for any k above one. For one step, and
    so for a segment of one step, both are equal.
    """
    shorter, longer = sorted(x.shape[-2:])
    return 2 * longer > 3 * shorter


def _gram(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT) if _is_wide(x) else torch.bmm(x.mT, x)


def _is_wide(x: Tensor) -> bool:
    return x.shape[-2] <= x.shape[-1]
