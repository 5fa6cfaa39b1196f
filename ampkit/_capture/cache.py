"""Which graph serves which input; how many are kept; what each costs and saves."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from .._torch.tree import tree_flatten, tree_unflatten
from .graph import CudaGraph, EmulatedGraph, Graph, Pool
from .inputs import StaticInputs
from .timing import Saving, Timing, combined
from .variation import Key


class Captured:
    """A graph, the buffers that it reads its input from, and what it costs.

    Attributes:
        nbytes: device memory that came with it: growth of the pool in its capture, and the buffers.
        timing: how often it was launched, and how long that and an eager call take.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: StaticInputs,
        pool_bytes: int,
        timing: Timing,
    ) -> None:
        self._graph = graph
        self.inputs = inputs
        self.nbytes = pool_bytes + inputs.nbytes
        self.timing = timing
        self._outputs: Any = _NONE_YET
        self._tensors: list[Tensor] = []  # in them
        self._rebuilt: _Rebuild = next  # the tree around tensors that take their places

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Do the step on this batch; return the outputs, in tensors of their own. Sync: none.

        Raises:
            InputMismatch: see `StaticInputs.refuse_shared`. Nothing was done.
        """
        self.inputs.copy_(leaves)
        outputs = self._graph.replay()
        if any(self.inputs.changed):
            self.inputs.copy_back(leaves)
        if outputs is not self._outputs:  # an emulated graph's are new each time
            self._outputs, self._tensors = outputs, []
            self._rebuilt = _rebuild(outputs, self._tensors)
        return self._rebuilt(map(Tensor.clone, self._tensors))

    def reset(self) -> None:
        """Give up the graph."""
        self._outputs, self._tensors, self._rebuilt = _NONE_YET, [], next
        self._graph.reset()


_NONE_YET = object()  # None may be what the step returns
_Rebuild = Callable[[Iterator[Tensor]], Any]


def _rebuild(node: Any, tensors: list[Tensor]) -> _Rebuild:
    """Return what makes a tree like `node`, with the tensors it is given for those of `node`, which it notes.

    It is what `tree_unflatten` makes, but a tuple of constants stays the same one: with accumulation there is one that
    holds a number for each parameter.
    """
    if isinstance(node, Tensor):
        tensors.append(node)
        return next
    kind = type(node)
    if kind is dict:
        keys, values = list(node), _rebuild(list(node.values()), tensors)
        return lambda given: dict(zip(keys, values(given), strict=True))
    if kind is tuple and _CONSTANTS.issuperset(map(type, node)):
        return lambda given: node
    if kind is list or kind is tuple or (isinstance(node, tuple) and hasattr(kind, "_make")):  # a named tuple
        parts = [_rebuild(child, tensors) for child in node]
        make = kind if kind in (list, tuple) else kind._make
        return lambda given: make([part(given) for part in parts])
    leaves, tree = tree_flatten(node)
    if len(leaves) == 1 and leaves[0] is node:
        return lambda given: node
    parts = [_rebuild(leaf, tensors) for leaf in leaves]
    return lambda given: tree_unflatten([part(given) for part in parts], tree)


def copied(tree: Any) -> Any:
    """Return a tree with a copy of each tensor."""
    tensors: list[Tensor] = []
    rebuilt = _rebuild(tree, tensors)
    return rebuilt(map(Tensor.clone, tensors))


_CONSTANTS = frozenset((bool, int, float, str, type(None)))


class Cache:
    """The graphs of one step by key, in one pool, the least recently used first.

    Args:
        max_graphs: how many are kept.
        memory_budget: bytes of pool and buffers that all of them may take, None without limit.

    Attributes:
        limit: how many are kept from now on.
    """

    def __init__(self, max_graphs: int, memory_budget: int | None) -> None:
        self.limit = max_graphs
        self._budget = memory_budget
        self._pool = Pool()
        self._graphs: OrderedDict[Key, Captured] = OrderedDict()
        self._dropped = Saving(0, None, None)

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[tuple[Key, Captured]]:
        return iter(self._graphs.items())

    def get(self, key: Key) -> Captured | None:
        """Return the graph for this key as the most recently used one, or None."""
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        return captured

    def make_room(self) -> list[Key]:
        """Reset the least recently used graphs until one more fits; return their keys. Their memory stays in the pool,
        for the next one."""
        evicted = []
        while len(self._graphs) >= self.limit:
            key, captured = self._graphs.popitem(last=False)
            self._drop(captured)
            evicted.append(key)
        return evicted

    def drop(self, key: Key) -> None:
        """Reset one graph, if it is there."""
        if key in self._graphs:
            self._drop(self._graphs.pop(key))

    def _drop(self, captured: Captured) -> None:
        captured.reset()  # waits for the device, as the next line would
        self._dropped = combined([self._dropped, captured.timing.saving()])
        captured.timing.replays = 0  # counted; a new graph of this layout has the same timing

    def new_graph(self, stream: Any, generators: Any) -> Graph:
        """Return a graph to capture, emulated where there is no stream."""
        return EmulatedGraph() if stream is None else CudaGraph(stream, self._pool, generators)

    def add(
        self,
        key: Key,
        graph: Graph,
        inputs: StaticInputs,
        pool_bytes_before: int,
        timing: Timing,
    ) -> Captured:
        """Keep a graph that was captured."""
        captured = Captured(graph, inputs, max(0, self._pool.nbytes - pool_bytes_before), timing)
        self._graphs[key] = captured
        return captured

    def over_budget(self) -> bool:
        """Return whether all graphs together take more than the budget."""
        return self._budget is not None and self.nbytes > self._budget

    def clear(self) -> None:
        """Reset all graphs. The pool goes with the last."""
        while self._graphs:
            self._drop(self._graphs.popitem()[1])  # first out of the cache: one that is reset must not serve

    def saving(self) -> Saving:
        """Return what all graphs so far have saved, those that were dropped too. Sync: waits for the calls that were
        measured to end."""
        return combined([self._dropped, *(captured.timing.saving() for captured in self._graphs.values())])

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and all static inputs."""
        return self._pool.nbytes + sum(captured.inputs.nbytes for captured in self._graphs.values())
