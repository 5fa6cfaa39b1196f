"""What capture asks of an optimizer: gradient norm, clipping, skipping and learning rate, all on the device."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ._torch import foreach_norm

# Their fused kernels divide by `optimizer.grad_scale`, return if `optimizer.found_inf` is 1, and take a tensor
# learning rate.
_FUSED = (Adam, AdamW, SGD, Adagrad)
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds it to the norm


def is_one_pass(optimizer: Optimizer) -> bool:
    """Return whether unscaling, clipping and skipping can happen inside the optimizer's own kernel."""
    # Not `_step_supports_amp_scaling`: torch forgets to set it for Adagrad, whose kernel takes both all the same.
    return isinstance(optimizer, _FUSED) and all(group["fused"] for group in optimizer.param_groups)


def why_not_capturable(optimizer: Optimizer) -> str:
    """Return why a graph cannot hold `optimizer.step()` and what to write instead, or "" if it can."""
    name = type(optimizer).__name__
    if is_one_pass(optimizer):
        return ""
    on_cuda = any(param.is_cuda for group in optimizer.param_groups for param in group["params"])
    if isinstance(optimizer, _FUSED) and not (
        isinstance(optimizer, Adagrad) and on_cuda
    ):  # torch 2.11 refuses that one
        return f"{name} reads the device or the host in every step. Write {name}(..., fused=True)."
    return f"{name} cannot skip a step on the device. Use AdamW, Adam or SGD with fused=True."


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


def total_norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm over all gradients as a float32 tensor of shape () on `device`.

    It is inf or nan exactly if some element is, save that squares of magnitudes above 1.8e19 overflow float32 too.

    Args:
        grads: dense floating tensors of any shape, dtype and device. float16 is summed in float32.
        device: where the result goes.

    Sync: none. Aliasing: none.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[grad.device, grad.dtype].append(grad)
    norms: list[Tensor] = []
    for group in groups.values():
        norms += (norm.to(device, non_blocking=True) for norm in foreach_norm(group, 2.0, dtype=torch.float32))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return `min(1, max_norm / (norm + 1e-6))`, as torch.nn.utils.clip_grad_norm_ does. Shape (). Sync: none."""
    return torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)


def step_clipped(optimizer: Optimizer, max_norm: float | None, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
    """Step, clipping the global gradient norm to `max_norm`: in the optimizer's kernel where it is fused.

    Returns:
        What `optimizer.step` returned, and the norm before clipping (None without `max_norm`).

    Sync: none beyond the optimizer's own.
    """
    grads = gradients(optimizer)
    if max_norm is None or not grads:
        return optimizer.step(*args, **kwargs), None
    if not is_one_pass(optimizer):
        norm = torch.nn.utils.clip_grad_norm_((p for g in optimizer.param_groups for p in g["params"]), max_norm)
        return optimizer.step(*args, **kwargs), norm
    norm = total_norm(grads, grads[0].device)
    with kernel_scaling(optimizer, clip_coefficient(norm, max_norm).reciprocal(), None):
        return optimizer.step(*args, **kwargs), norm


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
    Within a step it is a float32 tensor of shape () on the device, into which a changed float is filled before.
    (A float goes into a CUDA graph as a constant: set to 0 later, a replay still moved the parameter by 1.0.)
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._rates: list[Tensor] = []
        self._filled: list[float | None] = []

    def refresh(self) -> None:
        """Bring the tensors up to date with `group["lr"]`. One kernel per group whose rate changed; no sync."""
        for i, group in enumerate(self._optimizer.param_groups):
            if i == len(self._rates):
                self._rates.append(torch.empty((), dtype=torch.float32, device=self._device))
                self._filled.append(None)
            rate = group["lr"]
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
        given: list[dict[str, Any]] = [{k: group[k] for k in ("lr", "capturable") if k in group} for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True  # true of every fused kernel: its step count is on the device
        try:
            yield
        finally:
            for group, values in zip(groups, given, strict=True):
                group.update(values)
