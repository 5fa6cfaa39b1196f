"""The numbers that draws on the host are compared with: where they are kept, and whether they have changed since."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn


class KeptNumber(NamedTuple):
    """A float that an object has as an attribute, or a Python module as a global variable.

    Attributes:
        owner: returns the object; None once it is gone.
        name: of the attribute.
        value: what it was.
    """

    owner: Callable[[], Any]
    name: str
    value: float

    @property
    def place(self) -> tuple[int, str]:
        """Equal for the same attribute of the same object."""
        return id(self.owner()), self.name

    def has_changed(self) -> bool:
        """Return whether the attribute is another number now."""
        owner = self.owner()
        return owner is not None and _attributes(owner).get(self.name) != self.value


def kept_numbers(wanted: Iterable[float], frame: FrameType | None) -> Iterator[KeptNumber]:
    """Yield where numbers are kept that the functions on a stack can reach, as far as the call of the engine.

    Nobody tells where a number comes from. So all attributes that are equal to it are taken: those of the objects that
    the functions have in variables, of the attributes of these objects (a config), and global variables.
    """
    numbers = tuple(wanted)
    seen: set[int] = set()
    while frame is not None and not frame.f_globals.get("__name__", "").endswith("_capture.engine"):
        script = sys.modules.get(frame.f_globals.get("__name__", ""))
        for owner in (script, *frame.f_locals.values()):
            yield from _found(numbers, owner, seen)
            if not issubclass(type(owner), ModuleType):
                for value in list(_attributes(owner).values()):
                    if not issubclass(type(value), (nn.Module, ModuleType)):
                        yield from _found(numbers, value, seen)
        frame = frame.f_back


def _found(numbers: tuple[float, ...], owner: Any, seen: set[int]) -> Iterator[KeptNumber]:
    if id(owner) in seen or issubclass(type(owner), (type, Tensor)):
        return
    seen.add(id(owner))
    for name, value in list(_attributes(owner).items()):
        if type(value) is float and any(_are_close(value, number) for number in numbers):
            try:
                yield KeptNumber(weakref.ref(owner), name, value)
            except TypeError:  # of a class without weak references
                return


def _are_close(kept: float, compared: float) -> bool:
    """Return whether a number is, or is the complement of, a kept probability, as far as float32 tells."""
    return min(abs(kept - compared), abs(1 - kept - compared)) <= _ROUNDING * abs(compared)


def _attributes(owner: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(owner, "__dict__")  # without asking a lazy proxy
    except (AttributeError, TypeError):
        return {}
    return found if type(found) is dict else {}


_ROUNDING = 1e-6  # a tensor made of the number has it in float32
