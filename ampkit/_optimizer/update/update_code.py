"""What torch.compile compiles of an update: norm, unscaling, clipping, Adam or SGD, skipping, the loss scale."""

import math
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from ..._torch.tensors.tensors import foreach_norm
from ..device_step import clip_coefficient
from ..scale_rule import SMALLEST, ScaleLimits
from .state_form import StateForm, narrowed, widened


class Constants(NamedTuple):
    """What is a constant in compiled code."""

    groups: tuple[tuple[Any, ...], ...]  # of each param group that has parameters with gradients, the options
    sizes: tuple[int, ...]  # how many such parameters each of them has
    is_sgd: bool  # else it is Adam or AdamW
    max_norm: float | None
    rule: tuple[float, float, int] | None  # growth factor, backoff factor and growth interval of the loss scale
    limits: ScaleLimits | None  # None if only torch's rule bounds the loss scale
    form: StateForm | None = None  # None if weights and state stay in their own dtypes


class Tensors(NamedTuple):
    """What compiled code reads and changes. The lists of all groups are joined, and no tensor has the shape ().

    torch 2.11 may drop what compiled code does in place to a float64 tensor of shape () on the CPU, because it takes
    such a tensor for a number of Python (torch/fx/passes/_tensorify_python_scalars.py).
    """

    params: list[Tensor]  # those that have a gradient
    grads: list[Tensor]  # in any floating dtype
    states: list[list[Tensor]]  # by parameter: the tensors that the optimizer keeps of its shape
    counts: list[Tensor]  # the step count of each parameter; none for SGD
    rates: list[Tensor]  # by group
    scale: dict[str, Tensor]  # the tensors of the loss scale


def update(constants: Constants, tensors: Tensors) -> tuple[Tensor | None, Tensor | None]:
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
        g.to(dtype, copy=True) if factor is None else (g.to(factor.dtype) * factor).to(dtype)
        for g, dtype in ((g, p.dtype if constants.form is None else torch.float32) for g, p in pairs)
    ]
    if found is None and constants.form is None:
        _step(constants, tensors.params, grads, tensors.states, tensors.counts, tensors.rates)
    else:
        before = [[param, *kept] for param, kept in zip(tensors.params, tensors.states, strict=True)]
        copies = [_copied(constants.form, each) for each in before]
        counts = [count.clone() for count in tensors.counts]
        _step(constants, [each[0] for each in copies], grads, [each[1:] for each in copies], counts, tensors.rates)
        after = [_rounded(constants.form, *pair) for pair in zip(before, copies, strict=True)]
        skip = None if found is None else found > 0
        for old, new in zip([*chain(*before), *tensors.counts], [*chain(*after), *counts], strict=True):
            old.copy_(new if skip is None else torch.where(skip, old, new))
        if skip is not None and found is not None:
            _move_scale(constants, tensors.scale, skip, found)
    return norm, found


def _copied(form: StateForm | None, tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of a parameter and of its state for a step to change: with a form in float32."""
    if form is None:
        return [tensor.clone() for tensor in tensors]
    low = [tensor for tensor in tensors if tensor.dtype is torch.bfloat16]
    wide = iter(widened(low, compensated=form.compensates(tensors[0])))
    kept = tensors[:-1] if form.compensates(tensors[0]) else tensors
    return [next(wide) if tensor.dtype is torch.bfloat16 else tensor.clone() for tensor in kept]


def _rounded(form: StateForm | None, before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    """Return what a step has made of such copies in the dtypes of before, the compensation included."""
    if form is None:
        return after
    compensated = form.compensates(before[0])
    wide = [new for old, new in zip(before, after, strict=False) if old.dtype is torch.bfloat16]
    low = iter(narrowed(wide, compensated=compensated, stochastic=form.rounding == "stochastic"))
    return [next(low) if old.dtype is torch.bfloat16 else new for old, new in zip_longest(before, after)]


_MOST_SUMS = 64


def _total_norm(grads: list[Tensor]) -> Tensor:
    """Return what `device_step.total_norm` returns, in a form that dynamo traces.

    torch's foreach kernel gives 65,536 elements to one block, which takes 8 microseconds for a layer of 256 x 256 (on
    an H200, with torch 2.11). Inductor's sums of squares take 2, but a ResNet-50 with its 161 tensors is slower by 2%.
    """
    wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    filled = [grad for grad in grads if grad.numel()]
    if not filled:
        return torch.zeros((), dtype=wide, device=grads[0].device)
    if len(filled) <= _MOST_SUMS:
        return torch.stack([grad.to(wide).square().sum() for grad in filled]).sum().sqrt()
    norms = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        group = [grad for grad in filled if grad.dtype is dtype]
        if group:
            norms.extend(foreach_norm(group, 2.0, dtype=wide))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _step(
    constants: Constants,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[list[Tensor]],
    counts: list[Tensor],
    rates: list[Tensor],
) -> None:
    start = 0
    for options, size, rate in zip(constants.groups, constants.sizes, rates, strict=True):
        own = slice(start, start + size)
        start += size
        if constants.is_sgd:
            weight_decay, momentum, dampening, nesterov, maximize = options
            wide = rate.reshape(()).double()  # of this shape it does not turn other operands into float64
            sgd(  # torch's own function
                params[own],
                grads[own],
                [kept[0] if kept else None for kept in states[own]],
                has_sparse_grad=False,
                foreach=True,
                fused=False,
                weight_decay=weight_decay,
                momentum=momentum,
                lr=wide,  # type: ignore[arg-type]  # takes a tensor when it is compiled
                dampening=dampening,
                nesterov=nesterov,
                maximize=maximize,
            )
        else:
            for each in zip(params[own], grads[own], states[own], counts[own], strict=True):
                _step_adam(options, *each, rate)


def _step_adam(
    options: tuple[Any, ...], param: Tensor, grad: Tensor, kept: list[Tensor], count: Tensor, rate: Tensor
) -> None:
    """Step one parameter by Adam or AdamW, operation by operation as `_multi_tensor_adam` of torch/optim/adam.py.

    Kingma and Ba, Adam (arXiv:1412.6980), algorithm 1; Loshchilov and Hutter, Decoupled Weight Decay Regularization
    (arXiv:1711.05101), algorithm 2; Reddi et al., On the Convergence of Adam and Beyond (ICLR 2018), for `amsgrad`.
    """
    beta1, beta2, decoupled, amsgrad, weight_decay, eps, maximize = options
    average, average_of_squares, *largest = kept
    wide = torch.float64 if param.dtype is torch.float64 else torch.float32
    rate = rate.reshape(()).to(wide)
    count.add_(1)
    steps = count.reshape(()).to(wide)
    grad = -grad if maximize else grad
    if weight_decay and decoupled:
        param.mul_(1 - rate * weight_decay)
    elif weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    average.lerp_(grad, 1 - beta1)
    average_of_squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if amsgrad:
        largest[0].copy_(torch.maximum(largest[0], average_of_squares))
    divisor = (largest[0] if amsgrad else average_of_squares).sqrt() / _bias_correction(beta2, steps).sqrt() + eps
    param.addcdiv_(average, divisor * (_bias_correction(beta1, steps) / -rate))


def _bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Return `1 - beta**steps`, with all digits in float32 too, in which a power would leave four of them at step 1.

    Inductor computes it for each element. Powers in float64, which fused kernels take, took 8 of the 51 microseconds of
    a step of a small MLP (H200, torch 2.11).
    """
    return -torch.expm1(steps * math.log(beta)) if beta > 0 else torch.ones_like(steps)


def _move_scale(constants: Constants, scale: dict[str, Tensor], skip: Tensor, found: Tensor) -> None:
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
