"""What the references between objects are called, and the objects: in the user's own names."""

import gc
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..._text import dtype_name, size_text
from ..._torch.fake_tensors import is_fake
from ..._torch.modules import module_tables
from ..._user_line import line_text

_STEPS = 12  # of a chain that are shown

# What stands between objects that the user knows: a circle is better told from one of these.
NAMELESS = (
    dict,
    list,
    tuple,
    set,
    types.CellType,
    types.TracebackType,
    types.MethodType,
    types.GetSetDescriptorType,
)
_Route = tuple[str, tuple[object, ...]]  # what a reference is called, and the objects that it leads through


def chain(path: Sequence[object]) -> str:
    """Return how each object of a path refers to the next, in the user's names."""
    steps, i = [], 0
    while i < len(path) - 1:
        label, taken = _reference(path[i], path[i + 1 : i + 4])  # no route is longer
        steps.append(_name(path[i]) + label)
        i += taken
    steps.append(_name(path[-1]))
    if len(steps) > _STEPS:
        steps[_STEPS // 2 : -_STEPS // 2] = [f"({len(steps) - _STEPS} more)"]
    return " -> ".join(steps)


def _reference(holder: object, following: Sequence[object]) -> tuple[str, int]:
    """Return what the reference to the first object, or through some, is called, and how many it leads through."""
    fitting = [
        (len(things), label)
        for label, things in _routes(holder)
        if len(things) <= len(following) and all(a is b for a, b in zip(things, following, strict=False))
    ]
    taken, label = max(fitting, key=lambda route: route[0], default=(1, " (no name)"))
    return label, taken


def _routes(holder: object) -> Iterator[_Route]:
    """Yield what an object refers to, by name. Calls no repr and no comparison of the user's."""
    for kind, routes in _ROUTES.items():
        if issubclass(type(holder), kind):
            yield from routes(holder)
    attributes = _attributes(holder)
    for name, value in attributes.items():
        yield f".{name}", (value,)  # Python 3.11 keeps them in the object until someone asks for the dict
        yield f".{name}", (attributes, value)
    for cls in type(holder).__mro__:
        for name, member in vars(cls).items():
            if type(member) is types.MemberDescriptorType and (value := _slot(member, holder)) is not None:
                yield f".{name}", (value,)
    yield ".__class__", (type(holder),)


def _attributes(holder: object) -> dict[str, object]:
    try:
        found = object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return {}
    return found if type(found) is dict else {}  # that of a class is a view, see _of_class


def _slot(member: types.MemberDescriptorType, holder: object) -> object:
    try:
        return member.__get__(holder)
    except AttributeError:  # not set
        return None


def _of_dict(holder: dict[Any, object]) -> Iterator[_Route]:
    for key, value in dict.items(holder):
        yield f"[{key!r}]" if type(key) in (str, int) else f"[{type(key).__name__}]", (value,)
        yield " key", (key,)


def _of_sequence(holder: Any) -> Iterator[_Route]:
    plain = next(kind for kind in (list, tuple, deque) if isinstance(holder, kind))
    for i, value in enumerate(plain.__iter__(holder)):  # that of a subclass is the user's
        yield f"[{i}]", (value,)


def _of_set(holder: set[object]) -> Iterator[_Route]:
    for value in holder:
        yield " element", (value,)


def _of_function(holder: types.FunctionType) -> Iterator[_Route]:
    for name, cell in zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False):
        for value in gc.get_referents(cell):
            yield f" closure cell {name!r}", (holder.__closure__, cell, value)
        yield f" closure cell {name!r}", (holder.__closure__, cell)
    for value in holder.__defaults__ or ():
        yield " default argument", (holder.__defaults__, value)
    for name, value in (holder.__kwdefaults__ or {}).items():
        yield f" default of {name!r}", (holder.__kwdefaults__, value)


def _of_cell(holder: types.CellType) -> Iterator[_Route]:
    for value in gc.get_referents(holder):
        yield " of a closure", (value,)


def _of_frame(holder: types.FrameType) -> Iterator[_Route]:
    cells = [thing for thing in gc.get_referents(holder) if type(thing) is types.CellType]
    for name, value in holder.f_locals.items():
        yield f" local {name!r}", (value,)
        for cell in cells:
            if any(held is value for held in gc.get_referents(cell)):
                yield f" local {name!r}", (cell, value)
    yield " called by", (holder.f_back,)


def _of_traceback(holder: types.TracebackType) -> Iterator[_Route]:
    yield ".tb_next", (holder.tb_next,)


def _of_error(holder: BaseException) -> Iterator[_Route]:
    for name in ("__traceback__", "__context__", "__cause__"):
        yield f".{name}", (getattr(holder, name),)
    for i, value in enumerate(holder.args):
        yield f".args[{i}]", (holder.args, value)


def _of_class(holder: type) -> Iterator[_Route]:
    for inner in gc.get_referents(vars(holder)):  # the dict behind the view
        for name, value in vars(holder).items():
            yield f".{name}", (inner, value)
    for base in holder.__mro__:
        yield ".__mro__", (holder.__mro__, base)


def _of_module(holder: nn.Module) -> Iterator[_Route]:
    attributes = _attributes(holder)
    for table in module_tables(holder):
        for name, value in table.items():
            yield f".{name}", (table, value)
            yield f".{name}", (attributes, table, value)


def _of_tensor(holder: Tensor) -> Iterator[_Route]:
    yield ".grad_fn", (holder.grad_fn,)


_ROUTES: dict[type, Callable[[Any], Iterator[_Route]]] = {
    dict: _of_dict,
    list: _of_sequence,
    tuple: _of_sequence,
    deque: _of_sequence,
    set: _of_set,
    types.FunctionType: _of_function,
    types.CellType: _of_cell,
    types.FrameType: _of_frame,
    types.TracebackType: _of_traceback,
    BaseException: _of_error,
    type: _of_class,
    nn.Module: _of_module,
    Tensor: _of_tensor,
}


# ----------------------------------------------------------------------------------------------------- names of objects


def _name(thing: object) -> str:
    kind = type(thing)
    if issubclass(kind, Tensor):
        return _tensor_name(thing)  # type: ignore[arg-type]
    if kind is types.FrameType:
        return f"frame of {thing.f_code.co_name}"  # type: ignore[attr-defined]
    if kind is types.FunctionType:
        return f"function {thing.__qualname__}"  # type: ignore[attr-defined]
    return f"class {thing.__name__}" if issubclass(kind, type) else kind.__name__  # type: ignore[attr-defined]


def _tensor_name(tensor: Tensor) -> str:
    memory = storage_of(tensor)
    size = f", {size_text(memory[1])}" if memory else ""
    graph = ", with its autograd graph" if tensor.grad_fn is not None else ""
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {dtype_name(tensor.dtype)} {tensor.device}{size}{graph}"


def lines_of(things: Sequence[object]) -> list[str]:
    """Return the lines of functions and frames, or of classes, each once."""
    raised = {id(thing.tb_frame): thing.tb_lineno for thing in things if type(thing) is types.TracebackType}
    found = []
    for thing in things:
        if type(thing) is types.FunctionType:
            found.append(line_text(thing.__code__.co_filename, thing.__code__.co_firstlineno))
        elif type(thing) is types.FrameType:
            found.append(line_text(thing.f_code.co_filename, raised.get(id(thing), thing.f_lineno)))
    return list(dict.fromkeys(found or map(_line_of_class, filter(_is_written, map(type, things)))))


def _is_written(kind: type) -> bool:
    """Return whether a class has an `__init__` in Python of its own, which says where it is."""
    return type(vars(kind).get("__init__")) is types.FunctionType


def _line_of_class(kind: type) -> str:
    code = vars(kind)["__init__"].__code__
    return line_text(code.co_filename, code.co_firstlineno)


def storage_of(tensor: Tensor) -> tuple[StorageWeakRef, int] | None:
    """Return a reference to a tensor's storage, and its bytes; None where it has none."""
    if is_fake(type(tensor)):
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return None
    return (StorageWeakRef(storage), storage.nbytes()) if storage.nbytes() else None
