"""Eager calls: on the capture stream, with a batch that lies where a graph would read it, and outputs of their own."""

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..._errors import InputMismatch
from ..._torch.tensors.modes import modes
from ..._torch.tensors.tensors import versions
from ..._torch.tensors.tree import tree_unflatten
from ..._undo import Undo
from ..graph.cache import copied
from ..keys.inputs import Spec, path
from ..keys.placement import own_copy, place_of
from ..keys.spans import Spans, span
from .session import Session

_R = TypeVar("_R")


class EagerCall(NamedTuple):
    """A call for which there is no graph."""

    phase: Hashable  # the first argument of the function
    args: tuple[Any, ...]  # its other arguments
    kwargs: dict[str, Any]
    leaves: Sequence[Any]  # the tensors and constants in these
    start: Any = None  # the clock's mark of when it began; None if it is not to be timed

    def to(self, fn: Callable[..., Any]) -> Any:
        """Return what `fn` returns for these arguments."""
        return fn(self.phase, *self.args, **self.kwargs)


class EagerCalls:
    """Makes the eager calls, and counts them.

    Autograd and cuBLAS keep memory for each stream. With one stream for eager calls and captures they do so once.

    Attributes:
        stream: where calls are made; None: on the caller's stream.
        counts: how many there were, by reason.
    """

    def __init__(self, session: Session) -> None:
        self._device, self._fallback = session.device, session.fallback
        self._state, self._reducers = session.state, session.ranks.reducers
        self.stream = session.stream
        self.counts: Counter[str] = Counter()

    def run(self, reason: str, fn: Callable[[], Any], own: Callable[[Any], Any] = copied) -> Any:
        """Return `own(outputs)` of what `fn` returns, called eagerly, and counted under this reason."""
        self.counts[reason] += 1
        self._state.refresh_rates()
        self._reducers.begin_eager_call()
        return self.on_stream(fn, own)

    def on_stream(self, fn: Callable[[], Any], own: Callable[[Any], Any] = copied) -> Any:
        """Return `own(outputs)` of what `fn` returns, called on the stream of these calls.

        Work of the caller's stream comes before that of `fn`, and later work of the caller's stream behind it. Sync:
        none, but once there will be no graph any more, the first call waits for the device.
        """
        if self._fallback.refused and self.stream is not None and not self._reducers.moved:
            self.stream = None
            # Errors refer to themselves through their tracebacks. What a failed capture made may hold nodes of autograd
            # that belong to the capture stream, and torch warns where they are used on another one.
            gc.collect()
            torch.cuda.empty_cache()  # memory that is cached for the capture stream would serve no other one
        stream = self.stream
        with Undo() as undo:
            undo.note(modes())
            if stream is None:
                outputs = own(fn())
            else:
                stream.wait_stream(torch.cuda.current_stream(self._device))
                try:
                    with torch.cuda.stream(stream):
                        outputs = own(fn())
                finally:
                    torch.cuda.current_stream(self._device).wait_stream(stream)
            undo.forget()
        return outputs


def call_aligned(
    call: Callable[[tuple[Any, ...], dict[str, Any], list[Any]], _R],
    spec: Spec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[Any],
    changing: Callable[[], Spans],
) -> _R:
    """Return `call(args, kwargs, leaves)`, with copies in place of tensors that are not as a graph would read them.

    A graph reads a batch from tensors of its own, which are aligned. Sums and matrix products of a slice of a larger
    tensor may have other bits, because their kernels read as many bytes at once as the address allows. So eager calls
    get an aligned copy of such a slice, too. The same holds for `x.conj()` and `-z.imag`, whose values torch
    computes where they are read, often in the kernel that reads them.

    `changing` returns the memory of the state that the call may change. A tensor that lies there is passed as it is,
    for an eager call sees the change; and a graph, which does not, will refuse it.

    Raises:
        InputMismatch: the call has changed such a tensor in place, and another one of the batch shares memory with it,
            which has not seen the change. The call was made.

    Aliasing: what the call changes in place is copied back. Sync: none.
    """
    tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    # Those that are not aligned, or do not hold their values.
    places = [i for i, leaf in tensors if place_of(leaf) or leaf.is_conj() or leaf.is_neg()]
    if places:
        state = changing()
        places = [i for i in places if not state.at(*span(leaves[i]))]
    if not places:
        return call(args, kwargs, leaves)
    given, own = leaves, list(leaves)
    for i in places:
        own[i] = own_copy(given[i])
    copies = [own[i] for i in places]
    before = versions(copies)
    args, kwargs = tree_unflatten(own, spec.tree)
    outputs = call(args, kwargs, own)
    for i, copy, old, new in zip(places, copies, before, versions(copies), strict=True):
        if new == old:
            continue
        given[i].copy_(copy, non_blocking=True)
        start, stop = span(given[i])
        for j, leaf in enumerate(given):
            if j != i and isinstance(leaf, Tensor) and span(leaf)[0] < stop and start < span(leaf)[1]:
                one, other = path(spec.tree, i), path(spec.tree, j)
                raise InputMismatch(
                    f"{one}, which the step has changed in place, lies in the same memory as {other}, which has not "
                    f"seen the change: kernels read {one} in another way than memory that torch allocates, so the step "
                    f"got a copy of it. Pass {one}.clone()."
                )
    return outputs
