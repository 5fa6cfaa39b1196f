"""Python's profile function, which is told of each call of a function. The user's code may set one of its own."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..._torch.compile import never_compile_by_itself
from ..._undo import Undo, replace

# Python's own: `sys` may have others in their place.
_set_profile, _profile = sys.setprofile, sys.getprofile


@contextmanager
def seeing_calls(note: Callable[[FrameType], object]) -> Iterator[Callable[[], bool]]:
    """Context in which `note` is called with the frame of each function of Python that this thread calls.

    It yields a function that returns whether all calls so far were seen. That is false where another profiler runs
    already, or where a profiler that is written in C is started or ended in the context. A profile function that is set
    by `sys.setprofile` is called too, and stays.
    """
    if _profile() is not None:
        yield lambda: False
        return
    shared = _SharedProfile(note)
    with Undo() as undo:
        undo.note(shared.end)
        replace(undo, sys, "setprofile", shared.set_users)
        replace(undo, sys, "getprofile", shared.users)
        shared.begin()
        yield shared.has_seen_all


class _SharedProfile:
    """A profile function that calls another one, too, which `sys.setprofile` and `sys.getprofile` set and return."""

    def __init__(self, note: Callable[[FrameType], object]) -> None:
        self._note = note
        self._thread = threading.get_ident()
        self._users: Callable[..., Any] | None = None
        self._on = False

    def begin(self) -> None:
        _set_profile(self._on_event)
        self._on = True

    def end(self) -> None:
        """Leave the user's profile function in place, if there is one."""
        if self._on_event == _profile():
            _set_profile(self._users)
        self._on = False

    def has_seen_all(self) -> bool:
        self._on = self._on and self._on_event == _profile()
        return self._on

    def set_users(self, function: Callable[..., Any] | None) -> None:
        """Take the place of `sys.setprofile`."""
        if threading.get_ident() == self._thread and self.has_seen_all():
            self._users = function
        else:
            _set_profile(function and _without_own(function))

    def users(self) -> Any:
        """Take the place of `sys.getprofile`."""
        here = threading.get_ident() == self._thread
        return self._users if here and self.has_seen_all() else _profile()

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self._note(frame)
        if self._users is not None and id(frame.f_code) not in _OWN_CODE:
            self._users(frame, event, arg)


def _without_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a profile function that is not told of the functions here, as it is not told of those of `sys`."""

    def on_event(frame: FrameType, event: str, arg: object) -> None:
        if id(frame.f_code) not in _OWN_CODE:
            function(frame, event, arg)

    return on_event


_OWN_CODE = {  # by identity: of code that dynamo has made there may be no hash
    id(function.__code__) for function in (_SharedProfile.set_users, _SharedProfile.users, _SharedProfile.has_seen_all)
}
never_compile_by_itself(_SharedProfile._on_event)
