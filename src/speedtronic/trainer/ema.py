"""An exponential moving average of the weights, kept on the device beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speedtronic.errors import CheckpointError, ConfigError
from speedtronic.trainer.out_of_memory import is_out_of_memory

# Elements that are averaged together: on a card, a few operations for each so many, and a copy of them for a moment.
_CHUNK = 2**26


class _Averaged(NamedTuple):
    """One weight of the model and its average.

    Attributes:
        weight: the trained weight.
        shown: the parameter in the copy, in the dtype of the weight.
        average: float32 or wider; the very same tensor as `shown` where that is.
    """

    weight: Tensor
    shown: Tensor
    average: Tensor


class WeightAverage:
    """A copy of a model in evaluation mode, with the average of the weights that training went through:

        average₀ = weights₀,    average ← decay · average + (1 - decay) · weights    after each update.

    This equals `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` bit for bit. Besides, a
    refused update is left out, without reading from the device whether it was refused.

    Averages of half-precision weights are float32: one step of a decay of 0.999 is below the resolution of bfloat16,
    and the average would not move. Tied weights are averaged once. The copy shares the frozen weights and the buffers,
    such as running statistics, with the model. Plain attributes of modules stay as they were when the copy was made.

    Memory: the trained weights in float32, and once more in their own dtype where that is a half precision. On a card
    an update holds a copy of some weights for a moment.

    Args:
        model: the plain module, on its device.
        decay: between 0 and 1; the average covers about the last 1 / (1 - decay) updates.

    Raises:
        ConfigError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._copy = _copied(model).eval()
        self._modules = list(zip(self._copy.modules(), model.modules(), strict=True))
        self._weights = _trained(model)
        self._frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        copies = dict(self._copy.named_parameters(remove_duplicate=False))
        # By weight, so that tied weights, which have several names, are averaged once.
        parts: dict[Tensor, _Averaged] = {}
        for name, weight in self._weights.items():
            if weight not in parts:
                shown = copies[name].requires_grad_(False)
                average = shown.to(torch.promote_types(shown.dtype, torch.float32))
                parts[weight] = _Averaged(weight, shown, average)
        self._parts = list(parts.values())
        self._chunks = list(_chunks(self._parts))
        self._averages = {name: parts[weight].average for name, weight in self._weights.items()}

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model still trains the weights that are averaged here, and no others."""
        trained = _trained(model)
        return trained.keys() == self._weights.keys() and all(trained[name] is self._weights[name] for name in trained)

    def lacks_weights(self) -> bool:
        """Whether weights are trained by now that were frozen when the average began, and so are not in it."""
        return any(parameter.requires_grad for parameter in self._frozen)

    @torch.no_grad()
    def update(self, refused: Tensor | None = None) -> None:
        """Move the average towards the weights of now.

        Args:
            refused: 0-dim, on the device; 1.0 where the update was refused, which leaves the average as it is. None
                where it was applied.
        """
        # On the host the answer is at hand; on a device, only the kernels below read it.
        if refused is not None and _is_on_host(refused):
            if refused.tolist():
                return
            refused = None
        gain = 1 - self._decay
        for chunk in self._chunks:
            averages, weights = [part.average for part in chunk], [part.weight for part in chunk]
            if weights[0].dtype != averages[0].dtype:
                wide = [torch.empty_like(average) for average in averages]
                torch._foreach_copy_(wide, weights)
                weights = wide
            # average += gain · (weight - average)
            if refused is None:
                torch._foreach_lerp_(averages, weights, gain)
                continue
            # The same, times 1, plus the average before, times 0; or the other way round. The numbers are finite, so
            # that the result is either of the two, and nothing has to be read.
            moved = torch._foreach_lerp(averages, weights, gain)
            kept = refused.to(averages[0].dtype)
            torch._foreach_mul_(moved, 1 - kept)
            torch._foreach_mul_(averages, kept)
            torch._foreach_add_(averages, moved)

    @torch.no_grad()
    def model(self) -> nn.Module:
        """The copy with the average as its weights, in the model's dtypes, and with the model's buffers of now."""
        for _, shown, average in self._parts:
            if shown.dtype != average.dtype:
                shown.copy_(average)
        for copied, original in self._modules:
            # A forward pass may have replaced a buffer by another tensor.
            for name, buffer in original._buffers.items():
                setattr(copied, name, buffer)
        return self._copy

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, by the model's names of the trained weights; tied names have one tensor."""
        return {name: average.detach() for name, average in self._averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from averages that `state_dict` returned.

        Raises:
            CheckpointError: they are not those of this model's trained weights; all that differs is listed.
        """
        problems = [f"{name} has no average in the checkpoint" for name in self._averages.keys() - state.keys()]
        problems += [f"{name} is not trained here" for name in state.keys() - self._averages.keys()]
        problems += [
            f"the average of {name} has shape {tuple(state[name].shape)}, and the weight {tuple(average.shape)}"
            for name, average in self._averages.items()
            if name in state and state[name].shape != average.shape
        ]
        if problems:
            raise CheckpointError(
                "the checkpoint's average of the weights (optimizer.ema) is of other weights:\n  "
                + "\n  ".join(sorted(problems))
                + "\nSet optimizer.ema to null to continue without it"
            )
        for name, average in self._averages.items():
            average.copy_(state[name])


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _chunks(parts: Iterable[_Averaged]) -> Iterator[list[_Averaged]]:
    """The weights that are averaged together: of one device and equal dtypes, and of bounded size."""
    alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[_Averaged]] = {}
    for part in parts:
        alike.setdefault((part.weight.dtype, part.average.dtype, part.average.device), []).append(part)
    for members in alike.values():
        chunk: list[_Averaged] = []
        room = _CHUNK
        for part in members:
            if chunk and part.average.numel() > room:
                yield chunk
                chunk, room = [], _CHUNK
            chunk.append(part)
            room -= part.average.numel()
        yield chunk


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def _copied(model: nn.Module) -> nn.Module:
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    # deepcopy takes what is in its memo as copied already, so the copy shares it.
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
