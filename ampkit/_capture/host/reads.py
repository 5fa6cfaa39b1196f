"""Plain attributes of modules that a step reads, such as the `p` of a dropout. A graph holds them as constants."""

import contextlib
import functools
import operator
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import Tensor, nn

from ..._torch.compile import COMPILER, is_compiling
from ..._torch.tensors.modules import MODULE_CALL
from ..._user_line import NOT_THE_USERS, TORCH, is_ampkits, is_in_users_file, is_users_file
from .calls import seeing_calls
from .code import functions_of, names, names_looked_up
from .constants import ABSENT, CLOSED_PACKAGES, are_same, bases_of, getter, is_plain, module_name, noted, reference
from .executed import Executed
from .objects import Holder, any_name, holders, holds_others

# The code of torch's modules reads their attributes. Other code of torch is given values, and has names in abundance.
_MODULES = f"{TORCH}nn{os.sep}modules{os.sep}"
_COMPILER = tuple(TORCH + folder.removeprefix("torch/").replace("/", os.sep) for folder in COMPILER)
_PACKAGES = f"-packages{os.sep}"
# Code of torch and Lightning, whose `self.log` reads attributes of its own, and what is compared elsewhere.
_OF_OTHERS = [f"{_PACKAGES}{name}{os.sep}" for name in CLOSED_PACKAGES]
# DistributedDataParallel keeps notes about a step in attributes, and metrics are updated between steps.
_NOT_COMPARED = ("torch.nn.parallel.", "torchmetrics.")
_KEPT_ELSEWHERE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))
_NONE: frozenset[str] = frozenset()
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class _Names:
    """Names of attributes.

    Attributes:
        of_all: those that are compared in all modules.
        of_class: by class: further ones, which only the methods of the class read.
    """

    of_all: frozenset[str] = frozenset()
    of_class: dict[type, frozenset[str]] = field(default_factory=dict)

    def has(self, kind: type, name: str) -> bool:
        """Return whether attributes of this name are compared in modules of this class."""
        return name in self.of_all or name in self.of_class.get(kind, ())

    def has_somewhere(self, name: str) -> bool:
        """Return whether code of any class reads something by this name."""
        return name in self.of_all or any(name in names for names in self.of_class.values())

    def with_further(self, others: "_Names") -> "_Names":
        """Return these names and others."""
        kinds = self.of_class.keys() | others.of_class.keys()
        of_class = {kind: self.of_class.get(kind, _NONE) | others.of_class.get(kind, _NONE) for kind in kinds}
        return _Names(self.of_all | others.of_all, of_class)

    def without(self, names: set[str]) -> "_Names":
        """Return the others of these names."""
        return _Names(self.of_all - names, {kind: found - names for kind, found in self.of_class.items()})

    def has_all(self, kind: type, text: str) -> bool:
        """Return whether what is written so, such as `config.depth`, is compared in modules of this class."""
        name, *inside = _IDENTIFIER.findall(text)
        return self.has(kind, name) and all(map(self.has_somewhere, inside))


@dataclass(frozen=True, eq=False)
class AttributeValues:
    """The values of attributes of modules.

    Two of these are equal if the attributes that both looked at have the same values.

    Attributes:
        names: the attributes that were looked at.
        kinds: the class of each module.
        found: by the place of the module and how the attribute is written (`p`, `config.depth`): a number, text or
            function itself, a weak reference of a tensor, and the type of any other object.
        paths: returns the path of each module.
    """

    names: _Names
    kinds: list[type]
    found: dict[tuple[int, str], Any]
    paths: Callable[[], list[str]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttributeValues) and not any(True for _ in self._different(other))

    def __hash__(self) -> int:
        return hash(AttributeValues)

    def named(self) -> dict[str, Any]:
        """Return the values by how messages name them."""
        paths = self.paths()
        return {f"the attribute {paths[place]}.{name}": value for (place, name), value in self.found.items()}

    def changed(self, new: "AttributeValues") -> dict[str, tuple[Any, Any]]:
        """Return the old and the new value of each attribute that is another one now, by its path."""
        paths = self.paths()
        return {
            f"{paths[key[0]]}.{key[1]}": (self.found.get(key, ABSENT), new.found.get(key, ABSENT))
            for key in self._different(new)
        }

    def _different(self, other: "AttributeValues") -> Iterator[tuple[int, str]]:
        for key in {**self.found, **other.found}:
            place, name = key
            both = place < min(len(self.kinds), len(other.kinds)) and all(
                values.names.has_all(values.kinds[place], name) for values in (self, other)
            )
            if both and not are_same(self.found.get(key, ABSENT), other.found.get(key, ABSENT)):
                yield key


class Attributes:
    """Which attributes of modules are compared from call to call, and what reads them.

    They are those that the Python code of a step reads by name. Which code that is, a step that is watched shows. If a
    step changes an attribute itself, no attribute of that name is compared, since a replay would not change it.
    """

    def __init__(self) -> None:
        self.names: _Names = _Names()
        self._read = _Names()  # with those that are not compared
        self._left_out: set[str] = set(_KEPT_ELSEWHERE)  # for good
        self._changing: set[str] = set()  # what calls change
        self._rewritten: set[str] = set()  # what the last call that read it has changed, and is compared

    def names_read(self) -> Callable[[str], bool]:
        """Return a function that returns whether code of the steps so far reads something by a name."""
        return self._read.has_somewhere

    def leave_out(self, names: Iterable[str]) -> None:
        """Do not compare attributes with these names. Something else does."""
        self._left_out.update(names)
        self._learn(_Names())

    @contextlib.contextmanager
    def noting(
        self, modules: Sequence[nn.Module], take: Callable[[FrameType], Sequence[nn.Module]], executed: Executed
    ) -> Iterator[None]:
        """Context for a step, whose code tells which attributes of these modules are compared from then on.

        Args:
            modules: the modules.
            take: is called with the frame of each function of Python that is called. It returns further modules, which
                the step will call.
            executed: which instructions of these functions are executed. The context must be within its own.
        """
        before = [_Before(modules)]
        code: dict[CodeType, _Origin] = {}  # what the step calls

        def note(frame: FrameType) -> None:
            with contextlib.suppress(TypeError):  # of code that dynamo has made, with a dict among its constants
                if frame.f_code not in code:
                    if is_compiling():  # and calls what it likes
                        return
                    if _is_of_step(frame, code):
                        code[frame.f_code] = _origin(frame)
                if code.get(frame.f_code) is _Origin.PACKAGE:  # `take` has the user's code watched
                    executed.watch(frame)
            further = take(frame)
            before.extend([_Before(further)] if further else ())

        with seeing_calls(note) as has_seen_all:
            yield
            observed = has_seen_all()
        kinds = dict.fromkeys(map(type, modules))
        methods = {kind: {function.__code__ for _, function in functions_of(kind)} for kind in kinds}
        if not observed or executed.compiled:  # another profiler runs, or no function is called of what was compiled
            found = chain.from_iterable(methods.values())
            called = [*executed.compiled, *(each for each in found if each.co_name != "__init__")]
            code.update((each, _origin_of(each.co_filename)) for each in called)
        # The methods of a module that has others inside may read attributes of those.
        outer = {type(module) for module in modules if any(True for _ in module.children())}
        leaves = set().union(*(methods[kind] for kind in methods if kind not in outer))
        leaves.difference_update(*(methods[kind] for kind in outer))
        own = {kind: frozenset(_names(code, methods[kind], executed)) for kind in methods if kind not in outer}
        names = _Names(frozenset(_names(code, code.keys() - leaves, executed)), own)
        self._take_changes(before, names)
        self._read = self._read.with_further(names)
        self._learn(names)

    def _take_changes(self, before: Sequence["_Before"], read: _Names) -> None:
        changed = set(chain.from_iterable(each.changed() for each in before))
        # Of a tensor that is made where there is none, or a longer one is needed, graphs must know which one they have.
        tensors = {
            name
            for name in filter(read.has_somewhere, self._changing | changed)
            if any(each.has_tensor(name) for each in before)
        }
        kept = {name for name in changed & tensors if self.names.has_somewhere(name) and name not in self._rewritten}
        self._rewritten = {name for name in self._rewritten if not read.has_somewhere(name)} | kept
        self._changing = (self._changing - tensors) | (changed - kept)

    def _learn(self, names: _Names) -> None:
        self.names = self.names.with_further(names).without(self._left_out | self._changing)

    def values(self, modules: Sequence[nn.Module], paths: Callable[[], list[str]]) -> AttributeValues:
        """Return the values that these modules have now."""
        found: dict[tuple[int, str], Any] = {}
        seen: set[int] = set()
        for place, module in enumerate(modules):
            for name, value in self._compared(module):
                found[place, name] = noted(value) if is_plain(value) else _stand_in(value)
                for holder in self._holders(value, seen):
                    found.update({(place, name + text): inside for text, inside in holder.found().items()})
        return AttributeValues(self.names, list(map(type, modules)), found, paths)

    def readers(self, modules: Sequence[nn.Module]) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return functions that read these attributes and what is in them, and the table to pass to each of them.

        A function returns a tuple. It raises a `KeyError` if an attribute is gone.
        """
        getters: list[Any] = []
        tables: list[Any] = []
        seen: set[int] = set()
        for module in modules:
            keys = [name for name, _ in self._compared(module)]
            for _, value in self._compared(module):
                for holder in self._holders(value, seen):
                    if (reader := holder.reader()) is not None:
                        getters.append(reader)
                        tables.append(holder.table)
            if keys:
                getters.append(getter(keys))
                tables.append(vars(module))
        return getters, tables

    def tables(self, modules: Sequence[nn.Module]) -> list[Any]:
        """Return what may get a further entry that counts: the `__dict__` of modules, where it may hide an attribute of
        the class, and what is in attributes."""
        if not self.names.of_all:
            return []
        compared = [module for module in modules if self._is_compared(module)]
        seen: set[int] = set()
        inside = (
            holder
            for module in compared
            for _, value in self._compared(module)
            for holder in self._holders(value, seen)
        )
        return [*map(vars, compared), *[holder.table for holder in inside]]

    def _holders(self, value: Any, seen: set[int]) -> Iterator[Holder]:
        return holders(value, self.names.has_somewhere, seen)

    def _compared(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        if self._is_compared(module):
            for name, value in vars(module).items():
                if self.names.has(type(module), name):
                    yield name, value

    def _is_compared(self, module: nn.Module) -> bool:
        return not any(module_name(base).startswith(_NOT_COMPARED) for base in bases_of(type(module)))


class _Before:
    """The attributes of modules, and what is in them, as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [(vars(module), dict(vars(module))) for module in modules]
        self._inside = [(holder, name, holder.copy()) for name, holder in _all_holders(modules)]

    def changed(self) -> Iterator[str]:
        """Yield the names of what has changed since."""
        for table, before in self._tables:
            yield from _changed(before, table)
        for holder, name, was in self._inside:
            now = holder.copy()
            if isinstance(was, dict) and isinstance(now, dict):
                yield from (key if isinstance(key, str) else name for key in _changed(was, now))
            elif len(was) != len(now) or not all(map(operator.is_, was, now)):
                yield name

    def has_tensor(self, name: str) -> bool:
        """Return whether something of this name is a tensor now."""
        tables = [now for now, _ in self._tables]
        tables += [holder.table for holder, _, _ in self._inside if isinstance(holder.table, dict)]
        return any(isinstance(dict.get(table, name), Tensor) for table in tables)


def _stand_in(value: Any) -> Any:
    """Return what stands for an object that is not plain: of what holds others, these are compared instead."""
    return type(value) if holds_others(value) else reference(value)


class _Origin(Enum):
    """Whose code a function is. It decides which of its names count."""

    USERS = "the user's"
    MODULES = "torch's modules"  # other code of torch is given values, and has names in abundance
    PACKAGE = "an installed package's"
    PYTHON = "Python's library's, or made by it"  # as the methods of named tuples
    OTHERS = "torch's or ampkit's"  # or that of a package whose attributes are compared elsewhere, or generated


def _origin(frame: FrameType) -> _Origin:
    """Return whose code a frame runs. What torch's compiler has written, in files anywhere, has a name of torch's."""
    if is_in_users_file(frame):  # also of `python -c`
        return _Origin.USERS
    found = _origin_of(frame.f_code.co_filename)
    return _Origin.OTHERS if found is _Origin.USERS else found


@functools.lru_cache(maxsize=4096)
def _origin_of(filename: str) -> _Origin:
    if filename.startswith(_MODULES):
        return _Origin.MODULES
    if filename.startswith(NOT_THE_USERS) or any(package in filename for package in _OF_OTHERS):
        return _Origin.OTHERS
    if _PACKAGES in filename:
        return _Origin.PACKAGE
    return _Origin.USERS if is_users_file(filename) else _Origin.PYTHON


def _is_of_step(frame: FrameType, code: Container[CodeType]) -> bool:
    """Return whether the step's own code made this call, and not torch or ampkit for purposes of their own.

    Args:
        frame: of the function that is called.
        code: what the step has called so far.
    """
    origin, caller, through = _origin(frame), frame.f_back, set[str]()
    if origin in (_Origin.USERS, _Origin.OTHERS):
        return origin is _Origin.USERS
    while caller is not None and _origin(caller) is _Origin.PYTHON:
        through.add(caller.f_code.co_filename)
        caller = caller.f_back
    calls = None if caller is None else _origin(caller)
    if caller is None or calls is not _Origin.OTHERS:
        return calls is _Origin.USERS or (caller is not None and caller.f_code in code)
    if origin is _Origin.MODULES:
        return not is_ampkits(caller) or frame.f_code not in _LISTING
    # Torch and ampkit call packages on the user's behalf, as hooks and optimizers. Compiled code, imports and parts of
    # Python's library call others.
    is_others = caller.f_code.co_filename.startswith(_COMPILER) or not through <= _PASSING_ON
    return origin is _Origin.PACKAGE and not is_others


_PASSING_ON = {contextlib.__file__, functools.__file__}
# What ampkit calls of a module beside its forward.
_LISTING = {each.__code__ for each in vars(nn.Module).values() if type(each) is FunctionType} - {MODULE_CALL}


def _names(origins: dict[CodeType, _Origin], code: Iterable[CodeType], executed: Executed) -> set[str]:
    """Return the names that this code reads attributes by, and its texts, which `getattr` may be given.

    Args:
        origins: of all code that the step calls.
        code: the part that is looked at.
        executed: which instructions of it were executed.
    """
    found = set[str]()
    for each in code:
        if origins.get(each, _Origin.OTHERS) is not _Origin.OTHERS:
            # Packages have texts in abundance that they look nothing up by.
            is_library = origins[each] in (_Origin.PACKAGE, _Origin.PYTHON)
            found |= executed.names(each, (names_looked_up if is_library else names)(each))
    return found


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[Any]:
    """Yield the keys whose value is another object now."""
    return (key for key in {**before, **now} if before.get(key, before) is not now.get(key, before))


def _all_holders(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Holder]]:
    """Yield what is in the attributes of these modules, and by which name the code that changes it reads it.

    What lies under several names is yielded for each of them.
    """
    seen: dict[str, set[int]] = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if name not in _KEPT_ELSEWHERE and not is_plain(value):
                for holder in holders(value, any_name, seen.setdefault(name, set())):
                    yield _IDENTIFIER.findall(name + holder.path)[-1], holder
