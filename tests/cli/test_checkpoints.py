from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.export.files import HuggingFaceTokenizer
from speedtronic.cli import main, output
from speedtronic.cli.checkpoints import _with_settings_of_folder
from speedtronic.config import SpeedtronicConfig
from speedtronic.data.tokenizers import tiktoken
from speedtronic.data.tokenizers.chars import CharTokenizer
from speedtronic.durable.files import FileSystem
from speedtronic.errors import ConfigError
from speedtronic.model.transformer import build_reference_transformer
from tests.support.tokenizers import byte_level_bpe, lines_of_ranks

# ---------------------------------------------------------------------- list


@pytest.fixture
def half_damaged(tmp_path: Path) -> Path:
    """An output folder with two checkpoints, the older one cut short."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    path = manager.save(5, {"metrics": {"loss": 3.5}})
    manager.save(10, {"metrics": {"loss": 2.25, "eval_loss": 2.5}})
    os.truncate(path / "state.json", 1)
    return tmp_path / "run"


def listed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["checkpoints", "list", *arguments]) == code
    return capsys.readouterr().out


def test_the_table_tells_step_losses_and_status(half_damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading, first, second = listed(capsys, str(half_damaged)).splitlines()
    assert heading.split() == ["STEP", "AGE", "SIZE", "LOSS", "EVAL", "LOSS", "RUN", "STATUS", "FOLDER"]
    assert first.split()[0] == "5"
    assert "3.5000" in first
    assert "damaged: state.json has 1 bytes" in first
    assert second.split()[:2] == ["*", "10"]
    assert second.split()[5:7] == ["2.2500", "2.5000"]
    assert "complete" in second
    assert second.endswith("step_000000000010")


def test_the_checkpoints_folder_itself_and_a_config_are_the_same(
    half_damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"run:\n  output_dir: {half_damaged}\n")
    outputs = {listed(capsys, str(path), "--json") for path in (half_damaged, half_damaged / "checkpoints", config)}
    assert len(outputs) == 1


def test_json_is_an_array_of_objects(half_damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = json.loads(listed(capsys, str(half_damaged), "--json"))
    assert (second["step"], second["loss"], second["eval_loss"], second["problem"]) == (10, 2.25, 2.5, None)
    assert len(second["run_id"]) == 32
    assert first["problem"].startswith("state.json has 1 bytes")
    assert (first["newest"], second["newest"]) == (False, True)
    assert (first["best"], second["best"]) == (False, True)
    assert second["monitored"] == {"name": "loss", "mode": "min", "value": 2.5}
    fields = ["step", "path", "size_bytes", "time", "run_id", "loss", "eval_loss"]
    fields += ["monitored", "newest", "best", "problem"]
    assert list(first) == list(second) == fields


def test_the_help_describes_every_field(capsys: pytest.CaptureFixture[str], half_damaged: Path) -> None:
    fields = json.loads(listed(capsys, str(half_damaged), "--json"))[0]
    text = listed(capsys, "--help")
    assert not [field for field in fields if field not in text]


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """An output folder with three evaluated checkpoints, the second of them the best."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    for step, loss in ((5, 2.5), (10, 1.5), (15, 2.0)):
        model = {"weight": torch.full((2,), float(step))}
        manager.save(step, {"step": step, "model": model, "metrics": {"loss": 1.0, "eval_loss": loss}})
    return tmp_path / "run"


def test_the_best_is_marked_in_lists(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, str(evaluated)).splitlines()[1:]
    assert ["complete, best" in line for line in lines] == [False, True, False]
    entries = json.loads(listed(capsys, str(evaluated), "--json"))
    assert [(entry["step"], entry["newest"], entry["best"]) for entry in entries] == [
        (5, False, False),
        (10, False, True),
        (15, True, False),
    ]


def test_best_chooses_what_is_verified_and_exported(evaluated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(evaluated), "--best"]) == 0
    assert capsys.readouterr().out.startswith("step_000000000010: sound")
    out = evaluated.parent / "best.safetensors"
    assert main(["checkpoints", "export", str(evaluated), "--best", "--out", str(out)]) == 0
    assert "step 10" in capsys.readouterr().out
    assert load_file(out)["weight"].tolist() == [10.0, 10.0]
    # If it is damaged, the next best one is exported.
    (evaluated / "checkpoints/step_000000000010/model.safetensors").write_bytes(b"x")
    assert main(["checkpoints", "export", str(evaluated), "--best", "--out", str(out), "--force"]) == 0
    assert load_file(out)["weight"].tolist() == [15.0, 15.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "RUN/checkpoints/step_000000000005", "--best"], "is one checkpoint"),
        (["verify", "RUN", "--best", "--all"], "--all and --best choose different checkpoints"),
    ],
)
def test_best_among_one_or_all_is_bad_use(
    evaluated: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["checkpoints", *(word.replace("RUN", str(evaluated)) for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_yaml_takes_values_on_the_command_line(
    half_damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("run: {name: other}\n", encoding="utf-8")
    expected = listed(capsys, str(half_damaged), "--json")
    assert listed(capsys, str(config), f"run.output_dir={half_damaged}", "--json") == expected
    (half_damaged / "checkpoints").rename(half_damaged / "kept")
    found = listed(capsys, "--json", str(half_damaged), "checkpoint.directory=kept")
    assert found == expected.replace("checkpoints/step", "kept/step")


def test_one_checkpoint_is_listed_alone(
    half_damaged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = half_damaged / "checkpoints" / "step_000000000010"
    by_name = json.loads(listed(capsys, str(folder), "--json"))
    monkeypatch.chdir(folder)
    by_dot = json.loads(listed(capsys, ".", "--json"))
    assert [entry["step"] for entry in by_name] == [10]
    assert by_dot == by_name
    assert by_name[0]["newest"]


def test_the_one_that_is_loaded_next_is_that_of_the_last_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointManager(tmp_path).save(900, {})
    CheckpointManager(tmp_path).save(10, {})
    newest = [entry["step"] for entry in json.loads(listed(capsys, str(tmp_path), "--json")) if entry["newest"]]
    assert newest == [10]


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: there are no checkpoints\n"


def test_a_path_that_is_not_there_is_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent'}: there is no such folder or config\n"


def test_checkpoints_of_version_2_are_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_100.pt").write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / "step_100.pt"):
        assert main(["checkpoints", "list", str(path)]) == 2
        assert "checkpoints of version 2.0 (step_100.pt)" in capsys.readouterr().err


def test_a_checkpoint_without_a_manifest_is_listed(half_damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (half_damaged / "checkpoints" / "step_000000000010" / "manifest.json").unlink()
    assert "damaged: manifest.json is missing" in listed(capsys, str(half_damaged), code=1)


def test_a_folder_that_cannot_be_read_is_one_clear_message(
    half_damaged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["checkpoints", "list", str(half_damaged)]) == 2
    assert capsys.readouterr().err == f"error: {half_damaged / 'checkpoints'}: cannot be read: Permission denied\n"


# ---------------------------------------------------------------------- verify


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An output folder with checkpoints of steps 5 and 10."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    manager.save(5, {"model": {"w": torch.ones(8)}})
    manager.save(10, {"model": {"w": torch.ones(8)}, "metrics": {"loss": 2.0}})
    return tmp_path / "run"


def flip_a_bit(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step_{step:012d}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def verified(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["checkpoints", "verify", *arguments]) == code
    return capsys.readouterr().out


def test_the_newest_is_read_whole(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 5)
    line = verified(capsys, str(saved))
    assert line.startswith("step_000000000010: sound, ")
    assert line.count("\n") == 1


def test_a_flipped_bit_is_found_and_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 10)
    line = verified(capsys, str(saved), code=1)
    assert line == (
        "step_000000000010: damaged: model.safetensors is damaged: its contents do not match their checksum\n"
    )


def test_all_are_told_in_a_line_each(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 5)
    first, second = verified(capsys, str(saved), "--all", code=1).splitlines()
    assert first.startswith("step_000000000005: damaged: model.safetensors")
    assert second.startswith("step_000000000010: sound")


def test_one_that_is_named_is_read_alone(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 10)
    folder = saved / "checkpoints" / "step_000000000005"
    assert verified(capsys, str(folder)).startswith("step_000000000005: sound")
    (folder / "manifest.json").unlink()
    assert "manifest.json is missing" in verified(capsys, str(folder), code=1)


def test_a_config_means_its_run(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"run:\n  output_dir: {saved}\n")
    assert verified(capsys, str(config)) == verified(capsys, str(saved / "checkpoints"))


def test_json_has_the_objects_of_the_list(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 5)
    found = json.loads(verified(capsys, str(saved), "--all", "--json", code=1))
    main(["checkpoints", "list", str(saved), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["problem"] is None
    assert "checksum" in found[0]["problem"]
    assert found == [listed[0] | {"problem": found[0]["problem"]}, listed[1]]


@pytest.mark.parametrize("pointer", ["as it is", "missing", "damaged"])
def test_the_newest_is_the_last_that_was_saved_also_when_it_has_lost_its_manifest(
    saved: Path, capsys: pytest.CaptureFixture[str], pointer: str
) -> None:
    latest = saved / "checkpoints" / "latest.json"
    if pointer == "missing":
        latest.unlink()
    elif pointer == "damaged":
        latest.write_text("{")
    assert "step_000000000010: sound" in verified(capsys, str(saved))
    if pointer == "as it is":
        (saved / "checkpoints" / "step_000000000010" / "manifest.json").unlink()
        assert "step_000000000010: damaged: manifest.json is missing" in verified(capsys, str(saved), code=1)


def test_without_the_newest_its_run_is_looked_at(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(saved / "checkpoints" / "step_000000000010")
    assert "step_000000000005: sound" in verified(capsys, str(saved))


def test_nothing_to_verify_is_bad_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: there are no checkpoints\n"


def test_a_problem_cannot_steer_the_terminal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = saved / "checkpoints" / "step_000000000010" / "manifest.json"
    manifest.write_text('{"format": "\\u001b[2J", "\x1b[31m": 1')
    assert "\x1b" not in verified(capsys, str(saved), code=1)


def test_a_bar_shows_how_much_is_read(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_WORTH_SHOWING", 1)
    assert main(["checkpoints", "verify", str(saved)]) == 0
    assert capsys.readouterr().err == ""  # not on a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["checkpoints", "verify", str(saved)]) == 0
    shown = capsys.readouterr()
    assert "verifying" in shown.err
    assert shown.out.startswith("step_000000000010: sound")


# ---------------------------------------------------------------------- while a run saves


@pytest.fixture
def overtaken(tmp_path: Path, config: SpeedtronicConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that saves again, and removes what was there, when its first checkpoint's weights are first read."""
    writer = CheckpointManager(tmp_path / "run" / "checkpoints", keep_last=1)
    writer.save(5, state_of(config, 5))
    original, is_saved = FileSystem.open, []

    def open_(self: FileSystem, path: Path) -> Any:
        if path.name == "model.safetensors" and not is_saved:
            is_saved.append(True)
            writer.save(10, state_of(config, 10))
        return original(self, path)

    monkeypatch.setattr(FileSystem, "open", open_)
    return tmp_path / "run"


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_a_checkpoint_that_a_run_removes_is_not_called_damaged(
    overtaken: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["checkpoints", "verify", str(overtaken), *options]) == 0
    assert capsys.readouterr().out.startswith("step_000000000010: sound, ")


@pytest.mark.parametrize("moment", ["while it is verified", "while it is copied"])
def test_an_export_takes_the_next_checkpoint_if_a_run_removes_the_one_before(
    overtaken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    if moment == "while it is copied":
        monkeypatch.setattr("speedtronic.checkpoint.manager.check_files", lambda *files: None)
    out, err = export(capsys, overtaken, "--out", tmp_path / "w.safetensors")
    assert out.startswith(f"exported: {tmp_path / 'w.safetensors'}: step 10, ")
    assert err == ""
    assert load_file(tmp_path / "w.safetensors")


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\nfrom speedtronic.cli import main\n"
        "for action in ('list', 'verify', 'export'):\n    main(['checkpoints', action, '--help'])\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------------- export


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
def exportable(tmp_path: Path, config: SpeedtronicConfig) -> Path:
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
    exportable: Path, tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = export(capsys, exportable, "--out", tmp_path / "w.safetensors")
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
    exportable: Path, tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = export(capsys, exportable / "checkpoints" / "step_000000000005", "--out", tmp_path / "out")
    assert "step 5" in out
    name = "transformer.wte.weight"
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], state_of(config, 5)["model"][name])


def test_a_damaged_one_is_passed_over_and_named(
    exportable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = exportable / "checkpoints" / "step_000000000010"
    (newest / "state.safetensors").write_bytes(b"")
    out, err = export(capsys, exportable, "--out", tmp_path / "w.safetensors")
    assert "step 5" in out
    assert err.startswith("warning: ")
    assert "step_000000000010 was passed over for step_000000000005" in err
    assert "state.safetensors is damaged" in refused(capsys, newest, "--out", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_a_llama_has_the_separator_of_the_run(
    exportable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = export(capsys, exportable, "--out", tmp_path / "hf", "--format", "huggingface", "--dtype", "bfloat16")
    assert out.splitlines()[1:] == []
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == "\0"
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["dtype"]) == ("llama", 0, "bfloat16")


def test_a_model_without_a_tokenizer_says_so(
    tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointManager(tmp_path).save(1, state_of(config, 1))
    out, _ = export(capsys, tmp_path, "--out", tmp_path / "hf", "--format", "huggingface")
    assert "without a tokenizer: the run had none" in out
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] is None


def test_ranks_go_along_as_merges(
    tmp_path: Path, config: SpeedtronicConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setitem(tiktoken.ENCODINGS, 256, tiktoken.RankEncoding("bytes", r"\S+|\s+", 256, 257))
    spec = {"type": "tiktoken", "ranks": lines_of_ranks([bytes([byte]) for byte in range(256)])}
    CheckpointManager(tmp_path).save(1, state_of(config, 1, spec))
    out, _ = export(capsys, tmp_path, "--out", tmp_path / "hf", "--format", "huggingface")
    assert len(out.splitlines()) == 1
    assert json.loads((tmp_path / "hf" / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256


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
    exportable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "w.safetensors"
    target.write_text("old")
    assert "--force" in refused(capsys, exportable, "--out", target)
    assert target.read_text() == "old"
    export(capsys, exportable, "--out", target, "--force")
    assert load_file(target)


def test_another_model_is_told_which_format_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SpeedtronicConfig.from_dict({"model": {"name": "mine"}})
    CheckpointManager(tmp_path / "c").save(1, {"model": {"w": torch.ones(2)}, "config": config.to_dict()})
    message = refused(capsys, tmp_path / "c", "--out", tmp_path / "hf", "--format", "huggingface")
    assert "--format safetensors" in message
    export(capsys, tmp_path / "c", "--out", tmp_path / "w.safetensors")


def test_checkpoints_of_version_2_are_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_100.pt").write_bytes(b"\x80\x02")
    assert "checkpoints of version 2.0" in refused(capsys, tmp_path, "--out", tmp_path / "out")


def test_a_full_disk_is_one_error_of_the_run(
    exportable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FileSystem, file: Any, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystem, "write", full)
    message = refused(capsys, exportable, "--out", tmp_path / "w.safetensors", code=1)
    assert message == f"error: {tmp_path / 'w.safetensors'}: cannot be written: No space left on device\n"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_there_is_no_default_place(exportable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "export", str(exportable)]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_tokenizer_gets_the_settings_of_the_folder_that_it_came_from(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    own = byte_level_bpe()
    tokenizer = HuggingFaceTokenizer(own.spec()["json"], own.separator_id)
    (tmp_path / "tokenizer.json").write_text(own.spec()["json"])
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    found = _with_settings_of_folder(tokenizer, str(tmp_path))
    assert found is not None
    assert (found.settings, found.chat_template) == ({"chat_template": "{{ messages }}"}, None)
    other = tokenizer._replace(json="of another run")
    assert _with_settings_of_folder(other, str(tmp_path)) is other
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its tokenizer_config\.json cannot be read"):
        _with_settings_of_folder(tokenizer, str(tmp_path))
