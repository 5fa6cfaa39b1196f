"""What is done to gradients before the optimizer steps: their norm, whether one is not finite, unscaling, clipping."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch.tensors.tensors import sharded_class
from .device_step import any_found, clip_coefficient, multiply_, total_norm
from .sharded import OverRanks
from .step_kind import gradients, scales_in_kernel, skips_by_itself, takes_scale


class Prepared(NamedTuple):
    """What is known of gradients that are unscaled and clipped already, so that the optimizer only has to step.

    Attributes:
        norm: the norm of the unscaled gradients before clipping, shape (); None if it was not measured.
        found_inf: 1.0 if a gradient is not finite, else 0.0: float32, shape (). None without a loss scale.
    """

    norm: Tensor | None
    found_inf: Tensor | None


class Measured(NamedTuple):
    """What was measured of gradients before anything is done to them.

    Attributes:
        norm: the norm of the unscaled gradients, shape ().
        found_inf: 1.0 if a gradient is not finite, else 0.0: float32, shape ().
        divisor: what the gradients are still to be divided by, shape (); None if they are unscaled.
    """

    norm: Tensor
    found_inf: Tensor
    divisor: Tensor | None


def can_be_prepared(optimizer: Optimizer) -> bool:
    """Return whether gradients can be unscaled and clipped apart from the optimizer's step, with the same bits.

    They cannot if its kernel does both, or if it looks for overflows itself. Sparse gradients are left to torch, and
    those that `fully_shard` split to the step.
    """
    grads = gradients(optimizer)
    if not grads or takes_scale(optimizer) or skips_by_itself(optimizer):
        return False
    sharded = sharded_class()
    return all(grad.layout is torch.strided and not isinstance(grad, sharded) for grad in grads)


def measured(
    optimizer: Any,
    grads: Sequence[Tensor],
    scale: Tensor,
    found_infs: Iterable[Tensor] | None,
    norm_type: float,
    over_ranks: OverRanks,
) -> Measured:
    """Measure the gradients of an optimizer.

    Args:
        optimizer: may have a `grad_scale` that its gradients are divided by, too.
        grads: its gradients.
        scale: the loss scale, shape ().
        found_infs: what unscaling has found on each device; None if the gradients are not unscaled yet.
        norm_type: order of the norm.
        over_ranks: makes the norms of whole gradients of those of their shards.

    Sync: none.
    """
    divisor = scale if found_infs is None else None
    preset = getattr(optimizer, "grad_scale", None) if takes_scale(optimizer) else None
    if preset is not None:
        preset = preset.reshape(()).to(scale.device, non_blocking=True)
        divisor = preset if divisor is None else divisor * preset
    norm = total_norm(grads, scale.device, norm_type, over_ranks)
    unscaled = norm if divisor is None else norm / divisor
    if found_infs is not None:
        return Measured(unscaled, any_found(found_infs, scale.device), divisor)
    found = torch.where(norm < torch.inf, 0.0, 1.0)  # also 1 for nan; two kernels, isfinite takes four
    return Measured(unscaled, found.float(), divisor)  # made in the default dtype, which may be float64


def divide_and_clip_(
    optimizer: Optimizer, grads: Sequence[Tensor], divisor: Tensor | None, clip: Tensor | None
) -> Tensor | None:
    """Divide gradients and clip them, in memory, unless the optimizer's kernel does so.

    Args:
        optimizer: what will step.
        grads: its gradients. Where its kernel divides them, these stay as they are.
        divisor: what the gradients are still to be divided by, shape (); None if they are unscaled.
        clip: what unscaled gradients are to be multiplied by, shape (); None does not clip.

    Returns:
        What the kernel of the optimizer is to divide by, None if nothing is left for it.
    """
    if clip is not None:
        # nan or 0 comes from a norm that is not finite: the step is skipped, but the divisor must stay a number.
        coefficient = torch.where(clip > 0, clip, 1.0)
        divisor = coefficient.reciprocal() if divisor is None else divisor / coefficient
    in_step = takes_scale(optimizer) and (scales_in_kernel(optimizer) or clip is None)
    if divisor is not None and (not in_step or divisor.dtype is not torch.float32):  # kernels take float32 only
        multiply_(grads, divisor.reciprocal())
        return None
    return divisor


def prepared(optimizer: Optimizer, found: Measured, max_norm: float | None) -> Prepared:
    """Unscale and clip the gradients of an optimizer, of which `can_be_prepared` is true. Sync: none."""
    clip = None if max_norm is None else clip_coefficient(found.norm, max_norm)
    divide_and_clip_(optimizer, gradients(optimizer), found.divisor, clip)
    return Prepared(found.norm, found.found_inf)
