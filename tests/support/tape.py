"""A graph for the CPU that freezes what a CUDA graph freezes: a capture records operations, a replay runs them again.

An emulated graph calls the function again in each replay, so numbers of the host, branches, modes and settings are
always fresh. Here they are those of the capture, which itself changes nothing, and each operation writes where it wrote
then, as in a CUDA graph. What reads a tensor on the host is frozen too; a CUDA graph refuses it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from ampkit._capture.compare.rehearsal import Rehearsal
from ampkit._capture.engine import layout_capture as _layout_capture
from ampkit._capture.engine import layouts as _layouts
from ampkit._capture.graph import cache as _cache
from ampkit._capture.graph import graph as _graph
from ampkit._capture.keys.inputs import Spec, StaticInputs


class TapedGraph:
    """Takes the place of `EmulatedGraph`."""

    def __init__(self) -> None:
        self._tape: _Tape | None = None
        self._outputs: Any = None

    def capture(self, fn: Callable[[], Any], around: Any, then: Callable[[Any], Any]) -> None:
        """Record what `then(fn())` does, and undo it."""
        self._tape = _Tape()
        random_state = torch.get_rng_state()
        try:
            with _ordinary_tensors(), self._tape:
                self._outputs = then(fn())
        finally:
            self._tape.undo()
            torch.set_rng_state(random_state)

    def cut(self, asked: Tensor, answer: bool) -> None:
        """Have replays end here if this is something else then."""
        assert self._tape is not None  # set by capture
        self._tape.cut(asked, answer)

    def replay(self) -> Any:
        """Run what was recorded, and return the same tensors as ever."""
        assert self._tape is not None  # set by capture
        self._tape.run()
        return self._outputs

    def reset(self) -> None:
        """Forget everything."""
        self._tape = self._outputs = None


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Replace inference mode by no_grad: in it a dispatch mode sees linear and gru whole, behind autocast's casts."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class _Tape(TorchDispatchMode):
    """Records every operation below autograd, with the tensors that it read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # what was read or written to, and its values before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs or {})))):
            return NotImplemented  # it calls operations on the tensors in it, which come here
        read = tree_map(_alias, (args, kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(read) if isinstance(leaf, Tensor)):
            # All that is read: batch_norm's schema does not say that it writes to its running mean.
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage.data_ptr()] = whole, whole.clone()
        outputs = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _OF_SHAPE:
            self._calls.append((func, *read, tree_leaves(tree_map(_alias, outputs))))
        return outputs

    def cut(self, asked: Tensor, answer: bool) -> None:
        """End here in each run in which this is something else."""
        self._calls.append((_ask, (asked.detach(), answer), {}, [None]))

    def undo(self) -> None:
        """Put back what was written over."""
        for memory, before in self._before.values():
            memory.copy_(before)
        self._before = {}

    def run(self) -> None:
        """Do it all again, in the same memory."""
        with torch.inference_mode():  # which may write to tensors of any mode, and records nothing
            for func, args, kwargs, outputs in self._calls:
                for old, new in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.copy_(new)


def _ask(asked: Tensor, answer: bool) -> None:
    if _graph.is_true(asked) is not answer:
        raise _graph.OtherAnswerError


# They change the shape of the tensor that they get and no memory. Those after them were recorded with the new shape.
_OF_SHAPE = ("transpose_", "t_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_", "swapdims_", "detach_")


def _alias(value: Any) -> Any:
    """Return another view of a tensor's memory, which keeps the shape that it has now."""
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def taped() -> Iterator[None]:
    """Make `graph="emulate"` record and run tapes."""
    with (
        mock.patch.object(_cache, "EmulatedGraph", TapedGraph),
        mock.patch.object(_layout_capture, "StaticInputs", _FilledInputs),
        mock.patch.object(_layouts, "Rehearsal", _Incomparable),
    ):
        yield


class _Incomparable(Rehearsal):
    """Compares nothing: under the mode that records a tape, torch runs other operations than in an eager call."""

    def difference(self) -> str:
        """Return "": the two are not compared."""
        return ""

    @property
    def done(self) -> bool:
        """Whether a capture may follow: always."""
        return True


class _FilledInputs(StaticInputs):
    """On a GPU a capture computes nothing, so it may read buffers that nobody has filled."""

    def __init__(self, spec: Spec, leaves: list[Any]) -> None:
        super().__init__(spec, leaves)
        with torch.no_grad():
            self.copy_(leaves)
