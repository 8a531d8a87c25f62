"""Vision: handwritten digits of 8 x 8 pixels, which scikit-learn brings along, and a small convolutional network.

A batch is a tuple (images, labels). With `loss: cross_entropy` the model is called with the images alone, and its
scores are compared with the labels.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from speedtronic import DataConfig, ModelConfig, register_model


@register_model("digits")
class Digits(nn.Module):
    def __init__(self, config: ModelConfig, *, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        # (B, 1, 8, 8) pixels to (B, 10) scores
        return self.layers(images)


def make(config: DataConfig) -> tuple[TensorDataset, TensorDataset]:
    """The training part, and a fifth that is held out."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    everything = TensorDataset(images, torch.tensor(bunch.target))
    return tuple(random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(config.seed)))


class Accuracy:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right: Tensor | int = 0
        self.all = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right = self.right + (preds.argmax(dim=1) == target).sum()
        self.all += len(target)

    def compute(self) -> float:
        return float(self.right / self.all)
