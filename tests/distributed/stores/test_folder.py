"""The store in a folder."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speedtronic.distributed.stores import FolderStore, MemoryStore, prove_exclusive
from speedtronic.distributed.stores.folder import _hard_link as hard_link
from speedtronic.errors import StoreRefusedError, StoreUnavailableError
from tests.distributed.stores.conformance import NAMES, StoreConformance


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        return FolderStore(tmp_path / "made" / "when used")


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_listings_equal_those_of_the_memory_store_after_any_marker(tmp_path: Path) -> None:
    folder, memory = FolderStore(tmp_path), MemoryStore()
    for name in NAMES:
        folder.put_if_absent(name, b"x")
        memory.put_if_absent(name, b"x")
    for prefix in ("", "a", "a/", "a/x", "a/x/", "a/x/y-2", "b", "a0/"):
        for marker in ("", *NAMES, "a", "a/", "a/x", "a/5", "a-", "a-1", "ac", "A", "a/x/y-", "zz"):
            assert folder.list_after(prefix, marker) == memory.list_after(prefix, marker), (prefix, marker)


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "mistyped")
    assert store.get("head/1", limit=1) is None
    assert store.list_after("head/").entries == ()
    store.delete("head/1")
    assert list(tmp_path.iterdir()) == []


def test_an_object_is_a_file_of_its_name_without_leftovers(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put_if_absent("head/00000001.json", b"one")
    store.put_if_absent("head/00000001.json", b"two")
    assert files_under(tmp_path) == ["head/00000001.json"]
    assert (tmp_path / "head/00000001.json").read_bytes() == b"one"


class Crash(BaseException):
    """Stands for the end of the process."""


def test_a_writer_that_dies_before_the_link_leaves_no_visible_object(tmp_path: Path) -> None:
    def crash(*_: object) -> None:
        raise Crash

    with pytest.raises(Crash):
        FolderStore(tmp_path, link=crash).put_if_absent("w/1", b"weights")
    store = FolderStore(tmp_path)
    assert store.get("w/1", limit=10) is None
    assert store.list_after("").entries == ()
    assert store.put_if_absent("w/1", b"again")


def test_bytes_and_folders_are_flushed_before_the_answer(tmp_path: Path) -> None:
    events: list[str] = []

    def note(descriptor: int) -> None:
        path = path_of(descriptor)
        events.append("file" if path.is_file() else str(path.relative_to(tmp_path)))

    def link(*names: Any) -> None:
        events.append("link")
        hard_link(*names)

    FolderStore(tmp_path / "t", sync=note, link=link).put_if_absent("in/a/1", b"x")
    assert events.index("file") < events.index("link")
    assert {".", "t", "t/in"} <= set(events[: events.index("link")]), "the names of the folders above"
    assert events[-1] == "t/in/a", "the object's own name, last"


def test_folders_made_by_another_process_are_flushed_too(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    flushed: list[str] = []
    store = FolderStore(tmp_path, sync=lambda descriptor: flushed.append(str(path_of(descriptor))))
    store.put_if_absent("head/1", b"x")
    assert str(tmp_path) in flushed
    flushed.clear()
    store.put_if_absent("head/2", b"x")
    assert str(tmp_path) not in flushed, "once is enough"


def test_an_object_is_on_the_disk_before_a_second_creation_is_refused(tmp_path: Path) -> None:
    FolderStore(tmp_path).put_if_absent("head/1", b"x")
    flushed: list[str] = []
    store = FolderStore(tmp_path, sync=lambda descriptor: flushed.append(str(path_of(descriptor))))
    assert not store.put_if_absent("head/1", b"y")
    assert flushed == [str(tmp_path / "head")]


def test_a_link_that_succeeded_despite_an_error_counts(tmp_path: Path) -> None:
    def link(*names: Any) -> None:
        hard_link(*names)
        raise FileExistsError(errno.EEXIST, "the repeated request finds the name taken")

    assert FolderStore(tmp_path, link=link).put_if_absent("head/1", b"x")


def test_a_folder_that_vanishes_during_a_creation_is_made_again(tmp_path: Path) -> None:
    tries = 0

    def link(source_folder: int, source: str, folder: int, name: str) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            os.rmdir(path_of(folder))
        hard_link(source_folder, source, folder, name)

    assert FolderStore(tmp_path, link=link).put_if_absent("in/a/1", b"x")
    assert files_under(tmp_path) == ["in/a/1"]


def test_a_folder_is_removed_with_its_last_object(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "s")
    store.put_if_absent("in/a/1/x", b"x")
    store.put_if_absent("in/b/1/x", b"x")
    store.delete("in/a/1/x")
    assert not (tmp_path / "s/in/a").exists()
    store.delete("in/b/1/x")
    assert (tmp_path / "s").exists()
    assert not (tmp_path / "s/in").exists()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused_by_the_probe(tmp_path: Path, code: int) -> None:
    def link(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(StoreRefusedError, match="no hard links.*keep the store on another"):
        prove_exclusive(FolderStore(tmp_path, link=link))
    assert files_under(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, StoreRefusedError),
        (errno.EROFS, StoreRefusedError),
        (errno.ENOSPC, StoreUnavailableError),
        (errno.EIO, StoreUnavailableError),
        (errno.ESTALE, StoreUnavailableError),
    ],
)
def test_temporary_and_lasting_errors_are_told_apart(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(kind, match=os.strerror(code)):
        FolderStore(tmp_path, sync=fail).put_if_absent("head/1", b"x")
    assert files_under(tmp_path) == []


def test_a_mount_that_cannot_flush_folders_is_still_used(tmp_path: Path) -> None:
    def flush(descriptor: int) -> None:
        if path_of(descriptor).is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    assert FolderStore(tmp_path, sync=flush).put_if_absent("head/1", b"x")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = FolderStore(tmp_path / "file")
    with pytest.raises(StoreRefusedError, match="must be a folder"):
        store.put_if_absent("head/1", b"x")
    with pytest.raises(StoreRefusedError, match="must be a folder"):
        store.get("head/1", limit=1)


def test_a_name_below_an_object_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put_if_absent("head/1", b"x")
    with pytest.raises(StoreRefusedError, match="head/1: Not a directory; the store must be"):
        store.put_if_absent("head/1/below", b"x")


def test_links_pipes_and_foreign_names_are_not_objects(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    root = tmp_path / "s"
    (root / "head").mkdir(parents=True)
    (root / "head/link").symlink_to(outside / "secret")
    (root / "head/folder").symlink_to(outside)
    (root / "head/.hidden").write_text("hidden")
    (root / "head/a b").write_text("blank")
    os.mkfifo(root / "head/pipe")
    store = FolderStore(root)
    assert store.list_after("").entries == ()
    assert store.get("head/link", limit=100) is None
    assert store.get("head/pipe", limit=100) is None
    for name in ("link", "folder", "pipe"):
        assert store.get(f"head/{name}", limit=100, partial=True) == b"", "the name is taken"
    assert store.get("head", limit=100, partial=True) == b"", "by a folder of the store's own"


def test_old_leftovers_of_writers_are_removed_and_new_ones_kept(tmp_path: Path) -> None:
    unfinished = tmp_path / ".unfinished"
    unfinished.mkdir()
    for name in ("old", "new"):
        (unfinished / name).write_bytes(b"part")
    day_before = os.stat(unfinished / "new").st_mtime - 25 * 3600
    os.utime(unfinished / "old", (day_before, day_before))
    FolderStore(tmp_path).put_if_absent("head/1", b"x")
    assert files_under(tmp_path) == [".unfinished/new", "head/1"]


def test_a_listing_scans_only_what_comes_after_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path)
    for folder in ("head", "in/old", "in/new", "w"):
        (tmp_path / folder).mkdir(parents=True)
    for version in range(300):
        (tmp_path / f"head/{version:08d}.json").touch()
    scanned: list[str] = []
    scan = os.scandir

    def note(folder: int) -> object:
        scanned.append(str(path_of(folder).relative_to(tmp_path)))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", note)
    assert [entry.name for entry in store.list_after("head/", "head/00000298.json").entries] == ["head/00000299.json"]
    assert store.list_after("in/", "in/new/1/x").entries == ()
    assert scanned == ["head", "in", "in/new", "in/old"]


def test_a_mount_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    released = threading.Event()
    store = FolderStore(tmp_path, sync=lambda descriptor: None if released.wait(30) else None)
    with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.05 s"):
        store.put_if_absent("head/1", b"x", timeout=0.05)
    released.set()


def test_a_mount_that_hung_is_used_again_when_it_answers(tmp_path: Path) -> None:
    released = threading.Event()
    store = FolderStore(tmp_path, sync=lambda descriptor: None if released.wait(30) else None)
    for number in range(4):
        with pytest.raises(StoreUnavailableError, match="no answer within"):
            store.put_if_absent(f"head/{number}", b"x", timeout=0.01)
    with pytest.raises(StoreUnavailableError, match="4 earlier requests still hang"):
        store.get("head/1", limit=1)
    released.set()
    for thread in threading.enumerate():
        if thread.name == "store request":
            thread.join()
    assert store.put_if_absent("head/4", b"x")
    assert store.get("head/0", limit=1) == b"x", "a request that nobody waits for may still take effect"


# ---------------------------------------------------------------------- links


REQUESTS: dict[str, Callable[[FolderStore, str], object]] = {
    "put": lambda store, name: store.put_if_absent(name, b"x"),
    "get": lambda store, name: store.get(name, limit=100),
    "partial get": lambda store, name: store.get(name, limit=100, partial=True),
    "list": lambda store, name: store.list_after(name),
    "list its folder": lambda store, name: store.list_after(name.rpartition("/")[0] + "/"),
    "delete": lambda store, name: store.delete(name),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is none of a store's business, with what a store might reach through a link."""
    folder = tmp_path / "outside"
    (folder / "node").mkdir(parents=True)
    (folder / "empty").mkdir()
    for path in (folder / "1", folder / "node/1"):
        path.write_bytes(b"secret")
    os.utime(folder / "1", (0, 0))
    return folder


def all_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("link", ["head", "in", "in/node"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_nothing_outside_is_read_made_or_deleted_through_a_link_to_a_folder(
    tmp_path: Path, outside: Path, link: str, kind: str
) -> None:
    root, before = tmp_path / "s", all_under(outside)
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside)
    for name in (f"{link}/1", f"{link}/node/1", f"{link}/empty/1", f"{link}/new/1"):
        if kind == "put":
            with pytest.raises(StoreRefusedError, match=f"{link}: Not a directory.*and no links"):
                REQUESTS[kind](FolderStore(root), name)
        else:
            assert REQUESTS[kind](FolderStore(root), name) in (None, ((), False))
    assert all_under(outside) == before


def test_a_link_in_the_place_of_unfinished_files_is_refused(tmp_path: Path, outside: Path) -> None:
    root, before = tmp_path / "s", all_under(outside)
    root.mkdir()
    (root / ".unfinished").symlink_to(outside)
    with pytest.raises(StoreRefusedError, match=r"\.unfinished: Not a directory"):
        FolderStore(root).put_if_absent("head/1", b"x")
    assert all_under(outside) == before, "and the old file there is not taken for a dead writer's"


def test_a_link_in_the_place_of_an_object_takes_its_name(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "s"
    (root / "head").mkdir(parents=True)
    (root / "head/1").symlink_to(outside / "1")
    (root / "head/2").symlink_to(outside / "new")
    store = FolderStore(root)
    for name in ("head/1", "head/2"):
        assert not store.put_if_absent(name, b"x")
        assert store.get(name, limit=100) is None
        assert store.get(name, limit=100, partial=True) == b""
        store.delete(name)
    assert (outside / "1").read_bytes() == b"secret"
    assert not (outside / "new").exists()


def test_a_link_that_appears_during_a_creation_is_not_followed(tmp_path: Path, outside: Path) -> None:
    root = tmp_path / "s"

    def link(*names: Any) -> None:
        (root / "head").rename(root / "moved")
        (root / "head").symlink_to(outside)
        hard_link(*names)

    FolderStore(root, link=link).put_if_absent("head/new", b"x")
    assert not (outside / "new").exists()
    assert (root / "moved/new").read_bytes() == b"x"


def test_an_unfinished_file_that_becomes_a_link_gives_no_object_from_outside(tmp_path: Path, outside: Path) -> None:
    def link(source_folder: int, source: str, folder: int, name: str) -> None:
        os.unlink(source, dir_fd=source_folder)
        os.symlink(outside / "1", source, dir_fd=source_folder)
        hard_link(source_folder, source, folder, name)

    store = FolderStore(tmp_path / "s", link=link)
    store.put_if_absent("head/1", b"x")
    assert store.get("head/1", limit=100) is None
    assert os.stat(outside / "1").st_nlink == 1


def test_the_root_may_lie_behind_links_which_are_resolved_at_once(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    store = FolderStore(tmp_path / "link/run")
    store.put_if_absent("head/1", b"x")
    (tmp_path / "link").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert store.get("head/1", limit=1) == b"x"
    assert store.url == f"dir://{tmp_path}/link/run", "the address stays as it was given"
    assert files_under(tmp_path / "disk") == ["run/head/1"]


def test_no_request_leaves_a_descriptor_open(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "s")
    store.put_if_absent("in/a/1", b"x")
    store.put_if_absent("in/b/2", b"x")
    open_before = len(os.listdir("/proc/self/fd"))
    for request in REQUESTS.values():
        request(store, "in/a/1")
        request(store, "in/a/new/1")
    with pytest.raises(StoreRefusedError):
        store.put_if_absent("in/b/2/3", b"x")
    assert len(os.listdir("/proc/self/fd")) == open_before


# ---------------------------------------------------------------------- a mount that is not there


def known_by_its_number(root: Path) -> FolderStore:
    store = FolderStore(root)
    store.put_if_absent("head/1", b"x")
    return store


def known_as_its_creator(root: Path) -> FolderStore:
    store = known_by_its_number(root)
    store.put_if_absent("store.json", b'{"id":"this store","protocol":2}')
    return store


def known_from_its_identity(root: Path) -> FolderStore:
    known_as_its_creator(root)
    store = FolderStore(root)
    store.get("store.json", limit=100)
    return store


KNOWN = [known_by_its_number, known_as_its_creator, known_from_its_identity]


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_root_that_is_gone_is_unavailable_and_is_not_made_again(
    tmp_path: Path, known: Callable[[Path], FolderStore], kind: str
) -> None:
    root = tmp_path / "s"
    store = known(root)
    root.rename(tmp_path / "away")
    with pytest.raises(StoreUnavailableError, match=r"/s is gone; is it mounted\?"):
        REQUESTS[kind](store, "head/2")
    assert not root.exists()
    (tmp_path / "away").rename(root)
    REQUESTS[kind](store, "head/2")
    assert store.get("head/1", limit=1) == b"x"


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("kind", REQUESTS)
def test_an_empty_folder_in_the_place_of_the_root_is_unavailable_and_stays_empty(
    tmp_path: Path, known: Callable[[Path], FolderStore], kind: str
) -> None:
    root = tmp_path / "s"
    store = known(root)
    root.rename(tmp_path / "away")
    root.mkdir()
    with pytest.raises(StoreUnavailableError, match=r"a.* folder.* is in its place; is it mounted\?"):
        REQUESTS[kind](store, "head/2")
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "away").rename(root)
    REQUESTS[kind](store, "head/2")
    assert store.get("head/1", limit=1) == b"x"


def test_a_root_that_was_only_read_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "s"
    known_by_its_number(root)
    store = FolderStore(root)
    store.get("head/1", limit=1)
    shutil.rmtree(root)
    with pytest.raises(StoreUnavailableError, match="is gone"):
        prove_exclusive(store)
    assert not root.exists()


def test_a_mount_that_returns_with_other_numbers_is_known_by_its_identity(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = known_from_its_identity(root)
    root.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", root)
    assert store.put_if_absent("head/2", b"y")


def test_without_an_identity_another_folder_with_the_same_objects_is_unavailable(tmp_path: Path) -> None:
    root = tmp_path / "s"
    store = known_by_its_number(root)
    root.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", root)
    with pytest.raises(StoreUnavailableError, match="another folder"):
        store.put_if_absent("head/2", b"y")


def test_a_process_that_starts_before_its_store_is_mounted_finds_it_afterwards(tmp_path: Path) -> None:
    known_as_its_creator(tmp_path / "mount")
    (tmp_path / "s").mkdir()
    store = FolderStore(tmp_path / "s")
    prove_exclusive(store)
    assert store.get("store.json", limit=100) is None
    (tmp_path / "s").rename(tmp_path / "bare")
    (tmp_path / "mount").rename(tmp_path / "s")
    assert store.get("store.json", limit=100) == b'{"id":"this store","protocol":2}'
    (tmp_path / "s").rename(tmp_path / "mount")
    (tmp_path / "bare").rename(tmp_path / "s")
    with pytest.raises(StoreUnavailableError, match="without this store's"):
        store.get("head/1", limit=1)


@pytest.mark.parametrize("there", [b"that store", b"this store and more", b"", None])
def test_another_store_in_its_place_is_unavailable_though_it_has_the_number_of_the_first(
    tmp_path: Path, there: bytes | None
) -> None:
    root = tmp_path / "s"
    store = known_as_its_creator(root)
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if there is not None:
        (root / "store.json").write_bytes(there)
    before = all_under(root)
    with pytest.raises(StoreUnavailableError, match=r"without this store's store\.json"):
        store.put_if_absent("head/2", b"y")
    assert all_under(root) == before


def test_an_identity_that_was_read_in_part_or_lost_to_another_says_nothing(tmp_path: Path) -> None:
    root = tmp_path / "s"
    known_as_its_creator(root)
    store = FolderStore(root)
    assert not store.put_if_absent("store.json", b"another")
    assert store.get("store.json", limit=4, partial=True) == b'{"id"'
    assert store.get("store.json", limit=4) is None
    assert store.get("head/1", limit=1) == b"x"


def test_what_is_renamed_during_a_request_stays_in_the_store(tmp_path: Path) -> None:
    root = tmp_path / "s"

    def link(*names: Any) -> None:
        root.rename(tmp_path / "away")
        root.mkdir()
        hard_link(*names)

    assert FolderStore(root, link=link).put_if_absent("head/1", b"x")
    assert list(root.iterdir()) == []
    assert (tmp_path / "away/head/1").read_bytes() == b"x"


def test_a_system_that_opens_nothing_relative_to_a_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(StoreRefusedError, match="Windows cannot open a file relative to a folder.*use s3://"):
        FolderStore(tmp_path)


def test_junk_in_place_of_the_identity_is_not_taken_for_it(tmp_path: Path) -> None:
    """The true folder may be away, and return."""
    known_as_its_creator(tmp_path / "mount")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "store.json").write_text("{}")
    store = FolderStore(tmp_path / "s")
    assert store.get("store.json", limit=100) == b"{}"
    (tmp_path / "s").rename(tmp_path / "bare")
    (tmp_path / "mount").rename(tmp_path / "s")
    assert store.get("store.json", limit=100) == b'{"id":"this store","protocol":2}'
    assert store.put_if_absent("in/a/s/00000001.safetensors", b"data")
