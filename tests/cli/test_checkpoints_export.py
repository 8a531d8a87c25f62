from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.config import SpeedtronicConfig
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.model.transformer import build_reference_transformer

SIZES = {"vocab_size": 300, "max_seq_len": 16, "n_layer": 1, "n_head": 2, "d_model": 8}


@pytest.fixture
def config() -> SpeedtronicConfig:
    return SpeedtronicConfig.from_dict({"model": SIZES})


def state_of(config: SpeedtronicConfig, seed: int, tokenizer: Any = None) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": build_reference_transformer(config.model).state_dict(),
        "config": config.to_dict(redact_secrets=True),
        "tokenizer": tokenizer,
    }


@pytest.fixture
def saved(tmp_path: Path, config: SpeedtronicConfig) -> Path:
    """An output folder with checkpoints of steps 5 and 10, of a model of bytes."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    manager.save(5, state_of(config, 5, CharTokenizer().spec()))
    manager.save(10, state_of(config, 10, CharTokenizer().spec()))
    return tmp_path / "run"


def export(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[str, str]:
    """What it says on its two outputs."""
    assert main(["checkpoints", "export", *map(str, arguments)]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 2) -> str:
    assert main(["checkpoints", "export", *map(str, arguments)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    return said.err


def test_the_newest_is_exported_with_the_names_of_the_model(
    saved: Path, tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = export(capsys, saved, "--out", tmp_path / "w.safetensors")
    assert out.startswith(f"exported: {tmp_path / 'w.safetensors'}: step 10, 3.21k weights, ")
    assert err == ""
    expected = state_of(config, 10)["model"]
    loaded = load_file(tmp_path / "w.safetensors")
    assert expected.keys() - loaded.keys() == {"lm_head.weight"}
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


@pytest.mark.parametrize(
    ("decay", "kind"), [(0.999, "averaged weights (optimizer.ema 0.999)"), (None, "averaged weights")]
)
def test_the_average_is_exported_and_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], decay: float | None, kind: str
) -> None:
    config = SpeedtronicConfig.from_dict({"model": SIZES, "optimizer": {"ema": decay}})
    average = state_of(config, 2)["model"]
    CheckpointManager(tmp_path / "run").save(12, {**state_of(config, 1), "ema": average})
    out, _ = export(capsys, tmp_path / "run", "--out", tmp_path / "w.safetensors")
    assert out.startswith(f"exported: {tmp_path / 'w.safetensors'}: step 12, 3.21k {kind}, ")
    loaded = load_file(tmp_path / "w.safetensors")
    assert all(torch.equal(loaded[name], average[name]) for name in loaded)


def test_one_that_is_named_is_exported(
    saved: Path, tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = export(capsys, saved / "checkpoints" / "step_000000000005", "--out", tmp_path / "out")
    assert "step 5" in out
    name = "transformer.wte.weight"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], state_of(config, 5)["model"][name])


def test_a_damaged_one_is_passed_over_and_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = saved / "checkpoints" / "step_000000000010"
    (newest / "state.safetensors").write_bytes(b"")
    out, err = export(capsys, saved, "--out", tmp_path / "w.safetensors")
    assert "step 5" in out
    assert err.startswith("warning: ")
    assert "step_000000000010 was passed over for step_000000000005" in err
    assert "state.safetensors is damaged" in refused(capsys, newest, "--out", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_llama_has_the_separator_of_the_run(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = export(capsys, saved, "--out", tmp_path / "hf", "--format", "huggingface", "--dtype", "bfloat16")
    assert out.splitlines()[1:] == ["without a tokenizer.json: token ids are the UTF-8 bytes of the text"]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["dtype"]) == ("llama", 0, "bfloat16")


@pytest.mark.parametrize(
    ("spec", "word", "separator"),
    [
        (None, "without a tokenizer: the model was trained on bare token ids", None),
        (CorpusCharTokenizer("abc").spec(), "without a tokenizer.json: token ids are the places of the characters", 0),
    ],
)
def test_what_is_missing_of_a_tokenizer_is_said(
    tmp_path: Path,
    config: SpeedtronicConfig,
    capsys: pytest.CaptureFixture[str],
    spec: Any,
    word: str,
    separator: int | None,
) -> None:
    CheckpointManager(tmp_path).save(1, state_of(config, 1, spec))
    out, _ = export(capsys, tmp_path, "--out", tmp_path / "hf", "--format", "huggingface")
    assert word in out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == separator


def test_the_tokenizer_of_the_run_goes_along(
    tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"a": 0, "b": 1, "[UNK]": 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["</s>"])
    CheckpointManager(tmp_path).save(1, state_of(config, 1, {"type": "tokenizers", "json": tokenizer.to_str()}))
    out, _ = export(capsys, tmp_path, "--out", tmp_path / "hf", "--format", "huggingface")
    assert len(out.splitlines()) == 1
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == tokenizer.to_str()
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 3


def test_an_export_that_is_there_is_kept_unless_forced(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "w.safetensors"
    target.write_text("old")
    assert "--force" in refused(capsys, saved, "--out", target)
    assert target.read_text() == "old"
    export(capsys, saved, "--out", target, "--force")
    assert load_file(target)


def test_another_model_is_told_which_format_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SpeedtronicConfig.from_dict({"model": {"name": "mine"}})
    CheckpointManager(tmp_path / "c").save(1, {"model": {"w": torch.ones(2)}, "config": config.to_dict()})
    message = refused(capsys, tmp_path / "c", "--out", tmp_path / "hf", "--format", "huggingface")
    assert "--format safetensors" in message
    export(capsys, tmp_path / "c", "--out", tmp_path / "w.safetensors")


def test_checkpoints_of_version_2_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_100.pt").write_bytes(b"\x80\x02")
    assert "checkpoints of version 2.0" in refused(capsys, tmp_path, "--out", tmp_path / "out")


def test_a_full_disk_is_one_error_of_the_run(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from speedtronic.durable.files import FileSystem

    def full(self: FileSystem, file: Any, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystem, "write", full)
    message = refused(capsys, saved, "--out", tmp_path / "w.safetensors", code=1)
    assert message == f"error: {tmp_path / 'w.safetensors'}: cannot be written: No space left on device\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_there_is_no_default_place(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "export", str(saved)]) == 2
    assert "--out" in capsys.readouterr().err
