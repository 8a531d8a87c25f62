import hashlib
import json
import sys
from subprocess import run
from typing import Any

import pytest

from speedtronic.distributed import protocol
from speedtronic.distributed.protocol import (
    Blob,
    DeltaId,
    Manifest,
    Mark,
    Outer,
    Rejection,
    copy_name,
    find_head,
    head_name,
    momentum_name,
    parse_blob_version,
    parse_delta_name,
    parse_head_name,
    put_own,
    read_manifest,
    weights_name,
)
from speedtronic.distributed.requests import perform
from speedtronic.distributed.stores.base import Entry, Listing
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.support.masters import Fault, Watched

HASH = "0" * 64
MARK = Mark(
    seq=3,
    step=30,
    samples=60,
    tokens=600,
    tokens_per_step=20.0,
    seconds=1.5,
    version=1,
    rounds=0.5,
    time="2026-01-01",
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
        "schema_id": HASH,
        "weights": Blob(path="w/00000000-n.safetensors", size=8, sha256=HASH),
        "momentum": None,
        "outer": Outer(name="nesterov", scalars={"count": 0.25, "steps": 1}),
        "marks": {"a/s": MARK},
        "applied": ("in/a/s/00000002.safetensors",),
        "rejected": (Rejection(name="in/a/s/00000003.safetensors", reason="stale"),),
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
    for version in versions:
        store.inner.put_if_absent(head_name(version.version), version.to_bytes())
    return store


class Lagging(Watched):
    """Lists only what was there some time ago."""

    def __init__(self, shown: int) -> None:
        super().__init__()
        self.shown = shown

    def list_after(self, prefix: str, marker: str = "", **options: Any) -> Listing:
        page = super().list_after(prefix, marker, **options)
        return Listing(page.entries[: self.shown], False)


# --- Names


def test_the_protocol_can_be_read_without_torch() -> None:
    code = "import sys, speedtronic.distributed.protocol; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_parse_back_to_what_they_name() -> None:
    delta = DeltaId("node-1", "20260101-ab.c", 12)
    assert delta.name == "in/node-1/20260101-ab.c/00000012.safetensors"
    assert parse_delta_name(delta.name) == delta
    assert head_name(7) == "head/00000007.json"
    assert parse_head_name(head_name(7)) == 7
    assert parse_blob_version(weights_name(7, "ab-1")) == 7
    assert parse_blob_version(momentum_name(8, "ab-1")) == 8


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
    assert read.marks["a/s"].position == (30, 60, 600)


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
        without("marks"),
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
        edited(marks={"a/s": {"seq": 1}}),
        edited(marks={"../s": json.loads(MARK.model_dump_json())}),
        edited(marks={"a": json.loads(MARK.model_dump_json())}),
        edited(marks={"a/..": json.loads(MARK.model_dump_json())}),
    ],
)
def test_an_invalid_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StoreContentError):
        Manifest.from_bytes(data)


@pytest.mark.parametrize(("version", "word"), [(2, "newer"), (0, "older")])
def test_another_protocol_is_named(version: int, word: str) -> None:
    with pytest.raises(StoreContentError, match=rf"{word} Speedtronic \(protocol {version}, here 1\)"):
        Manifest.from_bytes(edited(protocol=version, something_new=1))


def test_a_delta_up_to_the_mark_is_processed() -> None:
    assert manifest().has_processed(DeltaId("a", "s", 3))
    assert not manifest().has_processed(DeltaId("a", "s", 4))
    assert not manifest().has_processed(DeltaId("a", "t", 1))


# --- The head


def test_an_empty_store_has_no_head() -> None:
    assert perform(find_head(None), Watched()) is None


@pytest.mark.parametrize("known", [None, 0, 3, 6])
def test_the_head_is_found_from_any_version(known: int | None) -> None:
    versions = history(8)
    store = store_with(versions)
    assert perform(find_head(None if known is None else versions[known]), store) == versions[7]


@pytest.mark.parametrize("length", [1, 3000])
def test_an_idle_look_is_one_small_request_whatever_the_history(length: int) -> None:
    versions = history(length)
    store = store_with(versions)
    assert perform(find_head(versions[-1]), store) is None
    assert store.requests == [("get", head_name(length))]


@pytest.mark.parametrize("known", [None, 0, 3])
@pytest.mark.parametrize("shown", [0, 1, 5])
def test_a_lagging_listing_does_not_hide_the_head(known: int | None, shown: int) -> None:
    versions = history(8)
    store = Lagging(shown)
    for version in versions:
        store.put_if_absent(head_name(version.version), version.to_bytes())
    assert perform(find_head(None if known is None else versions[known]), store) == versions[7]


def test_a_listing_that_still_shows_deleted_manifests_does_no_harm() -> None:
    versions = history(3)
    store = store_with(versions)

    class Ghosts(Watched):
        def list_after(self, prefix: str, marker: str = "", **options: Any) -> Listing:
            return Listing((Entry(head_name(5), 10), Entry("head/junk", 10)), False)

    assert perform(find_head(None), Ghosts(store.inner)) == versions[2]


def test_a_version_that_does_not_follow_the_known_one_is_refused() -> None:
    store = store_with([manifest(), manifest(1, parent=manifest(nonce="other"))])
    with pytest.raises(StoreContentError, match=r"head/00000001\.json does not follow"):
        perform(find_head(manifest()), store)


def test_a_manifest_that_cannot_be_read_is_named() -> None:
    store = Watched()
    store.put_if_absent(head_name(0), b"{}")
    with pytest.raises(StoreContentError, match=r"head/00000000\.json: not a manifest"):
        perform(find_head(None), store)


def test_errors_about_a_foreign_manifest_are_short_and_printable() -> None:
    data = json.dumps({**json.loads(manifest().to_bytes()), "\x1b[2J" + "x" * 10_000: 1}).encode()
    with pytest.raises(StoreContentError) as caught:
        Manifest.from_bytes(data)
    assert "extra_forbidden" in str(caught.value)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


def test_a_manifest_under_another_name_is_refused() -> None:
    store = Watched()
    store.put_if_absent(head_name(1), manifest().to_bytes())
    with pytest.raises(StoreContentError, match="holds version 0"):
        perform(read_manifest(1), store)


# --- Objects of one's own

NAME = "in/a/s/00000001.safetensors"


def test_an_own_object_is_put_once() -> None:
    store = Watched()
    assert perform(put_own(NAME, b"data"), store) == NAME
    assert store.requests == [("put", NAME)]


def test_a_lost_acknowledgement_makes_no_second_object() -> None:
    store = MemoryStore()
    with pytest.raises(StoreUnavailableError):
        Fault(0, done=True, kills=False).run(put_own(NAME, b"data"), store)
    assert perform(put_own(NAME, b"data"), store) == NAME
    assert [entry.name for entry in store.list_after("in/").entries] == [NAME]


def test_a_torn_object_gets_a_whole_copy_beside_it_and_is_not_deleted() -> None:
    store = Watched()
    store.inner.put_if_absent(NAME, b"da")
    copy = perform(put_own(NAME, b"data"), store)
    assert copy == copy_name(NAME, 1)
    assert store.get(copy, limit=100) == b"data"
    assert "delete" not in {kind for kind, _ in store.requests}
    assert perform(put_own(NAME, b"data"), store) == copy, "sent again, it is found"


def test_a_store_that_keeps_nothing_whole_is_refused() -> None:
    store = Watched()
    for copy in range(protocol.MOST_COPIES):
        store.put_if_absent(copy_name(NAME, copy), b"other")
    with pytest.raises(StoreContentError, match="did not keep"):
        perform(put_own(NAME, b"data"), store)


def test_fields_of_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        manifest().version = 1  # type: ignore[misc]
