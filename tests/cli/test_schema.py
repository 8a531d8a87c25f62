from __future__ import annotations

import json

import pytest

from speedtronic.cli import main
from speedtronic.config.reference import json_schema, markdown


@pytest.mark.parametrize("arguments", [["schema"], ["schema", "--format", "json"]])
def test_it_prints_the_json_schema(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_it_prints_the_reference_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == markdown()


def test_another_format_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--format", "xml"]) == 2
    assert "invalid choice: 'xml'" in capsys.readouterr().err
