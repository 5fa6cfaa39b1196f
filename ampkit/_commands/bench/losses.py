"""Whether a variant trains correctly: the losses it must reach, and by how much rounding may change them."""

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
from .report import Row, error_text
from .session import Plan, TimedLoop
from .variants import Setting, torch_amp

# By how much a loss may differ from the expected one, as a share of the fall (largest minus smallest loss), for each
# compute dtype, unless rounding makes a larger difference. On a CPU, float32 and bfloat16 differed by up to 1.2% (mlp,
# resnet18-cifar, a small gpt2-like), a learning rate 1.25 times as high by 10% or more, no schedule by 43%, no clipping
# by 50%.
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.03, torch.bfloat16: 0.05}
LEAST_FALL = 0.05  # as a share of the first loss: a smaller fall counts as this much
NUDGED_RUNS = 2
# The tolerance is this multiple of the noise. A third run with nudged weights differed by more than 4 times the noise
# of two others in 1 of 168 cases (eight runs of a resnet50 on 64x64 images, batch 8, bfloat16, noise 15% of the fall).
NOISE_FACTOR = 4.0
LARGEST_TOLERANCE = 0.5  # as a share of the fall; with a larger tolerance, a loss within it proves little


class Expected(NamedTuple):
    """The losses that a variant must reach, and by how much they may differ.

    A pass is one use of all batches. Differences by rounding grow exponentially, so they are small in early passes. A
    variant that trains incorrectly is found there, even if rounding makes large differences later.
    """

    losses: list[float]  # the mean loss of each pass
    fall: float  # the largest minus the smallest of these losses, at least `LEAST_FALL` of the first
    noise: list[float]  # the largest difference by rounding alone up to each pass, as a share of the fall
    tolerances: list[float]  # the largest difference allowed in each pass, as a share of the fall
    ends: Sequence[int]  # the last step of each pass

    @classmethod
    def of(cls, runs: Sequence[list[float]], floor: float, ends: Sequence[int]) -> "Expected":
        """Return the expected losses of eager runs: the first, and others from nudged weights.

        `floor` is the tolerance if there is no noise.
        """
        losses = runs[0]
        fall = max(max(losses) - min(losses), LEAST_FALL * abs(losses[0])) or 1.0  # not 0, if all losses are 0
        spreads = (
            math.inf if any(map(math.isnan, part)) else max(part) - min(part) for part in zip(*runs, strict=True)
        )
        noise = list(itertools.accumulate((spread / fall for spread in spreads), max))
        return cls(losses, fall, noise, [max(floor, NOISE_FACTOR * part) for part in noise], ends)

    def judge(self, losses: Sequence[float], row: Row) -> None:
        """Compare losses with the expected ones and fill in the row. Nan is never within the tolerance."""
        differences = [abs(a - b) / self.fall for a, b in zip(losses, self.losses, strict=True)]
        passes = list(zip(differences, self.tolerances, self.noise, strict=True))
        row.expected = self.losses[-1]
        row.difference, row.tolerance, row.noise = max(passes, key=lambda part: part[0] / part[1])
        row.off = any(math.isnan(part) or part > most for part, most, _ in passes)
        row.compared = max(
            (end for end, most in zip(self.ends, self.tolerances, strict=True) if most <= LARGEST_TOLERANCE), default=0
        )


class Expectations:
    """The expected losses of one case, from eager runs with torch AMP.

    There are three runs: one from the case's weights, and two from weights that are nudged, which means changed at
    random by as much as rounding to the compute dtype may change them. The runs differ by as much as kernels that round
    differently, or sum in another order, may change the losses.

    These runs come before all variants, so they also pay for what a process does once only (start CUDA, let cuDNN
    choose its kernels). If there are no expected losses, `notes` gets a sentence with the reason.
    """

    def __init__(self, case: Case, setting: Setting, plan: Plan, notes: list[str]) -> None:
        self._case, self._setting, self._plan, self._notes = case, setting, plan, notes
        self._known: dict[bool, Expected | None] = {}
        self.of(True)

    def of(self, whole: bool) -> Expected | None:
        """Return the expected losses, None if training failed.

        They are those of a step with clipping and schedule on all batches, or of one without on the first batch. The
        first call trains. It frees all memory afterwards, so no variant may exist then.
        """
        if whole in self._known:
            return self._known[whole]
        self._known[whole] = None
        try:
            runs = [self._losses(whole, nudged) for nudged in range(1 + NUDGED_RUNS)]
        except Exception as error:
            size = self._case.batch_size
            self._notes.append(f"No expected losses for batch {size}, torch AMP failed: {error_text(error)}.")
            return None
        finally:
            clean_up(self._setting.device)
        floor = TOLERANCE[self._setting.policy.compute]
        known = self._known[whole] = Expected.of(runs, floor, self._session(whole).ends)
        return known

    def _losses(self, whole: bool, nudged: int) -> list[float]:
        case, compute = self._case, self._setting.policy.compute
        if nudged:
            # float32 may run as TF32, whose mantissa is as long as that of float16.
            in_tf32 = compute == torch.float32 and self._setting.device.type == "cuda"
            case = replace(case, model=nudge(case.model, torch.float16 if in_tf32 else compute, nudged))
        session = self._session(whole)
        torch_amp(case, self._setting, whole=whole).train(session.checked_steps(), session.on_loss)
        return session.losses

    def _session(self, whole: bool) -> TimedLoop:
        batches = self._case.batches
        return TimedLoop(batches if whole else [batches[0]] * len(batches), self._setting.device, self._plan)


def nudge(model: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return a copy with each parameter changed at random, by as much as rounding to this dtype may change it."""
    generator = torch.Generator().manual_seed(seed)
    half_unit = torch.finfo(dtype).eps / 2
    model = copy.deepcopy(model)
    with torch.no_grad():
        for param in filter(Tensor.is_floating_point, model.parameters()):
            param.mul_(1 + half_unit * (2 * torch.rand(param.shape, generator=generator) - 1).to(param.dtype))
    return model
