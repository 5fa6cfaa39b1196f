"""What captured functions may return: trees of tensors, as a replay computes nothing else anew; and a loss."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .._torch.tensors.tree import tree_flatten, tree_unflatten


def mapped_outputs(outputs: Any, change: Callable[[Tensor], Tensor], who: str, place: str = "") -> Any:
    """Return the tree that a captured function returned, with `change(tensor)` in place of each tensor.

    Args:
        outputs: a tree of tensors and None.
        change: called with each tensor.
        who: what the error message calls the function.
        place: what the error message says of the tree's place in what the function returned.

    Raises:
        ValueError: the tree has a leaf that is neither a tensor nor None.
    """
    leaves, tree = tree_flatten(outputs)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise ValueError(
                f"{who} returned a {type(leaf).__name__} ({leaf!r}){place}, which a replay cannot compute anew. "
                "Return tensors."
            )
    return tree_unflatten([leaf if leaf is None else change(leaf) for leaf in leaves], tree)


def check_loss(loss: object) -> None:
    """Raise a `ValueError` unless this is a floating tensor of shape () with grad."""
    if not isinstance(loss, Tensor):
        found, hint = ("None", " End it with `return loss`.") if loss is None else (f"a {type(loss).__name__}", "")
        expected = f"expected the loss as a tensor, or (loss, aux).{hint}"
        raise ValueError(f"graphed_step: loss_fn returned {found}; {expected}")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise ValueError(
            f"graphed_step: loss_fn returned a loss of shape {tuple(loss.shape)} and dtype {loss.dtype}; expected a "
            "floating tensor of shape (). Reduce it with .mean() or .sum()."
        )
    if not loss.requires_grad:
        raise ValueError(
            "graphed_step: loss_fn returned a loss without grad: it depends on no parameter that requires grad, or was "
            "made under torch.no_grad() or from .detach(). Compute it from model(...) with gradients on."
        )
