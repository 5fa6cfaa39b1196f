"""Modules that are compiled one by one: one whose compilation fails is made again, as eager code, at its place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._capture.state.snapshot import Snapshot
from ..._capture.state.state import TrainingState
from ..._torch.autograd.autograd import in_graph_task
from ..._torch.tensors.tree import tree_flatten
from .compiled_writes import why_failed

_SHOWN = 5  # names in a line


class CompiledParts:
    """Calls modules as compiled code, or as eager code once their compilation has failed.

    Attributes:
        watches: whether the call that runs compiles, so that a part may be made again, from the buffers and random
            numbers before it.
        problems: why a part is not compiled, by its name.
    """

    def __init__(self, buffers: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        self._buffers, self._generators = buffers, generators
        self.watches: bool = False
        self.problems: dict[str, str] = {}

    def run(self, name: str, compiled: Callable[..., Any], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `compiled` returns, or `call`, which does the same as eager code."""
        if name in self.problems:
            return call(*args, **kwargs)
        # A backward that calls it again, as checkpointing does, ends it by an error of torch's own.
        if not self.watches or in_graph_task():
            return compiled(*args, **kwargs)
        before = self.snapshot(tree_flatten((args, kwargs))[0])  # of a graph break: what comes before it has run
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            before.restore()
            returned = call(*args, **kwargs)  # if this raises too, it was not the compiler that failed
            self.problems[name] = why_failed(error)
            return returned

    def snapshot(self, leaves: Sequence[Any]) -> Snapshot:
        """Return buffers, random numbers and these tensors, as they are now."""
        state = TrainingState({}, [], own={str(i): buffer for i, buffer in enumerate(self._buffers)})
        return Snapshot(state, self._generators, leaves, on_host=True)

    def problem_texts(self) -> list[str]:
        """Return what is not compiled, and why: parts with the same reason together."""
        reasons = dict.fromkeys(self.problems.values())
        return [
            f"{listed([name for name, why in self.problems.items() if why == reason])}, since {reason}"
            for reason in reasons
        ]


def is_one_layer(module: nn.Module) -> bool:
    """Return whether a module is a single layer of torch.nn, which is one kernel or two."""
    return getattr(module.forward, "__module__", "").startswith("torch.nn.modules.") and not [*module.children()]


def listed(names: Sequence[str]) -> str:
    """Return names in a line, with dots in place of most if there are many."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN - 2])}, ..., {names[-1]} ({len(names)} parts)"
