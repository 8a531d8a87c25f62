"""Build optimizers from a configuration: which parameter belongs to which group, and whether to use fused kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from speedtronic.config import OptimizerConfig
from speedtronic.errors import ConfigError, warn
from speedtronic.optimizers.adamw import COMPILED_FROM, CautiousAdamW
from speedtronic.optimizers.hybrid import HybridOptimizer
from speedtronic.optimizers.routing import route_parameters
from speedtronic.optimizers.without_dynamo import AdamW
from speedtronic.precision import supports_fused_adamw

Built = TypeVar("Built", bound=torch.optim.Optimizer)
Named = tuple[str, nn.Parameter]


def build_adamw(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    *,
    compiled: bool = False,
    warn: Callable[[str], None] = warn,
) -> torch.optim.AdamW:
    """Build AdamW (arXiv 1711.05101) over all trainable parameters of `model`; with `config.cautious` `CautiousAdamW`.

    If `config.fused` is null, the fused kernel is used wherever torch has it: `supports_fused_adamw(device)` says so,
    or a step that is tried (`runs_fused_adamw`). A complex parameter rules it out. If torch refuses the fused kernel,
    the ordinary one is used, and `warn` is told. The same holds for a `compiled` cautious step that does
    not compile on this machine.

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    groups = parameter_groups(model, weight_decay=config.weight_decay, decay_1d=config.decay_1d)
    check_ownership(model, groups)
    compiled = compiled and config.cautious and _cautious_step_compiles(device, warn)

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

    return _fused_where_possible(construct, config, device, groups, warn)


def build_hybrid(
    model: nn.Module, config: OptimizerConfig, device: torch.device, *, warn: Callable[[str], None] = warn
) -> HybridOptimizer:
    """Build `HybridOptimizer`: Muon for the hidden matrices of `model`, AdamW for its other trainable parameters.

    `route_parameters` tells them apart. AdamW trains all of a model that has no hidden matrix, and `warn` is told.
    AdamW's fused kernel is chosen as in `build_adamw`.

    Raises:
        ConfigError: nothing in the model is trainable, or a module declares a role or a split that is not possible.
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
        warn(
            "optimizer.name: muon: the model has no hidden nn.Linear, so AdamW trains all of it; set "
            "_speedtronic_optimizer_role = 'muon' on the modules that Muon should train, or use optimizer.name: adamw"
        )
    return _fused_where_possible(construct, config, device, groups, warn)


def parameter_groups(model: nn.Module, *, weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into matrices and the rest.

    Matrices (two dimensions and more) decay. Norms, biases and other vectors decay only with `decay_1d`. They are two
    groups in both cases, so that a resumed run may change `decay_1d`. Frozen parameters belong to no group, tied ones
    to one. Empty groups are left out.

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    _check_shapes_are_known(model)
    trainable = [named for named in model.named_parameters() if named[1].requires_grad]
    return _without_empty_groups(_matrices_and_the_rest(trainable, weight_decay, decay_1d))


def hybrid_groups(model: nn.Module, *, weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into the groups of a `HybridOptimizer`.

    AdamW's matrices (embeddings and heads too) and its other parameters come first, with weight decay as in
    `parameter_groups`. So the learning rate of the first group, which a run reports, is `optimizer.lr`. One group with
    the matrices of Muon follows, and then one more group for each kind of split. Empty groups are left out.

    Raises:
        ConfigError: nothing in the model is trainable, or a module declares a role or a split that is not possible.
    """
    _check_shapes_are_known(model)
    routing = route_parameters(model)
    by_split: dict[tuple[int, ...] | None, list[Named]] = {None: []}
    for name, parameter in routing.muon:
        by_split.setdefault(routing.splits.get(name), []).append((name, parameter))
    adamw = _matrices_and_the_rest(routing.adamw, weight_decay, decay_1d)
    return _without_empty_groups(
        [{**group, "algorithm": "adamw"} for group in adamw]
        + [{**_members(matrices), "algorithm": "muon", "split": split} for split, matrices in by_split.items()]
    )


def _check_shapes_are_known(model: nn.Module) -> None:
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ConfigError(
            f"the lazy modules of the model have no shape yet ({', '.join(lazy[:4])}), and the shape of a weight "
            "decides how it is trained: call the model once on a batch before its optimizer is built"
        )


def _matrices_and_the_rest(trained: Sequence[Named], weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    matrices = [named for named in trained if named[1].ndim >= 2]
    rest = [named for named in trained if named[1].ndim < 2]
    return [
        {**_members(matrices), "weight_decay": weight_decay},
        {**_members(rest), "weight_decay": weight_decay if decay_1d else 0.0},
    ]


def _members(named: Sequence[Named]) -> dict[str, Any]:
    """The parameters of a group and their names. A checkpoint uses the names to find the state of each parameter."""
    return {"params": [parameter for _, parameter in named], "param_names": [name for name, _ in named]}


def _without_empty_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the model has no trainable parameter: set requires_grad on the parameters to train")
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
    """An optimizer writes its options into its groups. A second attempt to build one must not find them there."""
    return [dict(group) for group in groups]


def _cautious_step_compiles(device: torch.device, warn: Callable[[str], None]) -> bool:
    """Whether it compiles, tried now on a spare weight: an error in the first step of a run would end it."""
    weight = nn.Parameter(torch.zeros(COMPILED_FROM, device=device))
    weight.grad = torch.zeros_like(weight)
    try:
        CautiousAdamW([weight], compiled=True).step()
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way, and the step works without it
        warn(f"the cautious step does not compile on {device} ({error}): it runs without the compiler")
        return False
    return True


def runs_fused_adamw(device: str | torch.device, dtypes: Collection[torch.dtype] = (torch.float32,)) -> bool:
    """Whether torch's fused AdamW runs on a device of any kind, for parameters of these dtypes: a step is tried."""
    device = torch.device(device)
    try:
        parameters = [torch.nn.Parameter(torch.zeros(1, device=device, dtype=dtype)) for dtype in dtypes]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        AdamW(parameters, fused=True).step()
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


def _fused_where_possible(
    construct: Callable[..., Built],
    config: OptimizerConfig,
    device: torch.device,
    groups: Iterable[dict[str, Any]],
    warn: Callable[[str], None],
) -> Built:
    """Construct with `fused=True` if it is asked for or available. If not, or if that fails, construct without."""
    fused = config.fused
    if fused is None:
        # The seed's probe knows CUDA. torch constructs the fused optimizer for parameters too whose first step fails,
        # such as complex ones, so elsewhere a step is tried, with a parameter of each dtype.
        dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
        real = all(dtype.is_floating_point for dtype in dtypes)
        fused = real and (supports_fused_adamw(device) or runs_fused_adamw(device, dtypes))
    if fused:
        try:
            return construct(fused=True)
        except (TypeError, RuntimeError, ValueError) as error:
            warn(f"fused AdamW is not available on {device} ({error}): using the ordinary one")
    return construct()
