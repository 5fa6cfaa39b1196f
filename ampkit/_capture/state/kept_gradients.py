"""The memory in which a step keeps gradients between calls. Backward may make them there, unless others see them."""

from dataclasses import dataclass, field

from torch import Tensor

from ..._torch.tensors.tensors import shares_storage_with_none, storage_address
from ..keys.placement import place_of


@dataclass(eq=False)
class KeptGradients:
    """The tensors in which gradients are kept, by parameter.

    Backward may get the memory of such a tensor for the gradient. If somebody has that gradient by the end of the call
    (a hook that keeps it, `torch.autograd.grad`), the memory is left to him.
    """

    _by_param: dict[Tensor, Tensor] = field(default_factory=dict)
    _taken: set[Tensor] = field(default_factory=set)  # parameters whose memory was given to backward

    def add(self, param: Tensor, kept: Tensor) -> None:
        """Take note of the tensor in which a gradient is kept."""
        self._by_param[param] = kept

    def remove_others(self, params: set[Tensor]) -> None:
        """Forget all parameters but these."""
        self._by_param = {param: kept for param, kept in self._by_param.items() if param in params}
        self._taken &= params

    def take(self, param: Tensor, grad: Tensor) -> Tensor | None:
        """Return a tensor in which this gradient can be made and kept; None if it must have memory of its own."""
        kept = self._by_param.get(param)
        if kept is None or param.grad is not None:
            return None
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
        if grad is not None and storage_address(grad) == storage_address(kept):
            same = (grad.shape, grad.stride(), grad.data_ptr()) == (kept.shape, kept.stride(), kept.data_ptr())
            param.grad = kept if same else grad
        del grad  # another reference may be left
        if shares_storage_with_none(kept):
            return False
        del self._by_param[param]
        return True
