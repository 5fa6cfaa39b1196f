"""How each function that is called is seen, beside profilers of the user's own.

From Python 3.12 on `sys.monitoring` tells, where several tools run beside each other, cProfile among them. Before that
a thread has one profile function, which is shared here with one that is written in Python.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any

from ..._torch.compile import around_compilations, never_compile_by_itself
from ..._undo import Undo, replace
from .executed import MONITORING, monitoring_tool

# Python's own: `sys` may have others in their place.
_set_profile, _profile = sys.setprofile, sys.getprofile


@contextmanager
def seeing_calls(note: Callable[[FrameType], bool]) -> Iterator[Callable[[], bool]]:
    """Context in which `note` is called with the frame of each function of Python that this thread calls.

    Where it returns True, it may be told of no further calls of the same code.

    It yields a function that returns whether all calls so far were seen. Before Python 3.12 that is false where another
    profiler runs already, or where a profiler that is written in C is started or ended in the context. A profile
    function that is set by `sys.setprofile` is called too, and stays.

    What torch.compile calls while it compiles is left out: a million functions, and compiled code has guards of its own
    for what it has read.
    """
    thread = threading.get_ident()

    def on_start(_code: CodeType, _offset: int) -> Any:
        if threading.get_ident() == thread and note(sys._getframe(1)):
            return MONITORING.DISABLE
        return None

    with Undo() as undo:
        if MONITORING is not None:
            never_compile_by_itself(on_start)
            if (tool := monitoring_tool(undo)) is not None:
                MONITORING.register_callback(tool, MONITORING.events.PY_START, on_start)
                MONITORING.register_callback(tool, MONITORING.events.PY_RESUME, on_start)
                calls = MONITORING.events.PY_START | MONITORING.events.PY_RESUME
                MONITORING.set_events(tool, calls)
                set_events = partial(MONITORING.set_events, tool)
                around_compilations(undo, partial(set_events, 0), partial(set_events, calls))
            yield lambda: tool is not None
        elif _profile() is not None:
            yield lambda: False
        else:
            shared = _SharedProfile(note)
            undo.note(shared.end)
            replace(undo, sys, "setprofile", shared.set_users)
            replace(undo, sys, "getprofile", shared.users)
            shared.begin()
            around_compilations(undo, shared.pause, shared.go_on)
            yield shared.has_seen_all


# -------------------------------------------------------------------------------------- before Python 3.12: a profile


@dataclass(eq=False)
class _SharedProfile:
    """A profile function that calls another one, too, which `sys.setprofile` and `sys.getprofile` set and return."""

    _note: Callable[[FrameType], bool]
    _noted: dict[int, CodeType] = field(default_factory=dict)  # of which no further calls are to be seen, by identity
    _thread: int = field(default_factory=threading.get_ident)
    _users: Callable[..., Any] | None = None
    _on: bool = False

    def begin(self) -> None:
        _set_profile(self._on_event)
        self._on = True

    def end(self) -> None:
        """Leave the user's profile function in place, if there is one."""
        if self._on_event == _profile():
            _set_profile(self._users)
        self._on = False

    def pause(self) -> None:
        """See no calls, if it has seen all so far."""
        if self.has_seen_all():
            _set_profile(self._users)

    def go_on(self) -> None:
        """See calls again, behind `pause`."""
        if self._on and _profile() == self._users:
            _set_profile(self._on_event)

    def has_seen_all(self) -> bool:
        self._on = self._on and self._on_event == _profile()
        return self._on

    def set_users(self, function: Callable[..., Any] | None) -> None:
        """Take the place of `sys.setprofile`."""

        def without_own(frame: FrameType, event: str, arg: object) -> None:  # as it is not told of those of `sys`
            if function is not None and id(frame.f_code) not in _OWN_CODE:
                function(frame, event, arg)

        if threading.get_ident() == self._thread and self.has_seen_all():
            self._users = function
        else:
            _set_profile(function and without_own)

    def users(self) -> Any:
        """Take the place of `sys.getprofile`."""
        here = threading.get_ident() == self._thread
        return self._users if here and self.has_seen_all() else _profile()

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and id(frame.f_code) not in self._noted and self._note(frame):
            self._noted[id(frame.f_code)] = frame.f_code
        if self._users is not None and id(frame.f_code) not in _OWN_CODE:
            self._users(frame, event, arg)


_OWN_CODE = {  # by identity: of code that dynamo has made there may be no hash
    id(function.__code__) for function in (_SharedProfile.set_users, _SharedProfile.users, _SharedProfile.has_seen_all)
}
never_compile_by_itself(_SharedProfile._on_event)
