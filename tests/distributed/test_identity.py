from __future__ import annotations

import os
from pathlib import Path

import pytest

from speedtronic.distributed.identity import NodeLock, new_nonce, node_folder, resolve_node_id
from speedtronic.distributed.records import session_name, session_number
from speedtronic.distributed.stores.base import checked_name
from speedtronic.errors import RunFolderError, RunLockedError


def test_a_configured_name_is_taken_and_nothing_is_written(tmp_path: Path) -> None:
    assert resolve_node_id("rack-7", tmp_path / "state") == "rack-7"
    assert not (tmp_path / "state").exists()


def test_a_name_is_made_once_and_kept(tmp_path: Path) -> None:
    first = resolve_node_id(None, tmp_path / "state", nonce=lambda: "0a1b2c3d")
    assert first == "node-0a1b2c3d"
    assert resolve_node_id(None, tmp_path / "state") == first


def test_two_state_folders_make_two_names(tmp_path: Path) -> None:
    assert resolve_node_id(None, tmp_path / "a") != resolve_node_id(None, tmp_path / "b")


@pytest.mark.parametrize("content", ["", "../up", "a/b", "ä", "-x", "x" * 200])
def test_a_file_without_a_valid_name_is_refused_with_the_remedy(tmp_path: Path, content: str) -> None:
    (tmp_path / "node_id").write_text(content, encoding="utf-8")
    with pytest.raises(RunFolderError, match="remove it, or set distributed.node_id"):
        resolve_node_id(None, tmp_path)


def test_a_state_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(RunFolderError, match="distributed.state_dir"):
        resolve_node_id(None, tmp_path / "state")


def test_the_nonces_of_two_processes_differ_and_make_names_of_sessions() -> None:
    assert new_nonce() != new_nonce()
    assert session_number(session_name(12, new_nonce())) == 12


def test_names_are_safe_in_a_store() -> None:
    session = session_name(1, new_nonce())
    checked_name(f"in/{resolve_node_id('rack-7', Path())}/{session}/00000001.safetensors")


def test_another_store_or_node_has_another_folder(tmp_path: Path) -> None:
    folders = {node_folder(tmp_path, url, node) for url in ("dir:///a", "dir:///b") for node in ("m", "n")}
    assert len(folders) == 4
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert node_folder(tmp_path, "dir:///a", "m") == node_folder(tmp_path, "dir:///a", "m")


def test_a_second_node_in_the_same_folder_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "n"
    with NodeLock(folder), pytest.raises(RunLockedError, match=r"node 'n' .* by this process .*distributed\.node_id"):
        NodeLock(folder).__enter__()
    with NodeLock(folder):
        pass


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_second_node_in_another_process_is_refused(tmp_path: Path) -> None:
    with NodeLock(tmp_path / "n"):
        child = os.fork()  # a new process would import torch first
        if child == 0:
            try:
                NodeLock(tmp_path / "n").__enter__()
            except RunLockedError as error:
                (tmp_path / "error").write_text(str(error))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    error = (tmp_path / "error").read_text()
    assert f"by process {os.getpid()} on" in error
    assert "distributed.state_dir" in error


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="distributed.state_dir"):
        NodeLock(tmp_path / "file" / "n").__enter__()
