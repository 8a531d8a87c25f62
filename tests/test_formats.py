"""What an older version wrote is read, resumed and written as that version did (`tests/fixtures/write.py`)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from speedtronic import TrainResult, build_model, load_config
from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.data import ShardSet
from speedtronic.distributed import MasterOuterLoop, open_store
from speedtronic.model import loss
from speedtronic.runtime import build_runtime, train_from_config
from tests.fixtures.write import TEXT, digest, keep_state

OLDER = Path(__file__).parent / "fixtures" / "older"
EXPECTED: dict[str, Any] = json.loads((OLDER / "expected.json").read_bytes())


def rounds_alike() -> bool:
    """Whether matrix products round here as on the machine of the fixtures: an Intel processor without bf16.

    Each maker has kernels of its own. What is only read or copied is compared bit for bit anywhere.
    """
    if torch.__version__ != EXPECTED["torch"] or torch.backends.cpu.get_cpu_capability() != EXPECTED["cpu"]:
        return False
    processor = torch.cpu.get_capabilities()
    return str(processor["cpu_name"]).startswith("Intel") and not processor["avx512_bf16"]


SAME_ROUNDING = rounds_alike()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixtures, in which the test stands."""
    copy = tmp_path / "older"
    shutil.copytree(OLDER, copy)
    monkeypatch.chdir(copy)
    return copy


class OlderCrossEntropy(torch.autograd.Function):
    """As that version computed it: the same formula, with another rounding in the last digit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        normalizer = torch.logsumexp(logits, -1)
        ctx.save_for_backward(logits, targets, normalizer)
        return (normalizer - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizer = ctx.saved_tensors
        weight = upstream.expand_as(targets).unsqueeze(-1)
        gradient = torch.exp(logits - normalizer.unsqueeze(-1)).mul_(weight)
        return gradient.scatter_add_(-1, targets.unsqueeze(-1), -weight), None


@pytest.fixture(autouse=True)
def older_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "_SummedCrossEntropy", OlderCrossEntropy)


def assert_same_losses(result: TrainResult, expected: list[str]) -> None:
    losses = [record["loss"] for record in result.metrics]
    if SAME_ROUNDING:
        assert [loss.hex() for loss in losses] == expected
    assert losses == pytest.approx([float.fromhex(loss) for loss in expected], rel=1e-5)


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    if SAME_ROUNDING:
        assert digest(found) == digest(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_checkpoint_is_read_bit_for_bit() -> None:
    state = CheckpointManager("run/checkpoints").load_latest()
    assert state is not None
    model = load_file("run/checkpoints/step_000000000004/model.safetensors")
    own = digest(state["model"])
    assert {name: own[name] for name in model} == digest(model)
    assert state["step"] == 4
    assert main(["checkpoints", "verify", "run"]) == 0


def test_a_run_is_resumed_to_the_same_losses_and_weights() -> None:
    trainer, _ = build_runtime("run.yaml", resume=True)
    with trainer.logger:
        result = trainer.fit()
    assert_same_losses(result, EXPECTED["losses"][4:])
    if SAME_ROUNDING:
        assert digest(trainer.model.state_dict()) == EXPECTED["weights"]
        assert trainer.averaged_model is not None
        assert digest(trainer.averaged_model.state_dict()) == EXPECTED["average"]


def test_shards_hold_the_tokens_of_the_text() -> None:
    shards = ShardSet("shards")
    shards.verify()
    tokens = np.empty(len(shards), dtype=np.int64)
    shards.read(0, tokens)
    assert shards.tokenizer.decode(tokens[:-1].tolist()) == TEXT


def test_preparing_the_text_writes_the_same_shards() -> None:
    assert main(["data", "prepare", "text.txt", "--tokenizer", "chars", "--shard-tokens", "2000", "--out", "anew"]) == 0
    for file in sorted(Path("shards").iterdir()):
        assert (Path("anew") / file.name).read_bytes() == file.read_bytes(), file.name


def test_exports_have_the_same_bytes() -> None:
    assert main(["checkpoints", "export", "run", "--out", "anew/model.safetensors"]) == 0
    assert main(["checkpoints", "export", "run", "--format", "huggingface", "--out", "anew/llama"]) == 0
    for file in sorted(path for path in Path("export").rglob("*") if path.is_file()):
        assert Path("anew", *file.parts[1:]).read_bytes() == file.read_bytes(), file


@pytest.mark.parametrize("export", ["export/model.safetensors", "export/llama"])
def test_an_export_is_trained_from(export: str) -> None:
    config = load_config("run.yaml")
    config.run.init_from = export
    config.run.output_dir = "from_export"
    trainer, _ = build_runtime(config)
    expected = load_file("export/model.safetensors")
    own = digest(trainer.model.state_dict())
    assert {name: own[name] for name in expected} == digest(expected)


def test_a_store_is_pulled_bit_for_bit() -> None:
    assert main(["diloco", "pull", "dir://store", "--out", "newest.safetensors"]) == 0
    (weights,) = Path("store/w").glob("00000001-*")
    assert digest(load_file("newest.safetensors")) == digest(load_file(weights))


def test_a_master_goes_on_with_what_a_store_holds() -> None:
    model = build_model(load_config("node.yaml").model)
    master = MasterOuterLoop(
        open_store("dir://store"), dict(model.named_parameters()), outer_lr=None, outer_momentum=None
    )
    assert master.sync_once() == 1
    assert_same_tensors(master.snapshot(), load_file("pulled.safetensors"))


def test_a_node_is_resumed_with_its_ledger_to_the_same_losses() -> None:
    keep_state()
    assert_same_losses(train_from_config("node.yaml", resume=True, max_steps=6), EXPECTED["node losses"])


def test_the_fixtures_are_what_the_older_version_wrote() -> None:
    whole = hashlib.sha256()
    for file in sorted(OLDER.rglob("*")):
        if file.is_file():
            whole.update(file.relative_to(OLDER).as_posix().encode() + b"\0" + file.read_bytes())
    assert whole.hexdigest() == "d1a2edb0f5013642818e110b5234fff52b3481cdbcc10b2321b603192dad8683"
