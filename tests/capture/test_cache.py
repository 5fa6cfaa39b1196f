"""The outputs of a replay: the tree that the step returned, in tensors of their own."""

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from harness import assert_same
from torch import Tensor

from ampkit._capture.cache import Captured
from ampkit._capture.graph import EmulatedGraph
from ampkit._capture.inputs import StaticInputs, read_batch
from ampkit._capture.timing import Timing
from ampkit._torch.tree import tree_flatten

CPU = torch.device("cpu")


class Out(NamedTuple):
    loss: Any
    aux: Any


ONE, TWO = torch.ones(2), torch.tensor(2.0)
OUTPUTS: dict[str, Any] = {
    "tensor": ONE,
    "none": None,
    "named tuple": Out(ONE, {"a": TWO, "b": [ONE, (TWO,)]}),
    "constants": (Out(ONE, None), (0, 1, 2), "text", 2.5, (), [], {}),
    "a constant beside a tensor": ((1, ONE), [2, TWO]),
    "one tensor twice": (ONE, ONE),
    "a container of another kind": OrderedDict(a=ONE, b=(1, TWO)),
    "a leaf of another kind": (torch.float16, ONE),
    "a queue": (deque([ONE, 1], maxlen=3), TWO),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_rebuilt(name: str) -> None:
    """Types, order, keys and constants are kept; every tensor is another one, in memory of its own, at each replay."""
    expected = OUTPUTS[name]
    graph = EmulatedGraph()
    graph.capture(lambda: expected)
    spec, leaves = read_batch((), {}, CPU)
    captured = Captured(graph, StaticInputs(spec, leaves), 0, Timing(), False)
    first, second = captured.replay(leaves), captured.replay(leaves)
    assert tree_flatten(first)[1] == tree_flatten(expected)[1]
    assert_same(list(tree_flatten(first)[0]), list(tree_flatten(expected)[0]))
    every = [leaf for tree in (expected, first, second) for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    made = {leaf.data_ptr() for leaf in every}
    tensors = len(every) // 3
    assert len(made) == 2 * tensors + len({id(leaf) for leaf in every[:tensors]})
