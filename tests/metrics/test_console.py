from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from speedtronic.metrics.console import ConsoleSink
from speedtronic.metrics.records import INFO, LOG, WARNING, Record
from tests.support.cases import case


def message(text: str, level: int = INFO) -> Record:
    return Record(LOG, level, {"message": text}, 0.0, datetime.now(UTC))


def test_without_a_stream_it_writes_to_the_present_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ConsoleSink(None, INFO).write(message("hello"))
    assert capsys.readouterr().out == "hello\n"


def test_records_below_the_level_are_not_shown() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, WARNING)
    sink.write(message("a", INFO))
    sink.write(message("b", WARNING))
    assert stream.getvalue() == "warning: b\n"


class Counting(io.StringIO):
    """A stream that fails on every write, and counts the writes."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        raise self.error


def test_nothing_more_is_written_to_a_stream_that_is_gone() -> None:
    closed_terminal = OSError(errno.EIO, "Input/output error")
    for error in (BrokenPipeError(), ValueError("I/O operation on closed file"), closed_terminal):
        with case(error):
            stream = Counting(error)
            sink = ConsoleSink(stream, INFO)
            sink.write(message("a"))
            sink.write(message("b"))
            assert stream.writes == 1


def test_a_full_disk_behind_a_redirection_is_tried_again() -> None:
    stream = Counting(OSError(28, "No space left on device"))
    sink = ConsoleSink(stream, INFO)
    sink.write(message("a"))
    sink.write(message("b"))
    assert stream.writes == 2


def test_characters_that_the_streams_encoding_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    sink = ConsoleSink(io.TextIOWrapper(raw, encoding="ascii"), INFO)
    sink.write(message("schön"))
    assert raw.getvalue() == b"sch\\xf6n\n"


def test_a_closed_pipe_does_not_end_the_process_and_gives_no_error_at_exit() -> None:
    program = (
        "from speedtronic.metrics import MetricLogger\n"
        "logger = MetricLogger()\n"
        "for step in range(1000): logger.emit('train_step', {'step': step})\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_importing_the_logger_loads_neither_torch_nor_rich() -> None:
    program = "import sys, speedtronic.metrics; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_without_a_standard_output_it_is_silent_and_not_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    sink = ConsoleSink(None, INFO)
    sink.write(message("a"))
    assert not sink.is_terminal()


def test_a_closed_stream_is_not_a_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    sink = ConsoleSink(stream, INFO)
    sink.write(message("a"))
    assert not sink.is_terminal()
