"""What torch.optim keeps private: hooks around a step, the state of a first step, which `step` a class has."""

import importlib
import inspect
import os
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from .guard import private

# What GradScaler inherits from torch.amp.GradScaler and touches by its private name.
for _name in ("_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker", "_get_growth_tracker"):
    private(GradScaler, _name)


def supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's GradScaler leaves unscaling and skipping to `optimizer.step`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def can_init_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `init_optimizer_state` works: for every optimizer of torch.optim but LBFGS and SparseAdam."""
    return hasattr(optimizer, "_init_group")


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of parameters that have a gradient, as the first `step` would, without stepping.

    torch.optim does that in `_init_group(group, ...)`, which also appends to lists that `step` passes.
    """
    init_group = private(optimizer, "_init_group")
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        init_group(group, *([] for _ in range(lists)))


_step_wrapper = private(torch.optim.Optimizer, "profile_hook_step")(lambda self: None).__code__


def class_step(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the `step` that a class of optimizers defines or inherits, without what torch wraps it in.

    torch wraps `step` of a class when the first object of it is made, to call hooks: a subclass that inherits `step`
    may hold another wrapper than its base. Wrappers of other makers stay.
    """
    step: Any = kind.step
    while getattr(step, "__code__", None) is _step_wrapper:
        step = step.__wrapped__
    return step


_ROOT = os.path.dirname(torch.__file__)


def is_written_by_torch(function: Any) -> bool:
    """Return whether a function was defined in torch's files: not one that somebody put in the place of torch's."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_ROOT)


def is_step_of_class(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step` is its class's: learning-rate schedulers wrap it, which counts as the same."""
    own: Any = vars(optimizer).get("step")
    if own is None:
        return True
    wrapped: Any = getattr(own, "__wrapped__", None)
    return getattr(own, "_wrapped_by_lr_sched", False) and wrapped is type(optimizer).step


_optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
_HOOKS_OF_ALL = tuple(
    private(_optimizers, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)
_HOOKS_OF_ONE = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what `optimizer.step` calls before and after itself, but for the observers of torch and of ampkit."""
    tables = [*_HOOKS_OF_ALL, *(getattr(optimizer, name, {}) for name in _HOOKS_OF_ONE)]
    return [hook for table in tables for hook in table.values() if not _is_observer(hook)]


def remove_step_hook(hook: Any) -> None:
    """Remove what `register_optimizer_step_pre_hook` was given, if it is there."""
    for key in [key for key, held in _HOOKS_OF_ALL[0].items() if held is hook]:
        _HOOKS_OF_ALL[0].pop(key, None)


def _is_observer(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "ampkit")
