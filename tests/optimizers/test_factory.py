"""Optimizers from a configuration: ownership, weight decay, the fused kernel and its fallback, every option set."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError, SpeedtronicWarning
from speedtronic.model import ReferenceTransformer
from speedtronic.optimizers import factory, hybrid
from speedtronic.optimizers.adamw import CautiousAdamW
from speedtronic.optimizers.cautious import CautiousOptimizer
from speedtronic.optimizers.factory import (
    build_adamw,
    build_hybrid,
    hybrid_groups,
    parameter_groups,
    runs_fused_adamw,
)
from speedtronic.precision import PrecisionPlan
from speedtronic.runtime import build_optimizer
from speedtronic.trainer import Trainer
from speedtronic.trainer.nonfinite import NonFiniteGuard
from tests.support.cases import case
from tests.support.foreign import tiny_model
from tests.support.models import make_trainer

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


class ConvolutionalNet(nn.Module):
    """Images (B, 1, 6, 6) to scores (B, 3), with a norm, two tied hidden layers, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(64, 5)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.norm(self.convolution(x)).relu().flatten(1)).tanh()
        out: Tensor = self.head(self.frozen(self.second(self.first(hidden).tanh())) + hidden)
        return out


def section(**keys: object) -> Any:
    return SpeedtronicConfig.from_dict({"optimizer": keys}).optimizer


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Block()
    decayed, plain = parameter_groups(model, weight_decay=0.1, decay_1d=False)
    assert decayed["param_names"] == ["embedding.weight", "linear.weight"]
    assert names_of(model, decayed) == {"embedding.weight", "linear.weight"}
    assert names_of(model, plain) == {"linear.bias", "norm.weight", "norm.bias"}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_decay_1d_decays_everything() -> None:
    groups = parameter_groups(Block(), weight_decay=0.1, decay_1d=True)
    assert [len(group["params"]) for group in groups] == [2, 3]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1]


def test_a_tied_parameter_belongs_to_one_group_once_and_a_frozen_one_to_none() -> None:
    model = Block()
    optimizer = build_adamw(model, section(), CPU)
    owned = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(owned) == len(set(owned)) == 5
    assert id(model.frozen.weight) not in owned


def test_a_trainable_parameter_that_no_group_owns_is_named() -> None:
    model = Block()
    with pytest.raises(ConfigError, match=r"no group: linear\.bias, norm\.weight, norm\.bias"):
        factory.check_ownership(model, parameter_groups(model, weight_decay=0.1, decay_1d=False)[:1])


def test_a_trainable_parameter_that_two_groups_own_is_named() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight, model.bias]}, {"params": [model.bias]}]
    with pytest.raises(ConfigError, match="owned more than once: bias"):
        factory.check_ownership(model, groups)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_adamw(nn.Linear(2, 2).requires_grad_(False), section(), CPU)


def test_adamw_takes_lr_betas_eps_and_weight_decay_from_the_config() -> None:
    """Seed: "Builds AdamW from config.optimizer: lr, betas, eps, weight_decay"."""
    keys = section(lr=0.02, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3)
    group = build_adamw(nn.Linear(2, 2), keys, CPU).param_groups[0]
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.02,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.3,
    }


def test_fused_null_asks_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "When optimizer.fused is null, supports_fused_adamw(device) probes CUDA"."""
    asked: list[torch.device] = []

    def probe(device: torch.device) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr(factory, "supports_fused_adamw", probe)
    assert build_adamw(nn.Linear(2, 2), section(), CPU).param_groups[0]["fused"] is True
    assert asked == [CPU]


def test_a_forced_fused_value_is_attempted_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "A forced fused value is also attempted"."""
    monkeypatch.setattr(factory, "supports_fused_adamw", lambda device: pytest.fail("asked"))
    assert build_adamw(nn.Linear(2, 2), section(fused=True), CPU).param_groups[0]["fused"] is True
    assert not build_adamw(nn.Linear(2, 2), section(fused=False), CPU).param_groups[0]["fused"]


def test_whether_fused_adamw_runs_is_tried_with_each_dtype() -> None:
    assert runs_fused_adamw("cpu", [torch.float32, torch.float64])
    assert not runs_fused_adamw("cpu", [torch.float32, torch.complex64])


@pytest.mark.parametrize("keys", [{}, {"name": "muon"}, {"cautious": True}])
@pytest.mark.parametrize("runs", [True, False])
def test_fused_null_means_fused_wherever_a_step_of_it_runs(
    keys: dict[str, Any], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the seed's probe, which knows CUDA only."""
    if not runs:
        monkeypatch.setattr(factory.AdamW, "step", _refuse_to_step)
    optimizer = build_optimizer(Block(), SpeedtronicConfig.from_dict({"optimizer": keys}), CPU)
    assert {bool(group["fused"]) for group in optimizer.param_groups if "fused" in group} == {
        runs and runs_fused_adamw(CPU)
    }


def _refuse_to_step(optimizer: torch.optim.AdamW) -> None:
    raise RuntimeError("no fused kernel for this device")


@pytest.mark.parametrize("keys", [{}, {"name": "muon"}, {"cautious": True}])
@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_optimizer_keeps_the_kernel_of_its_checkpoint(keys: dict[str, Any], kept: bool) -> None:
    def built(fused: bool | None) -> torch.optim.Optimizer:
        return build_optimizer(Block(), SpeedtronicConfig.from_dict({"optimizer": keys | {"fused": fused}}), CPU)

    resumed = built(None)
    resumed.load_state_dict(built(kept).state_dict())
    assert {bool(group["fused"]) for group in resumed.param_groups if "fused" in group} == {kept}


@pytest.mark.parametrize("error", [TypeError, RuntimeError, ValueError])
def test_a_refused_fused_construction_falls_back_and_says_so(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed: "TypeError, RuntimeError, or ValueError during construction falls back to ordinary AdamW"."""
    real = torch.optim.AdamW

    def picky(*args: Any, fused: bool = False, **kwargs: Any) -> torch.optim.AdamW:
        if fused:
            raise error("no fused kernel")
        return real(*args, **kwargs)

    monkeypatch.setattr(factory, "AdamW", picky)
    with pytest.warns(SpeedtronicWarning, match="no fused kernel"):
        optimizer = build_adamw(nn.Linear(2, 2), section(fused=True), CPU)
    assert not optimizer.param_groups[0]["fused"]


def test_a_step_equals_torch_adamw_with_the_same_groups() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = build_adamw(model, section(lr=0.1, weight_decay=0.5), CPU)
    reference = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.5}, {"params": [twin.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        fused=runs_fused_adamw(CPU),
    )
    for module, optimizer in ((model, ours), (twin, reference)):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=0)
    torch.testing.assert_close(model.bias, twin.bias, rtol=0, atol=0)


# ---------------------------------------------------------------- cautious


@pytest.mark.parametrize("cautious", [True, False])
def test_compile_compiles_only_the_cautious_step(monkeypatch: pytest.MonkeyPatch, cautious: bool) -> None:
    monkeypatch.setattr(factory, "_cautious_step_compiles", lambda device, warn: True)
    optimizer = build_adamw(Block(), section(cautious=cautious), CPU, compiled=True)
    assert vars(optimizer).get("compiled", False) is cautious


def test_a_cautious_step_that_does_not_compile_runs_without_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: CautiousAdamW) -> None:
        raise RuntimeError("no C++ compiler")

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(CautiousAdamW, "step", refuse)
        optimizer = build_adamw(Block(), section(cautious=True), CPU, compiled=True, warn=said.append)
    assert isinstance(optimizer, CautiousAdamW)
    assert not optimizer.compiled
    assert said == ["the cautious step does not compile on cpu (no C++ compiler): it runs without the compiler"]


def test_cautious_builds_cautious_adamw_with_its_rescaling() -> None:
    keys = {"lr": 0.1, "weight_decay": 0.0, "cautious": True}
    grown = {}
    for rescale in (False, True):
        model = nn.Linear(2, 2, bias=False)
        model.weight.data.zero_()
        optimizer = build_adamw(model, section(**keys, cautious_rescale=rescale), CPU)
        assert isinstance(optimizer, CautiousAdamW)
        model.weight.grad = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
        optimizer.step()
        grown[rescale] = model.weight[0, 0].item()
    assert grown[False] == pytest.approx(-0.1)
    assert grown[True] == pytest.approx(-0.1 * 4 / (3 + 1))
    assert not isinstance(build_adamw(nn.Linear(2, 2), section(), CPU), CautiousAdamW)


# ---------------------------------------------------------------- muon


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest_in_two_groups() -> None:
    model = Block()
    groups = hybrid_groups(model, weight_decay=0.1, decay_1d=False)
    assert [group["algorithm"] for group in groups] == ["adamw", "adamw", "muon"]
    assert [names_of(model, group) for group in groups] == [
        {"embedding.weight"},
        {"linear.bias", "norm.weight", "norm.bias"},
        {"linear.weight"},
    ]
    optimizer = build_hybrid(model, section(name="muon", weight_decay=0.3), CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0, 0.3]
    optimizer = build_hybrid(model, section(name="muon", weight_decay=0.3, decay_1d=True), CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.3]


def test_muon_takes_its_options_from_the_config() -> None:
    keys = {
        **{"lr": 0.02, "muon_lr": 0.3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3, "muon_momentum": 0.5},
        **{"muon_ns_steps": 3, "muon_norm_eps": 1e-4, "muon_plus": True, "muon_scale": "match_rms_adamw"},
        **{"muon_coefficients": "polar_express", "cautious": True, "cautious_rescale": True},
    }
    adamw, _, muon = build_hybrid(Block(), section(name="muon", **keys), CPU).param_groups
    assert {key: adamw[key] for key in ("lr", "betas", "eps", "weight_decay", "cautious", "cautious_rescale")} == {
        **{"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3, "cautious": True},
        "cautious_rescale": True,
    }
    expected = {
        **{"lr": 0.3, "momentum": 0.5, "ns_steps": 3, "norm_eps": 1e-4, "muon_plus": True, "weight_decay": 0.3},
        **{"scale": "match_rms_adamw", "coefficients": "polar_express", "cautious": True, "cautious_rescale": True},
    }
    assert {key: muon[key] for key in expected} == expected


def test_the_rate_of_muon_defaults_to_lr_and_the_first_group_has_lr() -> None:
    rates = [group["lr"] for group in build_hybrid(Block(), section(name="muon", lr=0.02), CPU).param_groups]
    assert rates == [0.02, 0.02, 0.02]
    rates = [
        group["lr"] for group in build_hybrid(Block(), section(name="muon", lr=0.02, muon_lr=1.0), CPU).param_groups
    ]
    assert rates == [0.02, 0.02, 1.0]


def test_matrices_with_the_same_split_are_one_group_of_their_own() -> None:
    model = nn.Sequential(*(nn.Linear(4, 6, bias=False) for _ in range(4)))
    for number in (1, 3):
        model[number]._speedtronic_muon_split = (4, 1, 1)
    groups = hybrid_groups(model, weight_decay=0.1, decay_1d=False)
    assert [(names_of(model, group), group["split"]) for group in groups] == [
        ({"0.weight", "2.weight"}, None),
        ({"1.weight", "3.weight"}, (4, 1, 1)),
    ]


def test_a_model_without_hidden_matrices_is_trained_by_adamw_and_a_warning_names_the_remedies() -> None:
    transformers = pytest.importorskip("transformers")
    said: list[str] = []
    optimizer = build_hybrid(tiny_model(transformers, "gpt2"), section(name="muon"), CPU, warn=said.append)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["adamw", "adamw"]
    (message,) = said
    assert "no hidden nn.Linear" in message
    assert "_speedtronic_optimizer_role = 'muon'" in message
    assert "optimizer.name: adamw" in message


def test_a_model_of_only_hidden_matrices_has_one_group() -> None:
    optimizer = build_hybrid(nn.Linear(2, 2, bias=False), section(name="muon"), CPU)
    assert [group["algorithm"] for group in optimizer.param_groups] == ["muon"]


def test_muon_on_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_hybrid(nn.Linear(2, 2).requires_grad_(False), section(name="muon"), CPU)


def test_the_fused_kernel_of_a_hybrid_falls_back_as_adamws_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_hybrid(Block(), section(name="muon", fused=True), CPU).param_groups[0]["fused"] is True
    assert not build_hybrid(Block(), section(name="muon", fused=False), CPU).param_groups[0]["fused"]
    real = torch.optim.AdamW

    def picky(*args: Any, fused: bool = False, **kwargs: Any) -> torch.optim.AdamW:
        if fused:
            raise RuntimeError("no fused kernel")
        return real(*args, **kwargs)

    monkeypatch.setattr(hybrid, "AdamW", picky)
    with pytest.warns(SpeedtronicWarning, match="no fused kernel"):
        optimizer = build_hybrid(Block(), section(name="muon", fused=True), CPU)
    assert not optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("keys", [{}, {"name": "muon"}])
def test_complex_parameters_choose_the_ordinary_kernel_and_are_trained(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "supports_fused_adamw", lambda device: True)
    model = nn.Linear(3, 3)
    model.register_parameter("spectrum", nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    optimizer = build_optimizer(model, SpeedtronicConfig.from_dict({"optimizer": keys}), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(model.get_parameter("spectrum").detach(), torch.ones(3, dtype=torch.complex64))


# ---------------------------------------------------------------- every option set

OPTION_SETS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "fused adamw": {"fused": True},
    "cautious adamw": {"cautious": True},
    "fused cautious adamw, rescaled": {"cautious": True, "cautious_rescale": True, "fused": True},
    "muon": {"name": "muon"},
    "muon with fused adamw": {"name": "muon", "fused": True},
    "muon plus": {"name": "muon", "muon_plus": True},
    "cautious muon": {"name": "muon", "cautious": True, "muon_lr": 0.02},
    "fused cautious muon, rescaled": {"name": "muon", "cautious": True, "cautious_rescale": True, "fused": True},
    "muon with polar express": {"name": "muon", "muon_coefficients": "polar_express"},
    "muon at adamw's scale": {"name": "muon", "muon_scale": "match_rms_adamw"},
}
every_option_set = pytest.mark.parametrize("keys", OPTION_SETS.values(), ids=list(OPTION_SETS))


def built(model: nn.Module, keys: dict[str, Any]) -> torch.optim.Optimizer:
    options = {"lr": 0.01, "weight_decay": 0.0, **keys}
    return build_optimizer(model, SpeedtronicConfig.from_dict({"optimizer": options}), CPU)


def convolutional() -> tuple[nn.Module, Tensor]:
    """The model and its loss, the same each time."""
    torch.manual_seed(0)
    model = ConvolutionalNet()
    return model, model(torch.randn(4, 1, 6, 6)).square().mean()


def reference() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = ReferenceTransformer(vocab_size=32, block_size=8, n_layer=1, n_head=2, d_model=8)
    ids = torch.randint(32, (4, 8))
    return model, model(ids, labels=ids)["loss"]


@every_option_set
def test_one_update_moves_every_trainable_tensor_and_no_frozen_one(keys: dict[str, Any]) -> None:
    for make in (convolutional, reference):
        with case(make):
            model, loss = make()
            optimizer = built(model, keys)
            before = {name: tensor.clone() for name, tensor in model.named_parameters()}
            loss.backward()
            optimizer.step()
            moved = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
            assert moved == {name for name, tensor in model.named_parameters() if tensor.requires_grad}


@every_option_set
def test_a_tied_weight_is_moved_once(keys: dict[str, Any]) -> None:
    model, loss = convolutional()
    optimizer = built(model, keys)
    owned = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(owned) == len(set(owned)) == sum(p.requires_grad for p in model.parameters())
    loss.backward()
    optimizer.step()
    alone = nn.Linear(5, 5, bias=False)
    alone.load_state_dict({"weight": convolutional()[0].get_parameter("first.weight")})
    single = built(alone, keys)
    alone.weight.grad = model.get_parameter("first.weight").grad
    single.step()
    torch.testing.assert_close(model.get_parameter("first.weight"), alone.weight)


@every_option_set
def test_a_nan_gradient_changes_nothing(keys: dict[str, Any]) -> None:
    for policy in ("stop", "skip"):
        with case(policy):
            model, loss = convolutional()
            optimizer = built(model, keys)
            loss.backward()
            optimizer.step()
            guard = NonFiniteGuard(policy, optimizer)
            weights = copy.deepcopy(model.state_dict())
            state = copy.deepcopy(optimizer.state_dict())
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.view(-1)[0] = float("nan")
            guard.step(guard.inspect(torch.tensor(1.0), torch.tensor(float("nan"))))
            torch.testing.assert_close(dict(model.state_dict()), dict(weights), rtol=0, atol=0)
            torch.testing.assert_close(optimizer.state_dict()["state"], state["state"], rtol=0, atol=0)


RANDOM = torch.Generator().manual_seed(0)
IMAGES = [(torch.randn(4, 1, 6, 6, generator=RANDOM), torch.arange(4) % 3) for _ in range(2)]
INFINITE = (torch.full((4, 1, 6, 6), float("inf")), IMAGES[0][1])
SCALED = PrecisionPlan(mode="fp16", dtype=torch.float32, use_scaler=True, autocast_enabled=False, device_type="cpu")


def classifier(model: nn.Module, keys: dict[str, Any], batches: list[Any] = IMAGES, **options: Any) -> Trainer:
    return make_trainer(
        model,
        batches,
        optimizer=built(model, keys),
        loss_fn=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        **options,
    )


def assert_same(first: nn.Module, second: nn.Module) -> None:
    torch.testing.assert_close(dict(first.state_dict()), dict(second.state_dict()), rtol=0, atol=0)


class ResetsAfterTwo:
    """A coordinator that asks for a reset after the second step, and notes the size of the state after each step."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        assert self.optimizer is not None
        self.held.append(len(self.optimizer.state))
        return step == 2


@every_option_set
def test_after_a_coordinators_reset_training_continues_as_with_a_new_optimizer(keys: dict[str, Any]) -> None:
    coordinator = ResetsAfterTwo()
    model = convolutional()[0]
    trainer = classifier(model, keys, coordinator=coordinator)
    coordinator.optimizer = trainer.optimizer
    trainer.fit(2)
    assert not trainer.optimizer.state
    twin = copy.deepcopy(model)
    assert trainer.fit(4).steps == 4
    assert coordinator.held == [sum(parameter.requires_grad for parameter in model.parameters())] * 4
    classifier(twin, keys).fit(2)
    assert_same(twin, model)


@every_option_set
def test_a_gradient_scaler_skips_overflows_and_changes_nothing_else(keys: dict[str, Any]) -> None:
    scaled, plain = convolutional()[0], convolutional()[0]
    assert classifier(scaled, keys, [IMAGES[0], INFINITE, IMAGES[1]], precision=SCALED).fit(2).steps == 2
    classifier(plain, keys).fit(2)
    torch.testing.assert_close(dict(scaled.state_dict()), dict(plain.state_dict()))


# ---------------------------------------------------------------- optimizers by their class


class NoOptimizer:
    def __init__(self, params: Any, lr: float) -> None: ...


def test_a_class_is_called_with_the_groups_the_rate_and_its_arguments() -> None:
    section = {"name": "torch.optim:SGD", "lr": 0.1, "args": {"momentum": 0.9, "nesterov": True}, "weight_decay": 0.3}
    groups = [{"match": "head.*", "lr": 0.01}]
    model = Block()
    optimizer = build_optimizer(model, SpeedtronicConfig.from_dict({"optimizer": {**section, "groups": groups}}), CPU)
    assert type(optimizer) is torch.optim.SGD
    found = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    assert (found["linear.weight"]["lr"], found["linear.weight"]["weight_decay"]) == (0.1, 0.3)
    assert (found["linear.bias"]["lr"], found["linear.bias"]["weight_decay"]) == (0.1, 0.0)
    assert found["embedding.weight"]["lr"] == 0.01  # tied to the head
    assert not any(name.startswith("frozen") for name in found)


def test_a_named_optimizer_can_be_cautious() -> None:
    section = {"name": "torch.optim:RMSprop", "cautious": True, "cautious_rescale": True}
    optimizer = build_optimizer(Block(), SpeedtronicConfig.from_dict({"optimizer": section}), CPU)
    assert isinstance(optimizer, CautiousOptimizer)
    assert optimizer.rescale
    assert isinstance(optimizer.base, torch.optim.RMSprop)


@pytest.mark.parametrize(
    ("section", "shown"),
    [
        ({"name": "torch.optim:Adams"}, r"optimizer\.name: the module 'torch\.optim' has no 'Adams'"),
        ({"name": "torch.optim:SGD", "args": {"speed": 1}}, r"optimizer\.name: torch\.optim:SGD takes .*'speed'"),
        ({"name": "torch.optim:SGD", "args": {"momentum": -1}}, r"optimizer\.name: torch\.optim:SGD: Invalid momentum"),
        ({"name": "torch.optim:SGD", "args": {"lr": 1}}, r"optimizer\.args: lr is a key of the section itself"),
        ({"name": "torch.optim:LBFGS"}, r"optimizer\.name: torch\.optim:LBFGS: LBFGS doesn't support"),
        ({"name": f"{__name__}:NoOptimizer"}, r"returned NoOptimizer, which is no torch\.optim\.Optimizer"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(section: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        build_optimizer(Block(), SpeedtronicConfig.from_dict({"optimizer": section}), CPU)
