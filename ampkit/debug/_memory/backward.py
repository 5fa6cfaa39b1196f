"""Backward node by node, in Python: autograd's own engine asks the device for its streams, and there may be none."""

import heapq
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..._torch.autograd import (
    ENGINE_ENTRIES,
    graph_nodes,
    graph_task,
    input_metadata,
    leaf_hooks,
    newest_sequence_number,
    post_accumulate_hooks,
    sequence_number,
)
from ..._torch.fake_tensors import is_fake
from ..._torch.tensors import shares_storage_with_none, use_count

_ACCUMULATES = "torch::autograd::AccumulateGrad"
_REFERENCES = 3  # to a tensor in a list that a function has taken out and asks about


class _Saved:
    """What a node keeps of the forward, until it has run."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor


class Backward:
    """Runs backwards within `without_engine`.

    Args:
        on_node: called with each node before it runs, with None behind the last.
    """

    def __init__(self, on_node: Callable[[Any], object]) -> None:
        self._on_node = on_node
        self._saved: dict[int, list[weakref.ref[_Saved]]] = {}  # by the number of the node

    def pack(self, tensor: Tensor) -> _Saved:
        """Keep a tensor that the newest node of the graph saves."""
        saved = _Saved(tensor)
        self._saved.setdefault(newest_sequence_number(), []).append(weakref.ref(saved))
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        """Return what was kept."""
        if saved.tensor is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time. Specify retain_graph=True the first time."
            )
        return saved.tensor

    def run(
        self,
        outputs: Sequence[Tensor | GradientEdge],
        grads: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor | GradientEdge],
        allow_unreachable: bool = True,
        accumulate_grad: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """Do what the engine does, with its arguments: see torch.autograd.backward and torch.autograd.grad."""
        wanted = [_edge(tensor) for tensor in inputs]
        task = _Task([_edge(output) for output in outputs], wanted if inputs else None, accumulate_grad)
        for edge, grad in zip(map(_edge, outputs), grads, strict=True):
            task.add(edge.node, edge.output_nr, grad)
        with torch.set_grad_enabled(create_graph), graph_task():
            for node, buffer in task:
                self._on_node(node)
                task.pass_on(node, buffer)
                if not keep_graph:
                    self._release(node)
        self._on_node(None)
        if not accumulate_grad and not allow_unreachable and None in task.captured:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True."
            )
        return tuple(task.captured)

    def _release(self, node: Any) -> None:
        for reference in self._saved.pop(sequence_number(node), ()):
            if (saved := reference()) is not None:
                saved.tensor = None


class _Task:
    """One backward: which nodes are to run, what has arrived for them, and in what order they come.

    Args:
        roots: where it starts.
        wanted: the gradients that are asked for; None for those of all leaves.
        accumulates: they are accumulated into `.grad`, not returned.
    """

    def __init__(self, roots: list[GradientEdge], wanted: list[GradientEdge] | None, accumulates: bool) -> None:
        self._wanted = wanted or []
        self._accumulates = accumulates
        self.captured: list[Tensor | None] = [] if accumulates else [None] * len(self._wanted)
        nodes = list(graph_nodes(roots))
        self._needed = set(nodes) if wanted is None else _leading_to(nodes, {edge.node for edge in wanted})
        self._missing = Counter(
            following for node in nodes if node in self._needed for following, _ in node.next_functions
        )
        self._buffers: dict[Any, list[Tensor | None]] = {}
        self._ready: list[tuple[int, int, Any]] = []
        self._order = count()
        self._roots = {edge.node for edge in roots if not self._missing[edge.node]}

    def __iter__(self) -> Iterator[tuple[Any, list[Tensor | None]]]:
        for root in self._roots:
            self._push(root)
        while self._ready:
            node = heapq.heappop(self._ready)[-1]
            yield node, self._buffers.pop(node, [])

    def _push(self, node: Any) -> None:
        if node in self._needed:
            heapq.heappush(self._ready, (-sequence_number(node), next(self._order), node))

    def add(self, node: Any, i: int, grad: Tensor | None) -> None:
        """A gradient arrives."""
        metadata = input_metadata(node)
        buffer = self._buffers.setdefault(node, [None] * len(metadata))
        if grad is None:
            return
        if tuple(grad.shape) != tuple(metadata[i].shape):
            grad = grad.sum_to_size(*metadata[i].shape)  # of an input that was expanded
        if grad.dtype is not metadata[i].dtype:
            grad = grad.to(metadata[i].dtype)
        if buffer[i] is not None:
            grad = _sum(buffer, i, grad)
        buffer[i] = grad

    def pass_on(self, node: Any, buffer: list[Tensor | None]) -> None:
        """Run a node, and hand on what it returns."""
        for j, edge in enumerate(self._wanted):
            if edge.node is node and not self._accumulates:
                self.captured[j] = buffer[edge.output_nr]
        if node.name() == _ACCUMULATES:
            if self._accumulates:
                _accumulate(node.variable, buffer)
            return
        edges = list(node.next_functions)
        if not any(following in self._needed for following, _ in edges):
            return
        results = _call(node, buffer)
        buffer.clear()
        results.reverse()
        for following, i in edges:
            result = results.pop()
            if following in self._needed:
                self.add(following, i, result)
                self._missing[following] -= 1
                if not self._missing[following]:
                    self._push(following)
            del result


def _edge(tensor: Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(tensor) if isinstance(tensor, Tensor) else tensor


def _leading_to(nodes: list[Any], ends: set[Any]) -> set[Any]:
    """Return the nodes that one of the ends can be reached from. Nodes made earlier come behind those made later."""
    needed = set(ends)
    for node in sorted(nodes, key=sequence_number):
        if any(following in needed for following, _ in node.next_functions):
            needed.add(node)
    return needed


def _call(node: Any, buffer: list[Tensor | None]) -> list[Tensor | None]:
    """Return a gradient, or None, per edge to a next node."""
    needs = getattr(node, "needs_input_grad", None)
    if needs is None:
        results = node(*buffer)
        return list(results) if isinstance(results, tuple) else [results]
    arrived = zip(input_metadata(node), buffer, strict=True)
    # Whether its author wanted None here instead (`set_materialize_grads`) cannot be read.
    buffer = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) if grad is None else grad for x, grad in arrived]
    results = node.apply(*buffer)  # of a user's Function: a result per argument of its forward
    results = results if isinstance(results, tuple) else (results,)
    needed = iter([result for result, need in zip(results, needs, strict=False) if need])
    return [None if following is None else next(needed) for following, _ in node.next_functions]


def _sum(buffer: list[Tensor | None], i: int, grad: Tensor) -> Tensor:
    """Add a gradient to the one that was there, in place if nobody else has that."""
    alone = _is_alone(buffer, i)
    there = buffer[i]
    assert there is not None
    return there.add_(grad) if alone and not torch.is_grad_enabled() else there + grad


def _is_alone(buffer: list[Tensor | None], i: int) -> bool:
    """Return whether nobody else has this tensor or its memory, so that it may be changed."""
    tensor = buffer[i]
    assert tensor is not None
    alone = sys.getrefcount(tensor) <= _REFERENCES and use_count(tensor) == 1
    return alone and shares_storage_with_none(tensor) and tensor.layout is torch.strided


def _accumulate(leaf: Tensor, buffer: list[Tensor | None]) -> None:
    """Make a gradient the leaf's, or add it to that."""
    for hook in leaf_hooks(leaf):
        new = hook(buffer[0])
        buffer[0] = buffer[0] if new is None else new
    grad = buffer[0]
    if grad is None:
        return
    if leaf.grad is not None:
        if torch.is_grad_enabled():
            leaf.grad = leaf.grad + grad
        else:
            leaf.grad += grad
    else:
        del grad
        leaf.grad = _stolen(leaf, buffer)
    for done in post_accumulate_hooks(leaf):
        done(leaf)


def _stolen(leaf: Tensor, buffer: list[Tensor | None]) -> Tensor:
    """Return the gradient itself if nobody else has it and it is laid out as the leaf, else a copy that is."""
    grad = buffer[0]
    assert grad is not None
    alone = sys.getrefcount(grad) <= _REFERENCES and use_count(grad) == 1
    if not grad.is_sparse and not torch.is_grad_enabled() and alone and _same_layout(grad, leaf):
        return grad.detach()
    return grad.clone() if grad.is_sparse or _same_layout(grad, leaf) else torch.empty_like(leaf).copy_(grad)


def _same_layout(grad: Tensor, leaf: Tensor) -> bool:
    # Fake kernels know sizes, but not always the layout: cuDNN gives a weight's gradient the layout of the weight.
    if is_fake(type(grad)) and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size():
        return True
    sizes = zip(grad.shape, grad.stride(), leaf.stride(), strict=True)
    return all(mine == others for size, mine, others in sizes if size != 1)


@contextmanager
def without_engine(on_node: Callable[[Any], object]) -> Iterator[None]:
    """Context in which each backward of this process runs in Python, for tensors that have no device.

    Gradients are the engine's, and memory is freed when the engine would free it. Hooks on leaves are called; hooks on
    other tensors and on nodes (those of `register_full_backward_hook` among them) are not.

    Args:
        on_node: called with each node before it runs, with None behind the last.
    """
    backward = Backward(on_node)
    before = [getattr(owner, name) for owner, name in ENGINE_ENTRIES]
    with saved_tensors_hooks(backward.pack, backward.unpack):
        for owner, name in ENGINE_ENTRIES:
            setattr(owner, name, backward.run)
        try:
            yield
        finally:
            for (owner, name), function in zip(ENGINE_ENTRIES, before, strict=True):
                setattr(owner, name, function)
