"""The nodes of an autograd graph and the engine that runs them: what torch tells of them under private names only."""

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..._undo import Undo, replace
from ..guard import private

# keeps_graph() is called within a backward pass: whether its caller passed retain_graph=True.
keeps_graph: Callable[[], bool] = private(torch._C._autograd, "_get_current_graph_task_keep_graph")
# current_graph_task(): the number of the backward pass that calls this code, -1 outside of one.
current_graph_task: Callable[[], int] = private(torch._C, "_current_graph_task_id")


def in_backward() -> bool:
    """Return whether a backward pass is calling this code."""
    return current_graph_task() != -1


# Every backward enters the engine through this function, which callers look up in these two places.
ENGINE_CODE = private(torch.autograd.graph, "_engine_run_backward").__code__
ENGINE_ENTRIES = ((torch.autograd, "_engine_run_backward"), (torch.autograd.graph, "_engine_run_backward"))
private(torch.autograd, "_engine_run_backward")
# current_node() returns the node that a backward pass is running, None outside of one.
current_node: Callable[[], Any] = private(torch._C, "_current_autograd_node")


# The node that accumulates a parameter's gradient belongs to the stream of the forward that made it, as long as
# something keeps the autograd graph of that forward alive. torch 2.15 can run it on a capture's stream, 2.11 cannot.
_override_streams: Callable[[bool], None] | None = getattr(
    torch.autograd.graph, "set_override_stale_capture_stream", None
)
CAN_RUN_ON_ONE_STREAM = _override_streams is not None


@contextmanager
def one_stream() -> Iterator[None]:
    """Context of a capture in which all nodes of autograd run on its stream, where torch can do that."""
    with Undo() as undo:
        if _override_streams is not None:
            undo.note(_override_streams, private(torch._C, "_override_stale_capture_stream")())
            _override_streams(True)
        yield


def graph_nodes(outputs: Sequence[Any]) -> Iterator[Any]:
    """Yield every node of the autograd graph that some tensors or `GradientEdge`s were computed by."""
    left: list[Any] = [output.grad_fn if isinstance(output, Tensor) else output.node for output in outputs]
    seen: set[Any] = {None}
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            yield node
            left += [following for following, _ in node.next_functions]


_next_sequence_number = private(torch.autograd, "_get_sequence_nr")
for _name in ("_input_metadata", "_sequence_nr"):
    private(torch.autograd.graph.Node, _name)
# input_metadata(node): shape, dtype and device of each gradient that an autograd node takes.
input_metadata: Callable[[Any], Sequence[Any]] = operator.attrgetter("_input_metadata")
# sequence_number(node): the number that autograd gave it when it was made. A backward runs the highest number first.
sequence_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


def output_dtype(node: Any) -> torch.dtype | None:
    """Return the dtype of an autograd node's first output, which is that of its gradient. None if it takes none."""
    metadata = input_metadata(node)
    dtype: torch.dtype | None = metadata[0].dtype if metadata else None
    return dtype


def leaf_hooks(leaf: Tensor) -> list[Callable[[Tensor | None], Tensor | None]]:
    """Return the hooks that a leaf's gradient is passed to before it is accumulated."""
    return list((private(leaf, "_backward_hooks") or {}).values())


def post_accumulate_hooks(leaf: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks that are called once a leaf's gradient is accumulated."""
    return list((private(leaf, "_post_accumulate_grad_hooks") or {}).values())


_task_numbers = itertools.count(1 << 40)  # far above the numbers that autograd gives, which count up from 0
_push_hooks, _pop_hooks, _top_hooks = (
    private(torch._C._autograd, f"_{name}_saved_tensors_default_hooks") for name in ("push", "pop", "top")
)
_HOOKS = "ampkit: hooks of outputs"  # key in a node's metadata
_engine_owner: Any = torch.autograd.Variable
_ENGINE_METHODS = ("run_backward", "queue_callback", "is_checkpoint_valid")
_engine: dict[str, Any] = {name: private(private(_engine_owner, "_execution_engine"), name) for name in _ENGINE_METHODS}


@contextmanager
def callbacks_queued_by(queue: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Context in which code within a backward asks this function to have another one called when it is over."""
    with Undo() as undo:
        replace(undo, _engine_owner, "_execution_engine", SimpleNamespace(**{**_engine, "queue_callback": queue}))
        yield


@contextmanager
def hooks_noted() -> Iterator[None]:
    """Context in which `Tensor.register_hook` notes the hooks of tensors that are no leaves: see `output_hooks`."""
    register = Tensor.register_hook

    @functools.wraps(register)
    def register_and_note(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        handle = register(tensor, hook)  # type: ignore[no-untyped-call]  # torch has no annotation there
        node: Any = tensor.grad_fn
        if node is not None:
            # The same dict as the tensor has, so that hooks that are added or removed later are there or not.
            node.metadata.setdefault(_HOOKS, {})[tensor.output_nr] = private(tensor, "_backward_hooks")
        return handle

    with Undo() as undo:
        replace(undo, Tensor, "register_hook", register_and_note)
        yield


def output_hooks(node: Any) -> list[tuple[int, Callable[[Tensor | None], Tensor | None]]]:
    """Return the hooks of a node's outputs that were noted, each with the number of its output."""
    noted: dict[int, dict[int, Any]] = node.metadata.get(_HOOKS, {})
    return [(i, hook) for i, hooks in noted.items() for hook in list(hooks.values())]


def newest_sequence_number() -> int:
    """Return the number of the autograd node that this thread made last: in forward, that of the running operation."""
    return int(_next_sequence_number()) - 1


def saved_by(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that an autograd node keeps. Tensors that saved-tensor hooks have packed are left out."""
    kind: Any = type(node)
    for name in _saved_attributes(kind):
        try:
            value = getattr(node, name)
        except RuntimeError:  # a backward has freed them
            continue
        for saved in value if isinstance(value, (tuple, list)) else (value,):
            data = getattr(saved, "data", None)
            if isinstance(data, Tensor):
                yield data
    variable = getattr(node, "variable", None)  # of a leaf's AccumulateGrad
    if isinstance(variable, Tensor):
        yield variable


@functools.cache
def _saved_attributes(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def last_factor(loss: Tensor) -> float | None:
    """Return the number that a loss was multiplied by last, or the inverse of the one that it was divided by.

    None if there is none on the host, or if that makes a mean. To be called without modes, which would see that the
    number is read.
    """
    node: Any = loss.grad_fn
    kind = type(node).__name__
    if kind not in ("DivBackward0", "MulBackward0") or _is_sum(node.next_functions[0][0]):
        return None
    # Torch makes a tensor of a number of Python's: of a float one of float64.
    saved = getattr(getattr(node, "_raw_saved_other", None), "data", None)
    if not isinstance(saved, Tensor) or saved.dim() or saved.device.type != "cpu":
        return None
    if kind == "DivBackward0":
        return 1.0 / float(saved) if saved else None
    # Losses are multiplied by tensors, too, which are not to be read.
    return float(saved) if saved.dtype is torch.float64 and loss.dtype is not torch.float64 else None


def _is_sum(node: Any) -> bool:
    """Return whether this node, or one of which it is a linear combination, sums over elements."""
    kind = type(node).__name__
    if kind.startswith(("AddBackward", "MulBackward", "NegBackward", "SubBackward", "ToCopyBackward")):
        return any(_is_sum(each) for each, _ in node.next_functions)
    return kind.startswith("SumBackward") or getattr(node, "_saved_reduction", None) == _SUM


_SUM = 2  # torch.nn._reduction.get_enum("sum")


@contextmanager
def graph_task() -> Iterator[None]:
    """Context in which Python code that asks for the running backward gets a new number, though none is running.

    Checkpointing asks: it recomputes a block once for each number.
    """
    number = next(_task_numbers)
    with Undo() as undo:
        replace(undo, torch._C, "_current_graph_task_id", lambda: number)
        yield


@contextmanager
def hooks_wrapped(wrap: Callable[[Any], tuple[Any, Any]]) -> Iterator[None]:
    """Context in which a pack hook and an unpack hook that `wrap` returns take the place of `saved_tensors_hooks`.

    `wrap` is called with each of these when it is entered. It is kept until it is left.
    """
    kind = torch.autograd.graph.saved_tensors_hooks
    kept: list[Any] = []

    def enter(hooks: Any) -> None:
        _push_hooks(*wrap(hooks))
        kept.append(hooks)

    def leave(hooks: Any, *error: object) -> None:
        kept.remove(hooks)
        _pop_hooks()

    with Undo() as undo:
        replace(undo, kind, "__enter__", enter)
        replace(undo, kind, "__exit__", leave)
        yield


def in_graph_task() -> bool:
    """Return whether a backward pass is calling this code, that of `graph_task` included."""
    return bool(torch._C._current_graph_task_id() != -1)


def packs_saved_tensors() -> bool:
    """Return whether hooks pack what autograd saves now, as in `saved_tensors_hooks` and in a checkpointed function."""
    return _top_hooks(False) is not None
