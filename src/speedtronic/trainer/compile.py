"""`torch.compile` around a model, and training without it after it fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import capture_rng_state, capture_torch_rng_state, restore_rng_state
from speedtronic.config import SpeedtronicConfig
from speedtronic.metrics import MetricLogger


class CompiledModel:
    """A compiled module that leaves batches smaller than the first one to the eager module.

    A short last batch would otherwise be compiled for on its own, which costs more than it saves.

    Args:
        model: the module to compile; its parameters and their names stay its own.
        mode: the mode of `torch.compile`.
        dynamic: true compiles for any shape, and then every batch runs compiled.
    """

    def __init__(self, model: nn.Module, *, mode: str | None, dynamic: bool | None) -> None:
        self._eager = model
        options: dict[str, Any] = {"mode": mode, "dynamic": dynamic}
        self._compiled: Callable[..., Any] = torch.compile(
            model, **{name: option for name, option in options.items() if option is not None}
        )
        self._any_shape = dynamic is True
        self._batch_size: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim)
        size = next((tensor.shape[0] for tensor in tensors), 0)
        if self._batch_size is None:
            self._batch_size = size
        short = size < self._batch_size and not self._any_shape
        return self._eager(*args, **kwargs) if short else self._compiled(*args, **kwargs)


class Compilation:
    """Compiles a model, and logs it when that fails.

    Args:
        model: the module to compile.
        config: its `compile` and `compile_options`.
        logger: receives `compile` events, and a warning with the traceback of a failure.

    Attributes:
        model: the compiled model; None where nothing is compiled, or not any more.
        states: the random states before an update, should its compiled code fail.
    """

    def __init__(self, model: nn.Module, config: SpeedtronicConfig, logger: MetricLogger) -> None:
        self.model: CompiledModel | None = None
        self.states = RandomStates()
        self._logger = logger
        if not config.compile:
            return
        options = config.compile_options
        try:
            self.model = CompiledModel(model, mode=options.mode, dynamic=options.dynamic)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the eager model can train
            self.abandon("construction_failed", error)
        else:
            logger.emit("compile", {"status": "enabled"})

    def abandon(self, status: str, error: Exception) -> None:
        """Train without compilation from now on."""
        self.model = None
        self._logger.emit("compile", {"status": status, "error": f"{type(error).__name__}: {error}"})
        trace = "".join(traceback.format_exception(error))
        self._logger.warning(f"compilation failed; training continues without it:\n{trace}")


# So many updates that leave the generators of Python and NumPy alone show that the model does not draw from them.
_ENOUGH_UPDATES = 3


class RandomStates:
    """The states of the random number generators before an update, to which a failed one returns.

    torch's state is read before each update. Python's and NumPy's take ten times as long to read. So they are left out
    after a few updates that did not move them.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._unmoved = 0

    def keep(self) -> None:
        """Read the states: an update follows."""
        self._state = capture_rng_state() if self._unmoved < _ENOUGH_UPDATES else capture_torch_rng_state()

    def note_success(self) -> None:
        """The update that followed has succeeded."""
        if "numpy" in self._state:
            now, before = capture_rng_state(), self._state
            numpy_moved = not all(map(np.array_equal, now["numpy"], before["numpy"]))
            moved = numpy_moved or now["python"] != before["python"]
            self._unmoved = 0 if moved else self._unmoved + 1

    def restore(self) -> None:
        """Go back to the states that were kept."""
        restore_rng_state(self._state)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that memory ran out on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
