"""Your own metric: how often the right token is among the best guesses.

`custom_metric.yaml` names the class. It is called with the `args` of the metric. The classes of `torchmetrics` have the
same three methods, and are named in the same way.
"""

from torch import Tensor


class TopAccuracy:
    def __init__(self, *, guesses: int = 5) -> None:
        self.guesses = guesses
        self.reset()

    def reset(self) -> None:
        self.right: Tensor | int = 0
        self.all = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        # (N, V) scores and (N,) ids. The count stays on the device, so that nothing waits for it.
        best = preds.topk(self.guesses).indices
        self.right = self.right + (best == target[:, None]).any(dim=1).sum()
        self.all += len(target)

    def compute(self) -> float:
        return float(self.right / self.all)
