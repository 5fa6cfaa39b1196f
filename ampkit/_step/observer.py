"""What a training step calls on an object that measures its gradients and activations, and when."""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Observer(Protocol):
    """Measures in some of the steps. It must change no gradient and draw no random number.

    Each optimizer step begins with `begin` and ends with `stepped`. An observed one enters `observing` in each of its
    micro-batches, and calls `gradients` in the last one. These two are captured. So they must read nothing from the
    device, write to `tensors` alone, and leave no other tensor that is read later.
    """

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """Get ready for the steps of this model. Raise a `ValueError` if it was made for another one."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what observed steps write to, by the name that messages use. Called once, after `attach`."""

    def begin(self) -> bool:
        """Return whether to observe the optimizer step that begins now. Called on the host, outside of a capture."""

    def observing(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch."""

    def gradients(self, scale: Tensor | None) -> None:
        """Measure the gradients in `param.grad`, which are multiplied by `scale` and not clipped yet."""

    def stepped(self, skipped: Tensor | None) -> None:
        """Take note that an optimizer step was launched. Called on the host, outside of a capture.

        Args:
            skipped: how many steps were skipped so far, a tensor on the device; None if there is no loss scale.
        """

    def observe_next(self) -> bool:
        """Observe the next optimizer step, unless ranks might not agree on that. Return whether it will be."""

    def first_nonfinite(self, since: int) -> str:
        """Return in words where a value was first not finite and reached a gradient; "" if that is not known.

        Steps before `since` do not count; the first one is 0. Waits for the device.
        """
