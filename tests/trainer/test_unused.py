"""A section of the configuration that nothing acts on is said, with its keys and what to pass."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.data import build_data
from speedtronic.evaluation import HeldOutLoss
from speedtronic.metrics import MetricLogger
from speedtronic.optimizers import CautiousOptimizer
from speedtronic.precision import resolve_precision
from speedtronic.registry import registry
from speedtronic.runtime import build_logger, build_optimizer, build_runtime, build_scheduler
from speedtronic.trainer import Callback, Trainer
from tests.support.models import Coordinator, Events, Regression, config_of, make_trainer, regression_batches


def said_of(config: Any, **parts: Any) -> list[str]:
    console = StringIO()
    make_trainer(config=config, logger=MetricLogger(stream=console), **parts)
    return [line for line in console.getvalue().splitlines() if "nothing acts on it" in line]


NODE = {"enabled": True, "repo_id": "folder:/nowhere", "role": "worker"}


@pytest.mark.parametrize(
    ("config", "keys", "remedy"),
    [
        ({"eval": {"every_steps": 1}}, "eval.every_steps", "pass evaluator=speedtronic.evaluation.HeldOutLoss"),
        ({"eval": {"batches": 4, "at_end": True}}, "eval.batches", "pass evaluator="),
        ({"optimizer": {"lr": 0.1, "name": "muon"}}, "optimizer.name, optimizer.lr", "runtime.build_optimizer("),
        ({"optimizer": {"weight_decay": 0.1}}, "optimizer.weight_decay", "was not made by it"),
        ({"scheduler": {"name": "wsd"}}, "scheduler.name", "no scheduler was passed; pass scheduler="),
        ({"checkpoint": {"every_steps": 500}}, "checkpoint.every_steps", "pass checkpoint_manager="),
        ({"distributed": NODE}, "distributed", "pass coordinator="),
        ({"callbacks": ["package.module:factory"]}, "callbacks", "pass callbacks="),
        ({"data": {"shuffle": True, "num_workers": 2}}, "data.num_workers, data.shuffle", "pass dataloader="),
        ({"data": {"shards": "folder"}}, "data.shards", "the dataloader that was passed was not made by it"),
        ({"data": {"validation_fraction": 0.2, "seed": 1}}, "data.validation_fraction, data.seed", "dataloader="),
        ({"model": {"name": "mine"}}, "model.name", "pass model=speedtronic.build_model(config)"),
        ({"plugins": ["mine"]}, "plugins", "pass model="),
        ({"tune": "auto"}, "tune", "let speedtronic.runtime.build_runtime make them"),
    ],
)
def test_keys_without_their_part_are_named_with_what_to_pass(config: Any, keys: str, remedy: str) -> None:
    (said,) = said_of(config)
    assert f"warning: {keys}: " in said
    assert remedy in said
    assert "set data.validation_fraction" not in said


def test_a_loader_and_a_model_that_were_built_by_the_configuration_follow_it() -> None:
    sizes = {"vocab_size": 16, "max_seq_len": 8, "n_layer": 1, "n_head": 1, "d_model": 8}
    config = config_of(model=sizes | {"name": "of a test"}, plugins=["mine"], data={"shuffle": True})
    registry.register("of a test", lambda section: Regression(), replace=True)
    model = registry.build(config.model)
    loader = build_data(config, pin_memory=False).train
    for whole in (model, torch.nn.DataParallel(model)):
        assert said_of(config, model=whole, batches=loader) == []


def test_what_the_trainer_acts_on_by_itself_is_not_spoken_of() -> None:
    assert said_of(None) == []
    sections: dict[str, Any] = {
        "run": {"max_steps": 3},
        "data": {"micro_batch_size": 4, "target_batch_size": 8},
        "optimizer": {"grad_clip": 1.0, "ema": 0.9},
        "checkpoint": {"enabled": False, "every_steps": 5},
        "distributed": {"inner_steps": 5},
        "logging": {"level": "DEBUG", "every_steps": 5},
        "eval": {"at_end": True},
        "loss": "mse",
    }
    assert said_of(sections) == []


def test_parts_that_were_passed_are_taken_to_act_on_their_sections(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    config = config_of(
        eval={"every_steps": 1}, checkpoint={"every_steps": 5}, distributed=NODE, callbacks=["package.module:factory"]
    )
    said = said_of(
        config,
        evaluator=HeldOutLoss(regression_batches, device=cpu, precision=resolve_precision("fp32", cpu)),
        checkpoint_manager=CheckpointManager(tmp_path),
        coordinator=Coordinator(Events()),
        callbacks=[Callback()],
    )
    assert said == []


def test_an_optimizer_and_a_scheduler_that_were_built_by_the_configuration_follow_it() -> None:
    config, model = config_of(optimizer={"lr": 0.1}, scheduler={"name": "wsd"}), Regression()
    optimizer = build_optimizer(model, config, "cpu")
    ours = build_scheduler(optimizer, config)
    for chosen in (ours, torch.optim.lr_scheduler.ChainedScheduler([ours])):
        for given in (optimizer, CautiousOptimizer(optimizer)):
            assert said_of(config, optimizer=given, scheduler=chosen) == []
    own = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    (said,) = said_of(config, optimizer=optimizer, scheduler=own)
    assert "scheduler.name: " in said
    assert "the scheduler that was passed was not made by it" in said


def test_a_loss_beside_a_loss_fn_and_log_files_without_their_logger_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (said,) = said_of({"loss": "mse"}, loss_fn=lambda output, batch: output["loss"])
    assert "loss: " in said
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_of(logging={"json_file": "log.jsonl"})
    Trainer(model, optimizer, regression_batches(), device="cpu", config=config)
    assert "logging.json_file: nothing acts on it, since no logger was passed" in capsys.readouterr().out
    with build_logger(config_of()) as logger:
        Trainer(model, optimizer, regression_batches(), device="cpu", config=config, logger=logger)
    assert "nothing acts on it" not in capsys.readouterr().out


def test_a_runtime_from_its_own_resolved_configuration_has_all_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 16, "max_seq_len": 8, "n_layer": 1, "n_head": 1, "d_model": 8}
    config = config_of(run={"output_dir": str(tmp_path)}, model=sizes)
    build_runtime(config.to_dict())
    assert "nothing acts on it" not in capsys.readouterr().out
