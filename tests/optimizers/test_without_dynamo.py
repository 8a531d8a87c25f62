from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from speedtronic.optimizers.without_dynamo import AdamW

RUN = """\
import sys
from speedtronic import train_from_config

train_from_config({
    "run": {"max_steps": 1, "device": "cpu", "output_dir": sys.argv[1]},
    "model": {"vocab_size": 16, "max_seq_len": 8, "n_layer": 1, "n_head": 2, "d_model": 8},
    "optimizer": {"name": sys.argv[2], "cautious": sys.argv[3] == "cautious"},
    "logging": {"level": "ERROR"},
}, resume=True)
unused = {"torch._dynamo", "sympy", "speedtronic.distributed", "fsspec", "pyarrow", "datasets", "transformers", "rich"}
assert not unused & sys.modules.keys(), unused & sys.modules.keys()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_does_not_import_the_compiler_or_what_else_it_does_not_use(name: str, tmp_path: Path) -> None:
    for form in ("plain", "cautious"):
        for _ in range(2):  # the second one resumes, and so loads an optimizer's state
            subprocess.run([sys.executable, "-c", RUN, str(tmp_path / form), name, form], check=True)


def trained(kind: Callable[..., torch.optim.Optimizer], steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = kind(model.parameters(), lr=0.1)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = model(torch.ones(2, 3)).square().sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)
    return model, optimizer


def test_its_adamw_is_torchs_bit_for_bit_in_steps_and_state() -> None:
    (model, own), (twin, torchs) = trained(AdamW, 5), trained(torch.optim.AdamW, 5)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert own.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]
    own.load_state_dict(torchs.state_dict())
    torchs.load_state_dict(own.state_dict())


def test_its_adamw_calls_the_hooks_of_a_step_and_counts_for_a_scheduler() -> None:
    _, optimizer = trained(AdamW, 0)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    optimizer.step()
    scheduler.step()  # warns, and so fails here, where it sees no step before its own
    assert called == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.05
