"""What capture asks of an optimizer: gradient norm, clipping, skipping and learning rate, all on the device."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ._torch import (
    can_init_optimizer_state,
    foreach_add_,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
    init_optimizer_state,
)

# Their fused kernels divide by `optimizer.grad_scale`, return if `optimizer.found_inf` is 1, and take a tensor learning
# rate.
_FUSED = (Adam, AdamW, SGD, Adagrad)
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds it to the norm


def is_one_pass(optimizer: Optimizer) -> bool:
    """Return whether unscaling, clipping and skipping can happen inside the optimizer's own kernel."""
    # Not `_step_supports_amp_scaling`: torch forgets to set it for Adagrad, whose kernel takes both all the same.
    return isinstance(optimizer, _FUSED) and all(group["fused"] for group in optimizer.param_groups)


def is_revocable(optimizer: Optimizer) -> bool:
    """Return whether a step can be undone on the device: nothing that it changes is on the host."""
    if isinstance(optimizer, SGD):
        return True  # momentum is all it has
    on_device = all(group.get("capturable") for group in optimizer.param_groups)
    return on_device and can_init_optimizer_state(optimizer)


def why_not_capturable(optimizer: Optimizer) -> str:
    """Return why a graph cannot hold `optimizer.step()` and what to write instead, or "" if it can."""
    name = type(optimizer).__name__
    if is_one_pass(optimizer) or all("capturable" in group for group in optimizer.param_groups):
        return ""
    on_cuda = any(param.is_cuda for group in optimizer.param_groups for param in group["params"])
    refused = isinstance(optimizer, Adagrad) and on_cuda  # by torch 2.11, which has the kernel
    if isinstance(optimizer, _FUSED) and not refused:
        return f"{name} reads its learning rate or its step count on the host. Write {name}(..., fused=True)."
    return f"{name} has no form that a graph can hold. Use one that has: AdamW, Adam or SGD with fused=True."


def why_not_called(optimizer: Optimizer) -> str:
    """Return why a step that is written for the user cannot call `optimizer.step()` and what to use instead, or ""."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return ""
    name = type(optimizer).__name__
    return f"{name} computes the loss several times in a step. Use AdamW, Adam or SGD with fused=True."


def broken_kernel(optimizer: Optimizer) -> str:
    """Return which fused kernel computes nonsense here and what to write instead, or "".

    torch 2.11's fused SGD on the CPU leaves float16 and bfloat16 parameters as they are, but for the last few elements
    (pytorch#191763, fixed by #192545). Tried out rather than guessed from the version.
    """
    if not (isinstance(optimizer, SGD) and is_one_pass(optimizer)):
        return ""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for dtype in {param.dtype for param in params if param.device.type == "cpu"} & {torch.float16, torch.bfloat16}:
        probe = torch.ones(64, dtype=dtype, requires_grad=True)  # more than a vector register holds
        probe.grad = torch.ones_like(probe)
        SGD([probe], lr=1.0, fused=True).step()
        if probe.any():
            return f"torch {torch.__version__} does not update {dtype} parameters with fused SGD on the CPU. Use AdamW."
    return ""


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that `optimizer.step()` will read, in its order."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(grads: Sequence[Tensor], device: torch.device, norm_type: float = 2.0) -> Tensor:
    """Return the norm over all gradients as a float32 tensor of shape () on `device`.

    It is inf or nan exactly if some element is, save that powers that overflow float32 do so too: for the 2-norm
    those of magnitudes above 1.8e19.

    Args:
        grads: dense tensors of any shape and device, floating or complex. float16 is summed in float32.
        device: where the result goes.
        norm_type: order of the norm, above 0; inf is the largest magnitude.

    Sync: none. Aliasing: none.
    """
    filled = (grad for grad in grads if grad.numel())
    groups = _grouped(torch.view_as_real(grad) if grad.is_complex() else grad for grad in filled)
    norms = [torch.zeros((), device=device)] if not groups else []
    for group in groups.values():
        norms += (norm.to(device, non_blocking=True) for norm in foreach_norm(group, norm_type, dtype=torch.float32))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return `min(1, max_norm / (norm + 1e-6))`, as torch.nn.utils.clip_grad_norm_ does. Shape (). Sync: none."""
    return torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)


def step_clipped(
    optimizer: Optimizer, max_norm: float | None, norm_type: float, *args: Any, **kwargs: Any
) -> tuple[Any, Tensor | None]:
    """Step, clipping the global gradient norm to `max_norm`: in the optimizer's kernel where it is fused.

    Returns:
        What `optimizer.step` returned, and the norm before clipping (None without `max_norm`).

    Sync: none beyond the optimizer's own.
    """
    grads = gradients(optimizer)
    if any(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]):
        # torch 2.11's fused SGD raises a TypeError where a parameter gets its first gradient later than others did.
        seed_momentum(optimizer)
    if max_norm is None or not grads:
        return optimizer.step(*args, **kwargs), None
    if not is_one_pass(optimizer):
        params = (param for group in optimizer.param_groups for param in group["params"])
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return optimizer.step(*args, **kwargs), norm
    norm = total_norm(grads, grads[0].device, norm_type)
    with kernel_scaling(optimizer, clip_coefficient(norm, max_norm).reciprocal(), None):
        return optimizer.step(*args, **kwargs), norm


def multiply_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a float32 tensor of shape (), in place. One kernel per device and dtype; no sync."""
    for (device, _), group in _grouped(grads).items():
        foreach_mul_(group, factor.to(device, non_blocking=True))


def revocable_step(optimizer: Optimizer, found_inf: Tensor, **kwargs: Any) -> float | None:
    """Step, and undo the step bit by bit on the device where `found_inf` is 1.

    For optimizers without a kernel that skips. Zero gradients would not do: moments decay and weights shrink on them.
    The tensors are backed up, stepped, and put back by integer arithmetic on their bits, which nan cannot pass
    through: `new + (old - new) * found_inf`. Three passes over parameters and state beside the optimizer's own.

    Args:
        optimizer: one for which `is_revocable` holds, with gradients that are unscaled already.
        found_inf: 0.0 or 1.0, float32, shape ().
        **kwargs: passed on to `optimizer.step`.

    Returns:
        What `optimizer.step` returned.

    Sync: none.
    """
    with torch.no_grad():
        init_optimizer_state(optimizer)  # what the first step would make could not be undone
        groups = _grouped(map(_as_integers, _changed_by_step(optimizer)))
        backups = {key: [torch.empty_like(tensor) for tensor in group] for key, group in groups.items()}
        for key, group in groups.items():
            foreach_copy_(backups[key], group)
        result: float | None = optimizer.step(**kwargs)
        for (device, dtype), group in groups.items():
            difference = backups[device, dtype]
            foreach_sub_(difference, group)
            foreach_mul_(difference, found_inf.to(device, non_blocking=True).to(dtype))
            foreach_add_(group, difference)
    return result


def _grouped(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the tensors by what a foreach kernel takes together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return groups


def _changed_by_step(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                yield param.detach()
                yield from (value for value in optimizer.state[param].values() if isinstance(value, Tensor))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(tensor: Tensor) -> Tensor:
    floats = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return floats.view(_INTEGERS[floats.element_size()])


@contextmanager
def kernel_scaling(optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> Iterator[None]:
    """Make the fused kernel divide gradients by `grad_scale` and do nothing where `found_inf` is 1.

    Both are float32 tensors of shape () or None. found_inf must be 0 or 1: the kernels test for 1, and on 2 Adam
    applies the step and lets its step count fall (seen on torch 2.11, CUDA).
    """
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def seed_momentum(optimizer: Optimizer) -> bool:
    """Give a fused SGD zero momentum buffers before its first step; return False where zeros would not be exact.

    torch allocates them uninitialised and lets the kernel fill them; if the first step is skipped the garbage stays,
    and a parameter with zero gradient then moved by 6.3 (torch 2.11). Zeros are exact where dampening is 0: the kernel
    computes `momentum * 0 + gradient`. With dampening the first step is another formula, and the caller must not skip
    it in the kernel.
    """
    if not isinstance(optimizer, SGD):
        return True
    exact = True
    for group in optimizer.param_groups:
        if group["momentum"] == 0:
            continue
        bare = [p for p in group["params"] if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None]
        if group["dampening"] == 0:
            for param in bare:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        elif bare:
            exact = False
    return exact


class CapturableGroups:
    """What a captured step must find in `optimizer.param_groups`, put there for the step alone.

    `group["lr"]` stays what the user made it: schedulers, checkpoints and assignments see a float and need no device.
    Within a step it is a tensor of shape () on the device, into which a changed float is filled before. A group whose
    rate is None, or that has none, keeps that: such an optimizer computes its rate itself.
    (A float goes into a CUDA graph as a constant: set to 0 later, a replay still moved the parameter by 1.0.)
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._rates: list[Tensor] = []
        self._filled: list[float | None] = []

    def refresh(self) -> None:
        """Bring the tensors up to date with `group["lr"]`. One kernel per group whose rate changed; no sync."""
        groups = self._optimizer.param_groups
        del self._rates[len(groups) :], self._filled[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(self._rates):
                # What the kernels read: float32 on CUDA; on the CPU they take any, and float64 is what a float is.
                dtype = torch.float32 if self._device.type == "cuda" else torch.float64
                with torch.inference_mode(False):  # what is made in it could never be filled outside of it
                    self._rates.append(torch.empty((), dtype=dtype, device=self._device))
                self._filled.append(None)
            rate = group.get("lr")
            if rate is None:
                continue
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._rates[i].copy_(rate.detach().reshape(()))
                self._filled[i] = None
            elif float(rate) != self._filled[i]:
                self._filled[i] = float(rate)
                self._rates[i].fill_(float(rate))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the groups have a tensor learning rate inside, and the flag without which Adam refuses to be captured."""
        groups = self._optimizer.param_groups
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            self._move_step_counts()
        given: list[dict[str, Any]] = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            # On the CPU, torch takes a tensor in a loop or in a fused kernel.
            if group.get("lr") is not None and (on_cuda or not group.get("foreach")):
                group["lr"] = rate
            if "capturable" in group and on_cuda:  # torch refuses the flag on the CPU, where nothing needs it
                group["capturable"] = True
        try:
            yield
        finally:
            for group, values in zip(groups, given, strict=True):
                group.update(values)

    def _move_step_counts(self) -> None:
        """Put step counts on the device that were made, or loaded, without the flag. They are float32 either way."""
        for state in self._optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor) and step.device != self._device:
                state["step"] = step.to(self._device)
