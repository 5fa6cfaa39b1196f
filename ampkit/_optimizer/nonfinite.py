"""A guard against gradients that are not finite, without a loss scale: such a step is skipped, or training stops."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .device_scale import copied_counts
from .device_step import any_found, total_norm
from .scaled_step import ScaledStep
from .scaler import GradScaler
from .sharded import ONE_RANK, OverRanks
from .step_kind import gradients

SKIP, STOP = "skip", "stop"
_LATE = 7  # calls behind its start, a copy to the host is read: the device has mostly passed it by then


class NonfiniteGuard(GradScaler):
    """Steps optimizers as a `GradScaler` does, but scales nothing. So each step that is not skipped keeps its bits.

    It looks for inf and nan in the gradients, or in their norm if they are clipped, since a norm of inf or nan would
    make all of them 0 or nan. It has no state for a `state_dict`.

    Args:
        device: the type of the device.
        stops: whether all steps behind the first one that is skipped are skipped, too.

    Attributes:
        stops: the argument.
        said: whether an error has said that training has stopped.
    """

    def __init__(self, device: str, *, stops: bool) -> None:
        super().__init__(device, init_scale=1.0, dynamic=False)
        self.stops: bool = stops
        self.said: bool = False
        self.found_inf: Tensor | None = None
        name = f"graphed_step(nonfinite={STOP if stops else SKIP!r})"
        self._scaled_step = ScaledStep(name)
        self._all_skipped = (
            f"{name}: the last {{}} optimizer steps were all skipped, because a gradient was not finite in each, so "
            "that the weights do not change any more. Look at the loss and the weights, or at the first layer with a "
            "value that is not finite (ampkit.debug.numerics)."
        )
        self._stopped: Tensor | None = None  # with `stops`: 1.0 from the first step on that was skipped, else 0.0
        self._copy: tuple[Tensor, torch.cuda.Event | None] | None = None  # of the counters
        self._age = 0  # calls since it was started
        self._bad_step: int | None = None

    # ------------------------------------------------------------------------------------- what a training step calls

    def rule(self) -> dict[str, Any]:
        """Return nothing: no number of the host decides anything."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return the counters by name, and whether training has stopped. Aliasing: the live tensors."""
        named = {"steps": self.steps, "skipped": self.skipped, "stopped": self._stopped}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def materialize(self, device: torch.device) -> None:
        """See `GradScaler`."""
        super().materialize(device)
        if self.stops and self._stopped is None:
            self._stopped = torch.zeros((), device=device, dtype=torch.float32)

    def scale(self, outputs: Any) -> Any:
        """Return the argument."""
        return outputs

    @property
    def _scales(self) -> bool:
        return False

    def unscale_all(self, optimizers: Sequence[Optimizer]) -> Tensor:
        """Look at the gradients as they are now. The step is skipped if this or a later look finds something.

        Returns 1.0 if one has, else 0.0: shape (), on the device. Sync: none.
        """
        found = self._look(optimizers, None)
        self._per_optimizer_states[id(optimizers[0])]["found_inf_per_device"] = {found.device: found}
        return found

    def _look(self, optimizers: Sequence[Optimizer], norm: Tensor | None, over_ranks: OverRanks = ONE_RANK) -> Tensor:
        """Return 1.0 if the step is to be skipped, else 0.0: float32, shape ().

        Without a norm it takes the largest magnitude of an element, which is finite exactly if all elements are.
        """
        scale, _ = self._check_scale_growth_tracker("step")
        with torch.no_grad():
            size = total_norm(gradients(*optimizers), scale.device, torch.inf, over_ranks) if norm is None else norm
            found = torch.where(size < torch.inf, 0.0, 1.0).float()  # also 1 for nan
            states = (self._per_optimizer_states[id(optimizer)] for optimizer in optimizers)
            before = [tensor for state in states for tensor in state["found_inf_per_device"].values()]
            if before:
                found = any_found([found, *before], scale.device)
            if self._stopped is not None:
                self._stopped.copy_(torch.maximum(found, self._stopped))
                found = self._stopped.clone()
        return found

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Forget what was found in this iteration."""
        self._per_optimizer_states.clear()

    # ------------------------------------------------------------------------------------------------- late answers

    def watch_skips(self) -> None:
        """Begin to copy the counters to the host, behind a step, for `bad_step`. If it only skips, see `GradScaler`."""
        if not self.stops:
            super().watch_skips()
        elif self._copy is None and self._bad_step is None and self.steps is not None and self.skipped is not None:
            self._copy, self._age = copied_counts(self.steps, self.skipped), 0

    def bad_step(self, calls: int = 1) -> int | None:
        """Return the number of the optimizer step at which training has stopped, from 1; None if none is known.

        To be asked before this many calls are made. The answer is known 13 calls late at most, and equally late on all
        ranks. Sync: none, unless the host is seven calls ahead of the device where it reads.
        """
        self._age += calls
        if self._copy is not None and self._age >= _LATE:
            (counts, arrived), self._copy = self._copy, None
            if arrived is not None:
                arrived.synchronize()  # sync: mostly it has arrived
            self._note(*counts.tolist())
        return self._bad_step

    def bad_step_now(self) -> int | None:
        """Return the same, of all steps so far. Waits for the device."""
        if self._stopped is not None and self._bad_step is None:
            assert self.steps is not None  # made with it, as the next
            assert self.skipped is not None
            self._note(*torch.stack([self.steps, self.skipped]).tolist())  # sync
        return self._bad_step

    def _note(self, steps: float, skipped: float) -> None:
        if skipped:  # all steps behind the first one of them were, too
            self._bad_step = int(steps - skipped) + 1

    def go_on(self) -> None:
        """Let steps change the weights again."""
        if self._stopped is not None and self.skipped is not None:
            self._stopped.zero_()
            self.skipped.zero_()
            self._copy = self._bad_step = None
            self.said = False

    def state_dict(self) -> dict[str, Any]:
        """Return {}, as a scaler that is disabled."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, as a scaler that is disabled."""
