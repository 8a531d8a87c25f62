from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.cli.tracebacks import format_error
from tests.support.configs import tiny

MODEL = """
import torch
from speedtronic import register_model

def project(x):
    return torch.nn.functional.linear(x, torch.zeros(3, 7))

@register_model("wrong_shapes")
class WrongShapes(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 4)

    def forward(self, input_ids, labels=None):
        return project(self.embedding(input_ids))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def train(folder: Path, plugin: str) -> int:
    config = tiny(folder / "run", plugins=[plugin], model={"name": "wrong_shapes"})
    (folder / "my.yaml").write_text(json.dumps(config), encoding="utf-8")
    return main(["train", str(folder / "my.yaml")])


def test_a_models_error_begins_with_its_own_lines_and_ends_in_the_message(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong_shapes_of_a_test.py").write_text(MODEL, encoding="utf-8")
    assert train(folder, "wrong_shapes_of_a_test") == 1
    first, own, inner = (line for line in capsys.readouterr().err.partition("All calls:")[0].split("  File ") if line)
    assert first == "Your code, most recent call last:\n"
    assert own.startswith(f'"{folder / "wrong_shapes_of_a_test.py"}", line 15, in forward\n')
    assert inner.startswith(f'"{folder / "wrong_shapes_of_a_test.py"}", line 6, in project\n')
    assert train(folder, "wrong_shapes_of_a_test") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_a_plugin_that_is_no_python_is_shown_at_its_line_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "no_python_of_a_test.py").write_text("import torch\ndef f(:\n", encoding="utf-8")
    assert train(folder, "no_python_of_a_test") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f'  File "{folder / "no_python_of_a_test.py"}", line 2'
    assert lines[-1] == "SyntaxError: invalid syntax"
    assert len(lines) == 4


def test_the_lines_of_a_cause_count_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    source = "def inner():\n    raise KeyError('deep')\ndef run(call):\n    call(inner)\n"
    file.write_text(source, encoding="utf-8")
    names: dict[str, object] = {}
    exec(compile(source, str(file), "exec"), names)

    def wrap(inner: object) -> None:
        try:
            inner()  # type: ignore[operator]  # a function of the text above
        except KeyError as error:
            raise RuntimeError("outside") from error

    with pytest.raises(RuntimeError) as caught:
        names["run"](wrap)  # type: ignore[operator]  # likewise
    own, _, everything = format_error(caught.value).partition("All calls:\n")
    assert [line for line in own.splitlines() if line.startswith(f'  File "{file}"')] == [
        f'  File "{file}", line 2, in inner',
        f'  File "{file}", line 4, in run',
    ]
    assert everything == "".join(traceback.format_exception(caught.value))
    assert everything.endswith("RuntimeError: outside\n")


def test_an_error_without_the_users_code_is_an_ordinary_traceback() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    calls = caught.value.__traceback__
    assert calls is not None
    # The call in this test is the user's; without it there is none.
    bare = caught.value.with_traceback(calls.tb_next)
    assert format_error(bare).startswith("Traceback (most recent call last):\n")
