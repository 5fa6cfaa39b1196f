"""torch's callbacks for its work on GPUs: their kinds, and how they are turned on and off again.

torch itself can only turn them on. A process in which they stay on pays for a call into Python with each event, and may
lose exceptions: torch imports a module for each event, and if memory is freed while an exception is on its way, that
import ends in a SystemError, and the exception is gone (pytorch#181865).
"""

import ctypes
import functools
import importlib
from pathlib import Path
from typing import Any

import torch

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


def _switch_of(library: Path) -> ctypes.c_bool | None:
    """Return the variable that torch looks at before each callback: `c10::impl::GPUTrace::haveState` in GPUTrace.h."""
    try:
        return ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "_ZN3c104impl8GPUTrace9haveStateE")
    except (OSError, ValueError):  # another platform, or a torch without it
        return None


_switch = _switch_of(Path(torch.__file__).parent / "lib" / "libc10.so")
_on_by_ampkit = False  # whether the trace is on because ampkit turned it on


def gpu_trace_registries() -> dict[str, Any] | None:
    """Return torch's `CallbackRegistry` of each kind of work; None where torch has no such callbacks.

    The kinds are those of `torch.cuda._gpu_trace.register_callback_for_<kind>`. A registry has `callback_list` and
    `add_callback`, but no way to remove a callback.
    """
    try:
        trace = importlib.import_module("torch.cuda._gpu_trace")
    except ImportError:
        return None
    names = {kind: "".join(map(str.capitalize, kind.split("_"))) + "Callbacks" for kind in GPU_TRACE_KINDS}
    if not hasattr(torch._C, "_activate_gpu_trace") or not all(hasattr(trace, name) for name in names.values()):
        return None
    return {kind: getattr(trace, name) for kind, name in names.items()}


def activate_gpu_trace() -> None:
    """Have torch call back. `gpu_trace_registries` has returned registries before."""
    global _on_by_ampkit
    if _switch is not None and not _switch.value:
        _on_by_ampkit = True
    torch._C._activate_gpu_trace()


def deactivate_gpu_trace() -> None:
    """Have torch call back no more, if it was ampkit that turned the trace on.

    Does nothing where torch's switch was not found.

    torch's own function turns the trace on once per process and does nothing in later calls (GPUTrace.cpp). So it is
    replaced by one that turns the trace on again, for ampkit and for others, such as torch's CUDA sanitizer.
    """
    global _on_by_ampkit
    if _switch is None or not _on_by_ampkit:
        return
    _on_by_ampkit = False
    _switch.value = False
    torch._C._activate_gpu_trace = functools.partial(setattr, _switch, "value", True)
