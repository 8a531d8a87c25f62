"""What an optimizer step costs, in time and in memory, beside the steps of torch and of plain code.

    python benchmarks/optimizer_step.py [muon] [cautious] [memory] [--rounds N] [--bf16-rounds N] [--device D]
        [--tiny] [--json]

Contenders have models of their own with the same weights and gradients, and each does one step in turn (A B C A B C …);
the figures are medians of the rounds' ratios.

muon: a transformer of 12 layers of width 256, whose 84 hidden matrices Muon trains and fused AdamW the rest. Beside it
`torch.optim.Muon` with fused AdamW, and the same formula written out in fp32, one matrix after the other. torch's Muon
computes in bf16, which processors without it emulate, many times slower; `--bf16-rounds` is how often it may take part.

cautious: 48 million parameters, cautious AdamW, compiled (`compile: true`) and in pieces, beside torch's fused AdamW.

memory: the most bytes that torch's allocator held during a step, above what it held before, as copies of all
parameters. What a library for matrix products takes for itself, which does not grow with the model, is not in it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic import ReferenceTransformer, SpeedtronicConfig
from speedtronic.optimizers.routing import route_parameters
from speedtronic.runtime import build_optimizer

# vocabulary, layers, width: 84 hidden matrices with 9.5 million entries, and 48 million parameters
MUON_MODEL = (256, 12, 256)
LARGE_MODEL = (8192, 14, 512)

CASES = ("muon", "cautious", "memory")
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


def make_model(sizes: tuple[int, int, int], device: str) -> ReferenceTransformer:
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


def muon_contenders(device: str) -> dict[str, Step]:
    own = make_model(MUON_MODEL, device)
    plain_matrices, plain_rest = parts(make_model(MUON_MODEL, device))
    torch_matrices, torch_rest = parts(make_model(MUON_MODEL, device))
    torch_muon = torch.optim.Muon(torch_matrices, lr=LR, weight_decay=WEIGHT_DECAY)
    return {
        "speedtronic": ours(own, device, name="muon").step,
        "plain fp32": InTurn(PlainMuon(plain_matrices), fused_adamw(plain_rest)).step,
        "torch": InTurn(torch_muon, fused_adamw(torch_rest)).step,
    }


def cautious_contenders(device: str) -> dict[str, Step]:
    compiled, pieces, other = (make_model(LARGE_MODEL, device) for _ in range(3))
    return {
        "compiled": ours(compiled, device, compiled=True, cautious=True).step,
        "in pieces": ours(pieces, device, cautious=True).step,
        "torch": fused_adamw(list(other.parameters())).step,
    }


def seconds_of(step: Step, device: str) -> float:
    started = time.perf_counter()
    step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


def race(
    contenders: dict[str, Step], device: str, rounds: int, pairs: list[tuple[str, str]], limits: dict[str, int]
) -> dict[str, Any]:
    """Medians of the seconds of a step, and for each pair of the one's over the other's in the same round."""
    # The first step makes the state, and lets torch choose and load what it computes with.
    for name, step in contenders.items():
        if limits.get(name, rounds) > 0:
            step()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, step in contenders.items():
            if number < limits.get(name, rounds):
                seconds[name].append(seconds_of(step, device))
    seconds = {name: values for name, values in seconds.items() if values}
    ratios = {
        f"{one} ÷ {other}": statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=False))
        for one, other in pairs
        if one in seconds and other in seconds
    }
    milliseconds = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    return {"milliseconds": milliseconds, "ratios": ratios}


def memory(device: str) -> dict[str, float]:
    """Copies of all parameters that a step holds besides parameters, gradients and state."""
    cases: dict[str, tuple[tuple[int, int, int], dict[str, object]]] = {
        "fused AdamW, 48 M": (LARGE_MODEL, {}),
        "cautious AdamW, 48 M": (LARGE_MODEL, {"cautious": True}),
        "cautious AdamW, rescaled, 48 M": (LARGE_MODEL, {"cautious": True, "cautious_rescale": True}),
        "Muon, 9.5 M": (MUON_MODEL, {"name": "muon"}),
        "Muon, 48 M": (LARGE_MODEL, {"name": "muon"}),
        "cautious Muon, 48 M": (LARGE_MODEL, {"name": "muon", "cautious": True}),
    }
    copies = {}
    for name, (sizes, options) in cases.items():
        model = make_model(sizes, device)
        optimizer = ours(model, device, **options)
        optimizer.step()
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        copies[name] = peak_bytes(optimizer.step, device) / size
    return copies


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


def show(results: dict[str, Any], rounds: int) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds")
    for case in ("muon", "cautious"):
        if case in results:
            print(f"{case}: ms per step, and ratios")
            for name, milliseconds in results[case]["milliseconds"].items():
                print(f"  {name:26} {milliseconds:10.1f}")
            for pair, ratio in results[case]["ratios"].items():
                print(f"  {pair:26} {ratio:10.2f}")
    if "memory" in results:
        print("memory: copies of the parameters that a step holds")
        for name, copies in results["memory"].items():
            print(f"  {name:32} {copies:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", default=CASES, help=f"all without one: {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bf16-rounds", type=int, default=2, help="rounds of torch's Muon; 0 leaves it out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="models so small that the figures say nothing")
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    if args.tiny:
        globals().update(MUON_MODEL=(64, 1, 64), LARGE_MODEL=(64, 1, 64))
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"unknown case {', '.join(sorted(unknown))}: choose from {', '.join(CASES)}")
    results: dict[str, Any] = {}
    if "muon" in args.cases:
        limits = {"torch": min(args.rounds, args.bf16_rounds)}
        pairs = [("speedtronic", "plain fp32"), ("speedtronic", "torch")]
        results["muon"] = race(muon_contenders(args.device), args.device, args.rounds, pairs, limits)
    if "cautious" in args.cases:
        pairs = [("compiled", "torch"), ("in pieces", "torch")]
        results["cautious"] = race(cautious_contenders(args.device), args.device, args.rounds, pairs, {})
    if "memory" in args.cases:
        results["memory"] = memory(args.device)
    if args.json:
        print(json.dumps({"benchmark": "optimizer_step", **results}))
        return
    show(results, args.rounds)


if __name__ == "__main__":
    main()
