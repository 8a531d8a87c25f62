"""An exponential moving average of the weights, kept on the device beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speedtronic.errors import CheckpointError, ConfigError
from speedtronic.trainer.compile import is_out_of_memory


class _Averaged(NamedTuple):
    """A trained weight, the copy's parameter for it, and the average: that very parameter where it is exact enough."""

    weight: Tensor
    shown: Tensor
    average: Tensor


class WeightAverage:
    """A copy of a model in evaluation mode, whose weights are the average of those that training went through:

        average₀ = weights₀,    average ← decay · average + (1 - decay) · weights    after each update,

    bit for bit what `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` computes, but that a
    refused update is left out without reading from the device whether it was.

    Averages of half-precision weights are float32: one step of a decay of 0.999 is below the resolution of bfloat16,
    and the average would stand still. Tied weights are averaged once. Frozen weights and buffers, such as running
    statistics, are the model's own: the copy shares them. Plain attributes of modules stay what they were when the
    copy was made.

    The copy takes as much memory as the trained weights do in float32, and theirs once more where they are of half
    precision.

    Args:
        model: the plain module, on its device.
        decay: between 0 and 1; the average is over about the last 1 / (1 - decay) updates.

    Raises:
        ConfigError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._copy = _copied(model).eval()
        self._modules = list(zip(self._copy.modules(), model.modules(), strict=True))
        shown = dict(self._copy.named_parameters(remove_duplicate=False))
        trained = [item for item in model.named_parameters(remove_duplicate=False) if item[1].requires_grad]
        parts = {weight: _averaged(weight, shown[name]) for name, weight in trained}
        self._parts = list(parts.values())
        self._names = {name: parts[weight].average for name, weight in trained}
        self._weights = dict(trained)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the weights that the model trains are still those averaged here, and not others in their place."""
        trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        return trained.keys() == self._weights.keys() and all(trained[name] is self._weights[name] for name in trained)

    @torch.no_grad()
    def update(self, refused: Tensor | None = None) -> None:
        """Take in the weights as they are now.

        Args:
            refused: 0-dim, on the device; 1.0 where the update was refused, and the average stays as it is. None where
                it was applied.
        """
        gains = {dtype: self._gain(refused, dtype) for dtype in {part.average.dtype for part in self._parts}}
        for weight, _, average in self._parts:
            average.lerp_(weight.to(average.dtype), gains[average.dtype])

    def _gain(self, refused: Tensor | None, dtype: torch.dtype) -> Tensor | float:
        return 1 - self._decay if refused is None else (1 - refused.to(dtype)) * (1 - self._decay)

    @torch.no_grad()
    def model(self) -> nn.Module:
        """The copy with the average as its weights, in the model's dtypes, and with the model's buffers of now."""
        for _, shown, average in self._parts:
            if shown.dtype != average.dtype:
                shown.copy_(average)
        for copied, original in self._modules:
            # A forward may have put another tensor in a buffer's place.
            for name, buffer in original._buffers.items():
                setattr(copied, name, buffer)
        return self._copy

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, by the model's names of the trained weights; tied names have one tensor."""
        return {name: average.detach() for name, average in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from averages that `state_dict` returned.

        Raises:
            CheckpointError: they are not those of this model's trained weights; all that differs is listed.
        """
        problems = [f"{name} has none in the checkpoint" for name in self._names.keys() - state.keys()]
        problems += [f"{name} is not trained here" for name in state.keys() - self._names.keys()]
        problems += [
            f"that of {name} has shape {tuple(state[name].shape)}, and the weight {tuple(average.shape)}"
            for name, average in self._names.items()
            if name in state and state[name].shape != average.shape
        ]
        if problems:
            raise CheckpointError(
                "the checkpoint's average of the weights (optimizer.ema) is of other weights:\n  "
                + "\n  ".join(sorted(problems))
                + "\nSet optimizer.ema to null to train on without it"
            )
        for name, average in self._names.items():
            average.copy_(state[name])


def _copied(model: nn.Module) -> nn.Module:
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    # What is in the memo counts as copied already, and so is shared.
    shared = {id(tensor): tensor for tensor in chain(frozen, model.buffers())}
    try:
        with torch.no_grad():
            return deepcopy(model, shared)
    except Exception as error:  # noqa: BLE001 - copying runs the model's own code
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"optimizer.ema: the average is kept in a copy of the model, and this model cannot be copied "
            f"({type(error).__name__}: {error}); give it a __deepcopy__, or set optimizer.ema to null"
        ) from error


def _averaged(weight: Tensor, shown: Tensor) -> _Averaged:
    shown.requires_grad_(False)
    return _Averaged(weight, shown, shown.to(torch.promote_types(shown.dtype, torch.float32)))
