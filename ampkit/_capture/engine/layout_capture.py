"""How a layout gets its graph: record it, compare it with the eager call before, keep within the memory budget."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..._errors import CaptureError
from ..._undo import Undo
from ..graph.cache import Cache, Captured
from ..graph.capture_query import answered
from ..graph.graph import Graph, MakeContext, Then
from ..graph.pool import no_recompile
from ..keys.inputs import StaticInputs
from ..keys.key import Key
from ..preflight.host_values import refuse_reads
from ..ranks.ranks import Ranks
from ..state.overlaps import keep_apart
from ..state.state import TrainingState
from ..state.walk import Walk
from .fallback import Fallback
from .host_draws import HostDraws
from .layouts import Layout, Layouts
from .options import Options


class LayoutCapture:
    """Captures layouts, each of them once its warm-up is over.

    Args:
        fn: what a graph records.
        state: what `fn` may change.
        stream: where to capture; None for emulated graphs.
        options: see `Options`.
        ranks: the processes that must decide alike.
        cache: keeps the graphs.
        layouts: those that have no graph.
        fallback: issues the warnings.
        draws: what is known of the draws on the host.

    Attributes:
        captures: how many graphs were captured so far.
        evictions: how many graphs made room for others so far.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        state: TrainingState,
        stream: torch.cuda.Stream | None,
        options: Options,
        ranks: Ranks,
        cache: Cache,
        layouts: Layouts,
        fallback: Fallback,
        draws: HostDraws,
    ) -> None:
        self._draws = draws
        self._fn = fn
        self._state = state
        self._stream = stream
        self._options = options
        self._ranks = ranks
        self._cache = cache
        self._layouts = layouts
        self._fallback = fallback
        self.captures = 0
        self.evictions = 0

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
            self._layouts.of(evicted).evict()
        pool_bytes = self._cache.pool_bytes
        graph, inputs, flags = self._record(key, layout, leaves)
        self.captures += 1
        keep_apart(inputs, self._state, layout.writes.paths())
        timing = layout.timing.of_another_graph() if key.joint else layout.timing
        captured = self._cache.add(key, graph, inputs, pool_bytes, timing, layout.told, flags)
        fits = self._ranks.agree(not self._cache.over_budget())
        return captured if fits else self._within_budget(key, layout, leaves)

    def _record(
        self, key: Key, layout: Layout, leaves: list[Any]
    ) -> tuple[Graph, StaticInputs, Callable[[], None] | None]:
        """Return a graph that was just recorded, the buffers that it reads, and what `record` returns."""
        inputs = StaticInputs(key.spec, leaves)
        new = self._cache.new_graph(self._stream, self._options.generators)
        graph = layout.named(new if key.outcomes is None else self._draws.around(new))
        # An emulated graph keeps the function that it is given. With self in that, a cycle would keep the graph alive.
        fn = answered(self._fn, layout.told)

        def recorded() -> Any:
            versions = inputs.versions()
            outputs = fn(key.phase, *inputs.args, **inputs.kwargs)
            inputs.note_changes(versions)
            return outputs

        then = self._layouts.make_outputs
        rest = self._state, self._ranks, self._cache.clear
        flags = record(graph, recorded, layout.rehearsal.capturing, then, *rest)
        return graph, inputs, flags

    def _within_budget(self, key: Key, layout: Layout, leaves: list[Any]) -> Captured | None:
        """Capture again into a pool that fewer graphs share. Refuse this key if its graph alone is too large."""
        others = len(self._cache) - 1
        if (others or self._cache.families) and not self._ranks.several:
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
        difference = layout.rehearsal.difference()
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
        if difference and not layout.differed and not self._ranks.several:
            layout.differed = True
            return None
        if not difference:
            return CaptureError(self._ranks.other_failed)
        return CaptureError(
            f"{difference}. A graph would repeat what it recorded, but this depends on more than the batch and the "
            "declared state. Pass a value that changes as a tensor, or keep it in a buffer that the step changes."
        )


def record(
    graph: Graph,
    fn: Callable[[], Any],
    context: MakeContext,
    then: Then,
    state: TrainingState,
    ranks: Ranks,
    drop_graphs: Callable[[], object],
) -> Callable[[], None] | None:
    """Capture a graph on all ranks.

    Args:
        graph: a new one.
        fn: see `Graph.capture`.
        context: see `Graph.capture`.
        then: see `Graph.capture`.
        state: what `fn` may change.
        ranks: those that capture now.
        drop_graphs: drops all graphs, if the failure leaves none of them right.

    Returns:
        What leaves the modules in the mode, and their tensors with the `requires_grad`, in which `fn` has left them. A
        replay does not do that by itself. None if `fn` has left all of them as they were.

    Raises:
        CaptureError: the capture failed, on this rank or on another one. Everything is as before the call.
    """
    before = state.tensors()
    walk = Walk(state.modules)
    flags = walk.flags()
    failure: CaptureError | None = None
    ranks.reducers.begin_capture()
    state.renew_gradient_nodes()
    with Undo() as undo:
        undo.note(walk.put_back, flags)
        undo.note(state.rebind, before)
        undo.note(graph.reset)
        refuse = refuse_reads(undo)
        try:
            with no_recompile():
                graph.capture(fn, context, then)
            refuse()
            _refuse_rebound(state.rebound_since(before))
        except CaptureError as error:
            advice = ranks.reducers.advice
            failure = CaptureError(f"{error}{advice}") if advice else error
        if not ranks.agree(failure is None):
            if not ranks.agree(ranks.reducers.idle):
                drop_graphs()
                ranks.reducers.reset()
            try:
                raise failure or CaptureError(ranks.other_failed)
            finally:
                del failure  # its traceback refers to this frame: a cycle, which would keep what the step made
        undo.forget()
    changed = walk.changed_flags(flags)
    walk.put_back(flags)  # the replay that follows will set them
    return partial(walk.set_flags, changed) if changed else None


def _refuse_rebound(paths: list[str]) -> None:
    """Raise a `CaptureError` if a capture has made or rebound tensors of the state, at these paths."""
    if paths:
        raise CaptureError(
            f"{', '.join(paths[:3])}: made or rebound in the step; a replay would neither read nor keep the new "
            "value. Change tensors in place (copy_, add_), and make them before the step."
        )
