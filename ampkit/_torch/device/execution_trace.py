"""torch's execution trace (every operation that runs, in all threads, and marks of a caller), and its profiler."""

import atexit
import ctypes
import functools
import itertools
import os
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._undo import Undo
from ..guard import private
from ..tensors.modes import call_each, without_torch_function

# profiler_enabled(): whether torch's profiler records this thread. A second one would end the first.
profiler_enabled: Callable[[], bool] = private(torch._C._autograd, "_profiler_enabled")

# The observer behind torch.profiler.ExecutionTraceObserver, which would add files and events of its own. A process can
# have one observer only.
_profiler = private(torch._C, "_profiler")
_add_trace = private(_profiler, "_add_execution_trace_observer")
_remove_trace = private(_profiler, "_remove_execution_trace_observer")
_enable_trace = private(_profiler, "_enable_execution_trace_observer")
_disable_trace = private(_profiler, "_disable_execution_trace_observer")
# Two calls that mark, in such a trace, what runs between them: exit_mark takes what enter_mark(name) returned.
enter_mark: Callable[[str], Any] = private(torch.autograd, "_record_function_with_args_enter")
exit_mark: Callable[[Any], None] = private(torch.autograd, "_record_function_with_args_exit")
UNRECORDED = "ampkit: beside the step"
_FATAL = 3  # the log level in c10/util/logging_is_not_google_glog.h
_FILLER = "ampkit: end of a trace" + 8192 * "."
# Where this environment variable is not 0, the observer reads tensors, and so waits for the device.
_READS_TENSORS = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE"


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context of what is marked in such a trace to be no part of the step."""
    mark = enter_mark(UNRECORDED)
    try:
        yield
    finally:
        exit_mark(mark)


@contextmanager
def execution_trace() -> Iterator["ExecutionTrace"]:
    """Context in which the operations of all threads are traced. Yields the trace, which has its text behind the end.

    Nothing is traced in three cases: an observer of the user's runs, the observer would read tensors, or another thread
    is using an autograd graph. In the last case torch 2.11 could read out of bounds
    (csrc/profiler/standalone/execution_trace_observer.cpp): for each node of a backward the observer looks up the
    operations of the thread that ran its forward, and it does not notice that this list may be empty.

    Nested tensors must not occur in the context. They make the lists disagree, with the same consequence.
    """
    with Undo() as undo:
        trace = ExecutionTrace()
        undo.note(trace.end)
        trace.begin()
        yield trace
        trace.read()


@dataclass(eq=False)
class ExecutionTrace:
    """What the observer writes between a begin and an end."""

    begun: bool = False  # whether it writes
    text: str = ""  # the operations as JSON, once it has ended
    _observer: "_OperationObserver | None" = None
    _alone: bool = field(default_factory=lambda: len(sys._current_frames()) == 1)  # no other thread
    _ends: Iterator[Callable[[], object]] = field(default_factory=lambda: iter((_disable_trace,)))

    def begin(self) -> None:
        """Begin to write, if that can be done."""
        impossible = os.environ.get(_READS_TENSORS, "0") != "0" or _graph_in_other_thread()
        if impossible or _one_trace.setdefault("trace", self) is not self:
            return
        with _less_logging():
            self._observer = _observer()
            if self._observer is not None:
                self.begun = True  # before the next line, so that an interrupt between the two disables too much
                self._observer.enable()

    def read(self) -> None:
        """Stop, and take what was written."""
        self._stop()
        if self._observer is not None:
            self.text = self._observer.read()

    def _stop(self) -> None:
        if self.begun and _one_trace.get("trace") is self:
            with _less_logging():
                exit_mark(enter_mark(_FILLER))
                call_each(self._ends)

    def end(self) -> None:
        """Stop. Remove the observer if no other thread can be in one of its functions."""
        if _one_trace.get("trace") is not self:
            return
        self._stop()
        if self._observer is not None and self._alone and len(sys._current_frames()) == 1:
            with _less_logging():
                self._observer.remove()
        _one_trace.pop("trace", None)


class _OperationObserver:
    """torch's observer, which is registered once and then enabled for each trace.

    torch 2.11 crashes if another thread is within a function of an observer that is removed, and also if an operation
    began in that thread under one observer and ends under the next one. So an observer is removed only if there are no
    other threads. As long as it is disabled, operations take as long as without it, within 2 %. It keeps an
    ExecutionTraceObserver of the user's from being registered.

    What it writes is in a buffer of 8 KiB first. A mark with a longer name at the end of each trace pushes it out.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ampkit-")
        self._path = os.path.join(self._folder, "trace.json")
        self._file: FileIO | None = None
        self._removal = iter((_remove_trace,))  # to be called once: torch crashes where there is none to remove
        self._start = 0  # of what was not read yet
        self.process = os.getpid()

    def is_registered(self) -> bool:
        """Return whether torch's observer is this one."""
        return (self._file is not None or os.path.exists(self._path)) and length_hint(self._removal) > 0

    def register(self) -> None:
        """Make it torch's observer, unless there is one. Then the file is there, whatever an interrupt cuts short."""
        _add_trace(self._path)
        if not os.path.exists(self._path):
            os.rmdir(self._folder)

    def enable(self) -> None:
        """Write what runs from now on."""
        if self._file is None:
            self._file = open(self._path, "r+b", buffering=0)  # noqa: SIM115 - until it is removed
            shutil.rmtree(self._folder, ignore_errors=True)  # the open file stays readable
        # A trace that an error has ended was not read. After `read`, the file is shorter than what was written.
        self._start = max(self._start, os.fstat(self._file.fileno()).st_size)
        _enable_trace()

    def read(self) -> str:
        """Return what was written since the last call, and free the disk space of that."""
        assert self._file is not None  # opened by `enable`
        self._file.seek(self._start)
        written = self._file.read()
        self._start += len(written)
        self._file.truncate(0)  # torch goes on at its own place in the file, behind a hole
        return written.decode(errors="replace")

    def remove(self) -> None:
        """Remove it from torch."""
        call_each(self._removal)
        if self._file is not None:
            self._file.close()


_one_trace: dict[str, ExecutionTrace] = {}  # at most one; `setdefault` is one step for all threads
_registered: list[_OperationObserver] = []  # at most one


def _observer() -> _OperationObserver | None:
    """Return torch's observer if it is ampkit's, registered now if there is none; None if it is the user's."""
    if _registered and _registered[0].is_registered():
        if _registered[0].process == os.getpid():
            return _registered[0]
        _registered[0].remove()  # the copy that a fork has made, which writes to the same file
    _registered[:] = [_OperationObserver()]  # first, so that an interrupt finds it
    _registered[0].register()
    return _registered[0] if _registered[0].is_registered() else None


@atexit.register
def _remove_at_exit() -> None:
    """Remove the observer before C++ destroys it, since threads may be at work until the end of the process."""
    for observer in _registered:
        if observer.is_registered() and observer.process == os.getpid():
            with _less_logging():
                observer.remove()


def _graph_in_other_thread() -> bool:
    """Return whether another Python thread runs a backward, or has a tensor with a graph in a local variable."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that holds itself keeps everything on the stack alive
    with without_torch_function():
        for outer, _ in itertools.chain.from_iterable(map(traceback.walk_stack, frames.values())):
            if outer.f_globals.get("__name__", "").startswith("torch.autograd"):
                return True
            tensors = [value for value in list(outer.f_locals.values()) if issubclass(type(value), Tensor)]
            if any(tensor.grad_fn is not None for tensor in tensors):
                return True
    return False


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
