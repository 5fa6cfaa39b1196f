"""The dictionaries in which a module keeps its parameters, buffers, children and hooks, and a tensor its hooks."""

import functools
import gc
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..guard import private

# A module gets them when it is made, so the class alone cannot be asked for them.
_MODULE = nn.Module()
for _name in (
    *("_parameters", "_buffers", "_modules", "_is_full_backward_hook"),
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
):
    private(_MODULE, _name)

for _name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
    private(Tensor, _name)
_HOOKS_OF_TENSORS: tuple[Callable[[Tensor], dict[int, Any] | None], ...] = tuple(
    map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks"))
)
MODULE_CALL = private(nn.Module, "_call_impl").__code__  # of the function that calls `forward`


def is_module(value: object) -> TypeGuard[nn.Module]:
    """Return whether this is a module with parts, which it has once `nn.Module.__init__` was called.

    `isinstance` is not used, as it may have a lazy proxy make its object, and asks a weak one for an object that may be
    gone.
    """
    return issubclass(type(value), nn.Module) and "_modules" in vars(value)


def live_modules() -> list[nn.Module]:
    """Return all modules of this process."""
    return list(filter(is_module, live_objects(nn.Module)))


_subclasses: Callable[[type], list[type]] = type.__subclasses__  # whatever a metaclass makes of it


def live_objects(base: type) -> list[Any]:
    """Return all objects of this process whose class is this one or a subclass, if the garbage collector knows them.

    The objects of other classes, of which there are hundreds of thousands, are let go before any other thread runs: it
    cannot go on with a tuple that it is about to make while somebody else has it. So no Python code runs in between.
    """
    kinds, new = dict[int, type](), list[type]([base])
    while new:
        kinds.update((id(above), above) for above in new)
        new = [kind for above in new for kind in _subclasses(above) if id(kind) not in kinds]
    objects, same = itertools.tee(itertools.chain.from_iterable(itertools.starmap(gc.get_objects, [()])))
    return list(itertools.compress(objects, map(kinds.__contains__, map(id, map(type, same)))))


# parts_of(module): it and all modules inside, whatever a class of the user's makes of `modules`.
parts_of: Callable[[nn.Module], Iterator[nn.Module]] = nn.Module.modules
# module_tables(module): its own dictionaries of parameters, buffers and children. Faster than the iterators.
module_tables: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = operator.attrgetter(
    "_parameters", "_buffers", "_modules"
)
# hook_tables(module): its own dictionaries of hooks that run in a call of it: before, after and in backward.
hook_tables: Callable[[nn.Module], tuple[dict[int, Any], ...]] = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)


def has_legacy_backward_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of `register_backward_hook`."""
    return module._is_full_backward_hook is False and bool(module._backward_hooks)


# The dictionaries of hooks that run in the calls of all modules.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = tuple(
    private(torch.nn.modules.module, name)
    for name in (
        *("_global_forward_pre_hooks", "_global_forward_hooks"),
        *("_global_backward_pre_hooks", "_global_backward_hooks"),
    )
)
# has_global_hooks(): whether there are any.
has_global_hooks: Callable[[], bool] = functools.partial(any, GLOBAL_HOOKS)

private(RemovableHandle, "next_id")
# hooks_made(): how many hooks of modules, tensors and optimizers were ever registered in this process.
hooks_made: Callable[[], int] = functools.partial(getattr, RemovableHandle, "next_id")


def tables_with_hooks(modules: Iterable[nn.Module], tensors: Iterable[Tensor]) -> list[dict[int, Any]]:
    """Return the dictionaries of hooks that run in a call of these modules or in a backward to these tensors.

    Those that are empty, or have hooks of torch and ampkit only, are left out.
    """
    tables = [*GLOBAL_HOOKS, *(table for module in modules for table in hook_tables(module))]
    tables += [table for tensor in tensors for read in _HOOKS_OF_TENSORS if (table := read(tensor)) is not None]
    return [table for table in tables if table and not all(map(is_of_torch, table.values()))]


def is_of_torch(hook: Any) -> bool:
    """Return whether a hook belongs to torch or to ampkit."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] in ("torch", "ampkit")
