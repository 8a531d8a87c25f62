"""A second run in a used folder: refused, continued, or started after the first was moved aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.cli.former_run import find_former_run, set_aside
from speedtronic.config import load_config
from speedtronic.durable.files import FileSystem
from speedtronic.errors import RunFolderError
from tests.support.configs import tiny


def write_config(folder: Path, **sections: Any) -> str:
    path = folder / "my.yaml"
    path.write_text(json.dumps(tiny(folder / "run", **{"logging": {"json_file": "m.jsonl"}, **sections})))
    return str(path)


def run_ids(file: Path) -> list[str]:
    """The ids in the lines of a log, each once, in their order."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return list(dict.fromkeys(line["run_id"] for line in lines))


def checkpoint_id(folder: Path) -> str:
    manager = CheckpointManager(folder)
    assert manager.load_latest() is not None
    return manager.run_id


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_id_of_a_run_is_in_its_folder_its_checkpoints_and_every_line(tmp_path: Path) -> None:
    assert main(["train", write_config(tmp_path)]) == 0
    run = tmp_path / "run"
    run_id = checkpoint_id(run / "checkpoints")
    assert run_ids(run / "m.jsonl") == [run_id]
    assert json.loads((run / "run.json").read_bytes())["run_id"] == run_id
    assert run_id in (run / "config.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert load_config(run / "config.yaml").to_dict() == load_config(tmp_path / "my.yaml").to_dict()


def test_a_resumed_run_keeps_its_id_from_the_first_line_on(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", config, "--max-steps", "2"]) == 0
    assert main(["train", config, "--resume", "optimizer.lr=1e-2"]) == 0
    assert run_ids(tmp_path / "run/m.jsonl") == [checkpoint_id(tmp_path / "run/checkpoints")]
    assert load_config(tmp_path / "run/config.yaml").optimizer.lr == 1e-2


def test_a_second_run_in_a_used_folder_is_a_choice_and_leaves_the_first_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert main(["train", config]) == 0
    before = contents(tmp_path / "run")
    capsys.readouterr()
    assert main(["train", config]) == 2
    run_id = checkpoint_id(tmp_path / "run/checkpoints")
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'run'} holds a run already (run {run_id[:8]}, checkpoints up to step 4, m.jsonl): "
        "continue it with --resume, move it aside with --overwrite, or choose another folder with --output-dir\n"
    )
    assert contents(tmp_path / "run") == before
    assert main(["train", config, "--output-dir", str(tmp_path / "other")]) == 0
    assert contents(tmp_path / "run") == before


def test_a_run_that_failed_before_its_first_step_leaves_the_folder_free(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", config, 'optimizer.groups=[{match: "no.such.*", lr: 1e-3}]']) == 2
    assert run_ids(tmp_path / "run/m.jsonl")
    assert main(["train", config]) == 0
    assert run_ids(tmp_path / "run/m.jsonl")[-1] == checkpoint_id(tmp_path / "run/checkpoints")
    assert main(["train", config]) == 2


def test_overwrite_moves_the_old_run_aside_whole_and_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    for number, steps in enumerate(("2", "3", "4")):
        before = contents(tmp_path / "run")
        assert main(["train", config, "--overwrite", "--max-steps", steps]) == 0
        if number:
            assert f"was moved to {tmp_path / f'run.old-{number}'}\n" in capsys.readouterr().out
            assert contents(tmp_path / f"run.old-{number}") == before
    ids = [checkpoint_id(tmp_path / name / "checkpoints") for name in ("run.old-1", "run.old-2", "run")]
    assert len(set(ids)) == 3
    assert [run_ids(tmp_path / name / "m.jsonl") for name in ("run.old-1", "run.old-2", "run")] == [[i] for i in ids]
    assert load_config(tmp_path / "run.old-1/config.yaml").run.max_steps == 2


def test_the_old_run_is_a_run_where_it_was_moved_to(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", config, "--max-steps", "2"]) == 0
    assert main(["train", config, "--overwrite"]) == 0
    assert main(["train", str(tmp_path / "run.old-1"), "--resume", "--max-steps", "3"]) == 0
    assert len(run_ids(tmp_path / "run.old-1/m.jsonl")) == 1
    assert (tmp_path / "run.old-1/checkpoints/step_000000000003").is_dir()
    assert not (tmp_path / "run/checkpoints/step_000000000003").exists()


def test_what_is_not_of_the_run_stays_in_its_folder(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", config]) == 0
    (tmp_path / "run/notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "run/other/checkpoints").mkdir(parents=True)
    assert main(["train", config, "--overwrite"]) == 0
    assert (tmp_path / "run/notes.txt").exists()
    assert (tmp_path / "run/other/checkpoints").exists()


def test_a_run_with_other_file_names_is_found_by_its_own_configuration(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    scratch = str(tmp_path / "scratch")
    assert main(["train", config, f"checkpoint.directory={scratch}", "logging.json_file=logs/other.jsonl"]) == 0
    assert main(["train", config]) == 2
    assert main(["train", config, "--overwrite"]) == 0
    assert (tmp_path / "run.old-1/logs/other.jsonl").is_file()
    assert (tmp_path / "scratch.old-1/step_000000000004").is_dir()
    assert not list((tmp_path / "scratch").glob("step_*"))


def test_a_run_that_failed_before_its_first_step_leaves_its_folder_free(tmp_path: Path) -> None:
    config = write_config(tmp_path, logging={}, optimizer={"lr": 1e30}, scheduler={"warmup_steps": 0})
    assert main(["train", config]) == 1  # not finite
    assert (tmp_path / "run/config.yaml").exists()
    assert main(["train", config, "optimizer.lr=1e-3"]) == 0
    assert load_config(tmp_path / "run/config.yaml").optimizer.lr == 1e-3


def test_overwrite_in_a_new_folder_is_an_ordinary_start(tmp_path: Path) -> None:
    assert main(["train", write_config(tmp_path), "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml", "run"]


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", write_config(tmp_path), "--resume", "--overwrite"]) == 2
    assert "choose one" in capsys.readouterr().err


def test_the_configuration_may_ask_to_resume(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint={"resume": True})
    assert main(["train", config, "--max-steps", "2"]) == 0
    assert main(["train", config]) == 0
    assert len(run_ids(tmp_path / "run/m.jsonl")) == 1


def test_what_is_refused_moves_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", config]) == 0
    for word in ("precision.mode=fp8", "plugins=[no_such_module]"):
        assert main(["train", config, "--overwrite", word]) == 2
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]


def test_a_move_that_fails_half_way_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    assert main(["train", config]) == 0
    before = contents(tmp_path / "run")
    former = find_former_run(load_config(config), tmp_path / "run")
    assert former is not None
    rename = FileSystem.rename

    def failing(fs: FileSystem, source: Path, target: Path) -> None:
        if source.name == "m.jsonl":
            raise OSError(18, "Invalid cross-device link")
        rename(fs, source, target)

    monkeypatch.setattr(FileSystem, "rename", failing)
    with pytest.raises(RunFolderError, match="cannot be moved to .*cross-device link.*choose another folder"):
        set_aside(former)
    assert contents(tmp_path / "run") == before


def test_without_an_output_dir_the_command_uses_a_folder_of_the_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny("unused", run={"name": "first one"})
    del config["run"]["output_dir"]
    Path("my.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert main(["train", "my.yaml"]) == 0
    assert Path("runs/first one/checkpoints/step_000000000004").is_dir()
    assert main(["train", "my.yaml", "run.name=second"]) == 0
    assert main(["checkpoints", "list", "my.yaml", "run.name=second"]) == 0
    capsys.readouterr()
    assert main(["train", "my.yaml", "run.name=a/b"]) == 2
    assert capsys.readouterr().err == "error: run.name: 'a/b' cannot be the name of a folder; set run.output_dir\n"


def test_the_folder_of_a_run_asks_for_the_secrets_that_it_does_not_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, distributed={"token": "hf_verysecret123"})
    assert main(["train", config, "--max-steps", "2"]) == 0
    capsys.readouterr()
    assert main(["train", str(tmp_path / "run"), "--resume", "--max-steps", "3"]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'run'}: the folder of a run keeps no secrets; give them again (distributed.token), or "
        "name the configuration that the run was started with\n"
    )
    again = ["train", str(tmp_path / "run/config.yaml"), "--resume", "--max-steps", "3", "distributed.token=hf_again"]
    assert main(again) == 0
    assert "hf_again" not in "".join(map(str, contents(tmp_path / "run").values()))


def test_what_trackers_wrote_moves_with_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert main(["train", config]) == 0
    position = tmp_path / "run/trackers/wandb.json"
    position.parent.mkdir()
    position.write_text("{}")
    assert main(["train", config, "--overwrite"]) == 0
    assert (tmp_path / "run.old-1/trackers/wandb.json").read_text() == "{}"
    assert not position.exists()
