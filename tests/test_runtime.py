"""The composition root: sources of a configuration, precedence, seeding, parts, resume."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from speedtronic import runtime
from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.config import ConfigError, ModelConfig, SpeedtronicConfig, load_config
from speedtronic.config.checks import NOT_BUILT as NOT_BUILT_KEYS
from speedtronic.data import CharTokenizer, ShardWriter
from speedtronic.errors import CheckpointError, DeviceError, NotBuiltError, RunLockedError
from speedtronic.model import build_reference_transformer
from speedtronic.optimizers.adamw import CautiousAdamW
from speedtronic.optimizers.hybrid import HybridOptimizer
from speedtronic.optimizers.without_dynamo import AdamW
from speedtronic.registry import registry
from speedtronic.runtime import (
    build_logger,
    build_optimizer,
    build_runtime,
    build_scheduler,
    seed_everything,
    train_from_config,
    tune_from_config,
)
from speedtronic.trainer import Trainer, TrainResult
from tests.support.cases import case
from tests.support.configs import tiny
from tests.support.cuda import RecordedCuda


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """The runs' console lines go to the capture."""


def as_yaml(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(load_config(config).to_yaml(), encoding="utf-8")
    return path


# ---------------------------------------------------------------- sources


def test_a_dict_a_yaml_a_string_and_a_config_all_build_the_same_run(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    path = as_yaml(config, tmp_path)
    losses = {
        name: [record["loss"] for record in train_from_config(source).metrics]
        for name, source in {
            "dict": config,
            "path": path,
            "name": str(path),
            "text": path.read_text(encoding="utf-8"),
            "config": SpeedtronicConfig.from_dict(config),
        }.items()
    }
    assert len(losses["dict"]) == 4
    assert all(values == losses["dict"] for values in losses.values())


def test_a_configuration_is_resolved_once_on_the_way_from_the_command_line_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    construct = SpeedtronicConfig.__init__

    def counting(self: SpeedtronicConfig, /, **values: Any) -> None:
        made.append(inspect.stack()[1].function)
        construct(self, **values)

    path = as_yaml(tiny(tmp_path), tmp_path)
    monkeypatch.setattr(SpeedtronicConfig, "__init__", counting)
    assert main(["train", str(path), "run.max_steps=1"]) == 0
    # What the file says, the run's own copy of it, and the check of what a trainer is handed.
    assert made == ["load", "load", "validate"]


def test_build_runtime_returns_a_trainer_and_its_manager(tmp_path: Path) -> None:
    """Seed: "-> tuple[Trainer, CheckpointManager]"; "resolves hardware, and constructs every local component"."""
    trainer, manager = build_runtime(tiny(tmp_path))
    assert isinstance(trainer, Trainer)
    assert isinstance(manager, CheckpointManager)
    assert trainer.checkpoint_manager is manager
    assert manager.directory == tmp_path / "checkpoints"
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert trainer.scheduler is not None
    assert trainer.coordinator is None


def test_train_from_config_fits_and_has_two_more_names(tmp_path: Path) -> None:
    """Seed: "Builds the runtime and immediately calls Trainer.fit()"; "run = train_from_config; train = …"."""
    assert runtime.run is runtime.train is train_from_config
    result = train_from_config(tiny(tmp_path))
    assert isinstance(result, TrainResult)
    assert result.steps == 4


@pytest.mark.parametrize(("argument", "data", "expected"), [(1, 2, 1), (None, 2, 2), (None, None, 3)])
def test_the_target_is_the_argument_then_data_then_run(
    argument: int | None, data: int | None, expected: int, tmp_path: Path
) -> None:
    """Seed: "explicit build_runtime(max_steps=...) → data.max_steps → run.max_steps"."""
    config = tiny(tmp_path, run={"max_steps": 3}, data={"max_steps": data})
    assert train_from_config(config, max_steps=argument).steps == expected


def test_the_max_steps_argument_leaves_the_schedule_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path, run={"max_steps": 10})
    short = train_from_config(config, max_steps=3)
    long = train_from_config(tiny(tmp_path / "long", run={"max_steps": 10}))
    assert [record["lr"] for record in short.metrics] == [record["lr"] for record in long.metrics[:3]]


def test_the_device_argument_comes_before_the_config(tmp_path: Path) -> None:
    config = tiny(tmp_path, run={"device": "cuda:7"})
    trainer, _ = build_runtime(config, device="cpu")
    assert trainer.device == torch.device("cpu")
    assert build_runtime(config, device=torch.device("cpu"))[0].device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_explicit_device_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="cuda"):
        build_runtime(tiny(tmp_path, run={"device": "cuda"}))


def test_the_card_of_a_run_is_the_current_one_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = RecordedCuda(monkeypatch, bf16={1})
    asked: list[tuple[str, Any]] = []

    class ModelBuiltError(Exception):
        pass

    def build(section: Any) -> nn.Module:
        asked.extend(cuda.calls)
        raise ModelBuiltError

    monkeypatch.setattr(runtime, "build_model", build)
    for built in (build_runtime, tune_from_config):
        with case(built.__name__):
            cuda.calls.clear()
            asked.clear()
            cuda.current = 0
            with pytest.raises(ModelBuiltError):
                built(tiny(tmp_path, run={"device": "cuda:1"}, tune="off"))
            assert asked == [("set_device", 1)]


def test_a_zero_target_is_refused_rather_than_replaced(tmp_path: Path) -> None:
    trainer, _ = build_runtime(tiny(tmp_path), max_steps=0)
    with pytest.raises(ConfigError, match="positive"):
        trainer.fit()


def test_the_trainer_knows_its_target(tmp_path: Path) -> None:
    assert build_runtime(tiny(tmp_path, data={"max_steps": 2}))[0].max_steps == 2
    assert build_runtime(tiny(tmp_path))[0].max_steps == 4
    assert build_runtime(tiny(tmp_path), max_steps=1)[0].max_steps == 1


def test_parts_follow_a_config_that_was_edited_by_attribute(tmp_path: Path) -> None:
    config = load_config(tiny(tmp_path))
    config.run.max_steps = 10
    config.run.log_every = 5
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_scheduler(optimizer, config)
    assert scheduler.lr_lambdas[0](10) == pytest.approx(0.1)
    assert build_logger(config).every_steps == 5


def test_the_checkpoint_section_reaches_the_manager(tmp_path: Path) -> None:
    keys = {"every_steps": 7, "every_minutes": 0.5, "keep_last": 2, "keep_every": 14, "keep_best": 1}
    config = load_config(tiny(tmp_path, checkpoint=keys))
    manager = runtime.build_checkpoint_manager(config, build_logger(config))
    assert {key: getattr(manager, key) for key in keys} == keys


def test_the_best_the_milestones_and_the_newest_are_kept(tmp_path: Path) -> None:
    train_from_config(
        tiny(
            tmp_path,
            run={"max_steps": 13},
            data={"validation_fraction": 0.2},
            optimizer={"lr": 0.5},
            eval={"every_steps": 2},
            checkpoint={"every_steps": 2, "keep_last": 1, "keep_every": 4, "keep_best": 1},
            logging={"json_file": "log.jsonl"},
        )
    )
    events = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
    best = min(losses, key=lambda step: losses[step])
    entries = CheckpointManager(tmp_path / "checkpoints").entries()
    assert [entry.step for entry in entries] == sorted({4, 8, 12, 13, best})
    assert [entry.eval_loss for entry in entries] == [losses[entry.step] for entry in entries]


def test_keep_best_with_nothing_held_out_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_best: nothing is held out.*validation_fraction"):
        build_runtime(tiny(tmp_path, checkpoint={"keep_best": 1}))


# ---------------------------------------------------------------- what is not built yet

NODE: dict[str, Any] = {"enabled": True, "repo_id": "memory://runtime", "node_id": "ann"}

NOT_BUILT: dict[str, dict[str, Any]] = {
    "distributed.worker_repo_id": {"distributed": {**NODE, "worker_repo_id": "dir:///tmp/store"}},
    "distributed.codec: int8, int4, int2, topk": {"distributed": {**NODE, "codec": "int4"}},
    "distributed.outer: sparse_loco": {"distributed": {**NODE, "outer": "sparse_loco"}},
    "distributed.trusted_nodes": {"distributed": {**NODE, "trusted_nodes": ["ab"]}},
    "distributed.robust": {"distributed": {**NODE, "robust": "clip"}},
    "parallel.strategy: fsdp": {"parallel": "fsdp"},
    "parallel.shard_within_node": {"parallel": {"shard_within_node": True}},
    "parallel.cpu_offload": {"parallel": {"cpu_offload": True}},
    "precision.mode: fp8": {"precision": {"mode": "fp8"}},
}


def test_what_is_not_built_yet_is_refused_by_name_and_never_ignored(tmp_path: Path) -> None:
    assert {key.partition(":")[0] for key in NOT_BUILT} == NOT_BUILT_KEYS.keys()
    for key, values in NOT_BUILT.items():
        with pytest.raises(NotBuiltError, match=key):
            build_runtime(tiny(tmp_path, **values))


def test_all_refusals_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotBuiltError) as caught:
        build_runtime(tiny(tmp_path, precision="fp8", distributed={**NODE, "robust": "clip"}))
    assert len(str(caught.value).splitlines()) == 2


def test_keys_of_distributed_count_only_where_it_is_enabled(tmp_path: Path) -> None:
    trainer, _ = build_runtime(tiny(tmp_path, distributed={"codec": "int4", "robust": "clip"}))
    assert trainer.coordinator is None


def test_a_repository_on_the_hub_needs_to_know_among_how_many_it_is_shared(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="distributed.expected_nodes: a repository on the Hub takes about 128 commits"
    ):
        build_runtime(tiny(tmp_path, distributed={"enabled": True, "repo_id": "org/name"}))


def test_a_saved_full_config_builds_again(tmp_path: Path) -> None:
    build_runtime(load_config(tiny(tmp_path)).to_dict())


# ---------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, tuple[dict[str, Any], type[torch.optim.Optimizer]]] = {
    "adamw": ({}, AdamW),
    "cautious adamw": ({"cautious": True}, CautiousAdamW),
    "muon": ({"name": "muon"}, HybridOptimizer),
    "cautious muon": ({"name": "muon", "cautious": True}, HybridOptimizer),
}


def test_build_optimizer_builds_what_the_config_names() -> None:
    for name, (keys, kind) in OPTIMIZERS.items():
        config = SpeedtronicConfig.from_dict({"optimizer": keys})
        assert type(build_optimizer(nn.Linear(2, 2), config, "cpu")) is kind, name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_a_run_to_a_lower_loss(name: str, tmp_path: Path) -> None:
    config = tiny(tmp_path, run={"max_steps": 20}, optimizer={"lr": 0.02, **OPTIMIZERS[name][0]})
    losses = [record["loss"] for record in train_from_config(config).metrics]
    assert losses[-1] < losses[0]


def test_a_run_with_muon_reports_the_rate_of_lr(tmp_path: Path) -> None:
    optimizer = {"name": "muon", "lr": 0.01, "muon_lr": 0.5}
    muon = train_from_config(tiny(tmp_path / "muon", optimizer=optimizer))
    adamw = train_from_config(tiny(tmp_path / "adamw", optimizer={"lr": 0.01}))
    assert [record["lr_applied"] for record in muon.metrics] == [record["lr_applied"] for record in adamw.metrics]


def test_a_role_that_does_not_exist_is_an_error_that_names_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Misled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)
            self.body._speedtronic_optimizer_role = "sgd"  # type: ignore[assignment]

    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    registry.register("misled", lambda config: Misled())
    with pytest.raises(ConfigError, match="module 'body': _speedtronic_optimizer_role is 'sgd'"):
        build_runtime(tiny(tmp_path, model={"name": "misled"}, optimizer="muon"))


# ---------------------------------------------------------------- plugins


def test_plugins_are_imported_from_the_configs_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "plugin_of_a_test.py").write_text(
        "import torch\n"
        "from speedtronic import register_model\n"
        "@register_model('plugin-of-a-test')\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, config, width):\n"
        "        super().__init__()\n"
        "        self.embed = torch.nn.Embedding(config.vocab_size, width)\n"
        "        self.head = torch.nn.Linear(width, config.vocab_size)\n"
        "    def forward(self, input_ids, labels):\n"
        "        return {'logits': self.head(self.embed(input_ids))}\n",
        encoding="utf-8",
    )
    config = tiny(tmp_path, plugins=["plugin_of_a_test"], model={"name": "plugin-of-a-test", "extra": {"width": 8}})
    trainer, _ = build_runtime(as_yaml(config, tmp_path))
    assert trainer.model.get_parameter("embed.weight").shape == (64, 8)
    assert trainer.fit().steps == 4


def test_a_dataset_is_found_in_the_configs_own_folder_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "data_of_a_test.py").write_text(
        "from speedtronic.data import SyntheticTokenDataset\n"
        "def make(data):\n"
        "    return SyntheticTokenDataset(8, data.block_size, data.vocab_size, 0)\n",
        encoding="utf-8",
    )
    assert train_from_config(as_yaml(tiny(tmp_path, data={"dataset": "data_of_a_test:make"}), tmp_path)).steps == 4


OWN = """
import torch
from speedtronic import register_model


@register_model("own-classifier")
def classifier(config):
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


@register_model("own-lazy")
def lazy(config):
    return torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Tanh(), torch.nn.LazyLinear(2))


class Named(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, image, label=None):
        return self.linear(image)


register_model("own-named", Named)


def items(count):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return x, (x.sum(-1) > 0).long()


def pairs(data):
    held_out = list(zip(*items(23)))
    return list(zip(*items(40))), held_out


def mappings(data):
    return [{"image": x, "label": y} for x, y in zip(*items(40))]


def categories(data):
    return [{"image": x, "category": y} for x, y in zip(*items(40))]


def focal(output, batch):
    chosen = output.log_softmax(-1).gather(-1, batch["label"][:, None])
    return -((1 - chosen.exp()) * chosen).mean()
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a configuration beside a module of a user's own, `own_<name of the folder>`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    module = f"own_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(OWN, encoding="utf-8")

    def write(model: str, data: str, **keys: Any) -> Path:
        sizes = {"dataset": f"{module}:{data}", "micro_batch_size": 5, "target_batch_size": 5}
        loss = {key: value.replace("OWN", module) for key, value in keys.items() if key == "loss"}
        config = tiny(tmp_path, plugins=[module], model={"name": model}, data=sizes, optimizer={"lr": 0.05}, **loss)
        return as_yaml(config, tmp_path)

    return write


def test_a_plain_module_trains_and_is_evaluated_by_a_named_loss(own: Callable[..., Path]) -> None:
    config = load_config(own("own-classifier", "pairs", loss="cross_entropy"), ["run.max_steps=60"])
    trainer, _ = build_runtime(config)
    result = trainer.fit()
    assert result.samples == 300
    assert result.tokens == 0
    x, y = sys.modules[config.plugins[0]].items(23)
    with torch.no_grad():
        right = nn.functional.cross_entropy(trainer.model(x), y).item()
    assert result.eval_loss == pytest.approx(right)
    assert right < 0.4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_have_their_shapes_before_the_optimizer_is_built(optimizer: str, own: Callable[..., Path]) -> None:
    config = load_config(own("own-lazy", "pairs", loss="cross_entropy"), [f"optimizer.name={optimizer}"])
    trainer, _ = build_runtime(config)
    decayed = {p.ndim for g in trainer.optimizer.param_groups for p in g["params"] if g["weight_decay"]}
    assert decayed == {2}
    first = trainer.state_dict()["data"]
    assert first == build_runtime(config)[0].state_dict()["data"]
    assert trainer.fit().samples == 20


def test_a_loss_of_ones_own_is_found_in_the_configs_own_folder(own: Callable[..., Path]) -> None:
    assert train_from_config(own("own-named", "mappings", loss="OWN:focal")).samples == 20


@pytest.mark.parametrize(
    ("model", "data", "loss", "said"),
    [
        ("own-named", "mappings", {}, r"scores of classes.*set loss"),
        ("own-classifier", "pairs", {}, r"Sequential.forward\(input\).*set loss"),
        ("own-classifier", "mappings", {"loss": "cross_entropy"}, "no input: name its columns"),
        (
            "own-named",
            "categories",
            {"loss": "cross_entropy"},
            "has image, category: name the column of the targets 'labels'",
        ),
        ("own-named", "categories", {"loss": "mse"}, "has image, category"),
        ("own-named", "mappings", {"loss": "OWN:missing"}, "loss: the module .* has no 'missing'"),
        ("own-named", "mappings", {"loss": "mean"}, "loss: must be cross_entropy, mse, or an importable function"),
    ],
)
def test_what_gives_no_loss_is_one_error_with_the_remedy_and_exit_code_2(
    model: str, data: str, loss: dict[str, str], said: str, own: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = own(model, data)
    module = load_config(path).plugins[0]
    assert main(["train", str(path), *(f"{key}={value.replace('OWN', module)}" for key, value in loss.items())]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert "Traceback" not in error


def test_a_plugin_that_does_not_exist_is_named_with_the_places(tmp_path: Path) -> None:
    path = as_yaml(tiny(tmp_path, plugins=["no_such_plugin"]), tmp_path)
    with pytest.raises(ConfigError, match="no_such_plugin") as caught:
        build_runtime(path)
    assert str(tmp_path) in str(caught.value)


def test_a_plugins_own_error_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_plugin_of_a_test.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    path = as_yaml(tiny(tmp_path, plugins=["broken_plugin_of_a_test"]), tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        build_runtime(path)


# ---------------------------------------------------------------- callbacks


CALLBACKS_OF_A_TEST = """
from speedtronic.trainer import Callback

class Stop(Callback):
    def __init__(self, at=3):
        self.at = at
    def on_step_end(self, run):
        if run.step == self.at:
            run.stop()
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"] + 2

def halfway(*, config):
    return Stop(config.run.max_steps // 2)

def wants_more(name):
    return Stop()

def fails():
    raise OSError("no such place")

number = 7

def no_callback():
    return number
"""


@pytest.fixture
def callbacks_of_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "callbacks_of_a_test.py").write_text(CALLBACKS_OF_A_TEST, encoding="utf-8")
    return tmp_path


def test_callbacks_of_the_yaml_are_built_by_their_factories_and_resumed(callbacks_of_a_test: Path) -> None:
    path = as_yaml(
        tiny(callbacks_of_a_test, callbacks=["callbacks_of_a_test:Stop"], run={"max_steps": 9}), callbacks_of_a_test
    )
    assert train_from_config(path).steps == 3
    assert train_from_config(path, resume=True).steps == 5


def test_a_callbacks_factory_gets_the_configuration_if_it_asks_for_it_by_name(callbacks_of_a_test: Path) -> None:
    config = tiny(callbacks_of_a_test, callbacks=["callbacks_of_a_test:halfway"], run={"max_steps": 8})
    assert train_from_config(as_yaml(config, callbacks_of_a_test)).steps == 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_module_of_a_test:Stop", "callbacks: cannot import 'no_module_of_a_test'"),
        ("callbacks_of_a_test:Sotp", "callbacks: the module 'callbacks_of_a_test' has no 'Sotp'"),
        ("callbacks_of_a_test:number", "callbacks: callbacks_of_a_test:number must be a function, not int"),
        ("callbacks_of_a_test:wants_more", "callbacks: callbacks_of_a_test:wants_more takes"),
        ("callbacks_of_a_test:no_callback", "callbacks: int is no callback"),
        ("callbacks_of_a_test", "written package.module:function"),
    ],
)
def test_a_name_that_gives_no_callback_is_one_error_with_exit_code_2(
    name: str, why: str, callbacks_of_a_test: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = callbacks_of_a_test / "run.yaml"
    path.write_text(json.dumps(tiny(callbacks_of_a_test, callbacks=[name])), encoding="utf-8")
    assert main(["train", str(path)]) == 2
    assert why in capsys.readouterr().err


def test_what_a_callbacks_factory_raises_is_passed_on_with_its_name(callbacks_of_a_test: Path) -> None:
    path = as_yaml(tiny(callbacks_of_a_test, callbacks=["callbacks_of_a_test:fails"]), callbacks_of_a_test)
    with pytest.raises(OSError, match="no such place") as caught:
        build_runtime(path)
    assert caught.value.__notes__ == ["raised by the factory callbacks_of_a_test:fails that callbacks names"]


# ---------------------------------------------------------------- seeding


def test_seeding_covers_python_numpy_torch_and_child_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "Python random; PYTHONHASHSEED in the current process environment; NumPy …; PyTorch CPU"."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def draw() -> tuple[float, float, float]:
        seed_everything(42)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draw()
    assert draw() == first
    assert os.environ["PYTHONHASHSEED"] == "42"
    seed_everything(43)
    assert random.random() != first[0]


@pytest.mark.parametrize("seed", [2**32, -1, 2**64 + 7, -(2**70)])
def test_any_whole_number_is_a_seed_and_child_processes_still_start(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def draw() -> tuple[float, float, float]:
        seed_everything(seed)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draw()
    np.random.seed(99)
    assert draw() == first
    assert os.environ["PYTHONHASHSEED"] == str(seed % 2**32)
    assert subprocess.run([sys.executable, "-S", "-c", ""], check=False).returncode == 0


def test_all_cuda_devices_are_seeded_when_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "all CUDA devices when CUDA is available"."""
    seeds: list[int] = []
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    seed_everything(5)
    assert 5 in seeds


def test_a_failing_numpy_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "NumPy failures are ignored"."""

    def fail(seed: int) -> None:
        raise RuntimeError("broken numpy")

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(np.random, "seed", fail)
    seed_everything(5)
    monkeypatch.setitem(sys.modules, "numpy", None)
    seed_everything(5)


def test_the_run_is_seeded_before_the_model_is_made(tmp_path: Path) -> None:
    first = build_runtime(tiny(tmp_path))[0].model.state_dict()
    torch.rand(7)
    second = build_runtime(tiny(tmp_path))[0].model.state_dict()
    other = build_runtime(tiny(tmp_path, run={"seed": 4}))[0].model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# ---------------------------------------------------------------- parts


def test_the_logger_maps_its_section_and_has_no_hooks(tmp_path: Path) -> None:
    """Seed: "Maps logging.level, file, json_file, and every_steps. It does not attach hooks"."""
    section = {"level": "WARNING", "file": "run.log", "json_file": "run.jsonl", "every_steps": 7}
    logger = build_logger(load_config(tiny(tmp_path, logging=section)))
    with logger:
        assert logger.every_steps == 7
        logger.emit("train_step", {"step": 7, "loss": 1.0})
    assert json.loads((tmp_path / "run.jsonl").read_text(encoding="utf-8"))["loss"] == 1.0


def test_the_schedule_starts_at_its_warmup_and_moves_per_call() -> None:
    config = SpeedtronicConfig.from_dict({"scheduler": {"warmup_steps": 4}})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_scheduler(optimizer, config)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5, 1.0, 1.5])


def test_threads_and_determinism_are_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be put back after the test")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    try:
        build_runtime(tiny(tmp_path, run={"threads": 1, "deterministic": True}))
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "cuBLAS reads it when it starts"
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_cudnn_measures_convolutions_on_a_card_unless_the_run_is_deterministic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = (
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "cuda", False, True),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "cuda", True, False),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "cpu", False, False),
        (nn.Linear(1, 1), "cuda:1", False, False),
    )
    for model, device, deterministic, measures in cases:
        with case(model, device, deterministic):
            monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
            config = SpeedtronicConfig.from_dict({"run": {"deterministic": deterministic}})
            runtime._tune_convolutions(model, config, torch.device(device))
            assert torch.backends.cudnn.benchmark is measures


def test_held_out_data_is_evaluated_at_the_end(tmp_path: Path) -> None:
    result = train_from_config(tiny(tmp_path, data={"validation_fraction": 0.2}))
    assert result.eval_loss is not None
    assert result.eval_loss > 0


def test_asking_for_evaluations_holds_out_a_tenth(tmp_path: Path) -> None:
    config = load_config(tiny(tmp_path, eval={"every_steps": 2}))
    assert config.data.validation_fraction == 0.1
    assert train_from_config(config).eval_loss is not None


def test_evaluations_of_nothing_are_refused(tmp_path: Path) -> None:
    config = tiny(tmp_path, eval={"every_steps": 2}, data={"validation_fraction": 0.0})
    with pytest.raises(ConfigError, match="validation_fraction"):
        build_runtime(config)


def test_without_held_out_data_there_is_no_evaluation(tmp_path: Path) -> None:
    assert train_from_config(tiny(tmp_path)).eval_loss is None


def test_after_three_steps_every_trainable_tensor_of_the_reference_model_has_changed(tmp_path: Path) -> None:
    trainer, _ = build_runtime(tiny(tmp_path, optimizer={"weight_decay": 0.0}))
    before = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    trainer.fit(3)
    unchanged = [n for n, tensor in trainer.model.named_parameters() if torch.equal(tensor, before[n])]
    assert not unchanged


def test_a_run_that_writes_nothing_makes_no_folder(tmp_path: Path) -> None:
    output = tmp_path / "runs"
    train_from_config(tiny(output, checkpoint={"enabled": False}))
    assert not output.exists()


def test_a_jsonl_run_has_one_strict_object_per_line(tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path, logging={"json_file": "metrics.jsonl"}))
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events if event["event"] == "train_step"] == ["train_step"] * 4
    assert [event["event"] for event in events[:3]] == ["environment", "shape_profile", "train_start"]
    assert events[-1]["event"] == "train_end"
    assert all({"elapsed_s", "time"} <= event.keys() for event in events)


def test_a_token_of_the_config_is_in_no_file_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_averysecrettoken"
    config = tiny(
        tmp_path,
        distributed={"token": secret},
        logging={"json_file": "metrics.jsonl", "file": "run.log", "level": "DEBUG"},
    )
    train_from_config(config)
    assert secret not in repr(load_config(config))
    assert secret not in capsys.readouterr().out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 6
    assert not [path for path in files if secret.encode() in path.read_bytes()]


# ---------------------------------------------------------------- resume


def test_a_missing_checkpoint_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seed: "A missing checkpoint is a warning, not an error"."""
    trainer, _ = build_runtime(tiny(tmp_path), resume=True)
    assert "no checkpoint" in capsys.readouterr().out
    assert trainer.fit().steps == 4


def test_what_the_parts_of_a_run_warn_of_is_in_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train_from_config(tiny(tmp_path))
    capsys.readouterr()
    changed = {"data": {"shuffle": True}, "precision": {"mode": "fp16"}, "optimizer": {"fused": True}}

    def refuse(*args: Any, fused: bool = False, **options: Any) -> AdamW:
        if fused:
            raise RuntimeError("no fused kernel")
        return AdamW(*args, **options)

    monkeypatch.setattr("speedtronic.optimizers.factory.AdamW", refuse)
    build_runtime(tiny(tmp_path, logging={"json_file": "events.jsonl"}, **changed), resume=True)
    shown, lines = capsys.readouterr().out, (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    for said in (
        "the order of the data has changed (data.shuffle)",
        "precision fp16 cannot run on cpu",
        "no fused kernel",
    ):
        assert said in lines
        assert any(line.startswith("warning: ") and said in line for line in shown.splitlines())


@pytest.mark.parametrize("by", ["argument", "config"])
def test_resume_continues_the_run(by: str, tmp_path: Path) -> None:
    straight = train_from_config(tiny(tmp_path / "straight", run={"max_steps": 6}, model={"dropout": 0.1}))
    config = tiny(tmp_path / "parts", run={"max_steps": 6}, model={"dropout": 0.1})
    first = train_from_config(config, max_steps=2)
    if by == "config":
        config["checkpoint"] = {"resume": True}
    second = train_from_config(config, resume=by == "argument")
    losses = [record["loss"] for record in (*first.metrics, *second.metrics)]
    assert losses == [record["loss"] for record in straight.metrics]
    assert second.samples == straight.samples


def test_a_changed_config_is_shown_key_by_key_and_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_from_config(tiny(tmp_path, optimizer={"lr": 1e-3, "weight_decay": 0.1}))
    capsys.readouterr()
    changed = tiny(tmp_path, run={"max_steps": 8}, optimizer={"lr": 1e-2, "weight_decay": 0.3, "decay_1d": True})
    trainer, _ = build_runtime(changed, resume=True)
    shown = capsys.readouterr().out
    assert "optimizer.lr: 0.001 -> 0.01" in shown
    assert "optimizer.weight_decay: 0.1 -> 0.3" in shown
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.3, 0.3]
    result = trainer.fit()
    expected = train_from_config(tiny(tmp_path / "other", run={"max_steps": 8}, optimizer={"lr": 1e-2}))
    assert [r["lr_applied"] for r in result.metrics] == [r["lr_applied"] for r in expected.metrics[4:]]


@pytest.mark.parametrize(
    ("decay", "nearer", "refused"),
    [(8, 14, True), (4, 14, False), (8, 18, False), (8, 10, False), (None, 11, True), (None, 14, False)],
)
def test_a_wsd_decay_that_does_not_fit_into_what_is_left_is_refused(
    tmp_path: Path, decay: int | None, nearer: int, refused: bool
) -> None:
    """A run of 40 stops after 10 updates, at the full rate. The jump of the first would be from 1.0 to 0.55."""
    schedule = {"name": "wsd", "warmup_steps": 2, "decay_steps": decay}
    before = tiny(tmp_path, run={"max_steps": 40}, optimizer={"lr": 1.0}, scheduler=schedule)
    train_from_config(before, max_steps=10)
    after = tiny(tmp_path, run={"max_steps": nearer}, optimizer={"lr": 1.0}, scheduler=schedule)
    if refused:
        with pytest.raises(ConfigError, match=r"^scheduler.decay_steps: .* scheduler.max_steps .* \(run.max_steps\)"):
            build_runtime(after, resume=True)
    else:
        build_runtime(after, resume=True)


def test_a_wsd_decay_that_has_begun_goes_on_after_a_resume(tmp_path: Path) -> None:
    config = tiny(tmp_path, run={"max_steps": 8}, scheduler={"name": "wsd", "warmup_steps": 0, "decay_steps": 6})
    train_from_config(config, max_steps=5)
    assert train_from_config(config, resume=True).steps == 8


def test_a_changed_model_is_an_error_that_names_the_tensors(tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path))
    with pytest.raises(CheckpointError, match=r"transformer\.wte\.weight has shape \(64, 16\)"):
        build_runtime(tiny(tmp_path, model={"d_model": 32}), resume=True)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_other_frozen_parameters_are_an_error_that_names_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(config: ModelConfig, frozen: str) -> nn.Module:
        model = build_reference_transformer(config.model_copy(update={"extra": {}}))
        model.get_parameter(f"transformer.h.0.attn.{frozen}.weight").requires_grad_(False)
        return model

    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    registry.register("partly-frozen", without)

    def config(frozen: str) -> dict[str, Any]:
        return tiny(tmp_path, model={"name": "partly-frozen", "extra": {"frozen": frozen}}, optimizer={"name": name})

    train_from_config(config("q_proj"), max_steps=2)
    with pytest.raises(CheckpointError, match=r"attn\.q_proj\.weight was not trained there; .*out_proj\.weight is not"):
        build_runtime(config("out_proj"), resume=True)
    assert train_from_config(config("q_proj"), resume=True).steps == 4


def test_checkpoints_present_but_none_sound_is_an_error(tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path))
    for weights in tmp_path.glob("checkpoints/*/model.safetensors"):
        weights.write_bytes(b"torn")
    with pytest.raises(CheckpointError):
        build_runtime(tiny(tmp_path), resume=True)


def test_a_fresh_run_may_start_in_a_used_folder_and_leaves_its_checkpoints(tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path))
    before = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    result = train_from_config(tiny(tmp_path, run={"seed": 9}))
    assert result.steps == 4
    after = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert before < after


def test_a_second_run_is_refused_before_it_touches_the_first_ones_log(tmp_path: Path) -> None:
    config = tiny(tmp_path, logging={"json_file": "metrics.jsonl"})
    train_from_config(config)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    hold = (
        "from speedtronic.checkpoint import RunLock; import sys\n"
        "with RunLock(sys.argv[1]): print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunLockedError, match=str(other.pid)):
            train_from_config(config, resume=True)
        other.communicate(b"\n")
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_two_runs_may_not_share_a_checkpoint_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    config = tiny(tmp_path / "one", checkpoint={"directory": str(shared)})
    trainer, manager = build_runtime(config)
    seen: list[bool] = []

    class Asks:
        def on_event(self, event: str, payload: dict[str, Any]) -> None:
            if event == "train_step":
                seen.append(bool((shared / ".lock").read_text(encoding="utf-8")))

    trainer.logger.add_hook(Asks())
    trainer.fit()
    assert manager.directory == shared
    assert seen == [True] * 4


# ---------------------------------------------------------------- startup shapes


def test_build_runtime_validates_the_startup_shapes_and_fit_does_not_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed: "build_runtime() resolves precision, validates startup shapes, …"."""
    section = {"alignment": 16, "warn_on_cpu": True, "check_model": False}
    config = tiny(tmp_path, shape_validation=section, logging={"json_file": "metrics.jsonl"})
    trainer, _ = build_runtime(config)
    shown = capsys.readouterr().out
    assert shown.count("data.micro_batch_size") == 1
    assert trainer.shape_report is not None
    assert trainer.shape_report.profile.alignment == 16
    with trainer.logger:
        trainer.fit()
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events[:4] == ["environment", "shape_warning", "shape_profile", "train_start"]
    assert events.count("shape_warning") == events.count("shape_profile") == 1


def test_shape_validation_may_be_switched_off(tmp_path: Path) -> None:
    trainer, _ = build_runtime(tiny(tmp_path, shape_validation={"enabled": False}))
    assert trainer.shape_report is not None
    assert trainer.shape_report.warnings == ()


# ---------------------------------------------------------------- weights to start from


def test_a_run_starts_from_the_weights_of_another_at_step_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = build_runtime(tiny(tmp_path / "first"))
    first.fit()
    capsys.readouterr()
    second, _ = build_runtime(tiny(tmp_path / "second", run={"seed": 5, "init_from": str(tmp_path / "first")}))
    ours, theirs = second.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert second.step == 0
    assert not second.optimizer.state
    newest = tmp_path / "first/checkpoints/step_000000000004"
    assert f"starting from {len(ours)} tensors of {newest}" in capsys.readouterr().out
    assert second.fit().steps == 4


def test_a_resumed_run_does_not_read_the_weights_it_started_from(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    source, _ = build_runtime(tiny(tmp_path / "source", run={"seed": 5}))
    safetensors.torch.save_model(source.model, str(weights))
    config = tiny(tmp_path / "run", run={"init_from": str(weights)})
    train_from_config(config, max_steps=2)
    weights.unlink()
    assert train_from_config(config, resume=True).steps == 4


def test_a_run_without_a_checkpoint_to_resume_starts_from_its_weights(tmp_path: Path) -> None:
    source, _ = build_runtime(tiny(tmp_path / "source", run={"seed": 5}))
    safetensors.torch.save_model(source.model, str(tmp_path / "weights.safetensors"))
    config = tiny(tmp_path / "run", run={"init_from": str(tmp_path / "weights.safetensors")})
    trainer, _ = build_runtime(config, resume=True)
    assert torch.equal(trainer.model.state_dict()["lm_head.weight"], source.model.state_dict()["lm_head.weight"])


def test_weights_that_do_not_fit_name_the_key_and_the_tensors(tmp_path: Path) -> None:
    train_from_config(tiny(tmp_path / "first"))
    other = tiny(tmp_path / "second", run={"init_from": str(tmp_path / "first")}, model={"d_model": 32})
    with pytest.raises(CheckpointError, match=r"(?s)^run\.init_from: .*transformer\.wte\.weight has shape \(64, 16\)"):
        build_runtime(other)


def test_what_fits_is_loaded_on_request_and_the_rest_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = build_runtime(tiny(tmp_path / "first"))
    first.fit()
    run = {"init_from": str(tmp_path / "first"), "init_strict": False}
    second, _ = build_runtime(tiny(tmp_path / "second", run=run, model={"n_layer": 2}))
    shown = capsys.readouterr().out
    assert "transformer.h.1.attn.q_proj.weight is missing there" in shown
    assert torch.equal(second.model.get_parameter("lm_head.weight"), first.model.get_parameter("lm_head.weight"))


def test_weights_that_were_trained_to_compute_something_else_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_from_config(tiny(tmp_path / "first"))
    run = {"init_from": str(tmp_path / "first")}
    capsys.readouterr()
    build_runtime(tiny(tmp_path / "same", run=run))
    assert "something else" not in capsys.readouterr().out
    build_runtime(tiny(tmp_path / "other", run=run, model={"qk_norm": True, "rope_base": 500.0}))
    shown = capsys.readouterr().out
    assert "its weights were trained to compute something else than they do here" in shown
    assert "model.rope_base is 10000.0 there and 500.0 here" in shown
    assert "model.qk_norm is False there and True here" in shown


def test_weights_of_another_tokenizer_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("a few words, and a few words more " * 40, encoding="utf-8")
    data = {"text_path": str(tmp_path / "text.txt"), "tokenizer": "chars", "synthetic": False}
    train_from_config(tiny(tmp_path / "first", data=data))
    run = {"init_from": str(tmp_path / "first")}
    capsys.readouterr()
    build_runtime(tiny(tmp_path / "same", data=data, run=run))
    assert "a different tokenizer" not in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("a few words, and A FEW words more " * 40, encoding="utf-8")
    build_runtime(tiny(tmp_path / "other", data=data, run=run))
    assert "a different tokenizer" in capsys.readouterr().out


# ---------------------------------------------------------------- document mask


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Shards of documents of 5, 6, … tokens."""
    tokenizer = CharTokenizer()
    with ShardWriter(tmp_path / "documents", tokenizer=tokenizer) as writer:
        for number in range(20):
            writer.write(tokenizer.encode_array("x" * (4 + number)))
            writer.end_document()
    return tmp_path / "documents"


def test_attention_is_kept_within_documents_on_request(tmp_path: Path, documents: Path) -> None:
    def losses(masked: bool) -> list[float]:
        config = tiny(
            tmp_path / str(masked),
            model={"vocab_size": 256},
            data={"shards": str(documents), "document_mask": masked, "validation_fraction": 0.3},
        )
        result = train_from_config(config)
        assert result.eval_loss is not None
        return [*(record["loss"] for record in result.metrics), result.eval_loss]

    masked = losses(True)
    assert len(masked) == 5
    assert all(a != b for a, b in zip(masked, losses(False), strict=True))


def test_a_model_that_takes_no_document_ids_is_refused_a_document_mask(
    tmp_path: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(nn.Module):
        def forward(self, input_ids: torch.Tensor, **more: torch.Tensor) -> None: ...

    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    registry.register("takes-no-documents", lambda config: Other())
    config = tiny(
        tmp_path,
        model={"name": "takes-no-documents", "vocab_size": 256},
        data={"shards": str(documents), "document_mask": True},
    )
    with pytest.raises(ConfigError, match=r"data\.document_mask: the model 'takes-no-documents' has no argument"):
        build_runtime(config)


def test_a_warmup_that_is_not_given_stays_as_it_was_when_a_resumed_run_becomes_longer(tmp_path: Path) -> None:
    """Resolved once: 40 updates have a warmup of 4, and so have the 400 that they become."""
    short = tiny(tmp_path, run={"max_steps": 40}, scheduler={"warmup_steps": None}, checkpoint={"every_steps": 3})
    trainer, _ = build_runtime(short, max_steps=3)
    assert trainer.config.scheduler.warmup_steps == 4
    trainer.fit()
    longer = {**short, "run": {**short["run"], "max_steps": 400}}
    resumed, _ = build_runtime(longer, resume=True)
    assert resumed.config.scheduler.warmup_steps == 4
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(3e-4)  # the last step of the warmup
    given, _ = build_runtime({**longer, "scheduler": {"warmup_steps": 8}}, resume=True)
    assert given.optimizer.param_groups[0]["lr"] == pytest.approx(3e-4 * 4 / 8)
    assert build_runtime(longer)[0].config.scheduler.warmup_steps == 40


def test_the_fields_of_the_configuration_choose_the_line_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_from_config(tiny(tmp_path, logging={"fields": ["step", "tokens"], "file": "log.txt"}))
    assert "step 4/4  tokens 128\n" in capsys.readouterr().out
    assert "INFO step 4/4  tokens 128\n" in (tmp_path / "log.txt").read_text()
