"""What the user gets of the observed steps: findings, what to do about them, and the statistics as a table."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..._precision.policy import Policy
from ..._text import size_text
from .findings import NumericsFinding, NumericsRow

F16_MAX = 65504.0  # torch.finfo(torch.float16).max
_IN_BFLOAT16 = "Compute in bfloat16: Policy.parse('bfloat16')."
_SHOWN = 24  # rows of the table in the text of a report: they fit on a screen with the lines above them
_MODULES_NAMED = 8  # modules that were never called, of those that the text names: they take a line or two


@dataclass(frozen=True)
class NumericsReport:
    """What was found in the observed steps so far.

    Attributes:
        steps: how many optimizer steps there were so far.
        observed: how many of them were observed.
        step: the last observed step, None if there was none.
        scale: the loss scale in that step, 1.0 if there is none.
        safe_scale: the largest power of two that would have kept every gradient of the observed steps finite in
            float16; inf if all gradients were zero, None if each of these steps overflowed.
        first_overflow: where a step first computed a value that is inf or nan and reached a gradient.
        first_underflow: the module in whose backward float16 gradients first vanished.
        advice: what to do, with the code to write.
        rows: the statistics of the last observed step, in the order of time.
        never_called: modules that no observed step called in Python: they are unused, or inside compiled code.
        compiled: modules that were measured from outside.
        bytes: the size of the buffer on the device.
    """

    steps: int
    observed: int
    step: int | None
    scale: float
    safe_scale: float | None
    first_overflow: NumericsFinding | None
    first_underflow: NumericsFinding | None
    advice: tuple[str, ...]
    rows: tuple[NumericsRow, ...]
    never_called: tuple[str, ...]
    compiled: tuple[str, ...]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json.dumps` takes. JSON has no inf: a `safe_scale` of inf becomes None."""
        named = {"first_overflow": self.first_overflow, "first_underflow": self.first_underflow}
        findings = {name: None if found is None else found._asdict() for name, found in named.items()}
        safe = None if self.safe_scale == math.inf else self.safe_scale
        return {**asdict(self), **findings, "safe_scale": safe, "rows": [row._asdict() for row in self.rows]}

    def table(self, rows: int | None = None) -> str:
        """Return the statistics as a text table in the order of time.

        Args:
            rows: show only this many rows, the worst ones. None shows all.
        """
        shown = self.rows
        if rows is not None and len(shown) > rows:
            worst = sorted(shown, key=_badness, reverse=True)[:rows]
            shown = tuple(row for row in shown if row in worst)
        width = max([len(row.name) for row in shown], default=6)
        head = f"{'name':{width}}  what         dtype      largest    not finite  zeros   subnormal  flushed in fp16"
        in_float8 = any(row.in_float8 for row in shown)
        lines = [head + "  flushed in fp8  saturated" * in_float8]
        for row in shown:
            largest = f"{'>=' if row.nonfinite else ''}{row.largest:.3e}"
            line = (
                f"{row.name:{width}}  {row.what:11}  {row.dtype:8}  {largest:>10}  {row.nonfinite:10d}  "
                f"{row.zeros / row.count:6.1%}  {row.subnormal / row.count:9.1%}  {row.flushed / row.count:6.1%}"
            )
            if row.in_float8:
                saturated = row.saturated_in_float8 / row.in_float8
                line += f"{row.fraction_flushed_in_float8:17.1%}{saturated:19.1%}"
            lines.append(line)
        return "\n".join(lines)

    def __str__(self) -> str:
        if self.step is None:
            return f"numerics: {self.steps} steps, none of them observed."
        safe = "not known, all observed steps overflowed" if self.safe_scale is None else f"{self.safe_scale:g}"
        lines = [
            f"numerics: {self.observed} of {self.steps} steps observed, the last one step {self.step}; "
            f"loss scale {self.scale:g}, largest safe one {safe}; {size_text(self.bytes)} on the device",
            *(str(found) for found in (self.first_overflow, self.first_underflow) if found is not None),
            *(f"advice: {line}" for line in self.advice),
        ]
        if self.compiled:
            lines.append(f"compiled, measured from outside: {', '.join(self.compiled)}")
        if self.never_called:
            lines.append(f"never called, or inside compiled code: {', '.join(self.never_called[:_MODULES_NAMED])}")
        return "\n".join([*lines, f"step {self.step}, the worst rows of {len(self.rows)}:", self.table(_SHOWN)])


def _badness(row: NumericsRow) -> tuple[bool, float]:
    return row.nonfinite > 0, max(row.fraction_fading, row.fraction_flushed_in_float8)


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
    """Return what to do about the first overflow and underflow, in sentences that contain the code to write.

    `safe` is the largest safe loss scale, None if it is not known. The overflow `persists` if the last observed step
    overflowed too. `root` is the name that stands for the model itself; a policy cannot name it.
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
        # A module in float32 would not help: the gradient that it passes back becomes float16 again if the module
        # before it computes in float16.
        between_modules = underflow.what in ("grad_input", "grad_output")
        remedy = _IN_BFLOAT16 if between_modules else _in_float32(underflow.name, root)
        lines.append(f"A loss scale of {scale:g} leaves no room for a larger one. {remedy}")
    return lines


def _in_float32(module: str, root: str) -> str:
    if module == root:
        return _IN_BFLOAT16
    rule = Policy(compute="float16", modules={module: "float32"})
    return f"Compute that module in float32, Policy.parse({str(rule)!r}), or all in bfloat16, Policy.parse('bfloat16')."
