"""Batches move to the device, are counted, and become a loss."""

from __future__ import annotations

import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.errors import ConfigError, ModelError
from speedtronic.precision import PrecisionPlan, resolve_precision
from speedtronic.trainer.forward import Forward, Once, batch_size_and_tokens, move_batch

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


def test_a_copy_to_mps_waits_since_it_may_read_memory_that_was_freed() -> None:
    seen: list[tuple[Any, ...]] = []

    class Recorder(Tensor):
        def to(self, *args: Any, **kwargs: Any) -> Tensor:
            seen.append((*args, kwargs))
            return self

    move_batch({"x": torch.ones(1).as_subclass(Recorder)}, torch.device("mps"))
    assert seen == [(torch.device("mps"), {"non_blocking": False})]


IDS = torch.zeros(2, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"input_ids": IDS, "inputs": torch.zeros(9, 9)}, (2, 10)),
        ({"inputs": IDS}, (2, 10)),
        ((IDS, torch.zeros(2)), (2, 10)),
        ([IDS[0], 1], (5, 5)),
        ({"x": torch.zeros(4, 3).numpy(), "y": torch.zeros(4).numpy()}, (4, 0)),
        ({"input_ids": IDS.numpy(), "attention_mask": torch.eye(2, 5).int().numpy()}, (2, 2)),
        ((IDS.numpy(), IDS.numpy()), (2, 10)),
        ({"input_ids": None, "inputs": IDS.int()}, (2, 10)),
        ({"input_ids": torch.zeros(2, 3), "attention_mask": torch.tensor([[1.0, 1, 0], [1, 0, 0]])}, (2, 3)),
        ({"input_ids": IDS[:, :3], "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, (2, 3)),
        ({"inputs": torch.zeros(2, 3, 8), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, (2, 3)),
        ({"input_ids": torch.zeros(4), "attention_mask": torch.zeros(4)}, (4, 4)),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5).tril()}, (2, 10)),
        ({"input_ids": IDS, "attention_mask": torch.full((5, 5), -torch.inf).triu(1)}, (2, 10)),
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


X, Y = torch.zeros(6, 3), torch.zeros(6, dtype=torch.long)
IMAGES = torch.zeros(6, 3, 8, 8)
Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "batch",
    [
        {"x": X, "y": Y},
        {"pixel_values": IMAGES, "labels": Y},
        {"image": IMAGES.to(torch.uint8), "label": Y},
        {"inputs_embeds": torch.zeros(6, 4, 8), "labels": torch.zeros(6, 4, dtype=torch.long)},
        {"features": {"a": X, "b": [X, X]}, "y": Y},
        {"inputs": X, "labels": Y},
        {"inputs": {"a": X}, "y": Y},
        {"x": X, "names": ["a"] * 6, "scale": torch.tensor(2.0), "none": None},
        (IMAGES, Y),
        (IMAGES.to(torch.uint8), Y),
        (IMAGES.long(), Y),
        [IMAGES[:, 0].int(), Y],
        {"inputs": IMAGES.short(), "labels": Y},
        (X > 0, Y),
        ((X, X), Y),
        Pair({"a": X}, Y),
        ([X, (X, X)],),
        X,
        ([torch.zeros(3, n, n) for n in range(1, 7)], [{"boxes": torch.zeros(n, 4)} for n in range(6)]),
        {"pixel_values": IMAGES, "labels": [{"boxes": torch.zeros(n, 4)} for n in range(6)]},
        (nn.utils.rnn.pack_sequence([torch.zeros(n, 3) for n in (5, 4, 4, 2, 1, 1)]), Y),
    ],
)
def test_a_batch_without_tokens_counts_the_first_dimension_that_its_tensors_share(batch: Any) -> None:
    assert batch_size_and_tokens(batch, lambda kind, message: pytest.fail(message)) == (6, 0)


def test_tensors_that_share_no_first_dimension_are_counted_by_the_first_with_one_warning() -> None:
    said: list[str] = []
    once = Once(said.append)
    for _ in range(2):
        assert batch_size_and_tokens({"x": X, "edges": torch.zeros(2, 9)}, once) == (6, 0)
    assert len(said) == 1
    assert "first tensor: 6" in said[0]


def test_a_packed_sequence_moves_but_for_what_must_stay_on_the_cpu() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    moved = move_batch({"x": packed}, torch.device("meta"))["x"]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


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


class Scores(nn.Module):
    """Takes images and returns scores of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = self.linear(pixels)
        return scores


def made(kind: str, model: nn.Module, *example: Tensor) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.")
        if kind == "script":
            return torch.jit.script(model)
        if kind == "trace":
            return torch.jit.trace(model, example)
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    return nn.DataParallel(model) if kind == "data-parallel" else model


KINDS = ["plain", "script", "trace", "compiled", "data-parallel"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_torch_made_of_another_gets_what_the_other_asks_for(kind: str) -> None:
    pixels, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    plain = Scores()
    model = made(kind, plain, pixels)
    forward = forward_of(model, loss_fn=lambda output, batch: nn.functional.cross_entropy(output, batch["label"]))
    loss = forward(model, {"pixels": pixels, "label": labels, "name": ["a"] * 5}).value
    torch.testing.assert_close(loss, nn.functional.cross_entropy(plain(pixels), labels))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_forward_does_not_take_are_named_with_the_remedy(kind: str) -> None:
    model = made(kind, Scores(), torch.zeros(2, 4))
    batch = {"pixels": torch.zeros(2, 4), "idx": torch.zeros(2), "text": ["a", "b"]}
    with pytest.raises(ModelError, match=r"Scores\.forward\(.*idx, text: leave them out.*loss_fn"):
        forward_of(model)(model, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_another_name_is_asked_for(kind: str) -> None:
    model = made(kind, Scores(), torch.zeros(2, 4))
    forward = forward_of(model, loss_fn=lambda output, batch: output.mean())
    with pytest.raises(ModelError, match="batch of images, labels does not fit .*no pixels"):
        forward(model, {"images": torch.zeros(2, 4), "labels": torch.zeros(2)})


def test_a_sequential_is_told_what_a_batch_calls_it_with() -> None:
    model = nn.Sequential(nn.Linear(4, 1))
    with pytest.raises(
        ModelError, match=r"forward\(batch\[0\], batch\[1\]\), which Sequential\.forward\(input\).*loss_fn"
    ):
        forward_of(model)(model, (torch.zeros(2, 4), torch.zeros(2, 1)))
    assert forward_of(model, loss_fn=lambda output, batch: output.mean())(model, (torch.ones(2, 4), 0)).value.ndim == 0


def test_a_fault_inside_of_a_model_is_raised_as_it_is() -> None:
    class Faulty(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return len(3)  # type: ignore[arg-type, return-value]

    model = Faulty()
    with pytest.raises(TypeError, match="has no len") as raised:
        forward_of(model)(model, (1, 2))
    assert not isinstance(raised.value, ModelError)


def test_a_fault_with_columns_that_a_model_does_not_name_names_them() -> None:
    class PassesOn(nn.Module):
        def forward(self, x: Tensor, **others: Any) -> Any:
            return torch.sum(x, **others)

    model = PassesOn()
    with pytest.raises(TypeError) as raised:
        forward_of(model)(model, {"x": torch.ones(2), "text": ["a", "b"]})
    assert "['text']" in raised.value.__notes__[0]


def test_scores_of_classes_with_a_label_each_are_refused_before_anything_is_said() -> None:
    class Labelled(Scores):
        def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
            return super().forward(pixels)

    model = Labelled()
    with pytest.raises(ModelError, match=r"scores of classes.*loss \(cross_entropy.*loss_fn"):
        forward_of(model)(model, (torch.zeros(2, 4), torch.tensor([0, 1])))


class Masked(nn.Module):
    """Takes a mask, if it gets one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x.sum() if mask is None else (x * mask).sum()


def test_fields_of_a_tuple_that_do_not_reach_a_parameter_of_forward_are_said_once() -> None:
    x, mask, y = torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2)
    said: list[str] = []
    forward = forward_of(Masked(), loss_fn=lambda output, batch: output - batch[2].sum(), warn=said.append)
    assert [forward(Masked(), (x, mask, y)).value.item() for _ in range(2)] == [6.0, 6.0]
    assert len(said) == 1
    assert "of the 3 fields of a batch, Masked.forward is given the first alone, and none for mask;" in said[0]
    # A mapping reaches it. A pair holds the targets, and a module without a further parameter misses nothing.
    forward_of(Masked(), loss_fn=lambda output, batch: output)(Masked(), {"x": x, "mask": mask, "y": y})
    forward_of(Masked(), loss_fn=lambda output, batch: output)(Masked(), (x, y))
    plain = nn.Linear(3, 1)
    forward_of(plain, loss_fn=lambda output, batch: output.mean())(plain, (x, y, mask))


def test_fields_beyond_a_pair_that_forward_could_take_are_said_without_a_loss_function_too() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, labels: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
            return ((x if mask is None else x * mask).sum(1) - labels).square().mean() * scale

    said: list[str] = []
    batch = (torch.ones(2, 3), torch.zeros(2), torch.zeros(2, 3))
    assert forward_of(Own(), warn=said.append)(Own(), batch).value.item() == 9.0
    assert "given the first two alone, and none for mask, scale;" in said[0]


Y_WITH_IGNORED = torch.tensor([[1, -100], [2, 3]])


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        ({"pixels": torch.zeros(2, 4), "y": Y_WITH_IGNORED}, "y"),
        ((torch.zeros(2, 4), torch.ones(2, 2, dtype=torch.long), Y_WITH_IGNORED), "2"),
    ],
)
def test_ignored_labels_in_a_field_that_is_not_taken_for_the_labels_are_said_once(batch: Any, field: str) -> None:
    said: list[str] = []
    model = Scores()
    forward = forward_of(model, loss_fn=lambda output, batch: output.mean(), warn=said.append)
    for _ in range(2):
        forward(model, batch)
        forward.settle()
    assert len(said) == 1
    assert said[0].startswith(f"the field {field} of a batch has integers of -100, and is not taken for its labels")


@pytest.mark.parametrize(
    "batch",
    [
        {"pixels": torch.zeros(2, 4), "y": Y_WITH_IGNORED.abs()},
        {"pixels": torch.zeros(2, 4), "y": Y_WITH_IGNORED.float()},
        {"pixels": torch.zeros(2, 4), "labels": Y_WITH_IGNORED, "more": Y_WITH_IGNORED},
        (torch.zeros(2, 4), Y_WITH_IGNORED),
    ],
)
def test_fields_without_ignored_labels_and_labels_by_their_name_are_not_doubted(batch: Any) -> None:
    model = Scores()
    forward = forward_of(model, loss_fn=lambda output, batch: output.mean())
    forward(model, batch)
    forward.settle()


def test_a_class_is_no_loss_function() -> None:
    with pytest.raises(ConfigError, match=r"^loss_fn: MSELoss is a class; .*criterion = MSELoss\(\)$"):
        forward_of(Scores(), loss_fn=nn.MSELoss)


def test_a_model_that_fails_on_arrays_is_told_what_it_was_given() -> None:
    x = torch.zeros(2, 4).numpy()
    with pytest.raises(TypeError) as caught:
        forward_of(Scores(), loss_fn=lambda output, batch: output.mean())(Scores(), (x, x))
    assert "the batch holds NumPy arrays" in caught.value.__notes__[0]
