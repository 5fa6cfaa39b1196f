"""Values that a graph holds as constants: which ones, what is noted of them, and when two of them are the same.

Objects and classes are read without running code of theirs, which may raise, or change something.
"""

import array
import ctypes
import datetime
import operator
import os
import re
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._text import CONSTANTS, dtype_name, grid, value_text

# Of a class: it and its bases, in the order in which attributes are looked up; its `__dict__`; its `__qualname__`.
bases_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
class_table: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
qualified_name: Callable[[type], str] = type.__dict__["__qualname__"].__get__
_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
CData: Any = ctypes.Structure.__mro__[1]  # the class of all numbers and arrays of ctypes


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


_TIMES = (datetime.date, datetime.time, datetime.timedelta)
_NUMBERS = (*CONSTANTS, torch.dtype, torch.device, range, Decimal, PurePath, *_TIMES)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_BY_IDENTITY = (*_FUNCTIONS, type, Enum, Tensor)
_CLOSED = (nn.Module, torch.optim.Optimizer, types.ModuleType)
CLOSED_PACKAGES = frozenset(("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "ampkit"))
# Its thread notes the time in its object every 10 s. Inductor starts it, and code of transformers reaches it.
_MONITOR_OF_TQDM = "tqdm._monitor"
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
        return all(map(is_plain, (value.start, value.stop, value.step)))
    return issubclass(kind, (*_NUMBERS, *_BY_IDENTITY)) or _is_of_numpy(kind, "generic")


def is_array(value: Any) -> bool:
    """Return whether a value holds numbers in memory of its own, where they may change in place, as of numpy."""
    kind = type(value)
    if kind in (bytearray, array.array) or issubclass(kind, CData):
        return True
    return kind.__name__ == "ndarray" and _is_of_numpy(kind, "ndarray") and value.dtype.kind in _NUMERIC


def _is_of_numpy(kind: type, name: str) -> bool:
    """Return whether a class is this one of numpy or made from it. Nothing is, if nobody has imported numpy."""
    found = getattr(sys.modules.get("numpy"), name, None)
    return found is not None and issubclass(kind, found)


def is_closed(value: Any) -> bool:
    """Return whether what is in this object is no setting of a step, or is looked at by itself."""
    kind = type(value)
    return issubclass(kind, _CLOSED) or package_name(kind) in CLOSED_PACKAGES or module_name(kind) == _MONITOR_OF_TQDM


def tells_its_size(kind: type) -> bool:
    """Return whether `len` gives the number of entries of lists, dicts and deques of this class."""
    return getattr(kind, "__len__", None) in (dict.__len__, list.__len__, deque.__len__)


def gives_its_entries(kind: type) -> bool:
    """Return whether a class of dicts reads its entries as `dict` does."""
    return getattr(kind, "__getitem__", None) is dict.__getitem__


def is_in_order(kind: type) -> bool:
    """Return whether a class of lists, tuples or deques reads its entries as these do."""
    base = next((base for base in (list, tuple, deque) if issubclass(kind, base)), None)
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in ("__getitem__", "__iter__"))


def getter(keys: list[Any], kind: type = dict) -> Callable[[Any], tuple[Any, ...]]:
    """Return what reads the entries with these keys, one at least, of a table of this class as a tuple."""
    if hasattr(kind, "__missing__"):  # which dict.__getitem__ calls, too: it would make an entry that is gone
        return lambda table: tuple([dict.get(table, key, ABSENT) for key in keys])
    return operator.itemgetter(*keys, keys[0])  # of two keys, it is one


def noted(value: Any) -> Any:
    """Return a value, and in place of a tensor or a module a weak reference, so that settings of earlier calls keep no
    memory."""
    kind = type(value)  # a weak proxy may be of an object that is gone
    if issubclass(kind, (tuple, frozenset)):
        return (tuple if issubclass(kind, tuple) else frozenset)(map(noted, value))
    return value if is_plain(value) and not issubclass(kind, Tensor) else reference(value)


class TensorReference(weakref.ref[Tensor]):
    """A weak reference of a tensor, and its `place_of`."""

    __slots__ = ("place",)
    place: tuple[Any, ...] | None


def reference(value: Any) -> Any:
    """Return a weak reference of an object, or the object if there can be none."""
    if issubclass(type(value), Tensor):
        found = TensorReference(value)
        found.place = place_of(value)
        return found
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def place_of(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return address, shape and strides of a tensor, which `tensor.data = ...` changes; None if it has no memory."""
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # of a sparse one, or of a class of tensors around others
        return None


def are_same(old: Any, now: Any) -> bool:
    """Return whether a graph may have the one in place of the other: equal numbers, or the same tensor or function."""
    if old is now:  # there is one weak reference of an object
        return True
    if type(old) is not type(now):
        return False
    if type(old) is TensorReference:
        return old() is not None and old() is now() and old.place == now.place
    if isinstance(old, (tuple, list)):
        return len(old) == len(now) and all(map(are_same, old, now))
    if isinstance(old, frozenset):
        others = [[each for each in values if not isinstance(each, _WRITTEN)] for values in (old, now)]
        is_there = all(any(are_same(each, found) for found in others[1]) for each in others[0])
        return len(old) == len(now) and is_there and _written(old) == _written(now)
    if type(old) is slice:
        return are_same((old.start, old.stop, old.step), (now.start, now.stop, now.step))
    if isinstance(old, (float, complex, Decimal)):
        return number_text(old) == number_text(now)  # 0.0 and -0.0 are equal, and nan is not
    if _is_of_numpy(type(old), "generic"):
        return bool(old.tobytes() == now.tobytes())
    equal = _own_kind(old).__eq__(old, now) if is_number(old) else False
    return equal is not NotImplemented and bool(equal)


def is_of_numbers(value: Any) -> bool:
    """Return whether there are only numbers, texts and functions in a value; or whether it is `ABSENT`."""
    kind = type(value)  # a weak proxy may be of an object that is gone
    if kind is dict:
        return len(value) <= MOST_ENTRIES and all(map(is_of_numbers, (*value.keys(), *value.values())))
    if kind in (list, set, tuple, deque, torch.Size):
        return len(value) <= MOST_ENTRIES and all(map(is_of_numbers, value))
    return value is ABSENT or issubclass(kind, (*_NUMBERS, *_FUNCTIONS, type, Enum)) or _is_of_numpy(kind, "generic")


def are_equal(old: Any, now: Any) -> bool:
    """Return whether two values are the same, as `are_same`, or lists, dicts and sets with the same in them.

    Two functions are equal if they have the same code, as one that each call defines.
    """
    if old is now or type(old) is not type(now):
        return old is now
    if type(old) is types.FunctionType:
        return old.__code__ is now.__code__
    if type(old) is dict:
        return are_equal(list(old), list(now)) and are_equal(list(old.values()), list(now.values()))
    if type(old) in (list, tuple, deque):
        return len(old) == len(now) and all(map(are_equal, old, now))
    if type(old) is set and is_of_numbers(old) and is_of_numbers(now):
        return are_same(frozenset(old), frozenset(now))
    return are_same(old, now)


def anew(value: Any, known: Set[int], made: dict[int, Any]) -> Any:
    """Return the same, in containers of its own, but for those that have `known` identities.

    `made` has what was made, by the identity of what it is a copy of. What lies in two places is made once.
    """
    if type(value) not in (dict, list, set, deque) or id(value) in known:
        return value
    if id(value) not in made:
        if type(value) is dict:
            made[id(value)] = {key: anew(each, known, made) for key, each in value.items()}
        else:
            inside = [anew(each, known, made) for each in value]
            made[id(value)] = deque(inside, value.maxlen) if type(value) is deque else type(value)(inside)
    return made[id(value)]


def is_write(old: Any, now: Any) -> bool:
    """Return whether a call leaves other numbers or texts than it found, or a list or dict of another length.

    Other objects, and tensors, may be what the call has made, and no later call may read them.
    """
    kinds = type(old), type(now)  # a weak proxy may be of an object that is gone
    if kinds[0] is kinds[1] and kinds[0] in (list, dict, deque):
        return len(old) != len(now) or (is_of_numbers(now) and not are_equal(old, now))
    return is_of_numbers(now) and not are_same(old, now)


def _written(values: frozenset[Any]) -> set[tuple[type, str]]:
    """Return how the numbers in a set are written: as keys 0.0 and -0.0 are one, and so are 1 and True."""
    return {(type(each), number_text(each)) for each in values if isinstance(each, _WRITTEN)}


_WRITTEN = (*CONSTANTS, Decimal)


def number_text(number: Any) -> str:
    """Return a number or text as Python writes it."""
    return str(_own_kind(number).__repr__(number))


def _own_kind(number: Any) -> Any:
    """Return the class of a number or text, without what a class of the user's makes of it."""
    return next((kind for kind in CONSTANTS if isinstance(number, kind)), type(number))


Key = tuple[Any, ...]  # of what code reads by words of its own, an attribute or a variable
# A key, and what is written behind it. None, and a name, maybe with entries: in whatever module it is.
Place = tuple[Key | None, str]
_ENTRIES = re.compile(r"(\[[^\]]*\])+$")  # at the end of a text
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_NAMED = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])*$")
_TENSORS = "[*]"  # behind how a list or dict is written: the tensors in it


@dataclass(eq=False)
class OwnChanges:
    """The places that the step changes itself. No replay would change them, so they are not compared.

    What one call alone has changed is compared again: it has filled a cache, or made a tensor where there was none, or
    where a longer one is needed. So are numbers, where a call leaves what it has found, or what an earlier one has
    found or left there: a replay puts them there, too.
    """

    places: set[Place] = field(default_factory=set)
    _calls: Counter[Place] = field(default_factory=Counter)  # how many have changed it
    _left: dict[Hashable, list[Any]] = field(default_factory=dict)  # the numbers that calls found and left in places
    _rewritten: set[Place] = field(default_factory=set)  # what the last call that read it has changed, and is compared

    def leaves_out(self, place: Place, *values: Any) -> bool:
        """Return whether this is not compared: it is one of the places, or an entry of one.

        It may be a tensor beside an entry that is one of them. These take turns, as in a list of the last ones.
        `values` are what was noted of the place.
        """
        key, text = place
        if key is not None and len(key) == 2:
            text, key = named_entry(f"{key[1]}{text}"), None
        around = around_entries(text)
        if not self.places.isdisjoint([(key, text), (key, around)]):
            return True
        takes_turns = (key, f"{around}{_TENSORS}") in self.places
        return takes_turns and all(type(each) is TensorReference for each in values)

    def is_new(self, place: Hashable, was: Any, now: Any) -> bool:
        """Return whether a call has left a number in a place that no earlier call has found or left there."""
        left = self._left.setdefault(place, [])
        is_new = not any(are_equal(now, each) for each in left)
        left += [anew(each, frozenset(), {}) for each in (was, now) if is_of_numbers(each)]
        del left[:-MOST_ENTRIES]
        return is_new

    def saw(
        self,
        changed: Set[Place],
        *,
        is_read: Callable[[Place], bool],
        is_tensor: Callable[[Place], bool],
        is_number: Callable[[Place], bool],
        is_compared: Callable[[Place], bool],
    ) -> bool:
        """Take note of a call. Return whether something is left out from now on that was compared.

        Args:
            changed: the places that have another value behind it.
            is_read: returns whether the call has read a place.
            is_tensor: returns whether there is a tensor in it now.
            is_number: returns whether there is a number in it now.
            is_compared: returns whether it is compared so far, and was read before it was changed.
        """
        first = {each for each in changed - self.places - self._rewritten if is_compared(each)}
        kept = {each for each in first if is_tensor(each) or is_number(each)}
        self._rewritten = {each for each in self._rewritten if not is_read(each)} | kept
        now = changed - kept
        self._calls.update(now)
        read = filter(is_read, self.places - now)
        filled = {each for each in read if is_tensor(each) or is_number(each) or self._calls[each] == 1}
        widened = any(is_compared(place) for place in now - self.places)
        self.places = (self.places - filled) | now
        return widened


@dataclass(frozen=True, eq=False)
class ReadValues:
    """The values of all that steps read. Two of these are equal if all that both looked at has the same values."""

    found: dict[Key, dict[str, Any]]  # what is noted of the values, by key and by what is written behind it
    name: Callable[[Key], str]  # returns how messages name a key
    was_looked_at: Callable[[Key, str], bool]  # returns whether a place had no value where none was found
    left_out: OwnChanges

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReadValues) and not any(True for _ in self.different(other))

    def __hash__(self) -> int:
        return hash(ReadValues)

    def renewed(self, now: "ReadValues") -> "ReadValues":
        """Return what is compared now, with the values that were seen here where there are any."""
        seen = {
            key: {text: self.found.get(key, {}).get(text, value) for text, value in found.items()}
            for key, found in now.found.items()
        }
        return ReadValues(seen, now.name, now.was_looked_at, now.left_out)

    def named(self) -> dict[str, Any]:
        """Return the values by how messages name them."""
        return {
            f"{self.name(key)}{text}": value
            for key, found in self.found.items()
            for text, value in found.items()
            if not self.left_out.leaves_out((key, text), value)
        }

    def changed(self, new: "ReadValues") -> dict[str, tuple[Any, Any]]:
        """Return the old and the new value of what is another one now, by how messages name it."""
        found: dict[str, tuple[Any, Any]] = {}
        for key, text in self.different(new):
            old, now = self.found.get(key, {}).get(text, ABSENT), new.found.get(key, {}).get(text, ABSENT)
            name = f"{self.name(key)}{text}"
            # Behind a tensor that is another one, as in CACHE.shape[0], nothing more is said.
            if not any(name.startswith((f"{known}.", f"{known}[")) and old is was for known, (was, _) in found.items()):
                found[name] = old, now
        return found

    def different(self, other: "ReadValues") -> Iterator[tuple[Key, str]]:
        """Yield the places that have another value in the other one."""
        for key, text in different(self.found, other.found):
            is_known = text in self.found.get(key, ()) and text in other.found.get(key, ())
            looked = is_known or (self.was_looked_at(key, text) and other.was_looked_at(key, text))
            values = [each.found.get(key, {}).get(text, ABSENT) for each in (self, other)]
            if looked and not any(each.left_out.leaves_out((key, text), *values) for each in (self, other)):
                yield key, text


def different(old: dict[Key, dict[str, Any]], now: dict[Key, dict[str, Any]]) -> Iterator[tuple[Key, str]]:
    """Yield the key and the text of each value that is another one."""
    for key in {**old, **now}:
        was, becomes = old.get(key, {}), now.get(key, {})
        for text in {**was, **becomes}:
            if not are_same(was.get(text, ABSENT), becomes.get(text, ABSENT)):
                yield key, text


def names_in(text: str) -> list[str]:
    """Return the names in how a value is written: `loss` and `weights` of `self.loss.weights[0]` without its `self.`"""
    found: list[str] = _IDENTIFIER.findall(text)
    return found


def named_entry(text: str) -> str:
    """Return the last name in what is written, with the entries behind it."""
    found = _NAMED.search(text)
    return text if found is None else found[0]


def changed_entry(key: Key | None, text: str) -> set[Place]:
    """Return what counts as changed where an entry is another one. Where it has no name, tensors may take turns."""
    return {(key, text)} if text.endswith("']") else {(key, text), (key, f"{around_entries(text)}{_TENSORS}")}


def around_entries(text: str) -> str:
    """Return how the list or dict is written that has the entry which a text ends with."""
    return _ENTRIES.sub("", text)


class HostConstant(NamedTuple):
    """A value of the host that a step reads, and that its graphs hold.

    Attributes:
        path: how it is written: `model.drop.p`, `CONFIG.loss['l1']`.
        value: what it is now, as text.
        line: `file:line` of a line that reads it; "" if it is not known.
        not_compared: why a call does not compare it with what it was; "" if it does.
        is_code: whether it is a function, a class or a module, of which only is compared which one it is.
    """

    path: str
    value: str
    line: str
    not_compared: str = ""
    is_code: bool = False


class HostConstants(tuple[HostConstant, ...]):
    """The values of the host that a step reads, and that its graphs hold. Prints as a table."""

    __slots__ = ()

    @property
    def compared(self) -> int:
        """How many of them each call compares with what they were."""
        return sum(not each.not_compared for each in self)

    def __str__(self) -> str:
        # The path of a file as one begins to read it: in its package, or where Python runs.
        packages = f"-packages{os.sep}"
        rows = [("path", "value", "read in", "not compared")]
        for each in self:
            if not each.is_code or each.not_compared:
                line = each.line.rpartition(packages)[2].removeprefix(f"{os.getcwd()}{os.sep}")
                rows.append((each.path, each.value, line, each.not_compared))
        columns = 4 if self.compared < len(self) else 3
        code = dict.fromkeys(each.path for each in self if each.is_code and not each.not_compared)
        lines = [f"{len(self)} values of the host, {self.compared} of them compared in each call"]
        if len(rows) > 1:
            lines += grid([row[:columns] for row in rows], texts=columns)
        return "\n".join([*lines, *([f"and functions, classes and modules: {', '.join(code)}"] if code else [])])


def constant(path: str, value: Any, line: tuple[str, int] | None, not_compared: str) -> HostConstant:
    """Return a row: of a value as it was noted, `ABSENT` if there is none, and the file and number of a line."""
    if isinstance(value, weakref.ref):
        value = value()
    kind = type(value)
    is_code = issubclass(kind, (*_FUNCTIONS, type, ModuleType)) and not issubclass(kind, Enum)
    if issubclass(kind, Tensor):
        text = f"a tensor, {dtype_name(value.dtype)} {list(value.shape)}"
    elif is_code:
        called = value.__func__ if kind is types.MethodType else value
        is_class, is_module = issubclass(type(called), type), issubclass(type(called), ModuleType)
        found = qualified_name(called) if is_class else (own_table(called) or {}).get("__name__") if is_module else None
        text = found or (
            called.__qualname__ if type(called) in _FUNCTIONS else f"of class {qualified_name(type(called))}"
        )
    else:
        text = "" if value is ABSENT else value_text(value) or f"of class {qualified_name(kind)}"
    place = "" if line is None or not line[0] else f"{line[0]}:{line[1]}"
    return HostConstant(path, text, place, not_compared, is_code)


OWN = "the step changes it itself"
_NUMERIC = "biufcSU"  # kinds of dtypes of numpy: booleans, numbers and texts
ABSENT = object()
