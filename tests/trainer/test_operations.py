"""How many operations an update asks a card for, and that nothing is read of it between two logs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from speedtronic.runtime import build_runtime
from speedtronic.trainer import Trainer
from speedtronic.trainer.ema import WeightAverage
from speedtronic.trainer.step import Updater
from tests.support.cases import case
from tests.support.configs import tiny
from tests.support.operations import Operations, act_as_on_a_card

# Counts depend on neither the number of weights nor, up to bounded ones, on their sizes.
MODEL = {"vocab_size": 64, "max_seq_len": 16, "n_head": 2, "d_model": 16}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fused AdamW": {},
    "average": {"ema": 0.999},
    "cautious": {"cautious": True},
    "rescale": {"cautious": True, "cautious_rescale": True},
    "Muon": {"name": "muon"},
    "all": {"name": "muon", "muon_plus": True, "cautious": True, "cautious_rescale": True, "ema": 0.999},
}


def built(output: Path, patch: pytest.MonkeyPatch, **sections: Any) -> Trainer:
    """A trainer whose tensors are treated as those of a card."""
    act_as_on_a_card(patch)
    sections["optimizer"] = {"fused": True, **sections.get("optimizer", {})}
    return build_runtime(tiny(output, checkpoint={"enabled": False}, **sections))[0]


def operations_of_an_update(trainer: Trainer, patch: pytest.MonkeyPatch) -> Operations:
    """What the third update asks for after its backward pass: norm, clipping, verdict, step and average."""
    seen = Operations()

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any) -> Any:
            with seen if steps == 3 else nullcontext():
                return act(*arguments)

        return acting

    steps = 0
    run = Updater.run

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return run(*arguments)

    patch.setattr(Updater, "run", counted)
    patch.setattr(Updater, "_guarded_update", watched(Updater._guarded_update))
    patch.setattr(WeightAverage, "update", watched(WeightAverage.update))
    trainer.fit(3)
    assert steps == 3
    return seen


def test_an_update_asks_for_few_operations_whatever_the_number_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/performance.md has these counts, and why cautious steps need more than the goal of twice fused AdamW's."""
    most = {"fused AdamW": 18, "average": 23, "cautious": 40, "rescale": 68, "Muon": 152, "all": 259}
    for name, options in OPTIMIZERS.items():
        totals = []
        for layers in (1, 3):
            with case(name, layers), monkeypatch.context() as patch:
                optimizer = {"grad_clip": 1.0, **options}
                trainer = built(tmp_path, patch, model={**MODEL, "n_layer": layers}, optimizer=optimizer)
                found = operations_of_an_update(trainer, patch)
                totals.append(found.total)
                assert found.total <= most[name], found.counts
                assert not found.reads
        assert totals[0] == totals[1]
    assert most["average"] <= 2 * most["fused AdamW"]


def test_nothing_is_read_of_the_device_between_two_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulated = {"target_batch_size": 4}
    ways: dict[str, dict[str, Any]] = {name: {"optimizer": options} for name, options in OPTIMIZERS.items()}
    ways |= {
        "accumulation": {"data": accumulated},
        "by tokens": {"data": {**accumulated, "loss_normalization": "tokens"}},
        "clipping": {"optimizer": {"grad_clip": 0.1}},
        "skip": {"run": {"on_nonfinite": "skip"}},
        "ignore": {"run": {"on_nonfinite": "ignore"}},
        "checkpointing": {"gradient_checkpointing": True},
        "bf16": {"precision": "bf16"},
    }
    for name, sections in ways.items():
        with case(name), monkeypatch.context() as patch:
            trainer = built(tmp_path, patch, logging={"every_steps": 100}, **sections)
            trainer.fit(2)
            seen = Operations()

            def watched(act: Callable[[Any], Any], seen: Operations = seen) -> Callable[[Any], Any]:
                def acting(fit: Any) -> Any:
                    with seen:
                        return act(fit)

                return acting

            patch.setattr(trainer, "_train_step", watched(trainer._train_step))
            patch.setattr(trainer.logger, "log_last_step", lambda: None)
            trainer.fit(4)
            assert seen.total > 50
            assert not seen.reads


def test_the_read_that_an_ordinary_optimizer_needs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot obey a verdict on the device; so the host reads one number an update. It is the test of this count."""
    trainer = built(tmp_path, monkeypatch, optimizer={"fused": False})
    assert operations_of_an_update(trainer, monkeypatch).reads["_local_scalar_dense"] > 0
