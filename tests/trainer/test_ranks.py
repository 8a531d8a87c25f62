"""Ranks train like one process, and what would make them differ is refused. The ranks are threads."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from speedtronic.config import SpeedtronicConfig
from speedtronic.data import build_data
from speedtronic.errors import ConfigError, NonFiniteError
from speedtronic.runtime import build_runtime
from speedtronic.trainer import Callback, RunView, Trainer
from speedtronic.trainer.forward import Forward
from speedtronic.trainer.loss import MeanLoss
from speedtronic.trainer.ranks import check_alike, check_division, micro_batches_of
from tests.support.configs import tiny
from tests.support.thread_group import ThreadGroup, on_ranks, train_on_ranks

STEPS = 5


def config_of(folder: Path, **sections: Any) -> dict[str, Any]:
    plain = {
        "run": {"max_steps": STEPS, "seed": 3},
        "data": {"num_tokens": 2000, "micro_batch_size": 1, "target_batch_size": 6, "shuffle": True},
        "logging": {"level": "ERROR"},
        "checkpoint": {"every_steps": 100},
    }
    return tiny(
        folder,
        **{
            key: {**plain.get(key, {}), **keys} if isinstance(keys, dict) else keys
            for key, keys in {**plain, **sections}.items()
        },
    )


def alone(config: dict[str, Any]) -> Trainer:
    trainer, _ = build_runtime(config)
    trainer.fit()
    return trainer


def assert_alike(ranks: list[Trainer], one: Trainer) -> None:
    """All ranks have one state, to the bit, and it is that of one process to rounding."""
    first = ranks[0].model.state_dict()
    for rank in ranks[1:]:
        for name, tensor in rank.model.state_dict().items():
            assert torch.equal(tensor, first[name]), name
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(first[name], tensor, rtol=1e-5, atol=1e-5)
    assert (ranks[0].samples, ranks[0].tokens) == (one.samples, one.tokens)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"cautious": True}, "data": {"loss_normalization": "tokens"}},
        {"optimizer": {"name": "muon", "cautious": True, "ema": 0.9}, "scheduler": {"name": "cosine"}},
        *(
            pytest.param({"scheduler": {"name": name, "warmup_steps": 1, **keys}}, marks=pytest.mark.slow)
            for name, keys in (("constant", {}), ("linear", {}), ("wsd", {"decay_steps": 2}))
        ),
    ],
    ids=["adamw", "muon", "cautious, by tokens", "muon, cautious, ema", "constant", "linear", "wsd"],
)
def test_ranks_train_like_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], ranks: int
) -> None:
    data = {**config_of(tmp_path)["data"], **sections.get("data", {})}
    one = alone(config_of(tmp_path / "one", **{**sections, "data": data}))
    many = train_on_ranks(monkeypatch, ranks, config_of(tmp_path / "many", **{**sections, "data": data}))
    assert_alike(many, one)
    if one.averaged_model is not None:
        shown = many[0].averaged_model
        assert shown is not None
        for name, tensor in one.averaged_model.state_dict().items():
            torch.testing.assert_close(shown.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_last_batch_that_not_all_ranks_have_hangs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """7 samples an epoch, 3 ranks of 2: the last global batch is one sample, of rank 0."""
    data = {
        "num_tokens": 7 * 16,
        "micro_batch_size": 2,
        "target_batch_size": 6,
        "drop_last": False,
        "loss_normalization": "tokens",
    }
    many = train_on_ranks(monkeypatch, 3, config_of(tmp_path, data=data))
    # Of five updates, three begin an epoch with six samples, and two take the one that is left.
    assert [trainer.samples for trainer in many] == [3 * 6 + 2 * 1] * 3


def test_a_group_that_does_not_divide_the_target_is_told_the_numbers(tmp_path: Path) -> None:
    config = SpeedtronicConfig.from_dict(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"target_batch_size 6 .*micro_batch_size \(1\) × ranks \(4\), such as 8"):
        on_ranks(4, lambda group: micro_batches_of(config, group))


def test_without_sizes_each_rank_has_a_micro_batch() -> None:
    assert on_ranks(2, lambda group: micro_batches_of(SpeedtronicConfig(), group)) == [1, 1]


def test_a_loader_that_is_not_divided_is_refused(tmp_path: Path) -> None:
    whole = build_data(SpeedtronicConfig.from_dict(config_of(tmp_path)), pin_memory=False).train
    dataset = TensorDataset(torch.arange(8))
    for loader in (whole, DataLoader(dataset), [torch.zeros(2)]):
        with pytest.raises(ConfigError, match="ranks would train on the same samples: build it with rank"):
            on_ranks(2, lambda group, loader=loader: check_division(loader, group))


def test_a_loader_that_says_its_part_is_taken(tmp_path: Path) -> None:
    config = SpeedtronicConfig.from_dict(config_of(tmp_path))
    dataset = TensorDataset(torch.arange(8))

    def ours(group: ThreadGroup) -> None:
        own = build_data(config, pin_memory=False, rank=group.rank, world_size=2, in_step=2).train
        check_division(own, group)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=group.rank)
        check_division(DataLoader(dataset, sampler=sampler), group)

    on_ranks(2, ours)


def test_an_evaluator_on_some_ranks_only_is_refused() -> None:
    with pytest.raises(ConfigError, match="some ranks have an evaluator and some have none"):
        on_ranks(2, lambda group: check_alike(group, True, object() if group.rank else None))


def test_a_checkpoint_manager_on_one_rank_is_enough() -> None:
    assert on_ranks(2, lambda group: check_alike(group, group.rank == 0, None)) == [True, True]


def test_what_a_callback_of_one_rank_asks_for_all_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Stops(Callback):
        def on_step_end(self, run: RunView) -> None:
            if run.step == 2 and not asked:
                asked.append(run.step)
                run.stop()

    monkeypatch.setattr("speedtronic.runtime._build_callbacks", lambda config: [Stops()])
    many = train_on_ranks(monkeypatch, 2, config_of(tmp_path))
    assert asked == [2]
    assert [trainer.step for trainer in many] == [2, 2]


def test_an_evaluation_is_shared_and_has_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 held-out samples, in batches of one, of which at most 5 are measured."""
    sections: dict[str, Any] = {
        "data": {**config_of(tmp_path)["data"], "validation_fraction": 0.1},
        "eval": {"every_steps": 5, "batches": 5},
    }
    one = alone(config_of(tmp_path / "one", **sections)).state_dict()["metrics"]["eval_loss"]
    kept: list[float] = []

    class Keeps(Callback):
        def on_eval_end(self, run: RunView) -> None:
            assert run.evaluation is not None
            assert run.evaluation["batches"] == 5
            kept.append(run.evaluation["loss"])

    monkeypatch.setattr("speedtronic.runtime._build_callbacks", lambda config: [Keeps()])
    train_on_ranks(monkeypatch, 3, config_of(tmp_path / "many", **sections))
    assert len(kept) == 3
    assert len(set(kept)) == 1
    del one


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 2), (3, 2), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 1), (2, 3), (1, 3), (3, 1)))],
)
def test_a_run_goes_on_at_the_same_sample_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    """Nothing twice, nothing skipped. Epochs of 11 samples end within updates, and in the middle of a global batch."""
    data = {"num_tokens": 11 * 16, "micro_batch_size": 1, "target_batch_size": 6, "drop_last": False}
    seen: list[tuple[int, ...]] = []
    plain = Trainer._move_batch

    def noted(trainer: Trainer, batch: Any) -> Any:
        seen.extend(map(tuple, batch["input_ids"].tolist()))
        return plain(trainer, batch)

    monkeypatch.setattr(Trainer, "_move_batch", noted)

    def train(ranks: int, steps: int, micro_batch: int, *, resume: bool) -> int:
        changes = {"data": {**data, "micro_batch_size": micro_batch}, "run": {"max_steps": steps, "seed": 3}}
        config = config_of(tmp_path, **changes, scheduler={"max_steps": 9})
        with monkeypatch.context() as patch:
            trainers = train_on_ranks(patch, ranks, config, resume=resume)
        assert {trainer.step for trainer in trainers} == {steps}
        return trainers[0].samples

    train(before, 3, 1, resume=False)
    train(after, 5, 1, resume=True)
    # And with other micro batches besides.
    total = train(before, 9, 3 if before == 2 else 2, resume=True)
    loader = build_data(SpeedtronicConfig.from_dict(config_of(tmp_path, data=data)), pin_memory=False).train
    order = [tuple(row) for _ in range(10) for batch in loader for row in batch["input_ids"].tolist()]
    assert len(seen) == total
    assert Counter(seen) == Counter(order[:total])


@pytest.mark.parametrize(
    ("sections", "more"),
    [
        ({}, []),
        ({"data": {"loss_normalization": "tokens"}}, []),
        ({"optimizer": {"name": "muon"}}, ["stack"]),
        ({"callbacks": ["tests.trainer.test_ranks:Callback"]}, ["reduce max"]),
    ],
    ids=["adamw", "by tokens", "muon", "callbacks"],
)
def test_an_update_takes_as_many_collectives_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], more: list[str]
) -> None:
    """One sum on the host, one of numbers, one of the gradients, which are smaller than a bucket here."""
    calls = []
    for steps in (2, 3):
        data = {**config_of(tmp_path)["data"], **sections.get("data", {})}
        changes = {**sections, "data": data, "run": {"max_steps": steps, "seed": 3}, "scheduler": {"max_steps": 3}}
        many = train_on_ranks(monkeypatch, 2, config_of(tmp_path / str(steps), **changes))
        calls.append(Counter(many[0]._group.calls))  # type: ignore[attr-defined]  # a group that counts
    assert calls[1] - calls[0] == Counter({"reduce_later": 3, **Counter(more)})


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_value_that_is_not_finite_on_one_rank_is_everybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    plain = Forward.__call__
    ours = threading.local()

    def poisoned(forward: Forward, model: Any, batch: Any) -> MeanLoss:
        loss = plain(forward, model, batch)
        ours.calls = getattr(ours, "calls", 0) + 1
        # One rank's second update, of three micro batches.
        if threading.current_thread().name.endswith("_1") and ours.calls == 4:
            return MeanLoss(loss.value * float("inf"))
        return loss

    monkeypatch.setattr(Forward, "__call__", poisoned)
    config = config_of(tmp_path, run={"max_steps": 3, "seed": 3, "on_nonfinite": policy})
    if policy == "stop":
        with pytest.raises(NonFiniteError, match="step 2"):
            train_on_ranks(monkeypatch, 2, config)
    else:
        many = train_on_ranks(monkeypatch, 2, config)
        assert [trainer.step for trainer in many] == [3, 3]
        assert all(bool(p.isfinite().all()) for p in many[0].model.parameters())
