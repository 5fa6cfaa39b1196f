"""Every private torch name that ampkit uses, guarded. Checked on torch 2.11.0 (CPU and CUDA 13.0 builds)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils import _pytree

_MISSING = object()


def _private(owner: object, name: str) -> Any:
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        raise ImportError(
            f"ampkit does not support torch {torch.__version__}: {owner!r} has no {name!r}. "
            "Install a torch that ampkit was checked on (2.11), or a newer ampkit."
        )
    return found


# torch.utils._pytree: the tree that a batch or an output is. torch.compile and torch.export flatten with it too.
TreeSpec = _pytree.TreeSpec
tree_flatten: Callable[[Any], tuple[list[Any], TreeSpec]] = _private(_pytree, "tree_flatten")
tree_unflatten: Callable[[Sequence[Any], TreeSpec], Any] = _private(_pytree, "tree_unflatten")
tree_flatten_with_path: Callable[[Any], tuple[list[tuple[Any, Any]], TreeSpec]] = _private(
    _pytree, "tree_flatten_with_path"
)
keystr: Callable[[Any], str] = _private(_pytree, "keystr")

# torch._foreach_norm(tensors, ord, dtype): one kernel for the norms of many tensors; clip_grad_norm_ is built on it.
foreach_norm: Callable[..., list[Tensor]] = _private(torch, "_foreach_norm")

# What GradScaler inherits from torch.amp.GradScaler and touches by its private name.
for _name in ("_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker", "_get_growth_tracker"):
    _private(GradScaler, _name)


def module_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the live tables of a module: parameters, buffers, children. Faster than the iterators."""
    return module._parameters, module._buffers, module._modules


def drop_capture_from_allocator(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the caching allocator that a capture that failed is over.

    `CUDAGraph.capture_end` raises before it does so itself (ATen/cuda/CUDAGraph.cpp). Left alone, the allocator takes
    the capture for unfinished and never again frees a block that `record_stream` marked: 20 x 64 MiB measured as lost.
    """
    assert device.index is not None
    _private(torch._C, "_cuda_endAllocateToPool")(device.index, pool)
    _private(torch._C, "_cuda_releasePool")(device.index, pool)
