"""A folder on the Hugging Face Hub: a Git repository of a model, written in one commit."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from speedtronic.errors import ConfigError, MissingExtraError, SpeedtronicError

_ADDRESS = re.compile(r"hf://([A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})")
_TRUE = {"1", "ON", "YES", "TRUE"}
_ATTEMPTS = 5
_LONGEST_PAUSE = 300.0  # seconds


class PublishError(SpeedtronicError):
    """The Hub did not take a commit."""


def repository_of(address: str) -> str:
    """`namespace/name` of an address of the Hub.

    Raises:
        ConfigError: it is none, or the environment says to stay off the Hub.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or match[1].startswith("buckets/"):
        raise ConfigError(f"{address}: not the address of a repository on the Hub; write hf://namespace/name")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        raise ConfigError(f"{address}: HF_HUB_OFFLINE is set, so the Hub is not asked; unset it")
    return match[1]


def publish_to_hub(
    folder: Path,
    address: str,
    *,
    private: bool,
    message: str,
    warn: Callable[[str], None],
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Put the files of a folder into a repository of the Hub, in one commit. What is equal there is not sent again.

    The token comes from `HF_TOKEN`, or from the login of the Hub's own client. Large files go ahead of the commit, from
    the disk. A commit that failed for a while is made again: it changes nothing where it had taken effect.

    Args:
        folder: its files, and none of its folders.
        address: `hf://namespace/name`; the repository is made where it is missing.
        private: for whom a new repository is. One that is there stays as it is.
        message: of the commit.
        warn: told where a repository is public, although a private one was asked for.
        sleep: waits.

    Returns:
        The address of the commit, for a browser.

    Raises:
        ConfigError: the address is wrong, or the Hub denies access.
        MissingExtraError: huggingface_hub is not installed.
        PublishError: the Hub does not answer, or took it after no attempt.
    """
    repository = repository_of(address)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError as error:
        raise MissingExtraError("the Hub's client is not installed; install speedtronic[hub]") from error
    api = HfApi(library_name="speedtronic")

    def commit() -> str:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            warn(f"{address} is public: what is published there can be read by everybody; its settings change that")
        files = sorted(path for path in folder.iterdir() if path.is_file())
        operations = [CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=str(path)) for path in files]
        return str(api.create_commit(repository, operations, commit_message=message).commit_url)

    # The client makes requests for large files again by itself, and none for commits.
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return commit()
        except Exception as error:  # noqa: BLE001 - foreign code, of which some errors pass; the rest is raised again
            pause = _pause_after(error, address, attempt)
            if attempt == _ATTEMPTS:
                told = getattr(trouble_of(error), "status", None) or type(error).__name__
                raise PublishError(f"{address}: the Hub took no commit in {_ATTEMPTS} attempts ({told})") from None
        sleep(pause)
    raise AssertionError("the loop returns or raises")


def _pause_after(error: Exception, address: str, attempt: int) -> float:
    """Seconds to wait before the next attempt, where the error may pass.

    Raises:
        ConfigError: the Hub denies access.
        PublishError: it refuses.
        Exception: the error itself, where it is a bug.
    """
    trouble = trouble_of(error)
    if trouble is None:
        raise error
    if trouble.status in DENIED:
        raise ConfigError(f"{address}: {denied(trouble.status)}") from None
    if not trouble.passes:
        raise PublishError(f"{address}: the Hub refuses the commit ({trouble.status})") from None
    return min(2.0**attempt if trouble.retry_after is None else trouble.retry_after, _LONGEST_PAUSE)


# ---------------------------------------------------------------------- what errors of the client mean


DENIED = (401, 403, 404)
_TEMPORARY = {408, 412, 425, 429, *range(500, 600)}  # 412: another commit was made meanwhile
_TRANSPORTS = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "hf_xet"}


class Trouble(NamedTuple):
    """Why a request to the Hub failed.

    Attributes:
        status: that the Hub answered, or None.
        passes: whether the same request may succeed later.
        retry_after: seconds that the Hub asks to wait, if it does.
    """

    status: int | None
    passes: bool
    retry_after: float | None = None


def trouble_of(error: BaseException) -> Trouble | None:
    """What an error of the Hub's client means; None where it is a bug."""
    cause = error
    while getattr(cause, "response", None) is None and cause.__cause__ is not None:
        cause = cause.__cause__  # of an upload, which has an error of its own
    response = getattr(cause, "response", None)
    if response is not None:
        status, asked = int(response.status_code), str(response.headers.get("Retry-After", ""))
        return Trouble(status, status in _TEMPORARY, float(asked) if asked.isdecimal() else None)
    if isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] in _TRANSPORTS:
        return Trouble(None, passes=True)
    return None


def denied(status: int | None) -> str:
    """What to do about one of `DENIED`."""
    what = {401: "does not know the token", 403: "denies access", 404: "shows no such repository to this token"}
    return (
        f"the Hub {what[status or 404]} ({status}); log in with `hf auth login`, or set HF_TOKEN to a token that may "
        "write there"
    )
