"""Models by the folder that `save_pretrained` wrote, and adapters beside frozen weights: tiny, with random weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.config import ModelConfig
from speedtronic.errors import CheckpointError, ConfigError, MissingExtraError
from speedtronic.model import hugging_face
from speedtronic.registry import build_model
from speedtronic.runtime import build_runtime, evaluate_from_config, train_from_config
from tests.support.configs import tiny
from tests.support.foreign import LENGTH, VOCABULARY, tiny_model

pytestmark = [
    pytest.mark.slow,  # importing transformers takes seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft calls it
]

KINDS = ("llama", "gpt2")
LORA = {"r": 4}


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    module: ModuleType = pytest.importorskip("transformers")
    return module


@pytest.fixture(scope="module")
def peft(transformers: ModuleType) -> ModuleType:
    module: ModuleType = pytest.importorskip("peft")
    return module


@pytest.fixture
def pretrained(tmp_path: Path, transformers: ModuleType) -> Callable[..., Path]:
    def save(kind: str = "llama", seed: int = 7, name: str = "pretrained", **options: Any) -> Path:
        model: Any = tiny_model(transformers, kind, seed)
        model.save_pretrained(tmp_path / name, **options)
        return tmp_path / name

    return save


def config_of(output: Path, folder: Path, lora: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    run = {"init_from": str(folder), "max_steps": 6, **sections.pop("run", {})}
    model = {"name": "hf", "max_seq_len": LENGTH, **({"lora": lora} if lora else {}), **sections.pop("model", {})}
    config = tiny(output, run=run, data={"shuffle": True, "target_batch_size": 4}, **sections)
    return {**config, "model": model}


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits  # type: ignore[no-any-return]


def newest(folder: Path) -> dict[str, Any]:
    state = CheckpointManager(folder / "checkpoints").load_latest()
    assert state is not None
    return state


# ---------------------------------------------------------------- the folder's model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
def test_a_folder_trains_from_the_yaml_alone_and_resumes_bit_for_bit(
    kind: str, max_shard_size: str, transformers: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder = pretrained(kind, max_shard_size=max_shard_size)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(json.dumps(config_of(tmp_path / "straight", folder)), encoding="utf-8")
    trainer, _ = build_runtime(yaml)
    source = tiny_model(transformers, kind, 7)
    assert type(trainer.model) is type(source)
    torch.testing.assert_close(logits(trainer.model), logits(source), rtol=0, atol=0)
    assert trainer.config.model.vocab_size == trainer.config.data.vocab_size == VOCABULARY
    straight = train_from_config(yaml)
    first = train_from_config(config_of(tmp_path / "parts", folder), max_steps=3)
    second = train_from_config(config_of(tmp_path / "parts", folder), resume=True)
    losses = [record["loss"] for record in straight.metrics]
    assert losses == [record["loss"] for record in (*first.metrics, *second.metrics)]
    trained = newest(tmp_path / "straight")["model"]
    assert not any(torch.equal(trained[name], p) for name, p in source.named_parameters())


def test_without_weights_to_start_from_the_folder_says_what_is_built(
    pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder = pretrained()
    section = ModelConfig(name="hf", hf_folder=str(folder), extra={"attention_dropout": 0.25})
    model: Any = build_model(section)
    assert model.config.attention_dropout == 0.25
    assert not torch.equal(logits(model), logits(tiny_model(pytest.importorskip("transformers"), "llama", 7)))


@pytest.mark.parametrize("name", ["olmo2", "qwen3", "gemma3_text", "gpt_neox", "mixtral", "opt"])
def test_other_classes_train_from_their_folder(name: str, transformers: ModuleType, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": LENGTH}
    special = {
        "mixtral": {"num_local_experts": 2},
        "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **sizes, **special.get(name, {}), **ids)
    source = transformers.AutoModelForCausalLM.from_config(config)
    source.save_pretrained(tmp_path / "pretrained")
    trainer, _ = build_runtime(config_of(tmp_path / "run", tmp_path / "pretrained", run={"max_steps": 2}))
    torch.testing.assert_close(logits(trainer.model), logits(source), rtol=0, atol=0)
    trainer.model.train()
    assert trainer.fit().steps == 2


def test_a_run_is_evaluated_and_exported_with_its_own_class(
    transformers: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder = pretrained("gpt2")
    config = config_of(tmp_path / "run", folder, eval={"every_steps": 3})
    trainer, _ = build_runtime(config)
    result = trainer.fit()
    assert evaluate_from_config(config, newest(tmp_path / "run"))["loss"] == pytest.approx(result.eval_loss)
    out = tmp_path / "exported"
    assert main(["checkpoints", "export", str(tmp_path / "run"), "--out", str(out), "--format", "huggingface"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logits(theirs), logits(trainer.model), rtol=0, atol=0)
    assert (
        main(["checkpoints", "export", str(tmp_path / "run"), "--out", str(tmp_path / "no"), "--format", "peft"]) == 2
    )
    assert not (tmp_path / "no").exists()


def test_what_is_wrong_with_a_folder_is_named(
    transformers: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    def refused(match: str, error: type[Exception] = ConfigError, **section: Any) -> None:
        with pytest.raises(error, match=match):
            build_runtime(config_of(tmp_path / "run", folder, **section))

    folder = tmp_path / "nothing"
    refused(r"^model\.hf_folder: .*nothing has no config\.json")
    folder = pretrained("gpt2")
    refused(r"^model\.vocab_size: 99 contradicts the 64 of", model={"vocab_size": 99})
    refused(r"^model\.extra\.colour: the gpt2 of .* has no such value", model={"extra": {"colour": 1}})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def rewrite(**changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")

    rewrite(n_embd=32)
    refused(r"transformer\.wte\.weight has shape \(64, 16\) there and \(64, 32\) in this model", CheckpointError)
    rewrite(n_layer=3)
    refused(r"transformer\.h\.2\.ln_1\.weight is missing there", CheckpointError)
    rewrite(quantization_config={"quant_method": "gptq", "bits": 4})
    refused(r"are quantised, and cannot be trained")
    rewrite(model_type="unheard_of")
    refused(r"^model\.hf_folder: .* cannot be used")
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")
    refused(r"transformers has no causal language model for a vit")


def test_what_does_not_fit_is_left_random_on_request(
    transformers: ModuleType, pretrained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pretrained("gpt2")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "n_layer": 3}), encoding="utf-8")
    trainer, _ = build_runtime(config_of(tmp_path / "run", folder, run={"init_strict": False}))
    assert "transformer.h.2.ln_1.weight is missing there" in capsys.readouterr().out
    source = tiny_model(transformers, "gpt2", 7)
    for name, tensor in source.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], tensor)


def test_no_code_of_a_folder_is_run_and_no_pickle_is_read(pretrained: Callable[..., Path], tmp_path: Path) -> None:
    folder = pretrained()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')\n", encoding="utf-8")
    mapped = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "own", "auto_map": mapped}), encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        build_runtime(config_of(tmp_path / "run", folder))
    for key in ("attn_implementation", "_attn_implementation"):
        kernel = {**config, key: "kernels-community/flash-attn"}
        (folder / "config.json").write_text(json.dumps(kernel), encoding="utf-8")
        with pytest.raises(
            ConfigError, match="asks for an attention kernel that would be fetched, kernels-community/fl"
        ):
            build_runtime(config_of(tmp_path / "run", folder))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}', encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"has adapters in it \(adapter_config\.json\); name the folder of their base"
    ):
        build_runtime(config_of(tmp_path / "run", folder))
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which could run code"):
        build_runtime(config_of(tmp_path / "run", folder))
    assert not ran.exists()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"install speedtronic\[transformers\]"):
        hugging_face._transformers()
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"install speedtronic\[peft\]"):
        hugging_face._peft()


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_move_and_a_checkpoint_has_nothing_else(
    kind: str, peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder = pretrained(kind)
    trainer, _ = build_runtime(config_of(tmp_path / "run", folder, LORA))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.fit()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) is ("lora_" not in name), name
    state = newest(tmp_path / "run")
    assert state["model"].keys() == {name for name in before if "lora_" in name}
    assert state["base"] == {
        "model.safetensors": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    }
    file = next((tmp_path / "run/checkpoints").glob("step_*/model.safetensors"))
    assert file.stat().st_size < 4 * sum(before[name].numel() for name in state["model"]) + 8192


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}, {"name": "muon"}])
def test_adapters_resume_bit_for_bit(
    options: dict[str, Any], peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder, lora = pretrained(), {**LORA, "dropout": 0.1}
    straight = train_from_config(config_of(tmp_path / "straight", folder, lora, optimizer=options))
    first = train_from_config(config_of(tmp_path / "parts", folder, lora, optimizer=options), max_steps=3)
    second = train_from_config(config_of(tmp_path / "parts", folder, lora, optimizer=options), resume=True)
    assert [r["loss"] for r in straight.metrics] == [r["loss"] for r in (*first.metrics, *second.metrics)]
    for name in ("model.safetensors", "state.safetensors"):
        file = f"checkpoints/step_000000000006/{name}"
        assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_adapters_and_transformers_the_merged_model(
    kind: str,
    peft: ModuleType,
    transformers: ModuleType,
    pretrained: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = pretrained(kind)
    trainer, _ = build_runtime(config_of(tmp_path / "run", folder, LORA, optimizer={"lr": 0.05}))
    trainer.fit()
    expected = logits(trainer.model)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.allclose(expected, logits(base), atol=1e-3)

    export = ["checkpoints", "export", str(tmp_path / "run"), "--out"]
    assert main([*export, str(tmp_path / "adapter"), "--format", "peft"]) == 0
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=0)

    assert main([*export, str(tmp_path / "merged"), "--format", "huggingface"]) == 0
    merged, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    assert main([*export, str(tmp_path / "half"), "--format", "huggingface", "--dtype", "bfloat16"]) == 0
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert next(half.parameters()).dtype is torch.bfloat16
    torch.testing.assert_close(logits(half).float(), expected, rtol=0.1, atol=0.1)


def test_an_adapter_starts_another_run(peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path) -> None:
    folder = pretrained()
    trainer, _ = build_runtime(config_of(tmp_path / "run", folder, LORA))
    trainer.fit()
    run = {"init_from": str(tmp_path / "run")}
    again, _ = build_runtime(config_of(tmp_path / "again", folder, LORA, run=run, model={"hf_folder": str(folder)}))
    torch.testing.assert_close(logits(again.model), logits(trainer.model), rtol=0, atol=0)


def test_adapters_beside_other_weights_are_refused(
    peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = pretrained(), pretrained(seed=8, name="other")
    config = config_of(tmp_path / "run", folder, LORA, eval={"every_steps": 6})
    train_from_config(config)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    shown = r"trained beside other weights than model\.hf_folder has \(model\.safetensors\)"
    with pytest.raises(CheckpointError, match=shown):
        build_runtime(config, resume=True)
    with pytest.raises(CheckpointError, match=shown):
        evaluate_from_config(config, newest(tmp_path / "run"))
    run = {"init_from": str(tmp_path / "run")}
    with pytest.raises(CheckpointError, match=shown):
        build_runtime(config_of(tmp_path / "again", folder, LORA, run=run, model={"hf_folder": str(folder)}))
    export = ["checkpoints", "export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--format", "peft"]
    assert main(export) == 2
    assert "trained beside other weights" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"^run\.init_from: with model\.lora the weights of .* stay as they are"):
        build_runtime(config_of(tmp_path / "two", other, LORA, model={"hf_folder": str(folder)}))


def test_a_base_in_several_files_is_told_by_each_of_them_and_by_no_other(
    peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder = pretrained(max_shard_size="4KB")
    files = {file.name for file in folder.glob("*.safetensors")}
    (folder / "consolidated.safetensors").write_bytes(b"the same in another form")
    trainer, _ = build_runtime(config_of(tmp_path / "run", folder, LORA))
    base = hugging_face.base_of(trainer.model)
    assert base is not None
    assert base.keys() == files
    assert len(files) > 1


def test_layers_to_adapt_are_named_and_a_wrong_name_is_refused(
    peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    folder = pretrained()
    trainer, _ = build_runtime(config_of(tmp_path / "run", folder, {**LORA, "targets": ["q_proj", "v_proj"]}))
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in trained)
    with pytest.raises(ConfigError, match=r"^model\.lora\.targets: .*down_proj, gate_proj, k_proj"):
        build_runtime(config_of(tmp_path / "wrong", folder, {**LORA, "targets": ["query"]}))


def test_a_base_in_bfloat16_trains_adapters_in_float32(
    peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path
) -> None:
    lora = {**LORA, "base": "bfloat16"}
    trainer, _ = build_runtime(config_of(tmp_path / "run", pretrained(), lora, optimizer={"lr": 0.05}))
    dtypes = {p.requires_grad: p.dtype for p in trainer.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    losses = [record["loss"] for record in trainer.fit().metrics]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_number_of_adapters(
    kind: str, peft: ModuleType, pretrained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pretrained(kind)
    plain = train_from_config(config_of(tmp_path / "plain", folder, LORA))
    trainer, _ = build_runtime(config_of(tmp_path / "saving", folder, LORA, gradient_checkpointing=True))
    shown = capsys.readouterr().out
    assert "gradient checkpointing is not available" not in shown
    assert "in evaluation mode" not in shown
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith(("layers.0.mlp", "h.0.mlp")))
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    saving = trainer.fit()
    assert len(calls) == 2 * 2 * 6  # two micro batches, forward and again in the backward pass
    assert [r["loss"] for r in plain.metrics] == pytest.approx([r["loss"] for r in saving.metrics], abs=1e-6)


def test_a_base_in_four_bits_trains_resumes_and_is_merged_in_full(
    peft: ModuleType,
    transformers: ModuleType,
    pretrained: Callable[..., Path],
    tmp_path: Path,
) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=LENGTH)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    options: Any = {"lora": {**LORA, "base": "4bit"}, "optimizer": {"lr": 0.02}}
    straight = train_from_config(config_of(tmp_path / "straight", tmp_path / "base", **options))
    first = train_from_config(config_of(tmp_path / "parts", tmp_path / "base", **options), max_steps=3)
    trainer, _ = build_runtime(config_of(tmp_path / "parts", tmp_path / "base", **options), resume=True)
    frozen = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert {p.dtype for name, p in frozen.items() if "q_proj" in name} == {torch.uint8}
    second = trainer.fit()
    assert [r["loss"] for r in straight.metrics] == [r["loss"] for r in (*first.metrics, *second.metrics)]
    assert all(torch.equal(trainer.model.get_parameter(name), p) for name, p in frozen.items())
    state = newest(tmp_path / "parts")
    assert all("lora_" in name for name in state["model"])

    export = ["checkpoints", "export", str(tmp_path / "parts"), "--out"]
    assert main([*export, str(tmp_path / "merged"), "--format", "huggingface"]) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    torch.testing.assert_close(logits(merged), logits(trainer.model), rtol=0.1, atol=0.05)
    assert main([*export, str(tmp_path / "adapter"), "--format", "peft"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits(merged), rtol=1e-4, atol=1e-5)
