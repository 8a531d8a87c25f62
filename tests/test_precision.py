from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from speedtronic.config import PrecisionConfig
from speedtronic.errors import ConfigError, DeviceError, NotBuiltError
from speedtronic.precision import (
    PrecisionPlan,
    autocast_context,
    copies_in_background,
    make_grad_scaler,
    resolve_device,
    resolve_precision,
    supports_fused_adamw,
    use_device,
)
from tests.support.cases import case
from tests.support.cuda import RecordedCuda

FP32 = PrecisionPlan("fp32", torch.float32, False, False, "cpu")


class Machine:
    """Makes torch report another machine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.has()

    def has(self, *, gpus: int = 0, bf16: bool = False, mps: bool = False, macos_14: bool = False) -> None:
        def bf16_supported(including_emulation: bool = True) -> bool:
            return bf16 or including_emulation

        self._patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        self._patch.setattr(torch.cuda, "device_count", lambda: gpus)
        self._patch.setattr(torch.cuda, "is_bf16_supported", bf16_supported)
        self._patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        self._patch.setattr(torch.backends.mps, "is_available", lambda: mps)
        self._patch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: macos_14)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_auto_takes_cuda_then_mps_then_the_cpu(machine: Machine) -> None:
    for parts, device in (
        ({"gpus": 1, "mps": True}, "cuda"),
        ({"gpus": 4}, "cuda:0"),
        ({"mps": True}, "mps"),
        ({}, "cpu"),
    ):
        for requested in ("auto", None):
            with case(parts, device, requested):
                machine.has(**parts)
                assert resolve_device(requested) == torch.device(device)


def test_an_explicit_device_is_kept(machine: Machine) -> None:
    machine.has(gpus=2, mps=True)
    for name in ("cpu", "cuda", "cuda:1", "mps"):
        assert resolve_device(name) == torch.device(name)
    assert resolve_device(torch.device("cuda", 1)) == torch.device("cuda:1")


def test_a_missing_device_is_a_runtime_error_that_names_the_available_ones(machine: Machine) -> None:
    for requested in ("cuda", "cuda:0", "mps", torch.device("cuda"), "xpu", "meta"):
        with case(requested):
            with pytest.raises(DeviceError, match=rf"{str(requested)!r} is not available.*: cpu$") as caught:
                resolve_device(requested)
            assert isinstance(caught.value, RuntimeError)


def test_an_index_beyond_the_last_gpu_is_refused_and_the_error_names_the_gpus(machine: Machine) -> None:
    machine.has(gpus=2)
    with pytest.raises(DeviceError, match="'cuda:7'.*cuda:0, cuda:1, cpu"):
        resolve_device("cuda:7")


def test_an_unknown_device_name_is_refused_and_the_error_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="'gpu'.*auto, cpu, cuda, cuda:<index> or mps"):
        resolve_device("gpu")


def test_auto_precision_follows_the_device(machine: Machine) -> None:
    for config in ("auto", PrecisionConfig()):
        for device, bf16, plan in (
            ("cuda", True, PrecisionPlan("bf16", torch.bfloat16, False, True, "cuda")),
            ("cuda:1", False, PrecisionPlan("fp16", torch.float16, True, True, "cuda")),
            ("mps", False, PrecisionPlan("fp32", torch.float32, False, False, "mps")),
            ("cpu", False, FP32),
        ):
            with case(config, device, bf16, plan):
                machine.has(gpus=2, bf16=bf16, mps=True, macos_14=True)
                assert resolve_precision(config, torch.device(device)) == plan


def test_an_explicit_mode_that_the_device_can_run_is_kept(machine: Machine) -> None:
    for mode, device, parts in (
        ("fp32", "cuda", {"gpus": 1, "bf16": True}),
        ("fp16", "cuda", {"gpus": 1}),
        ("bf16", "cuda", {"gpus": 1, "bf16": True}),
        ("bf16", "mps", {"mps": True, "macos_14": True}),
        ("bf16", "cpu", {}),
        ("fp32", "cpu", {}),
    ):
        with case(mode, device, parts):
            machine.has(**parts)
            plan = resolve_precision(mode, device)
            assert (plan.mode, plan.device_type) == (mode, device)
            assert plan.use_scaler == (mode == "fp16")
            assert plan.autocast_enabled == (mode != "fp32")


def test_a_mode_that_the_device_cannot_run_becomes_fp32_with_a_warning(machine: Machine) -> None:
    for mode, device, parts in (
        ("bf16", "cuda", {"gpus": 1, "bf16": False}),
        ("fp16", "cpu", {}),
        ("fp16", "mps", {"mps": True, "macos_14": True}),
        ("bf16", "mps", {"mps": True, "macos_14": False}),
    ):
        with case(mode, device, parts):
            machine.has(**parts)
            with pytest.warns(UserWarning, match=f"{mode} cannot run on {device}"):
                plan = resolve_precision(mode, device)
            assert plan == dataclasses.replace(FP32, device_type=device)


def test_the_card_that_trains_is_asked_for_bf16_and_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordedCuda(monkeypatch, bf16={1})
    assert [resolve_precision("auto", device).mode for device in ("cuda:1", "cuda:0", "cuda")] == [
        "bf16",
        "fp16",
        "fp16",
    ]
    assert cuda.current == 0, "asking changes nothing"


def test_a_card_with_a_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordedCuda(monkeypatch)
    for name in ("cuda:1", "cuda", "cpu", "mps"):
        use_device(torch.device(name))
    assert (cuda.calls, cuda.current) == ([("set_device", 1)], 1)


@pytest.fixture
def products_as_they_were() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("products_as_they_were")
@pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning")  # torch 2.9
def test_tf32_is_set_for_products_and_convolutions_on_cuda_and_left_alone_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RecordedCuda(monkeypatch)

    def settings() -> tuple[str, bool, str]:
        matmul = torch.backends.cuda.matmul.fp32_precision
        return matmul, torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()

    before = settings()
    for device, tf32, expected in (
        ("cpu", True, before),
        ("cuda", None, before),
        ("cuda", True, ("tf32", True, "high")),
        ("cuda:1", None, ("tf32", True, "high")),
        ("cuda:1", False, ("ieee", False, "highest")),
    ):
        with case(device, tf32):
            use_device(torch.device(device), tf32)
            assert settings() == expected


def test_a_copy_goes_on_in_the_background_from_the_host_alone_and_never_to_mps() -> None:
    here, elsewhere = torch.ones(1), torch.ones(1, device="meta")
    for device, may in (("cuda", True), ("cuda:1", True), ("cpu", True), ("mps", False)):
        with case(device):
            assert copies_in_background(here, torch.device(device)) is may
            assert copies_in_background(elsewhere, torch.device(device)) is False


def test_the_dtype_names_the_autocast_dtype_when_the_mode_is_auto() -> None:
    assert resolve_precision(PrecisionConfig(dtype="bfloat16"), "cpu").mode == "bf16"
    assert resolve_precision(PrecisionConfig(dtype="float32"), "cpu") == FP32


def test_fp8_is_not_built_yet() -> None:
    with pytest.raises(NotBuiltError, match="fp8"):
        resolve_precision("fp8", "cpu")


def test_an_unknown_mode_is_refused_and_the_error_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'half' is not one of auto, bf16, fp16, fp32"):
        resolve_precision("half", "cpu")


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP32.mode = "bf16"  # type: ignore[misc]


def test_autocast_is_on_only_for_half_precision() -> None:
    weight = torch.ones(2, 2)
    with autocast_context(resolve_precision("bf16", "cpu")):
        assert (weight @ weight).dtype == torch.bfloat16
    with autocast_context(FP32):
        assert (weight @ weight).dtype == torch.float32


def test_the_scaler_is_active_only_in_fp16() -> None:
    assert not make_grad_scaler(FP32).is_enabled()
    scaler = make_grad_scaler(PrecisionPlan("fp16", torch.float16, True, True, "cpu"))
    assert scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == scaler.get_scale() > 1.0


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_fused_adamw_is_probed_only_on_cuda(device: str) -> None:
    """Seed: "When optimizer.fused is null, supports_fused_adamw(device) probes CUDA"."""
    assert supports_fused_adamw(device) is False


@pytest.mark.parametrize("error", [TypeError, RuntimeError, ValueError, None])
def test_the_probe_builds_a_fused_optimizer_on_the_device(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None
) -> None:
    asked: list[Any] = []

    def zeros(size: int, *, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return torch.ones(size)

    def adamw(parameters: list[torch.nn.Parameter], *, fused: bool) -> None:
        asked.append(fused)
        if error is not None:
            raise error("no fused kernel")

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    assert supports_fused_adamw("cuda:1") is (error is None)
    assert asked == [torch.device("cuda:1"), True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_has_fused_adamw() -> None:
    assert supports_fused_adamw("cuda")
