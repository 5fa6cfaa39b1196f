"""A survey of a training step: how each module is called in it, and why the call cannot be captured by itself."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..._callables.input_leaves import Wants, detached, places_of, wanted_by
from ..._callables.passes import CAPTURED_AS_THEY_ARE, replace_forward
from ..._capture.host.left_tensors import LeftTensors
from ..._capture.host.opened_files import seeing_opened_files
from ..._capture.keys.containers import holds_tensors
from ..._capture.keys.inputs import Spec, flatten, is_plain, read_batch
from ..._capture.keys.placement import is_dense, place_of
from ..._capture.preflight.preflight import Preflight
from ..._errors import InputMismatch
from ..._text import CONSTANTS
from ..._torch.autograd.autograd import (
    ENGINE_ENTRIES,
    current_node,
    graph_nodes,
    in_backward,
    newest_sequence_number,
    packs_saved_tensors,
    sequence_number,
)
from ..._torch.tensors.modes import within_transform
from ..._torch.tensors.modules import has_global_hooks, hook_tables, module_tables
from ..._torch.tensors.operators import LIFT_FRESH, OperationCall
from ..._torch.tensors.tensors import storage_address
from ..._torch.tensors.tree import tree_flatten
from ..._undo import Undo, replace
from ..._user_line import line_text, wraps_operations

wraps_operations(__file__)

OUTPUT_SHARES = "an output shares memory with another one, or with an input, a parameter or a buffer"
WRITES = "it writes to a tensor that is no buffer of it"
_KEPT_CAST = "a leaf that requires grad is passed to it under autocast, which keeps a cast of it"
_Edge = tuple[int, int]  # what stands for an autograd node, and which of its outputs


class ModuleLayout(NamedTuple):
    """The layout of the input of a call, and whether autograd records the call."""

    spec: Spec
    wants_grad: tuple[Wants, ...]  # per leaf
    places: tuple[int, ...]  # per leaf
    grad_mode: bool


class GradientLayout(NamedTuple):
    """The layout of the gradient of an output."""

    stride: tuple[int, ...]
    dtype: torch.dtype
    place: int


@dataclass(eq=False)
class ModuleCall:
    """A call of a module in the forward of a step."""

    module: nn.Module
    name: str  # the module's path in the model
    parent: "ModuleCall | None"  # the call in which it was called; None if it was called by the loss function
    first: int  # the numbers of the autograd nodes that it made are greater than this, and at most `last`
    last: int = -1
    layout: ModuleLayout | None = None  # of its input; None if a graph cannot take it
    problems: dict[str, None] = field(default_factory=dict)  # why it cannot be captured by itself
    lines: dict[str, None] = field(default_factory=dict)  # in it, or in its backward, that cannot be captured
    operations: list[Any] = field(default_factory=list)  # what ran in it, in order, with shapes and numbers
    kernels: int = 0  # how many of these operations computed something
    gradients: list[GradientLayout | None] = field(default_factory=list)  # of outputs that require grad, as it came
    _own: set[int] = field(default_factory=set)  # the memory of its inputs, parameters and buffers
    _buffers: set[int] = field(default_factory=set)
    _returned: set[int] = field(default_factory=set)
    _edges_in: set[_Edge] = field(default_factory=set)
    _edges_out: set[_Edge] = field(default_factory=set)

    def chain(self) -> "Iterator[ModuleCall]":
        """Yield this call, the call in which it was made, and so on."""
        call: ModuleCall | None = self
        while call is not None:
            yield call
            call = call.parent


class Survey:
    """Watches one training step, and finds out which calls of modules can be captured as a forward and a backward.

    Such a call gets all tensors as arguments, parameters or buffers, and gives all of them as outputs; it changes
    nothing but its buffers, in place; and no line of it, or of its backward, is one that a graph cannot contain.

    Args:
        modules: those to look at, by name, each once.
        generators: see `Preflight`.
        eager: classes of modules that are not to be captured, and why.
        places: of variables that code reads or sets, see `LeftTensors`.
        values: what these lead to.
        writes_may_stop: whether numbers that a forward changes in lists, dicts and objects, and files that it writes,
            may stay as they are.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        device: torch.device,
        generators: Sequence[torch.Generator],
        eager: Mapping[type[nn.Module], str],
        places: Iterable[tuple[Any, Any]] = (),
        values: Iterable[Any] = (),
        *,
        writes_may_stop: bool,
    ) -> None:
        self._modules = list(modules)
        self._device, self._eager = device, eager
        self._preflight = Preflight(device, generators, observers=[self._on_operation], located=self._on_finding)
        self.calls: list[ModuleCall] = []  # in the order in which they began, but for those within a backward
        self.lines: dict[str, None] = {}  # that cannot be captured, with what happens there
        self._writes_may_stop = writes_may_stop
        inside = [] if writes_may_stop else [module for _, module in self._modules]
        self._held = LeftTensors(inside, (), *(((), ()) if writes_may_stop else (places, values)))
        self._running: list[ModuleCall] = []
        self._looking = False  # whether operations are those of the survey itself
        self._made: dict[int, ModuleCall | None] = {}  # the call that made the tensor at an address

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for a step, which computes the same bits in it. It may call backward several times."""
        with Undo() as undo:
            for name, module in self._modules:
                replace_forward(undo, module, self._watched(module, name, module.forward))
            for owner, name in ENGINE_ENTRIES:
                run = partial(self._run_engine, threading.get_ident(), getattr(owner, name))
                replace(undo, owner, name, run)
            files = nullcontext() if self._writes_may_stop else seeing_opened_files(self._on_opened_file)
            with self._preflight, files:
                yield

    def _watched(self, module: nn.Module, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        modules = list(module.modules())

        def forward(*args: Any, **kwargs: Any) -> Any:
            if in_backward() or within_transform():  # checkpointing calls it again, or torch.func
                return original(*args, **kwargs)
            self._looking = True
            call = self._begin(modules, name, args, kwargs)
            before, held = _attributes(modules), self._held.contents()
            self._looking = False
            try:
                outputs = original(*args, **kwargs)
            finally:
                self._preflight.look_for_draws()
                self._running.pop()
            call.last = newest_sequence_number()
            if _attributes(modules) != before or self._held.hold_others(held):
                call.problems["its forward changes attributes, or what is in them"] = None
            self._looking = True
            self._look_at_outputs(call, outputs)
            self._looking = False
            return outputs

        return forward

    def _begin(self, modules: list[nn.Module], name: str, args: Any, kwargs: Any) -> ModuleCall:
        """Return a call of the first of these modules, which has the others in it, and what is known before it runs."""
        self._preflight.look_for_draws()
        parent = self._running[-1] if self._running else None
        call = ModuleCall(modules[0], name, parent, newest_sequence_number())
        self.calls.append(call)
        self._running.append(call)
        call.problems |= {why: None for kind, why in self._eager.items() if isinstance(call.module, kind)}
        if torch.is_inference_mode_enabled():
            call.problems["it is called in inference mode. Use torch.no_grad()"] = None
        if packs_saved_tensors():
            call.problems["it is called while hooks pack saved tensors (checkpointing)"] = None
        if has_global_hooks() or any(map(any, chain.from_iterable(map(hook_tables, modules[1:])))):
            call.problems["there are hooks on a module in it"] = None
        buffers = [found for each in modules for found in module_tables(each)[1].values() if found is not None]
        params = [found for each in modules for found in module_tables(each)[0].values() if found is not None]
        if any(type(tensor.data) is not Tensor or tensor.device != self._device for tensor in (*params, *buffers)):
            call.problems["a parameter or buffer is no plain tensor on the device of the model"] = None
        try:
            leaves, tree = flatten(args, kwargs)
            spec, _ = read_batch(*detached(leaves, tree), self._device)
            call.layout = ModuleLayout(spec, wanted_by(leaves), places_of(leaves), torch.is_grad_enabled())
            if Wants.GRADIENT_AND_CAST in call.layout.wants_grad:
                call.problems[_KEPT_CAST] = None
        except InputMismatch as error:
            leaves = tree_flatten((args, kwargs))[0]
            others = (leaf for leaf in leaves if not isinstance(leaf, (Tensor, nn.Module)))
            hides = next(filter(holds_tensors, others), None)
            inside = f"it gets a {type(hides).__name__}, in which a graph does not see the tensors{advice_on(hides)}"
            call.problems[f"its input: {error}" if hides is None else inside] = None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call._buffers = set(map(storage_address, buffers))
        call._own = call._buffers.union(map(storage_address, (*tensors, *params)))
        # Without grad mode, nothing of the call is differentiated, and a view that was made so has no edge.
        wanted = torch.is_grad_enabled()
        into = [get_gradient_edge(tensor) for tensor in tensors if wanted and tensor.requires_grad]
        edges = [(_key(edge.node), edge.output_nr) for edge in into]
        edges += [(id(param), 0) for param in dict.fromkeys(params) if param.requires_grad]
        call._edges_in = set(edges)
        if len(call._edges_in) < len(edges):
            # Their gradients would be added in another order than without a graph.
            call.problems["a tensor that requires grad is passed to it twice"] = None
        return call

    def _look_at_outputs(self, call: ModuleCall, outputs: Any) -> None:
        leaves = tree_flatten(outputs)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if not is_plain(leaf) or leaf.device != self._device or not is_dense(leaf):
                    call.problems["an output is no dense tensor on the device"] = None
            elif type(leaf) not in CAPTURED_AS_THEY_ARE:
                call.problems[f"it returns a {type(leaf).__name__}"] = None
        if not tensors:
            call.problems["it returns no tensor"] = None
        addresses = list(filter(None, map(storage_address, tensors)))
        call._returned = set(addresses)
        if len(call._returned) < len(addresses) or call._returned & call._own:
            call.problems[OUTPUT_SHARES] = None
        for tensor in tensors:
            if tensor.requires_grad and tensor.is_leaf:
                call.problems["an output is a leaf that requires grad"] = None
            elif tensor.requires_grad:
                edge = get_gradient_edge(tensor)
                call._edges_out.add((_key(edge.node), edge.output_nr))
                tensor.register_hook(partial(_note_gradient, call, len(call.gradients)))
                call.gradients.append(None)

    def _on_operation(self, done: OperationCall) -> None:
        if self._looking:
            return
        backward = in_backward()
        if backward and torch.is_grad_enabled():
            for call in self._owners(current_node()):
                call.problems["its backward is checkpointed, or differentiated"] = None
        addresses = set(done.given_at) - {0}
        made = [address for address in done.made_at if address not in addresses]
        if done.op is LIFT_FRESH:
            made, addresses = done.given_at, set()
        if self._running or not backward:
            self._follow_data(addresses, done.written_at)
        packed = packs_saved_tensors()
        entry = operation_entry(done.op, done.args, done.kwargs)
        for call in self._running:
            call.operations.append(entry)
            call.kernels += bool(made or done.written)
            if packed:
                call.problems["it packs saved tensors (checkpointing)"] = None
        owner = self._running[-1] if self._running else None
        self._made.update(dict.fromkeys(made, owner))

    def _follow_data(self, addresses: set[int], written: Iterable[int]) -> None:
        """Find calls whose tensors come or leave in another way than as arguments, parameters, buffers and outputs."""
        running = set(self._running)
        for address in addresses:
            maker = self._made.get(address)
            makers = set() if maker is None else set(maker.chain())
            for call in running - makers:
                if address not in call._own:
                    call.problems["it reads a tensor that is no input, parameter or buffer of it"] = None
            for call in makers - running:
                if address not in call._returned:
                    call.problems["a tensor that it makes, and does not return, is used outside of it"] = None
        for address in written:
            maker = self._made.get(address)
            for call in running.difference(() if maker is None else maker.chain()):
                if address not in call._buffers:
                    call.problems[WRITES] = None

    def _on_finding(self, line: str, what: str, node: Any) -> None:
        backward = in_backward() and not self._running
        node = current_node() if backward and node is None else node
        calls = list(self._owners(node)) if backward else self._running[::-1]
        text = f"{line} - {what}" if line else what
        self.lines[text] = None
        for call in calls:
            call.lines[text] = None

    def _on_opened_file(self, line: tuple[str, int]) -> None:
        self._on_finding(line_text(*line), "writes to a file", None)

    def _owners(self, node: Any) -> Iterator[ModuleCall]:
        """Yield the calls in whose forward an autograd node was made, the innermost first."""
        if node is None or node.name() == _ACCUMULATES:
            return
        number = sequence_number(node)
        for call in reversed(self.calls):
            if call.first < number <= call.last:
                yield call

    def _run_engine(self, thread: int, engine: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run autograd's engine. In this thread, look before that at how gradients will get into the calls and out."""
        if threading.get_ident() != thread or in_backward():  # checkpointing runs it in a backward
            return engine(outputs, *args, **kwargs)
        nodes = {_key(node): node for node in graph_nodes(outputs)}
        owners = {key: set(self._owners(node)) for key, node in nodes.items()}
        for key, node in nodes.items():
            for following, output in node.next_functions:
                if following is None:
                    continue
                edge = (_key(following), output)
                before, after = owners[edge[0]], owners[key]
                for call in after - before:
                    if edge not in call._edges_in:
                        call.problems["a gradient leaves it to a tensor that is no input or parameter of it"] = None
                for call in before - after:
                    if edge not in call._edges_out:
                        call.problems["a gradient gets into it through a tensor that is no output of it"] = None
        return engine(outputs, *args, **kwargs)


def _note_gradient(call: ModuleCall, number: int, gradient: Tensor) -> None:
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        call.problems["the gradient of an output is no plain tensor"] = None
    else:
        call.gradients[number] = GradientLayout(gradient.stride(), gradient.dtype, place_of(gradient))


def advice_on(thing: object) -> str:
    """Return what to write in order not to pass a certain object to modules, "" if that is not known."""
    # transformers makes a cache of keys and values in each forward, in training too, unless it is told not to.
    is_cache = any(kind.__module__ == "transformers.cache_utils" for kind in type(thing).__mro__)
    return ". Pass use_cache=False to the model: training needs no cache" if is_cache else ""


_ACCUMULATES = "torch::autograd::AccumulateGrad"  # name of the node of a leaf


def _key(node: Any) -> int:
    """Return a key for an autograd node: its own number, or the identity of the parameter if it accumulates one."""
    return id(node.variable) if node.name() == _ACCUMULATES else -1 - sequence_number(node)


def operation_entry(op: Any, args: Any, kwargs: Any) -> tuple[str, tuple[Any, ...]]:
    """Return what stands for an operation that has run: its name, the layouts of its tensors, and its numbers."""
    return str(op), tuple(map(_entry_of, tree_flatten((args, kwargs))[0]))


def _entry_of(leaf: Any) -> Any:
    """Return what stands for an argument of an operation: the layout of a tensor, the value of a number."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride() if leaf.layout is torch.strided else None
    return (type(leaf), str(leaf)) if isinstance(leaf, CAPTURED_AS_THEY_ARE) else type(leaf)


def _attributes(modules: list[nn.Module]) -> list[Any]:
    """Return what stands for the attributes of these modules. Writing to a tensor changes nothing."""
    tables = chain.from_iterable((vars(each), *module_tables(each)[:2]) for each in modules)
    return [(key, _identity(value)) for table in tables for key, value in table.items()]


def _identity(value: Any) -> Any:
    """Return what stands for an attribute: a number or text by its value, a container by what is in it."""
    if isinstance(value, CONSTANTS):
        return type(value), str(value)
    if isinstance(value, dict):
        return id(value), [(id(key), id(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return id(value), [id(each) for each in value]
    return id(value)
