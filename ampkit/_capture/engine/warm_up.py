"""The eager calls before a capture, which show whether and how the step can be captured."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._torch.tensors.modes import modes
from ..._torch.tensors.tensors import version
from ..._torch.tensors.tree import tree_unflatten
from ..._undo import Undo
from ..graph.capture_query import answered, answering, noting_questions
from ..graph.timing import Clock
from ..keys.inputs import flatten
from ..keys.placement import own_copy
from ..preflight.draw_record import DrawRecorder
from ..preflight.host_changes import HostChanges
from ..preflight.preflight import Preflight, describe
from ..preflight.undeclared import Undeclared
from ..state.snapshot import Snapshot
from ..state.state import TrainingState
from ..state.surroundings import Surroundings
from .host_draws import HostDraws
from .layouts import Layout


class CallEagerly(Protocol):
    """`Engine.run`."""

    def __call__(self, reason: str, fn: Callable[[], Any], context: AbstractContextManager[Any] | None = None) -> Any:
        """Return what `fn` returns, called in this context and counted under this reason."""


class WarmUp:
    """Makes the calls of a layout's warm-up: one of them under the preflight, the last one as the rehearsal.

    Args:
        fn: what is called eagerly.
        captured: what a graph records: `fn`, or something that leaves the same bits.
        state: what `fn` may change.
        surroundings: the settings of the calls.
        device: where the inputs are.
        generators: CUDA generators beside the default one that `fn` draws from.
        can_repeat: whether a warm-up has more than two calls, so that the preflight can be repeated.
        watching: returns a context for the call under the preflight.
        declared: whether the user has declared what `fn` may change, so that it may change nothing else.
        clock: times some of the calls.
        may_tell: whether code that asks may be told that it is being captured, if its other branch cannot be.
        untimed: how many calls of a layout are slower than later ones, and are not timed.
        draws: what is known of the draws on the host.
        segments: returns a context for all calls, in which the allocator can give back later what they free.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        captured: Callable[..., Any],
        state: TrainingState,
        surroundings: Surroundings,
        *,
        device: torch.device,
        generators: Sequence[torch.Generator],
        can_repeat: bool,
        watching: Callable[[], AbstractContextManager[Any]],
        declared: bool,
        clock: Clock,
        may_tell: bool,
        untimed: int,
        draws: HostDraws,
        segments: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._fn = fn
        self._captured = captured
        self._state = state
        self._surroundings = surroundings
        self._device = device
        self._generators = generators
        self._can_repeat = can_repeat
        self._watching = watching
        self._undeclared = Undeclared(state, device, refuses_changes=declared)
        self._host_changes = HostChanges(state)
        self._clock = clock
        self._may_tell = may_tell
        self._untimed = untimed
        self._draws = draws
        self._segments = segments

    def __call__(
        self,
        run: CallEagerly,
        layout: Layout,
        leaves: Sequence[Any],
        phase: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preflight_left: int,
        start: Any,
    ) -> Any:
        """Do the next call of this layout.

        Args:
            run: `Engine.run`.
            layout: a cold one.
            leaves: the tensors and constants in `args` and `kwargs`.
            phase: the first argument of `fn`.
            args: its other arguments.
            kwargs: its keyword arguments.
            preflight_left: how many calls before the capture the preflight comes, at most. It is slow. If each call has
                another layout, most layouts have only one call, which then needs none.
            start: the clock's mark of when the call began; None if it is not to be timed.
        """
        with Undo() as undo:
            undo.note(modes())
            noted = nullcontext() if layout.calls else layout.writes.noted(self._state)
            with self._segments(), noted, self._host_changes.watching(is_first=not layout.calls):
                if not layout.checked and layout.calls_left <= preflight_left:
                    outputs = self._call_under_preflight(run, layout, leaves, partial(self._fn, phase), args, kwargs)
                else:
                    outputs = self._call(run, layout, phase, args, kwargs, start)
            undo.forget()
        problem = "\n".join(filter(None, (layout.problem, layout.unreadable)))
        layout.problem = self._host_changes.added_to(self._with_undeclared(problem))
        return outputs

    def _call(
        self,
        run: CallEagerly,
        layout: Layout,
        phase: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        start: Any,
    ) -> Any:
        if layout.checked and not layout.problem and layout.calls_left < 2 and not self._state.is_undecided():

            def rehearse() -> Any:
                with layout.rehearsing(), answering(layout.told):  # as a capture answers
                    return self._captured(phase, *args, **kwargs)

            # The first call may have taken other branches, where it made something that later calls find.
            with self._state.noting_reads(in_parts=lambda: False):
                outputs = run(layout.reason, rehearse)
            self._compare_what_was_read(layout)
        else:
            fn = answered(self._fn, layout.told)
            outputs = run(layout.reason, lambda: fn(phase, *args, **kwargs))
            if start is not None and layout.calls >= self._untimed and layout.timing.eager.wanted:
                layout.timing.eager.add(start, self._clock.now())
        layout.calls += 1  # last: a call that raised has shown nothing
        return outputs

    def _call_under_preflight(
        self,
        run: CallEagerly,
        layout: Layout,
        leaves: Sequence[Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        def fn() -> Any:
            return function(*args, **kwargs)

        before = self._state.tensors().keys()
        asked = False

        def call() -> Any:
            nonlocal asked
            with noting_questions(layout.told) as has_asked:
                outputs = self._call_for_preflight(layout, function, args, kwargs)
            asked = has_asked()
            return outputs

        with self._watching(), self._undeclared.watching(leaves) as observer:
            draws = DrawRecorder(self._device) if self._draws.enabled else None
            preflight = Preflight(self._device, self._generators, observer=observer, draws=draws)
            with self._state.noting_reads(in_parts=lambda: bool(preflight.findings)):
                outputs = run(layout.reason, lambda: self._looked(layout, leaves, preflight, call, fn))
            layout.path = None if draws is None else draws.path
        self._compare_what_was_read(layout)
        # A call that makes state for the first time (of an optimizer, or a mask that is kept) may wait where
        # later ones do not, and so may a scaler that still watches what the optimizer does. Then the preflight is
        # repeated.
        first = layout.calls == 0 and self._can_repeat
        if observer.nested:
            layout.rehearsal.give_up("there are nested tensors, and torch cannot record operations on those")
        made = self._state.is_undecided() or self._state.tensors().keys() != before
        if preflight.findings and (first or made):
            layout.calls += first
            return outputs
        problem = describe(preflight.findings)
        may_tell = self._may_tell and not self._state.problem
        if problem and asked and may_tell and not layout.problem_untold:
            layout.problem_untold, layout.told = problem, True  # another look, at the other branch
            layout.calls += 1
            return outputs
        if problem and layout.problem_untold:  # neither branch can be captured
            problem, layout.told = layout.problem_untold, False
        layout.problem = self._with_undeclared("\n".join(filter(None, (self._state.problem, problem))))
        layout.checked = True  # after the line above, or an interrupt could hide the problem
        layout.calls += 1
        return outputs

    def _compare_what_was_read(self, layout: Layout) -> None:
        """Compare what the call just made has read with what it is in the next calls."""
        layout.unreadable = layout.unreadable or self._state.variables.take_problem()
        self._undeclared.take_without_tensors(self._state.variables.modules())
        self._surroundings.take_values()

    def _looked(
        self,
        layout: Layout,
        leaves: Sequence[Any],
        preflight: Preflight,
        call: Callable[[], Any],
        fn: Callable[[], Any],
    ) -> Any:
        """Call under the preflight. If the call takes the other branch, and that cannot be captured, undo it.

        Then `fn` is called as in eager steps, which take the first branch. The user's code runs twice in this call.
        """
        if not layout.problem_untold:
            with preflight:
                return call()
        before = Snapshot(self._state, self._generators, leaves, on_host=True)
        with preflight:
            outputs = call()
        if preflight.findings:
            before.restore()
            layout.told = False
            outputs = fn()
        return outputs

    def _call_for_preflight(
        self, layout: Layout, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call with `no_grad` in place of inference mode, if the call is in that.

        In inference mode a dispatch mode gets composite operations as one, and they then compute something else than
        without it: autocast does not reach their parts. Under `no_grad` they compute the same as in inference mode.
        """
        with layout.rehearsal.looking(), ExitStack() as stack:
            # A tensor made in inference mode may not be written to outside of it.
            if torch.is_inference_mode_enabled() and not any(map(Tensor.is_inference, self._state.tensors().values())):
                args, kwargs = stack.enter_context(writable(args, kwargs))
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            return function(*args, **kwargs)

    def _with_undeclared(self, problem: str) -> str:
        """Return a problem, with what the user must declare. Take what need not be declared into the state."""
        if self._undeclared.adopt():
            self._surroundings.accept()
        return "\n".join(filter(None, (problem, self._undeclared.take_problem())))


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
