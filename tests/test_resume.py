"""A run that stops and goes on in another process equals one that never stopped, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import SchedulerConfig, SpeedtronicConfig
from speedtronic.data.prepare.prepare import prepare
from speedtronic.data.prepare.records import PromptRecords
from speedtronic.errors import CheckpointError
from speedtronic.runtime import build_optimizer, build_runtime, train_from_config
from tests.support.configs import tiny

SOURCES = ("synthetic", "text", "shards")
CASES = [*((source, workers) for source in SOURCES for workers in (0, 2)), ("mixture", 2)]
STOP, END = 5, 12

# Each source with another optimizer, so that these too go through a process of their own.
OPTIMIZER_OF = {
    "synthetic": {"name": "adamw"},
    "text": {"name": "muon", "muon_lr": 0.02},
    "shards": {"name": "muon", "muon_plus": True, "cautious": True},
    "mixture": {"name": "adamw"},
}

# Trains every configuration of a JSON file up to its stop, in a process of its own.
FIRST_PART = """
import json, sys
from speedtronic.runtime import train_from_config
for config in json.load(open(sys.argv[1])):
    assert train_from_config(config, max_steps=int(sys.argv[2])).steps == int(sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, its shards, and the first part of each case trained in another process."""
    folder = tmp_path_factory.mktemp("resume")
    text = folder / "text.txt"
    text.write_text("".join(f"{number} bottles on the wall. " for number in range(30)), encoding="utf-8")
    prepare([text], folder / "shards")
    for name, count in (("sums", 15), ("more", 9)):
        lines = [json.dumps({"prompt": f"{n}+{n}=", "completion": str(2 * n)}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        prepare([folder / f"{name}.jsonl"], folder / name, records=PromptRecords())
    configs = folder / "configs.json"
    configs.write_text(json.dumps([case_config(*case, folder, "parts") for case in CASES]), encoding="utf-8")
    subprocess.run([sys.executable, "-c", FIRST_PART, str(configs), str(STOP)], check=True, stdout=subprocess.DEVNULL)
    return folder


def config_of(source: str, workers: int, folder: Path, name: str) -> dict[str, Any]:
    """Twelve updates of 2 × 2 samples each: more than one epoch of every source."""
    origin = {
        "synthetic": {"synthetic": True, "num_tokens": 42 * 16},
        "text": {"text_path": str(folder / "text.txt")},
        "shards": {"shards": str(folder / "shards")},
        "mixture": {
            "mixture": {str(folder / "sums"): 3, str(folder / "more"): 1},
            **{"packing": "best_fit", "document_mask": True},
        },
    }
    return tiny(
        folder / name / f"{source}-{workers}",
        run={"max_steps": END},
        model={"vocab_size": 256, "dropout": 0.2},
        data={
            **origin[source],
            "micro_batch_size": 2,
            "target_batch_size": 4,
            "shuffle": True,
            "num_workers": workers,
        },
    )


def case_config(source: str, workers: int, folder: Path, name: str) -> dict[str, Any]:
    return {**config_of(source, workers, folder, name), "optimizer": OPTIMIZER_OF[source]}


def final_state(config: dict[str, Any]) -> dict[str, Any]:
    state = CheckpointManager(Path(config["run"]["output_dir"]) / "checkpoints").load_latest()
    assert state is not None
    return state


@pytest.mark.parametrize(("source", "workers"), CASES)
def test_five_steps_a_new_process_and_seven_equal_twelve(
    source: str, workers: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = case_config(source, workers, folder, "straight")
    parts = case_config(source, workers, folder, "parts")
    whole = train_from_config(straight)
    rest = train_from_config(parts, resume=True)
    assert [record["loss"] for record in rest.metrics] == [record["loss"] for record in whole.metrics[STOP:]]
    assert (rest.steps, rest.samples, rest.tokens) == (whole.steps, whole.samples, whole.tokens)
    expected, resumed = final_state(straight), final_state(parts)
    assert expected["data"]["loader"]["epoch"] > 0
    assert expected["data"] == resumed["data"]
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name


def test_other_weights_of_a_mixture_are_shown_on_resume(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("mixture", 0, folder, "weights")
    train_from_config(config, max_steps=2)
    config["data"]["mixture"] = dict.fromkeys(config["data"]["mixture"], 1)
    capsys.readouterr()
    assert train_from_config(config, resume=True).steps == END
    shown = capsys.readouterr()
    assert "the weights of the mixture have changed: " in shown.out + shown.err
    assert "sums 0.75 → 0.5" in shown.out + shown.err


def test_the_number_of_workers_does_not_change_the_batches(folder: Path) -> None:
    without, with_two = (train_from_config(config_of("text", workers, folder, "workers")) for workers in (0, 2))
    assert [r["loss"] for r in without.metrics] == [r["loss"] for r in with_two.metrics]


def zigzag(config: SchedulerConfig, *, length: int) -> Callable[[int], float]:
    return lambda step: 1 - (step % length) / length


OPTIONS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "token normalisation": {"data": {"loss_normalization": "tokens"}},
    "clipping": {"optimizer": {"grad_clip": 0.1}},
    "fused": {"optimizer": {"fused": True}},
    "decay of norms": {"optimizer": {"decay_1d": True}},
    "bf16": {"precision": {"mode": "bf16"}},
    "skipping": {"run": {"on_nonfinite": "skip"}},
    "document mask": {"data": {"document_mask": True}},
    "evaluation": {"eval": {"every_steps": 2}, "data": {"validation_fraction": 0.2}},
    "in the foreground": {"checkpoint": {"background": False}},
    "muon": {"optimizer": {"name": "muon"}},
    "muon with its own rate, fused": {"optimizer": {"name": "muon", "muon_lr": 0.02, "fused": True}},
    "muon plus": {"optimizer": {"name": "muon", "muon_plus": True}},
    "muon with other numbers": {
        "optimizer": {"name": "muon", "muon_coefficients": "polar_express", "muon_scale": "match_rms_adamw"}
    },
    "cautious": {"optimizer": {"cautious": True}},
    "cautious, fused and rescaled": {"optimizer": {"cautious": True, "cautious_rescale": True, "fused": True}},
    "cautious muon": {"optimizer": {"name": "muon", "cautious": True}},
    "cautious muon, rescaled": {"optimizer": {"name": "muon", "cautious": True, "cautious_rescale": True}},
    "rates and decay by name and depth, clipped by value": {
        "model": {"n_layer": 2},
        "optimizer": {
            "name": "muon",
            "grad_clip_value": 0.01,
            "layer_decay": 0.5,
            "groups": [{"match": "*.mlp.*", "lr": 0.01, "weight_decay": 0.3}, {"match": "*.k_proj.*", "frozen": True}],
        },
    },
    "an optimizer and a schedule of others": {
        "optimizer": {"name": "torch.optim:NAdam", "args": {"momentum_decay": 0.01}, "cautious": True},
        "scheduler": {"name": f"{__name__}:zigzag", "args": {"length": 3}},
    },
    "a last short batch": {"data": {"drop_last": False, "micro_batch_size": 3, "target_batch_size": 6}},
}


def option_config(option: dict[str, Any], folder: Path, output: Path) -> dict[str, Any]:
    config = config_of("shards", 0, folder, "options")
    merged = {name: {**keys, **option.get(name, {})} for name, keys in config.items()}
    merged["run"]["output_dir"] = str(output)
    return {**option, **merged}


def losses(result: Any) -> list[float]:
    return [record["loss"] for record in result.metrics]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_resumes_bit_for_bit(name: str, folder: Path, tmp_path: Path) -> None:
    straight, parts = (option_config(OPTIONS[name], folder, tmp_path / part) for part in ("straight", "parts"))
    whole = train_from_config(straight)
    train_from_config(parts, max_steps=STOP)
    assert losses(train_from_config(parts, resume=True)) == losses(whole)[STOP:]
    expected, resumed = final_state(straight)["model"], final_state(parts)["model"]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in expected.items())


CONVERSIONS = {
    "adamw to cautious adamw": ({}, {"cautious": True}),
    "cautious adamw to fused adamw": ({"cautious": True, "cautious_rescale": True}, {"fused": True}),
    "muon to cautious muon plus": ({"name": "muon"}, {"name": "muon", "cautious": True, "muon_plus": True}),
    "cautious muon to other numbers": (
        {"name": "muon", "cautious": True},
        {
            **{"name": "muon", "muon_lr": 0.5, "muon_momentum": 0.5, "muon_ns_steps": 3, "weight_decay": 0.3},
            **{"muon_coefficients": "polar_express", "muon_scale": "match_rms_adamw", "fused": True},
        },
    ),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_another_option_set_takes_over_the_state_and_its_own_options_count(
    name: str, folder: Path, tmp_path: Path
) -> None:
    first, second = ({"optimizer": optimizer} for optimizer in CONVERSIONS[name])
    train_from_config(option_config(first, folder, tmp_path), max_steps=STOP)
    saved = final_state(option_config(first, folder, tmp_path))["optimizer"]
    changed = option_config(second, folder, tmp_path)
    trainer, _ = build_runtime(changed, resume=True)
    fresh, _ = build_runtime(option_config(second, folder, tmp_path / "fresh"))
    for group, expected in zip(trainer.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
        options = {key: value for key, value in expected.items() if key not in ("params", "lr")}
        assert {key: group[key] for key in options} == options
        assert group["lr"] == pytest.approx(expected["initial_lr"] * trainer.scheduler.lr_lambdas[0](STOP))
    torch.testing.assert_close(trainer.optimizer.state_dict()["state"], saved["state"], rtol=0, atol=0)
    assert trainer.fit().steps == END


@pytest.mark.parametrize(("wrote", "reads"), [("adamw", "muon"), ("muon", "adamw")])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_state_of_another_algorithm_is_refused_with_the_remedy(
    wrote: str, reads: str, layers: int, folder: Path, tmp_path: Path
) -> None:
    model = {"model": {"n_layer": layers}}
    train_from_config(option_config({**model, "optimizer": {"name": wrote}}, folder, tmp_path), max_steps=1)
    with pytest.raises(CheckpointError, match=rf"optimizer\.name: {wrote}.*run\.init_from"):
        build_runtime(option_config({**model, "optimizer": {"name": reads}}, folder, tmp_path), resume=True)


@pytest.mark.parametrize(("first", "then"), [("adamw", "torch.optim:SGD"), ("torch.optim:SGD", "torch.optim:Adam")])
def test_the_state_of_another_class_is_refused_with_the_remedy(
    first: str, then: str, folder: Path, tmp_path: Path
) -> None:
    before, after = (option_config({"optimizer": {"name": name}}, folder, tmp_path) for name in (first, then))
    train_from_config(before, max_steps=1)
    with pytest.raises(CheckpointError, match=rf"was written by optimizer\.name: {first}, .* nothing to {then}"):
        train_from_config(after, resume=True)


def test_the_state_of_muon_is_refused_by_adamw_where_the_groups_have_the_same_sizes() -> None:
    """torch's AdamW would take it in without a word: two groups of one tensor each on both sides."""
    from tests.support.models import Regression, make_trainer

    def trainer(name: str) -> Any:
        model = Regression()
        config = SpeedtronicConfig.from_dict({"optimizer": {"name": name}})
        return make_trainer(model, optimizer=build_optimizer(model, config, "cpu"))

    for wrote, reads in (("muon", "adamw"), ("adamw", "muon")):
        first = trainer(wrote)
        first.fit(2)
        state = first.state_dict()
        with pytest.raises(CheckpointError, match=rf"optimizer\.name: {wrote}"):
            trainer(reads).resume(state)


class TwoLayers(torch.nn.Module):
    """Two layers of one shape, and two that are each other's transpose, of which `frozen` and `adamws` are told."""

    def __init__(self, frozen: str | None = None, adamws: str | None = None) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.up, self.down = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
        self.end = torch.nn.Linear(3, 1)
        if frozen is not None:
            self.get_submodule(frozen).requires_grad_(False)
        if adamws is not None:
            self.get_submodule(adamws)._speedtronic_optimizer_role = "adamw"  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.down(self.up(self.second(self.first(x).tanh()).tanh()))
        return {"loss": torch.nn.functional.mse_loss(self.end(hidden), y)}


def two_layers(optimizer: dict[str, Any], model: TwoLayers) -> Any:
    from tests.support.models import make_trainer

    config = SpeedtronicConfig.from_dict({"optimizer": optimizer})
    return make_trainer(model, optimizer=build_optimizer(model, config, "cpu"))


@pytest.mark.parametrize(
    ("name", "wrote", "reads", "told"),
    [
        *[
            (
                name,
                {"frozen": "first"},
                {"frozen": "second"},
                r"first\.weight was not trained there.*second\.bias is",
            )
            for name in ("adamw", "muon")
        ],
        ("muon", {"adamws": "first"}, {"adamws": "second"}, "in other groups"),
        ("muon", {"adamws": "up"}, {"adamws": "down"}, "in other groups"),
    ],
)
def test_the_state_of_other_parameters_is_refused_where_they_are_as_many(
    name: str, wrote: dict[str, str], reads: dict[str, str], told: str
) -> None:
    """torch goes by their number alone, and would give each the moments of another."""
    first = two_layers({"name": name}, TwoLayers(**wrote))
    first.fit(2)
    state = first.state_dict()
    with pytest.raises(CheckpointError, match=rf"does not fit this optimizer: .*{told}"):
        two_layers({"name": name}, TwoLayers(**reads)).resume(state)
    again = two_layers({"name": name}, TwoLayers(**wrote))
    again.resume(state)
    assert again.fit(3).steps == 3


def test_names_are_not_compared_where_one_side_has_none_and_compiled_names_match() -> None:
    first = two_layers({}, TwoLayers())
    first.fit(2)
    state = first.state_dict()
    groups = state["optimizer"]["param_groups"]
    for group in groups:
        group["param_names"] = [f"_orig_mod.{name}" for name in group["param_names"]]
    two_layers({}, TwoLayers()).resume(state)
    for group in groups:
        del group["param_names"]
    second = two_layers({}, TwoLayers())
    second.resume(state)
    assert second.optimizer.param_groups[0]["param_names"][0] == "first.weight"


@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler about itself
def test_a_compiled_run_resumes_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    logging = {"json_file": "log.jsonl"}
    straight, parts = (
        option_config({"compile": True, "logging": logging}, folder, tmp_path / part) for part in ("straight", "parts")
    )
    whole = train_from_config(straight)
    train_from_config(parts, max_steps=STOP)
    assert losses(train_from_config(parts, resume=True)) == losses(whole)[STOP:]
    for run in ("straight", "parts"):
        lines = [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        assert {line["status"] for line in lines if line["event"] == "compile"} == {"enabled"}


def test_another_folder_continues_the_same_run(folder: Path, tmp_path: Path) -> None:
    here = option_config({}, folder, tmp_path / "here")
    whole = train_from_config(option_config({}, folder, tmp_path / "straight"))
    train_from_config(here, max_steps=STOP)
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "moved").mkdir()
    shutil.copytree(folder / "shards", tmp_path / "moved/shards")
    there = option_config({"data": {"shards": str(tmp_path / "moved/shards")}}, folder, tmp_path / "there")
    assert losses(train_from_config(there, resume=True)) == losses(whole)[STOP:]


@pytest.mark.parametrize("micro", [1, 4])
def test_another_micro_batch_of_the_same_target_continues_with_the_same_samples(
    micro: int, folder: Path, tmp_path: Path
) -> None:
    without_dropout = {"model": {"dropout": 0.0}}
    whole = train_from_config(option_config(without_dropout, folder, tmp_path / "straight"))
    train_from_config(option_config(without_dropout, folder, tmp_path / "parts"), max_steps=STOP)
    changed = option_config({**without_dropout, "data": {"micro_batch_size": micro}}, folder, tmp_path / "parts")
    rest = train_from_config(changed, resume=True)
    assert losses(rest) == pytest.approx(losses(whole)[STOP:], abs=1e-5)
    assert rest.samples == whole.samples


def test_a_foreign_loader_is_replayed_to_its_place() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    from tests.support.models import Regression, make_trainer, regression_batches

    inputs = torch.cat([x for x, _ in regression_batches()])
    targets = torch.cat([y for _, y in regression_batches()])

    class Dropping(Regression):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(torch.nn.functional.dropout(x, 0.3, self.training), y)

    def fresh() -> Any:
        torch.manual_seed(0)
        return make_trainer(Dropping(), DataLoader(TensorDataset(inputs, targets), batch_size=5, shuffle=True))

    whole = fresh().fit(12)
    first = fresh()
    first.fit(5)
    state = first.state_dict()
    torch.manual_seed(99)
    second = fresh()
    second.resume(state)
    rest = second.fit(12)
    assert [r["loss"] for r in rest.metrics] == [r["loss"] for r in whole.metrics[5:]]
