"""Whole numbers of the device that the host reads: code and operations are given them, and read nothing.

`sizes.tolist()` and `torch.tensor([lengths.max()])` read them where no dispatch mode sees it, so methods are replaced.
Elsewhere an operation reads them (`torch.zeros(lengths.max())`, `x[mask]`), and a mode gives them to it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._text import comparable
from ..._torch.device.execution_trace import unrecorded
from ..._torch.tensors.fast_paths import autocast_of_parts
from ..._torch.tensors.host_counts import Count, counts_of, with_counts
from ..._torch.tensors.modes import WatchingMode, without_modes
from ..._torch.tensors.operators import LIST_READS
from ..._torch.tensors.tree import tensors_in, tree_flatten, tree_unflatten
from ..._undo import Undo
from ..._user_line import compiler_runs, wraps_operations
from .replaced import replace_here

wraps_operations(__file__)

AHEAD = "ahead"  # stands for a number that is asked ahead of each call


class GivenNumbers(WatchingMode):
    """Gives operations the whole numbers that they read, in their order. With `differs`, they are compared before that.

    Args:
        device: of the tensors that have them.
        numbers: for each operation that reads some, in their order: these, `AHEAD` for each one that is
            asked ahead, or None.
        ahead: the answers of those that are asked ahead.
        differs: called if a number is another one. The operation then reads its own.
    """

    def __init__(
        self,
        device: torch.device,
        numbers: Iterator[tuple[Any, ...] | None],
        ahead: Iterator[Any],
        differs: Callable[[], None] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._device, self._numbers, self._ahead, self._differs = device, numbers, ahead, differs

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts = counts_of(op, args, kwargs)
        found = None
        if counts and counts[0].tensor.device.type == self._device.type and not compiler_runs():
            found = next(self._numbers, None)
        if counts and found is not None:
            numbers: list[Any] = [next(self._ahead, None) if number is AHEAD else number for number in found]
            if self._are(numbers, counts):
                return with_counts(op, args, kwargs, numbers)
        with autocast_of_parts(op):
            return op(*args, **kwargs)

    def _are(self, numbers: list[Any], counts: Sequence[Count]) -> bool:
        """Return whether these are the numbers. In a capture nobody can tell."""
        if self._differs is None:
            return len(numbers) == len(counts) and None not in numbers
        with unrecorded():
            is_same = numbers == [comparable(count.read()) for count in counts]
        if not is_same:
            self._differs()
        return is_same


@contextmanager
def unwatched(device: torch.device) -> Iterator[None]:
    """Context in which the host reads tensors of the device, which is no finding."""
    with Undo() as undo, without_modes():
        if device.type == "cuda":
            undo.note(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("default")
        yield


def tell_lists(
    undo: Undo,
    device: torch.device,
    numbers_of: Callable[[Tensor], tuple[int, ...] | None],
    stacks: Callable[[], object] = lambda: None,
) -> None:
    """Have `torch.tensor([lengths.max(), 1])` get the number, not the tensor, which torch reads where no mode sees it.

    If there are tensors alone, `torch.stack` makes the same, and no number is read.

    Args:
        undo: that is undone at its end.
        device: of the tensors.
        numbers_of: returns the number of a tensor in a tuple, None if it is not known.
        stacks: called where they are stacked.
    """

    def told(place: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        data = args[place] if len(args) > place and isinstance(args[place], (list, tuple)) else ()
        here = [tensor for tensor in tensors_in(data) if tensor.device.type == device.type]
        if not here or compiler_runs():
            return original(*args, **kwargs)
        if not place and (stacked := _stacked(data, kwargs)) is not None:
            stacks()
            return stacked
        # Of these alone torch makes the same tensor as of their numbers.
        if any(tensor.dim() or tensor.dtype not in (torch.int64, torch.bool) for tensor in here):
            return original(*args, **kwargs)
        found = {id(tensor): numbers_of(tensor) for tensor in here}
        if None in found.values():
            return original(*args, **kwargs)
        leaves, tree = tree_flatten(data)
        numbers = [(found.get(id(leaf)) or (leaf,))[0] for leaf in leaves]
        return original(*args[:place], tree_unflatten(numbers, tree), *args[place + 1 :], **kwargs)

    for owner, name, place in LIST_READS:
        replace_here(undo, owner, name, partial(told, place))


def _stacked(data: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Return what `torch.tensor(data, **kwargs)` does, if that is a stack of tensors which are where it is to be."""
    is_plain = all(type(each) is Tensor and each.layout is torch.strided and not each.is_nested for each in data)
    if not is_plain or set(kwargs) != {"device"}:
        return None
    found = {(each.shape, each.dtype, each.device) for each in data}
    if found != {(torch.Size(), data[0].dtype, torch.empty(0, device=kwargs["device"]).device)}:
        return None
    return torch.stack([each.detach() for each in data])


def numbers_in(tensor: Tensor) -> tuple[int, ...]:
    """Return the numbers in a tensor, `comparable`. Sync: it waits for the device."""
    return tuple(map(comparable, _to_list(tensor.reshape(-1))))


def nested(numbers: Sequence[int], shape: torch.Size) -> Any:
    """Return numbers as `tolist` does of a tensor of this shape."""
    if not shape:
        return numbers[0]
    size = len(numbers) // shape[0] if shape[0] else 0
    return [nested(numbers[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def outermost(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return what takes a method's place in calls of the step's.

    It does not in calls within a call, for torch function modes call it again, nor in those of torch's compiler, which
    asks what is in constants that it folds. Later calls of the step compile nothing, and ask nothing there.
    """
    running: list[Tensor] = []

    def asked(original: Callable[..., Any], tensor: Tensor) -> Any:
        if running or compiler_runs():
            return original(tensor)
        running.append(tensor)
        try:
            return ask(original, tensor)
        finally:
            running.clear()

    return asked


_to_list = Tensor.tolist  # which is replaced
