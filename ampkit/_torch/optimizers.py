"""What optimizers and scalers keep private: hooks around a step, the state of a first step, a class's own `step`."""

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._undo import Undo
from .guard import private
from .tensors.modules import is_of_torch

# ampkit's GradScaler inherits these from torch.amp.GradScaler, and uses or replaces them.
_SCALER = GradScaler("cpu")
for _name in (
    *("_enabled", "_init_scale", "_scale", "_growth_tracker", "_growth_factor", "_backoff_factor", "_growth_interval"),
    *("_per_optimizer_states", "_get_growth_tracker", "_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker"),
):
    private(_SCALER, _name)


private(torch.optim.SGD, "_init_group")
# torch 2.11 has the fused kernel of Adagrad for CUDA, but its `_init_group` passes `cuda_unsupported=True` to the check
# of devices, which then refuses to run it. torch 2.15 passes nothing, and runs it.
FUSED_ADAGRAD_ON_CUDA = "cuda_unsupported" not in str(private(torch.optim.Adagrad, "_init_group").__code__.co_consts)
_step_wrapper = private(torch.optim.Optimizer, "profile_hook_step")(lambda self: None).__code__


def supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's GradScaler leaves unscaling and skipping to `optimizer.step`."""
    # Optimizers without such a step lack the name, so there is nothing to guard.
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not has_lost_fused(optimizer)


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `unscale_` was called for this optimizer since the last `update`."""
    states = private(scaler, "_per_optimizer_states")
    return id(optimizer) in states and states[id(optimizer)]["stage"] is not OptState.READY


def has_lost_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `load_state_dict` has put `fused=None` over the `fused=True` that torch's optimizer was made with.

    It still says that its step scales, and then fails an assertion, with torch's own GradScaler, too.
    """
    was_fused = getattr(optimizer, "_step_supports_amp_scaling", False) and is_of_torch(type(optimizer))
    return bool(was_fused) and not all(group.get("fused", True) for group in optimizer.param_groups)


def can_init_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `init_optimizer_state` works. It does for torch.optim, except LBFGS and SparseAdam."""
    return hasattr(optimizer, "_init_group")


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first `step` would make for the parameters that have a gradient, without stepping.

    torch.optim does so in `_init_group(group, ...)`, whose other arguments are lists that it appends to.
    """
    init_group = private(optimizer, "_init_group")
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        init_group(group, *([] for _ in range(lists)))


def note_step(optimizer: Any) -> None:
    """Have schedulers of torch know that an optimizer has stepped, where that was not by its own `step`."""
    optimizer._opt_called = True


def class_step(kind: type[torch.optim.Optimizer]) -> Any:
    """Return the `step` that a class of optimizers defines or inherits, without the wrappers that torch puts around it.

    torch wraps the `step` of a class, to call hooks, when it makes the first optimizer of the class. So a subclass that
    inherits `step` may have another wrapper than its base. Wrappers that others put there stay.
    """
    step: Any = kind.step
    while getattr(step, "__code__", None) is _step_wrapper:
        step = step.__wrapped__
    return step


_optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
# The hooks around the steps of all optimizers.
HOOKS_OF_ALL: tuple[dict[int, Any], ...] = tuple(
    private(_optimizers, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)
_HOOKS_OF_ONE = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
for _name in _HOOKS_OF_ONE:
    # An optimizer gets them when it is made. To make one here would take a second, for torch._dynamo is imported.
    if _name not in torch.optim.Optimizer.__annotations__:
        private(torch.optim.Optimizer, _name)  # raises the error


def hooks_of_one(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], ...]:
    """Return the hooks before and after its step, a table each.

    There are none where `super().__init__()` was not called, as in published forms of Lookahead and in accelerate's
    wrapper. torch then calls no hooks either.
    """
    return tuple([getattr(optimizer, name) for name in _HOOKS_OF_ONE if hasattr(optimizer, name)])


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the hooks that `optimizer.step` calls before and after itself, except those of torch and of ampkit."""
    tables = (*HOOKS_OF_ALL, *hooks_of_one(optimizer))
    return [hook for table in tables for hook in table.values() if not is_of_torch(hook)]


def remove_step_hook(hook: Any) -> None:
    """Remove what `register_optimizer_step_pre_hook` was given, if it is there."""
    for key in [key for key, held in HOOKS_OF_ALL[0].items() if held is hook]:
        HOOKS_OF_ALL[0].pop(key, None)


def _remove_note(note: "_Note") -> None:
    _noting[:] = [other for other in _noting if other is not note]


_Note = Callable[[torch.optim.Optimizer], object]
_noting: list[_Note] = []


def announce_step(optimizer: torch.optim.Optimizer) -> None:
    """Say that an optimizer is to step, which it does not if a gradient is not finite."""
    for note in _noting:
        note(optimizer)


@contextmanager
def noting_steps(note: _Note) -> Iterator[None]:
    """Context in which `note` is called with each optimizer that this thread steps, or skips for an overflow."""
    thread = threading.get_ident()

    def noted(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if threading.get_ident() == thread:
            note(optimizer)

    with Undo() as undo:
        undo.note(remove_step_hook, noted)
        register_optimizer_step_pre_hook(noted)
        undo.note(_remove_note, noted)
        _noting.append(noted)
        yield
