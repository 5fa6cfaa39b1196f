"""How an optimizer steps under a loss scale: it unscales, clips and skips in its kernel, or somebody does so for it."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._errors import AmpkitWarning, CaptureError
from .._torch.device.streams import is_capturing
from .._user_line import users_level
from .device_step import (
    changed_by_step,
    divide_and_clip_,
    kernel_scaling,
    seed_late_momentum,
    seed_momentum,
    step_or_undo,
)
from .rollback import StepChanges
from .step_kind import can_be_undone, runs_beside_step, scales_in_kernel, takes_scale, torch_class

IN_PLACE = "Keep its state in tensors on the device, and change them in place (copy_, add_)"


@dataclass(eq=False)
class ScaledStep:
    """The optimizer steps of one scaler, each of them skipped where a gradient is not finite."""

    name: str = "GradScaler.step"  # what messages call it
    undecided: bool = False  # whether the last step waited for the device only to learn what the optimizer changes
    _warned: bool = False
    # What steps change whose code is not torch.optim's.
    _changes: weakref.WeakKeyDictionary[Optimizer, StepChanges] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_changes": None}  # a copy of the scaler gets to know copies of the optimizers anew

    def changes_of(self, optimizer: Optimizer) -> StepChanges:
        """Return what is known of the tensors that an optimizer's step changes."""
        if self._changes is None:
            self._changes = weakref.WeakKeyDictionary()
        return self._changes.setdefault(optimizer, StepChanges())

    def step(
        self,
        optimizer: Optimizer,
        grads: Sequence[Tensor],
        found_inf: Tensor | None,
        divisor: Tensor | None,
        clip: Tensor | None,
        step: Callable[[], Any],
    ) -> float | None:
        """Do what `divide_and_clip_` does, and call `step`. Change nothing where `found_inf` (float32, shape ()) is 1.

        Returns what `step` returned, None if it was not called.
        """
        divisor = divide_and_clip_(optimizer, grads, divisor, clip)
        stepped: float | None = None
        if found_inf is None:
            seed_late_momentum(optimizer)
            changes = None if self._changes is None else self._changes.get(optimizer)
            with nullcontext() if divisor is None else kernel_scaling(optimizer, divisor, None):
                stepped = step() if changes is None or not changes.wanted else changes.watch(optimizer, step)
            return stepped
        if not takes_scale(optimizer):
            return self._skip_or_step(optimizer, grads, found_inf, step)
        with kernel_scaling(optimizer, divisor, found_inf):
            if not scales_in_kernel(optimizer):
                stepped = self._skip_or_step(optimizer, grads, found_inf, step)
            elif seed_momentum(optimizer) or not found_inf.item():  # sync: only for a first step with dampening
                stepped = step()
        return stepped

    def _skip_or_step(
        self, optimizer: Optimizer, grads: Sequence[Tensor], found_inf: Tensor, step: Callable[[], Any]
    ) -> float | None:
        """Step, and undo the step on the device if it must be skipped. Where it cannot be undone, read `found_inf`."""
        changes: StepChanges | None = None
        changed: list[Tensor] | None = None
        if not takes_scale(optimizer) and (hidden := runs_beside_step(optimizer)):
            reason = f"has {hidden}, which must not run in a skipped step"
        elif torch_class(optimizer) is None:
            changes = self.changes_of(optimizer)
            reason = changes.incomplete
            changed = None if reason else changes.known(optimizer)
            self.undecided |= changed is None and not reason
        elif not seed_momentum(optimizer):
            reason = ""  # In its first step SGD ignores dampening, so it can be undone from the second step on.
        elif can_be_undone(optimizer):
            changed = changed_by_step(optimizer)
        else:
            reason = "keeps its step count on the host"
        if changed is not None:
            return step_or_undo(step, found_inf, changed)
        if is_capturing():
            reason = reason or "has not been watched enough to know what it changes"
            raise CaptureError(f"{self.name}: {type(optimizer).__name__} {reason}. {IN_PLACE}.")
        if reason and any(grad.is_cuda for grad in grads):
            self._warn_of_read(optimizer, reason)
        stepped: float | None = None
        if not found_inf.item():  # sync
            stepped = step() if reason or changes is None else changes.watch(optimizer, step)
        return stepped

    def _warn_of_read(self, optimizer: Optimizer, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        name = type(optimizer).__name__
        can = [word for word in ("fused", "capturable") if all(word in group for group in optimizer.param_groups)]
        remedy = f"Write {name}(..., {can[0]}=True)" if can else "Use AdamW(..., fused=True), which can"
        if not takes_scale(optimizer) and runs_beside_step(optimizer):
            remedy = "Call after the step what should run there"
        elif torch_class(optimizer) is None:
            remedy = IN_PLACE
        message = (
            f"{self.name}({name}): {name} {reason}; it cannot be skipped on the device, so every step waits for it."
            f" {remedy}."
        )
        warnings.warn(message, AmpkitWarning, stacklevel=users_level())
