"""The head of a language model and its loss, forward and backward, for large vocabularies: three ways, time and memory.

    python benchmarks/cross_entropy.py [--positions N] [--width D] [--vocabularies V ...] [--chunk N] [--rounds N]
                                       [--json]

- `torch` is `F.linear` and `F.cross_entropy`, which keeps the log-softmax beside the logits.
- `ours` is the head of the reference model: it keeps the logits alone, which the model returns.
- `chunked` is `F.linear_cross_entropy` of torch 2.13 with chunks of positions. It returns no logits, computes the
  gradients in the forward pass, and has no second derivative.

Each measurement is a process of its own, in turn (A B C A B C …), which takes one warm-up on a few positions. The time
is that of the CPU, over all its threads; the memory is the growth of the process's peak after the warm-up, which has
held the gradients. The losses and gradients are compared with those of `torch`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtronic.model.loss import causal_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From the hidden states (N, D), the head's weight (V, D) and the labels (N,) to their mean loss."""


def by_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return causal_cross_entropy(F.linear(hidden, weight).unsqueeze(0), labels.unsqueeze(0))


def chunked(chunk: int | None) -> Loss:
    """With chunks of so many positions; None lets torch choose."""
    sizes: dict[str, Any] = {} if chunk is None else {"batch_chunk_size": chunk, "chunking_method": None}
    options = torch.nn.LinearCrossEntropyOptions(**sizes)
    return lambda hidden, weight, labels: F.linear_cross_entropy(hidden, weight, labels, options=options)


def measure(name: str, positions: int, width: int, vocabulary: int, chunk: int | None) -> dict[str, float]:
    """Seconds, bytes, and how far loss and gradients are from torch's, relative to the largest of its values."""
    loss_of = {"torch": by_torch, "ours": ours, "chunked": chunked(chunk)}[name]
    torch.manual_seed(0)
    hidden = torch.randn(positions, width, requires_grad=True)
    weight = torch.randn(vocabulary, width).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (positions,))
    labels[::7] = -100

    def results(loss_of: Loss, positions: int) -> list[Tensor]:
        loss = loss_of(hidden[:positions], weight, labels[:positions])
        return [loss.detach(), *torch.autograd.grad(loss, [hidden, weight])]

    results(loss_of, 4)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = results(loss_of, positions)
    seconds, after = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    expected = results(by_torch, positions)
    differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    scale = 1 if sys.platform == "darwin" else 1024
    return {"seconds": seconds, "bytes": (after - before) * scale, "difference": max(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[50_304, 128_256])
    parser.add_argument("--chunk", type=int, default=None, help="positions of a chunk; torch chooses without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "V"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        name, vocabulary = args.one
        print(json.dumps(measure(name, args.positions, args.width, int(vocabulary), args.chunk)))
        return
    names = ["torch", "ours"] + (["chunked"] if hasattr(F, "linear_cross_entropy") else [])
    report: list[dict[str, Any]] = []
    for vocabulary in args.vocabularies:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                found[name].append(_in_a_process(name, vocabulary, args))
        for name, rounds in found.items():
            ratios = {
                key: statistics.median(row[key] / base[key] for row, base in zip(rounds, found["torch"], strict=True))
                for key in ("seconds", "bytes")
            }
            difference = max(row["difference"] for row in rounds)
            megabytes = statistics.median(row["bytes"] for row in rounds) / 1e6
            report.append(
                {"vocabulary": vocabulary, "name": name, **ratios, "megabytes": megabytes, "difference": difference}
            )
    if args.json:
        print(json.dumps({"benchmark": "cross_entropy", "positions": args.positions, "rows": report}))
        return
    print(f"{args.positions} positions, D {args.width}, torch {torch.__version__}; ratios are ÷ torch")
    print(f"{'V':>8}  {'head':8}{'time':>8}{'memory':>8}{'MB':>8}{'difference':>12}")
    for row in report:
        print(
            f"{row['vocabulary']:8}  {row['name']:8}{row['seconds']:8.2f}{row['bytes']:8.2f}{row['megabytes']:8.0f}"
            f"{row['difference']:12.1e}"
        )


def _in_a_process(name: str, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, str(vocabulary)]
    command += ["--positions", str(args.positions), "--width", str(args.width)]
    command += ["--chunk", str(args.chunk)] if args.chunk else []
    values: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return values


if __name__ == "__main__":
    main()
