"""Operations of ATen: their names, schemas and kernels, and the Python functions that call them or copy without one."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..guard import private
from .tensors import storage_address
from .tree import tensors_in

# The builtins below torch.nn.functional. torch.compile traces some of its Python functions down to them.
_nn_builtins = private(torch._C, "_nn")


def nn_builtin(name: str) -> Callable[..., Any] | None:
    """Return the builtin of this name below torch.nn.functional, or None if there is none."""
    found: Callable[..., Any] | None = getattr(_nn_builtins, name, None)
    return private(torch, "_grouped_mm") if name == "grouped_mm" else found


# Operations that ask for a property of a tensor, not for values. A dispatch mode sees them for some fake tensors only.
METADATA_OPS: frozenset[Any] = frozenset({private(torch.ops.prim, "device").default})
# The operation by which autocast and `Tensor.to` cast a tensor to another dtype or copy it to another device.
TO_COPY: Any = private(torch.ops.aten, "_to_copy").default
# Operations whose second argument is a list of indices. Of those on the host their kernels make copies.
INDEXING: frozenset[str] = frozenset(("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"))
# The operation that a dispatch mode sees when `torch.tensor(data)` is called.
LIFT_FRESH: Any = private(torch.ops.aten, "lift_fresh").default


@contextmanager
def kernels(functions: Mapping[str, Callable[..., Any]], dispatch_keys: Sequence[str]) -> Iterator[None]:
    """Context in which operations of ATen run these functions, in every thread, as their kernels for dispatch keys.

    The name of an operation is `name.overload`, or `name` for the default overload.
    """
    with private(torch.library, "_scoped_library")("aten", "IMPL") as library:
        for name, function in functions.items():
            for key in dispatch_keys:
                library.impl(name, function, key)
        yield


# has_kernel(name, dispatch key): whether an operation, as "aten::sum.dim_IntList", has a kernel of its own for the key.
has_kernel: Callable[[str, str], bool] = private(torch._C, "_dispatch_has_kernel_for_dispatch_key")


def ops_with_kernel(dispatch_key: str) -> list[str]:
    """Return the names (`aten::sum.dim_IntList`) of all operations with a kernel of their own for a dispatch key."""
    return sorted(name for name in private(torch._C, "_dispatch_get_all_op_names")() if has_kernel(name, dispatch_key))


def op_overload(name: str) -> Any:
    """Return the operation that has this name, written as `ops_with_kernel` writes it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


for _name in ("_schema", "_op"):
    private(TO_COPY, _name)
# op_schema(op): an overload's `.name`, and `.arguments` with `.name`, `.type`, `.kwarg_only`, `.N` and defaults.
op_schema: Callable[[Any], Any] = operator.attrgetter("_schema")
# op_builtin(op): the C++ function that an operation calls. From torch 2.15 on, a warning that is issued inside names
# the Python line that called this function.
op_builtin: Callable[[Any], Any] = operator.attrgetter("_op")


class OperationKind(NamedTuple):
    """What is known of all calls of an operation. Of one with control flow, which has no schema, nothing is.

    Attributes:
        name: without namespace and overload.
        written: position and name of each argument that it writes to, as its schema says.
        unmarked: the same of those that it may write to, though its schema does not say so: running statistics.
        draws: whether it draws random numbers.
        repeatable: whether it is one of ATen that gives the same for the same arguments, of shapes that are known.
    """

    name: str
    written: tuple[tuple[int, str], ...] = ()
    unmarked: tuple[tuple[int, str], ...] = ()
    draws: bool = False
    repeatable: bool = False


@functools.cache
def kind_of(op: Any) -> OperationKind:
    """Return what is known of an operation."""
    if not hasattr(op, "overloadpacket"):
        return OperationKind(str(op.name()))
    arguments = list(enumerate(op_schema(op).arguments))
    written = tuple((i, each.name) for i, each in arguments if each.alias_info and each.alias_info.is_write)
    statistics = tuple((i, each.name) for i, each in arguments if each.name in ("running_mean", "running_var"))
    draws = torch.Tag.nondeterministic_seeded in op.tags
    depends = torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags
    return OperationKind(
        str(op.overloadpacket.__name__),
        written,
        tuple(place for place in statistics if place not in written),
        draws,
        op.namespace == "aten" and not depends | draws,
    )


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to, as its schema says."""
    return _tensors_at(kind_of(op).written, args, kwargs)


def all_written(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operation writes to, whether its schema says so or not."""
    return [*written_arguments(op, args, kwargs), *_tensors_at(kind_of(op).unmarked, args, kwargs)]


def unmarked_writes(call: "OperationCall") -> list[Tensor]:
    """Return the tensors among the arguments that an operation may write to though its schema does not say so."""
    return _tensors_at(call.kind.unmarked, call.args, call.kwargs)


def _tensors_at(places: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in places]) if places else []


_TENSORS = ("given", "given_at", "made", "made_at", "written", "written_at")


class OperationCall:
    """A call of an operation below autograd, as a dispatch mode has seen it.

    `given` are the tensors among its arguments, `written` those of them that it writes to, and `made` the tensors in
    its result. `given_at`, `written_at` and `made_at` are the addresses of the memory that they lie in.
    """

    __slots__ = ("args", "kind", "kwargs", "op", "result", *_TENSORS)

    def __init__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.op, self.args, self.kwargs, self.result = op, args, kwargs, result
        self.kind = kind_of(op)
        self.given, self.made = tensors_in((args, kwargs)), tensors_in(result)
        self.given_at = [*map(storage_address, self.given)]
        self.made_at = [*map(storage_address, self.made)]
        self.written = written_arguments(op, args, kwargs)
        self.written_at = [*map(storage_address, self.written)]


# `Tensor.__repr__` looks this function up: owner and name. It switches dispatch modes off before it reads the tensor.
PRINT_ENTRY = (private(torch, "_tensor_str"), "_str")
private(*PRINT_ENTRY)
# `torch.nn.functional.cross_entropy` looks this function up: owner and name.
CROSS_ENTROPY_ENTRY = (_nn_builtins, "cross_entropy_loss")
private(*CROSS_ENTROPY_ENTRY)
# call_from_binding(function, types, args, kwargs) calls function(*args, **kwargs) as a C++ binding would. A warning of
# C++ code inside is shown when this returns. Otherwise it is shown when the outermost binding returns: for a backward,
# at the end of all of it.
call_from_binding: Callable[..., Any] = private(torch._C, "_disabled_torch_function_impl")


def host_waits() -> Iterator[tuple[str, Any, str]]:
    """Yield the functions that wait for a CUDA device without an operation: how users write the call, owner and name.

    Callers look the name up on the owner. The sync debug mode sees a stream's alone, and only when the wait is over.
    """
    for call, name in (
        ("torch.cuda.synchronize()", "_cuda_synchronize"),
        ("torch.accelerator.synchronize()", "_accelerator_synchronizeDevice"),
    ):
        private(torch._C, name)
        yield call, torch._C, name
    yield "event.synchronize()", torch.cuda.Event, "synchronize"
    yield "stream.synchronize()", torch.cuda.Stream, "synchronize"


# Methods that copy the values of a CPU tensor without an operation: owner and name.
HOST_COPIES: tuple[tuple[Any, str], ...] = ((Tensor, "tolist"), (Tensor, "numpy"))
# Functions that read tensors inside a list, which no dispatch mode sees: owner, name, position of the list.
LIST_READS: tuple[tuple[Any, str, int], ...] = (
    (torch, "tensor", 0),
    (torch, "as_tensor", 0),
    (torch, "asarray", 0),
    (Tensor, "new_tensor", 1),
)
# The operation by which `Tensor.item` reads the value.
READ: Any = private(torch.ops.aten, "_local_scalar_dense").default
# Operations of fused optimizers. They change their arguments in place, and have no kernel for fake tensors.
IN_PLACE_WITHOUT_META: tuple[Any, ...] = tuple(
    private(torch.ops.aten, name) for name in ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
)
