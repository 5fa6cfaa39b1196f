"""The update by compiled code: which optimizers have one, and when it is compiled."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..._torch.compile import Compiler
from ..param_groups import CapturableGroups
from ..scale_rule import ScaleLimits
from ..scaler import GradScaler
from ..step_kind import parameters, runs_beside_step, torch_class
from .state_form import StateForm, state_form
from .update_code import Constants, Tensors, update

_KINDS = (Adam, AdamW, SGD)
# The sums of the norm are alike, and combined at no loss. Inductor of torch 2.11 cannot reorder the loops of foreach
# operations: reorder_loops_by_dep_pair in torch/_inductor/scheduler.py asserts that it gets none. It got those of SGD
# with convolutions in channels_last, whose compilation failed.
_OPTIONS = {"combo_kernels_pointwise_only": False, "loop_ordering_after_fusion": False}
_MOST_VARIANTS = 8  # sets of hyperparameters, and of parameters with gradients; each of them is compiled by itself


@dataclass(eq=False)
class CompiledUpdate:
    """Steps an optimizer by compiled code, with gradients scaled as needed.

    The tensors of the optimizer's state stay what they are, so that its `state_dict` does too. The last bits differ
    from those of the fused kernels. Where a gradient is not finite, the compiled code writes back what was there.
    """

    _optimizer: Optimizer
    _scaler: GradScaler  # gets norm and `found_inf` as from its own `step` and `update`
    _groups: CapturableGroups
    _max_norm: float | None
    _compiler: Compiler
    _compiled: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)
    ready: set[Hashable] = field(default_factory=set)  # the keys of the updates that have been compiled
    used: bool = False  # whether a step was done by compiled code

    def text(self) -> str:
        """Return in words what is compiled."""
        parts = [type(self._optimizer).__name__]
        parts += ["clipping"] if self._max_norm is not None else []
        parts += ["loss scale"] if self._scaler.is_enabled() else []
        return ", ".join(parts)

    def prepared(self, low: Mapping[Tensor, Tensor]) -> "PreparedUpdate | None":
        """Return the update of this step. Gradients in low precision (`low`) take the place of `param.grad`.

        It is None if no parameter has a gradient, and in a first step, which makes the state of the optimizer.

        Raises:
            NotImplementedError: hyperparameters have changed too often.
        """
        read = self._read(low)
        if read is None:
            return None
        constants, tensors = read
        key = (constants, *((t.shape, t.stride(), t.dtype) for t in (*tensors.params, *tensors.grads)))
        if key not in self._compiled:
            if len(self._compiled) == _MOST_VARIANTS:
                raise NotImplementedError(
                    f"{type(self._optimizer).__name__} had {_MOST_VARIANTS} sets of hyperparameters, or of parameters "
                    "with gradients, and each of them is compiled. Keep all but the learning rate constant."
                )
            self._compiled[key] = self._compiler.compiled(update, whole=True, **_OPTIONS)
        return PreparedUpdate(key, constants, tensors)

    def run(self, prepared: "PreparedUpdate") -> None:
        """Do the update of a step, and give norm and `found_inf` to the scaler. Sync: none."""
        with torch.no_grad():
            norm, found = self._compiled[prepared.key](prepared.constants, prepared.tensors)
        self._scaler.grad_norm, self._scaler.found_inf = norm, found
        self.ready.add(prepared.key)
        self.used = True

    def _read(self, low: Mapping[Tensor, Tensor]) -> tuple[Constants, Tensors] | None:
        is_sgd, form = torch_class(self._optimizer) is SGD, state_form(self._optimizer)
        options, sizes, params, grads, counts, rates = [], [], [], [], [], []
        states: list[list[Tensor]] = []
        for group, rate in zip(self._optimizer.param_groups, self._groups.tensors(), strict=True):
            found = [(param, low.get(param, param.grad)) for param in group["params"]]
            with_gradient = [(param, grad) for param, grad in found if grad is not None]
            if not with_gradient:
                continue
            if is_sgd:
                numbers = [group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")]
            else:
                numbers = [*group["betas"], group.get("decoupled_weight_decay", False)]
                numbers += [group[name] for name in ("amsgrad", "weight_decay", "eps", "maximize")]
            options.append(tuple(numbers))
            sizes.append(len(with_gradient))
            rates.append(_with_shape(rate))
            for param, grad in with_gradient:
                names = (form or StateForm()).names(group, param)
                kept = [self._optimizer.state[param].get(name) for name in (names if is_sgd else [*names, "step"])]
                if not all(isinstance(value, Tensor) for value in kept):
                    return None
                params.append(_with_shape(param.detach()))
                grads.append(_with_shape(grad.detach()))
                values = [_with_shape(value) for value in kept]
                counts += [] if is_sgd else [values.pop()]  # the last one
                states.append(values)
        if not params:
            return None
        rule, limits, scale = None, None, {}
        if self._scaler.is_enabled():
            known = self._scaler.rule()
            rule = known["growth_factor"], known["backoff_factor"], known["growth_interval"]
            limits = ScaleLimits(**{name: known[name] for name in ScaleLimits._fields})
            limits = None if limits.is_torchs_rule else limits
            scale = {name: _with_shape(tensor) for name, tensor in self._scaler.tensors().items()}
        constants = Constants(tuple(options), tuple(sizes), is_sgd, self._max_norm, rule, limits, form)
        return constants, Tensors(params, grads, states, counts, rates, scale)


class PreparedUpdate(NamedTuple):
    """The update of one step. Those with the same key run the same code."""

    key: Hashable
    constants: Constants
    tensors: Tensors


def _with_shape(tensor: Tensor) -> Tensor:
    """Return a tensor of shape () as one of shape (1,), and others as they are. Aliasing: the same memory."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def why_not_updated(optimizer: Optimizer) -> str:
    """Return why the update of this optimizer cannot be compiled, "" if it can."""
    name = type(optimizer).__name__
    if torch_class(optimizer) not in _KINDS:
        return f"{name} is not Adam, AdamW or SGD of torch.optim"
    if hidden := runs_beside_step(optimizer):
        return f"{name} has {hidden}, which compiled code would not call"
    devices = {param.device for param in parameters(optimizer)}
    if len(devices) > 1 or not all(param.is_floating_point() for param in parameters(optimizer)):
        return f"{name} has parameters that are complex, or on several devices"
    for group in optimizer.param_groups:
        if group.get("differentiable") or any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            return f"{name} is differentiable, or has betas that are tensors"
    return ""
