"""What is known of a device: its peak by its whole name, and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedtronic import ReferenceTransformer
from speedtronic.trainer import throughput
from speedtronic.trainer.throughput import (
    PEAK_FLOPS,
    DeviceMeter,
    card_name,
    device_peak_flops,
    flop_utilisation,
    training_flops_per_token,
)
from tests.support.cases import case

CUDA = torch.device("cuda")

# What drivers call cards, and the dense rate in TFLOP/s of 16-bit products that add in fp32.
CARDS = {
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GH200 144G HBM3e": 989.4,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "A100-PCIE-40GB": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165,
    "NVIDIA A10": 125,
    "NVIDIA L40S": 362.05,
    "NVIDIA L40": 181.05,
    "NVIDIA L4": 121,
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100-SXM2-32GB": 125,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla T4": 65,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 5080": 112.6,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 3090 Ti": 80,
    "NVIDIA GeForce RTX 3090": 71,
    "AMD Instinct MI300X": 1307.4,
    # Names that begin or end as a known one does, and are other cards, or parts of one.
    "NVIDIA RTX A1000": None,
    "NVIDIA RTX A4000": None,
    "NVIDIA T400 4GB": None,
    "NVIDIA A10G": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA RTX 4000 Ada Generation": None,
    "Quadro RTX 6000": None,
    "NVIDIA H100 PCIe 2": None,
}


def test_a_card_has_the_peak_of_its_whole_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in CARDS.items():
        with case(name):
            monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
            for dtype in (torch.bfloat16, torch.float16):
                assert device_peak_flops(CUDA, dtype) == (None if peak is None else pytest.approx(peak * 1e12))
    assert {card_name(name) for name, peak in CARDS.items() if peak is not None} == PEAK_FLOPS.keys()


def test_a_peak_is_of_16_bits_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_peak_flops(CUDA, torch.float32) is None
    for device in ("cpu", "mps"):
        assert device_peak_flops(torch.device(device), torch.bfloat16) is None


def test_utilisation_is_the_rate_of_flops_over_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    model = ReferenceTransformer(vocab_size=11, block_size=6, n_layer=1, n_head=2, d_model=8)
    utilisation = flop_utilisation(model, CUDA, torch.bfloat16, 6)
    assert utilisation is not None
    assert utilisation(1e9) == pytest.approx(1e9 * training_flops_per_token(model, 6) / 989.4e12)
    of_two = flop_utilisation(model, CUDA, torch.bfloat16, 6, 2)
    assert of_two is not None
    assert utilisation is not None
    assert of_two(100.0) == pytest.approx(utilisation(100.0) / 2)
    assert flop_utilisation(model, CUDA, torch.bfloat16, None) is None
    assert training_flops_per_token(nn.Linear(3, 5), 6) == 6 * 20


class Card:
    """Stands in for what torch asks of a card, and counts the questions."""

    def __init__(self, patch: pytest.MonkeyPatch, *, library: bool, failure: Exception | None = None) -> None:
        self.asked: list[str] = []
        for question, answer in (("max_memory_allocated", 7), ("max_memory_reserved", 9), ("utilization", 55)):
            patch.setattr(torch.cuda, question, lambda device, q=question, a=answer: self._answer(q, a))
        patch.setattr(throughput, "find_spec", lambda name: name if library and name == "pynvml" else None)
        self._failure = failure

    def _answer(self, question: str, answer: int) -> int:
        self.asked.append(question)
        if question == "utilization" and self._failure is not None:
            raise self._failure
        return answer


def meter(patch: pytest.MonkeyPatch, **options: Any) -> tuple[DeviceMeter, Card, list[str]]:
    card, warnings = Card(patch, **options), list[str]()
    return DeviceMeter(CUDA, warnings.append), card, warnings


def test_a_card_says_what_is_in_tensors_what_is_reserved_and_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found, card, warnings = meter(monkeypatch, library=True)
    assert found.figures == {"peak_memory_bytes": 7, "peak_reserved_bytes": 9, "gpu_busy_percent": 55}
    card.asked.clear()
    assert found.figures["peak_memory_bytes"] == 7
    assert (card.asked, warnings) == ([], []), "what was read is kept until the next read"


def test_without_the_extra_a_card_is_not_asked_how_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found, card, warnings = meter(monkeypatch, library=False)
    assert found.figures == {"peak_memory_bytes": 7, "peak_reserved_bytes": 9}
    assert "utilization" not in card.asked
    assert warnings == []


def test_a_card_that_cannot_say_how_busy_it_is_costs_a_warning_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found, card, warnings = meter(monkeypatch, library=True, failure=RuntimeError("no driver"))
    assert "gpu_busy_percent" not in found.figures
    assert len(warnings) == 1
    assert "no driver" in warnings[0]
    card.asked.clear()
    found.read()
    assert "utilization" not in card.asked


def test_the_cpu_has_the_memory_of_its_process() -> None:
    figures = DeviceMeter(torch.device("cpu"), pytest.fail).figures
    assert figures.keys() == {"peak_memory_bytes"}
    assert figures["peak_memory_bytes"] is None or figures["peak_memory_bytes"] > 2**20
