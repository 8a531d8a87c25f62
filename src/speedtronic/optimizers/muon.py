"""Muon: momentum that is orthogonalised as a matrix before it is applied (Keller Jordan, "Muon", 2024).

With weight W, gradient G, momentum buffer B, all of one shape, and μ `momentum`, λ `weight_decay`, η `lr`:

    B ← μ B + (1 - μ) G
    Q = (1 - μ) G + μ B, or B without `nesterov`
    U = newton_schulz(Q), and with `muon_plus` its rows, then its columns, divided by their norms
    W ← (1 - η λ) W - η s U

The scale s is sqrt(max(1, rows / columns)). With `match_rms_adamw` it is 0.2 sqrt(max(rows, columns)), so that entries
move about as far as with AdamW (Liu et al., arXiv 2502.16982, section 2.2).

`cautious` sets an entry of U to zero unless it has the gradient's sign (arXiv 2411.16085). Decay is not masked.

Matrices of one shape step together, in stacks of bounded size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from speedtronic.optimizers.cautious import agreeing, refuse_sparse, rescale_factor
from speedtronic.optimizers.newton_schulz import Coefficients, orthogonalize
from speedtronic.optimizers.without_dynamo import WithoutDynamo
from speedtronic.precision import copies_in_background
from speedtronic.ranks import Group, SingleProcess

Scale = Literal["original", "match_rms_adamw"]
Normalization = Literal["none", "row", "col", "row_col", "col_row"]

# Elements of one stack. A step holds at most seven stacks in fp32, besides the workspace of the products. The size is
# enough to keep a GPU busy; a CPU needs less.
_STACK_ELEMENTS = {"cpu": 2**21}
_STACK_ELEMENTS_ELSEWHERE = 2**24


class Muon(WithoutDynamo):
    """Muon over 2-D parameters; the formula is in the module's docstring. Other parameters belong to another optimizer.

    The state of a parameter is `momentum_buffer`, of its shape, in fp32, or in fp64 for fp64 parameters. 16-bit weights
    are updated in fp32 and rounded once.

    A param group may have `split`, the row counts of the pieces of each of its weights. A model may fuse several
    matrices into one weight: with `split`, each piece is orthogonalised, scaled and masked on its own, as if the
    matrices were separate.

    The step obeys a gradient scaler's `grad_scale` and `found_inf` on the device: if `found_inf` is 1, no bit of a
    weight or a buffer changes, whatever the gradients are.

    Args:
        params: parameters; the step leaves those without a gradient alone.
        lr: learning rate η, a number or a 0-dim tensor.
        momentum: μ, in [0, 1).
        nesterov: orthogonalise the momentum that the next step would have if its gradient were the same.
        ns_steps: Newton–Schulz iterations.
        weight_decay: decoupled weight decay λ.
        eps: smallest Frobenius norm to divide Q by.
        norm_eps: smallest norm that `muon_plus` divides by.
        muon_plus: normalise rows, then columns, after the orthogonalisation.
        scale: "original" or "match_rms_adamw".
        coefficients: "quintic" or "polar_express"; see `newton_schulz`.
        cautious: keep only the entries of the update that go down the gradient.
        cautious_rescale: scale a cautious update up to make up for the entries that were dropped.

    Attributes:
        ranks: processes that hold the same weights, gradients and buffers. They share out the orthogonalisations. A
            `Trainer` sets it.

    Raises:
        ValueError: an argument, or an option of a group, is out of range.
    """

    ranks: Group = SingleProcess()
    _step_supports_amp_scaling: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        eps: float = 1e-7,
        norm_eps: float = 1e-8,
        muon_plus: bool = False,
        *,
        scale: Scale = "original",
        coefficients: Coefficients = "quintic",
        cautious: bool = False,
        cautious_rescale: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
            "eps": eps,
            "norm_eps": norm_eps,
            "muon_plus": muon_plus,
            "scale": scale,
            "coefficients": coefficients,
            "cautious": cautious,
            "cautious_rescale": cautious_rescale,
            "split": None,
        }
        check_options(defaults)
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it leaves out come from the constructor.

        Raises:
            ValueError: one of its options is out of range.
        """
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again; called once, before the update.

        Returns:
            The result of `closure`; None without one.

        Raises:
            ValueError: a parameter is not 2-D, or its rows do not match its group's `split`.
            TypeError: a parameter is complex.
            RuntimeError: a gradient is sparse. After any of these errors, nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A gradient scaler, or the trainer's guard, sets these attributes for the time of the step.
        grad_scale, found_inf = vars(self).get("grad_scale"), vars(self).get("found_inf")
        muon_step(self.param_groups, self.state, grad_scale=grad_scale, found_inf=found_inf, ranks=self.ranks)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, or that of a `torch.optim.Muon`; options that it lacks stay as they are.

        `adjust_lr_fn` of torch's Muon becomes `scale` here. Its `ns_coefficients` are dropped.

        Raises:
            ValueError: the state is of another optimizer, or of other parameters.
        """
        options = [dict(group) for group in self.param_groups]

        def check(final: dict[str, Any]) -> None:
            # torch would load the state of another optimizer, and the steps would then ignore it.
            foreign = [own for own in final["state"].values() if own and "momentum_buffer" not in own]
            if foreign:
                raise ValueError(
                    "the state is not that of Muon: each parameter of Muon has a momentum_buffer, and one parameter "
                    f"here has {', '.join(foreign[0])}"
                )
            check_saved_shapes(self.param_groups, final)

        loaded = load_with_exact_momenta(self, state_dict, check)
        for group, saved, own in zip(self.param_groups, loaded["param_groups"], options, strict=True):
            group.update({option: value for option, value in own.items() if option not in saved})
            # A `torch.optim.Muon` has another name for the scale, and always the quintic coefficients.
            group.pop("ns_coefficients", None)
            if "adjust_lr_fn" in group:
                group["scale"] = group.pop("adjust_lr_fn") or "original"

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for option, default in self.defaults.items():
                group.setdefault(option, default)
        self._step_supports_amp_scaling = True


@torch.no_grad()
def muon_step(
    groups: Sequence[dict[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    ranks: Group | None = None,
) -> None:
    """Do one step of Muon on the parameters of `groups` that have a gradient. It reads nothing from an accelerator.

    Args:
        groups: param groups with all the options of `Muon`.
        state: for each parameter, {"momentum_buffer": tensor}; a missing one is made.
        grad_scale: 0-dim; the factor that the gradients were multiplied by.
        found_inf: 0-dim; if it is 1, nothing changes.
        ranks: processes that hold the same weights, gradients and buffers, and share the work.

    Raises:
        ValueError, TypeError, RuntimeError: as `Muon.step`.
    """
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                _check_parameter(parameter, group["split"])
    # On the host the answer is at hand; on a device, only the kernels of the step read it.
    if found_inf is not None and _is_on_host(found_inf):
        if found_inf.item():
            return
        found_inf = None
    matrices = [matrix for group in groups for matrix in _matrices(group, state)]
    verdict = _Verdict(found_inf)
    if ranks is None or ranks.size == 1:
        for stack in _stacks(matrices):
            _Step(stack, grad_scale, verdict).finish(None)
        return
    _step_together(matrices, ranks, grad_scale, verdict)


@torch.no_grad()
def post_polar_normalize(update: Tensor, *, mode: Normalization = "row_col", eps: float = 1e-8) -> Tensor:
    """Divide the rows, the columns, or one after the other by their Euclidean norms.

    Args:
        update: (..., m, n), floating. It is not changed.
        mode: "none", "row", "col", "row_col" (rows, then columns) or "col_row".
        eps: smallest norm to divide by, so that zero stays zero.

    Returns:
        A new tensor of the shape and dtype of `update`, computed at least in fp32.

    Raises:
        ValueError: the mode is unknown, or `update` has fewer than two dimensions.
    """
    if mode not in get_args(Normalization):
        raise ValueError(f"mode must be one of {', '.join(get_args(Normalization))}, not {mode!r}")
    if update.ndim < 2:
        raise ValueError(f"only matrices have rows and columns, not a tensor of shape {tuple(update.shape)}")
    wide = update.to(torch.promote_types(update.dtype, torch.float32), copy=True)
    for part in mode.split("_") if mode != "none" else ():
        along = -1 if part == "row" else -2
        wide /= torch.linalg.vector_norm(wide, dim=along, keepdim=True).clamp(min=eps)
    return wide.to(update.dtype)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the option, if an option of a param group is out of range."""
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.ndim != 0:
        raise ValueError(f"lr must be a number or a 0-dim tensor, not one of shape {tuple(lr.shape)}")
    steps = options["ns_steps"]
    requirements = {
        "lr": (lr >= 0, "not negative"),
        "momentum": (0 <= options["momentum"] < 1, "in [0, 1)"),
        "ns_steps": (isinstance(steps, int) and steps >= 1, "a whole number of at least 1"),
        "weight_decay": (options["weight_decay"] >= 0, "not negative"),
        "eps": (options["eps"] > 0, "positive"),
        "norm_eps": (options["norm_eps"] > 0, "positive"),
        "scale": (options["scale"] in get_args(Scale), f"one of {', '.join(get_args(Scale))}"),
        "coefficients": (
            options["coefficients"] in get_args(Coefficients),
            f"one of {', '.join(get_args(Coefficients))}",
        ),
    }
    for name, (holds, requirement) in requirements.items():
        if not holds:
            raise ValueError(f"Muon's {name} must be {requirement}, not {options[name]!r}")


# ---------------------------------------------------------------------- which matrices step together


@dataclass(frozen=True)
class _Rule:
    """The options of a param group that decide how its matrices step."""

    lr: float | Tensor
    momentum: float
    nesterov: bool
    ns_steps: int
    weight_decay: float
    eps: float
    norm_eps: float
    muon_plus: bool
    scale: Scale
    coefficients: Coefficients
    cautious: bool
    cautious_rescale: bool


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is orthogonalised as one: a weight, or some rows of one. A step writes through these views."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    rule: _Rule


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _check_parameter(parameter: Tensor, split: Sequence[int] | None) -> None:
    shape = tuple(parameter.shape)
    if parameter.is_complex():
        raise TypeError(f"Muon trains real matrices, not a complex parameter of shape {shape}; give it to AdamW")
    if parameter.ndim != 2:
        raise ValueError(f"Muon trains 2-D parameters, not one of shape {shape}; give it to AdamW")
    refuse_sparse(parameter)
    if split is not None and (sum(split) != shape[0] or any(rows < 1 for rows in split)):
        raise ValueError(
            f"split {tuple(split)} must be row counts that add up to the rows of a parameter of shape {shape}"
        )


def _matrices(group: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]]) -> Iterator[_Matrix]:
    """The matrices of a param group that have a gradient, cut by its `split`."""
    rule = _Rule(**{name: group[name] for name in _Rule.__dataclass_fields__})
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        own = state.setdefault(parameter, {})
        if "momentum_buffer" not in own:
            own["momentum_buffer"] = torch.zeros_like(parameter, dtype=_momentum_dtype(parameter))
        rows = list(group["split"] or parameter.shape[:1])
        whole = (parameter, parameter.grad, own["momentum_buffer"])
        for weight, gradient, momentum in zip(*(torch.split(tensor, rows) for tensor in whole), strict=True):
            if weight.numel() > 0:
                yield _Matrix(weight, gradient, momentum, rule)


def _momentum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _stacks(matrices: Iterable[_Matrix]) -> Iterator[list[_Matrix]]:
    """Group the matrices that step alike into as few stacks as the bound allows."""
    kinds: dict[tuple[Any, ...], list[_Matrix]] = defaultdict(list)
    for matrix in matrices:
        weight, gradient = matrix.weight, matrix.gradient
        kinds[matrix.rule, weight.shape, weight.dtype, gradient.dtype, weight.device].append(matrix)
    for alike in kinds.values():
        weight = alike[0].weight
        room = max(1, _STACK_ELEMENTS.get(weight.device.type, _STACK_ELEMENTS_ELSEWHERE) // weight.numel())
        # Stacks of about equal size: a small last one would leave threads without work.
        members = math.ceil(len(alike) / math.ceil(len(alike) / room))
        for start in range(0, len(alike), members):
            yield alike[start : start + members]


# ---------------------------------------------------------------------- the step of a stack


class _Step:
    """The step of a stack, by the formula of the module's docstring, in its two halves. The first is made at once.

    Attributes:
        update: U before it is masked and scaled; None where another rank computes it.
    """

    def __init__(
        self, stack: Sequence[_Matrix], grad_scale: Tensor | None, verdict: _Verdict, *, orthogonalizes: bool = True
    ) -> None:
        self._stack = stack
        self._verdict = verdict
        self._rule = rule = stack[0].rule
        momenta = [matrix.momentum for matrix in stack]
        device, dtype = momenta[0].device, momenta[0].dtype
        self._skip = skip = verdict.skips_on(device)
        self._gradient = gradient = torch.stack([matrix.gradient for matrix in stack]).to(dtype)
        if grad_scale is not None:
            gradient /= grad_scale.to(device, non_blocking=copies_in_background(grad_scale, device))
        # A step that must be skipped multiplies by one and adds -0.0: that changes no bit, not even those of a -0.0.
        if skip is not None:
            gradient.masked_fill_(skip, -0.0)

        # B ← μ B + (1 - μ) G
        torch._foreach_mul_(momenta, verdict.one_if_skipped(rule.momentum, gradient))
        torch._foreach_add_(momenta, gradient.unbind(), alpha=1 - rule.momentum)
        self.update: Tensor | None = None
        if not orthogonalizes:
            return

        # Q = (1 - μ) G + μ B, or B. It overwrites G, unless the mask below needs G again.
        update = gradient.clone() if rule.cautious else gradient
        if rule.nesterov:
            torch._foreach_lerp_(update.unbind(), momenta, rule.momentum)
        else:
            torch._foreach_copy_(update.unbind(), momenta)

        # U = newton_schulz(Q)
        update = orthogonalize(update, rule.ns_steps, rule.eps, coefficients=rule.coefficients)
        if rule.muon_plus:
            update = post_polar_normalize(update, eps=rule.norm_eps)
        self.update = update

    @property
    def shape(self) -> torch.Size:
        """Of U: (matrices, rows, columns)."""
        return self._gradient.shape

    def finish(self, update: Tensor | None) -> None:
        """Apply U: this rank's own, or one that another rank has computed."""
        rule, weights = self._rule, [matrix.weight for matrix in self._stack]
        update = self.update if update is None else update
        assert update is not None

        # The mask. `agreeing` expects an update that is added; U is subtracted, so the gradient changes its sign.
        if rule.cautious:
            update = agreeing(update, -self._gradient)
            if rule.cautious_rescale:
                kept = torch.count_nonzero(update, dim=(-2, -1))
                update = update * rescale_factor(kept, update[0])[:, None, None]

        # -η s U
        rows, columns = update.shape[-2:]
        original = rule.scale == "original"
        scale = math.sqrt(max(1.0, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        update *= -(rule.lr * scale)
        if self._skip is not None:
            update.masked_fill_(self._skip, -0.0)

        # W ← (1 - η λ) W - η s U, in the dtype of U.
        wide = weights if weights[0].dtype == update.dtype else [weight.to(update.dtype) for weight in weights]
        if rule.weight_decay != 0:
            torch._foreach_mul_(wide, self._verdict.one_if_skipped(1 - rule.lr * rule.weight_decay, update))
        torch._foreach_add_(wide, update.unbind())
        if wide is not weights:
            torch._foreach_copy_(weights, wide)


def _step_together(matrices: Sequence[_Matrix], ranks: Group, grad_scale: Tensor | None, verdict: _Verdict) -> None:
    """Step all matrices, each of which one rank orthogonalises for all.

    They go round by round: in each, every rank orthogonalises some stacks of its own, and all ranks get all updates. So
    no rank holds more than about a stack of each rank at once.
    """
    owned: list[list[_Matrix]] = [[] for _ in range(ranks.size)]
    loads = [0] * ranks.size
    # The largest first, each to the rank with the least work. A product of (m, n) by (n, m) costs m² n, m ≤ n.
    for matrix in sorted(matrices, key=_cost, reverse=True):
        rank = loads.index(min(loads))
        owned[rank].append(matrix)
        loads[rank] += _cost(matrix)
    # Updates travel together where they are alike.
    for kind in {(matrix.momentum.device, matrix.momentum.dtype): None for matrix in matrices}:
        rounds = [list(_rounds(m for m in own if (m.momentum.device, m.momentum.dtype) == kind)) for own in owned]
        for turn in range(max(map(len, rounds))):
            steps = [
                [_Step(stack, grad_scale, verdict, orthogonalizes=rank == ranks.rank) for stack in own[turn]]
                if turn < len(own)
                else []
                for rank, own in enumerate(rounds)
            ]
            sizes = [sum(step.shape.numel() for step in own) for own in steps]
            flat = torch.zeros(max(sizes), device=kind[0], dtype=kind[1])
            for place, step in zip(_places(flat, steps[ranks.rank]), steps[ranks.rank], strict=True):
                assert step.update is not None
                place.copy_(step.update)
            for row, own in zip(ranks.stack(flat), steps, strict=True):
                for place, step in zip(_places(row, own), own, strict=True):
                    step.finish(place)


def _cost(matrix: _Matrix) -> int:
    return matrix.weight.numel() * min(matrix.weight.shape)


def _rounds(matrices: Iterable[_Matrix]) -> Iterator[list[list[_Matrix]]]:
    """The stacks of one rank, as many at a time as are about as large as one may be."""
    waiting: list[list[_Matrix]] = []
    size = 0
    for stack in _stacks(matrices):
        weight = stack[0].weight
        own = len(stack) * weight.numel()
        if waiting and size + own > _STACK_ELEMENTS.get(weight.device.type, _STACK_ELEMENTS_ELSEWHERE):
            yield waiting
            waiting, size = [], 0
        waiting.append(stack)
        size += own
    if waiting:
        yield waiting


def _places(flat: Tensor, steps: Sequence[_Step]) -> Iterator[Tensor]:
    """Where the updates of some steps are in one row, each as a view in its shape."""
    start = 0
    for step in steps:
        yield flat[start : start + step.shape.numel()].view(step.shape)
        start += step.shape.numel()


class _Verdict:
    """Whether a step must be skipped, and what follows from it, computed once for all stacks.

    Args:
        found_inf: one element, 1 if it must; None if it must not.
    """

    def __init__(self, found_inf: Tensor | None) -> None:
        self._found_inf = found_inf
        self._skips: dict[torch.device, Tensor] = {}
        self._factors: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def skips_on(self, device: torch.device) -> Tensor | None:
        """0-dim bool on `device`; None if the step must not be skipped."""
        if self._found_inf is not None and device not in self._skips:
            background = copies_in_background(self._found_inf, device)
            self._skips[device] = self._found_inf.to(device, non_blocking=background).reshape(()) > 0
        return self._skips.get(device)

    def one_if_skipped(self, factor: float | Tensor, like: Tensor) -> float | Tensor:
        """`factor`, or one if the step must be skipped: a number, or a 0-dim tensor if only the device knows."""
        skip = self.skips_on(like.device)
        if skip is None:
            return factor
        if isinstance(factor, Tensor):
            return (like.new_ones(()) * factor).masked_fill_(skip, 1.0)
        key = factor, like.dtype, like.device
        if key not in self._factors:
            self._factors[key] = like.new_full((), factor).masked_fill_(skip, 1.0)
        return self._factors[key]


# ---------------------------------------------------------------------- saved state


def check_saved_shapes(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError if a saved tensor differs in shape from its parameter, and so belongs to another one."""
    for parameter, own in _saved_states(groups, state_dict):
        for name, saved in own.items():
            if name != "step" and isinstance(saved, Tensor) and saved.shape != parameter.shape:
                raise ValueError(
                    f"the {name} of a parameter of shape {tuple(parameter.shape)} has shape {tuple(saved.shape)}"
                )


def load_with_exact_momenta(
    optimizer: WithoutDynamo, state_dict: dict[str, Any], check: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Load a state dict into `optimizer`, and keep the dtype of its momenta, which torch would round.

    Args:
        optimizer: has params that Muon trains, perhaps among others.
        state_dict: a result of `state_dict`.
        check: raises if the state does not fit. It sees the state that the hooks of other code have left.

    Returns:
        The state dict that was loaded.
    """
    loaded: list[dict[str, Any]] = []

    def before_loading(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
        check(final)
        loaded.append(final)

    # Hooks of other code may change the state. This hook is the newest, so it runs last.
    handle = optimizer.register_load_state_dict_pre_hook(before_loading)
    try:
        WithoutDynamo.load_state_dict(optimizer, state_dict)
    finally:
        handle.remove()
    # torch has cast the momenta to the dtype of their parameters: put the saved ones in their place.
    for parameter, own in _saved_states(optimizer.param_groups, loaded[0]):
        if "momentum_buffer" in own:
            exact = own["momentum_buffer"].to(device=parameter.device, dtype=_momentum_dtype(parameter))
            optimizer.state[parameter]["momentum_buffer"] = exact
    return loaded[0]


def _saved_states(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """Each parameter with its saved state. If the groups differ in number or size, torch raises on loading."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            yield parameter, state_dict["state"].get(number, {})
