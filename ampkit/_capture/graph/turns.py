"""Calls that share a capture stream: they are made one at a time, and the device runs one after the other."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch

from ..._errors import AmpkitError
from ..._torch.autograd.autograd import current_graph_task
from ..._torch.device.streams import raw_stream
from ..._undo import Undo, close, open_here

_P = ParamSpec("_P")
_R = TypeVar("_R")


class StreamOrder:
    """Makes the device run what is launched on one stream after what was launched before on another one.

    Graphs that share static inputs, a pool, or cuBLAS's workspace for the stream of their capture must not overlap in
    time. As long as all launches are on one stream, `follow` only compares two numbers.
    """

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None  # parameters have one
        self._device = device
        self._address = -1  # of the stream of the last launch; 0 is the default stream
        self.last: torch.cuda.Stream | None = None  # that of the last launch

    def follow(self) -> None:
        """Have the current stream wait for the last one, unless it is the same. To be called under a lock. Sync: none.

        It must not be called in a capture: a stream that captures may not wait for work outside of the capture.
        """
        if raw_stream(self._device.index) != self._address:
            current = torch.cuda.current_stream(self._device)
            if self.last is not None:
                current.wait_stream(self.last)
            self.last, self._address = current, raw_stream(self._device.index)


@dataclass(eq=False)
class Turns:
    """The calls of all steps that capture on one stream.

    Attributes:
        order: of what the calls launch; None without a CUDA device.
        lock: to be held during a call, user code included. Within the call another step may be called. With a lock for
            each step, two threads could wait for each other.
    """

    order: StreamOrder | None
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass(eq=False)
class Turn:
    """Makes the calls of one step, each when no other thread is in a call on the same capture stream."""

    _turns: Turns
    _name: str  # what messages call the step
    running: bool = False  # whether the step is in a call

    def stream(self) -> torch.cuda.Stream | None:
        """Return the stream of the last launch on this step's device, None if there was none."""
        return None if self._turns.order is None else self._turns.order.last

    def call(self, fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return what `fn` returns, called when no other thread is in a call.

        Raises:
            AmpkitError: this step is running already, and `fn` is called from inside it; or this thread captures.
        """
        if current_graph_task() != -1:
            # Autograd has one thread per device. If this is the one, the call that runs may be waiting for it.
            if not self._turns.lock.acquire(blocking=False):
                raise AmpkitError(_IN_BACKWARD.format(self._name))
            self._turns.lock.release()
        with self._turns.lock:
            if self.running:
                raise AmpkitError(_NESTED.format(self._name))
            opened = open_here.contexts
            depth = len(opened)
            try:  # in this frame, so that an interrupt at any moment leaves a step that can be called again
                try:
                    self.running = True
                    if _here.captures:
                        raise AmpkitError(_CAPTURES.format(self._name))
                    if self._turns.order is not None:
                        self._turns.order.follow()
                    return fn(*args, **kwargs)
                finally:
                    if len(opened) > depth:  # as in `_undo.call`
                        close(opened[depth])
                    self.running = False
            finally:
                self.running = False  # an interrupt may come right before the one above


@dataclass(eq=False)
class _Here(threading.local):
    """Whether this thread captures, and its turns by device."""

    captures: bool = False
    turns: dict[torch.device, Turns] = field(default_factory=dict)


_here = _Here()


def turns_on(device: torch.device) -> Turns:
    """Return the turns of the steps that this thread makes for this device. It has one capture stream there."""
    if device not in _here.turns:
        _here.turns[device] = Turns(StreamOrder(device) if device.type == "cuda" else None)
    return _here.turns[device]


@contextmanager
def within_capture() -> Iterator[None]:
    """Context in which this thread captures, so that no step may be called."""
    with Undo() as undo:
        undo.note(setattr, _here, "captures", _here.captures)
        _here.captures = True
        yield


_CAPTURES = (
    "{0} was called within the capture of another graphed function, which cannot hold a second graph. Call the plain "
    "function there: the outer graph then holds what it does."
)
_NESTED = (
    "{0} was called from inside itself (by the function that it graphs, or by a hook that runs in it). Call the plain "
    "function there."
)
_IN_BACKWARD = (
    "{0} was called in a backward pass (by a hook, or by a function that checkpointing computes again) while another "
    "graphed call runs, which may be waiting for that pass. Call it before or after the backward pass."
)
