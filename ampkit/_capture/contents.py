"""Values that a graph holds as constants: which ones, and what is in lists, dicts and other objects."""

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
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
_DEEPEST = 8  # tables in tables; a level of OmegaConf's `config.vision.depth` has two
_MOST = 64  # entries of a list, or of a dict without names; more are data
_MOST_NAMED = 4096
_MOST_TABLES = 1000  # in all


class Holder(NamedTuple):
    """A table with values.

    Attributes:
        path: how it is written, behind the name of the attribute: "", ".vision", "['vision']".
        table: a list, a dict, or the `__dict__` of an object.
        keys: of the values in it that are numbers, texts, functions or tensors. Those of a list are all.
        inner: of those that hold others.
        texts: how each of these values is written, behind the name of the attribute.
    """

    path: str
    table: Any
    keys: list[Any]
    inner: list[Any]
    texts: list[str]

    def copy(self) -> Any:
        """Return the table as it is now."""
        return self.table.copy() if isinstance(self.table, (dict, list)) else dict(self.table)


def is_number(value: Any) -> bool:
    """Return whether two values of this kind are compared by `==`."""
    return isinstance(value, (*_NUMBERS, types.MethodType))


def is_plain(value: Any) -> bool:
    """Return whether a value has nothing inside that could change: a number, a text, a function, a tensor itself."""
    kind = type(value)  # the `__class__` of a weak proxy is that of another object, which may be gone
    return all(map(is_plain, value)) if issubclass(kind, tuple) else issubclass(kind, (*_NUMBERS, *_BY_IDENTITY))


def holders(value: Any, is_read: Callable[[str], bool], seen: set[int]) -> Iterator[Holder]:
    """Yield the tables in a value that is not plain, and in those inside of it.

    Args:
        value: the attribute.
        is_read: returns whether code reads something by this name. Entries with other names are left out.
        seen: the identities of tables that are left out; grows.
    """
    left: list[tuple[str, Any, int]] = [("", value, 1)]
    while left:
        path, owner, depth = left.pop()
        is_object, entries = _entries(owner)
        if entries is None or id(entries) in seen or len(seen) >= _MOST_TABLES:
            continue
        seen.add(id(entries))
        pairs = [(key, entry) for key, entry in _pairs(entries) if not isinstance(key, str) or is_read(key)]
        texts = {key: f"{path}.{key}" if is_object else f"{path}[{key!r}]" for key, _ in pairs}
        keys = [key for key, entry in pairs if is_plain(entry)]
        inner = [(key, entry) for key, entry in pairs if depth < _DEEPEST and holds_others(entry)]
        if keys or inner or not entries:
            yield Holder(path, entries, keys, [key for key, _ in inner], [texts[key] for key in keys])
        left += [(texts[key], entry, depth + 1) for key, entry in inner]


def holds_others(value: Any) -> bool:
    """Return whether there may be tables in this value."""
    return not is_plain(value) and _entries(value)[1] is not None


def is_closed(value: Any) -> bool:
    """Return whether what is in this object is no setting of a step, or is looked at by itself."""
    kind = type(value)
    return issubclass(kind, _CLOSED) or kind.__module__.partition(".")[0] in CLOSED_PACKAGES


def own_table(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object; None if it has none."""
    try:
        table = object.__getattribute__(value, "__dict__")  # not what `__getattr__` and weak proxies make of it
    except AttributeError:
        return None
    return table if type(table) is dict else None


def _entries(owner: Any) -> tuple[bool, Any]:
    """Return whether this is an object with attributes, and the table of what it holds; None if it is left as it is."""
    kind = type(owner)
    if is_closed(owner):
        return False, None
    if issubclass(kind, dict):
        is_usual = kind.__getitem__ is dict.__getitem__ and len(owner) <= _MOST_NAMED
        return False, owner if is_usual else None
    if kind is list:
        return False, owner if len(owner) <= _MOST and all(map(is_plain, owner)) else None
    table = own_table(owner)
    return True, table if table is not None and len(table) <= _MOST_NAMED else None


def _pairs(entries: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(entries, list):
        return list(enumerate(entries))
    unnamed = [key for key in entries if not isinstance(key, str)]
    numbered = len(unnamed) <= _MOST and all(map(is_number, unnamed))
    return [(key, entry) for key, entry in list(entries.items()) if isinstance(key, str) or numbered]


def getter(keys: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the entries with these keys, one at least, as a tuple."""
    return operator.itemgetter(*keys, keys[0])  # of two keys, it is one


def noted(value: Any) -> Any:
    """Return a value, and in place of a tensor a weak reference, so that settings of earlier calls keep no memory."""
    if isinstance(value, tuple):
        return tuple(map(noted, value))
    return weakref.ref(value) if isinstance(value, Tensor) else value


def are_same(old: Any, now: Any) -> bool:
    """Return whether a graph may have the one in place of the other: equal numbers, or the same tensor or function."""
    if old is now:  # there is one weak reference of a tensor
        return True
    if type(old) is not type(now):
        return False
    if isinstance(old, tuple):
        return len(old) == len(now) and all(map(are_same, old, now))
    if isinstance(old, (float, complex)):
        return repr(old) == repr(now)  # 0.0 and -0.0 are equal, and nan is not
    return is_number(old) and bool(old == now)


ABSENT = object()
