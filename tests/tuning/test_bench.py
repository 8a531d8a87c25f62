"""A measurement takes real updates on a copy, and leaves the run as it was."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.trainer import Trainer
from speedtronic.tuning.bench import Bench
from speedtronic.tuning.plan import Choices
from speedtronic.tuning.search import LEAST, WARM
from tests.support.models import Regression, regression_batches

pytestmark = pytest.mark.slow

CONFIG = SpeedtronicConfig(data={"micro_batch_size": 4, "target_batch_size": 8}, precision={"mode": "fp32"})
BASE = Choices.of(CONFIG)


class Clock:
    """Seconds that pass only where something says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Batches:
    """A loader that starts over; reading a batch takes `seconds`."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self.restarts = 0
        self._clock = clock
        self._seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        for batch in regression_batches():
            self._clock.now += self._seconds
            yield batch

    def restart(self) -> None:
        self.restarts += 1


class Timed(Regression):
    """A forward pass takes the seconds of its turn; the last ones go on."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = list(seconds)

    def __deepcopy__(self, memo: object) -> Timed:
        copy = Timed(self.clock, *self.seconds)
        copy.load_state_dict(self.state_dict())
        return copy

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return super().forward(x, y)


def sgd(model: nn.Module, config: SpeedtronicConfig, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.optimizer.lr)


def bench_of(model: nn.Module, clock: Clock, loader: Any = None, **options: Any) -> Bench:
    loader = loader or Batches(clock)
    options = {"make_loader": lambda config: loader, "make_optimizer": sgd} | options
    return Bench(model, CONFIG, torch.device("cpu"), clock=clock, **options)


def test_a_measurement_is_the_median_of_the_updates_after_the_warm_ones() -> None:
    clock = Clock()
    # Two micro batches an update: 10 s and 5 s to warm up, then 2, 4, 2 s.
    seconds = [5.0, 5.0, 2.5, 2.5, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]
    with bench_of(Timed(clock, *seconds), clock) as bench:
        row = bench(BASE, steps=LEAST, hopeless=None)
    assert (row.step_seconds, row.start_seconds, row.note) == (2.0, 15.0 - WARM * 2.0, "")


def test_a_hopeless_way_is_left_after_a_few_updates_and_a_long_one_when_enough_is_known() -> None:
    for seconds, hopeless, note in ((5.0, 1.0, "left early"), (5.0, None, "")):
        clock = Clock()
        with bench_of(Timed(clock, seconds), clock) as bench:
            row = bench(BASE, steps=50, hopeless=hopeless)
        assert (row.note, clock.now) == (note, (WARM + LEAST) * 2 * seconds)


def test_the_share_of_an_update_that_waits_for_data_is_measured() -> None:
    clock = Clock()
    with bench_of(Timed(clock, 3.0), clock, Batches(clock, 1.0)) as bench:
        bench(BASE, steps=8, hopeless=None)
        assert bench.data_share == pytest.approx(0.25)


def test_nothing_of_the_run_is_changed() -> None:
    clock = Clock()
    torch.manual_seed(3)
    model = Regression().eval()
    before, threads = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_num_threads()
    state, expected = random.getstate(), torch.get_rng_state()

    def noisy(config: SpeedtronicConfig) -> Batches:
        torch.rand(7), random.random()
        return Batches(clock)

    with bench_of(model, clock, make_loader=noisy) as bench:
        bench(BASE.but(threads=2), steps=4, hopeless=None)
        bench(BASE, steps=4, hopeless=None)
    assert (random.getstate(), torch.get_num_threads()) == (state, threads)
    assert torch.equal(torch.get_rng_state(), expected)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_weights_of_the_copy_stay_too() -> None:
    clock, seen = Clock(), []
    with bench_of(Regression(), clock, make_optimizer=lambda *parts: seen.append(parts[0]) or sgd(*parts)) as bench:
        bench(BASE, steps=4, hopeless=None)
        first = seen[0].linear.weight.clone()
        bench(BASE, steps=4, hopeless=None)
    assert torch.equal(seen[1].linear.weight, first)


def test_a_loader_is_made_once_for_each_way_to_read_and_starts_over() -> None:
    clock, made = Clock(), []

    def make(config: SpeedtronicConfig) -> Batches:
        made.append((config.data.num_workers, Batches(clock)))
        return made[-1][1]

    with bench_of(Regression(), clock, make_loader=make) as bench:
        for choices in (BASE, BASE.but(threads=1), BASE.but(num_workers=1)):
            bench(choices, steps=3, hopeless=None)
    assert [(workers, loader.restarts) for workers, loader in made] == [(0, 2), (1, 1)]


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (ValueError("no such shape\nand more"), "ValueError: no such shape"),
    ],
)
def test_what_fails_costs_that_way_alone(error: Exception, note: str) -> None:
    clock = Clock()
    with bench_of(Regression(), clock) as bench:
        with mock.patch.object(Regression, "forward", side_effect=error):
            failed = bench(BASE, steps=3, hopeless=None)
        assert bench(BASE, steps=3, hopeless=None).step_seconds is not None
    assert (failed.step_seconds, failed.note) == (None, note)


def test_a_way_that_does_not_compile_is_not_measured_as_if_it_had() -> None:
    clock = Clock()
    with (
        mock.patch("torch.compile", side_effect=RuntimeError("no compiler\nhere")),
        mock.patch("torch.compiler.reset") as reset,
        bench_of(Regression(), clock) as bench,
    ):
        row = bench(BASE.but(compile=True), steps=3, hopeless=None)
    assert (row.step_seconds, row.note) == (None, "did not compile: RuntimeError: no compiler")
    assert reset.call_count == 1


def test_a_signal_while_measuring_ends_what_measures() -> None:
    clock, fit = Clock(), Trainer.fit

    def interrupted(trainer: Trainer, steps: int) -> Any:
        result = fit(trainer, steps)
        result.interrupted_by = signal.SIGINT
        return result

    with (
        mock.patch.object(Trainer, "fit", interrupted),
        pytest.raises(KeyboardInterrupt),
        bench_of(Regression(), clock) as bench,
    ):
        bench(BASE, steps=3, hopeless=None)
