"""One optimizer step without a host read: norm of the gradients, unscaling, clipping, undoing of a skipped step."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from .._torch.optimizers import init_optimizer_state
from .._torch.tensors.tensors import (
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
    sharded_class,
)
from .._undo import Undo
from .sharded import ONE_RANK, OverRanks
from .step_kind import (
    gradients,
    parameters,
    scales_in_kernel,
    skips_by_itself,
    summed_parameters,
    takes_scale,
    torch_class,
)

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds it to the norm
_DOUBLES = (torch.float64, torch.complex128)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def total_norm(
    grads: Sequence[Tensor], device: torch.device, norm_type: float = 2.0, over_ranks: OverRanks = ONE_RANK
) -> Tensor:
    """Return the norm over all gradients as a tensor of shape () on `device`: float32, or float64 if a gradient is.

    The norm is inf or nan if an element is. Otherwise it is finite, unless a power of an element overflows float32. For
    the 2-norm that happens at magnitudes above 1.8e19. float16 is summed in float32. Gradients may be on any device,
    floating or complex, but not sparse. If they are shards, `over_ranks` makes the norms of whole gradients of theirs.
    Sync: none.
    """
    # Ranks must have as many norms as each other, but a shard of one of them may be empty.
    filled = (grad if grad.numel() else grad.new_zeros(1) for grad in grads if over_ranks or grad.numel())
    groups = _grouped(torch.view_as_real(grad) if grad.is_complex() else grad for grad in filled)
    norms = [torch.zeros((), dtype=torch.float32, device=device)] if not groups else []
    for (_, dtype), group in groups.items():
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        norms += (norm.to(device, non_blocking=True) for norm in foreach_norm(group, norm_type, dtype=wide))
    norm: Tensor = torch.linalg.vector_norm(over_ranks.norms(torch.stack(norms), norm_type), norm_type)
    return norm


def any_found(found_infs: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a tensor on `device` that is 1.0 if one of these is above 0, else 0.0. Shape (). Sync: none.

    torch adds up what it found on each device, but its kernels test for 1: if two devices found something, the step
    would not be skipped.
    """
    found = [tensor.to(device, non_blocking=True) for tensor in found_infs]
    if not found:  # an optimizer that looks at its gradients itself, or has none
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(found).amax().clamp(max=1.0)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return `min(1, max_norm / (norm + 1e-6))`, as torch.nn.utils.clip_grad_norm_ does. Shape (). Sync: none."""
    return torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)


def clip_unscaled_(
    optimizer: Optimizer, max_norm: float | None, norm_type: float, over_ranks: OverRanks
) -> tuple[Tensor | None, Tensor | None]:
    """Clip the norm over all gradients to `max_norm`, in memory, unless the optimizer's kernel does so.

    Returns the norm before clipping (None without `max_norm`), and what the kernel of the optimizer is to divide by
    (None if nothing is left for it). Sync: none.
    """
    grads = gradients(optimizer)
    if max_norm is None or not grads:
        return None, None
    if scales_in_kernel(optimizer) and not any(grad.dtype in _DOUBLES for grad in grads):
        # Not for gradients in float64, since a kernel takes a divisor in float32 only.
        norm = total_norm(grads, grads[0].device, norm_type, over_ranks)
        return norm, clip_coefficient(norm, max_norm).reciprocal()
    if over_ranks:
        norm = total_norm(grads, grads[0].device, norm_type, over_ranks)
        torch.nn.utils.clip_grads_with_norm_(parameters(optimizer), max_norm, norm)
    else:
        norm = torch.nn.utils.clip_grad_norm_(summed_parameters(optimizer), max_norm, norm_type)
    return norm, None


def seed_late_momentum(optimizer: Optimizer) -> None:
    """Give SGD zero momentum buffers where a parameter gets its first gradient later than others did.

    torch 2.11's fused SGD raises a TypeError there.
    """
    if any(optimizer.state.get(param) for param in parameters(optimizer)):
        seed_momentum(optimizer)


def multiply_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a float tensor of shape (). One kernel per device and dtype. Sync: none."""
    for (device, dtype), group in _grouped(grads).items():
        # A factor of another dtype takes a kernel per tensor, except float32 for float16. Those gradients need it,
        # because float16 does not hold the reciprocal of a large scale.
        wide = torch.float64 if dtype in _DOUBLES else torch.float32
        foreach_mul_(group, factor.to(device, wide, non_blocking=True))


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


def changed_by_step(optimizer: Optimizer) -> list[Tensor]:
    """Return every tensor that the next step changes, if `can_be_undone` is true of the optimizer.

    State that the first step would create is created here, because creating it could not be undone.
    """
    with torch.no_grad():
        init_optimizer_state(optimizer)
    changed: list[Tensor] = []
    for param in parameters(optimizer):
        if param.grad is not None:
            changed.append(param.detach())
            changed += (value for value in optimizer.state[param].values() if isinstance(value, Tensor))
    return changed


def step_or_undo(step: Callable[[], Any], found_inf: Tensor, changed: Sequence[Tensor]) -> float | None:
    """Call `step`, and where `found_inf` is 1 give all changed tensors the bits that they had before, on the device.

    For optimizers without a kernel that skips. Zero gradients would not do, because moments still decay and weights
    still shrink. The tensors are copied before the step, and put back afterwards by integer arithmetic on their bits:
    `new + (old - new) * found_inf`. In floating-point arithmetic a nan would stay. This takes three passes over
    parameters and state in addition to the optimizer's own. Sync: none.

    `found_inf` is float32. No two of the changed tensors share memory. Returns what `step` returned.
    """
    with torch.no_grad():
        groups = _grouped(map(as_integers, changed))
        backups = {key: [torch.empty_like(tensor) for tensor in group] for key, group in groups.items()}
        for key, group in groups.items():
            foreach_copy_(backups[key], group)
        undoing: list[Any] = []
        for (device, dtype), group in groups.items():
            difference = backups[device, dtype]
            undoing += (
                partial(foreach_sub_, difference, group),
                partial(foreach_mul_, difference, found_inf.to(device, non_blocking=True).to(dtype)),
                partial(foreach_add_, group, difference),
            )
    with Undo() as undo:  # after an interrupt, too, a step that was to be skipped must be undone
        undo.note(_call_each_once, iter(undoing))
        result: float | None = step()
    return result


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers. Aliasing: they lie in the same memory."""
    floats = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return floats.view(_INTEGERS[floats.element_size()])


def _call_each_once(functions: "Iterator[partial[None]]") -> None:
    """Call what is left in the iterator. If an interrupt ends this, a second call goes on where the first one stopped.

    `map` takes a function and calls it in one step of the interpreter, so an interrupt does not come in between.
    """
    with torch.no_grad():
        deque(map(partial.__call__, functions), maxlen=0)


def _grouped(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the tensors by device and dtype: a foreach kernel takes those of one group together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups


@contextmanager
def kernel_scaling(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Context in which the fused kernel divides gradients by `grad_scale` and does nothing where `found_inf` is 1.

    Both are float32 tensors of shape () or None. `found_inf` must be 0 or 1, because the kernels test for 1. With 2,
    Adam applies the step and lets its step count fall (seen on torch 2.11, CUDA).
    """
    with Undo() as undo:
        undo.note(vars(optimizer).pop, "grad_scale", None)
        undo.note(vars(optimizer).pop, "found_inf", None)
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        yield


def seed_momentum(optimizer: Optimizer) -> bool:
    """Give SGD zero momentum buffers before its first step. Return False where zeros would change the result.

    torch allocates the buffers of fused SGD uninitialised and lets the kernel fill them. If the first step is skipped
    the garbage stays: a parameter with zero gradient then moved by 6.3 (torch 2.11). Where dampening is 0, zeros are
    exact, because the kernel computes `momentum * 0 + gradient`. They are -0.0, to which any gradient is added without
    a change, and 0.0 would turn a gradient of -0.0 into 0.0. With dampening the first step is another formula, so no
    zeros are put there, and the caller must not skip that step on the device.
    """
    if torch_class(optimizer) is not SGD:
        return True
    exact = True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        bare = [p for p in group["params"] if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None]
        if group["dampening"] == 0:
            for param in bare:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param).neg_()
        elif bare:
            exact = False
    return exact
