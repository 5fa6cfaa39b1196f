"""What the statistics of a step say: where it first overflowed or underflowed, and which gradient is the largest."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._text import dtype_name
from .hooks import ModelHooks
from .measurements import BIAS, BINS, FLOAT8, LARGEST, MAGNITUDE, NONFINITE

_F16_NORMAL = -14  # exponent of torch.finfo(torch.float16).smallest_normal; below it digits are lost one by one
_F16_ZERO = -25  # values below 2**-25 are rounded to zero
# The share of subnormal values among those that are not zero from which on a tensor counts as underflowing: more than
# half of its values have lost digits. In healthy tensors the share is near 0.
_UNDERFLOWING = 0.5
_GRADIENTS = ("grad_output", "grad_input", "gradient")
# The exponents that a report tells apart: those of float16, -24 to 15, and some beyond on either side.
_LOWEST, _HIGHEST = -32, 16


class NumericsFinding(NamedTuple):
    """Where a step first left the range of its numbers.

    Attributes:
        kind: "overflow" or "underflow".
        name: the module in which it happened.
        direction: "forward" or "backward".
        step: the optimizer step, counted from 0.
        what: the tensor that shows it: the module's "output" or "grad_input", or the name of a parameter if its
            gradient shows it. It is "input", "weight" or "grad_output" if it had happened before the module computed.
        detail: the numbers behind it, in words.
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
    """Statistics of a tensor of a module, or of the gradient of a parameter, added up over all calls in one step.

    Attributes:
        name: the name of the module or the parameter.
        what: "input", "output", "grad_output" (the gradient of the module's outputs) or "grad_input" (the gradient that
            the module passes back to its inputs); "weight" for that of a Linear layer which computes in float8;
            "gradient" for a parameter. Gradients are measured as the backward computes them, multiplied by the loss
            scale.
        dtype: the dtype of the tensor.
        count: how many values it has.
        largest: the largest magnitude. If a value is inf or nan, it is a power of two: the largest finite magnitude is
            at least that, and less than twice that.
        nonfinite: how many values are inf or nan.
        zeros: how many values are zero. In bfloat16 and float32, subnormals (below 2**-126) are counted as zeros.
        subnormal: how many values are not zero, but below 2**-14, where float16 loses digits.
        flushed: how many of the `subnormal` ones are below 2**-25, which float16 rounds to zero. It is 0 if the tensor
            is in float16 already.
        exponents: how many values there are from 2**e up to 2**(e + 1), by e from -32 (or less) to 16 (or more).
        in_float8: how many values a Linear layer has cast to float8. It casts its input, its weight and the gradient of
            its output, each under its own recipe.
        flushed_in_float8: how many of these were not zero, and became zero. Each tensor is read by two products. With
            one scale per row it is cast for each of them, and a value counts if it became zero for one of them.
        saturated_in_float8: how many became the largest number of the format because they were beyond it. Scales are
            made from the largest magnitude of the tensor or the row, so it is 0 with every recipe of today.
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
    in_float8: int = 0
    flushed_in_float8: int = 0
    saturated_in_float8: int = 0

    @property
    def fraction_flushed(self) -> float:
        """The share of values that float16 rounds to zero.

        In a float16 tensor it is the share of zeros, whatever made them: ReLU and pooling do so too.
        """
        return (self.zeros if self.dtype == "float16" else self.flushed) / self.count

    @property
    def fraction_fading(self) -> float:
        """The share of subnormal values among those that are not zero. It is near 0 in healthy tensors, 1 at worst."""
        return self.subnormal / max(self.count - self.zeros, 1)

    @property
    def fraction_flushed_in_float8(self) -> float:
        """The share of values that became zero in float8, of those that were cast; 0 if none was."""
        return self.flushed_in_float8 / max(self.in_float8, 1)


class ObservedStep:
    """One observed step, and what its statistics say.

    The buffer is a copy of that of `DeviceStatistics`, in host memory. The order is that in which rows were measured;
    those of parameters come last. Dtypes are by row.
    """

    def __init__(
        self, step: int, buffer: Tensor, hooks: ModelHooks, order: Sequence[int], dtypes: Mapping[int, torch.dtype]
    ) -> None:
        self.step, self.scale = step, float(buffer[-1, 0]) or 1.0
        tensors = hooks.tensors
        self._tensors, self._parameters, self._dtypes = tensors, hooks.parameters, dtypes
        self._row_of = {(tensor.name, tensor.what): i for i, tensor in enumerate(tensors)}
        self._values = values = buffer[:-1]
        # Lists, by row: looking up single elements of a tensor would take milliseconds altogether.
        self._counts: list[float] = values[:, :BINS].sum(1).tolist()
        self._zeros: list[float] = values[:, 0].tolist()
        self._subnormals: list[float] = values[:, 1 : _F16_NORMAL + BIAS].sum(1).tolist()
        self._nonfinite: list[float] = values[:, NONFINITE].tolist()
        self._largest: list[float] = values[:, LARGEST].tolist()
        self.nonfinite_rows = {i for i, count in enumerate(self._nonfinite) if count}
        self.overflowed = any(tensors[i].what == "gradient" for i in self.nonfinite_rows)
        for i in self.nonfinite_rows:  # the counts of exponents tell the largest finite one
            finite = values[i, 1:NONFINITE].nonzero()
            self._largest[i] = 2.0 ** (int(finite[-1]) + 1 - BIAS) if len(finite) else 0.0
        self._magnitudes: list[float] = values[:, MAGNITUDE].tolist()
        place = {row: float(i) for i, row in enumerate(order)}
        for i in order:  # the gradient of a parameter belongs to the backward of its module
            if (tensor := tensors[i]).what == "gradient":
                place[i] = place.get(self._row_of.get((tensor.module, "grad_output"), i), place[i]) + 0.5
        self._order = [i for i in sorted(place, key=place.__getitem__) if self._counts[i]]

    def rows(self) -> list[NumericsRow]:
        """Return the statistics in the order of time."""
        rows = []
        for i in self._order:
            counts = self._values[i, :BINS]
            exponents: Counter[int] = Counter()
            for number in counts[1:NONFINITE].nonzero().flatten().tolist():
                exponents[min(max(number + 1 - BIAS, _LOWEST), _HIGHEST)] += int(counts[number + 1])
            row = NumericsRow(
                name=self._tensors[i].name,
                what=self._tensors[i].what,
                dtype=dtype_name(self._dtypes[i]),
                count=int(self._counts[i]),
                largest=self._largest[i],
                nonfinite=int(self._nonfinite[i]),
                zeros=int(self._zeros[i]),
                subnormal=int(self._subnormals[i]),
                flushed=int(counts[1 : _F16_ZERO + BIAS].sum()),
                exponents=dict(exponents),
                in_float8=int(self._values[i, FLOAT8]),
                flushed_in_float8=int(self._values[i, FLOAT8 + 1]),
                saturated_in_float8=int(self._values[i, FLOAT8 + 2]),
            )
            rows.append(row)
        return rows

    def first_overflow(self, harmless: set[int]) -> NumericsFinding | None:
        """Return where the overflow began, None if the gradients of all parameters are finite.

        Harmless are rows that are not finite in good steps either, such as attention scores that a mask sets to -inf.
        """
        if not self.overflowed:
            return None
        bad = [i for i in self._order if i in self.nonfinite_rows]
        first = next((i for i in bad if i not in harmless), None)
        if first is None:
            first = next(i for i in bad if self._tensors[i].what == "gradient")
        tensor = self._tensors[first]
        direction = "forward" if tensor.what in ("input", "weight", "output") else "backward"
        what = tensor.name if tensor.what == "gradient" else tensor.what
        amount = f"{int(self._nonfinite[first])} of {int(self._counts[first])} values are not finite"
        how = {
            "input": f"its input: {amount} already, because of the batch or of code between modules",
            "weight": f"its weight: {amount} already",
            "output": f"its output: {amount}",
            "grad_output": f"its grad_output: {amount} already, because of the loss, its scale or other code",
            "grad_input": f"its grad_input: {amount}",
            "gradient": f"the gradient of {tensor.name}: {amount}",
        }[tensor.what]
        parameters = self._parameters.get(tensor.module, {})
        if broken := [name for name, i in parameters.items() if not self._magnitudes[i] < math.inf]:
            how = f"{amount}; {broken[0]} is not finite itself: it broke in an earlier step"
        return NumericsFinding("overflow", tensor.module, direction, self.step, what, how)

    def first_underflow(self) -> NumericsFinding | None:
        """Return the module in whose backward float16 gradients begin to vanish, None if they do not.

        Zeros do not tell: ReLU, pooling and dropout make millions of them. Underflow leaves subnormal values beside the
        zeros, or it leaves only zeros behind a module whose weights are not zero.
        """
        for i in self._order:
            tensor = self._tensors[i]
            if self._dtypes[i] is not torch.float16 or tensor.what not in ("grad_output", "grad_input"):
                continue
            grad_output = self._row_of[tensor.name, "grad_output"]
            had_values = self._counts[grad_output] > self._zeros[grad_output]
            # Its first parameter is its weight, which may be zero: that of a BatchNorm may start so.
            weights = list(self._parameters.get(tensor.module, {}).values())[:1]
            has_weights = any(self._magnitudes[weight] > 0 for weight in weights)
            nonzero = self._counts[i] - self._zeros[i]
            vanished = tensor.what == "grad_input" and had_values and not nonzero and has_weights
            if vanished or self._subnormals[i] / max(nonzero, 1.0) >= _UNDERFLOWING:
                detail = f"its {tensor.what}: {self._zeros_and_subnormals(i)}"
                already = tensor.what == "grad_output"
                detail += " already" if already else f"; its grad_output: {self._zeros_and_subnormals(grad_output)}"
                return NumericsFinding("underflow", tensor.module, "backward", self.step, tensor.what, detail)
        return None

    def _zeros_and_subnormals(self, i: int) -> str:
        zeros, subnormal = self._zeros[i] / self._counts[i], self._subnormals[i] / self._counts[i]
        return f"{zeros:.1%} zeros and {subnormal:.1%} subnormal values"

    def largest_unscaled_gradient(self) -> float:
        """Return the largest finite magnitude of a gradient, divided by the loss scale; 0 if there is none."""
        found = [self._largest[i] for i in self._order if self._tensors[i].what in _GRADIENTS]
        return max(found, default=0.0) / self.scale

    def gradients_of_parameters(self) -> tuple[float, float, float]:
        """Return three figures over the gradients of all parameters.

        These are the largest finite magnitude, divided by the loss scale; how many values are not finite; and the share
        of values that float16 rounds to zero.
        """
        chosen = [i for i in self._order if self._tensors[i].what == "gradient"]
        count = sum(self._counts[i] for i in chosen) or 1.0
        below = self._values[:, 1 : _F16_ZERO + BIAS].sum(1).tolist()
        flushed = sum(self._zeros[i] if self._dtypes[i] is torch.float16 else below[i] for i in chosen)
        largest = max((self._largest[i] for i in chosen), default=0.0)
        return largest / self.scale, sum(self._nonfinite[i] for i in chosen), flushed / count

    def flushed_in_float8(self) -> float | None:
        """Return the share of values that became zero, of all that were cast to float8; None if none was."""
        cast, flushed, _ = self._values[:, FLOAT8:].sum(0).tolist()
        return flushed / cast if cast else None
