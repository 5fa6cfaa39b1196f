"""What follows where something cannot be captured: one warning and eager calls from then on, or an error."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..._errors import CaptureError
from ..._user_line import WarnOnce

# What advice says, and no line of a user's, which messages quote.
IN_AUX = re.compile("([Rr]eturn it|[Rr]eturn the tensor|be kept) in aux")


def going_on(problem: str) -> str:
    """Return a problem, which may end with a full stop or not, and what follows from it, without one."""
    return f"{problem.rstrip('.')}. Training goes on eagerly"


class StepDoneError(CaptureError):
    """The graph computes something else than the step. This step was done all the same, as eager computes it.

    Attributes:
        outputs: what the step returned.
    """

    def __init__(self, text: str, outputs: Any) -> None:
        super().__init__(text)
        self.outputs = outputs


class MovableOptimizer:
    """Where an optimizer steps: as a part of what the engine calls, or behind that. This one is always a part.

    Attributes:
        why_behind: why it steps behind that; "" if it is a part.
        follows_behind: why what follows it is called behind that, while it may be a part; "" if that is so, too.
    """

    why_behind: str = ""
    follows_behind: str = ""

    @property
    def stays_behind(self) -> bool:
        """Whether it is known already that it will never be a part."""
        return False

    def has_moved(self) -> bool:
        """Return whether it has become a part, or none any more, since this was called last."""
        return False

    def leave(self, changed: str = "", *, problem: str = "") -> bool:
        """Have it step behind from now on, if it can. Return whether it did not before.

        Args:
            changed: what has changed that a graph holds as a constant, or
            problem: why the step cannot be captured.
        """
        return False


UNMOVED = MovableOptimizer()


@dataclass(eq=False)
class Fallback:
    """Warns that calls are eager, each kind of warning once, or raises; and remembers why."""

    _name: str  # what messages call the step
    _warn: WarnOnce
    raises: bool  # whether the user asked for errors (`on_failure="raise"`)
    refused: str  # why every call is eager; "" as long as some layout may be captured
    failure: str | None = None  # what could not be captured last, for the report; None if nothing failed

    def error(self, reason: object) -> CaptureError:
        """Return the error that gives this reason."""
        return CaptureError(self._worded(f"{self._name}: {reason}"))

    def _worded(self, text: str) -> str:
        """Return a message about a step whose function returns what it likes: only that of `graphed_step` has `aux`."""
        return text if self._name == "graphed_step" else IN_AUX.sub(r"\1", text)

    def refuse(self, reason: str) -> None:
        """Make every call eager, for a reason that is known before the first one. Warn, or raise a `CaptureError`."""
        if self.raises:
            raise self.error(reason)
        self.refused = self.failure = reason
        tries = "" if torch.cuda.is_available() else ", and graph='emulate' tries the code without a GPU"
        self._warn(f"{going_on(reason)}; graph='off' says so without a warning{tries}.")

    def refuse_wrong_graph(self, problem: str, outputs: Any) -> None:
        """Make every call eager, since a replay did not do what this step did. Warn, or raise a `StepDoneError`."""
        self.refused = self.failure = problem
        if self.raises:
            raise self.step_done_error(problem, outputs)
        self._warn(f"{going_on(problem)}.")

    def step_done_error(self, problem: object, outputs: Any) -> StepDoneError:
        """Return the error that a graph is wrong, though the step that had these outputs was done."""
        return StepDoneError(f"{self._name}: {problem} This step was done, as eager computes it.", outputs)

    def give_up(self, refuse: Callable[[str], None], reason: str, error: CaptureError, *, is_last: bool) -> None:
        """Make the calls of one layout eager by `refuse(reason)`. Warn, or raise a `CaptureError`.

        They are counted under the reason. If the layout `is_last`, no other one has a graph, so that nothing is
        captured from now on.
        """
        if self.raises:
            raise self.error(error) from error
        self.failure = self._worded(str(error))
        refuse(reason)
        if is_last:
            self.refused = reason
        self.warn_once(self.failure, f"{going_on(self.failure)}.")

    def has_warned(self, kind: str) -> bool:
        """Return whether there was a warning of this kind."""
        return kind in self._warn

    def warn_once(self, kind: str, message: str) -> bool:
        """Warn unless there was a warning of this kind; return whether there was none."""
        return self._warn(self._worded(message), kind)
