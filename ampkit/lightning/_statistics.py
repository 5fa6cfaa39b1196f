"""Loss scale, skipped steps, gradient norm and speed for the loggers, read late enough that nothing waits."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._capture.graph.timing import Clock, milliseconds
from .._optimizer.scaler import GradScaler

_MOST_PENDING = 64  # each holds a few bytes of pinned memory


class TrainingStatistics(NamedTuple):
    """The statistics after one optimizer step, by name. A value that is not known is left out."""

    step: int  # its number
    values: dict[str, float]


@dataclass(eq=False)
class StatisticsReader:
    """Copies statistics from the device in the background: `start` begins a copy and returns the earlier ones.

    The loggers of a Trainer need numbers. `Trainer.log_metrics` and each logger would call `.item()` on a tensor, which
    waits for all steps that were launched before. So tensors are copied to pinned memory, and given to the loggers once
    an event says that the copy is done: one interval later, or more if the device is that far behind.
    """

    _device: torch.device
    _processes: int  # how many train on batches of this size
    samples: int = 0  # that this process has trained on since the interval began, counted by the caller
    batches: int = 0  # that these samples were in
    interval_start: Any = None  # a mark of the clock; None while the time does not count; the caller may set it to None
    _pending: "deque[_PendingStatistics]" = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._clock = Clock(self._device if self._device.type == "cuda" else None)

    def start_timing(self) -> None:
        """Begin an interval now."""
        self.interval_start, self.samples, self.batches = self._clock.now(), 0, 0

    def start(
        self, step: int, scaler: GradScaler, grad_norm: Tensor | None, numbers: dict[str, float]
    ) -> list[TrainingStatistics]:
        """Begin to read the statistics of a step, `numbers` among them. Return earlier ones that have arrived by now.

        Sync: none, unless the device is more than `_MOST_PENDING` intervals behind.
        """
        arrived = []
        while self._pending and (len(self._pending) > _MOST_PENDING or self._pending[0].has_arrived()):
            arrived.append(self._pending.popleft().read())
        now = self._clock.now()
        known = scaler.tensors() if scaler.is_enabled() else {}
        tensors = {"loss_scale": known.get("scale"), "skipped_steps": known.get("skipped"), "grad_norm": grad_norm}
        interval = None
        if self.interval_start is not None:
            interval = _Interval(self.interval_start, now, self.samples * self._processes, self.batches)
        known_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._pending.append(_PendingStatistics(step, known_tensors, numbers, interval))
        self.interval_start, self.samples, self.batches = now, 0, 0
        return arrived

    def finish(self) -> list[TrainingStatistics]:
        """Return all statistics that `start` has not returned yet. Sync: waits for their copies."""
        pending, self._pending = self._pending, deque()
        return [statistics.read() for statistics in pending]


class _Interval(NamedTuple):
    """From one reading to the next: when it began and ended, and what all processes, and this one, did in it."""

    start: Any  # a mark of the clock, as the next
    end: Any
    samples: int
    batches: int


class _PendingStatistics:
    """Statistics on their way from the device."""

    def __init__(
        self, step: int, tensors: dict[str, Tensor], numbers: dict[str, float], interval: _Interval | None
    ) -> None:
        self._step = step
        self._names = list(tensors)
        self._numbers = numbers
        self._interval = interval
        self._values = torch.empty(0)
        if tensors:
            packed = torch.stack([tensor.detach().double() for tensor in tensors.values()])
            self._values = torch.empty_like(packed, device="cpu", pin_memory=packed.is_cuda)
            self._values.copy_(packed, non_blocking=True)
        self._copied = torch.cuda.Event() if tensors and packed.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def has_arrived(self) -> bool:
        """Return whether `read` waits for nothing."""
        timed = self._interval is None or Clock.is_past(self._interval.end)
        return timed and (self._copied is None or self._copied.query())

    def read(self) -> TrainingStatistics:
        if self._copied is not None:
            self._copied.synchronize()
        values = dict(zip(self._names, self._values.tolist(), strict=True))
        if self._interval is not None:
            seconds = max(milliseconds(self._interval.start, self._interval.end) / 1000, 1e-9)
            values["samples_per_second"] = self._interval.samples / seconds
            if self._interval.batches:
                values["ms_per_step"] = 1000 * seconds / self._interval.batches
        return TrainingStatistics(self._step, {**values, **self._numbers})
