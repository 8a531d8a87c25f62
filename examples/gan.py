"""A GAN in one dimension: two optimizers and two losses in one update, by a `training_step`.

    python examples/gan.py

The generator turns noise into numbers like those of the data, whose mean is 4 and whose standard deviation is 1.25.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtronic import Trainer


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
        self.discriminator = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def real_or_not(scores: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def training_step(model: Gan, batch: tuple[Tensor, Tensor], step: int) -> Iterator[tuple[str, Tensor]]:
    real, noise = batch
    made = model.generator(noise)
    told = model.discriminator
    yield "discriminator", real_or_not(told(real), True) + real_or_not(told(made.detach()), False)
    # The discriminator has made its step by now.
    yield "generator", real_or_not(told(made), True)


def main(steps: int = 1500) -> tuple[float, float]:
    """Train, and return mean and standard deviation of what the generator makes."""
    torch.manual_seed(0)
    model = Gan()
    real, noise = 4 + 1.25 * torch.randn(20_000, 1), torch.randn(20_000, 1)
    trainer = Trainer(
        model,
        {
            "discriminator": torch.optim.Adam(model.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99)),
            "generator": torch.optim.Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.99)),
        },
        list(zip(real.split(64), noise.split(64), strict=True)),
        device="cpu",
        config={"run": {"max_steps": steps}, "logging": {"every_steps": 250}},
        training_step=training_step,
    )
    trainer.fit()
    with torch.no_grad():
        made = model.generator(torch.randn(10_000, 1))
    return float(made.mean()), float(made.std())


if __name__ == "__main__":
    print("mean {:.2f}, standard deviation {:.2f}".format(*main()))
