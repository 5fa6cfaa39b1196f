"""One call of a captured function: same input? warm-up, preflight, capture, replay, or eager; and the count of each."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._errors import CaptureError, CaptureWarning, InputMismatch
from .._torch.modes import modes
from .._torch.settings import settle_attention_priority
from .._torch.tensors import version
from .._torch.tree import tree_flatten, tree_unflatten
from .._undo import Undo
from .._user_line import users_level
from .cache import Cache, Captured
from .capture_query import captures
from .graph import capture_stream
from .inputs import StaticInputs, read_batch
from .layouts import MAX_LAYOUTS, WARM_UP, Layout, Layouts, Stage
from .options import Options
from .overlaps import keep_apart
from .pool import no_recompile
from .ranks import Ranks
from .report import GraphReport, Report
from .state import TrainingState
from .surroundings import Surroundings
from .timing import Clock
from .turns import Turn, turns_on
from .variation import Key, Variation
from .verify import Verdict, verified
from .warm_up import WarmUp


class StepDoneError(CaptureError):
    """What the graph computes is wrong. The step was done all the same.

    Attributes:
        outputs: of the step.
    """

    def __init__(self, text: str, outputs: Any) -> None:
        super().__init__(text)
        self.outputs = outputs


class Engine:
    """Calls `fn(phase, *args, **kwargs)`, first eagerly, then by replaying a graph of it.

    A key is the layout of the input, the phase, and the settings of the state (`Settings`). After `warmup` eager calls
    of a key, one of them under the preflight and the last as the rehearsal of the capture, its next call is captured
    and from then on replayed. Graphs of all keys share one pool. If memory of the state was replaced (see
    `Generation`), they are all dropped.

    Args:
        fn: function of tensors that changes only `state`; returns a tree of tensors and constants, which are the same
            in every call of a key.
        state: what it may change.
        device: where the inputs must be.
        options: see `Options`.
        ranks: the processes that must decide alike.
        blocker: why `fn` cannot be captured, if that is known already; else "".
        name: what messages call it.
        captured: what a graph records: `fn`, or something that leaves the same bits.
        watching: a context to be entered around the call of `fn` that precedes a capture.
        declared: whether the user has declared what `fn` may change, so that nothing else may be.
        one_argument: whether every call has one argument, the batch.

    Attributes:
        turn: in which the engine, and whatever belongs to the same call of the user's, is to be called.
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
        watching: Callable[[], AbstractContextManager[Any]] = nullcontext,
        declared: bool = False,
        one_argument: bool = False,
    ) -> None:
        if options.verify and ranks.wrappers:
            raise NotImplementedError(
                f"{name}(verify): ranks that compare and repeat steps on their own would wait for each other for ever. "
                "Verify with one process, without DistributedDataParallel."
            )
        self._fn = fn
        self._captured = captured or fn
        self._state = state
        self._device = device
        self._options = options
        self._ranks = ranks
        self._name = name
        real = options.graph == "auto" and device.type == "cuda"
        self._stream = capture_stream(device) if real else None
        if real:
            settle_attention_priority(device)  # a part of the settings that each graph belongs to
        self._turns = turns_on(device)
        self.turn = Turn(self._turns, name)
        # Two at least: one under the preflight, and the rehearsal.
        self._warmup = max(2, options.warmup, ranks.warmup if real else 0)
        self._lenient = device.type == "cpu"
        self._clock = Clock(device if real else None)
        self._marks = 0  # how many calls to come are marked where they start
        self._refused = "graph='off'" if options.graph == "off" else ""
        self._failure: str | None = None
        self._warned: set[str] = set()
        self._cache = Cache(options.max_graphs, options.memory_budget)
        self._layouts = Layouts(self._warmup, self._lenient)
        self._surroundings = Surroundings(state)
        self._variation = Variation(device, self._warmup, one_argument)
        self._warm_up_call = WarmUp(
            fn,
            self._captured,
            state,
            self._surroundings,
            device=device,
            generators=options.generators,
            early=self._warmup > 2,
            watching=watching,
            declared=declared,
            clock=self._clock,
        )
        self._eager: Counter[str] = Counter()
        self._unverified = options.verify
        self.captures = 0
        self.evictions = 0
        self.replays = 0
        if options.graph == "auto" and device.type != "cuda":
            blocker = f"the model is on {device}, and CUDA graphs need a CUDA device."
        blocker = blocker or _why_not_scripted(state)
        if blocker and options.graph != "off":
            self._refuse(blocker)

    def _refuse(self, reason: str) -> None:
        """Never capture, for this reason: warn once and stay eager, or raise if the user asked for that."""
        if self._options.on_failure == "raise":
            raise CaptureError(f"{self._name}: {reason}")
        self._refused = self._failure = reason
        self._warn(f"{reason} Training goes on eagerly; graph='off' says so without a warning.")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Hashable = None) -> Any:
        """Return what `fn` returns, in tensors of its own. To be called in this engine's `turn`."""
        start = self._mark() if self._marks else None
        spec, leaves = read_batch(args, kwargs, self._device)
        if self._refused or captures.recorded:
            return self._call_without_key(phase, args, kwargs)
        if self._state.generation() is not self._surroundings.generation:
            self._adapt()
        key = Key(spec, phase, self._surroundings.number)
        captured = self._cache.get(key)
        if captured is not None:
            if self._ranks.wrappers:
                start = self._vote_before_replay(start)
            self.replays += 1
            captured.timing.replays += 1
            if self._unverified or captured.timing.replay.wanted:
                return self._watched_replay(captured, phase, leaves, start)
            return captured.replay(leaves)
        layout, all_want = self._layout(key), False
        stage = layout.stage
        problem = layout.problem if stage is Stage.WARM else self._note(key, layout)
        all_want, all_can = self._ranks.decide(stage is Stage.WARM, not problem, settled=False)
        if not all_can and stage is not Stage.REFUSED:
            self._give_up(layout, "cannot be captured", CaptureError(problem or self._ranks.other_found))
            stage = Stage.REFUSED
        if stage is Stage.COLD:
            start = self._clock.now() if start is not None and self._ranks.wrappers else start  # behind the vote
            return self._warm_up(layout, leaves, phase, args, kwargs, start)
        if stage is Stage.WARM and all_want:
            outputs = self._capture_and_replay(key, layout, leaves)
            if outputs is not _NOT_CAPTURED:
                return outputs
        reason = self._refused or layout.refusal or "the ranks have not agreed to capture yet"
        return self.run(reason, lambda: self._fn(phase, *args, **kwargs))

    def _call_without_key(self, phase: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call eagerly, for nothing will be captured here."""
        if not self._refused:  # what it would launch can be no part of the other's graph
            return self.run("within the capture of another", lambda: self._fn(phase, *args, **kwargs))
        if self._options.graph != "off":
            self._ranks.decide(wants=False, can=True, settled=True)
        return self.run(self._refused, lambda: self._fn(phase, *args, **kwargs))

    def _vote_before_replay(self, start: Any) -> Any:
        """Vote as all other ranks do in this call. Return its start anew, for a vote waits for the device."""
        _, all_can = self._ranks.decide(wants=False, can=True, settled=True)
        if not all_can and self._options.on_failure == "raise":  # or the rank that raises would be waited for
            raise CaptureError(f"{self._name}: {self._ranks.other_found}")
        return None if start is None else self._clock.now()

    def _warm_up(
        self,
        layout: Layout,
        leaves: list[Any],
        phase: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        start: Any,
    ) -> Any:
        self._marks = _MARKS
        hurry = len(self._layouts) > _LOOKED_AT_FIRST
        return self._warm_up_call(self.run, layout, leaves, phase, args, kwargs, hurry=hurry, start=start)

    def _capture_and_replay(self, key: Key, layout: Layout, leaves: list[Any]) -> Any:
        """Capture for this key, replay the graph and compare it. Return the outputs, or `_NOT_CAPTURED`."""
        with Undo() as undo:
            undo.note(self._cache.drop, key)  # a graph that has not been compared must not serve
            undo.note(modes())
            captured = self._capture(key, layout, leaves)
            if captured is None:
                return _NOT_CAPTURED
            try:
                self.replays += 1
                captured.timing.replays += 1
                outputs = self._watched_replay(captured, key.phase, leaves, None)
            except InputMismatch:
                undo.forget()  # it is this batch that does not fit
                raise
            if not self._refused:
                self._compare(key, layout, outputs)
            undo.forget()
        return outputs

    def _watched_replay(self, captured: Captured, phase: Hashable, leaves: list[Any], start: Any) -> Any:
        """Replay, compared with an eager call, or timed if the call has a start: one that captures has none."""
        if self._unverified:
            return self._verified(captured, phase, leaves)
        outputs = captured.replay(leaves)
        if start is not None:
            captured.timing.replay.add(start, self._clock.now())
        if captured.timing.replay.wanted:
            self._marks = _MARKS
        return outputs

    def _mark(self) -> Any:
        """Return a mark of this moment, for a call that may be timed."""
        self._marks -= 1
        return self._clock.now()

    def run(self, reason: str, fn: Callable[[], Any], around: AbstractContextManager[Any] | None = None) -> Any:
        """Return what `fn` returns, called eagerly and counted under this reason."""
        self._eager[reason] += 1
        self._state.refresh_rates()
        return self._on_stream(fn, nullcontext() if around is None else around)

    def _on_stream(self, fn: Callable[[], Any], around: AbstractContextManager[Any]) -> Any:
        with Undo() as undo:
            undo.note(modes())
            outputs = self._aside(fn, around)
            undo.forget()
        return outputs

    def _aside(self, fn: Callable[[], Any], around: AbstractContextManager[Any]) -> Any:
        if self._stream is None:
            with around:
                return _copied(fn())
        # The same stream for warm-up, capture and stragglers: what autograd and cuBLAS keep per stream exists once.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream), around:
                return _copied(fn())
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def report(self, skipped: int = 0) -> Report:
        """Return the counts so far. Sync: reads the allocator, and waits for the calls that were timed to end."""
        with self._turns.lock:
            return self._report(skipped)

    def _report(self, skipped: int) -> Report:
        saving = self._cache.saving()
        self._variation.follow(self.replays, self.captures)
        return Report(
            graphs=len(self._cache),
            captures=self.captures,
            evictions=self.evictions,
            replays=self.replays,
            eager=dict(self._eager),
            bytes=self._cache.nbytes,
            per_graph=tuple(
                GraphReport(str(key.spec), captured.nbytes, *captured.timing.saving()) for key, captured in self._cache
            ),
            skipped=skipped,
            failure=self._failure or self._variation.text or None,
            eager_ms=saving.eager_ms,
            replay_ms=saving.replay_ms,
            saved_s=saving.seconds,
        )

    def close_in_turn(self) -> None:
        """Close when no other thread is in a call."""
        with self._turns.lock:
            self.close()

    def close(self) -> None:
        """Drop all graphs and give their memory back. The next call warms up and captures again."""
        self._cache.clear()
        self._layouts.clear()
        self._surroundings.forget()
        self._variation.restart()

    # ------------------------------------------------------------------------------------------------------- the key

    def _adapt(self) -> None:
        """Look at what has changed around the call. Drop graphs that are outdated, and say once what a change costs."""
        change = self._surroundings.observe()
        if change is None:
            return
        if change.outdates:
            self._cache.clear()
            self._layouts.clear()
        self._layouts.reason = f"{WARM_UP} again: {change.reason}"
        text = f"{change.text}. Each such change takes {self._warmup} eager steps and a new capture."
        if self._warn_once("changes", " ".join([text, *dict.fromkeys(change.advice.values())])):
            self._variation.follow(self.replays, self.captures)
            self._variation.say(change.advice)

    def _layout(self, key: Key) -> Layout:
        if len(self._layouts) == MAX_LAYOUTS and key not in self._layouts and "variation" not in self._warned:
            around = self._surroundings.around
            self._warn_once("variation", self._variation.text_of([(known, around) for known in self._layouts]))
        return self._layouts.of(key)

    def _note(self, key: Key, layout: Layout) -> str:
        """Take note that there is no graph for this call. Return why the ranks must give up, "" if there is no reason.

        Without `on_failure="raise"` they go on: capture works as soon as nothing varies any more.
        """
        if layout.refusal:
            return ""
        self._variation.follow(self.replays, self.captures)
        kept = min(self._cache.limit, MAX_LAYOUTS)
        cause = self._variation.note(key, self._surroundings.around, self.captures, kept)
        if cause is None:
            return ""
        if self._options.on_failure == "raise":
            return self._variation.text
        layout.reason = f"{WARM_UP}: {cause.reason}"
        if not self._variation.is_said:
            self._warn_once("variation", f"{self._variation.text} Until that stops, such calls are eager.")
        return ""

    # ---------------------------------------------------------------------------------------------- warm-up, capture

    def _capture(self, key: Key, layout: Layout, leaves: list[Any]) -> Captured | None:
        """Capture for this key; on failure leave everything as before the call and return None, or raise."""
        if layout.evictions and "variation" not in self._warned:  # which has said more
            self._warn_once(
                "evictions",
                f"a graph that was dropped to make room for others is captured again ({key.spec}). Raise max_graphs "
                "or memory_budget, or pad to fewer shapes with ampkit.Buckets.",
            )
        self._evicted(self._cache.make_room())
        inputs = StaticInputs(key.spec, leaves)
        graph = self._cache.new_graph(self._stream, self._options.generators)
        before, pool_bytes = self._state.tensors(), self._cache.pool_bytes
        failure: CaptureError | None = None
        # An emulated graph keeps what it is given: with self in it, a cycle would keep the graphs alive.
        fn = self._captured

        def recorded() -> Any:
            versions = inputs.versions()
            outputs = fn(key.phase, *inputs.args, **inputs.kwargs)
            inputs.note_changes(versions)
            return outputs

        with Undo() as undo:
            undo.note(self._state.rebind, before)
            undo.note(graph.reset)
            try:
                with no_recompile():
                    graph.capture(recorded, layout.rehearsal.capturing)
                _refuse_rebound(self._state.rebound_since(before))
            except CaptureError as error:
                failure = error
            agreed = self._ranks.agree(failure is None)
            if agreed:
                undo.forget()
        if not agreed:
            self._give_up(layout, "capture failed", failure or CaptureError(self._ranks.other_failed))
            return None
        if self._stream is not None:
            self._ranks.close_before_end(self)
        self.captures += 1
        keep_apart(inputs, self._state, layout.writes.paths())
        captured = self._cache.add(key, graph, inputs, pool_bytes, layout.timing)
        fits = self._ranks.agree(not self._cache.over_budget())
        return captured if fits else self._within_budget(key, layout, leaves)

    def _compare(self, key: Key, layout: Layout, outputs: Any) -> None:
        """Compare what was just captured, and replayed once, with the rehearsal; give it up if it differs.

        Behind the replay: whatever the host chose for this call is what the graph has. To call the user's code again
        would make the host choose again. A difference gets a second chance, for a thread of the user's may have had
        autograd's threads at the same time; not where ranks would disagree on that.
        """
        difference = layout.rehearsal.difference()
        if self._lenient and self._ranks.wrappers:
            return  # on a CPU, DistributedDataParallel does its part when gloo's threads are done with theirs
        if difference is None and not self._ranks.wrappers:  # not seen: once more, behind another rehearsal
            self._cache.drop(key)
            return
        if reason := layout.rehearsal.unseen:
            self._warn_once("unseen", f"the capture cannot be compared with an eager call: {reason}.")
        if self._ranks.agree(not difference):
            return
        self._cache.drop(key)
        if difference and not layout.differed and not self._ranks.wrappers:
            layout.differed = True
            return
        failure = _difference_error(difference) if difference else CaptureError(self._ranks.other_failed)
        if self._options.on_failure == "raise":
            raise StepDoneError(f"{self._name}: {failure} This step was done, as eager computes it.", outputs)
        self._give_up(layout, "capture failed", failure)

    def _within_budget(self, key: Key, layout: Layout, leaves: list[Any]) -> Captured | None:
        """Capture again into a pool that fewer graphs share; give this key up if its graph alone is too large."""
        budget = self._options.memory_budget
        assert budget is not None  # or nothing would be over it
        if len(self._cache) > 1 and not self._ranks.wrappers:
            limit = self._cache.limit
            self._cache.limit = len(self._cache) - 1
            self.evictions += len(self._cache) - 1  # they are warm, and captured again at their next call
            self._cache.clear()
            captured = self._capture(key, layout, leaves)
            if captured is None:
                self._cache.limit = limit
            return captured
        layout.refusal = f"its graph takes {self._cache.nbytes} bytes, memory_budget is {budget}"
        self._cache.clear()
        self._warn_once("budget", f"{key.spec}: {layout.refusal}. Training goes on eagerly.")
        return None

    def _evicted(self, keys: Sequence[Hashable]) -> None:
        self.evictions += len(keys)
        for key in keys:
            assert isinstance(key, Key)  # what _capture adds
            self._layout(key).evict()

    def _give_up(self, layout: Layout, reason: str, error: CaptureError) -> None:
        if self._options.on_failure == "raise":
            self._variation.restart()  # the caller may go on with batches that do not vary
            raise CaptureError(f"{self._name}: {error}") from error
        self._failure = str(error)
        layout.refusal = reason
        if not len(self._cache):
            self._refused = layout.refusal
        self._warn_once(self._failure, f"{error} Training goes on eagerly.")

    # ---------------------------------------------------------------------------------------------------- verification

    def _verified(self, captured: Captured, phase: Hashable, leaves: list[Any]) -> Any:
        captured.inputs.refuse_shared(leaves)  # of which the graph will be given copies
        given = _with_versions(leaves)
        last: list[Any] = []

        def eager() -> Any:
            last[:] = _with_versions(given)
            args, kwargs = tree_unflatten([*last], captured.inputs.spec.tree)
            return self._fn(phase, *args, **kwargs)

        def replay() -> Any:
            return captured.replay([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given])

        verdict: Verdict = self._on_stream(
            lambda: verified(replay, eager, self._state, self._options.generators), nullcontext()
        )
        self._unverified -= 1
        for leaf, used in zip(leaves, last, strict=True):
            if isinstance(leaf, Tensor) and version(used):  # changed in place
                leaf.copy_(used)
        if verdict.noise:
            self._warn_once("noise", f"verify: {verdict.noise}")
        if verdict.problem:
            self.close()
            self._refused = self._failure = f"verify: {verdict.problem}"
            if self._options.on_failure == "raise":
                text = f"{self._name}: {self._failure} This step was done, as eager computes it."
                raise StepDoneError(text, verdict.outputs)
            self._warn(f"{self._failure} Training goes on eagerly.")
        return verdict.outputs

    # -------------------------------------------------------------------------------------------------------- messages

    def _warn_once(self, kind: str, message: str) -> bool:
        """Warn unless there was a warning of this kind; return whether there was none."""
        if kind in self._warned:
            return False
        self._warned.add(kind)
        self._warn(message)
        return True

    def _warn(self, message: str) -> None:
        warnings.warn(f"{self._name}: {message}", CaptureWarning, stacklevel=users_level())


_NOT_CAPTURED = object()  # None may be what a function returns
_LOOKED_AT_FIRST = 8  # layouts; more come from inputs that vary
_MARKS = 64  # after a call that is to be timed: inputs may take turns


def _refuse_rebound(paths: list[str]) -> None:
    if paths:
        raise CaptureError(
            f"{', '.join(paths[:3])}: made or rebound in the step; a replay would neither read nor keep the new "
            "value. Change tensors in place (copy_, add_), and make them before the step."
        )


def _difference_error(difference: str) -> CaptureError:
    return CaptureError(
        f"{difference}. A graph would repeat what it recorded, but this depends on more than the batch and the "
        "declared state. Pass a value that changes as a tensor, or keep it in a buffer that the step changes."
    )


def _why_not_scripted(state: TrainingState) -> str:
    for root, top in state.modules.items():
        for name, module in top.named_modules(prefix=root):
            if isinstance(module, torch.jit.ScriptModule):
                return f"{name} is a torch.jit.ScriptModule, which hides its tensors' places. Pass the module itself."
    return ""


def _with_versions(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves, tensors as copies which count the changes in place: in inference mode, new ones do not."""
    with torch.inference_mode(False), torch.no_grad():
        return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _copied(tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
