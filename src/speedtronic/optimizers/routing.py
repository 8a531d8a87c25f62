"""Which parameters of a model Muon trains, and which AdamW trains.

Muon orthogonalises the update of a matrix, which suits the weights between hidden activations. Embeddings, which are
read row by row, and heads, which give the scores of classes, have another geometry and stay with AdamW (Jordan et al.
2024, "Muon: An optimizer for hidden layers in neural networks").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from speedtronic.errors import ConfigError

Role = Literal["muon", "adamw"]
NamedParameters = tuple[tuple[str, nn.Parameter], ...]

# The names of embeddings and heads, in upper or lower case. A name must match as a whole: "output" is part of the name
# of many hidden layers.
_EMBEDDINGS_AND_HEADS = frozenset(
    {
        "embed",
        "embedding",
        "wte",
        "wpe",
        "lm_head",
        "classifier",
        "output",
        "output_proj",
        "score",
        "score_proj",
        "head",
    }
)
_ROLE_ATTRIBUTE = "_speedtronic_optimizer_role"
_SPLIT_ATTRIBUTE = "_speedtronic_muon_split"


@dataclass(frozen=True, eq=False)
class ParameterRouting:
    """The parameters of a model as (name, parameter), each once, as `model.named_parameters()` orders and names them.

    Attributes:
        muon: matrices for Muon: floating, with two dimensions.
        adamw: all other trainable parameters.
        skipped: frozen parameters.
        splits: the row counts of the pieces of a matrix in `muon` that the model has fused from several, by its name.
    """

    muon: NamedParameters
    adamw: NamedParameters
    skipped: NamedParameters
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """A place of a parameter in the module tree; a tied parameter has several.

    Attributes:
        path: the path of the module.
        module: the module that holds the parameter.
        attribute: the parameter's name in it.
        role: the role that the module, or one around it, declares.
    """

    path: str
    module: nn.Module
    attribute: str
    role: Role | None

    @property
    def is_hidden_linear_weight(self) -> bool:
        if not isinstance(self.module, nn.Linear) or self.attribute != "weight":
            return False
        names = [part for part in self.path.split(".") if not part.isdecimal()]
        return not names or names[-1].lower() not in _EMBEDDINGS_AND_HEADS


def route_parameters(model: nn.Module) -> ParameterRouting:
    """Give each trainable parameter of `model` to Muon or to AdamW.

    Muon takes the `weight` of each hidden `nn.Linear`. AdamW takes embeddings, heads, norms, biases, and every weight
    of another kind of module: convolutions, the transposed matrices of GPT-2's `Conv1D`, the fused matrices of
    `nn.MultiheadAttention`.

    The name of a module tells embeddings and heads apart: embed, embedding, wte, wpe, lm_head, classifier, output,
    output_proj, score, score_proj or head, in upper or lower case. What counts is the last part of the module's path
    that is not a number. So `classifier.0` is a head, and `layer.0.output.dense` is hidden. A weight that is also the
    weight of an `nn.Embedding` is not hidden, whatever other names it has.

    A module can decide for itself and for all modules inside it with an attribute `_speedtronic_optimizer_role`, "muon"
    or "adamw"; the innermost one counts. A tied weight goes to Muon if all the roles given at its places say "muon".
    A parameter that is not a floating matrix of two dimensions always goes to AdamW.

    If the `weight` (F, D) of a module holds several matrices, such as those of queries, keys and values, the module
    declares their row counts, which sum to F, with an attribute `_speedtronic_muon_split`.

    Raises:
        ConfigError: a role is neither "muon" nor "adamw", or a split does not fit its weight. It is a `ValueError` that
            names the module.
    """
    places: dict[nn.Parameter, list[_Place]] = {}
    for place, parameter in _places(model, "", None):
        places.setdefault(parameter, []).append(place)
    splits = {parameter: split for parameter, found in places.items() if (split := _split(found)) is not None}
    named = tuple(model.named_parameters())
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    muon = tuple((name, parameter) for name, parameter in trainable if _is_for_muon(parameter, places[parameter]))
    matrices = {parameter for _, parameter in muon}
    return ParameterRouting(
        muon=muon,
        adamw=tuple((name, parameter) for name, parameter in trainable if parameter not in matrices),
        skipped=tuple((name, parameter) for name, parameter in named if not parameter.requires_grad),
        splits={name: splits[parameter] for name, parameter in muon if parameter in splits},
    )


def _places(module: nn.Module, path: str, role: Role | None) -> Iterator[tuple[_Place, nn.Parameter]]:
    """All places in the module tree. `role` is the role that the modules around `module` declare."""
    if hasattr(module, _ROLE_ATTRIBUTE):
        role = getattr(module, _ROLE_ATTRIBUTE)
        if role not in get_args(Role):
            raise ConfigError(f"{_title(module, path)}: {_ROLE_ATTRIBUTE} is {role!r}; it must be 'muon' or 'adamw'")
    # The dicts, not `named_parameters`: that leaves out the further places of a tied parameter.
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield _Place(path, module, attribute, role), parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, f"{path}.{name}".removeprefix("."), role)


def _is_for_muon(parameter: nn.Parameter, places: Sequence[_Place]) -> bool:
    if parameter.ndim != 2 or not parameter.is_floating_point():
        return False
    declared = [place.role == "muon" for place in places if place.role is not None]
    return all(declared or [place.is_hidden_linear_weight for place in places])


def _split(places: Sequence[_Place]) -> tuple[int, ...] | None:
    """The row counts that a module at one of the places declares for its weight."""
    for place in places:
        if place.attribute == "weight" and hasattr(place.module, _SPLIT_ATTRIBUTE):
            split = tuple(getattr(place.module, _SPLIT_ATTRIBUTE))
            rows = place.module.get_parameter("weight").shape[0]
            if not all(isinstance(count, int) and count > 0 for count in split) or sum(split) != rows:
                raise ConfigError(
                    f"{_title(place.module, place.path)}: {_SPLIT_ATTRIBUTE} is {split}; it must be whole numbers "
                    f"above 0 that sum to the {rows} rows of its weight"
                )
            return split
    return None


def _title(module: nn.Module, path: str) -> str:
    return f"module {path!r}" if path else f"the model, a {type(module).__name__}"
