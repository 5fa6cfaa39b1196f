"""Why two loops differ: what is measured on the states of both, and which of it explains the difference."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._text import dtype_name
from .comparison import coarser, ulp_of
from .loop_comparison import DifferingTensor

_LAST_BITS = 16  # eps of an update: unscale, norm, coefficient, clip and the optimizer round once or twice each
_SAME_RATIO = 1e-5  # of an update: how far rounding takes an element of a larger or smaller one
_CLEAR = 4  # ulp of a parameter: rounding leaves little of smaller updates
_SAME_FACTOR = 1e-3  # how far two loops that train differently take the ratio of their losses in a few steps
_VARIED = 1e-3  # of a loss: by how much it changes from step to step, at least, where a factor can be told
_WHOLE_FACTOR = 1e-4  # of a loss: how far sums of micro-batches take the ratio from a whole number, by rounding
_MOST_WHOLE = 64  # micro-batches; the reciprocals of more are so dense that one of them is always near
_LOSS_ROUNDING = 64 * torch.finfo(torch.float32).eps  # relative: sums in another order
_LOW_PRECISION = torch.finfo(torch.bfloat16).eps  # relative: a forward rounded to 8 bits, and averaged


@dataclass(frozen=True, eq=False)
class LoopState:
    """What is recorded of a loop behind a step, in host memory.

    Attributes:
        loss: what the step returned; None before the first one.
        parameters: by path.
        buffers: by path.
        generators: the states of the random number generators, by name.
    """

    loss: Tensor | None
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    generators: dict[str, bytes]


@dataclass(frozen=True, eq=False)
class LoopDifference:
    """The first compared step that differs, and what is known around it.

    Attributes:
        step: its number, counted from 1.
        old: the state of the old loop behind it.
        new: that of the new loop.
        before: the state of both behind the compared step in front of it.
        consecutive: whether that is the step just before it.
        rows: the tensors that differ.
        losses: the losses of both loops, in this compared step and the next ones.
        generators_part: behind which compared step generators differ first, and which; None if they do not.
        other_layout: how this batch is laid out otherwise than those before it, "" if it is not.
        repeated: the tensors in which the old loop differs from itself behind this step.
    """

    step: int
    old: LoopState
    new: LoopState
    before: LoopState
    consecutive: bool
    rows: tuple[DifferingTensor, ...]
    losses: list[tuple[float, float]]
    generators_part: tuple[int, tuple[str, ...]] | None
    other_layout: str
    repeated: tuple[DifferingTensor, ...]

    @property
    def only_parameters(self) -> bool:
        """Whether this step computed the same loss and buffers from the same state, and parameters alone differ."""
        comparable = all(row.kind == "parameter" and row.absolute < math.inf for row in self.rows)
        return self.consecutive and comparable and all(None not in row.shapes for row in self.rows)


def likely_reason(difference: LoopDifference) -> tuple[str, str]:
    """Return the first cause whose measurement fits, in a word and in a sentence. `LoopComparison` lists the words."""
    causes: dict[str, Callable[[LoopDifference], str]] = {
        "repeatability": _repeatability,
        "dtype": _dtype,
        "rounding": _rounding,
        "no update": _no_update,
        "rate": _rate,
        "loss factor": _factor,
        "generators": _generators,
        "batch": _batch,
        "precision": _precision,
    }
    for cause, measure in causes.items():
        if reason := measure(difference):
            return cause, reason
    if not difference.consecutive:
        return "unknown", "the steps in between were not compared: with every=1 more can be measured."
    return "unknown", "nothing that was measured explains it. ampkit.debug.compare finds the module where runs part."


def _repeatability(found: LoopDifference) -> str:
    first = found.rows[0]
    own = next((row for row in found.repeated if row.path == first.path), None)
    if own is None or own.absolute * 10 < first.absolute:
        return ""
    return (
        f"the old loop, built and run again, differs from itself as much ({own}). Use deterministic kernels "
        "(torch.use_deterministic_algorithms(True)), and let the factory build all that its step changes."
    )


def _dtype(found: LoopDifference) -> str:
    first = found.rows[0]
    old, new = first.dtypes
    if old is not None and new is not None and old is not new:
        return (
            f"{first.path} is {dtype_name(old)} in the old loop and {dtype_name(new)} in the new one: the loops "
            "compute in other dtypes. Compare the autocast of one with the policy of the other."
        )
    if first.kind == "loss" and first.shapes[0] != first.shapes[1]:
        return "the loss has another shape: one of the loops averages or sums it, and the other does not."
    return ""


def _rounding(found: LoopDifference) -> str:
    if not found.only_parameters:
        return ""
    if not all(_is_rounding(*_updates(found, row.path)) for row in found.rows):
        return ""
    return (
        "loss and buffers are equal, and parameters differ in the last bits alone: the loops round in another order. "
        "That is so if one clips in the optimizer's kernel, if one optimizer is fused and the other is not, or if one "
        'reads the rate as float32. graphed_step(..., arithmetic="torch") has the bits of a torch loop.'
    )


def _is_rounding(u: Tensor, v: Tensor, unit: Tensor, eps: float) -> bool:
    """Return whether two updates differ by no more than rounding of the parameter and of the update explain."""
    return bool(((v - u).abs() <= 2 * unit + _LAST_BITS * eps * torch.maximum(u.abs(), v.abs())).all())


def _no_update(found: LoopDifference) -> str:
    if not found.only_parameters:
        return ""
    before = found.before.parameters
    moved = [
        any(not torch.equal(state.parameters[row.path], before[row.path]) for row in found.rows)
        for state in (found.old, found.new)
    ]
    if all(moved):
        return ""
    which = "old" if moved[0] else "new"
    return (
        f"only the {which} loop has changed these parameters in this step: the other one skipped it (an overflow under "
        "a gradient scaler), accumulates over more micro-batches, or does not train them."
    )


def _rate(found: LoopDifference) -> str:
    if not found.only_parameters:
        return ""
    ratios: list[tuple[float, float]] = []  # by how many ulp the parameter has moved, ratio of the updates
    further = 0  # elements beside the one that gives a tensor its ratio
    for row in found.rows:
        u, v, unit, eps = _updates(found, row.path)
        if _is_rounding(u, v, unit, eps):
            continue
        ratio = ((u * v).sum() / (u * u).sum()).item()
        rounding = (1 + abs(ratio)) * unit + max(_SAME_RATIO, _LAST_BITS * eps) * v.abs()
        if not bool(((v - ratio * u).abs() <= rounding).all()):
            return ""
        ratios.append(((u.abs() / unit).max().item(), ratio))
        further += int((u.abs() > _CLEAR * unit).sum()) - 1
    if further < 1:
        return ""
    clearest = max(ratios)[1]
    differ = [ratio for _, ratio in ratios if abs(ratio - clearest) > _SAME_FACTOR * abs(clearest)]
    low, high = min([clearest, *differ]), max([clearest, *differ])
    one = f"{low:.4g} to {high:.4g}, by tensor," if differ else f"{clearest:.4g}"
    return (
        f"loss and buffers are equal, and the new loop's update is {one} times the old one's in all elements: learning "
        "rates have this ratio, or gradients if the optimizer is linear in them (SGD)."
    )


def _factor(found: LoopDifference) -> str:
    olds, news = zip(*found.losses, strict=True)
    if found.rows[0].kind != "loss" or not all(each and math.isfinite(each) for each in (*olds, *news)):
        return ""
    ratios = [new / old for old, new in found.losses]
    first = ratios[0]
    larger = max(abs(first), 1 / abs(first))
    whole = 2 <= round(larger) <= _MOST_WHOLE and abs(larger / round(larger) - 1) <= _WHOLE_FACTOR
    spread, varied = (max(each) - min(each) for each in (ratios, olds))
    # If the losses themselves hardly vary, something that is added to them looks like a factor.
    constant = spread <= _SAME_FACTOR * abs(first) and varied / abs(olds[0]) > max(10 * spread / abs(first), _VARIED)
    if not whole and not (constant and abs(first - 1) > 10 * _SAME_FACTOR):
        return ""
    steps = f" in {len(ratios)} compared steps" if constant else ""
    return (
        f"the new loss is {first:.6g} times the old one{steps}: one loop multiplies or divides it, as for gradient "
        "accumulation or by a loss scale. graphed_step(accumulate=n) divides itself, and out.loss is before that."
    )


def _generators(found: LoopDifference) -> str:
    if found.generators_part is None:
        return ""
    step, names = found.generators_part
    where = "before the first step" if step == 0 else f"behind step {step}"
    return (
        f"random number generators differ {where} ({', '.join(names)}): the loops draw in another order or another "
        "number of times, as for dropout, noise or augmentation."
    )


def _batch(found: LoopDifference) -> str:
    if not found.consecutive or not found.other_layout:
        return ""
    return (
        f"batch {found.step} is the first that {found.other_layout}: one of the loops pads or drops rows, or averages "
        "over them otherwise."
    )


def _precision(found: LoopDifference) -> str:
    first = found.rows[0]
    if first.kind != "loss" or not found.consecutive or not first.relative <= _LOW_PRECISION:
        return ""
    start = "from the same parameters, buffers and random numbers, the loss differs"
    if first.relative <= _LOSS_ROUNDING:
        return f"{start} in the last bits alone: other kernels, or sums in another order (compile, batch size, TF32)."
    return (
        f"{start} by {first.relative:.1g} of itself. Computing in float16, bfloat16 or TF32 rounds as much: compare "
        "the autocast of one loop with the policy of the other. If these agree, the losses are not the same function."
    )


def _updates(found: LoopDifference, path: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return by how much each loop has changed a parameter, its unit in the last place, and the eps of its dtype."""
    before, old, new = (state.parameters[path] for state in (found.before, found.old, found.new))
    dtype = coarser(old.dtype, new.dtype)
    wide = [torch.view_as_real(each).double() if each.is_complex() else each.double() for each in (before, old, new)]
    unit = ulp_of(torch.maximum(wide[0].abs(), wide[1].abs()), dtype)
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return wide[1] - wide[0], wide[2] - wide[0], unit, eps
