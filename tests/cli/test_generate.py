from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import generate, main
from speedtronic.cli.output import prepare
from speedtronic.config import SpeedtronicConfig, load_config
from speedtronic.config.run_folder import save_run
from speedtronic.data.tokenizers.chars import CorpusCharTokenizer
from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.stores import open_store
from speedtronic.generation import TextGenerator, load_generator
from speedtronic.registry import build_model, registry
from speedtronic.runtime import import_plugins
from tests.support.tokenizers import byte_level_bpe

TEXT = "to be or not\n"
MODEL = {"vocab_size": 16, "max_seq_len": 12, "n_layer": 1, "n_head": 2, "d_model": 8}

PLUGIN = """
from torch import nn
from speedtronic import register_model

@register_model("bag_of_one")
def build(config):
    return nn.Sequential(nn.Embedding(config.vocab_size, 4), nn.Linear(4, config.vocab_size))
"""


FORGOTTEN = """
from torch import nn
from speedtronic import register_model

@register_model("forgotten bag")
class Bag(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, input_ids, labels=None):
        return {"logits": self.table(input_ids)}
"""


def trained(folder: Path, **sections: Any) -> Path:
    """A YAML whose run has one checkpoint."""
    path = folder / "run.yaml"
    path.write_text(json.dumps({"run": {"output_dir": str(folder / "out")}, "model": MODEL, **sections}))
    save(load_config(path), folder)
    return path


def save(config: SpeedtronicConfig, folder: Path) -> None:
    import_plugins(config.plugins, folder)
    torch.manual_seed(0)
    state = {
        "model": build_model(config).state_dict(),
        "config": config.to_dict(redact_secrets=True),
        "tokenizer": CorpusCharTokenizer(TEXT).spec(),
        "step": 3,
    }
    CheckpointManager(Path(config.run.output_dir) / config.checkpoint.directory).save(3, state)


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    return trained(tmp_path)


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["generate", *map(str, arguments), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_prompt_is_continued_and_ends_with_a_new_line(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    out = output(capsys, run_yaml, "--prompt", "to be", "--max-tokens", 9, "--seed", 1)
    assert out.startswith("to be")
    assert out.endswith("\n")
    assert 5 < len(out) <= 5 + 9 + 1
    assert set(out) <= set(TEXT)


def test_a_yaml_and_its_folders_give_the_same_text(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    out = run_yaml.parent / "out"
    sources = (run_yaml, out, out / "checkpoints", out / "checkpoints" / "step_000000000003")
    assert len({output(capsys, source, "--prompt", "t", "--seed", 5) for source in sources}) == 1


def test_the_seed_decides_the_text(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    first, again, other = (output(capsys, run_yaml, "--seed", seed) for seed in (1, 1, 2))
    assert first == again != other


def test_each_sample_is_what_its_own_seed_gives(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    alone = [output(capsys, run_yaml, "--prompt", "to", "--seed", seed) for seed in (7, 8)]
    both = output(capsys, run_yaml, "--prompt", "to", "--seed", 7, "--num-samples", 2)
    assert both == generate.SAMPLE_SEPARATOR.join(alone)


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    greedy = output(capsys, run_yaml, "--prompt", "t", "--temperature", 0)
    assert output(capsys, run_yaml, "--prompt", "t", "--top-k", 1) == greedy
    assert output(capsys, run_yaml, "--prompt", "t", "--top-p", 1e-6) == greedy


def test_a_prompt_may_come_from_a_file(capsys: pytest.CaptureFixture[str], run_yaml: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("or not")
    assert output(capsys, run_yaml, "--prompt-file", file).startswith("or not")


def test_a_custom_model_comes_with_its_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bag_plugin.py").write_text(PLUGIN)
    try:
        path = trained(tmp_path, model={**MODEL, "name": "bag_of_one"}, plugins=["bag_plugin"])
        assert output(capsys, path, "--prompt", "to be").startswith("to be")
    finally:
        sys.path.remove(str(tmp_path))


@pytest.fixture
def trained_bag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of a plugin's model, which this process has forgotten since, as a new one has."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/forgotten_bag.py").write_text(FORGOTTEN)
    (tmp_path / "text.txt").write_text(TEXT * 40)
    config: dict[str, Any] = {
        "plugins": ["forgotten_bag"],
        "run": {"max_steps": 2, "output_dir": str(tmp_path / "out")},
        "model": {**MODEL, "name": "forgotten bag"},
        "data": {"text_path": str(tmp_path / "text.txt"), "tokenizer": "chars"},
        "checkpoint": {"directory": "saved"},
    }
    (tmp_path / "code/run.yaml").write_text(json.dumps(config))
    assert main(["train", str(tmp_path / "code/run.yaml")]) == 0
    monkeypatch.delitem(sys.modules, "forgotten_bag")
    monkeypatch.delitem(registry._factories, "forgotten bag")
    sys.path.remove(str(tmp_path / "code"))
    return tmp_path / "out"


@pytest.mark.parametrize("inside", ["", "saved", "saved/step_000000000002"])
def test_the_folder_of_a_run_is_enough_for_a_custom_model(
    capsys: pytest.CaptureFixture[str], trained_bag: Path, inside: str
) -> None:
    """Whatever its folder of checkpoints is called; its plugins come from where the run imported them."""
    capsys.readouterr()
    assert output(capsys, trained_bag / inside, "--prompt", "to be").startswith("to be")


def test_a_run_moves_with_its_folder(capsys: pytest.CaptureFixture[str], trained_bag: Path) -> None:
    capsys.readouterr()
    moved = trained_bag.rename(trained_bag.parent / "moved")
    assert output(capsys, moved, "--prompt", "to be").startswith("to be")


def test_values_on_the_command_line_go_before_those_of_the_run(
    capsys: pytest.CaptureFixture[str], run_yaml: Path
) -> None:
    words = ("--prompt", "to", "--seed", 1)
    elsewhere = run_yaml.parent / "elsewhere"
    (run_yaml.parent / "out").rename(elsewhere)
    expected = output(capsys, elsewhere, *words)
    assert output(capsys, run_yaml, f"run.output_dir={elsewhere}", *words) == expected
    (elsewhere / "checkpoints").rename(elsewhere / "kept")
    assert output(capsys, elsewhere, *words, "checkpoint.directory=kept") == expected
    assert load_generator(elsewhere / "kept", overrides=["data.block_size=1"]).context_length == 1


def test_the_best_checkpoint_writes_where_it_is_asked_for(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    config = load_config(run_yaml)
    folder = run_yaml.parent / "out/checkpoints"
    manager = CheckpointManager(folder)
    state = manager.load_latest()
    assert state is not None
    for step, loss in ((4, 2.0), (5, 1.0), (6, 3.0)):
        weights = {name: torch.full_like(tensor, 0.1 * step) for name, tensor in state["model"].items()}
        manager.save(step, {**state, "step": step, "model": weights, "metrics": {"loss": 1.0, "eval_loss": loss}})
    assert load_generator(folder).step == 6
    assert config.checkpoint.keep_best == 0
    assert load_generator(folder, best=True).step == 5
    output(capsys, run_yaml, "--best")
    assert main(["generate", str(folder / "step_000000000005"), "--best"]) == 2
    assert "is one checkpoint; to take the best, name the folder of its run" in capsys.readouterr().err


def test_without_an_evaluation_none_is_the_best(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    assert main(["generate", str(run_yaml), "--best"]) == 2
    assert "no checkpoint was evaluated, so none is the best" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "q"], "'q'"),
        (["--top-k", "0"], "top_k"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_new_tokens"),
        (["--seed", "99999999999999999999999"], "the seed must be from 0 to 2**63-1"),
        (["--seed", str(2**63 - 1), "--num-samples", "2"], "the seed must be from 0 to 2**63-1"),
        (["--num-samples", "0"], "--num-samples must be at least 1, not 0"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--prompt-file", "no/such/file"], "no/such/file"),
        (["--prompt-file", "latin.txt"], "latin.txt: not UTF-8 at byte 2"),
    ],
)
def test_bad_use_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    run_yaml: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(run_yaml.parent)
    Path("latin.txt").write_bytes(b"to\xe9")
    assert main(["generate", str(run_yaml), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_a_source_that_is_not_there_is_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["latest.json", "step_000000000003/model.safetensors"])
def test_a_file_that_is_no_configuration_is_answered_with_what_to_name(
    capsys: pytest.CaptureFixture[str], run_yaml: Path, name: str
) -> None:
    file = run_yaml.parent / "out" / "checkpoints" / name
    for command in (["generate"], ["checkpoints", "list"]):
        assert main([*command, str(file)]) == 2
        first = capsys.readouterr().err.splitlines()[0]
        if file.suffix == ".safetensors" and command == ["generate"]:
            assert first.endswith(f"does not say what model they are of; add it: CONFIG --weights {file}")
        else:
            assert first == f"error: {file}: not a configuration; name the folder of a run or its YAML"


# ---------------------------------------------------------------------- weights alone


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A YAML whose run never trained here, beside `pulled.safetensors`: weights that a master has published."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "run.yaml"
    (tmp_path / "text.txt").write_text(TEXT * 40)
    config.write_text(json.dumps({"model": MODEL, "data": {"text_path": "text.txt", "tokenizer": "chars"}}))
    torch.manual_seed(3)
    model = build_model(load_config(config))
    MasterOuterLoop(open_store(f"dir://{tmp_path}/store"), snapshot(model), schema=Schema.of(model)).sync_once()
    assert main(["diloco", "pull", "store", "--out", "pulled.safetensors"]) == 0
    capsys.readouterr()
    return config


def test_pulled_weights_write_what_the_model_with_them_writes(capsys: pytest.CaptureFixture[str], pulled: Path) -> None:
    out = output(capsys, pulled, "--weights", "pulled.safetensors", "--prompt", "to be", "--seed", 1)

    config = load_config(pulled)
    torch.manual_seed(3)
    model, tokenizer = build_model(config), CorpusCharTokenizer(TEXT)
    text = TextGenerator(model.eval(), tokenizer, MODEL["max_seq_len"], None).stream("to be", seed=1)
    assert out == "to be" + "".join(text) + "\n"


def test_the_folder_of_a_run_names_the_model_of_weights_too(
    capsys: pytest.CaptureFixture[str], pulled: Path, tmp_path: Path
) -> None:
    save_run(tmp_path / "run", load_config(pulled), "id", [])
    words = ("--weights", "pulled.safetensors", "--seed", 1)
    assert output(capsys, tmp_path / "run", *words) == output(capsys, pulled, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "gone.safetensors"], "gone.safetensors: no such file"),
        (["--weights", "text.txt"], "text.txt"),
        (["--weights", "pulled.safetensors", "model.d_model=16"], "these weights are not those of this model"),
        (["--weights", "pulled.safetensors", "model.d_model=16"], "Name the YAML, or the folder of the run, that they"),
        (["--weights", "pulled.safetensors", "data.text_path=gone.txt"], "gone.txt"),
        (
            ["--weights", "pulled.safetensors", "data.text_path=null", "data.tokenizer=bytes"],
            "set data.shards or data.text_path",
        ),
        (["--weights", "pulled.safetensors", "model.vocab_size=4"], "set model.vocab_size to"),
        (["--weights", "pulled.safetensors", "--best"], "--best: chooses among the checkpoints"),
    ],
)
def test_what_is_missing_beside_weights_is_named(
    capsys: pytest.CaptureFixture[str], pulled: Path, words: list[str], message: str
) -> None:
    assert main(["generate", str(pulled), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Pipe(io.TextIOWrapper):
    def __init__(self, encoding: str) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding)


def test_a_wrong_key_of_a_run_is_said_of_the_key_alone(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    folder = run_yaml.parent / "out"
    as_json = run_yaml.with_suffix(".json")
    as_json.write_text(load_config(run_yaml).to_json(), encoding="utf-8")
    for source in (folder, run_yaml, as_json):
        assert main(["generate", str(source), "modl.dropout=0.1"]) == 2
        said = capsys.readouterr().err
        assert "not a configuration" not in said
        assert "modl" in said.splitlines()[0]


def test_weights_of_another_size_are_one_line(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    assert main(["generate", str(run_yaml), "model.d_model=64"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r"has shape .* in the checkpoint and .*, and \d+ more; leave out model.d_model=64$", said.strip())


def test_a_special_token_in_a_prompt_is_said_to_be_text(capsys: pytest.CaptureFixture[str], run_yaml: Path) -> None:
    pytest.importorskip("tokenizers")
    config = load_config(trained(run_yaml.parent, model={**MODEL, "vocab_size": 512}))
    state = {"model": build_model(config).state_dict(), "config": config.to_dict(), "step": 4}
    manager = CheckpointManager(Path(config.run.output_dir) / config.checkpoint.directory)
    manager.save(4, {**state, "tokenizer": byte_level_bpe().spec()})
    assert main(["generate", str(run_yaml), "--prompt", "hi", "--max-tokens", "1", "--device", "cpu"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["generate", str(run_yaml), "--prompt", "hi<|endoftext|>", "--max-tokens", "1", "--device", "cpu"]) == 0
    assert "warning: the prompt spells <|endoftext|>, which the model reads here as ordinary text" in (
        capsys.readouterr().err
    )


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    generate._write("a\x1b[2J\tb\né\x07")
    assert terminal.getvalue() == "a\ufffd[2J\tb\né\ufffd"


def test_a_pipe_gets_the_characters_that_its_encoding_has_and_the_rest_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("utf-8", "a\x1bé".encode()), ("ascii", b"a\x1b\\xe9")):
        pipe = Pipe(encoding)
        monkeypatch.setattr(sys, "stdout", pipe)
        prepare()
        generate._write("a\x1bé")
        assert pipe.bytes.getvalue() == expected


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(run_yaml: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "speedtronic",
        "generate",
        str(run_yaml),
        "--max-tokens",
        "100000",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(
        [*command, "--num-samples", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
