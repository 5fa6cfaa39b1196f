"""Objects that are no lists or dicts, as tables of what is in them."""

from contextvars import ContextVar
from types import MemberDescriptorType
from typing import Any, NamedTuple

from .bare_objects import bases_of, class_table, own_table
from .contents import ABSENT

_FIELD = type(NamedTuple("_", [("field", int)]).__dict__["field"])  # how a named tuple gives an entry by its name


class Slots:
    """What an object keeps in `__slots__`, or a named tuple under its names, and its `__dict__`, as a table.

    Args:
        owner: the object.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        if name == "__dict__" and (own := own_table(self.owner)) is not None:
            return own
        for base in bases_of(type(self.owner)):
            descriptor: Any = class_table(base).get(name)
            if type(descriptor) in (MemberDescriptorType, _FIELD):
                try:
                    return descriptor.__get__(self.owner, type(self.owner))
                except AttributeError:  # not set
                    break
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        try:
            self[name]
        except KeyError:
            return False
        return True

    def names(self) -> list[str]:
        """Return the names under which the class keeps something, set or not."""
        tables = [class_table(base) for base in bases_of(type(self.owner)) if "__slots__" in class_table(base)]
        return [name for table in tables for name, value in table.items() if type(value) is MemberDescriptorType]


class Members:
    """What is in a set, as a table with one entry."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, _: None) -> frozenset[Any]:
        return frozenset(self.owner)

    def read(self) -> tuple[Any, ...]:
        """Return the contents: the same objects again if they have not changed since the last call."""
        return tuple(self.owner)


class ContextValue:
    """The value of a `ContextVar`, as a table with one entry; `ABSENT` if it has none."""

    def __init__(self, owner: "ContextVar[Any]") -> None:
        self.owner = owner

    def __getitem__(self, _: None) -> Any:
        return self.owner.get(ABSENT)

    def read(self) -> tuple[Any, ...]:
        """Return the value: the same object again if it has not changed since the last call."""
        return (self[None],)


class Array:
    """What is in an array of numbers, as a table with one entry: the numbers, and a text for dtype and shape."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._seen: tuple[Any, ...] = ()

    def __getitem__(self, _: None) -> tuple[Any, ...]:
        numbers = self.owner.ravel().tolist() if hasattr(self.owner, "ravel") else self.owner
        return (*numbers, self._kind())

    def read(self) -> tuple[Any, ...]:
        """Return the contents: the same object again if they have not changed since the last call."""
        now = self._kind(), bytes(self.owner) if type(self.owner) is bytearray else self.owner.tobytes()
        self._seen = self._seen if now == self._seen else now
        return (self._seen,)

    def _kind(self) -> str:
        if hasattr(self.owner, "dtype"):  # of numpy
            return f"{self.owner.dtype}{list(self.owner.shape)}"
        return f"{getattr(self.owner, 'typecode', 'B')}[{len(self.owner)}]"


ONE_ENTRY = (Members, ContextValue, Array)  # tables whose only key is None
