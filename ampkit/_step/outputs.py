"""What a captured function may return: trees of tensors, for a replay computes nothing else anew."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._torch.tree import tree_flatten, tree_unflatten


def mapped_outputs(outputs: Any, change: Callable[[Tensor], Tensor], who: str, place: str = "") -> Any:
    """Return a tree of tensors and None with each tensor changed.

    Args:
        outputs: what a function of the user's returned.
        change: called with each tensor.
        who: the function, for the message of an error.
        place: where in its result the tree stands, for the same message.

    Raises:
        ValueError: there is something else in the tree.
    """
    leaves, tree = tree_flatten(outputs)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise ValueError(
                f"{who} returned a {type(leaf).__name__} ({leaf!r}){place}, which a replay cannot compute anew. "
                "Return tensors."
            )
    return tree_unflatten([leaf if leaf is None else change(leaf) for leaf in leaves], tree)
