"""torch's execution trace: a file with every operation that runs, and marks that a caller adds to it."""

import ctypes
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._undo import Undo
from .guard import private
from .modes import call_each, without_torch_function

# The observer behind torch.profiler.ExecutionTraceObserver, which would add files and events of its own. A process can
# have one observer only.
_profiler = private(torch._C, "_profiler")
_add_trace = private(_profiler, "_add_execution_trace_observer")
_remove_trace = private(_profiler, "_remove_execution_trace_observer")
_enable_trace = private(_profiler, "_enable_execution_trace_observer")
_disable_trace = private(_profiler, "_disable_execution_trace_observer")
# Where this environment variable is not 0, the observer reads tensors, and so waits for the device.
_READS_TENSORS = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE"


@contextmanager
def execution_trace(path: str) -> Iterator[bool]:
    """Context in which the operations of all threads are written to a file as JSON. Yields whether they are.

    Nothing is written, and False is yielded, in three cases: another observer of this kind runs, the observer would
    read tensors, or another thread is using an autograd graph. In the last case torch 2.11 could read out of bounds
    (csrc/profiler/standalone/execution_trace_observer.cpp): for each node of a backward the observer looks up the
    operations of the thread that ran its forward, and it does not notice that this list may be empty.

    Nested tensors must not occur in the context. They make the lists disagree, with the same consequence.
    """
    with Undo() as undo:
        trace = _TraceFile(path)
        undo.note(trace.end)
        impossible = os.environ.get(_READS_TENSORS, "0") != "0" or _graph_in_other_thread()
        if impossible or _one_trace.setdefault("trace", trace) is not trace:
            yield False
            return
        with _less_logging():
            _add_trace(path)
            if trace.has_begun():
                _enable_trace()
        yield trace.begun


class _TraceFile:
    """An execution trace that is written to a file, or is about to be."""

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
                call_each(self._ends)
        _one_trace.pop("trace", None)


_one_trace: dict[str, _TraceFile] = {}  # at most one; `setdefault` is one step for all threads


def _graph_in_other_thread() -> bool:
    """Return whether another Python thread runs a backward, or has a tensor with a graph in a local variable."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that holds itself keeps everything on the stack alive
    with without_torch_function():
        return any(_has_graph(outer) for frame in frames.values() for outer, _ in traceback.walk_stack(frame))


def _has_graph(frame: FrameType) -> bool:
    if frame.f_globals.get("__name__", "").startswith("torch.autograd"):
        return True
    tensors = [value for value in list(frame.f_locals.values()) if issubclass(type(value), Tensor)]
    return any(tensor.grad_fn is not None for tensor in tensors)


_FATAL = 3  # the log level in c10/util/logging_is_not_google_glog.h


@contextmanager
def _less_logging() -> Iterator[None]:
    """Context in which torch's C++ logs no warnings. The observer would log one whenever it begins or ends."""
    level = _log_level()
    if level is None:
        yield
        return
    with Undo() as undo:
        undo.note(setattr, level, "value", level.value)
        level.value = _FATAL
        yield


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """Return the variable that holds the log level of torch's C++, None if the library does not export it.

    torch has no Python binding for it.
    """
    library = next((Path(torch.__file__).parent / "lib").glob("libc10.*"), None)
    try:
        return None if library is None else ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


# Two calls that mark, in such a trace, what runs between them: exit_mark takes what enter_mark(name) returned.
enter_mark: Callable[[str], Any] = private(torch.autograd, "_record_function_with_args_enter")
exit_mark: Callable[[Any], None] = private(torch.autograd, "_record_function_with_args_exit")
