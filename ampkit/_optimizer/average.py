"""The running average of a model (EMA or SWA), computed without the host reads of torch's own, for a graph."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn

from .._torch.tensors.tensors import devices_with_foreach, foreach_copy_, grouped_by_device_and_dtype

Tensors = Sequence[Tensor]

# Each call of get_swa_multi_avg_fn makes another function of the same code.
_SWA_CODE = inspect.unwrap(get_swa_multi_avg_fn()).__code__
# The kernels of lerp compute these in float32: ATen/OpMathType.h.
_IN_FLOAT32 = (torch.float16, torch.bfloat16)


def capturable(after_step: Callable[[nn.Module], object]) -> tuple[Callable[[nn.Module], object], nn.Module | None]:
    """Return what to run after the optimizer in place of `after_step`, and the module whose state that changes.

    `update_parameters` of an `AveragedModel` is replaced by `update_average`, and `prepare_average` is called here.
    Every other callable is returned as it is, with the module that it is a method of, or None.

    Raises:
        ValueError: not a callable, or the `AveragedModel` itself.
    """
    if not callable(after_step):
        raise ValueError(
            f"graphed_step(after_step={type(after_step).__name__}): expected a callable that takes the model, such as "
            "averaged.update_parameters."
        )
    if isinstance(after_step, AveragedModel):
        raise ValueError(
            "graphed_step(after_step=AveragedModel): that would run the model. Pass its update_parameters."
        )
    if isinstance(after_step, nn.Module):
        return after_step, after_step
    owner = getattr(after_step, "__self__", None)
    if isinstance(owner, AveragedModel) and getattr(after_step, "__func__", None) is AveragedModel.update_parameters:
        prepare_average(owner)
        return partial(update_average, owner), owner
    return after_step, owner if isinstance(owner, nn.Module) else None


def prepare_average(averaged: AveragedModel) -> None:
    """Move `averaged.n_averaged` to the device of the averaged parameters, because torch leaves it on the CPU.

    Sync: one copy, the first time.
    """
    tensor = next(_state(averaged.module), None)
    if tensor is not None and averaged.n_averaged.device != tensor.device:
        averaged.n_averaged = averaged.n_averaged.to(tensor.device)


def update_average(averaged: AveragedModel, model: nn.Module) -> None:
    """Do what `averaged.update_parameters(model)` does, bit by bit, and read nothing on the host.

    The first update copies the model, and later ones average. Only the device knows which update this is, so both are
    computed and one is selected. The averaging function is therefore called in the first update too, with a count of 1,
    and its result is dropped; it must keep no state of its own. Where torch raises in the second update, this raises in
    the first: torch's SWA kernel takes no integers, so on CUDA the default average with `use_buffers` fails on the
    batch counts of BatchNorm. Pass an `avg_fn` there.

    Sync: none, if `averaged` is on the model's device and its `avg_fn` or `multi_avg_fn` waits for nothing.
    """
    prepare_average(averaged)
    count = averaged.n_averaged
    mine = _state(averaged.module) if averaged.use_buffers else averaged.parameters()
    its = _state(model) if averaged.use_buffers else model.parameters()
    # As in torch, tensors without a counterpart in the other model are left alone.
    pairs = [(ours.detach(), theirs.detach().to(ours.device)) for ours, theirs in zip(mine, its, strict=False)]
    old, new = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    clamped = count.clamp(min=1)  # functions that divide by the count never see 0
    # The function is chosen as `AveragedModel.update_parameters` does.
    if averaged.multi_avg_fn is None and averaged.avg_fn is not None:
        _average_each(averaged.avg_fn, old, new, clamped)
    else:
        own = averaged.multi_avg_fn
        is_swa = own is None or getattr(inspect.unwrap(own), "__code__", None) is _SWA_CODE
        for ours_group, theirs_group in _grouped(old, new):
            device = ours_group[0].device
            here = clamped.to(device)
            if own is not None and not is_swa:
                own(ours_group, theirs_group, here)
            elif own is not None or device.type in devices_with_foreach():
                _swa(ours_group, theirs_group, here)
            else:
                _average_each(get_swa_avg_fn(), ours_group, theirs_group, here)
    first = count == 0
    for ours, theirs in zip(old, new, strict=True):
        torch.where(first.to(ours.device), theirs.to(ours.dtype), ours, out=ours)
    if not averaged.use_buffers:
        old = [ours.detach() for ours in averaged.module.buffers()]
        buffers = zip(old, model.buffers(), strict=True)
        new = [theirs.detach().to(ours.device, ours.dtype) for ours, theirs in buffers]
        for ours_group, theirs_group in _grouped(old, new):
            foreach_copy_(ours_group, theirs_group)
    count.add_(1)


def _state(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _average_each(
    avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor], old: Tensors, new: Tensors, count: Tensor
) -> None:
    for ours, theirs in zip(old, new, strict=True):
        ours.copy_(avg_fn(ours, theirs, count.to(ours.device)))


def _swa(old: list[Tensor], new: list[Tensor], count: Tensor) -> None:
    """Do what the function of `get_swa_multi_avg_fn` does to tensors of one dtype.

    torch passes `1 / (count + 1)` to a foreach kernel as a number, which it reads from the device. Here it stays a
    tensor, which must have the dtype of the parameters. float16 and bfloat16 would round it, so parameters in these are
    averaged in float32. torch's kernel does the same.
    """
    dtype = old[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        get_swa_multi_avg_fn()(old, new, count)
        return
    wide = torch.float32 if dtype in _IN_FLOAT32 else dtype
    weight = (1 / (count + 1)).to(wide)
    for ours, theirs in zip(old, new, strict=True):
        if wide is dtype:
            ours.lerp_(theirs, weight)
        else:
            ours.copy_(ours.to(wide).lerp_(theirs.to(wide), weight))


def _grouped(old: list[Tensor], new: list[Tensor]) -> list[list[list[Tensor]]]:
    """Return both lists by device and dtype: pairs of lists that one foreach kernel takes."""
    # torch's function refuses empty lists.
    return [lists for lists, _ in grouped_by_device_and_dtype([old, new]).values()] if old else []
