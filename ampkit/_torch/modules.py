"""The live tables of a module, and which parameters are sharded."""

import sys
from typing import Any

from torch import Tensor, nn


def module_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the live tables of a module: parameters, buffers, children. Faster than the iterators."""
    return module._parameters, module._buffers, module._modules


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, as `fully_shard` makes it."""
    tensors = sys.modules.get("torch.distributed.tensor")  # the import is slow, and a DTensor has made it
    return tensors is not None and isinstance(param, tensors.DTensor)


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the live tables of hooks that run in a call of the module, before, after and in backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def has_legacy_backward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of `register_backward_hook`."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)
