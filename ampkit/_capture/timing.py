"""How long calls take, eagerly and replayed, measured without waiting for the device."""

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Clock:
    """Takes the time by CUDA events on the current stream of a device, or by the host's clock if there is no device.

    The time between two events includes the time in which the stream waited for the host. So if the host is slower than
    the device, it is the host's time.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def now(self) -> Any:
        """Return a mark of this moment, which `Durations.add` takes. Sync: none."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def is_past(mark: Any) -> bool:
        """Return whether the device has reached this mark, so that `milliseconds` waits for nothing. Sync: none."""
        return isinstance(mark, float) or bool(mark.query())


class Durations:
    """How long some calls took.

    Args:
        most: how many calls are to be timed.

    Attributes:
        wanted: whether more calls are to be timed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.wanted: bool = most > 0
        self._marks: list[tuple[Any, Any]] = []  # not read yet
        self._ms: list[float] = []

    def add(self, start: Any, end: Any) -> None:
        """Add a call that began and ended at these marks of a clock. Sync: none."""
        self._marks.append((start, end))
        self.wanted = len(self._marks) + len(self._ms) < self._most

    def median_ms(self) -> float | None:
        """Return the median, None if no call was timed. Sync: waits for the last of the calls to end."""
        self._ms += (milliseconds(start, end) for start, end in self._marks)
        self._marks.clear()
        return statistics.median(self._ms) if self._ms else None


class Timing:
    """How long calls with one layout of the input take.

    Attributes:
        eager: times of warm-up calls, other than the first one, in which libraries start, and that of the preflight.
        replay: times of replays, other than the first one, which belongs to the call that captures.
        replays: how many replays there were.
    """

    def __init__(self) -> None:
        self.eager: Durations = Durations(_EAGER)
        self.replay: Durations = Durations(_REPLAYS)
        self.replays = 0

    def saving(self) -> "Saving":
        """Return both medians. Sync: waits for the timed calls to end."""
        return Saving(self.replays, self.eager.median_ms(), self.replay.median_ms())


class Saving(NamedTuple):
    """What replays saved.

    Attributes:
        replays: how many replays there were.
        eager_ms: time of one eager call, None if it was not measured.
        replay_ms: time of one replay, None if it was not measured.
    """

    replays: int
    eager_ms: float | None
    replay_ms: float | None

    @property
    def seconds(self) -> float | None:
        """Time saved by all replays, below 0 if they were slower; None if one of the two times is not known."""
        if self.eager_ms is None or self.replay_ms is None:
            return None
        return self.replays * (self.eager_ms - self.replay_ms) / 1000


def combined(savings: Iterable[Saving]) -> Saving:
    """Return means, weighted by the replays, over the graphs for which both times are known.

    If there is no such graph, the mean of each time is taken over the graphs for which that time is known.
    """
    known = [saving for saving in savings if saving.replays]
    both = [saving for saving in known if saving.seconds is not None]
    eager = [(saving.replays, saving.eager_ms) for saving in both or known if saving.eager_ms is not None]
    replay = [(saving.replays, saving.replay_ms) for saving in both or known if saving.replay_ms is not None]
    return Saving(sum(saving.replays for saving in both or known), _mean(eager), _mean(replay))


def _mean(weighted: list[tuple[int, float]]) -> float | None:
    weights = sum(weight for weight, _ in weighted)
    return sum(weight * value for weight, value in weighted) / weights if weights else None


def milliseconds(start: Any, end: Any) -> float:
    """Return the time between two marks of a clock. Sync: waits until the device has reached the second one."""
    if isinstance(start, float):
        return float(1000 * (end - start))
    end.synchronize()  # sync
    return float(start.elapsed_time(end))


_EAGER = 4  # of the calls of a long warm-up; one of three calls has one that is timed
_REPLAYS = 8
