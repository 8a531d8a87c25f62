"""The examples and the README's own code do what they say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.cli import main
from speedtronic.config import load_config
from speedtronic.config.checks import refuse_what_cannot_be_trained
from speedtronic.data.prepare.prepare import prepare
from speedtronic.precision import PrecisionPlan
from speedtronic.registry import build_model
from speedtronic.runtime import build_runtime
from speedtronic.shapes import validate_startup_shapes
from tests.support.pages import block_of, blocks
from tests.support.ranks import GPT2_RANKS, needs_gpt2_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if path.parent.name != "cluster")
DILOCO = ROOT / "examples/diloco/diloco.yaml"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODEL_PAGE = "docs/your_model.md"


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose plugins are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = ("lion", "inverse_root", "top", "good_enough", "digits")
    for name in ("model", "data", "my_model", "my_data", "my_callbacks", *own):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_sound_configuration(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("command", re.findall(r"^\$ speedtronic (.*?)(?: +#.*)?$", README, re.MULTILINE))
def test_of_every_command_but_train_one_process_of_torchruns_does_the_work(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train` is what all of them do (`tests/parallel`)."""
    if command.startswith("train "):
        pytest.skip("all processes train")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_slurm_script_is_sound_by_shellcheck() -> None:
    done = subprocess.run(["shellcheck", str(ROOT / "examples/cluster/slurm.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples/cluster").glob("*.yaml")), ids=lambda path: path.stem)
def test_skypilot_takes_its_tasks(path: Path) -> None:
    """By its own schema, where SkyPilot is installed: it is too large to be installed for this."""
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    task = YAML(typ="safe").load(path)
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_the_smoke_example_takes_four_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(ROOT / "examples/smoke.yaml")]) == 0
    assert "step 4" in capsys.readouterr().out
    assert (folder / "runs/smoke/checkpoints/step_000000000004").is_dir()


@pytest.mark.slow
def test_the_custom_model_example_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "examples/custom_model/custom_model.yaml")
    assert main(["train", config, "run.max_steps=40"]) == 0
    losses = [float(loss) for loss in re.findall(r"^step .*?loss ([\d.]+)", capsys.readouterr().out, re.MULTILINE)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_custom_data_example_learns_sums(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "examples/custom_data/custom_data.yaml")
    assert main(["train", config, "run.max_steps=60"]) == 0
    losses = [float(loss) for loss in re.findall(r"^eval .*?loss ([\d.]+)", capsys.readouterr().out, re.MULTILINE)]
    assert losses[-1] < 2.2  # of 2.6 at the start: ln 13


def losses_of(shown: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*?loss ([\d.]+)", shown, re.MULTILINE)]


@pytest.mark.slow
def test_the_optimizer_example_learns_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "examples/custom_optimizer/custom_optimizer.yaml")
    assert main(["train", config, "run.max_steps=20"]) == 0
    assert main(["train", config, "run.max_steps=40", "--resume"]) == 0
    losses = losses_of(capsys.readouterr().out)
    assert losses[-1] < 0.8 * losses[0]
    trainer, _ = build_runtime(config)
    assert type(trainer.optimizer).__name__ == "Lion"
    assert {group["lr"] / group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.1}
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [3e-3, 3e-3, 1e-3]
    assert trainer.optimizer.param_groups[0]["betas"] == [0.9, 0.98]


@pytest.mark.slow
def test_the_schedule_example_follows_its_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "examples/custom_schedule/custom_schedule.yaml")
    assert main(["train", config, "run.max_steps=60", "logging.json_file=log.jsonl"]) == 0
    lines = [json.loads(line) for line in (folder / "runs/custom-schedule/log.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr_applied"] for line in lines if line["event"] == "train_step"}
    assert rates[10] == pytest.approx(3e-3)
    assert rates[60] == pytest.approx(3e-3 * (21 / 70) ** 0.5)


@pytest.mark.slow
def test_the_metric_example_keeps_the_best_by_its_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(ROOT / "examples/custom_metric/custom_metric.yaml")]) == 0
    values = [float(value) for value in re.findall(r"^eval .*?top3 ([\d.]+)", capsys.readouterr().out, re.MULTILINE)]
    assert 3 / 64 < values[0] < values[-1] <= 1
    assert main(["checkpoints", "list", "runs/custom-metric"]) == 0
    assert "best" in capsys.readouterr().out


@pytest.mark.slow
def test_the_callback_example_ends_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(ROOT / "examples/custom_callback/custom_callback.yaml")]) == 0
    shown = capsys.readouterr().out
    step = re.search(r"the callback GoodEnough has stopped the run at step (\d+) of 400", shown)
    assert step is not None
    assert (folder / f"runs/custom-callback/checkpoints/step_{int(step[1]):012}").is_dir()


@pytest.mark.slow
def test_the_digits_example_is_right_about_nearly_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    assert main(["train", str(ROOT / "examples/digits/digits.yaml")]) == 0
    values = re.findall(r"^eval .*?accuracy ([\d.]+)", capsys.readouterr().out, re.MULTILINE)
    assert float(values[-1]) > 0.95


@pytest.mark.slow
def test_the_gan_example_makes_numbers_like_those_of_the_data() -> None:
    namespace: dict[str, Any] = {"__name__": "gan"}
    exec(compile((ROOT / "examples/gan.py").read_text(encoding="utf-8"), "gan.py", "exec"), namespace)
    mean, deviation = namespace["main"]()
    assert 3.3 < mean < 4.7
    assert 0.6 < deviation < 2.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft calls it
def test_the_fine_tuning_example_runs_by_the_commands_of_its_head(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model in place of the one that would be fetched."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    (folder / "corpus").mkdir()
    (folder / "corpus/text.txt").write_text("Once upon a time there was a fox.\n" * 400, encoding="utf-8")
    train_tokenizer = [
        "data",
        "train-tokenizer",
        "corpus/",
        "--vocab-size",
        "300",
        "--out",
        "models/base/tokenizer.json",
    ]
    assert main(train_tokenizer) == 0
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=256)
    transformers.LlamaForCausalLM(config).save_pretrained("models/base")
    path = ROOT / "examples/finetune/finetune.yaml"
    commands = re.findall(r"^#     speedtronic (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["data", "train", "generate", "checkpoints", "checkpoints"]
    for command in commands:
        words = shlex.split(command.replace("examples/", f"{ROOT}/examples/"))
        words += ["run.max_steps=4", "model.max_seq_len=32"] if words[0] == "train" else []
        words += ["--max-tokens", "5"] if words[0] == "generate" else []
        assert main(words) == 0, capsys.readouterr().err
    base = transformers.AutoModelForCausalLM.from_pretrained("models/base")
    adapted = peft.PeftModel.from_pretrained(base, "models/adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained("models/merged").eval()
    ids = torch.arange(20)[None]
    torch.testing.assert_close(adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")
def test_the_huggingface_example_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = str(ROOT / "examples/huggingface_model/huggingface_model.yaml")
    assert main(["train", config, "run.max_steps=30"]) == 0
    losses = [float(loss) for loss in re.findall(r"^step .*?loss ([\d.]+)", capsys.readouterr().out, re.MULTILINE)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_the_twin_of_gpt2_runs_by_the_commands_of_its_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a small text in place of Python's library."""
    text = folder / "text.py"
    text.write_text("def double(x):\n    return 2 * x\n" * 500, encoding="utf-8")
    page = (ROOT / "docs/gpt2_124m.md").read_text(encoding="utf-8").partition("## The twin")[2]
    commands = [shlex.split(line) for line in re.findall(r"^\$ speedtronic (.*)$", page, re.MULTILINE)]
    assert [command[0] for command in commands] == ["data", "data", "train", "generate"]
    for command in commands:
        words = [word.replace("examples/", str(ROOT / "examples") + "/") for word in command]
        if "--source" in words:
            at = words.index("--source")
            words[at : at + 2] = [str(text)]
        if "--vocab-size" in words:
            words[words.index("--vocab-size") + 1] = "300"
        if words[0] == "train":
            words += ["run.max_steps=2", "model.d_model=32", "model.n_layer=1"]
        assert main(words) == 0
    assert "def " in capsys.readouterr().out


def test_gpt2s_example_has_the_size_that_its_page_says_and_sizes_that_the_hardware_is_fast_with() -> None:
    config = load_config(ROOT / "examples/gpt2_124m.yaml")
    with torch.device("meta"):
        model = build_model(config)
    millions = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} million"
    assert f"# {millions} weights" in (ROOT / "examples/gpt2_124m.yaml").read_text(encoding="utf-8")
    assert f"6 · {millions}" in (ROOT / "docs/gpt2_124m.md").read_text(encoding="utf-8")
    plan = PrecisionPlan("bf16", torch.bfloat16, use_scaler=False, autocast_enabled=True, device_type="cuda")
    assert validate_startup_shapes(config, model, "cuda", plan).warnings == ()


@needs_gpt2_ranks
def test_gpt2s_example_trains_with_its_vocabulary_on_its_own_recipe(folder: Path) -> None:
    """With a model and batches that a test has time for."""
    (folder / "corpus").mkdir()
    (folder / "corpus/text.txt").write_text("To be, or not to be: that is the question.\n" * 200, encoding="utf-8")
    prepared = ["data", "prepare", "corpus/", "--tokenizer", str(GPT2_RANKS), "--out", "data/corpus-gpt2"]
    assert main(prepared) == 0
    small = ["n_layer=1", "n_head=2", "d_model=16", "max_seq_len=32"]
    sizes = [f"model.{size}" for size in small] + ["data.micro_batch_size=2", "data.target_batch_size=4"]
    options = ["run.max_steps=2", "run.device=cpu", "precision=fp32", "compile=false", "data.validation_fraction=0.1"]
    assert main(["train", str(ROOT / "examples/gpt2_124m.yaml"), *sizes, *options]) == 0
    assert (folder / "runs/gpt2-124m/checkpoints/step_000000000002").is_dir()


def test_the_quickstart_trains_and_writes_on_small_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = folder / "text.py"
    text.write_text("def double(x):\n    return 2 * x\n" * 2000, encoding="utf-8")
    prepare([text], folder / "data/python-stdlib")
    config = str(ROOT / "examples/quickstart.yaml")
    assert main(["train", config, "run.max_steps=3", "model.d_model=32", "model.n_layer=1"]) == 0
    capsys.readouterr()
    assert main(["generate", config, "--prompt", "def ", "--max-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def diloco_commands() -> list[list[str]]:
    """What the head of the example says to type, without `speedtronic`."""
    lines = re.findall(r"^#     speedtronic (.*)$", DILOCO.read_text(encoding="utf-8"), re.MULTILINE)
    return [shlex.split(line.replace("examples/", f"{ROOT}/examples/")) for line in lines]


def test_the_nodes_of_the_diloco_example_train_what_the_quickstart_trains() -> None:
    alone, together = load_config(ROOT / "examples/quickstart.yaml"), load_config(DILOCO)
    for section in ("model", "data", "optimizer"):
        assert getattr(together, section) == getattr(alone, section)
    assert together.scheduler.name == alone.scheduler.name


@pytest.mark.slow
def test_the_diloco_example_trains_by_the_commands_of_its_head(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small model on a small text, and each process as one of its own."""
    (folder / "text.py").write_text("def double(x):\n    return 2 * x\n" * 2000, encoding="utf-8")
    prepare([folder / "text.py"], folder / "data/python-stdlib")
    sizes = ["run.max_steps=8", "model.d_model=32", "model.n_layer=1", "distributed.inner_steps=2"]
    short = ["distributed.poll_interval=0.1", "distributed.grace=0.5", "eval.every_steps=null"]
    data, master, anna, berta, status, pull, generate = diloco_commands()
    assert data[:2] == ["data", "prepare"]
    assert master[-2:] == ["--until", str(load_config(DILOCO).run.max_steps)]
    master[-1] = "8"
    started = []
    try:
        for words in (master, anna, berta):
            started.append(subprocess.Popen([sys.executable, "-m", "speedtronic", *words, *sizes, *short]))
            while words is master and not (folder / "runs/diloco/store/head/00000000.json").exists():
                assert started[0].poll() is None
                time.sleep(0.05)  # so short a run could end before there is a version to begin from
        assert [process.wait(300) for process in started] == [0, 0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert main([*status, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [node["name"] for node in told["nodes"]] == ["anna", "berta"]
    assert told["version"] >= 1
    assert main(pull) == 0
    model = build_model(load_config(DILOCO, sizes))
    assert load_initial_weights(model, "diloco.safetensors").loaded
    assert main([*generate, *sizes, "--max-tokens", "5"]) == 0
    assert "def " in capsys.readouterr().out


def test_the_shakespeare_example_trains_on_any_text(folder: Path) -> None:
    (folder / "shakespeare.txt").write_text("To be, or not to be: that is the question.\n" * 200, encoding="utf-8")
    config = str(ROOT / "examples/shakespeare_char.yaml")
    assert main(["train", config, "run.max_steps=2", "eval.batches=2"]) == 0


def test_the_trainer_of_the_models_page_learns_a_sum(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block.text for block in blocks(MODEL_PAGE) if block.file is None and "Trainer" in block.text)
    exec(compile(block, MODEL_PAGE, "exec"), {})
    assert float(capsys.readouterr().out.splitlines()[-1].split()[0]) < 0.1


def write_files(folder: Path, page: str, *names: str) -> None:
    for name in names:
        (folder / name).write_text(block_of(page, name), encoding="utf-8")


def last_loss(shown: str) -> float:
    losses = re.findall(r"^step .*?loss ([\d.]+)", shown, re.MULTILINE)
    return float(losses[-1])


def test_the_model_of_its_page_learns_by_its_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(folder, MODEL_PAGE, "my_model.py", "my_run.yaml")
    assert main(["train", "my_run.yaml"]) == 0
    # Chance is ln 64 = 4.16. Of the next token, a bigram can know that it is one of four, but for noise.
    assert last_loss(capsys.readouterr().out) < 2.8
    assert (folder / "runs/bigram/checkpoints/step_000000000050").is_dir()


def test_the_callback_of_the_models_page_unfreezes_after_its_step(folder: Path) -> None:
    write_files(folder, MODEL_PAGE, "my_callbacks.py", "my_unfreezing.yaml")
    weights = {}
    for steps in (1, 20, 22):
        trainer, _ = build_runtime("my_unfreezing.yaml", max_steps=steps)
        trainer.fit()
        weights[steps] = trainer.model.get_parameter("transformer.h.0.mlp.down_proj.weight").detach()
    assert torch.equal(weights[1], weights[20])
    assert not torch.equal(weights[20], weights[22])


def test_the_readmes_dataset_is_learnt_by_its_yaml(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(folder, "README.md", "my_data.py", "my_counting.yaml")
    assert main(["train", "my_counting.yaml"]) == 0
    assert last_loss(capsys.readouterr().out) < 0.6  # counting has no surprises; chance is ln 64 = 4.16
    assert (folder / "runs/counting/checkpoints/step_000000000050").is_dir()


def test_the_readmes_corpus_is_prepared_and_trained_on_by_its_commands(folder: Path) -> None:
    (folder / "corpus").mkdir()
    words = " ".join(f"word{number} number{number * 7}" for number in range(3000))
    (folder / "corpus/words.txt").write_text(words, encoding="utf-8")
    (folder / "corpus/more.jsonl").write_text(json.dumps({"text": words}) + "\n", encoding="utf-8")
    commands = re.findall(r"^\$ speedtronic (data .*)$", README, re.MULTILINE)
    prepared = [command for command in commands if "corpus" in command]
    assert len(prepared) == 3
    for command in prepared:
        assert main(shlex.split(command)) == 0
    write_files(folder, "README.md", "my_corpus.yaml")
    assert main(["train", "my_corpus.yaml"]) == 0


def test_the_tests_that_the_contributing_page_picks_are_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picks = re.findall(r"pytest (tests/\S+\.py) -k (\w+)", page)
    assert picks
    for file, word in picks:
        assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (file, word)


def test_the_configurations_of_the_fine_tuning_page_are_sound() -> None:
    page = (ROOT / "docs/fine-tuning.md").read_text(encoding="utf-8")
    whole, adapters, groups = (load_config(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    assert whole.model.hf_folder == adapters.model.hf_folder == "models/base"
    assert adapters.model.lora is not None
    for config in (whole, adapters):
        refuse_what_cannot_be_trained(config)
    assert [group.match for group in groups.optimizer.groups][0] == "*embed_tokens*"


def test_the_readmes_configuration_is_sound() -> None:
    (block,) = (block for block in readme_blocks("yaml") if "quickstart" in block)
    assert load_config(block).accumulation_steps == 2


def test_the_readmes_error_is_the_one_that_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in readme_blocks("yaml") if "quickstart" in block)
    wrong = block.replace("micro_batch_size: 16 ", "micro_batchsize: 16 ")
    (folder / "config.yaml").write_text(wrong, encoding="utf-8")
    assert main(["validate", "config.yaml"]) == 2
    shown = re.search(r"error: config\.yaml:\d+: data\.micro_batchsize.*", README)
    assert shown is not None
    assert shown.group() in capsys.readouterr().err
