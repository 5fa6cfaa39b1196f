"""A replayed forward pass as a node of the caller's autograd graph, and how long its activations are needed."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._capture.graph.graph import Graph
from .._capture.keys.placement import empty_like, is_dense, place_of
from .._errors import CaptureWarning
from .._torch.autograd.autograd import keeps_graph
from .._torch.tensors.tensors import foreach_copy_, version
from .._undo import call
from .passes import Passes
from .shared_memory import SharedMemory

PENDING: Any = object()  # stands for the result of a call that could not be replayed


@dataclass(eq=False)
class GraphedPasses:
    """The forward and the backward graph of one layout of the input."""

    shared: SharedMemory  # the pools and the order of launches, which other callables share
    _passes: Passes  # the tensors that the graphs read and write
    _forward: Graph
    _backward: Graph  # not captured if no output requires grad
    _last: "weakref.ref[_ForwardReplay] | None" = None
    _has_warned: bool = False

    @property
    def pending(self) -> bool:
        """Whether a backward pass may still need the activations of the last call."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the forward graph on this input. Return `PENDING`, and replay nothing, if `pending` is true.

        Sync: none. Aliasing: none.
        """
        results = self.shared.in_turn(self._replay, leaves)  # another thread may replay it at the same time
        return PENDING if results is PENDING else self._passes.rebuild(results)

    def _replay(self, leaves: list[Any]) -> Any:
        if self.pending:
            return PENDING
        replay = _ForwardReplay(self)
        results = _replayed(replay, leaves, *self.sources(leaves))
        self._last = weakref.ref(replay)
        return results

    def sources(self, leaves: list[Any]) -> list[Tensor]:
        """Return the inputs and parameters that `backward` returns gradients of, in the order of these."""
        return [*(leaves[i] for i in self._passes.grad_inputs), *self._passes.params]

    def forward(self, leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Replay; return copies of the outputs, and the non-differentiable ones. Call it within `in_turn`."""
        self._passes.inputs.copy_(leaves)
        self._forward.replay()
        results = _copies(self._passes.results)
        pairs = zip(results, self._passes.differentiable, strict=True)
        return results, [result for result, differentiable in pairs if not differentiable]

    def backward(
        self, replay: "_ForwardReplay", grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return copies of the gradients of inputs and parameters, of those that are wanted. Call it within `in_turn`.

        The gradients given are those of the outputs of this forward replay.
        """
        if self._last is None or self._last() is not replay:
            raise RuntimeError(_OVERWRITTEN)
        if Passes.recording:  # in another thread, because this one would not be here during a capture
            raise RuntimeError(_RECORDING)
        if replay.versions != self.versions():
            raise RuntimeError(_MODIFIED)
        given = [g for g, differentiable in zip(grads, self._passes.differentiable, strict=True) if differentiable]
        found = self.gradients(given, wanted)
        replay.done = self.is_last(given)
        copies = dict(zip(found, _copies(list(found.values()), self.memory_for(found)), strict=True))
        return [copies.get(j) for j in range(len(wanted))]

    def begin_backward(self) -> None:
        """Look at the modes of a backward pass. Warn once if autocast is on, because the graph casts nothing."""
        if torch.is_autocast_enabled(self.shared.device.type) and not self._has_warned:
            self._has_warned = True
            warnings.warn(_AUTOCAST, CaptureWarning, stacklevel=3)

    def gradients(self, given: Sequence[Tensor | None], wanted: Sequence[bool]) -> dict[int, Tensor]:
        """Replay; return the gradients that are wanted, by number, which the next replay overwrites.

        The gradients given are those of the differentiable outputs.
        """
        passes = self._passes
        for static, grad in zip(passes.out_grads, given, strict=True):
            _ = static.zero_() if grad is None else static.copy_(grad, non_blocking=True)
        self._backward.replay()
        in_loss = {i for i, grad in enumerate(given) if grad is not None}
        # If none of the outputs that use an input is part of the loss, its gradient is None rather than zeros.
        return {
            j: grad
            for j, grad in enumerate(passes.grads)
            if grad is not None and wanted[j] and not passes.used_by[j].isdisjoint(in_loss)
        }

    def memory_for(self, grads: dict[int, Tensor]) -> list[Tensor | None]:
        """Return where to copy each of these gradients, None for new memory. Autograd gets these tensors."""
        return [None] * len(grads)

    def is_last(self, given: Sequence[Tensor | None]) -> bool:
        """Return whether no backward pass may follow the one that runs, with these gradients."""
        return not keeps_graph()

    def versions(self) -> list[int]:
        """Return the version of each parameter and buffer that backward reads. A change in place raises it."""
        return [version(tensor) for tensor in self._passes.read]

    def reset(self) -> None:
        """Free the graphs. Waits for the device."""
        self._last = None
        self._forward.reset()
        self._backward.reset()


@dataclass(eq=False)
class _ForwardReplay:
    """One replay of a forward graph. It is alive as long as its autograd node, and so as long as backward may come."""

    graphed: GraphedPasses
    done: bool = False
    versions: list[int] = field(default_factory=list)  # `GraphedPasses.versions` after the forward pass


class _ReplayFunction(torch.autograd.Function):
    """The autograd function of one call: forward and backward replay a graph each."""

    @staticmethod
    def forward(ctx: Any, replay: _ForwardReplay, leaves: list[Any], *_: Tensor) -> tuple[Tensor, ...]:
        results, constants = replay.graphed.forward(leaves)
        replay.versions = replay.graphed.versions()
        ctx.replay = replay
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphed, wanted = ctx.replay.graphed, ctx.needs_input_grad[2:]
        graphed.begin_backward()
        with torch.no_grad():
            returned = graphed.shared.in_turn(call, graphed.backward, ctx.replay, grads, wanted)
        if torch.is_grad_enabled():  # create_graph=True
            # torch's once_differentiable does this only if a gradient that comes in requires grad.
            returned = [*_differentiable_once(torch.empty(0, requires_grad=True), *returned)]
        return None, None, *returned


class _DifferentiableOnce(torch.autograd.Function):
    """Identity of gradients. To differentiate them is an error; otherwise they would pass for constants."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple([None if grad is None else grad.detach() for grad in grads])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "make_graphed_callables: a graphed callable can be differentiated once, not twice. Call close() on it "
            "(module.forward.close()), or leave it out of callables, where create_graph=True is needed."
        )


_replayed: Callable[..., tuple[Tensor, ...]] = _ReplayFunction.apply
_differentiable_once: Callable[..., tuple[Tensor | None, ...]] = _DifferentiableOnce.apply


def _copies(tensors: Sequence[Tensor], memory: Sequence[Tensor | None] = ()) -> list[Tensor]:
    """Return copies that belong to the caller, made by one kernel for all tensors of one dtype.

    `memory` has tensors to copy some of them into, or that they lie in already; if it is empty, all memory is new.
    """
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    # Memory that lies as the tensors' does, because later kernels may compute otherwise at another address.
    copies = []
    for tensor, given in zip(tensors, memory or [None] * len(tensors), strict=True):
        if given is None:
            place = place_of(tensor)
            given = empty_like(tensor, place) if place and is_dense(tensor) else torch.empty_like(tensor)
        copies.append(given)
    pairs = [pair for pair in zip(copies, tensors, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()]
    if len(pairs) == 1:
        pairs[0][0].copy_(pairs[0][1])
    elif pairs:
        foreach_copy_(*map(list, zip(*pairs, strict=True)))
    return copies


_OVERWRITTEN = (
    "make_graphed_callables: backward for a second time through a call whose activations are gone, because a later "
    "call was replayed or the callable was closed. Pass retain_graph=True to the first backward: calls are eager until "
    "the second one."
)
_AUTOCAST = (
    "make_graphed_callables: backward begins under autocast, and its graph was captured without. In eager calls "
    "autocast casts in backward, too, as for the matrix products of attention, so gradients may have other bits here. "
    "Leave the autocast region before backward."
)
_RECORDING = (
    "make_graphed_callables: backward while another thread captures a callable. Both would use one workspace of cuBLAS "
    "at the same time. Call each callable once in each layout before threads share the device."
)
_MODIFIED = (
    "make_graphed_callables: a parameter or buffer that backward needs has been modified by an inplace operation since "
    "the forward pass. Step the optimizer after backward."
)
