"""How long calls take, eagerly and replayed, measured without waiting for the device."""

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

_EAGER = 4  # of the calls of a long warm-up; one of three calls has one that is timed
_REPLAYS = 8


@dataclass(frozen=True, eq=False)
class Clock:
    """Takes the time by CUDA events on the current stream of a device, or by the host's clock if there is no device.

    The time between two events includes the time in which the stream waited for the host. So if the host is slower than
    the device, it is the host's time.
    """

    _device: torch.device | None

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


@dataclass(eq=False)
class Durations:
    """How long some calls took."""

    _most: int  # how many calls are to be timed
    wanted: bool = True  # whether more of them are
    _marks: list[tuple[Any, Any]] = field(default_factory=list)  # not read yet
    _ms: list[float] = field(default_factory=list)

    def add(self, start: Any, end: Any) -> None:
        """Add a call that began and ended at these marks of a clock. Sync: none."""
        self._marks.append((start, end))
        self.wanted = len(self._marks) + len(self._ms) < self._most

    def median_ms(self) -> float | None:
        """Return the median, None if no call was timed. Sync: waits for the last of the calls to end."""
        self._ms += (milliseconds(start, end) for start, end in self._marks)
        self._marks.clear()
        return statistics.median(self._ms) if self._ms else None


@dataclass(eq=False)
class Timing:
    """How long calls with one layout of the input take."""

    # Of warm-up calls, other than the first one, in which libraries start, and that of the preflight.
    eager: Durations = field(default_factory=partial(Durations, _EAGER))
    # Other than the first one, which belongs to the call that captures.
    replay: Durations = field(default_factory=partial(Durations, _REPLAYS))
    replays: int = 0  # how many there were

    def saving(self) -> "Saving":
        """Return both medians. Sync: waits for the timed calls to end."""
        return Saving(self.replays, self.eager.median_ms(), self.replay.median_ms())


@dataclass(eq=False)
class Shares:
    """How the time of some calls is shared among their parts and what is between them."""

    _clock: Clock
    wanted: bool = True  # whether more calls are to be measured
    _marks: list[tuple[str, Any, Any]] = field(default_factory=list)  # of the parts of the present call
    _start: Any = None
    _calls: list[tuple[list[tuple[str, Any, Any]], Any, Any]] = field(default_factory=list)  # not read yet
    _ms: list[dict[str, float]] = field(default_factory=list)

    def begin(self) -> None:
        """Note that a call begins now. Sync: none."""
        self._marks, self._start = [], self._clock.now()

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Context for a part of the call. Parts of one name are added up. Sync: none."""
        start = self._clock.now()
        yield
        self._marks.append((name, start, self._clock.now()))

    def end(self) -> None:
        """Note that the call ends now. Sync: none."""
        self._calls.append((self._marks, self._start, self._clock.now()))
        self.wanted = len(self._calls) + len(self._ms) < _SHARED

    def by_part(self, rest: str) -> dict[str, float]:
        """Return the share of each part, and of the rest under this name; {} if no call was measured.

        They are medians over the calls. Sync: waits for the calls to end.
        """
        for marks, start, end in self._calls:
            found: dict[str, float] = {}
            for name, *part in marks:
                found[name] = found.get(name, 0.0) + milliseconds(*part)
            self._ms.append({**found, rest: max(0.0, milliseconds(start, end) - sum(found.values()))})
        self._calls.clear()
        names = dict.fromkeys(name for found in self._ms for name in found)
        medians = {name: statistics.median(found.get(name, 0.0) for found in self._ms) for name in names}
        whole = sum(medians.values())
        return {name: median / whole for name, median in medians.items()} if whole else {}


class Saving(NamedTuple):
    """What replays saved. The time of one call, eager or replayed, is None if it was not measured."""

    replays: int  # how many there were
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


_SHARED = 3  # calls
