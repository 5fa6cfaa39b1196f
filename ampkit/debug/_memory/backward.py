"""Backward run in Python, node by node: autograd's own engine asks for the device's streams, and there may be none."""

import heapq
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..._torch.autograd.autograd import (
    ENGINE_ENTRIES,
    callbacks_queued_by,
    graph_nodes,
    graph_task,
    hooks_noted,
    hooks_wrapped,
    input_metadata,
    leaf_hooks,
    newest_sequence_number,
    output_hooks,
    post_accumulate_hooks,
    sequence_number,
)
from ..._torch.tensors.fake_tensors import is_fake
from ..._torch.tensors.tensors import shares_storage_with_none, use_count
from ..._undo import Undo, replace

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"  # name of the node that adds a gradient to a leaf's `.grad`
# References to a tensor that is in one list and nowhere else, in a function that has taken it out: the list's, the
# local variable's, and the argument of sys.getrefcount.
_SOLE_OWNER_REFERENCES = 3


@dataclass(eq=False)
class _Saved:
    """What stands for a tensor that a node has saved for backward. It is dropped when the node has run."""

    packed: Any  # the tensor, or what a pack hook has made of it
    unpack: Callable[[Any], Tensor] | None = None  # the unpack hook, None for the tensor itself
    is_dropped: bool = False


@dataclass(eq=False)
class _PythonEngine:
    """Runs the backward passes in `without_engine`."""

    _on_node: Callable[[Any], object]
    _saved: dict[int, list[weakref.ref[_Saved]]] = field(default_factory=dict)  # by the sequence number of the node
    # Of each backward that runs, the outermost first.
    _callbacks: list[list[Callable[[], object]]] = field(default_factory=list)

    def pack(self, tensor: Tensor) -> _Saved:
        """Keep a tensor that the newest node of the graph saves."""
        return self._keep(newest_sequence_number(), _Saved(tensor))

    def hooks_for(self, hooks: Any) -> tuple[Callable[[Tensor], _Saved], Callable[[_Saved], Tensor]]:
        """Return hooks that keep what the pack hook of other `saved_tensors_hooks` makes of a tensor."""
        entered = weakref.ref(hooks)  # weakly, because a node keeps the returned hook

        def pack(tensor: Tensor) -> _Saved:
            number, found = newest_sequence_number(), entered()  # the pack hook may make other nodes
            assert found is not None  # it is entered, or this would not be called
            return self._keep(number, _Saved(found.pack_hook(tensor), found.unpack_hook))

        return pack, self.unpack

    def unpack(self, saved: _Saved) -> Tensor:
        """Return a tensor that was saved."""
        if saved.is_dropped:
            raise RuntimeError(
                "Trying to backward through the graph a second time. Specify retain_graph=True the first time."
            )
        tensor: Tensor = saved.packed if saved.unpack is None else saved.unpack(saved.packed)
        return tensor

    def _keep(self, number: int, saved: _Saved) -> _Saved:
        self._saved.setdefault(number, []).append(weakref.ref(saved))
        return saved

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
        """Do what the engine does with these arguments: see torch.autograd.backward and torch.autograd.grad."""
        roots, wanted = (
            [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in given]
            for given in (outputs, inputs)
        )
        task = _GraphTask(roots, wanted if inputs else None, accumulate_grad)
        for edge, grad in zip(roots, grads, strict=True):
            task.add(edge.node, edge.output_nr, _fitted(grad, input_metadata(edge.node)[edge.output_nr]))
        self._callbacks.append([])
        try:
            with graph_task():
                with torch.set_grad_enabled(create_graph):
                    self._run_nodes(task, (lambda node: None) if keep_graph else self._release)
                for callback in self._callbacks[-1]:  # one may queue others
                    callback()
        finally:
            self._callbacks.pop()
        if not accumulate_grad and not allow_unreachable and None in task.results:
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True."
            )
        return tuple(task.results)

    def queue_callback(self, callback: Callable[[], object]) -> None:
        """Call a function when the backward that runs is over."""
        if not self._callbacks:
            raise RuntimeError("Final callbacks can only be installed during backward pass.")
        self._callbacks[-1].append(callback)

    def _run_nodes(self, task: "_GraphTask", release: Callable[[Any], object]) -> None:
        for node, arrived in task:
            _call_output_hooks(node, arrived)  # before the node counts as running, as in the engine
            self._on_node(node)
            task.run_node(node, arrived, release)
            self._on_node(None)

    def _release(self, node: Any) -> None:
        for reference in self._saved.pop(sequence_number(node), ()):
            if (saved := reference()) is not None:
                # Nothing is kept any more: the closure of a checkpoint's hook has the arguments of the function.
                saved.packed, saved.unpack, saved.is_dropped = None, None, True


class _GraphTask:
    """One backward pass: which nodes have to run, in which order, and the gradients that have arrived for each.

    It starts at the roots. `wanted` are the gradients that are asked for, None for those of all leaves. Unless it
    accumulates gradients into `.grad`, they are `results`, None where one has not arrived.
    """

    def __init__(self, roots: list[GradientEdge], wanted: list[GradientEdge] | None, accumulates: bool) -> None:
        self._wanted = wanted or []
        self._accumulates = accumulates
        self.results: list[Tensor | None] = [] if accumulates else [None] * len(self._wanted)
        nodes = list(graph_nodes(roots))
        self._needed = set(nodes)
        if wanted is not None:  # the nodes from which a backward pass gets to one of those, and these
            self._needed = {edge.node for edge in wanted}
            for node in sorted(nodes, key=sequence_number):  # a node leads only to nodes that were made before it
                if any(following in self._needed for following, _ in node.next_functions):
                    self._needed.add(node)
        self._dependencies = Counter(  # how many nodes have yet to send a gradient to a node
            following for node in nodes if node in self._needed for following, _ in node.next_functions
        )
        self._arrived: dict[Any, list[Tensor | None]] = {}  # a gradient for each input of a node, None for no gradient
        self._ready: list[tuple[int, int, Any]] = []  # a heap, highest sequence number first, then in order of arrival
        self._order = count()
        for root in {edge.node for edge in roots if not self._dependencies[edge.node]}:
            self._push(root)

    def __iter__(self) -> Iterator[tuple[Any, list[Tensor | None]]]:
        while self._ready:
            node = heapq.heappop(self._ready)[-1]
            yield node, self._arrived.pop(node, [])

    def _push(self, node: Any) -> None:
        if node in self._needed:
            heapq.heappush(self._ready, (-sequence_number(node), next(self._order), node))

    def add(self, node: Any, i: int, grad: Tensor | None) -> None:
        """Add a gradient to those that have arrived for input `i` of a node."""
        arrived = self._arrived.setdefault(node, [None] * len(input_metadata(node)))
        if grad is None:
            return
        before = arrived[i]
        if before is not None:
            # The gradient that has arrived before is changed if nothing but this list has it or its memory.
            alone = sys.getrefcount(before) <= _SOLE_OWNER_REFERENCES and use_count(before) == 1
            reusable = alone and shares_storage_with_none(before) and before.layout is torch.strided
            grad = before.add_(grad) if reusable and not torch.is_grad_enabled() else before + grad
        arrived[i] = grad

    def run_node(self, node: Any, arrived: list[Tensor | None], release: Callable[[Any], object]) -> None:
        """Run a node on the gradients that have arrived, have what it saved released, and pass on what it returns."""
        for j, edge in enumerate(self._wanted):
            if edge.node is node and not self._accumulates:
                self.results[j] = arrived[edge.output_nr]
        if node.name() == ACCUMULATE_GRAD:
            if self._accumulates:
                _accumulate(node.variable, arrived)
            return
        edges = list(node.next_functions)
        if not any(following in self._needed for following, _ in edges):
            return
        returned = _call(node, arrived)
        arrived.clear()
        for j, (following, i) in enumerate(edges):
            if following in self._needed:
                returned[j] = _fitted(returned[j], input_metadata(following)[i])
        release(node)
        returned.reverse()  # so that each is popped: a gradient has no owner here when it is passed on
        for following, i in edges:
            grad = returned.pop()
            if following in self._needed:
                self.add(following, i, grad)
                self._dependencies[following] -= 1
                if not self._dependencies[following]:
                    self._push(following)
            del grad


def _call_output_hooks(node: Any, arrived: list[Tensor | None]) -> None:
    """Call them here, where no variable keeps a gradient alive while the node runs."""
    for i, hook in output_hooks(node):
        new = hook(arrived[i])
        arrived[i] = arrived[i] if new is None else new


def _call(node: Any, arrived: list[Tensor | None]) -> list[Tensor | None]:
    """Return a gradient, or None, for each of a node's `next_functions`."""
    needs = getattr(node, "needs_input_grad", None)
    if needs is None:  # a node of torch's own
        results = node(*arrived)
        return list(results) if isinstance(results, tuple) else [results]
    inputs = zip(input_metadata(node), arrived, strict=True)
    # The author may have asked for None instead of zeros (`set_materialize_grads`), but that cannot be read.
    arrived = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) if grad is None else grad for x, grad in inputs]
    results = node.apply(*arrived)  # a user's Function returns a gradient for each argument of its forward
    results = results if isinstance(results, tuple) else (results,)
    needed = iter([result for result, need in zip(results, needs, strict=False) if need])
    return [None if following is None else next(needed) for following, _ in node.next_functions]


def _fitted(grad: Tensor | None, metadata: Any) -> Tensor | None:
    """Return a gradient in the shape and dtype that the node which it is passed to takes."""
    if grad is None:
        return None
    if tuple(grad.shape) != tuple(metadata.shape):
        grad = grad.sum_to_size(*metadata.shape)  # of an input that was expanded
    return grad if grad.dtype is metadata.dtype else grad.to(metadata.dtype)


def _accumulate(leaf: Tensor, arrived: list[Tensor | None]) -> None:
    """Run a leaf's hooks, and add the gradient to its `.grad`, as the engine does."""
    for hook in leaf_hooks(leaf):
        new = hook(arrived[0])
        arrived[0] = arrived[0] if new is None else new
    grad = arrived[0]
    if grad is None:
        return
    if leaf.grad is not None:
        if torch.is_grad_enabled():
            leaf.grad = leaf.grad + grad
        else:
            leaf.grad += grad
    else:
        # The gradient itself if nothing else has it and its layout is the leaf's, else a copy.
        alone = sys.getrefcount(grad) <= _SOLE_OWNER_REFERENCES and use_count(grad) == 1
        if not grad.is_sparse and not torch.is_grad_enabled() and alone and _same_layout(grad, leaf):
            leaf.grad = grad.detach()
        elif grad.is_sparse or _same_layout(grad, leaf):
            leaf.grad = grad.clone()
        else:
            leaf.grad = torch.empty_like(leaf).copy_(grad)
    for hook_after in post_accumulate_hooks(leaf):
        hook_after(leaf)


def _same_layout(grad: Tensor, leaf: Tensor) -> bool:
    # Fake kernels do not always get the layout right: cuDNN gives a weight's gradient the layout of the weight. So any
    # fake gradient that fills its memory passes.
    if is_fake(type(grad)) and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size():
        return True
    strides = zip(grad.shape, grad.stride(), leaf.stride(), strict=True)
    return all(stride == leaf_stride for size, stride, leaf_stride in strides if size != 1)


@contextmanager
def without_engine(on_node: Callable[[Any], object]) -> Iterator[None]:
    """Context in which each backward of this process runs in Python, so that tensors need no device.

    Gradients are those of autograd's engine, and memory is freed when the engine would free it. Hooks on tensors are
    called if they are registered in the context, or on leaves. Hooks on nodes, such as those of
    `register_full_backward_hook`, are not. `on_node` is called with each node before it runs, and with None after it.
    """
    engine = _PythonEngine(on_node)
    with (
        saved_tensors_hooks(engine.pack, engine.unpack),
        hooks_wrapped(engine.hooks_for),
        hooks_noted(),
        callbacks_queued_by(engine.queue_callback),
        Undo() as undo,
    ):
        for owner, name in ENGINE_ENTRIES:
            replace(undo, owner, name, engine.run)
        yield
