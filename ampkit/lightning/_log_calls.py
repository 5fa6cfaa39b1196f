"""What `training_step` returned and logged, taken apart into tensors, which a graph computes, and what it freezes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch.tree import tree_flatten, tree_unflatten
from .._undo import Undo


class LogCall(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Template:
    """A tree without its tensors, to be filled with others. Compares by identity, so that it can be a key of a dict."""

    def __init__(self, tree: Any) -> None:
        leaves, self._tree = tree_flatten(tree)
        self._leaves = [_HOLE if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors and forget them: a template outlives the graph whose memory they are."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def filled(self, tensors: list[Tensor]) -> Any:
        """Return the tree with these tensors in their places."""
        left = iter(tensors)
        return tree_unflatten([next(left) if leaf is _HOLE else leaf for leaf in self._leaves], self._tree)

    def __repr__(self) -> str:
        return "training_step"


_HOLE = object()


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[LogCall]]:
    """Context in which `module.log` makes an entry in the list it yields, and does nothing else.

    Lightning's own must not be captured: it rebinds the tensors that it sums in, and means over an epoch would be wrong
    without a word. A tensor is cloned, as Lightning does: the step may change it later.
    """
    recorder = _Recorder()
    before = vars(module).get("log")
    with Undo() as undo:
        if before is None:
            undo.note(vars(module).pop, "log", None)
        else:
            undo.note(vars(module).update, {"log": before})
        vars(module)["log"] = recorder
        yield recorder.calls


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[LogCall] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # not traced, as Lightning's own is not
    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        self.calls.append(LogCall(name, kept, args, kwargs))


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in what `training_step` returned, None where Lightning skips the step or raises an error."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    return None


def numbers(calls: list[LogCall]) -> dict[str, float]:
    """Return the Python numbers that were logged, by name."""
    return {call.name: call.value for call in calls if isinstance(call.value, (bool, int, float))}
