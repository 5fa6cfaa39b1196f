"""`name_kernels`: match the kernels of replays in a trace with the tables of a step's graphs."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from ..._arguments import check_path, wrong
from ..._capture.graph.kernel_names import GRAPH_MARK, KernelTable
from ..._capture.graph.profiled_calls import Call, Owner, ProfiledCalls, checked_trace, read_trace
from .alignment import certain_places
from .named_trace import NamedKernel, NamedTrace, row_of_modules


class Annotated(Protocol):
    """A step or function made with `annotate=True`."""

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return the kernels of each graph."""


def name_kernels(trace: str | os.PathLike[str] | dict[str, Any], step: Annotated) -> NamedTrace:
    """Put the names of modules over the kernels of replays in a profiler trace.

    ::

        step = ampkit.graphed_step(loss_fn, model, optimizer, annotate=True)
        ...                                             # until step.replays counts
        with torch.profiler.profile(activities=[CPU, CUDA], acc_events=True) as profiler:
            step(*batch)
        profiler.export_chrome_trace("replay.json")
        named = ampkit.debug.name_kernels("replay.json", step)
        print(named)                                    # modules, kernels, microseconds
        named.save("named.json")                        # for Perfetto or chrome://tracing

    A step with `annotate=True` notes the kernels of its last warm-up call with their modules. Here the kernels of each
    replay are matched with these, stream by stream, by name and in order. A kernel gets a name only if that is certain;
    all others are listed as unmatched.

    Args:
        trace: the file that `export_chrome_trace` wrote (.json or .json.gz), or what is in it. It is not changed.
            Profile the CPU too: otherwise the trace does not show which graph a launch belongs to, and kernels get
            names only if exactly one graph has these very kernels.
        step: what `graphed_step` or `graphed` returned, made with `annotate=True`, or such an `AmpkitCallback`.

    Returns:
        A `NamedTrace`.

    Raises:
        ValueError: the step was made without `annotate=True`, or the trace is none, or has no replay of the step in it.
        OSError: the file cannot be read.

    Sync: none.
    """
    tables = step.kernel_tables() if callable(getattr(step, "kernel_tables", None)) else None
    if tables is None:
        raise wrong("name_kernels", "step", step, "a step that was made with annotate=True")
    if isinstance(trace, dict):
        content = checked_trace(trace, "name_kernels(trace)")
    else:
        check_path("name_kernels", "trace", trace)
        content = read_trace(trace)
    events = list(content["traceEvents"])
    calls = ProfiledCalls(events)
    by_mark = {table.mark: table for table in tables}
    found = [(call, by_mark[call.mark]) for call in calls.marked(GRAPH_MARK) if call.mark in by_mark]
    if not found:
        found = [(call, _table_of(call, tables)) for call in calls.unmarked_graphs(GRAPH_MARK)]
    if not found:
        raise ValueError(
            "name_kernels(trace): it has no replay of this step in it. Profile a call that is a replay: "
            "step.replays counts them."
        )
    replays, problems = [], []
    for call, table in found:
        problems += [table.problem] if table.problem else []
        replay = []
        for kernel, owner in zip(call.kernels, _owners(call, table), strict=True):
            names = owner or ("", "", "")
            replay.append(NamedKernel(kernel.name, kernel.stream, kernel.start, kernel.duration, *names))
            if owner is not None:  # a copy with the name takes the place of the event
                event = events[kernel.event]
                events[kernel.event] = {**event, "args": {**event.get("args", {}), **owner._asdict()}}
        replays.append(tuple(replay))
    merged = {**content, "traceEvents": [*events, *row_of_modules(replays)]}
    return NamedTrace(merged, tuple(replays), tuple(dict.fromkeys(problems)))


def _table_of(call: Call, tables: Sequence[KernelTable]) -> KernelTable:
    """Return the table of a launch without a mark: that of the only graph with these very kernels."""
    names = Counter(kernel.name for kernel in call.kernels)
    same = [table for table in tables if Counter(k.kernel for row in table.streams for k in row) == names]
    if len({table.streams for table in same}) == 1:
        return same[0]
    return KernelTable("", (), "a graph was launched whose mark is not in the trace; profile the CPU too")


def _owners(call: Call, table: KernelTable) -> list[Owner | None]:
    """Return whose each kernel of a replay is, None where that is not certain."""
    owners: list[Owner | None] = [None] * len(call.kernels)
    places: dict[str, list[int]] = {}
    for i, kernel in enumerate(call.kernels):
        places.setdefault(kernel.stream, []).append(i)
    names = {stream: [call.kernels[i].name for i in rows] for stream, rows in places.items()}
    # The numbers of streams say nothing: a graph runs on the stream that it is launched on, and its side streams are
    # those of the driver. So a stream has the row of the table with which it has the most names in common.
    counted = [Counter(entry.kernel for entry in row) for row in table.streams]
    common = [
        ((Counter(found) & row).total(), stream, j) for stream, found in names.items() for j, row in enumerate(counted)
    ]
    pairs: dict[str, int] = {}
    for number, stream, j in sorted(common, key=lambda each: -each[0]):
        if number and stream not in pairs and j not in pairs.values():
            pairs[stream] = j
    for stream, j in pairs.items():
        row = table.streams[j]
        known = [entry.kernel for entry in row]
        for i, candidates in zip(places[stream], certain_places(names[stream], known), strict=True):
            possible = {row[place].owner for place in candidates}
            owners[i] = possible.pop() if len(possible) == 1 else None
    return owners
