"""Whether a variant still trains the same: the losses that it must have, and by how much rounding may move them."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .cases import Case
from .process import clean_up
from .report import Row, first_line
from .session import Plan, Session
from .variants import Setting, torch_amp

# By how much of its fall the loss may differ from the expected one at any time, by the dtype of compute, if rounding
# makes no larger difference. On a CPU float32 and bfloat16 differed by up to 1.2% (mlp, resnet18-cifar, a small
# gpt2-like), a learning rate 1.25 times as high by 10% or more, no schedule by 43%, no clipping by 50%.
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.03, torch.bfloat16: 0.05}
LEAST_FALL = 0.05  # of the first loss
NUDGED_RUNS = 2
# A run from nudged weights went further from the first run than so many times what two others told in 1 of 168 cases
# (eight runs of a resnet50 on 64x64 images, batch 8, bfloat16, where noise is 15% of the fall).
NOISE_FACTOR = 4.0
LARGEST_TOLERANCE = 0.5  # of the fall; where noise asks for more, a loss that passes says little


class Expected(NamedTuple):
    """The losses that a variant is to have, and by how much they may differ.

    Losses that differ by rounding part exponentially. So noise is small in early passes, in which a variant that does
    something else is off already, whatever noise is in later ones.

    Attributes:
        losses: means over each pass over the batches.
        fall: what these fall by, at least `LEAST_FALL`: the unit of the following.
        noise: by how much runs are apart that differ by rounding alone, at most, up to each pass.
        tolerances: of each pass.
        ends: the last step of each pass.
    """

    losses: list[float]
    fall: float
    noise: list[float]
    tolerances: list[float]
    ends: Sequence[int]

    @classmethod
    def of(cls, runs: Sequence[list[float]], floor: float, ends: Sequence[int]) -> "Expected":
        """Return what follows from the losses of eager runs.

        Args:
            runs: the one to compare with, and others that started from nudged weights.
            floor: the tolerance where there is no noise.
            ends: the last step of each pass.
        """
        losses = runs[0]
        fall = max(max(losses) - min(losses), LEAST_FALL * abs(losses[0])) or 1.0  # 0.0: a loss that is 0 throughout
        noise = list(itertools.accumulate((_spread(part) / fall for part in zip(*runs, strict=True)), max))
        return cls(losses, fall, noise, [max(floor, NOISE_FACTOR * part) for part in noise], ends)

    def judge(self, losses: Sequence[float], row: Row) -> None:
        """Fill in the row what its losses say. Nan is off in any pass: rounding does not lead there."""
        differences = [abs(a - b) / self.fall for a, b in zip(losses, self.losses, strict=True)]
        passes = list(zip(differences, self.tolerances, self.noise, strict=True))
        row.expected = self.losses[-1]
        row.difference, row.tolerance, row.noise = max(passes, key=lambda part: part[0] / part[1])
        row.off = any(math.isnan(part) or part > most for part, most, _ in passes)
        row.compared = max(
            (end for end, most in zip(self.ends, self.tolerances, strict=True) if most <= LARGEST_TOLERANCE), default=0
        )


def _spread(losses: Sequence[float]) -> float:
    return math.inf if any(map(math.isnan, losses)) else max(losses) - min(losses)


class Expectations:
    """What the variants of one case are to come to: eager runs with torch AMP, apart from theirs.

    Three runs each: from the case's weights, and twice from weights that are nudged by as much as rounding to the dtype
    of compute may change them. How far these go apart is what kernels that round differently, or in another order in
    each run, may make of the same step.

    They come first. What the process does once only (start CUDA, let cuDNN choose its kernels) is done in them.

    Args:
        case: what is trained.
        setting: policy and device.
        plan: how many steps are checked.
        notes: gets a sentence that says why there are no expected losses, where there are none.
    """

    def __init__(self, case: Case, setting: Setting, plan: Plan, notes: list[str]) -> None:
        self._case, self._setting, self._plan, self._notes = case, setting, plan, notes
        self._known = {True: self._run(True)}

    def of(self, whole: bool) -> Expected | None:
        """Return the expected losses of each pass over the batches; None if they could not be had.

        Args:
            whole: of a step with clipping and schedule, on all batches; else without, on the first batch alone.

        It may train, and frees what it took: no variant may be alive.
        """
        if whole not in self._known:
            self._known[whole] = self._run(whole)
        return self._known[whole]

    def _run(self, whole: bool) -> Expected | None:
        try:
            runs = [self._losses(whole, nudged) for nudged in range(1 + NUDGED_RUNS)]
        except Exception as error:
            size = self._case.batch_size
            self._notes.append(f"No expected losses for batch {size}, torch AMP failed: {first_line(error)}.")
            return None
        finally:
            clean_up(self._setting.device)
        return Expected.of(runs, TOLERANCE[self._setting.policy.compute], self._session(whole).ends)

    def _losses(self, whole: bool, nudged: int) -> list[float]:
        case = replace(self._case, model=nudge(self._case.model, self._rounding(), nudged)) if nudged else self._case
        session = self._session(whole)
        torch_amp(case, self._setting, whole=whole).train(session.checked_steps(), session.on_loss)
        return session.losses

    def _rounding(self) -> torch.dtype:
        compute = self._setting.policy.compute
        # TF32, which is allowed, has the mantissa of float16.
        return torch.float16 if compute == torch.float32 and self._setting.device.type == "cuda" else compute

    def _session(self, whole: bool) -> Session:
        batches = self._case.batches
        return Session(batches if whole else [batches[0]] * len(batches), self._setting.device, self._plan)


def nudge(model: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return a copy with each parameter changed at random, by as much as rounding to this dtype may change it."""
    made = torch.Generator().manual_seed(seed)
    half_unit = torch.finfo(dtype).eps / 2
    model = copy.deepcopy(model)
    with torch.no_grad():
        for param in filter(Tensor.is_floating_point, model.parameters()):
            param.mul_(1 + half_unit * (2 * torch.rand(param.shape, generator=made) - 1).to(param.dtype))
    return model
