"""Small models, batches and recorders that several tests train with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.metrics import MetricLogger
from speedtronic.trainer import Trainer


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
