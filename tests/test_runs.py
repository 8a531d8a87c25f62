"""A run is read back from its folder: columns, resumed and torn lines, how it ended; and the runs of a folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import speedtronic
from speedtronic import runs
from speedtronic.durable.lock import LOCK_FILE, RunLock, holder_lives
from speedtronic.errors import MissingExtraError, RunFolderError
from speedtronic.runtime import train_from_config
from tests.support.configs import tiny
from tests.support.logs import LogWriter


def test_the_columns_of_a_real_run_are_what_it_returned(tmp_path: Path) -> None:
    config = tiny(
        tmp_path, data={"validation_fraction": 0.2}, eval={"every_steps": 2}, logging={"json_file": "m.jsonl"}
    )
    result = train_from_config(config)
    run = speedtronic.runs.load(tmp_path)
    assert run.steps["step"].tolist() == [1, 2, 3, 4]
    for key in ("loss", "tokens", "grad_norm", "lr_applied"):
        assert run.steps[key].tolist() == [record[key] for record in result.metrics], key
    assert run.evals["step"].tolist() == [2, 4]
    assert run.evals["loss"][-1] == result.eval_loss
    assert (run.status, run.name, run.unreadable) == ("finished", "speedtronic-run", 0)
    assert run.config["model"]["d_model"] == 16
    assert run.last("loss") == result.final_loss
    assert run.last("mfu") is None
    assert run.of("environment")[0]["torch"].startswith("2.")
    summed = runs.summary(tmp_path)
    assert (summed.step, summed.target, summed.loss, summed.eval_loss) == (4, 4, result.final_loss, result.eval_loss)


def test_the_losses_of_several_optimizers_are_columns(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0, target=3)
    for step, losses in enumerate(({"one": 1.0, "two": 2.0}, {"one": 1.5}, {"one": 0.5, "two": 4.0}), start=1):
        log.step(step, loss=sum(losses.values()), losses=losses)
    steps = runs.load(tmp_path).steps
    assert "losses" not in steps
    assert steps["losses/one"].tolist() == [1.0, 1.5, 0.5]
    np.testing.assert_array_equal(steps["losses/two"], [2.0, np.nan, 4.0])


def test_of_steps_that_a_resumed_run_trained_again_the_later_ones_count(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0, target=10)
    for step in range(1, 7):
        log.step(step, loss=float(step))
    log.write("eval", step=6, loss=66.0)
    log.new_process()
    log.start(4, target=10)  # steps 5 and 6 are lost
    log.step(5, loss=50.0)
    run = runs.load(tmp_path)
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert run.steps["loss"].tolist() == [1, 2, 3, 4, 50]
    assert len(run.evals["step"]) == 0, "an evaluation of lost steps counts no more"
    assert np.all(np.diff(run.steps["seconds"]) > 0), "the clock of the second process starts anew"
    assert run.steps["seconds"][-1] > 6


def test_the_numbers_of_further_sets_stand_beside_those_of_the_held_out_part(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0)
    for step in (2, 4):
        log.step(step)
        log.write("eval", step=step, set="held_out", loss=1.0 + step, accuracy=0.5, targets=9)
        log.write("eval", step=step, set="books", loss=3.0 + step, targets=7)
    run = runs.load(tmp_path)
    assert run.evals["step"].tolist() == [2, 4]
    assert run.evals["loss"].tolist() == [3.0, 5.0]
    assert run.evals["books/loss"].tolist() == [5.0, 7.0]
    assert "books/targets" not in run.evals
    assert runs.summary(tmp_path).eval_loss == 5.0


def test_the_time_of_a_run_is_that_of_all_its_processes_without_what_lies_between(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0)
    log.step(1)
    log.new_process()
    log.write("log", level="INFO", message="resumed")
    log.start(1)
    log.step(2)
    log.new_process()
    log.start(2)
    log.write("train_end", step=2)
    run = runs.load(tmp_path)
    assert run.steps["seconds"].tolist() == [2, 2 + 3]
    assert [record["seconds"] for record in run.events] == [1, 2 + 1, 2 + 2, 5 + 1, 5 + 2]


def test_a_torn_last_line_waits_until_it_is_whole_and_a_torn_line_inside_is_counted(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0)
    log.step(1)
    reader = runs.RunReader(tmp_path)
    with log.file.open("ab") as file:
        file.write(b'{"event":"train_step","step":2,')
    assert reader.read().steps["step"].tolist() == [1]
    with log.file.open("ab") as file:
        file.write(b'"loss":0.5,"elapsed_s":9.0}\n{"event":"train_st\n[1]\n"text"\n\n')
    log.step(3)
    read = reader.read()
    assert read.unreadable == 3
    assert runs.load(tmp_path).steps["step"].tolist() == read.steps["step"].tolist()


def test_a_reader_takes_what_is_appended_and_starts_again_with_another_file(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.start(0)
    reader = runs.RunReader(tmp_path)
    assert reader.read().steps == {}
    for step in (1, 2, 3):
        log.step(step)
        assert reader.read().steps["step"].tolist() == list(range(1, step + 1))
    log.file.rename(tmp_path / "old")
    other = LogWriter(tmp_path, run_id="b" * 32)
    other.step(7)
    assert reader.read().steps["step"].tolist() == [7]


def test_values_that_are_null_missing_or_new_become_nan(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.write("train_step", step=1, loss=1.0)
    log.write("train_step", step=2, loss=None, nonfinite=["loss"])
    log.write("train_step", step=3, loss=3.0, mfu=0.5)
    log.write("train_step", step=4, mfu=0.25)
    log.write("train_step", step=5, loss="high", mfu=True)
    log.write("train_step", step="six", loss=6.0)
    run = runs.load(tmp_path)
    np.testing.assert_array_equal(run.steps["step"], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(run.steps["loss"], [1, np.nan, 3, np.nan, np.nan])
    np.testing.assert_array_equal(run.steps["mfu"], [np.nan, np.nan, 0.5, 0.25, 1])
    assert run.events[-1]["step"] == "six"


def test_a_file_with_several_runs_gives_the_one_of_the_folder_else_the_last(tmp_path: Path) -> None:
    for run_id, loss in (("a" * 32, 1.0), ("b" * 32, 2.0)):
        LogWriter(tmp_path, run_id=run_id).step(1, loss=loss)
    assert runs.load(tmp_path).steps["loss"].tolist() == [2.0]
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "a" * 32}), encoding="utf-8")
    assert runs.load(tmp_path).steps["loss"].tolist() == [1.0]


def test_a_cell_that_is_run_twice_trains_twice_and_the_second_run_is_read(tmp_path: Path) -> None:
    results = [train_from_config(tiny(tmp_path, logging={"json_file": "m.jsonl"})) for _ in range(2)]
    run = runs.load(tmp_path)
    assert [result.steps for result in results] == [4, 4]
    assert (run.steps["step"].tolist(), len(run.of("train_start")), run.status) == ([1, 2, 3, 4], 1, "finished")


def test_how_a_run_ended_is_told(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    log.write("outer_step", version=1)
    status = {"master": runs.load(tmp_path).status}
    log.start(0)
    log.step(1)
    status["left"] = runs.load(tmp_path).status
    with RunLock(tmp_path):
        status["held"] = runs.load(tmp_path).status
        assert (tmp_path / LOCK_FILE).read_bytes(), "looking must not free the lock"
    log.write("interrupted", step=1, signal="SIGINT")
    log.write("train_end", step=1)
    status["interrupted"] = runs.load(tmp_path).status
    log.start(1)
    log.write("train_end", step=2)
    status["finished"] = runs.load(tmp_path).status
    assert status == {
        "master": "ended",
        "left": "stopped",
        "held": "running",
        "interrupted": "interrupted",
        "finished": "finished",
    }


def test_the_holder_of_a_folder_lives_as_its_process_does(tmp_path: Path) -> None:
    assert holder_lives(tmp_path) is False
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    cases: list[tuple[int, str, bool | None]] = [
        (os.getppid(), socket.gethostname(), True),
        (dead.pid, socket.gethostname(), False),
        (os.getppid(), "another-machine", None),
    ]
    for pid, host, lives in cases:
        (tmp_path / LOCK_FILE).write_text(json.dumps({"pid": pid, "host": host}), encoding="utf-8")
        assert holder_lives(tmp_path) is lives
    (tmp_path / LOCK_FILE).write_text("half a li", encoding="utf-8")
    assert holder_lives(tmp_path) is None
    (tmp_path / LOCK_FILE).write_text("", encoding="utf-8")
    assert holder_lives(tmp_path) is False


def test_what_is_no_run_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no such run"):
        runs.load(tmp_path / "absent")
    with pytest.raises(RunFolderError, match="logging.json_file"):
        runs.load(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"a.jsonl, b.jsonl"):
        runs.load(tmp_path)
    assert runs.load(tmp_path / "a.jsonl").steps == {}


def test_runs_are_found_below_a_folder_and_not_inside_of_each_other(tmp_path: Path) -> None:
    for folder in ("a", "b/c/d", "b/c/d/inner", "e/f/g/too-deep", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "run.json").write_text("{}", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert runs.find(tmp_path) == [tmp_path / "a", tmp_path / "b/c/d"]
    assert runs.find(tmp_path / "a") == [tmp_path / "a"]
    with pytest.raises(RunFolderError, match="name a folder that holds runs"):
        runs.find(tmp_path / "absent")


def test_a_summary_reads_only_the_end_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_TAIL", 1000)
    log = LogWriter(tmp_path)
    log.start(0, target=100)
    for step in range(1, 51):
        log.step(step, loss=100.0 - step)
    summed = runs.summary(tmp_path)
    assert (summed.status, summed.step, summed.loss, summed.target) == ("stopped", 50, 50.0, None)
    (tmp_path / "config.yaml").write_text("run: {max_steps: 70}\n", encoding="utf-8")
    assert runs.summary(tmp_path).target == 70
    log.file.unlink()
    without = runs.summary(tmp_path)
    assert (without.status, without.step, without.loss) == (None, None, None)


def test_secrets_of_a_configuration_that_the_user_wrote_are_hidden(tmp_path: Path) -> None:
    LogWriter(tmp_path).step(1)
    (tmp_path / "config.yaml").write_text("distributed: {token: hf_secret123}\nrun: {name: n}\n", encoding="utf-8")
    run = runs.load(tmp_path)
    assert (run.config["distributed"]["token"], run.name) == ("<redacted>", "n")


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LogWriter(tmp_path).step(1)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtraError, match=r"speedtronic\[plot\]"):
        runs.load(tmp_path).plot()


@pytest.mark.slow
def test_a_plot_draws_the_loss_and_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: speedtronic[plot]")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    log = LogWriter(tmp_path)
    for step in (1, 2, 3, 4):
        log.step(step, loss=5.0 - step, tokens=10 * step)
    log.write("eval", step=3, loss=2.5)
    run = runs.load(tmp_path)
    axes = run.plot(by="tokens")
    drawn: list[tuple[list[Any], list[Any]]] = [(list(a.get_xdata()), list(a.get_ydata())) for a in axes.get_lines()]
    assert drawn == [([10, 20, 30, 40], [4, 3, 2, 1]), ([30], [2.5])]
    assert run.plot("tokens", ax=axes) is axes
    with pytest.raises(KeyError, match=r"no column 'lost'; it has .*loss"):
        run.plot("lost")


def test_importing_it_loads_no_torch() -> None:
    code = "import sys\nimport speedtronic.runs\nimport speedtronic.report.live\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
