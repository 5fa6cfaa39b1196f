"""The memory in which a step keeps gradients. Backward may make them there, unless others see them."""

from dataclasses import dataclass, field

from torch import Tensor

from ..._torch.tensors.tensors import move_memory, shares_storage_with_none, storage_address
from ..keys.placement import place_of


@dataclass(eq=False)
class KeptGradients:
    """The tensors in which gradients are kept, by parameter.

    Backward may get the memory of such a tensor for the gradient. If somebody has that gradient by the end of the call
    (a hook that keeps it, `torch.autograd.grad`), the memory is left to him.

    A gradient that is used in the call that makes it, and not kept from one micro-batch to the next (`lasts`), may stay
    in the pool of the graph that makes it. Activations lie there in forward.
    """

    lasts: bool
    _by_param: dict[Tensor, Tensor | None] = field(default_factory=dict)  # None: others have seen it
    _in_pool: set[Tensor] = field(default_factory=set)  # parameters
    _taken: set[Tensor] = field(default_factory=set)  # parameters whose memory was given to backward

    def add(self, param: Tensor, kept: Tensor) -> None:
        """Take note of the tensor in which a gradient is kept."""
        self._by_param[param] = kept
        self._in_pool.discard(param)

    def get(self, param: Tensor, default: Tensor | None) -> Tensor | None:
        """Return the tensor in which the gradient of a parameter is kept, `default` if others have seen it."""
        kept = self._by_param.get(param)
        return default if kept is None else kept

    def remove_others(self, params: set[Tensor]) -> None:
        """Forget all parameters but these."""
        self._by_param = {param: kept for param, kept in self._by_param.items() if param in params}
        self._taken &= params
        self._in_pool &= params

    def leave_pools(self) -> list[Tensor]:
        """Forget the tensors that lie in pools of graphs, and return them."""
        left = [(param, kept) for param in self._in_pool if (kept := self._by_param[param]) is not None]
        for param, _ in left:
            self._in_pool.remove(param)
            del self._by_param[param]
        return [kept for _, kept in left]

    def take(self, param: Tensor, grad: Tensor, made: Tensor | None) -> Tensor | None:
        """Return a tensor in which this gradient can be made and kept; None if it must have memory of its own.

        `made` is a tensor that has the memory of the gradient in the pool of a graph, where it may stay.
        """
        is_whole = made is not None and made.stride() == param.stride()  # as autograd makes gradients
        if made is not None and is_whole and not self.lasts and param not in self._by_param:
            self._by_param[param] = made
            self._in_pool.add(param)
        kept = self._by_param.get(param)
        if kept is None or param.grad is not None:
            return None
        if param in self._in_pool and kept.data_ptr() != grad.data_ptr():
            return None  # as long as backward runs, activations may lie there
        fits = (kept.shape, kept.stride(), kept.dtype) == (grad.shape, grad.stride(), grad.dtype)
        # Not if autograd, or somebody else, has another gradient there.
        if not fits or place_of(kept) != place_of(grad) or not shares_storage_with_none(kept):
            return None
        self._taken.add(param)
        return kept.detach()

    def leave(self, param: Tensor) -> bool:
        """Return whether somebody else sees the memory in which the gradient is to be kept. If so, forget it.

        Otherwise, if the gradient was made there, the parameter has the tensor that keeps it now.
        """
        if param not in self._taken:
            return False
        self._taken.remove(param)
        kept, grad = self._by_param[param], param.grad
        assert kept is not None  # or it was not taken
        if grad is not None and storage_address(grad) == storage_address(kept):
            same = (grad.shape, grad.stride(), grad.data_ptr()) == (kept.shape, kept.stride(), kept.data_ptr())
            param.grad = kept if same else grad
        del grad  # another reference may be left
        if shares_storage_with_none(kept):
            return False
        if param in self._in_pool:
            move_memory(kept)
        self._by_param[param] = None
        return True
