"""Which objects a tuple has, in a form that is compared in one call of C."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def identities_of(count: int) -> Callable[[tuple[Any, ...]], bytes]:
    """Return a function that returns the identities of the objects in a tuple of that length."""
    return _pointers_of(count) if _READS_TUPLES else _ids


def _ids(objects: tuple[Any, ...]) -> bytes:
    """Return the identities of some objects."""
    return b"".join([id(found).to_bytes(_POINTER, sys.byteorder) for found in objects])


def _pointers_of(count: int) -> Callable[[tuple[Any, ...]], bytes]:
    """Return what does as `_ids` for that many objects, in less time: in CPython a tuple is an array of them."""
    at = (ctypes.c_char * (_POINTER * count)).from_address
    return lambda objects: at(id(objects) + _HEAD).raw


def _reads_tuples() -> bool:
    """Return whether `_pointers_of` works in this interpreter."""
    tuples: list[tuple[Any, ...]] = [(), (None,), (True, _ids, "", 1.5), tuple(map(object.__class__, range(100)))]
    reads = (_pointers_of(len(objects))(objects) == _ids(objects) for objects in tuples)  # in CPython only
    return sys.implementation.name == "cpython" and all(reads)


_POINTER = ctypes.sizeof(ctypes.c_void_p)
_HEAD = tuple.__basicsize__  # bytes in front of the items
_READS_TUPLES = _reads_tuples()
