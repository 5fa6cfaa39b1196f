"""The tensors in an object's items and attributes, and copies of the object, with other tensors or with the same."""

import copy
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ..._text import CONSTANTS
from ..._torch.tensors.tree import tree_flatten, tree_unflatten

_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, str, bytes)
_ITEMS = (list, tuple, set, frozenset, deque)


def tensors_held(thing: object) -> Iterator[Tensor]:
    """Yield every tensor that is reached from an object by items and attributes, each once."""
    left, seen = [thing], set[int]()
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Tensor):
            yield found
        elif not isinstance(found, _OPAQUE):
            left += [value for _, value in _attributes(found)]
            if isinstance(found, dict):
                left += found.values()
            elif isinstance(found, _ITEMS):
                left += found


def holds_tensors(thing: object) -> bool:
    """Return whether a tensor is reached from an object by items and attributes."""
    return type(thing) not in _PLAIN and next(tensors_held(thing), None) is not None


_PLAIN = frozenset(CONSTANTS)


def own_batch(tree: Any) -> Any:
    """Return a tree with the same values, in containers and tensors that belong to the caller of this function alone.

    A function may take an entry out of its batch (`batch.pop("label")`), and have autograd record operations on a
    tensor of it (`x.requires_grad_()`). A replay does not call the function, so the user's own containers and tensors
    must not change in an eager call either, and the buffers that a graph reads must not change in its capture.

    A tensor that requires grad is returned as it is: what made it may be waiting for its gradient.

    Sync: none. Aliasing: the tensors lie in the memory of the given ones, and a change in place is seen in both.
    """
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if isinstance(tree, Tensor):
        if kind not in _PLAIN_TENSORS or tree.requires_grad:
            return tree
        own = tree.detach()
        vars(own).update(vars(tree))  # what the user's code has set on it
        return own
    if kind is tuple or kind is list:
        return kind(map(own_batch, tree))
    if kind in _DICTS:
        other = copy.copy(tree)
        for key, value in tree.items():
            other[key] = own_batch(value)
        return other
    if kind is deque:
        return deque(map(own_batch, tree), tree.maxlen)
    if isinstance(tree, tuple) and hasattr(kind, "_make"):  # a named tuple
        return tuple.__new__(kind, map(own_batch, tree))
    leaves, structure = tree_flatten(tree)  # torch may have been told of this class
    return tree if len(leaves) == 1 and leaves[0] is tree else tree_unflatten(list(map(own_batch, leaves)), structure)


_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))
_DICTS = frozenset((dict, OrderedDict, defaultdict))


def is_record(thing: object) -> bool:
    """Return whether an object consists of its items and attributes alone, so that `with_values` can copy it."""
    fields = ("__dataclass_fields__", "__attrs_attrs__")
    return isinstance(thing, (dict, UserDict, *_ITEMS)) or any(hasattr(type(thing), name) for name in fields)


def with_values(thing: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record of the same class with changed items and attributes; the record itself if none has changed.

    Neither `__init__` nor `__post_init__` is called.
    """
    attributes = {name: (value, change(value)) for name, value in _attributes(thing)}
    changed = {name: new for name, (old, new) in attributes.items() if new is not old}
    items = list(thing.values()) if isinstance(thing, dict) else list(thing) if isinstance(thing, _ITEMS) else []
    new_items = [change(item) for item in items]
    if not changed and all(new is old for old, new in zip(items, new_items, strict=True)):
        return thing
    if items and isinstance(thing, (tuple, frozenset)):
        base: Any = tuple if isinstance(thing, tuple) else frozenset
        other = base.__new__(type(thing), new_items)
        changed = {name: new for name, (_, new) in attributes.items()}  # it has none yet
    else:
        other = copy.copy(thing)
        if isinstance(thing, dict):
            for key, item in zip(thing, new_items, strict=True):
                other[key] = item
        elif items:
            other.clear()
            other.update(new_items) if isinstance(thing, set) else other.extend(new_items)
    for name, value in changed.items():
        object.__setattr__(other, name, value)  # also where it is frozen
    return other


def _attributes(thing: object) -> list[tuple[str, Any]]:
    """Return what an object has in its `__dict__` and its slots."""
    found = list(getattr(thing, "__dict__", {}).items())
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{slot}" if slot.startswith("__") and slot[-2:] != "__" else slot
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                found.append((name, getattr(thing, name)))
    return found
