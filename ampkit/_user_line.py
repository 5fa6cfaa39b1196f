"""Which line of the user's code is shown: the innermost one on a stack, in a traceback, or where a node was made."""

import contextlib
import functools
import importlib
import inspect
import linecache
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from ._torch.autograd.autograd import ENGINE_CODE, current_node
from ._torch.compiler_code import is_compiled_code, is_compilers_code, is_compiling
from ._undo import Undo, replace

# The folders of torch and of ampkit. What lies in them is not the user's code.
NOT_THE_USERS = tuple(f"{Path(module).parent}{os.sep}" for module in (torch.__file__, __file__))
TORCH, _AMPKIT = NOT_THE_USERS
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_OPTIMIZERS = f"torch{os.sep}optim{os.sep}"
_STACK_ENTRY = re.compile(r'  File "(.+)", line (\d+), in ')  # as traceback.format_stack writes it
# Files whose frames lie between an operation, or a warning, and the line that caused it.
_WRAPPERS = {
    __file__,
    f"{TORCH}_compile.py",
    f"{TORCH}_dynamo{os.sep}eval_frame.py",
    f"{TORCH}_dynamo{os.sep}external_utils.py",
    os.path.join(f"{TORCH}_functorch", "_aot_autograd", "runtime_wrappers.py"),  # a mode, in the first run of its code
    warnings.catch_warnings.__init__.__code__.co_filename,
}
# Files with functions that enter a context on behalf of their caller.
_ENTERING = {contextlib.__file__}
# Files of torch whose lines tell no more than the user's line that called them.
_TELL_NO_MORE = ("_tensor", "_tensor_str", "functional", "_jit_internal", "_ops", "__init__", "streams", "graph")


def wraps_operations(file: str) -> None:
    """Register a file of ampkit, by its `__file__`, with functions that run between a line and its operation."""
    _WRAPPERS.add(file)


def enters_for_its_caller(file: str) -> None:
    """Register a file of ampkit, by its `__file__`, with functions that enter a context on behalf of their caller."""
    _ENTERING.add(file)


def user_line(error: BaseException) -> str:
    """Return `file:line: source` of the user's innermost line in the traceback of an error, "" if there is none.

    Behind one of an installed package comes the line of the user's own that led to it.
    """
    frames = _users_frames(error)[::-1]
    lines = [line_text(frame.f_code.co_filename, number) for frame, number in frames]
    own = next((line for (frame, _), line in zip(frames, lines, strict=True) if is_in_users_file(frame)), "")
    return _line_and_caller(lines[0], own if own != lines[0] else "") if lines else ""


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an error, of the user's lines alone, "" if it came through none of them.

    A syntax error has no frame in the file that it is in: its own text names the line.
    """
    frames = _users_frames(error)
    if not frames and not (isinstance(error, SyntaxError) and _is_users(error.filename or "<string>")):
        return ""
    lines = traceback.StackSummary.extract(iter(frames)).format()
    return "".join([*lines, *traceback.format_exception_only(type(error), error)])


def _users_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Return the user's frames that an error came through, with the line in each, the innermost last."""
    return [(frame, number) for frame, number in traceback.walk_tb(error.__traceback__) if _is_users_frame(frame)]


def running_place(frame: FrameType | None) -> tuple[str, int] | None:
    """Return file and number of the user's innermost line on a stack, as `line_text` takes them. None without one."""
    users = next(filter(_is_users_frame, _frames(frame)), None)
    return None if users is None else (users.f_code.co_filename, users.f_lineno)


def is_users_call(frame: FrameType | None, *, wrapped: bool = False) -> bool:
    """Return whether the user's code called what runs, directly or through torch, and not ampkit or a backward pass.

    Args:
        frame: of what runs.
        wrapped: whether also through a wrapper (`wraps_operations`).
    """
    frames = (outer for outer in _frames(frame) if not wrapped or outer.f_code.co_filename not in _WRAPPERS)
    for outer in frames:
        if is_ampkits(outer) or outer.f_code is ENGINE_CODE:
            return False
        if _is_users_frame(outer):
            return True
    return False


def is_ampkits(frame: FrameType) -> bool:
    """Return whether a function is ampkit's own."""
    return frame.f_code.co_filename.startswith(_AMPKIT)


def running_line(frame: FrameType | None) -> str:
    """Return `file:line: source` of the user's innermost line on a stack, "" if there is none.

    Behind one of an installed package comes the line of the user's own that led to it.
    """
    users = [outer for outer in _frames(frame) if _is_users_frame(outer)]
    return _line_and_caller(*_of_frames(users)) if users else ""


def _of_frames(users: Sequence[FrameType]) -> tuple[str, str]:
    """Return the line of the first of these frames, and that of the first in a file of the user's own, "" if equal."""
    own = next(filter(is_in_users_file, users), users[0])
    lines = [line_text(frame.f_code.co_filename, frame.f_lineno) for frame in (users[0], own)]
    return lines[0], "" if own is users[0] else lines[1]


def _line_and_caller(line: str, caller: str) -> str:
    return f"{line}, called from {caller}" if caller else line


def users_level() -> int:
    """Return the `stacklevel` with which a warning that the caller issues names the user's innermost line.

    A line of an installed package, such as the one of a Trainer that calls a hook, is named if no own line called it.
    """
    frames = [*_frames(sys._getframe(1))]
    levels = (level for tells in (is_in_users_file, _is_users_frame) for level, at in enumerate(frames, 1) if tells(at))
    return next(levels, len(frames))


@dataclass(eq=False)
class WarnOnce:
    """Warns at the user's line, of each thing once.

    Args:
        name: what messages begin with.
        category: of the warnings.
    """

    _name: str
    _category: type[Warning]
    _kinds: set[str] = field(default_factory=set)

    def __contains__(self, kind: str) -> bool:
        """Return whether there was a warning of this kind."""
        return kind in self._kinds

    def __call__(self, message: str, kind: str = "") -> bool:
        """Warn, unless there was a warning of this kind, or if it has none, with this message. Return whether not."""
        if (kind or message) in self._kinds:
            return False
        self._kinds.add(kind or message)
        warnings.warn(f"{self._name}: {message}", self._category, stacklevel=users_level())
        return True


class SourceLocation(NamedTuple):
    """Where in the code something happened.

    Attributes:
        line: the user's line, "" if there is none.
        inside: the line of torch or ampkit that the user's line led to, "" if it tells no more.
        backward: it happened in the backward of one of torch's operations, and `line` is the line of the forward.
        caller: where `line` is one of an installed package, the line of the user's own that led to it.
    """

    line: str = ""
    inside: str = ""
    backward: bool = False
    caller: str = ""

    @property
    def key(self) -> str:
        """Equal for equal locations."""
        return self.line or self.inside


class _UsersStack(list[str]):
    """What `note_lines_alone` stores: no entry, one or two, the innermost last."""


class UserLineFinder:
    """Finds the user's line that something happens at, among the lines that run within a context.

    Args:
        entered: the frame that entered the context. The lines that called it are not searched.
        skip_torch: leave out what happens in torch's code alone, or in torch's optimizers.
    """

    def __init__(self, entered: FrameType, skip_torch: bool) -> None:
        if entered.f_code.co_flags & inspect.CO_GENERATOR and entered.f_back:  # a `contextmanager` may have entered it
            back = entered.f_back
            entered = back if back.f_code.co_filename in _ENTERING else entered
        # An `ExitStack` may have, too.
        frames = list(_frames(entered))
        passing = next(i for i, frame in enumerate(frames) if frame.f_code.co_filename not in _ENTERING)
        self._callers = len(frames) - passing - 1
        self._skip_torch = skip_torch

    def __call__(self, node: Any = None) -> SourceLocation | None:
        """Return where the running code was called from, None if that is left out.

        Within a backward, the line is the one whose forward made the autograd node.

        Args:
            node: an autograd node; if None, the one that is running.
        """
        frames = list(_frames(real_frame()))
        node, inside = node or current_node(), ""
        within = frames[: max(len(frames) - self._callers, 0)]
        for i, frame in enumerate(within):
            if _is_users_frame(frame):
                if self._skip_torch and inside.startswith(_OPTIMIZERS):
                    return None
                line, caller = _of_frames([frame, *filter(_is_users_frame, within[i + 1 :])])
                if node is not None and not is_in_users_file(frame):  # in a backward that a package defines
                    caller = innermost_users_line(self._made_in(node), is_users_file) or caller
                return SourceLocation(line, inside, caller=caller)
            if node is not None and frame.f_code is ENGINE_CODE:
                made = self._made_in(node)
                if line := innermost_users_line(made):
                    own = innermost_users_line(made, is_users_file)
                    return SourceLocation(line, inside, backward=True, caller="" if own == line else own)
            if inside:
                continue
            filename = frame.f_code.co_filename
            folder = next((folder for folder in NOT_THE_USERS if filename.startswith(folder)), None)
            # Some code tells no more than the line that called it.
            tells_more = filename not in _WRAPPERS and Path(filename).stem not in _TELL_NO_MORE
            if folder is not None and tells_more:  # such as `torch/optim/adam.py:345`
                inside = f"{os.path.relpath(filename, Path(folder).parent)}:{frame.f_lineno}"
        return None if self._skip_torch else SourceLocation(inside=inside)

    def _made_in(self, node: Any) -> list[tuple[str, int]]:
        """Return the lines of the forward that made an autograd node; [] without anomaly mode, which stores them."""
        stack = node.metadata.get("traceback_", [])
        made = map(_STACK_ENTRY.match, stack if isinstance(stack, _UsersStack) else stack[self._callers :])
        return [(match[1], int(match[2])) for match in made if match]

    def note_lines_alone(self, undo: Undo) -> None:
        """Have anomaly mode store the user's innermost line, in place of a stack that takes longer than an operation.

        In front of one of an installed package it stores the line of the user's own that led to it.

        It calls `format_stack` by its name (csrc/autograd/python_anomaly_mode.cpp).
        """
        module: Any = importlib.import_module("torch.fx.traceback")
        original = module.format_stack

        def users_stack() -> list[str]:
            if module.should_preserve_node_meta:  # torch.compile is at work, and takes stacks from nodes of its own
                return list(original())
            frames = list(_frames(sys._getframe(1)))
            within = frames[: max(len(frames) - self._callers, 0)]
            users = next((frame for frame in within if _is_users(frame.f_code.co_filename)), None)
            if users is None:
                return _UsersStack()
            own = next((frame for frame in within if is_users_file(frame.f_code.co_filename)), users)
            return _UsersStack(
                f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'
                for frame in dict.fromkeys((own, users))
            )

        replace(undo, module, "format_stack", users_stack)

    def line(self) -> str:
        """Return the user's `file:line: source` that the running code was called from, "" if there is none."""
        place = self()
        return "" if place is None else place.line


def innermost_users_line(places: Sequence[tuple[str, int]], is_users: Callable[[str], bool] | None = None) -> str:
    """Return `file:line: source` of the last of these lines that is the user's, "" if none is.

    `is_users` tells by the file, `is_users_file` if lines of installed packages do not count.
    """
    return next((line_text(*place) for place in reversed(places) if (is_users or _is_users)(place[0])), "")


def real_frame() -> FrameType:
    """Return the innermost frame of the caller's stack that is not one of a wrapper (`wraps_operations`)."""
    return next(frame for frame in _frames(sys._getframe(1)) if frame.f_code.co_filename not in _WRAPPERS)


def compiler_runs() -> bool:
    """Return whether torch's compiler runs here on behalf of its own: it compiles, or times kernels of Triton's.

    What it asks the device, waits for, copies or draws there is done before the capture, and is no line of the step.
    Code that it has compiled is.
    """
    if is_compiling():
        return True
    for frame in _frames(real_frame()):
        if frame.f_code.co_filename in _WRAPPERS:
            continue
        if is_compilers_code(frame.f_code):
            return True
        is_tritons = str(frame.f_globals.get("__name__")).startswith("triton.")  # which times what it is given
        if is_compiled_code(frame) or (_is_users_frame(frame) and not is_tritons):
            return False
    return False


def warn_at(frame: FrameType, message: Warning | str, category: type[Warning]) -> None:
    """Issue a warning as if the line that a frame is at had issued it. The user's filters hold."""
    scope = frame.f_globals
    registry = scope.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, scope["__name__"], registry)


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str, module: str = "") -> bool:
    """Return whether code is the user's: not torch's, not generated by torch, not ampkit's, not Python's own."""
    if filename.startswith((*NOT_THE_USERS, "<eval_with_key>", "<frozen ", "<string>")) or module.startswith("torch."):
        return False
    return not filename.startswith(_STDLIB) or "-packages" in filename


def is_users_file(filename: str) -> bool:
    """Return whether code in this file is the user's own, and not that of an installed package."""
    return bool(filename) and _is_users(filename) and "-packages" not in filename


def is_in_users_file(frame: FrameType) -> bool:
    """Return whether a function is the user's own, and not that of an installed package."""
    filename, module = frame.f_code.co_filename, frame.f_globals.get("__name__")  # which `exec` may leave out
    of_command = filename == "<string>" and module == "__main__"  # python -c
    return of_command or (_is_users_frame(frame) and is_users_file(filename))


def _is_users_frame(frame: FrameType) -> bool:
    return _is_users(frame.f_code.co_filename, frame.f_globals.get("__name__") or "")


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and the frames that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_text(filename: str, number: int) -> str:
    """Return `file:line: source`."""
    return f"{filename}:{number}: `{linecache.getline(filename, number).strip()}`"
