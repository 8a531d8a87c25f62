"""Where memory runs out, the error says what this run could do about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.trainer.out_of_memory import advice_if_out_of_memory, is_out_of_memory
from tests.support.cases import case
from tests.support.models import Regression, config_of, make_trainer

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def note(error: Exception, config: SpeedtronicConfig, device: torch.device = CUDA) -> str:
    with pytest.raises(type(error)) as caught, advice_if_out_of_memory(config, device):
        raise error
    assert caught.value is error
    return "".join(getattr(error, "__notes__", []))


def test_the_remedies_are_those_that_are_left_to_this_run() -> None:
    for data, options, device, has in (
        ({"micro_batch_size": 4}, {}, CUDA, ("micro_batch_size (4)", "gradient_checkpointing", "expandable_segments")),
        ({"micro_batch_size": 1}, {}, CUDA, ("gradient_checkpointing", "expandable_segments")),
        ({"micro_batch_size": 4}, {"gradient_checkpointing": True}, CPU, ("micro_batch_size (4)",)),
    ):
        with case(data, options, device):
            config = config_of(data={"target_batch_size": 8, **data}, **options)
            said = note(torch.OutOfMemoryError("CUDA out of memory"), config, device)
            known = ("micro_batch_size (4)", "gradient_checkpointing", "expandable_segments")
            assert tuple(remedy for remedy in known if remedy in said) == has
            assert f"memory ran out on {device}" in said


def test_a_loader_of_ones_own_gives_smaller_batches() -> None:
    assert "the data loader" in note(torch.OutOfMemoryError("CUDA out of memory"), config_of())


def test_other_errors_get_no_advice() -> None:
    assert note(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), config_of()) == ""


def test_an_error_that_was_raised_from_one_of_memory_is_one_too() -> None:
    error = RuntimeError("the loss failed")
    error.__cause__ = MemoryError()
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("the loss failed"))


def test_a_run_that_needs_too_much_ends_with_the_advice() -> None:
    class Large(Regression):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    model: nn.Module = Large()
    with pytest.raises(torch.OutOfMemoryError, match="20.00 GiB") as caught:
        make_trainer(model, config=config_of(data={"micro_batch_size": 4, "target_batch_size": 8})).fit(1)
    assert "lower data.micro_batch_size (4)" in caught.value.__notes__[0]
