"""Whether every step is skipped: counters are copied to the host now and then, and read once they have arrived."""

from typing import NamedTuple

import torch
from torch import Tensor

from .._torch.tensors.modes import without_dispatch_modes

IN_A_ROW = 50
ALL_SKIPPED = (
    "GradScaler: the last {} optimizer steps were all skipped, because a gradient was not finite in each, so the "
    "weights do not change any more. No scale helps where the loss or a weight is nan or inf: look at them, or at the "
    "first layer that overflows (ampkit.debug.numerics)."
)
_EVERY = 25  # calls per copy, which takes two transfers of 8 bytes


class _CountersCopy(NamedTuple):
    counts: Tensor  # of steps, and of skipped ones; pinned if they come from a GPU
    arrived: torch.cuda.Event | None


class SkipWatch:
    """Follows the two counters of a scaler without waiting for the device that they are on."""

    def __init__(self) -> None:
        self._calls = 0
        self._copy: _CountersCopy | None = None
        self._base: tuple[float, float] | None = None  # both counts when a step was last seen that was not skipped
        self._told = False

    def look(self, steps: Tensor, skipped: Tensor) -> int:
        """Return how many steps in a row were skipped, once, when they are `IN_A_ROW` or more; else 0. Sync: none."""
        if self._told or steps.device.type not in ("cpu", "cuda"):
            return 0
        self._calls += 1
        in_a_row = self._read()
        if self._copy is None and self._calls % _EVERY == 1:
            with without_dispatch_modes():  # the copy is no part of the step, which such a mode may be recording
                self._copy = _copied(steps, skipped)
        self._told = in_a_row >= IN_A_ROW
        return in_a_row if self._told else 0

    def _read(self) -> int:
        """Return how many steps in a row were skipped up to the last copy, 0 if no new copy has arrived."""
        if self._copy is None or not (self._copy.arrived is None or self._copy.arrived.query()):
            return 0
        steps, skipped = self._copy.counts.tolist()
        self._copy = None
        base = self._base
        if base is None or steps < base[0] or steps - base[0] != skipped - base[1]:
            self._base = steps, skipped
            return 0
        return int(steps - base[0])


def _copied(steps: Tensor, skipped: Tensor) -> _CountersCopy:
    on_cuda = steps.is_cuda
    counts = torch.empty(2, dtype=torch.float64, pin_memory=on_cuda)
    for place, count in zip(counts, (steps, skipped), strict=True):
        place.copy_(count, non_blocking=True)
    if not on_cuda:
        return _CountersCopy(counts, None)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(steps.device))
    return _CountersCopy(counts, arrived)
