"""Models of a library: Hugging Face's causal language models, tiny, with random weights."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from speedtronic.cli import main
from speedtronic.config import load_config
from speedtronic.errors import CheckpointError
from speedtronic.registry import registry
from speedtronic.runtime import build_runtime, train_from_config
from tests.support.configs import tiny
from tests.support.foreign import LENGTH, VOCABULARY, tiny_model
from tests.support.models import make_trainer

pytestmark = pytest.mark.slow  # importing transformers takes seconds

KINDS = ("llama", "gpt2")


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    module: ModuleType = pytest.importorskip("transformers")
    return module


PLUGIN = """
from tests.support.foreign import tiny_model
from speedtronic import register_model
import transformers

for kind in ("llama", "gpt2"):
    register_model(
        f"foreign-{kind}",
        lambda config, *, kind=kind, seed=0, dropout=0.0: tiny_model(transformers, kind, seed, dropout),
        replace=True,
    )
"""


@pytest.fixture
def plugin(tmp_path: Path, transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside the configuration that registers the models."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.delitem(sys.modules, "foreign_models_of_a_test", raising=False)
    (tmp_path / "foreign_models_of_a_test.py").write_text(PLUGIN, encoding="utf-8")
    return "foreign_models_of_a_test"


def as_yaml(
    folder: Path, output: str, kind: str, plugin: str, extra: dict[str, Any] | None = None, **sections: Any
) -> Path:
    model = {"name": f"foreign-{kind}", "extra": extra or {}}
    config = tiny(folder / output, plugins=[plugin], model=model, **sections)
    path = folder / f"{output}.yaml"
    # Written without being built: the plugin is imported by the run itself.
    path.write_text(load_config(config).to_yaml(), encoding="utf-8")
    return path


def sequences(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (3, LENGTH), generator=generator) for _ in range(count)]


def aligned(ids: Tensor) -> dict[str, Tensor]:
    """The labels of our data: the next token at each position, and none at the last, whose next token is unknown."""
    return {"input_ids": ids, "labels": F.pad(ids[:, 1:], (0, 1), value=-100)}


# ---------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", KINDS)
def test_aligned_labels_give_the_losses_of_the_models_own_convention(kind: str, transformers: ModuleType) -> None:
    """Its own: labels that repeat the inputs, shifted inside the model."""
    model = tiny_model(transformers, kind)
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    trainer = make_trainer(
        model,
        [aligned(ids) for ids in sequences()],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={"run": {"max_steps": 4}},
    )
    ours = [record["loss"] for record in trainer.fit().metrics]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for ids, loss in zip(sequences(), ours, strict=True):
        output = twin(input_ids=ids, labels=ids)
        by_hand = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert loss == pytest.approx(output.loss.item(), abs=1e-6)
        assert loss == pytest.approx(by_hand.item(), abs=1e-6)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_label_of_a_block_is_a_target(kind: str, transformers: ModuleType) -> None:
    """Shifted once more, the first target would be lost and each other be that of the position before."""
    model = tiny_model(transformers, kind)
    ids, labels = sequences(2)
    with torch.no_grad():
        expected = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten()).item()
    trainer = make_trainer(model, [{"input_ids": ids, "labels": labels}], config={"run": {"max_steps": 1}})
    assert trainer.fit().metrics[0]["loss"] == pytest.approx(expected, abs=1e-6)


def test_labels_that_repeat_the_inputs_are_aligned_on_request(transformers: ModuleType) -> None:
    model = tiny_model(transformers, "llama")
    (ids,) = sequences(1)
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss.item()
    config = {"run": {"max_steps": 1}, "data": {"labels": "unshifted"}}
    trainer = make_trainer(model, [{"input_ids": ids, "labels": ids}], config=config)
    assert trainer.fit().metrics[0]["loss"] == pytest.approx(expected, abs=1e-6)


# ---------------------------------------------------------------- a whole run


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugins_model_trains_from_a_yaml_and_resumes_bit_for_bit(kind: str, plugin: str, tmp_path: Path) -> None:
    sections = {"run": {"max_steps": 6}, "data": {"shuffle": True, "target_batch_size": 4}}
    extra = {"dropout": 0.1}
    straight = train_from_config(as_yaml(tmp_path, "straight", kind, plugin, extra, **sections))
    path = as_yaml(tmp_path, "parts", kind, plugin, extra, **sections)
    first = train_from_config(path, max_steps=3)
    second = train_from_config(path, resume=True)
    losses = [record["loss"] for record in (*first.metrics, *second.metrics)]
    assert len(losses) == 6
    assert losses == [record["loss"] for record in straight.metrics]
    newest = "checkpoints/step_000000000006/model.safetensors"
    assert (tmp_path / "parts" / newest).read_bytes() == (tmp_path / "straight" / newest).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
def test_a_run_starts_from_a_saved_pretrained_folder(
    kind: str, max_shard_size: str, transformers: ModuleType, plugin: str, tmp_path: Path
) -> None:
    source: Any = tiny_model(transformers, kind, seed=7)
    source.save_pretrained(tmp_path / "pretrained", max_shard_size=max_shard_size)
    assert (tmp_path / "pretrained/model.safetensors.index.json").exists() is (max_shard_size == "4KB")
    run = {"init_from": str(tmp_path / "pretrained")}
    trainer, _ = build_runtime(as_yaml(tmp_path, "run", kind, plugin, run=run))
    ours = trainer.model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in source.state_dict().items())
    assert trainer.fit().steps == 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_base_model_fill_the_one_with_a_head(
    kind: str, transformers: ModuleType, plugin: str, tmp_path: Path
) -> None:
    source: Any = tiny_model(transformers, kind, seed=7)
    source.base_model.save_pretrained(tmp_path / "pretrained")
    run = {"init_from": str(tmp_path / "pretrained"), "init_strict": kind == "gpt2"}  # whose head is tied
    trainer, _ = build_runtime(as_yaml(tmp_path, "run", kind, plugin, run=run))
    ours, theirs = trainer.model.state_dict(), source.state_dict()
    assert all(
        torch.equal(ours[name], tensor) for name, tensor in theirs.items() if kind == "gpt2" or "head" not in name
    )


def test_the_weights_of_another_model_are_refused_by_name(
    transformers: ModuleType, plugin: str, tmp_path: Path
) -> None:
    tiny_model(transformers, "gpt2").save_pretrained(tmp_path / "pretrained")  # type: ignore[operator]
    path = as_yaml(tmp_path, "run", "llama", plugin, run={"init_from": str(tmp_path / "pretrained")})
    with pytest.raises(CheckpointError, match=r"(?s)model\.norm\.weight is missing there.*ln_f\.bias is not in this"):
        build_runtime(path)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_recomputes_and_changes_no_number(
    kind: str, plugin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train_from_config(as_yaml(tmp_path, "plain", kind, plugin))
    trainer, _ = build_runtime(as_yaml(tmp_path, "saving", kind, plugin, gradient_checkpointing=True))
    assert "gradient checkpointing is not available" not in capsys.readouterr().out
    layer = next(module for name, module in trainer.model.named_modules() if name.endswith(("layers.0.mlp", "h.0.mlp")))
    calls: list[int] = []
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    result = trainer.fit()
    assert len(calls) == 2 * 4
    assert [r["loss"] for r in result.metrics] == pytest.approx([r["loss"] for r in plain.metrics], abs=1e-6)


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_is_exported_by_its_own_save_pretrained(
    kind: str, plugin: str, tmp_path: Path, transformers: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    path = as_yaml(tmp_path, "run", kind, plugin, run={"max_steps": 3})
    trainer, _ = build_runtime(path)
    trainer.fit()
    (ids, _) = sequences(2)
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits

    for run, folder in ((path, tmp_path / "hf"), (tmp_path / "run", tmp_path / "again")):
        assert main(["checkpoints", "export", str(run), "--out", str(folder), "--format", "huggingface"]) == 0
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        assert type(theirs) is type(trainer.model)
        with torch.no_grad():
            torch.testing.assert_close(theirs.eval()(input_ids=ids).logits, expected, rtol=0, atol=0)

    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "alone")
    other = str(tmp_path / "other")
    assert main(["checkpoints", "export", str(tmp_path / "alone"), "--out", other, "--format", "huggingface"]) == 2
    assert "name the run's folder or YAML" in capsys.readouterr().err
