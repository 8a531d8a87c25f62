"""Options that some parameters train with: by name (`optimizer.groups`) and by depth (`optimizer.layer_decay`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from speedtronic.config import OptimizerConfig
from speedtronic.config.sections import ParameterGroup
from speedtronic.errors import ConfigError


class Options(NamedTuple):
    """How some parameters train otherwise than the `optimizer` section says. None is as there.

    Attributes:
        rate_scale: multiplies the learning rate.
    """

    lr: float | None = None
    rate_scale: float = 1.0
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def of_group(self, lr: float, *, adamw: bool) -> dict[str, Any]:
        """What differs, as the keys of a param group whose learning rate would be `lr`. Muon has no betas and eps."""
        own: dict[str, Any] = {}
        if self.lr is not None or self.rate_scale != 1:
            own["lr"] = (lr if self.lr is None else self.lr) * self.rate_scale
        if adamw and self.betas is not None:
            own["betas"] = self.betas
        if adamw and self.eps is not None:
            own["eps"] = self.eps
        return own


AS_THE_SECTION_SAYS = Options()


def assigned(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[nn.Parameter, ParameterGroup]:
    """The first of the groups that matches one of the names of each parameter; a tied one has several names.

    Raises:
        ConfigError: a group gets no parameter.
    """
    names: defaultdict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    found: dict[nn.Parameter, ParameterGroup] = {}
    for number, group in enumerate(groups):
        matching = [p for p, own in names.items() if any(fnmatchcase(name, group.match) for name in own)]
        if not matching:
            examples = ", ".join(own[0] for own in list(names.values())[:4])
            raise ConfigError(
                f"optimizer.groups[{number}].match: {group.match!r} matches no parameter; a pattern is for whole "
                f"names, which here are {examples}, …"
            )
        left = [parameter for parameter in matching if parameter not in found]
        if not left:
            raise ConfigError(
                f"optimizer.groups[{number}].match: all parameters that {group.match!r} matches belong to groups "
                "before it, and the first that matches counts: put it before them, or remove it"
            )
        found.update(dict.fromkeys(left, group))
    return found


def freeze(model: nn.Module, config: OptimizerConfig) -> None:
    """Freeze the parameters that `optimizer.groups` never trains. Raises as `assigned`."""
    for parameter, group in assigned(model, config.groups).items():
        if group.frozen:
            parameter.requires_grad_(False)


def options_of(
    model: nn.Module, config: OptimizerConfig, blocks: Sequence[nn.Module]
) -> Mapping[nn.Parameter, Options]:
    """The options of the parameters that `optimizer.groups` or `optimizer.layer_decay` says something of.

    Layer-wise learning rates are those of BEiT (Bao et al., arXiv 2106.08254): with L blocks and the factor d, the rate
    of block l of 0 … L - 1 is multiplied by d^(L - l), that of what comes before the blocks by d^(L + 1), and that of
    what follows them by 1. What comes before is told by the order in which the model has its parameters.

    Args:
        blocks: those that the model repeats, the first one first; asked for with `layer_decay` only.

    Raises:
        ConfigError: as `assigned`.
    """
    groups = assigned(model, config.groups)
    scales: dict[nn.Parameter, float] = {}
    if config.layer_decay is not None:
        depths = {p: depth for depth, block in enumerate(blocks) for p in block.parameters()}
        depth = -1  # of what is not in a block: before all of them, until one has come
        for parameter in model.parameters():
            if parameter in depths:
                depth = len(blocks)
            scales[parameter] = config.layer_decay ** (len(blocks) - depths.get(parameter, depth))
    options = {}
    for parameter in model.parameters():
        group = groups.get(parameter)
        own = Options(
            lr=group.lr if group else None,
            rate_scale=scales.get(parameter, 1.0),
            weight_decay=group.weight_decay if group else None,
            betas=(group.betas[0], group.betas[1]) if group and group.betas else None,
            eps=group.eps if group else None,
        )
        if own != AS_THE_SECTION_SAYS:
            options[parameter] = own
    return options
