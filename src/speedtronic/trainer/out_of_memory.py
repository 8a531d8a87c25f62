"""What to do where memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from speedtronic.config import SpeedtronicConfig


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that memory ran out on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


@contextmanager
def advice_if_out_of_memory(config: SpeedtronicConfig, device: torch.device) -> Iterator[None]:
    """Adds to an error of the block that says that memory ran out what this run could do to need less of it."""
    try:
        yield
    except Exception as error:  # a user's model and data run in the block; the error is raised on, with a note
        if is_out_of_memory(error):
            error.add_note(f"memory ran out on {device}: {'; or '.join(_remedies(config, device))}")
        raise


def _remedies(config: SpeedtronicConfig, device: torch.device) -> Iterator[str]:
    size = config.data.micro_batch_size
    if "micro_batch_size" not in config.data.model_fields_set:
        yield "let the data loader give smaller batches, and as many more of them an update"
    elif size > 1:
        yield (
            f"lower data.micro_batch_size ({size}), and leave data.target_batch_size "
            f"({config.data.target_batch_size}) as it is: an update is then the same, in more and smaller parts"
        )
    if not config.gradient_checkpointing:
        yield "set gradient_checkpointing: true, which keeps less of the forward pass and computes it twice"
    if device.type == "cuda":
        yield (
            "start with PYTORCH_ALLOC_CONF=expandable_segments:True, if much is reserved and not in tensors "
            "(peak_reserved_bytes beside peak_memory_bytes): then memory is in pieces"
        )
