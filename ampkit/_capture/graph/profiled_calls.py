"""What an exported profiler trace says of marked calls: the kernels that each launched, and whose kernels they are.

The traces are those of `torch.profiler.profile.export_chrome_trace`. Where no GPU took part, operations on the CPU
stand in for kernels.
"""

import bisect
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
MODULE_MARK = "ampkit: module "

_DEVICE_KINDS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_LAUNCH_KINDS = frozenset(("cuda_runtime", "cuda_driver"))
_HOST_KINDS = frozenset(("cpu_op", "user_annotation"))
_GRAPH_LAUNCH = "GraphLaunch"  # in cudaGraphLaunch and cuGraphLaunch
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER_STEP = "Optimizer.step#"
_COMPILED = "Torch-Compiled Region: "
_OWN = "ampkit: "
_AROUND_OPERATIONS = ("autograd::", "torch::autograd::", "profiler::")


class Kernel(NamedTuple):
    """One kernel, copy or fill on a GPU in a trace; or one operation on the CPU, where no GPU took part."""

    name: str
    stream: str  # "device 0, stream 7", or the thread of the CPU
    start: float  # in microseconds of the trace
    duration: float  # in microseconds
    event: int  # its place in the list of events
    launch: int  # the place of the event of the host that it belongs to, -1 if that is not known


class Call(NamedTuple):
    """What ran within a mark in a trace."""

    mark: str  # its name, "" for the launch of a graph outside of all marks
    kernels: tuple[Kernel, ...]  # in the order of their starts
    graph: bool  # whether a CUDA graph was launched; then only its kernels are listed


class Owner(NamedTuple):
    """Whose kernel it is.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        module: the path of the innermost module whose forward ran it; in backward, of the one that made the autograd
            node. "" outside of all modules.
        operation: the operation of torch, in backward the autograd node.
    """

    phase: str
    module: str
    operation: str


def read_trace(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the trace in a file that `export_chrome_trace` wrote, with its `traceEvents` as a list.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no trace in it.
    """
    file = Path(path)
    data = file.read_bytes()
    if file.suffix == ".gz":
        data = gzip.decompress(data)
    trace = json.loads(data.decode(errors="replace"), strict=False)  # torch writes names of kernels as they are
    return checked_trace(trace, str(path))


def checked_trace(trace: Any, name: str) -> dict[str, Any]:
    """Return a trace. Raise a `ValueError` if it is none."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{name}: expected a trace as torch.profiler's export_chrome_trace writes it.")
    return trace


class ProfiledCalls:
    """The `traceEvents` of an exported trace, in which calls are looked up."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events
        self._threads = _threads(events)
        self._parents = {i: up for thread in self._threads.values() for i, up in thread.parents.items()}
        self._by_id = {
            event["args"]["External id"]: i
            for i, event in enumerate(events)
            if event.get("cat") in _HOST_KINDS and "External id" in event.get("args", ())
        }
        self._launches = [i for i, event in enumerate(events) if event.get("cat") in _LAUNCH_KINDS]
        self._on_device: dict[Any, list[int]] = defaultdict(list)
        for i, event in enumerate(events):
            if event.get("cat") in _DEVICE_KINDS:
                self._on_device[event["args"].get("correlation")].append(i)

    # ----------------------------------------------------------------------------------------------------- calls

    def marked(self, prefix: str) -> Iterator[Call]:
        """Yield the calls within marks whose names begin like this, in order of time."""
        yield from map(self._call, sorted(self._marks(prefix), key=lambda event: float(event["ts"])))

    def unmarked_graphs(self, prefix: str) -> Iterator[Call]:
        """Yield the launches of graphs outside of all such marks, in order of time."""
        marks = self._marks(prefix)
        for i in sorted(self._launches, key=lambda i: float(self._events[i]["ts"])):
            event = self._events[i]
            here = [mark for mark in marks if _thread_of(event) == _thread_of(mark)]
            if _GRAPH_LAUNCH in event["name"] and not any(_during(event, mark) for mark in here):
                yield Call("", _in_order(list(self._launched(i))), True)

    def _marks(self, prefix: str) -> list[Any]:
        return [e for e in self._events if e.get("cat") == "user_annotation" and e["name"].startswith(prefix)]

    def _call(self, mark: Any) -> Call:
        nodes = {
            _thread_of(event)
            for event in self._events
            if event.get("cat") == "cpu_op" and event["name"].startswith(_NODE) and _during(event, mark)
        }
        threads = {_thread_of(mark), *nodes}
        launches = [i for i in self._launches if _during(self._events[i], mark)]
        here = [i for i in launches if _thread_of(self._events[i]) == _thread_of(mark)]
        graphs = [i for i in here if _GRAPH_LAUNCH in self._events[i]["name"]]
        if graphs:
            return Call(mark["name"], _in_order([kernel for i in graphs for kernel in self._launched(i)]), True)
        kernels = [kernel for i in launches for kernel in self._launched(i)]
        known = {kernel.event for kernel in kernels}
        # Not every call that launches a kernel is in the trace, but the operation around it is.
        others = [place for places in self._on_device.values() for place in places if place not in known]
        found = [self._kernel(place, None) for place in others]
        kernels += [k for k in found if k.launch >= 0 and _during(self._events[k.launch], mark)]
        # What other threads launch meanwhile, such as a loader's, is no part of the call.
        kernels = [k for k in kernels if k.launch >= 0 and _thread_of(self._events[k.launch]) in threads]
        return Call(mark["name"], _in_order(kernels or list(self._operations(mark, threads))), False)

    def _launched(self, i: int) -> Iterator[Kernel]:
        """Yield what a launch ran on the GPU."""
        for place in self._on_device.get(self._events[i].get("args", {}).get("correlation", _NONE), ()):
            yield self._kernel(place, self._events[i])

    def _kernel(self, place: int, launched: Any) -> Kernel:
        """Return a kernel by the place of its event, and by the call that launched it if the trace has that."""
        event = self._events[place]
        args = event["args"]
        stream = f"device {args.get('device', 0)}, stream {args.get('stream', event.get('tid'))}"
        start, duration = float(event["ts"]), float(event.get("dur", 0))
        owner = self._by_id.get(args.get("External id"), -1)
        thread = None if owner >= 0 or launched is None else self._threads.get(_thread_of(launched))
        if thread is not None:  # the innermost event around the launch
            time = float(launched["ts"])
            found = bisect.bisect_right(thread.starts, time) - 1
            owner = thread.places[found] if found >= 0 else -1
            while owner >= 0 and thread.ends[owner] < time:
                owner = thread.parents[owner]
        return Kernel(event["name"], stream, start, duration, place, owner)

    def _operations(self, mark: Any, threads: set[Any]) -> Iterator[Kernel]:
        """Yield the operations on the CPU within a mark, without those that are parts of others."""
        for thread in threads:
            inside: set[int] = set()
            for i in self._threads[thread].places:
                event = self._events[i]
                name = event["name"]
                # Autograd nodes and compiled regions are around operations.
                operation = event["cat"] == "cpu_op" and "::" in name and not name.startswith(_AROUND_OPERATIONS)
                if self._parents[i] in inside:
                    inside.add(i)
                elif operation and _during(event, mark):
                    inside.add(i)
                    yield Kernel(name, f"thread {thread[1]}", float(event["ts"]), float(event["dur"]), i, i)

    # ---------------------------------------------------------------------------------------------------- owners

    def owners(self, kernels: Sequence[Kernel]) -> list[Owner]:
        """Return whose kernels these are, which one call has launched one by one, in order of their starts."""
        makers, linked = self._makers()
        owners: list[Owner] = []
        behind = ""  # the last phase that is certain
        for kernel in kernels:
            chain = list(self._chain(kernel.launch))
            names = [self._events[i]["name"] for i in chain]
            operations = [name for i, name in zip(chain, names, strict=True) if self._events[i]["cat"] == "cpu_op"]
            node = next((name.removeprefix(_NODE) for name in operations if name.startswith(_NODE)), "")
            module = self._module(chain)
            if node:
                phase = BACKWARD
                if not module and (maker := next((makers[i] for i in chain if i in makers), None)) is not None:
                    module = self._module(list(self._chain(maker)))
            else:
                phase = OPTIMIZER if any(name.startswith(_OPTIMIZER_STEP) for name in names) else ""
            if not phase and (module or any(i in linked for i in chain)):
                phase = FORWARD
            behind = phase or behind
            # What follows backward without being a part of it: unscale, clip, the optimizer's kernels, the loss scale.
            phase = phase or (OPTIMIZER if behind in (BACKWARD, OPTIMIZER) else FORWARD)
            owners.append(Owner(phase, module, node or next(iter(operations), "")))
        return owners

    def _module(self, chain: Sequence[int]) -> str:
        """Return the innermost module around, or without one the innermost compiled region or scope of the user's."""
        events = [self._events[i] for i in chain]
        names = [e["name"] for e in events if e["cat"] == "user_annotation" or e["name"].startswith(_COMPILED)]
        modules = [name.removeprefix(MODULE_MARK) for name in names if name.startswith(MODULE_MARK)]
        scopes = [name for name in names if not name.startswith((_OWN, _OPTIMIZER_STEP, "Optimizer.", "ProfilerStep"))]
        return next(iter(modules or scopes), "")

    def _chain(self, i: int) -> Iterator[int]:
        """Yield an event of the host and those around it, outwards."""
        while i >= 0:
            yield i
            i = self._parents.get(i, -1)

    def _makers(self) -> tuple[dict[int, int], set[int]]:
        """Return the operation of the forward for each autograd node that ran, and all operations that made one."""
        at: dict[Any, list[int]] = defaultdict(list)
        for i in self._parents:
            if self._events[i]["cat"] == "cpu_op":
                at[(*_thread_of(self._events[i]), float(self._events[i]["ts"]))].append(i)
        begins: dict[Any, list[int]] = {}
        makers: dict[int, int] = {}
        flows = [event for event in self._events if event.get("cat") == "fwdbwd"]
        for flow in flows:
            if flow["ph"] == "s":
                begins[flow["id"]] = at[(*_thread_of(flow), float(flow["ts"]))]
        for flow in flows:
            forward = begins.get(flow["id"])
            if flow["ph"] == "f" and forward:
                for i in at[(*_thread_of(flow), float(flow["ts"]))]:
                    makers[i] = forward[-1]
                    around = self._parents[i]  # hooks and sums of gradients run around the node, within this
                    if around >= 0 and self._events[around]["name"].startswith(_NODE):
                        makers[around] = forward[-1]
        return makers, {i for places in begins.values() for i in places}


class _Thread(NamedTuple):
    """The events of one thread of the host, in order of their starts."""

    places: list[int]
    starts: list[float]
    ends: dict[int, float]
    parents: dict[int, int]  # -1 for the outermost events


def _threads(events: Sequence[Any]) -> dict[Any, _Thread]:
    by_thread: dict[Any, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        if event.get("cat") in _HOST_KINDS:
            by_thread[_thread_of(event)].append(i)
    threads = {}
    for thread, places in by_thread.items():
        places.sort(key=lambda i: (float(events[i]["ts"]), -float(events[i].get("dur", 0)), i))
        parents: dict[int, int] = {}
        opened: list[int] = []
        for i in places:
            while opened and not _during(events[i], events[opened[-1]]):
                opened.pop()
            parents[i] = opened[-1] if opened else -1
            opened.append(i)
        starts, ends = [float(events[i]["ts"]) for i in places], {i: _end(events[i]) for i in places}
        threads[thread] = _Thread(places, starts, ends, parents)
    return threads


def _in_order(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    return tuple(sorted(kernels, key=lambda kernel: kernel.start))


def _thread_of(event: Any) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


_NONE = object()


def _end(event: Any) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def _during(event: Any, other: Any) -> bool:
    """Return whether an event began while the other one lasted."""
    return float(other["ts"]) <= float(event["ts"]) < _end(other)
