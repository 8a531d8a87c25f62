"""Times a 124 M GPT in bf16 on a CUDA device, by `Trainer.fit` and by hand: its steps, its attention, its launches.

    python benchmarks/gpu_check.py [speed] [attention] [launches] [--steps N] [--rounds N] [--dry]

speed: milliseconds a step, tokens per second, model FLOP utilisation and the ratio to a loop by hand of the same kind,
eager and compiled, as medians of interleaved rounds. The loop by hand clips and measures the norm as `fit` does.

attention: forward and backward of one layer: which kernel of torch runs, how long, and the peak of its memory.

launches: of a step of `fit`: how many kernels run on the card, and the share of its time in which none does.

`--dry` runs all of it with a tiny model on the CPU, to see that it reaches its end. Its figures say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from speedtronic import ReferenceTransformer, SpeedtronicConfig, Trainer
from speedtronic.metrics import MetricLogger
from speedtronic.precision import use_device
from speedtronic.trainer.throughput import device_peak_flops, peak_memory_bytes

PARTS = ("speed", "attention", "launches")
GPT = {"vocab_size": 50304, "block_size": 1024, "n_layer": 12, "n_head": 12, "d_model": 768}
TINY = {"vocab_size": 64, "block_size": 32, "n_layer": 1, "n_head": 4, "d_model": 32}
BATCH = 16
CLIP = 1.0


class Setting:
    """The device and the sizes of all that is measured."""

    def __init__(self, *, dry: bool) -> None:
        self.device = torch.device("cpu" if dry else "cuda")
        self.sizes = TINY if dry else GPT
        self.length = self.sizes["block_size"]
        pin = not dry
        ids = torch.randint(0, self.sizes["vocab_size"], (4, BATCH, self.length + 1))
        parts = ({"input_ids": row[:, :-1].contiguous(), "labels": row[:, 1:].contiguous()} for row in ids)
        self.batches = [{k: v.pin_memory() if pin else v for k, v in part.items()} for part in parts]

    def make_model(self) -> ReferenceTransformer:
        torch.manual_seed(0)
        return ReferenceTransformer(**self.sizes).to(self.device)  # type: ignore[arg-type]  # a dict of its sizes

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class ByHand:
    def __init__(self, setting: Setting, compiled: bool) -> None:
        model = setting.make_model()
        self._parameters = list(model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=3e-4, fused=True)
        self._setting = setting

        def loss_of(**batch: Tensor) -> Tensor:
            loss = model(**batch)["loss"]
            assert loss is not None
            return loss

        self._loss_of: Callable[..., Tensor] = torch.compile(loss_of) if compiled else loss_of
        self.norm = torch.zeros(())

    def run(self, steps: int) -> None:
        batches, device = self._setting.batches, self._setting.device
        for step in range(steps):
            batch = {k: v.to(device, non_blocking=True) for k, v in batches[step % len(batches)].items()}
            with torch.autocast(device.type, torch.bfloat16):
                loss = self._loss_of(**batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.norm = nn.utils.clip_grad_norm_(self._parameters, CLIP)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


class ByFit:
    def __init__(self, setting: Setting, compiled: bool) -> None:
        model = setting.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        config = SpeedtronicConfig.from_dict(
            {
                "precision": {"mode": "bf16", "tf32": True},
                "compile": compiled,
                "optimizer": {"grad_clip": CLIP},
                "data": {"micro_batch_size": BATCH, "target_batch_size": BATCH, "block_size": setting.length},
                "model": {"max_seq_len": setting.length},
            }
        )
        logger = MetricLogger(level="ERROR", every_steps=20)
        self._trainer = Trainer(model, optimizer, setting.batches, device=setting.device, config=config, logger=logger)

    def run(self, steps: int) -> None:
        self._trainer.fit(self._trainer.step + steps)


def seconds_per_step(setting: Setting, contender: ByHand | ByFit, steps: int) -> float:
    setting.wait()
    started = time.perf_counter()
    contender.run(steps)
    setting.wait()
    return (time.perf_counter() - started) / steps


def measure_speed(setting: Setting, steps: int, rounds: int) -> None:
    flops = setting.make_model().flops_per_token(setting.length)
    peak = device_peak_flops(setting.device, torch.bfloat16)
    tokens = BATCH * setting.length
    print("| loop | ms a step | tokens/s | MFU | ÷ by hand |\n|---|---|---|---|---|", flush=True)
    for compiled in (False, True):
        kind = "compiled" if compiled else "eager"
        contenders: dict[str, ByHand | ByFit] = {"by hand": ByHand(setting, compiled), "fit": ByFit(setting, compiled)}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.run(3)
        for _ in range(rounds):
            for name, contender in contenders.items():
                times[name].append(seconds_per_step(setting, contender, steps))
        for name, values in times.items():
            seconds = statistics.median(values)
            utilisation = f"{100 * tokens * flops / seconds / peak:.1f}%" if peak else "unknown"
            ratio = statistics.median(b / a for a, b in zip(values, times["by hand"], strict=True))
            row = f"| {name}, {kind} | {1e3 * seconds:.3f} | {tokens / seconds:,.0f} | {utilisation} | {ratio:.3f} |"
            print(row, flush=True)


class Kernels(TorchDispatchMode):
    """Notes which attention kernels are called; none is torch's own composition of plain operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
            self.names.add(name.removeprefix("_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


def measure_attention(setting: Setting, rounds: int) -> None:
    print("\n| attention of one layer | kernel | ms | peak, MB |\n|---|---|---|---|", flush=True)
    ids = setting.batches[0]["input_ids"].to(setting.device)
    documents = (torch.arange(setting.length, device=setting.device) // 16).expand_as(ids)
    heads = setting.sizes["n_head"]
    for name, kv_heads, mask in (
        ("plain", heads, None),
        ("grouped", heads // 2, None),
        ("mask", heads, documents),
        ("both", heads // 2, documents),
    ):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {**setting.sizes, "n_layer": 1, "n_kv_head": kv_heads, "vocab_size": 64}
        model = ReferenceTransformer(**sizes).to(setting.device)

        def step(model: nn.Module = model, mask: Tensor | None = mask) -> None:
            with torch.autocast(setting.device.type, torch.bfloat16):
                loss = model(ids % 64, ids % 64, document_ids=mask)["loss"]
            loss.backward()

        with Kernels() as kernels:
            step()
        if setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(rounds):
            setting.wait()
            started = time.perf_counter()
            step()
            setting.wait()
            times.append(time.perf_counter() - started)
        kernel = ", ".join(sorted(kernels.names)) or "plain operations"
        megabytes = (peak_memory_bytes(setting.device) or 0) / 1e6
        print(f"| {name} | {kernel} | {1e3 * statistics.median(times):.3f} | {megabytes:.0f} |", flush=True)


def measure_launches(setting: Setting, steps: int) -> None:
    print("\n| step of fit | kernels | idle |\n|---|---|---|", flush=True)
    fit = ByFit(setting, compiled=False)
    fit.run(3)
    setting.wait()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (setting.device.type == "cuda")
    with profile(activities=activities) as recorded:
        fit.run(steps)
        setting.wait()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    idle = "unknown"
    if spans:
        # Kernels may overlap: the card works while any of them does.
        busy, until = 0.0, spans[0][0]
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        idle = f"{1 - busy / (until - spans[0][0]):.1%}"
    print(f"| eager | {len(spans) / steps:.0f} | {idle} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if not args.dry and not torch.cuda.is_available():
        sys.exit("error: no CUDA device is here; run this on a machine that has one, or with --dry")
    if args.dry:
        args.steps, args.rounds = 2, 1
        # The compiler traces as it always does, and makes no code.
        torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    setting = Setting(dry=args.dry)
    use_device(setting.device, tf32=True)
    name = "CPU, dry" if args.dry else torch.cuda.get_device_name()
    print(f"\n{name}, torch {torch.__version__}, bf16, {BATCH} x {setting.length} tokens\n", flush=True)
    parts = args.parts or PARTS
    if "speed" in parts:
        measure_speed(setting, args.steps, args.rounds)
    if "attention" in parts:
        measure_attention(setting, args.rounds)
    if "launches" in parts:
        measure_launches(setting, args.steps)


if __name__ == "__main__":
    main()
