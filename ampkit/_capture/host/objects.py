"""What is in lists, dicts and other objects that a step reads: the tables of their entries and attributes."""

import copy
import csv
import functools
import gc
import inspect
import io
import itertools
import logging
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from ctypes import sizeof
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import BuiltinMethodType, FunctionType, MappingProxyType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._text import value_text
from ..._user_line import is_users_file
from .code import codes_in, functions_of, in_partial, unbound
from .constants import (
    ABSENT,
    CLOSED_CLASSES,
    MOST_ENTRIES,
    CData,
    bases_of,
    class_table,
    file_of_module,
    getter,
    gives_its_entries,
    is_array,
    is_closed,
    is_in_order,
    is_number,
    is_of_numbers,
    is_plain,
    module_name,
    names_in,
    noted,
    number_text,
    own_table,
    package_name,
    qualified_name,
    reference,
)

_FIELD = type(NamedTuple("_", [("field", int)]).__dict__["field"])  # how a named tuple gives an entry by its name


@dataclass(eq=False)
class Slots:
    """What an object keeps in `__slots__`, or a named tuple under its names, and its `__dict__`, as a table."""

    owner: Any

    def __getitem__(self, name: str) -> Any:
        if name == "__dict__" and (own := own_table(self.owner)) is not None:
            return own
        for base in bases_of(type(self.owner)):
            descriptor: Any = class_table(base).get(name)
            if type(descriptor) in (MemberDescriptorType, _FIELD):
                try:
                    return descriptor.__get__(self.owner, type(self.owner))
                except AttributeError:  # not set
                    break
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        try:
            self[name]
        except KeyError:
            return False
        return True

    def names(self) -> Iterator[str]:
        """Yield the names that the class has in `__slots__`."""
        for base in bases_of(type(self.owner)):
            if "__slots__" in class_table(base):
                yield from (name for name, each in class_table(base).items() if type(each) is MemberDescriptorType)


@dataclass(eq=False)
class _Whole:
    """What is in an object, as a table that is read whole: by number, or if it has one entry, under None.

    `read` returns all of it: the same objects again if nothing has changed since the last call.
    """

    owner: Any

    def __getitem__(self, key: int | None) -> Any:
        return self.read()[key or 0]

    def read(self) -> tuple[Any, ...]:
        raise NotImplementedError


class _Members(_Whole):
    """What is in a set: all of it under None if it is plain, else each object under its number."""

    def __getitem__(self, key: int | None) -> Any:
        return frozenset(self.owner) if key is None else self.read()[key]

    def read(self) -> tuple[Any, ...]:
        return tuple(self.owner)


class _Given(_Whole):
    """What `functools.partial` calls, and the arguments that it adds. It keeps them in C."""

    def read(self) -> tuple[Any, ...]:
        return in_partial(self.owner)


class _ContextValue(_Whole):
    """The value of a `ContextVar`; `ABSENT` if it has none."""

    def read(self) -> tuple[Any, ...]:
        return (self.owner.get(ABSENT),)


class _Array(_Whole):
    """What is in an array of numbers: one entry with the numbers, and a text for dtype and shape."""

    _seen: tuple[Any, ...] = ()

    def __getitem__(self, _: int | None) -> tuple[Any, ...]:
        if isinstance(self.owner, CData):
            return self.owner.value if hasattr(self.owner, "value") else bytes(self.owner), self._kind()
        numbers = self.owner.ravel().tolist() if hasattr(self.owner, "ravel") else self.owner
        return (*numbers, self._kind())

    def read(self) -> tuple[Any, ...]:
        now = self._kind(), self.owner.tobytes() if hasattr(self.owner, "tobytes") else bytes(self.owner)
        self._seen = self._seen if now == self._seen else now
        return (self._seen,)

    def _kind(self) -> str:
        if isinstance(self.owner, CData):
            return type(self.owner).__name__
        if hasattr(self.owner, "dtype"):  # of numpy
            return f"{self.owner.dtype}{list(self.owner.shape)}"
        return f"{getattr(self.owner, 'typecode', 'B')}[{len(self.owner)}]"


class File(_Whole):
    """A file that is open, as a table of which no entry is compared: how far it has been written, or read."""

    _seen: tuple[int, ...] = ()

    def read(self) -> tuple[int, ...]:
        now = (_position(self.owner),)
        self._seen = self._seen if now == self._seen else now
        return self._seen


def _position(file: Any) -> int:
    """Return how far a file has been written, or read; 0 where that cannot be told.

    What has been written so far to a file of texts is passed on to the system.
    """
    base = next(base for base in bases_of(type(file)) if "tell" in class_table(base))
    is_output = any(file is each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    if is_output or package_name(base) not in sys.stdlib_module_names:
        return 0
    try:
        return int(class_table(base)["tell"](file))
    except OSError as error:
        # A file of texts that is being iterated over does not tell: it is another line in each call.
        is_iterated = error.errno is None and not isinstance(error, ValueError)
        return -next(_LINES) if is_iterated else 0
    except Exception:  # it is closed, or what it is around is the user's
        return 0


FileClass = io.IOBase.__mro__[1]  # of all files; unlike `IOBase`, it runs no code to tell them
_AROUND_OTHERS = (MappingProxyType, type(csv.writer(io.StringIO())), type(csv.reader(())))  # a dict, files; in C
_LINES = itertools.count(1)
_DEEPEST = 8  # tables in tables; a level of OmegaConf's `config.vision.depth` has two
_MOST_NAMED = 4096
_MOST_TABLES = 1000  # in all
_ALL_LOGGERS = logging.Logger.manager.loggerDict  # of the process. Each of them leads there, and reads its parents.
_CACHED = type(functools.cache(lambda: None))


SET_BY_REPLAYS = (dict, list, deque, Slots)


class HeldTable(NamedTuple):
    """A table with values: of a list, tuple, deque or dict, the `__dict__` of an object or class, `Slots`, `_Whole`."""

    path: str  # how it is written, behind the name of the attribute: "", ".vision", "['vision']"
    table: Any
    keys: list[Any]  # of the values in it that are compared: numbers, texts, functions, tensors, modules
    inner: list[Any]  # of those that hold others; of these, the class is compared
    texts: dict[Any, str]  # how each of the values is written, behind the name of the attribute
    is_whole: bool  # whether nothing in it is left out, so that the order of a dict is compared, too
    owner: Any  # the list or dict, the object that has slots, the class, or what else is read whole

    def found(self) -> dict[str, Any]:
        """Return what is noted of the values that are compared, by how each of them is written."""
        found = {self.texts[key]: noted(self.table[key]) for key in self.keys}
        if self.is_whole and isinstance(self.table, dict):
            found[f"{self.path}.keys()"] = tuple(map(noted, self.table))
        return found

    def reader(self) -> Callable[[Any], tuple[Any, ...]] | None:
        """Return what reads the table, and gives the same objects as long as nothing in it changes; None if nothing in
        it is compared. It raises a `KeyError` or `IndexError` if an entry is gone."""
        if isinstance(self.table, _Whole):
            return None if isinstance(self.table, File) else type(self.table).read
        keys = [*self.keys, *self.inner]
        if keys and is_in_order(type(self.table)):
            return tuple
        if self.is_whole and isinstance(self.table, dict):
            return lambda table: (*dict.keys(table), *dict.values(table))
        return getter(keys, type(self.table)) if keys else None

    def copy(self) -> dict[Any, Any] | list[Any]:
        """Return the values as they are now: by their keys, or in their order if they have none."""
        if isinstance(self.table, dict):
            return dict(dict.items(self.table))
        if isinstance(self.table, _Whole):
            return list(self.table.read())
        if isinstance(self.table, (list, tuple, deque)):
            return list(self.table)
        return {key: self.table[key] for key in (*self.keys, *self.inner) if key in self.table}


def holders(
    value: Any,
    is_read: Callable[[str], bool],
    seen: set[int],
    *,
    is_set: Callable[[str], bool] | None = None,
    all_entries: bool = False,
    is_whole: Callable[[str], bool] | None = None,
    name: str = "",
) -> Iterator[HeldTable]:
    """Yield the tables in a value that is not plain, and in those inside of it.

    Args:
        value: the attribute.
        is_read: returns whether code reads something by this name. Otherwise it is left out.
        seen: the identities of what is left out; grows.
        is_set: returns whether code sets something by this name. Then it is left out if there is no number.
        all_entries: whether no entry of a dict is left out. Attributes of objects are.
        is_whole: returns whether no entry is left out of small dicts under a name.
        name: of the attribute.
    """
    left: list[tuple[str, Any, int]] = [("", value, 1)]
    while left:
        path, owner, depth = left.pop()
        if issubclass(type(owner), logging.Handler):  # it writes what is logged, which is told by other means
            continue
        for held, is_object, table, entries in _tables(owner):
            if id(held) in seen or held is _ALL_LOGGERS or len(seen) >= _MOST_TABLES:
                continue
            seen.add(id(held))
            is_small = isinstance(table, dict) and not is_object and len(entries) <= MOST_ENTRIES
            counts = all_entries or (is_whole is not None and is_small and is_whole(names_in(f"{name}{path}")[-1]))
            pairs = [
                (key, entry)
                for key, entry in entries
                if not isinstance(key, str)
                or (counts and not is_object)
                or is_read(key)
                or (is_set is not None and is_set(key) and is_of_numbers(entry))
            ]
            texts = {key: _written(path, key, table, is_object) for key, _ in pairs}
            inner = [(key, entry) for key, entry in pairs if depth < _DEEPEST and holds_others(entry)]
            keys = [key for key, entry in pairs if is_plain(entry) or is_closed(entry) or not _may_change_inside(entry)]
            has_all = counts and not is_object and len(pairs) == len(entries)
            yield HeldTable(path, table, keys, [key for key, _ in inner], texts, has_all, held)
            left += [(texts[key], entry, depth + 1) for key, entry in inner]


def restoring(held: HeldTable) -> Callable[[], None] | None:
    """Return what puts back all that is in a table that replays do not set; None if that cannot be done."""
    owner, table = held.owner, held.table
    if isinstance(table, _ContextValue):
        value = owner.get(ABSENT)
        return None if value is ABSENT else functools.partial(_set_context, owner, value)
    if isinstance(table, _Members) and type(owner) is set:
        return functools.partial(_set_members, owner, set(owner))
    if isinstance(table, _Array) and not (isinstance(owner, CData) or memoryview(owner).readonly):
        everything = ... if hasattr(owner, "shape") else slice(None)
        return functools.partial(operator.setitem, owner, everything, copy.copy(owner))
    if isinstance(table, MappingProxyType):
        return functools.partial(_set_class, owner, {key: table[key] for key in (*held.keys, *held.inner)})
    return None


def _set_context(variable: "ContextVar[Any]", value: Any) -> None:
    if variable.get(ABSENT) is not value:
        variable.set(value)


def _set_members(owner: set[Any], members: set[Any]) -> None:
    owner.clear()
    owner.update(members)


def _set_class(owner: type, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if class_table(owner).get(key, ABSENT) is not value:
            type.__setattr__(owner, key, value)


def any_name(_: str) -> bool:
    """`is_read` of `holders`, where no name is left out."""
    return True


def holds_others(value: Any) -> bool:
    """Return whether there may be tables in this value."""
    return any(True for _ in _tables(value))


def noted_inside(value: Any, *, of_module: bool) -> Any:
    """Return what is compared of a value: of one that is looked into, only its class.

    The type of an object, and not `isinstance`, tells what it is, since weak proxies may be of objects that are gone.
    """
    if is_plain(value):
        return noted(value)
    looked_into = holds_others(value)
    if not of_module and looked_into and not issubclass(type(value), (dict, list)) and not is_array(value):
        # Code of a package, which is not looked at, may read attributes of its object, or keep the values elsewhere.
        module = sys.modules.get(module_name(type(value)))
        looked_into = module is None or "-packages" not in file_of_module(module)
    return type(value) if looked_into else reference(value)


def _may_change_inside(value: Any) -> bool:
    """Return whether a value is a container, or another object that is looked into, and not compared itself."""
    return issubclass(type(value), (list, tuple, deque, dict, set, frozenset)) or is_array(value) or holds_others(value)


def _tables(owner: Any) -> Iterator[tuple[Any, bool, Any, Sequence[tuple[Any, Any]]]]:
    """Yield what an object holds: whose it is, whether it is attributes, the table, and the entries.

    Nothing is yielded of a plain value, of what is left as it is, and of what is too large to be a setting.
    """
    kind = type(owner)
    if issubclass(kind, MethodType) or (kind is BuiltinMethodType and type(owner.__self__) is not ModuleType):
        yield from _tables(owner.__self__)
    elif kind in _AROUND_OTHERS:
        for each in gc.get_referents(owner):
            yield from _tables(each)
    elif kind is ContextVar:
        yield _one_entry(_ContextValue(owner))
    elif issubclass(kind, Tensor) or (issubclass(kind, ModuleType) and is_users_file(file_of_module(owner))):
        if own := own_table(owner):
            yield own, True, own, list(own.items())
    elif issubclass(kind, type):
        yield from _of_classes(owner, set())
    elif is_plain(owner) or is_closed(owner):
        return
    elif issubclass(kind, dict):
        if gives_its_entries(kind) and dict.__len__(owner) <= _MOST_NAMED:
            pairs = list(dict.items(owner))
            unnamed = [key for key, _ in pairs if not isinstance(key, str)]
            by_identity: Any = object.__hash__  # no code of the user's may look a key up
            safe = (is_plain(key) or type(key).__hash__ is by_identity for key in unnamed)
            numbered = len(unnamed) <= MOST_ENTRIES and all(safe)
            yield owner, False, owner, [(key, entry) for key, entry in pairs if isinstance(key, str) or numbered]
    elif is_in_order(kind):
        if len(owner) <= MOST_ENTRIES:
            yield owner, False, owner, list(enumerate(owner))
    elif issubclass(kind, (set, frozenset)):
        if len(owner) > MOST_ENTRIES or kind.__iter__ not in (set.__iter__, frozenset.__iter__):
            return
        if all(map(is_plain, owner)):
            yield _one_entry(_Members(owner))
        else:
            yield owner, False, _Members(owner), list(enumerate(owner))
    elif is_array(owner):
        is_of_c = isinstance(owner, CData)
        if (sizeof(owner) if is_of_c else owner.size if hasattr(owner, "size") else len(owner)) <= MOST_ENTRIES:
            yield _one_entry(_Array(owner))
    elif kind is functools.partial:
        yield owner, False, _Given(owner), list(enumerate(in_partial(owner)))
    else:
        if issubclass(kind, FileClass):
            yield owner, False, File(owner), []
            if package_name(kind) in sys.stdlib_module_names:  # what is in it is no setting
                return
        if kind is _CACHED:
            results = tuple(_results(owner))
            yield owner, False, results, list(enumerate(results))
        yield from _attributes(owner)


def _one_entry(table: _Whole) -> tuple[Any, bool, Any, Sequence[tuple[Any, Any]]]:
    return table.owner, False, table, [(None, table[None])]


def _results(cached: Any) -> list[Any]:
    """Return what a function with `functools.cache` keeps, or with `functools.lru_cache` if it has no arguments."""
    function, info = cached.__wrapped__, cached.cache_info()
    if info.maxsize is None:
        tables = [table for table in gc.get_referents(cached) if type(table) is dict and table is not own_table(cached)]
        results = [result for table in tables for result in table.values()]
        return results if len(results) <= MOST_ENTRIES else []
    if type(function) is not FunctionType or info.currsize != 1:
        return []
    code = function.__code__
    takes = code.co_argcount or code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return [] if takes else [cached()]  # which calls nothing


def _attributes(owner: Any) -> Iterator[tuple[Any, bool, Any, Sequence[tuple[Any, Any]]]]:
    kind, own, slots = type(owner), own_table(owner), Slots(owner)
    hidden: set[str] = set()  # of what the class has under the same name
    if own is not None and len(own) <= _MOST_NAMED:
        hidden.update(own)
        yield own, True, own, list(own.items())
    if names := list(slots.names()):
        hidden.update(names)
        yield owner, True, slots, [(name, slots[name]) for name in names if name in slots]
    if own is not None or names:
        yield from _of_classes(kind, hidden)


def _of_classes(kind: type, hidden: set[str]) -> Iterator[tuple[Any, bool, Any, Sequence[tuple[Any, Any]]]]:
    """Yield the settings among the attributes of a class and its bases, but for those whose names are hidden."""
    for base in bases_of(kind):
        if package_name(base) in CLOSED_CLASSES:
            continue
        table = class_table(base)
        found = []
        for name, value in table.items():
            is_left_out = name in hidden or name.startswith("__") or issubclass(type(value), type)
            if not is_left_out and not any("__get__" in class_table(each) for each in bases_of(type(value))):
                found.append((name, value))  # no method, and no property
        hidden.update(table)
        yield base, True, table, found


def _written(path: str, key: Any, table: Any, is_object: bool) -> str:
    if key is None and isinstance(table, _Whole):
        return path
    if is_object:
        return f"{path}.{key}"
    fields = getattr(type(table), "_fields", ()) if isinstance(table, tuple) else ()
    if fields and len(fields) == len(table):
        return f"{path}.{fields[key]}"
    if issubclass(type(key), Enum):
        return f"{path}[{type(key).__name__}.{key._name_}]"
    if issubclass(type(key), type):
        return f"{path}[{qualified_name(key)}]"
    return f"{path}[{number_text(key) if is_number(key) else value_text(key) or object.__repr__(key)}]"


def users_methods(kinds: Iterable[type]) -> Iterator[tuple[Any, str, str, FunctionType]]:
    """Yield the methods of the user's own classes: the `__dict__`, the name, how messages name it, and the function.

    Code that is written anew, as by IPython's autoreload, changes functions in place.
    """
    for kind in dict.fromkeys(chain.from_iterable(map(bases_of, kinds))):
        table = class_table(kind)
        for name, value in table.items():
            if function := users_function(value):
                yield table, name, f"{module_name(kind)}.{qualified_name(kind)}.{name}", function


def class_numbers(kinds: Iterable[type], is_read: Callable[[str], bool]) -> Iterator[tuple[Any, str, str, Any]]:
    """Yield the numbers in the user's own classes that code reads: the `__dict__`, the name, how messages name it, and
    the number."""
    for kind in dict.fromkeys(chain.from_iterable(map(bases_of, kinds))):
        if package_name(kind) not in CLOSED_CLASSES:
            table = class_table(kind)
            found = ((name, value) for name, value in table.items() if is_read(name) and not name.startswith("__"))
            text = f"{module_name(kind)}.{qualified_name(kind)}"
            yield from ((table, name, f"{text}.{name}", value) for name, value in found if is_of_numbers(value))


def users_function(value: Any) -> FunctionType | None:
    """Return the function of the user's that a value is, or a method or property has; None if it has none."""
    found = unbound(value)
    return found if type(found) is FunctionType and is_users_file(found.__code__.co_filename) else None


def noted_function(function: FunctionType) -> tuple[Any, ...]:
    """Return what is noted of a function: its code, and what its arguments are by default."""
    by_name = function.__kwdefaults__ or {}
    return tuple(map(noted, (function.__code__, function.__defaults__, *by_name, *by_name.values())))


@dataclass(eq=False)
class Reach:
    """Yields the user's functions that may run where code uses some values, each once.

    Of an object these are the methods whose names one of the functions reads, and those that Python calls by itself
    (`__call__`, `__getattr__`).

    Args:
        values: to begin with; this list is used up.
    """

    _left: list[Any]
    _seen: dict[int, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)  # that the functions read
    _waiting: dict[str, list[Any]] = field(default_factory=dict)  # what objects have under other names

    def __iter__(self) -> Iterator[FunctionType]:
        while self._left:
            value = self._left.pop()
            if id(value) in self._seen or len(self._seen) >= _MOST_REACHED:
                continue
            self._seen[id(value)] = value
            if type(value) is not FunctionType:
                self._left += self._inside(value)
                continue
            self._left += chain.from_iterable(map(gc.get_referents, value.__closure__ or ()))
            self._left += [vars(value)["__wrapped__"]] if "__wrapped__" in vars(value) else []
            if is_users_file(value.__code__.co_filename):
                for name in chain.from_iterable(code.co_names for code in (value.__code__, *codes_in(value.__code__))):
                    self._names.add(name)
                    self._left += self._waiting.pop(name, ())
                yield value

    def add(self, values: Iterable[Any]) -> None:
        """Take these values, too."""
        self._left += values

    def _inside(self, value: Any) -> list[Any]:
        """Return the values that may be called where this one is used."""
        kind = type(value)
        if kind in (list, tuple, deque) or issubclass(kind, dict):
            entries = list(dict.values(value) if issubclass(kind, dict) else value)
            return entries if len(entries) <= MOST_ENTRIES else []
        if kind is functools.partial:
            return [*in_partial(value)]
        if (function := unbound(value)) is not value:
            return [function, *([value.__self__] if kind is MethodType else [])]
        of_class = value if issubclass(kind, type) else kind
        if package_name(of_class) in CLOSED_CLASSES and not issubclass(kind, nn.Module):
            return []
        if issubclass(of_class, nn.Module):
            self._names.add("forward")  # which torch calls
        named = [*functions_of(of_class), *(own_table(value) or {}).items()]
        found = []
        for name, each in named:
            if name in self._names or (name.startswith("__") and name not in _MADE_BY):
                found.append(each)
            else:
                self._waiting.setdefault(name, []).append(each)
        return found


_MOST_REACHED = 10_000  # values
_MADE_BY = ("__init__", "__new__", "__post_init__")
