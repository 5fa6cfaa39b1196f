"""Figures of a step for a logger, read without a wait: copies of tensors on the device, and what the host knows."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from .._capture.engine.engine import Engine
from .._capture.graph.timing import Clock, milliseconds
from .._optimizer.scaler import GradScaler


class StepMetrics:
    """Reads the figures of a step, and measures the time per call from one reading to the next."""

    def __init__(self, engine: Engine, scaler: GradScaler, device: torch.device) -> None:
        self._engine = engine
        self._scaler = scaler
        self._clock = Clock(device if device.type == "cuda" else None)
        self._past: tuple[Any, int] | None = None  # the newest mark of a reading that the device has reached, and calls
        self._ahead: deque[tuple[Any, int]] = deque()  # the later ones
        self._ms: float | None = None

    def figures(self) -> dict[str, Tensor | float]:
        """Return the figures by name, see `GraphedStep.metrics`. To be called in the step's turn. Sync: none."""
        figures: dict[str, Tensor | float] = {}
        known = self._scaler.tensors() if self._scaler.is_enabled() else {}
        if "scale" in known:
            figures["loss_scale"] = known["scale"].clone()
        if "skipped" in known:
            figures["skipped_steps"] = known["skipped"].long()  # counted in float64, so that this is a copy
        if self._scaler.grad_norm is not None:
            figures["grad_norm"] = self._scaler.grad_norm.clone()
        replayed, calls = self._engine.counts()
        figures["replay_share"] = replayed / max(calls, 1)
        # Mark this reading, and take the time between the two newest that the device has reached.
        self._ahead.append((self._clock.now(), calls))
        while self._ahead and self._clock.is_past(self._ahead[0][0]):
            before, self._past = self._past, self._ahead.popleft()
            if before is not None and self._past[1] > before[1]:
                self._ms = milliseconds(before[0], self._past[0]) / (self._past[1] - before[1])
        if self._ms is not None:
            figures["ms_per_step"] = self._ms
        return figures
