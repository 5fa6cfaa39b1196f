"""Where the time of a step goes: microseconds of the host in a call, and what the device does meanwhile."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._capture.graph import CudaGraph
from .cases import Batch, Case
from .process import clean_up
from .report import Row, first_line
from .variants import VARIANTS, Setting, feed

PROFILED_STEPS = 10
LEAD_IN, LEAD_OUT = 3, 1  # steps before and after these: the device has nothing queued when the profiler starts
ALL_STEPS = LEAD_IN + PROFILED_STEPS + LEAD_OUT
HOST_PAIRS = 20


def host_time(step: Callable[..., Tensor], case: Case, setting: Setting) -> tuple[float | None, float | None]:
    """Return the microseconds until a call returns, and those of the launch of its graph in it.

    The second of two calls counts: what comes behind a wait for the device runs on cold caches, and a loop does not
    wait. Behind a third graph of hundreds of kernels the driver's queue may be full, and the host waits for the device.

    None stands for what there is not: anything without CUDA, a graph in an eager step.
    """
    if setting.device.type != "cuda":
        return None, None
    # No more than the two calls take: memory may be as full as the variant fits.
    batches = itertools.cycle(list(feed(itertools.islice(case.batches, 2), case, setting)))
    calls, launches = [], []
    with _launches() as took:
        for _ in range(HOST_PAIRS):
            first, second = next(batches), next(batches)
            torch.cuda.synchronize(setting.device)
            step(*first)
            took.clear()
            start = time.perf_counter()
            step(*second)
            calls.append(time.perf_counter() - start)
            launches.append(sum(took))
    launch = statistics.median(launches) * 1e6
    return statistics.median(calls) * 1e6, launch or None


@contextmanager
def _launches() -> Iterator[list[float]]:
    """Context that notes how many seconds each launch of a graph of ampkit's takes the host."""
    took: list[float] = []
    replay = CudaGraph.replay

    def timed(self: CudaGraph) -> Any:
        start = time.perf_counter()
        outputs = replay(self)
        took.append(time.perf_counter() - start)
        return outputs

    CudaGraph.replay = timed  # type: ignore[method-assign]  # put back below
    try:
        yield took
    finally:
        CudaGraph.replay = replay  # type: ignore[method-assign]  # what was there


# -------------------------------------------------------------------------------------------------------------- profile


def profile(row: Row, case: Case, setting: Setting) -> str:
    """Build the row's variant, find out for how long kernels run in a step and how many, and fill in the row.

    Returns:
        Why there are no such figures, "" if there are.
    """
    events: list[Any] = []
    try:
        steps = _profiled_steps(case.batches, setting.device, events)
        VARIANTS[row.variant].build(case, setting).train(steps, lambda loss: None)
    except Exception as error:
        return first_line(error)
    finally:
        clean_up(setting.device)
    seen = device_work(events)
    if not seen.kernels:
        return "torch.profiler saw no kernel"
    row.busy_ms, row.kernels = seen.busy_us / ALL_STEPS / 1e3, seen.kernels / ALL_STEPS
    row.idle_share, row.between_share, row.copy_share = seen.idle_share, seen.between_share, seen.copy_share
    return ""


def _profiled_steps(batches: Sequence[Batch], device: torch.device, events: list[Any]) -> Iterator[Batch]:
    forever = itertools.cycle(batches)
    yield from itertools.islice(forever, 20)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        yield from itertools.islice(forever, ALL_STEPS)
        torch.cuda.synchronize(device)
    events.extend(profiler.events() or ())


class DeviceWork(NamedTuple):
    """What a device did in `ALL_STEPS`. Shares are of the time of the `PROFILED_STEPS` among them.

    Attributes:
        busy_us: microseconds in which at least one kernel ran. Copies within the device and fills count as kernels.
        kernels: how many ran, without copies and fills.
        idle_share: the share of time in which neither a kernel nor a copy ran.
        between_share: the part of it that was between launches by the host, not between the kernels of one graph.
        copy_share: the share in which only copies from or to the host ran, which another engine of the device does.
    """

    busy_us: float
    kernels: int
    idle_share: float
    between_share: float
    copy_share: float


Interval = tuple[float, float]


def device_work(events: Iterable[Any]) -> DeviceWork:
    """Return what a device did. Streams that work at the same time count once.

    Args:
        events: of torch.profiler. Those of the host, and annotations, do not count.
    """
    events = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    computing = [event for event in events if not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in computing)
    busy, at_work = _union(map(_time, computing)), _union(map(_time, events))
    launched = _union(_launched(events))
    if not kernels:
        return DeviceWork(0.0, 0, 0.0, 0.0, 0.0)
    # Steps leave no mark on the device's time: the middle of the time stands for the steps in the middle.
    first, last = at_work[0][0], at_work[-1][1]
    step = (last - first) / ALL_STEPS
    window = first + LEAD_IN * step, last - LEAD_OUT * step
    whole = window[1] - window[0]
    worked, computed, within = (_length(some, window) / whole for some in (at_work, busy, launched))
    return DeviceWork(_length(busy), kernels, 1 - worked, 1 - within, worked - computed)


def _time(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def _launched(events: Iterable[Any]) -> Iterator[Interval]:
    """Yield from when to when what one call of the driver launched was going on: a kernel, or all of a graph."""
    by_call: dict[int, list[Interval]] = {}
    for event in events:
        by_call.setdefault(event.id, []).append(_time(event))
    for times in by_call.values():
        yield min(start for start, _ in times), max(stop for _, stop in times)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same time."""
    covered: list[Interval] = []
    for start, stop in sorted(intervals):
        if covered and start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], stop)
        else:
            covered.append((start, stop))
    return covered


def _length(disjoint: Iterable[Interval], window: Interval = (-math.inf, math.inf)) -> float:
    return sum(max(0.0, min(stop, window[1]) - max(start, window[0])) for start, stop in disjoint)
