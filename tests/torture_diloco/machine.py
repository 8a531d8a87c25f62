"""Imported by each tortured process, as a plugin: makes it as slow as its machine is to be, and lets nothing get lost
of what the checks need.

At this model's size a start takes as long as hundreds of steps, which is no machine's proportion. So a step takes at
least `TORTURE_PACE` seconds. What is deleted from a folder store is kept in the folder `TORTURE_KEPT`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from speedtronic.distributed.stores.folder import FolderStore

_PACE = float(os.environ["TORTURE_PACE"])
_KEPT = Path(os.environ["TORTURE_KEPT"])

_stepped_at = time.monotonic()


def _take_time(*_: Any) -> None:
    global _stepped_at
    time.sleep(max(0.0, _stepped_at + _PACE - time.monotonic()))
    _stepped_at = time.monotonic()


class _Keeping:
    """`FolderStore.delete`, after the object has got a second name."""

    def __init__(self) -> None:
        self._delete = FolderStore.delete

    def delete(self, store: FolderStore, name: str, **options: Any) -> None:
        copy = _KEPT / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError, FileNotFoundError):  # deleted before
            os.link(store.url.removeprefix("dir://") + "/" + name, copy)
        self._delete(store, name, **options)


_keeping = _Keeping()
FolderStore.delete = lambda store, name, **options: _keeping.delete(store, name, **options)  # type: ignore[method-assign]
register_optimizer_step_post_hook(_take_time)
