"""The layout of an input, which is a part of its key, and the static buffers that a graph reads its input from."""

import math
import operator
from bisect import bisect_left
from collections import UserDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._arguments import shown
from ..._errors import InputMismatch
from ..._text import CONSTANTS, comparable, dtype_name
from ..._torch.tensors.tensors import foreach_copy_, is_wrapper, layout_check, storage_address, versions
from ..._torch.tensors.tree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from .containers import holds_tensors, is_record
from .placement import empty_like, once
from .spans import Spans, span


class TensorSpec(NamedTuple):
    """The layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dense = self.stride == torch.empty(self.shape, device="meta").stride()
        layout = "" if dense else f" with strides {self.stride}"
        return f"{tuple(self.shape)} {dtype_name(self.dtype)} on {self.device}{layout}"


class Constant(NamedTuple):
    """A leaf that is not a tensor. The type is compared too, since True == 1 == 1.0, but the arguments differ.

    So is the sign of a zero, since 0.0 == -0.0. And nan is the same in each call, though it is not equal to itself.
    """

    kind: type
    value: Any
    is_minus_zero: bool = False

    @classmethod
    def for_value(cls, value: Any) -> "Constant":
        """Return what stands for this value."""
        return cls(type(value), comparable(value), type(value) is float and value == 0 and math.copysign(1, value) < 0)

    def __str__(self) -> str:
        return shown(self.value)


class Spec(NamedTuple):
    """The layout of an input. Its hash is computed in every call, so it runs no Python code."""

    structure: Hashable  # see `_structure`; torch's tree if it has a container that `_structure` does not know
    leaves: tuple[TensorSpec | Constant, ...]

    @property
    def tree(self) -> TreeSpec:
        """The structure as torch writes it."""
        return _tree_of(self.structure)

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves)) or "no input"


def read_batch(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> tuple[Spec, list[Any]]:
    """Return the spec and the leaves of a batch.

    Raises:
        InputMismatch: a tensor is not strided, is quantized, belongs to a subclass, is on another device than `device`,
            or requires grad; another leaf has tensors in it, or is not hashable; a container contains itself. The
            message has the leaf's path.

    Sync: none. Aliasing: the leaves are the caller's objects.
    """
    leaves, structure = _flattened(args, kwargs)
    keys: list[TensorSpec | Constant] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            keys.append(_constant(leaf, structure, i))
        elif not is_plain(leaf):
            raise InputMismatch(_not_plain(leaf, path(_tree_of(structure), i)))
        elif leaf.device != device:
            raise InputMismatch(
                f"{path(_tree_of(structure), i)} is on {leaf.device}, but the model is on {device}. "
                f"Move it with .to({str(device)!r}), or iterate over ampkit.prefetch(loader, {str(device)!r})."
            )
        elif leaf.requires_grad:
            where = path(_tree_of(structure), i)
            raise InputMismatch(
                f"{where} requires grad, but a step returns gradients to parameters only. Pass {where}.detach()."
            )
        else:
            keys.append(TensorSpec(leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
    return Spec(structure, tuple(keys)), leaves


@dataclass(eq=False)
class BatchReader:
    """Reads batches, in less time if they are tensors with the layout of the two batches before."""

    _device: torch.device  # where the tensors must be
    _previous: Spec | None = None
    _is_same: Callable[..., bool] | None = None  # whether leaves have the layout of the batch before
    _flat: int = -1  # how many arguments that batch had, if each of them was a tensor

    def spec_and_leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Spec, list[Any]]:
        """Return what `read_batch` returns: the same `Spec` again, if the layout is that of the batch before."""
        previous, is_same = self._previous, self._is_same
        if previous is None or is_same is None:
            return self._read(args, kwargs)
        leaves: list[Any] = []
        if len(args) == self._flat and not kwargs:
            leaves += args
        else:
            try:
                structure = _structure(args, leaves), _structure(kwargs, leaves)
            except (_NotPlainError, RecursionError):
                return self._read(args, kwargs)
            if structure != previous.structure:
                return self._read(args, kwargs)
        return (previous, leaves) if is_same(*leaves) else self._read(args, kwargs)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Spec, list[Any]]:
        before, self._previous, self._is_same = self._previous, None, None
        spec, leaves = read_batch(args, kwargs, self._device)
        if spec == before:
            spec, self._is_same = before, layout_check(leaves)
            of_tensors = (tuple, *[None] * len(args)), (dict,)  # each argument is a tensor
            self._flat = len(args) if not kwargs and spec.structure == of_tensors else -1
        if {*map(type, spec.leaves)} == {TensorSpec}:  # constants may be large, and are not to be kept
            self._previous = spec
        return spec, leaves


def is_plain(tensor: Tensor) -> bool:
    """Return whether a plain tensor, as a graph reads it, can take the place of this one."""
    plain = type(tensor) in _PLAIN and not tensor.is_nested and not tensor.is_quantized
    return plain and tensor.layout is torch.strided


def check_plain(leaf: Tensor, tree: TreeSpec, i: int) -> None:
    """Raise an `InputMismatch` unless this leaf of a batch is plain, see `is_plain`."""
    if not is_plain(leaf):
        raise InputMismatch(_not_plain(leaf, path(tree, i)))


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Return `tree_flatten((args, kwargs))`. It is faster, because trees of plain containers are kept.

    Raises:
        InputMismatch: a container contains itself.
    """
    leaves, structure = _flattened(args, kwargs)
    return leaves, _tree_of(structure)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Hashable]:
    """Return the leaves of a batch, and its structure, see `Spec`."""
    leaves: list[Any] = []
    try:
        try:
            structure = _structure(args, leaves), _structure(kwargs, leaves)
        except _NotPlainError:
            return tree_flatten((args, kwargs))
    except RecursionError:
        raise InputMismatch(
            "the batch has a container that holds itself, or too many inside of one another. Pass tensors and "
            "constants in tuples, lists and dicts."
        ) from None
    if structure not in _trees:
        by_torch, tree = tree_flatten((args, kwargs))
        if len(by_torch) != len(leaves) or not all(map(operator.is_, by_torch, leaves)):
            return by_torch, tree  # this version of torch flattens these containers in another way
        if len(_trees) == _MAX_TREES:
            _trees.clear()
        _trees[structure] = tree
    return leaves, structure


def _tree_of(structure: Hashable) -> TreeSpec:
    """Return torch's tree of a batch with this structure."""
    if isinstance(structure, TreeSpec):
        return structure
    tree = _trees.get(structure)  # which may have been cleared
    return tree_flatten(_example(structure))[1] if tree is None else tree


def _example(structure: Any) -> Any:
    """Return a batch that has this structure: the inverse of `_structure`."""
    if structure is None:
        return 0
    kind, *parts = structure
    if isinstance(kind, type):
        middle = len(parts) // 2 if kind is dict else 0
        children = [_example(part) for part in parts[middle:]]
        return dict(zip(parts[:middle], children, strict=True)) if kind is dict else kind(children)
    return tuple(map(_example, structure))  # of args and of kwargs


class _NotPlainError(Exception):
    """A batch has a leaf or container of another type, which torch may know as a container."""


def _structure(node: Any, leaves: list[Any]) -> Hashable:
    """Return a tree without its leaves. Append the leaves to `leaves`.

    In the result None stands for a leaf, and a tuple for a container: its type, its keys if it is a dict, its children.
    """
    kind = type(node)
    if kind in _LEAVES:
        leaves.append(node)
        return None
    if kind is tuple or kind is list:
        return (kind, *[_structure(child, leaves) for child in node])
    if kind is dict:
        return (kind, *node, *[_structure(child, leaves) for child in node.values()])
    raise _NotPlainError


_PLAIN = (Tensor, nn.Parameter)  # a tensor of another class would reach the loss function as a plain tensor
_LEAVES = frozenset((Tensor, *CONSTANTS))
_MAX_TREES = 256  # batches that are dicts with other keys each time make one per call
_trees: dict[Hashable, TreeSpec] = {}


def paths(tree: TreeSpec) -> list[str]:
    """Return the expression for each leaf: `batch[0]`, `batch['image']`, `batch[1]['mask'][2]`."""
    whole = tree_unflatten(range(tree.num_leaves), tree)
    # keys[0] chooses between args and kwargs.
    return [f"batch{keystr(keys[1:])}" for keys, _ in tree_flatten_with_path(whole)[0]]


def path(tree: TreeSpec, leaf: int) -> str:
    """Return the expression for one leaf, see `paths`."""
    return paths(tree)[leaf]


_COPIED_TOGETHER = frozenset((torch.float64, torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool))


class StaticInputs:
    """Buffers with the layout of one batch, at addresses that never change. The caller never gets one of them.

    Args:
        spec: the layout.
        leaves: the first batch. Its constants are kept, since they are a part of `spec`.
        buffers: the memory to use, a tensor for each tensor of the batch; None to allocate it.

    Attributes:
        args, kwargs: the arguments of a call, with buffers in place of tensors.
        changed: per buffer, whether the step changes it in place, as far as that is known.
    """

    def __init__(self, spec: Spec, leaves: Sequence[Any], buffers: Sequence[Tensor] | None = None) -> None:
        self.spec = spec
        self._tree = spec.tree
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        # `versions` reads the version of each buffer. A tensor that is made in inference mode has none.
        with torch.inference_mode(False):
            self._buffers = [empty_like(leaves[i]) for i in self._places] if buffers is None else list(buffers)
        static = list(leaves)
        for i, buffer in zip(self._places, self._buffers, strict=True):
            static[i] = buffer
        self._expanded = any(0 in buffer.stride() for buffer in self._buffers)
        self._all_tensors = len(self._places) == len(static)
        # Several tensors of one dtype, such as tokens and masks, take one kernel. Not floats of 16 bits: it would
        # convert them to float32 and back, and so change the bits of some NaNs.
        dtypes = {buffer.dtype for buffer in self._buffers}
        self._together = len(self._buffers) > 1 and len(dtypes) == 1 and dtypes <= _COPIED_TOGETHER
        self._sizes = [stop - start for start, stop in (span(leaves[i]) for i in self._places)]
        self.changed: list[bool] = [False] * len(self._places)
        self.keep_apart(Spans({}), Spans({}))
        args, kwargs = tree_unflatten(static, self._tree)
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs

    def keep_apart(self, written: Spans, state: Spans) -> None:
        """Refuse later batches that share memory with the state, if the step changes one of the two in place.

        `written` are the tensors of the state that the step changes, `state` are all of them.
        """
        self._written, self._state = written, state
        self.any_changed: bool = any(self.changed)
        spans = [state if changed else written for changed in self.changed]
        rows = zip(self._places, self._sizes, spans, strict=True)
        # An empty tensor shares no memory.
        self._apart = [(i, size, others.starts, others.furthest) for i, size, others in rows if size]

    def copy_(self, leaves: Sequence[Any]) -> None:
        """Copy a batch of the same spec into the buffers, on the current stream. Sync: none.

        Raises:
            InputMismatch: see `refuse_shared`. Nothing was copied.
        """
        self.refuse_shared(leaves)
        given = leaves if self._all_tensors else [leaves[i] for i in self._places]
        if self._expanded:
            for buffer, leaf in zip(self._buffers, given, strict=True):
                once(buffer).copy_(once(leaf), non_blocking=True)
        elif self._together:
            foreach_copy_(self._buffers, given, True)  # non_blocking
        else:
            for buffer, leaf in zip(self._buffers, given, strict=True):
                buffer.copy_(leaf, True)

    def copies_of(self, leaves: Sequence[Any]) -> list[Any]:
        """Return a batch of this layout, with tensors that lie in memory as the buffers do, and no version yet."""
        copies = list(leaves)
        with torch.inference_mode(False), torch.no_grad():
            for i, buffer in zip(self._places, self._buffers, strict=True):
                copies[i] = empty_like(buffer)
                once(copies[i].data).copy_(once(leaves[i]))
        return copies

    def refuse_shared(self, leaves: Sequence[Any]) -> None:
        """Raise an `InputMismatch` if a tensor of the batch shares memory with another one, and the step changes one.

        The other tensor may belong to the batch or to the state.
        """
        for i, size, starts, furthest in self._apart:
            start = leaves[i].data_ptr()
            if furthest[bisect_left(starts, start + size)] > start:
                is_changed = self.changed[self._places.index(i)]
                other = (self._state if is_changed else self._written).at(start, start + size)
                argument = path(self._tree, i)
                if is_changed:
                    what = f"{argument}, which the step changes in place, lies in the same memory as {other}"
                else:
                    what = f"{argument} lies in the same memory as {other}, which the step changes"
                raise InputMismatch(
                    f"{what}; in a graph they are two tensors, and neither sees a change to the other. Pass "
                    f"{argument}.clone()."
                )
        addresses = [storage_address(leaves[i]) for i in self._places] if self.any_changed else []
        if len(set(addresses)) == len(addresses):
            return
        starts = [leaves[i].data_ptr() for i in self._places]
        spans = [(start, start + size) for start, size in zip(starts, self._sizes, strict=True)]
        for i, (start, stop) in enumerate(spans):
            others = [j for j, (a, b) in enumerate(spans) if self.changed[i] and j != i and a < stop and start < b]
            if others:
                one, another = path(self._tree, self._places[i]), path(self._tree, self._places[others[0]])
                raise InputMismatch(
                    f"{one}, which the step changes in place, lies in the same memory as {another}; in a graph they "
                    f"are two buffers. Pass {one}.clone()."
                )

    def versions(self) -> list[int]:
        """Return the version of each buffer: every change in place raises it, but a replay of a CUDA graph does not."""
        return versions(self._buffers)

    def note_changes(self, before: list[int]) -> None:
        """Note which buffers were changed in place since `versions` returned `before`."""
        now = self.versions()
        if now != before:
            self.changed = [old or a != b for old, a, b in zip(self.changed, before, now, strict=True)]
            self.keep_apart(self._written, self._state)

    def copy_back(self, leaves: Sequence[Any]) -> None:
        """Copy buffers that the step changes in place to the caller's tensors, as an eager step would. Sync: none."""
        for i, buffer, was_changed in zip(self._places, self._buffers, self.changed, strict=True):
            if was_changed:
                leaves[i].copy_(buffer, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)


def _constant(leaf: object, structure: Hashable, i: int) -> Constant:
    if holds_tensors(leaf) and not isinstance(leaf, nn.Module):  # a module in the batch is a constant
        where, kind = path(_tree_of(structure), i), f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        instead = "Pass its tensors in a dict"
        if where == "batch[0]" and isinstance(leaf, (dict, UserDict)):
            instead = "Write step(**batch) or pass dict(batch)"
        elif where == "batch[0]" and is_record(leaf) and hasattr(leaf, "__dict__"):
            instead = "Write step(**vars(batch))"
        raise InputMismatch(
            f"{where} is a {kind}, in which a step does not see the tensors. {instead}, or pass the tensors "
            "themselves, alone or in tuples, lists and dicts."
        )
    try:
        hash(leaf)
    except TypeError:
        raise InputMismatch(
            f"{path(_tree_of(structure), i)} is a {type(leaf).__name__}, which is neither a tensor nor hashable, so a "
            "step cannot tell whether it changed. Pass a tensor (torch.as_tensor) or a number, string or None."
        ) from None
    return Constant.for_value(leaf)


def _not_plain(leaf: Tensor, where: str) -> str:
    if leaf.is_nested:
        return f"{where} is a nested tensor, which a step does not take. Pad it: {where}.to_padded_tensor(0)."
    if leaf.is_quantized:
        return f"{where} is quantized, which a step does not take. Pass {where}.dequantize()."
    if leaf.layout is not torch.strided:
        return f"{where} has layout {leaf.layout}; a step takes strided tensors. Pass {where}.to_dense()."
    advice = "a plain torch.Tensor" if is_wrapper(leaf) else f"{where}.as_subclass(torch.Tensor)"
    return (
        f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}; a step takes plain tensors, for what a graph "
        f"reads is one. Pass {advice}."
    )
