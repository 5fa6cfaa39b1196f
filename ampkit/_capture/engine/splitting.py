"""What the engine asks of a step that can be done in parts, where it cannot be captured as a whole."""

from typing import Any, Protocol

from ..keys.key import Key
from .layouts import Layout

IN_PARTS = "in parts"  # what such calls are counted under


class Splitter(Protocol):
    """Decides which layouts are done in parts."""

    @property
    def has_parts(self) -> bool:
        """Whether some layout is done in parts, or may be."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the graphs of the parts take."""

    def takes(self, key: Key, layout: Layout) -> bool:
        """Return whether the calls of a layout are done in parts from now on, because of its `problem`."""

    def call(self, engine: Any, layout: Layout, phase: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a call of a layout that is done in parts, with the engine's `run` and `give_up`."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the report that say what is captured, and why the rest is not."""

    def close(self) -> None:
        """Release what is captured."""


class Never:
    """Takes no layout."""

    has_parts, nbytes = False, 0

    def takes(self, key: Key, layout: Layout) -> bool:
        return False

    def call(self, engine: Any, layout: Layout, phase: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise AssertionError  # it takes none

    def fields(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


NEVER = Never()
