"""`torch.compile` around a model, and training without it after it fails."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedtronic.checkpoint.rng import capture_rng_state, capture_torch_rng_state, restore_rng_state
from speedtronic.config import SpeedtronicConfig
from speedtronic.data.prepare.text_cache import cache_folder
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.model.wrappers import unwrapped
from speedtronic.trainer.loss import LossFunction

# The modes of torch.compile that use CUDA graphs (torch.compile's documentation).
_RECORDS_GRAPHS = ("reduce-overhead", "max-autotune")


class CompiledModel:
    """A compiled module that leaves batches smaller than the first one to the eager module.

    A short last batch would otherwise be compiled for on its own, which costs more than it saves.

    Args:
        model: the module to compile; its parameters and their names stay its own.
        mode: the mode of `torch.compile`.
        dynamic: true compiles for any shape, and then every batch runs compiled.
        blocks: the modules to compile in place of the whole model. They are compiled code only while this is called, so
            an evaluation, which calls the model itself, compiles nothing.
        loss_alone: the whole model's compiled code returns the loss that it has in a mapping, and nothing beside it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mode: str | None,
        dynamic: bool | None,
        blocks: Sequence[nn.Module] = (),
        loss_alone: bool = False,
    ) -> None:
        self._eager = model
        options: dict[str, Any] = {"mode": mode, "dynamic": dynamic}
        options = {name: option for name, option in options.items() if option is not None}
        # All blocks run the same code, so the first one's compiled code serves them all.
        self._blocks = [(block, torch.compile(block.forward, **options)) for block in blocks]
        whole = _loss_alone(model) if loss_alone else model
        self._compiled: Callable[..., Any] = self._by_blocks if blocks else torch.compile(whole, **options)
        self._any_shape = dynamic is True
        self._batch_size: int | None = None
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim)
        size = next((tensor.shape[0] for tensor in tensors), 0)
        if self._batch_size is None:
            self._batch_size = size
        if size < self._batch_size and not self._any_shape:
            return self._eager(*args, **kwargs)
        if not self._blocks or self._called:
            return self._compiled(*args, **kwargs)
        with warnings.catch_warnings():
            # The compiler itself looks at the gradient of what comes into a block.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
            output = self._compiled(*args, **kwargs)
        self._called = True
        return output

    def _by_blocks(self, *args: Any, **kwargs: Any) -> Any:
        for block, compiled in self._blocks:
            block.__dict__["forward"] = compiled
        try:
            return self._eager(*args, **kwargs)
        finally:
            for block, _ in self._blocks:
                block.__dict__.pop("forward", None)


def _loss_alone(model: nn.Module) -> Callable[..., Any]:
    """Calls a model, and drops what a mapping that it returns has beside a `loss`.

    Compiled code gives every differentiable output a gradient. For logits that nothing reads that would be a tensor of
    zeros of their size, the largest one of a language model (1.6 GB for 16 x 1,024 x 50,304 in bf16).
    """

    def loss_alone(*args: Any, **kwargs: Any) -> Any:
        output = model(*args, **kwargs)
        if isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
            return {"loss": output["loss"]}
        return output

    # torch counts by the code object how often it has compiled something, and every model has its own count.
    loss_alone.__code__ = loss_alone.__code__.replace()
    return loss_alone


def repeated_blocks(model: nn.Module, key: str = "compile_options.regional") -> list[nn.Module]:
    """The blocks that a model repeats: those in `model.blocks`, else the largest list of modules of one class.

    Args:
        key: of the configuration, which asks for them.

    Raises:
        ConfigError: the model has no such list.
    """
    own = getattr(model, "blocks", None)
    parts = [own] if isinstance(own, nn.ModuleList) else list(model.modules())
    lists = [list(part) for part in parts if isinstance(part, (nn.ModuleList, nn.Sequential))]
    found = [part for part in lists if len(part) > 1 and len({type(block) for block in part}) == 1]
    # A list of plain layers, such as embeddings or linear layers, is no list of blocks.
    found = [blocks for blocks in found if any(blocks[0].children()) and "forward" not in vars(blocks[0])]
    if not found:
        raise ConfigError(
            f"{key} is about the blocks that a model repeats, and {type(model).__name__} has no list of several "
            "modules of one class: keep them in a ModuleList named `blocks`, or leave it out"
        )
    return max(found, key=lambda blocks: sum(p.numel() for block in blocks for p in block.parameters()))


def keep_compiled_code() -> str | None:
    """Let the compiler keep its code where a restart of the machine leaves it; torch's own place is a temporary folder.

    Returns:
        The folder: `$TORCHINDUCTOR_CACHE_DIR` where that is set, else `torch-compile` in the cache of Speedtronic. None
        if that cannot be written, which leaves torch's own place.
    """
    try:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            folder = cache_folder() / "torch-compile"
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    except OSError:
        return None
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


class Compilation:
    """Compiles a model, and logs it when that fails.

    Args:
        model: the module to compile.
        config: its `compile` and `compile_options`.
        logger: receives `compile` events, and a warning with the traceback of a failure.
        device: where the model trains.
        passes: how many backward passes an update has.
        loss_fn: what reads the model's output; None where only its own loss is read, if it has one.

    Attributes:
        model: the compiled model; None where nothing is compiled, or not any more.
        states: the random states before an update, should its compiled code fail.

    Raises:
        ConfigError: `compile_options.regional` is on, and the model has no blocks; or its mode records CUDA graphs, and
            an update has several backward passes.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SpeedtronicConfig,
        logger: MetricLogger,
        device: torch.device,
        passes: int,
        loss_fn: LossFunction | None,
    ) -> None:
        self.model: CompiledModel | None = None
        self.states = RandomStates()
        self._logger = logger
        if not config.compile:
            return
        options = config.compile_options
        if device.type == "cuda" and options.mode in _RECORDS_GRAPHS and passes > 1:
            # The first backward pass leaves gradients in the graph's own memory, and the second one overwrites them
            # there, which torch notices and refuses: https://github.com/pytorch/pytorch/issues/169545
            raise ConfigError(
                f"compile_options.mode: {options.mode} records CUDA graphs, which cannot add up gradients, and an "
                f"update here has {passes} backward passes; use max-autotune-no-cudagraphs, or as many samples in "
                f"data.micro_batch_size as in data.target_batch_size ({config.data.target_batch_size})"
            )
        blocks = repeated_blocks(unwrapped(model)) if options.regional else []
        try:
            cache = keep_compiled_code()
            if cache is None:
                logger.warning(
                    "compiled code is kept in a temporary folder, since the cache of Speedtronic cannot be written: "
                    "set SPEEDTRONIC_CACHE to a folder that can"
                )
            self.model = CompiledModel(
                model, mode=options.mode, dynamic=options.dynamic, blocks=blocks, loss_alone=loss_fn is None
            )
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises, the eager model can train
            self.abandon("construction_failed", error)
        else:
            logger.emit("compile", {"status": "enabled", "cache": cache})

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
