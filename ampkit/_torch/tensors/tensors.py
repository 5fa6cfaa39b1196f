"""What torch tells of a tensor under private names only, and arithmetic on many tensors in one kernel."""

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _foreach_utils, _python_dispatch

from ..guard import private
from .fake_tensors import is_fake

# foreach_norm(tensors, ord, dtype): the norms of many tensors by one kernel. torch.nn.utils.clip_grad_norm_ calls it.
foreach_norm: Callable[..., list[Tensor]] = private(torch, "_foreach_norm")
# Arithmetic in place on many tensors. It takes one kernel if they have one device and one dtype.
foreach_add_: Callable[..., None] = private(torch, "_foreach_add_")
foreach_sub_: Callable[..., None] = private(torch, "_foreach_sub_")
foreach_mul_: Callable[..., None] = private(torch, "_foreach_mul_")
foreach_addcmul_: Callable[..., None] = private(torch, "_foreach_addcmul_")
foreach_copy_: Callable[..., None] = private(torch, "_foreach_copy_")
foreach_maximum_: Callable[..., None] = private(torch, "_foreach_maximum_")  # the larger of two numbers each

private(Tensor, "_version")
# version(tensor): a counter that rises whenever the tensor is changed in place. A replayed graph does not raise it.
version: Callable[[Tensor], int] = operator.attrgetter("_version")
# sparse_indices(tensor), sparse_values(tensor): those of a tensor of layout sparse_coo, which need not be coalesced.
sparse_indices: Callable[[Tensor], Tensor] = private(Tensor, "_indices")
sparse_values: Callable[[Tensor], Tensor] = private(Tensor, "_values")


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return the `version` of each tensor, at less cost: no Python code runs for each of them."""
    return list(map(version, tensors))


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Return whether this is a tensor. `isinstance` asks a weak proxy for its object, which may be gone."""
    return issubclass(type(value), Tensor)


def sharded_class() -> Any:
    """Return the class DTensor, () if nobody has imported it. Both can be the second argument of `isinstance`."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, and any other tensor as it is. Aliasing: the part itself, no copy."""
    return _local(tensor) if isinstance(tensor, sharded_class()) else tensor


_local: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")


_PLAIN = (Tensor, torch.nn.Parameter)  # neither sharded nor fake


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the memory that a tensor lies in, of a DTensor that of its part; None if it has none."""
    try:
        return (tensor if type(tensor) in _PLAIN else local_shard(tensor)).untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


# storage_at(address, device, bytes): memory that somebody else keeps.
_storage_at: Callable[..., Any] = private(torch._C, "_construct_storage_from_data_pointer")


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory, on CUDA, that does not keep that from being used again."""
    storage = tensor.untyped_storage()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        again = _storage_at(_pointer(storage), tensor.device, storage.nbytes())
        fresh.set_(again, tensor.storage_offset(), tensor.shape, tensor.stride())
        fresh = fresh.conj() if tensor.is_conj() else fresh
        return _neg_view(fresh) if tensor.is_neg() else fresh


_neg_view: Callable[[Tensor], Tensor] = private(torch, "_neg_view")
_pointer = torch.UntypedStorage.data_ptr  # which a recorder of ampkit's replaces, to see who else asks


def storage_address(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor lies in, 0 if it has none (empty, sparse, fake)."""
    if type(tensor) not in _PLAIN and is_fake(type(tensor)):  # torch warns of what follows
        return 0
    try:
        storage = storage_of(tensor)
        return 0 if storage is None else _pointer(storage)
    except RuntimeError:  # a nested tensor in the jagged layout has a storage without an address
        return 0


class Remembered:
    """A tensor as it was (of a DTensor, this process's part), and the means to put that back.

    The tensor has a storage, which is not kept alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = local_shard(tensor)
        self.value = tensor.clone()
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()

    @property
    def is_gone(self) -> bool:
        """Whether nothing refers to the memory any more."""
        return bool(self._storage.expired())

    def put_back(self) -> None:
        """Give the memory the values that it had, if it is there still."""
        if not self.is_gone:
            storage = private(torch.UntypedStorage, "_new_with_weak_ptr")(self._storage.cdata)
            with torch.no_grad():
                self.value.new_empty(0).set_(storage, *self._place).copy_(self.value)


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor's class holds other tensors and computes on them (DTensor, MaskedTensor)."""
    handler = private(type(tensor), "__torch_dispatch__")
    return handler is not private(torch.Tensor, "__torch_dispatch__")


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return by attribute the tensors that hold the bits of a tensor of a subclass, such as codes and scales.

    It is {} if the tensor has its bits itself, is a DTensor, or does not say where they are. Aliasing: the live ones.
    """
    if type(tensor) in _PLAIN or not _is_traceable_wrapper(tensor) or isinstance(tensor, sharded_class()):
        return {}
    flatten: Any = private(tensor, "__tensor_flatten__")
    found: dict[str, Any] = {name: vars(tensor).get(name) for name in flatten()[0]}
    return found if all(isinstance(inner, Tensor) for inner in found.values()) else {}


_is_traceable_wrapper: Callable[[object], bool] = private(_python_dispatch, "is_traceable_wrapper_subclass")

# The keys of the kernels that have autograd and version counters follow a view.
_UNTRACKED = functools.reduce(
    operator.or_,
    (
        private(torch._C, "DispatchKeySet")(private(private(torch._C, "DispatchKey"), name))
        for name in ("ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradOther")
    ),
)
# untracked(): a context in which a view of a tensor is a tensor of its own in the same memory, as from `.data`. It has
# a version counter of its own, and autograd does not take it for a view. To be used for views alone.
untracked: Callable[[], AbstractContextManager[None]] = functools.partial(
    private(torch._C, "_ExcludeDispatchKeyGuard"), _UNTRACKED
)

# torch.optim.swa_utils groups tensors by the first, and uses foreach kernels on the device types that the second lists.
grouped_by_device_and_dtype: Callable[
    [list[list[Tensor]]], dict[tuple[torch.device, torch.dtype], tuple[list[list[Tensor]], list[int]]]
] = private(_foreach_utils, "_group_tensors_by_device_and_dtype")
devices_with_foreach: Callable[[], list[str]] = private(_foreach_utils, "_get_foreach_kernels_supported_devices")


def is_same_generator(left: torch.Generator, right: torch.Generator) -> bool:
    """Return whether two Python objects are one generator. A dispatch mode gets another object than the caller has."""
    return bool(private(left, "_cdata") == private(right, "_cdata"))


private(Tensor, "_use_count")
# use_count(tensor): how many references to this tensor C++ counts. All references of Python are one.
use_count: Callable[[Tensor], int] = operator.methodcaller("_use_count")


def move_memory(tensor: Tensor) -> None:
    """Copy the memory of a tensor, and have it and all others that share it lie in the copy from now on. Sync: none."""
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes())


def shares_storage_with_none(tensor: Tensor) -> bool:
    """Return whether no other tensor lies in the same memory."""
    storage = tensor.untyped_storage()  # itself the second user of the memory, beside the tensor
    return bool(private(torch._C, "_storage_Use_Count")(private(storage, "_cdata")) <= 2)


# is_functorch_wrapped(tensor): whether it stands for other tensors within torch.func (vmap, grad), and has no memory.
is_functorch_wrapped: Callable[[Tensor], bool] = private(torch._C._functorch, "is_functorch_wrapped_tensor")


_guards: Any = getattr(torch._C._dynamo, "guards", None)  # of torch.compile; another torch may lack it


def layout_check(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a function that takes as many tensors and returns whether their layouts are those of the given ones.

    It compares classes, shapes, strides, dtypes, devices, dispatch keys and `requires_grad` in one call of C. It may
    return False for equal layouts too: if two tensors are one object, or if torch dispatches in another way, as in
    inference mode. None if this version of torch has no such function.
    """
    try:
        check: Callable[..., bool] = _guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        return check if check(*tensors) else None
    except (AttributeError, TypeError, RuntimeError):
        return None
