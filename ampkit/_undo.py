"""Temporary changes: each one is noted with its undoing before it is made, so that no interrupt leaves it in place.

Ctrl-C raises `KeyboardInterrupt` between any two lines of Python, also between those of `__enter__` and `__exit__`. If
that cuts one of them short, Python does not leave the context. If the context is a generator, it is left when the
traceback is freed, which a notebook keeps. So each context that changes something is on a list of its thread while it
is open. The context or the call around it undoes, at its own end, what is still open.
"""

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(eq=False)
class _OpenHere(threading.local):
    """The contexts that are open in this thread, the outermost first."""

    contexts: "list[Undo]" = field(default_factory=list)


open_here = _OpenHere()


class Undo:
    """Context that calls at its end what was noted in it, the last note first.

    An interrupt may come after the note and before the change, and another one while the change is undone. So a noted
    function may be called though nothing was changed, and more than once. It must set the value from before, and must
    not raise.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._open = open_here.contexts

    def __enter__(self) -> "Undo":
        self._open.append(self)
        return self

    def note(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` called at the end. Note it before making the change that it undoes."""
        self._notes.append((function, args))

    def forget(self) -> None:
        """Drop all notes, so that the changes stay."""
        self._notes.clear()

    def undo(self) -> None:
        """Call what was noted, now."""
        while self._notes:
            function, args = self._notes[-1]
            function(*args)
            self._notes.pop()  # after the call, so that a call that is interrupted is made again

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the context, and before it every context that is still open in it. Does nothing if it has ended."""
        if self not in self._open:
            return
        while self._open[-1] is not self:
            self._open[-1].close()
        self.undo()
        self._open.remove(self)


def keep_warning_filters(undo: Undo) -> None:
    """Note that the filters of warnings and `warnings.showwarning` are put back as they are now."""
    caught = warnings.catch_warnings()

    def put_back() -> None:
        with suppress(RuntimeError, AttributeError):  # its `__enter__` was not called, or was interrupted
            caught.__exit__(None, None, None)

    undo.note(put_back)
    caught.__enter__()


def replace(undo: Undo, owner: Any, name: str, new: Any) -> None:
    """Replace an attribute; note how to put the old one back."""
    if name in vars(owner):
        undo.note(setattr, owner, name, vars(owner)[name])
    else:  # a base class has it
        undo.note(_remove, owner, name)
    setattr(owner, name, new)


def _remove(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


def call(fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return what `fn` returns. If an interrupt leaves a context open in it, undo that context."""
    opened = open_here.contexts
    depth = len(opened)
    try:
        return fn(*args, **kwargs)
    finally:
        if len(opened) > depth:
            close(opened[depth])


def close(outermost: Undo) -> None:
    """End a context that an interrupt has left open, and those within it."""
    try:
        outermost.close()
    finally:
        outermost.close()  # again, since a second interrupt (Ctrl-C held down) may have stopped the first call
