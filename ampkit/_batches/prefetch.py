"""Copies the next batch to the device, and decodes it there, on a side stream while a step runs."""

import functools
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .._arguments import check_at_least, check_callable, read_device, wrong
from .._capture.keys.containers import holds_tensors, is_record, tensors_held, with_values
from .._errors import AmpkitError, AmpkitWarning
from .._torch.tensors.tree import tree_flatten, tree_unflatten

Batch = TypeVar("Batch")


class prefetch(Generic[Batch]):  # noqa: N801 - used like a function, as `enumerate` is
    """Iterate over `loader`, with every tensor of a batch on `device`.

    On CUDA each batch is pinned (unless the loader did that) and copied on a side stream while the device still works
    on earlier steps, and the stream of the step waits for the copy. So the copy takes no time from the step. On the CPU
    it is a plain iterator.

    A batch is taken from the loader when the loop asks for it and never before, so that random numbers and the state of
    the loader are those of a plain loop at every step. The copy overlaps with earlier steps all the same, because a
    loop that does not wait for the device is up to `depth` steps ahead of it. For that, the loader and the launch of a
    step together must take the host less time than the step takes the device. A loop that reads the loss in every step
    is not ahead, and waits for each copy.

    With `transform`, images can be decoded on the device rather than by the loader: uint8 has a quarter of the bytes of
    float32. Make its constants before the loop::

        mean, scale = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) for v in (MEAN, SCALE))  # in units of a pixel

        def decode(batch):
            images, labels = batch  # uint8, (N, H, W, 3)
            return (images.permute(0, 3, 1, 2) - mean) * scale, labels  # float32, channels_last

        for images, labels in ampkit.prefetch(loader, "cuda", transform=decode): ...

    Args:
        loader: any iterable of batches. A batch may contain trees of tensors; dict-like objects (`UserDict`, such as
            the `BatchEncoding` of transformers), dataclasses and attrs classes, whose copies keep their class; and
            objects with a method `to(device)`, which is called. An object without tensors is passed on as it is. Each
            `iter()` of the prefetcher starts a new `iter(loader)`, so one prefetcher serves all epochs. `len()` is the
            loader's. A loader must not write to a pinned batch after yielding it, because the copy may still be due.
        device: where the batches go: "cuda", "cuda:1", "cpu" or a `torch.device`.
        depth: how many steps the host may run ahead of the device. It bounds the memory of waiting batches.
        transform: a function that gets each batch on the device and returns the batch to yield, a tree of tensors and
            other objects. It runs without autograd on the side stream, right behind the copy and at the same time as an
            earlier step. So it may read tensors from before the loop, and must not change what a step reads. The host
            calls it when the loop asks for the batch, between two steps: it draws the same numbers from the default
            generators as it would in the first line of the loop's body.

    Raises:
        ValueError: `depth` is not a positive int, `device` names CUDA where there is none, or `transform` is not
            callable.
        AmpkitError: while iterating, a batch has tensors in an object of another kind; or `transform` raised (its
            exception is the cause), or returned None.

    Sync: waits only if the host is `depth` steps ahead, or if an object's own `to(device)` waits. Aliasing: a batch
    that is on the device already is yielded as it is, any other has tensors of its own.
    """

    @overload
    def __init__(
        self, loader: Iterable[Batch], device: "torch.device | str", *, depth: int = 2, transform: None = None
    ) -> None: ...

    @overload
    def __init__(
        self, loader: Iterable[Any], device: "torch.device | str", *, depth: int = 2, transform: Callable[[Any], Batch]
    ) -> None: ...

    def __init__(
        self,
        loader: Iterable[Any],
        device: "torch.device | str",
        *,
        depth: int = 2,
        transform: Callable[[Any], Batch] | None = None,
    ) -> None:
        check_at_least("prefetch", "depth", depth, 1, "it is how many steps the host may be ahead of the device")
        if transform is not None:
            check_callable("prefetch", "transform", transform, "a function of a batch, or None")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise wrong("prefetch", "loader", loader, "an iterable of batches, such as a DataLoader")
        self.loader = loader
        self.device: torch.device = read_device("prefetch", "device", device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type not in ("cuda", "cpu"):
            text = f"prefetch: batches are copied to {self.device} without overlap, which only CUDA devices have here."
            warnings.warn(text, AmpkitWarning, stacklevel=2)
        self.depth = depth
        self.transform = transform

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without len raises its own TypeError

    def __iter__(self) -> Iterator[Batch]:
        if self.device.type != "cuda":
            for i, batch in enumerate(self.loader):
                yield self._transformed(_Transfer(self.device, i, lambda tensor: tensor.to(self.device))(batch), i)
            return
        side, consumer = _side_stream(self.device), torch.cuda.current_stream(self.device)
        if self.transform is not None:
            side.wait_stream(consumer)  # the device may still be computing its constants
        steps: deque[torch.cuda.Event] = deque()
        for i, batch in enumerate(self.loader):
            consumer = torch.cuda.current_stream(self.device)
            try:
                with torch.cuda.stream(side):
                    copy = functools.partial(self._copy, consumer=consumer, side=side)
                    on_device = self._transformed(_Transfer(self.device, i, copy)(batch), i)
            finally:  # also after an error, because the memory that `transform` reads may be reused then
                consumer.wait_stream(side)
            # The next copy on the side stream must not reuse this memory while the consumer still reads it. Tensors
            # that `transform` did not return were used on the side stream alone, which reuses their memory in order.
            leaves = tree_flatten(on_device)[0] if holds_tensors(on_device) else []
            for tensor in chain.from_iterable(map(tensors_held, leaves)):
                if tensor.device == self.device:
                    tensor.record_stream(consumer)
            yield on_device
            del on_device, leaves
            steps.append(consumer.record_event())
            if len(steps) > self.depth:
                steps.popleft().synchronize()

    def _copy(self, tensor: Tensor, *, consumer: torch.cuda.Stream, side: torch.cuda.Stream) -> Tensor:
        if tensor.device == self.device:
            if self.transform is not None:  # it reads on the side stream what the loader wrote on the consumer's
                side.wait_stream(consumer)  # which is after the steps that are queued there, so nothing overlaps then
                tensor.record_stream(side)
            return tensor
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()  # the pinned allocator keeps it until the copy below is over
        return tensor.to(self.device, non_blocking=True)

    def _transformed(self, batch: Any, i: int) -> Batch:
        if self.transform is None:
            return batch  # type: ignore[no-any-return]  # the loader's batch is the one to yield
        try:
            with torch.no_grad():
                made = self.transform(batch)
        except Exception as error:
            raise AmpkitError(f"prefetch(transform): batch {i}: {type(error).__name__}: {error}") from error
        if made is None:
            raise AmpkitError(f"prefetch(transform): batch {i}: it returned None, not a batch. Does it lack a return?")
        return made


@dataclass(eq=False)
class _Transfer:
    """Copies one batch to the device, with every tensor in its trees and objects. The batch itself stays as it is."""

    _device: torch.device
    _i: int  # the number of the batch, for messages
    _move: Callable[[Tensor], Tensor]  # returns a tensor on the device
    # So that a tensor that is in the batch twice is one tensor on the device.
    _by_id: dict[int, Tensor] = field(default_factory=dict)
    _within: list[Any] = field(default_factory=list)  # the objects whose parts are being moved

    def __call__(self, thing: Any) -> Any:
        """Return the batch, or a part of it, on the device."""
        if isinstance(thing, Tensor):
            if id(thing) not in self._by_id:
                try:
                    self._by_id[id(thing)] = self._move(thing)
                # A tensor may have no memory or shape yet: on meta, or of a lazy module.
                except (NotImplementedError, ValueError) as error:
                    message = f"prefetch: batch {self._i}: a {_kind(thing)} cannot be moved: {error}"
                    raise AmpkitError(message) from error
            return self._by_id[id(thing)]
        if not holds_tensors(thing):
            return thing
        if any(thing is outer for outer in self._within):
            raise AmpkitError(
                f"prefetch: batch {self._i}: a {_kind(thing)} contains itself, so it cannot be "
                "copied. Leave that reference out of the batch."
            )
        self._within.append(thing)
        try:
            # A PackedSequence is a named tuple with parts that must stay on the host. Its own `to` knows which.
            leaves, spec = tree_flatten(thing, is_leaf=lambda part: isinstance(part, PackedSequence))
        except RecursionError:
            raise AmpkitError(
                f"prefetch: batch {self._i}: a {_kind(thing)} contains itself, or too many nested containers."
            ) from None
        is_tree = len(leaves) != 1 or leaves[0] is not thing
        moved = tree_unflatten([self(leaf) for leaf in leaves], spec) if is_tree else self._object(thing)
        self._within.pop()
        return moved

    def _object(self, thing: Any) -> Any:
        """Return an object that is no tree with its tensors on the device, or raise an `AmpkitError`."""
        moves_itself = callable(getattr(type(thing), "to", None)) and not isinstance(thing, (dict, UserDict))
        if is_record(thing) and not moves_itself:
            return with_values(thing, self)
        tensors = list(tensors_held(thing))
        for tensor in tensors:
            if tensor.device == self._device:
                self(tensor)  # stays where it is
        if all(tensor.device == self._device for tensor in tensors):
            return thing
        if not moves_itself:
            raise AmpkitError(
                f"prefetch: batch {self._i} holds a {_kind(thing)}, whose tensors cannot be moved: it has no method "
                "to(device), and it is no dataclass. Give it one, or have the loader yield its tensors in a tuple or "
                "dict."
            )
        made = thing.to(self._device)
        if made is None:
            raise AmpkitError(
                f"prefetch: batch {self._i}: {_kind(thing)}.to(device) returned None, not an "
                "object. Have it return the moved object."
            )
        return made


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to a device. All prefetchers use one, since a stream reuses only its own memory."""
    return torch.cuda.Stream(device)
