"""A store that fails as a test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speedtronic.distributed.stores.base import Store


class Failing:
    """A store that raises what `trouble` gives for a request, where it gives anything."""

    def __init__(self, store: Store, trouble: Callable[[str, str], Exception | None]) -> None:
        self._store = store
        self._trouble = trouble

    def __getattr__(self, kind: str) -> Any:
        method = getattr(self._store, kind)
        if not callable(method) or kind == "close":
            return method

        def call(name: str, *arguments: Any, **options: Any) -> Any:
            if (error := self._trouble(kind, name)) is not None:
                raise error
            return method(name, *arguments, **options)

        return call
