"""The current CUDA stream: its address, whether it is being captured, and torch's callbacks for what is done on it."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from .guard import private


def capturing_builtin() -> Callable[[], bool]:
    """Return what `torch.cuda.is_current_stream_capturing` calls, which is a function of Python."""
    found: Callable[[], bool] = private(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing")
    return found


def replace_capturing_builtin(function: Callable[[], bool]) -> None:
    """Have `torch.cuda.is_current_stream_capturing` call this, also for those who imported it earlier by name."""
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = function  # type: ignore[attr-defined]  # imported there


_capturing: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # not without CUDA


def is_capturing() -> bool:
    """Return whether what is launched now becomes part of a CUDA graph. Whatever user code is told, it is the truth."""
    return _capturing is not None and torch.cuda.is_initialized() and _capturing()


# raw_stream(device index): the address of the current stream, 0 for the default one, without an object for it. A build
# without CUDA has none, and no streams either.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)


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
