"""What is done to gradients before the optimizer steps: their norm, whether one is not finite, unscaling, clipping."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch.tensors.tensors import sharded_class
from .device_step import multiply_
from .step_kind import gradients, scales_in_kernel, skips_by_itself, takes_scale


class Prepared(NamedTuple):
    """What is known of gradients that are unscaled and clipped already, so that the optimizer only has to step."""

    norm: Tensor | None  # of the unscaled gradients before clipping, shape (); None if it was not measured
    found_inf: Tensor | None  # 1.0 if a gradient is not finite, else 0.0: float32, shape (). None without a loss scale


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


def divide_and_clip_(
    optimizer: Optimizer, grads: Sequence[Tensor], divisor: Tensor | None, clip: Tensor | None
) -> Tensor | None:
    """Divide gradients and clip them, in memory, unless the optimizer's kernel does so.

    `divisor` is what they are still to be divided by, None if they are unscaled; `clip` is what unscaled gradients are
    to be multiplied by. Returns what the kernel of the optimizer is to divide by, None if nothing is left for it.
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
