"""Several calls in one graph, once each of them has a graph of its own: captured, compared, counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._errors import CaptureError
from ..._torch.tensors.modes import modes
from ..._undo import Undo
from ..compare.call_record import OperationRecorder, Record, first_difference
from ..graph.cache import Captured, Family
from ..graph.capture_query import recording, seeing_capture
from ..graph.report import GraphReport
from ..graph.timing import Timing
from ..keys.inputs import Spec, StaticInputs, TensorSpec
from ..keys.key import Key
from ..keys.placement import ALIGNED
from ..state.overlaps import keep_apart
from .record import record
from .session import Session

Noting = Callable[[], AbstractContextManager[None]]  # returns the context in which one call of the series is made


class MakesCalls(Protocol):
    """Does the calls of a series, each with a slice of the inputs."""

    def __call__(self, parts: int, noting: Noting, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do `parts` parts of the series. Every part has as many calls."""


class Compare(Protocol):
    """`Engine.verified`."""

    def __call__(self, captured: Captured, eager: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Replay, compare that with `eager(*args, **kwargs)`, and return the outputs of the eager call."""


class Series:
    """Captures a series of calls as one graph, and launches it. Lengths are counted in parts of equally many calls.

    A series is captured once each of its calls has a graph of its own: then it is warm, and known to be right. The
    calls of the first capture that have the same graph are compared with each other, operation by operation.

    With several ranks, they are not compared.

    Args:
        session: of the engine, which makes the single calls.

    Attributes:
        given_up: whether nothing is captured any more, because a capture has failed on one of several ranks.
        captures: how many graphs were captured so far.
        launches: how often a graph was launched.
        parts: how many parts these launches did.
    """

    def __init__(self, session: Session) -> None:
        self._state, self._stream, self._options = session.state, session.stream, session.options
        self._ranks, self._cache = session.ranks, session.cache
        self._layouts, self._fallback = session.layouts, session.fallback
        # Ranks would have to compare the same launches.
        self._unverified = 0 if self._ranks.several else self._options.verify
        self._comparisons: dict[Key, _Comparison] = {}  # of families that were not launched yet
        self._refused: set[Key] = set()
        self.given_up: bool = False
        self.captures: int = 0
        self.launches: int = 0
        self.parts: int = 0

    def graph(
        self,
        key: Key,
        parts: int,
        lengths: range,
        calls: int,
        fn: MakesCalls,
        singles: Sequence[Key],
        may_capture: bool,
    ) -> Captured | None:
        """Return the graph that does this many parts, captured now if it must be. Nothing of it is done.

        The second length that is not the longest one has all others captured with it, so that no later length takes a
        capture.

        Args:
            key: of the longest series. Its spec has the calls along dimension 0 of each tensor.
            parts: how many parts are wanted, one of `lengths`.
            lengths: the numbers of parts that graphs may have.
            calls: how many calls a part has.
            fn: what a graph records.
            singles: the keys of the calls of one part.
            may_capture: whether to capture.

        Returns:
            None if there is no graph: the single calls have none yet, or the series cannot be captured, of which there
            was a warning, or it may not be captured now.

        Raises:
            CaptureError: with `on_failure="raise"`, the series cannot be captured.
        """
        family = self._cache.families.get(key)
        if family is None:
            if not may_capture or not self.is_ready(key, singles):
                return None
            family = self._new_family(key, singles)
        if parts not in family.graphs:
            if not may_capture:
                return None
            short = [length for length in family.graphs if length < lengths[-1]]
            missing = [n for n in reversed(lengths) if n not in family.graphs] if short and parts < lengths[-1] else []
            for length in missing or [parts]:
                if not self._captured(key, family, length, calls, fn, singles):
                    return None
        self._cache.families.move_to_end(key)
        return family.graphs[parts]

    def has(self, key: Key, parts: int) -> bool:
        """Return whether there is a graph that does this many parts."""
        return key in self._cache.families and parts in self._cache.families[key].graphs

    def is_ready(self, key: Key, singles: Sequence[Key]) -> bool:
        """Return whether a first graph may be captured for this key, see `graph`."""
        return key not in self._refused and not self.given_up and self._are_ready(singles)

    def launch(self, key: Key, parts: int, leaves: Sequence[Any], eager: MakesCalls, compare: Compare) -> Any:
        """Do this many parts with the graph that `graph` returned. Return the outputs, in tensors of their own.

        Args:
            key: as for `graph`.
            parts: as for `graph`.
            leaves: the slices of the inputs that the calls take.
            eager: does the same parts eagerly.
            compare: verifies a launch.

        Raises:
            InputMismatch: see `StaticInputs.refuse_shared`. Nothing was done.
            StepDoneError: with `on_failure="raise"`, the launch was verified and was wrong. The parts were done.
        """
        family = self._cache.families[key]
        captured = family.graphs[parts]
        self.launches += 1
        self.parts += parts
        family.launches += 1
        with Undo() as undo:
            if key in self._comparisons:
                undo.note(self._drop, key)  # graphs that have not been compared must not be launched again
            undo.note(modes())
            if self._unverified:
                call = seeing_capture(eager, family.told)
                outputs = compare(captured, lambda *args, **kwargs: call(parts, _unnoted, args, kwargs), leaves)
                self._unverified -= 1
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
                f"up to {max(family.graphs)} optimizer steps per launch: {key.spec}",
                family.pool_bytes + family.buffer_bytes,
                family.launches,
            )
            for key, family in self._cache.families.items()
            if family.graphs
        ]

    # ----------------------------------------------------------------------------------------------------- capture

    def _are_ready(self, singles: Sequence[Key]) -> bool:
        """Return whether the single calls have graphs, and change no tensor of their input in place."""
        graphs = dict(self._cache)
        found = [graphs[key] for key in singles if key in graphs and key in self._layouts]
        # Calls that change their inputs would have to be kept apart from each other, too.
        return len(found) == len(singles) and not any(any(captured.inputs.changed) for captured in found)

    def _new_family(self, key: Key, singles: Sequence[Key]) -> Family:
        while len(self._cache.families) >= self._options.max_graphs:
            self._drop(next(iter(self._cache.families)))
        with torch.inference_mode(False):
            buffers = [_aligned(leaf) for leaf in key.spec.leaves if isinstance(leaf, TensorSpec)]
        layouts = list(map(self._layouts.layout_of, singles))
        writes = set[str]().union(*(layout.writes.paths() for layout in layouts))
        family = Family(buffers, any(layout.answer.sees_capture for layout in layouts), writes)
        self._cache.families[key] = family
        return family

    def _captured(
        self, key: Key, family: Family, parts: int, calls: int, fn: MakesCalls, singles: Sequence[Key]
    ) -> bool:
        """Capture a graph of this length. Return whether that worked; otherwise the key is refused from now on."""
        before = self._cache.pool_bytes
        rehearsals = [] if family.graphs else [self._layouts.layout_of(single).rehearsal for single in singles]
        compares = rehearsals and not any(rehearsal.unseen for rehearsal in rehearsals) and not self._ranks.several
        kinds = [singles.index(single) for single in singles]
        comparison = _Comparison(rehearsals[0].numbers, rehearsals[0].lenient, kinds) if compares else None
        with Undo() as undo:
            undo.note(modes())
            try:
                captured = self._record(key, family, parts, calls, fn, comparison, singles)
            except CaptureError as error:
                self._refuse(key, str(error), error)
                return False
            undo.forget()
        keep_apart(captured.inputs, self._state, family.writes)
        if comparison is not None:
            self._comparisons[key] = comparison
        self.captures += 1
        family.graphs[parts] = captured
        family.pool_bytes += max(0, self._cache.pool_bytes - before)
        if not self._ranks.agree(not self._cache.over_budget()):
            problem = f"its graphs take {self._cache.nbytes} bytes, memory_budget is {self._options.memory_budget}"
            self._cache.clear()  # the layouts stay warm, so that the next single calls capture again
            self._refuse(key, f"{problem}.", None)
            return False
        return True

    def _drop(self, key: Key) -> None:
        self._comparisons.pop(key, None)
        if key in self._cache.families:
            self._cache.families.pop(key).reset()

    def _refuse(self, key: Key, reason: str, error: CaptureError | None) -> None:
        """Capture no series of this key from now on. Warn, or raise a `CaptureError` if there is an error."""
        problem = f"several calls in one graph: {reason}"
        self._drop(key)
        if self._ranks.several:  # all of them, because each rank has keys of its own
            self.given_up = True
            while self._cache.families:
                self._drop(next(iter(self._cache.families)))
        if self._fallback.raises and error is not None:
            raise self._fallback.error(problem) from error
        self._refused.add(key)
        self._fallback.warn_once("series", f"{problem} Each call is a launch of its own.")

    def _record(
        self,
        key: Key,
        family: Family,
        parts: int,
        calls: int,
        fn: MakesCalls,
        comparison: "_Comparison | None",
        singles: Sequence[Key],
    ) -> Captured:
        rows = parts * calls
        buffers = [buffer[:rows] for buffer in family.buffers]
        inputs = StaticInputs(*_rows(key.spec, rows), buffers)
        graph = self._cache.new_graph(self._stream, self._options.generators)
        if self._layouts.names is not None:
            noted = [self._layouts.layout_of(single).kernels for single in singles]
            graph = self._layouts.names.named(graph, noted * parts)
        call = seeing_capture(fn, family.told)

        def recorded() -> Any:
            # An emulated graph calls this in each replay. Only the first one is recorded.
            noting = _unnoted if comparison is None or comparison.ended else comparison
            outputs = call(parts, noting, inputs.args, inputs.kwargs)
            if noting is comparison and comparison is not None:
                comparison.end()
            return outputs

        with Undo() as undo:
            undo.note(graph.reset)
            then = self._layouts.make_outputs
            flags = record(graph, recorded, recording, then, self._state, self._ranks, self._cache.clear)
            if comparison is not None and comparison.difference:
                raise CaptureError(comparison.difference)
            undo.forget()
        return Captured(graph, inputs, 0, Timing(), family.told, flags)


class _Comparison:
    """Records each call of a series, and compares it with the first one of its kind.

    Args:
        numbers: see `OperationRecorder`.
        lenient: see `OperationRecorder`.
        kinds: of the calls of a part. Calls of one kind do the same.

    Attributes:
        ended: whether all calls were recorded.
        difference: where a call first differs, in words; "" if none does.
    """

    def __init__(self, numbers: bool, lenient: bool, kinds: Sequence[int]) -> None:
        self._numbers = numbers
        self._lenient = lenient
        self._kinds = kinds
        self._first: dict[int, Record | None] = {}
        self._made = 0
        self.ended = False
        self.difference = ""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context of the next call."""
        recorder = OperationRecorder(self._numbers, self._lenient)
        with recorder:
            yield
        kind, self._made = self._kinds[self._made % len(self._kinds)], self._made + 1
        if kind not in self._first:
            self._first[kind] = recorder.record
            return
        first = self._first[kind]
        if first is not None and recorder.record is not None and not self.difference:
            found = first_difference(first, recorder.record)
            self.difference = found and (
                f"{found}, both in one series. A graph would repeat what it recorded, but this depends on more than "
                "the batch and the declared state."
            )

    def end(self) -> None:
        """Take note that the series is over. Records refer to objects of the user's."""
        self._first, self.ended = {}, True


@contextmanager
def _unnoted() -> Iterator[None]:
    yield


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
