"""An eager call: on the capture stream, with a batch that lies where a graph would read it, and outputs of its own."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._errors import InputMismatch
from ..._torch.tensors.modes import modes
from ..._torch.tensors.tensors import versions
from ..._torch.tensors.tree import tree_unflatten
from ..._undo import Undo
from ..keys.inputs import Spec, path
from ..keys.placement import is_as_copied, own_copy
from ..keys.spans import Spans, span

_R = TypeVar("_R")


def called_on(
    stream: torch.cuda.Stream | None,
    device: torch.device,
    fn: Callable[[], Any],
    context: AbstractContextManager[Any],
    own: Callable[[Any], Any],
) -> Any:
    """Return `own(outputs)` of what `fn` returns, called on this stream and in this context; None is the caller's one.

    Work of the caller's stream comes before that of `fn`, and later work of the caller's stream behind it. Sync: none.
    """
    with Undo() as undo:
        undo.note(modes())
        if stream is None:
            with context:
                outputs = own(fn())
        else:
            stream.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(stream), context:
                    outputs = own(fn())
            finally:
                torch.cuda.current_stream(device).wait_stream(stream)
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

    Args:
        call: makes the call.
        spec: the layout of the batch.
        args: of the call.
        kwargs: of the call.
        leaves: of these.
        changing: gives the memory of the state that the call may change. A tensor that lies there is passed as it is,
            for an eager call sees the change; and a graph, which does not, will refuse it.

    Raises:
        InputMismatch: the call has changed such a tensor in place, and another one of the batch shares memory with it,
            which has not seen the change. The call was made.

    Aliasing: what the call changes in place is copied back. Sync: none.
    """
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not is_as_copied(leaf)]
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
        if new != old:
            given[i].copy_(copy, non_blocking=True)
            _refuse_shared(spec, given, i)
    return outputs


def _refuse_shared(spec: Spec, leaves: Sequence[Any], changed: int) -> None:
    start, stop = span(leaves[changed])
    for i, leaf in enumerate(leaves):
        if i != changed and isinstance(leaf, Tensor) and span(leaf)[0] < stop and start < span(leaf)[1]:
            one, other = path(spec.tree, changed), path(spec.tree, i)
            raise InputMismatch(
                f"{one}, which the step has changed in place, lies in the same memory as {other}, which has not seen "
                f"the change: kernels read {one} in another way than memory that torch allocates, so the step got a "
                f"copy of it. Pass {one}.clone()."
            )
