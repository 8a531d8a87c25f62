"""What only a CUDA device can show: no synchronisation between logs, late numbers, pinned copies, resume.

`SPEEDTRONIC_GPU_TESTS=cpu` runs those on the CPU that can run there, to try the tests themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speedtronic import ReferenceTransformer
from speedtronic.errors import ConfigError, NonFiniteError
from speedtronic.generation import generate_batch
from speedtronic.metrics import MetricLogger
from speedtronic.runtime import build_runtime, train_from_config
from speedtronic.trainer import Callback, RunView, Trainer
from speedtronic.trainer.callbacks import Callbacks
from tests.support.configs import tiny
from tests.support.cuda import DEVICE, HAS_CARD, needs_card, needs_card_or_rehearsal, nothing_synchronises
from tests.support.models import Events, Silence

pytestmark = [pytest.mark.gpu, needs_card_or_rehearsal]


def on_card(output: Path, **sections: Any) -> dict[str, Any]:
    sections["run"] = {"device": DEVICE, "max_steps": 8, **sections.get("run", {})}
    return tiny(output, **sections)


def losses(config: dict[str, Any], **options: Any) -> list[float]:
    return [record["loss"] for record in train_from_config(config, **options).metrics]


# ---------------------------------------------------------------- no synchronisation


class Idle(Callback):
    """Asks for nothing that is on the device."""

    def on_step_end(self, run: RunView) -> None:
        assert run.step <= run.target


ACCUMULATED = {"target_batch_size": 4}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "average": {"optimizer": {"ema": 0.9}},
    "clipping": {"optimizer": {"grad_clip": 0.1}},
    "cautious": {"optimizer": {"cautious": True}},
    "rescale": {"optimizer": {"cautious": True, "cautious_rescale": True}},
    "Muon": {"optimizer": {"name": "muon"}},
    "Muon, all": {"optimizer": {"name": "muon", "muon_plus": True, "cautious": True, "cautious_rescale": True}},
    "accumulation": {"data": ACCUMULATED},
    "by tokens": {"data": {**ACCUMULATED, "loss_normalization": "tokens"}},
    "workers": {"data": {"num_workers": 1}},
    "skip": {"run": {"on_nonfinite": "skip"}},
}


@pytest.mark.parametrize("name", WAYS)
def test_nothing_synchronises_between_logs(name: str, tmp_path: Path) -> None:
    trainer, _ = build_runtime(
        on_card(tmp_path, logging={"every_steps": 100}, checkpoint={"enabled": False}, **WAYS[name])
    )
    trainer._callbacks = Callbacks([Idle()], warn=print)
    trainer.fit(2)  # the first steps load kernels and make the optimizer's state

    def watched(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def acting(fit: Any) -> Any:
            with nothing_synchronises():
                return act(fit)

        return acting

    trainer._train_step = watched(trainer._train_step)  # type: ignore[method-assign]
    last = trainer._act_between_steps
    # After the last step the numbers are read, so that its line can be written.
    trainer._act_between_steps = lambda fit: last(fit) if trainer.step == 8 else watched(last)(fit)  # type: ignore[method-assign]
    assert trainer.fit(8).steps == 8


def test_a_window_that_closes_does_not_synchronise_either(tmp_path: Path) -> None:
    trainer, _ = build_runtime(on_card(tmp_path, logging={"every_steps": 2}, checkpoint={"enabled": False}))
    trainer.fit(2)
    step = trainer._train_step

    def watched(fit: Any) -> bool:
        # The close of the next window waits for this one: what is asked for is that this one is only queued.
        if trainer.step == 3:
            with nothing_synchronises():
                return step(fit)
        return step(fit)

    trainer._train_step = watched  # type: ignore[method-assign]
    assert len(trainer.fit(8).metrics) == 6


# ---------------------------------------------------------------- numbers


def test_every_record_arrives_complete_and_in_order(tmp_path: Path) -> None:
    result = train_from_config(on_card(tmp_path, logging={"every_steps": 3}))
    assert [record["step"] for record in result.metrics] == list(range(1, 9))
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in result.metrics)
    assert all(record["interval_steps_per_sec"] > 0 for record in result.metrics)


@pytest.mark.parametrize("mode", ["fp32", "bf16", pytest.param("fp16", marks=needs_card)])
def test_every_precision_trains(mode: str, tmp_path: Path) -> None:
    found = losses(on_card(tmp_path, run={"max_steps": 60}, precision=mode))
    assert found[-1] < found[0]


def test_twenty_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    for name, optimizer in (("adamw", {}), ("muon", {"name": "muon"})):
        config = on_card(tmp_path / name, run={"max_steps": 20}, precision="fp32", optimizer=optimizer)
        # Muon's products are bf16 on a card.
        tolerance = 1e-3 if name == "adamw" else 2e-2
        assert losses(config) == pytest.approx(losses(config, device="cpu"), rel=tolerance)


def test_a_deterministic_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run": {"deterministic": True, "max_steps": 20}, "model": {"dropout": 0.1}}
    try:
        assert losses(on_card(tmp_path / "one", **options)) == losses(on_card(tmp_path / "two", **options))
    finally:
        torch.use_deterministic_algorithms(False)


class Poisoned:
    """Random tokens, whose loss is NaN from the given update on or in it alone."""

    def __init__(self, at: int, then: bool) -> None:
        self._at, self._then = at, then

    def loss(self, output: Any, batch: Any) -> Tensor:
        bad = batch["number"] >= self._at if self._then else batch["number"] == self._at
        return output["loss"] + torch.where(bad.any(), torch.nan, 0.0)


def numbered_batches(count: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = [torch.randint(0, 11, (2, 7)) for _ in range(count)]
    return [
        {"input_ids": row[:, :-1], "labels": row[:, 1:], "number": torch.full((2,), number + 1)}
        for number, row in enumerate(rows)
    ]


def poisoned_trainer(policy: str, events: Events) -> Trainer:
    torch.manual_seed(0)
    model = ReferenceTransformer(vocab_size=11, max_seq_len=6, n_layer=1, n_head=2, d_model=16).to(DEVICE)
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        numbered_batches(8),
        device=DEVICE,
        config={"run": {"on_nonfinite": policy}, "precision": "fp32"},
        logger=MetricLogger(stream=Silence(), hooks=[events], every_steps=100),
        loss_fn=Poisoned(5, then=policy == "stop").loss,
    )


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_nan_at_step_five_leaves_the_weights_of_step_four(policy: str) -> None:
    events = Events()
    ours, four = poisoned_trainer(policy, events), poisoned_trainer(policy, Events())
    four.fit(4)
    if policy == "stop":
        with pytest.raises(NonFiniteError, match="step 5"):
            ours.fit(8)
        assert ours.step == 4
    else:
        ours.fit(5)
    assert [payload["step"] for payload in events.of("nonfinite")] == [5]
    for own, expected in zip(ours.model.parameters(), four.model.parameters(), strict=True):
        assert torch.equal(own, expected)


# ---------------------------------------------------------------- the right card


@pytest.mark.skipif(not HAS_CARD or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_run_on_the_second_card_equals_one_on_the_first_and_leaves_the_first_alone(tmp_path: Path) -> None:
    first = losses(on_card(tmp_path / "first", run={"device": "cuda:0"}, precision="fp32"))
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    second = losses(on_card(tmp_path / "second", run={"device": "cuda:1"}, precision="fp32"))
    torch.cuda.set_device(0)
    assert second == first
    assert torch.cuda.max_memory_allocated(0) == before


# ---------------------------------------------------------------- checkpoints


RESUMED: dict[str, dict[str, Any]] = {
    "all of a model": {"model": {"dropout": 0.1}, "data": {"shuffle": True}, "optimizer": {"ema": 0.9}},
    "Muon": {"optimizer": {"name": "muon"}},
    "workers and pinned memory": {"data": {"num_workers": 2, "pin_memory": HAS_CARD}},
    "fp16": {"precision": "fp16"},
    "compiled": {"compile": True},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_card if n in ("fp16", "compiled") else ()) for n in RESUMED]
)
def test_a_resumed_run_equals_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    options = RESUMED[name]
    whole = losses(on_card(tmp_path / "whole", **options))
    train_from_config(on_card(tmp_path / "parts", **options), max_steps=3)
    assert losses(on_card(tmp_path / "parts", **options), resume=True) == whole[3:]


def test_a_save_in_the_background_holds_what_a_save_that_waits_holds(tmp_path: Path) -> None:
    """The training goes on while it is written, and must not change the copy."""
    files = []
    try:
        for background in (True, False):
            folder = tmp_path / str(background)
            checkpoint = {"every_steps": 3, "background": background, "keep_last": None}
            run = {"max_steps": 8, "deterministic": True}
            train_from_config(on_card(folder, checkpoint=checkpoint, precision="fp32", run=run))
            written = sorted((folder / "checkpoints").rglob("*.safetensors"))
            files.append({str(path.relative_to(folder)): path.read_bytes() for path in written})
    finally:
        torch.use_deterministic_algorithms(False)
    assert files[0] == files[1]
    assert len({Path(name).parent for name in files[0]}) == 3


# ---------------------------------------------------------------- graphs, nodes, generation


@needs_card
def test_graphs_are_recorded_with_one_micro_batch_and_refused_with_two(tmp_path: Path) -> None:
    graphs: dict[str, Any] = {"compile": True, "compile_options": {"mode": "reduce-overhead"}}
    eager = losses(on_card(tmp_path / "eager", precision="fp32"))
    trainer, _ = build_runtime(on_card(tmp_path / "graphs", precision="fp32", **graphs))
    events = Events()
    trainer.logger.add_hook(events)
    found = [record["loss"] for record in trainer.fit().metrics]
    assert "runtime_fallback" not in {payload["status"] for payload in events.of("compile")}
    assert found == pytest.approx(eager, rel=1e-4)
    with pytest.raises(ConfigError, match="2 backward passes"):
        build_runtime(on_card(tmp_path / "two", data=ACCUMULATED, **graphs))


def test_a_node_sends_at_its_boundary_and_installs_what_comes_back(tmp_path: Path) -> None:
    distributed = {
        "enabled": True,
        "role": "master",
        "repo_id": f"dir://{tmp_path}/store",
        "state_dir": str(tmp_path / "state"),
        "node_id": "ann",
        "inner_steps": 2,
        "quorum": 1,
        "expected_nodes": 1,
        "poll_interval": 0.05,
    }
    trainer, _ = build_runtime(on_card(tmp_path / "run", run={"max_steps": 60}, distributed=distributed))
    events = Events()
    trainer.logger.add_hook(events)
    assert trainer.fit().steps == 60
    trainer.logger.close()
    assert {"delta_uploaded", "global_installed", "outer_step"} <= set(events.names())
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_greedy_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ReferenceTransformer(vocab_size=64, max_seq_len=32, n_layer=2, n_head=4, n_kv_head=2, d_model=32).eval()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    options: dict[str, Any] = {"max_new_tokens": 12, "context_length": 32, "temperature": 0.0}
    expected = generate_batch(model, prompts, **options)
    assert generate_batch(model.to(DEVICE), prompts, **options) == expected
