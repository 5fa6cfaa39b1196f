"""Where tensors lie in memory, and which of them lie in a range of addresses."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which the elements lie. Other memory may lie between them too."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize * bool(tensor.numel())


class Spans:
    """Tensors by their addresses.

    A range of addresses from `start` to `stop` meets one of them if and only if
    `furthest[bisect_left(starts, stop)] > start`. A replay evaluates that itself for each input, to save calls.

    Args:
        tensors: by path. Those that are not plain tensors in memory are left out.

    Attributes:
        starts: where each tensor begins, in order.
        furthest: the greatest end of the first 0, 1, 2, ... tensors, since one may lie inside another.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._rows = sorted((*span(tensor), path) for path, tensor in tensors.items() if has_memory(tensor))
        self.starts: list[int] = [start for start, _, _ in self._rows]
        self.furthest: list[int] = [0, *accumulate((stop for _, stop, _ in self._rows), max)]

    def at(self, start: int, stop: int) -> str:
        """Return the path of a tensor that has bytes in this range, "" if none has."""
        before = bisect_left(self.starts, stop)
        if self.furthest[before] <= start or start == stop:
            return ""
        return next(path for _, end, path in self._rows[:before] if end > start)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one, whose elements lie at the addresses that its strides give."""
    return tensor.layout is torch.strided and not tensor.is_nested and type(tensor.data) is Tensor
