"""Trackio, which keeps runs on this machine, in `TRACKIO_DIR`, or sends them to `TRACKIO_SPACE_ID`."""

from __future__ import annotations

import os

from speedtronic.metrics.trackers import Point, TrackedRun, import_tracker


def open_trackio(run: TrackedRun) -> TrackioTracker:
    return TrackioTracker(run)


class TrackioTracker:
    """A run in the project of `TRACKIO_PROJECT`, or else in `speedtronic`.

    Its name ends in the beginning of the run's id, by which a resumed run is the same run there.
    """

    def __init__(self, run: TrackedRun) -> None:
        trackio = import_tracker("trackio")
        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", "speedtronic"),
            name=f"{run.name}-{run.run_id[:8]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
        )

    def log(self, point: Point) -> None:
        self._run.log(dict(point.numbers), step=point.step)

    def flush(self) -> None:
        """Do nothing: Trackio's own thread sends what was logged."""

    def close(self) -> None:
        self._run.finish()
