"""Values that a graph holds as constants: which ones, what is noted of them, and when two of them are the same.

Objects and classes are read without running code of theirs, which may raise, or change something.
"""

import array
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_bases = type.__dict__["__mro__"].__get__
_module = type.__dict__["__module__"].__get__
_table = type.__dict__["__dict__"].__get__


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, in the order in which attributes are looked up."""
    found: tuple[type, ...] = _bases(kind)
    return found


def class_table(kind: type) -> Mapping[str, Any]:
    """Return the `__dict__` of a class."""
    found: Mapping[str, Any] = _table(kind)
    return found


def module_name(kind: type) -> str:
    """Return the name of the Python module that a class says it is from; "" if it says none."""
    found = _module(kind)
    return found if isinstance(found, str) else ""


def package_name(kind: type) -> str:
    """Return the name of the top-level package of a class."""
    return module_name(kind).partition(".")[0]


def file_of_module(module: ModuleType) -> str:
    """Return the file of a Python module, "" if it has none. A module that is loaded late stays as it is."""
    found = (own_table(module) or {}).get("__file__")
    return found if isinstance(found, str) else ""


def own_table(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object; None if it has none.

    It is not what a property of that name, `__getattr__` or a weak proxy makes of it.
    """
    for base in bases_of(type(value)):
        descriptor: Any = class_table(base).get("__dict__")
        if type(descriptor) in (GetSetDescriptorType, MemberDescriptorType):
            table = descriptor.__get__(value)
            return table if type(table) is dict else None
    return None


_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range, Decimal)
_BUILT_IN = (bool, int, float, complex, str, bytes)
_BY_IDENTITY = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
    Enum,
    Tensor,
)
_CLOSED = (nn.Module, torch.optim.Optimizer, types.ModuleType)
CLOSED_PACKAGES = frozenset(("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "ampkit"))


CLOSED_CLASSES = CLOSED_PACKAGES | {"builtins"}  # the packages of classes that are not looked into


MOST_ENTRIES = 64  # of a list, or of a dict without names; more are data


def is_number(value: Any) -> bool:
    """Return whether two values of this kind are compared by `==`."""
    return isinstance(value, (*_NUMBERS, types.MethodType))


def is_plain(value: Any) -> bool:
    """Return whether a value has nothing inside that could change: a number, a text, a function, a tensor itself."""
    kind = type(value)  # the `__class__` of a weak proxy is that of another object, which may be gone
    if issubclass(kind, (tuple, frozenset)):
        return all(map(is_plain, value))
    if kind is slice:
        return all(map(is_plain, _ends(value)))
    return issubclass(kind, (*_NUMBERS, *_BY_IDENTITY)) or _is_of_numpy(kind, "generic")


def is_array(value: Any) -> bool:
    """Return whether a value holds numbers in memory of its own, where they may change in place: of numpy, or bytes."""
    kind = type(value)
    if kind in (bytearray, array.array):
        return True
    return kind.__name__ == "ndarray" and _is_of_numpy(kind, "ndarray") and value.dtype.kind in _NUMERIC


def _is_of_numpy(kind: type, name: str) -> bool:
    """Return whether a class is this one of numpy or made from it. Nothing is, if nobody has imported numpy."""
    found = getattr(sys.modules.get("numpy"), name, None)
    return found is not None and issubclass(kind, found)


def _ends(value: slice) -> tuple[Any, ...]:
    return value.start, value.stop, value.step


def is_closed(value: Any) -> bool:
    """Return whether what is in this object is no setting of a step, or is looked at by itself."""
    kind = type(value)
    return issubclass(kind, _CLOSED) or package_name(kind) in CLOSED_PACKAGES


def size(table: Any) -> int:
    """Return how many entries a list or dict has."""
    return dict.__len__(table) if isinstance(table, dict) else list.__len__(table)


def tells_its_size(kind: type) -> bool:
    """Return whether `len` gives the number of entries of lists, dicts and deques of this class."""
    return getattr(kind, "__len__", None) in (dict.__len__, list.__len__, deque.__len__)


def gives_its_entries(kind: type) -> bool:
    """Return whether a class of dicts reads its entries as `dict` does."""
    return getattr(kind, "__getitem__", None) is dict.__getitem__


def getter(keys: list[Any], kind: type = dict) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the entries with these keys, one at least, of a table of this class as a tuple."""
    if hasattr(kind, "__missing__"):  # it would make an entry that is gone
        return lambda table: tuple([dict.__getitem__(table, key) for key in keys])
    return operator.itemgetter(*keys, keys[0])  # of two keys, it is one


def noted(value: Any) -> Any:
    """Return a value, and in place of a tensor or a module a weak reference, so that settings of earlier calls keep no
    memory."""
    if isinstance(value, (tuple, frozenset)):
        return (tuple if isinstance(value, tuple) else frozenset)(map(noted, value))
    return reference(value) if isinstance(value, Tensor) or is_closed(value) else value


def reference(value: Any) -> Any:
    """Return a weak reference of an object, or its class if there can be none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return type(value)


def are_same(old: Any, now: Any) -> bool:
    """Return whether a graph may have the one in place of the other: equal numbers, or the same tensor or function."""
    if old is now:  # there is one weak reference of a tensor
        return True
    if type(old) is not type(now):
        return False
    if isinstance(old, tuple):
        return len(old) == len(now) and all(map(are_same, old, now))
    if isinstance(old, frozenset):
        return bool(old == now)
    if type(old) is slice:
        return are_same(_ends(old), _ends(now))
    if isinstance(old, (float, complex, Decimal)):
        return number_text(old) == number_text(now)  # 0.0 and -0.0 are equal, and nan is not
    if _is_of_numpy(type(old), "generic"):
        return bool(old.tobytes() == now.tobytes())
    return is_number(old) and bool(_own_kind(old).__eq__(old, now))


def number_text(number: Any) -> str:
    """Return a number or text as Python writes it."""
    return str(_own_kind(number).__repr__(number))


def _own_kind(number: Any) -> Any:
    """Return the class of a number or text, without what a class of the user's makes of it."""
    return next((kind for kind in _BUILT_IN if isinstance(number, kind)), type(number))


_NUMERIC = "biufcSU"  # kinds of dtypes of numpy: booleans, numbers and texts
ABSENT = object()
