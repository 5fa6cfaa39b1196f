"""The functions that a code object belongs to, and the arguments that they are given before any call."""

import functools
import gc
from collections.abc import Iterable
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any


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
                left += [found.func, *_arguments(found)]
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
        arguments += [_arguments(each) for each in partials if id(each.func) in called]
        return [*chain.from_iterable(arguments)]


_CALLED = (FunctionType, MethodType, functools.partial)


def _arguments(made: "functools.partial[Any]") -> tuple[Any, ...]:
    return (*made.args, *made.keywords.values())
