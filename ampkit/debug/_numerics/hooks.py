"""Which tensors of a model are measured, and by which hooks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..._precision.float8 import watching_float8
from ..._torch.autograd.autograd import in_backward, newest_sequence_number, sequence_number
from ..._torch.compile import is_compiled, is_compiled_in_place
from ..._torch.tensors.tensors import local_shard
from ..._torch.tensors.tree import tensors_in
from .measurements import DeviceStatistics, MeasuredTensor, Measurements, is_measurable

_OF_MODULES = ("input", "output", "grad_output", "grad_input")
Edge = tuple[Any, int]  # a node of the autograd graph, and the number of one of its outputs


class ModelHooks:
    """The hooks on one model. `numerics` says what they measure.

    Names are those without `DistributedDataParallel` and `torch.compile`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[tuple[str, nn.Module]] = []
        self.compiled: list[str] = []  # names of modules
        self.root = type(unwrapped(model)).__name__  # the name that stands for the model itself
        self._collect(unwrapped(model), "")
        self._params = {param: name.replace(_COMPILED, "") for name, param in unwrapped(model).named_parameters()}
        # What is measured, by the row of the statistics.
        self.tensors = [MeasuredTensor(name, what, name) for name, _ in self._modules for what in _OF_MODULES]
        self._linear = {module: name for name, module in self._modules if isinstance(module, nn.Linear)}
        self.tensors += [MeasuredTensor(name, "weight", name) for name in self._linear.values()]
        self.first_parameter = len(self.tensors)  # all rows from here on are those of parameters
        owners = {name: name.rpartition(".")[0] or self.root for name in self._params.values()}
        self.tensors += [MeasuredTensor(name, "gradient", owner) for name, owner in owners.items()]
        self._row = {(tensor.name, tensor.what): row for row, tensor in enumerate(self.tensors)}
        # For each module that holds parameters, the row of each one, by the name that this module gives it. A tied
        # parameter has one row, and is listed with every module that holds it.
        self.parameters: dict[str, dict[str, int]] = {}
        for full_name, param in unwrapped(model).named_parameters(remove_duplicate=False):
            name = full_name.replace(_COMPILED, "")
            owner = name.rpartition(".")[0] or self.root
            self.parameters.setdefault(owner, {})[name] = self._row[self._params[param], "gradient"]
        # The calls that have begun, by module: where their inputs come from, and the newest autograd node by then.
        self._open_calls: dict[str, list[tuple[set[Edge], int]]] = {}

    def _collect(self, module: nn.Module, name: str) -> None:
        if is_compiled_in_place(module):
            raise ValueError(
                f"numerics(model): {name or 'the model'} was compiled in place (module.compile()), and then calls no "
                "hooks. Write model.layer = torch.compile(model.layer), which is measured from outside, or measure "
                "before it is compiled."
            )
        # Compared by identity, not by hash: the hash of a torchmetrics.Metric changes with its state.
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

    @contextmanager
    def measuring(self, to: Measurements, *, in_loop: bool = False) -> Iterator[None]:
        """Context in which what the model computes is measured.

        In a loop of the user's own, the gradient of a parameter is measured whenever a backward has added to it. Calls
        while the model is in eval mode and no gradients are recorded are left out there, which is validation.
        Fine-tuning in eval mode is measured, and so is a reentrant checkpoint in train mode.
        """
        with ExitStack() as hooks:
            hooks.callback(self._open_calls.clear)  # a forward that raised may have left its autograd graph
            hooks.enter_context(watching_float8(partial(self._in_float8, to)))
            for name, module in self._modules:
                before = partial(self._before, to, in_loop, name)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                # Always: checkpointing ends a recomputation by an error, as soon as it has all that it needs.
                after = partial(self._after, to, name)
                hooks.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)
            for param, name in self._params.items() if in_loop else ():
                if param.requires_grad:
                    row = self._row[name, "gradient"]
                    # It is replaced, because it is the sum over all micro-batches so far.
                    handle = param.register_post_accumulate_grad_hook(
                        lambda param, row=row: to.add(row, param.grad, replace=True)
                    )
                    hooks.callback(handle.remove)
            yield

    def measure_gradients(self, to: Measurements) -> None:
        """Measure the gradients that parameters have; of those that are split over processes, this process's part."""
        for param, name in self._params.items():
            if param.grad is not None:
                to.add_part(self._row[name, "gradient"], local_shard(param.grad))

    def measure_parameters(self, statistics: DeviceStatistics) -> None:
        """Write the largest magnitude of each parameter, or of this process's part of it, to the statistics."""
        parts = {self._row[name, "gradient"]: local_shard(param.detach()) for param, name in self._params.items()}
        found = {row: part for row, part in parts.items() if is_measurable(part)}
        statistics.set_magnitudes(list(found), list(found.values()))

    def parameters_were_replaced(self) -> bool:
        """Return whether the model has other parameters now."""
        return set(map(id, self._params)) != set(map(id, unwrapped(self._model).parameters()))

    def _before(self, to: Measurements, in_loop: bool, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code that calls the module must not contain the measuring
            return
        validates = not self._model.training and not torch.is_grad_enabled()
        if to.closed or (in_loop and validates):
            return
        inputs = list(filter(is_measurable, tensors_in((args, kwargs))))
        if not in_backward():  # in backward, a checkpoint computes again what was measured in forward
            for tensor in inputs:
                to.add(self._row[name, "input"], tensor)
        # Noted now, because an operation in place would make the input its own output.
        found = [get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]
        edges = {(edge.node, edge.output_nr) for edge in found}
        self._open_calls.setdefault(name, []).append((edges, newest_sequence_number()))

    def _in_float8(self, to: Measurements, recipe: str, layer: nn.Linear, input: Tensor, out: Tensor) -> None:
        """Measure what a layer casts to float8, within a call that is measured."""
        name = self._linear.get(layer)
        if name is None or to.closed or not self._open_calls.get(name):
            return
        if not in_backward():
            to.add(self._row[name, "weight"], layer.weight)
            to.add_float8(self._row[name, "weight"], recipe, "weight", layer.weight)
            to.add_float8(self._row[name, "input"], recipe, "input", input)
        if out.grad_fn is not None:
            out.register_hook(partial(to.add_float8, self._row[name, "grad_output"], recipe, "grad_output"))

    def _after(self, to: Measurements, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or to.closed or not self._open_calls.get(name):
            return
        edges, newest = self._open_calls[name].pop()
        outputs = list(filter(is_measurable, tensors_in(output)))
        for tensor in outputs:
            if not in_backward():
                to.add(self._row[name, "output"], tensor)
            if tensor.grad_fn is not None:
                tensor.register_hook(partial(to.add, self._row[name, "grad_output"]))
        for node, i in _nodes_of_inputs(outputs, edges, newest):
            row = self._row[name, "grad_input"]
            node.register_hook(lambda grad_inputs, _, row=row, i=i: to.add(row, grad_inputs[i]))


def _nodes_of_inputs(outputs: list[Tensor], edges: set[Edge], newest: int) -> Iterator[tuple[Any, int]]:
    """Yield the autograd nodes of a module that pass a gradient back to its inputs, and the number of that gradient.

    A hook on the input itself would get the sum over everything that uses the input; a node has this module's share.
    The edges are where the inputs come from. The module's nodes are newer than the newest one before the call.
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


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that a `DistributedDataParallel` wraps, or the model itself if it is none."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


_COMPILED = "_orig_mod."  # in names of parameters: what torch.compile calls the module inside of its own
