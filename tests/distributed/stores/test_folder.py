"""The store in a folder."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from speedtronic.distributed.stores import FolderStore, MemoryStore, prove_exclusive
from speedtronic.errors import StoreRefusedError, StoreUnavailableError
from tests.distributed.stores.conformance import NAMES, StoreConformance


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        return FolderStore(tmp_path / "made" / "when used")


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
    def crash(source: Path, target: Path) -> None:
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
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append("file" if path.is_file() else str(path.relative_to(tmp_path)))

    def link(source: Path, target: Path) -> None:
        events.append("link")
        os.link(source, target)

    FolderStore(tmp_path / "t", sync=note, link=link).put_if_absent("in/a/1", b"x")
    assert events.index("file") < events.index("link")
    assert {".", "t", "t/in"} <= set(events[: events.index("link")]), "the names of the folders above"
    assert events[-1] == "t/in/a", "the object's own name, last"


def test_folders_made_by_another_process_are_flushed_too(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    flushed: list[str] = []
    store = FolderStore(tmp_path, sync=lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    store.put_if_absent("head/1", b"x")
    assert str(tmp_path) in flushed
    flushed.clear()
    store.put_if_absent("head/2", b"x")
    assert str(tmp_path) not in flushed, "once is enough"


def test_an_object_is_on_the_disk_before_a_second_creation_is_refused(tmp_path: Path) -> None:
    FolderStore(tmp_path).put_if_absent("head/1", b"x")
    flushed: list[str] = []
    store = FolderStore(tmp_path, sync=lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    assert not store.put_if_absent("head/1", b"y")
    assert flushed == [str(tmp_path / "head")]


def test_a_link_that_succeeded_despite_an_error_counts(tmp_path: Path) -> None:
    def link(source: Path, target: Path) -> None:
        os.link(source, target)
        raise FileExistsError(errno.EEXIST, "the repeated request finds the name taken")

    assert FolderStore(tmp_path, link=link).put_if_absent("head/1", b"x")


def test_a_folder_that_vanishes_during_a_creation_is_made_again(tmp_path: Path) -> None:
    tries = 0

    def link(source: Path, target: Path) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            target.parent.rmdir()
        os.link(source, target)

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
    def link(source: Path, target: Path) -> None:
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
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    assert FolderStore(tmp_path, sync=flush).put_if_absent("head/1", b"x")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    store = FolderStore(tmp_path / "file")
    with pytest.raises(StoreRefusedError, match="must be a folder"):
        store.put_if_absent("head/1", b"x")
    assert store.get("head/1", limit=1) is None


def test_a_name_below_an_object_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put_if_absent("head/1", b"x")
    with pytest.raises(StoreRefusedError, match="Not a directory"):
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

    def note(path: Path) -> object:
        scanned.append(str(path.relative_to(tmp_path)))
        return scan(path)

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
