"""The row of modules in a trace: nested spans of phase, modules and kernel over the kernels of a replay."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

PROCESS = "modules"  # where profilers have the number of a process; Kineto has "Spans" and "Traces" itself
_ABOVE_GPUS = 4_999_999  # Kineto sorts GPU i at 5000000 + i (libkineto/src/output_json.cpp)


class NamedKernel(NamedTuple):
    """One kernel of a replay; on the CPU, one operation.

    Attributes:
        kernel: its name in the trace.
        stream: "device 0, stream 7", or the thread of the CPU.
        start: when it began, in microseconds of the trace.
        us: how long it took, in microseconds.
        phase: "forward", "backward" or "optimizer"; "" if it could not be matched.
        module: the path of its module; "" outside of all modules, and if it could not be matched.
        operation: the operation or, in backward, the autograd node; "" if it could not be matched.
    """

    kernel: str
    stream: str
    start: float
    us: float
    phase: str
    module: str
    operation: str


def row_of_modules(replays: Sequence[Sequence[NamedKernel]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a process with a row for each stream."""
    streams = sorted({kernel.stream for replay in replays for kernel in replay})
    yield _metadata("process_name", 0, {"name": "modules (ampkit)"})
    yield _metadata("process_sort_index", 0, {"sort_index": _ABOVE_GPUS})
    for row, stream in enumerate(streams):
        yield _metadata("thread_name", row, {"name": stream})
        for replay in replays:
            kernels = sorted((k for k in replay if k.stream == stream), key=lambda kernel: kernel.start)
            yield from _spans(kernels, row)


def _spans(kernels: Sequence[NamedKernel], row: int) -> Iterator[dict[str, Any]]:
    """Yield the spans of one stream in one replay: phase, around modules by their path, around kernels.

    A span lasts as long as kernels of the same module follow.
    """
    opened: list[tuple[str, float]] = []
    end = 0.0
    for place, kernel in enumerate(kernels):
        parts = kernel.module.split(".") if kernel.module else []
        path = [kernel.phase, *(".".join(parts[: i + 1]) for i in range(len(parts)))] if kernel.phase else ["unmatched"]
        same = 0
        while same < min(len(path), len(opened)) and opened[same][0] == path[same]:
            same += 1
        while len(opened) > same:
            name, start = opened.pop()
            yield _span(name, start, end, row, {})
        opened += [(name, kernel.start) for name in path[same:]]
        # Kernels of one stream may overlap a little. Spans of one row must not.
        following = kernels[place + 1].start if place + 1 < len(kernels) else kernel.start + kernel.us
        end = min(kernel.start + kernel.us, max(following, kernel.start))
        shown = {"module": kernel.module, "phase": kernel.phase, "operation": kernel.operation}
        yield _span(kernel.kernel, kernel.start, end, row, shown)
    while opened:
        name, start = opened.pop()
        yield _span(name, start, end, row, {})


def _span(name: str, start: float, end: float, row: int, args: dict[str, str]) -> dict[str, Any]:
    span = {"ph": "X", "cat": "ampkit", "name": name, "pid": PROCESS, "tid": row, "ts": start}
    return {**span, "dur": round(end - start, 3), "args": args}


def _metadata(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PROCESS, "tid": row, "ts": 0, "args": args}
