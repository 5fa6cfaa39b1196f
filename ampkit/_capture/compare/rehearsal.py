"""The rehearsal: the last eager call before a capture, which must record the same operations."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from ..._torch.compile import noticing_compiled_code
from ..graph.capture_query import recording
from .call_record import RecordedCall, first_difference, recorded_call

_MOST_MISSED = 4  # calls; after that many, the profiler or the thread that is in the way is expected to stay


@dataclass(eq=False)
class Rehearsal:
    """Compares the capture of one layout with the eager call before it, once.

    A graph repeats what the capture recorded. If the eager call did something else, then the step depends on something
    that is neither its input nor declared state, such as a number that changes on the host.
    """

    lenient: bool  # see `recorded_call`
    numbers: bool = False  # the same; known once the call under the preflight was made
    uses_gradients: bool = True  # whether the eager call may have, see `RecordedCall`
    gradients_of: set[int] = field(default_factory=set)  # the ids of tensors whose gradient it has used
    _eager: RecordedCall | None = None
    _captured: RecordedCall | None = None
    _missed: int = 0
    _reason: str = (
        "torch records the operations of a call only if no ExecutionTraceObserver of torch.profiler is on and no other "
        "thread runs a forward or backward, and in each call there was one or the other"
    )

    @property
    def unseen(self) -> str:
        """Why no call could be recorded, so that nothing can be compared; "" if one was recorded, or still may be."""
        return self._reason if self._missed >= _MOST_MISSED else ""

    @property
    def done(self) -> bool:
        """Whether the capture may follow: a call was recorded, or none can be."""
        return self._eager is not None or bool(self.unseen)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Context of the call under the preflight. It notes whether compiled code runs."""
        with noticing_compiled_code() as compiled:
            yield
        self.numbers = not compiled()

    def give_up(self, reason: str) -> None:
        """Compare nothing, for this reason, which messages give."""
        self._missed, self._reason = _MOST_MISSED, reason

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context of the eager call."""
        unseen = nullcontext(RecordedCall())
        with recording(), unseen if self.unseen else recorded_call(self.numbers, self.lenient) as call:
            yield
        self.uses_gradients, self.gradients_of = call.uses_gradients, call.gradients_of
        self._eager = call if call.is_recorded else None
        self._missed += not call.is_recorded

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context of the capture, which may be entered again if that fails."""
        self._captured = None
        if self._eager is None:
            with recording():
                yield
            return
        with recording(), recorded_call(self.numbers, self.lenient) as call:
            yield
        self._captured = call if call.is_recorded else None

    def difference(self) -> str | None:
        """Return in words where the two calls first differ, "" if nowhere; then forget them.

        None if the capture could not be recorded, because of what another thread did.
        """
        eager, captured, self._eager, self._captured = self._eager, self._captured, None, None
        if eager is None:
            return ""
        if captured is None or (left := eager.record) is None or (right := captured.record) is None:
            self._missed += 1
            return None
        return first_difference(left, right)
