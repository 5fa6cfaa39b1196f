"""Loss scale, skipped steps, gradient norm and speed for the loggers, read late enough that nothing waits."""

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from .._optimizer.scaler import GradScaler


class TrainingStatistics(NamedTuple):
    """The statistics after one optimizer step.

    Attributes:
        step: the number of that step.
        values: by name. A value that is not known is left out.
    """

    step: int
    values: dict[str, float]


class StatisticsReader:
    """Copies statistics from the device in the background: `start` begins a copy and returns the previous statistics.

    Args:
        device: where the step computes.
        processes: how many processes train on batches of this size.

    Attributes:
        samples: how many samples this process has trained on since the interval began. The caller counts them.
        interval_start: when the interval began; None while the time does not count.
    """

    def __init__(self, device: torch.device, processes: int) -> None:
        self._device = device
        self._processes = processes
        self.samples = 0
        self.interval_start: _Timestamp | None = None
        self._pending: _PendingStatistics | None = None

    def start_timing(self) -> None:
        """Begin an interval now."""
        self.interval_start, self.samples = _Timestamp(self._device), 0

    def restart_timing(self) -> None:
        """Exclude the time until the end of the next batch from the speed."""
        self.interval_start = None

    def start(
        self, step: int, scaler: GradScaler, grad_norm: Tensor | None, numbers: dict[str, float]
    ) -> TrainingStatistics | None:
        """Begin to read the statistics of a step, `numbers` among them. Return the previous ones, None if none.

        Sync: none that takes time.
        """
        previous = self.finish()
        now = _Timestamp(self._device)
        known = scaler.tensors() if scaler.is_enabled() else {}
        tensors = {"loss_scale": known.get("scale"), "skipped_steps": known.get("skipped"), "grad_norm": grad_norm}
        start = self.interval_start
        self._pending = _PendingStatistics(
            step,
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            numbers,
            (start, now, self.samples * self._processes) if start is not None else None,
        )
        self.interval_start, self.samples = now, 0
        return previous

    def finish(self) -> TrainingStatistics | None:
        """Return the statistics that `start` began last, None if none. Waits for their copy, mostly done by then."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.read()


class _PendingStatistics:
    """Statistics on their way from the device."""

    def __init__(
        self,
        step: int,
        tensors: dict[str, Tensor],
        numbers: dict[str, float],
        interval: "tuple[_Timestamp, _Timestamp, int] | None",
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

    def read(self) -> TrainingStatistics:
        if self._copied is not None:
            self._copied.synchronize()
        values = dict(zip(self._names, self._values.tolist(), strict=True))
        if self._interval is not None:
            start, end, samples = self._interval
            values["samples_per_second"] = samples / max(end.seconds_since(start), 1e-9)
        return TrainingStatistics(self._step, {**values, **self._numbers})


class _Timestamp:
    """A point in time. On a GPU it is when the GPU gets there, not when the host queued it."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = math.nan if self._event else time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, before: "_Timestamp") -> float:
        if self._event is None or before._event is None:
            return self._seconds - before._seconds
        self._event.synchronize()
        return float(before._event.elapsed_time(self._event)) / 1000
