from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from speedtronic.checkpoint import staging as image_module
from speedtronic.checkpoint.staging import StagingBuffer
from speedtronic.durable.tensor_file import DTYPE_NAMES, tensor_chunks
from speedtronic.errors import CheckpointError


def filled(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> StagingBuffer:
    buffer = StagingBuffer()
    buffer.fill(tensors, metadata or {})
    return buffer


def data_of(buffer: StagingBuffer) -> bytes:
    return b"".join(bytes(chunk) for chunk in buffer.chunks())


def memory_of(buffer: StagingBuffer) -> list[int]:
    return [block.data_ptr() for block in buffer._blocks]


TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
    "double": torch.ones(2, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "step": torch.tensor(7.0),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor([True, False]),
}


@pytest.mark.parametrize("block", [1, 16, 2**28])
def test_a_filled_buffer_is_the_file_of_its_tensors(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(image_module, "_BLOCK", block)
    expected = b"".join(bytes(chunk) for chunk in tensor_chunks(TENSORS, {"format": "pt"}))
    assert data_of(filled(TENSORS, {"format": "pt"})) == expected


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
def test_every_dtype_can_be_copied(dtype: torch.dtype) -> None:
    tensor = torch.arange(5, dtype=torch.float32).to(dtype)
    back = safetensors.torch.load(data_of(filled({"x": tensor, "odd": torch.ones(3, dtype=torch.uint8)})))["x"]
    assert back.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_no_tensors_make_an_empty_file_of_the_format() -> None:
    assert safetensors.torch.load(data_of(filled({}))) == {}


def test_tensors_of_the_same_form_use_the_same_memory() -> None:
    buffer = filled({"a": torch.zeros(4), "b": torch.zeros(2, 2)})
    memory = memory_of(buffer)
    buffer.fill({"a": torch.ones(4), "b": torch.full((2, 2), 2.0)}, {})
    assert memory_of(buffer) == memory
    back = safetensors.torch.load(data_of(buffer))
    assert (back["a"].sum(), back["b"].sum()) == (4, 8)


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.ones(5)},
        {"a": torch.ones(2, 2)},
        {"a": torch.ones(4, dtype=torch.int32)},
        {"c": torch.ones(4)},
        {"a": torch.ones(4), "b": torch.ones(1)},
        {},
    ],
)
def test_tensors_of_another_form_are_arranged_again(other: dict[str, Tensor]) -> None:
    buffer = filled({"a": torch.zeros(4)}, {"x": "1"})
    data_of(buffer)
    buffer.fill(other, {"x": "1"})
    assert data_of(buffer) == data_of(filled(other, {"x": "1"}))


def test_other_metadata_are_in_the_next_file() -> None:
    buffer = filled({"a": torch.zeros(4)}, {"x": "1"})
    data_of(buffer)
    buffer.fill({"a": torch.zeros(4)}, {"x": "2"})
    assert data_of(buffer) == data_of(filled({"a": torch.zeros(4)}, {"x": "2"}))


def test_released_memory_is_taken_again() -> None:
    buffer = filled({"a": torch.zeros(4)})
    before = data_of(buffer)
    buffer.release()
    assert memory_of(buffer) == []
    buffer.fill({"a": torch.zeros(4)}, {})
    assert data_of(buffer) == before


def test_pinned_memory_goes_back_to_the_system_once_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would keep it locked, as large as the state, until the process ends."""
    left: list[list[int]] = []
    # torch 2.9 has none.
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: left.append(memory_of(buffer)), raising=False)
    buffer = filled({"a": torch.zeros(4)})
    buffer.release()
    assert left == [], "what is not pinned is no memory of that allocator"
    buffer = filled({"a": torch.zeros(4)})
    buffer._pinned = True  # as it is where a tensor is on a card
    buffer.release()
    buffer.release()
    assert left == [[]], "once, and after the blocks were freed"


def test_no_memory_for_the_copies_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def allocate(*shape: Any, **options: Any) -> Tensor:
        if options.get("dtype") == torch.uint8:
            raise RuntimeError("can't allocate memory")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    buffer = StagingBuffer()
    with pytest.raises(CheckpointError, match=r"no memory.*16 bytes.*checkpoint\.background: false"):
        buffer.fill({"a": torch.zeros(4)}, {})
    monkeypatch.undo()
    buffer.fill({"a": torch.zeros(4)}, {})
    assert data_of(buffer) == data_of(filled({"a": torch.zeros(4)}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_are_copied_into_pinned_memory_by_the_time_fill_returns() -> None:
    source = torch.full((1 << 24,), 1.0, device="cuda")
    buffer = StagingBuffer()
    for value in (2.0, 3.0):
        source.fill_(value)
        buffer.fill({"x": source, "cpu": torch.ones(3)}, {})
        assert all(block.is_pinned() for block in buffer._blocks)
        source.fill_(9.0)
        back = safetensors.torch.load(data_of(buffer))
        assert back["x"].unique().tolist() == [value]
        assert back["cpu"].sum() == 3
