from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "numpy", "rich", "safetensors"}


def _imported_by(*arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


@pytest.fixture
def small(tmp_path: Path) -> str:
    file = tmp_path / "c.yaml"
    file.write_text("max_steps: 3\n", encoding="utf-8")
    return str(file)


def test_importing_the_configuration_loads_no_torch() -> None:
    imported = _imported_by("-c", "import speedtronic, speedtronic.config, speedtronic.errors")
    assert "pydantic" in imported
    assert not imported & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("validate", "--help"),
        ("validate", "CONFIG"),
        ("schema",),
        ("schema", "--format", "markdown"),
    ],
)
def test_commands_that_only_read_the_configuration_load_no_torch(arguments: tuple[str, ...], small: str) -> None:
    arguments = tuple(small if argument == "CONFIG" else argument for argument in arguments)
    assert not _imported_by("-m", "speedtronic", *arguments) & HEAVY
