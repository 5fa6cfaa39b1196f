"""Values that a graph holds as constants: which ones, and what is in lists, dicts and other objects."""

import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .bare_objects import own_table, package_name

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
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
        """Return the table as it is now, as a list or a plain dict."""
        return list(self.table) if isinstance(self.table, list) else dict(dict.items(self.table))


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
        texts = {key: f"{path}.{key}" if is_object else f"{path}[{_text(key)}]" for key, _ in pairs}
        keys = [key for key, entry in pairs if is_plain(entry)]
        inner = [(key, entry) for key, entry in pairs if depth < _DEEPEST and holds_others(entry)]
        if keys or inner or not size(entries):
            yield Holder(path, entries, keys, [key for key, _ in inner], [texts[key] for key in keys])
        left += [(texts[key], entry, depth + 1) for key, entry in inner]


def holds_others(value: Any) -> bool:
    """Return whether there may be tables in this value."""
    return not is_plain(value) and _entries(value)[1] is not None


def is_closed(value: Any) -> bool:
    """Return whether what is in this object is no setting of a step, or is looked at by itself."""
    kind = type(value)
    return issubclass(kind, _CLOSED) or package_name(kind) in CLOSED_PACKAGES


def _entries(owner: Any) -> tuple[bool, Any]:
    """Return whether this is an object with attributes, and the table of what it holds; None if it is left as it is."""
    kind = type(owner)
    if is_closed(owner):
        return False, None
    if issubclass(kind, dict):
        return False, owner if gives_its_entries(kind) and size(owner) <= _MOST_NAMED else None
    if kind is list:
        return False, owner if len(owner) <= _MOST and all(map(is_plain, owner)) else None
    table = own_table(owner)
    return True, table if table is not None and len(table) <= _MOST_NAMED else None


def _pairs(entries: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(entries, list):
        return list(enumerate(entries))
    pairs = list(dict.items(entries))
    unnamed = [key for key, _ in pairs if not isinstance(key, str)]
    numbered = len(unnamed) <= _MOST and all(map(is_number, unnamed))
    return [(key, entry) for key, entry in pairs if isinstance(key, str) or numbered]


def size(table: Any) -> int:
    """Return how many entries a list or dict has."""
    return dict.__len__(table) if isinstance(table, dict) else list.__len__(table)


def tells_its_size(kind: type) -> bool:
    """Return whether `len` gives the number of entries of lists and dicts of this class."""
    return getattr(kind, "__len__", None) in (dict.__len__, list.__len__)


def gives_its_entries(kind: type) -> bool:
    """Return whether a class of dicts reads its entries as `dict` does."""
    return getattr(kind, "__getitem__", None) is dict.__getitem__


def getter(keys: list[Any], kind: type = dict) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the entries with these keys, one at least, of a table of this class as a tuple."""
    if hasattr(kind, "__missing__"):  # it would make an entry that is gone
        return lambda table: tuple([dict.__getitem__(table, key) for key in keys])
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
        return _text(old) == _text(now)  # 0.0 and -0.0 are equal, and nan is not
    return is_number(old) and bool(_own_kind(old).__eq__(old, now))


def _text(number: Any) -> str:
    return str(_own_kind(number).__repr__(number))


def _own_kind(number: Any) -> Any:
    """Return the class of a number or text, without what a class of the user's makes of it."""
    return next((kind for kind in _BUILT_IN if isinstance(number, kind)), type(number))


ABSENT = object()
