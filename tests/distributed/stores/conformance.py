"""What holds for every store: each is tested by a subclass that has a fixture `store`."""

from __future__ import annotations

import hashlib
import threading

import pytest

from speedtronic.distributed.requests import Get, answer
from speedtronic.distributed.stores import RetryingStore, Store, base, prove_exclusive, s3
from speedtronic.distributed.stores.base import PAGE
from tests.support.counting_store import CountingStore
from tests.support.faulty_store import Faults, FaultyStore

WRONG_NAMES = (
    *(
        "",
        "/",
        "/head/1",
        "head/",
        "head//1",
        "../1",
        "head/../1",
        "head/..",
        ".",
        "./1",
        "head/.hidden",
        ".x/1",
    ),
    *("head\\1", "C:1", "head/1\n", "head/\x001", "héad/1", "head/1 2", "~/1", "-1", "_1", "head/" + "1" * 129),
    *("1/2/3/4/5/6/7/8/9", "head/1?x", "head/%2e%2e", "s3://head"),
)


NAMES = ("a-1/x", "a.b/x", "a/x-1", "a/x/y", "a0", "ab/x", "a/x.y", "B/x", "a/10", "a/9", "a/x/y-2")


class StoreConformance:
    def test_an_object_is_created_once_and_stays_as_it_is(self, store: Store) -> None:
        assert store.put_if_absent("head/00000001.json", b"first")
        assert not store.put_if_absent("head/00000001.json", b"another")
        assert not store.put_if_absent("head/00000001.json", b"")
        assert store.get("head/00000001.json", limit=100) == b"first"

    def test_of_many_simultaneous_creations_one_succeeds(self, store: Store) -> None:
        created = [False] * 6
        together = threading.Barrier(len(created))

        def create(index: int) -> None:
            together.wait()
            created[index] = store.put_if_absent("head/00000007.json", b"by %d" % index)

        threads = [threading.Thread(target=create, args=(index,)) for index in range(len(created))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(created) == 1
        assert store.get("head/00000007.json", limit=100) == b"by %d" % created.index(True)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_a_created_object_is_readable_at_once(self, store: Store, kind: type[bytes]) -> None:
        data = bytes(range(256)) * 4096
        assert store.put_if_absent("in/node-a/s.1/00000001.safetensors", kind(data))
        assert store.get("in/node-a/s.1/00000001.safetensors", limit=len(data)) == data

    def test_an_empty_object_is_an_object(self, store: Store) -> None:
        assert store.put_if_absent("in/empty", b"")
        assert not store.put_if_absent("in/empty", b"")
        assert store.get("in/empty", limit=10) == b""
        assert store.get("in/empty", limit=0, size=0) == b""
        assert store.get("in/empty", limit=10, size=1) is None
        assert store.list_after("in/").entries == (("in/empty", 0),)

    def test_a_missing_object_is_none(self, store: Store) -> None:
        assert store.get("head/00000001.json", limit=100) is None
        store.put_if_absent("head/00000001.json", b"there")
        assert store.get("head/00000002.json", limit=100) is None
        assert store.get("head", limit=100) is None
        assert store.get("head/00000001.json/below", limit=100) is None

    def test_an_unexpected_size_or_checksum_counts_as_absent(self, store: Store) -> None:
        data = b"0123456789"
        digest = hashlib.sha256(data).hexdigest()
        store.put_if_absent("w/1", data)
        assert store.get("w/1", limit=10) == data
        assert store.get("w/1", limit=10, size=10, sha256=digest) == data
        assert store.get("w/1", limit=9) is None
        assert store.get("w/1", limit=9, size=10) is None
        assert store.get("w/1", limit=100, size=9) is None
        assert store.get("w/1", limit=100, size=11) is None
        assert store.get("w/1", limit=100, sha256=hashlib.sha256(b"other").hexdigest()) is None

    def test_a_partial_read_tells_what_is_too_long_from_what_is_absent(self, store: Store) -> None:
        store.put_if_absent("head/1", b"0123456789")
        store.put_if_absent("head/2", b"")
        assert store.get("head/1", limit=10, partial=True) == b"0123456789"
        assert store.get("head/1", limit=100, partial=True) == b"0123456789"
        assert store.get("head/1", limit=4, partial=True) == b"01234"
        assert store.get("head/1", limit=0, partial=True) == b"0"
        assert store.get("head/2", limit=4, partial=True) == b""
        assert store.get("head/3", limit=4, partial=True) is None

    def test_a_partial_read_passes_through_retries(self, store: Store) -> None:
        store.put_if_absent("head/1", b"0123456789")
        through = RetryingStore(CountingStore(FaultyStore(store, Faults())))
        assert through.get("head/1", limit=4, partial=True) == b"01234"
        assert answer(Get("head/1", limit=4, partial=True), through, None) == b"01234"
        assert answer(Get("head/1", limit=4), through, None) is None

    def test_a_listing_continues_after_any_of_its_names_and_ascends_within_a_folder(self, store: Store) -> None:
        for name in NAMES:
            store.put_if_absent(name, name.encode())
        listing = store.list_after("")
        assert sorted(listing.entries) == sorted((name, len(name)) for name in NAMES)
        for index, (marker, _) in enumerate(listing.entries):
            assert store.list_after("", marker) == (listing.entries[index + 1 :], False), marker
        for folder in ("a", "a/x"):
            inside = [name for name, _ in listing.entries if name.rpartition("/")[0] == folder]
            assert len(inside) > 1
            assert inside == sorted(inside)

    def test_in_one_folder_a_listing_begins_after_any_name(self, store: Store) -> None:
        for version in (1, 2, 5, 10):
            store.put_if_absent(f"head/{version:08d}.json", b"x")

        def versions_after(version: int) -> list[int]:
            return [int(name[5:13]) for name, _ in store.list_after("head/", f"head/{version:08d}.json").entries]

        assert versions_after(0) == [1, 2, 5, 10]
        assert versions_after(2) == [5, 10]
        assert versions_after(7) == [10]
        assert versions_after(10) == []

    def test_a_listing_has_the_names_that_begin_with_its_prefix(self, store: Store) -> None:
        for name in ("in/a/1/x", "in/a/2/x", "in/ab/1/x", "in/b/1/x", "inn/x", "w/x"):
            store.put_if_absent(name, b"1")

        def names(prefix: str, marker: str = "") -> list[str]:
            return [entry.name for entry in store.list_after(prefix, marker).entries]

        assert names("in/") == ["in/a/1/x", "in/a/2/x", "in/ab/1/x", "in/b/1/x"]
        assert names("in/a") == ["in/a/1/x", "in/a/2/x", "in/ab/1/x"]
        assert names("in/a/") == ["in/a/1/x", "in/a/2/x"]
        assert names("in/a/1/x") == ["in/a/1/x"]
        assert names("in/", "in/a/1/x") == ["in/a/2/x", "in/ab/1/x", "in/b/1/x"]
        assert names("in/", "in/b/1/x") == []
        assert names("none/") == []

    def test_a_long_listing_comes_in_pages(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        assert PAGE == 1000
        for module in (base, s3):
            monkeypatch.setattr(module, "PAGE", 3)
        names = [f"head/{version:08d}.json" for version in range(7)]
        for name in names:
            store.put_if_absent(name, b"x")
        pages = [store.list_after("head/")]
        while pages[-1].more:
            pages.append(store.list_after("head/", pages[-1].entries[-1].name))
        assert [len(page.entries) for page in pages] == [3, 3, 1]
        assert [entry.name for page in pages for entry in page.entries] == names
        assert not store.list_after("head/", names[3]).more, "three are left, which is a page"

    def test_a_long_listing_of_many_folders_comes_in_pages(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (base, s3):
            monkeypatch.setattr(module, "PAGE", 3)
        names = [f"in/node-{node}/s/{number:08d}" for node in range(3) for number in range(2)] + ["in/node/s-1/1"]
        for name in names:
            store.put_if_absent(name, b"x")
        store.put_if_absent("inn/1", b"x")
        pages = [store.list_after("in/")]
        while pages[-1].more:
            pages.append(store.list_after("in/", pages[-1].entries[-1].name))
        assert [len(page.entries) for page in pages] == [3, 3, 1]
        assert sorted(entry.name for page in pages for entry in page.entries) == names

    def test_a_deleted_object_is_gone_and_its_name_is_free(self, store: Store) -> None:
        store.put_if_absent("in/a/1", b"x")
        store.put_if_absent("in/a/2", b"y")
        store.delete("in/a/1")
        assert store.get("in/a/1", limit=10) is None
        assert store.list_after("in/").entries == (("in/a/2", 1),)
        store.delete("in/a/1")
        store.delete("in/none/1")
        store.delete("in/a/2")
        assert store.list_after("in/").entries == ()
        assert store.put_if_absent("in/a/1", b"z")
        assert store.get("in/a/1", limit=10) == b"z"

    def test_every_method_refuses_an_invalid_name(self, store: Store) -> None:
        for name in WRONG_NAMES:
            with pytest.raises(ValueError, match="not a valid name"):
                store.put_if_absent(name, b"x")
            with pytest.raises(ValueError, match="not a valid name"):
                store.get(name, limit=10)
            with pytest.raises(ValueError, match="not a valid name"):
                store.delete(name)

    def test_an_invalid_prefix_is_refused(self, store: Store) -> None:
        for prefix in ["/", "../", "head/..", "head//", ".unfinished", "a b"]:
            with pytest.raises(ValueError, match="not a valid prefix"):
                store.list_after(prefix)

    def test_it_passes_the_probe_which_leaves_nothing_behind(self, store: Store) -> None:
        prove_exclusive(store)
        prove_exclusive(store)
        assert store.list_after("").entries == ()

    def test_the_result_is_the_same_when_a_third_of_the_requests_fail(self, store: Store) -> None:
        faulty = FaultyStore(store, Faults(seed=11, failing=0.3))
        reliable = RetryingStore(CountingStore(faulty), attempts=40, sleep=lambda _: None)
        names = [f"in/node/{index:08d}" for index in range(20)]
        for name in names:
            reliable.put_if_absent(name, name.encode())
            assert not reliable.put_if_absent(name, b"again")
            assert reliable.get(name, limit=100) == name.encode()
        for name in names[:10]:
            reliable.delete(name)
        assert [entry.name for entry in reliable.list_after("in/").entries] == names[10:]
