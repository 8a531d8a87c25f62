from __future__ import annotations

import io
import re
import sys
import types
from typing import Any

import pytest

from speedtronic.metrics import MetricLogger
from speedtronic.metrics.progress import ProgressMode
from tests.support.cases import case


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class AsciiTerminal(io.TextIOWrapper):
    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="ascii")

    def isatty(self) -> bool:
        return True


class HungUp(Terminal):
    """A terminal that is closed after the first step."""

    def write(self, text: str) -> int:
        if "step 1/4" in self.getvalue():
            raise OSError(5, "Input/output error")
        return super().write(text)


class Clock:
    def __init__(self, each: float = 1.0) -> None:
        self.seconds = 0.0
        self.each = each

    def __call__(self) -> float:
        self.seconds += self.each
        return self.seconds


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def step(number: int) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 9.0,
        "tokens_per_sec": 9.0,
        "interval_loss": 2.5,
        "interval_samples_per_sec": 9.0,
        "interval_tokens_per_sec": 12345.0,
        "eta_s": (4 - number) / 2.0,
        "peak_memory_bytes": 1.2e9,
    }


def run(stream: io.StringIO, progress: ProgressMode, level: str = "INFO") -> str:
    logger = MetricLogger(level, stream=stream, progress=progress, clock=Clock())
    logger.emit("train_start", {"step": 0, "target_steps": 4})
    logger.emit("train_step", step(1))
    logger.emit("checkpoint", {"step": 1, "path": "[bold]x"})
    logger.emit("train_step", step(4))
    logger.emit("train_end", {"steps": 4})
    logger.close()
    return stream.getvalue()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_on_a_terminal_one_line_shows_step_loss_speed_time_left_and_memory() -> None:
    text = without_escapes(run(Terminal(), "auto"))
    assert re.search(r"step 1/4 .*25%  loss 2.5000  12.3k tok/s  eta 0:00:02  1.2 GB", text)
    assert "step 4/4" in text


def screen(text: str) -> list[str]:
    """What a terminal shows in the end, for the escapes that rich writes: up, erase a line, carriage return."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part.startswith("\x1b"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith("\x1b") and part != "\r":
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


def test_all_lines_stand_above_a_bar_that_ends_at_100_percent() -> None:
    shown = screen(run(Terminal(), "auto"))
    assert [line.split("  ")[0] for line in shown[:4]] == ["train_start", "step 1/4", "checkpoint", "step 4/4"]
    assert re.fullmatch(r"step 4/4 ━+ 100%  loss 2.5000  12.3k tok/s  eta 0:00:00  1.2 GB", shown[4])
    assert shown[5:] == ["train_end  steps 4"]


def test_the_bar_moves_with_each_step_before_its_numbers_are_known() -> None:
    stream = Terminal()
    logger = MetricLogger(stream=stream, progress="on", clock=Clock(), every_steps=2)
    logger.emit("train_start", {"step": 0, "target_steps": 200})
    logger.show_step(1)
    assert re.search(r"step 1/200 ━+ 0%", screen(stream.getvalue())[-1])
    logger.show_step(2)
    logger.emit("train_step", step(1))
    logger.emit("train_step", step(2))
    logger.show_step(199)
    assert "step 199/200" in screen(stream.getvalue())[-1]
    assert " 99%  loss 2.5000" in screen(stream.getvalue())[-1]
    logger.close()
    assert [line for line in screen(stream.getvalue()) if line.startswith("step 1/")] == []


def test_a_terminal_of_80_characters_shows_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with MetricLogger(stream=stream, progress="on", clock=Clock()) as logger:
        logger.emit("train_start", {"step": 0, "target_steps": 100_000})
        logger.emit("train_step", {**step(99_999), "eta_s": 3600.0})
    shown = screen(stream.getvalue())[-1]
    assert re.fullmatch(r"step 99999/100000 ━+╸ 99%  loss 2.5000  12.3k tok/s  eta 1:00:00  1.2 GB", shown)
    assert len(shown) < 80


def test_lines_of_steps_wait_for_the_next_frame_and_none_is_lost() -> None:
    """A frame costs about a millisecond, which a short step must not pay each time."""
    stream = Terminal()
    clock = Clock(each=0.0)
    logger = MetricLogger(stream=stream, progress="on", clock=clock)
    logger.emit("train_start", {"step": 0, "target_steps": 100})
    for number in range(1, 51):
        logger.show_step(number)
        logger.emit("train_step", {**step(number), "eta_s": 1.0})
    drawn = stream.getvalue().count("\x1b[2K")
    assert drawn <= 3
    logger.close()
    shown = screen(stream.getvalue())
    assert [line.split("  ")[0] for line in shown[1:51]] == [f"step {number}/100" for number in range(1, 51)]
    assert "step 50/100" in shown[51]


def test_the_cursor_is_shown_again() -> None:
    text = run(Terminal(), "auto")
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_close_ends_the_live_line_too() -> None:
    stream = Terminal()
    logger = MetricLogger(stream=stream, progress="auto")
    logger.emit("train_start", {"step": 0, "target_steps": 4})
    logger.close()
    logger.close()
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_without_a_terminal_lines_are_plain() -> None:
    for progress in ("auto", "on"):
        with case(progress):
            text = run(io.StringIO(), progress)
            assert text.splitlines()[1].startswith("step 1/4  loss 2.5000")
            assert all(character.isprintable() or character == "\n" for character in text)


def test_off_means_plain_lines_on_a_terminal_too() -> None:
    assert "\x1b" not in run(Terminal(), "off")


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run(Terminal(), "on")


def test_without_ordinary_lines_auto_shows_no_live_line_but_on_does() -> None:
    assert run(Terminal(), "auto", "WARNING") == ""
    assert "step 4/4" in without_escapes(run(Terminal(), "on", "WARNING"))


def test_a_train_start_without_a_target_starts_no_live_line() -> None:
    stream = Terminal()
    MetricLogger(stream=stream, progress="auto").emit("train_start", {})
    assert stream.getvalue() == "train_start\n"


def test_prints_of_the_training_code_appear_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    logger = MetricLogger(progress="auto")
    logger.emit("train_start", {"step": 0, "target_steps": 4})
    print("a print of the model")
    logger.close()
    assert sys.stdout is stream
    assert "a print of the model\n" in without_escapes(stream.getvalue())


def test_characters_that_the_terminals_encoding_lacks_are_escaped_above_the_live_line() -> None:
    terminal = AsciiTerminal()
    logger = MetricLogger(stream=terminal, progress="on", clock=Clock())
    logger.emit("train_start", {"step": 0, "target_steps": 4})
    logger.emit("checkpoint", {"path": "oä/x"})
    logger.emit("train_step", step(1))
    logger.close()
    text = terminal.bytes.getvalue().decode("ascii")
    assert "checkpoint  path o\\xe4/x" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_a_terminal_that_hangs_up_does_not_end_the_run() -> None:
    assert "step 1/4" in run(HungUp(), "on")


def test_a_step_without_numbers_does_not_end_the_run() -> None:
    for payload in (
        {},
        {"step": "three"},
        {"step": 2, "loss": "low", "steps_per_sec": 1e-300, "peak_memory_bytes": "much"},
    ):
        with case(payload):
            stream = Terminal()
            with MetricLogger(stream=stream, progress="on", clock=Clock()) as logger:
                logger.emit("train_start", {"step": 0, "target_steps": 4})
                logger.emit("train_step", payload)
                logger.emit("train_step", step(4))
            assert "step 4/4" in without_escapes(stream.getvalue())


class NotebookStream(io.StringIO):
    """What a cell prints to: it is told by the module of its class, and is no terminal."""


NotebookStream.__module__ = "ipykernel.iostream"


def test_a_cell_of_a_notebook_has_one_output_that_moves_and_plain_lines_below(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            shown.append(data["text/plain"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw
        assert display_id
        return Handle()

    ipython = types.ModuleType("IPython.display")
    monkeypatch.setattr(ipython, "display", display, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    lines = run(NotebookStream(), "auto").splitlines()
    assert [line.split("  ")[0] for line in lines] == ["train_start", "step 1/4", "checkpoint", "step 4/4", "train_end"]
    assert "\x1b" not in "".join(lines)
    assert shown[-1] == "step 4/4  ████████████████████  100%  loss 2.5000  12.3k tok/s  eta 0:00:00  1.2 GB"
    assert any(frame.startswith("step 1/4  █████░░░░░░░░░░░░░░░  25%") for frame in shown)
    assert run(NotebookStream(), "off").count("step 1/4") == 1
