"""A trace whose kernels have names: its table of modules, its row of modules, and the file that it is written to."""

import gzip
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..._arguments import check_at_least
from ..._text import grid

_SHOWN = 20  # rows of the printed table
_PROCESS = "modules"  # where profilers have the number of a process; Kineto has "Spans" and "Traces" itself
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


class ModuleTime(NamedTuple):
    """What the kernels of one module took in one phase.

    Attributes:
        phase: "forward", "backward" or "optimizer"; "" for kernels that could not be matched.
        module: the path of the module; "" outside of all modules.
        kernels: how many there are in a replay, on average.
        us: microseconds that they take in a replay, on average.
        share: their share of the time of all kernels of the replays.
    """

    phase: str
    module: str
    kernels: float
    us: float
    share: float


@dataclass(eq=False, repr=False)
class NamedTrace:
    """What `ampkit.debug.name_kernels` returns: a trace with names over the kernels of replays. Prints as a table.

    Attributes:
        trace: the trace, as in the JSON that `export_chrome_trace` writes, with a process "modules (ampkit)".
        replays: the kernels of each replay in it.
        problems: why kernels could not be matched, each reason once.
    """

    trace: dict[str, Any]
    replays: tuple[tuple[NamedKernel, ...], ...]
    problems: tuple[str, ...]

    @property
    def unmatched(self) -> tuple[NamedKernel, ...]:
        """The kernels of replays that have no name, because it was not certain which entry of the table they are."""
        return tuple(kernel for replay in self.replays for kernel in replay if not kernel.phase)

    @property
    def named_share(self) -> float:
        """The share of the time of all kernels of replays that has a name, from 0 to 1; 1 if there are none."""
        whole = sum(kernel.us for replay in self.replays for kernel in replay)
        return 1 - sum(kernel.us for kernel in self.unmatched) / whole if whole else 1.0

    def rows(self, depth: int = 0) -> list[ModuleTime]:
        """Return the times by phase and module, the longest first.

        Args:
            depth: how many parts of a module's path count, 0 for all: with 1, `layer1.0.conv1` is counted as `layer1`.

        Raises:
            ValueError: depth is negative.
        """
        check_at_least("rows", "depth", depth, 0, "the number of parts of a module's path, 0 for all of them")
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for kernel in itertools.chain(*self.replays):
            times[kernel.phase, ".".join(kernel.module.split(".")[: depth or None])].append(kernel.us)
        whole, number = sum(map(sum, times.values())) or 1.0, len(self.replays)
        rows = [ModuleTime(*key, len(us) / number, sum(us) / number, sum(us) / whole) for key, us in times.items()]
        return sorted(rows, key=lambda row: -row.us)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file, which Perfetto and chrome://tracing open. If it ends in .gz, it is compressed.

        Raises:
            OSError: the file cannot be written.
        """
        data = json.dumps(self.trace).encode()
        Path(path).write_bytes(gzip.compress(data) if Path(path).suffix == ".gz" else data)

    def table(self, depth: int = 1) -> str:
        """Return the longest rows as a table, with one line for all others."""
        rows = self.rows(depth)
        shown = [(row.phase or "unmatched", row.module or "-", *row[2:]) for row in rows[:_SHOWN]]
        if rest := rows[_SHOWN:]:
            kernels, us, share = (sum(column) for column in zip(*(row[2:] for row in rest), strict=True))
            shown.append((f"{len(rest)} more", "", kernels, us, share))
        cells = [(phase, module, f"{n:.0f}", f"{us:.1f}", f"{share:.1%}") for phase, module, n, us, share in shown]
        return "\n".join(grid([("phase", "module", "kernels", "us", "share"), *cells], 2))

    def to_dict(self) -> dict[str, Any]:
        """Return the table for JSON: rows of all modules, and what could not be matched."""
        rows = [row._asdict() for row in self.rows()]
        figures = {"replays": len(self.replays), "named_share": self.named_share, "problems": list(self.problems)}
        return {**figures, "unmatched": len(self.unmatched), "modules": rows}

    def __str__(self) -> str:
        return self.text()

    def text(self, depth: int = 1) -> str:
        """Return what is printed, with so many parts of each module's path."""
        number = len(self.replays)
        whole = sum(kernel.us for replay in self.replays for kernel in replay) / max(1, number)
        kernels = sum(map(len, self.replays)) / max(1, number)
        head = (
            f"{number} replay{'s' if number != 1 else ''}: {kernels:.0f} kernels, {whole:.0f} us each; "
            f"{self.named_share:.1%} of the time has a name"
        )
        left = [f"{len(self.unmatched)} kernels unmatched"] if self.unmatched else []
        return "\n".join([head, self.table(depth), *left, *(f"not matched: {text}" for text in self.problems)])


def row_of_modules(replays: Sequence[Sequence[NamedKernel]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a process with a row for each stream: spans of phase, modules and kernel, nested."""
    about: dict[str, Any] = {"ph": "M", "pid": _PROCESS, "tid": 0, "ts": 0}
    yield {**about, "name": "process_name", "args": {"name": "modules (ampkit)"}}
    yield {**about, "name": "process_sort_index", "args": {"sort_index": _ABOVE_GPUS}}
    for row, stream in enumerate(sorted({kernel.stream for replay in replays for kernel in replay})):
        yield {**about, "name": "thread_name", "tid": row, "args": {"name": stream}}
        for replay in replays:
            kernels = sorted((k for k in replay if k.stream == stream), key=lambda kernel: kernel.start)
            for name, start, end, args in _spans(kernels):
                span = {"ph": "X", "cat": "ampkit", "name": name, "pid": _PROCESS, "tid": row, "ts": start}
                yield {**span, "dur": round(end - start, 3), "args": args}


def _spans(kernels: Sequence[NamedKernel]) -> Iterator[tuple[str, float, float, dict[str, str]]]:
    """Yield name, start, end and arguments of the spans of one stream in one replay.

    These are phases, around modules by their path, around kernels. A span lasts as long as kernels of the same module
    follow.
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
            yield *opened.pop(), end, {}
        opened += [(name, kernel.start) for name in path[same:]]
        # Kernels of one stream may overlap a little. Spans of one row must not.
        following = kernels[place + 1].start if place + 1 < len(kernels) else kernel.start + kernel.us
        end = min(kernel.start + kernel.us, max(following, kernel.start))
        shown = {"module": kernel.module, "phase": kernel.phase, "operation": kernel.operation}
        yield kernel.kernel, kernel.start, end, shown
    while opened:
        yield *opened.pop(), end, {}
