"""Out-of-order backprop: weight gradients of linear layers are put off, and run beside the rest of the backward pass.

The backward pass of a linear layer has two products. The layers below wait for the gradient of the input. Nobody waits
for the gradient of the weight before the update. So the first product runs at once, and the second goes to a side
stream, where it fills what the small kernels of the next layers leave idle.

Source: Oh et al., "Out-of-Order BackProp: An Effective Scheduling Technique for Deep Learning", EuroSys 2022.
"""

from __future__ import annotations

import copy
import statistics
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_OUTSTANDING = 2
"""Weight gradients that may be put off at a time. Each keeps its layer's input and output gradient alive."""

_IGNORED, _MEASURED = 6, 20  # backward passes before the gain is measured, and those that it is measured on
_MIN_STAGES = 2  # with a single layer there is nothing to overlap with


@dataclass(frozen=True)
class StageInfo:
    """A layer whose weight gradient is put off.

    Attributes:
        name: of the module in the model.
        parameters: how many numbers its weight and bias have.
        stream: the side stream that its weight gradient runs on.
    """

    name: str
    parameters: int
    stream: int


class EventLogger(Protocol):
    """The part of `MetricLogger` that is used here."""

    def emit(self, event: str, payload: dict[str, Any]) -> object: ...


class Lanes(Protocol):
    """Where put-off work runs."""

    def put(self, lane: int, work: Callable[[], list[Tensor]], reads: Sequence[Tensor]) -> None:
        """Run `work` later or elsewhere, after all that was queued so far. It reads `reads` and returns its results."""

    def join(self) -> None:
        """Let whatever is queued from now on see the results."""

    def mark(self) -> Any:
        """A point in time, after all that was queued so far."""

    def seconds(self, start: Any, end: Any) -> float | None:
        """The time between two marks; None while it is not known."""


class SameStream:
    """Put-off work runs on the stream of the backward pass, two layers later: the order without the overlap.

    It shows on any device that the order changes no gradient, and in a benchmark what the order alone costs.
    """

    def __init__(self) -> None:
        self._put_off: deque[Callable[[], list[Tensor]]] = deque()

    def put(self, lane: int, work: Callable[[], list[Tensor]], reads: Sequence[Tensor]) -> None:
        self._put_off.append(work)
        while len(self._put_off) > MOST_OUTSTANDING:
            self._put_off.popleft()()

    def join(self) -> None:
        while self._put_off:
            self._put_off.popleft()()

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float | None:
        return end - start


class SideStreams:
    """Put-off work runs on CUDA streams of its own.

    Args:
        device: a CUDA device.
        count: how many streams.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._running: deque[torch.cuda.Event] = deque()
        self._results: list[Tensor] = []

    def put(self, lane: int, work: Callable[[], list[Tensor]], reads: Sequence[Tensor]) -> None:
        main, side = torch.cuda.current_stream(self._device), self._streams[lane]
        side.wait_event(main.record_event())
        with torch.cuda.stream(side):
            self._results += work()
        for tensor in reads:  # their memory may be given away only when the side stream is done with them
            tensor.record_stream(side)
        self._running.append(side.record_event())
        if len(self._running) > MOST_OUTSTANDING:
            main.wait_event(self._running.popleft())

    def join(self) -> None:
        main = torch.cuda.current_stream(self._device)
        while self._running:
            main.wait_event(self._running.popleft())
        for tensor in self._results:  # made on a side stream, and from now on used on this one
            tensor.record_stream(main)
        self._results.clear()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return start.elapsed_time(end) / 1000 if end.query() else None  # type: ignore[no-untyped-call]


class StageStreamScheduler:
    """Puts off the weight gradients of a model's linear layers, from its construction to `dispose`.

    Call `begin` just before a backward pass whose gradients accumulate in `.grad`, and `finish` just after it. The
    gradients are then those of an ordinary backward pass. Any other backward pass is an ordinary one. A layer that
    shares its weight, is called several times in a pass, or has hooks on its parameters is left to autograd.

    The first passes are measured, every other one without putting anything off. Where the gain is below `min_gain`, the
    scheduler ends itself.

    Args:
        model: the module that is trained.
        device: where it is.
        num_streams: side streams, 1 or more.
        logger: receives the event `ooo_backprop` with `as_dict()`, at the start and when the scheduler ends itself.
        lanes: where put-off work runs; `SideStreams` of the device by default.
        min_gain: smallest gain of a backward pass that is worth it; None measures nothing.
        compiled: whether the model runs as compiled code, which a model that is given itself may not show.

    Attributes:
        enabled: whether weight gradients are put off.
        reason: why not, or "".
        stages: the layers, in the order of `model.named_modules()`.
        gain: what was measured: 0.05 where ordinary passes take 5% longer; None until it is known.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        *,
        num_streams: int = 4,
        logger: EventLogger | None = None,
        lanes: Lanes | None = None,
        min_gain: float | None = 0.03,
        compiled: bool = False,
    ) -> None:
        if num_streams < 1:
            raise ValueError(f"num_streams must be at least 1, not {num_streams}")
        self.device = torch.device(device)
        self.num_streams = num_streams
        self.stages: list[StageInfo] = []
        self.gain: float | None = None
        self._logger = logger
        self._layers: list[_Layer] = []
        self._min_gain = min_gain
        self._passes = 0
        self._start: Any = None
        self._times: list[tuple[bool, Any, Any]] = []  # (put off, start, end) of each measured pass
        self.deferring = False

        layers = _layers_of(model)
        self.reason = self._obstacle(model, len(layers), lanes, compiled)
        self.enabled = not self.reason
        if self.enabled:
            self.lanes = lanes if lanes is not None else SideStreams(self.device, num_streams)
            for number, (name, module) in enumerate(layers):
                size = sum(parameter.numel() for parameter in module.parameters())
                self.stages.append(StageInfo(name, size, number % num_streams))
                self._layers.append(_Layer(module, self, number % num_streams))
        self._tell()

    def _obstacle(self, model: nn.Module, layers: int, lanes: Lanes | None, compiled: bool) -> str:
        if lanes is None and self.device.type != "cuda":
            return f"out-of-order backprop needs CUDA, and this run is on {self.device.type}"
        # `torch.compile(module)` wraps a module; `module.compile()` changes how it is called.
        if compiled or any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
            return "the model is compiled, and the compiler orders the backward pass"
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return "gradients are reduced between ranks while the backward pass runs"
        if layers < _MIN_STAGES:
            return f"it needs {_MIN_STAGES} plain linear layers that are trained, and the model has {layers}"
        return ""

    def begin(self) -> None:
        """From now on, backward passes put off weight gradients."""
        if not self.enabled:
            return
        if self._min_gain is not None and self._passes < _IGNORED + _MEASURED:
            self.deferring = self._passes % 2 == 0
            self._start = self.lanes.mark()
        else:
            self.deferring = True

    def finish(self) -> None:
        """Put nothing off any more; whatever is queued from now on sees all gradients."""
        if not self.enabled:
            return
        self.lanes.join()
        for layer in self._layers:
            layer.uses = 0
        if self._start is not None:
            if self._passes >= _IGNORED:
                self._times.append((self.deferring, self._start, self.lanes.mark()))
            self._start = None
            self._passes += 1
        self.deferring = False
        if self._passes >= _IGNORED + _MEASURED and self._times:
            self._judge()

    def _judge(self) -> None:
        """Compare the measured passes, once the device is through with them. The host does not wait for it."""
        if self.lanes.seconds(*self._times[-1][1:]) is None:
            return
        took: dict[bool, list[float]] = {True: [], False: []}
        for put_off, start, end in self._times:
            took[put_off].append(cast(float, self.lanes.seconds(start, end)))
        self._times.clear()
        self.gain = statistics.median(took[False]) / statistics.median(took[True]) - 1
        if self._min_gain is not None and self.gain < self._min_gain:
            self.dispose()
            self.reason = f"measured gain {self.gain:.1%} of a backward pass, less than {self._min_gain:.0%}"
        self._tell()

    def dispose(self) -> None:
        """Give every layer its own forward again. The scheduler does nothing from now on."""
        for layer in self._layers:
            del layer.module.forward
        self._layers.clear()
        if self.enabled:
            self.enabled, self.reason = False, "disposed"

    def as_dict(self) -> dict[str, Any]:
        """What the event `ooo_backprop` says."""
        return {
            "enabled": self.enabled,
            "reason": self.reason,
            "device": str(self.device),
            "num_streams": self.num_streams,
            "stages": len(self.stages),
            "gain": self.gain,
        }

    def _tell(self) -> None:
        if self._logger is not None:
            self._logger.emit("ooo_backprop", self.as_dict())


def product(x: Tensor, modules: Sequence[nn.Module]) -> Tensor | None:
    """`x` times the weights of several linear layers side by side, if a scheduler has them all; else None."""
    layers = [module.__dict__.get("forward") for module in modules]
    if not all(isinstance(layer, _Layer) for layer in layers):
        return None
    return _product(x, cast("list[_Layer]", layers), None)


class _Layer:
    """Stands in for the forward of one linear layer."""

    def __init__(self, module: nn.Linear, scheduler: StageStreamScheduler, lane: int) -> None:
        self.module, self.scheduler, self.lane = module, scheduler, lane
        self.uses = 0  # calls since the last backward pass
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Linear.forward gives it
        return _product(input, [self], self.module.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copy of a model is not scheduled: its layer has the forward of its class."""
        return types.MethodType(nn.Linear.forward, copy.deepcopy(self.module, memo))


def _layers_of(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The layers that can put off their weight gradients: plain, trained, and the only ones with their parameters."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and all(
            type(parameter) is nn.Parameter and parameter.requires_grad and owners[id(parameter)] == 1
            for parameter in module.parameters()
        )
        and isinstance(module._parameters.get("weight"), nn.Parameter)
    ]


def _product(x: Tensor, layers: list[_Layer], bias: Tensor | None) -> Tensor:
    weights = [layer.module.weight for layer in layers]
    parameters = weights if bias is None else [*weights, bias]
    ordinary = (
        not torch.is_grad_enabled()
        or not all(parameter.requires_grad for parameter in parameters)
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )
    if ordinary:
        return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights), bias)
    for layer in layers:
        layer.uses += 1
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out: Tensor = _PutOffProduct.apply(x, layers, bias, *weights)  # type: ignore[no-untyped-call]
    return out


class _PutOffProduct(torch.autograd.Function):
    """`F.linear` whose backward pass may put off the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[_Layer], bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.layers = layers
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, *weights, *([] if bias is None else [bias]))
        return F.linear(x, _joined(weights, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, *parameters = ctx.saved_tensors
        weights = parameters[:-1] if ctx.has_bias else parameters
        layers: list[_Layer] = ctx.layers

        # Over all leading dimensions at once: N rows, (N, in) and (N, out).
        rows, grad_rows = x.reshape(-1, x.size(-1)), grad.reshape(-1, grad.size(-1))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_rows @ _joined(weights, grad.dtype)).view(x.shape)

        def grads_of_parameters() -> list[Tensor]:
            whole = (grad_rows.t() @ rows).to(weights[0].dtype)
            ends = list(accumulate(weight.size(0) for weight in weights))
            parts = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            return [*parts, grad_rows.sum(0).to(parameters[-1].dtype)] if ctx.has_bias else parts

        scheduler = layers[0].scheduler
        if (
            not scheduler.deferring
            or torch.is_grad_enabled()  # these gradients will be differentiated again
            or any(layer.uses > 1 for layer in layers)  # one sum rounds otherwise than two additions to `.grad`
            or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)  # autograd calls them
        ):
            results = grads_of_parameters()
            bias_grad = results.pop() if ctx.has_bias else None
            return grad_x, None, bias_grad, *results

        def work() -> list[Tensor]:
            results = grads_of_parameters()
            for parameter, result in zip(parameters, results, strict=True):
                if parameter.grad is None:
                    parameter.grad = result
                else:
                    parameter.grad += result
            return [cast(Tensor, parameter.grad) for parameter in parameters]

        scheduler.lanes.put(layers[0].lane, work, (rows, grad_rows))
        return grad_x, None, None, *[None] * len(weights)


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (weights[0] if len(weights) == 1 else torch.cat(list(weights))).to(dtype)
