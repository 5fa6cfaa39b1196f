"""Where the optimizer steps: as a part of the graphs, or eagerly behind each of them."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .._capture.engine.fallback import MovableOptimizer
from .._capture.engine.options import Options
from .._capture.ranks.ranks import Ranks
from .._capture.state.state import TrainingState
from .._optimizer.device_step import changed_by_step
from .._optimizer.param_groups import CapturableGroups
from .._optimizer.rate_program import RateProgram
from .._optimizer.scaled_step import IN_PLACE
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import can_be_undone, may_be_constant, why_not_capturable, why_other_bits


class OptimizerPlace(MovableOptimizer):
    """Decides whether the optimizer's step is a part of the graphs, where its code does not tell.

    Such an optimizer steps behind the graphs at first, and these steps are watched. Once they are seen to change
    nothing but tensors on the device, in place, it becomes a part of the graphs. These read what it computes of its
    rates from tensors, if that leaves the same bits (`RateProgram`). Else they hold all its numbers as constants, and
    it steps behind the graphs again, for good, when one of these numbers changes. So it does if the step cannot be
    captured with it.

    Args:
        optimizer: what steps.
        scaler: steps it, and knows what its steps change.
        why_behind: why it steps behind the graphs at first; "" if it is a part of them and stays one.
        may_join: whether it may become a part.
        holds: whether it is a part from the beginning, with its rate as a constant. It leaves if that changes.
    """

    # Set before the first step. The optimizer joins the state as soon as its step is captured.
    state: TrainingState
    groups: CapturableGroups  # of the optimizer

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: GradScaler,
        why_behind: str = "",
        *,
        may_join: bool = False,
        holds: bool = False,
    ) -> None:
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        self._changes = scaler.changes_of(optimizer) if may_join else None
        self._is_undone = scaler.is_enabled() and can_be_undone(optimizer)
        self.why_behind: str = why_behind
        self._holds = holds
        self.holds_rates: bool = holds  # whether graphs hold the learning rate as a constant now
        self._moved = False
        self._rates: list[Any] | None = None
        self._varies = False  # whether they have changed since the first step
        self._others = 0  # changes of other numbers, since the rates are in tensors
        self._steps = 0  # how many were watched
        self._watch(may_join)

    def _watch(self, wanted: bool) -> None:
        self._watches = wanted
        if self._changes is not None:
            self._changes.wanted = wanted

    @property
    def stays_behind(self) -> bool:
        """Whether it is known already that it will never be a part of the graphs."""
        return self.behind and not self._watches

    @property
    def behind(self) -> bool:
        """Whether it steps behind the graphs."""
        return bool(self.why_behind)

    def has_stepped(self) -> None:
        """Decide, behind a step behind the graphs."""
        if not self._watches:
            return
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        # Two rates are the same tensor or the same number: to compare tensors would wait for the device.
        pairs = [] if self._rates is None else zip(rates, self._rates, strict=False)
        self._varies |= any(a is not b and not ({type(a), type(b)} <= {int, float} and a == b) for a, b in pairs)
        self._rates, self._steps = rates, self._steps + 1
        assert self._changes is not None
        if self._changes.incomplete:
            self._stay_behind(f"{self._name} {self._changes.incomplete}, which a graph would not do. {IN_PLACE}.")
        elif self._steps > 1 and (changed := self._changed_by_step()) is not None:
            self._join(changed)
        elif self._steps == _PATIENCE:
            self._stay_behind(self.why_behind)

    def _changed_by_step(self) -> list[Tensor] | None:
        assert self._changes is not None  # it may join
        known = self._changes.known(self._optimizer)
        return changed_by_step(self._optimizer) if known is None and self._is_undone else known

    def _join(self, changed: list[Tensor]) -> None:
        """Become a part of the graphs, or stay behind them. `changed` is what a step changes beside the gradients."""
        problem = self._put_rates_on_device(changed)
        if problem and self._varies:
            self._stay_behind(self._text("its learning rate changed", problem))
            return
        self._watch(False)
        self.state.hold([self._optimizer], [] if problem else [self.groups])
        self.why_behind, self.holds_rates, self._moved = "", bool(problem), True

    def _put_rates_on_device(self, changed: list[Tensor]) -> str:
        """Have graphs read what steps compute of the rates from tensors. Return why that cannot be, "" if it can."""
        if not all(type(group.get("lr")) in (int, float) for group in self._optimizer.param_groups):
            return "has a rate that is no number"
        program = RateProgram(self._optimizer, self.groups.device)
        try:
            program.try_out(changed)
        except Exception as error:  # of the optimizer's own code; all is as before
            return f"raises with its rate in a tensor: {type(error).__name__}: {error}"
        self.groups.program = None if program.why else program
        return program.why

    def _stay_behind(self, why: str) -> None:
        self._watch(False)
        self.why_behind = why
        self.state.look_again()  # so that the engine says why, if there are graphs already

    def leave(self, changed: str = "", *, problem: str = "") -> bool:
        """Step behind the graphs from now on, if this optimizer may do so, see `MovableOptimizer`."""
        if not self.behind and self.groups.program is not None:
            self._others += bool(changed)
            if not problem and self._others < _FEW:  # another graph has the new number
                return False
        elif not self.holds_rates or (problem and self._holds):
            return False
        self.holds_rates, self.groups.program, self._moved = False, None, True
        with_it = f"together with the step of {self._name}, the training step could not be captured"
        self.why_behind = self._text(changed) if changed else f"{with_it}: {problem}"
        self.state.hold([])
        return True

    def _text(self, changed: str, problem: str = "") -> str:
        can_fuse = all("fused" in group for group in self._optimizer.param_groups)
        changed = f"{changed}, which no tensor can stand for: it {problem}" if problem else changed
        remedy = f"Write {self._name}(..., fused=True)." if can_fuse else "Keep it constant."
        if self._holds:
            remedy = "Pass lr=torch.tensor(rate, device=...), which kernels of torch read from the device."
        return f"{self._name} has numbers that a graph would hold as constants, and {changed}. {remedy}"

    def has_moved(self) -> bool:
        """Return whether it has joined the graphs, or left them, since this was called last."""
        moved, self._moved = self._moved, False
        return moved


def place_of(
    optimizer: Optimizer, scaler: GradScaler, options: Options, ranks: Ranks, *, as_torch: bool = False
) -> tuple[str, OptimizerPlace]:
    """Return why nothing can be captured with this optimizer, "" if something can, and where it steps.

    With `as_torch` a step has to have the bits of a loop of torch's, see `why_other_bits`.
    """
    why = why_not_capturable(optimizer) or (why_other_bits(optimizer) if as_torch else "")
    if not why and as_torch and not all(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups):
        return "", OptimizerPlace(optimizer, scaler, holds=options.graph != "off")
    if options.on_failure != "parts" or options.graph == "off" or not why:
        return why, OptimizerPlace(optimizer, scaler)
    # Each rank would decide by itself.
    may_join = may_be_constant(optimizer) and not ranks.several
    return "", OptimizerPlace(optimizer, scaler, why, may_join=may_join)


_FEW = 3  # changes of numbers other than rates
_PATIENCE = 16  # steps: the first one creates state, the next shows what a step changes, and some may be skipped
