"""When the next batch is copied to the device: while a step runs, from pinned memory, on a side stream."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ._errors import AmpkitWarning
from ._torch import tree_flatten, tree_unflatten

Batch = TypeVar("Batch")


class prefetch(Generic[Batch]):  # noqa: N801 - used like a function, as `enumerate` is
    """Iterate over `loader`, with every tensor of a batch on `device`.

    On CUDA each batch is pinned (unless the loader did that), copied on a side stream while the device still works on
    the previous step, and handed over by an event: the copy costs the step nothing. On the CPU it is a plain iterator.

    Args:
        loader: any iterable of batches (trees of tensors and other objects; the others pass through). Each `iter()` of
            the prefetcher starts a new `iter(loader)`, so one prefetcher serves all epochs. `len()` is the loader's.
        device: where the batches go: "cuda", "cuda:1", "cpu" or a `torch.device`.
        depth: how many steps the host may run ahead of the device. It bounds the memory of waiting batches.

    Raises:
        ValueError: `depth` is not a positive int, or `device` names CUDA where there is none.

    Sync: waits only where the host is `depth` steps ahead. Aliasing: none, every batch has tensors of its own.
    """

    def __init__(self, loader: Iterable[Batch], device: "torch.device | str", *, depth: int = 2) -> None:
        if not isinstance(depth, int) or depth < 1:
            raise ValueError(f"prefetch(depth={depth!r}): expected an int of at least 1.")
        self.loader = loader
        self.device = _indexed(torch.device(device))
        self.depth = depth

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without len raises its own TypeError

    def __iter__(self) -> Iterator[Batch]:
        return self._copied() if self.device.type == "cuda" else (self._moved(batch) for batch in self.loader)

    def _moved(self, batch: Batch) -> Batch:
        moved: Batch = _map_tensors(lambda tensor: tensor.to(self.device), batch)
        return moved

    def _copied(self) -> Iterator[Batch]:
        side = torch.cuda.Stream(self.device)
        steps: deque[torch.cuda.Event] = deque()
        for batch in self.loader:
            with torch.cuda.stream(side):
                on_device = _map_tensors(self._copy, batch)
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_stream(side)
            # The allocator must not give the memory to the side stream's next copy while the consumer still reads it.
            _map_tensors(lambda tensor, stream=consumer: _record(tensor, stream), on_device)
            yield on_device
            del on_device
            steps.append(consumer.record_event())
            if len(steps) > self.depth:
                steps.popleft().synchronize()

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # the pinned allocator keeps it until the copy below is over
        return tensor.to(self.device, non_blocking=True)


def _record(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    if tensor.is_cuda:
        tensor.record_stream(stream)
    return tensor


def _map_tensors(fn: Any, tree: Any) -> Any:
    leaves, spec = tree_flatten(tree)
    return tree_unflatten([fn(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"prefetch(device={str(device)!r}): no CUDA device is available. Pass 'cpu'.")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cuda", "cpu"):
        warnings.warn(f"prefetch: batches are copied to {device} without overlap.", AmpkitWarning, stacklevel=3)
    return device
