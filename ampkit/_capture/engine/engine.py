"""One call of a captured function: a replay of its graph, a step of its warm-up, its capture, or an eager call."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..._arguments import uninitialized
from ..._errors import CaptureError, InputMismatch
from ..._torch.tensors.modes import modes
from ..._torch.tensors.settings import settle_attention_priority
from ..._undo import Undo
from ..compare.schedule import ComparisonSchedule
from ..compare.verify import Comparisons, Verifier
from ..graph.cache import DOES_NOT_FIT, Captured, copied
from ..graph.capture_query import captures, seeing_capture
from ..graph.graph import OtherAnswerError
from ..graph.kernel_names import KernelTable
from ..graph.report import GraphReport, Report
from ..graph.timing import Timing
from ..graph.turns import Turn, turns_on
from ..host.constants import ABSENT, HostConstants, are_same
from ..keys.inputs import BatchReader
from ..keys.key import Key
from ..preflight.draw_paths import NEW
from ..preflight.undeclared import replaced
from ..ranks.job_end import close_before_end
from ..ranks.ranks import Together
from ..state.bound import why_not_scripted
from ..state.overlaps import may_change
from .cuts import numbers_in
from .eager_call import EagerCall, EagerCalls, call_aligned
from .host_draws import HostDraws
from .input_questions import InputQuestions
from .layout_capture import LayoutCapture
from .layouts import IN_PARTS, MAX_LAYOUTS, Cold, Layout, Warm
from .multi_step import MultiStepGraphs, Steps
from .options import WARM_UP
from .session import Session
from .variation import Variation
from .warm_up import WarmUp


class Engine:
    """Calls `fn(phase, *args, **kwargs)` of a session, first eagerly, then by replaying a graph of it.

    A key stands for the layout of the input, the phase, and the settings of the state (`Settings`). The first `warmup`
    calls of a key are eager: one of them runs under the preflight, and the last one is the rehearsal of the capture.
    The next call of the key is captured, and later ones are replayed. Graphs of all keys share one pool. If memory of
    the state was replaced (see `Generation`), all graphs are dropped.

    Args:
        session: the function, and what is known of its calls.

    Attributes:
        turn: makes other threads wait. The engine, and all that belongs to the same call, must be called in it.
        replays: how many calls were a graph launch.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state, self._ranks = session.state, session.ranks
        self._reader = BatchReader(session.device)
        session.ranks.reducers.stream = session.stream
        if session.on_cuda:
            settle_attention_priority(session.device)  # one of the settings that a key stands for
        self._turns = turns_on(session.device)
        self.turn: Turn = session.ranks.watched(Turn(self._turns, session.name))
        self._fallback = session.fallback
        self._cache, self._layouts = session.cache, session.layouts
        self._settings_history = session.settings_history
        self._variation = Variation(session.device, session.warmup, session.one_argument)
        self._eager, self._draws, self._questions = EagerCalls(session), HostDraws(session), InputQuestions(session)
        self._warm_up_call = WarmUp(session, self._eager, self._draws, self._questions)
        self._capture = LayoutCapture(session, self._draws, self._questions)
        self._multi_step = MultiStepGraphs(session)
        self._told_since: int | None = None  # the number of a call
        self._early = 2  # layouts that are still to be looked at in their first call
        self._may_change_itself = False  # whether no argument and no number of an optimizer is what the call is new by
        self.replays: int = 0
        # How many calls are still to come.
        self._starts_to_mark = 0
        options = session.options
        self._verifies, self._comparisons = options.verify != 0, ComparisonSchedule(options.verify)
        self._compared = Comparisons()
        self._verifier = Verifier(self._state, options.generators, session.ranks, options.graph == "emulate")
        problem = session.options.why_not_on(session.device) or session.blocker or why_not_scripted(self._state.modules)
        if problem and session.options.graph != "off":
            self._fallback.refuse(problem)
        else:
            self._say_behind()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Hashable = None) -> Any:
        """Return what `fn` returns, in tensors of its own. To be called in this engine's `turn`."""
        start = None
        if self._starts_to_mark:
            self._starts_to_mark -= 1
            start = self._session.clock.now()
        if self._verifies:
            self._comparisons.count()
        spec, leaves = self._reader.spec_and_leaves(args, kwargs)  # raises the same errors with and without graphs
        if self._fallback.refused or captures.recorded or self._variation.rest:
            eager = partial(self._call_without_key, phase)
            return call_aligned(eager, spec, args, kwargs, leaves, partial(may_change, self._state, None))
        if self._state.generation() is not self._settings_history.generation:
            self._adapt()
        captured = self._cache.get(spec, phase, self._settings_history.number)
        key = Key(spec, phase, self._settings_history.number)
        if captured is None or self._ranks.exchanges:
            key = self._questions.decided(self._draws.decided(key), leaves)  # which may depend on the draws
            key = self._of_all_ranks(key)
            captured = captured or self._cache.find(key)
        if captured is not None and captured.misfits >= _MISFITS and not self._ranks.several:
            self._cache.drop(key)
            self._layout(key).outlive()
            captured = None
        if captured is not None:
            compares = self._verifies and self._comparisons.is_due()
            if self._ranks.several:
                _, all_can = self._ranks.decide(wants=False, can=True, settled=not compares, replays=True)
                if not all_can and self._fallback.raises:  # the other ranks would wait for the one that raises
                    raise self._fallback.error(self._ranks.other_found)
                start = None if start is None else self._session.clock.now()  # a vote waits for the device
            self.replays += 1
            captured.timing.replays += 1
            try:
                if compares or captured.timing.replay.wanted:
                    return self._watched_replay(captured, phase, leaves, start, compares)
                return captured.replay(leaves)
            except OtherAnswerError as error:
                reason = str(error)  # not called here: what an emulated replay holds open ends with the traceback
            eager = partial(self._answer_otherwise, key, captured.timing, captured.sees_capture, reason)
            return call_aligned(eager, spec, args, kwargs, leaves, partial(may_change, self._state, None))
        eager = partial(self._call_without_graph, key, start)
        return call_aligned(
            eager, spec, args, kwargs, leaves, lambda: may_change(self._state, self._layout(key).writes)
        )

    def without_graph(
        self, reason: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], phase: Hashable
    ) -> Any:
        """Return what `fn` returns, in tensors of its own: called eagerly for a reason, and no step of a warm-up.

        To be called in place of this engine, in the same turn. Several ranks make such a call together.
        """
        if self._verifies:
            self._comparisons.count()
        spec, leaves = self._reader.spec_and_leaves(args, kwargs)
        fn = seeing_capture(fn, self._session.options.capturing is True)

        def eager(args: tuple[Any, ...], kwargs: dict[str, Any], _: list[Any]) -> Any:
            return self._eager.run(self._fallback.refused or reason, lambda: fn(phase, *args, **kwargs))

        return call_aligned(eager, spec, args, kwargs, leaves, partial(may_change, self._state, None))

    def _of_all_ranks(self, key: Key) -> Key:
        """Return the key of a call, which stands for what the other ranks decide, too, if all know what it leads to."""
        decided = key.outcomes, key.answers
        of_all = self._ranks.outcome_of_all(None if NEW in decided else decided)
        return key if of_all is None or decided == (None, None) else key._replace(ranks_outcome=of_all)

    def _call_without_graph(
        self, key: Key, start: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        layout = self._layout(key)
        stage, is_warm = layout.stage, isinstance(layout.stage, Warm)
        found = (layout.problem or replaced(layout.loose)) if is_warm else ""
        problem = found or self._ranks.reducers.problem or self._note(key, layout)
        all_want, all_can = self._ranks.decide(is_warm, not problem, settled=False)
        if not layout.refusal and not all_can:
            self._give_up(layout, "cannot be captured", CaptureError(problem or self._ranks.other_found), key)
        if all_can and isinstance(stage, Cold):
            return self._warm_up(key, layout, stage, EagerCall(key.phase, args, kwargs, leaves, start))
        if all_can and is_warm and all_want:
            reason: str | None = None
            try:
                outputs = self._capture_and_replay(key, layout, leaves)
                if outputs is not _NOT_CAPTURED:
                    return outputs
            except OtherAnswerError as error:
                reason = str(error)
            if reason is not None:
                sees_capture = layout.answer.sees_capture
                return self._answer_otherwise(key, layout.timing, sees_capture, reason, args, kwargs, leaves)
        if layout.refusal is IN_PARTS:
            return self._session.splitter.call(self, layout, key.phase, args, kwargs)
        fn = seeing_capture(self._session.fn, layout.answer.sees_capture)
        no_graph = _NOT_AGREED if self._ranks.several else _BEGINS_ANEW
        reason = self._fallback.refused or layout.refusal or no_graph
        return self._eager.run(reason, lambda: fn(key.phase, *args, **kwargs))

    def _call_without_key(self, phase: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], _: list[Any]) -> Any:
        """Call eagerly: as every call is, as a part of another engine's capture, or without a look at what is new."""
        reason = self._fallback.refused or "within the capture of another"
        options, whole = self._session.options, self._session.whole
        if not (self._fallback.refused or captures.recorded):
            self._variation.rest -= 1
            reason, whole = self._variation.reason, None
        if self._fallback.refused and options.graph != "off":
            self._ranks.decide(wants=False, can=True, settled=True)
        fn = seeing_capture(whole or self._session.fn, options.capturing is True)
        own = copied if whole is None else lambda outputs: outputs
        return self._eager.run(reason, lambda: fn(phase, *args, **kwargs), own=own)

    def _answer_otherwise(
        self,
        key: Key,
        timing: Timing,
        sees_capture: bool,
        reason: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _: list[Any],
    ) -> Any:
        """Call eagerly, because a replay had another answer at a cut, and was undone; or for a reason."""
        self.replays -= 1
        timing.replays -= 1
        fn = seeing_capture(self._session.fn, sees_capture)
        if not reason and self._questions.asked(key) is not None:
            self._questions.miss(key, self.replays)
        before = numbers_in(self._state.modules)
        outputs = self._eager.run(reason or _OTHER_ANSWER, lambda: fn(key.phase, *args, **kwargs))
        now, may_stop = numbers_in(self._state.modules), self._session.options.may_stop
        changed = [name for name in now if not (are_same(before.get(name, ABSENT), now[name]) or may_stop(name))]
        if changed:  # the calls with the answer of the capture may change it back, and no replay would
            self._questions.stop_cutting(_CHANGES.format(changed[0]))
        return outputs

    def places_and_values(self) -> tuple[list[tuple[Any, Any]], list[tuple[str, Any]]]:
        """Return where the variables are that code of the step reads or sets, and what they lead to."""
        return self._state.reads.places_and_values()

    # ----------------------------------------------------------------------------------------------- with a graph

    def _watched_replay(
        self, captured: Captured, phase: Hashable, leaves: list[Any], start: Any, compares: bool
    ) -> Any:
        """Replay. Compare that with an eager call if it is due. Otherwise time it if its start is given."""
        if compares and self._ranks.together:
            if not captured.fits():  # before an eager call leaves other tensors
                raise OtherAnswerError(DOES_NOT_FIT)
            fn = seeing_capture(self._session.fn, captured.sees_capture)
            outputs = self._verified(captured, partial(fn, phase), leaves)
            self._comparisons.note()
            return outputs
        outputs = captured.replay(leaves)
        if start is not None:
            captured.timing.replay.add(start, self._session.clock.now())
        if captured.timing.replay.wanted:
            self._starts_to_mark = _MARKED
        return outputs

    def _verified(self, captured: Captured, eager: Callable[..., Any], leaves: Sequence[Any]) -> Any:
        """Replay, and compare that with `eager(*args, **kwargs)`. Return the outputs of the eager call."""
        pool_bytes = self._cache.pool_bytes
        verdict = self._eager.on_stream(lambda: self._verifier.of_graph(captured, eager, leaves, pool_bytes))
        self._compared.note(verdict)
        if verdict.skipped:
            self._fallback.warn_once("skipped", f"verify: {verdict.skipped}")
        if verdict.noise:
            self._fallback.warn_once("noise", f"verify: {verdict.noise}")
        if verdict.problem:
            self.close()
            self._fallback.refuse_wrong_graph(f"verify: {verdict.problem}", verdict.outputs)
        return verdict.outputs

    # -------------------------------------------------------------------------------------------- without a graph

    def _adapt(self) -> None:
        """Find out what has changed since the last call. Drop outdated graphs, and warn once of what a change costs."""
        if self._session.optimizer.has_moved():
            self._may_change_itself = True  # all begins anew
            self.close()
        elif len(self._cache):
            self._say_behind()
        if path := self._state.generation().walk.uninitialized():
            raise uninitialized(self._session.name, path)
        change = self._settings_history.observe()
        if change is not None and change.of_optimizer and self._session.optimizer.leave(change.reason):
            self._adapt()
            return
        if change is None:
            return
        self._may_change_itself = not change.of_optimizer
        if change.outdates:
            self._cache.clear()
            self._layouts.clear()
        self._layouts.reason = f"{WARM_UP} again: {change.reason}"
        costs = f"takes {self._session.warmup} eager steps and a new capture"
        text = f"{change.text}. Each such change {costs}."
        if not change.outdates:
            text = f"{change.text}. Each new value {costs}; one that comes back has its graph."
        remark = [self._state.reads.remark] if self._state.reads.remark else []
        if self._fallback.warn_once("changes", " ".join([text, *dict.fromkeys(change.advice.values()), *remark])):
            self._variation.follow(self.replays + self._multi_step.launches, self.captures)
            self._variation.said.update(change.advice)

    def _layout(self, key: Key) -> Layout:
        full = len(self._layouts) == MAX_LAYOUTS and key not in self._layouts
        if full and not self._fallback.has_warned("variation"):
            known = [(known, self._settings_history.call_settings) for known in self._layouts]
            cause = self._variation.explain(known)  # some of these may have had replays
            self._fallback.warn_once(
                "variation",
                f"there were {len(known)} different inputs so far, because {cause.examples}. Each of them takes "
                f"{self._session.warmup} eager calls and a graph of its own. {cause.advice}",
            )
        return self._layouts.layout_of(key)

    def _note(self, key: Key, layout: Layout) -> str:
        """Count a call that has no graph. Return why to give up capturing, "" if not. Only on_failure="raise" does."""
        if layout.refusal:
            return ""
        self._variation.follow(self.replays + self._multi_step.launches, self.captures)
        kept = min(self._cache.limit, MAX_LAYOUTS)
        cause = self._variation.note(key, self._settings_history.call_settings, self.captures, kept)
        if cause is None:
            return ""
        if self._fallback.raises:
            return self._variation.text
        reason, counts = self._variation.reason, self._eager.counts
        if layout.reason != reason and all(name in layout.reason for name in cause.names):
            counts[reason] += counts.pop(layout.reason, 0)  # calls before the cause was known have it, too
        layout.count_under(reason)
        if not self._variation.said.issuperset(cause.names):
            self._fallback.warn_once("variation", f"{self._variation.text} Until that stops, such calls are eager.")
        is_new = isinstance(layout.stage, Cold) and not layout.stage.calls
        self._variation.lay_to_rest(is_new and not (len(self._cache) or self._ranks.several))
        return ""

    def _warm_up(self, key: Key, layout: Layout, cold: Cold, call: EagerCall) -> Any:
        if call.start is not None and self._ranks.several:
            call = call._replace(start=self._session.clock.now())  # the ranks have voted, which waits for the device
        self._starts_to_mark = _MARKED
        # Most layouts that come later have one call, if there is something new in each call. Where the step itself may
        # have changed what the second one is new by, a look at that tells.
        is_early = not cold.calls and (self._early == 2 or (self._early == 1 and self._may_change_itself))
        self._early, self._may_change_itself = self._early - is_early, False
        is_new = NEW in (key.outcomes, key.answers)
        left = self._session.warmup if is_new else 3 if is_early else 2
        outputs, drawn, asked = self._warm_up_call(key, layout, cold, call, preflight_left=left)
        number = self.replays + sum(self._eager.counts.values())
        if news := layout.answer.take_news(f"call {number}"):
            self._told_since = self._told_since or number
            self._layouts.show_capture(key)
            self._fallback.warn_once("answer", news)
        if drawn is not None:
            key = self._draws.learn(key, drawn)
        if asked is not None:
            self._questions.learn(key, asked)
        return outputs

    def _capture_and_replay(self, key: Key, layout: Layout, leaves: list[Any]) -> Any:
        """Capture for this key, replay the graph and compare it. Return the outputs, or `_NOT_CAPTURED`."""
        if self._eager.stream is not None and self._ranks.several:
            close_before_end(self)
        with Undo() as undo:
            undo.note(self._cache.drop, key)  # a graph that has not been compared must not be replayed again
            undo.note(modes())
            try:
                captured = self._capture.capture(key, layout, leaves)
            except CaptureError as error:
                self._give_up(layout, "capture failed", error)
                captured = None
            if captured is None:
                return _NOT_CAPTURED
            self._say_behind()
            try:
                self.replays += 1
                captured.timing.replays += 1
                compares = self._comparisons.is_due(is_first=True)
                outputs = self._watched_replay(captured, key.phase, leaves, None, compares)
            except InputMismatch:
                undo.forget()  # it is this batch that does not fit
                raise
            failure = None if self._fallback.refused else self._capture.compare(key, layout)
            if failure is not None:
                if self._fallback.raises:
                    raise self._fallback.step_done_error(failure, outputs)
                self._give_up(layout, "capture failed", failure)
            undo.forget()
        return outputs

    def _say_behind(self) -> None:
        if self._session.optimizer.stays_behind:
            text = "Until then forward and backward are captured, and the optimizer steps eagerly behind them."
            self._fallback.warn_once("behind", f"{self._session.optimizer.why_behind} {text}")

    def _give_up(self, layout: Layout, reason: str, error: CaptureError, key: Key | None = None) -> None:
        """Make the calls of a layout eager. With its key, they may be done in parts instead."""
        optimizer, splitter = self._session.optimizer, self._session.splitter
        if optimizer.leave(problem=str(error)):
            if optimizer.follows_behind:
                self._fallback.warn_once("follows", _FOLLOWS.format(str(error).removesuffix(".")))
            return
        if self._eager.stream is not None:
            torch.cuda.empty_cache()  # eager calls cannot use the segments that grew in the warm-up
        if key is not None and splitter.takes(key, layout):
            return
        if self._fallback.raises:
            self._variation.restart()  # the caller may go on with batches that do not vary
        is_last = not (len(self._cache) or splitter.has_parts)
        self._fallback.give_up(layout.refuse, reason, error, is_last=is_last)

    def refuse(self, layout: Layout, problem: str) -> None:
        """Make the calls of a layout eager that were done in parts, because of this problem."""
        self._give_up(layout, "cannot be captured", CaptureError(problem))

    def warn_once(self, kind: str, message: str) -> None:
        """Warn, unless there was a warning of this kind."""
        self._fallback.warn_once(kind, message)

    def run(self, reason: str, fn: Callable[[], Any]) -> Any:
        """Return what `fn` returns, the caller's own; it is called eagerly, and counted under this reason."""
        return self._eager.run(reason, fn)

    def run_noted(self, reason: str, fn: Callable[[AbstractContextManager[Any]], Any]) -> Any:
        """The same, where only modules are captured: what is read in the context that `fn` gets is compared later on.

        The call under the preflight may have filled a cache that they read, which tells of no later call.
        """
        outputs = self._eager.run(reason, lambda: fn(self._state.noting_reads(in_parts=lambda: True)))
        self._session.settings_history.take_values()
        return outputs

    # ------------------------------------------------------------------------------------------ several calls at once

    def settings_number(self) -> int | None:
        """Return what a key has of the settings of a call that is made now. None if the call cannot be captured."""
        if self._fallback.refused or captures.recorded:
            return None
        if self._state.generation() is not self._settings_history.generation:
            self._adapt()
        return self._settings_history.number

    def find(self, steps: Steps, windows: int, *, may_capture: bool) -> Captured | None:
        """Return the graph of several calls, captured now if it must be, see `MultiStepGraphs.find`."""
        return self._multi_step.find(steps, windows, may_capture=may_capture)

    def launch(self, steps: Steps, windows: int, leaves: Sequence[Any]) -> Any:
        """Do the calls by the graph that `find` has returned, see `MultiStepGraphs.launch`."""
        return self._multi_step.launch(steps, windows, leaves, self._verified)

    def decide_together(self, steps: Steps | None, windows: int) -> Together | None:
        """Return what to do with several calls that every rank was given at once. To be called in each such call.

        They make this many windows. `steps` is None if they cannot be captured. None is returned to make the calls as
        if they had come one by one.
        """
        ranks, graphs = self._ranks, self._multi_step
        if ranks.several and (not ranks.captured or graphs.given_up or captures.recorded):
            return None
        lengths = None if steps is None else self._cache.multi_step.get(steps.key)
        has = lengths is not None and windows in lengths.graphs
        ready = steps is not None and not has and graphs.is_ready(steps)
        return ranks.decide_together(has, ready, settled=has or bool(self._fallback.refused))

    # ------------------------------------------------------------------------------------------ report and release

    def constants(self) -> HostConstants:
        """Return the values of the host that graphs hold."""
        with self._turns.lock:
            return self._state.constants()

    @property
    def captures(self) -> int:
        """How many graphs were captured."""
        return self._capture.captures + self._multi_step.captures

    @property
    def refusal(self) -> str:
        """Why every call is eager from now on, in the words of a message; "" if some may be captured."""
        return self._fallback.refused and (self._fallback.failure or self._fallback.refused)

    def counts(self) -> tuple[int, int]:
        """Return how many calls were replayed so far, one by one or several at once, and how many there were."""
        replayed = self.replays + self._multi_step.calls
        return replayed, replayed + sum(self._eager.counts.values())

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return the kernels of each graph so far. None without `annotate`."""
        return None if self._session.names is None else list(self._session.names.tables)

    def report(self, skipped: int = 0) -> Report:
        """Return the counts so far. Sync: reads the allocator, and waits for the calls that were timed to end."""
        with self._turns.lock:
            saving = self._cache.saving()
            single = [GraphReport(key.text, graph.nbytes, *graph.timing.saving()) for key, graph in self._cache]
            self._variation.follow(self.replays + self._multi_step.launches, self.captures)
            return Report(
                graphs=len(self._cache) + sum(len(lengths.graphs) for lengths in self._cache.multi_step.values()),
                captures=self.captures,
                evictions=self._capture.evictions,
                replays=self.replays,
                eager={reason: count for reason, count in self._eager.counts.items() if reason != IN_PARTS},
                in_parts=self._eager.counts[IN_PARTS],
                **self._session.splitter.fields(),
                bytes=self._cache.nbytes + self._session.splitter.nbytes,
                input_bytes=self._cache.input_bytes,
                per_graph=(*single, *self._multi_step.reports()),
                skipped=skipped,
                failure=self._fallback.failure or self._variation.text or None,
                eager_ms=saving.eager_ms,
                replay_ms=saving.replay_ms,
                saved_s=saving.seconds,
                told_since=self._told_since,
                launches=self._multi_step.launches,
                scanned=self._multi_step.windows,
                eager_optimizer=None if self._fallback.refused else self._session.optimizer.why_behind or None,
                eager_after_step=self._session.optimizer.follows_behind or None,
                verified=str(self._compared) if self._verifies else None,
                emulated=self._session.options.graph == "emulate",
                constants=self._state.constants(),
                waits=tuple(self._questions.waits()),
            )

    def close_in_turn(self) -> None:
        """Close when no other thread is in a call."""
        with self._turns.lock:
            self.close()

    def close(self) -> None:
        """Drop all graphs and give their memory back. The next call warms up and captures again."""
        self._cache.clear()
        self._layouts.clear()
        self._session.splitter.close()
        self._draws.clear()
        self._questions.clear()
        self._settings_history.forget()
        self._variation.restart()


_FOLLOWS = "{0}. after_step is called eagerly behind each graph, which has all else of the step."
_NOT_AGREED = "the ranks have not agreed to capture yet"
_BEGINS_ANEW = f"{WARM_UP} again: what could not be captured has been taken out of the graph"  # the optimizer's step
_OTHER_ANSWER = "another answer to a question than the graph was captured with"
_CHANGES = (
    "a call with another answer of the device than the one before has changed {0}, which a replay would not change "
    "back. Lines that ask about more than the input are named from now on. Keep it in a tensor on the device, or set "
    "it behind the call."
)
_NOT_CAPTURED = object()  # None may be what a function returns
_MISFITS = 4  # calls in a row that a graph does not fit, behind which it is captured anew
_MARKED = 64  # calls behind one that is to be timed: inputs may take turns
