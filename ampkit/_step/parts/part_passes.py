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
from ..._callables.passes import Passes, undone
from ..._callables.shared_memory import SharedMemory
from ..._capture.graph.graph import EmulatedGraph, Graph
from ..._capture.graph.pool import no_recompile
from ..._capture.keys.inputs import StaticInputs
from ..._capture.keys.placement import empty_like, once, place_of
from ..._capture.state.watch import autocast
from ..._errors import CaptureError
from ..._torch.autograd.autograd import graph_nodes, keeps_graph
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.modes import WatchingMode, modes
from ..._torch.tensors.settings import settings, unfilled_memory
from ..._torch.tensors.tensors import is_tensor, unowned, version
from ..._torch.tensors.tree import tree_flatten
from ..._undo import Undo, replace
from ..._user_line import wraps_operations
from .module_survey import ModuleCall, operation_entry
from .part_memory import FreedError, PartMemory, SavedTensors

wraps_operations(__file__)

_NO_BACKWARD = (
    "backward of {}, which is captured by itself, cannot be captured with the gradients that it gets now: {} Later "
    "calls of it are eager. Pass on_failure='eager' to do no step in parts."
)
_OTHER_WEIGHTS = (
    "it does something else where it has others in place of its parameters, as in a capture: does it ask for their "
    "identity (`id(weight)`, `is`, a dict with parameters as keys)?"
)


class Context(NamedTuple):
    """What decides which kernels a backward pass runs, beside gradients and what autograd has saved.

    `create_graph` is among it, as the grad mode: some derivatives are computed in another way then (dropout, silu).
    Function modes are not: autograd leaves those around `backward` before it begins.
    """

    autocast: tuple[torch.dtype | None, torch.dtype | None]
    keeps_casts: bool
    creates_graph: bool
    settings: list[Any]

    @classmethod
    def now(cls) -> "Context":
        """Return the context of the code that calls this."""
        return cls(autocast(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), settings())


class PartPasses(Passes):
    """A module's forward and backward pass, in which every addition of gradients is in the order of the eager step.

    Where an input or a parameter is used more than once, the eager step adds its gradients one by one, together with
    those of uses outside of the module. So the gradient of each use is given out by itself, and autograd adds them.

    The autograd graph of the capture is kept, and only a capture may read it: attention saves a number of the host for
    backward, and in a capture a tensor of the device (aten/src/ATen/native/transformers/cuda/attention_backward.cu). So
    a backward pass that no graph can replay, because gradients come in with another layout than those that were seen,
    or because another backward pass will follow, gets a graph for itself. Memory is let go of, see `PartMemory`: that
    of inputs and outputs behind the forward pass, where autograd has not saved them, and that of all that autograd has
    saved behind the backward pass.

    Autograd's leaves are made anew for each forward pass, so that autocast finds no casts of them in its cache.

    Operations of a backward pass are autocast if autocast is on where the caller begins it: within a loss function, as
    `torch.autograd.grad` often is, or a `backward` behind it is not. So each one takes the autocast of its caller.

    A capture leaves modules and random numbers as they were.

    The arguments are those of `Passes`, and the call as a survey has seen it. Its operations must be those of this one.
    Without grad mode there is no backward pass.

    Attributes:
        static: the gradients of the differentiable outputs, which backward starts from; None for those without.
        slots: the number of the source of each gradient that backward gives out; see `Passes.grads` for the sources.
        made: gradients of parameters in the pool, by the number of the slot. Their memory is let go with them.
    """

    empties_autocast_cache = False  # the eager parts of the step go on with what it has

    def __init__(
        self,
        function: Callable[..., Any],
        call: ModuleCall,
        inputs: StaticInputs,
        memory: PartMemory,
    ) -> None:
        assert call.layout is not None  # or it is not captured
        self.grad_mode = call.layout.grad_mode
        self._memory, self._modules = memory, list(call.module.modules())
        tensors = list(dict.fromkeys(chain(call.module.parameters(), call.module.buffers())))
        wants_grad = call.layout.wants_grad
        super().__init__(function, self._modules, tensors, inputs, wants_grad, memory.device, sees_capture=False)
        self._gradients, self._operations = call.gradients, call.operations
        self._data: list[Any] = []  # the leaves of the input, without what autograd knows of them
        self._ends: list[GradientEdge] = []  # of the differentiable outputs
        self.saved = SavedTensors()
        self._runs_again = False  # whether each replay of forward makes a new autograd graph, which backward may free
        self.static: list[Tensor | None] = []
        self._edges: list[list[tuple[Any, int]]] = []  # by source: the nodes that use it, and the number of the input
        self.slots: list[int] = []
        self.made: dict[int, Tensor] = {}

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

    def capture_forward(self, graph: Graph) -> None:
        """Warm up and capture the forward pass, see `Passes.capture`.

        If the backward pass cannot be captured, that is an error as well: nothing else can be done behind this capture.
        """
        self._runs_again = isinstance(graph, EmulatedGraph)
        with self._capturing(self._memory):
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
                if self.has_backward and not self._runs_again:
                    attempt = self._memory.graph_apart()
                    with torch.autocast(self._device.type, enabled=False):  # as in the warm-up
                        attempt.capture(partial(self.gradients_for, self.static, keep=True))
                    attempt.reset()
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

    def capture_backward(self, graph: Graph, *, keep: bool, create_graph: bool) -> None:
        """Capture the backward pass of the last replay of the forward graph, see `Passes.capture`.

        Unless `keep`, it lets go of what autograd has saved: there can be one replay of it behind each one of forward.
        """
        warm, spans = self.static, () if keep else self._memory.spans()  # the one is not freed during the capture
        run = partial(self.gradients_for, create_graph=create_graph)

        def run_again() -> None:
            self.grads = run(self.static, keep=keep)

        def record() -> None:
            with unfilled_memory():
                self.static = [None if static is None else empty_like(static, place_of(static)) for static in warm]
            with self.saved.reading(keep=True, spans=spans):
                self.grads = run(self.static, keep=True)

        with self._capturing(self._memory), no_recompile():
            graph.capture(run_again if self._runs_again else record)
        if not self._runs_again:
            self.static = [None if static is None else unowned(static) for static in self.static]
            first = len(self.grad_inputs)
            whole = [i for i, j in enumerate(self.slots) if j >= first and len(self._edges[j]) == 1]
            self.made = {i: grad for i in whole if (grad := self.grads[i]) is not None and not grad.is_sparse}
            self.grads = [grad if grad is None or grad.is_sparse else unowned(grad) for grad in self.grads]

    def run_backward(
        self, given: Sequence[Tensor | None], *, keep: bool, create_graph: bool
    ) -> tuple[list[Tensor | None], Graph]:
        """Return the gradients of the slots, for these of the outputs; and the graph in whose memory they lie.

        `keep` says whether another backward pass may follow. Waits for the device, unless graphs are emulated.
        """
        graph = self._memory.graph_apart()
        found: list[Tensor | None] = []

        def record() -> None:
            found.extend(self.gradients_for(given, keep=keep or not self._runs_again, create_graph=create_graph))

        with self._capturing(self._memory), no_recompile(), self.saved.reading(keep=keep):
            graph.capture(record)
        graph.replay()
        return found, graph

    def gradients_for(
        self, given: Sequence[Tensor | None], *, keep: bool, create_graph: bool = False
    ) -> list[Tensor | None]:
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
                    each[j].append(grad.detach())

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
                retain_graph=keep or create_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
        for j, found in zip(used, sums, strict=True):
            if found is not None and len(self._edges[j]) == 1:
                each[j] = [found.detach()]
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
                self.grads = self.gradients_for(self.static, keep=False)
        for j, grad in zip(self.slots, self.grads, strict=True):
            # The gradient of a parameter gets the parameter's strides in any case.
            if grad is not None and j < len(self.grad_inputs) and torch.empty_like(grad).stride() != grad.stride():
                raise CaptureError("the gradient of an input has a layout that a copy would not have.")
        leaves = (leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        if any(version(leaf) for leaf in leaves):
            raise CaptureError("it writes into its input, which a replay would not.")
        self._edges = []  # so that no memory is freed during the capture
        return known

    @contextmanager
    def _capturing(self, shared: SharedMemory) -> Iterator[None]:
        with Undo() as undo:
            undo.note(modes())
            with Undo() as draws, undone(self._modules, self._device) as rebound, super()._capturing(shared):
                for generator in self._memory.generators:
                    draws.note(generator.set_state, generator.get_state())
                yield
                if names := rebound():
                    raise CaptureError(f"{', '.join(names[:3])}: made or rebound in forward.")
            undo.forget()  # it would clear autocast's cache, which the eager parts of this step go on with


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

    The first backward pass for gradients of the layout that was seen is captured, and replayed at once. Another one is
    captured for itself if gradients come with another layout, or if autocast or settings of torch are others than in
    the one that was captured, or if the graph would overwrite what is still needed: another backward pass is to follow,
    of this part or of others that came before it when they were captured.

    Attributes:
        failure: why a backward pass could not be captured, "" if each one could.
    """

    def __init__(self, memory: PartMemory, passes: PartPasses, forward: Graph, forward_number: int, name: str) -> None:
        super().__init__(memory, passes, forward, EmulatedGraph())  # no backward graph yet
        self._memory, self._part, self._name = memory, passes, name
        self.forward_number: int = forward_number
        self.backward_number: int = 0
        self.lets_go: bool = False
        self.failure: str = ""
        self._now = Context.now()  # of the backward pass that runs
        self._context: Context | None = None  # of the backward pass that is captured
        self._apart: Graph = EmulatedGraph()  # of a backward pass that has a graph for itself

    def _replay(self, leaves: list[Any]) -> Any:
        if not self._memory.is_free(self, self.forward_number):
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

    def begin_backward(self) -> None:
        """Note what the caller's context is. Backward takes it over, and autocast with it."""
        self._now = Context.now()

    def backward(self, *args: Any) -> list[Tensor | None]:
        """Return copies of gradients, see `GraphedPasses.backward`."""
        copies = super().backward(*args)
        self._apart.reset()
        return copies

    def gradients(self, given: Sequence[Tensor | None], wanted: Sequence[bool]) -> dict[int, Tensor]:
        """Replay, after a capture if there must be one; return the gradients that are wanted, by number.

        Raises:
            CaptureError: a backward pass could be captured with the gradients that were seen, and not with these.
        """
        part = self._part
        try:
            with self._memory.measured(self._name):
                if self._may_replay(given):
                    for static, grad in zip(part.static, given, strict=True):
                        if static is not None and grad is not None:
                            once(static).copy_(once(grad), non_blocking=True)
                    self._backward.replay()
                    part.saved.free()
                    found = part.grads
                else:
                    found, self._apart = part.run_backward(given, **self._kind())
        except CaptureError as error:
            self.failure = str(error)
            if isinstance(error.__cause__, FreedError):
                raise error.__cause__ from None
            raise CaptureError(_NO_BACKWARD.format(self._name, error)) from error
        return {j: grad for j, grad in enumerate(found) if grad is not None and wanted[j]}

    def _kind(self) -> dict[str, bool]:
        return {"keep": keeps_graph(), "create_graph": self._now.creates_graph}

    def _may_replay(self, given: Sequence[Tensor | None]) -> bool:
        """Return whether the graph can do this backward pass. It is captured now if it is the first one."""
        part = self._part
        if not (part.has_backward and all(map(_fits, part.static, given))):
            return False
        if self._context is None:
            graph, number = self._memory.graph()
            if not self._memory.is_free(self, number):
                return False
            part.capture_backward(graph, **self._kind())
            self._backward, self.backward_number = graph, number
            self.lets_go, self._context = not keeps_graph(), self._now
        if self.lets_go and (keeps_graph() or part.saved.is_free):
            return False
        return self._memory.is_free(self, self.backward_number) and self._context == self._now

    def memory_for(self, grads: dict[int, Tensor]) -> list[Tensor | None]:
        """Return where to copy each of these gradients: those of parameters where they will be kept, if that can be."""
        kept, part, first = self._memory.kept, self._part, len(self._part.grad_inputs)
        made, part.made = part.made if self.backward_number else {}, {}
        if kept is None:
            return [None] * len(grads)
        found = []
        for number, grad in grads.items():
            j = part.slots[number] - first
            found.append(None if j < 0 else kept.take(part.params[j], grad, made.get(number)))
            if found[-1] is not None and found[-1].data_ptr() == grad.data_ptr():
                self._memory.stays_in_pool(self)
        return found

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
