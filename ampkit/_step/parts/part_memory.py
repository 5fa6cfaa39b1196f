"""The memory of a step in parts: one pool, in which a graph uses what graphs before it need no more.

Eager steps free an activation as soon as backward has read it, and gradients take its place. To reserve no more than
that, all graphs of a step are captured into one pool, in the order in which they are replayed: each in the call that
needs it first. A backward pass lets go of the activations that it reads. So a graph may overwrite all that was free in
its capture. It must not be replayed where that is still needed, and an autograd graph must not be freed, because
further backward passes are captured from it: `SavedTensors` lets go of the memory and keeps the addresses.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._callables.shared_memory import SharedMemory
from ..._capture.graph.graph import CudaGraph, EmulatedGraph, Graph, Pool, capture_stream
from ..._capture.graph.timing import Shares
from ..._capture.state.kept_gradients import KeptGradients
from ..._torch.autograd.autograd import current_node
from ..._torch.tensors.tensors import storage_address, unowned

_Spans = Sequence[tuple[int, int]]  # addresses: the first one, and the first one behind


class SharesPool(Protocol):
    """A part whose graphs may be in the pool of others.

    Attributes:
        forward_number, backward_number: when the graphs were captured, 0 for one that is not, or is in a pool of its
            own.
        lets_go: whether its backward graph lets go of the activations that it reads.
        pending: whether a backward pass may still need these.
    """

    forward_number: int
    backward_number: int
    lets_go: bool

    @property
    def pending(self) -> bool: ...


class PartMemory(SharedMemory):
    """The pools of the parts of one step, which may draw from generators beside the default one.

    The graphs that one call has captured share one. A graph that a later call has captured, where a module was left out
    at first, has a pool of its own: nobody knows its place among the others.
    """

    def __init__(self, device: torch.device, emulated: bool, generators: Sequence[torch.Generator]) -> None:
        super().__init__(device, emulated)
        self._stream: torch.cuda.Stream | None = None  # not known before the first capture
        self.generators = tuple(generators)
        self._pools = [Pool()]  # the first one is shared
        self._count = 0  # of the graphs in it
        self._is_shared = True  # by the graphs that are captured next
        self._newest = 0  # of the backward graphs whose gradients stay in the pool until the call is over
        self._replayed: list[SharesPool] = []  # in the order of their captures; those that may be pending, and others
        self.kept: KeptGradients | None = None  # where the present call keeps gradients of parameters
        self.shares: Shares | None = None  # measures how much of the time of the present call each part takes

    @property
    def nbytes(self) -> int:
        """Bytes of the pools. It reads the allocator and does not wait for the device."""
        return sum(pool.nbytes for pool in self._pools)

    def end_call(self) -> None:
        """Take note that a call is over. If it has captured graphs, later ones do not share their pool."""
        self._newest = 0
        if self._is_shared and self._count:
            self._is_shared = False
            if not self.emulated:
                torch.cuda.empty_cache()  # what the calls before have needed

    def is_free(self, part: SharesPool, number: int) -> bool:
        """Return whether a graph of this part with this number may be replayed now.

        It overwrites activations of forward passes that were captured behind it, and those that were let go before it,
        and gradients of backward passes that were captured behind it.
        """
        if 0 < number <= self._newest:
            return False
        while self._replayed and not self._replayed[-1].pending:
            self._replayed.pop()
        return not number or not any(
            (number < other.forward_number or (other.lets_go and 0 < other.backward_number < number))
            and other is not part
            and other.pending
            for other in self._replayed
        )

    def stays_in_pool(self, part: SharesPool) -> None:
        """Take note that the call will use gradients of a part where its backward graph has written them."""
        self._newest = part.backward_number

    def note(self, part: SharesPool) -> None:
        """Take note of the replay of a forward graph, behind `is_free`."""
        if part.forward_number:
            self._replayed.append(part)

    def measured(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a replay of a part of this name."""
        return nullcontext() if self.shares is None else self.shares.measured(name)

    def graph(self) -> tuple[Graph, int]:
        """Return a graph to capture, and its number: 0 if it has a pool of its own."""
        if self._is_shared:
            self._count += 1
        else:
            self._pools.append(Pool())
        return self._graph_in(self._pools[-1]), self._count * self._is_shared

    def graph_apart(self) -> Graph:
        """Return a graph to capture in a pool of its own, replay and reset."""
        return self._graph_in(Pool())

    def _graph_in(self, pool: Pool) -> Graph:
        if self.emulated:
            return EmulatedGraph()
        return CudaGraph(self.stream(), pool, self.generators)

    def stream(self) -> torch.cuda.Stream:
        """Return the stream of the step, for which cuBLAS has memory, whichever thread calls the step or backward."""
        if self._stream is None:
            current, default = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
            self._stream = capture_stream(self.device) if current == default else current  # that has no captures
        return self._stream

    def spans(self) -> _Spans:
        """Return where the pools lie. It reads the allocator and does not wait for the device."""
        return [span for pool in self._pools for span in pool.spans()]


class FreedError(RuntimeError):
    """Backward reads what was freed, as in eager code without `retain_graph=True`."""


@dataclass(eq=False)
class _SavedTensor:
    tensor: Tensor
    is_let_go: bool = False
    freed_in: int = -1  # the number of the replay in which a backward pass has freed it that has a graph for itself


class SavedTensors:
    """What autograd saves in the capture of a forward pass.

    A backward pass that is captured lets go of the memory of what it has read, so that other graphs use it. The
    autograd graph can still be used wherever they have not done that: this is for the caller to know. What an eager
    step would have freed cannot be read again, as in an eager step.
    """

    def __init__(self) -> None:
        self._replay = 0  # how many there were of forward
        self._freed_in = -1  # the last of these for which backward was replayed
        self._keep, self._spans = True, _NO_SPANS  # see `reading`
        self._read: list[_SavedTensor] = []  # by the node of the backward pass that is running
        self._node: Any = None

    def begin(self) -> None:
        """Take note of a replay of forward."""
        self._replay += 1

    def free(self) -> None:
        """Take note of a replay of backward, which may overwrite all that its capture has let go of."""
        self._freed_in = self._replay

    @property
    def is_free(self) -> bool:
        """Whether backward was replayed since the last replay of forward."""
        return self._freed_in == self._replay

    def pack(self, tensor: Tensor) -> _SavedTensor:
        """Keep a tensor. Use it as a pack hook."""
        return _SavedTensor(tensor.detach())  # the tensor itself would refer to the autograd graph that saves it

    def unpack(self, saved: _SavedTensor) -> Tensor:
        """Return a tensor that was kept. Use it as an unpack hook."""
        if self._replay == saved.freed_in or (saved.is_let_go and self.is_free):
            raise FreedError(_FREED)
        if self._spans or not self._keep:
            node = current_node()
            if node is not self._node:
                self._end_node()
                self._node = node
            self._read.append(saved)
        return saved.tensor

    @contextmanager
    def reading(self, *, keep: bool, spans: _Spans = ()) -> Iterator[None]:
        """Context of a backward pass. Of what it reads it lets go in these spans of memory, and frees it unless `keep`.

        Each node may read a tensor several times.
        """
        self._keep, self._spans = keep, spans
        try:
            yield
            self._end_node()
        finally:
            self._keep, self._spans, self._read, self._node = True, _NO_SPANS, [], None

    def _end_node(self) -> None:
        for saved in self._read:
            address = storage_address(saved.tensor)
            is_plain = type(saved.tensor) is Tensor
            if is_plain and any(start <= address < stop for start, stop in self._spans):
                saved.tensor, saved.is_let_go = unowned(saved.tensor), True
            if not self._keep:
                saved.freed_in = self._replay
        self._read = []


_NO_SPANS: _Spans = ()
_FREED = (
    "backward for a second time through a module that is captured by itself, whose activations are freed. Pass "
    "retain_graph=True to the first backward."
)
