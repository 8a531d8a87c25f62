"""Muon: momentum whose matrix is orthogonalised before it is applied (Keller Jordan, "Muon", 2024).

With weight W, gradient G, momentum buffer B, all of one shape, and μ `momentum`, λ `weight_decay`, η `lr`:

    B ← μ B + (1 - μ) G
    Q = (1 - μ) G + μ B, or B without `nesterov`
    U = newton_schulz(Q), and with `muon_plus` its rows, then its columns, divided by their norms
    W ← (1 - η λ) W - η s U

The scale s is sqrt(max(1, rows / columns)), or with `match_rms_adamw` 0.2 sqrt(max(rows, columns)), with which entries
move about as far as AdamW's (Liu et al., arXiv 2502.16982, section 2.2).

`cautious` sets the entries of U to zero whose sign is not the gradient's (arXiv 2411.16085); decay stays outside.

Matrices of one shape step together, as a stack of bounded size.
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

from speedtronic.optimizers.cautious import agreeing
from speedtronic.optimizers.newton_schulz import Coefficients, orthogonalize
from speedtronic.optimizers.without_dynamo import WithoutDynamo

Scale = Literal["original", "match_rms_adamw"]
Normalization = Literal["none", "row", "col", "row_col", "col_row"]

# Elements of one stack. A step holds at most seven stacks in fp32, beside what the products take. Enough to keep a GPU
# busy; the CPU needs fewer for that.
_STACK_ELEMENTS = {"cpu": 2**21}
_STACK_ELEMENTS_ELSEWHERE = 2**24


class Muon(WithoutDynamo):
    """Muon over 2-D parameters; the formula is in the module's docstring. Other parameters belong to another optimizer.

    The state of a parameter is `momentum_buffer`, of its shape, in fp32, or in fp64 for fp64 parameters. 16-bit weights
    are updated in fp32 and rounded once.

    A param group may have `split`, the row counts of the pieces of each of its weights: a weight that a model fuses
    from several steps as they would apart, each piece orthogonalised, scaled and masked on its own.

    A gradient scaler's `grad_scale` and `found_inf` are obeyed on the device: where `found_inf` is 1, no bit of a
    weight or a buffer changes, whatever the gradients are.

    Args:
        params: any parameters; those without a gradient are left alone.
        lr: learning rate η, a number or a 0-dim tensor.
        momentum: μ, in [0, 1).
        nesterov: orthogonalise the momentum that the next step would have with the same gradient.
        ns_steps: Newton–Schulz iterations.
        weight_decay: decoupled weight decay λ.
        eps: smallest Frobenius norm that Q is divided by.
        norm_eps: smallest norm that `muon_plus` divides by.
        muon_plus: normalise rows, then columns, after the orthogonalisation.
        scale: "original" or "match_rms_adamw".
        coefficients: "quintic" or "polar_express"; see `newton_schulz`.
        cautious: keep only the entries of the update whose sign opposes the gradient's.
        cautious_rescale: scale a cautious update up by the share of entries that were dropped.

    Raises:
        ValueError: an argument, or an option of a group, is out of range.
    """

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
        """Add a group of parameters; what it leaves out comes from the constructor.

        Raises:
            ValueError: one of its options is out of range.
        """
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model anew; called once, before the update.

        Returns:
            What `closure` returns; None without it.

        Raises:
            ValueError: a parameter is not 2-D, or its rows are not those of its group's `split`.
            TypeError: a parameter is complex.
            RuntimeError: a gradient is sparse. Nothing has changed then, as after the others.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A gradient scaler, or the trainer's guard, hands its verdict over as attributes for the time of the step.
        verdict = vars(self)
        muon_step(
            self.param_groups, self.state, grad_scale=verdict.get("grad_scale"), found_inf=verdict.get("found_inf")
        )
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or that of a `torch.optim.Muon`; options that it lacks stay as they are.

        Of torch's options, `adjust_lr_fn` is `scale` here, and its `ns_coefficients` are not taken over.

        Raises:
            ValueError: it is of another optimizer, or of other parameters.
        """
        loaded: list[dict[str, Any]] = []
        options = [dict(group) for group in self.param_groups]

        def check(_: torch.optim.Optimizer, final: dict[str, Any]) -> None:
            _check_state(self.param_groups, final)
            loaded.append(final)

        # A hook, since those of others may change what is loaded; it runs last.
        handle = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, saved, own in zip(self.param_groups, loaded[0]["param_groups"], options, strict=True):
            group.update({option: value for option, value in own.items() if option not in saved})
            _translate(group)
        take_momenta_as_saved(self.param_groups, loaded[0], self.state)

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
) -> None:
    """Do one step of Muon on the parameters of `groups` that have a gradient. Nothing is read from a device.

    Args:
        groups: param groups with all the options of `Muon`.
        state: of each parameter, {"momentum_buffer": tensor}; made where it is missing.
        grad_scale: 0-dim; what the gradients were multiplied by.
        found_inf: 0-dim; 1 where nothing must change.

    Raises:
        ValueError, TypeError, RuntimeError: as `Muon.step`.
    """
    for group in groups:
        for parameter in _with_gradient(group):
            _check_parameter(parameter, group["split"])
    if found_inf is not None and _is_on_host(found_inf):
        if found_inf.item():
            return
        found_inf = None
    pieces = [piece for group in groups for piece in _pieces(group, state)]
    for stack in _stacks(pieces):
        _step_stack(stack, grad_scale, found_inf)


@torch.no_grad()
def post_polar_normalize(update: Tensor, *, mode: Normalization = "row_col", eps: float = 1e-8) -> Tensor:
    """Divide the rows, the columns, or one after the other by their Euclidean norms.

    Args:
        update: (..., m, n), floating. It is not changed.
        mode: "none", "row", "col", "row_col" (rows, then columns) or "col_row".
        eps: smallest norm that is divided by, so that zero stays zero.

    Returns:
        A new tensor of the shape and dtype of `update`, computed at least in fp32.

    Raises:
        ValueError: there is no such mode, or `update` has fewer than two dimensions.
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
    """Raise ValueError, naming the option, unless the options of a param group are in range."""
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
    """The options of a param group that say how its matrices step."""

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
class _Piece:
    """A matrix that is orthogonalised whole: a weight, or some rows of one. Views, which a step writes to."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    rule: _Rule

    @property
    def kind(self) -> tuple[Any, ...]:
        """What pieces must have in common to step as one stack."""
        return self.rule, self.weight.shape, self.weight.dtype, self.gradient.dtype, self.weight.device


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _with_gradient(group: Mapping[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def _check_parameter(parameter: Tensor, split: Sequence[int] | None) -> None:
    shape = tuple(parameter.shape)
    assert parameter.grad is not None, "only those with a gradient are asked for"
    if parameter.is_complex():
        raise TypeError(f"Muon trains real matrices, not a complex parameter of shape {shape}; give it to AdamW")
    if parameter.ndim != 2:
        raise ValueError(f"Muon trains 2-D parameters, not one of shape {shape}; give it to AdamW")
    if parameter.grad.layout != torch.strided:
        raise RuntimeError(
            f"Muon takes no sparse gradient, as the parameter of shape {shape} has; give it to SparseAdam"
        )
    if split is not None and (sum(split) != shape[0] or any(rows < 1 for rows in split)):
        raise ValueError(
            f"split {tuple(split)} must be row counts that add up to those of a parameter of shape {shape}"
        )


def _pieces(group: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]]) -> Iterator[_Piece]:
    rule = _Rule(**{name: group[name] for name in _Rule.__dataclass_fields__})
    for parameter in _with_gradient(group):
        assert parameter.grad is not None, "only those with a gradient are asked for"
        rows = list(group["split"] or parameter.shape[:1])
        whole = (parameter, parameter.grad, _momentum(parameter, state.setdefault(parameter, {})))
        for weight, gradient, momentum in zip(*(torch.split(tensor, rows) for tensor in whole), strict=True):
            if weight.numel() > 0:
                yield _Piece(weight, gradient, momentum, rule)


def _momentum(parameter: Tensor, own: dict[str, Any]) -> Tensor:
    if "momentum_buffer" not in own:
        own["momentum_buffer"] = torch.zeros_like(parameter, dtype=_momentum_dtype(parameter))
    buffer: Tensor = own["momentum_buffer"]
    return buffer


def _momentum_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _stacks(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one kind together, in as few stacks as the bound allows, and about as many in each: for all threads."""
    kinds: dict[tuple[Any, ...], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        kinds[piece.kind].append(piece)
    for alike in kinds.values():
        weight = alike[0].weight
        room = max(1, _STACK_ELEMENTS.get(weight.device.type, _STACK_ELEMENTS_ELSEWHERE) // weight.numel())
        members = math.ceil(len(alike) / math.ceil(len(alike) / room))
        for start in range(0, len(alike), members):
            yield alike[start : start + members]


# ---------------------------------------------------------------------- the step of a stack


def _step_stack(stack: Sequence[_Piece], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    rule, momenta = stack[0].rule, [piece.momentum for piece in stack]
    device, dtype = momenta[0].device, momenta[0].dtype
    refused = None if found_inf is None else found_inf.to(device, non_blocking=True).reshape(()) > 0
    gradient = torch.stack([piece.gradient for piece in stack]).to(dtype)
    if grad_scale is not None:
        gradient /= grad_scale.to(device, non_blocking=True)
    _remember(momenta, gradient, rule.momentum, refused)
    # Only the mask needs the gradient once more; without it Q takes its place.
    update = gradient.clone() if rule.cautious else gradient
    if rule.nesterov:
        torch._foreach_lerp_(update.unbind(), momenta, rule.momentum)
    else:
        torch._foreach_copy_(update.unbind(), momenta)
    _apply([piece.weight for piece in stack], _direction(update, gradient, rule), rule, refused)


def _remember(momenta: list[Tensor], gradient: Tensor, momentum: float, refused: Tensor | None) -> None:
    """B ← μ B + (1 - μ) G. A refused step multiplies by one and adds -0.0, which leaves every bit, -0.0's own too."""
    if refused is not None:
        gradient.masked_fill_(refused, -0.0)
    torch._foreach_mul_(momenta, _unless(refused, momentum, gradient))
    torch._foreach_add_(momenta, gradient.unbind(), alpha=1 - momentum)


def _direction(update: Tensor, gradient: Tensor, rule: _Rule) -> Tensor:
    """U of the module's docstring, of the stack Q: what is subtracted from the weights, before the scale."""
    update = orthogonalize(update, rule.ns_steps, rule.eps, coefficients=rule.coefficients)
    if rule.muon_plus:
        update = post_polar_normalize(update, eps=rule.norm_eps)
    if not rule.cautious:
        return update
    ascent = -gradient
    if not rule.cautious_rescale:
        return agreeing(update, ascent)
    return torch.stack([agreeing(*pair, rescale=True) for pair in zip(update, ascent, strict=True)])


def _apply(weights: list[Tensor], update: Tensor, rule: _Rule, refused: Tensor | None) -> None:
    """W ← (1 - η λ) W - η s U, in the dtype of U."""
    update *= -(rule.lr * _scale(rule.scale, *update.shape[-2:]))
    if refused is not None:
        update.masked_fill_(refused, -0.0)
    wide = weights if weights[0].dtype == update.dtype else [weight.to(update.dtype) for weight in weights]
    if rule.weight_decay != 0:
        torch._foreach_mul_(wide, _unless(refused, 1 - rule.lr * rule.weight_decay, update))
    torch._foreach_add_(wide, update.unbind())
    if wide is not weights:
        torch._foreach_copy_(weights, wide)


def _unless(refused: Tensor | None, factor: float | Tensor, like: Tensor) -> float | Tensor:
    """`factor`, or one where the step is refused: a number, or a 0-dim tensor where only the device knows."""
    if refused is None:
        return factor
    return (like.new_ones(()) * factor).masked_fill_(refused, 1.0)


def _scale(scale: Scale, rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns)) if scale == "original" else 0.2 * math.sqrt(max(rows, columns))


# ---------------------------------------------------------------------- saved state


def _check_state(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Refuse the state of another optimizer, which torch would load and a step then ignore."""
    foreign = [own for own in state_dict["state"].values() if own and "momentum_buffer" not in own]
    if foreign:
        raise ValueError(
            f"the state is not that of Muon, whose parameters have a momentum_buffer: one has {', '.join(foreign[0])}"
        )
    check_shapes(groups, state_dict)


def check_shapes(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise ValueError where what was saved of a parameter is not of its shape, and so of another parameter."""
    for parameter, own in _saved_states(groups, state_dict):
        for name, saved in own.items():
            if name != "step" and isinstance(saved, Tensor) and saved.shape != parameter.shape:
                raise ValueError(
                    f"the {name} of a parameter of shape {tuple(parameter.shape)} has shape {tuple(saved.shape)}"
                )


def take_momenta_as_saved(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any], state: MutableMapping[Tensor, dict[str, Any]]
) -> None:
    """Put the saved momenta into `state`: torch has cast them to the dtype of their parameter, which may round them."""
    for parameter, own in _saved_states(groups, state_dict):
        if "momentum_buffer" in own:
            saved = own["momentum_buffer"]
            state[parameter]["momentum_buffer"] = saved.to(device=parameter.device, dtype=_momentum_dtype(parameter))


def _saved_states(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    """Each parameter with its saved state. torch itself says when groups differ in number or size."""
    for group, saved in zip(groups, state_dict["param_groups"], strict=False):
        for parameter, number in zip(group["params"], saved["params"], strict=False):
            yield parameter, state_dict["state"].get(number, {})


def _translate(group: dict[str, Any]) -> None:
    """Turn the options of a `torch.optim.Muon` into those of this one. Its coefficients are the quintic ones."""
    group.pop("ns_coefficients", None)
    if "adjust_lr_fn" in group:
        group["scale"] = group.pop("adjust_lr_fn") or "original"
