"""Which functions of Python a step calls, whose they are, and by which names they read attributes."""

import contextlib
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from ..._torch.compiler_code import is_compilers_code, is_compiling
from ..._torch.tensors.modules import MODULE_CALL
from ..._user_line import NOT_THE_USERS, TORCH, is_ampkits, is_in_users_file, is_users_file
from .code import functions_of, line_of, names, names_looked_up
from .constants import ABSENT, CLOSED_PACKAGES, are_equal, bases_of, is_plain, module_name, named_entry, names_in
from .executed import Executed
from .objects import SET_BY_REPLAYS, HeldTable, any_name, class_numbers, holders

_MODULES = f"{TORCH}nn{os.sep}modules{os.sep}"
_PACKAGES = f"-packages{os.sep}"
KEPT_ELSEWHERE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))  # what each module has
Line = tuple[str, int]  # a file and a number
# Packages whose code reads attributes of its own, as `self.log` of Lightning does, or what is compared elsewhere.
_OF_OTHERS = [f"{_PACKAGES}{name}{os.sep}" for name in CLOSED_PACKAGES]


class Origin(Enum):
    """Whose code a function is. It decides which of its names count."""

    USERS = "the user's"
    MODULES = "torch's modules"  # it reads their attributes; other code of torch is given values, and has many names
    PACKAGE = "an installed package's"
    PYTHON = "Python's library's, or made by it"  # as the methods of named tuples
    OTHERS = "torch's or ampkit's"  # or that of a package whose attributes are compared elsewhere, or generated


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


_PASSING_ON = {contextlib.__file__, functools.__file__}
# What ampkit calls of a module beside its forward.
_LISTING = {each.__code__ for each in vars(nn.Module).values() if type(each) is FunctionType} - {MODULE_CALL}


@dataclass(frozen=True)
class Names:
    """Names by which code reads attributes of modules."""

    of_all: frozenset[str] = frozenset()  # those that count in all modules
    of_class: dict[type, frozenset[str]] = field(default_factory=dict)  # further ones, which only its methods read

    def has(self, kind: type, name: str) -> bool:
        """Return whether attributes of this name count in modules of this class."""
        return name in self.of_all or name in self.of_class.get(kind, ())

    def of(self, kind: type) -> Set[str]:
        """Return the names that count in modules of this class."""
        return self.of_all | self.of_class.get(kind, frozenset())

    def has_somewhere(self, name: str) -> bool:
        """Return whether code of any class reads something by this name."""
        return name in self.of_all or any(name in names for names in self.of_class.values())

    def without(self, left: Set[str]) -> "Names":
        """Return the others of these names."""
        return Names(self.of_all - left, {kind: found - left for kind, found in self.of_class.items()})


class CallRecorder:
    """Notes the code that a step calls, and what is in its modules before.

    Args:
        modules: those that the step may call.
        executed: which instructions are executed.
        take: is called with the frame of each function, too. It returns further modules, which the step will call.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        executed: Executed,
        take: Callable[[FrameType], Sequence[nn.Module] | None],
    ) -> None:
        self._modules, self._executed, self._take = modules, executed, take
        # By identity: dynamo makes code that has no hash, and a hash of code takes longer than all else here.
        self._judged: dict[int, tuple[CodeType, Origin]] = {}
        self._called: dict[int, tuple[CodeType, Origin]] = {}  # what counts as called by the step
        self.before = [_Before(modules)]  # what was in these, and in those that the step was found to call
        self.lines: dict[str, dict[CodeType, Line]] = {}  # where the names are read that `names` returns
        self.set: set[str] = set()  # the names of attributes that the code has set, see `names`
        self.whole: set[str] = set()  # and of those of which it may have read all entries

    def on_call(self, frame: FrameType) -> bool:
        """Take note of a function that is called. Return whether nothing is to be noted of further calls of it."""
        code = frame.f_code
        counts = id(code) in self._called
        origin = self._origin_in(frame)
        # Most calls are torch's and ampkit's, whoever makes them: they are judged once.
        if not counts and (origin is Origin.OTHERS or self._is_of_step(frame, origin)):
            if is_compiling():  # and calls what it likes
                return False
            self._called[id(code)] = code, origin
            try:
                hash(code)
            except TypeError:  # of code that dynamo has made, with a dict among its constants
                self._called[id(code)] = code, Origin.OTHERS
            counts = True
        if counts and origin is Origin.PACKAGE:  # `take` has the user's code watched
            self._executed.watch(frame)
        further = self._take(frame)
        if further:
            self.before.append(_Before(further))
        return counts and further is None and not (origin is Origin.PACKAGE and self._executed.watches_each_call)

    def _origin_in(self, frame: FrameType) -> Origin:
        """Return whose code a frame runs. What torch's compiler writes, in files anywhere, has a name of torch's."""
        code = frame.f_code
        if id(code) not in self._judged:
            found = origin_of(code.co_filename)
            if is_in_users_file(frame):  # also of `python -c`
                found = Origin.USERS
            elif found is Origin.USERS:
                found = Origin.OTHERS
            self._judged[id(code)] = code, found
        return self._judged[id(code)][1]

    def _is_of_step(self, frame: FrameType, origin: Origin) -> bool:
        """Return whether the step's own code made this call, and not torch or ampkit for purposes of their own.

        The frame is of the function that is called, which is no other function of torch's or ampkit's.
        """
        if origin is Origin.USERS:
            return True
        caller = frame.f_back
        calls = None if caller is None else self._origin_in(caller)
        if origin is Origin.PYTHON and calls is Origin.OTHERS:  # soon told, as there are many of them
            return False
        if origin is Origin.PYTHON and caller and calls is Origin.PYTHON and id(caller.f_code) not in self._called:
            return False  # as the call of its caller, which the same code outside has made
        through = set[str]()
        while caller is not None and calls is Origin.PYTHON:
            through.add(caller.f_code.co_filename)
            caller = caller.f_back
            calls = None if caller is None else self._origin_in(caller)
        if caller is None or calls is not Origin.OTHERS:
            return calls is Origin.USERS or (caller is not None and id(caller.f_code) in self._called)
        if origin is Origin.MODULES:
            return not is_ampkits(caller) or frame.f_code not in _LISTING
        # Torch and ampkit call packages on the user's behalf, as hooks and optimizers. Compiled code, imports and parts
        # of Python's library call others.
        is_others = is_compilers_code(caller.f_code) or not through <= _PASSING_ON
        return origin is Origin.PACKAGE and not is_others

    def names(self, observed: bool) -> Names:
        """Return the names by which the code that was called reads attributes. Take note of those that it sets.

        Args:
            observed: whether all calls were seen. Otherwise the methods of the modules count as called, as does what
                was compiled, of which no function is called.
        """
        kinds = dict.fromkeys(map(type, self._modules))
        methods = {kind: {function.__code__ for _, function in functions_of(kind)} for kind in kinds}
        if not observed or self._executed.compiled:
            found = chain.from_iterable(methods.values())
            called = [*self._executed.compiled, *(each for each in found if each.co_name != "__init__")]
            self._called.update((id(each), (each, origin_of(each.co_filename))) for each in called)
        # The methods of a module that has others inside may read attributes of those.
        outer = {type(module) for module in self._modules if any(True for _ in module.children())}
        leaves = set().union(*(methods[kind] for kind in methods if kind not in outer))
        leaves.difference_update(*(methods[kind] for kind in outer))
        origins = {code: origin for code, origin in self._called.values() if origin is not Origin.OTHERS}
        for code, origin in origins.items():
            self.set.update(() if origin is Origin.PYTHON else self._executed.attributes_set(code))
            self.whole.update(() if origin is Origin.PYTHON else self._executed.attributes_read_whole(code))

        def read_by(code: Set[CodeType]) -> frozenset[str]:
            return frozenset(name for each in origins.keys() & code for name in self._names(each, origins[each]))

        own = {kind: read_by(methods[kind]) for kind in methods if kind not in outer}
        return Names(read_by(origins.keys() - leaves), own)

    def _names(self, code: CodeType, origin: Origin) -> Iterator[str]:
        # Libraries have many texts. Only those count by which something is looked up.
        candidates = (names_looked_up if origin in (Origin.PACKAGE, Origin.PYTHON) else names)(code)
        for name, place in self._executed.names(code, candidates).items():
            self.lines.setdefault(name, {})[code] = line_of(place)
            yield name


class HostChange(NamedTuple):
    """What a call has put in another one's place, or made longer or shorter."""

    place: Hashable
    name: str  # by which the code that changes it reads it
    entry: str  # how it is written if it is an entry, behind the name of the list or dict; else ""
    attribute: str  # that it is in
    was: Any  # of what is longer or shorter now, how long it was
    now: Any
    is_set: bool  # whether a replay can set it, too


class _Before:
    """The attributes of modules, and what is in them, as they are now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        modules = list(filter(is_looked_into, modules))
        self._tables = [(vars(module), dict(vars(module))) for module in modules]
        self._inside: list[tuple[HeldTable, str, str, Any]] = []
        self._classes = [(each[0], each[1], each[-1]) for each in class_numbers(set(map(type, modules)), any_name)]
        seen: dict[str, set[int]] = {}  # what lies under several names is kept for each of them
        for module in modules:
            for name, value in list(vars(module).items()):
                if name not in KEPT_ELSEWHERE and not is_plain(value):
                    found = holders(value, any_name, seen.setdefault(name, set()))
                    # By the name by which the code that changes it reads it.
                    self._inside += [(each, name, names_in(name + each.path)[-1], each.copy()) for each in found]

    def changes(self) -> Iterator[HostChange]:
        """Yield what is not the same now, or a list or dict of another length."""
        for table, before in self._tables:
            for key, was, now in differing(before, table):
                yield HostChange((id(table), key), key, "", key, was, now, True)
        for table, key, was in self._classes:
            if not are_equal(was, now := table.get(key, ABSENT)):
                yield HostChange((id(table), key), key, "", key, was, now, False)
        for holder, attribute, name, was in self._inside:
            now, place, is_set = holder.copy(), id(holder.owner), isinstance(holder.table, SET_BY_REPLAYS)
            if len(was) != len(now):
                yield HostChange((place, len), name, "", attribute, len(was), len(now), is_set)
            if isinstance(was, dict) and isinstance(now, dict):
                pairs = differing(was, now)
            elif len(was) == len(now):
                pairs = differing(dict(enumerate(was)), dict(enumerate(now)))
            else:
                continue
            for key, old, new in pairs:
                entry = named_entry(f"{attribute}{holder.texts[key]}") if key in holder.texts else ""
                entry = entry if entry.endswith("]") else ""
                yield HostChange(
                    (place, key), key if isinstance(key, str) else name, entry, attribute, old, new, is_set
                )

    def values(self, name: str) -> Iterator[Any]:
        """Yield what there is under a name now."""
        tables = [now for now, _ in self._tables]
        tables += [holder.table for holder, *_ in self._inside if isinstance(holder.table, dict)]
        yield from (table[name] for table in tables if dict.__contains__(table, name))
        for holder, attribute, *_ in self._inside if name.endswith("]") else ():
            keys = {key for key, text in holder.texts.items() if named_entry(f"{attribute}{text}") == name}
            now = holder.copy() if keys else {}
            pairs = now.items() if isinstance(now, dict) else enumerate(now)
            yield from (value for key, value in pairs if key in keys)


def is_looked_into(module: nn.Module) -> bool:
    """Return whether the attributes of a module are compared. DistributedDataParallel keeps notes about a step in
    attributes, and metrics are updated between steps."""
    packages = map(module_name, bases_of(type(module)))
    return not any(name.startswith(("torch.nn.parallel.", "torchmetrics.")) for name in packages)


def differing(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the keys whose value is another one now, with both values, `ABSENT` if there is none."""
    for key in {**before, **now}:
        was, becomes = before.get(key, ABSENT), now.get(key, ABSENT)
        if not are_equal(was, becomes):
            yield key, was, becomes
