"""The capture of one graph, on all ranks or on none: what a failure undoes, and what a replay does not do by itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._errors import CaptureError
from ..._torch.tensors.tree import tensors_in
from ..._undo import Undo
from ..graph.graph import Graph, MakeContext, Then
from ..graph.pool import no_recompile
from ..host.left_tensors import LeftTensors, moves, put
from ..preflight.host_values import refuse_reads
from ..preflight.touched import Use, addresses
from ..ranks.ranks import Ranks
from ..state.carried import REPLACES
from ..state.state import TrainingState
from ..state.walk import Walk


@dataclass(frozen=True, eq=False)
class Left:
    """What a call leaves on the host, and a replay does not by itself. To be called behind each replay."""

    _walk: Walk
    _flags: Any
    _gradients: Any
    _held: list[tuple[Any, Any, Any]]  # see `LeftTensors.taken`
    fits: Callable[[], bool] | None  # see `LeftTensors.fitting`

    def __call__(self) -> None:
        """Leave it."""
        self._walk.set_flags(self._flags)
        self._walk.set_gradients(self._gradients)
        put(self._held)

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the graph that are left in containers, and are in memory of their own."""
        return tensors_in([value for _, _, value in self._held])


def fitting(state: TrainingState, left: Left | None) -> list[Callable[[], bool]]:
    """Return what tells whether a graph that was just captured may be replayed; all of these have to return True."""
    return [each for each in (state.fitting(), None if left is None else left.fits) if each is not None]


def record(
    graph: Graph,
    fn: Callable[[], Any],
    context: MakeContext,
    then: Then,
    state: TrainingState,
    ranks: Ranks,
    drop_graphs: Callable[[], object],
    loose: Iterable[Use] = (),
) -> Left | None:
    """Capture a graph on all ranks.

    Args:
        graph: a new one.
        fn: see `Graph.capture`.
        context: see `Graph.capture`.
        then: see `Graph.capture`.
        state: what `fn` may change.
        ranks: those that capture now.
        drop_graphs: drops all graphs, if the failure leaves none of them right.
        loose: how calls use tensors that nobody owns.

    Returns:
        What leaves the modules in the mode, and their tensors with the `requires_grad` and the gradients, in which `fn`
        has left them, and tensors where `fn` has put new ones. A replay does not do that by itself. None if `fn` has
        left all of them as they were.

    Raises:
        CaptureError: the capture failed, on this rank or on another one. Everything is as before the call.
    """
    before = state.tensors()
    walk = Walk(state.modules)
    flags, gradients = walk.flags(), walk.gradients() if state.finds_gradients else []
    held, reads = state.held_tensors(), state.read_values()
    left: Left | None = None
    failure: CaptureError | None = None
    state.carried.forget_replaced()
    ranks.reducers.begin_capture()
    state.renew_gradient_nodes()
    with Undo() as undo:
        undo.note(walk.put_back, flags)
        undo.note(walk.set_gradients, gradients)
        undo.note(state.rebind, before)
        undo.note(held.restore)
        undo.note(held.put_back)
        undo.note(graph.reset)
        refuse = refuse_reads(undo)
        try:
            with no_recompile():
                graph.capture(fn, context, then)
            refuse()
            if paths := state.rebound_since(before):
                raise CaptureError(
                    f"{', '.join(paths[:3])}: made or rebound in the step; a replay would neither read nor keep the "
                    "new value. Change tensors in place (copy_, add_), and make them before the step."
                )
            if any(moves(was, now) or state.carried.is_renewed(table, key) for table, key, now, was in held.new()):
                raise CaptureError(REPLACES)
            left, is_lost = _left(walk, flags, gradients, held, state, loose)
            if is_lost:
                raise CaptureError(REPLACES)
            state.look_again()
            if changed := reads.changed(state.read_values()):
                raise CaptureError(_CHANGED.format(", ".join([*changed][:3])))
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
    return left


def _left(
    walk: Walk, flags: Any, gradients: Any, held: LeftTensors, state: TrainingState, loose: Iterable[Use]
) -> tuple[Left | None, bool]:
    """Return what a capture has left, for replays, and whether none can follow. Put back what was there before."""
    changed, found = walk.changed_flags(flags), dict(gradients)
    left = [(place, now) for place, now in walk.gradients() if place in found and now is not found[place]]
    put_there = held.taken()
    used = addresses(tensor for use in loose if (tensor := use.tensor()) is not None)
    fits, is_lost = held.fitting(put_there, state.carried.copied, used, state.reads.left_out())
    walk.put_back(flags)  # the replay that follows will set them
    walk.set_gradients(gradients)
    held.put_back()
    has_left = bool(changed or left or put_there or fits)
    return Left(walk, changed, left, put_there, fits) if has_left else None, is_lost


_CHANGED = (
    "{0}: the step changes it on the host, where a replay would not do so. Return in aux what is to be kept, or change "
    "it behind the call."
)
