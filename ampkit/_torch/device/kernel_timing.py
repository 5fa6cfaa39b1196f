"""How Inductor times the kernels that it chooses from: one behind the other, as they run in a graph.

By itself Inductor puts an event in front of each launch and one behind it (torch/_inductor/runtime/benchmarking.py,
`InductorBenchmarker`). The device is done with a kernel of a few microseconds before the host has recorded the second
event. So what is measured is the host, 8 to 20 us, and which of 20 kernels is chosen is left to chance.
"""

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._undo import Undo
from ..guard import private

CALLS = 20  # between two events
REPEATS = 3  # of which the fastest counts
LONG_MS = 0.2  # beside this the host does not matter
_CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz


@contextmanager
def timed_back_to_back() -> Iterator[None]:
    """Context in which Inductor times short kernels on CUDA by `milliseconds_of`, on every thread."""
    module = importlib.import_module("torch._inductor.runtime.benchmarking")
    benchmarker = private(module, "benchmarker")
    before = private(benchmarker, "benchmark_gpu")

    def timed(function: Callable[[], Any], *args: Any, **options: Any) -> Any:
        plain = not args and options.get("return_mode", "min") == "min" and options.get("grad_to_none") is None
        found = milliseconds_of(function) if plain else None
        return before(function, *args, **options) if found is None else found

    with Undo() as undo:
        undo.note(vars(benchmarker).pop, "benchmark_gpu", None)
        benchmarker.benchmark_gpu = timed
        yield


def milliseconds_of(function: Callable[[], object]) -> float | None:
    """Return the milliseconds that the work of one call takes on the current CUDA device; None if they are not short.

    The calls are launched while the device is kept busy, so that it finds all of them in its queue and the host's time
    is in none of them. Data is in the device's cache, as behind the kernel that wrote it. Waits for the device.
    """
    torch.cuda.synchronize()
    function()  # loads the kernel; an error is the caller's
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        function()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    if (time.perf_counter() - begun) * 1e3 / REPEATS > LONG_MS:
        return None
    host_ms = (launched - begun) * 1e3 / REPEATS
    found = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(2 * host_ms * CALLS * _CYCLES_PER_MS))
        start.record()
        for _ in range(CALLS):
            function()
        late = start.query()  # the host was too slow
        end.record()
        end.synchronize()
        if not late:
            found.append(start.elapsed_time(end) / CALLS)
    return min(filter(None, found), default=None)
