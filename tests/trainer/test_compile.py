"""A compiled model trains like an eager one, and a failure of the compiler costs only the compilation."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from speedtronic import ReferenceTransformer
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.runtime import seed_everything
from speedtronic.trainer import Trainer
from speedtronic.trainer.compile import Compilation, CompiledModel, keep_compiled_code, repeated_blocks
from tests.support.cases import case
from tests.support.models import (
    ACCUMULATE_TWO,
    Events,
    Regression,
    Silence,
    config_of,
    make_trainer,
    regression_batches,
)


def test_a_failing_construction_leaves_the_eager_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "torch.compile construction failure leaves the eager model active"."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    events = Events()
    ours = make_trainer(config=config_of(compile=True), events=events)
    assert ours.fit(2).steps == 2
    assert events.of("compile")[0]["status"] == "construction_failed"
    assert "no compiler" in events.of("compile")[0]["error"]


class Breakable:
    """A stand-in for torch.compile: runs the module eagerly, and fails in the given calls."""

    def __init__(self, model: nn.Module, fail_at: set[int], error: Exception) -> None:
        self._model, self._fail_at, self._error = model, fail_at, error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        output = self._model(*args, **kwargs)
        if self.calls in self._fail_at:
            raise self._error
        return output


class Dropping(Regression):
    """Draws random numbers in its forward, so that a rerun shows whether they were rewound."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return super().forward(nn.functional.dropout(x, 0.5, self.training), y)


def breakable_trainer(
    monkeypatch: pytest.MonkeyPatch, error: Exception, events: Events | None = None, fail_at: int = 4
) -> Trainer:
    monkeypatch.setattr(torch, "compile", lambda model, **options: Breakable(model, {fail_at}, error))
    torch.manual_seed(0)
    return make_trainer(Dropping(), events=events, config=config_of(compile=True, data=ACCUMULATE_TWO))


def test_a_compiled_failure_reruns_the_update_eagerly_from_the_same_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed: "Any exception from a compiled forward disables compilation and reruns that batch eagerly"."""
    events = Events()
    ours = breakable_trainer(monkeypatch, RuntimeError("broken kernel"), events)
    torch.manual_seed(1)
    losses = [record["loss"] for record in ours.fit(4).metrics]
    assert [payload["status"] for payload in events.of("compile")] == ["enabled", "runtime_fallback"]
    torch.manual_seed(0)
    eager = make_trainer(Dropping(), config=config_of(data=ACCUMULATE_TWO))
    torch.manual_seed(1)
    assert losses == [record["loss"] for record in eager.fit(4).metrics]


class DrawingEverywhere(Regression):
    """Draws from all three generators in its forward."""

    def __init__(self, *, draws: bool = True) -> None:
        super().__init__()
        self.draws = draws

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scale = random.random() + np.random.random() if self.draws else 1.0
        return super().forward(nn.functional.dropout(x * scale, 0.5, self.training), y)


def test_a_failure_after_many_good_updates_rewinds_every_generator_that_the_model_draws_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = []
    for fail_at in (0, 12):  # never, and in the second micro batch of the sixth update
        monkeypatch.setattr(
            torch, "compile", lambda model, at=fail_at, **options: Breakable(model, {at}, RuntimeError("broken"))
        )
        torch.manual_seed(0)
        ours = make_trainer(DrawingEverywhere(), config=config_of(compile=True, data=ACCUMULATE_TWO))
        seed_everything(1)
        losses.append([record["loss"] for record in ours.fit(8).metrics])
    assert losses[0] == losses[1]


def test_generators_that_the_model_does_not_draw_from_are_read_in_the_first_updates_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: Breakable(model, set(), RuntimeError()))
    ours = make_trainer(DrawingEverywhere(draws=False), config=config_of(compile=True))
    ours.fit(4)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("NumPy's state was read")

    monkeypatch.setattr(np.random, "get_state", refuse)
    for _ in range(3):
        ours._compilation.states.keep()
        ours._compilation.states.note_success()


def test_the_eager_error_is_raised_when_the_rerun_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = breakable_trainer(monkeypatch, RuntimeError("compiled"), fail_at=1)

    class Broken(Regression):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            raise ValueError("the model's own mistake")

    ours.model = Broken()
    with pytest.raises(ValueError, match="own mistake"):
        ours.fit(1)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_never_swallowed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = breakable_trainer(monkeypatch, error)
    with pytest.raises(type(error)):
        ours.fit(4)


def test_a_batch_smaller_than_the_first_does_not_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Breakable] = []

    def fake_compile(model: nn.Module, **options: Any) -> Breakable:
        made.append(Breakable(model, set(), RuntimeError()))
        return made[0]

    monkeypatch.setattr(torch, "compile", fake_compile)
    x, y = regression_batches()[0]
    make_trainer(batches=[(x, y), (x[:2], y[:2])], config=config_of(compile=True)).fit(4)
    assert made[0].calls == 2


# ---------------------------------------------------------------- what is compiled, and how often


def tiny_model(layers: int = 3) -> ReferenceTransformer:
    torch.manual_seed(0)
    return ReferenceTransformer(vocab_size=11, max_seq_len=6, n_layer=layers, d_model=16, n_head=2, ngram_order=2)


def token_batches(*sizes: int) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    rows = [torch.randint(0, 11, (size, 7)) for size in sizes]
    return [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in rows]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many graphs were compiled. The compiler traces as it always does, and runs a graph without making code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("regional", [False, True])
def test_a_run_compiles_one_graph_also_with_a_short_last_batch_and_evaluations(
    graphs: Callable[[], int], regional: bool
) -> None:
    model = tiny_model()
    evaluated: list[float] = []

    def evaluate(model: nn.Module, should_stop: Any) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            evaluated.append(model(**token_batches(2)[0])["loss"].item())
        model.train()
        return {"loss": evaluated[-1]}

    config = config_of(compile=True, compile_options={"regional": regional}, eval={"every_steps": 2})
    events = Events()
    ours = make_trainer(model, token_batches(4, 4, 3), config=config, evaluator=evaluate, events=events)
    ours.fit(3)
    assert [payload["status"] for payload in events.of("compile")] == ["enabled"]
    assert graphs() == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        losses = [record["loss"] for record in ours.fit(8).metrics]
    assert evaluated
    assert not any("forward" in vars(module) for module in model.modules())
    eager = make_trainer(tiny_model(), token_batches(4, 4, 3))
    assert losses == pytest.approx([record["loss"] for record in eager.fit(8).metrics][3:], rel=1e-5)


def test_the_reference_model_is_one_graph_from_ids_to_the_loss(graphs: Callable[[], int]) -> None:
    torch.compile(tiny_model(), fullgraph=True)(**token_batches(4)[0])["loss"].backward()
    assert graphs() == 1


def test_blocks_are_found_by_name_and_else_by_their_class() -> None:
    model = tiny_model()
    assert repeated_blocks(model) == list(model.blocks)
    layer = partial(nn.TransformerEncoderLayer, 8, 2, 16)
    named_otherwise = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(900, 900), nn.Linear(900, 900)])})
    named_otherwise["layers"] = nn.Sequential(layer(), layer())
    assert repeated_blocks(named_otherwise) == list(named_otherwise["layers"].children())


def test_a_model_without_blocks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"Regression has no list .* named `blocks`, or leave it out"):
        make_trainer(config=config_of(compile=True, compile_options={"regional": True}))


def test_compiled_code_is_kept_in_the_cache_that_outlives_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "the user's own")
    assert keep_compiled_code() == "the user's own"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(torch, "compile", lambda model, **options: Breakable(model, set(), RuntimeError()))
    events = Events()
    make_trainer(config=config_of(compile=True), events=events)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "torch-compile")
    assert events.of("compile") == [{"status": "enabled", "cache": str(tmp_path / "torch-compile")}]
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "a file").touch()
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "a file"))
    assert keep_compiled_code() is None


@pytest.mark.slow
def test_a_really_compiled_model_trains_and_saves_plain_names() -> None:
    ours, eager = make_trainer(config=config_of(compile=True)), make_trainer()
    compiled_losses = [record["loss"] for record in ours.fit(4).metrics]
    assert compiled_losses == pytest.approx([record["loss"] for record in eager.fit(4).metrics], rel=1e-5)
    assert ours.state_dict()["model"].keys() == eager.state_dict()["model"].keys()


# ---------------------------------------------------------------- what compiled code returns


def test_compiled_code_returns_the_loss_alone_where_nothing_reads_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[Any] = []

    def recorded(code: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs.append(code(*args, **kwargs))
            return outputs[-1]

        return run

    monkeypatch.setattr(torch, "compile", recorded)
    for loss_fn, keys in ((None, {"loss"}), (lambda output, batch: output["loss"], {"loss", "logits"})):
        outputs.clear()
        make_trainer(tiny_model(), token_batches(2), config=config_of(compile=True), loss_fn=loss_fn).fit(1)
        assert [set(output) for output in outputs] == [keys]


def test_an_output_without_a_loss_is_returned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda code, **options: code)
    compiled = CompiledModel(tiny_model(), mode=None, dynamic=None, loss_alone=True)
    (batch,) = token_batches(2)
    assert compiled(batch["input_ids"])["logits"].shape == (2, 6, 11)
    plain = nn.Linear(3, 2)
    assert torch.is_tensor(CompiledModel(plain, mode=None, dynamic=None, loss_alone=True)(torch.ones(1, 3)))


@pytest.mark.slow
def test_the_backward_pass_of_compiled_code_gets_no_gradient_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backward: list[list[tuple[int, ...]]] = []

    def forward_compiler(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph)

    def backward_compiler(graph: Any, inputs: Any) -> Any:
        # What comes from outside are the tangents; all else was kept by the forward pass.
        tangents = [node for node in graph.graph.nodes if node.op == "placeholder" and "tangents" in node.name]
        backward.append([tuple(node.meta["val"].shape) for node in tangents])
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=forward_compiler, bw_compiler=backward_compiler)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    losses = []
    for loss_fn, tangents in ((None, [()]), (lambda output, batch: output["loss"], [(2, 6, 11), ()])):
        torch._dynamo.reset()
        backward.clear()
        events = Events()
        ours = make_trainer(
            tiny_model(), token_batches(2), config=config_of(compile=True), loss_fn=loss_fn, events=events
        )
        losses.append([record["loss"] for record in ours.fit(3).metrics])
        assert backward == [tangents]
        assert [payload["status"] for payload in events.of("compile")] == ["enabled"]
    assert losses[0] == losses[1]


def test_a_mode_that_records_graphs_is_refused_on_a_card_where_gradients_are_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    logger = MetricLogger(stream=Silence())
    model = tiny_model()
    for mode, device, passes, refused in (
        ("reduce-overhead", "cuda", 2, True),
        ("max-autotune", "cuda:1", 2, True),
        ("max-autotune-no-cudagraphs", "cuda", 2, False),
        (None, "cuda", 2, False),
        ("reduce-overhead", "cuda", 1, False),
        ("reduce-overhead", "cpu", 2, False),
    ):
        with case(mode, device, passes):
            config = config_of(compile=True, compile_options={"mode": mode})
            if not refused:
                Compilation(model, config, logger, torch.device(device), passes, None)
                continue
            with pytest.raises(ConfigError, match=rf"compile_options.mode: {mode} .* 2 backward .*no-cudagraphs"):
                Compilation(model, config, logger, torch.device(device), passes, None)
