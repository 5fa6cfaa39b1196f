"""Checks of the loss scaler and the scheduler that `graphed_step` gets."""

from typing import Any, Protocol

import torch

from .._arguments import wrong
from .._optimizer.scaler import GradScaler
from .._precision.policy import Policy


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


def read_scaler(scaler: GradScaler | None, policy: Policy | None, device: torch.device) -> GradScaler:
    """Return the given scaler, or one that is enabled if the policy needs it. Raise a `ValueError` if it is torch's."""
    if scaler is None:
        return GradScaler(device.type, enabled=policy is not None and policy.needs_scaling)
    if not isinstance(scaler, GradScaler):
        raise ValueError(
            f"graphed_step(scaler={type(scaler).__module__}.{type(scaler).__name__}): it waits for the device. Pass an "
            "ampkit.GradScaler, which takes the same arguments and loads the same state_dict."
        )
    return scaler
