"""One call of a module in a step, as a forward and a backward graph that leave the bits of the eager call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..._callables.autograd_node import PENDING, GraphedPasses
from ..._callables.input_leaves import buffers_like
from ..._callables.passes import Passes
from ..._capture.graph.graph import EmulatedGraph, Graph
from ..._capture.graph.pool import no_recompile
from ..._capture.keys.inputs import StaticInputs
from ..._capture.keys.placement import empty_like, once, place_of
from ..._capture.state.watch import autocast
from ..._errors import CaptureError
from ..._torch.autograd.autograd import graph_nodes, keeps_graph
from ..._torch.autograd.backward_thread import run_backwards_here
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.modes import WatchingMode
from ..._torch.tensors.settings import settings, unfilled_memory
from ..._torch.tensors.tensors import is_tensor, unowned, version
from ..._torch.tensors.tree import tree_flatten
from ..._undo import Undo, replace
from ..._user_line import wraps_operations
from .module_survey import ModuleCall, operation_entry
from .part_memory import PartMemory, SavedTensors

wraps_operations(__file__)

_OTHER_WEIGHTS = (
    "it does something else where it has others in place of its parameters, as in a capture: does it ask for their "
    "identity (`id(weight)`, `is`, a dict with parameters as keys)?"
)


class Context(NamedTuple):
    """What decides which kernels a backward pass runs, beside gradients and what autograd has saved.

    Function modes do not: autograd leaves those around `backward` before it begins.
    """

    autocast: tuple[torch.dtype | None, torch.dtype | None]
    keeps_casts: bool
    settings: list[Any]

    @classmethod
    def now(cls) -> "Context":
        """Return the context of the code that calls this."""
        return cls(autocast(), torch.is_autocast_cache_enabled(), settings())

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """Context in which autocast is as it was then."""
        with Undo() as undo:
            for kind, dtype in zip(("cuda", "cpu"), self.autocast, strict=True):
                again = torch.autocast(kind, dtype, dtype is not None, self.keeps_casts)
                again.__enter__()
                undo.note(again.__exit__, None, None, None)
            yield


class PartPasses(Passes):
    """A module's forward and backward pass, in which every addition of gradients is in the order of the eager step.

    Where an input or a parameter is used more than once, the eager step adds its gradients one by one, together with
    those of uses outside of the module. So the gradient of each use is given out by itself, and autograd adds them.

    The autograd graph of the capture is kept. If a backward pass cannot be replayed, because gradients come in with
    another layout than those that were seen, or because another backward pass will follow, it runs on it eagerly.
    Memory is let go of, see `PartMemory`: that of inputs and outputs behind the forward pass, where autograd has not
    saved them, and that of all that autograd has saved behind the backward pass.

    Autograd's leaves are made anew for each forward pass, so that autocast finds no casts of them in its cache.

    Operations of a backward pass are autocast if autocast is on where the caller begins it: within a loss function, as
    `torch.autograd.grad` often is, or a `backward` behind it is not. So each one takes the autocast of its caller.

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
        self._gradients, self._operations = call.gradients, call.operations
        self._data: list[Any] = []  # the leaves of the input, without what autograd knows of them
        self._ends: list[GradientEdge] = []  # of the differentiable outputs
        self.saved = SavedTensors()
        self._runs_again = False  # whether each replay of forward makes a new autograd graph, which backward may free
        self._lets_go = True
        self.static: list[Tensor | None] = []
        self._edges: list[list[tuple[Any, int]]] = []  # by source: the nodes that use it, and the number of the input
        self.slots: list[int] = []

    def forward(self) -> None:
        """Run the module; keep its outputs with their autograd graph."""
        # A copy into the buffer does not change the version of `.data`, which autograd saves.
        self._data = [x.data if isinstance(x, Tensor) else x for x in _leaves_of(self.inputs)]
        self._renew_leaves(self._data)
        super().forward()
        self._ends = [get_gradient_edge(result) for result in self.results if result.requires_grad]
        numbers = {id(tensor): j for j, tensor in enumerate(self._sources)}
        self._edges = [[] for _ in self._sources]
        for node in graph_nodes(self._ends):
            for place, (following, _) in enumerate(node.next_functions):
                if following is None or following.name() != "torch::autograd::AccumulateGrad":
                    continue
                if id(following.variable) not in numbers:
                    raise CaptureError("it uses a tensor that requires grad and is no input or parameter of it.")
                self._edges[numbers[id(following.variable)]].append((node, place))
        self.slots = [j for j, uses in enumerate(self._edges) for _ in uses]

    def backward(self) -> None:
        """Run the backward pass of the last forward pass on the static gradients; keep the gradients."""
        self.grads = self.gradients_for(self.static, keep=not (self._runs_again and self._lets_go))

    def capture_forward(self, graph: Graph, memory: PartMemory) -> None:
        """Warm up and capture the forward pass, see `Passes.capture`."""
        self._runs_again = isinstance(graph, EmulatedGraph)
        with self._capturing(memory):
            known = self._warm_up()
            given = _leaves_of(self.inputs)
            self._outputs, self._ends, self.grads = [], [], ()  # so that no memory is freed during the capture
            with no_recompile():
                graph.capture(self.forward if self._runs_again else self._record_forward)
                if not self._runs_again:
                    with torch.no_grad():
                        self.inputs.copy_(given)
                graph.replay()  # before that, an emulated graph has no outputs
                self._check_same(known)
        if not self._runs_again:
            self._outputs = [unowned(output) if isinstance(output, Tensor) else output for output in self._outputs]
            for leaf in filter(is_tensor, (*self._leaves, *self._data)):
                leaf.data = unowned(leaf)
            self.inputs = StaticInputs(self.inputs.spec, given, list(filter(is_tensor, self._data)))

    def _record_forward(self) -> None:
        with unfilled_memory():
            self.inputs = buffers_like(self.inputs.spec, _leaves_of(self.inputs))  # in the pool
        with saved_tensors_hooks(self.saved.pack, self.saved.unpack):
            self.forward()

    def capture_backward(self, graph: Graph, memory: PartMemory, *, lets_go: bool) -> None:
        """Capture the backward pass of the last replay of the forward graph, see `Passes.capture`.

        If it lets go of what autograd has saved, there can be one replay of it behind each replay of forward.
        """
        self._lets_go = lets_go
        warm, spans = self.static, memory.spans() if lets_go else ()  # the one is not freed during the capture

        def record() -> None:
            self.saved.begin()
            with unfilled_memory():
                self.static = [None if static is None else empty_like(static, place_of(static)) for static in warm]
            with self.saved.reading(keep=True, spans=spans):
                self.backward()

        with self._capturing(memory), no_recompile(), Undo() as undo:
            run_backwards_here(undo)  # as within the step
            graph.capture(self.backward if self._runs_again else record)
        if not self._runs_again:
            self.static = [None if static is None else unowned(static) for static in self.static]
            self.grads = [grad if grad is None or grad.is_sparse else unowned(grad) for grad in self.grads]

    def run_backward(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the slots. The backward pass runs eagerly, within one of the caller's."""
        keep = keeps_graph()
        with self.saved.reading(keep=keep):
            return self.gradients_for(given, keep=keep or not self._runs_again)

    def gradients_for(self, given: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """Return the gradients of the slots for these gradients of the differentiable outputs.

        `keep` says whether the autograd graph is kept.
        """
        pairs = [(end, grad) for end, grad in zip(self._ends, given, strict=True) if grad is not None]
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
                [end for end, _ in pairs],
                [self._sources[j] for j in used],
                [grad for _, grad in pairs],
                retain_graph=keep,
                allow_unused=True,
            )
        for j, found in zip(used, sums, strict=True):
            if found is not None and len(self._edges[j]) == 1:
                each[j] = [found]
        fresh = {j: iter(found) for j, found in each.items()}
        return [next(fresh[j], None) for j in self.slots]

    def _warm_up(self, passes: int = 2, allow_unused: bool = True) -> tuple[Any, ...]:
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
            with torch.autocast(self._device.type, enabled=False):  # so that it leaves no casts to the caller
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

    A backward pass is eager before its graph is captured, or if gradients come with another layout than at the capture,
    or if autocast or settings of torch are others than in the backward pass that was captured, or if the graph would
    overwrite what is still needed: another backward pass is to follow, of this part or of others that came before it
    when they were captured.

    Attributes:
        first_backward: the number of a backward pass that is to be captured, and its context; None if there is none.
    """

    def __init__(self, memory: PartMemory, passes: PartPasses, forward: Graph, name: str) -> None:
        super().__init__(memory, passes, forward, EmulatedGraph())  # no backward graph yet
        self._memory, self._part, self._name = memory, passes, name
        self._has_backward = False  # captured
        self.forward_number: int = memory.number()
        self.backward_number: int = 0
        self.lets_go: bool = True
        self.first_backward: tuple[int, Context] | None = None
        self._context: Context | None = None  # of the backward pass that is captured

    def capture_backward(self) -> None:
        """Capture the backward pass, behind the call in which it has run for the first time."""
        assert self.first_backward is not None  # it has run
        _, known = self.first_backward
        self.first_backward = None
        with known.autocasting():
            with torch.no_grad():  # as in a backward pass
                same = known == Context.now()
            if not same:
                raise CaptureError("settings of torch are others in its backward than behind the step.")
            self._backward, self._context = self._memory.graph(), known
            self._part.capture_backward(self._backward, self._memory, lets_go=self.lets_go)
        self.backward_number, self._has_backward = self._memory.number(), True

    def _replay(self, leaves: list[Any]) -> Any:
        if not self._memory.is_free(self):
            return PENDING
        results = super()._replay(leaves)
        if results is not PENDING:
            self._memory.note(self)
        return results

    def forward(self, leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Replay, see `GraphedPasses.forward`."""
        self._part.saved.begin()
        with self._memory.measured(self._name):
            return super().forward(leaves)

    def sources(self, leaves: list[Any]) -> list[Tensor]:
        """Return the inputs and parameters that `backward` returns gradients of: one as often as it is used."""
        sources = super().sources(leaves)
        return [sources[j] for j in self._part.slots]

    def check_autocast(self) -> None:
        """Backward takes the autocast of its caller."""

    def gradients(self, given: Sequence[Tensor | None], wanted: Sequence[bool]) -> dict[int, Tensor]:
        """Replay, or run eagerly; return the gradients that are wanted, by number."""
        part = self._part
        with self._memory.measured(self._name):
            if self._may_replay(given):
                for static, grad in zip(part.static, given, strict=True):
                    if static is not None and grad is not None:
                        once(static).copy_(once(grad), non_blocking=True)
                self._backward.replay()
                part.saved.free()
                found = part.grads
            else:
                with self.shared.aside():  # the stream of the nodes that the capture has made
                    found = part.run_backward(given)
            return {j: grad for j, grad in enumerate(found) if grad is not None and wanted[j]}

    def _may_replay(self, given: Sequence[Tensor | None]) -> bool:
        fits = self._part.has_backward and all(map(_fits, self._part.static, given))
        if not self._has_backward:
            self.lets_go &= not keeps_graph()
            if fits and self.first_backward is None:
                self.first_backward = self._memory.backward_passes(), Context.now()
            return False
        if self.lets_go and (keeps_graph() or self._part.saved.is_free):
            return False
        return fits and self._memory.is_free_behind(self) and self._context == Context.now()

    def memory_for(self, grads: dict[int, Tensor]) -> list[Tensor | None]:
        """Return where to copy each of these gradients: those of parameters where they will be kept, if that can be."""
        kept, slots, first = self._memory.kept, self._part.slots, len(self._part.grad_inputs)
        if kept is None:
            return [None] * len(grads)
        places = [(slots[number] - first, grad) for number, grad in grads.items()]
        return [None if j < 0 else kept.take(self._part.params[j], grad) for j, grad in places]

    def is_last(self, given: Sequence[Tensor | None]) -> bool:
        """Return whether no backward pass may follow. One may that starts from outputs that have no gradient here."""
        pairs = zip(self._part.static, given, strict=True)
        return super().is_last(given) and not any(static is not None and grad is None for static, grad in pairs)


def _leaves_of(inputs: StaticInputs) -> list[Any]:
    return tree_flatten((inputs.args, inputs.kwargs))[0]


def _fits(static: Tensor | None, grad: Tensor | None) -> bool:
    if static is None or grad is None:
        return static is grad
    return static.stride() == grad.stride() and static.dtype is grad.dtype and place_of(static) == place_of(grad)
