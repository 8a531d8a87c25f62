"""Stores that fsspec reaches: object storage with exclusive creation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from speedtronic.distributed.stores.base import (
    REQUEST_TIMEOUT,
    Buffer,
    Entry,
    Listing,
    checked_name,
    checked_prefix,
    expected_bytes,
    first_page,
    is_name,
)
from speedtronic.distributed.stores.timeouts import BoundedCalls
from speedtronic.errors import StoreError, StoreRefusedError, StoreUnavailableError

_TEMPORARY = {408, 425, 429, *range(500, 600)}  # statuses of HTTP


class ObjectStore:
    """Objects under a path of an fsspec file system that has `pipe_file(…, mode="create")`.

    A listing reads all names under its prefix; a subclass that knows the service can do better.

    Args:
        fs: an fsspec file system that keeps no listings of its own (`use_listings_cache=False`).
        root: the path under which the objects lie, without a slash at its end.
        url: for messages, without secrets.
    """

    _upload_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self._fs = fs
        self._root = root
        self._url = url
        self._calls = BoundedCalls(url)

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        path = self._path(checked_name(name))
        try:
            # Not `open(path, "xb")`, which overwrites where nothing is written.
            # The libraries take no views.
            content = data if isinstance(data, (bytes, bytearray)) else bytes(data)
            self._ask(timeout, "pipe_file", path, content, mode="create", **self._upload_options)
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise self._no_such_place() from None
        return True

    def get(
        self,
        name: str,
        *,
        limit: int,
        size: int | None = None,
        sha256: str | None = None,
        partial: bool = False,
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        path = self._path(checked_name(name))
        end = 1 + (limit if size is None else min(limit, size))
        try:
            data: bytes = self._ask(timeout, "cat_file", path, start=0, end=end)
        except FileNotFoundError:
            return None
        return expected_bytes(data, limit, size, sha256, partial=partial)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        folder = self._path(checked_prefix(prefix).rpartition("/")[0])
        try:
            found: dict[str, dict[str, Any]] = self._ask(timeout, "find", folder, detail=True)
        except FileNotFoundError:
            return Listing((), more=False)
        sizes = {path: int(facts["size"]) for path, facts in found.items()}
        return first_page(entry for entry in sorted(self._entries(sizes.items(), prefix)) if entry.name > marker)

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        path = self._path(checked_name(name))
        try:
            self._ask(timeout, "rm_file", path)
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Nothing to close."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _entries(self, sizes: Iterable[tuple[str, int]], prefix: str) -> Iterable[Entry]:
        """The objects among some paths: those with valid names, under `prefix`."""
        for path, size in sizes:
            name = path.removeprefix(f"{self._root}/")
            if is_name(name) and name.startswith(prefix):
                yield Entry(name, size)

    def _no_such_place(self) -> StoreRefusedError:
        return StoreRefusedError(f"{self._url}: there is no such bucket or folder; make it, or correct the address")

    def _ask(self, timeout: float, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system, within a timeout.

        Raises:
            FileExistsError, FileNotFoundError: the name is taken, or free.
            StoreError: anything else that can go wrong; the message says what to check.
        """
        try:
            if not self._fs.async_impl:
                return self._calls.within(timeout, lambda: getattr(self._fs, method)(*args, **options))
            return self._await(timeout, getattr(self._fs, f"_{method}"), *args, **options)
        except Exception as error:  # noqa: BLE001 - foreign code; an unknown error is a bug, and is raised again
            known = self._translated(error)
            if known is None or known is error:
                raise
            # The library's message may hold addresses with secrets in them, so it is not shown.
            raise known from None

    def _await(self, timeout: float, coroutine: Callable[..., Any], *args: Any, **options: Any) -> Any:
        from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types

        return sync(self._fs.loop, coroutine, *args, timeout=timeout, **options)

    def _translated(self, error: Exception) -> Exception | None:
        """An error of the file system as an error of a store; None if it is a bug."""
        if isinstance(error, (StoreError, FileExistsError, FileNotFoundError)):
            return error
        # Errors of gcsfs, aiohttp and the like carry the status of HTTP as one of these attributes.
        codes = [str(getattr(error, attribute, None)) for attribute in ("code", "status")]
        status = next((int(code) for code in codes if code.isdecimal()), None)
        library = type(error).__module__.partition(".")[0]
        denied = isinstance(error, PermissionError) or status in {401, 403} or library == "google"
        # gcsfs has no class of error for denied access.
        if denied or (isinstance(error, OSError) and str(error).startswith("Forbidden")):
            return StoreRefusedError(f"{self._url}: access is denied; check the credentials and what they may do")
        if isinstance(error, TimeoutError):
            return StoreUnavailableError(f"{self._url}: no answer in time")
        if status in _TEMPORARY or isinstance(error, OSError) or library == "aiohttp":
            what = type(error).__name__ if status is None else f"{status}"
            return StoreUnavailableError(f"{self._url}: the request failed ({what})")
        if status is not None or isinstance(error, (NotImplementedError, TypeError, ValueError)):
            return StoreRefusedError(
                f"{self._url}: this file system cannot do what is asked of it ({type(error).__name__}); it needs "
                'pipe_file(…, mode="create")'
            )
        return None
