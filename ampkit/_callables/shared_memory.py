"""In which memory and in which order the graphs of callables run: their pools, and whose turn it is on a device."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from .._capture.graph import CudaGraph, EmulatedGraph, Graph, Pool, capture_stream
from .._capture.turns import StreamOrder

_P = ParamSpec("_P")
_R = TypeVar("_R")


class SharedMemory:
    """What callables that share memory have in common.

    Each forward graph has a pool of its own. Activations stay in it until the backward pass; in a common pool those of
    one graph may lie where an earlier graph, replayed again meanwhile, has its scratch. A backward graph leaves nothing
    but gradients, which are copied out at once: all of them have one pool, whatever order they run in.
    """

    def __init__(self, device: torch.device, emulated: bool) -> None:
        self.device = device
        self._pool = None if emulated else Pool()

    def graphs(self) -> tuple[Graph, Graph]:
        """Return a forward and a backward graph to capture."""
        if self._pool is None:
            return EmulatedGraph(), EmulatedGraph()
        stream = capture_stream(self.device, _USE)
        return CudaGraph(stream, Pool()), CudaGraph(stream, self._pool)

    def call(self) -> AbstractContextManager[Any]:
        """Return a context for a whole call. An emulated graph runs the callable, with other tensors in place of its
        parameters, so that threads must not meet in it."""
        return _lock if self._pool is None else _NO_CONTEXT

    def in_turn(self, fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return what `fn` returns, which launches graphs: all of one pass or none, behind those launched before.

        What cuBLAS keeps for the capture stream is part of the graphs: two of them must not run at a time. User code
        has no place in here. It could wait for another thread, or for autograd's, which takes turns here as well.
        """
        with _lock:
            if self._pool is not None:
                if self.device not in _orders:
                    _orders[self.device] = StreamOrder(self.device)
                _orders[self.device].follow()
            return fn(*args, **kwargs)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context on the stream of warm-up and capture."""
        if self._pool is None:
            yield
            return
        current, stream = self.in_turn(torch.cuda.current_stream, self.device), capture_stream(self.device, _USE)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


_USE = "callables"  # not the stream of steps, whose calls may run user code in one thread while these run in another
_lock = threading.RLock()
_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()
_orders: dict[torch.device, StreamOrder] = {}
# By handle: torch's allocator does not tell which graphs captured into a pool, nor in which order they will run.
_by_handle: "weakref.WeakValueDictionary[tuple[Any, torch.device, bool], SharedMemory]" = weakref.WeakValueDictionary()


def shared_memory_of(handle: Any, device: torch.device, emulated: bool) -> SharedMemory:
    """Return what callables with this pool handle share on a device: the same object as long as one of them lives."""
    return _by_handle.setdefault((handle, device, emulated), SharedMemory(device, emulated))
