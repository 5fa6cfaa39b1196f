"""Padding: batches of varying shapes become batches of a few shapes, with a mask that says what is not padding."""

import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from .._arguments import listed, wrong
from .._capture.keys.inputs import check_plain, flatten, path
from .._errors import InputMismatch
from .._text import dtype_name
from .._torch.tensors.tree import TreeSpec, tree_unflatten

FillByPath = tuple[tuple[str, float], ...]
Sizes = tuple[int, ...]  # of a batch: (B,), with `length` (B, L)


@dataclass(frozen=True)
class Buckets:
    """Sizes to pad batches to, so that one CUDA graph per size serves every batch. Hashable.

    Dimension 0 of a batch is padded to the smallest size in `batch` that holds it and, with `length`, dimension 1 to
    the smallest in `length`. `loss_fn` gets a mask as one more keyword argument, always, so that it is written once::

        def loss_fn(model, images, labels, *, mask):
            losses = F.cross_entropy(model(images), labels, reduction="none")
            return (losses * mask).sum() / mask.sum()

    The mask is a bool tensor, False at the padding: of shape (B,), with `length` (B, L). Apply it before every
    reduction over samples, those of metrics included, because `.mean()` would count the padding. The model still
    computes the padding, so pad with values for which the loss is finite: `nan * 0` is nan.

    Padding changes the result of layers that combine several samples. BatchNorm in train mode includes the padding in
    its mean, its variance and its running statistics. Prefer GroupNorm or LayerNorm, or let the usual batch size be a
    bucket, so that only the last batch of an epoch is padded. Attention needs the mask of `length` as its key padding
    mask. Dropout draws other random numbers than without padding.

    With "auto", `graphed_step` chooses the sizes from the batches that it gets, see there.

    Args:
        batch: sizes of dimension 0, such as (16, 32, 64), or "auto".
        length: sizes of dimension 1, such as (128, 256); None leaves dimension 1 alone. "auto" if `batch` is "auto".
        pad: the number that fills the padding, for all tensors or, in a dict, by the path of a tensor:
            `{"batch[1]": -100}` for the second positional argument, `{"batch['labels']": -100}` for a keyword. Tensors
            that it does not name get 0.
        mask: the keyword by which `loss_fn` gets the mask.

    Attributes:
        batch: the sizes, ascending, or "auto".
        length: the sizes, ascending, or None, or "auto".
        pad: the number, or sorted pairs of path and number; `dict(buckets.pad)` is a dict.
        mask: the keyword.

    Raises:
        ValueError: an argument that cannot work; the message says what to pass.
    """

    batch: tuple[int, ...] | Literal["auto"]
    length: tuple[int, ...] | Literal["auto"] | None = None
    pad: float | Mapping[str, float] | FillByPath = 0
    mask: str = "mask"

    def __post_init__(self) -> None:
        if is_auto(self.length) and not is_auto(self.batch):
            raise wrong("Buckets", "batch", self.batch, "'auto', because sizes are chosen for both dimensions together")
        if is_auto(self.batch):
            if not (self.length is None or is_auto(self.length)):
                raise wrong("Buckets", "length", self.length, "'auto' or None, as batch is 'auto'")
        else:
            object.__setattr__(self, "batch", _read_sizes("batch", self.batch))
            if self.length is not None:
                object.__setattr__(self, "length", _read_sizes("length", self.length))
        if not isinstance(self.pad, (int, float)):
            pairs = listed(self.pad.items() if isinstance(self.pad, Mapping) else self.pad)
            tuples = [] if pairs is None else [pair for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]
            known = all(isinstance(key, str) and isinstance(number, (int, float)) for key, number in tuples)
            if pairs is None or not known or len(tuples) < len(pairs):
                expected = "a number, or numbers by path such as {\"batch['labels']\": -100}"
                raise wrong("Buckets", "pad", self.pad, expected)
            object.__setattr__(self, "pad", tuple(sorted(dict(tuples).items())))
        if not isinstance(self.mask, str) or not self.mask.isidentifier() or keyword.iskeyword(self.mask):
            raise wrong("Buckets", "mask", self.mask, "the name of a keyword argument of loss_fn")

    def pad_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the batch padded to its bucket, and the mask among its keyword arguments.

        The batch size is that of the first tensor with a dimension, and every tensor of that size in dimension 0 is
        padded there. The length is dimension 1 of the first tensor with two dimensions, and every tensor of that size
        in dimension 1 is padded there. Nothing but the size decides this, so a tensor that is not per sample, such as
        class weights, must not be in the batch: use it in `loss_fn` directly.

        If a batch is larger than the largest bucket, in either dimension, it is not padded and its mask is all True. So
        is each batch with "auto": only the step that chooses the sizes knows them.

        Args:
            args: positional arguments of a step, trees of tensors and constants.
            kwargs: keyword arguments of a step, with values of the same kinds.

        Raises:
            InputMismatch: the batch has no tensor with a batch size. It has a tensor that no step takes, or an argument
                with the name of the mask. `pad` names a path that is not in the batch, or gives a tensor a number that
                its dtype does not have.

        Sync: none. Aliasing: padded tensors, and those with gaps in memory (`tokens[:, :-1]`), are copies without gaps
        in the same order of dimensions (channels_last stays so); all others are the caller's.
        """
        return padded(self, args, kwargs, partial(smallest_bucket, self))


def text(sizes: Sizes) -> str:
    """Return `32x128` for a batch of 32 samples of 128 tokens."""
    return "x".join(map(str, sizes))


def is_auto(sizes: object) -> bool:
    """Return whether these sizes of `Buckets` are to be chosen."""
    return isinstance(sizes, str) and sizes == "auto"


def smallest_bucket(buckets: Buckets, real: Sizes) -> Sizes:
    """Return the sizes that a batch of these sizes is padded to: the same if no bucket holds it, or with "auto"."""
    if isinstance(buckets.batch, str) or isinstance(buckets.length, str):
        return real
    allowed = (buckets.batch,) if buckets.length is None else (buckets.batch, buckets.length)
    fitting = [[each for each in sizes if each >= size] for sizes, size in zip(allowed, real, strict=True)]
    return tuple(sizes[0] for sizes in fitting) if all(fitting) else real  # sizes ascend


def padded(
    buckets: Buckets, args: tuple[Any, ...], kwargs: dict[str, Any], fitting: Callable[[Sizes], Sizes]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch padded to the sizes that `fitting` returns for its own, see `Buckets.pad_batch`."""
    if buckets.mask in kwargs:
        raise InputMismatch(
            f"Buckets: batch[{buckets.mask!r}] is there already, and the mask of real samples would replace it. "
            f"Give the mask another name: Buckets(mask='real')."
        )
    leaves, tree = flatten(args, kwargs)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            check_plain(leaf, tree, i)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    real: Sizes = ()
    for dim in range(1 if buckets.length is None else 2):
        size = next((tensor.shape[dim] for tensor in tensors if tensor.dim() > dim), None)
        if size is None:
            raise InputMismatch(
                f"Buckets({'length' if dim else 'batch'}=...): the batch has no tensor of {dim + 1} or more "
                f"dimensions to pad. Pass one{', or length=None' if dim else ', or no buckets'}."
            )
        real += (size,)
    bucket = fitting(real)
    for i, (leaf, fill) in enumerate(zip(leaves, fill_of_each_leaf(buckets.pad, tree), strict=True)):
        leaves[i] = _leaf_in_bucket(leaf, real, bucket, fill, tree, i)
    args, kwargs = tree_unflatten(leaves, tree)
    device = next(tensor.device for tensor in tensors if tensor.dim())
    mask = torch.zeros(bucket, dtype=torch.bool, device=device)
    mask[tuple(slice(size) for size in real)].fill_(True)
    return args, {**kwargs, buckets.mask: mask}


def pad_stack(
    buckets: Buckets, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, fitting: Callable[[Sizes], Sizes]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a stack of `count` batches, in which each slice along dimension 0 is what `padded` makes of that slice.

    Errors and aliasing are those of `Buckets.pad_batch`. Sync: none.
    """
    leaves, tree = flatten(args, kwargs)
    first, named = padded(buckets, *first_slice(leaves, tree), fitting)
    mask = named.pop(buckets.mask)
    fills = fill_of_each_leaf(buckets.pad, tree)
    for i, (stack, one, fill) in enumerate(zip(leaves, flatten(first, named)[0], fills, strict=True)):
        # Each slice gets the layout of `one`, which is the first one, padded.
        if not isinstance(stack, Tensor) or (stack.shape[1:], stack.stride()[1:]) == (one.shape, one.stride()):
            continue
        if stack.stride(0) == 0:  # all slices are one tensor
            leaves[i] = one.expand(count, *one.shape)
        else:
            strides = (max(1, one.numel()), *one.stride())
            leaves[i] = _copied_into(stack, (count, *one.shape), strides, fill)
    args, kwargs = tree_unflatten(leaves, tree)
    return args, {**kwargs, buckets.mask: mask.expand(count, *mask.shape)}


def stack_padding(buckets: Buckets | None) -> Callable[..., Any] | None:
    """Return what pads stacks to the sizes that were given, see `pad_stack`; None without buckets."""
    if buckets is None:
        return None
    return partial(pad_stack, buckets, fitting=partial(smallest_bucket, buckets))


def first_slice(leaves: Sequence[Any], tree: TreeSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first batch of a stack. Aliasing: views."""
    args, kwargs = tree_unflatten([leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)
    return args, kwargs


def _leaf_in_bucket(
    leaf: Any, real: tuple[int, ...], bucket: tuple[int, ...], fill: float, tree: TreeSpec, i: int
) -> Any:
    """Return a tensor that starts with `leaf` and is `fill` elsewhere; `leaf` as it is if nothing is to be padded.

    It takes a copy, and a fill for each dimension that is padded.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    shape = list(leaf.shape)
    dims = [dim for dim, size in enumerate(real) if dim < leaf.dim() and shape[dim] == size]
    if not dims:
        return leaf
    # This is checked for a batch without padding too. Otherwise only the last batch of an epoch would show the mistake.
    if not _can_hold(leaf.dtype, fill):
        where = path(tree, i)
        raise InputMismatch(
            f"Buckets: {where} is {dtype_name(leaf.dtype)}, which has no {fill!r} to pad with. Name each tensor that "
            f'is padded with other than 0: Buckets(pad={{"{where}": ...}}).'
        )
    for dim in dims:
        shape[dim] = bucket[dim]
    # A batch that needs no padding gets the same strides as padded ones. Otherwise it would need a graph of its own.
    order = list(range(leaf.dim()))  # of the dimensions in memory, outermost first
    old = leaf.stride()
    if 0 not in old:  # the dimensions of an expanded tensor have no order
        # Of two dimensions with equal stride in a tensor without gaps, the one of size 1 is the inner one.
        order.sort(key=lambda dim: (old[dim], leaf.shape[dim] > 1), reverse=True)
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step  # there are no gaps
        step *= max(shape[dim], 1)
    if list(leaf.shape) == shape and leaf.stride() == tuple(strides):
        return leaf
    return _copied_into(leaf, tuple(shape), tuple(strides), fill)


def _copied_into(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], fill: float) -> Tensor:
    """Return a new tensor that starts with `tensor` and is `fill` elsewhere."""
    padded = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    start = padded
    for dim, (size, wanted) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size < wanted:
            start.narrow(dim, size, wanted - size).fill_(fill)
            start = start.narrow(dim, 0, size)
    start.copy_(tensor)
    return padded


@lru_cache(maxsize=256)  # all batches of a loader have one tree, and to write its paths takes longer than to pad
def fill_of_each_leaf(pad: float | FillByPath, tree: TreeSpec) -> tuple[float, ...]:
    """Return the number to pad with for each leaf of a batch."""
    if not isinstance(pad, tuple):
        return (pad,) * tree.num_leaves
    paths = [path(tree, i) for i in range(tree.num_leaves)]
    fills = dict(pad)
    for name in fills:
        if name not in paths:
            raise InputMismatch(f"Buckets(pad): the batch has no {name}. Name one of {', '.join(paths)}.")
    return tuple(fills.get(each, 0) for each in paths)


@lru_cache(maxsize=256)
def _can_hold(dtype: torch.dtype, value: float) -> bool:
    """Return whether a tensor of this dtype can hold `value`, apart from rounding."""
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return abs(value) <= torch.finfo(dtype).max or value - value != 0  # which is so for inf and nan
    try:
        limits = torch.iinfo(dtype)
    except TypeError:  # torch.bits8 and similar dtypes, which hold no numbers
        return False
    return (isinstance(value, int) or value.is_integer()) and limits.min <= value <= limits.max


def _read_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    found = listed(sizes) if isinstance(sizes, (Sequence, set, frozenset)) else None
    if not found or not all(type(size) is int and size > 0 for size in found):
        hint = f"({sizes},)" if type(sizes) is int and sizes > 0 else "(16, 32, 64)"
        raise wrong("Buckets", name, sizes, f"sizes, ints of at least 1. Pass {name}={hint}")
    return tuple(sorted(set(found)))
