"""Where in a model numbers are measured: which modules and parameters, in which hooks, under which names."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..._torch.autograd import in_backward, newest_sequence_number, sequence_number
from ..._torch.compile import is_compiled, is_compiled_in_place
from ..._torch.tree import tensors_in
from .statistics import Row, Tally, Telemetry, is_measurable

_OF_MODULES = ("input", "output", "grad_output", "grad_input")
Edge = tuple[Any, int]  # a node of the graph, and which of its outputs


class Sites:
    """The places of one model: leaf modules, other modules with parameters of their own, and parameters.

    A module is measured at its inputs and outputs, and at the gradients that come to its outputs and that it hands on
    to its inputs. Where a module of `torch.compile` is, it is measured from outside, and what is in it is not.

    Args:
        model: a `DistributedDataParallel` or a compiled module gives the names without its own.

    Attributes:
        rows: what is measured, by index.
        parameters: of each module that holds some, by its own names for them, in which row each one is. Tied ones, of
            which there is one row, are with all that hold them.
        compiled: names of compiled modules.
        root: the name that stands for the model itself.

    Raises:
        ValueError: a module was compiled in place, by `module.compile()`, and calls no hooks.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[tuple[str, nn.Module]] = []
        self.compiled: list[str] = []
        self.root = type(unwrapped(model)).__name__
        self._collect(unwrapped(model), "")
        self._params = {param: _plain_name(name) for name, param in unwrapped(model).named_parameters()}
        self.rows = [Row(name, what, name) for name, _ in self._modules for what in _OF_MODULES]
        self.rows += [Row(name, "gradient", self._owner(name)) for name in self._params.values()]
        self._index = {(row.name, row.what): i for i, row in enumerate(self.rows)}
        self.parameters: dict[str, dict[str, int]] = {}
        for full_name, param in unwrapped(model).named_parameters(remove_duplicate=False):
            name = _plain_name(full_name)
            self.parameters.setdefault(self._owner(name), {})[name] = self._index[self._params[param], "gradient"]
        self._open: dict[str, list[tuple[set[Edge], int]]] = {}  # calls that have begun, by module

    def _collect(self, module: nn.Module, name: str) -> None:
        if is_compiled_in_place(module):
            raise ValueError(
                f"numerics(model): {name or 'the model'} was compiled in place (module.compile()), and then calls no "
                "hooks. Write model.layer = torch.compile(model.layer), which is measured from outside, or measure "
                "before it is compiled."
            )
        # Not by hash: that of a torchmetrics.Metric changes with its state.
        if any(module is known for _, known in self._modules):
            return
        compiled = is_compiled(module)
        children = [] if compiled else list(module.named_children())
        if not children or any(True for _ in module.parameters(recurse=False)):
            self._modules.append((name or self.root, module))
        if compiled:
            self.compiled.append(name or self.root)
        for key, child in children:
            self._collect(child, f"{name}.{key}" if name else key)

    def _owner(self, param: str) -> str:
        return param.rpartition(".")[0] or self.root

    def row(self, name: str, what: str) -> int | None:
        """Return the index of a row, None if there is none."""
        return self._index.get((name, what))

    # -------------------------------------------------------------------------------------------------- measuring

    @contextmanager
    def measuring(self, tally: Tally, *, only_training: bool = False, parameters: bool = False) -> Iterator[None]:
        """Context in which what the model computes is measured.

        Args:
            tally: where to.
            only_training: leave out calls while the model is in eval mode and no gradients are recorded, which is
                validation. Fine-tuning in eval mode is measured, and so is a reentrant checkpoint in train mode.
            parameters: measure gradients of parameters too, whenever a backward has added to them.
        """
        with ExitStack() as hooks:
            hooks.callback(self._open.clear)  # a forward that raised may have left its graph
            for name, module in self._modules:
                before = partial(self._before, tally, only_training, name)
                handle = module.register_forward_pre_hook(before, with_kwargs=True)
                hooks.callback(handle.remove)
                # Always: checkpointing ends a recomputation by an error, as soon as it has all that it needs.
                after = partial(self._after, tally, name)
                handle = module.register_forward_hook(after, with_kwargs=True, always_call=True)
                hooks.callback(handle.remove)
            for param, name in self._params.items() if parameters else ():
                if param.requires_grad:
                    hook = partial(_on_accumulated, tally, self._index[name, "gradient"])
                    hooks.callback(param.register_post_accumulate_grad_hook(hook).remove)
            yield

    def measure_gradients(self, tally: Tally) -> None:
        """Measure the gradients that parameters have."""
        for param, name in self._params.items():
            if param.grad is not None:
                tally.add(self._index[name, "gradient"], param.grad)

    def measure_parameters(self, telemetry: Telemetry) -> None:
        """Note how large parameters are."""
        found = {self._index[n, "gradient"]: p.detach() for p, n in self._params.items() if is_measurable(p)}
        telemetry.set_magnitudes(list(found), list(found.values()))

    def _before(self, tally: Tally, only_training: bool, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a whole function is compiled: its code must not hold what is measured now
            return
        validates = not self._model.training and not torch.is_grad_enabled()
        if tally.closed or (only_training and validates):
            return
        inputs = _floats((args, kwargs))
        if not in_backward():  # or else it is a checkpoint's recomputation of what was measured before
            for tensor in inputs:
                tally.add(self._index[name, "input"], tensor)
        # Now, for an operation in place makes the input its own output.
        found = [get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]
        edges = {(edge.node, edge.output_nr) for edge in found}
        self._open.setdefault(name, []).append((edges, newest_sequence_number()))

    def _after(self, tally: Tally, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or tally.closed or not self._open.get(name):
            return
        edges, newest = self._open[name].pop()
        outputs = _floats(output)
        for tensor in outputs:
            if not in_backward():
                tally.add(self._index[name, "output"], tensor)
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(_on_gradient, tally, self._index[name, "grad_output"]))
        for node, i in _edges_out(outputs, edges, newest):
            node.register_hook(partial(_on_node, tally, self._index[name, "grad_input"], i))


def _on_gradient(tally: Tally, row: int, grad: Tensor) -> None:
    tally.add(row, grad)


def _on_node(tally: Tally, row: int, i: int, grad_inputs: tuple[Tensor | None, ...], grad_outputs: Any) -> None:
    grad = grad_inputs[i]
    if grad is not None:
        tally.add(row, grad)


def _on_accumulated(tally: Tally, row: int, param: Tensor) -> None:
    if param.grad is not None:
        tally.add(row, param.grad, instead=True)  # it is the sum of all micro-batches so far


def _edges_out(outputs: list[Tensor], edges: set[Edge], newest: int) -> Iterator[tuple[Any, int]]:
    """Yield the nodes behind some outputs, made after `newest`, that hand a gradient to an edge, and which of theirs.

    What such a node hands on is this module's share. A hook on the input would be given the sum over all that use it.
    """
    left = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node in seen or hasattr(node, "variable") or sequence_number(node) <= newest:
            continue
        seen.add(node)
        for i, (following, output) in enumerate(node.next_functions):
            if (following, output) in edges:
                yield node, i
            elif following is not None:
                left.append(following)


def _floats(tree: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(tree) if is_measurable(tensor)]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that a `DistributedDataParallel` holds, or else the module itself."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")
