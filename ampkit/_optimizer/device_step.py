"""What capture asks of an optimizer: gradient norm, clipping, skipping and learning rate, all on the device."""

import inspect
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

from .._errors import AmpkitWarning, CaptureError
from .._torch.optimizers import (
    can_init_optimizer_state,
    class_step,
    init_optimizer_state,
    step_hooks,
    supports_amp_scaling,
)
from .._torch.streams import is_capturing
from .._torch.tensors import foreach_add_, foreach_copy_, foreach_mul_, foreach_norm, foreach_sub_
from .._undo import Undo
from .._user_line import TORCH

# Their fused kernels divide by `optimizer.grad_scale`, return if `optimizer.found_inf` is 1, and take a tensor learning
# rate.
_FUSED = (Adam, AdamW, SGD, Adagrad)
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grads_with_norm_ adds it to the norm


def _is_written_by_torch(function: Any) -> bool:
    """Return whether a function was defined in torch's files, so that nobody put another one in its place."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(TORCH)


def _is_step_of_class(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` is the method of its class, or a learning-rate scheduler's wrapper around it."""
    own: Any = vars(optimizer).get("step")
    if own is None:
        return True
    wrapped: Any = getattr(own, "__wrapped__", None)
    return wrapped is type(optimizer).step and own.__code__.co_filename == lr_scheduler.__file__


def torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of torch.optim whose step is this optimizer's, None if it has one of its own.

    By the code that would run, not by inheritance: a subclass may do anything in its step.
    """
    kind = type(optimizer)
    base = next((base for base in kind.__mro__ if f"{base.__module__}.".startswith("torch.optim.")), Optimizer)
    if base is Optimizer or not _is_step_of_class(optimizer) or class_step(kind) is not class_step(base):
        return None
    if not _is_written_by_torch(class_step(base)):  # replaced on torch's own class
        return None
    replaced = any(
        name in vars(optimizer) or getattr(kind, name, None) is not getattr(base, name, None) for name in _CALLED
    )
    return None if replaced else base


_HOOKS = "has step hooks, which a replay would not call. Call after the step what they do."
# What steps of torch.optim call on their optimizer, and the wrapper that calls hooks.
_CALLED = ("_init_group", "_accelerator_graph_capture_health_check", "_optimizer_step_code")


def is_one_pass(optimizer: Optimizer) -> bool:
    """Return whether unscaling, clipping and skipping can happen inside the optimizer's own kernel."""
    # Not `_step_supports_amp_scaling`: torch forgets to set it for Adagrad, whose kernel takes both all the same.
    return torch_class(optimizer) in _FUSED and _is_fused(optimizer)


def _is_fused(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, _FUSED) and all(group["fused"] for group in optimizer.param_groups)


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` is given `grad_scale` and `found_inf`, as torch's scaler does it too."""
    return is_one_pass(optimizer) or supports_amp_scaling(optimizer)


def runs_beside_step(optimizer: Optimizer) -> str:
    """Return what `optimizer.step()` runs beside the step of its class, "" if nothing.

    It may do anything, anywhere, and torch's scaler does not run it in a step that it skips on the host.
    """
    if step_hooks(optimizer):
        return "step hooks"
    return "" if _is_step_of_class(optimizer) else "a step that was replaced on the object"


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Return whether unscaling and skipping are left to a step of another maker, as torch's scaler leaves them.

    A subclass of a fused optimizer says so too, but by what its base has set: its own part may know nothing of it.
    """
    if not supports_amp_scaling(optimizer) or torch_class(optimizer) is not None:
        return False
    return not isinstance(optimizer, _FUSED) or "grad_scaler" in inspect.signature(optimizer.step).parameters


def is_revocable(optimizer: Optimizer) -> bool:
    """Return whether a step of torch.optim can be undone on the device: nothing that it changes is on the host."""
    kind = torch_class(optimizer)
    if kind is SGD:
        return True  # momentum is all it has
    on_device = all(group.get("capturable") for group in optimizer.param_groups)
    return kind is not None and on_device and can_init_optimizer_state(optimizer)


def why_not_capturable(optimizer: Optimizer) -> str:
    """Return why a graph cannot hold `optimizer.step()` and what to write instead, or "" if it can."""
    name = type(optimizer).__name__
    if step_hooks(optimizer):
        return f"{name} {_HOOKS}"
    if _is_fused(optimizer) or all("capturable" in group for group in optimizer.param_groups):
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
    if not (isinstance(optimizer, SGD) and _is_fused(optimizer)):
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
    """Return the norm over all gradients as a tensor of shape () on `device`: float32, or float64 if a gradient is.

    It is inf or nan exactly if some element is, save that powers that overflow float32 do so too: for the 2-norm
    those of magnitudes above 1.8e19.

    Args:
        grads: dense tensors of any shape and device, floating or complex. float16 is summed in float32, float64 and
            complex128 in float64.
        device: where the result goes.
        norm_type: order of the norm, above 0; inf is the largest magnitude.

    Sync: none. Aliasing: none.
    """
    filled = (grad for grad in grads if grad.numel())
    groups = _grouped(torch.view_as_real(grad) if grad.is_complex() else grad for grad in filled)
    norms = [torch.zeros((), dtype=torch.float32, device=device)] if not groups else []
    for (_, dtype), group in groups.items():
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        norms += (norm.to(device, non_blocking=True) for norm in foreach_norm(group, norm_type, dtype=wide))
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
    if not is_one_pass(optimizer) or _has_double(grads):  # a kernel takes a float32 divisor
        params = (param for group in optimizer.param_groups for param in group["params"])
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return optimizer.step(*args, **kwargs), norm
    norm = total_norm(grads, grads[0].device, norm_type)
    with kernel_scaling(optimizer, clip_coefficient(norm, max_norm).reciprocal(), None):
        return optimizer.step(*args, **kwargs), norm


def multiply_(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a float32 or float64 tensor of shape (), in place. One kernel per device and dtype; no
    sync.
    """
    for (device, dtype), group in _grouped(grads).items():
        # A factor of another dtype would be a kernel per tensor; but float32 for float16, which 1 / 65536 underflows.
        wide = torch.float64 if dtype in _DOUBLES else torch.float32
        foreach_mul_(group, factor.to(device, wide, non_blocking=True))


_DOUBLES = (torch.float64, torch.complex128)


def _has_double(grads: Sequence[Tensor]) -> bool:
    return any(grad.dtype in _DOUBLES for grad in grads)


def revocable_step(optimizer: Optimizer, found_inf: Tensor, *args: Any, **kwargs: Any) -> float | None:
    """Step, and undo the step bit by bit on the device where `found_inf` is 1. See `undoable_step`.

    Args:
        optimizer: one for which `is_revocable` holds, with gradients that are unscaled already.
        found_inf: 0.0 or 1.0, float32, shape ().
        *args: passed on to `optimizer.step`.
        **kwargs: passed on to `optimizer.step`.

    Returns:
        What `optimizer.step` returned.

    Sync: none.
    """
    with torch.no_grad():
        init_optimizer_state(optimizer)  # what the first step would make could not be undone
    return undoable_step(optimizer, found_inf, list(_changed_by_step(optimizer)), *args, **kwargs)


def undoable_step(
    optimizer: Optimizer, found_inf: Tensor, changed: Sequence[Tensor], *args: Any, **kwargs: Any
) -> float | None:
    """Step, and give tensors the bits that they had before, on the device, where `found_inf` is 1.

    For optimizers without a kernel that skips. Zero gradients would not do: moments decay and weights shrink on them.
    The tensors are backed up, stepped, and put back by integer arithmetic on their bits, which nan cannot pass
    through: `new + (old - new) * found_inf`. Three passes over parameters and state beside the optimizer's own.

    Args:
        optimizer: its gradients are unscaled already.
        found_inf: 0.0 or 1.0, float32, shape ().
        changed: every tensor that the step may change; no two of them share memory.
        *args: passed on to `optimizer.step`.
        **kwargs: passed on to `optimizer.step`.

    Returns:
        What `optimizer.step` returned.

    Sync: none.
    """
    with torch.no_grad():
        groups = _grouped(map(_as_integers, changed))
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
    with Undo() as undo:  # an interrupt must not leave a step that was to be skipped
        undo.note(_call_once, iter(undoing))
        result: float | None = optimizer.step(*args, **kwargs)
    return result


def _call_once(left: "Iterator[partial[None]]") -> None:
    """Call what is left, each once though this may be interrupted and called again: taken and called in one step of the
    interpreter."""
    with torch.no_grad():
        deque(map(partial.__call__, left), maxlen=0)


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
    with Undo() as undo:
        undo.note(vars(optimizer).pop, "grad_scale", None)
        undo.note(vars(optimizer).pop, "found_inf", None)
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        yield


def seed_momentum(optimizer: Optimizer) -> bool:
    """Give a fused SGD zero momentum buffers before its first step; return False where zeros would not be exact.

    torch allocates them uninitialised and lets the kernel fill them; if the first step is skipped the garbage stays,
    and a parameter with zero gradient then moved by 6.3 (torch 2.11). Zeros are exact where dampening is 0: the kernel
    computes `momentum * 0 + gradient`. With dampening the first step is another formula, and the caller must not skip
    it in the kernel.
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
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        elif bare:
            exact = False
    return exact


_REPLACED = ("lr", "capturable", "foreach")  # in the groups, for the step alone


@dataclass
class _Rate:
    """The learning rate of a group.

    Attributes:
        tensor: that the step reads.
        filled: what is in it, None if that is not known.
    """

    tensor: Tensor
    filled: float | None = None


class CapturableGroups:
    """What a captured step must find in `optimizer.param_groups`, put there for the step alone.

    `group["lr"]` stays what the user made it: schedulers, checkpoints and assignments see a float and need no device.
    Within a step it is a tensor of shape () on the device, into which a changed float is filled before. A group whose
    rate is None, or that has none, keeps that: such an optimizer computes its rate itself.
    (A float goes into a CUDA graph as a constant: set to 0 later, a replay still moved the parameter by 1.0.)

    On CUDA the loops of RMSprop and Adadelta (`foreach=False`) would read that tensor on the host in every step, so
    their foreach kernels run, which take it. That is said once.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._rates: list[_Rate] = []
        if device.type == "cuda" and any(map(self._reads_rate, optimizer.param_groups)):
            name = type(optimizer).__name__
            warnings.warn(
                f"{name}(foreach=False) reads its learning rate on the host, which a graph cannot hold: the step runs "
                f"its foreach kernels, which may differ in the last bit. Write {name}(..., foreach=True).",
                AmpkitWarning,
                stacklevel=4,
            )

    def _reads_rate(self, group: dict[str, Any]) -> bool:
        """Return whether the step turns a tensor rate into a float: `param.add_(..., alpha=-lr)` in torch 2.11."""
        return isinstance(self._optimizer, (RMSprop, Adadelta)) and group.get("foreach") is False

    def refresh(self) -> None:
        """Bring the tensors up to date with `group["lr"]`. One kernel per group whose rate changed; no sync."""
        groups = self._optimizer.param_groups
        del self._rates[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(self._rates):
                # What the kernels read: float32 on CUDA; on the CPU they take any, and float64 is what a float is.
                dtype = torch.float32 if self._device.type == "cuda" else torch.float64
                with torch.inference_mode(False):  # what is made in it could never be filled outside of it
                    self._rates.append(_Rate(torch.empty((), dtype=dtype, device=self._device)))
            rate = group.get("lr")
            if rate is None:
                continue
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._rates[i].filled = None
                self._rates[i].tensor.copy_(rate.detach().reshape(()))
            elif float(rate) != self._rates[i].filled:
                self._rates[i].tensor.fill_(float(rate))
                self._rates[i].filled = float(rate)  # behind it, for an interrupt may come between

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the groups have a tensor learning rate inside, and the flag without which Adam refuses to be captured."""
        groups = self._optimizer.param_groups
        on_cuda = self._device.type == "cuda"
        if is_capturing() and step_hooks(self._optimizer):  # registered since `why_not_capturable` was asked
            raise CaptureError(f"{type(self._optimizer).__name__} {_HOOKS}")
        if on_cuda:
            self._move_step_counts()
        given: list[dict[str, Any]] = [{k: group[k] for k in _REPLACED if k in group} for group in groups]
        with Undo() as undo:
            for group, values in zip(groups, given, strict=True):
                undo.note(group.update, values)
            for group, rate in zip(groups, self._rates, strict=True):
                # On the CPU, torch takes a tensor in a loop or in a fused kernel.
                if group.get("lr") is not None and (on_cuda or not group.get("foreach")):
                    group["lr"] = rate.tensor
                if on_cuda and self._reads_rate(group):
                    group["foreach"] = True
                if "capturable" in group and on_cuda:  # torch refuses the flag on the CPU, where nothing needs it
                    group["capturable"] = True
            yield

    def _move_step_counts(self) -> None:
        """Put step counts on the device that were made, or loaded, without the flag. They are float32 either way."""
        for state in self._optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor) and step.device != self._device:
                state["step"] = step.to(self._device)
