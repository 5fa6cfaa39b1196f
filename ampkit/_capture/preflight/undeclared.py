"""Optimizers and modules that a step uses and that are not declared, found in an eager call before the capture."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._optimizer.step_kind import broken_kernel, parameters, why_not_capturable
from ..._torch.compile import seeing_allocations_of_compiled_code
from ..._torch.optimizers import remove_step_hook
from ..._torch.tensors.fake_tensors import is_fake
from ..._torch.tensors.modes import without_torch_function
from ..._torch.tensors.modules import live_modules, module_tables, parts_of
from ..._torch.tensors.tensors import is_tensor, local_shard, storage_address
from ..._torch.tensors.tree import tensors_in
from ..._undo import Undo
from ..._user_line import running_line, wraps_operations
from ..host.reads import Reads
from ..state.bound import why_not_scripted
from ..state.state import TrainingState
from .sparse_gradients import why_not_dense
from .touched import Touched, Use, addresses

wraps_operations(__file__)

# take_in(optimizers, is_new): takes optimizers whose steps can be captured into the state, and gradients of all that is
# in it. `is_new(gradient)` returns whether the last call has made it.
TakeIn = Callable[[Sequence[torch.optim.Optimizer], Callable[[Tensor], bool]], object]


class Undeclared:
    """Looks for optimizers and modules that a step uses beside those of its state.

    A module that is only read, such as a frozen teacher, is taken into the state, so that graphs are dropped when a
    tensor in it is replaced. A graph would freeze the learning rate of an optimizer that is not in the state, and
    gradients of a module would lie in the memory of the graph. So `take_in` takes these in, or else they are problems.

    Args:
        state: the declared modules and optimizers.
        device: where the step computes.
        refuses_changes: whether a module that the step changes must be declared. Otherwise it is taken into the state.
        take_in: see `Session.take_in`.
    """

    def __init__(
        self, state: TrainingState, device: torch.device, *, refuses_changes: bool, take_in: TakeIn | None = None
    ) -> None:
        self._state = state
        self._device = device
        self._refuses_changes, self._take_in = refuses_changes, take_in
        self._problems: list[str] = []
        self._to_adopt: list[nn.Module] = []
        self._stepped: list[torch.optim.Optimizer] = []
        self._is_changed = False  # whether a call changes one of these modules
        self._loose: list[Use] = []

    @contextmanager
    def watching(self, leaves: Sequence[Any]) -> "Iterator[Touched]":
        """Context for an eager call with these inputs. It yields a function to be called with each operation."""
        self._problems, self._to_adopt, self._stepped, self._loose, self._is_changed = [], [], [], [], False
        touched = Touched(addresses(self._state.tensors().values()) | addresses(tensors_in(leaves)), self._device)
        thread = threading.get_ident()
        declared = (*self._state.optimizers, *self._state.eager_optimizers)
        held = {id(param) for each in declared for param in parameters(each)}

        def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            # The inner part of an optimizer works on the param groups of that.
            groups = {id(group) for known in (*declared, *self._stepped) for group in known.param_groups}
            is_known = optimizer in declared or all(id(group) in groups for group in optimizer.param_groups)
            if threading.get_ident() != thread or is_known:
                return
            line, name = _at(running_line(sys._getframe(1))), type(optimizer).__name__
            if self._take_in is None:
                self._problems.append(_OPTIMIZER.format(line, name))
            elif not held.isdisjoint(map(id, parameters(optimizer))):
                self._problems.append(_ANOTHER_OPTIMIZER.format(line, name))
            elif problem := why_not_capturable(optimizer) or broken_kernel(optimizer):
                self._problems.append(f"{line}{problem}")
            else:
                self._stepped.append(optimizer)

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
        places = self._state.reads.places_and_values()[1] if modules else []
        for module in modules:
            named = (path for path, value in places if value is module and path not in self._state.modules)
            place = f"undeclared[{len(self._state.modules)}: {type(module).__name__}]"
            self._state.modules[next(named, place)] = module
        return bool(modules)

    def take_in(self, touched: Touched) -> bool:
        """Take in what the call that was watched last trains or changes. Return whether there is anything.

        Then that call has not shown how later ones use it.
        """
        if self._take_in is None or not (self._is_changed or self._stepped):
            return False
        self.adopt()
        stepped, self._stepped, self._is_changed = self._stepped, [], False
        self._take_in(stepped, touched.made_in_call)
        return True

    def _look_at(self, touched: Touched) -> None:
        declared = {module for top in self._state.modules.values() for module in parts_of(top)}
        live = {made for made in live_modules() if type(made).__hash__ is not None}
        owners = {module: used for module in live - declared if (used := _used(module, touched.uses))}
        owned = {id(use) for rows in owners.values() for _, _, use in rows}
        self._loose = [use for use in touched.uses.values() if use.by_user and id(use) not in owned]
        for address, use in touched.uses.items():
            use.is_lost = address in touched.lost
        stepped = {id(param) for optimizer in self._stepped for param in parameters(optimizer)}
        for use in self._loose:
            tensor = use.tensor()
            if tensor is not None and id(tensor) not in stepped and _gets_gradient(tensor, touched):
                self._problems.append(_LOOSE_GRADIENT.format(_at(use.line)))
        # The largest modules that contain some of the owners and nothing that is declared.
        parts = {module: set(parts_of(module)) for module in live} if owners else {}
        containing = [module for module, below in parts.items() if below & owners.keys() and not below & declared]
        inner = {part for module in containing for part in parts[module] if part is not module}
        for root in containing:
            if root in inner:
                continue
            may_train = self._take_in is not None and _may_train(root, self._device)
            is_changed, problem = False, ""
            for prefix, module in root.named_modules():
                for key, tensor, use in owners.get(module, ()):
                    name = ".".join(filter(None, (type(root).__name__, prefix, key)))
                    trains = _gets_gradient(tensor, touched)
                    is_changed |= trains or use.written
                    if problem:
                        break
                    if trains and not may_train:
                        problem = _GRADIENT.format(_at(use.line), name)
                    elif use.written and self._refuses_changes:
                        problem = _CHANGED.format(_at(use.line), name)
            if problem:
                self._problems.append(problem)
            else:
                self._to_adopt.append(root)
                self._is_changed |= is_changed


def replaced(loose: Iterable[Use]) -> str:
    """Return which lines use tensors that have been replaced since, "" if none."""
    gone = (use for use in loose if use.is_replaced)
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


def _gets_gradient(tensor: Tensor, touched: Touched) -> bool:
    """Return whether the call has made the gradient that this tensor has now, or has written to it."""
    return tensor.is_leaf and tensor.grad is not None and touched.wrote(tensor.grad)


def _may_train(module: nn.Module, device: torch.device) -> bool:
    """Return whether calls may train a module that was taken into the state only now.

    Ranks that average gradients, or have a part of each parameter, must be known before the first call.
    """
    tensors = [*module.parameters(), *module.buffers()]
    elsewhere = any(tensor.device != device or local_shard(tensor) is not tensor for tensor in tensors)
    averages = any(isinstance(part, nn.parallel.DistributedDataParallel) for part in parts_of(module))
    return not (elsewhere or averages or why_not_dense([module]) or why_not_scripted({"": module}))


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
_ANOTHER_OPTIMIZER = (
    "{0}steps an optimizer that is not declared ({1}), over parameters of another one. If each call makes one, make it "
    "before the first call; else pass both in ampkit.graphed(optimizers=(...))."
)
_GRADIENT = (
    "{0}uses {1}, which gets a gradient and belongs to no declared module, so that the gradient would be lost. Pass "
    "its module in ampkit.graphed(modules=(...)), make it a part of the model of graphed_step, or freeze it: "
    "module.requires_grad_(False)."
)
_LOOSE_GRADIENT = (
    "{0}uses a tensor that belongs to no declared module, and leaves it a gradient, which a replay would not. Step its "
    "optimizer in the function, or put it into a declared module, as an nn.Parameter."
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
    "{0}reads a tensor that is no argument and belongs to no declared module, and that has been replaced since, or got "
    "other memory (tensor.data = ..., vector_to_parameters). A graph would go on reading the old memory. Pass it as an "
    "argument, or keep it in a buffer of a declared module and change that in place (copy_)."
)
_CHANGED = (
    "{0}uses {1}, which the function changes and which belongs to no declared module. Pass its module in "
    "ampkit.graphed(modules=(...)), or put it in eval mode if nothing else changes it."
)
