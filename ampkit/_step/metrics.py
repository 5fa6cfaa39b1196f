"""Figures of a step for a logger, read without a wait: copies of tensors on the device, and what the host knows."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._capture.engine.engine import Engine
from .._capture.graph.timing import Clock, milliseconds
from .._optimizer.scaler import GradScaler


@dataclass(eq=False)
class StepMetrics:
    """Reads the figures of a step, and measures the time per call from one reading to the next."""

    _engine: Engine
    _scaler: GradScaler
    _clock: Clock
    _past: tuple[Any, int] | None = None  # the newest mark of a reading that the device has reached, and calls
    _ahead: deque[tuple[Any, int]] = field(default_factory=deque)  # the later ones
    _ms: float | None = None

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
