"""Operations of ATen: their schemas, their kernels, and the functions of Python that end in one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .guard import private
from .tree import tree_flatten

# torch._C._nn: the builtins below torch.nn.functional. torch.compile inlines some Python functions down to them.
_nn_builtins = private(torch._C, "_nn")


def nn_builtin(name: str) -> Callable[..., Any] | None:
    """Return the builtin of this name below torch.nn.functional, or None if there is none."""
    found: Callable[..., Any] | None = getattr(_nn_builtins, name, None)
    return found


# Operations that read what a tensor is, not what is in it. A dispatch mode sees them only for some fake tensors.
METADATA_OPS: frozenset[Any] = frozenset({private(torch.ops.prim, "device").default})
# The cast of one tensor to another dtype or device, as autocast and `Tensor.to` make it.
TO_COPY: Any = private(torch.ops.aten, "_to_copy").default
# What a dispatch mode sees of `torch.tensor(data)`.
LIFT_FRESH: Any = private(torch.ops.aten, "lift_fresh").default


@contextmanager
def kernels(functions: Mapping[str, Callable[..., Any]], dispatch_keys: Sequence[str]) -> Iterator[None]:
    """Context in which operations of ATen run these functions, for every thread.

    Args:
        functions: by name, with the overload unless it is the default one.
        dispatch_keys: for tensors of which kind.
    """
    with private(torch.library, "_scoped_library")("aten", "IMPL") as library:
        for name, function in functions.items():
            for key in dispatch_keys:
                library.impl(name, function, key)
        yield


def ops_with_kernel(dispatch_key: str) -> list[str]:
    """Return the names (`aten::sum.dim_IntList`) of all operations with a kernel of their own for a dispatch key."""
    has_kernel = private(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    names = private(torch._C, "_dispatch_get_all_op_names")()
    return sorted(name for name in names if has_kernel(name, dispatch_key))


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Return whether an operation of ATen, by name without `aten::`, has a kernel of its own for a dispatch key."""
    return bool(private(torch._C, "_dispatch_has_kernel_for_dispatch_key")(f"aten::{name}", dispatch_key))


def op_overload(name: str) -> Any:
    """Return the callable of an operation's name as `ops_with_kernel` gives it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def has_overload(name: str) -> bool:
    """Return whether the running torch has an operation of this name, as `ops_with_kernel` gives it."""
    try:
        op_overload(name)
    except AttributeError:
        return False
    return True


def op_schema(op: Any) -> Any:
    """Return an overload's schema: `.name`, `.arguments` with `.name`, `.type`, `.kwarg_only`, `.N` and defaults."""
    return private(op, "_schema")


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, by its schema."""
    for i, argument in enumerate(op_schema(op).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))


# `Tensor.__repr__` looks this up. It switches dispatch modes off before it reads the tensor.
PRINT_ENTRY = (private(torch, "_tensor_str"), "_str")
private(*PRINT_ENTRY)
# call(function, types, args, kwargs): calls function(*args, **kwargs) as the C++ of a binding does. What C++ below it
# warns of is shown when this returns, not when the outermost binding does, which for a backward is at its end.
call_from_binding: Callable[..., Any] = private(torch._C, "_disabled_torch_function_impl")


def op_builtin(op: Any) -> Any:
    """Return what an overload calls in C++. From torch 2.15 on, warnings below name the line of Python calling it."""
    return private(op, "_op")


def host_waits() -> Iterator[tuple[str, Any, str]]:
    """Yield the functions that wait for a CUDA device without an operation: what they are called, the owner and the
    name under which callers look them up. The sync debug mode sees the stream's alone, and only when it is over.
    """
    yield "torch.cuda.synchronize()", torch._C, "_cuda_synchronize"
    yield "torch.accelerator.synchronize()", torch._C, "_accelerator_synchronizeDevice"
    yield "event.synchronize()", torch.cuda.Event, "synchronize"
    yield "stream.synchronize()", torch.cuda.Stream, "synchronize"


# What copies a tensor's values to the host without an operation, where the tensor is on the CPU: the owner, the name.
HOST_COPIES: tuple[tuple[Any, str], ...] = ((Tensor, "tolist"), (Tensor, "numpy"))
# What reads tensors that stand in a list, hidden from dispatch modes: the owner, the name, the place of the list.
LIST_READS: tuple[tuple[Any, str, int], ...] = (
    (torch, "tensor", 0),
    (torch, "as_tensor", 0),
    (torch, "asarray", 0),
    (Tensor, "new_tensor", 1),
)
for _owner, _name in (*HOST_COPIES, *(entry[:2] for entry in LIST_READS)):
    private(_owner, _name)
# What `Tensor.item` comes down to.
READ: Any = private(torch.ops.aten, "_local_scalar_dense").default
# Kernels of optimizers that change their arguments in place, and that fake tensors have no kernel of.
IN_PLACE_WITHOUT_META: tuple[Any, ...] = tuple(
    private(torch.ops.aten, name) for name in ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
)
