"""Loss scale, skipped steps, gradient norm and speed in mid-training: read when the device has long passed them."""

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from .._optimizer.scaler import GradScaler


class Reading(NamedTuple):
    """What `Meter.take` returns: the state behind one optimizer step.

    Attributes:
        step: the number of that step.
        values: by name; what is not known is left out.
    """

    step: int
    values: dict[str, float]


class Meter:
    """Takes readings every so many steps without waiting for the device: each is handed out when the next is taken.

    Args:
        device: where the step computes.
        processes: how many train on batches of this size.
    """

    def __init__(self, device: torch.device, processes: int) -> None:
        self._device = device
        self._processes = processes
        self._samples = 0  # since the mark
        self._mark: _Mark | None = None
        self._taken: _Taken | None = None

    def count(self, samples: int) -> None:
        """Count the samples of a batch, at its end."""
        if self._mark is None:
            self._mark, self._samples = _Mark(self._device), 0
        else:
            self._samples += samples

    def restart(self) -> None:
        """Leave what comes now out of the speed: validation, or the time between epochs."""
        self._mark = None

    def take(
        self, step: int, scaler: GradScaler, grad_norm: Tensor | None, numbers: dict[str, float]
    ) -> Reading | None:
        """Start a reading, in which `numbers` are known, and return the one before, None if there is none.

        Sync: none that takes time.
        """
        before = self.finish()
        now = _Mark(self._device)
        known = scaler.tensors() if scaler.is_enabled() else {}
        tensors = {"loss_scale": known.get("scale"), "skipped_steps": known.get("skipped"), "grad_norm": grad_norm}
        self._taken = _Taken(
            step,
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            numbers,
            (self._mark, now, self._samples * self._processes) if self._mark is not None else None,
        )
        self._mark, self._samples = now, 0
        return before

    def finish(self) -> Reading | None:
        """Return the last reading that was started. Waits for the device to get there, which it mostly has."""
        taken, self._taken = self._taken, None
        return None if taken is None else taken.read()


class _Taken:
    """A reading under way."""

    def __init__(
        self,
        step: int,
        tensors: dict[str, Tensor],
        numbers: dict[str, float],
        interval: "tuple[_Mark, _Mark, int] | None",
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

    def read(self) -> Reading:
        if self._copied is not None:
            self._copied.synchronize()
        values = dict(zip(self._names, self._values.tolist(), strict=True))
        if self._interval is not None:
            start, end, samples = self._interval
            values["samples_per_second"] = samples / max(end.seconds_since(start), 1e-9)
        return Reading(self._step, {**values, **self._numbers})


class _Mark:
    """A point in time: on a GPU when it gets there, not when the host asked it to."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._seconds = math.nan if self._event else time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, before: "_Mark") -> float:
        if self._event is None or before._event is None:
            return self._seconds - before._seconds
        self._event.synchronize()
        return float(before._event.elapsed_time(self._event)) / 1000
