"""One call of a module in a step, as a forward and a backward graph that leave the bits of the eager call."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..._callables.autograd_node import PENDING, GraphedPasses
from ..._callables.passes import Passes
from ..._callables.shared_memory import SharedMemory
from ..._capture.graph.graph import CudaGraph, Graph, Pool, capture_stream
from ..._capture.graph.timing import Shares
from ..._capture.keys.inputs import StaticInputs
from ..._capture.keys.placement import empty_like, once, place_of
from ..._errors import CaptureError
from ..._torch.autograd.autograd import graph_nodes
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.modes import WatchingMode
from ..._torch.tensors.tensors import unowned, version
from ..._undo import Undo, replace
from ..._user_line import wraps_operations
from .module_survey import ModuleCall, operation_entry

wraps_operations(__file__)

_OTHER_WEIGHTS = (
    "it does something else where it has others in place of its parameters, as in a capture: does it ask for their "
    "identity (`id(weight)`, `is`, a dict with parameters as keys)?"
)


class PartMemory(SharedMemory):
    """The pools of the parts of one step, which may draw from generators beside the default one.

    The forward graphs that one call has captured share one. What such a graph needs for a moment may be where those
    behind it have activations. So these must not be needed any more when it is replayed. A graph that a later call has
    captured, where a module was left out at first, has a pool of its own: nobody knows its place among the others.
    All backward graphs share another one: they leave only gradients, which are copied at once.
    """

    def __init__(self, device: torch.device, emulated: bool, generators: Sequence[torch.Generator]) -> None:
        super().__init__(device, emulated)
        self.generators = tuple(generators)
        self._backward_pool = Pool()
        self._forward_pools = [Pool()]  # the first one is shared
        self._count = 0  # of the parts with graphs in it
        self._is_shared = True  # by the graphs that are captured next
        self._replayed: list[GraphedPart] = []  # in the order of their captures; those that may be pending, and others
        self.shares: Shares | None = None  # measures how much of the time of the present call each part takes

    @property
    def nbytes(self) -> int:
        """Bytes of the pools. It reads the allocator and does not wait for the device."""
        return sum(pool.nbytes for pool in (self._backward_pool, *self._forward_pools))

    def end_call(self) -> None:
        """Take note that a call is over. If it has captured graphs, later ones do not share their pool."""
        self._is_shared = not self._count

    def number(self) -> int:
        """Return the number of a part that was just captured, 0 if it has a pool of its own."""
        self._count += self._is_shared
        return self._count * self._is_shared

    def is_free(self, part: "GraphedPart") -> bool:
        """Return whether a part may be replayed now: no backward pass may still need one of a higher number."""
        while self._replayed and not self._replayed[-1].pending:
            self._replayed.pop()
        return not (self._replayed and 0 < part.number <= self._replayed[-1].number)

    def note(self, part: "GraphedPart") -> None:
        """Take note of a replay, behind `is_free`."""
        if part.number:
            self._replayed.append(part)

    def measured(self, name: str) -> AbstractContextManager[None]:
        """Return a context for a replay of a part of this name."""
        return nullcontext() if self.shares is None else self.shares.measured(name)

    def graphs(self) -> tuple[Graph, Graph]:
        """Return a forward and a backward graph to capture."""
        if self.emulated:
            return super().graphs()
        stream = capture_stream(self.device, self.use)
        if not self._is_shared:
            self._forward_pools.append(Pool())
        backward = CudaGraph(stream, self._backward_pool, self.generators)
        return CudaGraph(stream, self._forward_pools[-1], self.generators), backward


class PartPasses(Passes):
    """A module's forward and backward pass, in which every addition of gradients is in the order of the eager step.

    Where an input or a parameter is used more than once, the eager step adds its gradients one by one, together with
    those of uses outside of the module. So the gradient of each use is given out by itself, and autograd adds them.

    The autograd graph of the capture is kept. If gradients come in with another layout than those that were seen, or
    the backward pass begins under autocast, as `torch.autograd.grad` in a loss function does, it runs on it eagerly.

    Autograd's leaves are made anew for each forward pass, so that autocast finds no casts of them in its cache.

    The arguments are those of `Passes`, and the call as a survey has seen it. Its operations must be those of this one.
    Without grad mode there is no backward pass.

    Attributes:
        static: the gradients of the differentiable outputs, which backward starts from; None for those without.
        slots: the number of the source of each gradient that backward gives out; see `Passes.grads` for the sources.
    """

    empties_autocast_cache = False  # the eager parts of the step go on with what it has

    def __init__(
        self,
        function: Callable[..., Any],
        call: ModuleCall,
        inputs: StaticInputs,
        device: torch.device,
    ) -> None:
        assert call.layout is not None  # or it is not captured
        self.grad_mode = call.layout.grad_mode
        modules = list(call.module.modules())
        tensors = list(dict.fromkeys(chain(call.module.parameters(), call.module.buffers())))
        super().__init__(function, modules, tensors, inputs, call.layout.wants_grad, device, sees_capture=False)
        self._static_leaves = list(self._leaves)
        self._gradients, self._operations = call.gradients, call.operations
        self.static: list[Tensor | None] = []
        self._edges: list[list[tuple[Any, int]]] = []  # by source: the nodes that use it, and the number of the input
        self.slots: list[int] = []

    def forward(self) -> None:
        """Run the module; keep its outputs with their autograd graph."""
        # A copy into the buffer does not change the version of `.data`, which autograd saves.
        self._renew_leaves([x.data if isinstance(x, Tensor) else x for x in self._static_leaves])
        super().forward()
        numbers = {id(tensor): j for j, tensor in enumerate(self._sources)}
        self._edges = [[] for _ in self._sources]
        for node in graph_nodes([result for result in self.results if result.requires_grad]):
            for place, (following, _) in enumerate(node.next_functions):
                if following is None or following.name() != "torch::autograd::AccumulateGrad":
                    continue
                if id(following.variable) not in numbers:
                    raise CaptureError("it uses a tensor that requires grad and is no input or parameter of it.")
                self._edges[numbers[id(following.variable)]].append((node, place))
        self.slots = [j for j, uses in enumerate(self._edges) for _ in uses]

    def backward(self) -> None:
        """Run the backward pass of the last forward pass on the static gradients; keep the gradients."""
        with torch.autocast(self._device.type, enabled=False):
            self.grads = self.gradients_for(self.static)

    def capture(self, shared: SharedMemory, warmup: int, allow_unused: bool) -> tuple[Graph, Graph]:
        """Warm up and capture both passes, see `Passes.capture`."""
        graphs = super().capture(shared, warmup, allow_unused)
        if not shared.emulated:  # the graphs keep the memory of the pool, and may share that of the gradients
            self.grads = [grad if grad is None or grad.is_sparse else unowned(grad) for grad in self.grads]
        return graphs

    def begins_under_autocast(self) -> bool:
        """Return whether autocast is on, which a backward pass takes from the code that begins it."""
        return torch.is_autocast_enabled(self._device.type)

    def gradients_for(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the slots, computed eagerly for these gradients of the differentiable outputs."""
        results = [result for result in self.results if result.requires_grad]
        pairs = [(result, grad) for result, grad in zip(results, given, strict=True) if grad is not None]
        used = [j for j, edges in enumerate(self._edges) if edges]
        each: dict[int, list[Tensor]] = {j: [] for j in used}
        if not (pairs and used):
            return [None] * len(self.slots)

        def note(places: list[tuple[int, int]], grads: Sequence[Tensor | None], _: object) -> None:
            for place, j in sorted(places):
                grad = grads[place]
                if grad is not None:
                    each[j].append(grad)

        by_node: dict[Any, list[tuple[int, int]]] = {}
        for j, edges in enumerate(self._edges):
            for node, place in edges if len(edges) > 1 else ():
                by_node.setdefault(node, []).append((place, j))
        with self._aliased(), Undo() as undo:
            for node, places in by_node.items():  # of a source that is used several times, each use gives its gradient
                undo.note(node.register_hook(partial(note, places)).remove)
            sums = torch.autograd.grad(
                [result for result, _ in pairs],
                [self._sources[j] for j in used],
                [grad for _, grad in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        for j, found in zip(used, sums, strict=True):
            if found is not None and len(self._edges[j]) == 1:
                each[j] = [found]
        fresh = {j: iter(found) for j, found in each.items()}
        return [next(fresh[j], None) for j in self.slots]

    def _warm_up(self, passes: int, allow_unused: bool) -> tuple[Any, ...]:
        seen = _Operations()
        with Undo() as undo:
            replace(undo, self, "_function", partial(seen.of, self._function))
            self.forward()
        if seen.entries != self._operations:
            raise CaptureError(_OTHER_WEIGHTS)
        known, slots = self._first_forward(), self.slots
        if sum(self.differentiable) != len(self._gradients):
            raise CaptureError("it returned other outputs than before.")
        self.static = [None] * len(self._gradients)
        results = [result for result in self.results if result.requires_grad]
        for i, (result, layout) in enumerate(zip(results, self._gradients, strict=True)):
            if layout is not None:  # the output gets a gradient
                stride, dtype, place = layout
                like = torch.empty_strided(result.shape, stride, dtype=dtype, device=result.device)
                self.static[i] = static = empty_like(like, place)
                once(static).zero_()
        self.has_backward = any(static is not None for static in self.static)
        for _ in range(passes):
            self.forward()
            self._check_same(known)
            if slots != self.slots:
                raise CaptureError("it used its inputs and parameters in another way each time.")
            self.backward()
        for j, grad in zip(self.slots, self.grads, strict=True):
            # The gradient of a parameter gets the parameter's strides in any case.
            if grad is not None and j < len(self.grad_inputs) and torch.empty_like(grad).stride() != grad.stride():
                raise CaptureError("the gradient of an input has a layout that a copy would not have.")
        leaves = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        if any(version(leaf) for leaf in leaves):
            raise CaptureError("it writes into its input, which a replay would not.")
        self._edges = []  # so that no memory is freed during the capture
        return known


class _Operations(WatchingMode):
    """Notes the operations of a call, as a survey does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self.entries: list[Any] = []

    def of(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function."""
        with self:
            return function(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with autocast_of_parts(func):
            result = func(*args, **kwargs)
        self.entries += [operation_entry(func, args, kwargs)] * hasattr(func, "overloadpacket")
        return result


class GraphedPart(GraphedPasses):
    """The two graphs of one call of a module in a step. The time that they take is added to that of `name`.

    A backward pass is eager if gradients come with another layout than at the capture.
    """

    def __init__(self, memory: PartMemory, passes: PartPasses, forward: Graph, backward: Graph, name: str) -> None:
        super().__init__(memory, passes, forward, backward)
        self._memory, self._part, self._name = memory, passes, name
        self.number = memory.number()

    def _replay(self, leaves: list[Any]) -> Any:
        if not self._memory.is_free(self):
            return PENDING
        results = super()._replay(leaves)
        if results is not PENDING:
            self._memory.note(self)
        return results

    def forward(self, leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Replay, see `GraphedPasses.forward`."""
        with self._memory.measured(self._name):
            return super().forward(leaves)

    def sources(self, leaves: list[Any]) -> list[Tensor]:
        """Return the inputs and parameters that `backward` returns gradients of: one as often as it is used."""
        sources = super().sources(leaves)
        return [sources[j] for j in self._part.slots]

    def gradients(self, given: Sequence[Tensor | None], wanted: Sequence[bool]) -> dict[int, Tensor]:
        """Replay, or run eagerly; return the gradients that are wanted, by number."""
        part = self._part
        with self._memory.measured(self._name):
            if all(map(_fits, part.static, given)) and not part.begins_under_autocast():
                for static, grad in zip(part.static, given, strict=True):
                    if static is not None and grad is not None:
                        once(static).copy_(once(grad), non_blocking=True)
                self._backward.replay()
                found = part.grads
            else:
                with self.shared.aside():  # the stream of the nodes that the capture has made
                    found = part.gradients_for(given)
            return {j: grad for j, grad in enumerate(found) if grad is not None and wanted[j]}


def _fits(static: Tensor | None, grad: Tensor | None) -> bool:
    if static is None or grad is None:
        return static is grad
    return static.stride() == grad.stride() and static.dtype is grad.dtype and place_of(static) == place_of(grad)
