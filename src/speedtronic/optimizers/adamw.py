"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) and its cautious form (Liang et al., arXiv 2411.16085).

With weight W, gradient G, moments m and v, and the counted step t:

    m ← β₁ m + (1 - β₁) G,  v ← β₂ v + (1 - β₂) G²
    D = (m / (1 - β₁ᵗ)) / (sqrt(v / (1 - β₂ᵗ)) + ε)
    W ← (1 - lr · decay) W - lr · D             cautious: only the entries of D with D · G > 0

The cautious step goes through the weights in pieces of bounded size, which stay in the cache of a CPU. For each piece,
torch's own kernel computes -lr · D into a buffer of that size, so a step needs no second copy of the weights. The
compiled step takes each large weight in one loop instead, and needs no buffer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from speedtronic.optimizers.cautious import refuse_complex, refuse_sparse, where_positive
from speedtronic.optimizers.without_dynamo import WithoutDynamo
from speedtronic.precision import copies_in_background

# Elements of one piece, which bound the memory of a cautious step: two buffers of this size, a third if small weights
# share a piece, and with `rescale` four more for a short time. On a CPU the buffers stay in the cache. On a GPU, larger
# pieces mean fewer kernel launches: of this size, a kernel takes much longer than its launch.
CPU_PIECE = 2**18
ACCELERATOR_PIECE = 2**25

# Below this many elements, calling compiled code costs more than it saves.
COMPILED_FROM = 2**17

_Kernel = Callable[..., None]


class CautiousAdamW(WithoutDynamo, torch.optim.AdamW):
    """`torch.optim.AdamW` that leaves out the entries of its update that go up the gradient (arXiv 2411.16085).

    Weight decay is not masked. Arguments and state dict are those of `torch.optim.AdamW`, and each class loads what the
    other saved. It needs no copy of the parameters. With `fused` it obeys a gradient scaler's `grad_scale` and
    `found_inf` on the device: if `found_inf` is 1, no bit of a parameter or its state changes.

    Args:
        params, lr, betas, eps, weight_decay, maximize, foreach, fused: as in `torch.optim.AdamW`.
        amsgrad, capturable, differentiable: must be False.
        rescale: scale the kept entries of each parameter's update by entries / (kept + 1), the paper's alpha. That
            takes one more pass over gradients and first moments.
        compiled: compile the step of large parameters, which halves its time on a CPU. The first step then takes some
            seconds, and fails if there is no compiler. The last digits may differ from those of the ordinary step.

    Raises:
        ValueError: an argument, or an option of a group, is out of range or not supported.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        rescale: bool = False,
        compiled: bool = False,
    ) -> None:
        self.rescale = rescale
        self.compiled = compiled
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._support_scaling()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it leaves out come from the constructor.

        Raises:
            ValueError: an option of the group is not supported.
        """
        _check_options({**self.defaults, **param_group}, cautious=True)
        super().add_param_group(param_group)
        self._support_scaling()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again; called once, before the update.

        Returns:
            The result of `closure`; None without one.

        Raises:
            TypeError: a parameter is complex.
            RuntimeError: a gradient is sparse. After any of these errors, nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Check all groups before any of them changes.
        for group in self.param_groups:
            check_group(group, cautious=True)
        # A gradient scaler, or the trainer's guard, sets these attributes for the time of the step.
        grad_scale, found_inf = vars(self).get("grad_scale"), vars(self).get("found_inf")
        for group in self.param_groups:
            adamw_step(
                [group],
                self.state,
                fused=bool(group["fused"]),
                cautious=True,
                rescale=self.rescale,
                compiled=self.compiled,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rescale": self.rescale, "compiled": self.compiled}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._support_scaling()

    def _support_scaling(self) -> None:
        """Tell gradient scalers whether `step` obeys `found_inf` itself, as the fused kernel does."""
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)


@torch.no_grad()
def adamw_step(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],
    *,
    fused: bool,
    cautious: bool,
    rescale: bool,
    compiled: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Do one step of AdamW on the parameters of `groups` that have a gradient. It reads nothing back to the host.

    Args:
        groups: param groups with the options of `torch.optim.AdamW`.
        state: for each parameter, {"step", "exp_avg", "exp_avg_sq"} as in `torch.optim.AdamW`; a missing one is made.
        fused: use torch's fused kernel.
        cautious: leave out the entries of the update that go up the gradient. Otherwise the step is exactly torch's.
        rescale: scale the kept entries of each parameter's cautious update by entries / (kept + 1).
        compiled: compile the cautious step of large parameters.
        grad_scale: one element; the factor that the gradients were multiplied by. Only with `fused`.
        found_inf: one element; if it is 1, no bit of a parameter or its state changes. Only with `fused`.

    Raises:
        ValueError: `grad_scale` or `found_inf` without `fused`; an option that is not supported.
        TypeError: a parameter of a cautious step is complex.
        RuntimeError: a gradient is sparse. After any of these errors, nothing has changed.
    """
    if not fused and (grad_scale is not None or found_inf is not None):
        raise ValueError("only the fused kernel takes grad_scale and found_inf: build the optimizer with fused=True")
    for group in groups:
        check_group(group, cautious=cautious)
    if found_inf is not None:
        found_inf = found_inf.reshape(())
    for group in groups:
        weights = [_weight(parameter, state, group, fused) for parameter in _with_gradient(group)]
        kernel = partial(
            adamw,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            lr=group["lr"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            # None lets torch choose between its two ordinary implementations.
            fused=fused or None,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        if cautious:
            caution = _Caution(rescale=rescale, compiled=compiled, grad_scale=grad_scale, found_inf=found_inf)
            _cautious_update(weights, group, kernel, caution)
        else:
            kernel(
                [weight.parameter for weight in weights],
                [weight.gradient for weight in weights],
                [weight.state["exp_avg"] for weight in weights],
                [weight.state["exp_avg_sq"] for weight in weights],
                [weight.state["max_exp_avg_sq"] for weight in weights] if group["amsgrad"] else [],
                [weight.state["step"] for weight in weights],
                weight_decay=group["weight_decay"],
                has_complex=any(weight.parameter.is_complex() for weight in weights),
            )


def check_group(group: dict[str, Any], *, cautious: bool) -> None:
    """Raise the errors of `adamw_step` for the options and gradients of a param group."""
    _check_options(group, cautious=cautious)
    for parameter in _with_gradient(group):
        refuse_sparse(parameter)
        if cautious:
            refuse_complex(parameter)


def _check_options(group: dict[str, Any], *, cautious: bool) -> None:
    for option in ("amsgrad", "capturable", "differentiable") if cautious else ("differentiable",):
        if group[option]:
            kind = "cautious AdamW" if cautious else "AdamW"
            raise ValueError(f"{kind} does not support {option} here: leave it False, or use torch.optim.AdamW")


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


class _Weight(NamedTuple):
    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]


def _weight(
    parameter: Tensor, state: MutableMapping[Tensor, dict[str, Any]], group: dict[str, Any], fused: bool
) -> _Weight:
    """A parameter with its gradient and its state, which is made if it is missing."""
    gradient = parameter.grad
    assert gradient is not None
    own = state.setdefault(parameter, {})
    if not own:
        # The step counter has the device and the dtype that `torch.optim.AdamW` gives it.
        double = torch.get_default_dtype() is torch.float64 and not fused
        own["step"] = torch.zeros(
            (),
            dtype=torch.float64 if double else torch.float32,
            device=parameter.device if fused or group["capturable"] else "cpu",
        )
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        own.update({moment: torch.zeros_like(parameter, memory_format=torch.preserve_format) for moment in moments})
    elif fused:
        # An optimizer that was not fused kept its step counter on the CPU, in the default dtype.
        own["step"] = own["step"].to(parameter.device, torch.float32)
    return _Weight(parameter.detach(), gradient, own)


# ---------------------------------------------------------------------- cautious


@dataclass(frozen=True)
class _Caution:
    """The options of a cautious step that are not in a param group."""

    rescale: bool
    compiled: bool
    grad_scale: Tensor | None
    found_inf: Tensor | None


class _Piece(NamedTuple):
    """A weight, or a part of one, with its gradient and its moments, each 1-D.

    Attributes:
        step: the weight's counter.
        number: of the weight, among those of its device and dtype.
        last: whether no piece of the weight follows.
    """

    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    number: int
    last: bool = True


def _cautious_update(weights: list[_Weight], group: dict[str, Any], kernel: _Kernel, caution: _Caution) -> None:
    alike: dict[tuple[torch.device, torch.dtype], list[_Weight]] = defaultdict(list)
    for weight in weights:
        alike[weight.parameter.device, weight.parameter.dtype].append(weight)
    for (device, _), members in alike.items():
        size = CPU_PIECE if device.type == "cpu" else ACCELERATOR_PIECE
        workspace = _Workspace(members, size, group, caution.found_inf)
        flattened = [_flattened(weight, number) for number, weight in enumerate(members)]
        factors = _rescale_factors(flattened, size, group, caution) if caution.rescale else None
        # Large weights: one call of compiled code each.
        compiled_from = COMPILED_FROM if caution.compiled else math.inf
        large = [flat for flat in flattened if flat.weight.numel() >= compiled_from]
        if large:
            _update_compiled(large, factors, workspace, group, caution)
        # All others: cut into pieces, and small pieces put together, for torch's kernel.
        small = [flat for flat in flattened if flat.weight.numel() < compiled_from]
        for batch in _batches(small, size):
            _update_batch(batch, factors, workspace, kernel, ascend=group["maximize"])
        # The flat tensors of a weight whose memory has gaps are copies: write them back.
        for weight, flat in zip(members, flattened, strict=True):
            if not _is_flat(weight):
                parameter, _, exp_avg, exp_avg_sq = _in_memory_order(weight)
                for target, source in (
                    (parameter, flat.weight),
                    (exp_avg, flat.exp_avg),
                    (exp_avg_sq, flat.exp_avg_sq),
                ):
                    if not target.is_contiguous():
                        target.copy_(source.view(target.shape))


class _Workspace:
    """What the pieces of one device and dtype share: two buffers, and the group's decay as tensors on the device.

    Attributes:
        update, condition: (elements,) buffers.
        shrink: (1,), the factor of a weight's decay: 1 - lr · decay, or 1 if the step must be skipped.
        gate: 0-dim, 0, or NaN if the step must be skipped.
        skip: 0-dim bool, whether the step must be skipped; None if it never must.
    """

    def __init__(self, weights: list[_Weight], size: int, group: dict[str, Any], found_inf: Tensor | None) -> None:
        like = weights[0].parameter
        elements = min(size, sum(weight.parameter.numel() for weight in weights))
        self.update, self.condition = (like.new_empty(elements) for _ in range(2))
        # One dimension, not zero: torch then decays a 16-bit weight in fp32, and rounds it once.
        dtype = torch.promote_types(like.dtype, torch.float32)
        shrink = 1 - group["lr"] * group["weight_decay"]
        if isinstance(shrink, Tensor):
            background = copies_in_background(shrink, like.device)
            self.shrink = shrink.to(like.device, dtype, non_blocking=background).reshape(1)
        else:
            self.shrink = torch.full((1,), shrink, dtype=dtype, device=like.device)
        self.gate = like.new_zeros(())
        self.skip: Tensor | None = None
        if found_inf is not None:
            background = copies_in_background(found_inf, like.device)
            self.skip = found_inf.to(like.device, non_blocking=background) > 0
            self.shrink.masked_fill_(self.skip, 1.0)
            self.gate.masked_fill_(self.skip, float("nan"))


def _is_flat(weight: _Weight) -> bool:
    return all(tensor.is_contiguous() for tensor in _tensors(weight))


def _tensors(weight: _Weight) -> tuple[Tensor, ...]:
    return weight.parameter, weight.gradient, weight.state["exp_avg"], weight.state["exp_avg_sq"]


def _in_memory_order(weight: _Weight) -> tuple[Tensor, ...]:
    """Parameter, gradient and moments with their dimensions in the order of the parameter's memory.

    An elementwise step may take the elements in any order. In this order a transposed weight, or a weight in
    channels-last format, is one run of memory too.
    """
    order = sorted(range(weight.parameter.ndim), key=weight.parameter.stride, reverse=True)
    return tuple(tensor.permute(order) for tensor in _tensors(weight))


def _flattened(weight: _Weight, number: int) -> _Piece:
    """A weight as one piece: views if its memory has no gaps, and copies if it has."""
    tensors = _tensors(weight) if _is_flat(weight) else _in_memory_order(weight)
    parameter, gradient, exp_avg, exp_avg_sq = (tensor.contiguous().view(-1) for tensor in tensors)
    return _Piece(parameter, gradient, exp_avg, exp_avg_sq, step=weight.state["step"], number=number)


def _pieces(whole: _Piece, size: int) -> Iterator[_Piece]:
    """Cut a weight into pieces of at most `size` elements."""
    if whole.weight.numel() <= size:
        yield whole
        return
    cuts = [torch.split(tensor, size) for tensor in whole[:4]]
    last = len(cuts[0]) - 1
    for position, (weight, gradient, exp_avg, exp_avg_sq) in enumerate(zip(*cuts, strict=True)):
        yield _Piece(weight, gradient, exp_avg, exp_avg_sq, whole.step, whole.number, last=position == last)


def _batches(weights: Iterable[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Put consecutive pieces together, up to `size` elements, so that small weights share a call of the kernel.

    No batch has two pieces of one weight.
    """
    batch: list[_Piece] = []
    room = size
    for piece in (piece for whole in weights for piece in _pieces(whole, size)):
        if batch and piece.weight.numel() > room:
            yield batch
            batch, room = [], size
        batch.append(piece)
        room -= piece.weight.numel()
    if batch:
        yield batch


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _rescale_factors(weights: list[_Piece], size: int, group: dict[str, Any], caution: _Caution) -> Tensor:
    """Return entries / (kept + 1) of each weight, `(weights,)`, before the first one is updated.

    D has the sign of the new first moment. So this computes the new first moments, in pieces, and counts: one more pass
    over gradients and first moments, and a few in the cache. Nothing is done weight by weight, since a card spends more
    time on the launch of a kernel than on most weights.
    """
    like = weights[0].weight
    dtype = torch.promote_types(like.dtype, torch.float32)
    kept: list[Tensor] = []
    owners: list[int] = []
    for batch in _batches(weights, size):
        slope = _joined([piece.gradient for piece in batch])
        if caution.grad_scale is not None:
            slope = slope / caution.grad_scale.to(slope.device)
        if group["maximize"]:
            slope = slope.neg()
        direction = torch.lerp(_joined([piece.exp_avg for piece in batch]), slope, 1 - group["betas"][0])
        # The product of a sign and a number cannot become zero, as that of two small numbers can.
        agrees = (direction.sign_().mul_(slope) > 0).to(dtype)
        # The 1-norm of zeros and ones is how many ones there are.
        kept += torch._foreach_norm(torch.split(agrees, [piece.weight.numel() for piece in batch]), 1)
        owners += [piece.number for piece in batch]
    counts = torch.stack(kept)
    if len(owners) > len(weights):
        numbers = constant(tuple(owners), torch.int64, like.device)
        counts = counts.new_zeros(len(weights)).index_add_(0, numbers, counts)
    return constant(tuple(whole.weight.numel() for whole in weights), dtype, like.device) / (counts + 1)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor `(numbers,)`, made once: a copy from the host waits for all that a card has to do."""
    return torch.tensor(values, dtype=dtype, device=device)


def _update_batch(
    batch: list[_Piece], factors: Tensor | None, workspace: _Workspace, kernel: _Kernel, *, ascend: bool
) -> None:
    sizes = [piece.weight.numel() for piece in batch]
    update, condition = (buffer[: sum(sizes)] for buffer in (workspace.update, workspace.condition))
    updates = torch.split(update, sizes)

    # The kernel adds -lr · D to `update`. If the step must be skipped, it adds nothing, and the -0.0 stays. Adding -0.0
    # to a weight changes no bit of it; adding 0.0 could.
    update.fill_(-0.0)
    kernel(
        list(updates),
        [piece.gradient for piece in batch],
        [piece.exp_avg for piece in batch],
        [piece.exp_avg_sq for piece in batch],
        [],
        # The kernel advances the step of each piece, but the weight's own step must advance only once.
        [piece.step if piece.last else piece.step.clone() for piece in batch],
        weight_decay=0.0,
    )

    # The mask. The sign of gradient / update says whether the update goes down the gradient. A product would have the
    # same sign, but for small numbers it can become zero. A gate of NaN keeps every entry, and so the -0.0.
    gradient = _joined([piece.gradient for piece in batch])
    torch.addcdiv(workspace.gate, gradient, update, value=1 if ascend else -1, out=condition)
    where_positive(update, condition, out=update)

    # Each weight by its own factor. The weights of a batch follow each other.
    if factors is not None and len(batch) == 1:
        update.mul_(factors[batch[0].number])
    elif factors is not None:
        repeats = constant(tuple(sizes), torch.int64, update.device)
        own = factors[batch[0].number : batch[-1].number + 1]
        update.mul_(torch.repeat_interleave(own, repeats, output_size=sum(sizes)))

    # W ← (1 - lr · decay) W + update
    weights = [piece.weight for piece in batch]
    if update.dtype == workspace.shrink.dtype:
        torch._foreach_mul_(weights, workspace.shrink.reshape(()))
        torch._foreach_add_(weights, updates)
    else:  # 16 bits, which are rounded once
        for weight, kept in zip(weights, updates, strict=True):
            torch.addcmul(kept, weight, workspace.shrink, out=weight)


# ---------------------------------------------------------------------- compiled


def _update_compiled(
    weights: list[_Piece], factors: Tensor | None, workspace: _Workspace, group: dict[str, Any], caution: _Caution
) -> None:
    like = workspace.shrink
    formula = _compiled_formula()
    beta1, beta2 = group["betas"]
    # What depends on the step t = step + 1 of each weight: lr / (1 - β₁ᵗ) and 1 / sqrt(1 - β₂ᵗ).
    counted = torch.stack([flat.step for flat in weights])
    steps = counted.to(like.device, like.dtype, non_blocking=copies_in_background(counted, like.device)) + 1
    rates = (group["lr"] / _bias_correction(beta1, steps)).unbind()
    corrections = _bias_correction(beta2, steps).rsqrt().unbind()
    grad_scale = None if caution.grad_scale is None else caution.grad_scale.to(like.device).reshape(())
    # As one tensor: compiled code would make a tensor of each number at each call.
    gains = (1 - beta1, beta2, 1 - beta2, group["eps"])
    numbers = constant(gains, like.dtype, like.device) if _are_numbers(gains) else like.new_tensor(gains)
    for flat, rate, correction in zip(weights, rates, corrections, strict=True):
        if factors is not None:
            rate = rate * factors[flat.number]
        formula(
            # `.data` is not a view: for views, the compiler would compile again for every shape of their base.
            *(tensor.data for tensor in (*flat[:4], rate, correction, like, numbers)),
            skip=workspace.skip,
            grad_scale=grad_scale,
            maximize=group["maximize"],
        )
    # Count the step, unless it was skipped.
    advance = 1 if workspace.skip is None else workspace.skip.logical_not().to(torch.float32)
    torch._foreach_add_([flat.step for flat in weights], advance)


def _are_numbers(values: tuple[float | Tensor, ...]) -> TypeGuard[tuple[float, ...]]:
    return not any(isinstance(value, Tensor) for value in values)


def _bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    """Return 1 - beta^step. Near beta = 1, this form keeps the digits that the plain difference loses in fp32."""
    return -torch.expm1(step * (math.log(beta) if beta > 0 else -math.inf))


@cache
def _compiled_formula() -> Callable[..., None]:
    return torch.compile(_formula, dynamic=True)


def _formula(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rate: Tensor,
    correction: Tensor,
    shrink: Tensor,
    factors: Tensor,
    *,
    skip: Tensor | None,
    grad_scale: Tensor | None,
    maximize: bool,
) -> None:
    """Step one weight of shape (elements,) by the formula of this module, in a form that a compiler makes one loop of.

    Args:
        weight, gradient, exp_avg, exp_avg_sq: (elements,); all but the gradient are changed.
        rate: 0-dim, lr / (1 - beta1^t).
        correction: 0-dim, 1 / sqrt(1 - beta2^t).
        shrink: (1,), 1 - lr · decay.
        factors: (4,), 1 - beta1, beta2, 1 - beta2, eps.
        skip: 0-dim bool; if it is true, nothing changes.
        grad_scale: 0-dim, the factor that the gradient was multiplied by.
        maximize: climb the gradient.
    """
    first_gain, second_kept, second_gain, eps = factors.unbind()
    slope = -gradient if maximize else gradient
    if grad_scale is not None:
        slope = slope / grad_scale
    # The moments m and v, and the direction D.
    first = exp_avg + first_gain * (slope - exp_avg)
    second = exp_avg_sq * second_kept + slope * slope * second_gain
    direction = first / (second.sqrt() * correction + eps)
    # The mask finds what to drop, not what to keep. So a NaN is kept, and shows in the weight.
    opposed = ((first <= 0) & (slope >= 0)) | ((first >= 0) & (slope <= 0))
    moved = weight * shrink - rate * torch.where(opposed, 0.0, direction)
    for held, new in ((weight, moved), (exp_avg, first), (exp_avg_sq, second)):
        held.copy_(new if skip is None else torch.where(skip, held, new))
