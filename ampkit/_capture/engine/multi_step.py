"""Several calls in one graph, once each of them has a graph of its own: captured, compared, counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._errors import CaptureError
from ..._torch.tensors.modes import modes
from ..._undo import Undo
from ..compare.call_record import Record, first_difference, recorded_call
from ..compare.schedule import ComparisonSchedule
from ..graph.cache import Captured, GraphLengths
from ..graph.capture_query import recording, seeing_capture
from ..graph.graph import Graph
from ..graph.report import GraphReport
from ..graph.timing import Timing
from ..keys.inputs import Spec, StaticInputs, TensorSpec
from ..keys.key import Key
from ..keys.placement import ALIGNED
from ..state.overlaps import keep_apart
from .record import fitting, record
from .session import Session

Noting = Callable[[], AbstractContextManager[None]]  # returns the context in which one call is made
# Does the calls of this many windows, all of which have as many, each with a slice of the inputs (args and kwargs).
MakesCalls = Callable[[int, Noting, tuple[Any, ...], dict[str, Any]], Any]
Compare = Callable[[Captured, Callable[..., Any], Sequence[Any]], Any]  # `Engine._verified`


class Steps(NamedTuple):
    """Calls that one graph may do: windows of micro-batches, or of one call each."""

    key: Key  # of the longest graph. Its spec has the calls along dimension 0 of each tensor
    singles: Sequence[Key]  # the keys of the calls of one window
    lengths: range  # the numbers of windows that graphs may have
    captured: MakesCalls  # what a graph records
    eager: MakesCalls  # does the same eagerly


class MultiStepGraphs:
    """Captures the calls of one or more windows as one graph, and launches it.

    That is done once each of the calls has a graph of its own: then it is warm, and known to be right. The calls of the
    first capture that have the same graph are compared with each other, operation by operation. With several ranks,
    they are not compared.

    Attributes:
        given_up: whether nothing is captured any more, because a capture has failed on one of several ranks.
        captures: how many graphs were captured so far.
        launches: how often a graph was launched.
        windows: how many windows these launches did.
        calls: how many calls these had.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ranks, self._cache = session.ranks, session.cache
        self._layouts, self._fallback = session.layouts, session.fallback
        # Ranks would have to compare the same launches.
        self._schedule = ComparisonSchedule(0 if self._ranks.several else session.options.verify)
        self._comparisons: dict[Key, _CallComparison] = {}  # of graphs that were not launched yet
        self._refused: set[Key] = set()
        self.given_up: bool = False
        self.captures = self.launches = self.windows = self.calls = 0

    def find(self, steps: Steps, windows: int, *, may_capture: bool) -> Captured | None:
        """Return the graph that does this many windows, captured now if it must and may be. Nothing of it is done.

        Mostly a graph of the greatest length is all that is needed. The first shorter graph is what is left at the end
        of a loop. When a second one is wanted, all lengths are captured, so that no later call takes a capture.

        Returns:
            None if there is no graph: the single calls have none yet, or the windows cannot be captured, of which there
            was a warning, or they may not be captured now.

        Raises:
            CaptureError: with `on_failure="raise"`, they cannot be captured.
        """
        lengths = self._cache.multi_step.get(steps.key)
        if lengths is None:
            if not may_capture or not self.is_ready(steps):
                return None
            while len(self._cache.multi_step) >= self._session.options.max_graphs:
                self._drop(next(iter(self._cache.multi_step)))
            with torch.inference_mode(False):
                buffers = [_aligned(leaf) for leaf in steps.key.spec.leaves if isinstance(leaf, TensorSpec)]
            layouts = list(map(self._layouts.layout_of, steps.singles))
            writes = set[str]().union(*(layout.writes.paths() for layout in layouts))
            lengths = GraphLengths(buffers, any(layout.answer.sees_capture for layout in layouts), writes)
            self._cache.multi_step[steps.key] = lengths
        if windows not in lengths.graphs:
            if not may_capture:
                return None
            longest = steps.lengths[-1]
            wanted = [windows]
            if windows < longest and any(length < longest for length in lengths.graphs):
                wanted = [length for length in reversed(steps.lengths) if length not in lengths.graphs]
            for length in wanted:
                if not self._capture(steps, lengths, length):
                    return None
        self._cache.multi_step.move_to_end(steps.key)
        return lengths.graphs[windows] if lengths.graphs[windows].fits() else None

    def is_ready(self, steps: Steps) -> bool:
        """Return whether a first graph may be captured: the single calls have graphs, and change no input in place."""
        if steps.key in self._refused or self.given_up:
            return False
        graphs = dict(self._cache)
        found = [graphs[key] for key in steps.singles if key in graphs and key in self._layouts]
        # Calls that change their inputs would have to be kept apart from each other, too.
        return len(found) == len(steps.singles) and not any(any(captured.inputs.changed) for captured in found)

    def launch(self, steps: Steps, windows: int, leaves: Sequence[Any], compare: Compare) -> Any:
        """Do this many windows with the graph that `find` returned. Return the outputs, in tensors of their own.

        `leaves` are the slices of the inputs that the calls take. `compare` verifies a launch.

        Raises:
            InputMismatch: see `StaticInputs.refuse_shared`. Nothing was done.
            StepDoneError: with `on_failure="raise"`, the launch was verified and was wrong. The windows were done.
        """
        key = steps.key
        lengths = self._cache.multi_step[key]
        captured = lengths.graphs[windows]
        self.launches += 1
        self.windows += windows
        self.calls += windows * len(steps.singles)
        lengths.launches += 1
        captured.timing.replays += 1
        self._schedule.count()
        with Undo() as undo:
            if key in self._comparisons:
                undo.note(self._drop, key)  # graphs that have not been compared must not be launched again
            undo.note(modes())
            if self._schedule.is_due(is_first=captured.timing.replays == 1):
                eager = seeing_capture(steps.eager, captured.sees_capture)
                outputs = compare(captured, lambda *args, **kwargs: eager(windows, nullcontext, args, kwargs), leaves)
                self._schedule.note()
            else:
                outputs = captured.replay(leaves)
            undo.forget()
        comparison = self._comparisons.get(key)
        if comparison is not None and comparison.ended:
            del self._comparisons[key]
            if comparison.difference:  # of emulated calls, which have done the right thing
                if self._fallback.raises:
                    raise self._fallback.step_done_error(comparison.difference, outputs)
                self._refuse(key, comparison.difference, None)
        return outputs

    def reports(self) -> list[GraphReport]:
        """Return what the report says of these graphs: an entry for all lengths of a layout."""
        return [
            GraphReport(
                f"up to {max(lengths.graphs)} optimizer steps per launch: {key.spec}",
                lengths.pool_bytes + lengths.buffer_bytes,
                lengths.launches,
            )
            for key, lengths in self._cache.multi_step.items()
            if lengths.graphs
        ]

    # ----------------------------------------------------------------------------------------------------- capture

    def _capture(self, steps: Steps, lengths: GraphLengths, windows: int) -> bool:
        """Capture a graph of this length. Return whether that worked; otherwise the key is refused from now on."""
        key, before = steps.key, self._cache.pool_bytes
        rehearsals = [] if lengths.graphs else [self._layouts.layout_of(single).rehearsal for single in steps.singles]
        comparison: _CallComparison | None = None
        if rehearsals and not any(rehearsal.unseen for rehearsal in rehearsals) and not self._ranks.several:
            kinds = [steps.singles.index(single) for single in steps.singles]
            comparison = _CallComparison(rehearsals[0].numbers, rehearsals[0].lenient, kinds)
        with Undo() as undo:
            undo.note(modes())
            try:
                captured = self._record(steps, lengths, windows, comparison)
            except CaptureError as error:
                self._refuse(key, str(error), error)
                return False
            undo.forget()
        keep_apart(captured.inputs, self._session.state, lengths.writes)
        if comparison is not None:
            self._comparisons[key] = comparison
        self.captures += 1
        lengths.graphs[windows] = captured
        lengths.pool_bytes += max(0, self._cache.pool_bytes - before)
        if not self._ranks.agree(not self._cache.over_budget()):
            budget = self._session.options.memory_budget
            problem = f"its graphs take {self._cache.nbytes} bytes, memory_budget is {budget}"
            self._cache.clear()  # the layouts stay warm, so that the next single calls capture again
            self._refuse(key, f"{problem}.", None)
            return False
        return True

    def _record(
        self, steps: Steps, lengths: GraphLengths, windows: int, comparison: "_CallComparison | None"
    ) -> Captured:
        rows = windows * len(steps.singles)
        inputs = StaticInputs(*_rows(steps.key.spec, rows), [buffer[:rows] for buffer in lengths.buffers])
        graph: Graph = self._cache.new_graph(self._session.stream, self._session.options.generators)
        if self._session.names is not None:
            noted = [self._layouts.layout_of(single).kernels for single in steps.singles]
            graph = self._session.names.named(graph, noted * windows)
        calls, uploads = seeing_capture(steps.captured, lengths.sees_capture), self._session.uploads
        in_operations = any(self._layouts.layout_of(single).uploads_in_operations for single in steps.singles)

        def recorded() -> Any:
            # An emulated graph calls this in each replay. Only the first one is recorded.
            with uploads.in_place(in_operations=in_operations, captures=True):
                if comparison is None or comparison.ended:
                    return calls(windows, nullcontext, inputs.args, inputs.kwargs)
                outputs = calls(windows, comparison, inputs.args, inputs.kwargs)
            comparison.end()
            return outputs

        with Undo() as undo:
            undo.note(graph.reset)
            then, state = self._layouts.make_outputs, self._session.state
            loose = [use for single in steps.singles for use in self._layouts.layout_of(single).loose]
            left = record(graph, recorded, recording, then, state, self._ranks, self._cache.clear, loose)
            if comparison is not None and comparison.difference:
                raise CaptureError(comparison.difference)
            undo.forget()
        return Captured(graph, inputs, 0, Timing(), lengths.sees_capture, left, fitting(state, left))

    def _drop(self, key: Key) -> None:
        self._comparisons.pop(key, None)
        if key in self._cache.multi_step:
            self._cache.multi_step.pop(key).reset()

    def _refuse(self, key: Key, reason: str, error: CaptureError | None) -> None:
        """Capture no graph of this key from now on. Warn, or raise a `CaptureError` if there is an error."""
        problem = f"several calls in one graph: {reason}"
        self._drop(key)
        if self._ranks.several:  # all of them, because each rank has keys of its own
            self.given_up = True
            while self._cache.multi_step:
                self._drop(next(iter(self._cache.multi_step)))
        if self._fallback.raises and error is not None:
            raise self._fallback.error(problem) from error
        self._refused.add(key)
        self._fallback.warn_once("several calls", f"{problem} Each call is a launch of its own.")


@dataclass(eq=False)
class _CallComparison:
    """Records each call of a graph, and compares it with the first one of its kind."""

    _numbers: bool  # see `recorded_call`
    _lenient: bool  # the same
    _kinds: Sequence[int]  # of the calls of a window; calls of one kind do the same
    _first: dict[int, Record | None] = field(default_factory=dict)  # by kind
    _made: int = 0
    ended: bool = False  # whether all calls were recorded
    difference: str = ""  # where a call first differs, in words; "" if none does

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context of the next call."""
        with recorded_call(self._numbers, self._lenient) as call:
            yield
        kind, self._made = self._kinds[self._made % len(self._kinds)], self._made + 1
        if kind not in self._first:
            self._first[kind] = call.record
            return
        first = self._first[kind]
        if first is not None and call.record is not None and not self.difference:
            found = first_difference(first, call.record)
            self.difference = found and (
                f"{found}, both in one series. A graph would repeat what it recorded, but this depends on more than "
                "the batch and the declared state."
            )

    def end(self) -> None:
        """Take note that all calls were made. Records refer to objects of the user's."""
        self._first, self.ended = {}, True


def _aligned(spec: TensorSpec) -> Tensor:
    """Return memory in which each slice along dimension 0 has its strides, and begins where a tensor could begin."""
    rows, *shape = spec.shape
    _, *strides = spec.stride
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    step = -(-(last + 1) * spec.dtype.itemsize // ALIGNED) * ALIGNED // spec.dtype.itemsize
    return torch.empty_strided((rows, *shape), (step, *strides), dtype=spec.dtype, device=spec.device)


def _rows(spec: Spec, rows: int) -> tuple[Spec, list[Any]]:
    """Return the spec of the first rows, and leaves like these, without memory."""
    specs: list[Any] = [
        leaf._replace(shape=(rows, *leaf.shape[1:])) if isinstance(leaf, TensorSpec) else leaf for leaf in spec.leaves
    ]
    leaves = [
        torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, TensorSpec)
        else leaf.value
        for leaf in specs
    ]
    return Spec(spec.structure, tuple(specs)), leaves
