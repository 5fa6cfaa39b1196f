"""One call of a captured function: a replay of its graph, a step of its warm-up, its capture, or an eager call."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..._errors import CaptureError, InputMismatch
from ..._torch.tensors.modes import modes
from ..._torch.tensors.settings import settle_attention_priority
from ..._undo import Undo
from ..compare.verify import verified_replay
from ..graph.cache import Cache, Captured, copied
from ..graph.capture_query import answered, captures
from ..graph.graph import capture_stream
from ..graph.kernel_names import KernelNames
from ..graph.pool import growing_segments
from ..graph.report import Report
from ..graph.timing import Clock
from ..graph.turns import Turn, turns_on
from ..keys.inputs import BatchReader
from ..keys.key import Key
from ..ranks.ranks import Ranks
from ..state.bound import why_not_scripted
from ..state.overlaps import may_change
from ..state.state import TrainingState
from ..state.surroundings import Surroundings
from .eager_call import call_aligned, called_on
from .fallback import UNMOVED, Fallback, MovableOptimizer
from .host_draws import NEW, HostDraws
from .layout_capture import LayoutCapture
from .layouts import MAX_LAYOUTS, Layout, Layouts, Stage
from .options import WARM_UP, Options
from .series import Series
from .splitting import IN_PARTS, NEVER, Splitter
from .variation import Variation
from .warm_up import WarmUp

_Fn = Callable[[], Any]
_Context = AbstractContextManager[Any]


class Engine:
    """Calls `fn(phase, *args, **kwargs)`, first eagerly, then by replaying a graph of it.

    A key stands for the layout of the input, the phase, and the settings of the state (`Settings`). The first `warmup`
    calls of a key are eager: one of them runs under the preflight, and the last one is the rehearsal of the capture.
    The next call of the key is captured, and later ones are replayed. Graphs of all keys share one pool. If memory of
    the state was replaced (see `Generation`), all graphs are dropped.

    Args:
        fn: function of tensors that changes only `state`. It returns a tree of tensors and constants; the constants are
            the same in every call of a key.
        state: what `fn` may change.
        device: where the inputs must be.
        options: see `Options`.
        ranks: the processes that must decide alike.
        blocker: why `fn` cannot be captured, if that is known already; else "".
        name: what messages call it.
        captured: what a graph records: `fn`, or something that leaves the same bits.
        whole: what is called once nothing is captured any more, in place of `fn`. It does what the caller would do
            behind `fn`, too, and its outputs belong to the caller.
        optimizer: where the optimizer steps, if that may be behind `fn`.
        watching: returns a context for the call of `fn` that runs under the preflight.
        declared: whether the user has declared what `fn` may change, so that it may change nothing else.
        one_argument: whether every call has one argument, the batch.
        untimed: how many calls of a layout are slower than later ones, and are not timed.
        splitter: does calls in parts that cannot be captured.

    Attributes:
        turn: makes other threads wait. The engine, and all that belongs to the same call, must be called in it.
        names: those of the kernels of its graphs; None without `annotate`.
        series: captures several calls in one graph.
        replays: how many calls were a graph launch.
        eager: how many calls were eager, by reason.
        fallback: says that calls are eager.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        state: TrainingState,
        *,
        device: torch.device,
        options: Options,
        ranks: Ranks,
        blocker: str,
        name: str,
        captured: Callable[..., Any] | None = None,
        whole: Callable[..., Any] | None = None,
        optimizer: MovableOptimizer = UNMOVED,
        watching: Callable[[], AbstractContextManager[Any]] = nullcontext,
        declared: bool = False,
        one_argument: bool = False,
        untimed: int = 1,
        splitter: Splitter = NEVER,
    ) -> None:
        on_cuda = options.graph == "auto" and device.type == "cuda"
        captured = captured or fn
        self._warmup, why_more = ranks.warm_up(options.warmup, on_cuda)
        words = f"{WARM_UP} ({why_more})" if why_more else WARM_UP
        self._fn, self._whole, self._own = fn, whole or fn, copied if whole is None else lambda outputs: outputs
        self._state, self._watch, self._optimizer, self._splitter = state, state.watch, optimizer, splitter
        self._device, self._reader, self._options, self._ranks = device, BatchReader(device), options, ranks
        self._stream = ranks.reducers.stream = capture_stream(device) if on_cuda else None
        if on_cuda:
            settle_attention_priority(device)  # one of the settings that a key stands for
        self._turns = turns_on(device)
        self.turn: Turn = ranks.watched(Turn(self._turns, name))
        self._clock = Clock(device if on_cuda else None)
        self.fallback: Fallback = Fallback(name, options)
        self._cache = Cache(options.max_graphs, options.memory_budget)
        self.names: KernelNames | None = KernelNames(state.modules) if options.annotate else None
        self._layouts = Layouts(self._warmup, device.type == "cpu", options.capturing is True, self.names, words)
        self._surroundings = Surroundings(state)
        self._variation = Variation(device, self._warmup, one_argument)
        self._draws = HostDraws(ranks, self._cache, self._layouts, self.fallback)
        self._warm_up_call = WarmUp(
            fn,
            captured,
            state,
            self._surroundings,
            device=device,
            generators=options.generators,
            can_repeat=self._warmup > 2,
            watching=watching,
            declared=declared,
            clock=self._clock,
            may_tell=options.capturing == "auto" and not ranks.several,  # each rank would decide by itself
            untimed=untimed,
            draws=self._draws,
            segments=growing_segments if on_cuda else nullcontext,
        )
        self._capture = LayoutCapture(
            captured, state, self._stream, options, ranks, self._cache, self._layouts, self.fallback, self._draws
        )
        self.series: Series = Series(state, self._stream, options, ranks, self._cache, self._layouts, self.fallback)
        self._told_since: int | None = None  # the number of a call
        self.replays: int = 0
        self.eager: Counter[str] = Counter()
        self._unverified, self._starts_to_mark = options.verify, 0  # each counts calls that are still to come
        self._begin(options.why_not_on(device) or blocker or why_not_scripted(state.modules))

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return self._capture.captures + self.series.captures

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Hashable = None) -> Any:
        """Return what `fn` returns, in tensors of its own. To be called in this engine's `turn`."""
        start = self._mark_start() if self._starts_to_mark else None
        spec, leaves = self._reader.read(args, kwargs)  # raises the same errors with and without graphs
        if self.fallback.refused or captures.recorded:
            changing = partial(may_change, self._state, None)
            return call_aligned(partial(self._call_without_key, phase), spec, args, kwargs, leaves, changing)
        if self._watch.present() is not self._surroundings.generation:
            self._adapt()
        captured = self._cache.get(spec, phase, self._surroundings.number)
        if captured is None or self._ranks.exchanges:
            key = self._draws.decided(Key(spec, phase, self._surroundings.number))
            captured = captured or self._cache.find(key)
        if captured is not None:
            if self._ranks.several:
                start = self._vote_before_replay(start)
            self.replays += 1
            captured.timing.replays += 1
            if self._unverified or captured.timing.replay.wanted:
                return self._watched_replay(captured, phase, leaves, start)
            return captured.replay(leaves)
        return call_aligned(
            partial(self._call_without_graph, key, start),
            spec,
            args,
            kwargs,
            leaves,
            lambda: may_change(self._state, self._layout(key).writes),
        )

    def _call_without_graph(
        self, key: Key, start: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        layout = self._layout(key)
        stage = self._agreed_stage(key, layout)
        if stage is Stage.COLD:
            return self._warm_up(key, layout, leaves, args, kwargs, start)
        if stage is Stage.WARM:
            outputs = self._capture_and_replay(key, layout, leaves)
            if outputs is not _NOT_CAPTURED:
                return outputs
        if layout.refusal is IN_PARTS:
            return self._splitter.call(self, layout, key.phase, args, kwargs)
        reason = self.fallback.refused or layout.refusal or "the ranks have not agreed to capture yet"
        fn = answered(self._fn, layout.told)
        return self.run(reason, lambda: fn(key.phase, *args, **kwargs))

    def settings(self) -> int | None:
        """Return what a key has of the settings of a call that is made now. None if the call cannot be captured."""
        if self.fallback.refused or captures.recorded:
            return None
        if self._state.generation() is not self._surroundings.generation:
            self._adapt()
        return self._surroundings.number

    def _call_without_key(self, phase: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], _: list[Any]) -> Any:
        """Call eagerly, because every call is eager, or because the call is a part of another engine's capture."""
        reason = self.fallback.refused or "within the capture of another"
        if self.fallback.refused and self._options.graph != "off":
            self._ranks.decide(wants=False, can=True, settled=True)
        fn = answered(self._whole, self._options.capturing is True)
        return self.run(reason, lambda: fn(phase, *args, **kwargs), own=self._own)

    # ----------------------------------------------------------------------------------------------- with a graph

    def _vote_before_replay(self, start: Any) -> Any:
        """Vote on this call with all other ranks. Return its start, taken anew, since a vote waits for the device."""
        _, all_can = self._ranks.decide(wants=False, can=True, settled=not self._unverified, replays=True)
        if not all_can and self.fallback.raises:  # the other ranks would wait for the one that raises
            raise self.fallback.error(self._ranks.other_found)
        return None if start is None else self._clock.now()

    def _watched_replay(self, captured: Captured, phase: Hashable, leaves: list[Any], start: Any) -> Any:
        """Replay. Compare the first `verify` replays with eager calls. Time the others whose start is given."""
        if self._unverified and self._ranks.together:
            outputs = self.verified(captured, partial(answered(self._fn, captured.told), phase), leaves)
            self._unverified -= 1
            return outputs
        outputs = captured.replay(leaves)
        if start is not None:
            captured.timing.replay.add(start, self._clock.now())
        if captured.timing.replay.wanted:
            self._starts_to_mark = _MARKED
        return outputs

    def verified(self, captured: Captured, eager: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Replay, and compare that with `eager(*args, **kwargs)`. Return the outputs of the eager call."""
        rest = self._state, self._options.generators, self._ranks
        verdict = self._on_stream(lambda: verified_replay(captured, eager, leaves, *rest))
        if verdict.noise:
            self.fallback.warn_once("noise", f"verify: {verdict.noise}")
        if verdict.problem:
            self.close()
            self.fallback.refuse_wrong_graph(f"verify: {verdict.problem}", verdict.outputs)
        return verdict.outputs

    def _mark_start(self) -> Any:
        """Return a time stamp of this moment, for a call that may be timed."""
        self._starts_to_mark -= 1
        return self._clock.now()

    # -------------------------------------------------------------------------------------------- without a graph

    def _adapt(self) -> None:
        """Find out what has changed since the last call. Drop outdated graphs, and warn once of what a change costs."""
        if self._optimizer.has_moved():
            self.close()
        elif len(self._cache):
            self._say_behind()
        change = self._surroundings.observe()
        if change is not None and change.of_optimizer and self._optimizer.leave(change.reason):
            self._adapt()
            return
        if change is None:
            return
        if change.outdates:
            self._cache.clear()
            self._layouts.clear()
        self._layouts.reason = f"{WARM_UP} again: {change.reason}"
        costs = f"takes {self._warmup} eager steps and a new capture"
        text = f"{change.text}. Each such change {costs}."
        if not change.outdates:
            text = f"{change.text}. Each new value {costs}; one that comes back has its graph."
        if self.fallback.warn_once("changes", " ".join([text, *dict.fromkeys(change.advice.values())])):
            self._variation.follow(self.replays + self.series.launches, self.captures)
            self._variation.say(change.advice)

    def _layout(self, key: Key) -> Layout:
        """Return the layout of this key. Warn if there were too many of them."""
        full = len(self._layouts) == MAX_LAYOUTS and key not in self._layouts
        if full and not self.fallback.has_warned("variation"):
            known = [(known, self._surroundings.call_settings) for known in self._layouts]
            self.fallback.warn_once("variation", self._variation.text_of(known))
        return self._layouts.of(key)

    def _agreed_stage(self, key: Key, layout: Layout) -> Stage:
        """Return what all ranks do in this call: warm up (COLD), capture (WARM), or call eagerly (REFUSED)."""
        stage = layout.stage
        problem = (layout.problem if stage is Stage.WARM else "") or self._ranks.problem or self._note(key, layout)
        all_want, all_can = self._ranks.decide(stage is Stage.WARM, not problem, settled=False)
        if stage is not Stage.REFUSED and not all_can:
            self.give_up(layout, "cannot be captured", CaptureError(problem or self._ranks.other_found), key)
        return Stage.REFUSED if not all_can or (stage is Stage.WARM and not all_want) else stage

    def _note(self, key: Key, layout: Layout) -> str:
        """Count a call that has no graph. Return why to give up capturing, "" if not. Only on_failure="raise" does."""
        if layout.refusal:
            return ""
        self._variation.follow(self.replays + self.series.launches, self.captures)
        kept = min(self._cache.limit, MAX_LAYOUTS)
        cause = self._variation.note(key, self._surroundings.call_settings, self.captures, kept)
        if cause is None:
            return ""
        if self.fallback.raises:
            return self._variation.text
        layout.reason = f"{WARM_UP}: {cause.reason}"
        if not self._variation.is_said:
            self.fallback.warn_once("variation", f"{self._variation.text} Until that stops, such calls are eager.")
        return ""

    def _warm_up(
        self, key: Key, layout: Layout, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any], start: Any
    ) -> Any:
        if start is not None and self._ranks.several:
            start = self._clock.now()  # the ranks have voted, which waits for the device
        self._starts_to_mark = _MARKED
        self._state.renew_gradient_nodes()
        left = self._warmup if key.outcomes is NEW else 2 if len(self._layouts) > _EARLY_PREFLIGHTS else 3
        outputs = self._warm_up_call(
            self.run, layout, leaves, key.phase, args, kwargs, preflight_left=left, start=start
        )
        if layout.told and layout.problem_untold and layout.checked:
            self._say_told(key, layout)
        self._draws.learn(key, layout)
        return outputs

    def _say_told(self, key: Key, layout: Layout) -> None:
        """Warn that from the call just made on, user code is told that it is being captured, for this layout."""
        number = self.replays + sum(self.eager.values())
        self._told_since = self._told_since or number
        self._layouts.tell(key)
        self.fallback.say_told(number, layout.problem_untold)
        layout.problem_untold = ""

    def _capture_and_replay(self, key: Key, layout: Layout, leaves: list[Any]) -> Any:
        """Capture for this key, replay the graph and compare it. Return the outputs, or `_NOT_CAPTURED`."""
        if self._stream is not None:
            self._ranks.close_before_end(self)
        with Undo() as undo:
            undo.note(self._cache.drop, key)  # a graph that has not been compared must not be replayed again
            undo.note(modes())
            try:
                captured = self._capture.capture(key, layout, leaves)
            except CaptureError as error:
                self.give_up(layout, "capture failed", error)
                captured = None
            if captured is None:
                return _NOT_CAPTURED
            self._say_behind()
            try:
                self.replays += 1
                captured.timing.replays += 1
                outputs = self._watched_replay(captured, key.phase, leaves, None)
            except InputMismatch:
                undo.forget()  # it is this batch that does not fit
                raise
            failure = None if self.fallback.refused else self._capture.compare(key, layout)
            if failure is not None:
                if self.fallback.raises:
                    raise self.fallback.step_done_error(failure, outputs)
                self.give_up(layout, "capture failed", failure)
            undo.forget()
        return outputs

    def _begin(self, problem: str) -> None:
        if problem and self._options.graph != "off":
            self.fallback.refuse(problem)
        else:
            self._say_behind()

    def _say_behind(self) -> None:
        if self._optimizer.stays_behind:
            self.fallback.say_behind(self._optimizer.why_behind)

    def give_up(self, layout: Layout, reason: str, error: CaptureError, key: Key | None = None) -> None:
        """Make the calls of a layout eager. With its key, they may be done in parts instead."""
        if self._optimizer.leave(problem=str(error)) or (key is not None and self._splitter.takes(key, layout)):
            return
        if self.fallback.raises:
            self._variation.restart()  # the caller may go on with batches that do not vary
        if self._stream is not None:
            torch.cuda.empty_cache()  # eager calls cannot use the segments that grew in the warm-up
        self.fallback.give_up(layout.refuse, reason, error, is_last=not (len(self._cache) or self._splitter.has_parts))

    # ------------------------------------------------------------------------------------------------ eager calls

    def run(self, reason: str, fn: _Fn, context: _Context | None = None, own: Callable[[Any], Any] = copied) -> Any:
        """Return what `fn` returns, the caller's own; it is called eagerly, and counted under this reason."""
        self.eager[reason] += 1
        self._watch.refresh_rates()
        self._ranks.reducers.begin_call()
        return self._on_stream(fn, nullcontext() if context is None else context, own)

    def _leave_capture_stream(self) -> None:
        """Call on the caller's stream from now on, since there will be no graph. Sync: waits for the device, once."""
        if self._stream is not None and not self._ranks.reducers.moved:
            self._stream = None
            # Errors refer to themselves through their tracebacks. What a failed capture made may hold nodes of autograd
            # that belong to the capture stream, and torch warns where they are used on another one.
            gc.collect()
            torch.cuda.empty_cache()  # memory that is cached for the capture stream would serve no other one

    def _on_stream(self, fn: _Fn, context: _Context = nullcontext(), own: Callable[[Any], Any] = copied) -> Any:  # noqa: B008 - has no state
        """Call `fn` on the capture stream and return `own(outputs)`.

        Autograd and cuBLAS keep memory for each stream. With one stream for eager calls and captures they do so once.
        """
        if self.fallback.refused:
            self._leave_capture_stream()
        return called_on(self._stream, self._device, fn, context, own)

    # ------------------------------------------------------------------------------------------ report and release

    def report(self, skipped: int = 0) -> Report:
        """Return the counts so far. Sync: reads the allocator, and waits for the calls that were timed to end."""
        with self._turns.lock:
            saving = self._cache.saving()
            self._variation.follow(self.replays + self.series.launches, self.captures)
            return Report(
                graphs=len(self._cache) + sum(len(family.graphs) for family in self._cache.families.values()),
                captures=self.captures,
                evictions=self._capture.evictions,
                replays=self.replays,
                eager={reason: count for reason, count in self.eager.items() if reason != IN_PARTS},
                in_parts=self.eager[IN_PARTS],
                **self._splitter.fields(),
                bytes=self._cache.nbytes + self._splitter.nbytes,
                input_bytes=self._cache.input_bytes,
                per_graph=(*self._cache.reports(), *self.series.reports()),
                skipped=skipped,
                failure=self.fallback.failure or self._variation.text or None,
                eager_ms=saving.eager_ms,
                replay_ms=saving.replay_ms,
                saved_s=saving.seconds,
                told_since=self._told_since,
                launches=self.series.launches,
                scanned=self.series.parts,
                eager_optimizer=None if self.fallback.refused else self._optimizer.why_behind or None,
                emulated=self._options.graph == "emulate",
            )

    def close_in_turn(self) -> None:
        """Close when no other thread is in a call."""
        with self._turns.lock:
            self.close()

    def close(self) -> None:
        """Drop all graphs and give their memory back. The next call warms up and captures again."""
        self._cache.clear()
        self._layouts.clear()
        self._splitter.close()
        self._draws.clear()
        self._surroundings.forget()
        self._variation.restart()


_NOT_CAPTURED = object()  # None may be what a function returns
_EARLY_PREFLIGHTS = 8  # layouts; if there are more, most of them have only one call
_MARKED = 64  # calls behind one that is to be timed: inputs may take turns
