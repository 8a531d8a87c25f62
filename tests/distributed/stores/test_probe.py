"""The proof of exclusive creation."""

from __future__ import annotations

import pytest

from speedtronic.distributed.stores import MemoryStore, RetryingStore, prove_exclusive
from speedtronic.errors import StoreRefusedError, StoreUnavailableError
from tests.support.faulty_store import Faults, FaultyStore


class Overwriting(MemoryStore):
    """Creates what is there already, and says what it is told to say."""

    says = True

    def put_if_absent(self, name, data, *, timeout=60.0):  # type: ignore[no-untyped-def]
        self.delete(name)
        super().put_if_absent(name, data)
        return self.says


class SayingTwice(MemoryStore):
    """Keeps the first, and says that it took the second."""

    def put_if_absent(self, name, data, *, timeout=60.0):  # type: ignore[no-untyped-def]
        super().put_if_absent(name, data)
        return True


class Forgetful(MemoryStore):
    def get(self, name, *, limit, size=None, sha256=None, partial=False, timeout=60.0):  # type: ignore[no-untyped-def]
        return None


class Silent(Overwriting):
    says = False


@pytest.mark.parametrize("kind", [Overwriting, SayingTwice, Silent])
def test_a_store_that_creates_twice_is_refused_by_name(kind: type[MemoryStore]) -> None:
    store = kind("bad")
    with pytest.raises(StoreRefusedError, match="memory://bad: this store lets an object be created twice"):
        prove_exclusive(store)
    assert store.list_after("").entries == ()


def test_a_store_that_does_not_read_what_it_created_is_refused_by_name() -> None:
    with pytest.raises(StoreRefusedError, match="memory://bad: .*does not read back"):
        prove_exclusive(Forgetful("bad"))


def test_the_first_creation_may_answer_false_after_a_lost_answer() -> None:
    for seed in range(50):
        faulty = FaultyStore(MemoryStore(), Faults(seed=seed, failing=0.5))
        prove_exclusive(RetryingStore(faulty, attempts=60, sleep=lambda _: None))


def test_an_overwriting_store_is_refused_also_where_requests_fail() -> None:
    for seed in range(50):
        faulty = FaultyStore(Overwriting(), Faults(seed=seed, failing=0.5))
        with pytest.raises(StoreRefusedError):
            prove_exclusive(RetryingStore(faulty, attempts=60, sleep=lambda _: None))


def test_an_unavailable_store_is_not_refused() -> None:
    with pytest.raises(StoreUnavailableError):
        prove_exclusive(FaultyStore(MemoryStore(), Faults(failing=1.0)))


def test_a_probe_object_that_cannot_be_removed_is_left() -> None:
    class Keeping(MemoryStore):
        def delete(self, name, *, timeout=60.0):  # type: ignore[no-untyped-def]
            raise StoreUnavailableError("busy")

    store = Keeping()
    prove_exclusive(store, token=lambda: "chosen")
    assert [entry.name for entry in store.list_after("").entries] == ["probe/chosen"]
