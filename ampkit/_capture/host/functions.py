"""The user's functions that a step may call: what is noted of their code, which may be written anew in place."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import FunctionType
from typing import Any

from ..._user_line import is_users_file
from .code import unbound
from .constants import bases_of, class_table, getter, module_name, noted, qualified_name


class Methods:
    """The methods that the user's own classes of modules have.

    Code that is written anew, as by IPython's autoreload, changes functions in place.

    Args:
        kinds: the classes of the modules.

    Attributes:
        key: of what is noted of them.
        functions: the functions.
    """

    key = ("methods",)

    def __init__(self, kinds: Iterable[type]) -> None:
        bases = dict.fromkeys(chain.from_iterable(map(bases_of, kinds)))
        pairs = ((kind, name, unbound(value)) for kind in bases for name, value in class_table(kind).items())
        self._found = [(kind, name, function) for kind, name, function in pairs if users_function(function)]
        self.functions = [function for _, _, function in self._found]

    def found(self) -> dict[str, Any]:
        """Return what is noted of each of them, by its name."""
        return {
            f"{module_name(kind)}.{qualified_name(kind)}.{name}": parts_of(each) for kind, name, each in self._found
        }

    def readers(self) -> Iterator[tuple[Callable[[Any], tuple[Any, ...]], Any]]:
        """Yield functions that read what this depends on, and what to pass to them."""
        for kind in dict.fromkeys(kind for kind, _, _ in self._found):
            yield getter([name for each, name, _ in self._found if each is kind]), class_table(kind)


def users_function(value: Any) -> FunctionType | None:
    """Return the function of the user's that a value is, or a method or property has; None if it has none."""
    found = unbound(value)
    return found if type(found) is FunctionType and is_users_file(found.__code__.co_filename) else None


def parts_of(function: FunctionType) -> tuple[Any, ...]:
    """Return what is noted of a function: its code, and what its arguments are by default."""
    by_name = function.__kwdefaults__ or {}
    return tuple(map(noted, (function.__code__, function.__defaults__, *by_name, *by_name.values())))
