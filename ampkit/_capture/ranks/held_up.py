"""A rank that waits for one that is gone: whether it waits, and how its wait is ended. `heartbeat` decides when."""

import ctypes
import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from ..._errors import AmpkitError
from ..._torch.ranks.distributed import aborts
from ..graph.turns import Turn

LAST_RESORT_S = 10.0  # from the abort to the end of the process: NCCL needs a second, users' `finally` clauses the rest
_STDERR = 2  # sys.stderr may be a file of Python's, which faulthandler cannot write to


@dataclass(eq=False)
class Waiting:
    """What the calls of this process' steps wait for, as another thread sees it."""

    turns: list[Turn] = field(default_factory=list)  # those of the steps
    calls: int = 0  # how many the steps have begun
    thread: int = 0  # of the last call
    ending: bool = False  # whether this process releases its graphs, which waits for the device
    _seen: int = -1
    since: float | None = None  # when this wait began; None to begin anew
    probe: threading.Thread | None = None  # the thread that looks at the device

    def seconds(self) -> float:
        """Return for how long this rank has been in one call, or the device in what was launched before."""
        now = time.monotonic()
        seen, self._seen = self._seen, self.calls
        turns = list(self.turns)
        waits = self.ending or (seen == self.calls and any(turn.running for turn in turns))
        if not waits:  # unless the device has not done since an earlier look what it had to do then
            waits = self.probe is not None and self.probe.is_alive()
            streams = [] if waits else [stream for turn in turns if (stream := turn.stream()) is not None]
            if streams:
                # Not an event: to record one on a full stream blocks, with Python's lock held.
                self.probe = started("ampkit-probe", lambda: _synchronize(streams))
        if not waits or self.since is None:
            self.since = now
        return now - self.since


def _synchronize(streams: list[torch.cuda.Stream]) -> None:
    for stream in dict.fromkeys(streams):
        with suppress(RuntimeError):  # the device has failed; the thread that trains gets the same error
            stream.synchronize()


def started(name: str, work: Callable[[], object]) -> threading.Thread:
    """Return a thread that does some work, and keeps no process from ending."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class EndedWait:
    """Has the waits of this process end, because of another rank.

    The thread that trains (None if it is ending already) gets an `AmpkitError` with this text as soon as it is in
    Python again. If it is not within `LAST_RESORT_S`, the process ends with exit code 1 and the stack of each thread on
    stderr.
    """

    def __init__(self, text: str, thread: int | None) -> None:
        last_resort()
        if thread is not None:  # before the abort: what the device computes from then on is garbage
            raise_in(thread, text)
        self._aborts = [started("ampkit-abort", abort) for abort in aborts()]

    def join(self) -> None:
        """Wait for the communicators to be gone, which they are behind the last graph. `last_resort` ends this wait."""
        for abort in self._aborts:
            abort.join()


def raise_in(thread: int, text: str) -> None:
    """Have a thread raise an `AmpkitError` before its next instruction of Python."""
    # The interpreter takes a class, and makes the exception of it in that thread, without arguments. So the text has to
    # be in a class of this error's own, which tracebacks show under the name of the public one.
    made = {"__init__": lambda error: AmpkitError.__init__(error, text), "__module__": AmpkitError.__module__}
    kind = type(AmpkitError.__name__, (AmpkitError,), made)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def last_resort() -> None:
    """Have this process end in `LAST_RESORT_S`. The thread for that is C's: it needs no lock of Python's.

    `faulthandler.cancel_dump_traceback_later` takes it back.
    """
    faulthandler.dump_traceback_later(LAST_RESORT_S, exit=True, file=_STDERR)
