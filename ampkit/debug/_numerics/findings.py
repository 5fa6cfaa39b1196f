"""What the statistics of a step say: where it overflowed or underflowed first, which loss scale is safe, what helps."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ..._precision.policy import Policy
from ..._text import dtype_name
from .statistics import BIAS, BINS, LARGEST, MAGNITUDE, NONFINITE, Row, Snapshot

F16_MAX = 65504.0  # torch.finfo(torch.float16).max
F16_NORMAL = -14  # exponent of torch.finfo(torch.float16).smallest_normal; below it digits are lost one by one
F16_ZERO = -25  # what lies below 2**-25 is rounded to zero
_LOST = 0.5  # share of the nonzero values that are subnormal, from which on a tensor counts as underflowing
_GRADIENTS = ("grad_output", "grad_input", "gradient")
_LOWEST, _HIGHEST = -32, 16  # exponents that are told apart in a report


class NumericsFinding(NamedTuple):
    """Where a step first left the range of its numbers.

    Attributes:
        kind: "overflow" or "underflow".
        name: the module in which it happened.
        direction: "forward" or "backward".
        step: the optimizer step, counted from 0.
        what: which tensor shows it: the module's "output" or "grad_input", the name of a parameter whose gradient does,
            or, where it was there before the module computed, "input" or "grad_output".
        detail: the rest of the story, in words.
    """

    kind: str
    name: str
    direction: str
    step: int
    what: str
    detail: str

    def __str__(self) -> str:
        return f"first {self.kind}: {self.name}, {self.direction}, step {self.step} ({self.detail})"


class NumericsRow(NamedTuple):
    """Statistics of a tensor of a module, or of the gradient of a parameter, summed over all calls in one step.

    Attributes:
        name: of the module or the parameter.
        what: "input", "output", "grad_output" (what comes to its outputs in backward), "grad_input" (what it hands on)
            or, of a parameter, "gradient". Gradients are as the backward sees them: multiplied by the loss scale.
        dtype: of the tensor.
        count: how many values it has.
        largest: the largest magnitude; where a value is inf or nan, the power of two that the largest finite one is not
            below, which is more than half of it.
        nonfinite: how many values are inf or nan.
        zeros: how many are zero (of bfloat16 and float32, or subnormal, which is below 2**-126).
        subnormal: how many are not zero, but below 2**-14, where float16 loses digits.
        flushed: how many of these lie below 2**-25, so that float16 rounds them to zero: none where it is float16.
        exponents: how many values there are from 2**e up to 2**(e + 1), by e from -32 (or less) to 16 (or more).
    """

    name: str
    what: str
    dtype: str
    count: int  # type: ignore[assignment]  # hides tuple.count
    largest: float
    nonfinite: int
    zeros: int
    subnormal: int
    flushed: int
    exponents: dict[int, int]

    @property
    def fraction_flushed(self) -> float:
        """The share of values that float16 makes zero.

        Where the tensor is float16, of those that are zero, whatever made them so: ReLU and pooling do it too.
        """
        return (self.zeros if self.dtype == "float16" else self.flushed) / self.count

    @property
    def fraction_fading(self) -> float:
        """The share of subnormal values among those that are not zero: near 0 in good health, near 1 at the bottom."""
        return self.subnormal / max(self.count - self.zeros, 1)


class Reading:
    """One snapshot with what the host knows of its rows.

    Args:
        snapshot: the numbers.
        rows: what they are of.
        parameters: the rows of each module's parameters by their names, as `Sites` has them.
        order: indices of the rows that were measured, in the order of time; those of parameters come last.
        dtypes: of the tensors, by index.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        rows: Sequence[Row],
        parameters: Mapping[str, Mapping[str, int]],
        order: Sequence[int],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        self.step, self.scale = snapshot.step, snapshot.scale
        self._rows, self._parameters, self._dtypes = rows, parameters, dtypes
        self._index = {(row.name, row.what): i for i, row in enumerate(rows)}
        self._values = values = snapshot.values
        # Lists, by row: looking up single elements of a tensor would take milliseconds in all.
        self._counts: list[float] = values[:, :BINS].sum(1).tolist()
        self._zeros: list[float] = values[:, 0].tolist()
        self._subnormals: list[float] = values[:, 1 : F16_NORMAL + BIAS].sum(1).tolist()
        self._nonfinite: list[float] = values[:, NONFINITE].tolist()
        self._largest = self._largest_finite(values[:, LARGEST].tolist())
        self._magnitudes: list[float] = values[:, MAGNITUDE].tolist()
        self.order = [i for i in self._in_time(order) if self._counts[i]]

    def _largest_finite(self, magnitudes: list[float]) -> list[float]:
        """Return magnitudes with those that are not finite replaced by what the counts of exponents say."""
        for i, nonfinite in enumerate(self._nonfinite):
            if nonfinite:
                finite = self._values[i, 1:NONFINITE].nonzero()
                magnitudes[i] = 2.0 ** (int(finite[-1]) + 1 - BIAS) if len(finite) else 0.0
        return magnitudes

    def _in_time(self, order: Sequence[int]) -> list[int]:
        """Return the order with each parameter's gradient where its module's backward is."""
        place = {row: float(i) for i, row in enumerate(order)}
        for i in order:
            row = self._rows[i]
            if row.what == "gradient":
                place[i] = place.get(self._index.get((row.module, "grad_output"), i), place[i]) + 0.5
        return sorted(place, key=lambda i: place[i])

    def rows(self) -> list[NumericsRow]:
        """Return the statistics in the order of time."""
        return [self._row(i) for i in self.order]

    def _row(self, i: int) -> NumericsRow:
        row, counts = self._rows[i], self._values[i, :BINS]
        exponents: dict[int, int] = {}
        for number in counts[1:NONFINITE].nonzero().flatten().tolist():
            exponent = min(max(number + 1 - BIAS, _LOWEST), _HIGHEST)
            exponents[exponent] = exponents.get(exponent, 0) + int(counts[number + 1])
        return NumericsRow(
            name=row.name,
            what=row.what,
            dtype=dtype_name(self._dtypes[i]),
            count=int(self._counts[i]),
            largest=self._largest[i],
            nonfinite=int(self._nonfinite[i]),
            zeros=int(self._zeros[i]),
            subnormal=int(self._subnormals[i]),
            flushed=int(counts[1 : F16_ZERO + BIAS].sum()),
            exponents=exponents,
        )

    # ------------------------------------------------------------------------------------------------------- overflow

    def nonfinite(self) -> set[int]:
        """Return the rows that have values that are not finite."""
        return {i for i, count in enumerate(self._nonfinite) if count}

    def overflowed(self) -> bool:
        """Return whether the gradient of a parameter is not finite."""
        return any(self._rows[i].what == "gradient" for i in self.nonfinite())

    def first_overflow(self, harmless: set[int]) -> NumericsFinding | None:
        """Return where it began, if a gradient of a parameter is not finite.

        Args:
            harmless: rows that are not finite in good steps either, such as scores that a mask sets to -inf.
        """
        if not self.overflowed():
            return None
        bad = self.nonfinite()
        first = next((i for i in self.order if i in bad - harmless), None)
        if first is None:
            first = next(i for i in self.order if i in bad and self._rows[i].what == "gradient")
        row = self._rows[first]
        direction = "forward" if row.what in ("input", "output") else "backward"
        what = row.name if row.what == "gradient" else row.what
        return NumericsFinding("overflow", row.module, direction, self.step, what, self._how_it_overflowed(first))

    def _how_it_overflowed(self, first: int) -> str:
        row, stats = self._rows[first], self._row(first)
        amount = f"{stats.nonfinite} of {stats.count} values are not finite"
        broken = [name for name, i in self._of_module(row.module).items() if not self._magnitudes[i] < math.inf]
        if broken:
            return f"{amount}; {broken[0]} is not finite itself: it broke in an earlier step"
        return {
            "input": f"already its input: {amount}, out of the batch or out of code between modules",
            "output": f"its output: {amount}",
            "grad_output": f"already the gradient that comes to it: {amount}, out of the loss, its scale or other code",
            "grad_input": f"the gradient that it hands on: {amount}",
            "gradient": f"the gradient of {row.name}: {amount}",
        }[row.what]

    def _of_module(self, module: str) -> Mapping[str, int]:
        return self._parameters.get(module, {})

    # ------------------------------------------------------------------------------------------------------ underflow

    def first_underflow(self) -> NumericsFinding | None:
        """Return at whose backward gradients in float16 begin to vanish.

        Zeros alone do not tell: ReLU, pooling and dropout make them by the millions. What float16 flushes leaves
        subnormal values beside the zeros, or nothing at all behind a module with weights that are not zero.
        """
        for i in self.order:
            row = self._rows[i]
            if row.what == "grad_output" and self._is_low(i) and self._subnormal(i) >= _LOST:
                return self._underflow(i, f"already the gradient that comes to it: {self._lost(i)}")
            if row.what == "grad_input" and self._is_low(i):
                before = self._index[row.name, "grad_output"]
                came = self._counts[before] > self._zeros[before]  # some that are not zero
                gone = came and self._counts[i] == self._zeros[i] and self._has_weights(row.module)
                if gone or self._subnormal(i) >= _LOST:
                    return self._underflow(i, f"the gradient that it hands on: {self._lost(i)}; {self._lost(before)}")
        return None

    def _underflow(self, i: int, detail: str) -> NumericsFinding:
        row = self._rows[i]
        return NumericsFinding("underflow", row.module, "backward", self.step, row.what, detail)

    def _is_low(self, i: int) -> bool:
        return self._dtypes[i] is torch.float16

    def _subnormal(self, i: int) -> float:
        """Return the share of the values that are not zero which are subnormal, 0 where all are zero."""
        return self._subnormals[i] / max(self._counts[i] - self._zeros[i], 1.0)

    def _has_weights(self, module: str) -> bool:
        """Return whether the module's first parameter, the weight, is not zero, as that of a BatchNorm may begin."""
        return any(self._magnitudes[i] > 0 for i in list(self._of_module(module).values())[:1])

    def _lost(self, i: int) -> str:
        stats = self._row(i)
        where = " came to it" if stats.what == "grad_output" else ""
        zeros, subnormal = stats.zeros / stats.count, stats.subnormal / stats.count
        return f"{zeros:.1%} zeros and {subnormal:.1%} subnormal values{where}"

    # ---------------------------------------------------------------------------------------------------------- scale

    def largest_unscaled_gradient(self) -> float:
        """Return the largest finite magnitude of a gradient without the loss scale, 0 where there is none."""
        found = [self._largest[i] for i in self.order if self._rows[i].what in _GRADIENTS]
        return max(found, default=0.0) / self.scale

    def gradients_of_parameters(self) -> tuple[float, float, float]:
        """Return the largest finite magnitude without the loss scale, how many values are not finite, and the share of
        values that float16 makes zero.
        """
        chosen = [i for i in self.order if self._rows[i].what == "gradient"]
        count = sum(self._counts[i] for i in chosen) or 1.0
        below = self._values[:, 1 : F16_ZERO + BIAS].sum(1).tolist()
        lost = sum(self._zeros[i] if self._is_low(i) else below[i] for i in chosen)
        largest = max((self._largest[i] for i in chosen), default=0.0)
        return largest / self.scale, sum(self._nonfinite[i] for i in chosen), lost / count


def safe_scale(largest: float) -> float:
    """Return the largest power of two that keeps a gradient of this magnitude finite in float16; inf for 0."""
    if largest <= 0.0:
        return math.inf
    exponent = math.floor(math.log2(F16_MAX / largest))
    if largest * 2.0**exponent > F16_MAX:  # log2 was rounded up
        exponent -= 1
    return float(2.0**exponent)


def advice(
    overflow: NumericsFinding | None,
    underflow: NumericsFinding | None,
    scale: float,
    safe: float | None,
    persists: bool,
    root: str,
) -> list[str]:
    """Return what to do, in sentences that hold the code to write.

    Args:
        overflow: the first one, if any.
        underflow: likewise.
        scale: the present loss scale.
        safe: the largest safe one, None where it is not known.
        persists: whether the last observed step overflowed too.
        root: the name that stands for the model itself, which is no path.
    """
    lines = []
    if overflow is not None and overflow.direction == "forward":
        lines.append(f"No loss scale helps against an overflow in forward. {_in_float32(overflow.name, root)}")
    elif overflow is not None and safe is not None and safe < scale:
        lines.append(f"Start with a smaller loss scale: GradScaler(init_scale={safe:g}).")
    elif overflow is not None and persists:
        lines.append(f"The overflow persists at a loss scale of {scale:g}. {_in_float32(overflow.name, root)}")
    elif overflow is not None:
        lines.append("The loss scale has backed off, and later steps are finite: nothing to do.")
    if underflow is not None and safe is not None and scale * 2 <= safe < math.inf:
        lines.append(f"A larger loss scale brings gradients back: GradScaler(init_scale={safe:g}).")
    elif underflow is not None:
        # What a module in float32 hands on becomes float16 again where the module before it computes in that.
        handed_on = underflow.what in ("grad_input", "grad_output")
        way_out = _IN_BFLOAT16 if handed_on else _in_float32(underflow.name, root)
        lines.append(f"A loss scale of {scale:g} leaves no room for a larger one. {way_out}")
    return lines


_IN_BFLOAT16 = "Compute in bfloat16: Policy.parse('bfloat16')."


def _in_float32(module: str, root: str) -> str:
    if module == root:
        return _IN_BFLOAT16
    rule = Policy(compute="float16", modules={module: "float32"})
    return f"Compute that module in float32, Policy.parse({str(rule)!r}), or all in bfloat16, Policy.parse('bfloat16')."
