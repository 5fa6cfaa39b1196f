"""Python's `random` and `numpy.random`, and whether a step draws from them."""

import ctypes
import functools
import operator
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

_PYTHON, _NUMPY = "Python's random", "numpy.random"
_WORDS = 624  # of the state of a Mersenne Twister, beside its position


class HostSources:
    """Notices draws of random numbers on the host, other than torch's.

    It is asked before each operation. `random.getstate()` makes 625 numbers, and numpy's takes five times as long as
    that: longer than the operation. So the words are compared where they are in memory, if they are found there.
    """

    def __init__(self) -> None:
        self._words: dict[str, tuple[Callable[[], Any], Any]] = {}  # by source, how they are read, and what they are
        self._whole: dict[str, Any] = {}  # the states of those that were not drawn from
        self.drawn_from()

    def drawn_from(self) -> list[str]:
        """Return the sources that numbers were drawn from since this was called last."""
        found = []
        for name in (_PYTHON, _NUMPY) if "numpy.random" in sys.modules else (_PYTHON,):
            if name not in self._words:  # numpy may be imported in a step
                reader, whole = _SOURCES[name]
                read = reader()
                self._words[name], self._whole[name] = (read, read()), whole()
            read, before = self._words[name]
            words = read()
            if words != before:
                self._words[name] = read, words
                self._whole.pop(name, None)
                found.append(name)
        return found

    def drawn_from_pairs(self) -> list[str]:
        """Return the sources from which only the second number of a pair of normal ones was drawn, which was there."""
        return [name for name, before in self._whole.items() if before != _SOURCES[name][1]()]


def memory_reader(address: int, size: int) -> Callable[[], bytes]:
    """Return a function that returns these bytes. It is C code, as are many calls of it that a step is watched in."""
    return functools.partial(operator.attrgetter("raw"), (ctypes.c_char * size).from_address(address))


def _python_reader() -> Callable[[], Any]:
    source: Any = random.getstate.__self__  # type: ignore[attr-defined]  # the methods of one object
    head, form = object.__basicsize__, struct.Struct(f"=i{_WORDS}I")  # RandomObject in CPython's _randommodule.c
    if type(source).__mro__[1].__basicsize__ < head + form.size:
        return random.getstate
    read = memory_reader(id(source) + head, form.size)
    *words, position = random.getstate()[1]
    return read if read() == form.pack(position, *words) else random.getstate


def _numpy_reader() -> Callable[[], Any]:
    get_generator: Callable[[], Any] = getattr(sys.modules["numpy.random"], "get_bit_generator", lambda: None)
    generator = get_generator()  # new in numpy 1.24
    if type(generator).__name__ != "MT19937":
        return _numpy_state
    position = struct.Struct("=i")  # behind the words: mt19937_state in numpy's mt19937.h
    read = memory_reader(generator.ctypes.state_address, 4 * _WORDS + position.size)
    key, at, *_ = _numpy_state()
    return read if read() == key + position.pack(at) else _numpy_state


def _numpy_state() -> list[Any]:
    state = sys.modules["numpy.random"].get_state(legacy=False)
    inner = state.pop("state")
    return [each.tobytes() if hasattr(each, "tobytes") else each for each in (*inner.values(), *state.values())]


# By source, what returns a function that reads its words, and what returns its whole state.
_SOURCES: dict[str, tuple[Callable[[], Callable[[], Any]], Callable[[], Any]]] = {
    _PYTHON: (_python_reader, random.getstate),
    _NUMPY: (_numpy_reader, _numpy_state),
}
