"""Every exception that Speedtronic raises on purpose, in one hierarchy, and its one kind of warning.

The command line turns a `SpeedtronicError` into one clear message and its `exit_code`: 2 if the user can fix the cause
before the next try (`InputError`), 1 if a run failed on its way.
"""

from __future__ import annotations

import warnings
from typing import ClassVar


class SpeedtronicError(Exception):
    """Base of all Speedtronic errors. The message says what is wrong and how to fix it."""

    exit_code: ClassVar[int] = 1


class InputError(SpeedtronicError):
    """An input cannot be used: a config, data, a checkpoint, the environment."""

    exit_code: ClassVar[int] = 2


class ConfigError(InputError, ValueError):
    """A configuration is wrong. The message has one line for each problem: file, line, key, remedy."""


class NotBuiltError(ConfigError):
    """The configuration asks for a part that this version does not have yet."""


class DataError(InputError, ValueError):
    """Training data is missing, empty, too short, not valid text, or does not fit the vocabulary."""


class ModelError(InputError, TypeError):
    """A model cannot be called with the batches of the data, or what it returns is no loss."""


class DataWorkerError(SpeedtronicError, RuntimeError):
    """A process that loads data has died, most often because memory ran out."""


class CheckpointError(InputError, RuntimeError):
    """A checkpoint cannot be written or read, or does not fit the model."""


class DeviceError(InputError, RuntimeError):
    """An explicitly requested device does not exist on this machine."""


class RunFolderError(InputError, RuntimeError):
    """The folder of a run cannot be made, written or locked."""


class RunLockedError(RunFolderError):
    """Another live process is training in the same folder."""


class MissingExtraError(InputError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""


class NonFiniteError(SpeedtronicError, RuntimeError):
    """The loss or the gradients of a step are NaN or infinite. The weights are as they were before that step.

    Attributes:
        step: the 1-based global step that went wrong.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class ScalerOverflowError(SpeedtronicError, RuntimeError):
    """The gradient scaler skipped more updates in a row than a normal start does."""


class RankError(SpeedtronicError, RuntimeError):
    """Another process of the same run has gone, or does not answer."""


class StoreError(SpeedtronicError, RuntimeError):
    """A request to the store that nodes share has failed."""


class StoreUnavailableError(StoreError):
    """A fault that may pass: a timeout, a lost connection, a server that is busy or down. A retry may help."""


class StoreRefusedError(StoreError, InputError):
    """A fault that stays: no access, no such bucket, no exclusive create. The message says what to check."""

    exit_code: ClassVar[int] = 2


class StoreContentError(StoreRefusedError):
    """The store holds data that this version cannot read, or another model than that of this node."""


class SpeedtronicWarning(UserWarning, RuntimeWarning):
    """What a part warns of that is used without a run. In a run, its logger says it."""


def warn(message: str) -> None:
    """Warn of something, from a function that was given nothing else to say it with."""
    warnings.warn(message, SpeedtronicWarning, stacklevel=3)
