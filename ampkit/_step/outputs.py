"""What captured functions may get and return: trees of tensors, as a replay computes nothing else anew; and a loss."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._arguments import shown
from .._errors import AmpkitWarning
from .._text import type_text
from .._torch.autograd.autograd import last_factor
from .._torch.tensors.modes import without_dispatch_modes, without_torch_function
from .._torch.tensors.tree import tree_flatten, tree_unflatten
from .._user_line import users_level


def check_outputs(outputs: Any, who: str, place: str, state: str) -> None:
    """Raise a `ValueError` unless a function has returned a tree of tensors and None.

    The message says who has returned it, its place in what the function returned, and which state the call leaves.
    """
    for leaf in tree_flatten(outputs)[0]:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise ValueError(
                f"{who} returned a {type(leaf).__name__} ({shown(leaf)}){place}, which a replay cannot compute anew. "
                f"Return tensors. {state}"
            )


def mapped_outputs(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a tree of tensors and None with `change(tensor)` in place of each tensor."""
    leaves, tree = tree_flatten(outputs)
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


def hint_at_division(loss: Tensor, accumulate: int) -> None:
    """Warn if a loss seems to be divided for accumulation already, which the step does itself."""
    with without_dispatch_modes(), without_torch_function():
        factor = last_factor(loss)
    if factor == 1.0 / accumulate:
        warnings.warn(
            f"graphed_step(accumulate={accumulate}): loss_fn divides its loss by {accumulate}, and the step divides "
            "each loss by accumulate itself. Return the loss undivided, unless this number counts something else.",
            AmpkitWarning,
            stacklevel=users_level(),
        )


def misfit(loss_fn: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return how the batch of a step does not fit the arguments of `loss_fn`, and what to write; "" if it fits."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some functions of C have none
        return ""

    def fits(*args: Any, **kwargs: Any) -> bool:
        try:
            signature.bind(model, *args, **kwargs)
        except TypeError:
            return False
        return True

    if fits(*args, **kwargs):
        return ""
    only = args[0] if len(args) == 1 and not kwargs else None
    if isinstance(only, (tuple, list)) and fits(*only):
        remedy = "Write step(*batch)."
    elif isinstance(only, Mapping) and all(isinstance(key, str) for key in only) and fits(**only):
        remedy = "Write step(**batch)."
    elif (args and not kwargs and fits(args)) or (kwargs and not args and fits(kwargs)):
        remedy = "Write step(batch)."
    else:
        remedy = "What a step is called with goes to loss_fn behind the model."
    given = ", ".join([*(type_text(arg) for arg in args), *(f"{key}={type_text(arg)}" for key, arg in kwargs.items())])
    return f"graphed_step: the step was called with ({given}), but loss_fn takes {signature}. {remedy}"
