"""The graphs of one step: which one is replayed for which key, how many are kept, what each costs and saves."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from ..._text import CONSTANTS
from ..._torch.device.streams import is_capturing, raw_stream
from ..._torch.tensors.tensors import untracked
from ..._torch.tensors.tree import tree_flatten
from ..keys.inputs import Spec, StaticInputs
from ..keys.key import Key
from .graph import CudaGraph, EmulatedGraph, Graph, OtherAnswerError, Pool
from .timing import Saving, Timing, combined


class Captured:
    """A graph, the buffers that it reads its input from, and what it costs."""

    def __init__(
        self,
        graph: Graph,
        inputs: StaticInputs,
        pool_bytes: int,
        timing: Timing,
        sees_capture: bool,
        set_flags: Callable[[], None] | None = None,
        fits: Sequence[Callable[[], bool]] = (),
    ) -> None:
        self._graph = graph
        self._set_flags = set_flags  # what the calls leave on the host, see `record`
        self._fits = fits  # see `Carried.fitting` and `LeftTensors.fitting`
        self.inputs = inputs
        self.nbytes: int = pool_bytes + inputs.nbytes  # device memory that came with it; its capture let the pool grow
        self.timing = timing
        self.sees_capture = sees_capture  # whether the code of its eager calls is told that it is being captured
        self.misfits: int = 0  # calls in a row that it did not fit
        self.compared = False  # whether a replay was compared with an eager call

    def fits(self) -> bool:
        """Return whether it may be replayed now. Else the call would find something that the capture has not found."""
        fits = all(fits() for fits in self._fits)
        self.misfits = 0 if fits else self.misfits + 1
        return fits

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Do the step on this batch; return copies of the outputs. Sync: none.

        Raises:
            OtherAnswerError: it does not fit, or see `Graph`. Nothing was done.
            InputMismatch: see `StaticInputs.refuse_shared`. Nothing was done.
        """
        if not self.fits():
            raise OtherAnswerError(DOES_NOT_FIT)
        self.inputs.copy_(leaves)
        outputs: GraphOutputs = self._graph.replay()
        if self.inputs.any_changed:
            self.inputs.copy_back(leaves)
        if self._set_flags is not None:
            self._set_flags()
        return outputs.copied()

    def reset(self) -> None:
        """Give up the graph."""
        self._set_flags = None  # which may keep tensors of the graph
        self._graph.reset()


@dataclass(eq=False)
class GraphLengths:
    """Graphs that do several calls each, of one layout and different lengths. They read from the same buffers."""

    buffers: list[Tensor]  # for as many calls as the longest graph does
    sees_capture: bool  # whether the code of its eager calls is told that it is being captured
    writes: set[str]  # the paths of the tensors of the state that the calls change
    graphs: dict[int, Captured] = field(default_factory=dict)  # by the number of windows that they do
    launches: int = 0  # of any of them
    pool_bytes: int = 0  # what the pool grew by in their captures

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers)

    def reset(self) -> None:
        """Give up the graphs."""
        while self.graphs:
            self.graphs.popitem()[1].reset()


class GraphOutputs:
    """What a captured function returned, from which each replay gives the caller tensors of his own.

    The numbers among the outputs (loss, norm, whether the step was skipped) are gathered in one block of bytes, by one
    kernel of the graph. So a replay is followed by one copy for all of them.

    To be made in the capture, behind the function, with what it returned. Without `gathers` no numbers are gathered,
    and the graph has no kernel that the function did not launch.
    """

    def __init__(self, tree: Any, *, gathers: bool = True) -> None:
        self._tree = Rebuilt(tree)
        self._tensors = self._tree.tensors
        self._places: list[tuple[torch.dtype, int] | None] = []  # of each tensor in the block, counted in its dtype
        # Copies of the block to come, and the numbers in each of them: the tree, if it has no other tensors.
        self._rows: list[tuple[Tensor, Any]] = []
        self._stream = -1  # that these were allocated on
        self._count = 1  # how many rows are to be allocated
        self._block = self._gathered() if gathers else None
        self._index = None if self._block is None or not self._block.is_cuda else self._block.device.index
        self._gathers_all = None not in self._places

    def copied(self) -> Any:
        """Return the tree with tensors that nothing else lies in, and that no later replay changes. Sync: none.

        Numbers of several replays share an allocation, each with a place of its own, and no two tensors share a version
        counter.
        """
        if self._block is None:
            return self._tree.with_tensors(map(Tensor.clone, self._tensors))
        # Torch's allocator takes freed memory to be in use on the stream that it was allocated on.
        if self._index is not None and raw_stream(self._index) != self._stream:
            self._rows, self._count = [], 1
        if not self._rows:
            # Memory for the next replays: each time a copy of the block, and its numbers.
            if self._index is not None:
                self._stream = raw_stream(self._index)
            count, self._count = self._count, min(2 * self._count, _ROWS)
            rows = torch.empty(count, len(self._block), dtype=torch.uint8, device=self._block.device)
            with untracked():  # no two of them share a version counter
                columns = [
                    repeat(None, count) if place is None else rows.view(place[0])[:, place[1]].unbind()
                    for place in self._places
                ]
                trees = self._tree.with_columns(columns) if self._gathers_all else zip(*columns, strict=True)
                self._rows = list(zip(rows.unbind(), trees, strict=True))
        row, numbers = self._rows.pop()
        row.copy_(self._block)
        if self._gathers_all:
            return numbers
        pairs = zip(numbers, self._tensors, strict=True)
        return self._tree.with_tensors(tensor.clone() if number is None else number for number, tensor in pairs)

    def _gathered(self) -> Tensor | None:
        """Return the block of bytes of the numbers, and note where they are. None if there are not two of them."""
        # What a graph returns from the host is no work of the graph, and is read behind each replay.
        places = [tensor.device for tensor in self._tensors if tensor.is_cuda or not is_capturing()]
        device = places[0] if places else None
        numbers = [i for i, tensor in enumerate(self._tensors) if _is_number(tensor) and tensor.device == device]
        if len(numbers) < 2:
            return None
        numbers.sort(key=lambda i: -self._tensors[i].dtype.itemsize)  # so that each one is aligned
        self._places, end = [None] * len(self._tensors), 0
        for i in numbers:
            dtype = self._tensors[i].dtype
            self._places[i], end = (dtype, end // dtype.itemsize), end + dtype.itemsize
        block = torch.empty(-(-end // _WORD) * _WORD, dtype=torch.uint8, device=device)
        with torch.no_grad():
            torch.cat([self._tensors[i].reshape(1).view(torch.uint8) for i in numbers], out=block[:end])
        return block


_ROWS = 32  # with loss, norm and skip in each of them, as many as the least that torch's allocator hands out
_WORD = 8  # bytes of the largest number


def _is_number(tensor: Tensor) -> bool:
    """Return whether the bytes of a tensor are a number, and all that there is to it."""
    return (
        type(tensor) is Tensor
        and tensor.dim() == 0
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_complex() or tensor.is_neg() or tensor.is_quantized)
    )


class Rebuilt:
    """Makes a tree again, of other tensors. It makes what `tree_unflatten` would make, in less time.

    A tuple of constants stays the same object: with accumulation there is one that has a number for each parameter.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors: list[Tensor] = []  # those of the tree
        self._constants: list[Any] = []
        containers: list[tuple[Callable[[Sequence[Any]], Any], list[tuple[str, int]]]] = []
        self._find(tree, containers)
        begin = {_TENSOR: 0, _CONSTANT: len(self.tensors), _CONTAINER: len(self.tensors) + len(self._constants)}
        # How each container is made of what comes before it: tensors, constants, containers inside of it.
        self._containers = [
            (make, _getter([begin[kind] + number for kind, number in children])) for make, children in containers
        ]

    def with_tensors(self, tensors: Iterable[Tensor]) -> Any:
        """Return the tree with these tensors."""
        made = [*tensors, *self._constants]
        for make, children in self._containers:
            made.append(make(children(made)))
        return made[-1]

    def with_columns(self, columns: Iterable[Iterable[Any]]) -> Iterator[Any]:
        """Yield trees, each with the next tensor of each column. Functions of C make them all."""
        made: list[Iterator[Any]] = [*map(iter, columns), *map(repeat, self._constants)]
        for make, children in self._containers:
            inside = children(made)
            made.append(map(make, zip(*inside, strict=False) if inside else repeat(())))
        return made[-1]

    def _find(self, node: Any, containers: list[Any]) -> tuple[str, int]:
        """Note what a node has in it, and return where it will be: its number among those of its kind."""
        if isinstance(node, Tensor):
            self.tensors.append(node)
            return _TENSOR, len(self.tensors) - 1
        # A tuple of constants is one constant, which every replay returns as the same object.
        constant = type(node) in _CONSTANTS or (type(node) is tuple and _CONSTANTS.issuperset(map(type, node)))
        make, children = (None, ()) if constant else _parts(node)
        if make is None:
            self._constants.append(node)
            return _CONSTANT, len(self._constants) - 1
        containers.append((make, [self._find(child, containers) for child in children]))
        return _CONTAINER, len(containers) - 1


_TENSOR, _CONSTANT, _CONTAINER = "tensor", "constant", "container"


def _parts(node: Any) -> tuple[Callable[[Sequence[Any]], Any] | None, Sequence[Any]]:
    """Return what makes a container of its children, and these. None and () if the node is no container."""
    kind = type(node)
    if kind is dict:
        keys = list(node)
        return lambda values: dict(zip(keys, values, strict=True)), list(node.values())
    if kind is list or kind is tuple:
        return kind, node
    if isinstance(node, tuple) and hasattr(kind, "_make"):  # a named tuple
        return partial(tuple.__new__, kind), node
    leaves, spec = tree_flatten(node)
    return (None, ()) if len(leaves) == 1 and leaves[0] is node else (spec.unflatten, leaves)


def _getter(places: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return what takes the items at these places of a list, as a tuple."""
    if len(places) < 2:
        return lambda made: [made[place] for place in places]
    return operator.itemgetter(*places)


def copied(tree: Any) -> Any:
    """Return a tree with a copy of each tensor."""
    rebuilt = Rebuilt(tree)
    return rebuilt.with_tensors(map(Tensor.clone, rebuilt.tensors))


_CONSTANTS = frozenset(CONSTANTS)


@dataclass(eq=False)
class Cache:
    """The graphs of one step by key, the least recently used first. They share one pool."""

    limit: int  # how many are kept; it may be changed
    _budget: int | None  # how many bytes their pool and buffers may take together; None for no limit
    _pool: Pool = field(default_factory=Pool)
    _graphs: OrderedDict[Key, Captured] = field(default_factory=OrderedDict)
    # Those of several calls each, the least recently used first. They do not count against the limit.
    multi_step: OrderedDict[Key, GraphLengths] = field(default_factory=OrderedDict)
    _dropped: Saving = field(default_factory=partial(Saving, 0, None, None))
    _last: tuple[Key, Captured] | None = None  # the most recently used one

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[tuple[Key, Captured]]:
        return iter(self._graphs.items())

    def get(self, spec: Spec, phase: Any, settings: int) -> Captured | None:
        """Return the graph for the key of these three parts as the most recently used one, or None."""
        if self._last is not None:  # to compute the hash of a key takes longer than all of this
            key, captured = self._last
            if key.spec is spec and key.settings == settings and key.phase == phase:
                return captured
        key = Key(spec, phase, settings)
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
            self._last = key, found
        return found

    def find(self, key: Key) -> Captured | None:
        """Return the graph for a key with outcomes or answers as the most recently used one, or None."""
        if key.outcomes is None and key.answers is None:
            return None
        self._last = None  # `get` compares neither
        if key in self._graphs:
            self._graphs.move_to_end(key)
        return self._graphs.get(key)

    def make_room(self) -> list[Key]:
        """Reset the least recently used graphs until one more may be kept; return their keys.

        Their memory stays in the pool, for the next graph.
        """
        evicted, self._last = [], None
        while len(self._graphs) >= self.limit:
            key, captured = self._graphs.popitem(last=False)
            self._drop(captured)
            evicted.append(key)
        return evicted

    def drop(self, key: Key) -> None:
        """Reset one graph, if it is there."""
        self._last = None  # before the graph is taken out, since an interrupt may come between the two
        if key in self._graphs:
            self._drop(self._graphs.pop(key))

    def _drop(self, captured: Captured) -> None:
        captured.reset()  # waits for the device, as the next line would
        self._dropped = combined([self._dropped, captured.timing.saving()])
        captured.timing.replays = 0  # they are counted; a later graph of this layout goes on with this timing

    def new_graph(self, stream: Any, generators: Any) -> CudaGraph | EmulatedGraph:
        """Return a graph to capture: an emulated one if there is no stream."""
        return EmulatedGraph() if stream is None else CudaGraph(stream, self._pool, generators)

    def add(self, key: Key, captured: Captured) -> None:
        """Keep a graph."""
        self._last = None
        self._graphs[key] = captured

    def over_budget(self) -> bool:
        """Return whether all graphs together take more than the budget."""
        return self._budget is not None and self.nbytes > self._budget

    def clear(self) -> None:
        """Reset all graphs. The last one releases the pool."""
        self._last = None
        while self.multi_step:
            self.multi_step.popitem()[1].reset()
        while self._graphs:
            self._drop(self._graphs.popitem()[1])  # taken out first: a graph that is reset must not be found

    def saving(self) -> Saving:
        """Return what all graphs have saved so far, dropped ones included. Sync: waits for the timed calls to end."""
        return combined([self._dropped, *(captured.timing.saving() for captured in self._graphs.values())])

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and of the buffers of all graphs."""
        return self._pool.nbytes + self.input_bytes

    @property
    def input_bytes(self) -> int:
        """Bytes of the buffers that graphs read their inputs from."""
        inputs = sum(captured.inputs.nbytes for captured in self._graphs.values())
        return inputs + sum(lengths.buffer_bytes for lengths in self.multi_step.values())


DOES_NOT_FIT = "something else lies in an attribute, a dict or a list than when the graph was captured"
