"""What objects and classes have, read without running code of theirs, which may raise, or change something."""

from collections.abc import Mapping
from types import GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

_bases = type.__dict__["__mro__"].__get__
_module = type.__dict__["__module__"].__get__
_table = type.__dict__["__dict__"].__get__


def bases_of(kind: type) -> tuple[type, ...]:
    """Return a class and its bases, in the order in which attributes are looked up."""
    found: tuple[type, ...] = _bases(kind)
    return found


def class_table(kind: type) -> Mapping[str, Any]:
    """Return the `__dict__` of a class."""
    found: Mapping[str, Any] = _table(kind)
    return found


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
