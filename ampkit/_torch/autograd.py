"""The graph and the engine of autograd."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._undo import Undo
from .guard import private

# Within a backward pass: whether its caller asked to keep the graph (retain_graph=True).
keeps_graph: Callable[[], bool] = private(torch._C._autograd, "_get_current_graph_task_keep_graph")
_current_graph_task = private(torch._C, "_current_graph_task_id")


def in_backward() -> bool:
    """Return whether this code is called by a backward pass."""
    return bool(_current_graph_task() != -1)


# The function of the Python layer by which every backward enters autograd's engine, and where callers look it up.
ENGINE_CODE = private(torch.autograd.graph, "_engine_run_backward").__code__
ENGINE_ENTRIES = ((torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward"))
private(torch.autograd, "_engine_run_backward")
# Within a backward pass: the node of the graph that runs; None outside of one.
current_node: Callable[[], Any] = private(torch._C, "_current_autograd_node")


def forward_stack(node: Any) -> list[str]:
    """Return where a node of the graph was made, as `traceback.format_stack` did there; empty without anomaly mode."""
    stack: list[str] = node.metadata.get("traceback_", [])
    return stack


def graph_nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield every node of the graph behind some tensors and `GradientEdge`s."""
    left: list[Any] = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


def output_dtype(node: Any) -> torch.dtype | None:
    """Return the dtype of what a node of the graph computed, as far as its gradient has it."""
    metadata = private(node, "_input_metadata")
    dtype: torch.dtype | None = metadata[0].dtype if metadata else None
    return dtype


def has_gradient_hooks(param: Tensor) -> bool:
    """Return whether something is called with the gradient of this leaf, or when it is there."""
    return bool(private(param, "_backward_hooks") or private(param, "_post_accumulate_grad_hooks"))


def sequence_number(node: Any) -> int:
    """Return the number that a node of the graph was given when it was made; the engine runs the highest one first."""
    return int(private(node, "_sequence_nr")())


_next_sequence_number = private(torch.autograd, "_get_sequence_nr")


def newest_sequence_number() -> int:
    """Return the number of the node that this thread made last: in forward, of the operation that runs."""
    return int(_next_sequence_number()) - 1


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node of the graph keeps. Those that hooks have packed are left packed, and left out."""
    kind: Any = type(node)
    for name in _raw_saved(kind):
        try:
            value = getattr(node, name)
        except RuntimeError:  # a backward has freed them
            continue
        for saved in value if isinstance(value, (tuple, list)) else (value,):
            data = getattr(saved, "data", None)
            if isinstance(data, Tensor):
                yield data
    variable = getattr(node, "variable", None)  # a leaf's
    if isinstance(variable, Tensor):
        yield variable


@functools.cache
def _raw_saved(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def input_metadata(node: Any) -> Sequence[Any]:
    """Return shape, dtype and device of the gradients that a node of the graph takes."""
    metadata: Sequence[Any] = private(node, "_input_metadata")
    return metadata


def leaf_hooks(leaf: Tensor) -> list[Callable[[Tensor | None], Tensor | None]]:
    """Return what is called with the gradient of this leaf."""
    return list((private(leaf, "_backward_hooks") or {}).values())


def post_accumulate_hooks(leaf: Tensor) -> list[Callable[[Tensor], None]]:
    """Return what is called when this leaf's gradient is there."""
    return list((private(leaf, "_post_accumulate_grad_hooks") or {}).values())


_graph_tasks = itertools.count(1 << 40)  # far from those that autograd gives


@contextmanager
def graph_task() -> Iterator[None]:
    """Context that passes for a backward where Python asks: checkpointing recomputes once per such number."""
    before, number = private(torch._C, "_current_graph_task_id"), next(_graph_tasks)
    with Undo() as undo:
        undo.note(setattr, torch._C, "_current_graph_task_id", before)
        torch._C._current_graph_task_id = lambda: number
        yield
