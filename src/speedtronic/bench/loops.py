"""Training loops: `fit` in all its ways beside loops by hand, on the same shapes."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from speedtronic import ReferenceTransformer, SpeedtronicConfig, Trainer
from speedtronic.bench.figures import Clock, Figure, LeftOutError, Settings, interleaved, ratios
from speedtronic.metrics import MetricLogger
from speedtronic.runtime import build_runtime, tune_from_config
from speedtronic.trainer.result import MetricRecords
from speedtronic.tuning.tune import bf16_is_faster


class Size(NamedTuple):
    """A model, and its updates.

    Attributes:
        model: the keys of the `model` section.
        micro_batch: sequences of a micro batch.
        accumulation: micro batches of an update.
        steps: updates of a round.
    """

    model: dict[str, Any]
    micro_batch: int
    accumulation: int
    steps: int


TINY = {"vocab_size": 128, "max_seq_len": 32, "n_layer": 2, "d_model": 64, "n_head": 4, "n_kv_head": 2, "d_ff": 128}
SMALL = {"vocab_size": 512, "max_seq_len": 128, "n_layer": 4, "d_model": 256, "n_head": 8}
SIZES = {
    "tiny": Size(TINY, micro_batch=1, accumulation=2, steps=300),
    "small": Size(SMALL, micro_batch=8, accumulation=1, steps=20),
    "quick": Size({**TINY, "max_seq_len": 8, "n_layer": 1}, micro_batch=1, accumulation=2, steps=2),
}
WARM_UP = 20

Run = Callable[[int], float]
"""Trains so many steps more, and returns the seconds they took."""


def batches(size: Size) -> list[dict[str, Tensor]]:
    """64 micro batches of random ids, the same each time."""
    generator = torch.Generator().manual_seed(0)
    shape = (64, size.micro_batch, size.model["max_seq_len"] + 1)
    ids = torch.randint(0, size.model["vocab_size"], shape, generator=generator)
    return [{"input_ids": row[:, :-1].clone(), "labels": row[:, 1:].clone()} for row in ids]


def make_model(size: Size) -> ReferenceTransformer:
    torch.manual_seed(0)
    return ReferenceTransformer(**size.model)


def by_hand(
    size: Size,
    *,
    fused: bool | None = None,
    compiled: bool = False,
    merged: bool = False,
    bf16: bool = False,
    log: TextIO | None = None,
) -> Run:
    """A loop that anyone would write: forward, backward, AdamW with its defaults, and the loss is read.

    Args:
        merged: the micro batches of an update run as one.
        log: each step writes a line to it.
    """
    model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    call: Callable[..., Any] = torch.compile(model) if compiled else model
    micro_batches, accumulation = batches(size), size.accumulation
    if merged:
        pairs = list(zip(*[iter(micro_batches)] * accumulation, strict=True))
        micro_batches = [{key: torch.cat([one[key] for one in pair]) for key in pair[0]} for pair in pairs]
        accumulation = 1
    source = itertools.cycle(micro_batches)

    def run(steps: int) -> float:
        started = time.perf_counter()
        for step in range(1, steps + 1):
            total = 0.0
            for batch in itertools.islice(source, accumulation):
                with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                    loss = call(**batch)["loss"] / accumulation
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if log is not None:
                log.write(json.dumps({"step": step, "loss": total}) + "\n")
                log.flush()
        return time.perf_counter() - started

    return run


def config_of(size: Size, folder: Path, **changes: Any) -> SpeedtronicConfig:
    """A run of these shapes without end, which logs each step to a file."""
    return SpeedtronicConfig.from_dict(
        {
            "run": {"output_dir": str(folder), "max_steps": 10**6, "device": "cpu"},
            "model": size.model,
            "data": {
                "block_size": size.model["max_seq_len"],
                "micro_batch_size": size.micro_batch,
                "target_batch_size": size.micro_batch * size.accumulation,
                "num_tokens": 10**6,
            },
            "precision": {"mode": "fp32"},
            "scheduler": {"name": "constant", "warmup_steps": 0},
            "checkpoint": {"enabled": False},
            "logging": {"level": "ERROR", "json_file": "log.jsonl"},
            **changes,
        }
    )


def run_of(trainer: Trainer) -> Run:
    # What a run does once, such as writing its configuration, is no part of a step: `elapsed_s` is without it.
    return lambda steps: trainer.fit(trainer.step + steps).elapsed_s


def by_fit(size: Size, folder: Path, *, fused: bool, compiled: bool) -> Run:
    """The steps of `by_hand`, with its model, batches and optimizer, by `Trainer.fit`."""
    model = make_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    logger = MetricLogger(level="ERROR", json_file=folder / "fit.jsonl")
    config = config_of(size, folder, optimizer={"fused": fused}, compile=compiled)
    return run_of(Trainer(model, optimizer, batches(size), device="cpu", config=config, logger=logger))


def by_runtime(size: Size, folder: Path, **changes: Any) -> Run:
    """Steps of the same shapes by `build_runtime`, which reads its data from a loader of its own."""
    return run_of(build_runtime(config_of(size, folder, **changes))[0])


def by_plan(size: Size, folder: Path, **changes: Any) -> Run:
    """The same by the plan of `speedtronic tune`, which measures as long as it likes."""
    folder.mkdir()
    plan = tune_from_config(config_of(size, folder, tune="auto", **changes))
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    return by_runtime(size, folder, tune=str(folder / "plan.json"), **changes)


def measure(size: Size, makers: Mapping[str, Callable[[], Run]], settings: Settings) -> dict[str, list[float]]:
    """The seconds of each loop's rounds. Each keeps the number of threads that it was made with or chose itself."""
    usual = torch.get_num_threads()
    contenders: dict[str, Clock] = {}

    def one_round(run: Run, threads: int) -> float:
        torch.set_num_threads(threads)
        return run(size.steps)

    for name, make in makers.items():
        torch.set_num_threads(usual)
        run = make()
        run(2 if settings.quick else WARM_UP)
        contenders[name] = partial(one_round, run, torch.get_num_threads())
    try:
        return interleaved(contenders, settings.rounds_or(9))
    finally:
        torch.set_num_threads(usual)


def sizes(settings: Settings) -> tuple[str, ...]:
    return ("quick",) if settings.quick else ("tiny", "small")


# ---------------------------------------------------------------------- rows


def choices_by_hand(settings: Settings) -> Iterator[Figure]:
    """What each choice is worth in a loop by hand: its speed over that of the plain loop."""
    ways: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "compile + fused": {"fused": True, "compiled": True},
        "merged + compile + fused": {"fused": True, "compiled": True, "merged": True},
    }
    if bf16_is_faster():
        ways |= {"bf16": {"bf16": True}, "bf16 + compile + fused": {"bf16": True, "fused": True, "compiled": True}}

    def on_one_thread(size: Size) -> Run:
        torch.set_num_threads(1)
        return by_hand(size)

    for name in sizes(settings):
        size = SIZES[name]
        makers = {"plain": partial(by_hand, size), "one thread": partial(on_one_thread, size)}
        for way, options in ways.items():
            if not options.get("merged") or size.accumulation > 1:
                makers[way] = partial(by_hand, size, **options)
        seconds = measure(size, makers, settings)
        for way in list(makers)[1:]:
            yield Figure(name=f"{way} by hand, {name}", rounds=ratios(seconds["plain"], seconds[way]))


def overhead(settings: Settings) -> Iterator[Figure]:
    """Time of `fit` over that of the same steps by hand, each step logged to a file."""
    for name in sizes(settings):
        for way, seconds in _beside_by_hand(SIZES[name], settings, compiled=False):
            goal = 1.02 if name == "tiny" and way == "fit" else None
            yield Figure(name=f"time of {way}, {name}", rounds=ratios(*seconds), at_most=goal)


def compiled(settings: Settings) -> Iterator[Figure]:
    """Speed of `fit` with compile + fused over that of the same by hand."""
    for name in sizes(settings):
        for way, (own, hand) in _beside_by_hand(SIZES[name], settings, compiled=True):
            yield Figure(name=f"speed of {way}, {name}", rounds=ratios(hand, own), at_least=0.98)


def _beside_by_hand(
    size: Size, settings: Settings, *, compiled: bool
) -> Iterator[tuple[str, tuple[list[float], list[float]]]]:
    """Both ways to `fit`, each with its seconds and those of the loop by hand."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "by_hand.jsonl").open("w", encoding="utf-8") as log:
            makers = {
                "by hand": partial(by_hand, size, fused=compiled, compiled=compiled, log=log),
                "fit": partial(by_fit, size, folder, fused=compiled, compiled=compiled),
                "fit of build_runtime": partial(
                    by_runtime, size, folder / "runtime", optimizer={"fused": compiled}, compile=compiled
                ),
            }
            seconds = measure(size, makers, settings)
        for way in ("fit", "fit of build_runtime"):
            yield way, (seconds[way], seconds["by hand"])


def tuned(settings: Settings) -> Iterator[Figure]:
    """Speed of `fit` with a plan of `tune` over that of the plain loop by hand, in fp32."""
    goals = {"tiny": 2.7, "small": 1.25}
    for name in sizes(settings):
        size = SIZES[name]
        with tempfile.TemporaryDirectory() as folder:
            makers = {"by hand": partial(by_hand, size), "tuned": partial(by_plan, size, Path(folder) / "tuned")}
            seconds = measure(size, makers, settings)
        yield Figure(
            name=f"speed of fit with tune, {name}",
            rounds=ratios(seconds["by hand"], seconds["tuned"]),
            at_least=goals.get(name),
        )


def tuned_bf16(settings: Settings) -> Iterator[Figure]:
    """The same where the configuration allows bf16."""
    if not bf16_is_faster():
        raise LeftOutError("needs a processor that is faster in bf16 than in fp32")
    name = "quick" if settings.quick else "small"
    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        makers = {
            "by hand": partial(by_hand, size),
            "tuned": partial(by_plan, size, Path(folder) / "tuned", precision={"mode": "auto"}),
        }
        seconds = measure(size, makers, settings)
    yield Figure(
        name=f"speed of fit with tune and bf16, {name}",
        rounds=ratios(seconds["by hand"], seconds["tuned"]),
        at_least=1.4,
    )


def metrics_memory(settings: Settings) -> Iterator[Figure]:
    """Bytes that the metrics of a step take in what `fit` returns, until they are read."""
    size = SIZES["quick"]
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = build_runtime(config_of(size, Path(folder)))
        lines = [json.dumps(record) for record in trainer.fit(4).metrics]
    steps = 100 if settings.quick else 10_000
    records = MetricRecords()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for line in itertools.islice(itertools.cycle(lines), steps):
        records.append(json.loads(line))  # numbers of its own, as a step has
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    yield Figure(name="bytes of metrics a step", rounds=(taken / len(records),), at_most=150)
