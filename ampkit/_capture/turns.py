"""Whose turn it is: calls that share a capture stream are made one at a time, and run one behind the other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from .._errors import AmpkitError
from .._torch.autograd import current_graph_task
from .._torch.streams import raw_stream
from .._undo import Undo, close, open_here

_P = ParamSpec("_P")
_R = TypeVar("_R")


class StreamOrder:
    """Puts what is launched on one stream behind what was launched last on another one.

    Graphs that share static inputs, a pool, or what cuBLAS keeps for the stream of their capture must not overlap in
    time. While all launches come from one stream, that takes a comparison of two numbers.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None  # parameters have one
        self._device = device
        self._address = -1  # of the stream of the last launch; 0 is the default stream
        self._last: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Have the current stream wait for the last one, unless it is the same. To be called under a lock. Sync: none.

        Not called within a capture, whose stream may not wait for what is outside of it.
        """
        if raw_stream(self._device.index) != self._address:
            current = torch.cuda.current_stream(self._device)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._address = current, raw_stream(self._device.index)


class Turns:
    """The calls of all steps that capture on one stream.

    Args:
        device: where they compute.

    Attributes:
        lock: held for the whole of a call, user code included. Another step may be called within.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()  # not one per step: two threads could then wait for each other's
        self._order = StreamOrder(device) if device.type == "cuda" else None

    def begin(self, name: str) -> None:
        """Put the work of a call behind that of the last one. To be called with the lock held."""
        if _here.captures:
            raise AmpkitError(
                f"{name} was called within the capture of another graphed function, which cannot hold a second graph. "
                "Call the plain function there: the outer graph then holds what it does."
            )
        if self._order is not None:
            self._order.follow()


class Turn:
    """One step's place among the calls that share its capture stream.

    Args:
        turns: of the stream.
        name: what messages call the step.
    """

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name
        self._running = False

    def take(self, fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return what `fn` returns, called when all calls that other threads have begun are over.

        Raises:
            AmpkitError: this step is running already, and `fn` is called from inside it.
        """
        if current_graph_task() != -1:
            # Autograd has one thread per device. If this is the one, the call that runs may be waiting for it.
            if not self._turns.lock.acquire(blocking=False):
                raise AmpkitError(_IN_BACKWARD.format(self._name))
            self._turns.lock.release()
        with self._turns.lock:
            if self._running:
                raise AmpkitError(_NESTED.format(self._name))
            opened = open_here.contexts
            depth = len(opened)
            try:  # in this frame, so that an interrupt at any moment leaves a step that can be called again
                try:
                    self._running = True
                    self._turns.begin(self._name)
                    return fn(*args, **kwargs)
                finally:
                    if len(opened) > depth:  # as in `_undo.call`
                        close(opened[depth])
                    self._running = False
            finally:
                self._running = False  # an interrupt may come right before the one above


class _Here(threading.local):
    """What is known per thread."""

    def __init__(self) -> None:
        self.captures = False
        self.turns: dict[torch.device, Turns] = {}


_here = _Here()


def turns_on(device: torch.device) -> Turns:
    """Return the turns of what this thread makes for this device: it has one capture stream there."""
    if device not in _here.turns:
        _here.turns[device] = Turns(device)
    return _here.turns[device]


@contextmanager
def within_capture() -> Iterator[None]:
    """Context in which this thread captures, so that no step may be called."""
    with Undo() as undo:
        undo.note(setattr, _here, "captures", _here.captures)
        _here.captures = True
        yield


_NESTED = (
    "{0} was called from inside itself (by the function that it graphs, or by a hook that runs in it). Call the plain "
    "function there."
)
_IN_BACKWARD = (
    "{0} was called in a backward pass (by a hook, or by a function that checkpointing computes again) while another "
    "graphed call runs, which may be waiting for that pass. Call it before or after the backward pass."
)
