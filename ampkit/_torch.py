"""Every private torch name that ampkit uses, guarded. Checked on torch 2.11.0 (CPU, CUDA 13.0) and 2.15.0 (CPU)."""

import ctypes
import functools
import importlib
import inspect
import itertools
import operator
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.utils import _device, _foreach_utils, _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from ._undo import Undo

_MISSING = object()


def _private(owner: object, name: str) -> Any:
    found = getattr(owner, name, _MISSING)
    if found is _MISSING:
        raise ImportError(
            f"ampkit does not support torch {torch.__version__}: {owner!r} has no {name!r}. "
            "Install a torch that ampkit was checked on (2.11, 2.15), or a newer ampkit."
        )
    return found


# torch.utils._pytree: the tree that a batch or an output is. torch.compile and torch.export flatten with it too.
TreeSpec = _pytree.TreeSpec
tree_flatten: Callable[..., tuple[list[Any], TreeSpec]] = _private(_pytree, "tree_flatten")
tree_unflatten: Callable[[Sequence[Any], TreeSpec], Any] = _private(_pytree, "tree_unflatten")
tree_flatten_with_path: Callable[[Any], tuple[list[tuple[Any, Any]], TreeSpec]] = _private(
    _pytree, "tree_flatten_with_path"
)
keystr: Callable[[Any], str] = _private(_pytree, "keystr")


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the leaves of a tree that are tensors."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


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
_choose_attention = _private(torch, "_fused_sdp_choice")


def settle_attention_priority(device: torch.device) -> None:
    """Have torch settle in which order it tries attention kernels: its first choice on a device may change that order
    for the process (cuDNN first on Hopper, ATen/native/transformers/cuda/sdp_utils.cpp). Runs no kernel of attention.
    """
    tokens = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
    _choose_attention(tokens, tokens, tokens)


# The cast of one tensor to another dtype or device, as autocast and `Tensor.to` make it.
TO_COPY: Any = _private(torch.ops.aten, "_to_copy").default


# What a dispatch mode sees of `torch.tensor(data)`.
LIFT_FRESH: Any = _private(torch.ops.aten, "lift_fresh").default


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
    with Undo() as undo:
        undo.note(setattr, common, "amp_definitely_not_available", before[0])
        undo.note(setattr, torch.cuda, "is_bf16_supported", before[1])
        common.amp_definitely_not_available = lambda: False
        torch.cuda.is_bf16_supported = lambda including_emulation=True: True
        yield


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


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Return whether an operation of ATen, by name without `aten::`, has a kernel of its own for a dispatch key."""
    return bool(_private(torch._C, "_dispatch_has_kernel_for_dispatch_key")(f"aten::{name}", dispatch_key))


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
    return _private(op, "_schema")


_function_modes: Callable[[], list[Any]] = _private(torch.overrides, "_get_current_function_mode_stack")


def function_modes() -> list[Any]:
    """Return the function modes that are entered, outermost first, without those that change nothing."""
    return [mode for mode in _function_modes() if not isinstance(mode, UnseenFunctionMode)]


# The mode that torch.set_default_device, and a torch.device as a context, enter.
DeviceContext: Any = _private(_device, "DeviceContext")


def _settings() -> dict[str, Callable[[], Any]]:
    """Return how each setting of torch is read that decides which kernels run, by the name that its user knows.

    All of them are C functions where there is one, since they are read in every call: 1.9 us together. `allow_tf32` and
    `torch.get_float32_matmul_precision` are not among them, because both raise once `fp32_precision` was set; what they
    set shows in `fp32_precision`.
    """
    fp32_precision = _private(torch._C, "_get_fp32_precision_getter")
    found = {
        "torch.is_grad_enabled()": torch.is_grad_enabled,
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
        "torch.get_default_dtype()": torch.get_default_dtype,
        "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
        "torch.backends.cuda.matmul.fp32_precision": functools.partial(fp32_precision, "cuda", "matmul"),
        "torch.backends.cudnn.conv.fp32_precision": functools.partial(fp32_precision, "cuda", "conv"),
        "torch.backends.cudnn.rnn.fp32_precision": functools.partial(fp32_precision, "cuda", "rnn"),
        "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
        "torch.backends.opt_einsum.enabled": _private(torch.backends.opt_einsum, "_get_enabled"),
        "torch.backends.opt_einsum.strategy": _private(torch.backends.opt_einsum, "_get_strategy"),
        **{name: _private(torch._C, binding) for name, binding in _BINDINGS.items()},
    }
    optional = {name: getattr(torch._C, binding, None) for name, binding in _OPTIONAL_BINDINGS.items()}
    # torch 2.11 has it, with other implementations than its own behind the one flash attention.
    optional["torch.nn.attention.current_flash_attention_impl()"] = getattr(
        torch.nn.attention, "current_flash_attention_impl", None
    )
    return {**found, **{name: read for name, read in optional.items() if read is not None}}


_MATMUL, _CUDNN = "torch.backends.cuda.matmul.", "torch.backends.cudnn."
_BINDINGS = {
    f"{_MATMUL}allow_fp16_reduced_precision_reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
    f"{_MATMUL}allow_bf16_reduced_precision_reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
    f"{_MATMUL}allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "torch.backends.cuda.preferred_blas_library()": "_get_blas_preferred_backend",
    "torch.backends.cuda.preferred_linalg_library()": "_get_linalg_preferred_backend",
    f"{_CUDNN}enabled": "_get_cudnn_enabled",
    f"{_CUDNN}benchmark": "_get_cudnn_benchmark",
    f"{_CUDNN}deterministic": "_get_cudnn_deterministic",
    "torch.are_deterministic_algorithms_enabled()": "_get_deterministic_algorithms",
    "torch.is_deterministic_algorithms_warn_only_enabled()": "_get_deterministic_algorithms_warn_only",
    "torch.utils.deterministic.fill_uninitialized_memory": "_get_deterministic_fill_uninitialized_memory",
    "torch.backends.cuda.flash_sdp_enabled()": "_get_flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "_get_mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled()": "_get_math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled()": "_get_cudnn_sdp_enabled",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": "_get_math_sdp_allow_fp16_bf16_reduction",
    "the priority of attention kernels (torch.nn.attention.sdpa_kernel)": "_get_sdp_priority_order",
}
# Some builds have no such thing, and what torch does not have cannot change.
_OPTIONAL_BINDINGS = {
    f"{_CUDNN}benchmark_limit": "_cuda_get_cudnn_benchmark_limit",
    "the use of FlashAttention 3": "_get_fa3_sdp_enabled",
    "the use of an attention kernel from outside of torch": "_get_overrideable_sdp_enabled",
    "the number of multiprocessors that matmul leaves free": "_get_sm_carveout_experimental",
}
if torch.version.hip is not None:
    _OPTIONAL_BINDINGS["torch.backends.cuda.preferred_rocm_fa_library()"] = "_get_rocm_fa_preferred_backend"
    _OPTIONAL_BINDINGS["torch.backends.miopen.immediate"] = "_get_miopen_immediate"
_read_settings = _settings()
SETTINGS: tuple[str, ...] = tuple(_read_settings)
_settings_readers = tuple(_read_settings.values())


def settings() -> list[Any]:
    """Return the settings of torch, thread and process, that decide which kernels run, in the order of `SETTINGS`."""
    return [read() for read in _settings_readers]


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


def allocator_settings() -> tuple[str, bool]:
    """Return what the allocator of CUDA memory was last configured with, and whether its segments are expandable.

    The text is PYTORCH_ALLOC_CONF, or what was set since. An option that it does not name may keep its value.
    """
    found = _private(torch._C, "_cuda_memorySnapshot")((0, 0, False))["allocator_settings"]
    return str(found["PYTORCH_CUDA_ALLOC_CONF"]), bool(found["expandable_segments"])


def set_allocator_settings(settings: str) -> None:
    """Configure the allocator of CUDA memory, for what it takes from now on."""
    _private(torch._C, "_accelerator_setAllocatorSettings")(settings)


def capturing_builtin() -> Callable[[], bool]:
    """Return what `torch.cuda.is_current_stream_capturing` calls, which is a function of Python."""
    found: Callable[[], bool] = _private(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing")
    return found


def replace_capturing_builtin(function: Callable[[], bool]) -> None:
    """Have `torch.cuda.is_current_stream_capturing` call this, also for those who imported it earlier by name."""
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = function  # type: ignore[attr-defined]  # imported there


# The observer behind torch.profiler.ExecutionTraceObserver, which adds files and events of its own. One per process.
_profiler = _private(torch._C, "_profiler")
_add_trace = _private(_profiler, "_add_execution_trace_observer")
_remove_trace = _private(_profiler, "_remove_execution_trace_observer")
_enable_trace = _private(_profiler, "_enable_execution_trace_observer")
_disable_trace = _private(_profiler, "_disable_execution_trace_observer")
# With this in the environment the observer reads tensors, which waits for the device.
_READS_TENSORS = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE"


@contextmanager
def execution_trace(path: str) -> Iterator[bool]:
    """Context in which the operations of all threads are written to a file as JSON. Yields whether they are.

    They are not where another observer of this kind is at work, where it would read tensors, or where another thread
    has an autograd graph in hand: for a node of a backward the observer looks up what the thread of its forward has run
    since the trace began, and reads beyond an empty list where that is nothing (torch 2.11,
    csrc/profiler/standalone/execution_trace_observer.cpp). Nested tensors must not occur: they bring its lists out of
    step, to the same effect.
    """
    with Undo() as undo:
        trace = _Trace(path)
        undo.note(trace.end)
        impossible = os.environ.get(_READS_TENSORS, "0") != "0" or _others_run()
        if impossible or _one_trace.setdefault("trace", trace) is not trace:
            yield False
            return
        with _less_logging():
            _add_trace(path)
            if trace.has_begun():
                _enable_trace()
        yield trace.begun


class _Trace:
    """One that is written to a file, or is about to be."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.begun = False
        # Each is to be called once, whatever is interrupted: torch crashes where it has no observer to disable.
        self._ends = iter((_disable_trace, _remove_trace))

    def has_begun(self) -> bool:
        """Return whether torch's observer is this one: whatever torch returns, the file is there then."""
        self.begun = self.begun or os.path.exists(self._path)  # which may be deleted before the end
        return self.begun

    def end(self) -> None:
        """Stop writing."""
        if _one_trace.get("trace") is not self:
            return
        if self.has_begun():
            with _less_logging():
                _call_each(self._ends)
        _one_trace.pop("trace", None)


_one_trace: dict[str, _Trace] = {}  # at most one; `setdefault` is one step for all threads


def _others_run() -> bool:
    """Return whether another thread of Python's has an autograd graph in hand: a tensor of one, or its backward."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that holds itself keeps everything on the stack alive
    with without_torch_function():
        return any(_has_graph(outer) for frame in frames.values() for outer, _ in traceback.walk_stack(frame))


def _has_graph(frame: FrameType) -> bool:
    if frame.f_globals.get("__name__", "").startswith("torch.autograd"):
        return True
    tensors = [value for value in list(frame.f_locals.values()) if issubclass(type(value), Tensor)]
    return any(tensor.grad_fn is not None for tensor in tensors)


@contextmanager
def noticing_compiled_code() -> Iterator[Callable[[], bool]]:
    """Context that yields what tells whether code of torch.compile was called in it so far, by any thread."""
    dynamo: Any = importlib.import_module("torch._dynamo.eval_frame")  # takes a second; so would the first optimizer
    called = []
    enter = _private(dynamo, "_maybe_set_eval_frame")

    def noticed(callback: Any) -> Any:
        if callable(callback):  # not where something is kept from being compiled
            called.append(True)
        return enter(callback)

    with Undo() as undo:
        undo.note(setattr, dynamo, "_maybe_set_eval_frame", enter)
        dynamo._maybe_set_eval_frame = noticed
        yield lambda: bool(called)


class UnseenFunctionMode(TorchFunctionMode):
    """A function mode of ampkit's that changes nothing, and that is no policy around the step."""


@contextmanager
def _less_logging() -> Iterator[None]:
    """Context in which torch's C++ logs no warnings: the observer logs one each time that it begins or ends."""
    level = _log_level()
    if level is None:
        yield
        return
    with Undo() as undo:
        undo.note(setattr, level, "value", level.value)
        level.value = 3  # c10/util/logging_is_not_google_glog.h: fatal
        yield


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """Return the level that C++ logs from, None where it cannot be reached: there is no binding for it."""
    library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"), None)
    try:
        return None if library is None else ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


# Marks what runs between the two calls in such a trace: enter(name) returns what exit takes.
enter_mark: Callable[[str], Any] = _private(torch.autograd, "_record_function_with_args_enter")
exit_mark: Callable[[Any], None] = _private(torch.autograd, "_record_function_with_args_exit")


@contextmanager
def unseen_function_mode(mode: object) -> Iterator[None]:
    """Context in which `torch.overrides.has_torch_function` answers as without this mode, if it is the only one.

    nn.MultiheadAttention and nn.TransformerEncoderLayer ask for it and take slower kernels then.
    """
    asked = _private(torch.overrides, "has_torch_function")

    def has_torch_function(tensors: Any) -> Any:
        if [*map(id, _function_modes())] != [id(mode)]:
            return asked(tensors)
        with _private(torch.overrides, "_pop_mode_temporarily")():
            return asked(tensors)

    with Undo() as undo:
        undo.note(setattr, torch.overrides, "has_torch_function", asked)
        torch.overrides.has_torch_function = has_torch_function  # type: ignore[assignment]  # in its place
        yield


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


_capturing: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # not without CUDA


def is_capturing() -> bool:
    """Return whether what is launched now becomes part of a CUDA graph. Whatever user code is told, it is the truth."""
    return _capturing is not None and torch.cuda.is_initialized() and _capturing()


_step_wrapper = _private(torch.optim.Optimizer, "profile_hook_step")(lambda self: None).__code__


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
    _private(_optimizers, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
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


def version(tensor: Tensor) -> int:
    """Return a number that every change of the tensor in place raises; a replayed change does not."""
    return int(_private(tensor, "_version"))


def storage_address(tensor: Tensor) -> int:
    """Return where a tensor's memory starts, 0 where it has none (empty, sparse, fake)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class that stands for other tensors (DTensor, MaskedTensor)."""
    handler = _private(type(tensor), "__torch_dispatch__")
    return handler is not _private(torch.Tensor, "__torch_dispatch__")


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to, by its schema."""
    for i, argument in enumerate(op_schema(op).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
        yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))


def fail_on_recompile(undo: Undo) -> None:
    """Have torch.compile raise where it would compile, until that is undone: a capture must not hold that."""
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        return
    dynamo = _private(torch, "_dynamo").eval_frame
    before = _private(dynamo, "_stance")
    if before.stance != "force_eager":  # or nothing compiles
        undo.note(_private(dynamo, "_set_stance"), before)
        torch.compiler.set_stance("fail_on_recompile")


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


# raw_stream(device index): the address of the current stream, 0 for the default one, without an object for it. A build
# without CUDA has none, and no streams either.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


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


def op_builtin(op: Any) -> Any:
    """Return what an overload calls in C++. From torch 2.15 on, warnings below name the line of Python calling it."""
    return _private(op, "_op")


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
    _private(_owner, _name)


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


def leave(mode: TorchDispatchMode | TorchFunctionMode) -> None:
    """Take a dispatch mode or a function mode off, and those of its kind that were entered in it, if it is on.

    `mode.__exit__` takes off whichever is on: in a generator that is closed late, one of somebody else.
    """
    dispatch = isinstance(mode, TorchDispatchMode)
    kind: Any = TorchDispatchMode if dispatch else TorchFunctionMode
    entered = _dispatch_modes if dispatch else _function_modes
    while any(other is mode for other in entered()):
        kind.__exit__(entered()[-1], None, None, None)


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


_FLAGS_OF_DISPATCH_MODES = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(_python_dispatch, name)
)
_dispatch_modes = _private(_python_dispatch, "_get_current_dispatch_mode_stack")
_pop_dispatch_mode, _pop_function_mode = _private(_python_dispatch, "_pop_mode"), _private(torch.overrides, "_pop_mode")
_tell_of_dispatch_modes = getattr(_python_dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
uses_autograd_threads: Callable[[], bool] = _private(torch._C, "_is_multithreading_enabled")
let_autograd_use_threads: Callable[[bool], None] = _private(torch._C, "_set_multithreading_enabled")


def modes() -> Callable[[], None]:
    """Return what puts this thread's modes back to what they are now: gradients, autocast, anomaly mode, threads of
    autograd, the stream; and what takes off the dispatch and function modes that were entered since.

    For what an interrupt has left on: torch's contexts are Python, too, and one that is interrupted in `__enter__` or
    `__exit__` leaves its mode as it is.
    """
    set_modes: list[Callable[[], object]] = [
        functools.partial(torch.set_anomaly_enabled, torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        functools.partial(let_autograd_use_threads, uses_autograd_threads()),
        functools.partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
        functools.partial(_private(torch._C, "_set_grad_enabled"), torch.is_grad_enabled()),
    ]
    for kind in ("cpu", "cuda"):
        set_modes.append(functools.partial(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind)))
        set_modes.append(functools.partial(torch.set_autocast_dtype, kind, torch.get_autocast_dtype(kind)))
    if torch.cuda.is_initialized():
        set_modes.append(functools.partial(torch.cuda.set_stream, torch.cuda.current_stream()))
    dispatch, functions, nesting = len(_dispatch_modes()), len(_function_modes()), _autocast_nesting()
    flags = {name: getattr(_python_dispatch, name) for name in _FLAGS_OF_DISPATCH_MODES}

    def put_back() -> None:
        while len(_function_modes()) > functions:  # first: they see what is called below
            _pop_function_mode()
        while len(_dispatch_modes()) > dispatch:
            _pop_dispatch_mode()
        vars(_python_dispatch).update(flags)
        if _tell_of_dispatch_modes is not None and flags:
            _tell_of_dispatch_modes(flags["_is_in_any_mode_without_ignore_compile_internals"])
        for set_mode in set_modes:
            set_mode()
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()

    return put_back


def _autocast_nesting() -> int:
    """Return how many autocast contexts are entered."""
    return int(_call_each((torch.autocast_increment_nesting, torch.autocast_decrement_nesting))[1])


def _call_each(functions: Iterable[Any]) -> list[Any]:
    """Call functions of C's one behind the other, in one step of the interpreter: no interrupt comes between them, nor
    between taking one from an iterator and calling it."""
    return [*map(BuiltinFunctionType.__call__, functions)]


def activate_gpu_trace() -> dict[str, Any] | None:
    """Have torch call back for what it does on a GPU; return its `CallbackRegistry`s by kind, None if it has none.

    The kinds are those of `torch.cuda._gpu_trace.register_callback_for_<kind>`. Once activated, it stays so for the
    process (c10/core/impl/GPUTrace.cpp). A registry has `callback_list`, `add_callback` and nothing to take one off.
    """
    try:
        trace = importlib.import_module("torch.cuda._gpu_trace")
    except ImportError:
        return None
    activate = getattr(torch._C, "_activate_gpu_trace", None)
    names = {kind: "".join(map(str.capitalize, kind.split("_"))) + "Callbacks" for kind in GPU_TRACE_KINDS}
    if activate is None or not all(hasattr(trace, name) for name in names.values()):
        return None
    activate()
    return {kind: getattr(trace, name) for kind, name in names.items()}


# What torch calls back for, with the names of what it passes: handles of CUDA's, the address of a block of memory.
GPU_TRACE_KINDS: dict[str, tuple[str, ...]] = {
    "event_creation": ("event",),
    "event_deletion": ("event",),
    "event_record": ("event", "stream"),
    "event_wait": ("event", "stream"),
    "memory_allocation": ("address",),
    "memory_deallocation": ("address",),
    "stream_creation": ("stream",),
    "device_synchronization": (),
    "stream_synchronization": ("stream",),
    "event_synchronization": ("event",),
}


def sequence_number(node: Any) -> int:
    """Return the number that a node of the graph was given when it was made; the engine runs the highest one first."""
    return int(_private(node, "_sequence_nr")())


_next_sequence_number = _private(torch.autograd, "_get_sequence_nr")


def newest_sequence_number() -> int:
    """Return the number of the node that this thread made last: in forward, of the operation that runs."""
    return int(_next_sequence_number()) - 1


# The larger of two numbers each, in place, for many tensors in one kernel.
foreach_maximum_: Callable[..., None] = _private(torch, "_foreach_maximum_")


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is what torch.compile(module) returned: the hooks of those below it do not run."""
    return "get_compiler_config" in vars(module) and "_orig_mod" in module._modules


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called: its hooks run in compiled code, if at all."""
    return vars(module).get("_compiled_call_impl") is not None


# Context without function modes and `__torch_function__`, for what ampkit asks of tensors between operations.
without_torch_function: Callable[[], AbstractContextManager[None]] = _private(torch._C, "DisableTorchFunction")


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version` of each, without a step of the interpreter per tensor."""
    return list(map(_version_of, tensors))


_private(Tensor, "_version")
_version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


@contextmanager
def allocator_history(entries: int) -> Iterator[None]:
    """Context in which the CUDA allocator keeps its last events, with the Python stack of each allocation."""
    torch.cuda.init()  # an allocator that does not exist yet would miss the request
    if _private(torch._C, "_cuda_isHistoryEnabled")():  # whoever began it decides what is kept, and for how long
        yield
        return
    record = _private(torch.cuda.memory, "_record_memory_history")
    record("all", context="alloc", stacks="python", max_entries=entries)
    try:
        yield
    finally:
        record(None)


def allocator_snapshot() -> dict[str, Any]:
    """Return the CUDA allocators' segments with their blocks, and the history that was kept. Allocates nothing there.

    What it holds is documented at `torch.cuda.memory._snapshot`. pytorch.org/memory_viz shows it once it is pickled.
    """
    snapshot: dict[str, Any] = _private(torch.cuda.memory, "_snapshot")()
    return snapshot


def allocator_pages(snapshot: dict[str, Any]) -> dict[str, str]:
    """Return torch's own HTML pages of a snapshot, by name. Each loads its script from a network when it is opened."""
    viz = _private(torch.cuda, "_memory_viz")
    return {"trace": _private(viz, "trace_plot")(snapshot), "segments": _private(viz, "segment_plot")(snapshot)}


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node of the graph keeps. Those that hooks have packed are left packed, and left out."""
    kind: Any = type(node)
    for name in _raw_saved(kind):
        try:
            value = getattr(node, name)
        except RuntimeError:  # a backward has freed them
            continue
        for saved in value if isinstance(value, (tuple, list)) else (value,):
            data = getattr(saved, "data", None)
            if isinstance(data, Tensor):
                yield data
    variable = getattr(node, "variable", None)  # a leaf's
    if isinstance(variable, Tensor):
        yield variable


@functools.cache
def _raw_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def input_metadata(node: Any) -> Sequence[Any]:
    """Return shape, dtype and device of the gradients that a node of the graph takes."""
    metadata: Sequence[Any] = _private(node, "_input_metadata")
    return metadata


def use_count(tensor: Tensor) -> int:
    """Return how many have this tensor, all of Python counted once."""
    return int(_private(tensor, "_use_count")())


def shares_storage_with_none(tensor: Tensor) -> bool:
    """Return whether no other tensor lies in the same memory. The storage's object in Python is one user itself."""
    storage = tensor.untyped_storage()
    return bool(_private(torch._C, "_storage_Use_Count")(storage._cdata) <= 2)


def leaf_hooks(leaf: Tensor) -> list[Callable[[Tensor | None], Tensor | None]]:
    """Return what is called with the gradient of this leaf."""
    return list((_private(leaf, "_backward_hooks") or {}).values())


def post_accumulate_hooks(leaf: Tensor) -> list[Callable[[Tensor], None]]:
    """Return what is called when this leaf's gradient is there."""
    return list((_private(leaf, "_post_accumulate_grad_hooks") or {}).values())


_graph_tasks = itertools.count(1 << 40)  # far from those that autograd gives


@contextmanager
def graph_task() -> Iterator[None]:
    """Context that passes for a backward where Python asks: checkpointing recomputes once per such number."""
    before, number = _private(torch._C, "_current_graph_task_id"), next(_graph_tasks)
    with Undo() as undo:
        undo.note(setattr, torch._C, "_current_graph_task_id", before)
        torch._C._current_graph_task_id = lambda: number
        yield


# What `Tensor.item` comes down to.
READ: Any = _private(torch.ops.aten, "_local_scalar_dense").default
# Kernels of optimizers that change their arguments in place, and that fake tensors have no kernel of.
IN_PLACE_WITHOUT_META: tuple[Any, ...] = tuple(
    _private(torch.ops.aten, name) for name in ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")
)
# Context without the dispatch modes that are entered: what runs in it is seen by none of them.
without_dispatch_modes: Callable[[], Any] = _private(_python_dispatch, "_disable_current_modes")
# Whether a tensor stands for others within torch.func (vmap, grad), and so has no memory.
is_functorch_wrapped: Callable[[Tensor], bool] = _private(torch._C._functorch, "is_functorch_wrapped_tensor")


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Context in which what torch.compile was asked to compile runs as it was written, on every thread.

    Under a dispatch mode that asks for no exception, dynamo gives up each frame that it meets, and its code never runs
    compiled again (torch/_dynamo/convert_frame.py); here it meets none. A cache that was warm before is warm behind it.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and the import takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def is_mix_of_devices(error: Exception) -> bool:
    """Return whether an operation on fake tensors was given tensors of several devices."""
    text = str(error)
    return "FakeTensor Device Propagation" in text or "found at least two devices" in text  # torch 2.11, 2.15
