"""Which functions of Python a step calls, and whose they are. The user's code may set a profile function of its own."""

import contextlib
import functools
import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import Tensor, nn

from ..._torch.compile import COMPILER, is_compiling, never_compile_by_itself
from ..._torch.tensors.modules import MODULE_CALL
from ..._undo import Undo, replace
from ..._user_line import NOT_THE_USERS, TORCH, is_ampkits, is_in_users_file, is_users_file
from .code import functions_of, line_of, names, names_looked_up
from .constants import CLOSED_PACKAGES, is_plain
from .executed import Executed
from .objects import HeldTable, any_name, holders

# The code of torch's modules reads their attributes. Other code of torch is given values, and has names in abundance.
_MODULES = f"{TORCH}nn{os.sep}modules{os.sep}"
_COMPILER = tuple(TORCH + folder.removeprefix("torch/").replace("/", os.sep) for folder in COMPILER)
_PACKAGES = f"-packages{os.sep}"
KEPT_ELSEWHERE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))  # what each module has
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
Line = tuple[str, int]  # a file and a number
# Packages whose code reads attributes of its own, as `self.log` of Lightning does, or what is compared elsewhere.
_OF_OTHERS = [f"{_PACKAGES}{name}{os.sep}" for name in CLOSED_PACKAGES]
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


class Origin(Enum):
    """Whose code a function is. It decides which of its names count."""

    USERS = "the user's"
    MODULES = "torch's modules"  # other code of torch is given values, and has names in abundance
    PACKAGE = "an installed package's"
    PYTHON = "Python's library's, or made by it"  # as the methods of named tuples
    OTHERS = "torch's or ampkit's"  # or that of a package whose attributes are compared elsewhere, or generated


def origin_in(frame: FrameType) -> Origin:
    """Return whose code a frame runs. What torch's compiler has written, in files anywhere, has a name of torch's."""
    if is_in_users_file(frame):  # also of `python -c`
        return Origin.USERS
    found = origin_of(frame.f_code.co_filename)
    return Origin.OTHERS if found is Origin.USERS else found


@functools.lru_cache(maxsize=4096)
def origin_of(filename: str) -> Origin:
    """Return whose code is in a file, told by its name alone."""
    if filename.startswith(_MODULES):
        return Origin.MODULES
    if filename.startswith(NOT_THE_USERS) or any(package in filename for package in _OF_OTHERS):
        return Origin.OTHERS
    if _PACKAGES in filename:
        return Origin.PACKAGE
    return Origin.USERS if is_users_file(filename) else Origin.PYTHON


def is_of_step(frame: FrameType, origin: Origin, code: Container[CodeType]) -> bool:
    """Return whether the step's own code made this call, and not torch or ampkit for purposes of their own.

    Args:
        frame: of the function that is called, which is no other function of torch's or ampkit's.
        origin: whose it is.
        code: what the step has called so far.
    """
    if origin is Origin.USERS:
        return True
    caller, through = frame.f_back, set[str]()
    if origin is Origin.PYTHON and caller and caller.f_code not in code and origin_in(caller) is Origin.PYTHON:
        return False  # as the call of its caller, which the same code outside has made
    while caller is not None and origin_in(caller) is Origin.PYTHON:
        through.add(caller.f_code.co_filename)
        caller = caller.f_back
    calls = None if caller is None else origin_in(caller)
    if caller is None or calls is not Origin.OTHERS:
        return calls is Origin.USERS or (caller is not None and caller.f_code in code)
    if origin is Origin.MODULES:
        return not is_ampkits(caller) or frame.f_code not in _LISTING
    # Torch and ampkit call packages on the user's behalf, as hooks and optimizers. Compiled code, imports and parts of
    # Python's library call others.
    is_others = caller.f_code.co_filename.startswith(_COMPILER) or not through <= _PASSING_ON
    return origin is Origin.PACKAGE and not is_others


_PASSING_ON = {contextlib.__file__, functools.__file__}
# What ampkit calls of a module beside its forward.
_LISTING = {each.__code__ for each in vars(nn.Module).values() if type(each) is FunctionType} - {MODULE_CALL}


@dataclass(frozen=True)
class Names:
    """Names by which code reads attributes of modules.

    Attributes:
        of_all: those that count in all modules.
        of_class: by class: further ones, which only the methods of the class read.
    """

    of_all: frozenset[str] = frozenset()
    of_class: dict[type, frozenset[str]] = field(default_factory=dict)

    def has(self, kind: type, name: str) -> bool:
        """Return whether attributes of this name count in modules of this class."""
        return name in self.of_all or name in self.of_class.get(kind, ())

    def has_somewhere(self, name: str) -> bool:
        """Return whether code of any class reads something by this name."""
        return name in self.of_all or any(name in names for names in self.of_class.values())

    def with_further(self, others: "Names") -> "Names":
        """Return these names and others."""
        of_class = dict(self.of_class)
        for kind, found in others.of_class.items():
            of_class[kind] = found | of_class.get(kind, frozenset())
        return Names(self.of_all | others.of_all, of_class)

    def without(self, left: Set[str]) -> "Names":
        """Return the others of these names."""
        return Names(self.of_all - left, {kind: found - left for kind, found in self.of_class.items()})


class CallRecorder:
    """Notes the code that a step calls, and what is in its modules before.

    Args:
        modules: those that the step may call.
        executed: which instructions are executed.
        take: is called with the frame of each function, too. It returns further modules, which the step will call.

    Attributes:
        before: what was in the modules, and in those that the step was found to call.
        lines: where the names are read that `names` returns.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        executed: Executed,
        take: Callable[[FrameType], Sequence[nn.Module]],
    ) -> None:
        self._modules, self._executed, self._take = modules, executed, take
        self._origins: dict[CodeType, Origin] = {}
        self.before = [_Before(modules)]
        self.lines: dict[str, dict[CodeType, Line]] = {}

    def on_call(self, frame: FrameType) -> None:
        """Take note of a function that is called."""
        code = frame.f_code
        with contextlib.suppress(TypeError):  # of code that dynamo has made, with a dict among its constants
            if code not in self._origins:
                if is_compiling():  # and calls what it likes
                    return
                origin = origin_in(frame)
                # Most calls are torch's and ampkit's, whoever makes them: they are judged once.
                if origin is Origin.OTHERS or is_of_step(frame, origin, self._origins):
                    self._origins[code] = origin
            if self._origins.get(code) is Origin.PACKAGE:  # `take` has the user's code watched
                self._executed.watch(frame)
        further = self._take(frame)
        if further:
            self.before.append(_Before(further))

    def names(self, observed: bool) -> Names:
        """Return the names by which the code that was called reads attributes.

        Args:
            observed: whether all calls were seen. Otherwise the methods of the modules count as called, as does what
                was compiled, of which no function is called.
        """
        kinds = dict.fromkeys(map(type, self._modules))
        methods = {kind: {function.__code__ for _, function in functions_of(kind)} for kind in kinds}
        if not observed or self._executed.compiled:
            found = chain.from_iterable(methods.values())
            called = [*self._executed.compiled, *(each for each in found if each.co_name != "__init__")]
            self._origins.update((each, origin_of(each.co_filename)) for each in called)
        # The methods of a module that has others inside may read attributes of those.
        outer = {type(module) for module in self._modules if any(True for _ in module.children())}
        leaves = set().union(*(methods[kind] for kind in methods if kind not in outer))
        leaves.difference_update(*(methods[kind] for kind in outer))
        own = {kind: frozenset(self._names(methods[kind])) for kind in methods if kind not in outer}
        return Names(frozenset(self._names(self._origins.keys() - leaves)), own)

    def _names(self, code: Iterable[CodeType]) -> Iterator[str]:
        for each in code:
            origin = self._origins.get(each, Origin.OTHERS)
            if origin is not Origin.OTHERS:
                # Libraries have many texts. Only those count by which something is looked up.
                candidates = (names_looked_up if origin in (Origin.PACKAGE, Origin.PYTHON) else names)(each)
                for name, place in self._executed.names(each, candidates).items():
                    self.lines.setdefault(name, {})[each] = line_of(place)
                    yield name


class _Before:
    """The attributes of modules, and what is in them, as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [(vars(module), dict(vars(module))) for module in modules]
        self._inside: list[tuple[HeldTable, str, Any]] = []
        seen: dict[str, set[int]] = {}  # what lies under several names is kept for each of them
        for module in modules:
            for name, value in list(vars(module).items()):
                if name not in KEPT_ELSEWHERE and not is_plain(value):
                    found = holders(value, any_name, seen.setdefault(name, set()))
                    # By the name by which the code that changes it reads it.
                    self._inside += [(each, _IDENTIFIER.findall(name + each.path)[-1], each.copy()) for each in found]

    def changed(self) -> Iterator[str]:
        """Yield the names of what has changed since."""
        for table, before in self._tables:
            yield from _changed_keys(before, table)
        for holder, name, was in self._inside:
            now = holder.copy()
            if isinstance(was, dict) and isinstance(now, dict):
                yield from (key if isinstance(key, str) else name for key in _changed_keys(was, now))
            elif len(was) != len(now) or not all(map(operator.is_, was, now)):
                yield name

    def has_tensor(self, name: str) -> bool:
        """Return whether something of this name is a tensor now."""
        tables = [now for now, _ in self._tables]
        tables += [holder.table for holder, _, _ in self._inside if isinstance(holder.table, dict)]
        return any(isinstance(dict.get(table, name), Tensor) for table in tables)


def _changed_keys(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[Any]:
    """Yield the keys whose value is another object now."""
    return (key for key in {**before, **now} if before.get(key, before) is not now.get(key, before))
