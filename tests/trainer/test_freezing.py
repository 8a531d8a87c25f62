"""Parameters that train from, or until, an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speedtronic.runtime import build_runtime, train_from_config
from tests.support.configs import tiny

LATE, EARLY = "transformer.h.0.mlp.down_proj.weight", "transformer.h.0.attn.q_proj.weight"
GROUPS = [{"match": "*.mlp.down_proj.*", "train_from": 2}, {"match": "*.q_proj.*", "train_until": 3}]


def frozen_config(folder: Path, **optimizer: Any) -> dict[str, Any]:
    return tiny(folder, run={"max_steps": 6}, optimizer={"groups": GROUPS, **optimizer}, checkpoint={"every_steps": 1})


class Weights:
    """A callback that keeps two weights after each step."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {LATE: [], EARLY: []}

    def on_step_end(self, run: Any) -> None:
        for name, kept in self.seen.items():
            kept.append(run.model.get_parameter(name).detach().clone())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_parameter_moves_only_between_its_first_and_its_last_update(name: str, tmp_path: Path) -> None:
    trainer, _ = build_runtime(frozen_config(tmp_path, name=name))
    start = {key: trainer.model.get_parameter(key).detach().clone() for key in (LATE, EARLY)}
    weights = Weights()
    trainer._callbacks._calls["on_step_end"].append(("weights", weights.on_step_end))
    trainer.fit()
    for key, moves in (
        (LATE, [False, False, True, True, True, True]),
        (EARLY, [True, True, True, False, False, False]),
    ):
        steps = [start[key], *weights.seen[key]]
        assert [not torch.equal(a, b) for a, b in zip(steps, steps[1:], strict=False)] == moves


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_that_stops_between_resumes_bit_for_bit(ema: float | None, tmp_path: Path) -> None:
    train_from_config(frozen_config(tmp_path / "straight", ema=ema))
    for steps in (1, 3):
        train_from_config(frozen_config(tmp_path / "parts", ema=ema), max_steps=steps, resume=steps > 1)
    trainer, _ = build_runtime(frozen_config(tmp_path / "parts", ema=ema), resume=True)
    trainer.fit(5)
    trainer.fit()  # of one trainer, whose average goes on
    for name in ("model.safetensors", "state.safetensors"):
        file = f"checkpoints/step_000000000006/{name}"
        assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()
