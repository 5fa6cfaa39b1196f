"""The calls of a stack: one by one, or as a graph records them; and which phases the calls of a window have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._capture.engine.multi_step import Noting
from ..._capture.keys.inputs import Spec
from ..._torch.tensors.tree import TreeSpec
from ..training_step import PartOfStep, Phase, StepOutput, with_copies
from ..window import Window
from .stack import Stack, sliced


@dataclass(eq=False)
class Slices:
    """Makes the calls of stacks one by one, and learns by that which phases they have."""

    window: Window
    size: int  # how many micro-batches a window has
    _phases: dict[tuple[Spec, bool], tuple[Phase, ...]] = field(default_factory=dict)
    _seen: list[Phase] = field(default_factory=list)  # in the window that the calls are in

    def call(self, stack: Stack, i: int) -> StepOutput:
        """Make call i of a stack."""
        args, kwargs = sliced(stack.leaves, stack.tree, i)
        place = self.window.count
        phase = Phase(place + 1 == self.size, self.window.accumulated, self.window.observes())
        out = self.window.run(args, kwargs)
        if place == 0:
            self._seen = []
        if place == len(self._seen):
            self._seen.append(phase)
        if place + 1 == self.size == len(self._seen):
            if len(self._phases) == _MAX_SPECS:
                self._phases.clear()
            self._phases[stack.spec, phase.observed] = tuple(self._seen)
        return out

    def phases(self, spec: Spec, observed: bool = False) -> tuple[Phase, ...] | None:
        """Return the phases of the calls of a window, by which their graphs are found. None if they are not known."""
        return (Phase(True, (), observed),) if self.size == 1 else self._phases.get((spec, observed))


_MAX_SPECS = 256


def in_order(
    stack: Stack,
    launched: Callable[[int], tuple[int, Any] | None],
    single: Callable[[int], Any],
    first: Sequence[Any],
    together: Callable[[list[Any]], Any],
) -> list[Any]:
    """Do the calls of a stack. Return their outputs in pieces, each of one or more calls, stacked.

    Args:
        stack: the inputs.
        launched: `launched(i)` does calls by one launch, from call i on, and returns how many and their outputs,
            stacked. It returns None, and has done nothing, if there is no graph for them.
        single: `single(i)` does call i.
        first: the outputs of the first calls, which were done already.
        together: stacks outputs of single calls.
    """
    pieces: list[Any] = []
    singles = [*first]  # behind these
    done = len(singles)
    while done < stack.count:
        try:
            found = launched(done)
            if found is None:
                singles.append(single(done))
        except Exception as error:
            if done and hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"scan: {done} of {stack.count} calls were done before this one.")
            raise
        if found is not None:
            pieces += [together(singles), found[1]] if singles else [found[1]]
            singles = []
        done += 1 if found is None else found[0]
    return [*pieces, together(singles)] if singles else pieces


def micro_batches(
    call: Callable[..., PartOfStep],
    leaves: Sequence[Any],
    tree: TreeSpec,
    places: range,
    noting: Noting,
    observed: bool = False,
) -> list[PartOfStep]:
    """Do a window with the slices of a stack at these places, and return what `call` returned for each micro-batch."""
    done: list[PartOfStep] = []
    accumulated: tuple[int, ...] = ()
    for i in places:
        given, named = sliced(leaves, tree, i)
        with noting():
            part = call(Phase(i == places[-1], accumulated, observed), *given, **named)
        done.append(part._replace(output=with_copies(part.output)))
        accumulated = part.accumulated or ()
    return done
