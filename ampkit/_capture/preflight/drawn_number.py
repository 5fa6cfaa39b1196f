"""A drawn number that a step reads with `.item()`: whether Python code only compares it, and what it learns so."""

import dis
import operator
from collections.abc import Callable
from functools import partialmethod
from types import FrameType
from typing import Any

Compared = Callable[[Callable[[Any, Any], bool], float], object]  # is told of a comparison with this number

_PUSHES = frozenset(
    ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_DEREF")
) | {"LOAD_GLOBAL", "LOAD_NAME"}
_IDLE = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PRECALL"))


def is_compared_at_once(frame: FrameType) -> bool:
    """Return whether what a function returns to this frame is only compared there, as in `draw.item() < self.rate`.

    C code reads a float without asking it. So the bytecode behind the call must take the number off the stack in a
    comparison, before any other code can have it.
    """
    above = 0  # values on the stack above the number
    for instruction in dis.get_instructions(frame.f_code):
        name = instruction.opname
        if instruction.offset <= frame.f_lasti or name in _IDLE:
            continue
        if name == "COMPARE_OP":
            return above <= 1
        calls = "NULL" in instruction.argrepr  # the beginning of a call
        if name in _PUSHES and not calls:
            above += 1
        elif name.startswith("BINARY_") and above >= 2:
            above -= 1
        elif name != "LOAD_ATTR" or not above or calls:
            return False
    return False


class DrawnNumber(float):
    """A float that tells of its comparisons; of one with something else than a number, as one with nan."""

    told: Compared

    def _compare(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        self.told(compare, other if type(other) in (bool, int, float) else float("nan"))
        return compare(float(self), other)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(DrawnNumber, f"__{_name}__", partialmethod(DrawnNumber._compare, getattr(operator, _name)))
