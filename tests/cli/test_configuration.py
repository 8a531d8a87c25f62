from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.config import SpeedtronicConfig, load_config
from speedtronic.config.reference import json_schema, markdown

# ---------------------------------------------------------------------- validate


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text("max_steps: 3\nhub: {token: hf_verysecret, repo_id: a/b}\n", encoding="utf-8")
    return str(path)


def test_validate_prints_the_resolved_configuration_as_yaml(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    printed = load_config(out)
    assert (printed.run.max_steps, printed.scheduler.max_steps, printed.model.d_ff) == (3, 3, 1024)
    assert printed.to_dict().keys() == SpeedtronicConfig().to_dict().keys()


def test_validate_prints_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["max_steps"] == 3


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_validate_hides_secrets(form: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--format", form, file]) == 0
    out, _ = capsys.readouterr()
    assert "hf_verysecret" not in out
    assert "<redacted>" in out


def test_overrides_go_before_the_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, "run.max_steps=7", "optimizer.lr=1e-3"]) == 0
    printed = load_config(capsys.readouterr().out)
    assert (printed.run.max_steps, printed.optimizer.lr) == (7, 1e-3)


def test_the_file_may_be_an_option(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--config", file, "max_steps=9"]) == 0
    assert load_config(capsys.readouterr().out).run.max_steps == 9


@pytest.mark.parametrize("arguments", [[], ["max_steps=9"]])
def test_without_a_file_it_says_so(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", *arguments]) == 2
    assert capsys.readouterr().err == "error: no configuration file is named; write its path behind the command\n"


def test_a_wrong_override_exits_with_2(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, "run.sed=1"]) == 2
    assert capsys.readouterr() == ("", "error: command line: run.sed: unknown key; did you mean run.seed?\n")


def test_a_missing_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(tmp_path / "none.yaml")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.yaml'}: no such file\n"


# ---------------------------------------------------------------------- schema


@pytest.mark.parametrize("arguments", [["schema"], ["schema", "--format", "json"]])
def test_schema_prints_the_json_schema(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_schema_prints_the_reference_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--format", "markdown"]) == 0
    assert capsys.readouterr().out == markdown()


def test_another_format_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--format", "xml"]) == 2
    assert "invalid choice: 'xml'" in capsys.readouterr().err
