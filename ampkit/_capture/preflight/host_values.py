"""Values that change between two calls without a trace: who knows of one reports the line of a step that reads it."""

from collections.abc import Callable

from ..._errors import CaptureError
from ..._undo import Undo
from .uncapturable import Problem

_Receiver = Callable[[Problem, str], object]
_receivers: list[_Receiver] = []  # the innermost last


def receive(undo: Undo, receiver: _Receiver) -> None:
    """Have `receiver(problem, line)` be called for each read that is reported, until that is undone.

    Of several receivers, the last one is called.
    """

    def remove() -> None:
        _receivers[:] = [other for other in _receivers if other is not receiver]

    undo.note(remove)
    _receivers.append(receiver)


def refuse_reads(undo: Undo) -> Callable[[], None]:
    """Return a function that raises a `CaptureError` if a read was reported since, until that is undone.

    A capture may take another way than the calls that were watched before it, if it asks for what ampkit does not know
    of, such as the time.
    """
    found: list[str] = []
    receive(undo, lambda problem, line: found.append(f"{line} - {problem.what}. {problem.advice}"))

    def refuse() -> None:
        if found:
            raise CaptureError(found[0])

    return refuse


def report_read(problem: Problem, line: str) -> None:
    """Report a line (`file:line: source`) that reads a value which a graph would freeze, if the call is watched."""
    if _receivers:
        _receivers[-1](problem, line)
