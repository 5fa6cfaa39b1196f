"""Where the optimizer steps, and `after_step` is called: as a part of the graphs, or eagerly behind each of them."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._capture.engine.fallback import MovableOptimizer
from .._capture.engine.options import Options
from .._capture.ranks.ranks import Ranks
from .._capture.state.state import TrainingState
from .._optimizer.device_step import changed_by_step
from .._optimizer.param_groups import CapturableGroups, has_numbers
from .._optimizer.rate_program import RateProgram
from .._optimizer.scaled_step import IN_PLACE
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import (
    can_be_undone,
    gradients,
    makes_rate_tensors,
    may_be_constant,
    parameters,
    torch_class,
    why_not_capturable,
    why_other_bits,
)
from .._optimizer.update.stacked_muon import can_stack


class OptimizerPlace(MovableOptimizer):
    """Decides whether the optimizer's step is a part of the graphs, where its code does not tell.

    Such an optimizer steps behind the graphs at first, and these steps are watched. Once they are seen to change
    nothing but tensors on the device, in place, it becomes a part of the graphs. These read what it computes of its
    rates from tensors, if that leaves the same bits (`RateProgram`). Else they hold all its numbers as constants, and
    it steps behind the graphs again, for good, when one of these numbers changes. So it does if the step cannot be
    captured with it.

    Several optimizers are in the same place. They are a part of the graphs once each of them can be.

    Args:
        optimizers: what steps.
        scaler: steps them, and knows what their steps change.
        why_behind: why they step behind the graphs at first; "" if they are a part of them and stay one.
        may_join: those that may become a part.
        holds: whether they are a part from the beginning, with their rates as constants. They leave if one changes.
        follower: what is called as `after_step`, if it may leave the graphs. It does where it cannot be captured.
        stacked: those that `StackedMuon` steps, which graphs can hold.
        in_tensors: those that read their rates, and count their steps, in tensors on the device, in eager calls too.

    Attributes:
        stacked, in_tensors: see above.
        follows_behind: why `after_step` is called behind the graphs; "" if it is a part of them, or if there is none.
    """

    # Set before the first step. The optimizers join the state as soon as their steps are captured.
    state: TrainingState
    groups: Sequence[CapturableGroups]  # of the optimizers

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        scaler: GradScaler,
        why_behind: str = "",
        *,
        may_join: Sequence[Optimizer] = (),
        holds: bool = False,
        follower: Callable[..., object] | None = None,
        stacked: Collection[Optimizer] = (),
        in_tensors: Collection[Optimizer] = (),
    ) -> None:
        self.stacked: Collection[Optimizer] = stacked
        self.in_tensors: Collection[Optimizer] = in_tensors
        self._has_joined = False
        self._optimizers, self._joining = tuple(optimizers), tuple(may_join)
        self._named = next(iter(may_join), optimizers[0])  # by messages
        self._changes = {optimizer: scaler.changes_of(optimizer) for optimizer in may_join}
        self._is_scaled = scaler.is_enabled()
        self._follower = follower
        self.follows_behind: str = ""
        self.why_behind: str = why_behind
        self._holds = holds
        self.holds_rates: bool = holds  # whether graphs hold the learning rates as constants now
        self._moved = False
        self._rates: list[Any] | None = None
        self._varies = False  # whether they have changed since the first step
        self._others = 0  # changes of other numbers, since the rates are in tensors
        self._steps = 0  # how many were watched
        self._watch(bool(may_join))

    def _watch(self, wanted: bool) -> None:
        self._watches = wanted
        for changes in self._changes.values():
            changes.wanted = wanted

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
        rates = [group.get("lr") for optimizer in self._joining for group in optimizer.param_groups]
        # Two rates are the same tensor or the same number: to compare tensors would wait for the device.
        pairs = [] if self._rates is None else zip(rates, self._rates, strict=False)
        self._varies |= any(a is not b and not ({type(a), type(b)} <= {int, float} and a == b) for a, b in pairs)
        self._rates, self._steps = rates, self._steps + 1
        for optimizer, changes in self._changes.items():
            if changes.incomplete and (self._is_scaled or not changes.only_draws):
                why = f"which a graph would not do. {IN_PLACE}"
                if changes.only_draws:
                    why = "if the step was skipped, too. Without a loss scale and nonfinite= it is captured"
                self._stay_behind(f"{type(optimizer).__name__} {changes.incomplete}, {why}.")
                return
        changed = [self._changed_by_step(optimizer) for optimizer in self._joining] if self._steps > 1 else [None]
        if None not in changed and all(map(gradients, self._joining)):  # else nothing could be tried
            self._join([tensors or [] for tensors in changed])
        elif self._steps == _PATIENCE:
            self._stay_behind(self.why_behind)

    def _changed_by_step(self, optimizer: Optimizer) -> list[Tensor] | None:
        known = self._changes[optimizer].known(optimizer)
        return changed_by_step(optimizer) if known is None and self._is_scaled and can_be_undone(optimizer) else known

    def _join(self, changed: Sequence[list[Tensor]]) -> None:
        """Become a part of the graphs, or stay behind them. `changed` is what steps change beside the gradients."""
        found = [*map(self._put_rates_on_device, self._joining, changed)]
        self._named, problem = next(((each, why) for each, why in found if why), (self._named, ""))
        if problem and self._varies:
            self._stay_behind(self._text("its learning rate changed", problem))
            return
        self._watch(False)
        if problem:
            self._forget_programs()
        self.state.hold(self._optimizers, [] if problem else self.groups)
        self.why_behind, self.holds_rates, self._moved, self._has_joined = "", bool(problem), True, True

    def _put_rates_on_device(self, optimizer: Optimizer, changed: list[Tensor]) -> tuple[Optimizer, str]:
        """Have graphs read what steps compute of the rates from tensors. Return why that cannot be, "" if it can."""
        if optimizer in self.in_tensors and makes_rate_tensors(optimizer):
            return optimizer, ""
        if torch_class(optimizer) is None:
            return optimizer, "is not torch's, and may do with it what it likes"
        if not has_numbers(optimizer):
            return optimizer, "has a rate that is no number"
        if any(param.dtype in (torch.float16, torch.bfloat16) for param in parameters(optimizer)):
            return optimizer, "steps parameters of low precision, to which a tensor would be rounded"
        groups = self.groups[self._optimizers.index(optimizer)]
        program = RateProgram(optimizer, groups.device)
        try:
            program.try_out(changed)
        except Exception as error:  # of the optimizer's own code; all is as before
            return optimizer, f"raises with its rate in a tensor: {type(error).__name__}: {error}"
        groups.program = None if program.why else program
        changed_kind, problem = "the kind of its learning rate changed", "its learning rate is no number any more"
        groups.drop_program = partial(self.leave, changed_kind, problem=problem)
        return optimizer, program.why

    def _forget_programs(self) -> None:
        for groups in self.groups:
            groups.program = None

    def _stay_behind(self, why: str) -> None:
        self._watch(False)
        self._forget_programs()
        self.why_behind = why
        self.state.look_again()  # so that the engine says why, if there are graphs already

    def leave(self, changed: str = "", *, problem: str = "") -> bool:
        """Step behind the graphs from now on, if this optimizer may do so, see `MovableOptimizer`.

        If the problem may be one of `after_step`, that leaves them, and the optimizer stays.
        """
        if problem and self.leave_follower(problem):
            return True
        if not self.behind and any(groups.program for groups in self.groups):
            self._others += bool(changed)
            if not problem and self._others < _FEW:  # another graph has the new number
                return False
        elif not (self.holds_rates or (problem and self._has_joined)) or (problem and self._holds):
            return False
        self._forget_programs()
        self.holds_rates, self._moved = False, True
        with_it = f"together with the step of {type(self._named).__name__}, the training step could not be captured"
        self.why_behind = self._text(changed) if changed else f"{with_it}: {problem}"
        self.state.hold([])
        return True

    def leave_follower(self, problem: str) -> bool:
        """Call `after_step` behind the graphs from now on, if that may help. Return whether it was a part of them."""
        if self._follower is None or self.follows_behind or not self.state.reads.may_be_of_follower(problem):
            return False
        self.follows_behind, self._moved = problem, True
        self.state.leave_out(self._follower)
        return True

    def _text(self, changed: str, problem: str = "") -> str:
        name = type(self._named).__name__
        can_fuse = all("fused" in group for group in self._named.param_groups)
        changed = f"{changed}, which no tensor can stand for: it {problem}" if problem else changed
        remedy = f"Write {name}(..., fused=True)." if can_fuse else "Keep it constant."
        if self._holds:
            remedy = "Pass lr=torch.tensor(rate, device=...), which kernels of torch read from the device."
            if isinstance(self._named.defaults.get("lr"), Tensor):
                tensor = f"torch.tensor(group['lr'], device='{self.groups[0].device.type}')"
                remedy = (
                    "A state that was loaded has put a float in place of the tensor that it was made with. Behind "
                    f"load_state_dict write: for group in optimizer.param_groups: group['lr'] = {tensor}."
                )
        return f"{name} has numbers that a graph would hold as constants, and {changed}. {remedy}"

    def has_moved(self) -> bool:
        """Return whether it has joined the graphs, or left them, since this was called last."""
        moved, self._moved = self._moved, False
        return moved


def place_of(
    optimizers: Sequence[Optimizer],
    scaler: GradScaler,
    options: Options,
    ranks: Ranks,
    *,
    as_torch: bool = False,
    follower: Callable[..., object] | None = None,
    compiled: bool = False,
) -> tuple[str, OptimizerPlace]:
    """Return why nothing can be captured with these optimizers, "" if something can, and where they step.

    With `as_torch` a step has to have the bits of a loop of torch's, see `why_other_bits`. `follower` is what is called
    as `after_step`.
    With `compiled` a Muon steps by compiled code, if the step has one process: each of several would compile by itself.
    """
    stacked = [each for each in optimizers if compiled and not ranks.several and can_stack(each)]
    # A loop of torch's keeps the numbers of such optimizers on the host, where bias corrections may have other bits.
    in_tensors = [each for each in optimizers if not as_torch and makes_rate_tensors(each)]
    made = partial(OptimizerPlace, optimizers, scaler, stacked=stacked, in_tensors=in_tensors)
    if options.on_failure != "parts" or options.graph == "off" or ranks.several:
        follower = None
    problems = {
        each: why_not_capturable(each) or (why_other_bits(each) if as_torch else "")
        for each in optimizers
        if each not in stacked
    }
    why = next(filter(None, problems.values()), "")
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    if not why and as_torch and not all(isinstance(rate, Tensor) for rate in rates):
        return "", made(holds=options.graph != "off", follower=follower)
    if options.on_failure != "parts" or options.graph == "off" or not why:
        return why, made(follower=follower)
    others = [optimizer for optimizer, problem in problems.items() if problem]
    # Each rank would decide by itself.
    may_join = all(map(may_be_constant, others)) and not ranks.several
    return "", made(why, may_join=others if may_join else (), follower=follower)


def can_read_rates(optimizers: Sequence[Optimizer], place: OptimizerPlace, blocker: str) -> list[bool]:
    """Return of each optimizer whether its steps take their rates from tensors, in eager calls too.

    One alone does not where nothing is captured of its step, because of `blocker` or of its place. Of several, those
    do that can: others may keep them behind the graphs for a while, and the bits must be those of later calls.
    """
    if len(optimizers) == 1:
        return [not (blocker or place.behind) or optimizers[0] in place.in_tensors]
    known = (*place.stacked, *place.in_tensors)
    return [optimizer in known or not why_not_capturable(optimizer) for optimizer in optimizers]


_FEW = 3  # changes of numbers other than rates
_PATIENCE = 16  # steps: the first one creates state, the next shows what a step changes, and some may be skipped
