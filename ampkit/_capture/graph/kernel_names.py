"""Names for the kernels of graphs: which module each belongs to, noted in the eager call before the capture."""

import itertools
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from ..._errors import CaptureWarning
from ..._torch.device.execution_trace import enter_mark, exit_mark, profiler_enabled
from ..._undo import Undo
from .graph import Graph, GraphAround
from .profiled_calls import MODULE_MARK, Owner, ProfiledCalls, read_trace

GRAPH_MARK = "ampkit: graph "
ROOT = "(model)"  # the path of a module that no other one contains
_CALL = "ampkit: under the profiler"
_KEPT = 256  # tables; of as many graphs as a step may have layouts
_numbers = itertools.count(1)  # of graphs, in one process: a trace may show those of several steps


class KernelName(NamedTuple):
    """What a table says of one kernel.

    Attributes:
        kernel: its name in traces.
        owner: whose it is.
    """

    kernel: str
    owner: Owner


Streams = tuple[tuple[KernelName, ...], ...]  # for each stream, its kernels in order


class KernelTable(NamedTuple):
    """The kernels of one graph.

    Attributes:
        mark: what marks the replays of the graph in a trace.
        streams: the kernels of each stream, in order.
        problem: why there are none, "" if there are some.
    """

    mark: str
    streams: Streams
    problem: str


class NotedKernels(NamedTuple):
    """The kernels of one eager call, or why they could not be noted."""

    streams: Streams
    problem: str


NOT_NOTED = NotedKernels((), "no call before its capture was profiled")


@dataclass(eq=False)
class KernelNames:
    """Notes the kernels of calls, and keeps a table for each graph."""

    _modules: Mapping[str, nn.Module]  # whose paths are noted, by the name that messages use; more may be added
    tables: list[KernelTable] = field(default_factory=list)  # the oldest first

    @contextmanager
    def noted(self, scopes: bool) -> Iterator[list[NotedKernels]]:
        """Context of an eager call. Yields a list that has what was noted behind the end of the context.

        Args:
            scopes: whether to note modules. Their hooks would make torch.compile compile again.

        Sync: waits for the device at the end.
        """
        noted: list[NotedKernels] = []
        if profiler_enabled():
            problem = "a profiler was on in the last warm-up call; switch it on after the capture"
            warnings.warn(f"annotate=True: a graph gets no names: {problem}.", CaptureWarning, stacklevel=2)
            yield [NotedKernels((), problem)]
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, acc_events=True)
        with Undo() as undo:
            undo.note(_stop, profiler)
            profiler.start()
            with _module_marks(self._modules) if scopes else nullcontext(), _marked(_CALL):
                yield noted
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # the profiler would miss kernels that have not run yet
        with tempfile.TemporaryDirectory(prefix="ampkit-") as folder:
            path = str(Path(folder) / "trace.json")
            profiler.export_chrome_trace(path)
            calls = ProfiledCalls(read_trace(path)["traceEvents"])
        by_stream: dict[str, list[KernelName]] = {}
        if (call := next(calls.marked(_CALL), None)) is not None:
            for kernel, owner in zip(call.kernels, calls.owners(call.kernels), strict=True):
                by_stream.setdefault(kernel.stream, []).append(KernelName(kernel.name, owner))
        noted.append(NotedKernels(tuple(map(tuple, by_stream.values())), ""))

    def named(self, graph: Graph, calls: Sequence[NotedKernels]) -> Graph:
        """Return a graph that is about to be captured with a mark around each replay, and keep a table of its kernels.

        `calls` is what was noted of the calls that it does, in order.
        """
        mark = f"{GRAPH_MARK}{next(_numbers)}"
        problem = next((call.problem for call in calls if call.problem), "")
        rows = itertools.zip_longest(*(call.streams for call in calls), fillvalue=())
        streams = tuple(tuple(itertools.chain.from_iterable(row)) for row in rows)
        self.tables.append(KernelTable(mark, () if problem else streams, problem))
        del self.tables[:-_KEPT]
        return _MarkedGraph(graph, mark)


@dataclass(frozen=True, eq=False)
class _MarkedGraph(GraphAround):
    """A graph whose replays a profiler shows under a name."""

    _mark: str

    def replay(self) -> Any:
        """Do the recorded work under the mark, see `Graph`."""
        with _marked(self._mark):
            return self._graph.replay()


@contextmanager
def _marked(name: str) -> Iterator[None]:
    mark = enter_mark(name)
    try:
        yield
    finally:
        exit_mark(mark)


@contextmanager
def _module_marks(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Context in which the profiler shows the path of each module around its forward.

    Hooks of all modules are used: some modules compute in another way if they have hooks of their own.
    """
    paths: dict[nn.Module, str] = {}
    for name, root in modules.items():  # if there are several, paths begin with their names
        prefix = "" if name == "model" or len(modules) == 1 else f"{name}."
        for path, module in root.named_modules():
            paths.setdefault(module, f"{prefix}{path}" if path else prefix.removesuffix(".") or ROOT)
    opened = _Opened()
    own = opened.marks  # those of this thread

    def before(module: nn.Module, args: Any) -> None:
        path = paths.get(module) or f"({type(module).__name__})"
        opened.marks.append(enter_mark(f"{MODULE_MARK}{path}"))

    def behind(module: nn.Module, args: Any, output: Any) -> None:
        if opened.marks:
            exit_mark(opened.marks.pop())

    def exit_all() -> None:
        while own:
            exit_mark(own.pop())

    with Undo() as undo:
        undo.note(exit_all)  # what an interrupt has left open
        undo.note(global_hooks.register_module_forward_pre_hook(before).remove)
        undo.note(global_hooks.register_module_forward_hook(behind, always_call=True).remove)
        yield


@dataclass(eq=False)
class _Opened(threading.local):
    """The marks of modules whose forward runs in this thread."""

    marks: list[Any] = field(default_factory=list)


def _stop(profiler: torch.profiler.profile) -> None:
    if profiler_enabled():
        profiler.stop()
