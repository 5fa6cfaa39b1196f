"""The batches that a variant trains on, and the times and memory measured in between, the same for each variant."""

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Batch

MIB = 2**20
_SETTLED = 6  # stacks: the first ones warm up and capture, one by one and then together


class Plan(NamedTuple):
    """How thoroughly to measure."""

    repeats: int = 7  # timed blocks of steps
    seconds: float = 0.3  # approximate length of a block
    checked: int = 20  # first steps whose losses are compared; they include warm-up, compilation and capture
    profile: bool = True  # whether to measure how long kernels run
    limit: float = math.inf  # seconds from the start of a run, after which no variant is begun
    compiled_code: Path | None = None  # where compiled code is kept, and found by later runs; None compiles everything


class TimedLoop:
    """Yields the batches for one variant, and measures time and memory in between.

    A loop asks for the next batch after its step. So everything in the loop is measured, whoever wrote the loop. For a
    loop that does several steps per call, that many batches are yielded `together`, stacked. For the attributes see
    `Row`; `ms` has one number per repeat.
    """

    def __init__(self, batches: Sequence[Batch], device: torch.device, plan: Plan, together: int = 1) -> None:
        self._batches = stacks(batches, together)
        self._together = together
        self._device = device
        self._plan = plan
        self._losses: list[Tensor] = []
        self._start = self._now()
        self.ms: list[float] = []
        self.setup_s = 0.0
        self.peak_mib: float | None = None
        self.setup_peak_mib: float | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._base = torch.cuda.memory_allocated(device)  # what steps need is counted beyond this

    def on_loss(self, loss: Tensor) -> None:
        """Take the loss of a step, or of the steps that are done together."""
        if len(self._losses) < self._plan.checked:
            losses = [loss] if self._together == 1 else loss.unbind()[: self._plan.checked - len(self._losses)]
            self._losses += [each.detach().clone() for each in losses]  # the next replay may overwrite them

    def steps(self) -> Iterator[Batch]:
        """Yield the batches of the checked steps, of a warm-up, and of the timed blocks."""
        times = [self._now()]
        checked = self._plan.checked
        if self._together > 1:
            checked = max(_SETTLED, -(-checked // self._together))
        for batch in self._take(checked):
            yield batch
            times.append(self._now())
        steps = [after - before for before, after in itertools.pairwise(times)]
        typical = statistics.median(steps[len(steps) // 2 :])
        self.setup_s = max(0.0, times[-1] - self._start - typical * len(steps))
        # Steps to fill the driver's queue and let clock rates settle.
        yield from self._take(max(1, int(min(20, self._plan.seconds / 3 / typical))))
        self._now()
        if self._device.type == "cuda":
            self.setup_peak_mib = (torch.cuda.max_memory_allocated(self._device) - self._base) / MIB
            torch.cuda.reset_peak_memory_stats(self._device)
        n = max(5, int(min(1000, self._plan.seconds / typical)))
        for _ in range(self._plan.repeats):
            start = self._now()
            yield from self._take(n)
            self.ms.append((self._now() - start) / (n * self._together) * 1e3)
        if self._device.type == "cuda":
            # The pools of graphs count with their free memory, which only the graphs can use.
            segments = torch.cuda.memory_snapshot(include_traces=False)
            pools = [part for part in segments if tuple(part["segment_pool_id"]) != (0, 0)]
            free = sum(part["total_size"] - part["allocated_size"] for part in pools)
            self.peak_mib = (torch.cuda.max_memory_allocated(self._device) - self._base + free) / MIB

    @property
    def ends(self) -> range:
        """The last step of each checked pass over the batches; of each half of the steps if one pass is longer."""
        n = max(1, min(len(self._batches), self._plan.checked // 2))
        return range(n + self._plan.checked % n, self._plan.checked + 1, n)

    @property
    def losses(self) -> list[float]:
        """The mean loss of each of these passes. Waits for the device."""
        n = self.ends.step
        return [float(torch.stack([loss.float() for loss in self._losses[end - n : end]]).mean()) for end in self.ends]

    def checked_steps(self) -> Iterator[Batch]:
        """Yield the batches of the checked steps alone."""
        return self._take(self._plan.checked)

    def _take(self, n: int) -> Iterator[Batch]:
        return (self._batches[i % len(self._batches)] for i in range(n))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def stacks(batches: Sequence[Batch], together: int) -> Sequence[Batch]:
    """Return as many stacks as there are batches, going round these in order. One at a time are the batches."""
    if together == 1:
        return batches
    order = (batches[i % len(batches)] for i in itertools.count())
    return [
        tuple(torch.stack(leaves) for leaves in zip(*itertools.islice(order, together), strict=True)) for _ in batches
    ]
