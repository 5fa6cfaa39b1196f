"""What a variant trains on and when its time is taken: the same batches, blocks and memory count for each."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cases import Batch

MIB = 2**20


class Plan(NamedTuple):
    """How thoroughly to measure.

    Attributes:
        repeats: blocks of steps that are timed.
        seconds: length of a block, about.
        checked: steps from the start whose losses are compared. Warm-up, compilation and capture lie in them.
        profile: whether to measure how long kernels run.
    """

    repeats: int = 7
    seconds: float = 0.3
    checked: int = 20
    profile: bool = True


class Session:
    """The batches that one variant trains on, in order, with the time taken in between.

    A loop asks for a batch when it has called its step on the one before: so this sees all of the loop from where a
    loader is, whoever wrote the loop.

    Attributes:
        ms: milliseconds per step, one number per repeat.
        setup_s: see `Row`.
        peak_mib: see `Row`. None without CUDA.
        setup_peak_mib: see `Row`. None without CUDA.
    """

    def __init__(self, batches: Sequence[Batch], device: torch.device, plan: Plan) -> None:
        self._batches = batches
        self._device = device
        self._plan = plan
        self._losses: list[Tensor] = []
        self._start = self._now()
        self._memory = _Memory(device)
        self.ms: list[float] = []
        self.setup_s = 0.0
        self.peak_mib: float | None = None
        self.setup_peak_mib: float | None = None

    def on_loss(self, loss: Tensor) -> None:
        """Take the loss of a step."""
        if len(self._losses) < self._plan.checked:
            self._losses.append(loss.detach().clone())  # the next replay of a graph overwrites it

    def steps(self) -> Iterator[Batch]:
        """Yield batches: the checked steps, each on its own; a warm-up; the timed blocks."""
        taken = [self._now()]
        for batch in self._take(self._plan.checked):
            yield batch
            taken.append(self._now())
        steps = [after - before for before, after in itertools.pairwise(taken)]
        typical = statistics.median(steps[len(steps) // 2 :])
        self.setup_s = max(0.0, taken[-1] - self._start - typical * len(steps))
        # The driver's queue fills, and clocks settle.
        yield from self._take(max(1, int(min(20, self._plan.seconds / 3 / typical))))
        self._now()
        self.setup_peak_mib = self._memory.restart()
        n = max(5, int(min(1000, self._plan.seconds / typical)))
        for _ in range(self._plan.repeats):
            start = self._now()
            yield from self._take(n)
            self.ms.append((self._now() - start) / n * 1e3)
        self.peak_mib = self._memory.peak_mib()

    @property
    def ends(self) -> range:
        """The last of the checked steps in each pass over the batches, or in each half where there are too many."""
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


class _Memory:
    """Device memory beyond what was allocated when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._base = 0
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._base = torch.cuda.memory_allocated(self._device)

    def restart(self) -> float | None:
        """Return the most that was allocated so far, in MiB, and begin again."""
        if self._device is None:
            return None
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return (most - self._base) / MIB

    def peak_mib(self) -> float | None:
        """Return the most that was in use since, in MiB, with what the pools of graphs hold but do not show."""
        if self._device is None:
            return None
        private = [
            part
            for part in torch.cuda.memory_snapshot(include_traces=False)
            if tuple(part["segment_pool_id"]) != (0, 0)
        ]
        hidden: int = sum(part["total_size"] - part["allocated_size"] for part in private)
        return (torch.cuda.max_memory_allocated(self._device) - self._base + hidden) / MIB
