from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from speedtronic.checkpoint.export.files import ExportError
from speedtronic.distributed.protocol import Manifest, weights_name
from speedtronic.distributed.pull import pull, target
from speedtronic.distributed.stores import MemoryStore
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError, StoreContentError
from tests.support.published import publish, publish_two_versions, weights_of


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore("pull")
    publish_two_versions(store)
    return store


def test_the_newest_weights_become_a_safetensors_file(store: MemoryStore, tmp_path: Path) -> None:
    manifest = pull(store, tmp_path / "weights.safetensors")

    assert manifest.version == 2
    assert load_file(tmp_path / "weights.safetensors")["number"].tolist() == [2.0]


def test_an_older_version_can_be_pulled(store: MemoryStore, tmp_path: Path) -> None:
    assert pull(store, tmp_path / "w.safetensors", version=1).version == 1
    assert load_file(tmp_path / "w.safetensors")["number"].tolist() == [1.0]


def test_a_folder_gets_a_file_of_the_usual_name(store: MemoryStore, tmp_path: Path) -> None:
    pull(store, tmp_path / "new" / "folder")

    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["model.safetensors"]
    assert target(tmp_path) == tmp_path / "model.safetensors"


def test_a_path_of_another_kind_of_file_is_refused(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "v1.0").mkdir()
    for name in ("w.yaml", "w.bin", "new/w.pt", "file"):
        with pytest.raises(CheckpointError, match="a file that ends in .safetensors, or into a folder"):
            pull(store, tmp_path / name, replace=True)
    assert not (tmp_path / "new").exists()
    pull(store, tmp_path / "v1.0")
    assert (tmp_path / "v1.0/model.safetensors").is_file()


def test_an_existing_file_is_kept_unless_replace_is_set(store: MemoryStore, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(b"mine")

    with pytest.raises(CheckpointError, match="is there already; --force replaces it"):
        pull(store, file)
    assert file.read_bytes() == b"mine"

    pull(store, file, replace=True)
    assert file.read_bytes() == weights_of(2)


def test_a_folder_is_not_replaced(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").mkdir()

    with pytest.raises(CheckpointError, match="is a folder; name a file"):
        pull(store, tmp_path / "w.safetensors", replace=True)


def test_weights_that_do_not_match_the_manifest_are_refused(store: MemoryStore, tmp_path: Path) -> None:
    name = weights_name(2, "n")
    store.delete(name)
    store.put_if_absent(name, bytes(len(weights_of(2))))

    with pytest.raises(StoreContentError, match="the weights of version 2 are not in the store, or not as"):
        pull(store, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_version_whose_weights_were_removed_is_an_error_that_names_the_key(
    store: MemoryStore, tmp_path: Path
) -> None:
    store.delete(weights_name(0, "n"))

    with pytest.raises(StoreContentError, match=r"of version 0 .*distributed\.keep_versions"):
        pull(store, tmp_path / "w.safetensors", version=0)


@pytest.mark.parametrize("version", [-1, 3])
def test_a_missing_version_is_an_error_that_names_the_newest(store: MemoryStore, tmp_path: Path, version: int) -> None:
    with pytest.raises(StoreContentError, match=f"there is no version {version}; the newest is 2"):
        pull(store, tmp_path / "w.safetensors", version=version)


class Overtaken(MemoryStore):
    """A master publishes, and removes what was the newest, at the moment when that is asked for."""

    def __init__(self) -> None:
        super().__init__("overtaken")
        self._head: Manifest | None = None
        self._head = publish_two_versions(self)

    def get(self, name: str, **options: object) -> bytes | None:  # type: ignore[override]  # the same, loosely
        if self._head is not None and name == self._head.weights.path and self._head.version < 4:
            self.delete(name)
            self._head = publish(self, self._head)
        return super().get(name, **options)  # type: ignore[arg-type]  # as they were given


def test_a_version_pruned_during_the_download_is_replaced_by_the_next(tmp_path: Path) -> None:
    assert pull(Overtaken(), tmp_path / "w.safetensors").version == 4
    assert load_file(tmp_path / "w.safetensors")["number"].tolist() == [4.0]


def test_a_full_disk_leaves_nothing_behind(store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FileSystem, file: object, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystem, "write", full)

    with pytest.raises(ExportError, match="cannot be written: No space left on device"):
        pull(store, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []
