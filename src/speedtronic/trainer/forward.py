"""The forward pass: a batch moves to the device, is counted, and a model turns it into a loss.

Nothing here reads a number from the device: losses and counts stay tensors until the trainer logs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from speedtronic.errors import ConfigError, ModelError
from speedtronic.model import causal_cross_entropy
from speedtronic.model.wrappers import forward_signature, innermost
from speedtronic.precision import PrecisionPlan, autocast_context, copies_in_background
from speedtronic.trainer.loss import (
    LossFunction,
    MeanLoss,
    as_tensor,
    doubt_about,
    doubt_labels,
    has_no_target,
    resolve_loss,
)


class Once:
    """Passes the first warning of each kind on, and drops the others.

    Whether one is due may be known on the device alone. Then it waits for `settle`, and nothing is read before.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._said: set[str] = set()
        self._waiting: dict[str, tuple[str, Tensor]] = {}

    def __call__(self, kind: str, message: str, when: Tensor | None = None) -> None:
        """Warn now, or where `when`, a 0-dim bool tensor, turns out to be true."""
        if kind in self._said:
            return
        if when is not None:
            first, before = self._waiting.get(kind, (message, when))
            self._waiting[kind] = first, before | when
            return
        self._said.add(kind)
        self._warn(message)

    def settle(self) -> None:
        """Read from the device which of the waiting warnings are due, and pass these on."""
        waiting, self._waiting = self._waiting, {}
        for kind, (message, when) in waiting.items():
            if when.item():
                self(kind, message)


def move_batch(batch: Any, device: torch.device) -> Any:
    """Copy the tensors in `batch` (nested dicts, tuples and lists) to `device`, without waiting where that is safe."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=copies_in_background(batch, device))
    if isinstance(batch, Mapping):
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, PackedSequence):
        # A named tuple of which one field must stay on the CPU.
        background = copies_in_background(batch.data, device)
        return batch.to(device, non_blocking=background)  # type: ignore[arg-type]  # its stub knows dtypes alone
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move_batch(value, device) for value in batch)
    return batch


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """The tensors in `batch` (nested mappings, tuples and lists)."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)


def batch_size_and_tokens(
    batch: Any, once: Callable[[str, str], None] = lambda kind, message: None
) -> tuple[int, int | Tensor]:
    """Number of samples and of tokens in a batch.

    Counted on a mapping's `input_ids`, else its `inputs`, or on the first field of a tuple or list. Where the mapping
    also has an `attention_mask` (B, T), and what is counted has more than one dimension, the number of tokens is the
    sum of the mask: a 0-dim tensor, so that counting does not wait for the device. A mask of another shape, such as
    (B, 1, T, T), says who sees whom, and not which are tokens. Features and pixels are no tokens.

    Any other batch of tensors (other names, nested fields) has no tokens, and as many samples as the first dimension
    that its tensors share. Where they share none, but its fields are lists of one length, that counts; otherwise the
    first tensor, and `once` is told so. An array of NumPy's counts like a tensor. A batch without either is one sample
    of one token.
    """
    counted: Any = None
    mask: Any = None
    by_name = False
    if isinstance(batch, Mapping):
        counted = batch.get("input_ids")
        by_name = counted is not None
        if not by_name:
            counted = batch.get("inputs")
        mask = batch.get("attention_mask")
    elif isinstance(batch, (tuple, list)) and batch:
        counted = batch[0]
    counted, mask = as_tensor(counted), as_tensor(mask)
    if counted is None or counted.ndim == 0:
        return _count_any(batch, once)
    if counted.ndim > 1 and mask is not None and mask.ndim == 2 and len(mask) == len(counted):
        return counted.shape[0], mask.sum(dtype=torch.int64)
    return counted.shape[0], counted.numel() if by_name or _are_ids(counted) else 0


def _are_ids(counted: Tensor) -> bool:
    """Whether a tensor without a name holds ids of tokens (B, T), and not features, or pixels of any dtype."""
    numbers = counted.is_floating_point() or counted.is_complex() or counted.dtype is torch.bool
    return counted.ndim <= 2 and not numbers


def _count_any(batch: Any, once: Callable[[str, str], None]) -> tuple[int, int]:
    sizes = list(_first_dimensions(batch))
    if not sizes:
        return 1, 1
    if sizes.count(sizes[0]) == len(sizes):
        return sizes[0], 0
    # Images of any size and their boxes come as lists with one item for each sample.
    fields = list(batch.values() if isinstance(batch, Mapping) else batch)
    lengths = {
        len(field) if isinstance(field, (tuple, list)) else next(_first_dimensions(field), None) for field in fields
    }
    if len(lengths) == 1 and (length := lengths.pop()):
        return length, 0
    once(
        "counting",
        f"the tensors of a batch have different first dimensions ({', '.join(map(str, sizes[:8]))}), so its samples "
        f"are counted by the first tensor: {sizes[0]}; to have another one counted, put it first, or name it 'inputs'",
    )
    return sizes[0], 0


def _first_dimensions(value: Any) -> Iterator[int]:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield value.shape[0]
    elif isinstance(value, PackedSequence):
        # How many sequences there are at the first position; always on the CPU.
        yield int(value.batch_sizes[0])
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _first_dimensions(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _first_dimensions(item)


class Forward:
    """Calls a model on a batch, and turns what it returns into a scalar loss under the precision plan.

    A mapping calls `model(**batch)`, a tuple or list of at least two calls `model(batch[0], batch[1])`. With a
    `loss_fn`, the model gets only the keys and fields that its `forward` asks for, since the targets may be for
    `loss_fn` alone. A model whose `forward` takes `shift_labels`, as Hugging Face's causal models do, also gets the
    aligned labels under that name, so that it does not shift them a second time.

    Args:
        model: the module that is trained. What it gets is decided by the signature of its `forward`: of a module
            inside one that torch made around it (compiled, data-parallel), and of a scripted or traced one too.
        loss_fn: `loss_fn(output, batch)`, or None for the rules of `resolve_loss`.
        warn: called once with what the rules had to guess about the model's output; `settle` may call it too.

    Raises:
        ConfigError: `loss_fn` is a class.

    Attributes:
        loss_fn: the argument.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PrecisionPlan,
        *,
        loss_fn: LossFunction | None = None,
        warn: Callable[[str], None],
    ) -> None:
        if isinstance(loss_fn, type):
            raise ConfigError(
                f"loss_fn: {loss_fn.__name__} is a class; pass a function of the model's output and the batch, such as "
                f"lambda output, batch: criterion(output, batch[1]) with criterion = {loss_fn.__name__}()"
            )
        self._plan = plan
        self.loss_fn = loss_fn
        self._once = Once(warn)
        self._no_target: Tensor | None = None
        self._title = f"{_class_name(innermost(model))}.forward"
        self._signature = forward_signature(model)
        parameters = self._signature.parameters.values() if self._signature is not None else ()
        self._names = {p.name for p in parameters}
        # Without a signature a model gets every key of a batch.
        self._takes_any_key = self._signature is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
        # Hugging Face models pass further keywords to their `loss_function`, which takes shift_labels.
        self._takes_shift_labels = "shift_labels" in self._names or (
            self._takes_any_key and hasattr(model, "loss_function")
        )
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_place = [p for p in parameters if p.kind in positional]
        required = [p for p in by_place if p.default is p.empty]
        self._takes_second = loss_fn is None or len(required) >= 2
        # What a tuple of more fields might be meant for, and does not reach.
        self._not_given = [p.name for p in by_place][2 if self._takes_second else 1 :]
        self._not_given += [f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL]

    def autocast(self) -> AbstractContextManager[None]:
        """Within it, operations compute in the dtypes of the precision plan."""
        return autocast_context(self._plan)

    def __call__(self, model: Callable[..., Any], batch: Any) -> MeanLoss:
        """Return the mean loss of `batch`, attached to the graph.

        Raises:
            ModelError: the model cannot be called with the batch, or no loss is found in what it returned.
            DataError: the batch lacks the labels that the loss needs, or they do not fit.
        """
        return self.output_and_loss(model, batch)[1]

    def output_and_loss(self, model: Callable[..., Any], batch: Any) -> tuple[Any, MeanLoss]:
        """Return what the model returns for `batch`, and its mean loss. Raises as a call does."""
        with autocast_context(self._plan):
            output = self.call(model, batch)
            doubt_labels(batch, self._once)
            loss = resolve_loss(output, batch, self.loss_fn, warn=self._once)
            if self.loss_fn is None:
                doubt_about(output, batch, self._once)
            self._note_without_target(loss.value.detach(), batch)
            return output, loss

    def mean_of_means(self, model: Callable[..., Any], batch: Mapping[str, Tensor], samples: Sequence[int]) -> MeanLoss:
        """Return the mean of the mean losses of parts of `batch` with so many samples each, in one forward pass.

        The model is one whose micro batches may be merged (`trainer.merging`). A part without a target has the loss 0.
        """
        with autocast_context(self._plan):
            output = self.call(model, {key: value for key, value in batch.items() if key != "labels"})
            logits, labels = (torch.split(tensor, list(samples)) for tensor in (output["logits"], batch["labels"]))
            means = [causal_cross_entropy(*part) for part in zip(logits, labels, strict=True)]
            return MeanLoss(torch.stack(means).mean())

    def call(self, model: Callable[..., Any], batch: Any) -> Any:
        """Return what the model returns for `batch`.

        Raises:
            ModelError: the model cannot be called with the batch.
        """
        args, keywords = self._arguments(batch)
        try:
            return model(*args, **keywords)
        except (TypeError, RuntimeError) as error:  # the latter from scripted and traced modules
            if self._signature is not None and not _binds(self._signature, args, keywords):
                self._refuse(batch)
            if any(isinstance(value, np.ndarray) for value in (*args, *keywords.values())):
                error.add_note(
                    "the batch holds NumPy arrays, which a model is given as they are; make tensors of them in the "
                    "collate function, such as torch.from_numpy(array)"
                )
            if self._takes_any_key and (unnamed := [str(key) for key in keywords if key not in self._names]):
                error.add_note(f"{self._title} was also given columns of the batch that it does not name: {unnamed}")
            raise

    def settle(self) -> None:
        """Say what only the device knew of the outputs so far. It is read where there may be something to say."""
        self._once.settle()

    def met_no_target(self) -> bool:
        """Whether a batch that was trained on had labels, but no target, and a loss that is NaN. Reads the device."""
        return self._no_target is not None and bool(self._no_target)

    def _note_without_target(self, loss: Tensor, batch: Any) -> None:
        # The answer stays on the device until it is asked for. Nobody asks in an evaluation.
        if torch.is_grad_enabled() and (none := has_no_target(batch)) is not None:
            found = loss.isnan() & none
            self._no_target = found if self._no_target is None else self._no_target | found

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, Mapping):
            keywords = dict(batch)
            if self._takes_shift_labels and "labels" in batch and "shift_labels" not in batch:
                keywords["shift_labels"] = batch["labels"].contiguous()
            if self.loss_fn is not None and not self._takes_any_key:
                keywords = {key: value for key, value in keywords.items() if key in self._names}
            return (), keywords
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            args = (batch[0], batch[1]) if self._takes_second else (batch[0],)
            if len(batch) > 2 and self._not_given:
                self._once(
                    "fields",
                    f"of the {len(batch)} fields of a batch, {self._title} is given the first"
                    f"{' two' if self._takes_second else ''} alone, and none for {', '.join(self._not_given)}; if that "
                    "is not meant, let the batches be mappings of forward's arguments",
                )
            return args, {}
        length = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ModelError(
            f"a batch must be a mapping of forward's arguments or a tuple or list of at least two, not a "
            f"{type(batch).__name__}{length}: check the collate function of the data loader"
        )

    def _refuse(self, batch: Any) -> NoReturn:
        """Say why this batch does not fit the model's `forward`, and what to change."""
        assert self._signature is not None
        takes = f"{self._title}{self._signature}"
        if not isinstance(batch, Mapping):
            called, remedy = "forward(batch[0])", "let the batches be mappings of forward's arguments"
            if self._takes_second:
                called = "forward(batch[0], batch[1])"
                remedy = (
                    "where the second field holds the targets, set loss (cross_entropy, mse or a function) or pass "
                    f"loss_fn to the Trainer, and it is called with batch[0]; else {remedy}"
                )
            raise ModelError(f"a tuple or list batch calls {called}, which {takes} does not fit: {remedy}") from None
        needed = {
            p.name
            for p in self._signature.parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        problems = []
        if missing := sorted(needed - batch.keys()):
            problems.append(f"it has no {', '.join(missing)}: name its columns as forward's arguments are named")
        extra = [str(key) for key in batch if key not in self._names]
        if extra and not self._takes_any_key and self.loss_fn is None:
            problems.append(
                f"forward does not take {', '.join(extra)}: leave {'it' if len(extra) == 1 else 'them'} out in the "
                "dataset or the collate function, let forward take **kwargs, or, for what only the loss needs, set "
                "loss or pass loss_fn to the Trainer"
            )
        raise ModelError(
            f"a mapping batch calls forward(**batch), and the batch of {', '.join(map(str, batch))} does not fit "
            f"{takes}: {'; '.join(problems)}"
        ) from None


def _binds(signature: inspect.Signature, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True


def _class_name(model: nn.Module) -> str:
    # A scripted or traced module says which class it was made of.
    return str(getattr(model, "original_name", type(model).__name__))
