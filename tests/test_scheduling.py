"""Out-of-order backprop: the gradients are the ordinary ones, in another order; and streams are used as CUDA asks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic import ReferenceTransformer, StageStreamScheduler
from speedtronic.scheduling import MOST_OUTSTANDING, SameStream, SideStreams


def scheduled(model: nn.Module, **options: Any) -> StageStreamScheduler:
    return StageStreamScheduler(model, "cpu", **{"lanes": SameStream(), "min_gain": None} | options)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Tanh(),
        nn.Linear(16, 16, bias=False),
        nn.LayerNorm(16),
        nn.Linear(16, 16),
        nn.Linear(16, 4),
    )


def gpt(**options: Any) -> ReferenceTransformer:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 19,
        "block_size": 12,
        "n_layer": 3,
        "n_head": 4,
        "n_kv_head": 2,
        "d_model": 32,
    }
    return ReferenceTransformer(**shape | options)


class Twice(nn.Module):
    """Calls one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.twice(torch.tanh(self.twice(self.first(x)))))
        return out


def gpt_loss(model: nn.Module, seed: int) -> Tensor:
    ids = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(ids, ids.roll(-1, 1))["loss"]
    return loss


def plain_loss(model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed))
    out: Tensor = model(x).square().mean()
    return out


def frozen_first_layer() -> nn.Sequential:
    model = perceptron()
    model[0].requires_grad_(False)
    return model


def recomputing() -> ReferenceTransformer:
    model = gpt()
    model.set_gradient_checkpointing(True)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "perceptron": (perceptron, plain_loss),
    "a frozen layer": (frozen_first_layer, plain_loss),
    "a layer called twice": (Twice, plain_loss),
    "reference model": (gpt, gpt_loss),
    "untied, n-grams, norms": (lambda: gpt(tie_weights=False, ngram_order=2, ngram_buckets=8, qk_norm=True), gpt_loss),
    "recomputed": (recomputing, gpt_loss),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_an_ordinary_backward_pass_bit_for_bit(case: str, autocast: bool) -> None:
    """Also accumulated over micro batches, and with bfloat16."""
    build, loss_of = CASES[case]
    grads: list[dict[str, Tensor]] = []
    for put_off in (False, True):
        model = build()
        scheduler = scheduled(model) if put_off else None
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = loss_of(model, seed)
            if scheduler is not None:
                scheduler.begin()
            loss.backward()  # type: ignore[no-untyped-call]
            if scheduler is not None:
                scheduler.finish()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        if autocast and name.startswith("twice"):
            # Ordinary autocast sums the two gradients in bfloat16. Here each becomes float32 first.
            torch.testing.assert_close(grads[1][name], grad, rtol=2e-2, atol=1e-3)
        else:
            assert torch.equal(grad, grads[1][name]), name


class Told(SameStream):
    """Says when work is put off and when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self._put = 0

    def put(self, lane: int, work: Callable[[], list[Tensor]], reads: Sequence[Tensor]) -> None:
        number = self._put
        self._put += 1
        self.order.append(f"put off {number}")

        def told() -> list[Tensor]:
            self.order.append(f"run {number}")
            return work()

        super().put(lane, told, reads)


def test_at_most_two_weight_gradients_are_put_off_at_a_time() -> None:
    model, lanes = perceptron(), Told()
    scheduler = scheduled(model, lanes=lanes)
    loss = plain_loss(model, 0)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert lanes.order == []
    scheduler.begin()
    loss.backward()  # type: ignore[no-untyped-call]
    assert MOST_OUTSTANDING == 2
    assert lanes.order == ["put off 0", "put off 1", "put off 2", "run 0", "put off 3", "run 1"]
    scheduler.finish()
    assert lanes.order[6:] == ["run 2", "run 3"]


def test_the_reference_model_puts_off_the_products_it_fuses_together() -> None:
    model, lanes = gpt(), Told()
    scheduler = scheduled(model, lanes=lanes)
    loss = gpt_loss(model, 0)
    scheduler.begin()
    loss.backward()  # type: ignore[no-untyped-call]
    scheduler.finish()
    assert sum(told.startswith("run") for told in lanes.order) == 3 * 4


def test_hooks_of_parameters_and_modules_run_as_ever() -> None:
    heard: list[dict[str, list[Any]]] = []
    for put_off in (False, True):
        model, told = perceptron(), dict[str, list[Any]]()
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda grad, name=name, told=told: told.setdefault(name, []).append(grad.clone()))  # type: ignore[misc]
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, told=told: told.setdefault(f"{name} after", []).append(p.grad.clone())  # type: ignore[misc]
            )
        model[2].register_full_backward_hook(
            lambda module, gave, took, told=told: told.setdefault("module", []).append(took[0].clone())  # type: ignore[misc]
        )
        scheduler = scheduled(model) if put_off else None
        loss = plain_loss(model, 0)
        if scheduler is not None:
            scheduler.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        if scheduler is not None:
            scheduler.finish()
        heard.append(told)
    assert heard[0].keys() == heard[1].keys()
    for name, tensors in heard[0].items():
        assert len(tensors) == len(heard[1][name]) == 1
        assert torch.equal(tensors[0], heard[1][name][0]), name


def test_other_backward_passes_are_ordinary_ones() -> None:
    """Of a loss that differentiates by itself, twice, or through transforms of functions."""
    model, plain = perceptron(), perceptron()
    scheduler = scheduled(model)
    for made in (model, plain):
        loss = plain_loss(made, 0)
        first = torch.autograd.grad(loss, list(made.parameters()), create_graph=True)
        penalty = loss + sum(grad.square().sum() for grad in first)
        if made is model:
            scheduler.begin()
        penalty.backward()  # type: ignore[no-untyped-call, union-attr]
        if made is model:
            scheduler.finish()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)

    def functional(module: nn.Module) -> tuple[Tensor, ...]:
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        x = torch.ones(2, 6)
        grads = torch.func.grad(lambda values: torch.func.functional_call(module, values, (x,)).sum())(parameters)
        return tuple(grads.values())

    for mine, theirs in zip(functional(model), functional(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_after_dispose_a_model_is_as_it_was() -> None:
    model = gpt()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    scheduler = scheduled(model)
    assert scheduler.enabled
    assert len(scheduler.stages) == 3 * 7  # the head shares its weight with the embedding
    assert [stage.stream for stage in scheduler.stages[:5]] == [0, 1, 2, 3, 0]
    scheduler.dispose()
    scheduler.dispose()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert not scheduler.enabled
    scheduler.begin()
    scheduler.finish()


def test_a_copy_of_a_model_is_not_scheduled() -> None:
    model = perceptron()
    scheduled(model)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 6)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        twin[0].weight.zero_()
    assert not torch.equal(twin(x), model(x))
    assert twin[0].forward.__self__ is twin[0]


def test_it_is_off_with_a_reason() -> None:
    def reason(model: nn.Module, device: str = "cpu", **options: Any) -> str:
        scheduler = StageStreamScheduler(model, device, **options)
        assert not scheduler.enabled
        assert scheduler.as_dict()["reason"] == scheduler.reason
        scheduler.begin()
        scheduler.finish()
        return scheduler.reason

    assert reason(perceptron()) == "out-of-order backprop needs CUDA, and this run is on cpu"
    assert "mps" in reason(perceptron(), "mps")
    assert "2 plain linear layers that are trained, and the model has 1" in reason(nn.Linear(2, 2), lanes=SameStream())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own, on its first import of a compiler
        compiled, regional = torch.compile(perceptron()), perceptron()
        regional[0].compile()
    assert "compiled" in reason(perceptron(), lanes=SameStream(), compiled=True)
    assert "compiled" in reason(compiled, lanes=SameStream())
    assert "compiled" in reason(regional, lanes=SameStream())
    with pytest.raises(ValueError, match="num_streams must be at least 1"):
        StageStreamScheduler(perceptron(), "cpu", num_streams=0)


class Clocked(Told):
    """A pass that puts work off takes `seconds_put_off`, another one 1 second."""

    def __init__(self, seconds_put_off: float) -> None:
        super().__init__()
        self._seconds = seconds_put_off

    def mark(self) -> Any:
        return len(self.order)

    def seconds(self, start: int, end: int) -> float:
        return 1.0 if start == end else self._seconds


class Events:
    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, payload: dict[str, Any]) -> None:
        self.heard.append((event, payload))


@pytest.mark.parametrize(("seconds", "stays"), [(0.9, True), (0.99, False), (1.2, False)])
def test_a_scheduler_that_gains_too_little_ends_itself(seconds: float, stays: bool) -> None:
    model, events = perceptron(), Events()
    scheduler = scheduled(model, lanes=Clocked(seconds), min_gain=0.03, logger=events)
    for _ in range(30):
        loss = plain_loss(model, 0)
        scheduler.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        scheduler.finish()
    assert scheduler.enabled is stays
    assert scheduler.gain == pytest.approx(1 / seconds - 1)
    assert [event for event, _ in events.heard] == ["ooo_backprop", "ooo_backprop"]
    assert events.heard[0][1]["enabled"] is True
    assert events.heard[1][1]["enabled"] is stays
    assert stays or "less than 3%" in events.heard[1][1]["reason"]
    assert any("forward" in layer.__dict__ for layer in model) is stays


class Cuda:
    """What is asked of streams and events, in order; stands in for `torch.cuda`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "main"

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", self.stream)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(self, self.current))
        patch.setattr(torch.cuda, "stream", self.using)
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.calls.append(f"keep for {stream.name}"))
        self._made = 0

    def stream(self, device: Any) -> Stream:
        self._made += 1
        return Stream(self, f"side {self._made - 1}")

    def using(self, stream: Stream) -> Any:
        cuda = self

        class Using:
            def __enter__(self) -> None:
                cuda.current = stream.name

            def __exit__(self, *error: object) -> None:
                cuda.current = "main"

        return Using()


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def record_event(self) -> str:
        self.cuda.calls.append(f"record on {self.name}")
        return self.name

    def wait_event(self, event: str) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event}")


def test_a_side_stream_waits_for_what_it_reads_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    cuda.install(monkeypatch)
    streams = SideStreams(torch.device("cuda"), 2)

    def work(name: str) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            cuda.calls.append(f"{name} on {cuda.current}")
            return [torch.zeros(1)]

        return run

    def calls() -> Sequence[str]:
        taken, cuda.calls = cuda.calls, []
        return taken

    put = [
        "record on main",
        "side 0 waits for main",
        "a on side 0",
        "keep for side 0",
        "keep for side 0",
        "record on side 0",
    ]
    streams.put(0, work("a"), (torch.zeros(1), torch.zeros(1)))
    assert calls() == put
    streams.put(1, work("b"), ())
    calls()
    streams.put(0, work("c"), ())  # a third: the first must be done before the backward pass goes on
    assert calls()[-1] == "main waits for side 0"
    streams.join()
    assert calls() == ["main waits for side 1", "main waits for side 0", *["keep for main"] * 3]
    streams.join()
    assert calls() == []
