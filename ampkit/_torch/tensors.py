"""What torch knows of a tensor and does not publish, and arithmetic on many tensors in one kernel."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _foreach_utils

from .guard import private

# torch._foreach_norm(tensors, ord, dtype): one kernel for the norms of many tensors; clip_grad_norm_ is built on it.
foreach_norm: Callable[..., list[Tensor]] = private(torch, "_foreach_norm")
# In-place arithmetic on many tensors in one kernel, where device and dtype are one.
foreach_add_: Callable[..., None] = private(torch, "_foreach_add_")
foreach_sub_: Callable[..., None] = private(torch, "_foreach_sub_")
foreach_mul_: Callable[..., None] = private(torch, "_foreach_mul_")
foreach_copy_: Callable[..., None] = private(torch, "_foreach_copy_")


def version(tensor: Tensor) -> int:
    """Return a number that every change of the tensor in place raises; a replayed change does not."""
    return int(private(tensor, "_version"))


def storage_address(tensor: Tensor) -> int:
    """Return where a tensor's memory starts, 0 where it has none (empty, sparse, fake)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that stands for other tensors (DTensor, MaskedTensor)."""
    handler = private(type(tensor), "__torch_dispatch__")
    return handler is not private(torch.Tensor, "__torch_dispatch__")


# How torch.optim.swa_utils groups tensors for an averaging function, and where it takes foreach kernels to be fast.
grouped_by_device_and_dtype: Callable[
    [list[list[Tensor]]], dict[tuple[torch.device, torch.dtype], tuple[list[list[Tensor]], list[int]]]
] = private(_foreach_utils, "_group_tensors_by_device_and_dtype")
devices_with_foreach: Callable[[], list[str]] = private(_foreach_utils, "_get_foreach_kernels_supported_devices")


def is_same_generator(left: torch.Generator, right: torch.Generator) -> bool:
    """Return whether two objects are one generator: a dispatch mode is given another object than the caller has."""
    return bool(private(left, "_cdata") == private(right, "_cdata"))


# The larger of two numbers each, in place, for many tensors in one kernel.
foreach_maximum_: Callable[..., None] = private(torch, "_foreach_maximum_")


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version` of each, without a step of the interpreter per tensor."""
    return list(map(_version_of, tensors))


private(Tensor, "_version")
_version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


def use_count(tensor: Tensor) -> int:
    """Return how many have this tensor, all of Python counted once."""
    return int(private(tensor, "_use_count")())


def shares_storage_with_none(tensor: Tensor) -> bool:
    """Return whether no other tensor lies in the same memory. The storage's object in Python is one user itself."""
    storage = tensor.untyped_storage()
    return bool(private(torch._C, "_storage_Use_Count")(storage._cdata) <= 2)


# Whether a tensor stands for others within torch.func (vmap, grad), and so has no memory.
is_functorch_wrapped: Callable[[Tensor], bool] = private(torch._C._functorch, "is_functorch_wrapped_tensor")
