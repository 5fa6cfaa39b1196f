"""Which lines of the user's open a file to write to it. A replay opens none.

A file that stays open is found by what leads to it (`objects.File`). One that each call opens anew is not, so the
functions that open files are replaced while a call is watched. Of what opens files in C, `torch.save` is replaced, too.
"""

import builtins
import functools
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..._undo import Undo
from ..._user_line import compiler_runs, is_ampkits, is_in_users_file, real_frame, wraps_operations
from .replaced import replace_here

wraps_operations(__file__)


@contextmanager
def seeing_opened_files(note: Callable[[tuple[str, int]], None]) -> Iterator[None]:
    """Context in which `note` is called with file and number of each line that opens a file to write, in this thread.

    What torch's compiler, imports and `logging` write is left out.
    """
    with Undo() as undo:
        for owner, name, writes in _OPENING:
            replace_here(undo, owner, name, functools.partial(_opened, note, writes))
        yield


def _opened(
    note: Callable[[tuple[str, int]], None],
    writes: Callable[..., bool],
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Take the place of a function that opens a file."""
    if writes(*args, **kwargs) and not compiler_runs() and (place := _users_place()) is not None:
        note(place)
    return original(*args, **kwargs)


def _opens_to_write(file: Any = None, mode: Any = "r", *_: Any, **__: Any) -> bool:
    is_stdout = file in (1, 2) if isinstance(file, int) else str(file) == os.devnull
    return isinstance(mode, str) and not is_stdout and not set("wax+").isdisjoint(mode)


def _has_flags_to_write(path: Any = None, flags: Any = 0, *_: Any, **__: Any) -> bool:
    return isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) != 0 and str(path) != os.devnull


def _users_place() -> tuple[str, int] | None:
    """Return file and number of the user's line that runs; None if it is not for the user that a file is opened."""
    frame: FrameType | None = real_frame()
    while frame is not None and not is_ampkits(frame) and not frame.f_code.co_filename.startswith(_NOT_FOR_THE_USER):
        if is_in_users_file(frame):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


_NOT_FOR_THE_USER = ("<frozen importlib", logging.__file__)
# Owner, name, and what tells of the arguments whether a file is written. `open` is one function under two names.
_OPENING: tuple[tuple[Any, str, Callable[..., bool]], ...] = (
    (builtins, "open", _opens_to_write),
    (io, "open", _opens_to_write),
    (Path, "open", _opens_to_write),  # Python 3.10 has kept another `open` for it
    (os, "open", _has_flags_to_write),
    (torch, "save", lambda *_, **__: True),
)
