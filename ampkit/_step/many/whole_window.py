"""All micro-batches of an optimizer step per call: one graph of the whole window, or its calls one by one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..._batches.padding import Padding
from ..._capture.engine.engine import Engine
from ..._capture.engine.fallback import StepDoneError
from ..._capture.engine.multi_step import Noting, Steps
from ..._capture.keys.inputs import flatten
from ..._capture.keys.key import Key
from ..._capture.ranks.ranks import Together
from ..._errors import AmpkitError
from ..._undo import Undo, replace
from ..training_step import PartOfStep, Phase, StepOutput, TrainingStep
from ..window import Place
from .slices import Slices, micro_batches
from .stack import Stack, Words, losses_and_aux

WORDS = Words("window", "micro-batch", "micro-batches")
SHORT = "flush of a short window"
_ONE = range(1, 2)  # how many windows a graph may do


@dataclass(frozen=True, eq=False)
class WholeWindow:
    """Does the calls of a window that it is given as a stack, each micro-batch padded, if the step pads."""

    _engine: Engine
    _step: TrainingStep
    _slices: Slices
    _padding: Padding | None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepOutput:
        """Do the micro-batches of a stack and the optimizer step behind them; return the outputs as one."""
        window, size = self._slices.window, self._slices.size
        if done := window.count:
            raise AmpkitError(
                f"window: {done} of {size} micro-batches of an optimizer step were given to step(...) already. Give it "
                f"the other {size - done}, or call step.flush(), before step.window(...)."
            )
        pad = None if self._padding is None else self._padding.stack
        stack = Stack(args, kwargs, self._step.device, WORDS, pad)
        if stack.count > size:
            raise ValueError(
                f"window: {stack.shown}, which is for {stack.count} micro-batches, but an optimizer step has "
                f"accumulate={size}. Pass at most {size}, make the step with accumulate={stack.count}, or "
                "call step.scan, which does several optimizer steps."
            )
        window.refuse_stopped(stack.count)
        with Undo() as asking, Undo() as undo:
            replace(asking, window, "asks", False)  # a part of a window would be done
            undo.note(window.drop)  # an error or an interrupt ends the window
            eager = self._padding is not None and bool(self._padding.why_eager)  # on all ranks
            whole = stack.count == size > 1 and not eager
            out = self._launched(stack) if whole else self._one_by_one(stack)
            undo.forget()
        return out

    def _one_by_one(self, stack: Stack) -> StepOutput:
        """Do the micro-batches in a call each, and flush the window if it is short."""
        outs: list[StepOutput] = []
        failure: StepDoneError | None = None
        for i in range(stack.count):
            try:
                outs.append(self._slices.call(stack, i))
            except StepDoneError as error:
                failure = error  # this micro-batch was done; so are the others
            except Exception as error:
                if i and hasattr(error, "add_note"):  # since Python 3.11
                    error.add_note(f"window: its first {i} of {stack.count} micro-batches were done, and are dropped.")
                raise
        flushed = self._slices.window.flush(SHORT)
        if failure is not None:
            raise failure
        norm, skipped = (outs[-1].grad_norm, outs[-1].skipped) if flushed is None else flushed
        return StepOutput(*losses_and_aux(outs, WORDS), norm, skipped)

    def _launched(self, stack: Stack) -> StepOutput:
        """Do a whole window by one launch, or one by one if there is no graph."""
        self._step.gather()
        window, size = self._slices.window, self._slices.size
        number, observed = self._engine.settings_number(), window.observes()
        phases: tuple[Phase, ...] | None = self._slices.phases(stack.spec, observed)
        if self._step.after_every > 1:  # steps with and without `after_step` are made call by call
            phases = None
        steps: Steps | None = None  # it cannot be captured, or its phases are not known
        if number is not None and phases is not None:
            steps = Steps(
                # The name keeps its graphs apart from those of a scan, which read the learning rate elsewhere.
                key=Key(stack.spec_of(size), (WORDS.method, *phases), number),
                singles=[Key(stack.spec, phase, number) for phase in phases],
                lengths=_ONE,
                captured=partial(_one_window, self._step.captured, size, observed),
                eager=partial(_one_window, self._step, size, observed),
            )
        way = self._engine.decide_together(steps, 1)
        if steps is not None and way in (Together.LAUNCH, Together.CAPTURE):
            graph = self._engine.find(steps, 1, may_capture=way is Together.CAPTURE)
            if graph is not None:

                def launch(args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> PartOfStep:
                    graph.inputs.refuse_shared(stack.leaves)  # before the launch is counted
                    part: PartOfStep = self._engine.launch(steps, 1, stack.leaves)
                    return part

                return window.run((), {}, Place(first=False, last=True, parts=()), launch)
        with Undo() as undo:
            if way in (Together.CALLS, Together.CALLS_ALONE):
                replace(undo, self._step.ranks, "voting", way is Together.CALLS)
            return self._one_by_one(stack)


def _one_window(
    call: Callable[..., PartOfStep],
    size: int,
    observed: bool,
    windows: int,
    noting: Noting,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> PartOfStep:
    """Do a window, as a graph records it. Return what its last call has returned, with the outputs of all of them."""
    done = micro_batches(call, *flatten(args, kwargs), range(size), noting, observed)
    loss, aux = losses_and_aux([part.output for part in done], WORDS)
    return done[-1]._replace(output=done[-1].output._replace(loss=loss, aux=aux))
