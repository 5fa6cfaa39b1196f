"""A variable and what is read of it: the way to a value, and through which tables it leads."""

from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ..._user_line import is_users_file
from .bare_objects import bases_of, class_table, file_of_module, module_name, own_table
from .bytecode import Part, Scope
from .contents import ABSENT, gives_its_entries, is_closed, is_plain
from .tables import Slots

PathKey = tuple[int, str, tuple[Part, ...]]
_WRITING = frozenset(("add", "append", "clear", "discard", "extend", "insert", "remove", "setdefault", "update"))


class Root(NamedTuple):
    """A variable.

    Attributes:
        scope: where it is kept.
        owner: the global variables of a Python module, the cell of a variable of a function, or the value itself.
        name: of the variable.
    """

    scope: Scope
    owner: Any
    name: str

    def value(self) -> Any:
        """Return the value; `ABSENT` if there is none."""
        if self.scope is Scope.GLOBAL:
            return self.owner.get(self.name, ABSENT)
        if self.scope is Scope.ARGUMENT:
            return self.owner
        try:
            return self.owner.cell_contents
        except ValueError:  # not assigned yet
            return ABSENT


class Path(NamedTuple):
    """A variable and what is read of its value, of that value, and so on.

    Attributes:
        root: the variable.
        parts: what is read.
    """

    root: Root
    parts: tuple[Part, ...]

    @property
    def key(self) -> PathKey:
        """Equal for equal paths, as long as the root is kept."""
        return id(self.root.owner), self.root.name, self.parts

    @property
    def last_name(self) -> Any:
        """What the last part reads, or the name of the variable."""
        return self.parts[-1].key if self.parts else self.root.name

    def __str__(self) -> str:
        return "".join((self.root.name, *map(str, self.parts)))

    def followed(self) -> str:
        """Return how as much of it is written as leads to values."""
        return str(self._replace(parts=self.parts[: len(self.values()) - 1] if self.root.value() is not ABSENT else ()))

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Yield the table that the value of each part is in, and the value, as far as there are such values."""
        value = self.root.value()
        for part in self.parts:
            table = _table(value, part)
            if table is None:
                return
            value = table[part.key]
            yield table, value

    def only_writes(self) -> bool:
        """Return whether the path leads to a method that changes a list, dict or set."""
        values = self.values()
        part = self.parts[len(values) - 1] if 0 < len(values) <= len(self.parts) else None
        return part is not None and issubclass(type(values[-1]), (dict, list, set)) and part.key in _WRITING

    def values(self) -> list[Any]:
        """Return the value of the variable and those of the parts, as far as there are any."""
        value = self.root.value()
        return [] if value is ABSENT else [value, *[value for _, value in self.steps()]]


def is_left_alone(value: Any) -> bool:
    """Return whether nothing is read of a value: it is plain, or is looked at by itself."""
    return is_plain(value) or is_closed(value)


def _table(value: Any, part: Part) -> Any:
    """Return the table that has this part of a value; None if there is none, or if it is looked at by other means."""
    if not part.is_attribute:
        return value if _has_entry(value, part.key) else None
    if issubclass(type(value), ModuleType):
        module = own_table(value) or {}
        return module if is_users_file(file_of_module(value)) and part.key in module else None
    if issubclass(type(value), type):
        return _of_class(value, part.key)
    if is_left_alone(value) and type(value) is not FunctionType:
        return None
    if part.key in (slots := Slots(value)):
        return slots
    table = own_table(value)
    return table if table is not None and part.key in table else _of_class(type(value), part.key)


def _has_entry(value: Any, key: Any) -> bool:
    kind = type(value)
    if issubclass(kind, dict):
        return gives_its_entries(kind) and dict.__contains__(value, key)
    in_order = kind in (list, deque) or issubclass(kind, tuple)
    return in_order and type(key) is int and -len(value) <= key < len(value)


def _of_class(kind: type, name: str) -> Any:
    """Return the `__dict__` of the class in which a class has its attribute of this name."""
    bases = (base for base in bases_of(kind) if module_name(base) != "builtins")
    return next((class_table(base) for base in bases if name in class_table(base)), None)
