"""The modules that a step may change, with everything in them, and whether they are still the same objects."""

import functools
import gc
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..._torch.tensors.modules import module_tables
from ..._torch.tensors.tensors import local_shard

requires_grad: Callable[[Tensor], bool] = operator.attrgetter("requires_grad")


@dataclass(eq=False, repr=False)
class Objects:
    """A list of objects, compared by identity. It keeps them alive, so that no other object gets the same identity."""

    objects: Sequence[Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Objects) and self.are(other.objects)

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.objects)))

    def are(self, others: Sequence[Any]) -> bool:
        """Return whether the others are the very same objects. It uses no `==`, which waits for the device."""
        return len(self.objects) == len(others) and all(map(operator.is_, self.objects, others))


class Walk:
    """The modules below some roots with everything in them, kept as long as no table of any of them changes.

    Attributes:
        modules: the modules, each once.
        tables: the dictionaries in which they keep parameters, buffers and children.
        tensors: the parameters and buffers, each once.
        is_split: whether one of them is a DTensor.
        training: reads `training` of each module.
    """

    def __init__(self, roots: dict[str, nn.Module]) -> None:
        self.modules: list[nn.Module] = list(roots.values())
        self._roots = roots
        seen = set(self.modules)  # a module may be registered under two names
        for module in self.modules:  # grows below
            for child in module_tables(module)[2].values():
                if child is not None and child not in seen:
                    seen.add(child)
                    self.modules.append(child)
        self.tables: tuple[dict[str, Any], ...] = (*chain.from_iterable(map(module_tables, self.modules)),)
        # These keep the objects alive, so that no other object gets the same identity.
        self._objects = Objects(gc.get_referents(*self.tables))
        # Each once: a parameter may be registered under two names.
        found = (each for each in self._objects.objects if isinstance(each, Tensor))
        self.tensors: list[Tensor] = list(dict.fromkeys(found))
        # In a third of the time, if it is there and no class defines it.
        if all("training" in vars(each) and not hasattr(type(each), "training") for each in self.modules):
            read = functools.partial(map, operator.itemgetter("training"), list(map(vars, self.modules)))
        else:
            read = functools.partial(map, operator.attrgetter("training"), self.modules)
        self.training: Callable[[], Iterator[bool]] = read
        self.is_split: bool = any(local_shard(tensor) is not tensor for tensor in self.tensors)
        owners = (path for path in self.paths() for _ in range(3))  # three tables each
        # Now, because the tables may change.
        self._names = [f"{owner}.{key}" for owner, table in zip(owners, self.tables, strict=True) for key in table]

    def local(self) -> list[Tensor]:
        """Return the tensors; of a DTensor this process's part. Aliasing: the list may be that of `tensors`."""
        return list(map(local_shard, self.tensors)) if self.is_split else self.tensors

    def addresses(self) -> list[int]:
        """Return where each tensor lies now; of a DTensor, where this process's part of it lies."""
        return list(map(Tensor.data_ptr, self.local()))

    def layouts(self) -> list[Any]:
        """Return shape, strides and dtype of each tensor, which `.data =` can change where the address stays."""
        return list(map(_layout, self.local()))

    def is_current(self) -> bool:
        """Return whether every table still has the very same objects in it."""
        return self._objects.are(gc.get_referents(*self.tables))  # all values of all tables, in one call of C

    def flags(self) -> list[bool]:
        """Return what may change in place: requires_grad per tensor, training per module."""
        return [*map(requires_grad, self.tensors), *self.training()]

    def changed_flags(self, before: list[bool]) -> list[tuple[int, bool]]:
        """Return the flags that were changed since: the place of each in `flags`, and what it is now."""
        return [(i, now) for i, (old, now) in enumerate(zip(before, self.flags(), strict=True)) if old != now]

    def set_flags(self, flags: list[tuple[int, bool]]) -> None:
        """Set some of the flags, each by its place in `flags`."""
        for place, flag in flags:
            if place < len(self.tensors):
                self.tensors[place].requires_grad_(flag)
            else:
                self.modules[place - len(self.tensors)].training = flag

    def gradients(self) -> list[tuple[int, Tensor | None]]:
        """Return the gradient of each leaf among the tensors, by its place in `tensors`."""
        return [(place, tensor.grad) for place, tensor in enumerate(self.tensors) if tensor.is_leaf]

    def set_gradients(self, gradients: list[tuple[int, Tensor | None]]) -> None:
        """Set some of the gradients, each by its place."""
        for place, gradient in gradients:
            self.tensors[place].grad = gradient

    def put_back(self, before: list[bool]) -> None:
        """Put back the flags that were changed since."""
        self.set_flags([(place, before[place]) for place, _ in self.changed_flags(before)])

    def paths(self) -> list[str]:
        """Return the path of each module, by the first name that leads to it."""
        paths = {module: path for root, top in self._roots.items() for path, module in top.named_modules(prefix=root)}
        return [paths.get(module, "?") for module in self.modules]

    def first_change(self, new: "Walk") -> str:
        """Return in words the first difference from a walk of the same roots."""
        pairs = zip(self._names, self._objects.objects, new._names, new._objects.objects, strict=False)
        for old_name, old, new_name, now in pairs:
            if old_name not in new._names:
                return f"{old_name} was removed"
            if new_name not in self._names:
                return f"{new_name} was added"
            if old_name == new_name and old is not now:
                return f"{new_name} was replaced"
        return "a parameter, buffer or module was added or removed"

    def name_of(self, tensor: Tensor) -> str:
        """Return the path of one of the tensors."""
        pairs = zip(self._names, self._objects.objects, strict=False)
        return next(name for name, found in pairs if found is tensor)

    def uninitialized(self) -> str:
        """Return the path of a parameter or buffer that a lazy module makes in its first call, "" if all are there."""
        if not any(map(is_lazy, self.tensors)):
            return ""
        return next(name for name, found in zip(self._names, self._objects.objects, strict=False) if is_lazy(found))


def take_in_parameters(
    modules: dict[str, nn.Module], optimizers: Iterable[Optimizer], devices: Collection[torch.device]
) -> None:
    """Add a module with the parameters on these devices that optimizers hold, and that no module has; none if all do.

    So their gradients are compared, and are where the loop looks for them behind a replay.
    """
    known = {id(param) for module in modules.values() for param in module.parameters()}
    held = (param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"])
    strangers = [param for param in held if id(param) not in known and param.device in devices]
    if strangers:
        modules[f"{NO_MODULE}[{len(modules)}]"] = module_of(strangers)


NO_MODULE = "parameters of no module"  # what messages call the module that has them


def module_of(params: Iterable[Tensor]) -> nn.Module:
    """Return a module that has these parameters alone. An optimizer takes any leaf, `register_parameter` only some.

    Aliasing: the live tensors.
    """
    module = nn.Module()
    module_tables(module)[0].update((str(i), param) for i, param in enumerate(params))
    return module


def _layout(tensor: Tensor) -> tuple[Any, ...] | None:
    try:
        return tuple(tensor.shape), tensor.stride(), tensor.dtype
    except RuntimeError:  # a parameter of a lazy module has no shape yet, a sparse buffer has no strides
        return None
