"""Global variables that a step reads, variables of functions around it, and attributes of objects in them.

A graph holds their values as constants.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from .._torch.compile import never_compile_by_itself
from .._torch.modules import MODULE_CALL
from .._user_line import is_in_users_file, is_users_call, is_users_file
from .bytecode import Part, Read, Scope, codes_in, reads
from .contents import ABSENT, Holder, are_same, getter, holders, is_closed, is_plain, noted, own_table
from .functions import Functions

_Key = tuple[int, str, tuple[Part, ...]]
_WRITING = frozenset(("add", "append", "clear", "discard", "extend", "insert", "remove", "setdefault", "update"))
_FEW = 64  # entries of a dict, all of which are compared


class Reader(Enum):
    """What reads a variable."""

    MODULE = "a module that the step calls"
    OPTIMIZER = "the step of an optimizer"
    REST = "the rest of the step"


class _Root(NamedTuple):
    """A variable.

    Attributes:
        scope: where it is kept.
        owner: the global variables of a Python module, the cell of a variable of a function, or the value itself.
        name: of the variable.
    """

    scope: Scope
    owner: Any
    name: str

    def value(self) -> Any:
        """Return the value; `ABSENT` if there is none."""
        if self.scope is Scope.GLOBAL:
            return self.owner.get(self.name, ABSENT)
        if self.scope is Scope.ARGUMENT:
            return self.owner
        try:
            return self.owner.cell_contents
        except ValueError:  # not assigned yet
            return ABSENT


class _Path(NamedTuple):
    """A variable and what is read of its value, of that value, and so on.

    Attributes:
        root: the variable.
        parts: what is read.
    """

    root: _Root
    parts: tuple[Part, ...]

    @property
    def key(self) -> _Key:
        """Equal for equal paths, as long as the root is kept."""
        return id(self.root.owner), self.root.name, self.parts

    @property
    def last_name(self) -> Any:
        """What the last part reads, or the name of the variable."""
        return self.parts[-1].key if self.parts else self.root.name

    def __str__(self) -> str:
        return "".join((self.root.name, *map(str, self.parts)))

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Yield the table that the value of each part is in, and the value, as far as there are such values."""
        value = self.root.value()
        for part in self.parts:
            table = _table(value, part)
            if table is None:
                return
            value = table[part.key]
            yield table, value

    def only_writes(self) -> bool:
        """Return whether the path leads to a method that changes a list, dict or set."""
        values = self.values()
        part = self.parts[len(values) - 1] if 0 < len(values) <= len(self.parts) else None
        return part is not None and issubclass(type(values[-1]), (dict, list, set)) and part.key in _WRITING

    def values(self) -> list[Any]:
        """Return the value of the variable and those of the parts, as far as there are any."""
        value = self.root.value()
        return [] if value is ABSENT else [value, *[value for _, value in self.steps()]]


@dataclass(frozen=True, eq=False)
class VariableValues:
    """The values of variables, and of what is read of them.

    Two of these are equal if the paths that both looked at have the same values.

    Attributes:
        found: by path, by what is written behind it: a number, text or function itself, a weak reference of a tensor
            or of an object that nothing is read of, and the type of any other object.
        names: how each path is written.
    """

    found: dict[_Key, dict[str, Any]]
    names: dict[_Key, str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableValues) and not any(True for _ in self.different(other))

    def __hash__(self) -> int:
        return hash(VariableValues)

    def named(self) -> dict[str, Any]:
        """Return the values by how messages name them."""
        return {
            f"the variable {self.names[key]}{text}": value
            for key, found in self.found.items()
            for text, value in found.items()
        }

    def changed(self, new: "VariableValues") -> dict[str, tuple[Any, Any]]:
        """Return the old and the new value of each variable that is another one now, by how it is written."""
        return {
            f"{self.names[key]}{text}": (self.found[key].get(text, ABSENT), new.found[key].get(text, ABSENT))
            for key, text in self.different(new)
        }

    def different(self, other: "VariableValues") -> Iterator[tuple[_Key, str]]:
        """Yield what has another value in the other one: a path, and what is written behind it."""
        for key, old in self.found.items():
            now = other.found.get(key)
            for text in () if now is None else {**old, **now}:
                if now is not None and not are_same(old.get(text, ABSENT), now.get(text, ABSENT)):
                    yield key, text


class Notes:
    """What the functions that a step calls read, told by their bytecode.

    Args:
        look: returns the values of a path.
        functions: those of the user's that ampkit calls in a step.
    """

    def __init__(self, look: Callable[[_Path], dict[str, Any]], functions: Iterable[Any]) -> None:
        self._look = look
        self._functions = Functions(functions)
        self.paths: dict[_Key, _Path] = {}
        self.before: dict[_Key, dict[str, Any]] = {}  # the values when a function that reads them was called
        self.readers: dict[_Key, set[Reader]] = {}
        self._reads: dict[CodeType, list[Read]] = {}
        self._fixed: dict[CodeType, list[_Path]] = {}  # those that are the same in each call of a function
        self._inner: set[CodeType] = set()  # of functions that are defined by functions that were called
        # By identity: the objects on the paths, which are kept alive here. Functions may be given them.
        self._known: dict[int, tuple[Any, _Path]] = {}

    def take(self, frame: FrameType) -> None:
        """Take note of a function that is called."""
        code = frame.f_code
        found = self._reads.get(code)
        if found is None:
            found = self._reads[code] = reads(code) if is_in_users_file(frame) else []
            if found and not is_users_call(frame.f_back):
                self._take_what_is_bound(frame)
            self._fixed[code] = self._paths_of(frame, found)
            self._inner.update(codes_in(code) if found else ())
        if not found:
            return
        reader = _reader(frame)
        given = (self._given(frame, read) for read in found if read.scope is Scope.ARGUMENT)
        for path in (*self._fixed[code], *filter(None, given)):
            self._add(path, reader)

    def _paths_of(self, frame: FrameType, found: list[Read]) -> list[_Path]:
        code = frame.f_code
        fixed = [
            _Path(_Root(Scope.GLOBAL, frame.f_globals, read.variable), read.parts)
            for read in found
            if read.scope is Scope.GLOBAL and read.variable in frame.f_globals
        ]
        enclosing = [read for read in found if read.scope is Scope.ENCLOSING]
        for function in self._functions.of(code) if enclosing and code not in self._inner else ():
            cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
            roots = [(_Root(Scope.ENCLOSING, cells[read.variable], read.variable), read) for read in enclosing]
            fixed += [_Path(root, read.parts) for root, read in roots]
        return fixed

    def _given(self, frame: FrameType, read: Read) -> _Path | None:
        """Return the path of what is read of an argument; None if the argument was not on the path of a variable."""
        value = frame.f_locals.get(read.variable)
        if id(value) not in self._known:
            return None
        _, path = self._known[id(value)]
        return _Path(path.root, (*path.parts, *read.parts))

    def _take_what_is_bound(self, frame: FrameType) -> None:
        """Take note of what a function that ampkit calls is given, and not by the call.

        It is the object that a method belongs to, what `functools.partial` adds, and what arguments are by default.
        """
        bound = set(map(id, self._functions.bound(frame.f_code)))
        for name, value in frame.f_locals.items():
            if (name == "self" or id(value) in bound) and not _is_left_alone(value):
                self._known.setdefault(id(value), (value, _Path(_Root(Scope.ARGUMENT, value, name), ())))

    def _add(self, path: _Path, reader: Reader) -> None:
        if path.key in self.paths:
            self.readers[path.key].add(reader)
        if path.key in self.paths or path.only_writes():
            return
        self.readers[path.key] = {reader}
        self.paths[path.key] = path
        self.before[path.key] = self._look(path)
        for depth, value in enumerate(path.values()):
            self._functions.take(value)
            if not is_plain(value):
                self._known.setdefault(id(value), (value, _Path(path.root, path.parts[:depth])))


never_compile_by_itself(Notes.take)


class Variables:
    """Which variables are compared from call to call, and what reads them.

    They are those that the user's own code reads. Which code that is, a step that is watched shows. What a step changes
    itself is not compared, since a replay would not change it.

    Args:
        is_read: returns whether code reads attributes by a name.
        functions: those of the user's that ampkit calls in a step.
    """

    def __init__(self, is_read: Callable[[str], bool], functions: Iterable[Any] = ()) -> None:
        self._is_read, self._functions = is_read, tuple(functions)
        self._paths: dict[_Key, _Path] = {}
        self._readers: dict[_Key, set[Reader]] = {}
        self._left_out: dict[tuple[_Key, str], _Path] = {}  # the paths keep their keys from being those of others

    def notes(self) -> Notes:
        """Return notes to be taken while a step runs."""
        return Notes(self._look, self._functions)

    def learn(self, notes: Notes, *, in_parts: bool = False) -> None:
        """Compare what a step has read from now on. To be called at its end.

        Args:
            notes: those that were taken.
            in_parts: whether only modules are captured. Then what the rest of the step reads is not compared.
        """
        before, after = (VariableValues(found, {}) for found in (notes.before, self._looks(notes.paths)))
        for key, text in before.different(after):
            path = notes.paths[key]
            holds_more = any(_is_table(value) for value in path.values()[-1:])
            self._left_out[key, "" if holds_more else text] = path
        for key, path in notes.paths.items():
            if (key, "") not in self._left_out and not (in_parts and Reader.MODULE not in notes.readers[key]):
                self._paths[key] = path
                self._readers[key] = self._readers.get(key, set()) | notes.readers[key]

    def leave_out(self, names: Iterable[str]) -> None:
        """Do not compare variables and attributes with these names. Something else does."""
        left = set(names)
        self._left_out.update({(key, ""): path for key, path in self._paths.items() if path.last_name in left})
        self._paths = {key: path for key, path in self._paths.items() if (key, "") not in self._left_out}

    def forget(self) -> None:
        """Compare nothing any more."""
        for table in (self._paths, self._readers, self._left_out):
            table.clear()

    def are_of_optimizers(self, old: VariableValues, new: VariableValues) -> bool:
        """Return whether steps of optimizers read all that has changed, and nothing else does."""
        readers = [self._readers.get(key, set()) for key, _ in old.different(new)]
        return bool(readers) and all(found == {Reader.OPTIMIZER} for found in readers)

    def values(self) -> VariableValues:
        """Return the values that the variables have now."""
        return VariableValues(self._looks(self._paths), {key: str(path) for key, path in self._paths.items()})

    def readers(self) -> tuple[list[Any], list[Any]]:
        """Return functions that read what the values depend on, and the table to pass to each of them.

        A function returns a tuple. It raises a `KeyError` or `IndexError` if an entry is gone.
        """
        read: dict[int, tuple[Any, dict[Any, None]]] = {}
        for path in self._paths.values():
            pairs = [(table, [part.key]) for part, (table, _) in zip(path.parts, path.steps(), strict=False)]
            if path.root.scope is Scope.GLOBAL and path.root.value() is not ABSENT:
                pairs.append((path.root.owner, [path.root.name]))
            pairs += [(holder.table, [*holder.keys, *holder.inner]) for holder in self._contents(path)]
            for table, keys in pairs:
                read.setdefault(id(table), (table, {}))[1].update(dict.fromkeys(keys))
        found = [(getter(list(keys)), table) for table, keys in read.values() if keys]
        roots = (path.root for path in self._paths.values() if path.root.scope is Scope.GLOBAL)
        found += [(_is_there(root.name), root.owner) for root in roots if root.value() is ABSENT]
        return [reader for reader, _ in found], [table for _, table in found]

    def cells(self) -> list[Any]:
        """Return the cells that variables of functions are kept in."""
        cells = (path.root.owner for path in self._paths.values() if path.root.scope is Scope.ENCLOSING)
        return list({id(cell): cell for cell in cells}.values())

    def tables(self) -> list[Any]:
        """Return what may get a further entry that counts: objects, where it may hide an attribute of their class, and
        what is compared with all that is in it."""
        paths = self._paths.values()
        inside = [holder.table for path in paths for holder in self._contents(path)]
        owned = [own_table(value) for path in paths for value in path.values() if not _is_left_alone(value)]
        return list({id(table): table for table in (*inside, *owned) if table is not None}.values())

    def modules(self) -> list[nn.Module]:
        """Return the modules that variables lead to."""
        values = (path.values() for path in self._paths.values())
        return [value for found in values for value in found[-1:] if issubclass(type(value), nn.Module)]

    def _looks(self, paths: dict[_Key, _Path]) -> dict[_Key, dict[str, Any]]:
        return {key: self._look(path) for key, path in paths.items()}

    def _look(self, path: _Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for value in path.values()[-1:]:
            found[""] = noted(value) if is_plain(value) else _stand_in(value)
        for holder in self._contents(path):
            texts = zip(holder.keys, holder.texts, strict=True)
            found.update((text, noted(holder.table[key])) for key, text in texts)
        return {text: value for text, value in found.items() if (path.key, text) not in self._left_out}

    def _contents(self, path: _Path) -> Iterator[Holder]:
        """Yield what is in the last value of a path, if code can read it by what no bytecode tells."""
        for value in path.values()[-1:]:
            if _is_table(value):
                is_read = _always if len(value) <= _FEW else self._is_read
                yield from holders(value, is_read, set())
            elif not _is_left_alone(value) and hasattr(type(value), "__getattr__"):
                yield from holders(value, self._is_read, set())


def _table(value: Any, part: Part) -> Any:
    """Return the table that has this part of a value; None if there is none, or if it is looked at by other means."""
    if not part.is_attribute:
        return value if _has_entry(value, part.key) else None
    if issubclass(type(value), ModuleType):
        is_users = is_users_file(getattr(value, "__file__", None) or "")
        return vars(value) if is_users and part.key in vars(value) else None
    if issubclass(type(value), type):
        return _of_class(value, part.key)
    if _is_left_alone(value):
        return None
    table = own_table(value)
    return table if table is not None and part.key in table else _of_class(type(value), part.key)


def _has_entry(value: Any, key: Any) -> bool:
    kind = type(value)
    if issubclass(kind, dict):
        return kind.__getitem__ is dict.__getitem__ and key in value
    return kind is list and type(key) is int and -len(value) <= key < len(value)


def _of_class(kind: type, name: str) -> Any:
    """Return the `__dict__` of the class in which a class has its attribute of this name."""
    bases = (base for base in kind.__mro__ if base.__module__ != "builtins")
    return next((vars(base) for base in bases if name in vars(base)), None)


def _always(_: str) -> bool:
    return True


def _is_there(name: str) -> Callable[[dict[str, Any]], tuple[bool]]:
    return lambda table: (name in table,)


def _stand_in(value: Any) -> Any:
    """Return what stands for an object that is not plain: for most, what is read of them is compared instead.

    The type of an object, and not `isinstance`, tells what it is, since weak proxies may be of objects that are gone.
    """
    is_read = own_table(value) is not None and not is_closed(value) and not _is_of_package(value)
    if _is_table(value) or is_read:
        return type(value)
    try:
        return weakref.ref(value)
    except TypeError:
        return type(value)


def _is_of_package(value: Any) -> bool:
    """Return whether code that is not looked at may read attributes of this object, or keeps its values elsewhere."""
    module = sys.modules.get(type(value).__module__)
    return type(value) is functools.partial or "-packages" in (getattr(module, "__file__", None) or "")


def _is_table(value: Any) -> bool:
    return issubclass(type(value), (dict, list))


def _is_left_alone(value: Any) -> bool:
    return is_plain(value) or is_closed(value)


def _reader(frame: FrameType | None) -> Reader:
    """Return what a function is called for."""
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            return Reader.MODULE
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return Reader.OPTIMIZER
        frame = frame.f_back
    return Reader.REST
