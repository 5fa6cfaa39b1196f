"""What is changed for a while: how to undo it is noted before it is changed, so that no interrupt leaves it changed.

Ctrl-C raises `KeyboardInterrupt` between any two lines of Python, also between those of `__enter__` and `__exit__`. A
context whose `__enter__` or `__exit__` is cut short is never left, or, if it is a generator, when the traceback is
freed, which a notebook keeps. So each context that changes something is on a list of its thread while it is open, and
the context or the call around it undoes at its own end what is still open then.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _ThreadUndos(threading.local):
    """What is open in this thread, the outermost first."""

    def __init__(self) -> None:
        self.open: list[Undo] = []


_this_thread = _ThreadUndos()


class Undo:
    """Context at whose end everything is called that was noted in it, the last note first.

    An interrupt may come before what was noted has been changed, and again while it is undone. Hence what is noted may
    be called though nothing was changed, and more than once: it sets what was there before. It does not raise.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._open = _this_thread.open

    def __enter__(self) -> "Undo":
        self._open.append(self)
        return self

    def note(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` called at the end. To be called before the change that it undoes."""
        self._notes.append((function, args))

    def forget(self) -> None:
        """Have nothing called: all went well, and what was changed stays."""
        self._notes.clear()

    def undo(self) -> None:
        """Call what was noted, now."""
        while self._notes:
            function, args = self._notes[-1]
            function(*args)
            self._notes.pop()  # behind the call: one that is interrupted is made again

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the context, and first what is still open within it. Does nothing where that was done before."""
        if self not in self._open:
            return
        while self._open[-1] is not self:
            self._open[-1].close()
        self.undo()
        self._open.remove(self)


def keep_warning_filters(undo: Undo) -> None:
    """Have the filters of warnings, and `warnings.showwarning`, put back: what is set from now on is for a while."""
    caught = warnings.catch_warnings()

    def put_back() -> None:
        with suppress(RuntimeError, AttributeError):  # not entered, or not to the end
            caught.__exit__(None, None, None)

    undo.note(put_back)
    caught.__enter__()


def call(fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return what `fn` returns, having undone whatever an interrupt has left open in it."""
    opened = _this_thread.open
    depth = len(opened)
    try:
        return fn(*args, **kwargs)
    finally:
        if len(opened) > depth:
            _close(opened[depth])


def _close(outermost: Undo) -> None:
    try:
        outermost.close()
    finally:
        outermost.close()  # a second interrupt, at a key that is held down, has stopped the first one
