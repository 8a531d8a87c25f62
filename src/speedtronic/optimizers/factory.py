"""Build optimizers from a configuration: which parameter belongs to which group, and whether to use fused kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from speedtronic.config import OptimizerConfig
from speedtronic.errors import ConfigError, MissingExtraError, warn
from speedtronic.optimizers.adamw import COMPILED_FROM, CautiousAdamW
from speedtronic.optimizers.cautious import CautiousOptimizer
from speedtronic.optimizers.hybrid import HybridOptimizer
from speedtronic.optimizers.options import AS_THE_SECTION_SAYS, Options, freeze, options_of
from speedtronic.optimizers.routing import route_parameters
from speedtronic.optimizers.without_dynamo import AdamW
from speedtronic.precision import supports_fused_adamw
from speedtronic.registry import call_factory

Built = TypeVar("Built", bound=torch.optim.Optimizer)
Named = tuple[str, nn.Parameter]
OptionsOf = Mapping[nn.Parameter, Options]
_NO_OPTIONS: OptionsOf = MappingProxyType({})


def build_adamw(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    *,
    compiled: bool = False,
    blocks: Sequence[nn.Module] = (),
    warn: Callable[[str], None] = warn,
) -> torch.optim.AdamW:
    """Build AdamW (arXiv 1711.05101) over all trainable parameters of `model`; with `config.cautious` `CautiousAdamW`.

    What `config.groups` never trains is frozen. `blocks` are those that the model repeats, for `config.layer_decay`.

    If `config.fused` is null, the fused kernel is used wherever torch has it: `supports_fused_adamw(device)` says so,
    or a step that is tried (`runs_fused_adamw`). A complex parameter rules it out. If torch refuses the fused kernel,
    the ordinary one is used, and `warn` is told. The same holds for a `compiled` cautious step that does
    not compile on this machine.

    Raises:
        ConfigError: nothing in the model is trainable, or one of `config.groups` gets no parameter.
    """
    groups = _groups(model, config, blocks)
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
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    *,
    blocks: Sequence[nn.Module] = (),
    warn: Callable[[str], None] = warn,
) -> HybridOptimizer:
    """Build `HybridOptimizer`: Muon for the hidden matrices of `model`, AdamW for its other trainable parameters.

    `route_parameters` tells them apart. AdamW trains all of a model that has no hidden matrix, and `warn` is told.
    AdamW's fused kernel, what is frozen, and `blocks` are as in `build_adamw`.

    Raises:
        ConfigError: nothing in the model is trainable, one of `config.groups` gets no parameter, or a module declares a
            role or a split that is not possible.
    """
    freeze(model, config)
    groups = hybrid_groups(
        model,
        weight_decay=config.weight_decay,
        decay_1d=config.decay_1d,
        lr=config.lr,
        muon_lr=config.muon_lr,
        options=options_of(model, config, blocks),
    )
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


def build_adamw8bit(
    model: nn.Module, config: OptimizerConfig, *, blocks: Sequence[nn.Module] = ()
) -> torch.optim.Optimizer:
    """Build AdamW whose two moments have 8 bits (Dettmers et al., arXiv 2110.02861) over all that `model` trains.

    Each block of 256 entries has a scale of its own. Weights of less than 4,096 entries keep moments of 32 bits. With
    `config.cautious` it steps within `CautiousOptimizer`.

    Raises:
        ConfigError: nothing in the model is trainable, or one of `config.groups` gets no parameter.
        MissingExtraError: `bitsandbytes` is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise MissingExtraError(
            "optimizer.name: adamw8bit needs bitsandbytes; install speedtronic[bitsandbytes]"
        ) from error
    options = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "weight_decay": config.weight_decay}
    return _cautious_if_asked(AdamW8bit(_groups(model, config, blocks), **options), config)


def build_named(
    model: nn.Module, config: OptimizerConfig, *, blocks: Sequence[nn.Module] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer that `config.name` names as `package.module:class`, over all trainable parameters of `model`.

    It is called with the groups of `parameter_groups`, `lr` and `config.args`. With `config.cautious` it steps within
    `CautiousOptimizer`.

    Raises:
        ConfigError: nothing in the model is trainable, one of `config.groups` gets no parameter, there is no such
            class, it does not take these arguments, or it is no optimizer.
    """
    groups = _groups(model, config, blocks)
    if repeated := config.args.keys() & {"lr"}:
        raise ConfigError(f"optimizer.args: {', '.join(repeated)} is a key of the section itself; set optimizer.lr")
    try:
        optimizer = call_factory(config.name, groups, key="optimizer.name", args={"lr": config.lr, **config.args})
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"optimizer.name: {config.name}: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer.name: {config.name} returned {type(optimizer).__name__}, which is no torch.optim.Optimizer"
        )
    check_ownership(model, optimizer.param_groups)
    return _cautious_if_asked(optimizer, config)


def _cautious_if_asked(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> torch.optim.Optimizer:
    return CautiousOptimizer(optimizer, rescale=config.cautious_rescale) if config.cautious else optimizer


def _groups(model: nn.Module, config: OptimizerConfig, blocks: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The groups of an optimizer that trains everything in one way; what `config.groups` never trains is frozen."""
    freeze(model, config)
    groups = parameter_groups(
        model,
        weight_decay=config.weight_decay,
        decay_1d=config.decay_1d,
        lr=config.lr,
        options=options_of(model, config, blocks),
    )
    check_ownership(model, groups)
    return groups


def parameter_groups(
    model: nn.Module, *, weight_decay: float, decay_1d: bool, lr: float = 0.0, options: OptionsOf = _NO_OPTIONS
) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into matrices and the rest.

    Matrices (two dimensions and more) decay. Norms, biases and other vectors decay only with `decay_1d`. They are two
    groups in both cases, so that a resumed run may change `decay_1d`. Frozen parameters belong to no group, tied ones
    to one. Parameters with `options` of their own have groups of their own, after the others; `lr` is what their rates
    are scaled from. Empty groups are left out.

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    _check_shapes_are_known(model)
    trainable = [named for named in model.named_parameters() if named[1].requires_grad]
    return _without_empty_groups(_matrices_and_the_rest(trainable, weight_decay, decay_1d, lr, options))


def hybrid_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    decay_1d: bool,
    lr: float = 0.0,
    muon_lr: float = 0.0,
    options: OptionsOf = _NO_OPTIONS,
) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into the groups of a `HybridOptimizer`.

    AdamW's matrices (embeddings and heads too) and its other parameters come first, with weight decay and `options` as
    in `parameter_groups`. So the learning rate of the first group, which a run reports, is `optimizer.lr`. One group
    with the matrices of Muon follows, and then one more group for each kind of split and options. Empty groups are left
    out.

    Raises:
        ConfigError: nothing in the model is trainable, or a module declares a role or a split that is not possible.
    """
    _check_shapes_are_known(model)
    routing = route_parameters(model)
    by_split: dict[tuple[int, ...] | None, list[Named]] = {None: []}
    for name, parameter in routing.muon:
        by_split.setdefault(routing.splits.get(name), []).append((name, parameter))
    adamw = _matrices_and_the_rest(routing.adamw, weight_decay, decay_1d, lr, options)
    muon = [
        {**_members(members), "algorithm": "muon", "split": split, **own.of_group(muon_lr, adamw=False)}
        | ({} if own.weight_decay is None else {"weight_decay": own.weight_decay})
        for split, matrices in by_split.items()
        for own, members in _by_options(matrices, options)
    ]
    return _without_empty_groups([{**group, "algorithm": "adamw"} for group in adamw] + muon)


def _check_shapes_are_known(model: nn.Module) -> None:
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ConfigError(
            f"the lazy modules of the model have no shape yet ({', '.join(lazy[:4])}), and the shape of a weight "
            "decides how it is trained: call the model once on a batch before its optimizer is built"
        )


def _matrices_and_the_rest(
    trained: Sequence[Named], weight_decay: float, decay_1d: bool, lr: float, options: OptionsOf
) -> Iterator[dict[str, Any]]:
    for own, named in _by_options(trained, options):
        decay = weight_decay if own.weight_decay is None else own.weight_decay
        for members, decays in (
            ([one for one in named if one[1].ndim >= 2], True),
            ([one for one in named if one[1].ndim < 2], decay_1d),
        ):
            yield {**_members(members), "weight_decay": decay if decays else 0.0, **own.of_group(lr, adamw=True)}


def _by_options(named: Sequence[Named], options: OptionsOf) -> Iterator[tuple[Options, list[Named]]]:
    """The parameters by their options, those without any first."""
    parts: dict[Options, list[Named]] = {AS_THE_SECTION_SAYS: []}
    for name, parameter in named:
        parts.setdefault(options.get(parameter, AS_THE_SECTION_SAYS), []).append((name, parameter))
    yield from parts.items()


def _members(named: Sequence[Named]) -> dict[str, Any]:
    """The parameters of a group and their names. A checkpoint uses the names to find the state of each parameter."""
    return {"params": [parameter for _, parameter in named], "param_names": [name for name, _ in named]}


def _without_empty_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
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
