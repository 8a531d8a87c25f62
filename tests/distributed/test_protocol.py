import hashlib
import itertools
import json
import sys
from datetime import datetime
from pathlib import Path
from subprocess import run
from typing import Any

import pytest

from speedtronic.distributed import protocol
from speedtronic.distributed.protocol import (
    IDENTITY,
    DeltaId,
    Manifest,
    check_head,
    check_identity,
    copy_name,
    create_identity,
    create_manifest,
    find_head,
    head_name,
    momentum_name,
    parse_blob_version,
    parse_delta_name,
    put_own,
    read_identity,
    read_manifest,
    read_past,
    weights_name,
)
from speedtronic.distributed.records import (
    Blob,
    NodeMark,
    Outer,
    Rejection,
    SessionMark,
    session_name,
    session_number,
)
from speedtronic.distributed.requests import answer, perform
from speedtronic.distributed.stores.base import Listing
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.support.masters import Fault, Watched

HASH = "0" * 64
STORE = "ab" * 16
SESSION = session_name(2, "0123abcd")
MARK = NodeMark(
    closed_below=2,
    sessions={SESSION: SessionMark(seq=3, last=None, position=(30, 60, 600))},
    tokens_per_step=20.0,
    steps=10,
    seconds=1.5,
    norm=0.25,
    version=1,
    rounds=0.5,
    time=1_767_225_600,
    bytes=1000,
    rejected=1,
    reason="stale",
)


def manifest(version: int = 0, parent: Manifest | None = None, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "protocol": protocol.PROTOCOL,
        "version": version,
        "parent": parent.sha256 if parent is not None else None,
        "nonce": "n",
        "time": "2026-01-01",
        "store": STORE,
        "schema_id": HASH,
        "weights": Blob(path="w/00000000-n.safetensors", size=8, sha256=HASH),
        "momentum": None,
        "outer": Outer(name="nesterov", scalars={"count": 0.25, "steps": 1}),
        "nodes": {"a": MARK},
        "horizon": 0,
        "applied": (DeltaId("a", SESSION, 2).name,),
        "rejected": (Rejection(name=DeltaId("a", SESSION, 3).name, reason="stale"),),
        "fraction": 0.5,
        "rounds": 0.5,
    }
    return Manifest(**fields | changes)


def history(length: int) -> list[Manifest]:
    versions: list[Manifest] = []
    for version in range(length):
        versions.append(manifest(version, versions[-1] if versions else None))
    return versions


def store_with(versions: list[Manifest]) -> Watched:
    store = Watched()
    perform(create_identity(STORE), store.inner)
    for version in versions:
        store.inner.put_if_absent(head_name(version.version), version.to_bytes())
    return store


# --- Names


def test_the_protocol_can_be_read_without_torch() -> None:
    code = "import sys, speedtronic.distributed.protocol; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_parse_back_to_what_they_name() -> None:
    delta = DeltaId("node-1", "20260101-ab.c", 12)
    assert delta.name == "in/node-1/20260101-ab.c/00000012.safetensors"
    assert parse_delta_name(delta.name) == delta
    assert head_name(7) == "head/00000007.json"
    assert parse_blob_version(weights_name(7, "ab-1")) == 7
    assert parse_blob_version(momentum_name(8, "ab-1")) == 8


def test_a_session_s_name_holds_its_number_and_those_of_protocol_1_have_none() -> None:
    assert session_name(12, "9f3a2c1b") == "00000012-9f3a2c1b"
    assert session_number("00000012-9f3a2c1b") == 12
    assert [session_number(name) for name in ("20260101T000000Z-9f3a2c1b", "s", "00000012-9F3A2C1B")] == [0, 0, 0]


def test_names_sort_as_their_numbers_do() -> None:
    numbers = [0, 1, 9, 10, 99_999_999]
    assert sorted(map(head_name, numbers)) == [head_name(number) for number in numbers]
    deltas = [DeltaId("a", "s", 2), DeltaId("a", "s", 10), DeltaId("a", "t", 1), DeltaId("b", "a", 1)]
    assert sorted(deltas) == deltas


def test_a_copy_is_the_same_delta_under_another_name() -> None:
    delta = DeltaId("a", "s", 1)
    assert copy_name(delta.name, 0) == delta.name
    copies = [copy_name(delta.name, copy) for copy in range(1, 4)]
    assert len({delta.name, *copies}) == 4
    assert [parse_delta_name(name) for name in copies] == [delta] * 3
    assert parse_delta_name("in/a/s/00000001-1.safetensors") == delta, "as protocol 1 named it"
    assert copy_name(head_name(3), 8) == "head/00000003.8.json"
    assert parse_blob_version(copy_name(weights_name(3, "n"), 1)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "in/a/s/00000000.safetensors",
        "in/a/s/0000001.safetensors",
        "in/a/s/000000001.safetensors",
        "in/a/s/0000000१.safetensors",
        "in/a/s/00000001.pt",
        "in/a/s/00000001.safetensors.tmp",
        "in/a/00000001.safetensors",
        "in/a/s/x/00000001.safetensors",
        "in/../s/00000001.safetensors",
        "in/a/../00000001.safetensors",
        "in/./s/00000001.safetensors",
        "in//s/00000001.safetensors",
        "in/a b/s/00000001.safetensors",
        "in/a\n/s/00000001.safetensors",
        "/in/a/s/00000001.safetensors",
        "in/a/s/00000001.safetensors\n",
        "in/" + "a" * 129 + "/s/00000001.safetensors",
    ],
)
def test_other_names_are_not_parsed_as_deltas(name: str) -> None:
    assert parse_delta_name(name) is None


def test_a_version_that_eight_digits_do_not_hold_is_refused() -> None:
    assert head_name(99_999_999) == "head/99999999.json"
    with pytest.raises(StoreContentError, match="100000000"):
        head_name(100_000_000)


# --- Manifests


def test_a_manifest_is_the_same_after_being_written_and_read() -> None:
    written = manifest()
    read = Manifest.from_bytes(written.to_bytes())
    assert read == written
    assert read.to_bytes() == written.to_bytes()
    assert written.sha256 == hashlib.sha256(written.to_bytes()).hexdigest()
    assert read.nodes["a"].position == (30, 60, 600)
    assert read.session("a", SESSION) == MARK.sessions[SESSION]
    assert read.session("a", "other") is read.session("b", SESSION) is None


def test_numbers_come_back_to_the_last_bit() -> None:
    third = manifest(rounds=1 / 3, outer=Outer(name="x", scalars={"count": 0.1 + 0.2}))
    read = Manifest.from_bytes(third.to_bytes())
    assert read.rounds == 1 / 3
    assert read.outer.scalars == {"count": 0.1 + 0.2}


def edited(**changes: Any) -> bytes:
    fields = json.loads(manifest().to_bytes())
    return json.dumps(fields | changes, sort_keys=True, separators=(",", ":")).encode()


def without(key: str) -> bytes:
    fields = json.loads(manifest().to_bytes())
    del fields[key]
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


BLOB = {"path": "w/00000000-n.safetensors", "size": 8, "sha256": HASH}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"{" * 100_000,
        b'{"a":' * 100_000,
        manifest().to_bytes()[:-1],
        manifest().to_bytes() + b" ",
        b" " + manifest().to_bytes(),
        manifest().to_bytes().replace(b'"version":0', b'"version":0,"version":0'),
        without("nodes"),
        without("signature"),
        edited(more=1),
        edited(version=-1),
        edited(version=True),
        edited(version=1.0),
        edited(version="0"),
        edited(version=10**30),
        edited(parent="0" * 63),
        edited(rounds=-1.0),
        edited(rounds=float("nan")),
        edited(rounds=float("inf")),
        edited(fraction=1.5),
        edited(applied={"a": 1}),
        edited(weights=BLOB | {"path": "../../etc/passwd"}),
        edited(weights=BLOB | {"path": "w/../w/00000000-n.safetensors"}),
        edited(weights=BLOB | {"size": -1}),
        edited(weights=BLOB | {"sha256": "Z" * 64}),
        edited(protocol=0),
        edited(protocol=3),
        edited(protocol=1),
        edited(store="A" * 32),
        edited(signature="x"),
        edited(nodes={"a": {"seq": 1}}),
        edited(nodes={"..": json.loads(MARK.model_dump_json())}),
        edited(nodes={"a/b": json.loads(MARK.model_dump_json())}),
        edited(nodes={"a": json.loads(MARK.model_dump_json()) | {"sessions": {"..": {}}}}),
        edited(
            nodes={
                "a": json.loads(MARK.model_dump_json())
                | {"sessions": {f"s{n}": {"seq": 1, "last": None, "position": [1, 1, 1]} for n in range(17)}}
            }
        ),
    ],
)
def test_an_invalid_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StoreContentError):
        Manifest.from_bytes(data)


def test_a_delta_up_to_the_mark_is_processed_and_one_of_a_closed_session() -> None:
    head = manifest()
    assert head.has_processed(DeltaId("a", SESSION, 3))
    assert not head.has_processed(DeltaId("a", SESSION, 4))
    assert head.has_processed(DeltaId("a", session_name(1, "0" * 8), 9)), "closed"
    assert head.has_processed(DeltaId("a", "20260101T000000Z-0123abcd", 9)), "of protocol 1, and closed"
    assert not head.has_processed(DeltaId("a", session_name(2, "0" * 8), 1)), "another of the same number"
    assert not head.has_processed(DeltaId("a", session_name(3, "0" * 8), 1))
    assert not head.has_processed(DeltaId("b", session_name(1, "0" * 8), 1)), "an unknown node"


# --- Protocol 1

OLDER = Path(__file__).parent.parent / "fixtures" / "older" / "store" / "head"


def older(**changes: Any) -> bytes:
    fields = json.loads((OLDER / "00000001.json").read_bytes())
    return json.dumps(fields | changes, sort_keys=True, separators=(",", ":")).encode()


def test_a_manifest_of_protocol_1_is_read_and_keeps_its_bytes() -> None:
    data = (OLDER / "00000001.json").read_bytes()
    read = Manifest.from_bytes(data)
    assert (read.protocol, read.version, read.store) == (1, 1, None)
    assert (read.to_bytes(), read.sha256) == (data, hashlib.sha256(data).hexdigest())
    assert read.parent == Manifest.from_bytes((OLDER / "00000000.json").read_bytes()).sha256
    ((key, mark),) = json.loads(data)["marks"].items()
    node, _, session = key.partition("/")
    assert read.session(node, session) == SessionMark(
        seq=mark["seq"], last=None, position=(mark["step"], mark["samples"], mark["tokens"])
    )
    assert read.nodes[node].time == datetime.fromisoformat(mark["time"]).timestamp() // 1
    assert read.has_processed(DeltaId(node, session, mark["seq"]))
    assert not read.has_processed(DeltaId(node, session, mark["seq"] + 1))
    assert not read.has_processed(DeltaId(node, "20250101T000000Z-00000000", 1))


def test_of_many_sessions_of_protocol_1_the_last_are_kept_and_the_others_never_open_again() -> None:
    (mark,) = json.loads(older())["marks"].values()
    marks = {f"a/20260101T0000{n:02}Z-00000000": mark | {"version": n, "bytes": 1} for n in range(20)}
    read = Manifest.from_bytes(older(marks=marks))
    assert sorted(read.nodes["a"].sessions) == sorted(key[2:] for key in marks)[4:]
    assert (read.nodes["a"].bytes, read.nodes["a"].version) == (20, 19)
    assert read.horizon == read.version + 1


@pytest.mark.parametrize(
    "data", [older(version=-1), older(marks={"a": {}}), older(store=STORE), older()[:-1], b" " + older()]
)
def test_an_invalid_manifest_of_protocol_1_is_refused(data: bytes) -> None:
    with pytest.raises(StoreContentError):
        Manifest.from_bytes(data)


# --- The identity


def test_a_store_has_the_identity_that_was_created_first() -> None:
    store = MemoryStore()
    assert perform(read_identity(), store) is None
    assert perform(create_identity(STORE), store) == STORE
    assert perform(create_identity("0" * 32), store) == STORE
    perform(check_identity(STORE), store)
    perform(check_identity(None), store)


def test_a_store_without_the_known_identity_is_not_there() -> None:
    store = MemoryStore()
    with pytest.raises(StoreUnavailableError, match=r"store\.json is gone"):
        perform(check_identity(STORE), store)
    store.put_if_absent(IDENTITY, b"junk")
    with pytest.raises(StoreContentError, match="identity"):
        perform(check_identity(STORE), store)


def test_another_identity_is_another_store() -> None:
    store = MemoryStore()
    perform(create_identity("0" * 32), store)
    with pytest.raises(StoreContentError, match="another store"):
        perform(check_identity(STORE), store)


# --- The head


def test_an_empty_store_has_no_head() -> None:
    assert perform(find_head(None), Watched()) is None


@pytest.mark.parametrize("length", [1, 2, 3, 8, 100])
def test_the_head_is_found_from_any_version_whatever_a_listing_shows(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = history(length)
    store = store_with(versions)
    monkeypatch.setattr(store, "list_after", lambda *arguments, **options: Listing((), more=False))
    for known in (None, *range(length - 1)):
        assert perform(find_head(None if known is None else versions[known]), store) == versions[-1]


def test_a_version_in_a_bare_mount_point_is_none() -> None:
    """It may lie there from an attempt to make it while the mount was away before."""
    store = Watched()
    store.inner.put_if_absent(head_name(1), manifest(1, parent=manifest()).to_bytes())
    with pytest.raises(StoreUnavailableError, match="mounted"):
        perform(find_head(manifest()), store)


@pytest.mark.parametrize("length", [1, 3000])
def test_an_idle_look_is_one_small_request_whatever_the_history(length: int) -> None:
    versions = history(length)
    store = store_with(versions)
    assert perform(find_head(versions[-1], beside=False), store) is None
    assert store.requests == [("get", head_name(length))]
    assert perform(find_head(versions[-1]), store) is None
    assert store.requests[1:] == [("get", head_name(length)), ("list", f"head/{length:08d}.")]


def test_a_look_from_far_behind_takes_few_requests() -> None:
    versions = history(3000)
    for known, most in ((None, 30), (0, 30), (2900, 20), (2997, 7), (2998, 4)):
        store = store_with(versions)
        assert perform(find_head(None if known is None else versions[known]), store) == versions[-1]
        assert len(store.requests) <= most, known


JUNK = [b"", b"garbage", b"[]", b'{"protocol":99}', bytes(100), older()]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
@pytest.mark.parametrize("place", [4, 5, 7, 12, 99])
def test_a_stray_object_ahead_of_the_head_stops_nobody(junk: bytes, place: int) -> None:
    """In the next place it is stepped over; the next version lies beside it."""
    versions = history(4)
    store = store_with(versions)
    store.inner.put_if_absent(head_name(place), junk)
    for known in (None, *versions[:3]):
        assert perform(find_head(known), store) == versions[3]
    assert perform(find_head(versions[3]), store) is None
    for version in range(4, 14):
        versions.append(manifest(version, versions[-1]))
        assert perform(create_manifest(versions[-1], versions[-2]), store)
        for known in (None, *versions[:-1]):
            assert perform(find_head(known), store) == versions[-1], known
        assert perform(find_head(versions[-1]), store) is None
    if place < 14:
        assert store.get(copy_name(head_name(place), 1), limit=10_000) == versions[place].to_bytes()


def test_an_object_too_large_to_read_is_junk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = history(2)
    monkeypatch.setattr(protocol, "MANIFEST_LIMIT", len(versions[1].to_bytes()) + 10)
    store = store_with(versions[:1])
    store.inner.put_if_absent(head_name(1), b"x" * 10_000)
    assert perform(find_head(versions[0]), store) is None
    assert perform(create_manifest(versions[1], versions[0]), store)
    assert perform(find_head(versions[0]), store) == versions[1]


@pytest.mark.parametrize("place", [5, 7, 19])
@pytest.mark.parametrize("ours", [True, False])
def test_a_stray_manifest_far_ahead_does_not_lead_astray(place: int, ours: bool) -> None:
    """Of this store, as a copy from a backup would be, or of another."""
    versions = history(4)
    stray = manifest(place, parent=manifest(nonce="other"), store=STORE if ours else "0" * 32)
    store = store_with([*versions, stray])
    for known in (None, *versions[:3]):
        assert perform(find_head(known), store) == versions[3]
    for version in range(4, 25):
        versions.append(manifest(version, versions[-1]))
        assert perform(create_manifest(versions[-1], versions[-2]), store)
        for known in (None, *versions[:-1]):
            assert perform(find_head(known), store) == versions[-1], known


def test_junk_that_is_removed_after_a_version_was_put_beside_it_forks_nothing() -> None:
    versions = history(3)
    store = store_with(versions)
    store.inner.put_if_absent(head_name(3), b"junk")
    for version in range(3, 7):
        versions.append(manifest(version, versions[-1]))
        assert perform(create_manifest(versions[-1], versions[-2]), store)
        if version == 3:
            store.inner.delete(head_name(3))
            perform(check_head(versions[3]), store)
        for known in (None, *versions[:-1]):
            assert perform(find_head(known), store) == versions[-1], known
    rival = manifest(3, versions[2], nonce="rival")
    assert not perform(create_manifest(rival, versions[2]), store)
    for version in range(6):
        assert perform(read_past(version), store) == versions[version]
        assert perform(read_manifest(version), store) == versions[version]


def test_strays_cost_no_read_for_each_version() -> None:
    """Copies of an older state, as a backup would bring them back, and a name that is free again."""
    versions = history(1000)
    store = store_with(versions[:500])
    for place in (500, 700):
        store.inner.put_if_absent(head_name(place), manifest(place, parent=manifest(nonce="other")).to_bytes())
        for version in range(place, min(place + 200, 1000)):
            assert perform(create_manifest(versions[version], versions[version - 1]), store)
    store.inner.delete(head_name(700))
    store.requests.clear()
    assert perform(find_head(None), store) == versions[899]
    assert len(store.requests) < 150


def test_nine_pieces_of_junk_in_one_place_are_named() -> None:
    versions = history(1)
    store = store_with(versions)
    for copy in range(protocol.MOST_COPIES):
        store.inner.put_if_absent(copy_name(head_name(1), copy), b"junk")
    with pytest.raises(StoreContentError, match=r"head/00000001\.json and the 8 names beside it .*remove"):
        perform(find_head(versions[0]), store)


def test_a_failed_read_is_not_junk() -> None:
    store = store_with(history(1))
    with pytest.raises(StoreUnavailableError):
        Fault(0, done=False, kills=False).run(find_head(manifest()), store.inner)


def test_a_version_of_another_history_is_refused() -> None:
    """The store was restored to an older state, and went on from there."""
    older_state = manifest(nonce="other")
    store = store_with([older_state, manifest(1, parent=older_state)])
    with pytest.raises(StoreContentError, match=r"head/00000000\.json is not what it was"):
        perform(find_head(manifest()), store)


def test_a_version_of_a_later_protocol_is_named_and_not_stepped_over() -> None:
    fields = json.loads(manifest(1, parent=manifest()).to_bytes())
    store = store_with([manifest()])
    store.inner.put_if_absent(head_name(1), json.dumps(fields | {"protocol": 3, "more": 1}).encode())
    with pytest.raises(StoreContentError, match=r"newer Speedtronic \(protocol 3, here 2\)"):
        perform(find_head(manifest()), store)


# --- Creating a version


def test_the_first_of_two_masters_makes_the_version() -> None:
    store = store_with(history(1))
    first, second = (manifest(1, parent=manifest(), nonce=nonce) for nonce in ("first", "second"))
    assert perform(create_manifest(first, manifest()), store)
    assert not perform(create_manifest(second, manifest()), store)
    assert perform(create_manifest(first, manifest()), store), "asked again, it is still its own"
    assert perform(find_head(manifest()), store) == first


def test_no_version_is_made_where_the_one_before_is_gone() -> None:
    for store in (Watched(), store_with([manifest(nonce="other")])):
        with pytest.raises(
            StoreUnavailableError if store.inner.get(head_name(0), limit=9999) is None else StoreContentError
        ):
            perform(create_manifest(manifest(1, parent=manifest()), manifest()), store)
        assert not [name for kind, name in store.requests if kind == "put"]


def test_what_a_bare_mount_point_kept_is_not_another_history() -> None:
    store = store_with([manifest(nonce="put while the mount was away")])
    store.inner.delete(IDENTITY)
    with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
        perform(check_head(manifest()), store)


def test_a_past_version_is_the_one_that_the_next_follows() -> None:
    versions = history(3)
    store = store_with([versions[0], manifest(1, manifest(nonce="other"), nonce="stray"), versions[2]])
    assert perform(read_past(1), store) is None
    store.inner.put_if_absent(copy_name(head_name(1), 1), versions[1].to_bytes())
    assert perform(read_past(1), store) == versions[1]
    assert perform(read_past(7), store) is None


@pytest.mark.parametrize("request_", range(6))
@pytest.mark.parametrize("returns", [1, 2, 3, 4, 5, 6])
def test_a_mount_that_goes_away_while_a_version_is_made_makes_none(request_: int, returns: int) -> None:
    """What is put into the bare folder is lost, so it must not count as made."""
    there, bare = store_with(history(1)).inner, MemoryStore()
    procedure = create_manifest(manifest(1, parent=manifest()), manifest())
    answer_to, made = None, None
    try:
        for number in itertools.count():
            effect = procedure.send(answer_to)
            away = request_ <= number < request_ + returns
            answer_to = answer(effect, bare if away else there, None)
    except StopIteration as end:
        made = end.value
    except StoreUnavailableError:
        made = None
    if made:
        assert there.get(head_name(1), limit=10_000) is not None


def test_errors_about_a_foreign_manifest_are_short_and_printable() -> None:
    data = json.dumps({**json.loads(manifest().to_bytes()), "\x1b[2J" + "x" * 10_000: 1}).encode()
    with pytest.raises(StoreContentError) as caught:
        Manifest.from_bytes(data)
    assert "extra_forbidden" in str(caught.value)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_a_manifest_under_another_name_is_none() -> None:
    store = Watched()
    store.put_if_absent(head_name(1), manifest().to_bytes())
    assert perform(read_manifest(1), store) is None


# --- Objects of one's own

NAME = "in/a/s/00000001.safetensors"


def test_an_object_that_went_into_a_bare_mount_point_is_not_stored() -> None:
    """The folder is empty there: what was put into it is lost when the mount returns."""
    with pytest.raises(StoreUnavailableError, match="mounted"):
        perform(put_own(NAME, b"data", STORE), MemoryStore())


def test_an_own_object_is_put_once() -> None:
    store = Watched()
    assert perform(put_own(NAME, b"data", None), store) == NAME
    assert store.requests == [("put", NAME)]


def test_a_lost_acknowledgement_makes_no_second_object() -> None:
    store = MemoryStore()
    with pytest.raises(StoreUnavailableError):
        Fault(0, done=True, kills=False).run(put_own(NAME, b"data", None), store)
    assert perform(put_own(NAME, b"data", None), store) == NAME
    assert [entry.name for entry in store.list_after("in/").entries] == [NAME]


def test_a_torn_object_gets_a_whole_copy_beside_it_and_is_not_deleted() -> None:
    store = Watched()
    store.inner.put_if_absent(NAME, b"da")
    copy = perform(put_own(NAME, b"data", None), store)
    assert copy == copy_name(NAME, 1)
    assert store.get(copy, limit=100) == b"data"
    assert "delete" not in {kind for kind, _ in store.requests}
    assert perform(put_own(NAME, b"data", None), store) == copy, "sent again, it is found"


def test_a_store_that_keeps_nothing_whole_is_refused() -> None:
    store = Watched()
    for copy in range(protocol.MOST_COPIES):
        store.put_if_absent(copy_name(NAME, copy), b"other")
    with pytest.raises(StoreContentError, match="did not keep"):
        perform(put_own(NAME, b"data", None), store)


def test_fields_of_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        manifest().version = 1  # type: ignore[misc]
