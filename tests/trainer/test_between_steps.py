"""What happens between two steps: the order of evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.errors import ConfigError
from speedtronic.runtime import build_runtime
from tests.support.configs import tiny
from tests.support.models import Regression, make_trainer, regression_batches


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


@pytest.mark.parametrize(
    ("numbers", "found"),
    [(0.5, "a float"), ({"accuracy": 0.5}, "a dict of accuracy"), ({"loss": "low"}, "a dict of loss")],
)
def test_an_evaluator_that_returns_no_loss_is_told_what_to_return(numbers: Any, found: str) -> None:
    trainer = make_trainer(Regression(), regression_batches(), evaluator=lambda model, should_stop: numbers)
    with pytest.raises(ConfigError, match=f"^evaluator: must return a mapping with a number under 'loss'.* {found}$"):
        trainer.fit(1)


def test_the_loss_of_an_evaluator_may_be_a_tensor_and_is_a_number_in_the_result() -> None:
    result = make_trainer(
        Regression(), regression_batches(), evaluator=lambda model, should_stop: {"loss": torch.tensor(0.5)}
    ).fit(1)
    assert result.eval_loss == 0.5
    assert type(result.eval_loss) is float
