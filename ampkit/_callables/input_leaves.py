"""What a graph must know of the leaves of an input: what autograd and autocast want of them, and where they begin."""

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.keys.inputs import Spec, StaticInputs, is_plain
from .._capture.keys.placement import empty_like, place_of
from .._torch.tensors.tree import TreeSpec, tree_unflatten


class Wants(enum.IntEnum):
    """Whether a leaf of an input requires grad, and whether autocast keeps a cast of it."""

    NOTHING = 0
    GRADIENT = 1
    GRADIENT_AND_CAST = 2


def wanted_by(leaves: Sequence[Any], *, samples: bool = False) -> tuple[Wants, ...]:
    """Return what each leaf of an input wants.

    Autocast casts a tensor anew for each operation that needs it in low precision, and the gradients of these casts are
    added in float32. But of leaves of autograd's that require grad it keeps one cast for all operations, so that these
    gradients are added in low precision (aten/src/ATen/autocast_mode.cpp, `cached_cast`). With `samples`, other tensors
    will take the places of the leaves, which come out of other modules.
    """
    keeps_casts = not samples and torch.is_autocast_cache_enabled()
    wanted = [Wants.NOTHING] * len(leaves)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            kept = keeps_casts and leaf.is_leaf and leaf.dtype is torch.float32 and not leaf._is_view()
            kept = kept and torch.is_autocast_enabled(leaf.device.type)
            wanted[i] = Wants.GRADIENT_AND_CAST if kept else Wants.GRADIENT
    return tuple(wanted)


def as_input(tensor: Tensor, wants: Wants) -> Tensor:
    """Return a leaf of autograd's in the memory of this one. Autocast keeps casts of it only if that is wanted."""
    if wants is not Wants.GRADIENT:
        return tensor
    with torch.no_grad():
        return tensor.view_as(tensor)  # of views autocast keeps none


def detached(leaves: Sequence[Any], tree: TreeSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments with these leaves, as `read_batch` takes them.

    It refuses tensors that require grad, so they are detached.
    """
    plain = [leaf.detach() if isinstance(leaf, Tensor) and is_plain(leaf) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(plain, tree)
    return args, kwargs


def places_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the `place_of` each leaf. Kernels may compute otherwise for a tensor that begins at another one."""
    return tuple([place_of(leaf) if isinstance(leaf, Tensor) else 0 for leaf in leaves])


def static_inputs(spec: Spec, leaves: Sequence[Any]) -> StaticInputs:
    """Return buffers that lie in memory as these leaves of an input do, and have their values."""
    inputs = buffers_like(spec, leaves)
    with torch.no_grad():
        inputs.copy_(leaves)
    return inputs


def buffers_like(spec: Spec, leaves: Sequence[Any]) -> StaticInputs:
    """Return buffers that lie in memory as these leaves of an input do, with any values."""
    with torch.inference_mode(False):
        buffers = [empty_like(leaf, place_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
    return StaticInputs(spec, leaves, buffers)
