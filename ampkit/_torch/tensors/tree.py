"""How a batch or an output is taken apart into its leaves: `torch.utils._pytree`, which torch.compile uses too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..guard import private

TreeSpec = _pytree.TreeSpec
tree_flatten: Callable[..., tuple[list[Any], TreeSpec]] = private(_pytree, "tree_flatten")
tree_unflatten: Callable[[Sequence[Any], TreeSpec], Any] = private(_pytree, "tree_unflatten")
tree_flatten_with_path: Callable[[Any], tuple[list[tuple[Any, Any]], TreeSpec]] = private(
    _pytree, "tree_flatten_with_path"
)
keystr: Callable[[Any], str] = private(_pytree, "keystr")


_WITHOUT = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the leaves of a tree that are tensors."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is not tuple and kind is not list and kind is not dict:
        return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
    found: list[Tensor] = []
    for each in tree.values() if kind is dict else tree:  # an operation's arguments, most often
        if isinstance(each, Tensor):
            found.append(each)
        elif type(each) not in _WITHOUT:
            found += tensors_in(each)
    return found
