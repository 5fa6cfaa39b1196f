"""What the objects of `graphed_step` and `graphed` have in common: counts of their graphs, and the end of these."""

from typing import NoReturn, TypeVar

from .._capture.engine.engine import Engine
from .._capture.host.constants import HostConstants

_S = TypeVar("_S")


class GraphOwner:
    """A context manager whose calls are graph launches: leaving it closes it."""

    _engine: Engine | None  # None before the first call, if the device is not known earlier
    _why_not_copied: str  # and what to do instead

    def constants(self) -> HostConstants:
        """Return the values of the host that the graphs hold, as they are now.

        These are the attributes of modules, variables, and small tensors on the host that the step has read in its
        warm-up, each with the line that reads it, and with the reason if calls do not compare it. Before that there is
        none. Hyperparameters and the arguments of the step are no part of it. Replays do nothing for it. Sync: none.
        """
        return HostConstants() if self._engine is None else self._engine.constants()

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return 0 if self._engine is None else self._engine.captures

    @property
    def replays(self) -> int:
        """How many calls were a graph launch."""
        return 0 if self._engine is None else self._engine.replays

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {self._why_not_copied}")

    def close(self) -> None:
        """Release the graphs and their memory. A later call warms up and captures again. Waits for the device.

        It also waits for a call of another thread to end. A window of micro-batches goes on where it was. The graphs
        are released as well when the object is garbage-collected.
        """
        if self._engine is not None:
            self._engine.close_in_turn()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
