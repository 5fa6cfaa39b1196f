"""What lists, dicts and other objects hold that modules have as attributes, such as `model.config`."""

import types
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
# What is in these is no setting of a step, or is looked at by itself.
_CLOSED = (nn.Module, torch.optim.Optimizer, types.ModuleType)
_CLOSED_PACKAGES = frozenset(("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "ampkit"))
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


def _entries(owner: Any) -> tuple[bool, Any]:
    """Return whether this is an object with attributes, and the table of what it holds; None if it is left as it is."""
    kind = type(owner)
    if issubclass(kind, _CLOSED) or kind.__module__.partition(".")[0] in _CLOSED_PACKAGES:
        return False, None
    if issubclass(kind, dict):
        is_usual = kind.__getitem__ is dict.__getitem__ and len(owner) <= _MOST_NAMED
        return False, owner if is_usual else None
    if kind is list:
        return False, owner if len(owner) <= _MOST and all(map(is_plain, owner)) else None
    try:
        table = object.__getattribute__(owner, "__dict__")  # not what `__getattr__` and weak proxies make of it
    except AttributeError:
        return True, None
    return True, table if type(table) is dict and len(table) <= _MOST_NAMED else None


def _pairs(entries: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(entries, list):
        return list(enumerate(entries))
    unnamed = [key for key in entries if not isinstance(key, str)]
    numbered = len(unnamed) <= _MOST and all(map(is_number, unnamed))
    return [(key, entry) for key, entry in list(entries.items()) if isinstance(key, str) or numbered]
