"""Every exception that Speedtronic raises on purpose, in one hierarchy.

The command line turns a `SpeedtronicError` into one clear message and its `exit_code`: 2 for what the user can mend
before trying again (`InputError`), 1 for a run that failed while running.
"""

from __future__ import annotations

from typing import ClassVar


class SpeedtronicError(Exception):
    """Base of all Speedtronic errors. The message names the thing that is wrong and the remedy."""

    exit_code: ClassVar[int] = 1


class InputError(SpeedtronicError):
    """Something that was handed in cannot be used: a config, data, a checkpoint, the environment."""

    exit_code: ClassVar[int] = 2


class ConfigError(InputError, ValueError):
    """A configuration is wrong. The message lists every problem, one a line: file, line, key, remedy."""


class NotBuiltError(ConfigError):
    """The configuration asks for a part that this version does not have yet."""


class DataError(InputError, ValueError):
    """Training data is missing, empty, too short, not valid text, or does not fit the vocabulary."""


class DataWorkerError(SpeedtronicError, RuntimeError):
    """A process that fetches data has ended by itself, most often because memory ran out."""


class CheckpointError(InputError, RuntimeError):
    """A checkpoint cannot be written as asked, or cannot be read, or does not fit the model."""


class DeviceError(InputError, RuntimeError):
    """An explicitly requested device does not exist on this machine."""


class RunFolderError(InputError, RuntimeError):
    """The folder that a run writes to cannot be made, written or locked."""


class RunLockedError(RunFolderError):
    """Another live process is training in the same folder."""


class MissingExtraError(InputError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""


class NonFiniteError(SpeedtronicError, RuntimeError):
    """The loss or the gradients of a step are NaN or infinite. The weights are those from before that step.

    Attributes:
        step: the 1-based global step that went wrong.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class ScalerOverflowError(SpeedtronicError, RuntimeError):
    """The gradient scaler skipped more updates in a row than can pass for a normal start."""


class StoreError(SpeedtronicError, RuntimeError):
    """The store that nodes share did not do what was asked of it."""


class StoreUnavailableError(StoreError):
    """What can pass: a timeout, a lost connection, a server that is busy or down. Asking again may help."""


class StoreRefusedError(StoreError, InputError):
    """What will not pass by itself: no access, no such bucket, no exclusive create. The message says what to check."""

    exit_code: ClassVar[int] = 2


class StoreContentError(StoreRefusedError):
    """The store holds something that this version cannot read, or another model than this node's."""
