"""`speedtronic data prepare`: text into token shards, with its progress and a table at the end."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from speedtronic.cli.data_inputs import inputs
from speedtronic.cli.facts import counted, write_facts
from speedtronic.cli.interrupts import sigterm_unwinds
from speedtronic.metrics.console import ConsoleStream
from speedtronic.metrics.lines import short_bytes

if TYPE_CHECKING:
    from rich.progress import TaskID

    from speedtronic.data.prepare.prepare import PreparedSummary, Progress

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.1


def run(args: argparse.Namespace) -> int:
    from speedtronic.data.prepare.prepare import prepare
    from speedtronic.data.prepare.staging import is_resumable
    from speedtronic.data.shard_writer import DEFAULT_SHARD_TOKENS

    if not ConsoleStream(sys.stderr).isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    started = time.monotonic()
    try:
        with sigterm_unwinds(), closing(progress_report(time.monotonic)) as report:
            summary = prepare(
                args.paths,
                args.out,
                **inputs(args),
                tokenizer=args.tokenizer,
                shard_tokens=DEFAULT_SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens,
                seed=args.seed,
                force=args.force,
                processes=args.processes,
                on_progress=report.show,
            )
    except (KeyboardInterrupt, SystemExit):
        if is_resumable(Path(args.out)):
            print("interrupted: what is done is kept, and the same command goes on from there", file=sys.stderr)
        raise
    write_facts(_facts(summary, time.monotonic() - started))
    return 0


def _facts(summary: PreparedSummary, seconds: float) -> list[tuple[str, str]]:
    facts = [
        ("already prepared" if summary.already_prepared else "prepared", str(summary.folder)),
        ("tokens", f"{summary.tokens:,}"),
        ("documents", f"{summary.documents:,}"),
        ("shards", f"{summary.shards:,}"),
        ("bytes per token", f"{summary.text_bytes / summary.tokens:.2f}"),
        ("vocabulary", f"{summary.vocab_size:,}"),
        ("time", f"{seconds:.1f} s{_rate(summary.encoded_bytes, seconds)}"),
    ]
    if summary.skipped:
        facts.append(("left out, not being UTF-8 text", counted(summary.skipped, "file")))
    configuration = f"data.shards: {summary.folder}, model.vocab_size: {summary.vocab_size} or more"
    return [*facts, ("in a configuration", configuration)]


def _rate(encoded_bytes: int, seconds: float) -> str:
    return f", {short_bytes(encoded_bytes / seconds)}/s" if encoded_bytes and seconds else ""


class ProgressReport(Protocol):
    """Where the progress of a preparation is seen. It never fails: it must not end what it tells of."""

    def show(self, progress: Progress) -> None:
        """Show how far it has come."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def progress_report(clock: Callable[[], float]) -> ProgressReport:
    """A bar on a terminal, a line now and then elsewhere.

    Args:
        clock: seconds, monotonic.
    """
    stream = ConsoleStream(None)
    return _Bar(stream, clock) if stream.isatty() else _Lines(stream, clock)


class _Lines:
    """`encoding: 1.2 GB of 5.0 GB, 24.0 MB/s, 0:02:38 left`, at most every ten seconds."""

    def __init__(self, stream: ConsoleStream, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._shown_at = clock()
        self._stage = ""
        self._begun_at = 0.0
        self._begun_with = 0

    def show(self, progress: Progress) -> None:
        now = self._clock()
        if progress.stage != self._stage:
            self._stage, self._begun_at, self._begun_with = progress.stage, now, progress.done
        if now - self._shown_at < _SECONDS_BETWEEN_LINES:
            return
        self._shown_at = now
        words = [f"{progress.stage}: {short_bytes(progress.done)} of {short_bytes(progress.total)}"]
        done, seconds = progress.done - self._begun_with, now - self._begun_at
        if done > 0 and seconds > 0:
            left = timedelta(seconds=round((progress.total - progress.done) * seconds / done))
            words += [f"{short_bytes(done / seconds)}/s", f"{left} left"]
        self._stream.write(", ".join(words) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _Bar:
    """A live line. It is drawn by the thread that calls, at most ten times a second."""

    def __init__(self, stream: ConsoleStream, clock: Callable[[], float]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        self._clock = clock
        self._drawn_at = -math.inf
        self._stage = ""
        self._task: TaskID | None = None
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=cast("TextIO", stream)),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            get_time=clock,
        )
        self._live.start()

    def show(self, progress: Progress) -> None:
        if self._task is None or progress.stage != self._stage:
            if self._task is not None:
                self._live.remove_task(self._task)
            self._stage = progress.stage
            # Begun with what is done: a speed counts from here.
            self._task = self._live.add_task(progress.stage, total=progress.total, completed=progress.done)
        self._live.update(self._task, completed=progress.done)
        now = self._clock()
        if now - self._drawn_at >= _SECONDS_BETWEEN_FRAMES:
            self._drawn_at = now
            self._live.refresh()

    def close(self) -> None:
        self._live.stop()
