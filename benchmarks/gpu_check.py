"""Times training on a CUDA device: a 124 M GPT in bf16, by `Trainer.fit` and by hand, eager and compiled.

    python benchmarks/gpu_check.py [--steps N] [--rounds N]

Prints a Markdown table with tokens per second, model FLOP utilisation, and the ratio to the loop by hand of the same
kind, as medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

from speedtronic import ReferenceTransformer, SpeedtronicConfig, Trainer
from speedtronic.metrics import MetricLogger
from speedtronic.trainer.throughput import device_peak_flops

BATCH, LENGTH, VOCABULARY = 16, 1024, 50304


def make_model() -> ReferenceTransformer:
    torch.manual_seed(0)
    return ReferenceTransformer(vocab_size=VOCABULARY, block_size=LENGTH, n_layer=12, n_head=12, d_model=768).cuda()


def make_batches() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, VOCABULARY, (4, BATCH, LENGTH + 1)).pin_memory()
    return [
        {"input_ids": row[:, :-1].contiguous().pin_memory(), "labels": row[:, 1:].contiguous().pin_memory()}
        for row in ids
    ]


class ByHand:
    def __init__(self, batches: list[dict[str, Tensor]], compiled: bool) -> None:
        model = make_model()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self._model = torch.compile(model) if compiled else model
        self._batches = batches

    def run(self, steps: int) -> None:
        for step in range(steps):
            batch = {k: v.to("cuda", non_blocking=True) for k, v in self._batches[step % len(self._batches)].items()}
            with torch.autocast("cuda", torch.bfloat16):
                loss = self._model(**batch)["loss"]
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


class ByFit:
    def __init__(self, batches: list[dict[str, Tensor]], compiled: bool) -> None:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        config = SpeedtronicConfig(
            precision="bf16",
            compile=compiled,
            data={"micro_batch_size": BATCH, "target_batch_size": BATCH},
            model={"max_seq_len": LENGTH},
        )
        logger = MetricLogger(level="ERROR", every_steps=20)
        self._trainer = Trainer(model, optimizer, batches, device="cuda", config=config, logger=logger)

    def run(self, steps: int) -> None:
        self._trainer.fit(self._trainer.step + steps)


def tokens_per_second(contender: ByHand | ByFit, steps: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    contender.run(steps)
    torch.cuda.synchronize()
    return steps * BATCH * LENGTH / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device is here; run this on a machine that has one")
    torch.set_float32_matmul_precision("high")
    batches = make_batches()
    flops = make_model().flops_per_token(LENGTH)
    peak = device_peak_flops(torch.device("cuda"), torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, GPT 124 M, bf16, {BATCH} × {LENGTH} tokens\n")
    print("| loop | tokens/s | MFU | ÷ by hand |\n|---|---|---|---|")
    for compiled in (False, True):
        kind = "compiled" if compiled else "eager"
        contenders = {"by hand": ByHand(batches, compiled), "fit": ByFit(batches, compiled)}
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.run(5)
        for _ in range(args.rounds):
            for name, contender in contenders.items():
                rates[name].append(tokens_per_second(contender, args.steps))
        for name, values in rates.items():
            rate = statistics.median(values)
            utilisation = f"{100 * rate * flops / peak:.1f}%" if peak else "unknown"
            ratio = statistics.median(a / b for a, b in zip(values, rates["by hand"], strict=True))
            print(f"| {name}, {kind} | {rate:,.0f} | {utilisation} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
