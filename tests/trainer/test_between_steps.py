"""What happens between two steps: the order of evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path

from speedtronic.runtime import build_runtime
from tests.support.configs import tiny


def test_the_evaluation_at_the_end_is_in_the_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    """Also where the last step is one of the checkpoints' cadence and none of the evaluations'."""
    config = tiny(
        tmp_path,
        data={"validation_fraction": 0.2},
        eval={"every_steps": 3},
        checkpoint={"every_steps": 4, "keep_best": 1},
    )
    trainer, manager = build_runtime(config, max_steps=4)
    result = trainer.fit()
    state = manager.load_latest()
    assert state is not None
    assert state["step"] == 4
    assert state["metrics"]["eval_loss"] == result.eval_loss
    assert result.eval_loss is not None
