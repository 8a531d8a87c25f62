"""From a configuration with `tune` to the plan of a run: from a file, its checkpoint, the cache, or by measuring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.config.base import AutoSize
from speedtronic.metrics import MetricLogger
from speedtronic.trainer.loss import loss_by_name
from speedtronic.trainer.merging import refuses_merging
from speedtronic.trainer.throughput import training_flops_per_token
from speedtronic.tuning import cache
from speedtronic.tuning.bench import Bench, MakeLoader, MakeOptimizer
from speedtronic.tuning.plan import Choices, Plan, in_words, read_plan
from speedtronic.tuning.search import BUDGET, LEAST, WARM, Possible, Search

# What measuring takes besides the updates: a copy of the model, a second loader.
SETUP_SECONDS = 0.1
# No machine of the kind is faster: FLOP/s of a core, and of a card; and no update of a loop in Python takes less.
CORE_FLOPS, CARD_FLOPS, UPDATE_SECONDS = 5e10, 1e15, 1e-3


@dataclass(frozen=True)
class Workbench:
    """The run's parts that measuring works with: `Bench` has what they are.

    Attributes:
        model: it is copied.
        device: where to train.
        make_loader, make_optimizer: make parts for a measurement.
        clock: seconds.
    """

    model: nn.Module
    device: torch.device
    make_loader: MakeLoader
    make_optimizer: MakeOptimizer
    clock: Callable[[], float] = time.perf_counter


def plan_of_run(
    config: SpeedtronicConfig,
    workbench: Workbench,
    *,
    step: int,
    target: int,
    saved: Mapping[str, Any] | None,
    logger: MetricLogger,
) -> Plan | None:
    """The plan of a run, which is told to the logger; None without `tune`.

    Args:
        config: the run's, as the user gave it.
        step, target: where it begins and ends.
        saved: the plan in the checkpoint that the run resumes from.

    Raises:
        ConfigError: the plan that `tune` names cannot be read.
    """
    if config.tune == "off":
        if saved is not None:
            logger.warning(
                "tune is off: the plan of the checkpoint is dropped, so the run may be slower, and rounds otherwise"
            )
        return None
    machine = cache.machine_of(workbench.device)
    key = cache.key_of(config, workbench.model, machine)
    if config.tune != "auto":
        plan = read_plan(Path(config.tune))
        if plan.key != key:
            logger.warning(f"tune: {config.tune} was made for another model, configuration or machine")
        return _told(plan, "file", logger)
    if saved is not None and (former := _still_valid(saved, machine, key, target, logger)) is not None:
        return _told(former, "checkpoint", logger)
    steps = target - step
    kept = cache.load(key)
    # A run that is much longer than the one that was measured for can afford to measure what was left out.
    if kept is not None and (kept.complete or target <= 2 * kept.target):
        return _told(kept.for_steps(steps, target), "cache", logger)
    base = Choices.of(config)
    if steps * BUDGET < WARM + LEAST or steps * BUDGET * least_seconds(config, workbench) < SETUP_SECONDS:
        plan = Plan(choices=base, base=base, target=target, machine=machine, key=key)
        return _told(plan, "too short", logger)
    logger.info(f"tune: measuring how this run is fastest, in at most about {BUDGET:.0%} of its time")
    plan = measure_plan(config, workbench, step=step, target=target, limited=True)
    try:
        if plan.worth_keeping:
            cache.keep(plan)
    except OSError as error:
        logger.info(f"tune: the plan could not be kept for other runs: {error}")
    return _told(plan, "measured", logger)


def measure_plan(config: SpeedtronicConfig, workbench: Workbench, *, step: int, target: int, limited: bool) -> Plan:
    """Measure, and return the plan that came of it.

    Args:
        limited: keep to the budget of the run; without, everything is measured.
    """
    machine = cache.machine_of(workbench.device)
    base = Choices.of(config)
    with Bench(
        workbench.model,
        config,
        workbench.device,
        make_loader=workbench.make_loader,
        make_optimizer=workbench.make_optimizer,
        clock=workbench.clock,
    ) as bench:
        search = Search(bench, clock=workbench.clock, steps=target - step, limited=limited)
        measured = search.run(base, possible_choices(config, workbench.model, workbench.device))
    plan = Plan(
        choices=base,
        base=base,
        target=target,
        machine=machine,
        key=cache.key_of(config, workbench.model, machine),
        measured=tuple(measured),
        complete=search.complete,
    )
    return plan.for_steps(target - step, target)


def possible_choices(config: SpeedtronicConfig, model: nn.Module, device: torch.device) -> Possible:
    """What the configuration leaves open: keys with another value than their default were chosen by the user."""
    data, cores = config.data, cache.cores()
    size, target = Choices.of(config).micro_batch_size, data.target_batch_size
    most = _most_samples(config) if device.type == "cpu" else target
    sizes = [n for n in range(1, target + 1) if target % n == 0] if isinstance(data.micro_batch_size, AutoSize) else []
    merges = refuses_merging(model, loss_by_name(config.loss)) is None
    either_precision = config.precision.mode == "auto" and config.precision.dtype is None
    on_cpu = device.type == "cpu"
    plain = not config.compile and config.compile_options.mode is None
    # A compiler takes a module after the other. Two cores need about 20 s for two layers and 45 s for twelve.
    modules = sum(1 for module in model.modules() if module._parameters)
    return Possible(
        larger=tuple(n for n in sizes if size < n <= most),
        smaller=tuple(n for n in reversed(sizes) if n < size),
        merges=merges,
        most_samples=most,
        threads=_halves(cache.DEFAULT_THREADS) if on_cpu and config.run.threads is None else (),
        precisions=("bf16",) if on_cpu and either_precision and bf16_is_faster() else (),
        compile_modes=((None,) if on_cpu else (None, "reduce-overhead")) if plain else (),
        regional=plain and not config.compile_options.regional,
        num_workers=tuple(n for n in (1, 2, 4) if n < cores) if data.num_workers == 0 else (),
        unfused=on_cpu and config.optimizer.fused is None,
        target_batch_size=target,
        compile_seconds=15.0 + 0.3 * modules,
    )


def _most_samples(config: SpeedtronicConfig) -> int:
    """How many samples take a quarter of this machine's memory: a system ends a process that takes more than there is.

    Logits and their gradients, and what the layers of a transformer keep for the backward pass, all in float32.
    """
    model = config.model
    bytes_of_token = 16 * model.vocab_size + 160 * model.n_layer * model.d_model
    return int(cache.memory_bytes() // 4 // (bytes_of_token * (config.data.block_size or 1)))


def _halves(number: int) -> tuple[int, ...]:
    return () if number <= 1 else (number // 2, *_halves(number // 2))


def bf16_is_faster() -> bool:
    """Whether this CPU multiplies bfloat16 faster: without it, a single update could take as long as many others."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(128, 128, dtype=dtype)
        torch.mm(one, one)
        began = time.perf_counter()
        for _ in range(3):
            torch.mm(one, one)
        seconds[dtype] = time.perf_counter() - began
    return seconds[torch.bfloat16] < seconds[torch.float32]


def least_seconds(config: SpeedtronicConfig, workbench: Workbench) -> float:
    """A time that no update of this run is below, by its arithmetic: only a long run is worth a measurement."""
    length = config.data.block_size or 1
    flops = training_flops_per_token(workbench.model, length) * length * config.data.target_batch_size
    rate = CARD_FLOPS if workbench.device.type == "cuda" else CORE_FLOPS * cache.cores()
    return max(UPDATE_SECONDS, flops / rate)


def _still_valid(
    saved: Mapping[str, Any], machine: dict[str, str], key: str, target: int, logger: MetricLogger
) -> Plan | None:
    """The plan of a checkpoint, where it holds here. A run that was too short to measure may be longer now."""
    try:
        plan = Plan.model_validate(saved)
    except ValidationError:
        logger.warning("tune: the plan of the checkpoint is of another version, so it is dropped")
        return None
    if plan.machine != machine:
        other = ", ".join(
            f"{name} {value} -> {machine.get(name)}"
            for name, value in plan.machine.items()
            if machine.get(name) != value
        )
        logger.warning(f"tune: the plan of the checkpoint is dropped, since it was made on another machine: {other}")
        return None
    if plan.key != key:
        logger.warning("tune: the plan of the checkpoint is dropped, since the configuration has changed")
        return None
    return plan if plan.measured or plan.target == target else None


def _told(plan: Plan, source: str, logger: MetricLogger) -> Plan:
    changes = plan.choices.changes(plan.base)
    logger.emit("tune", {"source": source, "choices": changes, "speedup": plan.speedup, "ways": len(plan.measured)})
    if source == "measured":
        logger.info(f"tune: {in_words(changes)}, of {len(plan.measured)} ways that were measured\n{plan.table()}")
    elif source == "too short":
        logger.info("tune: the run is too short to measure for it, and there is no plan in the cache")
    else:
        faster = f", {plan.speedup:.2f} times as fast when it was measured" if plan.speedup else ""
        logger.info(f"tune: {in_words(changes)} ({source}{faster})")
    return plan
