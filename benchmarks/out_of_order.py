"""Out-of-order backprop: forward and backward of a stack of linear layers, ÷ the fastest ordinary way.

    python benchmarks/out_of_order.py [--device cuda] [--widths W ...] [--rows N] [--layers N] [--rounds N] [--steps N]
                                      [--json]

The cells are {eager, graph, compile} × {off, same stream, side streams} at each width. `same stream` puts the weight
gradients off and runs them on the stream of the backward pass: it shows what the order alone costs. Under compile
there is only `off`. Graphs and side streams need CUDA. Cells take turns within a round, and each ratio is the median
over the rounds. Losing cells are printed like the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.scheduling import SameStream, StageStreamScheduler

WAYS = ("eager", "graph", "compile")
ORDERS = ("off", "same stream", "side streams")


def build(width: int, layers: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*blocks).to(device)


def step_of(way: str, order: str, model: nn.Sequential, x: Tensor, streams: int) -> Callable[[], None] | None:
    """One forward and backward pass; None where this machine has no such cell."""
    on_cuda = x.device.type == "cuda"
    if (way == "compile" and order != "off") or (not on_cuda and (way == "graph" or order == "side streams")):
        return None
    lanes = SameStream() if order == "same stream" else None
    scheduler = None
    if order != "off":
        scheduler = StageStreamScheduler(model, x.device, num_streams=streams, lanes=lanes, min_gain=None)
    called: Callable[[Tensor], Tensor] = torch.compile(model) if way == "compile" else model

    def step() -> None:
        model.zero_grad(set_to_none=way != "graph")  # a graph accumulates where it was captured
        loss = called(x).square().mean()
        if scheduler is not None:
            scheduler.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        if scheduler is not None:
            scheduler.finish()

    if way != "graph":
        return step
    side = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(x.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / steps


def measure(width: int, options: argparse.Namespace) -> dict[str, Any]:
    """The milliseconds of each cell, and how often it is as fast as the fastest cell that puts nothing off."""
    device = torch.device(options.device)
    x = torch.randn(options.rows, width, device=device)
    steps = {}
    for way in WAYS:
        for order in ORDERS:
            step = step_of(way, order, build(width, options.layers, device), x, options.streams)
            if step is not None:
                steps[way, order] = step
    rounds = [
        {cell: seconds(step, options.steps, device) for cell, step in steps.items()} for _ in range(options.rounds)
    ]
    ordinary = [min(taken for (_, order), taken in times.items() if order == "off") for times in rounds]
    return {
        "width": width,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cells": {
            f"{way}, {order}": {
                "ms": statistics.median(times[way, order] for times in rounds) * 1000,
                "speed": statistics.median(
                    fastest / times[way, order] for fastest, times in zip(ordinary, rounds, strict=True)
                ),
            }
            for way, order in steps
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--rows", type=int, default=512, help="rows of a batch (default: 512)")
    parser.add_argument("--layers", type=int, default=12, help="linear layers (default: 12)")
    parser.add_argument("--streams", type=int, default=4, help="side streams (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="passes of a cell in a round (default: 20)")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each width")
    options = parser.parse_args()
    if not options.json:
        print("| width | way | weight gradients | ms | speed ÷ fastest ordinary way |\n|---|---|---|---|---|")
    for width in options.widths:
        record = measure(width, options)
        if options.json:
            print(json.dumps(record), flush=True)
            continue
        for cell, figures in record["cells"].items():
            way, order = cell.split(", ")
            print(f"| {width} | {way} | {order} | {figures['ms']:.3f} | {figures['speed']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
