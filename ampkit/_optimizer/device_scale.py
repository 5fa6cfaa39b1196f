"""The loss scale and its counters as tensors on the device: when they are made, what they count, who watches them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler as upstream

from .._errors import AmpkitWarning
from .._torch.device.streams import is_capturing
from .._torch.tensors.modes import without_dispatch_modes
from .._torch.tensors.tensors import foreach_add_
from .._undo import Undo, replace
from .._user_line import users_level
from .scale_rule import ScaleLimits, read_limits

_IN_A_ROW = 50
_ALL_SKIPPED = (
    "GradScaler: the last {} optimizer steps were all skipped, because a gradient was not finite in each, so the "
    "weights do not change any more. No scale helps where the loss or a weight is nan or inf: look at them, or at the "
    "first layer that overflows (ampkit.debug.numerics)."
)
_EVERY = 25  # calls per copy, which takes two transfers of 8 bytes


class DeviceScale(upstream.GradScaler):
    """The part of a `GradScaler` that keeps the scale and its counters on the device. Users see `GradScaler` only."""

    _all_skipped = _ALL_SKIPPED

    def __init__(self, given: dict[str, Any], limits: ScaleLimits) -> None:
        super().__init__(**given)
        self._limits = read_limits(limits, self._init_scale) if self._enabled else limits
        self.found_inf: Tensor | None = None
        self.steps: Tensor | None = None
        self.skipped: Tensor | None = None
        self._patience: Tensor | None = None  # overflows left until the scale backs off
        self._init_counts = (0.0, 0.0)
        self._init_patience = self._limits.hysteresis
        self._skip_watch: SkipWatch | None = SkipWatch()

    def rule(self) -> dict[str, Any]:
        """Return the numbers that decide how the scale moves, by name. They are constants in a captured step."""
        return {
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            **self._limits._asdict(),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return scale and counters by name, {} before the first `scale`. Aliasing: the live tensors."""
        named = {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "steps": self.steps,
            "skipped": self.skipped,
            "patience": self._patience,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        # float64, so that `+= found_inf` is one kernel and counts are exact to 2**53.
        self.steps, self.skipped = (torch.full((), n, dtype=torch.float64, device=dev) for n in self._init_counts)
        self._patience = torch.full((), self._init_patience, dtype=torch.int32, device=dev)
        super()._lazy_init_scale_growth_tracker(dev)  # last, so that whoever sees a scale finds the others too

    def materialize(self, device: torch.device) -> None:
        """Create scale and counters on `device` now rather than in the first `scale`.

        If a captured step made them, each replay would set the scale back to its first value.
        """
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def _count(self) -> None:
        if self.found_inf is None:  # of a disabled scaler
            return
        assert self.steps is not None  # made with the scale, as the next
        assert self.skipped is not None
        foreach_add_([self.steps, self.skipped], [torch.ones_like(self.found_inf), self.found_inf])

    def watch_skips(self) -> None:
        """Warn, once, if the last 50 steps were all skipped. `update` calls this, and a graphed step after a replay.

        Sync: none. The counters are copied to the host every 25 calls, and read in a later call.
        """
        if self._skip_watch is None or self.steps is None or self.skipped is None or is_capturing():
            return
        if count := self._skip_watch.look(self.steps, self.skipped):
            warnings.warn(self._all_skipped.format(count), AmpkitWarning, stacklevel=users_level())

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Context in which `update` does not call `watch_skips`, so that it runs the same operations in each call."""
        with Undo() as undo:
            replace(undo, self, "_skip_watch", None)
            yield

    def forgetting(self) -> Callable[[], None]:
        """Return a function that makes the scaler forget every `step` and `unscale_` after this call.

        A training step that is interrupted calls that function, because no `update` follows there.
        """
        before = {key: dict(state) for key, state in self._per_optimizer_states.items()} if self._enabled else {}

        def forget() -> None:
            if self._enabled:
                self._per_optimizer_states.clear()
                self._per_optimizer_states.update(before)

        return forget


def copied_counts(steps: Tensor, skipped: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy of two counters to the host; return where it arrives, and the event behind it. Sync: none.

    The copy is pinned if the counters are on a GPU. Without one it has arrived at once, and there is no event.
    """
    with without_dispatch_modes():  # the copy is no part of the step, which such a mode may be recording
        counts = torch.empty(2, dtype=torch.float64, pin_memory=steps.is_cuda)
        for place, count in zip(counts, (steps, skipped), strict=True):
            place.copy_(count, non_blocking=True)
        arrived = torch.cuda.Event() if steps.is_cuda else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(steps.device))
    return counts, arrived


@dataclass(eq=False)
class SkipWatch:
    """Follows the two counters of a scaler without waiting for the device that they are on."""

    _calls: int = 0
    # Steps and skipped ones, pinned if they come from a GPU, and the event after which they have arrived from there.
    _copy: tuple[Tensor, torch.cuda.Event | None] | None = None
    _base: tuple[float, float] | None = None  # both counts when a step was last seen that was not skipped
    _told: bool = False

    def look(self, steps: Tensor, skipped: Tensor) -> int:
        """Return how many steps in a row were skipped, once, when they are `_IN_A_ROW` or more; else 0. Sync: none."""
        if self._told or steps.device.type not in ("cpu", "cuda"):
            return 0
        self._calls += 1
        in_a_row = 0  # up to the last copy
        counts, arrived = self._copy or (None, None)
        if counts is not None and (arrived is None or arrived.query()):
            done, left_out = counts.tolist()
            self._copy = None
            base = self._base
            if base is None or done < base[0] or done - base[0] != left_out - base[1]:
                self._base = done, left_out
            else:
                in_a_row = int(done - base[0])
        if self._copy is None and self._calls % _EVERY == 1:
            self._copy = copied_counts(steps, skipped)
        self._told = in_a_row >= _IN_A_ROW
        return in_a_row if self._told else 0
