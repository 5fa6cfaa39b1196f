"""Whole numbers that operations read from the device: to count what a mask selects, for a size. And the same operations
with these numbers as arguments, which read nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..guard import private
from .operators import INDEXING, READ, kind_of
from .tree import tensors_in

_COUNT: Any = private(torch.ops.aten, "count_nonzero").default
_REPEAT: Any = private(torch.ops.aten, "repeat_interleave").Tensor
_PLACES: Any = private(torch.ops.aten, "nonzero_static").default
_SELECT: Any = private(torch.ops.aten, "index").Tensor
# The gradient of what `masked_scatter` puts in place: a selection within, which no dispatch mode sees.
_SCATTERED: Any = private(torch.ops.aten, "masked_scatter_backward").default
_MASKS = (torch.bool, torch.uint8)  # dtypes of indices that are masks
_WHOLE = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def _sum_of_repeats(repeats: Tensor) -> Tensor:
    """Return the sum, or -1 if one of them is negative, for which torch raises an error."""
    return torch.where((repeats < 0).any(), -1, repeats.sum())


class Count(NamedTuple):
    """A number on the device, a whole one but where it is an entry.

    Attributes:
        tensor: has it, or what it is computed from.
        by: computes it, None if the tensor has it.
    """

    tensor: Tensor
    by: Callable[[Tensor], Tensor] | None = None

    def read(self) -> Any:
        """Return the number. Sync: it waits for the device."""
        return READ(self.tensor if self.by is None else self.by(self.tensor))


def is_whole(tensor: Tensor) -> bool:
    """Return whether these are whole numbers, or True and False."""
    return tensor.dtype in _WHOLE


def counted_masks(args: Sequence[Any]) -> list[Tensor]:
    """Return the masks among the indices of an operation of `INDEXING`, if it counts what they select."""
    indices = tensors_in(args[1])
    masks = [index for index in indices if index.dtype in _MASKS]
    value, accumulate = (*args[2:4], None, False)[:2]  # of `index_put_`
    is_number = isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
    # `x[mask] = value` is a `masked_fill_` then, as at::native::canDispatchToMaskedFill decides it.
    is_fill = len(masks) == len(indices) == 1 and is_number and not accumulate
    return [] if is_fill else masks


def counts_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Count, ...] | None:
    """Return the numbers that an operation reads to run as `with_counts` does. None if it is no such operation."""
    name = kind_of(op).name
    if op is READ:
        return (Count(args[0]),)
    if name in ("nonzero", "masked_select") and not kwargs:
        return (Count(args[-1], _COUNT),)
    if op is _SCATTERED:
        return (Count(args[1], _COUNT),)
    if op is _REPEAT:
        return (Count(args[0], _sum_of_repeats),) if kwargs.get("output_size") is None else ()
    if name not in INDEXING or any(tensor.device != args[0].device for tensor in tensors_in(args[1:3])):
        return None
    return tuple(Count(mask, _COUNT) for mask in counted_masks(args))


def with_counts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], counts: Sequence[int]) -> Any:
    """Return what an operation returns, bit by bit, that is given the numbers which it reads otherwise."""
    name = kind_of(op).name
    if op is READ:
        return counts[0]
    if op is _REPEAT:
        return op(*args, **{**kwargs, "output_size": counts[0]})
    if name == "nonzero":
        return _places(args[0], counts[0])
    if name == "masked_select":
        return _selected(args[0], args[1], counts[0])
    if op is _SCATTERED:  # as at::native::masked_scatter_backward_symint
        selected = _selected(args[0], args[1], counts[0])
        return torch.cat((selected, selected.new_zeros(math.prod(args[2]) - len(selected)))).view(args[2])
    left, masks = iter(counts), counted_masks(args)
    indices: list[Tensor | None] = []
    for index in args[1]:
        is_mask = any(index is mask for mask in masks)
        indices += _places(index, next(left)).unbind(1) if is_mask else [index]
    return op(args[0], indices, *args[2:], **kwargs)


def _selected(tensor: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return `tensor.masked_select(mask)`, with a mask in which this many are true. On CUDA nothing waits."""
    given, places = torch.broadcast_tensors(torch.atleast_1d(tensor), torch.atleast_1d(mask))
    repeated = places.numel() // max(1, mask.numel())
    selected: Tensor = _SELECT(given, _places(places, count * repeated).unbind(1))
    return selected


def _places(mask: Tensor, count: int) -> Tensor:
    """Return `mask.nonzero()`, with the same strides. On CUDA nothing waits."""
    places: Tensor = _PLACES(mask, size=count)
    return places.t().contiguous().t()
