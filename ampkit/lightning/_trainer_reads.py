"""What a step reads of its Trainer that changes from batch to batch, noticed while Python runs the step."""

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from .._capture.preflight.host_values import report_read
from .._capture.preflight.uncapturable import Problem
from .._torch.autograd.autograd import in_backward
from .._torch.compile import noticing_compiled_code
from .._undo import Undo, replace
from .._user_line import running_line
from ._host_state import ADVICE, HOOK_BEHIND, HostReads, changing_values
from ._log_calls import catch_up

_LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_LOOPS = ("fit_loop", "validate_loop", "test_loop")  # their counters
_COUNTERS = ("global_step", *_LOOPS)  # of steps, among others
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_OF_TRAINER = (
    *("global_step", "current_epoch", "is_last_batch", "logger", "loggers", "optimizers", "lr_scheduler_configs"),
    *_METRICS,
)
_OF_MODULE = ("optimizers", "lr_schedulers")
_OnRead = Callable[[str, FrameType], None]
_Watched = tuple[type, str, Any]  # a class, the name of an attribute, and what takes its place


class TrainerReads:
    """Notices what a step reads of its Trainer, in the functions that it calls, too, and reports the line.

    A value counts where it is read: a counter behind a condition that is false keeps nothing from being captured.
    Compiled code runs no Python. If a step calls such code, all counts that stands in its bytecode (`host_reads`).
    """

    def __init__(self, trainer: Trainer, module: LightningModule, host_reads: HostReads, method: str) -> None:
        self._trainer, self._module, self._method = trainer, module, method
        self._host_reads = host_reads
        self._thread = threading.get_ident()
        self.noticed = False  # whether the last call has read something that a graph would freeze
        # Made once: compiled code is compiled anew if another object takes the place of one that it uses.
        named = [*((trainer, name) for name in _OF_TRAINER), (trainer.strategy, "optimizers")]
        properties = [each for each in named if isinstance(getattr(type(each[0]), each[1], None), property)]
        loops = [(trainer, name) for name in _LOOPS]
        self._watched = [
            _watched(owner, name, self._on_read)
            for owner, name in (*properties, *loops, *((module, name) for name in _OF_MODULE))
            if name in (*changing_values(module), "current_epoch", *_LOOPS)
        ]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for a call of the step that Python runs, its backward included."""
        self._thread, self.noticed = threading.get_ident(), False
        with Undo() as undo:
            for owner, name, watched in self._watched:
                replace(undo, owner, name, watched)
            if self._host_reads.problem is None:
                yield
                return
            with noticing_compiled_code() as has_run:
                yield
                if has_run():
                    self.noticed = True
                    report_read(self._host_reads.problem, "")

    def _on_read(self, name: str, frame: FrameType) -> None:
        reader = _reader(frame)
        is_here = threading.get_ident() == self._thread or in_backward()
        if reader is None or not is_here or (name in _LOOPS and reader is not frame):
            return
        if name == "current_epoch":
            self._host_reads.reads_epoch = True
            return
        advice = ADVICE["global_step" if name in _LOOPS else name].format(HOOK_BEHIND[self._method])
        what = f"reads {name} of the Trainer, and a graph would freeze its value"
        self.noticed = True
        report_read(Problem(what, advice, graph_only=True), running_line(reader))
        if name in (*_METRICS, *_COUNTERS):
            catch_up(self._module)


def _reader(frame: FrameType | None) -> FrameType | None:
    """Return the frame that reads something, which Lightning's functions may do for it; None if they do it by
    themselves."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if not module.startswith(_LIBRARIES):
            return None if module.startswith("ampkit.") else frame
        frame = frame.f_back
    return None


def _watched(owner: Any, name: str, on_read: _OnRead) -> _Watched:
    """Watch a method or a property of an object's class, or what the object has in its `__dict__`: a property comes
    before that."""
    original: Any = getattr(type(owner), name, None)
    if not callable(original) and not isinstance(original, property):
        original = property(
            lambda other: vars(other)[name], lambda other, value: operator.setitem(vars(other), name, value)
        )
    called: Any = original.fget if isinstance(original, property) else original

    @functools.wraps(called)
    def call(other: Any, *args: Any, **kwargs: Any) -> Any:
        if other is owner and not torch.compiler.is_compiling():
            on_read(name, sys._getframe(1))
        return called(other, *args, **kwargs)

    watched = property(call, original.fset, original.fdel) if isinstance(original, property) else call
    return type(owner), name, watched
