"""Small models, batches and recorders that several tests train with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.metrics import MetricLogger
from speedtronic.precision import PrecisionPlan
from speedtronic.trainer import Trainer

ACCUMULATE_TWO = {"micro_batch_size": 4, "target_batch_size": 8}


class Regression(nn.Module):
    """Tuple batches (x, y); returns {"loss": mean squared error}."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": ((self.linear(x) - y) ** 2).mean()}


def regression_batches(count: int = 8, size: int = 4, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of x (size, 3) and y = x·(1, -2, 3) + 1 (size, 1)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, size, 3, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 1.0
    return list(zip(inputs, targets, strict=True))


class Events:
    """A logger hook that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def on_event(self, event: str, payload: dict[str, Any]) -> None:
        self.seen.append((event, dict(payload)))

    def names(self) -> list[str]:
        return [name for name, _ in self.seen]

    def of(self, name: str) -> list[dict[str, Any]]:
        return [payload for event, payload in self.seen if event == name]


class Silence:
    """A text stream that takes everything and shows nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


class Endless:
    """A foreign loader that makes the batch of each call from its number, and never ends."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while True:
            yield self._make(number)
            number += 1


def make_trainer(
    model: nn.Module | None = None,
    batches: Any = None,
    *,
    config: SpeedtronicConfig | dict[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    events: Events | None = None,
    **options: Any,
) -> Trainer:
    """A trainer on the CPU with a quiet logger, of a seeded `Regression` unless told otherwise."""
    if model is None:
        torch.manual_seed(0)
        model = Regression()
    return Trainer(
        model,
        optimizer or torch.optim.SGD(model.parameters(), lr=0.05),
        regression_batches() if batches is None else batches,
        device="cpu",
        config=config,
        logger=options.pop("logger", MetricLogger(stream=Silence(), hooks=[events] if events is not None else [])),
        **options,
    )


def config_of(**sections: Any) -> SpeedtronicConfig:
    return SpeedtronicConfig.from_dict(sections)


class OnlyLogits(nn.Module):
    """Next-token logits over a vocabulary of 11, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(self.embed(input_ids))}


def successor_batches() -> list[dict[str, Tensor]]:
    """One batch (4, 6) for `OnlyLogits`, in which each label is the token plus one."""
    ids = torch.arange(24).reshape(4, 6) % 11
    return [{"input_ids": ids, "labels": (ids + 1) % 11}]


def poisoned(step: int) -> Endless:
    """Regression batches, of which the one of `step` is NaN."""

    def batch(number: int) -> tuple[Tensor, Tensor]:
        x, y = regression_batches()[number % 8]
        return x * float("nan") if number == step - 1 else x, y

    return Endless(batch)


class Coordinator:
    """A SyncCoordinator that writes down what happens to it, among the events."""

    def __init__(self, events: Events, *, reset: bool = False, fail_at: str | None = None) -> None:
        self._events = events
        self._reset = reset
        self._fail_at = fail_at

    def _note(self, what: str, **payload: Any) -> None:
        self._events.on_event(f"coordinator.{what}", payload)
        if what == self._fail_at:
            raise RuntimeError(f"{what} failed")

    def start(self) -> None:
        self._note("start")

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        self._note("step", model=model, step=step)
        return self._reset

    def stop(self) -> None:
        self._note("stop")

    def state_dict(self) -> dict[str, Any] | None:
        return {"baseline": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._note("load", state=state)


SCALED = PrecisionPlan(mode="fp16", dtype=torch.float32, use_scaler=True, autocast_enabled=False, device_type="cpu")


class Overflowing(Regression):
    """Gradients of the given steps are infinite under any loss scale."""

    def __init__(self, *bad: int) -> None:
        super().__init__()
        self._bad = bad
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        loss = super().forward(x, y)["loss"]
        return {"loss": loss * float("inf")} if self.calls in self._bad or self._bad == (-1,) else {"loss": loss}
