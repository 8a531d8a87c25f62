"""What an optimizer step costs, in time and in memory, beside the steps of torch and of plain code.

Contenders have models of their own with the same weights and gradients. For Muon that is a transformer of 12 layers of
width 256, whose 84 hidden matrices Muon trains and fused AdamW the rest, beside `torch.optim.Muon` with fused AdamW and
the same formula written out in fp32, one matrix after the other. For cautious AdamW it has 48 million parameters.

Memory is the most bytes that torch's allocator held during a step, above what it held before, as copies of all
parameters. What a library for matrix products takes for itself, which does not grow with the model, is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic import ReferenceTransformer, SpeedtronicConfig
from speedtronic.bench.figures import Clock, Figure, Settings, interleaved, ratios, seconds_of
from speedtronic.optimizers.routing import route_parameters
from speedtronic.runtime import build_optimizer
from speedtronic.tuning.tune import bf16_is_faster

# vocabulary, layers, width: 84 hidden matrices with 9.5 million entries, and 48 million parameters
Sizes = tuple[int, int, int]
MUON_MODEL: Sizes = (256, 12, 256)
LARGE_MODEL: Sizes = (8192, 14, 512)
QUICK_MODEL: Sizes = (64, 1, 64)

LR, WEIGHT_DECAY = 1e-3, 0.1

Step = Callable[[], object]


class PlainMuon:
    """Muon as it is written down, in fp32, one matrix after the other."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self._pairs = [(weight, torch.zeros_like(weight)) for weight in weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, momentum in self._pairs:
            assert weight.grad is not None
            momentum.mul_(0.95).add_(weight.grad, alpha=0.05)
            update = self._orthogonalized(weight.grad.lerp(momentum, 0.95))
            weight.mul_(1 - LR * WEIGHT_DECAY)
            rows, columns = weight.shape
            weight.add_(update, alpha=-LR * math.sqrt(max(1, rows / columns)))

    @staticmethod
    def _orthogonalized(matrix: Tensor) -> Tensor:
        tall = matrix.shape[0] > matrix.shape[1]
        x: Tensor = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x.T if tall else x


class InTurn:
    """Several optimizers, each over its own parameters, as one step."""

    def __init__(self, *optimizers: Any) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def make_model(sizes: Sizes, device: str) -> ReferenceTransformer:
    """A model with a gradient in every parameter."""
    vocabulary, layers, width = sizes
    torch.manual_seed(0)
    model = ReferenceTransformer(
        vocab_size=vocabulary, block_size=64, n_layer=layers, d_model=width, n_head=width // 64
    ).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def ours(model: nn.Module, device: str, *, compiled: bool = False, **options: object) -> torch.optim.Optimizer:
    section = {"lr": LR, "weight_decay": WEIGHT_DECAY, "fused": True, **options}
    config = SpeedtronicConfig.from_dict({"optimizer": section, "compile": compiled})
    return build_optimizer(model, config, device)


def fused_adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Muon's and AdamW's parameters."""
    routing = route_parameters(model)
    return [parameter for _, parameter in routing.muon], [parameter for _, parameter in routing.adamw]


def peak_bytes(step: Step, device: str) -> int:
    """The most bytes that torch's allocator held during a step, above what it held at its start."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profiled:
        step()
    profiler = profiled.profiler
    assert profiler is not None
    allocations = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


# ---------------------------------------------------------------------- rows


def muon(settings: Settings) -> Iterator[Figure]:
    """A step of Muon with fused AdamW over that of torch's, and over the formula in fp32."""
    sizes, device = QUICK_MODEL if settings.quick else MUON_MODEL, settings.device
    own = make_model(sizes, device)
    plain_matrices, plain_rest = parts(make_model(sizes, device))
    steps: dict[str, Step] = {
        "own": ours(own, device, name="muon").step,
        "the formula in fp32": InTurn(PlainMuon(plain_matrices), fused_adamw(plain_rest)).step,
    }
    # torch's Muon computes in bf16, which processors without it emulate, many times slower: no yardstick there.
    if device.startswith("cuda") or bf16_is_faster():
        matrices, rest = parts(make_model(sizes, device))
        theirs = torch.optim.Muon(matrices, lr=LR, weight_decay=WEIGHT_DECAY)
        steps["torch.optim.Muon"] = InTurn(theirs, fused_adamw(rest)).step
    seconds = race(steps, settings)
    for name in list(steps)[1:]:
        goal = 0.7 if name == "torch.optim.Muon" else None
        yield Figure(name=f"Muon ÷ {name}", rounds=ratios(seconds["own"], seconds[name]), at_most=goal)


def cautious(settings: Settings) -> Iterator[Figure]:
    """A step of cautious AdamW over that of fused AdamW."""
    sizes, device = QUICK_MODEL if settings.quick else LARGE_MODEL, settings.device
    compiled, pieces, other = (make_model(sizes, device) for _ in range(3))
    steps: dict[str, Step] = {
        "compiled": ours(compiled, device, compiled=True, cautious=True).step,
        "in pieces": ours(pieces, device, cautious=True).step,
        "fused": fused_adamw(list(other.parameters())).step,
    }
    seconds = race(steps, settings)
    for name, goal in (("compiled", 1.5), ("in pieces", None)):
        yield Figure(
            name=f"cautious AdamW, {name} ÷ fused AdamW", rounds=ratios(seconds[name], seconds["fused"]), at_most=goal
        )


def race(steps: dict[str, Step], settings: Settings) -> dict[str, list[float]]:
    """The seconds of each step, in each round."""

    def finished(step: Step) -> None:
        step()
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize()

    clocks: dict[str, Clock] = {name: partial(seconds_of, partial(finished, step)) for name, step in steps.items()}
    interleaved(clocks, 1)  # makes the states, and lets torch choose and load what it computes with
    return interleaved(clocks, settings.rounds_or(9))


def memory(settings: Settings) -> Iterator[Figure]:
    """Copies of all parameters that a step holds besides parameters, gradients and state."""
    large, small = (QUICK_MODEL, QUICK_MODEL) if settings.quick else (LARGE_MODEL, MUON_MODEL)
    cases: dict[str, tuple[Sizes, dict[str, Any]]] = {
        "fused AdamW, 48 M": (large, {}),
        "cautious AdamW, 48 M": (large, {"cautious": True}),
        "cautious AdamW, rescaled, 48 M": (large, {"cautious": True, "cautious_rescale": True}),
        "Muon, 9.5 M": (small, {"name": "muon"}),
        "Muon, 48 M": (large, {"name": "muon"}),
        "cautious Muon, 48 M": (large, {"name": "muon", "cautious": True}),
    }
    for name, (sizes, options) in cases.items():
        model = make_model(sizes, settings.device)
        optimizer = ours(model, settings.device, **options)
        optimizer.step()
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        copies = peak_bytes(optimizer.step, settings.device) / size
        yield Figure(
            name=f"copies, {name}", rounds=(copies,), at_most=1.0 if name.startswith("cautious AdamW") else None
        )
