"""What only a CUDA device can show: no synchronisation between logs, late numbers, pinned copies, resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.runtime import build_runtime, train_from_config
from speedtronic.trainer import Callback, RunView
from speedtronic.trainer.callbacks import Callbacks
from tests.support.configs import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_cuda(output: Path, **sections: Any) -> dict[str, Any]:
    return tiny(output, **{"run": {"device": "cuda", "max_steps": 8}, **sections})


class Idle(Callback):
    """Asks for nothing that is on the device."""

    def on_step_end(self, run: RunView) -> None:
        assert run.step <= run.target


@pytest.mark.parametrize("ema", [None, 0.9])
def test_nothing_synchronises_between_logs(ema: float | None, tmp_path: Path) -> None:
    config = on_cuda(tmp_path, logging={"every_steps": 100}, checkpoint={"enabled": False}, optimizer={"ema": ema})
    trainer, _ = build_runtime(config)
    trainer._callbacks = Callbacks([Idle()], warn=print)
    trainer.fit(2)  # the first steps load kernels and make the optimizer's state

    def watched(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def acting(fit: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return act(fit)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return acting

    trainer._train_step = watched(trainer._train_step)  # type: ignore[method-assign]
    trainer._act_between_steps = watched(trainer._act_between_steps)  # type: ignore[method-assign]
    assert trainer.fit(8).steps == 8


def test_every_record_arrives_complete_and_in_order(tmp_path: Path) -> None:
    result = train_from_config(on_cuda(tmp_path, logging={"every_steps": 3}))
    assert [record["step"] for record in result.metrics] == list(range(1, 9))
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in result.metrics)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_every_precision_trains(mode: str, tmp_path: Path) -> None:
    result = train_from_config(on_cuda(tmp_path, run={"device": "cuda", "max_steps": 60}, precision=mode))
    assert result.metrics[-1]["loss"] < result.metrics[0]["loss"]


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": {"dropout": 0.1}, "data": {"shuffle": True}, "optimizer": {"ema": 0.9}}
    whole = train_from_config(on_cuda(tmp_path / "whole", **options))
    train_from_config(on_cuda(tmp_path / "parts", **options), max_steps=3)
    rest = train_from_config(on_cuda(tmp_path / "parts", **options), resume=True)
    assert [r["loss"] for r in rest.metrics] == [r["loss"] for r in whole.metrics[3:]]
