"""The dictionaries in which a module keeps its parameters, buffers, children and hooks."""

from typing import Any

import torch
from torch import nn

from .guard import private

# A module gets them when it is made, so the class alone cannot be asked for them.
_MODULE = nn.Module()
for _name in (
    *("_parameters", "_buffers", "_modules", "_is_full_backward_hook"),
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
):
    private(_MODULE, _name)


def module_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a module's own dictionaries of parameters, buffers and children. Faster than the iterators."""
    return module._parameters, module._buffers, module._modules


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return a module's own dictionaries of hooks that run in a call of it: before, after and in backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def has_legacy_backward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of `register_backward_hook`."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


_GLOBAL_HOOKS = tuple(
    private(torch.nn.modules.module, name)
    for name in (
        *("_global_forward_pre_hooks", "_global_forward_hooks"),
        *("_global_backward_pre_hooks", "_global_backward_hooks"),
    )
)


def has_global_hooks() -> bool:
    """Return whether there are hooks that run in the calls of all modules of this process."""
    return any(_GLOBAL_HOOKS)
