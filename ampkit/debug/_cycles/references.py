"""How objects and the references between them are named: as the user's code names them."""

import gc
import types
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._capture.host.constants import own_table
from ..._text import dtype_name, size_text
from ..._torch.tensors.fake_tensors import is_fake
from ..._torch.tensors.modules import module_tables
from ..._torch.tensors.tensors import storage_of
from ..._user_line import line_text

_SHOWN = 12  # objects of a chain that are shown, half of them at each end: about three lines of a terminal

# Objects of these types stand between objects that the user has named. A cycle is easier to follow if it is told from
# an object of another type.
UNNAMED_TYPES = (
    dict,
    list,
    tuple,
    set,
    types.CellType,
    types.TracebackType,
    types.MethodType,
    types.GetSetDescriptorType,
)
# What a reference is called, and the objects that it leads to, in order: `.x` leads to an object's dict and then to x.
_Reference = tuple[str, tuple[object, ...]]
_MOST_OBJECTS = 3  # of a reference: an attribute of a module leads through its dict and its dict of parameters


def chain(path: Sequence[object]) -> str:
    """Return the names of the objects of a path, each with the name of its reference to the next."""
    names, i = [], 0
    while i < len(path) - 1:
        following = path[i + 1 : i + 1 + _MOST_OBJECTS]
        fitting = [
            (len(things), label)
            for label, things in _references(path[i])
            if len(things) <= len(following) and all(a is b for a, b in zip(things, following, strict=False))
        ]
        # The reference that covers the most of the following objects.
        length, label = max(fitting, key=lambda found: found[0], default=(1, " (no name)"))
        names.append(_name(path[i]) + label)
        i += length
    names.append(_name(path[-1]))
    if len(names) > _SHOWN:
        names[_SHOWN // 2 : -_SHOWN // 2] = [f"({len(names) - _SHOWN} more)"]
    return " -> ".join(names)


def _references(holder: Any) -> Iterator[_Reference]:
    """Yield all references of an object. Calls no repr, comparison or attribute access of the user's."""
    kind = type(holder)  # not isinstance, which may ask the object for its __class__
    yield from _contents(holder, kind)
    attributes = own_table(holder) or {}
    if issubclass(kind, BaseException):
        for name in ("__traceback__", "__context__", "__cause__"):
            yield f".{name}", (getattr(holder, name),)
        for i, value in enumerate(holder.args):
            yield f".args[{i}]", (holder.args, value)
    if issubclass(kind, type):
        for inner in gc.get_referents(vars(holder)):  # the dict, of which vars is a view
            for name, value in vars(holder).items():
                yield f".{name}", (inner, value)
        for base in holder.__mro__:
            yield ".__mro__", (holder.__mro__, base)
    if issubclass(kind, nn.Module):
        for table in module_tables(holder):
            for name, value in table.items():
                yield f".{name}", (table, value)
                yield f".{name}", (attributes, table, value)
    if issubclass(kind, Tensor):
        yield ".grad_fn", (holder.grad_fn,)
    for name, value in attributes.items():
        yield f".{name}", (value,)  # without a dict between: from Python 3.11 on, objects have none until asked
        yield f".{name}", (attributes, value)
    for cls in kind.__mro__:
        for name, member in vars(cls).items():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):  # not set
                    yield f".{name}", (member.__get__(holder),)
    yield ".__class__", (kind,)


def _contents(holder: Any, kind: type) -> Iterator[_Reference]:
    """Yield the references of a container, function, cell, frame or traceback; nothing for other kinds."""
    if issubclass(kind, dict):
        for key, value in dict.items(holder):
            yield f"[{key!r}]" if type(key) in (str, int) else f"[{type(key).__name__}]", (value,)
            yield " key", (key,)
    elif plain := next((each for each in (list, tuple, deque) if issubclass(kind, each)), None):
        for i, value in enumerate(plain.__iter__(holder)):  # a subclass may have an __iter__ of the user's
            yield f"[{i}]", (value,)
    elif issubclass(kind, set):
        for value in holder:
            yield " element", (value,)
    elif kind is types.FunctionType:
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False):
            for value in gc.get_referents(cell):
                yield f" closure cell {name!r}", (holder.__closure__, cell, value)
            yield f" closure cell {name!r}", (holder.__closure__, cell)
        for value in holder.__defaults__ or ():
            yield " default argument", (holder.__defaults__, value)
        for name, value in (holder.__kwdefaults__ or {}).items():
            yield f" default of {name!r}", (holder.__kwdefaults__, value)
    elif kind is types.CellType:
        for value in gc.get_referents(holder):
            yield " of a closure", (value,)
    elif kind is types.FrameType:
        cells = [thing for thing in gc.get_referents(holder) if type(thing) is types.CellType]
        for name, value in holder.f_locals.items():
            yield f" local {name!r}", (value,)
            for cell in cells:
                if any(inside is value for inside in gc.get_referents(cell)):
                    yield f" local {name!r}", (cell, value)
        yield " called by", (holder.f_back,)
    elif kind is types.TracebackType:
        yield ".tb_next", (holder.tb_next,)


def _name(thing: Any) -> str:
    kind = type(thing)
    if issubclass(kind, Tensor):
        memory = weak_storage_of(thing)
        size = f", {size_text(memory[1])}" if memory else ""
        graph = ", with its autograd graph" if thing.grad_fn is not None else ""
        return f"{kind.__name__} {tuple(thing.shape)} {dtype_name(thing.dtype)} {thing.device}{size}{graph}"
    if kind is types.FrameType:
        return f"frame of {thing.f_code.co_name}"
    if kind is types.FunctionType:
        return f"function {thing.__qualname__}"
    return f"class {thing.__name__}" if issubclass(kind, type) else kind.__name__


def lines_of(things: Sequence[object]) -> list[str]:
    """Return the lines of the functions and frames among some objects, or if there are none, of their classes."""
    raised = {id(thing.tb_frame): thing.tb_lineno for thing in things if type(thing) is types.TracebackType}
    found = []
    for thing in things:
        if type(thing) is types.FunctionType:
            found.append(line_text(thing.__code__.co_filename, thing.__code__.co_firstlineno))
        elif type(thing) is types.FrameType:
            found.append(line_text(thing.f_code.co_filename, raised.get(id(thing), thing.f_lineno)))
    if not found:  # a class does not say where it is, but its `__init__` does, if that is written in Python
        inits = [vars(type(thing)).get("__init__") for thing in things]
        codes = [init.__code__ for init in inits if type(init) is types.FunctionType]
        found = [line_text(code.co_filename, code.co_firstlineno) for code in codes]
    return list(dict.fromkeys(found))


def weak_storage_of(tensor: Tensor) -> tuple[StorageWeakRef, int] | None:
    """Return a weak reference to a tensor's storage and its bytes, or None if it has no memory."""
    if is_fake(type(tensor)):
        return None
    storage = storage_of(tensor)
    return (StorageWeakRef(storage), storage.nbytes()) if storage is not None and storage.nbytes() else None
