"""A forward and a backward pass as two graphs: static inputs, outputs and gradients, and what a replay gets wrong."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from .._capture.graph import Graph
from .._capture.inputs import Constant, StaticInputs
from .._capture.pool import no_recompile
from .._errors import CaptureError, CaptureWarning
from .._torch.autograd import graph_nodes
from .._torch.modules import module_tables
from .._torch.tensors import storage_address
from .._torch.tree import TreeSpec, tree_flatten, tree_unflatten
from .._undo import Undo, keep_warning_filters
from .shared_memory import SharedMemory

_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


class UnusedError(CaptureError):
    """An input or parameter is unused, which `allow_unused_input` would permit."""


class Passes:
    """A callable's forward and backward pass on static inputs, and all that they read and write.

    Gradients are taken with respect to aliases of the parameters, which share their memory. A parameter itself would
    bring along its hooks, which run again where the gradient arrives, and its gradient accumulator, which belongs to
    the stream it was first used on: as long as an autograd graph of the caller's keeps it, that stream is drawn into
    the capture and ends it.

    Args:
        function: the callable.
        modules: whose parameters it uses.
        tensors: the parameters and buffers of these.
        inputs: filled.
        wants_grad: per leaf of the input.
        device: of all of these.

    Attributes:
        entries: the leaves of the input that a gradient is wanted for, by number.
        params: the parameters that a gradient is wanted for.
        grads: of entries, then params.
        seeds: gradients of the differentiable outputs.
        differentiable: per tensor among the outputs.
        dependents: per gradient the differentiable outputs, by number, that it depends on.
        read: parameters and buffers that autograd saved, so that backward reads them where they are.
    """

    recording: ClassVar[set[object]] = set()  # what runs now: a graphed callable below is part of what is recorded

    def __init__(
        self,
        function: Callable[..., Any],
        modules: list[nn.Module],
        tensors: list[Tensor],
        inputs: StaticInputs,
        wants_grad: tuple[bool, ...],
        device: torch.device,
    ) -> None:
        self.inputs = inputs
        self.entries = [i for i, wanted in enumerate(wants_grad) if wanted]
        self.params = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        self.grads: Sequence[Tensor | None] = ()
        self.seeds: list[Tensor] = []
        self.differentiable: list[bool] = []
        self.dependents: list[set[int]] = []
        self.read: list[Tensor] = []
        self._function = function
        self._device = device
        self._tensors = tensors
        self._kept = [tensor.data for tensor in tensors]  # a graph reads them where they are, replaced or not
        aliases = {param: nn.Parameter(param.data) for param in self.params}
        for param, alias in aliases.items():
            vars(alias).update(vars(param))
        self._cells = [
            (module, key, aliases[param])
            for module in modules
            for key, param in module_tables(module)[0].items()
            if param in aliases
        ]
        self._leaves = tree_flatten((inputs.args, inputs.kwargs))[0]
        self._wrt = [self._leaves[i].requires_grad_() for i in self.entries] + list(aliases.values())
        self._outputs: list[Any] = []
        self._tree: TreeSpec | None = None

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
        args, kwargs = tree_unflatten(self._leaves, self.inputs.spec.tree)  # anew: it may change a list or dict
        with self._aliased(), torch.enable_grad():
            self._outputs, self._tree = tree_flatten(self._function(*args, **kwargs))

    def backward(self) -> None:
        """Run the backward pass of the last forward pass; keep the gradients."""
        wanted = [result for result in self.results if result.requires_grad]
        # Retained: what this pass would free, a second one after the same forward pass needs.
        with self._aliased(), torch.autocast(self._device.type, enabled=False):
            self.grads = torch.autograd.grad(wanted, self._wrt, self.seeds, retain_graph=True, allow_unused=True)

    def capture(self, shared: SharedMemory, warmup: int, allow_unused: bool) -> tuple[Graph, Graph]:
        """Warm up and capture both passes. Waits for the device.

        Raises:
            UnusedError: a gradient depends on no output, and `allow_unused` is False.
            CaptureError: it cannot be captured, or a replay would not do what the callable does.
        """
        forward, backward = shared.graphs()
        with shared.aside(), Undo() as undo:
            keep_warning_filters(undo)
            # Of an empty graph: the backward pass of x + 1 launches nothing.
            warnings.filterwarnings("ignore", "The captured step launched no CUDA kernel", CaptureWarning)
            known = self._warm_up(warmup, allow_unused)
            self._outputs, self.grads = [], ()  # so that nothing is freed in mid-capture
            with no_recompile():
                forward.capture(self.forward)
                forward.replay()  # an emulated graph has no outputs before
                self._check_same(known)
                if self.seeds:
                    backward.capture(self.backward)
        # The autograd graph goes, and with it whatever hooks and custom functions in it hold. Its memory is the pool's,
        # from which nothing is captured any more.
        self._outputs = [output.detach() if isinstance(output, Tensor) else output for output in self._outputs]
        return forward, backward

    def _warm_up(self, passes: int, allow_unused: bool) -> tuple[Any, ...]:
        """Run both passes; find out what there is to know of them. Return the signature of the outputs."""
        saved: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            saved.add(storage_address(tensor))
            return tensor.detach()  # a graph that saves one of its own tensors by a hook would never be freed

        versions = self.inputs.versions()
        with saved_tensors_hooks(note, lambda tensor: tensor):
            self.forward()
        known = self._signature()
        self.dependents = self._find_dependents()
        self.differentiable = [result.requires_grad for result in self.results]
        self.seeds = [torch.zeros_like(result) for result in self.results if result.requires_grad]
        self.read = [tensor for tensor in self._tensors if storage_address(tensor) in saved - {0}]
        for i in range(passes):
            if i:
                self.forward()
                self._check_same(known)
            if self.seeds:
                self.backward()
        if versions != self.inputs.versions():
            raise CaptureError("it writes into its input, which a replay would not. Clone the input before.")
        if self.seeds and not allow_unused:
            self._check_used()
        return known

    @contextmanager
    def _aliased(self) -> Iterator[None]:
        """Context in which the modules have the aliases for parameters, and nothing is in autocast's cache before or
        after: a cast that a capture made is memory of the graph, and one that it found would be frozen into it."""
        params = [(module, key, module_tables(module)[0][key]) for module, key, _ in self._cells]
        with Undo() as undo:
            run = object()
            undo.note(torch.clear_autocast_cache)
            undo.note(Passes.recording.discard, run)
            undo.note(_set, params)
            torch.clear_autocast_cache()
            Passes.recording.add(run)
            _set(self._cells)
            yield

    # --------------------------------------------------------------------------------------------------------- checks

    def _signature(self) -> tuple[Any, ...]:
        """Return what of the outputs must be the same in each pass."""
        parts: list[Any] = [self._tree]
        for output in self._outputs:
            if isinstance(output, Tensor):
                parts.append((output.shape, output.dtype, output.requires_grad))
                what = f"{type(output).__name__} of layout {output.layout} on {output.device}"
                plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided
                fits = plain and output.device == self._device
            else:
                parts.append(Constant(type(output), output))
                what, fits = type(output).__name__, type(output) in _CONSTANTS
            if not fits:
                raise CaptureError(
                    f"it returned a {what}, which a replay cannot compute anew. Return strided "
                    f"tensors on {self._device}, in tuples, lists and dicts."
                )
        return tuple(parts)

    def _check_same(self, known: tuple[Any, ...]) -> None:
        if self._signature() != known:
            raise CaptureError("it returned something else each time that it was called with the same input.")

    def _find_dependents(self) -> list[set[int]]:
        numbers = {id(tensor): j for j, tensor in enumerate(self._wrt)}
        dependents: list[set[int]] = [set() for _ in self._wrt]
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
                dependents[numbers[id(node.variable)]].add(i)
        return dependents

    def _check_used(self) -> None:
        for j, grad in enumerate(self.grads):
            if grad is None:
                kind = "an input" if j < len(self.entries) else "a parameter"
                raise UnusedError(
                    f"no output depends on {kind} of shape {tuple(self._wrt[j].shape)} that requires grad. Pass "
                    "allow_unused_input=True, or one that does not require grad."
                )


def _set(cells: Sequence[tuple[nn.Module, str, Any]]) -> None:
    for module, key, param in cells:
        setattr(module, key, param)  # not in the table: RNNs keep a list of their own


@contextmanager
def undone(modules: Sequence[nn.Module], device: torch.device) -> Iterator[Callable[[], list[str]]]:
    """Context that leaves modules and random numbers as they were: attributes by identity, buffers by value.

    Parameters keep what is written into them. Yields a function that returns the names of tensors that were rebound.
    """
    tables = [(m, table, dict(table)) for m in modules for table in (vars(m), *module_tables(m)[:2])]
    held = [tensor for _, _, before in tables for tensor in before.values() if isinstance(tensor, Tensor)]
    values = [(tensor, tensor.detach().clone()) for tensor in held if not isinstance(tensor, nn.Parameter)]

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
            # By .data: the bits are what they were, so autograd need not take the tensor for changed.
            tensor.data.copy_(value)

    with Undo() as undo:
        undo.note(torch.set_rng_state, torch.get_rng_state())
        if device.type == "cuda":
            undo.note(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device)
        undo.note(put_back)
        yield rebound
