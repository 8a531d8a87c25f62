"""Which parameters of a model Muon trains, and which AdamW does.

Muon orthogonalises the update of a matrix, which suits the weights between hidden activations. What is looked up by a
row, or is read as scores of classes, has other geometry and stays with AdamW (Jordan et al. 2024, "Muon: An optimizer
for hidden layers in neural networks").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from torch import nn

from speedtronic.errors import ConfigError

Role = Literal["muon", "adamw"]
NamedParameters = tuple[tuple[str, nn.Parameter], ...]

# What embeddings and heads are called, whole and in any case: a part such as "output" is in many a hidden layer's name.
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
    """The parameters of a model as (name, parameter), each once, in the order and under the names of
    `model.named_parameters()`.

    Attributes:
        muon: matrices for Muon, all of them floating and of two dimensions.
        adamw: everything else that is trained.
        skipped: frozen parameters.
        splits: by the name of a matrix in `muon` that a model has fused from several, the row counts of its pieces.
    """

    muon: NamedParameters
    adamw: NamedParameters
    skipped: NamedParameters
    splits: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """One place of the module tree at which a parameter stands; a tied one stands at several."""

    path: str
    module: nn.Module
    attribute: str
    role: Role | None

    def is_hidden_linear_weight(self) -> bool:
        return isinstance(self.module, nn.Linear) and self.attribute == "weight" and not _names_an_end(self.path)


def route_parameters(model: nn.Module) -> ParameterRouting:
    """Give each trainable parameter of `model` to Muon or to AdamW.

    Muon takes the `weight` of a hidden `nn.Linear`. An embedding or a head is told by its name, the last part of its
    module's path that is no number, in any case: embed, embedding, wte, wpe, lm_head, classifier, output, output_proj,
    score, score_proj or head. So `classifier.0` is a head, and `layer.0.output.dense` is hidden. A weight that is also
    that of an `nn.Embedding` is not hidden, whatever its other names. AdamW takes these, norms, biases, and all that is
    not the weight of an `nn.Linear`: convolutions, the transposed matrices of GPT-2's `Conv1D`, the fused ones of
    `nn.MultiheadAttention`.

    A module may decide for itself and all modules inside it by an attribute `_speedtronic_optimizer_role`, "muon" or
    "adamw"; the innermost one counts. Where a weight is tied, it goes to Muon if all roles that its places were given
    say so. What is no floating matrix of two dimensions stays with AdamW in any case.

    A module whose `weight` (F, D) holds several matrices, such as those of queries, keys and values, declares their row
    counts, which sum to F, by an attribute `_speedtronic_muon_split`.

    Raises:
        ConfigError: a role is neither "muon" nor "adamw", or a split does not fit its weight; a `ValueError` that
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
    role = _declared_role(module, path, role)
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield _Place(path, module, attribute, role), parameter
    for name, child in module._modules.items():
        if child is not None:
            yield from _places(child, f"{path}.{name}".removeprefix("."), role)


def _declared_role(module: nn.Module, path: str, inherited: Role | None) -> Role | None:
    if not hasattr(module, _ROLE_ATTRIBUTE):
        return inherited
    role = getattr(module, _ROLE_ATTRIBUTE)
    if role not in get_args(Role):
        raise ConfigError(f"{_title(module, path)}: {_ROLE_ATTRIBUTE} is {role!r}; it must be 'muon' or 'adamw'")
    return cast(Role, role)


def _is_for_muon(parameter: nn.Parameter, places: Sequence[_Place]) -> bool:
    if parameter.ndim != 2 or not parameter.is_floating_point():
        return False
    declared = [place.role == "muon" for place in places if place.role is not None]
    return all(declared or [place.is_hidden_linear_weight() for place in places])


def _names_an_end(path: str) -> bool:
    """Whether the module at `path` is called as embeddings and heads are: the two ends of a model."""
    names = [part for part in path.split(".") if not part.isdecimal()]
    return bool(names) and names[-1].lower() in _EMBEDDINGS_AND_HEADS


def _split(places: Sequence[_Place]) -> tuple[int, ...] | None:
    for place in places:
        if place.attribute == "weight" and hasattr(place.module, _SPLIT_ATTRIBUTE):
            return _checked_split(place)
    return None


def _checked_split(place: _Place) -> tuple[int, ...]:
    split = tuple(getattr(place.module, _SPLIT_ATTRIBUTE))
    rows = place.module.get_parameter("weight").shape[0]
    if not all(isinstance(count, int) and count > 0 for count in split) or sum(split) != rows:
        raise ConfigError(
            f"{_title(place.module, place.path)}: {_SPLIT_ATTRIBUTE} is {split}; it must be whole numbers above 0 that "
            f"sum to the {rows} rows of its weight"
        )
    return split


def _title(module: nn.Module, path: str) -> str:
    return f"module {path!r}" if path else f"the model, a {type(module).__name__}"
