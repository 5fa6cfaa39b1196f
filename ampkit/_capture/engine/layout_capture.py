"""How a layout gets its graph: record it, compare it with the eager call before, keep within the memory budget."""

import weakref
from functools import partial
from typing import Any

from ..._errors import CaptureError
from ..graph.cache import Captured
from ..graph.capture_query import seeing_capture
from ..graph.graph import Graph
from ..graph.timing import Timing
from ..keys.inputs import StaticInputs
from ..keys.key import Key
from ..preflight.questions import answering_questions
from ..state.overlaps import keep_apart
from .cuts import CutGraph
from .host_draws import DrawnGraph, HostDraws
from .input_questions import InputQuestions
from .layouts import Layout
from .record import Left, fitting, record
from .session import Session


class LayoutCapture:
    """Captures layouts, each of them once its warm-up is over."""

    def __init__(self, session: Session, draws: HostDraws, questions: InputQuestions) -> None:
        self._session, self._draws, self._questions = session, draws, questions
        self._options, self._ranks, self._cache = session.options, session.ranks, session.cache
        self._layouts, self._fallback = session.layouts, session.fallback
        self.captures = 0  # how many graphs were captured so far
        self.evictions = 0  # how many graphs made room for others so far

    def capture(self, key: Key, layout: Layout, leaves: list[Any]) -> Captured | None:
        """Capture a graph for this key and put it into the cache. Nothing of the step is done.

        Returns:
            The graph; None if it takes more memory than the budget. Then `layout.refusal` says so.

        Raises:
            CaptureError: the capture failed, on this rank or on another one. Everything is as before the call.
        """
        if layout.evictions and not self._fallback.has_warned("variation"):  # which has said more
            self._fallback.warn_once(
                "evictions",
                f"a graph that was dropped to make room for others is captured again ({key.spec}). Raise max_graphs "
                "or memory_budget, or pad to fewer shapes with ampkit.Buckets.",
            )
        for evicted in self._cache.make_room():
            self.evictions += 1
            self._layouts.layout_of(evicted).evict()
        pool_bytes = self._cache.pool_bytes
        graph, inputs, left = self._record(key, layout, leaves)
        self.captures += 1
        keep_apart(inputs, self._session.state, layout.writes.paths())
        # Eager calls take as long where other ranks draw something else, but there is another graph.
        timing = Timing(layout.timing.eager) if key.ranks_outcome else layout.timing
        grown = max(0, self._cache.pool_bytes - pool_bytes)
        fits = fitting(self._session.state, left)
        captured = Captured(graph, inputs, grown, timing, layout.answer.sees_capture, left, fits)
        self._cache.add(key, captured)
        is_small = self._ranks.agree(not self._cache.over_budget())
        return captured if is_small else self._within_budget(key, layout, leaves)

    def _record(self, key: Key, layout: Layout, leaves: list[Any]) -> tuple[Graph, StaticInputs, Left | None]:
        """Return a graph that was just recorded, the buffers that it reads, and what `record` returns."""
        inputs = StaticInputs(key.spec, leaves)
        new = self._cache.new_graph(self._session.stream, self._options.generators)
        graph: Graph = new if key.outcomes is None else DrawnGraph(new, self._draws)
        if self._session.names is not None:
            graph = self._session.names.named(graph, [layout.kernels])
        cuts = self._questions.cuts(key)
        asked = self._questions.asked(key)
        graph = cuts.undone(graph, layout.writes.paths(), asked, self._options.generators)
        # An emulated graph keeps the function that it is given. With self in that, a cycle would keep the graph alive.
        fn, uploads = seeing_capture(self._session.captured, layout.answer.sees_capture), self._session.uploads
        in_place = partial(uploads.in_place, in_operations=layout.uploads_in_operations, captures=True)
        cut = weakref.WeakMethod(new.cut)
        answered = partial(answering_questions, asked, self._session.device)

        def recorded() -> Any:
            versions = inputs.versions()
            with in_place(), answered(cuts.cutting(cut)):
                outputs = fn(key.phase, *inputs.args, **inputs.kwargs)
            inputs.note_changes(versions)
            return outputs

        then, state = self._layouts.make_outputs, self._session.state
        context = layout.rehearsal.capturing
        left = record(graph, recorded, context, then, state, self._ranks, self._cache.clear, layout.loose)
        if left is not None and isinstance(graph, CutGraph):
            graph.keep(left.tensors())
        return graph, inputs, left

    def _within_budget(self, key: Key, layout: Layout, leaves: list[Any]) -> Captured | None:
        """Capture again into a pool that fewer graphs share. Refuse this key if its graph alone is too large."""
        others = len(self._cache) - 1
        if (others or self._cache.multi_step) and not self._ranks.several:
            limit, self._cache.limit = self._cache.limit, max(1, others)
            self.evictions += others  # their layouts stay warm, so that their next calls capture again
            self._cache.clear()
            captured = None
            try:
                captured = self.capture(key, layout, leaves)
            finally:
                if captured is None:
                    self._cache.limit = limit
            return captured
        layout.refuse(f"its graph takes {self._cache.nbytes} bytes, memory_budget is {self._options.memory_budget}")
        self._cache.clear()
        self._fallback.warn_once("budget", f"{key.spec}: {layout.refusal}. Training goes on eagerly.")
        return None

    def compare(self, key: Key, layout: Layout) -> CaptureError | None:
        """Compare what was just captured, and replayed once, with the rehearsal. Drop the graph if it differs.

        This comes behind the replay, because the graph has what the host chose for this call. If the user's code were
        called again, the host would choose again.

        Returns:
            Why the layout must be given up; None if it need not be. A first difference is forgiven: a thread of the
            user's may have used autograd's threads at the same time. With several ranks it is not, for they might
            disagree on it.
        """
        difference = layout.difference()
        if self._layouts.lenient and self._ranks.wrappers:
            return None  # on a CPU, DistributedDataParallel does its part when gloo's threads are done with theirs
        if difference is None and not self._ranks.several:  # not recorded: once more, behind another rehearsal
            self._cache.drop(key)
            return None
        if reason := layout.rehearsal.unseen:
            self._fallback.warn_once("unseen", f"the capture cannot be compared with an eager call: {reason}.")
        if self._ranks.agree(not difference):
            return None
        self._cache.drop(key)
        if difference and not self._ranks.several and layout.is_forgiven():
            return None
        if not difference:
            return CaptureError(self._ranks.other_failed)
        return CaptureError(
            f"{difference}. A graph would repeat what it recorded, but this depends on more than the batch and the "
            "declared state. Pass a value that changes as a tensor, or keep it in a buffer that the step changes."
        )
