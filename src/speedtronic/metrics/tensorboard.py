"""TensorBoard: event files in a folder, written through the `tensorboard` package, without TensorFlow and torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedtronic.metrics.trackers import Point, TrackedRun, TrackerHook, import_tracker, require_tracker


def open_tensorboard(run: TrackedRun) -> TensorboardTracker:
    """The run's event files, in a folder of its own: a resumed run adds a file, and TensorBoard shows one curve."""
    return TensorboardTracker(run.folder / f"tensorboard-{run.run_id[:8]}", run.config)


class TensorboardTracker:
    """Appends scalars to a new event file.

    Args:
        folder: made where it is missing.
        config: shown under Text.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any] | None = None) -> None:
        self._event = import_tracker("tensorboard.compat.proto.event_pb2").Event
        self._summary = import_tracker("tensorboard.compat.proto.summary_pb2")
        self._writer = import_tracker("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
        if config is not None:
            self._add_text("configuration", json.dumps(config, indent=2, ensure_ascii=False))

    def log(self, point: Point) -> None:
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in point.numbers.items()]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event(wall_time=point.time.timestamp(), step=point.step, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_text(self, tag: str, text: str) -> None:
        tensors, types = (import_tracker(f"tensorboard.compat.proto.{name}_pb2") for name in ("tensor", "types"))
        # TensorBoard renders Markdown. Indented text is shown as it is.
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        metadata = self._summary.SummaryMetadata
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=metadata(plugin_data=metadata.PluginData(plugin_name="text")),
            tensor=tensors.TensorProto(dtype=types.DT_STRING, string_val=[shown.encode("utf-8")]),
        )
        self._writer.add_event(self._event(step=0, summary=self._summary.Summary(value=[value])))


class TensorboardHook(TrackerHook):
    """A hook that writes event files for TensorBoard.

    Args:
        log_dir: the folder for the files of this run.

    Raises:
        MissingExtraError: `tensorboard` is not installed.
    """

    def __init__(self, log_dir: str = "runs") -> None:
        require_tracker("tensorboard")
        super().__init__(lambda: TensorboardTracker(Path(log_dir)))
