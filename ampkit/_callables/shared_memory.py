"""The memory pools that graphs of callables share, and the order in which they run on a device."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from .._capture.graph.graph import CudaGraph, EmulatedGraph, Graph, Pool, capture_stream
from .._capture.graph.turns import StreamOrder

_P = ParamSpec("_P")
_R = TypeVar("_R")


class SharedMemory:
    """The pools of callables that were made with one pool handle.

    Each forward graph has a pool of its own, because its activations stay there until the backward pass. In a common
    pool, another graph that is replayed in between might use the same addresses for its temporary memory. All backward
    graphs share one pool and may run in any order: they leave only gradients there, which are copied out at once.
    """

    def __init__(self, device: torch.device, emulated: bool) -> None:
        self.device = device
        self.emulated = emulated
        self._pool = None if emulated else Pool()

    def graphs(self) -> tuple[Graph, Graph]:
        """Return a forward and a backward graph to capture."""
        if self._pool is None:
            return EmulatedGraph(), EmulatedGraph()
        return CudaGraph(self.stream(), Pool()), CudaGraph(self.stream(), self._pool)

    def stream(self) -> torch.cuda.Stream:
        """Return the stream on which passes are captured: another one than that of steps.

        Their calls may run in another thread at the same time.
        """
        return capture_stream(self.device, "callables")

    def call(self) -> AbstractContextManager[Any]:
        """Return a context for a whole call.

        An emulated graph runs the callable with other tensors in place of its parameters, so only one thread at a time
        may be in a call.
        """
        return _lock if self._pool is None else nullcontext()

    def in_turn(self, fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return what `fn` returns, which launches the graph of one pass. It runs after all that were launched before.

        Two graphs must not run at the same time, because both use the workspace that cuBLAS has for the capture stream.
        `fn` must not call user code: that could wait for another thread, such as autograd's, which waits for this lock.
        """
        with _lock:
            if self._pool is not None:
                if self.device not in _orders:
                    _orders[self.device] = StreamOrder(self.device)
                _orders[self.device].follow()
            return fn(*args, **kwargs)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context for warm-up and capture, on the capture stream."""
        if self._pool is None:
            yield
            return
        current, stream = self.in_turn(torch.cuda.current_stream, self.device), self.stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


_lock = threading.RLock()
_orders: dict[torch.device, StreamOrder] = {}
# By pool handle, device, and whether graphs are emulated. A handle stands for pools of ampkit's own, because torch does
# not tell which graphs captured into a pool, nor in which order they will run.
_by_handle: "weakref.WeakValueDictionary[tuple[Any, torch.device, bool], SharedMemory]" = weakref.WeakValueDictionary()


def shared_memory_of(handle: Any, device: torch.device, emulated: bool) -> SharedMemory:
    """Return the pools of callables with this handle on a device: the same object as long as one of them is alive."""
    return _by_handle.setdefault((handle, device, emulated), SharedMemory(device, emulated))
