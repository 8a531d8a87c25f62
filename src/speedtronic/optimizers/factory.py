"""Optimizers from a configuration: which parameter belongs to which group, and the fused kernel with its fallback."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from speedtronic.config import OptimizerConfig
from speedtronic.errors import ConfigError
from speedtronic.optimizers.adamw import COMPILED_FROM, CautiousAdamW
from speedtronic.optimizers.hybrid import HybridOptimizer
from speedtronic.optimizers.routing import ParameterRouting, route_parameters
from speedtronic.optimizers.without_dynamo import AdamW
from speedtronic.precision import supports_fused_adamw

_log = logging.getLogger(__name__)

Built = TypeVar("Built", bound=torch.optim.Optimizer)
Named = tuple[str, nn.Parameter]


def build_adamw(
    model: nn.Module, config: OptimizerConfig, device: torch.device, *, compiled: bool = False
) -> torch.optim.AdamW:
    """Build AdamW (arXiv 1711.05101) over all trainable parameters of `model`; with `config.cautious` `CautiousAdamW`.

    `config.fused` null asks `supports_fused_adamw(device)`, unless a parameter is complex, which the fused kernel does
    not take; a fused construction that torch refuses falls back to the ordinary one, and says so in the log. So does a
    `compiled` cautious step that cannot be compiled here.

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    groups = parameter_groups(model, weight_decay=config.weight_decay, decay_1d=config.decay_1d)
    check_ownership(model, groups)
    compiled = compiled and config.cautious and _cautious_step_compiles(device)

    def construct(**fused: bool) -> torch.optim.AdamW:
        options: dict[str, Any] = {
            "lr": config.lr,
            "betas": (config.betas[0], config.betas[1]),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            **fused,
        }
        if config.cautious:
            return CautiousAdamW(_copies(groups), rescale=config.cautious_rescale, compiled=compiled, **options)
        return AdamW(_copies(groups), **options)

    return _fused_where_possible(construct, config, device, groups)


def build_hybrid(model: nn.Module, config: OptimizerConfig, device: torch.device) -> HybridOptimizer:
    """Build `HybridOptimizer`: Muon for the hidden matrices of `model`, AdamW for its other trainable parameters.

    `route_parameters` tells which is which. A model without a hidden matrix is trained by AdamW alone, which a warning
    in the log says. AdamW's fused kernel is chosen as in `build_adamw`.

    Raises:
        ConfigError: nothing in the model is trainable, or a module's declared role or split cannot be.
    """
    groups = hybrid_groups(model, weight_decay=config.weight_decay, decay_1d=config.decay_1d)
    check_ownership(model, groups)

    def construct(**fused: bool) -> HybridOptimizer:
        return HybridOptimizer(
            _copies(groups),
            lr=config.lr,
            muon_lr=config.muon_lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            ns_steps=config.muon_ns_steps,
            norm_eps=config.muon_norm_eps,
            muon_plus=config.muon_plus,
            scale=config.muon_scale,
            coefficients=config.muon_coefficients,
            cautious=config.cautious,
            cautious_rescale=config.cautious_rescale,
            **fused,
        )

    if not any(group["algorithm"] == "muon" for group in groups):
        _log.warning(
            "optimizer.name: muon: the model has no hidden nn.Linear, so AdamW trains all of it; let the modules whose "
            "matrices Muon should train say so with _speedtronic_optimizer_role = 'muon', or use optimizer.name: adamw"
        )
    return _fused_where_possible(construct, config, device, groups)


def parameter_groups(model: nn.Module, *, weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into matrices and the rest.

    Matrices (two dimensions and more) decay; norms, biases and other vectors do not, unless `decay_1d`. They are two
    groups in either case, so that a run which is resumed may change its mind. Frozen parameters belong to no group,
    tied ones to one. Empty groups are left out.

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    trainable = [named for named in model.named_parameters() if named[1].requires_grad]
    return _filled(_matrices_and_the_rest(trainable, weight_decay, decay_1d))


def hybrid_groups(model: nn.Module, *, weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into the groups of a `HybridOptimizer`.

    AdamW's matrices (embeddings and heads too) and its other parameters come first, with weight decay as in
    `parameter_groups`, and so the first group's learning rate, which a run reports, is that of `optimizer.lr`. The
    matrices of Muon follow in one group, and those whose weight is several fused ones in one more for each kind of
    split. Empty groups are left out.

    Raises:
        ConfigError: nothing in the model is trainable, or a module's declared role or split cannot be.
    """
    routing = route_parameters(model)
    adamw = _matrices_and_the_rest(routing.adamw, weight_decay, decay_1d)
    return _filled([{**group, "algorithm": "adamw"} for group in adamw] + _muon_groups(routing))


def _matrices_and_the_rest(trained: Sequence[Named], weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    matrices = [named for named in trained if named[1].ndim >= 2]
    rest = [named for named in trained if named[1].ndim < 2]
    return [
        {**_members(matrices), "weight_decay": weight_decay},
        {**_members(rest), "weight_decay": weight_decay if decay_1d else 0.0},
    ]


def _muon_groups(routing: ParameterRouting) -> list[dict[str, Any]]:
    by_split: dict[tuple[int, ...] | None, list[Named]] = {None: []}
    for name, parameter in routing.muon:
        by_split.setdefault(routing.splits.get(name), []).append((name, parameter))
    return [{**_members(matrices), "algorithm": "muon", "split": split} for split, matrices in by_split.items()]


def _members(named: Sequence[Named]) -> dict[str, Any]:
    """The parameters of a group, and their names, by which a checkpoint tells whose state it holds."""
    return {"params": [parameter for _, parameter in named], "param_names": [name for name, _ in named]}


def _filled(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that are not empty."""
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the model has no trainable parameter: set requires_grad on what should be trained")
    return groups


def check_ownership(model: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    """Raise ConfigError, naming the parameters, unless each trainable one belongs to exactly one group."""
    owners = Counter(parameter for group in groups for parameter in group["params"])
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    problems = {
        "owned by no group": [name for name, parameter in trainable.items() if owners[parameter] == 0],
        "owned more than once": [name for name, parameter in trainable.items() if owners[parameter] > 1],
    }
    for problem, offenders in problems.items():
        if offenders:
            raise ConfigError(f"trainable parameters {problem}: {', '.join(offenders)}")


def _copies(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """For an optimizer to write its options into, which a second attempt must not find there."""
    return [dict(group) for group in groups]


def _cautious_step_compiles(device: torch.device) -> bool:
    """Compile it now, on a weight of its own: an error in the first step would end the run."""
    weight = nn.Parameter(torch.zeros(COMPILED_FROM, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        CautiousAdamW([weight], compiled=True).step()
    except Exception as error:  # noqa: BLE001 - compilers fail in any way, and the step works without
        _log.warning("the cautious step cannot be compiled on %s (%s): it runs without", device, error)
        return False
    return True


def _fused_where_possible(
    construct: Callable[..., Built], config: OptimizerConfig, device: torch.device, groups: Iterable[dict[str, Any]]
) -> Built:
    """Construct with `fused=True` where it is asked for or available, else, or when that fails, without."""
    fused = config.fused
    if fused is None:
        # torch constructs it for complex parameters too, and fails in the first step.
        real = all(parameter.is_floating_point() for group in groups for parameter in group["params"])
        fused = real and supports_fused_adamw(device)
    if fused:
        try:
            return construct(fused=True)
        except (TypeError, RuntimeError, ValueError) as error:
            _log.warning("fused AdamW is not available on %s (%s): using the ordinary one", device, error)
    return construct()
