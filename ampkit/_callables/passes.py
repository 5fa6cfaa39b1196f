"""A forward and a backward pass as two graphs: their static tensors, and the callables that a replay gets wrong."""

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from .._capture.graph.capture_query import answering
from .._capture.graph.graph import Graph
from .._capture.graph.pool import no_recompile
from .._capture.keys.containers import own_batch
from .._capture.keys.inputs import Constant, StaticInputs
from .._capture.preflight.host_values import refuse_reads
from .._errors import CaptureError, CaptureWarning
from .._text import CONSTANTS
from .._torch.autograd.autograd import graph_nodes
from .._torch.autograd.backward_thread import run_backwards_here
from .._torch.tensors.modules import module_tables
from .._torch.tensors.tensors import storage_address
from .._torch.tensors.tree import TreeSpec, tree_flatten, tree_unflatten
from .._undo import Undo, keep_warning_filters
from .input_leaves import Wants, as_input
from .shared_memory import SharedMemory

CAPTURED_AS_THEY_ARE = (*CONSTANTS, torch.dtype, torch.device, torch.Size)


class UnusedError(CaptureError):
    """An input or parameter is unused, which `allow_unused_input` would permit."""


class Passes:
    """A callable's forward and backward pass on static inputs, and the tensors that they read and write.

    Gradients are computed for aliases of the parameters, which share their memory. The parameters themselves would
    bring two things into the capture. Their hooks would run there, and a second time when the caller's autograd gets
    the gradient. And their gradient accumulators belong to the stream on which they were first used: if the caller
    still has an autograd graph with them, that stream would become part of the capture and end it.

    Args:
        function: the callable.
        modules: those whose parameters it uses. `tensors` are these parameters, and the buffers.
        inputs: the static inputs, filled with a sample.
        wants_grad: what each leaf of the input wants.
        sees_capture: whether user code is told that it is being captured, in the calls before the capture, too.

    Attributes:
        grad_inputs: which leaves of the input require grad, by number.
        params: the parameters that require grad.
        grads: the gradients of `grad_inputs`, then those of `params`.
        out_grads: the gradients of the differentiable outputs, which backward starts from.
        differentiable: whether an output requires grad, for each tensor among the outputs.
        has_backward: whether there is a backward pass.
        used_by: for each gradient, the differentiable outputs that depend on its tensor, by number.
        read: parameters and buffers that autograd saved, so that backward reads them where they are.
    """

    # Passes that run now, in any thread. A graphed callable that is called within one of them runs eagerly.
    recording: ClassVar[set[object]] = set()
    # A cast from before would be a constant in the graph, and a cast that was captured lies in the graph's memory.
    empties_autocast_cache: ClassVar[bool] = True
    grad_mode = True  # whether autograd records the forward pass

    def __init__(
        self,
        function: Callable[..., Any],
        modules: list[nn.Module],
        tensors: list[Tensor],
        inputs: StaticInputs,
        wants_grad: tuple[Wants, ...],
        device: torch.device,
        sees_capture: bool,
    ) -> None:
        self.inputs = inputs
        self._sees_capture = sees_capture
        self.grad_inputs = [i for i, wanted in enumerate(wants_grad) if wanted]
        self.params = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        self.grads: Sequence[Tensor | None] = ()
        self.out_grads: list[Tensor] = []
        self.differentiable: list[bool] = []
        self.has_backward = False
        self.used_by: list[set[int]] = []
        self.read: list[Tensor] = []
        self._function = function
        self._device = device
        self._tensors = tensors
        self._kept = [tensor.data for tensor in tensors]  # a graph reads this memory, also after `param.data = ...`
        wanted = set(self.params)
        self._owners = [
            (module, key, param)
            for module in modules
            for key, param in module_tables(module)[0].items()
            if param in wanted
        ]
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []  # what modules get for their parameters
        self._wants = wants_grad
        self._renew_leaves(tree_flatten((inputs.args, inputs.kwargs))[0])
        self._outputs: list[Any] = []
        self._tree: TreeSpec | None = None

    def _renew_leaves(self, leaves: list[Any]) -> None:
        """Make autograd's leaves anew: those of these inputs that require grad, and aliases of the parameters."""
        pairs = zip(leaves, self._wants, strict=True)
        self._leaves = [as_input(leaf, wants) if isinstance(leaf, Tensor) else leaf for leaf, wants in pairs]
        aliases = {param: nn.Parameter(param.data) for param in self.params}
        for param, alias in aliases.items():
            vars(alias).update(vars(param))
        self._places = [(module, key, aliases[param]) for module, key, param in self._owners]
        self._sources: list[Tensor] = [*(self._leaves[i].requires_grad_() for i in self.grad_inputs), *aliases.values()]

    @property
    def results(self) -> list[Tensor]:
        """The tensors among the outputs."""
        return [output for output in self._outputs if isinstance(output, Tensor)]

    def rebuild(self, results: Sequence[Tensor]) -> Any:
        """Return what the callable returns, with these tensors in it."""
        assert self._tree is not None  # set by forward
        fresh = iter(results)
        return tree_unflatten([next(fresh) if isinstance(o, Tensor) else o for o in self._outputs], self._tree)

    def forward(self) -> None:
        """Run the callable; keep its outputs with their autograd graph."""
        # New containers and tensors, which it may change. A copy into a buffer that requires grad would be refused.
        wanted = set(self.grad_inputs)
        leaves = [leaf if i in wanted else own_batch(leaf) for i, leaf in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self.inputs.spec.tree)
        with Undo() as undo, self._aliased(), torch.set_grad_enabled(self.grad_mode):
            run_backwards_here(undo)
            self._outputs, self._tree = tree_flatten(self._function(*args, **kwargs))
        if any(leaf.requires_grad for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in wanted):
            raise CaptureError(
                "it calls requires_grad_() on an argument, and a replay would not do that to the caller's tensor. Pass "
                "one that requires grad."
            )

    def backward(self) -> None:
        """Run the backward pass of the last forward pass; keep the gradients."""
        wanted = [result for result in self.results if result.requires_grad]
        # The autograd graph is retained, because backward may run twice after one forward pass.
        with self._aliased(), torch.autocast(self._device.type, enabled=False):
            self.grads = torch.autograd.grad(
                wanted, self._sources, self.out_grads, retain_graph=True, allow_unused=True
            )

    def capture(self, shared: SharedMemory, warmup: int, allow_unused: bool) -> tuple[Graph, Graph]:
        """Warm up and capture both passes. Waits for the device.

        Raises:
            UnusedError: an input or parameter has no part in any output, and `allow_unused` is False.
            CaptureError: it cannot be captured, or a replay would not do what the callable does.
        """
        forward, backward = shared.graphs()
        with self._capturing(shared):
            known = self._warm_up(warmup, allow_unused)
            self._outputs, self.grads = [], ()  # so that no memory is freed during the capture
            with no_recompile():
                forward.capture(self.forward)
                forward.replay()  # before that, an emulated graph has no outputs
                self._check_same(known)
                if self.has_backward:
                    backward.capture(self.backward)
        return forward, backward

    @contextmanager
    def _capturing(self, shared: SharedMemory) -> Iterator[None]:
        """Context for warm-up and capture. Raises a `CaptureError` at its end if something was read on the host."""
        with shared.aside(), Undo() as undo:
            keep_warning_filters(undo)
            # An empty graph is no mistake here: the backward pass of x + 1 launches nothing.
            warnings.filterwarnings("ignore", "The captured step launched no CUDA kernel", CaptureWarning)
            refuse = refuse_reads(undo)
            yield
            refuse()

    def free_autograd_graph(self) -> None:
        """Free the autograd graph of the capture, and what its hooks and custom functions refer to.

        Its memory goes back to the pool, in which nothing is captured any more.
        """
        self._outputs = [output.detach() if isinstance(output, Tensor) else output for output in self._outputs]

    def _first_forward(self) -> tuple[Any, ...]:
        """Run the forward pass. Note what it saves for backward, and return the signature of its outputs."""
        saved: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            saved.add(storage_address(tensor))
            return tensor.detach()  # the tensor itself would refer to the autograd graph that saves it

        with saved_tensors_hooks(note, lambda tensor: tensor):
            self.forward()
        self.differentiable = [result.requires_grad for result in self.results]
        self.read = [tensor for tensor in self._tensors if storage_address(tensor) in saved - {0}]
        return self._signature()

    def _warm_up(self, passes: int, allow_unused: bool) -> tuple[Any, ...]:
        """Run both passes and set the attributes that describe them. Return the signature of the outputs."""
        versions = self.inputs.versions()
        known = self._first_forward()
        self.used_by = self._find_users()
        self.out_grads = [torch.zeros_like(result) for result in self.results if result.requires_grad]
        self.has_backward = bool(self.out_grads)
        for i in range(passes):
            if i:
                self.forward()
                self._check_same(known)
            if self.out_grads:
                self.backward()
        if versions != self.inputs.versions():
            raise CaptureError("it writes into its input, which a replay would not. Clone the input before.")
        unused = [j for j, grad in enumerate(self.grads) if grad is None]
        if self.out_grads and unused and not allow_unused:
            kind = "an input" if unused[0] < len(self.grad_inputs) else "a parameter"
            raise UnusedError(
                f"no output depends on {kind} of shape {tuple(self._sources[unused[0]].shape)} that requires grad. "
                "Pass allow_unused_input=True, or one that does not require grad."
            )
        return known

    @contextmanager
    def _aliased(self) -> Iterator[None]:
        """Context in which the modules have the aliases for parameters."""
        params = [(module, key, module_tables(module)[0][key]) for module, key, _ in self._places]
        with Undo() as undo:
            run = object()
            if self.empties_autocast_cache:
                undo.note(torch.clear_autocast_cache)
            undo.note(Passes.recording.discard, run)
            undo.note(exchange, params)
            if self.empties_autocast_cache:
                torch.clear_autocast_cache()
            Passes.recording.add(run)
            exchange(self._places)
            with answering(True) if self._sees_capture else nullcontext():
                yield

    def _signature(self) -> tuple[Any, ...]:
        """Return structure, shapes, dtypes and constants of the outputs, which must be the same in each pass."""
        parts: list[Any] = [self._tree]
        for output in self._outputs:
            if isinstance(output, Tensor):
                parts.append((output.shape, output.dtype, output.requires_grad))
                shown = f"{type(output).__name__} of layout {output.layout} on {output.device}"
                plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided
                fits = plain and output.device == self._device
            else:
                parts.append(Constant.for_value(output))
                shown, fits = type(output).__name__, type(output) in CAPTURED_AS_THEY_ARE
            if not fits:
                raise CaptureError(
                    f"it returned a {shown}, which a replay cannot compute anew. Return strided "
                    f"tensors on {self._device}, in tuples, lists and dicts."
                )
        return tuple(parts)

    def _check_same(self, known: tuple[Any, ...]) -> None:
        if self._signature() != known:
            raise CaptureError(
                "it returned something else each time that it was called with the same input. Have it return "
                "tensors of the same shapes and dtypes in each call, and no values that Python counts."
            )

    def _find_users(self) -> list[set[int]]:
        """Return what `used_by` is. It keeps no autograd node, so that the next pass frees the graph of this one."""
        numbers = {id(tensor): j for j, tensor in enumerate(self._sources)}
        used_by: list[set[int]] = [set() for _ in self._sources]
        for i, result in enumerate(result for result in self.results if result.requires_grad):
            for node in graph_nodes([get_gradient_edge(result)]):
                if node.name() != "torch::autograd::AccumulateGrad":
                    continue
                if id(node.variable) not in numbers:
                    raise CaptureError(
                        f"it uses a tensor of shape {tuple(node.variable.shape)} that requires grad and is neither an "
                        "argument nor a parameter of the module, so its gradient would be lost. Pass the tensor as an "
                        "argument, or the module that owns it as the callable."
                    )
                used_by[numbers[id(node.variable)]].add(i)
        return used_by


def exchange(places: Sequence[tuple[nn.Module, str, Any]]) -> None:
    """Give modules these parameters under these names."""
    for module, key, param in places:
        setattr(module, key, param)  # rather than in the table, because an RNN has a list of its own


def replace_forward(undo: Undo, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another `forward` until the end of a context."""
    table = vars(module)
    if "forward" in table:
        undo.note(operator.setitem, table, "forward", table["forward"])
    else:
        undo.note(table.pop, "forward", None)
    table["forward"] = forward


@contextmanager
def undone(modules: Sequence[nn.Module], device: torch.device) -> Iterator[Callable[[], list[str]]]:
    """Context at whose end modules and random numbers are as before: the same attributes, and the values of buffers.

    What was written into parameters stays. Yields a function that returns the names of tensor attributes that were
    given another tensor.
    """
    tables = [(m, table, dict(table)) for m in modules for table in (vars(m), *module_tables(m)[:2])]
    attributes = [value for _, _, before in tables for value in before.values() if isinstance(value, Tensor)]
    values = [(tensor, tensor.detach().clone()) for tensor in attributes if not isinstance(tensor, nn.Parameter)]

    def rebound() -> list[str]:
        return [
            f"{type(module).__name__}.{key}"
            for module, table, before in tables
            for key, value in table.items()
            if isinstance(value, Tensor) and value is not before.get(key)
        ]

    def put_back() -> None:
        for _, table, before in tables:
            for key in table.keys() - before.keys():
                del table[key]
            table.update(before)
        for tensor, value in values:
            # Through .data, so that autograd does not count a change: the bits are as before.
            tensor.data.copy_(value)

    with Undo() as undo:
        undo.note(torch.set_rng_state, torch.get_rng_state())
        if device.type == "cuda":
            undo.note(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        undo.note(put_back)
        yield rebound
