from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtronic.cli import main
from speedtronic.config import SpeedtronicConfig, load_config
from speedtronic.config.reference import json_schema, markdown
from tests.support.configs import tiny

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


def test_a_working_directory_that_is_gone_is_said_in_one_line(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["validate", file]) == 2
    assert capsys.readouterr().err == (
        "error: the working directory is gone; change to a folder that exists (cd), and try again\n"
    )


def test_validate_prints_json(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["max_steps"] == 3


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_validate_hides_secrets(form: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--format", form, file]) == 0
    out, _ = capsys.readouterr()
    assert "hf_verysecret" not in out
    assert "<redacted>" in out


def test_validate_says_what_will_have_no_form_elsewhere(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, "model.ngram_order=2"]) == 0
    out, err = capsys.readouterr()
    assert load_config(out).model.ngram_order == 2
    assert err.startswith("note: model.ngram_order is 2, ")
    assert err.endswith("`checkpoints export` will write it as plain safetensors only\n")


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


def test_validate_refuses_what_train_refuses_with_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "not built": "precision: fp8\ndistributed: {enabled: true, repo_id: 'dir:///x', codec: int4}\n",
        "too long": "model: {max_seq_len: 16}\ndata: {block_size: 32}\n",
        "nothing held out": "eval: {every_steps: 2}\ndata: {validation_fraction: 0}\n",
        "no source": "data: {synthetic: false}\n",
        "a model that nothing registers": "model: {name: gtp}\n",
        "free keys": "model: {extra: {width: 3}}\n",
        "an odd head": "model: {d_model: 6, n_head: 2}\n",
        "a loss of numbers": "loss: mse\n",
        "no block": "data: {num_tokens: 10}\n",
        "nothing left to train on": "data: {num_tokens: 200, validation_fraction: 0.9}\n",
        "less than a batch": "data: {num_tokens: 400, micro_batch_size: 8, target_batch_size: 8}\n",
        "on the hub": "distributed: {enabled: true, repo_id: org/name}\n",
        "no address": "distributed: {enabled: true, repo_id: here}\n",
        "no bucket": "distributed: {enabled: true, repo_id: 's3://'}\n",
        "a foreign option": "distributed: {enabled: true, repo_id: 'dir:///x', store_options: {region: x}}\n",
        "a decay of another schedule": "scheduler: {decay_steps: 3}\n",
        "a jump": "max_steps: 20\nscheduler: {name: wsd, decay_steps: 30}\n",
    }
    for name, text in wrong.items():
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
        said = []
        for command in ("validate", "train"):
            assert main([command, str(tmp_path / "c.yaml"), f"run.output_dir={tmp_path}"]) == 2, name
            said.append(capsys.readouterr())
        assert said[0] == said[1], name
        assert said[0].out == ""


def test_validate_and_train_warn_of_a_warmup_that_does_not_end_and_of_a_target_that_does_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = tiny(tmp_path / "run", scheduler={"warmup_steps": 100}, data={"max_steps": 2})
    (tmp_path / "c.yaml").write_text(json.dumps(sections), encoding="utf-8")
    assert main(["validate", str(tmp_path / "c.yaml"), "run.max_steps=3"]) == 0
    out, err = capsys.readouterr()
    assert load_config(out).run.max_steps == 3
    first, second = err.splitlines()
    assert first.startswith("warning: run.max_steps (--max-steps) is 3, but data.max_steps is 2 and goes before it")
    assert second.startswith("warning: scheduler.warmup_steps is 100, but the run ends after 2 updates")
    assert main(["train", str(tmp_path / "c.yaml"), "--max-steps", "3"]) == 0
    shown = capsys.readouterr().out
    assert first.removeprefix("warning: ") in shown
    assert second.removeprefix("warning: ") in shown
    assert "train_end  step 2 " in shown
