"""The learning rates of several optimizer steps to come, in memory that a graph reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch.tensors.modes import without_dispatch_modes


class RateTable:
    """A tensor with a row per step and a column per param group.

    Args:
        steps: how many rows.
        groups: how many columns.
        device: of the parameters.
        dtype: what the optimizer reads a rate in.

    Attributes:
        rows: the rate of each group, by step: tensors of shape () in the memory of the table.
    """

    def __init__(self, steps: int, groups: int, device: torch.device, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            self._table = torch.zeros(steps, groups, _APART // dtype.itemsize, dtype=dtype, device=device)
            self.rows: list[list[Tensor]] = [[self._table[i, j, 0] for j in range(groups)] for i in range(steps)]
        self._filled: list[list[float]] = []  # what the first rows have; [] if that is not known
        self._new: list[list[float]] = []
        self._on_device = False  # whether a rate of the new rows was copied on the device

    def begin(self) -> None:
        """Begin with new rates for the first steps."""
        self._new, self._on_device = [], False

    def add(self, rates: Sequence[float | Tensor | None], steps: int = 1) -> None:
        """Add the rates of the next steps. A tensor on the device is copied now, because it may change after this.

        Sync: none.
        """
        done = len(self._new)
        if _FLOATS.issuperset(map(type, rates)):
            self._new += [[*rates]] * steps  # type: ignore[list-item]  # floats
            return
        for j, rate in enumerate(rates):
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._on_device, self._filled = True, []
                self._table[done : done + steps, j, 0].copy_(rate.detach().reshape(()).expand(steps))
        self._new += [[_number(rate) for rate in rates]] * steps

    def write(self) -> None:
        """Bring the table up to date with the rates that were added: one copy, none if nothing changed. Sync: none."""
        if self._on_device:
            self._write_cells()
        elif self._filled[: len(self._new)] != self._new:
            rest, self._filled = self._filled[len(self._new) :], []
            on_cuda = self._table.is_cuda
            with without_dispatch_modes():
                # In new pinned memory each time: the copy of the last rates may not have been done yet.
                apart = self._table.shape[2]
                cells = [[[rate] * apart for rate in row] for row in self._new]
                rates = torch.tensor(cells, dtype=self._table.dtype, device="cpu", pin_memory=on_cuda)
                self._table[: len(self._new)].copy_(rates, non_blocking=True)
            self._filled = self._new + rest  # after the copy, because an interrupt may come between the two

    def _write_cells(self) -> None:
        """Write the numbers among rates of which others are on the device already."""
        for row, numbers in zip(self.rows, self._new, strict=False):
            for cell, number in zip(row, numbers, strict=True):
                if number is not _NO_NUMBER:
                    cell.fill_(number)


def _number(rate: float | Tensor | None) -> float:
    """Return a rate on the host as a number, nan for none or one on the device."""
    if rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu"):
        return _NO_NUMBER
    return float(rate)


_APART = 16  # bytes from one rate to the next: compiled code copies an input that is less aligned (inductor, ALIGNMENT)
_NO_NUMBER = float("nan")
_FLOATS = frozenset((float,))
