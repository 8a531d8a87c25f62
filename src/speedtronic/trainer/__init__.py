"""The training loop: `Trainer.fit` and the parts it is made of."""

from speedtronic.trainer.callbacks import Callback, RunView
from speedtronic.trainer.result import TrainResult
from speedtronic.trainer.sync import SyncCoordinator
from speedtronic.trainer.trainer import SpeedtronicTrainer, Trainer, TrainingEngine

__all__ = [
    "Callback",
    "RunView",
    "SpeedtronicTrainer",
    "SyncCoordinator",
    "TrainResult",
    "Trainer",
    "TrainingEngine",
]
