"""A test of the one promise that the protocol is built on: a store creates an object only once."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress

from speedtronic.distributed.stores.base import Store
from speedtronic.errors import StoreRefusedError, StoreUnavailableError


def prove_exclusive(store: Store, *, token: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
    """Create one object twice, of which only the first creation may succeed, read it back, and remove it.

    A folder that a service copies between machines passes, since each machine sees its own copy. It is still unsafe:
    two masters may each create the same version.

    Args:
        token: a name that was never used.

    Raises:
        StoreRefusedError: the store lets a second creation through, does not read back what was created, or refuses
            one of the requests.
        StoreUnavailableError: the store does not answer.
    """
    name = f"probe/{token()}"
    first, second = b"first " + name.encode(), b"second " + name.encode()
    # The first answer decides nothing: it is false if a retry repeated a request that had succeeded.
    store.put_if_absent(name, first)
    again = store.put_if_absent(name, second)
    found = store.get(name, limit=len(second))
    with suppress(StoreUnavailableError):  # a few bytes are left, and the question is answered
        store.delete(name)
    if again or found == second:
        raise StoreRefusedError(
            f"{store.url}: this store lets an object be created twice, so that nodes could overwrite each other's "
            "work; it needs exclusive creation (S3: If-None-Match on PutObject)"
        )
    if found != first:
        raise StoreRefusedError(
            f"{store.url}: this store does not read back what was just created in it; it needs strong reads"
        )
