"""What a function of `graphed` changes, found in its first call: optimizers that step, modules that change or train."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._capture.state.walk import NO_MODULE, module_of
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.step_kind import parameters, why_not_capturable
from .._torch.optimizers import remove_step_hook
from .._torch.tensors.fake_tensors import is_fake
from .._torch.tensors.modes import UnseenFunctionMode, unseen_function_mode, without_torch_function
from .._torch.tensors.modules import live_modules, module_tables, parts_of
from .._torch.tensors.tensors import is_tensor, version
from .._undo import Undo


class _ForeachWrites(UnseenFunctionMode):
    """Notes what functions write to whose kernels on CUDA count no change of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.startswith(("_foreach_", "_fused_")) and name.endswith("_"):
            self.written += args[0] if args else (kwargs or {}).get("self", ())
        return func(*args, **(kwargs or {}))


class FoundState:
    """Watches a call of a function, and tells which of the process's modules and optimizers it has used.

    An optimizer reads its rate from the device from its first step on, as later calls have it. A module is found if one
    of its tensors was changed, or got a gradient, or is stepped by an optimizer.

    Args:
        device: where the function computes.
        optimizers: those that are known, whether the call steps them or not.
        modules: those that are known.

    Attributes:
        optimizers: these, and those that the call has stepped.
        device: the same.
    """

    def __init__(
        self, device: torch.device, optimizers: Sequence[torch.optim.Optimizer], modules: Sequence[nn.Module] = ()
    ) -> None:
        self.device: torch.device = device
        self.optimizers: list[torch.optim.Optimizer] = list(optimizers)
        self._given, self._modules = list(modules), list(modules)
        self._loose: list[Tensor] = []  # parameters of optimizers that belong to none of these
        self._gradients: dict[int, Tensor | None] = {}  # in front of the call, by the identity of the parameter

    def find_owners(self) -> None:
        """Find the modules of what the optimizers hold, without a call."""
        with without_torch_function():
            self._look({}, set())

    @contextmanager
    def finding(self) -> Iterator[None]:
        """Context of the call."""
        thread = threading.get_ident()
        before: dict[int, tuple[Any, ...]] = {}
        stepping: dict[str, torch.optim.Optimizer] = {}
        with without_torch_function():
            # With the tensors themselves, so that no other one gets the identity of one that is gone.
            for module in live_modules():
                before |= {id(tensor): (tensor, *_state(tensor)) for tensor in _tensors(module)}
        seen = _ForeachWrites()
        with Undo() as undo, ExitStack() as stack, unseen_function_mode(seen), seen:

            def on_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
                # The inner part of an optimizer works on the param groups of that.
                if threading.get_ident() != thread or stepping:
                    return
                known = {id(group) for each in self.optimizers for group in each.param_groups}
                if not known.issuperset(map(id, optimizer.param_groups)):
                    self.optimizers.append(optimizer)
                stepping["optimizer"] = optimizer
                self._apply(optimizer, stack)

            def has_stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
                if threading.get_ident() == thread and optimizer is stepping.get("optimizer"):
                    stepping.clear()
                    stack.close()  # what the function does with the rates from here on, it does with the user's

            undo.note(remove_step_hook, on_step)
            register_optimizer_step_pre_hook(on_step)
            undo.note(register_optimizer_step_post_hook(has_stepped).remove)
            yield
        with without_torch_function():
            self._look(before, set(map(id, seen.written)))

    def _apply(self, optimizer: torch.optim.Optimizer, stack: ExitStack) -> None:
        if not why_not_capturable(optimizer):
            groups = CapturableGroups(optimizer, self.device)
            groups.refresh()
            stack.enter_context(groups.applied())

    def _look(self, before: dict[int, tuple[Any, ...]], written: set[int]) -> None:
        parts_given = {id(part) for module in self._given for part in parts_of(module)}
        known = {id(param) for module in self._given for param in module.parameters()}
        stepped = [param for each in self.optimizers for param in parameters(each) if id(param) not in known]
        found = written.union(map(id, stepped))
        live, owners = live_modules(), set[int]()
        for module in live:
            for tensor in _tensors(module):
                count, gradient, changes = _state(tensor)
                _, *was = before.get(id(tensor), (tensor, count, gradient, changes))
                if id(tensor) in found or was[1] is not gradient or [was[0], was[2]] != [count, changes]:
                    owners.add(id(module))
        parts = [(module, _parts(module)) for module in live] if owners else []
        containing = [(top, below) for top, below in parts if not owners.isdisjoint(map(id, below))]
        containing = [
            (top, below)
            for top, below in containing
            if self._may_be_declared(below) and parts_given.isdisjoint(map(id, below))
        ]
        inner = {id(part) for top, below in containing for part in below if part is not top}
        self._modules = self._given + [top for top, _ in containing if id(top) not in inner]
        known = {id(param) for module in self._modules for param in module.parameters()}
        self._loose = [param for param in stepped if id(param) not in known]
        self._gradients = {id(tensor): gradient for tensor, _, gradient, _ in before.values()}

    def declared(self) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Return what a user would have to declare: modules, the largest on the device, and optimizers.

        Parameters that belong to no module are in one of their own.
        """
        return [*self._modules, *([module_of(self._loose)] if self._loose else [])], self.optimizers

    def gradients(self) -> list[Tensor | None]:
        """Return what the call has found in `param.grad` of each parameter of the modules."""
        modules, _ = self.declared()
        return [self._gradients.get(id(param)) for module in modules for param in module.parameters()]

    def _may_be_declared(self, modules: Iterable[nn.Module]) -> bool:
        """Return whether all parameters and buffers of these modules are on the device, and there already."""
        tables = (table for module in modules for table in module_tables(module)[:2])
        tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
        return not any(nn.parameter.is_lazy(tensor) or tensor.device != self.device for tensor in tensors)


def paths_of(modules: Sequence[nn.Module], function: Any, declared: int) -> list[str]:
    """Return what messages call modules, each once: as variables of the function, or attributes of its object, do.

    Others are called by their place if they are among the first `declared`, else by their class. One that only holds
    parameters of no module says so.
    """
    given, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    variables: dict[str, Any] = {}
    if code is not None:
        variables = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            variables.update({name: cell.cell_contents} if cell != CellType() else {})
    attributes = {**getattr(given, "__dict__", {}), **getattr(given, "_modules", {})}
    variables.update((f"self.{name}", value) for name, value in attributes.items())
    names = {id(value): name for name, value in reversed(variables.items()) if isinstance(value, nn.Module)}
    found: list[str] = []
    for i, module in enumerate(modules):
        kind = type(module)
        place = NO_MODULE if kind is nn.Module else f"modules[{i}]" if i < declared else kind.__name__
        name = names.get(id(module), place)
        found.append(f"{name}[{i}]" if name in found else name)
    return found


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return a module and all inside, or none where the class of one has no hash, which torch needs."""
    try:
        return [*parts_of(module)]
    except TypeError:
        return []


def _tensors(module: nn.Module) -> list[Tensor]:
    tables = (*module_tables(module)[:2], vars(module))
    values = [value for table in tables for value in table.values() if is_tensor(value)]
    return [each for each in values if not (is_fake(type(each)) or nn.parameter.is_lazy(each) or each.is_inference())]


def _state(tensor: Tensor) -> tuple[int, Tensor | None, int]:
    """Return how often a tensor was changed, its gradient, and how often that was changed."""
    grad = tensor.grad if tensor.is_leaf else None
    return version(tensor), grad, 0 if grad is None else version(grad)
