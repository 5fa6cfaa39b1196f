"""One call of captured passes as a node of the caller's autograd graph, and when its activations are gone."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._capture.graph import Graph
from .._torch.autograd import keeps_graph
from .._torch.tensors import foreach_copy_, version
from .._undo import call
from .passes import Passes
from .shared_memory import SharedMemory

PENDING: Any = object()  # what a call returns that was not made


class GraphedPasses:
    """The forward and the backward graph of one layout.

    Args:
        shared: the memory and the order that its launches share with those of other callables.
        passes: what they read and write.
        forward: of the forward pass.
        backward: of the backward pass; not captured where there is none.
    """

    def __init__(self, shared: SharedMemory, passes: Passes, forward: Graph, backward: Graph) -> None:
        self._shared = shared
        self._passes = passes
        self._forward = forward
        self._backward = backward
        self._last: weakref.ref[_ForwardReplay] | None = None

    @property
    def pending(self) -> bool:
        """Whether the activations of the last call may still be needed."""
        last = None if self._last is None else self._last()
        return last is not None and not last.done

    def __call__(self, leaves: list[Any]) -> Any:
        """Replay the forward graph on this input, or return `PENDING` and do nothing, for activations that a backward
        pass may still need are in it. Sync: none. Aliasing: none."""
        results = self._shared.in_turn(self._launched, leaves)  # another thread may launch it at the same time
        return PENDING if results is PENDING else self._passes.rebuild(results)

    def _launched(self, leaves: list[Any]) -> Any:
        if self.pending:
            return PENDING
        launch = _ForwardReplay(self)
        entries = [leaves[i] for i in self._passes.entries]
        results = _replayed(launch, leaves, *entries, *self._passes.params)
        self._last = weakref.ref(launch)
        return results

    def forward(self, leaves: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the outputs, and those of them that are not differentiable. To be called in a turn."""
        self._passes.inputs.copy_(leaves)
        self._forward.replay()
        results = _copies(self._passes.results)
        pairs = zip(results, self._passes.differentiable, strict=True)
        return results, [result for result, differentiable in pairs if not differentiable]

    def backward(
        self, launch: "_ForwardReplay", grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return copies of the gradients for these gradients of the outputs."""
        return self._shared.in_turn(call, self._backward_of, launch, grads, wanted)

    def _backward_of(
        self, launch: "_ForwardReplay", grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        if self._last is None or self._last() is not launch:
            raise RuntimeError(_OVERWRITTEN)
        if Passes.recording:  # in another thread, for in this one no graph is launched meanwhile
            raise RuntimeError(_RECORDING)
        if launch.versions != self.versions():
            raise RuntimeError(_MODIFIED)
        passes = self._passes
        given = [grad for grad, differentiable in zip(grads, passes.differentiable, strict=True) if differentiable]
        for seed, grad in zip(passes.seeds, given, strict=True):
            _ = seed.zero_() if grad is None else seed.copy_(grad, non_blocking=True)
        self._backward.replay()
        launch.done = not keeps_graph()
        reached = {i for i, grad in enumerate(given) if grad is not None}
        # Where the loss leaves out all that a gradient depends on there is none, rather than zeros.
        found = {
            j: grad
            for j, grad in enumerate(passes.grads)
            if grad is not None and wanted[j] and not passes.dependents[j].isdisjoint(reached)
        }
        copies = dict(zip(found, _copies(list(found.values())), strict=True))
        return [copies.get(j) for j in range(len(wanted))]

    def versions(self) -> list[int]:
        """Return a number per parameter and buffer that backward reads, which every change in place raises."""
        return [version(tensor) for tensor in self._passes.read]

    def reset(self) -> None:
        """Give the graphs up. Waits for the device."""
        self._last = None
        self._forward.reset()
        self._backward.reset()


class _ForwardReplay:
    """One replay of a forward graph. Its autograd node holds it, so that it lives while backward may still come."""

    def __init__(self, graphed: GraphedPasses) -> None:
        self.graphed = graphed
        self.done = False
        self.versions: list[int] = []  # of what backward reads, after the forward pass


class _ReplayFunction(torch.autograd.Function):
    """Forward and backward of one call, by replays."""

    @staticmethod
    def forward(ctx: Any, call: _ForwardReplay, leaves: list[Any], *_: Tensor) -> tuple[Tensor, ...]:
        results, constants = call.graphed.forward(leaves)
        call.versions = call.graphed.versions()
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            returned = ctx.call.graphed.backward(ctx.call, grads, ctx.needs_input_grad[2:])
        if torch.is_grad_enabled():  # create_graph=True
            # once_differentiable does this only where a gradient that comes in requires grad.
            returned = [*_differentiable_once(torch.empty(0, requires_grad=True), *returned)]
        return None, None, *returned


class _DifferentiableOnce(torch.autograd.Function):
    """Identity of gradients that cannot be differentiated, and say so rather than being taken for constants."""

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


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies that belong to the caller, made by one kernel where there are many tensors of one dtype."""
    if len(tensors) < 2 or any(tensor.layout is not torch.strided for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    foreach_copy_(copies, list(tensors))
    return copies


_OVERWRITTEN = (
    "make_graphed_callables: backward for a second time through a call whose activations are gone, for a later call "
    "was replayed or the callable was closed. Pass retain_graph=True to the first backward: calls are eager until then."
)
_RECORDING = (
    "make_graphed_callables: backward while another thread captures a callable. The two would use one workspace of "
    "cuBLAS at the same time. Call each callable once in each layout before threads share the device."
)
_MODIFIED = (
    "make_graphed_callables: a parameter or buffer that backward needs has been modified by an inplace operation since "
    "the forward pass. Step the optimizer after backward."
)
