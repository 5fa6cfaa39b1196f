"""Optimizers and modules that a step uses and that are not declared, found in an eager call before the capture."""

import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._torch.compile import seeing_allocations_of_compiled_code
from ..._torch.optimizers import remove_step_hook
from ..._torch.tensors.fake_tensors import is_fake
from ..._torch.tensors.modes import without_torch_function
from ..._torch.tensors.modules import live_modules, module_tables, parts_of
from ..._torch.tensors.tensors import is_tensor, storage_address
from ..._torch.tensors.tree import tensors_in
from ..._undo import Undo
from ..._user_line import running_line, wraps_operations
from ..host.reads import Reads
from ..state.state import TrainingState
from .touched import Touched, Use, addresses

wraps_operations(__file__)


class Undeclared:
    """Looks for optimizers and modules that a step uses beside those of its state.

    An optimizer must be declared, because a graph would freeze its learning rate. A module must be declared if it gets
    gradients, because they would lie in the memory of the graph. A module that is only read, such as a frozen teacher,
    need not be declared. It is taken into the state, so that graphs are dropped when a tensor in it is replaced.

    Args:
        state: the declared modules and optimizers.
        device: where the step computes.
        refuses_changes: whether a module that the step changes must be declared as well. Otherwise it is taken into the
            state.
    """

    def __init__(self, state: TrainingState, device: torch.device, *, refuses_changes: bool) -> None:
        self._state = state
        self._device = device
        self._refuses_changes = refuses_changes
        self._problems: list[str] = []
        self._to_adopt: list[nn.Module] = []
        self._loose: list[Use] = []

    @contextmanager
    def watching(self, leaves: Sequence[Any]) -> "Iterator[Touched]":
        """Context for an eager call with these inputs. It yields a function to be called with each operation."""
        self._problems, self._to_adopt, self._loose = [], [], []
        touched = Touched(addresses(self._state.tensors().values()) | addresses(tensors_in(leaves)), self._device)
        thread = threading.get_ident()
        declared = (*self._state.optimizers, *self._state.eager_optimizers)

        def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            # The inner part of a declared optimizer works on the param groups of that.
            groups = {id(group) for known in declared for group in known.param_groups}
            is_known = optimizer in declared or all(id(group) in groups for group in optimizer.param_groups)
            if threading.get_ident() == thread and not is_known:
                self._problems.append(_OPTIMIZER.format(_at(running_line(sys._getframe(1))), type(optimizer).__name__))

        with Undo() as undo:
            undo.note(remove_step_hook, on_step)
            register_optimizer_step_pre_hook(on_step)
            with seeing_allocations_of_compiled_code(touched.made):
                yield touched
        with without_torch_function():
            # What optimizers have on the host: learning rates, step counts.
            tables = [table for each in declared for table in (*each.param_groups, *each.state.values())]
            others = addresses(tensors_in([value for table in tables for value in table.values()]))
            read, changing = touched.on_host(others)
            self._state.host_tensors.note(read)
            self._problems += (_ON_HOST.format(_at(line)) for line in changing)
            for address in addresses(self._state.rates()):
                touched.uses.pop(address, None)
            if touched.uses:
                self._look_at(touched)

    def take_problem(self) -> str:
        """Return what the user must declare, "" if nothing; then forget it."""
        problems, self._problems = self._problems, []
        return "\n".join(dict.fromkeys(problems))

    def take_loose(self) -> list[Use]:
        """Return how the call that was watched last has used tensors that nobody owns; then forget it."""
        loose, self._loose = self._loose, []
        return loose

    def take_without_tensors(self, modules: Iterable[nn.Module]) -> None:
        """Have modules that the step reads be taken into the state if they have no tensors, as a dropout or a loss."""
        declared = {module for top in self._state.modules.values() for module in parts_of(top)}
        for module in modules:
            if module not in declared and not (*nn.Module.parameters(module), *nn.Module.buffers(module)):
                self._to_adopt.append(module)
                declared.update(parts_of(module))

    def adopt(self) -> bool:
        """Take the modules that need not be declared into the state; return whether there are any."""
        modules, self._to_adopt = self._to_adopt, []
        for module in modules:
            self._state.modules[f"undeclared[{len(self._state.modules)}: {type(module).__name__}]"] = module
        return bool(modules)

    def _look_at(self, touched: Touched) -> None:
        declared = {module for top in self._state.modules.values() for module in parts_of(top)}
        live = {made for made in live_modules() if type(made).__hash__ is not None}
        owners = {module: used for module in live - declared if (used := _used(module, touched.uses))}
        owned = {id(use) for rows in owners.values() for _, _, use in rows}
        self._loose = [use for use in touched.uses.values() if use.by_user and id(use) not in owned]
        for address, use in touched.uses.items():
            use.is_lost = address in touched.lost
        for use in self._loose:
            tensor = use.tensor()
            if tensor is not None and tensor.is_leaf and tensor.grad is not None and touched.wrote(tensor.grad):
                self._problems.append(_LOOSE_GRADIENT.format(_at(use.line)))
        # The largest modules that contain some of the owners and nothing that is declared.
        parts = {module: set(parts_of(module)) for module in live} if owners else {}
        containing = [module for module, below in parts.items() if below & owners.keys() and not below & declared]
        inner = {part for module in containing for part in parts[module] if part is not module}
        for root in containing:
            if root in inner:
                continue
            problem = ""
            for prefix, module in root.named_modules():
                for key, tensor, use in owners.get(module, ()):
                    name = ".".join(filter(None, (type(root).__name__, prefix, key)))
                    if problem:
                        break
                    if tensor.is_leaf and tensor.grad is not None and touched.wrote(tensor.grad):
                        problem = _GRADIENT.format(_at(use.line), name)
                    elif use.written and self._refuses_changes:
                        problem = _CHANGED.format(_at(use.line), name)
            if problem:
                self._problems.append(problem)
            else:
                self._to_adopt.append(root)


def replaced(loose: Iterable[Use]) -> str:
    """Return which lines use tensors that have been replaced since, "" if none."""
    gone = (use for use in loose if use.is_lost or use.tensor() is None)
    return "\n".join(dict.fromkeys(_REPLACED.format(_at(use.line)) for use in gone))


def gradients_of(loose: Iterable[Use], reads: Reads, tensors: Set[int], known: Mapping[str, Tensor]) -> str:
    """Return which lines, or variables, lead to tensors with these ids, "" if none: the loop may give them a gradient.

    Args:
        loose: what operations have used.
        reads: of tensors that the code has used in no operation, the variables.
        tensors: the ids.
        known: the tensors of the state, whose gradients are compared.
    """
    left = tensors - set(map(id, known.values()))
    if not left:
        return ""
    used = [(use.tensor(), _at(use.line)) for use in loose]
    used += [
        (tensor, f"the variable {path} - ")
        for path, value in reads.places_and_values()[1]
        for tensor in tensors_in(value)
    ]
    lines = (where for tensor, where in used if tensor is not None and tensor.is_leaf and id(tensor) in left)
    return "\n".join(_USES_GRADIENT.format(where) for where in dict.fromkeys(lines))


def _used(module: nn.Module, uses: dict[int, Use]) -> list[tuple[str, Tensor, Use]]:
    """Return the tensors of this module, but not of its children, that were used, with their names."""
    used = []
    for table in (*module_tables(module)[:2], vars(module)):
        for key, value in table.items():
            # Modules of the process may have tensors of any kind, also without an address.
            if is_tensor(value) and not is_fake(type(value)) and not nn.parameter.is_lazy(value):
                use = uses.get(storage_address(value))
                used += [] if use is None else [(key, value, use)]
    return used


def _at(line: str) -> str:
    return f"{line} - " if line else ""


_OPTIMIZER = (
    "{0}steps an optimizer that is not declared ({1}), so that a graph would freeze its learning rate. Pass it in "
    "ampkit.graphed(optimizers=(...), modules=(...))."
)
_GRADIENT = (
    "{0}uses {1}, which gets a gradient and belongs to no declared module, so that the gradient would be lost. Pass "
    "its module in ampkit.graphed(modules=(...)), make it a part of the model of graphed_step, or freeze it: "
    "module.requires_grad_(False)."
)
_LOOSE_GRADIENT = (
    "{0}uses a tensor that belongs to no declared module, and leaves it a gradient, which a replay would not. Step its "
    "optimizer in the function and leave out modules=, or put it into a declared module, as an nn.Parameter."
)
_USES_GRADIENT = (
    "{0}uses a tensor that belongs to no declared module, and the function reads or clears its gradient, which a "
    "replay would not find. Put it into a declared module, as an nn.Parameter: modules=(..., "
    "nn.ParameterList([parameter]))."
)
_ON_HOST = (
    "{0}changes a tensor on the host that the step reads, and a replay would not change it. Keep it on the device of "
    "the step, in a buffer of a declared module."
)
_REPLACED = (
    "{0}reads a tensor that is no argument and belongs to no declared module, and that has been replaced since. A "
    "graph would go on reading the memory of the old one. Pass it as an argument, or keep it in a buffer of a declared "
    "module and change that in place (copy_)."
)
_CHANGED = (
    "{0}uses {1}, which the function changes and which belongs to no declared module. Pass its module in "
    "ampkit.graphed(modules=(...)), or put it in eval mode if nothing else changes it."
)
