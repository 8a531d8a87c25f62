"""Learning-rate schedules against their formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from speedtronic.config import ConfigError, SchedulerConfig, SpeedtronicConfig
from speedtronic.optimizers import Schedule, learning_rate_schedule


def schedule(**section: object) -> Schedule:
    config = SpeedtronicConfig.from_dict({"scheduler": {"max_steps": 100, "warmup_steps": 10, **section}})
    return learning_rate_schedule(config.scheduler)


def test_warmup_rises_by_one_part_per_step_and_reaches_one_at_its_last() -> None:
    """Seed: "warmup: max(1e-8, (step + 1) / warmup_steps)"."""
    factor = schedule(name="constant")
    assert [factor(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_constant_stays_at_one_after_warmup() -> None:
    """Seed: "constant: 1.0"."""
    factor = schedule(name="constant")
    assert {factor(step) for step in (10, 50, 100, 1000)} == {1.0}


def test_cosine_follows_its_formula_over_the_progress_after_warmup() -> None:
    """Seed: "cosine: min_ratio + (1 - min_ratio) * 0.5 * (1 + cos(pi * progress))"."""
    factor = schedule(name="cosine", min_lr_ratio=0.1)
    for step in (10, 33, 55, 100):
        progress = (step - 10) / 90
        assert factor(step) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def test_cosine_stays_at_the_floor_beyond_the_horizon() -> None:
    factor = schedule(name="cosine", min_lr_ratio=0.25)
    assert factor(100) == pytest.approx(0.25)
    assert factor(10_000) == pytest.approx(0.25)


def test_warmup_beyond_the_horizon_is_allowed_and_ends_at_the_start_of_the_curve() -> None:
    factor = schedule(name="cosine", warmup_steps=200, min_lr_ratio=0.1)
    assert factor(99) == pytest.approx(0.5)
    assert factor(200) == pytest.approx(1.0)


def test_no_warmup_starts_at_the_full_rate() -> None:
    assert schedule(name="cosine", warmup_steps=0)(0) == pytest.approx(1.0)


def test_linear_falls_evenly_to_the_floor() -> None:
    factor = schedule(name="linear", min_lr_ratio=0.2)
    assert factor(55) == pytest.approx(0.6)
    assert factor(100) == pytest.approx(0.2)


def test_wsd_is_stable_until_its_decay_and_ends_at_the_floor() -> None:
    factor = schedule(name="wsd", min_lr_ratio=0.0, decay_steps=40)
    assert {factor(step) for step in (10, 30, 60)} == {1.0}
    assert factor(80) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(0.0)


def test_wsd_decays_over_the_last_fifth_by_default() -> None:
    factor = schedule(name="wsd", min_lr_ratio=0.0)
    assert factor(80) == pytest.approx(1.0)
    assert factor(90) == pytest.approx(0.5)


def test_wsd_never_jumps_where_its_warmup_leaves_less_than_a_fifth() -> None:
    for warmup in (0, 50, 80, 85, 99, 100, 150):
        factor = schedule(name="wsd", warmup_steps=warmup, min_lr_ratio=0.0)
        after = [factor(step) for step in range(max(0, warmup - 1), 100)]
        steepest = 1 / max(1, min(20, 100 - warmup))
        falls = [before - now for before, now in pairwise(after)]
        assert all(fall <= steepest + 1e-9 for fall in falls), warmup


def test_a_wsd_decay_longer_than_what_follows_the_warmup_is_an_error() -> None:
    """It would jump from 1.0 at the end of the warmup to 0.415 one step later: 0.1 + 0.9 · (100 - 30) / 200."""
    with pytest.raises(ConfigError, match=r"^scheduler\.decay_steps: 200 is more than the 70 .* at most 70$"):
        schedule(name="wsd", warmup_steps=30, decay_steps=200, min_lr_ratio=0.1)
    section = SchedulerConfig(name="wsd", max_steps=100, warmup_steps=30, decay_steps=71)
    with pytest.raises(ConfigError, match=r"scheduler\.decay_steps: 71 is more than the 70"):
        learning_rate_schedule(section)
    assert schedule(name="wsd", warmup_steps=30, decay_steps=70)(30) == 1.0
    assert schedule(name="cosine", warmup_steps=30, decay_steps=200)(30) == 1.0


def test_a_warmup_that_is_not_given_is_a_tenth_of_the_run_and_at_most_100() -> None:
    for steps, warmup in ((4, 0), (50, 5), (999, 99), (1000, 100), (10**6, 100)):
        factor = learning_rate_schedule(SpeedtronicConfig.from_dict({"max_steps": steps}).scheduler)
        assert [step for step in range(steps) if factor(step) == 1.0][0] == max(0, warmup - 1)


def halved_after(config: SchedulerConfig, *, step: int) -> Schedule:
    return lambda done: 0.5 if done >= step else 1.0


def no_curve(config: SchedulerConfig) -> float:
    return 0.5


def test_a_function_of_ones_own_gives_the_curve_after_the_warmup() -> None:
    factor = schedule(name=f"{__name__}:halved_after", args={"step": 6}, warmup_steps=4, max_steps=10)
    assert [factor(step) for step in range(8)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        ({"name": f"{__name__}:halved_after"}, "halved_after takes .*missing a required argument: 'step'"),
        ({"name": f"{__name__}:no_curve"}, "returned float, not a function from the number of updates"),
        ({"name": "no_such_module:curve"}, "cannot import 'no_such_module'"),
    ],
)
def test_a_function_that_gives_no_curve_is_refused(section: dict[str, object], shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"^scheduler\.name: .*{shown}"):
        schedule(**section)
