"""Which learning-rate schedulers a step can have."""

from typing import Any, Protocol

import torch

from .._arguments import wrong


class Scheduler(Protocol):
    """A learning-rate scheduler of torch.optim.lr_scheduler that needs no metric."""

    def step(self) -> None:
        """Set the next learning rate."""


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise a `ValueError` unless the scheduler can be stepped without arguments and works on this optimizer."""
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "graphed_step(scheduler=ReduceLROnPlateau): it needs a metric; call its step(metric) yourself."
        )
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        expected = "an object with a method step(), as in torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)"
        raise wrong("graphed_step", "scheduler", scheduler, f"{expected}, or None")
    other = getattr(scheduler, "optimizer", optimizer)
    if isinstance(other, torch.optim.Optimizer) and other.param_groups is not optimizer.param_groups:
        raise ValueError(
            f"graphed_step(scheduler={type(scheduler).__name__}): it was made for another {type(other).__name__}, so "
            "it would not change the rates of this optimizer. Make it from the optimizer that you pass."
        )
