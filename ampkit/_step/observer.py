"""What a training step tells somebody who watches its numbers, and when."""

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Observer(Protocol):
    """Somebody who measures in some of the steps. It must change no gradient and draw no random number.

    A step calls `begin`, then in each micro-batch of an observed step `observing`, in its last one `gradients`, and
    `stepped`. `observing` and `gradients` are captured: they must read nothing from the device, make no memory that
    outlives them, and write to `tensors` alone.
    """

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """Get ready for the steps of this model on this device. Raise a `ValueError` if it watches another model."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what observed steps write to, by the name that messages use. Called once, after `attach`."""

    def begin(self) -> bool:
        """Return whether the optimizer step that begins now is to be observed. On the host, outside of a capture."""

    def observing(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch."""

    def gradients(self, scale: Tensor | None) -> None:
        """Measure the gradients in `param.grad`, which are multiplied by `scale` and not clipped yet."""

    def stepped(self, skipped: Tensor | None) -> None:
        """Take note that an optimizer step was launched. On the host, outside of a capture.

        Args:
            skipped: how many steps the loss scale skipped so far, on the device; None without a loss scale.
        """
