"""What kind of step an optimizer has: torch.optim's or another, in which kernel, and whether a graph can hold it."""

import inspect
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adagrad, Adam, AdamW, Muon, Optimizer, Rprop, lr_scheduler

from .._torch.optimizers import (
    FUSED_ADAGRAD_ON_CUDA,
    can_init_optimizer_state,
    class_step,
    step_hooks,
    supports_amp_scaling,
)
from .._user_line import TORCH

# Their fused kernels divide gradients by `optimizer.grad_scale`, return at once if `optimizer.found_inf` is 1, and take
# a learning rate that is a tensor.
_FUSED = (Adam, AdamW, SGD, Adagrad)
# Methods of the optimizer that a step of torch.optim calls, and the wrapper that calls hooks.
_CALLED_BY_STEP = ("_init_group", "_accelerator_graph_capture_health_check", "_optimizer_step_code")
STEP_HOOKS = "has step hooks, which a replay would not call. Call after the step what they do."


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, in its order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


_models: "WeakKeyDictionary[Optimizer, ref[nn.Module]]" = WeakKeyDictionary()


def sum_in_order_of(model: nn.Module, optimizer: Optimizer) -> None:
    """Have norms over the gradients of an optimizer be summed in the order of a model, as `clip_grad_norm_` of the
    model's parameters does. Param groups, as those without weight decay, often have another one."""
    _models[optimizer] = ref(model)


def summed_parameters(*optimizers: Optimizer) -> list[Tensor]:
    """Return all parameters of optimizers in the order in which norms are summed: of the model, if it is known."""
    params, model = [*chain.from_iterable(map(parameters, optimizers))], _models.get(optimizers[0], lambda: None)()
    if model is None:
        return params
    order: dict[Tensor, int] = {param: i for i, param in enumerate(model.parameters())}
    return sorted(params, key=lambda param: order.get(param, len(order)))


def gradients(*optimizers: Optimizer) -> list[Tensor]:
    """Return the gradients that `optimizer.step()` will read, in the order in which their norms are summed."""
    return [param.grad for param in summed_parameters(*optimizers) if param.grad is not None]


def torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class of torch.optim whose code runs in this optimizer's step, None if there is other code in it.

    Inheritance does not decide this, because the step of a subclass may do anything.
    """
    own, cls = vars(optimizer), type(optimizer)
    if cls.__module__.startswith("torch.optim."):
        base = cls
    else:
        base = next((base for base in cls.__mro__ if f"{base.__module__}.".startswith("torch.optim.")), Optimizer)
    if base is Optimizer or any(map(own.__contains__, _CALLED_BY_STEP)) or _is_step_replaced(optimizer):
        return None
    step = class_step(base)
    code = getattr(step, "__code__", None)
    if code is None or not code.co_filename.startswith(TORCH):  # somebody replaced the step of torch's own class
        return None
    if cls is base:
        return base
    called = ((getattr(cls, name, None), getattr(base, name, None)) for name in _CALLED_BY_STEP)
    return base if class_step(cls) is step and all(own is torchs for own, torchs in called) else None


def _is_step_replaced(optimizer: Optimizer) -> bool:
    """Return whether the object has a `step` of its own. A learning-rate scheduler's wrapper does not count as one."""
    own: Any = vars(optimizer).get("step")
    if own is None:
        return False
    wrapped: Any = getattr(own, "__wrapped__", None)
    return wrapped is not type(optimizer).step or own.__code__.co_filename != lr_scheduler.__file__


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether each group asks for the fused kernel, of an optimizer of torch or of a subclass of one."""
    return isinstance(optimizer, _FUSED) and all(group["fused"] for group in optimizer.param_groups)


def scales_in_kernel(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own kernel can unscale, clip and skip."""
    # `_step_supports_amp_scaling` does not tell: torch 2.11 does not set it for Adagrad, whose kernel can do the same.
    return torch_class(optimizer) in _FUSED and is_fused(optimizer)


def takes_scale(optimizer: Optimizer) -> bool:
    """Return whether `optimizer.step` reads `optimizer.grad_scale` and `optimizer.found_inf`."""
    return scales_in_kernel(optimizer) or supports_amp_scaling(optimizer)


def runs_beside_step(optimizer: Optimizer) -> str:
    """Return what `optimizer.step()` runs beside the step of its class, "" if nothing.

    Such code may do anything, so a step that it belongs to cannot be undone. torch's scaler does not run it in a
    skipped step.
    """
    if step_hooks(optimizer):
        return "step hooks"
    return "a step that was replaced on the object" if _is_step_replaced(optimizer) else ""


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Return whether unscaling and skipping must be left to the optimizer's own step, as torch's scaler leaves them.

    An optimizer that is not torch's says so by an attribute. A subclass of a fused optimizer inherits the attribute,
    but its own code may ignore the scale, so such a class counts only if its step takes the scaler as an argument.
    """
    if not supports_amp_scaling(optimizer) or torch_class(optimizer) is not None:
        return False
    return not isinstance(optimizer, _FUSED) or "grad_scaler" in inspect.signature(optimizer.step).parameters


def can_be_undone(optimizer: Optimizer) -> bool:
    """Return whether a step of torch.optim can be undone on the device, since it changes nothing elsewhere."""
    cls = torch_class(optimizer)
    if cls in (SGD, Muon):
        return True  # momentum is all their state
    # On the CPU, where torch refuses the flag, step counts are tensors beside the parameters anyway. State that begins
    # with the rate of the first step would stay, if that is undone.
    on_cpu = cls not in (ASGD, Rprop) and all(param.device.type == "cpu" for param in parameters(optimizer))
    on_device = all("capturable" in group and (group["capturable"] or on_cpu) for group in optimizer.param_groups)
    return cls is not None and on_device and can_init_optimizer_state(optimizer)


def why_not_capturable(optimizer: Optimizer) -> str:
    """Return why a graph cannot hold `optimizer.step()` and what to write instead, or "" if it can."""
    name = type(optimizer).__name__
    if step_hooks(optimizer):
        return f"{name} {STEP_HOOKS}"
    if is_fused(optimizer) or all("capturable" in group for group in optimizer.param_groups):
        return ""
    on_cuda = any(param.is_cuda for param in parameters(optimizer))
    if isinstance(optimizer, _FUSED) and not (isinstance(optimizer, Adagrad) and on_cuda and not FUSED_ADAGRAD_ON_CUDA):
        return f"{name} reads its learning rate or its step count on the host. Write {name}(..., fused=True)."
    return f"{name} has no form that a graph can hold. Use one that has: AdamW, Adam or SGD with fused=True."


def why_other_bits(optimizer: Optimizer) -> str:
    """Return why its step in a graph has other bits than in a loop, of one that a graph can hold; "" if it has not."""
    on_host = any(param.is_cuda for param in parameters(optimizer)) and not is_fused(optimizer)
    if not on_host or all(group.get("capturable") for group in optimizer.param_groups):
        return ""
    name = type(optimizer).__name__
    return (
        f"{name} computes bias corrections on the host in float64, and in a graph in float32 on the device. Write "
        f"{name}(..., capturable=True), in the loop that you compare with, too."
    )


def may_be_constant(optimizer: Optimizer) -> bool:
    """Return whether a graph may hold `optimizer.step()` as long as its numbers do not change, its rate among them.

    That is not known before steps were watched, unless the code is torch's own: most of torch's optimizers compute with
    a step count on the host.
    """
    return torch_class(optimizer) in (None, SGD, Muon) and not step_hooks(optimizer)


def makes_rate_tensors(optimizer: Optimizer) -> bool:
    """Return whether the class of an optimizer has made tensors of the rates that it was given as numbers.

    Its step reads tensors then (those of torchao raise an error if they find a number), and may be given others, on the
    device.
    """
    if torch_class(optimizer) is not None or isinstance(optimizer.defaults.get("lr"), Tensor):
        return False
    return all(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups)


def why_not_called(optimizer: Optimizer) -> str:
    """Return why `optimizer.step()` cannot be called without a closure and what to use instead, or "" if it can."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return ""
    name = type(optimizer).__name__
    return f"{name} computes the loss several times in a step. Use AdamW, Adam or SGD with fused=True."


def broken_kernel(optimizer: Optimizer) -> str:
    """Return which fused kernel computes wrong values here and what to write instead, or "".

    On the CPU, torch 2.11's fused SGD updates only the last few elements of a float16 or bfloat16 parameter
    (pytorch#191763, fixed by #192545). A small step shows whether this version of torch does so.
    """
    if not (isinstance(optimizer, SGD) and is_fused(optimizer)):
        return ""
    cpu_dtypes = {param.dtype for param in parameters(optimizer) if param.device.type == "cpu"}
    for dtype in cpu_dtypes & {torch.float16, torch.bfloat16}:
        param = torch.ones(64, dtype=dtype, requires_grad=True)  # more elements than a vector register takes
        param.grad = torch.ones_like(param)
        SGD([param], lr=1.0, fused=True).step()
        if param.any():
            return f"torch {torch.__version__} does not update {dtype} parameters with fused SGD on the CPU. Use AdamW."
    return ""
