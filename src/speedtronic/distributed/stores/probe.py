"""Whether a store keeps the one promise that the protocol is built on."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from speedtronic.distributed.stores.base import Store
from speedtronic.errors import StoreRefusedError, StoreUnavailableError


def _new_token() -> str:
    return secrets.token_hex(16)


def prove_exclusive(store: Store, *, token: Callable[[], str] = _new_token) -> None:
    """Create one object twice, of which only the first may succeed, read it back, and remove it.

    A folder that a service copies between machines passes, since each machine sees its own copy. It is unsafe all the
    same: two masters may create one version each.

    Args:
        token: a name that was never used.

    Raises:
        StoreRefusedError: the store lets a second creation through, or does not read what was created, or refuses one
            of the requests.
        StoreUnavailableError: the store does not answer.
    """
    name = f"probe/{token()}"
    first, second = b"first " + name.encode(), b"second " + name.encode()
    # False here may be the answer to a repetition of a request whose own answer was lost.
    store.put_if_absent(name, first)
    again = store.put_if_absent(name, second)
    found = store.get(name, limit=len(second))
    _forget(store, name)
    if again or found == second:
        raise StoreRefusedError(
            f"{store.url}: this store lets an object be created twice, so that nodes could overwrite each other's "
            "work; it needs exclusive creation (S3: If-None-Match on PutObject)"
        )
    if found != first:
        raise StoreRefusedError(
            f"{store.url}: this store does not read back what was just created in it; it needs strong reads"
        )


def _forget(store: Store, name: str) -> None:
    try:
        store.delete(name)
    except StoreUnavailableError:
        return  # a few bytes are left, and the question is answered
