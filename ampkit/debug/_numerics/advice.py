"""What to do about an overflow or an underflow: which loss scale is safe, and which code to write."""

import math

from ..._precision.policy import Policy
from .findings import NumericsFinding

F16_MAX = 65504.0  # torch.finfo(torch.float16).max
_IN_BFLOAT16 = "Compute in bfloat16: Policy.parse('bfloat16')."


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
    """Return what to do, in sentences that contain the code to write.

    Args:
        overflow: the first overflow, if there was one.
        underflow: the first underflow, if there was one.
        scale: the present loss scale.
        safe: the largest safe loss scale, None if it is not known.
        persists: whether the last observed step overflowed too.
        root: the name that stands for the model itself; a policy cannot name it.
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
