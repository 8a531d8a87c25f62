from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.cli import main

ACTIONS = ("prepare", "inspect", "train-tokenizer")


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_explains_itself(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", action, "--help"]) == 0
    assert f"data {action}" in capsys.readouterr().out


def test_without_an_action_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    assert "ACTION" in capsys.readouterr().err


def test_reading_the_command_line_loads_no_torch() -> None:
    code = (
        "import argparse, sys\nfrom speedtronic.cli import data\n"
        "data.add_parser(argparse.ArgumentParser().add_subparsers())\n"
        "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_action_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom speedtronic.cli import main\n"
        "main(['data', 'prepare', sys.argv[1], '--out', sys.argv[2], '--tokenizer', 'chars'])\n"
        "main(['data', 'inspect', sys.argv[2], '--verify'])\nassert 'torch' not in sys.modules"
    )
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path / "out")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
