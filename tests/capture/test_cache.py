"""The outputs of a replay: the tree that the step returned, in tensors of their own."""

from collections import OrderedDict, deque
from typing import Any, NamedTuple

import pytest
import torch
from harness import ENGINES, assert_same
from torch import Tensor

from ampkit._capture.graph.cache import Captured, GraphOutputs
from ampkit._capture.graph.graph import CudaGraph, EmulatedGraph, Pool
from ampkit._capture.graph.timing import Timing
from ampkit._capture.keys.inputs import StaticInputs, read_batch
from ampkit._torch.tensors.tree import tree_flatten, tree_unflatten

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
    graph.capture(lambda: expected, then=GraphOutputs)
    spec, leaves = read_batch((), {}, CPU)
    captured = Captured(graph, StaticInputs(spec, leaves), 0, Timing(), False)
    first, second = captured.replay(leaves), captured.replay(leaves)
    assert tree_flatten(first)[1] == tree_flatten(expected)[1]
    assert_same(list(tree_flatten(first)[0]), list(tree_flatten(expected)[0]))
    every = [leaf for tree in (expected, first, second) for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    made = {leaf.data_ptr() for leaf in every}
    tensors = len(every) // 3
    assert len(made) == 2 * tensors + len({id(leaf) for leaf in every[:tensors]})


TRUE, HALF, LONG = torch.tensor(True), torch.tensor(0.1, dtype=torch.float16), torch.tensor(-(2**40))
NUMBERS: dict[str, Any] = {
    "loss, norm, skip": (Out(torch.tensor(0.1), None), torch.tensor(float("nan")), TRUE),
    "all sizes": [TRUE, HALF, torch.tensor(0.1), LONG, torch.tensor(0.1, dtype=torch.float64), ONE],
    "one number twice": (TWO, TWO),
    "a view of another": (ONE[0], ONE[1], ONE),
    "containers of all kinds": {"a": [TWO], "b": (Out(HALF, {}), [], (1, 2)), "c": OrderedDict(d=deque([TRUE, 3]))},
    "not only numbers": (torch.tensor(1j), TWO, torch.zeros(1, 1), torch.tensor(0.2)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_copied_at_once_and_stay_apart(name: str, engine: tuple[str, str]) -> None:
    """Numbers of many replays, written to in place and used by autograd: no other output sees it."""
    device, _ = engine
    leaves, tree = tree_flatten(NUMBERS[name])
    moved = {id(leaf): leaf.to(device) for leaf in leaves if isinstance(leaf, Tensor)}  # the same one twice, too
    given = tree_unflatten([moved.get(id(leaf), leaf) for leaf in leaves], tree)
    graph: Any = EmulatedGraph() if device == "cpu" else CudaGraph(torch.cuda.Stream(), Pool())
    graph.capture(lambda: given, then=GraphOutputs)
    spec, leaves = read_batch((), {}, torch.device(device))
    captured = Captured(graph, StaticInputs(spec, leaves), 0, Timing(), False)
    if device == "cpu":  # an emulated graph makes other outputs each time
        outputs = graph.replay()
        graph.replay = lambda: outputs
    replays = [captured.replay(leaves) for _ in range(70)]
    tensors = [leaf for replay in replays for leaf in tree_flatten(replay)[0]]
    tensors = [leaf for leaf in tensors if isinstance(leaf, Tensor)]
    expected = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    assert_same(tensors, expected * 70)
    assert len({leaf.data_ptr() for leaf in tensors}) == len(tensors)
    before = [leaf._version for leaf in tensors]
    weight = torch.ones((), device=device, requires_grad=True)
    tensors[0].logical_not_() if tensors[0].dtype is torch.bool else tensors[0].add_(weight)
    assert not any(leaf._is_view() for leaf in tensors)
    assert not any(leaf.requires_grad for leaf in tensors[1:])
    assert [leaf._version for leaf in tensors[1:]] == before[1:]
    assert_same(tensors[1:], (expected * 70)[1:])
    assert_same(captured.replay(leaves), replays[1])


@pytest.mark.cuda
def test_numbers_on_the_host_are_read_behind_each_replay() -> None:
    """A graph cannot copy them: what they are when a replay ends is what the caller gets."""
    here, there = [torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(3.0, device="cuda") for _ in range(2)]
    for numbers in (here, [*here, *there]):
        graph = CudaGraph(torch.cuda.Stream(), Pool())
        graph.capture(lambda numbers=numbers: (numbers, there[0] * 2), then=GraphOutputs)
        spec, leaves = read_batch((), {}, torch.device("cuda", 0))
        captured = Captured(graph, StaticInputs(spec, leaves), 0, Timing(), False)
        here[0].add_(1)
        found, doubled = captured.replay(leaves)
        assert [float(number) for number in found] == [float(number) for number in numbers]
        assert float(doubled) == 6.0


@pytest.mark.cuda
def test_numbers_of_calls_on_several_streams() -> None:
    """A call on another stream gets its numbers in memory that was allocated on that stream, also back on the first."""
    graph = CudaGraph(torch.cuda.Stream(), Pool())
    source = torch.tensor([0.1, 0.2], device="cuda")
    graph.capture(lambda: (source[0] * 1, source[1] * 1), then=GraphOutputs)
    spec, leaves = read_batch((), {}, torch.device("cuda", 0))
    captured = Captured(graph, StaticInputs(spec, leaves), 0, Timing(), False)
    found = []
    for stream in [torch.cuda.Stream(), torch.cuda.current_stream()] * 20:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found += captured.replay(leaves)
            rows = captured._graph._outputs._rows
            assert captured._graph._outputs._stream == stream.cuda_stream, len(rows)
        torch.cuda.current_stream().wait_stream(stream)
    assert_same(torch.stack(found).cpu(), torch.tensor([0.1, 0.2] * 40))
