"""The update as one function that torch.compile compiles: unscale, norm, clip, Adam or SGD, skip, the loss scale."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .._torch.compile import Compiler
from .._torch.tensors import foreach_norm
from .device_step import clip_coefficient
from .param_groups import CapturableGroups
from .scale_rule import SMALLEST, ScaleLimits
from .scaler import GradScaler
from .step_kind import parameters, runs_beside_step, torch_class

_KINDS = (Adam, AdamW, SGD)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MOST_VARIANTS = 8  # sets of hyperparameters, and of parameters with gradients; each of them is compiled by itself


class _Constants(NamedTuple):
    """What is a constant in compiled code.

    Attributes:
        groups: the options of each param group that has parameters with gradients, in the order of their names.
        sizes: how many such parameters each of them has.
        is_sgd: whether it is SGD, else it is Adam or AdamW.
        max_norm: clip to this; None does not clip.
        rule: growth factor, backoff factor and growth interval of the loss scale; None without a loss scale.
        limits: what else bounds the loss scale; None if only torch's rule does.
    """

    groups: tuple[tuple[Any, ...], ...]
    sizes: tuple[int, ...]
    is_sgd: bool
    max_norm: float | None
    rule: tuple[float, float, int] | None
    limits: ScaleLimits | None


class _Tensors(NamedTuple):
    """What compiled code reads and changes. The lists of all groups are joined, and no tensor has the shape ().

    torch 2.11 may drop what compiled code does in place to a float64 tensor of shape () on the CPU, because it takes
    such a tensor for a number of Python (torch/fx/passes/_tensorify_python_scalars.py).

    Attributes:
        params: the parameters that have a gradient.
        grads: their gradients, in any floating dtype.
        states: of each kind of state that the optimizer keeps, a list.
        rates: the learning rate of each group.
        scale: the tensors of the loss scale, by name.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[list[Tensor]]
    rates: list[Tensor]
    scale: dict[str, Tensor]


class CompiledUpdate:
    """Steps an optimizer by compiled code: the foreach form of torch's own functions, with gradients scaled as needed.

    The tensors of the optimizer's state stay what they are, so that its `state_dict` does too. The last bits differ
    from those of the fused kernels. Where a gradient is not finite, the compiled code writes back what was there.

    Args:
        optimizer: Adam, AdamW or SGD of torch.optim.
        scaler: the loss scale; it gets norm and `found_inf` as from its own `step` and `update`.
        groups: its learning rates as tensors.
        max_norm: clip the norm over all gradients to this; None does not clip.
        compiler: compiles.

    Attributes:
        used: whether a step was done by compiled code.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: GradScaler,
        groups: CapturableGroups,
        max_norm: float | None,
        compiler: Compiler,
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._groups = groups
        self._max_norm = max_norm
        self._compiler = compiler
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self._ready: set[Hashable] = set()
        self.used = False

    def text(self) -> str:
        """Return in words what is compiled."""
        parts = [type(self._optimizer).__name__]
        parts += ["clipping"] if self._max_norm is not None else []
        parts += ["loss scale"] if self._scaler.is_enabled() else []
        return ", ".join(parts)

    def prepared(self, low: Mapping[Tensor, Tensor]) -> "PreparedUpdate | None":
        """Return the update of this step, None if it must be done uncompiled.

        It must be if no parameter has a gradient, and in a first step, which makes the state of the optimizer.

        Args:
            low: gradients in low precision, by parameter, that take the place of `param.grad`.

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
            self._compiled[key] = self._compiler.compiled(_update, whole=True)
        return PreparedUpdate(self, key, constants, tensors)

    def run(self, update: "PreparedUpdate") -> None:
        """Do the update of a step, and give norm and `found_inf` to the scaler. Sync: none."""
        with torch.no_grad():
            norm, found = self._compiled[update.key](update.constants, update.tensors)
        self._scaler.grad_norm, self._scaler.found_inf = norm, found
        self._ready.add(update.key)
        self.used = True

    def is_ready(self, key: Hashable) -> bool:
        """Return whether the update with this key has been compiled."""
        return key in self._ready

    def _read(self, low: Mapping[Tensor, Tensor]) -> tuple[_Constants, _Tensors] | None:
        is_sgd = torch_class(self._optimizer) is SGD
        options, sizes, params, grads, rates = [], [], [], [], []
        states: list[list[Tensor]] = []
        for group, rate in zip(self._optimizer.param_groups, self._groups.tensors(), strict=True):
            found = [(param, low.get(param, param.grad)) for param in group["params"]]
            with_gradient = [(param, grad) for param, grad in found if grad is not None]
            if not with_gradient:
                continue
            options.append(_options(group, is_sgd))
            sizes.append(len(with_gradient))
            rates.append(_with_shape(rate))
            for param, grad in with_gradient:
                kept = [self._optimizer.state[param].get(name) for name in _state_names(group, is_sgd)]
                if not all(isinstance(value, Tensor) for value in kept):
                    return None
                params.append(_with_shape(param.detach()))
                grads.append(_with_shape(grad.detach()))
                states.append([_with_shape(value) for value in kept])
        if not params:
            return None
        rule, limits, scale = None, None, {}
        if self._scaler.is_enabled():
            numbers = self._scaler.rule()
            rule = numbers["growth_factor"], numbers["backoff_factor"], numbers["growth_interval"]
            limits = ScaleLimits(**{name: numbers[name] for name in ScaleLimits._fields})
            limits = None if limits.is_torchs_rule else limits
            scale = {name: _with_shape(tensor) for name, tensor in self._scaler.tensors().items()}
        constants = _Constants(tuple(options), tuple(sizes), is_sgd, self._max_norm, rule, limits)
        return constants, _Tensors(params, grads, states, rates, scale)


class PreparedUpdate(NamedTuple):
    """The update of one step.

    Attributes:
        by: what does it.
        key: updates with the same key run the same code.
        constants: see `_Constants`.
        tensors: see `_Tensors`.
    """

    by: CompiledUpdate
    key: Hashable
    constants: _Constants
    tensors: _Tensors


def _with_shape(tensor: Tensor) -> Tensor:
    """Return a tensor of shape () as one of shape (1,), and others as they are. Aliasing: the same memory."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def why_not_compiled(optimizer: Optimizer) -> str:
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


def _options(group: dict[str, Any], is_sgd: bool) -> tuple[Any, ...]:
    if is_sgd:
        return tuple(group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize"))
    decoupled = group.get("decoupled_weight_decay", False)
    rest = tuple(group[name] for name in ("amsgrad", "weight_decay", "eps", "maximize"))
    return (*group["betas"], decoupled, *rest)


def _state_names(group: dict[str, Any], is_sgd: bool) -> tuple[str, ...]:
    if is_sgd:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    return (*_MOMENTS, *(["max_exp_avg_sq"] if group["amsgrad"] else []), "step")


# ------------------------------------------------------------------------------------------------- what is compiled


def _update(constants: _Constants, tensors: _Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Do the whole update in place; return the norm of the unscaled gradients and `found_inf`."""
    scale = tensors.scale["scale"].reshape(()) if constants.rule is not None else None
    norm, found, factor = None, None, None
    if scale is not None or constants.max_norm is not None:
        norm = _total_norm(tensors.grads)
    if scale is not None and norm is not None:
        found = torch.where(norm < torch.inf, 0.0, 1.0).float()
        norm, factor = norm / scale, scale.reciprocal()
    if constants.max_norm is not None and norm is not None:
        clip = clip_coefficient(norm, constants.max_norm)
        factor = clip if scale is None else clip / scale
    pairs = zip(tensors.grads, tensors.params, strict=True)
    # A copy where nothing else makes one, because SGD changes gradients in place.
    grads = [
        g.to(p.dtype, copy=True) if factor is None else (g.to(factor.dtype) * factor).to(p.dtype) for g, p in pairs
    ]
    if found is None:
        _step(constants, tensors.params, grads, tensors.states, tensors.rates)
    else:
        params = [param.clone() for param in tensors.params]
        states = [[value.clone() for value in kept] for kept in tensors.states]
        _step(constants, params, grads, states, tensors.rates)
        skip = found > 0
        for old, new in zip(_flat(tensors.params, tensors.states), _flat(params, states), strict=True):
            old.copy_(torch.where(skip, old, new))
        _move_scale(constants, tensors.scale, skip, found)
    return norm, found


def _total_norm(grads: list[Tensor]) -> Tensor:
    """Return what `device_step.total_norm` returns, in a form that dynamo traces."""
    wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    norms = [torch.zeros((), dtype=wide, device=grads[0].device)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        group = [grad for grad in grads if grad.dtype is dtype and grad.numel()]
        if group:
            norms.extend(foreach_norm(group, 2.0, dtype=wide))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms[1:] or norms))
    return norm


def _flat(params: list[Tensor], states: list[list[Tensor]]) -> list[Tensor]:
    return [*params, *(value for kept in states for value in kept)]


def _step(
    constants: _Constants, params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]], rates: list[Tensor]
) -> None:
    """Step by torch's own functions, group by group."""
    start = 0
    for options, size, rate in zip(constants.groups, constants.sizes, rates, strict=True):
        rate = rate.reshape(()).double()  # of this shape it does not turn other operands into float64
        own = slice(start, start + size)
        start += size
        kinds = [list(kind) for kind in zip(*states[own], strict=True)]
        if constants.is_sgd:
            _step_sgd(options, params[own], grads[own], kinds, rate)
        else:
            _step_adam(options, params[own], grads[own], kinds, rate)


def _step_sgd(
    options: tuple[Any, ...], params: list[Tensor], grads: list[Tensor], kinds: list[list[Tensor]], rate: Tensor
) -> None:
    weight_decay, momentum, dampening, nesterov, maximize = options
    buffers: list[Tensor | None] = [*kinds[0]] if kinds else [None] * len(params)
    sgd(
        params,
        grads,
        buffers,
        has_sparse_grad=False,
        foreach=True,
        fused=False,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate,  # type: ignore[arg-type]  # takes a tensor when it is compiled
        dampening=dampening,
        nesterov=nesterov,
        maximize=maximize,
    )


def _step_adam(
    options: tuple[Any, ...], params: list[Tensor], grads: list[Tensor], kinds: list[list[Tensor]], rate: Tensor
) -> None:
    beta1, beta2, decoupled, amsgrad, weight_decay, eps, maximize = options
    # In float64, as fused kernels do: in float32, 1 - 0.999**step has four right digits in the first step. As tensors
    # of shape (), which do not turn other operands into float64.
    counts = [count.reshape(()).double() for count in kinds[-1]]
    adam(
        params,
        grads,
        kinds[0],
        kinds[1],
        kinds[2] if amsgrad else [],
        counts,
        foreach=True,
        capturable=True,
        differentiable=False,
        fused=False,
        has_complex=False,
        decoupled_weight_decay=decoupled,
        amsgrad=amsgrad,
        beta1=beta1,
        beta2=beta2,
        lr=rate,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )
    for kept, count in zip(kinds[-1], counts, strict=True):
        kept.copy_(count)


def _move_scale(constants: _Constants, scale: dict[str, Tensor], skip: Tensor, found: Tensor) -> None:
    """Count the step, and move the loss scale as torch's rule does and the limits of the scaler allow."""
    assert constants.rule is not None  # there is a loss scale
    growth, backoff, interval = constants.rule
    scale["steps"].add_(1)
    scale["skipped"].add_(found)
    before = scale["scale"].clone()
    count = scale["growth_tracker"] + 1
    full = count == interval
    # In float64, as in torch's kernel.
    smaller = (before.double() * backoff).to(before.dtype)
    larger = (before.double() * growth).to(before.dtype)
    larger = torch.where(full & (larger < torch.inf), larger, before)
    scale["scale"].copy_(torch.where(skip, smaller, larger))
    scale["growth_tracker"].copy_(torch.where(skip | full, 0, count))
    if constants.limits is None:
        scale["scale"].clamp_(min=SMALLEST)
    else:
        constants.limits.apply_(scale["scale"], before, scale["patience"], skip, ~skip & full)
