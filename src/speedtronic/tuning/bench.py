"""Measures ways to run: updates by a real `Trainer`, on a copy of the model and batches of a loader of its own."""

from __future__ import annotations

import copy
import gc
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.config import SpeedtronicConfig
from speedtronic.metrics import MetricLogger
from speedtronic.precision import resolve_precision
from speedtronic.trainer import Trainer
from speedtronic.trainer.callbacks import Callback, RunView
from speedtronic.trainer.out_of_memory import is_out_of_memory
from speedtronic.tuning.cache import DEFAULT_THREADS
from speedtronic.tuning.plan import Choices, Measured
from speedtronic.tuning.search import ENOUGH_SECONDS, LEAST, OUT_OF_MEMORY, WARM

MakeLoader = Callable[[SpeedtronicConfig], Any]
MakeOptimizer = Callable[[nn.Module, SpeedtronicConfig, torch.device], torch.optim.Optimizer]


class Bench:
    """Measures ways to run, and leaves the run's model, data, random numbers and threads as they are.

    The learning rate is 0 here, so that a warmup that is left out spoils no weights. Use it as a context manager.

    Args:
        model: the run's; it is copied.
        config: the run's.
        device: where to train.
        make_loader: from a configuration to a loader that the run does not read from, with `restart()`.
        make_optimizer: from model, configuration and device to an optimizer.
        clock: seconds.

    Attributes:
        data_share: share of an update that the last measurement waited for data.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SpeedtronicConfig,
        device: torch.device,
        *,
        make_loader: MakeLoader,
        make_optimizer: MakeOptimizer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.data_share = 0.0
        self._original = model
        self._model: nn.Module | None = None
        self._config = config
        self._device = device
        self._make_loader = make_loader
        self._make_optimizer = make_optimizer
        self._clock = clock
        self._loaders: dict[tuple[Any, ...], Any] = {}
        self._compiled = False

    def __enter__(self) -> Bench:
        self._rng, self._threads = capture_rng_state(), torch.get_num_threads()
        return self

    def __exit__(self, *exception: object) -> None:
        self._model = None
        for loader in self._loaders.values():
            getattr(loader, "close", lambda: None)()
        self._loaders.clear()
        self._forget()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        torch.set_num_threads(self._threads)
        restore_rng_state(self._rng)

    def __call__(self, choices: Choices, *, steps: int, hopeless: float | None) -> Measured:
        """Measure one way; see `search.Measure`. What fails costs this way alone."""
        self.data_share = 0.0
        try:
            with _quiet():
                return self._measure(choices, steps, hopeless)
        except Exception as error:  # noqa: BLE001 - a way may fail as the user's code or a compiler does
            note = OUT_OF_MEMORY if is_out_of_memory(error) else f"{type(error).__name__}: {error}".splitlines()[0]
            return Measured(choices=choices, step_seconds=None, note=note[:100])
        finally:
            self._forget()

    def _measure(self, choices: Choices, steps: int, hopeless: float | None) -> Measured:
        config = choices.applied_to(self._config)
        config.optimizer.lr = config.optimizer.muon_lr = 0.0
        if self._model is None:
            self._model = copy.deepcopy(self._original)
        torch.set_num_threads(choices.threads or DEFAULT_THREADS)
        self._compiled |= choices.compile
        data = _Waiting(self._loader(config), self._clock)
        watch = _Watch(data, self._device, self._clock, steps=steps, hopeless=hopeless)
        logger = _Deaf(every_steps=config.logging.every_steps)
        trainer = Trainer(
            self._model,
            self._make_optimizer(self._model, config, self._device),
            data,
            device=self._device,
            config=config,
            precision=resolve_precision(config.precision, self._device),
            logger=logger,
            callbacks=[watch],
            merged_micro_batches=choices.merged,
        )
        result = trainer.fit(WARM + steps)
        if result.interrupted_by is not None:
            # The measurement is over, and so are its signal handlers: whoever listens to the run hears of it now.
            signal.raise_signal(result.interrupted_by)
        if logger.failure is not None:
            return Measured(choices=choices, step_seconds=None, note=f"did not compile: {logger.failure}"[:100])
        self.data_share = watch.data_share
        note = "left early" if watch.gave_up else ""
        return Measured(choices=choices, step_seconds=watch.step_seconds, start_seconds=watch.start_seconds, note=note)

    def _loader(self, config: SpeedtronicConfig) -> Any:
        key = (config.data.micro_batch_size, config.data.num_workers, config.data.prefetch_factor)
        if key not in self._loaders:
            self._loaders[key] = self._make_loader(config)
        self._loaders[key].restart()
        return self._loaders[key]

    def _forget(self) -> None:
        """Free what a measurement held, and let the next compilation begin anew."""
        if self._model is not None:
            self._model.zero_grad(set_to_none=True)
        gc.collect()
        if self._compiled:
            # Graphs for other batch sizes would make the run's own compilation one for changing shapes.
            torch.compiler.reset()
            self._compiled = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class _Waiting:
    """A loader whose batches are timed."""

    def __init__(self, loader: Iterable[Any], clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._loader = loader
        self._clock = clock

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            began = self._clock()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.seconds += self._clock() - began
            yield batch


class _Watch(Callback):
    """Times the updates, and stops when more of them would say little."""

    def __init__(
        self, data: _Waiting, device: torch.device, clock: Callable[[], float], *, steps: int, hopeless: float | None
    ) -> None:
        self.gave_up = False
        self._data = data
        self._device = device
        self._clock = clock
        self._steps = steps
        self._hopeless = hopeless
        self._times: list[float] = []
        self._waited = 0.0

    def on_train_start(self, run: RunView) -> None:
        self._note()

    def on_step_end(self, run: RunView) -> None:
        self._note()
        if len(self._times) == WARM + 1:
            self._waited = self._data.seconds
        counted = len(self._times) - 1 - WARM
        if counted < LEAST:
            return
        enough = self._times[-1] - self._times[WARM] >= ENOUGH_SECONDS
        self.gave_up = self._hopeless is not None and min(self._durations) > self._hopeless
        if counted >= self._steps or enough or self.gave_up:
            run.stop()

    def _note(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times.append(self._clock())

    @property
    def _durations(self) -> list[float]:
        after_warm = self._times[WARM:]
        return [end - begin for begin, end in zip(after_warm, after_warm[1:], strict=False)]

    @property
    def step_seconds(self) -> float:
        return statistics.median(self._durations)

    @property
    def start_seconds(self) -> float:
        return max(0.0, self._times[WARM] - self._times[0] - WARM * self.step_seconds)

    @property
    def data_share(self) -> float:
        whole = self._times[-1] - self._times[WARM]
        return (self._data.seconds - self._waited) / whole if whole > 0 else 0.0


class _Deaf(MetricLogger):
    """A logger that shows nothing, and keeps why compiling failed."""

    def __init__(self, every_steps: int) -> None:
        super().__init__(every_steps=every_steps)
        self.failure: str | None = None

    def emit(self, event: str, payload: Mapping[str, Any] | None = None) -> None:
        if event == "compile" and payload is not None and "error" in payload:
            self.failure = str(payload["error"]).splitlines()[0]

    def warning(self, message: str) -> None: ...

    def info(self, message: str) -> None: ...


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
