from __future__ import annotations

from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.distributed.stores import open_store
from tests.support.published import publish_two_versions, weights_of


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; beside others it has a store with version 2."""
    monkeypatch.chdir(tmp_path)
    publish_two_versions(open_store(f"dir://{tmp_path / 'store'}"))
    return tmp_path


def test_the_newest_weights_are_pulled_into_the_working_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diloco", "pull", "store"]) == 0
    assert capsys.readouterr().out == f"pulled: model.safetensors: version 2 of dir://{folder}/store, 76 B\n"
    assert (folder / "model.safetensors").read_bytes() == weights_of(2)


def test_an_older_version_goes_where_it_is_told(folder: Path) -> None:
    assert main(["diloco", "pull", "store", "--version", "1", "--out", "new/w.safetensors"]) == 0
    assert (folder / "new/w.safetensors").read_bytes() == weights_of(1)


def test_what_is_there_is_replaced_by_force_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model.safetensors").write_bytes(b"mine")

    assert main(["diloco", "pull", "store"]) == 2
    assert capsys.readouterr().err == "error: model.safetensors is there already; --force replaces it\n"
    assert (folder / "model.safetensors").read_bytes() == b"mine"

    assert main(["diloco", "pull", "store", "--force"]) == 0
    assert (folder / "model.safetensors").read_bytes() == weights_of(2)


def test_a_version_that_is_not_there_is_one_line_and_bad_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "pull", "store", "--version", "9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("there is no version 9; the newest is 2")
    assert not (folder / "model.safetensors").exists()
