"""Autocast's cache of casts, filled with casts that were made elsewhere."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..._undo import Undo, replace
from .modes import without_modes

Taken = Callable[[nn.Parameter, Tensor], bool]

_autocast: Any = torch.amp.autocast_mode.autocast


def enter_autocast(undo: Undo, begin: Callable[[str], None]) -> None:
    """Have `begin`, called with its device type, begin each outermost autocast context, until the end of a context.

    Autocast keeps its casts until the outermost context ends. A recomputation within a backward has one of its own.
    """
    enter = _autocast.__enter__

    def entered(context: Any) -> Any:
        found = enter(context)
        torch.autocast_increment_nesting()
        if torch.autocast_decrement_nesting() == 1:
            begin(context.device)
        return found

    replace(undo, _autocast, "__enter__", entered)
    for device_type in ("cuda", "cpu"):  # a context around the step
        if torch.is_autocast_enabled(device_type):
            begin(device_type)


def fill_cache(copies: Mapping[nn.Parameter, Tensor], taken: Taken, device_type: str) -> None:
    """Put copies of parameters where autocast on a device keeps its casts, if it casts to their dtype there.

    Autocast then takes them for its own casts (`cached_cast` in ATen/autocast_mode.cpp): it casts the arguments of a
    matrix product, and a dispatch mode gives it the copy in place of the cast. The mode sees the product, too, so that
    no kernel runs and shapes do not matter. `taken` gets a parameter and the gradient of its cast, in a backward. If it
    returns False, the gradient is cast and goes to the parameter, as from `Tensor.to`.
    """
    if not (torch.is_autocast_enabled(device_type) and torch.is_autocast_cache_enabled()):
        return
    dtype = torch.get_autocast_dtype(device_type)
    with without_modes():
        for param, copy in copies.items():
            if copy.dtype is not dtype or param.device.type != device_type:
                continue
            cast = copy.data  # a tensor of its own
            with torch.no_grad(), _GivesCast(cast):
                torch.mm(param, param)
            cast.detach_()  # autocast has given it the backward of a cast
            with torch.enable_grad():
                _Cast.apply(cast, param, taken)  # type: ignore[no-untyped-call]  # not annotated in torch


class _GivesCast(TorchDispatchMode):
    """Gives a cast for the result of any operation."""

    def __init__(self, cast: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._cast = cast

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return self._cast


class _Cast(torch.autograd.Function):
    """The cast of a parameter, which is there already."""

    @staticmethod
    def forward(ctx: Any, cast: Tensor, param: nn.Parameter, taken: Taken) -> Tensor:
        ctx.mark_dirty(cast)
        ctx.set_materialize_grads(False)
        ctx.param, ctx.taken = param, taken
        return cast

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None, None]:
        if gradient is None or (not torch.is_grad_enabled() and ctx.taken(ctx.param, gradient)):
            return None, None, None
        return None, gradient.to(ctx.param.dtype), None


def beginning(loss: Tensor, note: Callable[[], None]) -> Tensor:
    """Return a view of a loss. A backward from there begins with a call of `note`."""
    begun: Tensor = _Beginning.apply(loss, note)  # type: ignore[no-untyped-call]  # not annotated in torch
    return begun


class _Beginning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradient, None
