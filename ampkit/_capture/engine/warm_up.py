"""The eager calls before a capture, which show whether and how the step can be captured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch.tensors.modes import modes
from ..._torch.tensors.tensors import version
from ..._torch.tensors.tree import tensors_in, tree_unflatten
from ..._undo import Undo
from ..graph.capture_query import answering, noting_questions, seeing_capture
from ..graph.pool import growing_segments
from ..keys.inputs import flatten
from ..keys.key import Key
from ..keys.placement import own_copy
from ..preflight.draw_paths import NOTHING_DRAWN, DrawPath
from ..preflight.host_changes import HostChanges
from ..preflight.preflight import Finding, describe
from ..preflight.questions import AskedPath, answering_questions
from ..preflight.undeclared import Undeclared, gradients_of, replaced
from ..preflight.watched_call import WatchedCall
from ..state.carried import REPLACES
from ..state.snapshot import Snapshot
from ..state.state import TrainingState
from .eager_call import EagerCall, EagerCalls
from .host_draws import HostDraws
from .input_questions import InputQuestions
from .layouts import Cold, Layout, Warm
from .session import Session


class WarmUp:
    """Makes the calls of a layout's warm-up: one of them under the preflight, the last one as the rehearsal."""

    def __init__(self, session: Session, eager: EagerCalls, draws: HostDraws, questions: InputQuestions) -> None:
        self._session = session
        self._state = session.state
        self._eager = eager
        self._draws, self._questions = draws, questions
        self._undeclared = Undeclared(
            session.state, session.device, refuses_changes=session.declared, take_in=session.take_in
        )
        self._host_changes = HostChanges(session.state, session.options.may_stop)
        self._state.reads.let_stop(session.options.may_stop, some=session.options.host_writes != "name")
        # In these, the allocator can give back later what a call frees.
        self._segments = growing_segments if session.on_cuda else nullcontext

    def __call__(
        self, key: Key, layout: Layout, cold: Cold, call: EagerCall, *, preflight_left: int
    ) -> tuple[Any, DrawPath | None, AskedPath | None]:
        """Do the next call of this layout.

        `preflight_left` is how many calls before the capture the preflight comes, at most, and all other looks. They
        are slow. If each call has another layout, most layouts have only one call, which then needs none.

        Returns:
            What the function returns; what it has drawn on the host, and what it has asked the device about its input,
            if that was looked at and can be repeated.
        """
        drawn: DrawPath | None = None
        asked: AskedPath | None = None
        with Undo() as undo:
            undo.note(modes())
            is_plain = cold.calls_left > preflight_left  # there may be no other call of it: nothing is looked at
            is_one_of_many = is_plain and len(self._session.layouts) > _FEW
            if not is_one_of_many:
                self._state.renew_gradient_nodes()
            if is_plain:
                # To have segments grow is slow: torch lists all memory to tell its settings.
                with nullcontext() if is_one_of_many else self._segments():
                    outputs = self._call(layout, cold, call)
                layout.count_call(cold)
                undo.forget()
                return outputs, None, None
            # At a cut calls may take other branches, which write other tensors.
            is_known = layout.writes.known and self._questions.asked(key) is None
            noted = nullcontext() if is_known else layout.writes.noted(self._state)
            watched, averaging = self._host_changes.watching(is_first=not cold.calls), self._session.ranks.reducers
            with self._segments(), noted, watched, averaging.watching() as why_not_averaged:
                if not cold.checked:
                    seen = self._look(layout, cold, call)
                    outputs, drawn = seen.outputs, seen.drawn
                    if drawn is None and key.outcomes is not None and not seen.findings:
                        drawn = NOTHING_DRAWN  # where others of its input draw
                    asked = self._judge(key, layout, cold, call.leaves, seen)
                elif not layout.problem and cold.calls_left < 2 and not self._state.is_undecided():
                    outputs, is_seen, is_asked = self._rehearse(key, layout, call)
                    layout.count_call(cold)  # behind the call: one that raised has shown nothing
                    if not (is_seen and is_asked):
                        layout.look_again(cold, "" if is_seen else REPLACES)
                    if not is_asked:
                        self._questions.miss(key, 0)
                else:
                    outputs = self._call(layout, cold, call)
                    layout.count_call(cold)
            undo.forget()
        problem = self._with_undeclared(self._problem(layout, why_not_averaged()))
        layout.end_call(cold, self._host_changes.added_to(problem))
        if (printing := self._host_changes.take_printing()) and isinstance(layout.stage, Warm) and not layout.problem:
            self._session.fallback.warn_once("prints", printing)
        return outputs, drawn, asked

    def _problem(self, layout: Layout, unaveraged: str) -> str:
        """Return why the layout cannot be captured, with what has shown since it was last said; each reason once."""
        state, used = self._state, ""
        if state.finds_gradients and layout.rehearsal.gradients_of:
            used = gradients_of(layout.loose, state.reads, layout.rehearsal.gradients_of, state.tensors())
        written = (_WRITTEN.format(what) for what in layout.written)
        found = [unaveraged, layout.unreadable, *written, used, replaced(layout.loose)]
        first, *new = (text if text not in layout.problem else "" for text in found)
        # Before the preflight's finding: the copy for which the Reducer makes the host wait, in no line of the user's.
        return "\n".join(filter(None, (first, layout.problem, *new)))

    def _call(self, layout: Layout, cold: Cold, call: EagerCall) -> Any:
        fn = seeing_capture(self._session.fn, layout.answer.sees_capture)
        outputs = self._eager.run(layout.reason, lambda: call.to(fn))
        if call.start is not None and cold.calls >= self._session.untimed and layout.timing.eager.wanted:
            layout.timing.eager.add(call.start, self._session.clock.now())
        return outputs

    def _rehearse(self, key: Key, layout: Layout, call: EagerCall) -> tuple[Any, bool, bool]:
        """Make the call.

        Returns:
            What it returns; whether the preflight has seen each place that it has replaced; and whether its answers at
            cuts were those of the call under the preflight, behind which its code may have taken other branches.
        """
        asked, cuts = self._questions.asked(key), self._questions.begin_cuts(key)
        carried, held = self._state.carried, self._state.held_tensors()
        places = carried.places(held)

        def rehearsal() -> Any:
            # As in a capture, the batch was not made in inference mode, and code that asks gets the same answer.
            with (
                writable(call.args, call.kwargs) as (args, kwargs),
                layout.rehearsing(),
                answering(layout.answer.sees_capture),
                self._session.uploads.in_place(in_operations=layout.uploads_in_operations),
                answering_questions(asked, self._session.device, cuts.ask, cuts.differ),
            ):
                return call._replace(args=args, kwargs=kwargs).to(self._session.captured)

        # The first call may have taken other branches, where it made something that later calls find.
        with self._state.noting_reads(in_parts=lambda: False):
            outputs = self._eager.run(layout.reason, rehearsal)
        # Calls of other layouts, and of other functions with this state, come in between.
        layout.note_writes(self._state.reads.writes(layout.written_before))
        # The name counts too: neither custom operations nor tensor subclasses tell what they read.
        self._state.note_gradients(used=layout.rehearsal.uses_gradients or self._state.reads.loads("grad"))
        self._compare_what_was_read(layout)
        is_asked = asked is None or (tuple(cuts.answers) == asked.answers and not cuts.differs)
        return outputs, not carried.has_more(places, held), is_asked

    def _look(self, layout: Layout, cold: Cold, call: EagerCall) -> "_Seen":
        """Call under the preflight, and learn of the call what later ones are compared with."""
        session, state = self._session, self._state
        known, held = state.tensors().keys(), state.held_tensors()
        places, memory = state.carried.places(held), held.memory()
        raised: list[str] = []
        with session.watching(), self._undeclared.watching(call.leaves) as observer:
            watched = WatchedCall(
                session.device,
                call.leaves,
                self._questions.kept(),
                session.uploads,
                session.options.generators,
                draws=self._draws.enabled,
                asks=self._questions.enabled,
                cuts=self._questions.may_cut,
                observers=[observer],
                bitmaps=session.ranks.reducers.bitmaps,
            )
            noting_reads = state.noting_reads(in_parts=lambda: bool(watched.preflight.findings))
            with state.carried.noting_gradients(places), noting_reads:
                outputs = self._eager.run(layout.reason, partial(self._watched, layout, call, watched, raised))
                renewed = state.carried.learn(places, held, observer.has_read, session.device)
                observer.take_for_each_other(renewed)
                observer.lost = memory - state.held_tensors().memory()
        layout.note_look(watched.provenance.in_operations, self._undeclared.take_loose())
        layout.writes.note_addresses(state, observer.written)
        if takes_in := self._undeclared.take_in(observer):
            self._accept_more_state()
            layout.forget_writes()
        self._compare_what_was_read(layout)
        if renewed and not len(session.cache):
            session.settings_history.accept()
        if observer.nested:
            layout.rehearsal.give_up("there are nested tensors, and torch cannot record operations on those")
        return _Seen(
            outputs,
            watched.preflight.findings,
            None if watched.draws is None or raised else watched.draws.path,
            None if watched.preflight.findings or raised else watched.questions.asked(),
            "".join(raised),
            watched.questions.changed(),
            has_made=state.is_undecided() or state.tensors().keys() != known,
            # None was there.
            has_kept=takes_in or (not cold.calls and any(not tensors_in(was) for _, _, _, was in held.new())),
        )

    def _watched(self, layout: Layout, call: EagerCall, watched: WatchedCall, raised: list[str]) -> Any:
        """Call under the preflight. If it tries the other answer, and that does not help either, the call is undone.

        Then the call is made as in eager steps, with the first answer. So the user's code runs twice in this call.
        `raised` gets what the code has raised that got the other answer.
        """
        fn, answer, outputs = self._session.fn, layout.answer, None
        before: Snapshot | None = None
        if answer.problem_when_hidden:
            before = Snapshot(self._state, self._session.options.generators, call.leaves, on_host=True)
        noting = noting_questions(answer.sees_capture)
        looking, own_call = layout.rehearsal.looking(), _outside_of_inference_mode(call, self._state)
        try:
            with watched.preflight, noting, looking, own_call as own, watched.recording():
                outputs = own.to(fn)
        except Exception as error:  # of code that eager calls do not reach
            if before is None:
                raise
            raised.append(f"{type(error).__name__}: {error}")
        if before is not None and (raised or watched.preflight.findings):
            before.restore()
            outputs = call.to(fn)
        return outputs

    def _judge(self, key: Key, layout: Layout, cold: Cold, leaves: Sequence[Any], seen: "_Seen") -> AskedPath | None:
        """Say what follows a call under the preflight: another one, or the rehearsal, or that there is a problem.

        A call that makes state for the first time (of an optimizer, or a mask that is kept) may wait where later ones
        do not, and so may a scaler that still watches what the optimizer does. Then the preflight is repeated, if the
        warm-up is long enough. So it is where the call has kept a tensor that later calls may read.

        Returns:
            What the call has asked, None if it may have asked about what it has made for later calls.
        """
        state, answer, asked = self._state, layout.answer, seen.asked
        is_first = cold.calls == 0 and self._session.warmup > 2
        if asked is not None and (seen.has_made or seen.has_kept or self._questions.leave_out(seen.changed)):
            layout.ask_again(cold)
            return None
        if seen.has_kept or (seen.findings and (is_first or seen.has_made)):
            if is_first or seen.has_kept:
                layout.count_call(cold)
            return asked
        if not self._questions.is_confirmed(key, asked, leaves, state.reads.written.keys()):
            layout.ask_again(cold)
            return asked
        problem = describe(seen.findings)
        has_tried_other = bool(answer.problem_when_hidden)
        if problem and not state.problem and answer.try_other(problem):
            layout.count_call(cold)  # another look, with the other answer
            return asked
        if has_tried_other:
            problem = answer.keep(problem or seen.raised)
        problem = "\n".join(filter(None, (state.problem, problem)))
        layout.note_preflight(cold, self._with_undeclared(problem))
        layout.count_call(cold)
        return asked

    def _compare_what_was_read(self, layout: Layout) -> None:
        """Compare what the call just made has read with what it is in the next calls."""
        layout.note_reads(self._state.reads.take_problem(), self._state.reads.written.keys())
        if self._state.reads.take_widened():
            self._session.cache.clear()  # what the graphs take for granted is compared no longer
        self._undeclared.take_without_tensors(self._state.reads.modules())
        self._session.settings_history.take_values()

    def _accept_more_state(self) -> None:
        """Drop the graphs, which know less of the state than is compared from now on: neither rates nor gradients."""
        self._session.cache.clear()
        self._session.settings_history.accept()

    def _with_undeclared(self, problem: str) -> str:
        """Return a problem, with what the user must declare. Take what need not be declared into the state."""
        if self._undeclared.adopt():
            self._accept_more_state()
        return "\n".join(filter(None, (problem, self._undeclared.take_problem())))


class _Seen(NamedTuple):
    """What a call under the preflight has shown."""

    outputs: Any
    findings: list[Finding]
    drawn: DrawPath | None  # what it has drawn on the host
    asked: AskedPath | None  # what it has asked the device about its input; None too if there are findings
    raised: str  # what the code has raised that got the other answer, "" if it has not
    changed: set[str]  # the paths of the state that it has asked about, and has changed then
    has_made: bool  # whether it has made state, or some of it is still undecided
    has_kept: bool  # whether it is the first call, and has left a tensor where there was none; or has widened the state


_FEW = 2  # layouts; more may be one in each call
_WRITTEN = (
    "{0} is changed by each call, which a replay would not do. Count in a tensor on the device, return what is to be "
    "kept in aux, or change it behind the call. Pass host_writes='ignore' if it may stop."
)


@contextmanager
def _outside_of_inference_mode(call: EagerCall, state: TrainingState) -> Iterator[EagerCall]:
    """Context with `no_grad` in place of inference mode, if the call is in that. It yields the call to be made.

    In inference mode a dispatch mode gets composite operations as one, and they then compute something else than
    without it: autocast does not reach their parts. Under `no_grad` they compute the same as in inference mode.
    """
    # A tensor made in inference mode may not be written to outside of it.
    if not torch.is_inference_mode_enabled() or any(map(Tensor.is_inference, state.tensors().values())):
        yield call
        return
    with writable(call.args, call.kwargs) as (args, kwargs), torch.inference_mode(False), torch.no_grad():
        yield call._replace(args=args, kwargs=kwargs)


@contextmanager
def writable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context that yields the same arguments with copies in place of tensors that were made in inference mode.

    A copy may be written to outside of inference mode. What was written is copied back at the end.
    """
    leaves, tree = flatten(args, kwargs)
    copies = {i: own_copy(leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_inference()}
    before = {i: version(copy) for i, copy in copies.items()}
    yield tree_unflatten([copies.get(i, leaf) for i, leaf in enumerate(leaves)], tree)
    for i, copy in copies.items():
        if version(copy) != before[i]:
            leaves[i].copy_(copy)
