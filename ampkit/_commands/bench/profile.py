"""Where the time of a step goes: how long a call takes on the host, and what the device does in a step."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._capture.graph.graph import CudaGraph
from ..._undo import Undo, replace
from .cases import Batch, Case
from .process import clean_up
from .report import Row, error_text
from .session import stacks
from .variants import VARIANTS, Setting, feed

PROFILED_STEPS = 10
LEAD_IN, LEAD_OUT = 3, 1  # steps before and after these: when the profiler starts, no work is queued on the device
ALL_STEPS = LEAD_IN + PROFILED_STEPS + LEAD_OUT
HOST_PAIRS = 20
Interval = tuple[float, float]


def host_time(step: Callable[..., Tensor], case: Case, setting: Setting) -> tuple[float | None, float | None]:
    """Return the microseconds until a call returns, and how many of them the launch of its graph takes.

    The second of two calls is measured. The first one follows a wait for the device and runs on cold caches, which does
    not happen in a loop. At a third call the driver's queue may be full, and the host would wait for the device.

    Both are None without CUDA. The second is None if the step launches no graph.
    """
    if setting.device.type != "cuda":
        return None, None
    # Only the two batches of the calls: there may be no memory left for more.
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
    """Context that notes for how many seconds each launch of an ampkit graph keeps the host busy."""
    took: list[float] = []
    replay = CudaGraph.replay

    def timed(self: CudaGraph) -> Any:
        start = time.perf_counter()
        outputs = replay(self)
        took.append(time.perf_counter() - start)
        return outputs

    with Undo() as undo:
        replace(undo, CudaGraph, "replay", timed)
        yield took


def profile(row: Row, case: Case, setting: Setting) -> str:
    """Build the row's variant, measure how many kernels run in a step and for how long, and fill in the row.

    Returns:
        Why this could not be measured, "" if it could.
    """
    events: list[Any] = []
    try:
        together = VARIANTS[row.variant].together
        steps = _profiled_steps(stacks(case.batches, together), setting.device, events)
        VARIANTS[row.variant].build(case, setting).train(steps, lambda loss: None)
    except Exception as error:
        return error_text(error)
    finally:
        clean_up(setting.device)
    work = device_work(events)
    if not work.kernels:
        return "torch.profiler saw no kernel"
    steps_profiled = ALL_STEPS * together
    row.busy_ms, row.kernels = work.busy_us / steps_profiled / 1e3, work.kernels / steps_profiled
    row.idle_share, row.between_share, row.copy_share = work.idle_share, work.between_share, work.copy_share
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
    """What a device did in `ALL_STEPS` steps. The shares, see `Row`, are of the time of `PROFILED_STEPS` of them."""

    busy_us: float  # in which at least one kernel ran; copies within the device and fills count as kernels
    kernels: int  # without copies and fills
    idle_share: float
    between_share: float
    copy_share: float


def device_work(events: Iterable[Any]) -> DeviceWork:
    """Return what a device did by the events of torch.profiler. Time in which several streams work is counted once."""
    events = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    computing = [event for event in events if not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in computing)
    busy, at_work = union(map(_time, computing)), union(map(_time, events))
    # The time on the device of each launch by the host: of one kernel, or of all kernels of a graph.
    by_call: dict[int, list[Interval]] = {}
    for event in events:
        by_call.setdefault(event.id, []).append(_time(event))
    launched = union((min(start for start, _ in times), max(stop for _, stop in times)) for times in by_call.values())
    if not kernels:
        return DeviceWork(0.0, 0, 0.0, 0.0, 0.0)
    # Events do not say which step they belong to, so the steps are assumed to take equally long.
    first, last = at_work[0][0], at_work[-1][1]
    step = (last - first) / ALL_STEPS
    window = first + LEAD_IN * step, last - LEAD_OUT * step
    whole = window[1] - window[0]
    worked, computed, within = (length(some, window) / whole for some in (at_work, busy, launched))
    return DeviceWork(length(busy), kernels, 1 - worked, 1 - within, worked - computed)


def _time(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted disjoint intervals that cover the same time."""
    covered: list[Interval] = []
    for start, stop in sorted(intervals):
        if covered and start <= covered[-1][1]:
            covered[-1] = covered[-1][0], max(covered[-1][1], stop)
        else:
            covered.append((start, stop))
    return covered


def length(disjoint: Iterable[Interval], window: Interval = (-math.inf, math.inf)) -> float:
    return sum(max(0.0, min(stop, window[1]) - max(start, window[0])) for start, stop in disjoint)
