"""`speedtronic doctor` says what a run finds on this machine, and what is likely to go wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speedtronic.cli import doctor, main
from speedtronic.cli.doctor import Finding
from speedtronic.durable.lock import FolderLock
from tests.support.cases import case
from tests.support.configs import tiny


@pytest.fixture(autouse=True)
def _small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", 10**6)


def by_part(findings: Iterable[Finding]) -> dict[str, tuple[str, str]]:
    return {finding.part: (finding.state, finding.says) for finding in findings}


def write_config(folder: Path, **sections: Any) -> str:
    path = folder / "my.yaml"
    path.write_text(json.dumps(tiny(folder / "run", **sections)))
    return str(path)


def test_a_sound_machine_is_exit_code_0_and_nothing_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json"]) == 0
    found = {entry["part"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["torch"]["state"] == "ok"
    assert "fp32" in found["cpu"]["says"]
    assert {"speedtronic", "disk", "disk speed", "locks", "cache"} <= found.keys()
    assert list(tmp_path.iterdir()) == []


def test_with_a_configuration_it_looks_at_what_that_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").mkdir()
    config = write_config(
        tmp_path, distributed={"enabled": True, "repo_id": f"dir://{tmp_path}/store", "node_id": "ann"}
    )
    assert main(["doctor", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["part", "what", "was", "found"]
    assert next(line for line in lines if line.startswith("store")).endswith("it holds no run yet")
    assert any(line.split()[:2] == ["configuration", "ok"] for line in lines)

    assert main(["doctor", config, "data.text_path=/no/such/file", "distributed.codec=int4"]) == 1
    shown = capsys.readouterr().out
    assert "data.text_path: there is no /no/such/file" in shown
    assert "not part of this version yet" in shown

    assert main(["doctor", config, f"distributed.repo_id=dir://{config}"]) == 1
    assert any(line.split()[:2] == ["store", "problem"] for line in capsys.readouterr().out.splitlines())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "store"]


def test_packages_that_are_missing_or_too_old_are_problems_and_extras_are_notes() -> None:
    found = by_part(
        doctor.look_at_packages(
            [
                "torch>=99.1",
                "numpy>=1.26",
                "no-such-package-here>=1",
                'no-such-extra>=3; extra == "books"',
                'rich>=13.7; extra == "cards"',
                'never-shown; extra == "dev"',
            ]
        )
    )
    assert found["torch"][0] == "problem"
    assert "too old: at least 99.1" in found["torch"][1]
    assert found["numpy"][0] == "ok"
    assert found["no-such-package-here"] == ("problem", "not installed; pip install no-such-package-here")
    assert found["not installed"] == ("note", "speedtronic[books]: install what you need")
    assert found["rich"][0] == "ok"
    assert "never-shown" not in str(found)


def test_a_package_of_several_extras_is_told_of_once() -> None:
    found = list(doctor.look_at_packages(['rich>=13.7; extra == "one"', 'rich>=13; extra == "two"']))
    assert [finding.part for finding in found].count("rich") == 1


def test_a_missing_compiler_is_a_warning_only_where_something_compiles() -> None:
    for compiles, state in ((True, "warning"), (False, "note")):
        with case(compiles):
            found = by_part(doctor.look_at_compilers({"CXX": "no-such-compiler"}, compiles=compiles))
            assert found["compiler"][0] == state
            assert "no-such-compiler" in found["compiler"][1]


def test_threads_that_idle_or_share_processors_are_warnings() -> None:
    for value, says in (("1", "1 of 4 processors"), ("8", "8 threads share 4 processors"), ("4", ""), ("", "")):
        with case(value):
            found = by_part(doctor.look_at_threads({"OMP_NUM_THREADS": value}, processors=lambda: 4))
            assert says in str(found)
            assert bool(found) == bool(says)


def test_little_shared_memory_is_a_warning_where_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=64 * 2**20, free=0))
    for workers, state in ((True, "warning"), (False, "note")):
        with case(workers):
            ((_, found, says),) = doctor.look_at_shared_memory(Path("/dev/shm"), workers=workers)
            assert (found, "--shm-size" in says) == (state, True)
    monkeypatch.undo()
    assert list(doctor.look_at_shared_memory(Path("/no/such/place"), workers=True)) == []


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "a/b"))
    assert by_part(doctor.look_at_cache())["cache"] == ("ok", str(tmp_path / "a/b"))
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # root may write anywhere
    state, says = by_part(doctor.look_at_cache())["cache"]
    assert state == "warning"
    assert says.startswith(f"{tmp_path} cannot be written")


def test_a_folder_without_locks_and_one_that_cannot_be_written_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: FolderLock) -> FolderLock:
        raise lock._unusable_error(OSError(95, "Operation not supported"))

    monkeypatch.setattr(FolderLock, "__enter__", refuse)
    found = by_part(doctor.look_at_folder(tmp_path / "run", Path("/no/mounts")))
    assert found["locks"][0] == "problem"
    assert "Operation not supported" in found["locks"][1]
    assert list(tmp_path.iterdir()) == []

    def full(*args: object, **options: object) -> object:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    found = by_part(doctor.look_at_folder(tmp_path, Path("/no/mounts")))
    assert found["disk"] == ("problem", f"{tmp_path} cannot be written: Read-only file system; set run.output_dir")


def test_a_mounted_folder_is_a_note(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n/dev/sdb /other xfs rw 0 0\n")
    assert "is on nfs4" in by_part(doctor.look_at_folder(tmp_path / "run", mounts))["mount"][1]
    mounts.write_text("/dev/sda / ext4 rw 0 0\n")
    assert "mount" not in by_part(doctor.look_at_folder(tmp_path / "run", mounts))


def test_the_speed_of_the_disk_is_measured(tmp_path: Path) -> None:
    seconds = iter([10.0, 10.5])
    found = by_part(doctor.look_at_folder(tmp_path, Path("/no/mounts"), clock=lambda: next(seconds)))
    assert found["disk speed"] == ("ok", "2 MB/s, written and flushed")
