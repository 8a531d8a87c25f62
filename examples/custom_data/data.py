"""Your own dataset: sums such as `17+25=042`, with one token for each digit.

`custom_data.yaml` names the function `make`. It is called with the `data` section and returns the training and the
validation part, two `torch.utils.data.Dataset`s. A sample holds the arguments of the model's `forward`.
"""

import numpy as np
from torch.utils.data import Dataset

from speedtronic import DataConfig

ALPHABET = "0123456789+=\n"
IGNORED = -100


class Sums(Dataset):
    """Sample i is sum number i. Only its result is a target."""

    def __init__(self, count: int, seed: int) -> None:
        self.terms = np.random.default_rng(seed).integers(0, 100, (count, 2))

    def __len__(self) -> int:
        return len(self.terms)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first, second = self.terms[index]
        question, answer = f"{first:02}+{second:02}=", f"{first + second:03}\n"
        ids = np.array([ALPHABET.index(character) for character in question + answer])
        labels = ids[1:].copy()  # aligned: label t is the token after input t
        labels[: len(question) - 1] = IGNORED
        return {"input_ids": ids[:-1], "labels": labels}


def make(config: DataConfig) -> tuple[Sums, Sums]:
    return Sums(20_000, seed=config.seed), Sums(500, seed=config.seed + 1)
