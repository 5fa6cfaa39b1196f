"""What scripts with cases for several ranks share: how two jobs of a rank are compared."""

from typing import Any

import torch
from torch import Tensor


def differences(left: Any, right: Any) -> list[str]:
    """Return the names of what differs in any bit between two jobs, which have `state()`, `outputs` and `watch`."""
    first, second = left.state(), right.state()
    names = [name for name in first if name not in second or not same_bits(first[name], second[name])]
    for call, (a, b) in enumerate(zip(left.outputs, right.outputs, strict=True)):
        pairs = zip(a, b, strict=False)  # torch's loop returns the loss alone if there is no norm
        names += [f"output {i} of call {call}" for i, (x, y) in enumerate(pairs) if not same_bits(x, y)]
    if left.watch is not None and right.watch is not None:
        names += ["numerics"] if repr(left.watch.report().rows) != repr(right.watch.report().rows) else []
    return names


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same bits, except those of nan."""
    return left.dtype is right.dtype and torch.equal(left.cpu().nan_to_num(0.5), right.cpu().nan_to_num(0.5))
