"""Batches move to the device, are counted, and become a loss."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.precision import PrecisionPlan, resolve_precision
from speedtronic.trainer.forward import Forward, batch_size_and_tokens, move_batch

CPU = torch.device("cpu")


def plan() -> PrecisionPlan:
    return resolve_precision("fp32", CPU)


def forward_of(model: nn.Module, **options: Any) -> Forward:
    return Forward(model, plan(), warn=options.pop("warn", pytest.fail), **options)


def test_nested_tensors_move_and_other_values_stay() -> None:
    """Seed: "_move_batch() recursively transfers tensors in dictionaries, tuples, and lists"."""
    pair = namedtuple("pair", "a b")
    tensor = torch.ones(2)
    moved = move_batch({"x": [tensor, (tensor, "s")], "p": pair(tensor, 3), "n": None}, torch.device("meta"))
    assert moved["x"][0].device.type == moved["x"][1][0].device.type == moved["p"].a.device.type == "meta"
    assert isinstance(moved["p"], pair)
    assert (moved["x"][1][1], moved["p"].b, moved["n"]) == ("s", 3, None)


def test_tensors_move_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "to the selected device with non_blocking=True"."""
    seen: list[dict[str, Any]] = []

    class Recorder(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(kwargs)
            return self

    move_batch((torch.ones(1).as_subclass(Recorder), torch.ones(1).as_subclass(Recorder)), CPU)
    assert seen == [{"non_blocking": True}] * 2


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": torch.zeros(2, 5), "inputs": torch.zeros(9, 9)}, (2, 10)),
        ({"inputs": torch.zeros(3, 4)}, (3, 12)),
        ((torch.zeros(4, 2), torch.zeros(4)), (4, 8)),
        ([torch.zeros(6), 1], (6, 6)),
        ({"input_ids": None, "inputs": torch.zeros(3, 4)}, (3, 12)),
        ({"input_ids": torch.zeros(2, 3), "attention_mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]])}, (2, 3)),
        ({"input_ids": torch.zeros(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, (2, 3)),
        ({"input_ids": torch.zeros(4), "attention_mask": torch.zeros(4)}, (4, 4)),
        ({"pixels": torch.zeros(2, 3)}, (1, 1)),
        ((), (1, 1)),
        ("text", (1, 1)),
        ((torch.tensor(3.0), 1), (1, 1)),
    ],
)
def test_samples_and_tokens_are_counted(batch: Any, expected: tuple[int, int]) -> None:
    """Seed: "_batch_size_and_tokens() chooses: dictionary input_ids, then inputs; or the first tuple/list field. For a
    multi-dimensional dictionary input with attention_mask, tokens equal the mask sum. Unsupported values report one
    sample and one token."
    """
    samples, tokens = batch_size_and_tokens(batch)
    assert (samples, int(tokens)) == expected


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def _note(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return torch.tensor(1.0)


class TakesTwo(Recording):
    def forward(self, x: Any, y: Any) -> Tensor:
        return self._note(x, y)


class TakesOne(Recording):
    def forward(self, x: Any, y: Any = None) -> Tensor:
        return self._note(x) if y is None else self._note(x, y)


class TakesShiftLabels(Recording):
    def forward(self, input_ids: Any, labels: Any = None, shift_labels: Any = None) -> Tensor:
        return self._note(input_ids=input_ids, labels=labels, shift_labels=shift_labels)


def test_a_mapping_calls_the_model_with_keywords() -> None:
    model = TakesTwo()
    forward_of(model)(model, {"x": 1, "y": 2})
    assert model.calls == [((1, 2), {})]


def test_a_tuple_calls_the_model_with_its_first_two_fields() -> None:
    model = TakesOne()
    forward_of(model)(model, (1, 2, 3))
    forward_of(model)(model, [4, 5])
    assert model.calls == [((1, 2), {}), ((4, 5), {})]


@pytest.mark.parametrize("batch", [torch.ones(2), (torch.ones(2),), "text", 3])
def test_any_other_batch_is_a_type_error(batch: Any) -> None:
    model = TakesTwo()
    with pytest.raises(TypeError, match="collate"):
        forward_of(model)(model, batch)


def test_with_loss_fn_a_model_gets_only_what_it_asks_for() -> None:
    one, two = TakesOne(), TakesTwo()

    def loss_fn(output: Any, batch: Any) -> Tensor:
        return torch.tensor(0.0)

    forward_of(one, loss_fn=loss_fn)(one, (1, 2))
    forward_of(one, loss_fn=loss_fn)(one, {"x": 1, "label": 2})
    forward_of(two, loss_fn=loss_fn)(two, (1, 2))
    assert one.calls == [((1,), {}), ((1,), {})]
    assert two.calls == [((1, 2), {})]


def test_a_model_that_names_shift_labels_is_given_the_aligned_labels() -> None:
    model, labels = TakesShiftLabels(), torch.tensor([[1, 2]])
    forward_of(model)(model, {"input_ids": 1, "labels": labels})
    given = model.calls[0][1]
    assert given["labels"] is labels
    assert torch.equal(given["shift_labels"], labels)


def test_a_model_that_hands_keywords_to_its_loss_function_is_given_them_too() -> None:
    class HandsOn(Recording):
        loss_function = staticmethod(lambda logits, labels, **keywords: None)

        def forward(self, input_ids: Any, labels: Any = None, **keywords: Any) -> Tensor:
            return self._note(**keywords)

    class TakesAnything(Recording):
        def forward(self, **keywords: Any) -> Tensor:
            return self._note(**keywords)

    batch = {"input_ids": 1, "labels": torch.tensor([[1, 2]]).T}
    model, other = HandsOn(), TakesAnything()
    forward_of(model)(model, batch)
    forward_of(other)(other, batch)
    assert model.calls[0][1].keys() == {"shift_labels"}
    assert model.calls[0][1]["shift_labels"].is_contiguous()
    assert other.calls[0][1].keys() == {"input_ids", "labels"}


def test_a_bare_tensor_of_logit_shape_is_warned_about_once() -> None:
    class Logits(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return torch.zeros(2, 4, 7)

    warnings: list[str] = []
    model = Logits()
    forward = forward_of(model, warn=warnings.append)
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, 4, dtype=torch.long)}
    forward(model, batch)
    forward(model, batch)
    assert len(warnings) == 1
    assert "(2, 4, 7)" in warnings[0]


def test_a_scripted_module_is_called_like_any_other() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Bilinear(2, 2, 1))
    loss = forward_of(model)(model, (torch.ones(1, 2), torch.ones(1, 2)))
    assert loss.ndim == 0
