"""One optimizer that trains hidden matrices with Muon and everything else with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from speedtronic.optimizers.adamw import adamw_step, check_group
from speedtronic.optimizers.muon import (
    Muon,
    Scale,
    check_options,
    check_saved_shapes,
    load_with_exact_momenta,
    muon_step,
)
from speedtronic.optimizers.newton_schulz import Coefficients
from speedtronic.optimizers.without_dynamo import AdamW, WithoutDynamo
from speedtronic.ranks import Group, SingleProcess

ParamGroup = dict[str, Any]


class HybridOptimizer(WithoutDynamo):
    """Muon and AdamW as one `torch.optim.Optimizer` with one state: hooks, schedulers and gradient scalers see one.

    Each param group names its `algorithm`, "muon" or "adamw", and has the options of that algorithm: those of `Muon`,
    or those of `torch.optim.AdamW` with `cautious` and `cautious_rescale`. Options that it leaves out come from the
    arguments. A parameter's state is that of `Muon` (`momentum_buffer`) or of `torch.optim.AdamW` (`step`, `exp_avg`,
    `exp_avg_sq`), in one dict.

    Args:
        params: param groups as for any `torch.optim.Optimizer`, each with `algorithm`. A Muon group may have `split`,
            the row counts of the pieces of its weights; each piece is orthogonalised on its own.
        lr: learning rate of AdamW's groups.
        muon_lr: learning rate of Muon's groups; None is `lr`.
        betas: AdamW's decay rates of the first and second moment.
        eps: AdamW's term in the denominator.
        weight_decay: decoupled weight decay of both.
        momentum, nesterov, ns_steps, muon_eps, norm_eps, muon_plus, scale, coefficients: as in `Muon`; `muon_eps` is
            its `eps`.
        fused: whether AdamW runs in torch's fused kernel. Then both algorithms skip a step whose gradients overflowed
            on the device, and read nothing back to the host.
        cautious: keep only the entries of an update that go down the gradient, in both algorithms.
        cautious_rescale: scale a cautious update up to make up for the entries that were dropped.

    Attributes:
        ranks: as of `Muon`.

    Raises:
        ValueError: a group names no algorithm, an option is out of range, or a parameter of a Muon group is not a
            matrix.
        TypeError: a parameter of a Muon group is complex.
    """

    ranks: Group = SingleProcess()

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float | Tensor = 1e-3,
        muon_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        muon_eps: float = 1e-7,
        norm_eps: float = 1e-8,
        muon_plus: bool = False,
        scale: Scale = "original",
        coefficients: Coefficients = "quintic",
        fused: bool = False,
        cautious: bool = False,
        cautious_rescale: bool = False,
    ) -> None:
        # Each algorithm's own class knows its options and checks them. These two optimizers never step.
        dummy = [torch.zeros(1, 1)]
        caution = {"cautious": cautious, "cautious_rescale": cautious_rescale}
        muon = Muon(
            dummy,
            lr if muon_lr is None else muon_lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            weight_decay=weight_decay,
            eps=muon_eps,
            norm_eps=norm_eps,
            muon_plus=muon_plus,
            scale=scale,
            coefficients=coefficients,
            **caution,
        )
        adamw = AdamW(dummy, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        self._options = {"muon": muon.defaults, "adamw": {**adamw.defaults, **caution}}
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which names its `algorithm`; see the class.

        Raises:
            ValueError: the group names no algorithm, or an option or parameter of a Muon group is out of range or not
                a matrix.
            TypeError: a parameter of a Muon group is complex.
        """
        algorithm = param_group.get("algorithm")
        if algorithm not in self._options:
            raise ValueError(f"a param group's algorithm must be 'muon' or 'adamw', not {algorithm!r}")
        self._add_defaults(param_group)
        if algorithm == "muon":
            check_options(param_group)
        super().add_param_group(param_group)
        if algorithm == "muon" and (problem := _why_not_muon(param_group)) is not None:
            del self.param_groups[-1]
            raise problem
        self._support_scaling()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again; called once, before the update.

        Returns:
            The result of `closure`; None without one.

        Raises:
            TypeError: a parameter of a cautious AdamW group is complex.
            RuntimeError: a gradient is sparse. After any of these errors, nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Check everything before anything changes. `muon_step` checks its own groups, and steps first.
        for group in self._groups_of("adamw"):
            check_group(group, cautious=group["cautious"])
        # A gradient scaler, or the trainer's guard, sets these attributes for the time of the step.
        grad_scale, found_inf = vars(self).get("grad_scale"), vars(self).get("found_inf")
        muon_step(self._groups_of("muon"), self.state, grad_scale=grad_scale, found_inf=found_inf, ranks=self.ranks)
        for group in self._groups_of("adamw"):
            adamw_step(
                [group],
                self.state,
                fused=group["fused"],
                cautious=group["cautious"],
                rescale=group["cautious_rescale"],
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, for groups of the same algorithms. The arguments give the options it lacks.

        Raises:
            ValueError: the state is of another optimizer, of other groups, or of parameters of other shapes.
        """

        def check(final: dict[str, Any]) -> None:
            # torch would load the state of another algorithm where the groups have as many parameters.
            saved, own = (
                ", ".join(str(group.get("algorithm", "an optimizer of another kind")) for group in groups) or "none"
                for groups in (final["param_groups"], self.param_groups)
            )
            if saved != own:
                raise ValueError(f"the saved param groups were trained by {saved}, and the groups here by {own}")
            check_saved_shapes(self.param_groups, final)

        load_with_exact_momenta(self, state_dict, check)

    def _add_defaults(self, group: dict[str, Any]) -> None:
        """Add the options that a group, or a saved one, leaves out."""
        for option, default in self._options[group["algorithm"]].items():
            group.setdefault(option, default)

    def _groups_of(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            self._add_defaults(group)
        self._support_scaling()

    def _support_scaling(self) -> None:
        """Tell gradient scalers whether `step` obeys `found_inf` itself: Muon always does, and fused AdamW."""
        self._step_supports_amp_scaling = all(group["fused"] for group in self._groups_of("adamw"))


def _why_not_muon(group: Mapping[str, Any]) -> Exception | None:
    """The error for the first parameter of a group that Muon cannot train, if there is one."""
    names = group.get("param_names") or [f"number {number} of its group" for number in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        if parameter.ndim != 2:
            return ValueError(f"Muon trains matrices, and parameter {name} has shape {tuple(parameter.shape)}")
        if not parameter.is_floating_point():
            return TypeError(f"Muon trains real floating matrices, and parameter {name} has dtype {parameter.dtype}")
    return None
