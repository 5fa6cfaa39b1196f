"""Every private torch name that ampkit uses, guarded. Checked on torch 2.11.0 (CPU and CUDA 13.0 builds)."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.amp.grad_scaler import GradScaler
from torch.utils import _foreach_utils, _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

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
# In-place arithmetic on many tensors in one kernel, where device and dtype are one.
foreach_add_: Callable[..., None] = _private(torch, "_foreach_add_")
foreach_sub_: Callable[..., None] = _private(torch, "_foreach_sub_")
foreach_mul_: Callable[..., None] = _private(torch, "_foreach_mul_")
foreach_copy_: Callable[..., None] = _private(torch, "_foreach_copy_")

# torch._C._nn: the builtins below torch.nn.functional. torch.compile inlines some Python functions down to them.
_nn_builtins = _private(torch._C, "_nn")


def nn_builtin(name: str) -> Callable[..., Any] | None:
    """Return the builtin of this name below torch.nn.functional, or None if there is none."""
    found: Callable[..., Any] | None = getattr(_nn_builtins, name, None)
    return found


def never_compile_by_itself(function: Callable[..., Any]) -> None:
    """Keep torch.compile from starting at this function or below. It still traces through it from compiled code.

    Where a compiled function falls back to Python, dynamo compiles the first frame below that is not torch's own: with
    a function mode around, that would be the mode, at each operation.
    """
    dynamo = _private(torch._C._dynamo, "eval_frame")
    skip = _private(dynamo, "_FrameAction").SKIP
    strategy = _private(dynamo, "_FrameExecStrategy")(skip, skip)
    _private(dynamo, "set_code_exec_strategy")(function.__code__, strategy)


# What GradScaler inherits from torch.amp.GradScaler and touches by its private name.
for _name in ("_check_scale_growth_tracker", "_lazy_init_scale_growth_tracker", "_get_growth_tracker"):
    _private(GradScaler, _name)


def supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch's GradScaler leaves unscaling and skipping to `optimizer.step`."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Operations that read what a tensor is, not what is in it. A dispatch mode sees them only for some fake tensors.
METADATA_OPS: frozenset[Any] = frozenset({_private(torch.ops.prim, "device").default})
# The cast of one tensor to another dtype or device, as autocast and `Tensor.to` make it.
TO_COPY: Any = _private(torch.ops.aten, "_to_copy").default


def fake_tensor_mode(**kwargs: Any) -> Any:
    """Return a new mode in which tensors have everything but data: `torch._subclasses.FakeTensorMode`."""
    return _private(fake_tensor, "FakeTensorMode")(**kwargs)


_LIMITS = tuple(
    _private(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
)
# In messages of errors that a kernel raises where it finds no device or no data.
_NO_DEVICE = ("NVIDIA", "CUDA", "cuda devices", "hasPrimaryContext", "data pointer", "storage")


def is_limit_of_fake_tensors(error: Exception) -> bool:
    """Return whether an error says that there is no data or no device, not that the code is wrong."""
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_DEVICE)
    return isinstance(error, _LIMITS) or told


@contextmanager
def autocast_without_cuda() -> Iterator[None]:
    """Context in which `torch.autocast("cuda")` works without a CUDA device, where it would switch itself off."""
    common = _private(torch.cuda.amp, "common")
    before = _private(common, "amp_definitely_not_available"), torch.cuda.is_bf16_supported
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    try:
        yield
    finally:
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = before


@contextmanager
def kernels(functions: Mapping[str, Callable[..., Any]], dispatch_keys: Sequence[str]) -> Iterator[None]:
    """Context in which operations of ATen run these functions, for every thread.

    Args:
        functions: by name, with the overload unless it is the default one.
        dispatch_keys: for tensors of which kind.
    """
    with _private(torch.library, "_scoped_library")("aten", "IMPL") as library:
        for name, function in functions.items():
            for key in dispatch_keys:
                library.impl(name, function, key)
        yield


def ops_with_kernel(dispatch_key: str) -> list[str]:
    """Return the names (`aten::sum.dim_IntList`) of all operations with a kernel of their own for a dispatch key."""
    has_kernel = _private(torch._C, "_dispatch_has_kernel_for_dispatch_key")
    names = _private(torch._C, "_dispatch_get_all_op_names")()
    return sorted(name for name in names if has_kernel(name, dispatch_key))


def op_overload(name: str) -> Any:
    """Return the callable of an operation's name as `ops_with_kernel` gives it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def op_schema(op: Any) -> Any:
    """Return an overload's schema: `.name`, `.arguments` with `.name`, `.type`, `.kwarg_only`, `.N` and defaults."""
    return _private(op, "_schema")


# The function modes that are entered, outermost first.
function_modes: Callable[[], list[Any]] = _private(torch.overrides, "_get_current_function_mode_stack")


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


def can_init_optimizer_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `init_optimizer_state` works: for every optimizer of torch.optim but LBFGS and SparseAdam."""
    return hasattr(optimizer, "_init_group")


def init_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state of parameters that have a gradient, as the first `step` would, without stepping.

    torch.optim does that in `_init_group(group, ...)`, which also appends to lists that `step` passes.
    """
    init_group = _private(optimizer, "_init_group")
    lists = len(inspect.signature(init_group).parameters) - 1
    for group in optimizer.param_groups:
        init_group(group, *([] for _ in range(lists)))


def version(tensor: Tensor) -> int:
    """Return a number that every change of the tensor in place raises; a replayed change does not."""
    return int(_private(tensor, "_version"))


def storage_address(tensor: Tensor) -> int:
    """Return where a tensor's memory starts, 0 where it has none (empty, sparse, fake)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, by its schema."""
    for i, argument in enumerate(op_schema(op).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))


@contextmanager
def fail_on_recompile() -> Iterator[None]:
    """Context in which torch.compile raises where it would compile: a capture must not hold that."""
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        yield
        return
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def cudagraphs_of_its_own(compiled: object) -> bool:
    """Return whether torch.compile was asked to capture CUDA graphs itself (mode="reduce-overhead", "max-autotune")."""
    parts = [compiled]
    if isinstance(compiled, nn.Module):
        parts += [part for module in compiled.modules() for part in (module, vars(module).get("_compiled_call_impl"))]
    configs = (part.get_compiler_config() for part in parts if hasattr(part, "get_compiler_config"))
    return any(config.get("triton.cudagraphs", False) for config in configs if config)


def is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, as `fully_shard` makes it."""
    tensors = sys.modules.get("torch.distributed.tensor")  # the import is slow, and a DTensor has made it
    return tensors is not None and isinstance(param, tensors.DTensor)


class _LastCall:
    """What `destroy_process_group` takes for one more communicator, which it finalizes before all backends."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.finalize = callback


def call_before_process_group_ends(callback: Callable[[], None]) -> None:
    """Have `torch.distributed.destroy_process_group()` of the default group call this first.

    There is no hook. A wrapped function would miss `from torch.distributed import destroy_process_group`.
    """
    comms = _private(torch.distributed.distributed_c10d, "_world").comms
    if not any(comm.finalize is callback for comm in comms if isinstance(comm, _LastCall)):
        comms.append(_LastCall(callback))


# How torch.optim.swa_utils groups tensors for an averaging function, and where it takes foreach kernels to be fast.
grouped_by_device_and_dtype: Callable[
    [list[list[Tensor]]], dict[tuple[torch.device, torch.dtype], tuple[list[list[Tensor]], list[int]]]
] = _private(_foreach_utils, "_group_tensors_by_device_and_dtype")
devices_with_foreach: Callable[[], list[str]] = _private(_foreach_utils, "_get_foreach_kernels_supported_devices")


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the live tables of hooks that run in a call of the module, before, after and in backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def has_legacy_backward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of `register_backward_hook`."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


# Within a backward pass: whether its caller asked to keep the graph (retain_graph=True).
keeps_graph: Callable[[], bool] = _private(torch._C._autograd, "_get_current_graph_task_keep_graph")
_current_graph_task = _private(torch._C, "_current_graph_task_id")


def in_backward() -> bool:
    """Return whether this code is called by a backward pass."""
    return bool(_current_graph_task() != -1)


# The function of the Python layer by which every backward enters autograd's engine, and where callers look it up.
ENGINE_CODE = _private(torch.autograd.graph, "_engine_run_backward").__code__
ENGINE_ENTRIES = ((torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward"))
_private(torch.autograd, "_engine_run_backward")
# Within a backward pass: the node of the graph that runs; None outside of one.
current_node: Callable[[], Any] = _private(torch._C, "_current_autograd_node")

# `Tensor.__repr__` looks this up. It switches dispatch modes off before it reads the tensor.
PRINT_ENTRY = (_private(torch, "_tensor_str"), "_str")
_private(*PRINT_ENTRY)

# call(function, types, args, kwargs): calls function(*args, **kwargs) as the C++ of a binding does. What C++ below it
# warns of is shown when this returns, not when the outermost binding does, which for a backward is at its end.
call_from_binding: Callable[..., Any] = _private(torch._C, "_disabled_torch_function_impl")


def host_waits() -> Iterator[tuple[str, Any, str]]:
    """Yield the functions that wait for a CUDA device unseen by the sync debug mode: what they are called, the owner
    and the name under which callers look them up.
    """
    yield "torch.cuda.synchronize()", torch._C, "_cuda_synchronize"
    yield "torch.accelerator.synchronize()", torch._C, "_accelerator_synchronizeDevice"
    yield "event.synchronize()", torch.cuda.Event, "synchronize"


def forward_stack(node: Any) -> list[str]:
    """Return where a node of the graph was made, as `traceback.format_stack` did there; empty without anomaly mode."""
    stack: list[str] = node.metadata.get("traceback_", [])
    return stack


def graph_nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield every node of the graph behind some tensors and `GradientEdge`s."""
    left: list[Any] = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def step_aside(mode: TorchDispatchMode) -> None:
    """Take a dispatch mode off, where it is the innermost one, until autograd has run the node that it is about to."""
    if _private(_python_dispatch, "_get_current_dispatch_mode")() is mode:
        _private(_python_dispatch, "_pop_mode")()


def is_same_generator(left: torch.Generator, right: torch.Generator) -> bool:
    """Return whether two objects are one generator: a dispatch mode is given another object than the caller has."""
    return bool(_private(left, "_cdata") == _private(right, "_cdata"))


def is_fake(kind: type) -> bool:
    """Return whether tensors of this class have everything but data."""
    return issubclass(kind, _private(fake_tensor, "FakeTensor"))


def output_dtype(node: Any) -> torch.dtype | None:
    """Return the dtype of what a node of the graph computed, as far as its gradient has it."""
    metadata = _private(node, "_input_metadata")
    dtype: torch.dtype | None = metadata[0].dtype if metadata else None
    return dtype


def has_gradient_hooks(param: Tensor) -> bool:
    """Return whether something is called with the gradient of this leaf, or when it is there."""
    return bool(_private(param, "_backward_hooks") or _private(param, "_post_accumulate_grad_hooks"))


def clear_cublas_workspaces() -> None:
    """Give back the memory that cuBLAS keeps per stream and thread. It takes new memory when it is called again."""
    _private(torch._C, "_cuda_clearCublasWorkspaces")()


def forget_compiled_code() -> None:
    """Empty what torch.compile keeps in memory: what it compiled, by module and by source. Files are left alone."""
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        return
    torch.compiler.reset()
    inductor = sys.modules.get("torch._inductor.utils")
    if inductor is not None:
        _private(inductor, "clear_caches")()
