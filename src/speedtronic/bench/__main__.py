"""Measures one row, as `rows.measure` asks for it: the row's name, its settings, and the file for the outcome."""

from __future__ import annotations

import sys
from pathlib import Path

from speedtronic.bench.figures import Settings
from speedtronic.bench.rows import measure_here

if __name__ == "__main__":
    name, settings, file = sys.argv[1:]
    outcome = measure_here(name, Settings.model_validate_json(settings))
    Path(file).write_text(outcome.model_dump_json(), encoding="utf-8")
