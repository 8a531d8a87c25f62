from __future__ import annotations

import subprocess
import sys

import pytest

from speedtronic.distributed.protocol import head_name
from speedtronic.distributed.records import SessionMark, seconds_of
from speedtronic.distributed.status import NodeStatus, StoreStatus, store_status
from speedtronic.distributed.stores import MemoryStore
from speedtronic.errors import StoreContentError
from tests.support.published import MARK, OLD, TIME, publish, publish_two_versions, weights_of

NOW = seconds_of(TIME) + 9  # 60 seconds after the marks
SESSION = "00000001-0000aaaa"


@pytest.fixture
def store() -> MemoryStore:
    """Version 2: `a` is in version 1, `b` in version 2."""
    store = MemoryStore("status")
    publish_two_versions(store)
    return store


def status_at(store: MemoryStore, now: float = NOW) -> StoreStatus:
    return store_status(store, now=now)


def node(status: StoreStatus, name: str) -> NodeStatus:
    return next(node for node in status.nodes if node.name == name)


def test_the_status_shows_the_newest_version(store: MemoryStore) -> None:
    status = status_at(store)

    assert (status.version, status.rounds, status.weights_bytes) == (2, 1.5, len(weights_of(2)))
    assert (status.time, status.age, status.pace) == (TIME, 9.0, 0.0)
    assert (status.url, status.id, status.protocol) == (store.url, "0" * 32, 2)
    assert [node.name for node in status.nodes] == ["a", "b"]


def test_a_node_is_as_far_behind_as_the_rounds_since_its_last_delta(store: MemoryStore) -> None:
    status = status_at(store)

    a, b = node(status, "a"), node(status, "b")
    assert (a.version, a.versions_behind, a.rounds_behind) == (1, 1, 0.5)
    assert (b.versions_behind, b.rounds_behind) == (0, 0.0)
    assert (a.step, a.samples, a.tokens, a.bytes) == (75, 1200, 153_600, 3000)
    assert (a.steps, a.seconds, a.tokens_per_step) == (25, 4.0, 2048.0)
    assert (a.seen, a.silent) == (MARK.time, 60.0)
    assert (a.rejected, a.reason) == (1, "stale")
    assert (b.rejected, b.reason) == (0, None)
    (session,) = a.sessions
    assert (session.session, session.known, session.seq, session.last) == (SESSION, True, 3, None)


def test_waiting_deltas_are_counted_and_processed_ones_are_not(store: MemoryStore) -> None:
    store.put_if_absent(f"in/a/{SESSION}/00000003.safetensors", bytes(900))  # processed, and not removed yet
    store.put_if_absent(f"in/a/{SESSION}/00000004.safetensors", bytes(1000))
    store.put_if_absent(f"in/a/{SESSION}/00000005.safetensors", bytes(1100))

    status = status_at(store)

    a = node(status, "a")
    assert (a.outstanding, a.outstanding_bytes, a.bytes) == (2, 2100, 5100)
    assert (status.outstanding, status.outstanding_bytes, status.unknown_sessions) == (2, 2100, 0)


@pytest.mark.parametrize("copy", [".1", "-1"])
def test_a_torn_delta_and_its_copy_count_as_one(store: MemoryStore, copy: str) -> None:
    store.put_if_absent(f"in/b/{SESSION}/00000004.safetensors", bytes(10))
    store.put_if_absent(f"in/b/{SESSION}/00000004{copy}.safetensors", bytes(1000))

    b = node(status_at(store), "b")

    assert (b.outstanding, b.outstanding_bytes) == (1, 1000)


def test_a_session_that_no_version_knows_is_the_newest_of_its_node(store: MemoryStore) -> None:
    store.put_if_absent("in/a/00000000-new/00000001.safetensors", bytes(1000))

    status = status_at(store)
    old, new = node(status, "a").sessions

    assert (old.session, new.session) == (SESSION, "00000000-new")
    assert (new.known, new.seq, new.outstanding, new.step) == (False, 0, 1, 0)
    assert status.unknown_sessions == 1
    assert node(status, "a").step == 75


def test_of_open_sessions_the_one_that_is_furthest_comes_last() -> None:
    store = MemoryStore("open")
    further = SessionMark(seq=1, last=None, position=(100, 1600, 200_000))
    missing = SessionMark(seq=2, last=4, position=(50, 800, 100_000))
    sessions = {"00000009-00000000": missing, "00000002-00000000": further, SESSION: OLD}
    publish(store, publish(store), nodes={"a": MARK.model_copy(update={"sessions": sessions})})

    a = node(status_at(store), "a")

    assert [session.seq for session in a.sessions] == [2, 3, 1]
    assert (a.step, a.sessions[0].last) == (100, 4)


def test_a_node_is_shown_before_its_first_delta_is_processed(store: MemoryStore) -> None:
    store.put_if_absent("in/c/s/00000001.safetensors", bytes(1000))

    status = status_at(store)

    assert [node.name for node in status.nodes] == ["a", "b", "c"]
    c = node(status, "c")
    assert (c.health, c.seen, c.silent, c.version, c.rounds_behind) == ("unknown", None, None, None, None)
    assert (c.outstanding, c.bytes) == (1, 1000)


# --- Who runs


def paced(store: MemoryStore, waiting: bool = True) -> None:
    """Two versions, ten minutes apart. The node took 100 s for its last delta, which entered with the second."""
    first = publish(store, time="2031-05-06T06:59:00+00:00")
    mark = MARK.model_copy(update={"seconds": 100.0, "time": seconds_of(TIME)})
    publish(store, first, nodes={"a": mark})
    if waiting:
        store.put_if_absent(f"in/a/{SESSION}/00000004.safetensors", b"12")


@pytest.mark.parametrize(
    ("after", "master", "of_node"),
    [
        (0, "running", "running"),
        (1800, "running", "running"),
        (1801, "late", "running"),
        (2100, "late", "running"),
        (2101, "late", "late"),
        (6000, "late", "late"),
        (6001, "silent", "late"),
        (7001, "silent", "gone"),
        (-50, "running", "running"),  # this machine's clock is behind
    ],
)
def test_a_node_that_is_silent_for_long_is_late_and_then_gone_and_a_master_silent(
    after: int, master: str, of_node: str
) -> None:
    store = MemoryStore("paced")
    paced(store)

    status = status_at(store, seconds_of(TIME) + after)

    assert status.pace == 600.0
    assert (status.master, node(status, "a").health) == (master, of_node)


def test_a_master_for_whom_nothing_waits_may_run_or_not() -> None:
    store = MemoryStore("paced")
    paced(store, waiting=False)

    assert status_at(store, seconds_of(TIME) + 10**6).master == "unknown"


def test_before_the_second_version_the_nodes_tell_how_long_one_takes() -> None:
    store = MemoryStore("first")
    publish(store, nodes={"a": MARK.model_copy(update={"seconds": 200.0})})
    store.put_if_absent(f"in/a/{SESSION}/00000004.safetensors", b"12")

    assert [status_at(store, seconds_of(TIME) + after).master for after in (600, 601)] == ["running", "late"]


def test_machines_that_are_faster_than_a_minute_are_not_late_before_three() -> None:
    store = MemoryStore("fast")
    publish_two_versions(store)
    store.put_if_absent(f"in/a/{SESSION}/00000004.safetensors", b"12")

    assert [status_at(store, seconds_of(TIME) + after).master for after in (180, 181)] == ["running", "late"]


# --- What is read


def test_names_that_are_not_deltas_are_ignored(store: MemoryStore) -> None:
    before = status_at(store)
    store.put_if_absent("in/readme.txt", b"hello")
    store.put_if_absent(f"in/a/{SESSION}/00000000.safetensors", b"x")

    assert status_at(store) == before


def test_all_pages_of_waiting_deltas_are_counted(store: MemoryStore) -> None:
    for seq in range(4, 2504):
        store.put_if_absent(f"in/b/{SESSION}/{seq:08d}.safetensors", b"12")

    status = status_at(store)

    assert (status.outstanding, status.outstanding_bytes) == (2500, 5000)


def test_neither_weights_nor_deltas_are_downloaded(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_if_absent(f"in/a/{SESSION}/00000004.safetensors", bytes(1000))
    read = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda name, **options: [read.append(name), get(name, **options)][1])

    status_at(store)

    assert read
    assert all(name.startswith("head/") or name == "store.json" for name in read)


def test_a_store_without_a_version_is_an_error_with_the_remedy() -> None:
    with pytest.raises(StoreContentError, match="no master has published yet.*speedtronic diloco master CONFIG"):
        status_at(MemoryStore("nothing"))


def test_a_store_whose_first_version_is_junk_alone_names_the_store() -> None:
    store = MemoryStore("odd")
    store.put_if_absent(head_name(0), b"{}")
    for copy in range(1, 9):
        store.put_if_absent(f"head/00000000.{copy}.json", b"{}")

    with pytest.raises(StoreContentError, match=r"^memory://odd: head/00000000\.json and the 8 names beside it"):
        status_at(store)


def test_looking_at_a_store_loads_no_torch() -> None:
    code = (
        "import speedtronic.distributed.status, sys\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
