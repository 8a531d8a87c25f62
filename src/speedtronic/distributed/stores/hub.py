"""A Git repository on the Hugging Face Hub, through its own client. Each creation is a commit on top of a known one.

    put a/b      HEAD resolve/main/a/b: absent, at commit C      commit {a/b} with C as its parent
                                                                 412: somebody else committed: look again

A repository takes about 128 commits an hour, so the weights and the momentum of a version wait for its manifest, and
what is to be deleted waits for any commit.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from speedtronic.checkpoint.export.hub import DENIED, denied, trouble_of
from speedtronic.distributed.records import BLOB_NAME
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
from speedtronic.errors import MissingExtraError, StoreError, StoreRefusedError, StoreUnavailableError, warn

BUDGET = 100  # commits an hour
_HOUR = 3600.0  # seconds
_HEADS = "head/"
_SQUASH_EVERY = 50  # versions; deleted weights are kept, and paid for, as long as the history names them
_RACES = 12  # commits of others during one of ours, after which it is tried later
_PAUSE = 0.2  # seconds after a lost race, at most

T = TypeVar("T")


class _Seen(NamedTuple):
    """Whether there is a file of some name at a commit."""

    exists: bool
    commit: str


class HubStore:
    """Objects that are files of a repository of the Hub, in the branch `main`.

    It is for publishing and for slow exchange: all who share a repository share its commits. The repository is made,
    private, where it is missing; one that is public is warned of. Who publishes versions squashes the history.

    A file that is absent at a commit is created by a commit on top of that one: the Hub answers 412 where its branch
    has gone on. Right after a commit the branch may show an older state for a while; commits before one's own
    last are known, and not believed.

    Args:
        repository: `namespace/name`.
        path: what the names of this store's files begin with, without slashes around it; may be empty.
        budget: commits that this process makes in an hour at most.
        clock: seconds, which never jump.
        sleep: waits.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
    """

    def __init__(
        self,
        repository: str,
        path: str = "",
        *,
        budget: int = BUDGET,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            raise MissingExtraError("a store on the Hub needs huggingface_hub; install speedtronic[hub]") from error
        self._api = HfApi(library_name="speedtronic")
        self._repository = repository
        self._path = f"{path}/" if path else ""
        self._url = f"hf://{repository}/{path}".rstrip("/")
        self._budget = budget
        self._clock = clock
        self._sleep = sleep
        self._calls = BoundedCalls(self._url)
        self._committing = threading.Lock()
        self._staged: dict[str, Any] = {}  # files of a version that has no manifest yet
        self._deleted: set[str] = set()  # names that the next commit removes
        self._commits: deque[float] = deque()  # when they were made
        self._not_before = 0.0
        self._own: str | None = None  # the last commit of this process
        self._older: set[str] = set()  # commits before that
        self._versions = 0
        self._ready = False

    @property
    def url(self) -> str:
        return self._url

    # ------------------------------------------------------------------ writing

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        checked_name(name)
        return self._ask(timeout, lambda: self._put(name, bytes(data)))

    def _put(self, name: str, data: bytes) -> bool:
        from huggingface_hub import CommitOperationAdd

        with self._committing:
            self._make_ready()
            added = CommitOperationAdd(path_in_repo=self._path + name, path_or_fileobj=data)
            if BLOB_NAME.fullmatch(name):
                # Ahead of the commit that makes the version, and a part of it. No two of these have one name.
                if name in self._staged:
                    return False
                self._api.preupload_lfs_files(self._repository, [added])
                self._staged[name] = added
                return True
            created = self._commit(name, added)
            if name.startswith(_HEADS):
                self._staged.clear()
                self._versions += created
                if created and self._versions % _SQUASH_EVERY == 0:
                    self._squash()
            return created

    def _make_ready(self) -> None:
        """Make the repository, if it is missing; say if it is public."""
        if self._ready:
            return
        self._api.create_repo(self._repository, private=True, exist_ok=True)
        if not self._api.model_info(self._repository).private:
            warn(f"{self._url} is public: everybody can read the weights; its settings on the Hub change that")
        self._ready = True

    def _commit(self, name: str, added: Any) -> bool:
        from huggingface_hub import CommitOperationDelete

        staged = list(self._staged.values()) if name.startswith(_HEADS) else []
        for _ in range(_RACES):
            seen = self._look(name)
            if seen.exists and name not in self._deleted:
                return False
            self._wait_for_budget()
            removed = [CommitOperationDelete(path) for path in self._still_there(seen.commit)]
            try:
                self._commits.append(self._clock())
                info = self._api.create_commit(
                    self._repository,
                    [*removed, *staged, added],
                    commit_message=name,
                    parent_commit=seen.commit,
                )
            except Exception as error:  # noqa: BLE001 - foreign code; anything but a lost race is raised again
                trouble = trouble_of(error)
                if trouble is None or trouble.status != 412:
                    raise
                self._commits.pop()
                self._sleep(_PAUSE * random.random())
                continue
            self._older.add(seen.commit)
            self._own = info.oid
            self._deleted.clear()
            return True
        raise StoreUnavailableError(f"{self._url}: others commit all the time; let each node have fewer commits")

    def _still_there(self, commit: str) -> list[str]:
        """The files to delete that are there: the answer to an earlier deletion may have been lost."""
        if not self._deleted:
            return []
        paths = [self._path + name for name in sorted(self._deleted)]
        return [found.path for found in self._api.get_paths_info(self._repository, paths, revision=commit)]

    def _wait_for_budget(self) -> None:
        """Raise StoreUnavailableError where a commit must wait."""
        now = self._clock()
        while self._commits and now - self._commits[0] >= _HOUR:
            self._commits.popleft()
        if len(self._commits) >= self._budget:
            raise StoreUnavailableError(
                f"{self._url}: {self._budget} commits were made within an hour, which is the budget; the next is made "
                f"in {_HOUR - (now - self._commits[0]):.0f} s"
            )

    def _squash(self) -> None:
        """Replace the history by one commit. Who knows a commit of it has to look again."""
        with suppress(Exception):  # it is tried again with a later version
            self._api.super_squash_history(self._repository, branch="main")
            if self._own is not None:
                self._older.add(self._own)
            self._own = None

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        """The next commit removes it; for this process it is gone at once."""
        checked_name(name)
        if self._staged.pop(name, None) is None:
            self._deleted.add(name)

    # ------------------------------------------------------------------ reading

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
        checked_name(name)
        if name in self._deleted:
            return None
        most = limit if size is None else min(limit, size)
        data = self._ask(timeout, lambda: self._read(name, most))
        return expected_bytes(data, limit, size, sha256, partial=partial)

    def _read(self, name: str, most: int) -> bytes | None:
        """The bytes of a file, `most` and one more at most; None if there is none."""
        revision = "main"
        for _ in range(3):  # main, one's own last commit, and main again where that was squashed
            with self._request("GET", name, revision) as response:
                if response.status_code == 200:
                    begun = bytearray()
                    for chunk in response.iter_bytes():
                        begun += chunk
                        if len(begun) > most:
                            break
                    return bytes(begun[: most + 1])
                again = self._newer_than(response)
            if again is None:
                return None
            revision = again
        return None

    def _look(self, name: str) -> _Seen:
        revision = "main"
        while True:
            with self._request("HEAD", name, revision, follow=False) as response:
                if response.status_code in {200, 302, 307}:
                    return _Seen(True, response.headers.get("X-Repo-Commit", ""))
                commit = response.headers.get("X-Repo-Commit")
                again = self._newer_than(response)
            if again is None:
                if commit is None:
                    raise StoreUnavailableError(f"{self._url}: the Hub does not say at which commit {name} is absent")
                return _Seen(False, commit)
            revision = again

    def _newer_than(self, response: Any) -> str | None:
        """The revision to ask where a file is absent in an older state than this process knows; None if it is absent.

        Raises what another answer than an absent file means.
        """
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]  # public, and not marked so

        code = response.headers.get("X-Error-Code")
        if code == "RevisionNotFound":  # the history was squashed meanwhile
            self._own = None
            return "main"
        if code == "RepoNotFound" and not self._ready:
            return None  # it is made with the first file
        if code != "EntryNotFound":
            response.read()
            hf_raise_for_status(response)
            raise StoreUnavailableError(f"{self._url}: the Hub answers {response.status_code}")
        return self._own if response.headers.get("X-Repo-Commit") in self._older else None

    def _request(self, method: str, name: str, revision: str, *, follow: bool = True) -> Any:
        from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]  # likewise

        url = f"{self._api.endpoint}/{self._repository}/resolve/{revision}/{self._path}{name}"
        headers = {**build_hf_headers(library_name="speedtronic"), "Accept-Encoding": "identity"}
        return get_session().stream(method, url, headers=headers, follow_redirects=follow, timeout=REQUEST_TIMEOUT)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        """As every store does. It lists the whole folder of the prefix, whatever the marker."""
        checked_prefix(prefix)
        found = self._ask(timeout, lambda: self._list(prefix))
        return first_page(entry for entry in sorted(found) if entry.name > marker)

    def _list(self, prefix: str) -> list[Entry]:
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        folder = (self._path + prefix.rpartition("/")[0]).rstrip("/")
        entries = []
        try:
            for found in self._api.list_repo_tree(self._repository, folder or None, recursive=True, revision="main"):
                name = found.path.removeprefix(self._path)
                wanted = is_name(name) and name.startswith(prefix) and name not in self._deleted
                if isinstance(found, RepoFile) and wanted:
                    entries.append(Entry(name, found.size))
        except EntryNotFoundError:
            return []
        except RepositoryNotFoundError:
            if self._ready:
                raise
            return []
        return entries

    def close(self) -> None:
        """Nothing to close: the client's connections are shared by the process."""

    # ------------------------------------------------------------------ errors

    def _ask(self, timeout: float, call: Callable[[], T]) -> T:
        if self._clock() < self._not_before:
            raise StoreUnavailableError(
                f"{self._url}: the Hub asked to wait; {self._not_before - self._clock():.0f} s are left"
            )
        try:
            return self._calls.within(timeout, call)
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code; an unknown error is a bug, and is raised again
            trouble = trouble_of(error)
            if trouble is None:
                raise
            if trouble.status in DENIED:
                raise StoreRefusedError(f"{self._url}: {denied(trouble.status)}") from None
            if trouble.retry_after is not None:
                self._not_before = self._clock() + trouble.retry_after
            if trouble.passes:
                told = f"answers {trouble.status}" if trouble.status is not None else "does not answer"
                raise StoreUnavailableError(f"{self._url}: the Hub {told}") from None
            raise StoreRefusedError(f"{self._url}: the Hub answers {trouble.status}") from None
