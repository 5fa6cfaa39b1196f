"""The scheduler that a step was given: stepped behind each optimizer step, and by nobody else."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._errors import AmpkitWarning
from .._user_line import users_level
from .arguments import Scheduler

_STEPS = 3  # in a row that the user's loop has stepped the scheduler before, until a warning says so


@dataclass(eq=False)
class Schedule:
    """Steps a scheduler, and warns once if the loop around the step does so too: the rate would fall twice as fast."""

    scheduler: Scheduler
    where: str = "graphed_step"  # what messages call the step
    _left: float | None = None  # its count of steps where this object has left it
    _stepped_elsewhere: int = 0  # how many times in a row it had moved on since

    def step(self) -> None:
        """Step the scheduler. Sync: none."""
        count = self._count()
        moved = None not in (count, self._left) and count > self._left  # type: ignore[operator]  # neither is None
        self._stepped_elsewhere = self._stepped_elsewhere + 1 if moved else 0
        if self._stepped_elsewhere == _STEPS:
            warnings.warn(
                f"{self.where}(scheduler={type(self.scheduler).__name__}): your loop steps the scheduler too, before "
                f"each of the last {_STEPS} optimizer steps. The step does this itself. Leave out scheduler.step(), or "
                "make the step without scheduler=.",
                AmpkitWarning,
                stacklevel=users_level(),
            )
        self.scheduler.step()
        self._left = self._count()

    def is_moved_by(self, stepped: Sequence[torch.optim.Optimizer]) -> bool:
        """Return whether one of these optimizers is the scheduler's. If that does not tell its own, each one is."""
        own = getattr(self.scheduler, "optimizer", None)
        groups = getattr(own, "param_groups", None)
        return any(groups is None or optimizer.param_groups is groups for optimizer in stepped)

    def _count(self) -> float | None:
        count = getattr(self.scheduler, "last_epoch", None)
        return count if isinstance(count, int | float) else None
