"""A rank that waits for one that is gone: how long it has waited, and how another thread ends its wait."""

import ctypes
import faulthandler
import threading
import time

import torch

from .._errors import AmpkitError
from .._torch.distributed import aborts
from .turns import Turn

LAST_RESORT_S = 10.0  # from the abort to the end of the process: NCCL needs a second, users' `finally` clauses the rest
_STDERR = 2  # sys.stderr may be a file of Python's, which faulthandler cannot write to


class Waiting:
    """What the calls of this process' steps wait for, as another thread sees it.

    Attributes:
        turns: those of the steps.
        calls: how many calls the steps have begun.
        thread: the thread of the last call.
        ending: whether this process releases its graphs, which waits for the device.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.calls = 0
        self.thread = 0
        self.ending = False
        self._seen = -1
        self._since: float | None = None
        self._marks: list[torch.cuda.Event] = []

    def seconds(self) -> float:
        """Return for how long this rank has been in one call, or the device in what was launched before."""
        now = time.monotonic()
        if not self._waits() or self._since is None:
            self._since = now
        return now - self._since

    def _waits(self) -> bool:
        seen, self._seen = self._seen, self.calls
        turns = list(self.turns)
        in_one_call = seen == self.calls and any(turn.running for turn in turns)
        return self.ending or in_one_call or self._device_waits(turns)

    def _device_waits(self, turns: list[Turn]) -> bool:
        """Return whether the device still has not come to the marks of an earlier look. Make new ones if it has."""
        try:
            if not all(mark.query() for mark in self._marks):
                return True
            self._marks = [mark for turn in turns if (mark := turn.mark()) is not None]
        except RuntimeError:  # the device has failed; the training thread gets the same error
            return True
        return False


def end_wait(text: str, thread: int | None) -> None:
    """Have the waits of this process end, because of another rank.

    The thread gets an `AmpkitError` with this text as soon as it is in Python again. If it is not within
    `LAST_RESORT_S`, the process ends with exit code 1 and the stack of each thread on stderr.

    Args:
        text: why.
        thread: which thread trains; None if it is ending already.
    """
    last_resort()
    if thread is not None:  # before the abort: what the device computes from then on is garbage
        raise_in(thread, text)
    for abort in aborts():
        threading.Thread(target=abort, name="ampkit-abort", daemon=True).start()


def raise_in(thread: int, text: str) -> None:
    """Have a thread raise an `AmpkitError` before its next instruction of Python."""

    def __init__(self: AmpkitError) -> None:  # noqa: N807 - of the class below
        AmpkitError.__init__(self, text)

    # Python makes the exception in that thread, without arguments.
    kind = type(AmpkitError.__name__, (AmpkitError,), {"__init__": __init__, "__module__": AmpkitError.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def last_resort() -> None:
    """Have this process end in `LAST_RESORT_S`. The thread for that is C's: it needs no lock of Python's."""
    faulthandler.dump_traceback_later(LAST_RESORT_S, exit=True, file=_STDERR)


def no_last_resort() -> None:
    """Take `last_resort` back."""
    faulthandler.cancel_dump_traceback_later()
