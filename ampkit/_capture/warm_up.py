"""The eager calls before a capture: what they show of the step, and what must be known before a graph may hold it."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch.modes import modes
from .._undo import Undo
from .layouts import Layout
from .preflight import Preflight, describe
from .state import TrainingState
from .surroundings import Surroundings
from .timing import Clock
from .undeclared import Undeclared


class Run(Protocol):
    """How the engine calls eagerly."""

    def __call__(self, reason: str, fn: Callable[[], Any], context: AbstractContextManager[Any] | None = None) -> Any:
        """Return what `fn` returns, called in this context and counted under this reason."""


class WarmUp:
    """Calls a layout eagerly: first under the preflight, then, if there is time, as it is, and last as the rehearsal.

    Earlier calls, where there are more, are as they are too.

    Args:
        fn: what is called eagerly.
        captured: what a graph records: `fn`, or something that leaves the same bits.
        state: what it may change.
        surroundings: of the calls.
        device: where the inputs are.
        generators: CUDA generators beside the default one that it draws from.
        early: whether there are more than two calls, so that a second look is possible.
        watching: a context to be entered around the call under the preflight.
        declared: whether the user has declared what `fn` may change, so that nothing else may be.
        clock: for the calls that are timed.
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
        early: bool,
        watching: Callable[[], AbstractContextManager[Any]],
        declared: bool,
        clock: Clock,
    ) -> None:
        self._fn = fn
        self._captured = captured
        self._state = state
        self._surroundings = surroundings
        self._device = device
        self._generators = generators
        self._early = early
        self._watching = watching
        self._undeclared = Undeclared(state, refuses_changes=declared)
        self._clock = clock

    def __call__(
        self,
        run: Run,
        layout: Layout,
        leaves: Sequence[Any],
        phase: Hashable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        hurry: bool,
        start: Any,
    ) -> Any:
        """Do the next call of this layout.

        Args:
            run: of the engine.
            layout: a cold one.
            leaves: the tensors and constants in `args` and `kwargs`.
            phase: passed on.
            args: passed on.
            kwargs: passed on.
            hurry: whether the preflight comes as late as it can. It is slow, and where each call has another layout,
                most of them never see a second call.
            start: a mark of the clock when the call began, None if it is not to be timed.
        """
        with Undo() as undo:
            undo.note(modes())
            with nullcontext() if layout.calls else layout.writes.noted(self._state):
                if not layout.looked and layout.to_come <= (2 if hurry else 3):
                    outputs = self._look(run, layout, leaves, lambda: self._fn(phase, *args, **kwargs))
                else:
                    outputs = self._call(run, layout, phase, args, kwargs, start)
            undo.forget()
        layout.problem = self._with_undeclared(layout.problem)
        return outputs

    def _call(
        self, run: Run, layout: Layout, phase: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], start: Any
    ) -> Any:
        if layout.looked and not layout.problem and layout.to_come < 2 and not self._state.is_undecided():

            def rehearse() -> Any:
                with layout.rehearsal.rehearsing():
                    return self._captured(phase, *args, **kwargs)

            outputs = run(layout.reason, rehearse)
        else:
            outputs = run(layout.reason, lambda: self._fn(phase, *args, **kwargs))
            if start is not None and layout.calls and layout.timing.eager.wanted:
                layout.timing.eager.add(start, self._clock.now())
        layout.calls += 1  # behind it: a call that raised has shown nothing
        return outputs

    def _look(self, run: Run, layout: Layout, leaves: Sequence[Any], fn: Callable[[], Any]) -> Any:
        """Call under the preflight."""
        before = self._state.tensors().keys()
        with self._watching(), self._undeclared.watching(leaves) as observer:
            preflight = Preflight(self._device, self._generators, observer=observer)
            outputs = run(layout.reason, lambda: self._looked_at(layout, leaves, fn), preflight)
        # What is made for the first time may wait, as optimizer state does, or a mask that is kept: then look again. So
        # does a scaler that still watches what the optimizer does.
        first = layout.calls == 0 and self._early
        if observer.nested:
            layout.rehearsal.give_up("there are nested tensors, and torch cannot record operations on those")
        made = self._state.is_undecided() or self._state.tensors().keys() != before
        if preflight.findings and (first or made):
            layout.calls += first
            return outputs
        layout.problem = self._with_undeclared(describe(preflight.findings))
        layout.looked = True  # behind it, or an interrupt could hide the problem
        layout.calls += 1
        return outputs

    def _looked_at(self, layout: Layout, leaves: Sequence[Any], fn: Callable[[], Any]) -> Any:
        """Call under a dispatch mode, which in inference mode sees composite operations whole, behind autocast: there
        they compute something else. Without gradients they compute the same."""
        with layout.rehearsal.looking(), ExitStack() as stack:
            given = [*self._state.tensors().values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
            # Outside of inference mode nobody may write to what was made in it.
            if torch.is_inference_mode_enabled() and not any(map(Tensor.is_inference, given)):
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            return fn()

    def _with_undeclared(self, problem: str) -> str:
        """Return a problem, and what must be declared; take what need not be into the state."""
        if self._undeclared.adopt():
            self._surroundings.accept()
        return "\n".join(filter(None, (problem, self._undeclared.take_problem())))
