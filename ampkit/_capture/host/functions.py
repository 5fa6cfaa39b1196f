"""Functions: whose code it is, what they are given before any call, and which of them may run where a value is used."""

import functools
import gc
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..._user_line import is_users_file
from .bare_objects import bases_of, class_table, own_table, package_name
from .bytecode import codes_in
from .contents import CLOSED_CLASSES, MOST_ENTRIES


class Functions:
    """Finds functions by their code, which is all that a frame tells of the function that is called.

    It knows those that it was told of, and what they have in variables of functions around them. Any other it finds by
    the garbage collector, which sees no functions that were made before `gc.freeze`.

    Args:
        known: functions, methods and calls of `functools.partial`; other values are passed over.
    """

    def __init__(self, known: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}
        self._by_code: dict[CodeType, list[FunctionType]] = {}
        for value in known:
            self.take(value)

    def take(self, value: Any) -> None:
        """Take note of a value, if it is a function, a method, or made by `functools.partial`."""
        left = [value]
        while left:
            found = left.pop()
            if type(found) not in _CALLED or id(found) in self._seen:
                continue
            self._seen[id(found)] = found
            if type(found) is functools.partial:
                left += in_partial(found)
            elif type(found) is MethodType:
                left.append(found.__func__)
            else:
                self._by_code.setdefault(found.__code__, []).append(found)
                left += chain.from_iterable(map(gc.get_referents, found.__closure__ or ()))

    def of(self, code: CodeType) -> list[FunctionType]:
        """Return the functions with this code."""
        for found in gc.get_referrers(code):
            if type(found) is FunctionType and found.__code__ is code:
                self.take(found)
        return self._by_code.get(code, [])

    def bound(self, code: CodeType) -> list[Any]:
        """Return the arguments that functions with this code have by default, or by `functools.partial`."""
        functions = self.of(code)
        for found in gc.get_referrers(*functions) if functions else ():
            if type(found) in _CALLED:
                self.take(found)
        methods = [found for found in self._seen.values() if type(found) is MethodType and found.__func__ in functions]
        for found in gc.get_referrers(*methods) if methods else ():
            self.take(found)
        called = {id(found) for found in (*functions, *methods)}
        partials = [found for found in self._seen.values() if type(found) is functools.partial]
        arguments = [(*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()) for each in functions]
        arguments += [in_partial(each)[1:] for each in partials if id(each.func) in called]
        return [*chain.from_iterable(arguments)]


_CALLED = (FunctionType, MethodType, functools.partial)


def in_partial(made: "functools.partial[Any]") -> tuple[Any, ...]:
    """Return the function that `functools.partial` calls, and the arguments that it adds."""
    return (made.func, *made.args, *made.keywords.values())


def functions_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield the methods and properties of a class by name, but for those that torch's base class of modules has."""
    for base in bases_of(kind):
        for name, value in class_table(base).items() if base not in nn.Module.__mro__ else ():
            function = unbound(value)
            if type(function) is FunctionType:
                yield name, function


def unbound(value: Any) -> Any:
    """Return the function of a property, of a method, or of what is made by `staticmethod` or `classmethod`."""
    if issubclass(type(value), property):
        return value.fget
    return value.__func__ if type(value) in (staticmethod, classmethod, MethodType) else value


def given_before(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function is given before any call, and a name for it: the object of a method, arguments of
    `functools.partial`, and those that are given by default."""
    while type(function) is functools.partial:
        yield from (("an argument", value) for value in function.args)
        yield from function.keywords.items()
        function = function.func
    if type(function) is MethodType:
        yield "self", function.__self__
        function = function.__func__
    if type(function) is FunctionType:
        names, values = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
        yield from zip(names[len(names) - len(values) :], values, strict=True)
        yield from (function.__kwdefaults__ or {}).items()


class Reach:
    """Yields the user's functions that may run where code uses some values, each once.

    Of an object these are the methods whose names one of the functions reads, and those that Python calls by itself
    (`__call__`, `__getattr__`).

    Args:
        values: to begin with.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._left = list(values)
        self._seen: dict[int, Any] = {}
        self._names: set[str] = set()  # that the functions read
        self._waiting: dict[str, list[Any]] = {}  # what objects have under other names

    def __iter__(self) -> Iterator[FunctionType]:
        while self._left:
            value = self._left.pop()
            if id(value) in self._seen or len(self._seen) >= _MOST:
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


_MOST = 10_000  # values
_MADE_BY = ("__init__", "__new__", "__post_init__")
