"""Which graph serves which input; how many are kept; the bytes of each."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ._graph import CudaGraph, EmulatedGraph, Graph, Pool
from ._inputs import StaticInputs
from ._torch import tree_flatten, tree_unflatten


class Captured:
    """A graph, the buffers that it reads its input from, and what it costs.

    Attributes:
        nbytes: device memory that came with it: growth of the pool in its capture, and the buffers.
        replays: how often it was launched.
    """

    def __init__(self, graph: Graph, inputs: StaticInputs, changed: list[bool], pool_bytes: int) -> None:
        self._graph = graph
        self.inputs = inputs
        self._changed = changed  # which buffers the step changes in place
        self.nbytes = pool_bytes + inputs.nbytes
        self.replays = 0
        self._outputs: Any = None
        self._output_leaves: Any = None
        self._output_tree: Any = None

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Do the step on this batch; return the outputs, in tensors of their own. Sync: none."""
        self.inputs.copy_(leaves)
        before = self.inputs.versions()
        outputs = self._graph.replay()
        now = self.inputs.versions()
        # An emulated graph changes them only now.
        self._changed = [old or a != b for old, a, b in zip(self._changed, before, now, strict=True)]
        if any(self._changed):
            self.inputs.copy_back(leaves, self._changed)
        if outputs is not self._outputs:  # an emulated graph's are new each time
            self._outputs = outputs
            self._output_leaves, self._output_tree = tree_flatten(outputs)
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._output_leaves]
        return tree_unflatten(copies, self._output_tree)

    def reset(self) -> None:
        """Give up the graph."""
        self._outputs = self._output_leaves = None
        self._graph.reset()


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
        self._graphs: OrderedDict[Hashable, Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[tuple[Any, Captured]]:
        return iter(self._graphs.items())

    def get(self, key: Hashable) -> Captured | None:
        """Return the graph for this key as the most recently used one, or None."""
        captured = self._graphs.get(key)
        if captured is not None:
            self._graphs.move_to_end(key)
        return captured

    def make_room(self) -> list[Hashable]:
        """Reset the least recently used graphs until one more fits; return their keys. Their memory stays in the pool,
        for the next one."""
        evicted = []
        while len(self._graphs) >= self.limit:
            key, captured = self._graphs.popitem(last=False)
            captured.reset()
            evicted.append(key)
        return evicted

    def new_graph(self, stream: Any, generators: Any) -> Graph:
        """Return a graph to capture, emulated where there is no stream."""
        return EmulatedGraph() if stream is None else CudaGraph(stream, self._pool, generators)

    def add(
        self, key: Hashable, graph: Graph, inputs: StaticInputs, changed: list[bool], pool_bytes_before: int
    ) -> Captured:
        """Keep a graph that was captured."""
        captured = Captured(graph, inputs, changed, max(0, self._pool.nbytes - pool_bytes_before))
        self._graphs[key] = captured
        return captured

    def over_budget(self) -> bool:
        """Return whether all graphs together take more than the budget."""
        return self._budget is not None and self.nbytes > self._budget

    def clear(self) -> None:
        """Reset all graphs. The pool goes with the last."""
        for captured in self._graphs.values():
            captured.reset()
        self._graphs.clear()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self._pool.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the pool and all static inputs."""
        return self._pool.nbytes + sum(captured.inputs.nbytes for captured in self._graphs.values())
