"""Whether the loss of a padded batch sees the padding, and in which line: found by calling it with other padding.

Batches that differ in nothing but what stands in their padding have the same sizes, and so run the same kernels. Every
kernel computes a sample, or a token, with the same bits whatever its neighbours are, unless it combines them. So if the
loss has other bits, something has combined padding with what is real: BatchNorm, a mean without the mask, attention
without a mask. The line is that of the first operation that has other bits where its result is real.

This does not show a mean that divides by the padded size, as `(losses * mask).mean()` does, since zeros in the padding
are the same zeros. That one is recognised by its value: it has the same ratio to the loss of the batch without padding
as the sizes have. The two are compared in eval mode, because dropout would draw other numbers for other sizes.

What is not found: a loss that depends on the size of the batch in another way. Nothing can be told where kernels add
in any order, or where random numbers are drawn in eval mode.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.keys.inputs import flatten, path
from .._capture.state.bits import bits
from .._capture.state.snapshot import Snapshot, all_generators
from .._capture.state.state import TrainingState
from .._errors import InputMismatch
from .._torch.tensors.fake_tensors import is_fake
from .._torch.tensors.modes import WatchingMode
from .._torch.tensors.tree import tensors_in, tree_unflatten
from .._undo import Undo
from .._user_line import UserLineFinder
from .buckets import Buckets, Sizes, padded, text

_Batch = tuple[tuple[Any, ...], dict[str, Any]]
_WORTH = 1.1  # by which factor the padding must change a size, so that the loss can tell it from rounding
_NEAR = 0.01  # how near a ratio of losses is to be to that of sizes. In low precision losses differ by less


class PaddingCheck:
    """Refuses a loss that sees the padding, before the first batch that is padded in a dimension.

    It calls the loss up to six times. Tensors of the model, the random numbers, and the
    modes of the modules are put back behind each call.

    Args:
        buckets: how batches are padded.
        loss: `loss(args, kwargs)` returns the loss of a batch.
        model: what the loss may change.
        generators: random-number generators beside the default ones that the loss draws from.
    """

    def __init__(
        self, buckets: Buckets, loss: Callable[..., Tensor], model: nn.Module, generators: Sequence[torch.Generator]
    ) -> None:
        self._buckets, self._loss, self._model, self._generators = buckets, loss, model, generators
        self._read_in: set[int] = set()  # dimensions that were padded where it was asked
        self._counted_in: set[int] = set()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], real: Sizes, bucket: Sizes) -> None:
        """Raise an `InputMismatch` if the loss of this batch, padded to a bucket, sees the padding.

        Nothing is done if batches were checked before that are padded in the same dimensions. Sync: reads the losses.
        """
        factors = {dim: size / own for dim, (own, size) in enumerate(zip(real, bucket, strict=True)) if 0 < own < size}
        worth = {dim for dim, factor in factors.items() if factor >= _WORTH}
        if not all(real) or (factors.keys() <= self._read_in and worth <= self._counted_in):
            return
        filled = padded(self._buckets, args, kwargs, lambda _: bucket)
        problem = "" if factors.keys() <= self._read_in else self._read(filled, args, kwargs, real, bucket)
        if not problem and not worth <= self._counted_in:
            problem = self._counted(filled, args, kwargs, real, bucket)
        if problem:
            raise InputMismatch(f"graphed_step(buckets='auto'): {problem} {_INSTEAD}")
        self._read_in |= factors.keys()
        self._counted_in |= worth

    def _read(self, filled: _Batch, args: tuple[Any, ...], kwargs: dict[str, Any], real: Sizes, bucket: Sizes) -> str:
        """Return in words where values of the padding reach the loss; "" if they do not."""
        other, names = self._other_padding(filled, args, kwargs, real)
        if not names:
            return ""
        losses = [self._call(batch)[0] for batch in (filled, filled, other)]
        first, again, changed = (bits(loss).tolist() for loss in losses)  # sync
        if first != again or first == changed:
            return ""
        one, two = (_RealParts(real, bucket) for _ in range(2))
        self._call(filled, one)
        self._call(other, two)
        line = one.first_difference(two)
        instead = f"Buckets('auto', 'auto', pad={{\"{names[0]}\": 0}})"
        return (
            f"the loss changes with what stands in the padding of {' and '.join(names)}{line and f', by {line}'}. If "
            f"the number there tells the model that it is padding, name it: {instead}."
        )

    def _counted(
        self, filled: _Batch, args: tuple[Any, ...], kwargs: dict[str, Any], real: Sizes, bucket: Sizes
    ) -> str:
        """Return in words how the loss depends on how much padding there is; "" if no mean counts the padding."""
        plain = padded(self._buckets, args, kwargs, lambda own: own)
        factors = [size / own for own, size in zip(real, bucket, strict=True)]
        (own, drew), (of_padded, drew_more) = (self._call(batch, evaluates=True) for batch in (plain, filled))
        before, after = float(own), float(of_padded)  # sync
        if drew or drew_more or not math.isfinite(before) or not before:
            return ""
        if not math.isfinite(after):
            return f"the loss of a batch is {before:.4g}, and {after} with padding."
        if not after or not any(
            each >= _WORTH and abs(before / after - each) < _NEAR for each in (*factors, math.prod(factors))
        ):
            return ""
        found = _RealParts(real, bucket)
        self._call(filled, found, evaluates=True)
        line = found.mean
        return (
            f"a mean counts the padding{line and f': {line}'}. The loss of a batch is {before:.4g}, and {after:.4g} if "
            f"it is padded from {text(real)} to {text(bucket)}."
        )

    def _call(self, batch: _Batch, mode: Any = None, *, evaluates: bool = False) -> tuple[Tensor, bool]:
        """Return the loss of a batch, and whether random numbers were drawn for it, and put back what it changed."""
        constant = set(map(id, self._model.parameters()))
        state = TrainingState({"model": self._model}, [], None, own={})
        start = Snapshot(state, self._generators, flatten(*batch)[0], on_host=True, constant=constant)
        with Undo() as undo:
            undo.note(start.restore)
            undo.note(torch.clear_autocast_cache)
            if evaluates:
                self._model.eval()
            before = [generator.get_state() for generator in all_generators(self._generators)]
            if mode is None:
                loss = self._loss(*batch)
            else:
                with mode:
                    loss = self._loss(*batch)
            after = [generator.get_state() for generator in all_generators(self._generators)]
        return loss.detach().clone(), not all(map(torch.equal, before, after))

    def _other_padding(
        self, filled: _Batch, args: tuple[Any, ...], kwargs: dict[str, Any], real: Sizes
    ) -> tuple[_Batch, list[str]]:
        """Return the batch with real samples and tokens in the padding, and the names of the tensors that differ.

        A number that `pad` gives says that something is padding, as does False, or 0 among numbers 0 and 1.
        """
        given, tree = flatten(args, kwargs)
        mask = filled[1][self._buckets.mask]
        leaves, _ = flatten(filled[0], {name: filled[1][name] for name in kwargs})
        named = self._buckets.pad
        signals = dict(named) if isinstance(named, tuple) else {}
        if not isinstance(named, tuple) and named:
            return filled, []
        names = []
        for i, (own, leaf) in enumerate(zip(given, leaves, strict=True)):
            where = path(tree, i)
            if not isinstance(leaf, Tensor) or own.shape == leaf.shape or where in signals:
                continue
            if leaf.dtype is torch.bool or bool(((own == 0) | (own == 1)).all()):  # sync
                continue
            repeated = own
            for dim in range(min(len(real), own.dim())):
                order = torch.arange(leaf.shape[dim], device=own.device) % own.shape[dim]
                repeated = repeated.index_select(dim, order)
            leaves[i] = torch.empty_like(leaf).copy_(repeated)  # with the strides that it has
            names.append(where)
        args, kwargs = tree_unflatten(leaves, tree)
        return (args, {**kwargs, self._buckets.mask: mask}), names


_INSTEAD = (
    "Divide the sum of masked losses by mask.sum(), give the mask to attention and to means, and replace BatchNorm by "
    "GroupNorm or LayerNorm. Sizes of your own, buckets=Buckets(batch=(16, 32), length=(128, 256)), are not checked."
)


class _RealParts(WatchingMode):
    """Records of each operation its line, and a number made of the bits of the real part of its results.

    Attributes:
        mean: the line of the last mean over something that was padded.
    """

    def __init__(self, real: Sizes, bucket: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it
        self._padded = [(own, size) for own, size in zip(real, bucket, strict=True) if own < size]
        self._bucket = bucket
        self._found: list[tuple[str, Tensor]] = []
        self.mean: str = ""

    def __enter__(self) -> "_RealParts":
        self._line = UserLineFinder(sys._getframe(1), skip_torch=False)
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(map(is_fake, types)):
            return result
        # What attention computes beside its result, for its backward, has sizes of its own.
        results = tensors_in(result)
        for tensor in results[:1] if "scaled_dot_product" in str(func) else results:
            part = self._real_part(tensor)
            if part is not None:
                self._found.append((self._line.line(), bits(part).to(torch.int64).sum()))
        if str(func).startswith("aten.mean") and any(size in args[0].shape for _, size in self._padded):
            self.mean = self._line.line()
        return result

    def _real_part(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor without its padding; None if it is not known where that is. Its sizes tell."""
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        both = math.prod(self._bucket)
        if len(self._bucket) > 1 and both in tensor.shape:  # samples and tokens as one dimension
            tensor = tensor.unflatten(tensor.shape.index(both), self._bucket)
        for own, size in self._padded:
            dims = [dim for dim, found in enumerate(tensor.shape) if found == size]
            if not dims and any(found and found % size == 0 for found in tensor.shape):
                return None  # it may be one with another
            for dim in dims:
                tensor = tensor.narrow(dim, 0, own)
        return tensor

    def first_difference(self, other: "_RealParts") -> str:
        """Return the line of the first result that has other bits in `other`, "" if none has. Waits for the device."""
        for (line, one), (_, two) in zip(self._found, other._found, strict=False):
            if line and not torch.equal(one, two):  # sync
                return line
        return ""
