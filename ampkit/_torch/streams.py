"""The current CUDA stream: its address, whether it is being captured, and torch's callbacks for work on the GPU."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .guard import private


def capturing_builtin() -> Callable[[], bool]:
    """Return the function that `torch.cuda.is_current_stream_capturing` calls."""
    found: Callable[[], bool] = private(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing")
    return found


def replace_capturing_builtin(function: Callable[[], bool]) -> None:
    """Have `torch.cuda.is_current_stream_capturing` call this one. Code that imported it by name is reached too."""
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = function  # type: ignore[attr-defined]  # graphs.py imports it


# A torch that was built without CUDA has neither of the two bindings in this file, and no streams.
_capturing: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def is_capturing() -> bool:
    """Return whether work that is launched now becomes part of a CUDA graph.

    It is the truth even while ampkit answers user code otherwise (`replace_capturing_builtin`).
    """
    return _capturing is not None and torch.cuda.is_initialized() and _capturing()


# raw_stream(device index): the address of the current stream, 0 for the default one. It makes no Stream object.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


def activate_gpu_trace() -> dict[str, Any] | None:
    """Have torch call back for its work on GPUs. Return a `CallbackRegistry` for each kind of work.

    Returns None where torch has no such callbacks. The kinds are those of
    `torch.cuda._gpu_trace.register_callback_for_<kind>`. Once activated, the trace stays active for the process
    (c10/core/impl/GPUTrace.cpp). A registry has `callback_list` and `add_callback`, but no way to remove a callback.
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


# The kinds of work that torch calls back for, and the arguments that it passes: CUDA handles, or a memory address.
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
