"""The tensors of modules and optimizers by path, with the places that they are bound to."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._torch.tensors.modules import module_tables
from ..._torch.tensors.tensors import inner_tensors, is_tensor


class Cell(NamedTuple):
    """A place that a tensor is bound to."""

    path: str  # what a user calls it
    table: Any  # the dict that holds the tensor, or the list
    key: Any


class Bound(dict[str, Tensor]):
    """Tensors by path.

    Attributes:
        others: attributes of the modules that were not tensors, by path. A step may have put a tensor in their place.
            And tensors whose bits are in other tensors, which are in the table.
    """

    def __init__(self, tensors: dict[str, Tensor], modules: Mapping[str, nn.Module]) -> None:
        self.others: dict[str, Any] = {path: tensor for path, tensor in tensors.items() if inner_tensors(tensor)}
        super().__init__({path: tensor for path, tensor in tensors.items() if path not in self.others})
        for prefix, module in _named(modules):
            plain = ((key, value) for key, value in vars(module).items() if not is_tensor(value))
            self.others.update((f"{prefix}.{key}", value) for key, value in plain)


def cells(
    modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], own: dict[str, Tensor], *, computed: bool = False
) -> Iterator[Cell]:
    """Yield the cell of every tensor of modules, optimizers, and of a table of ampkit's own.

    With `computed`, attributes that require grad count, too. Mostly they are computed in each forward (weight_norm).
    """
    owners: dict[Tensor, str] = {}
    for prefix, module in _named(modules):
        for table in module_tables(module)[:2]:
            for key, tensor in table.items():
                if tensor is not None:
                    owners[tensor] = f"{prefix}.{key}"
                    yield Cell(owners[tensor], table, key)
        attributes = vars(module)
        for key, value in attributes.items():
            if is_tensor(value) and (computed or not value.requires_grad):
                yield Cell(f"{prefix}.{key}", attributes, key)
    for i, optimizer in enumerate(optimizers):
        for j, (param, state) in enumerate(optimizer.state.items()):
            owner = owners.get(param, f"state[{j}]")  # if the parameter belongs to no module
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield from _with_inner(Cell(f"optimizer[{i}].{owner}.{key}", state, key))
    for name in own:
        yield Cell(name, own, name)


def _with_inner(cell: Cell) -> Iterator[Cell]:
    """Yield a cell, and those of the tensors in its tensor."""
    yield cell
    value = cell.table[cell.key]
    for name in inner_tensors(value):
        yield from _with_inner(Cell(f"{cell.path}.{name}", vars(value), name))


def why_not_scripted(modules: Mapping[str, nn.Module]) -> str:
    """Return which module keeps its tensors where `cells` does not find them, "" if none does."""
    for name, module in _named(modules):
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name} is a torch.jit.ScriptModule, which hides its tensors' places. Pass the module itself."
    return ""


def _named(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for root, top in modules.items():
        yield from top.named_modules(prefix=root)
