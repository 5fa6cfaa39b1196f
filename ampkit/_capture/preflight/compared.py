"""What Python code only compares: a number that it reads with `.item()`, or two tensors. It learns a truth."""

import dis
import operator
from collections.abc import Callable, Sequence
from functools import partialmethod
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._torch.tensors.modes import DeviceContext, function_modes, without_torch_function
from ..._torch.tensors.tensors import storage_address
from ..._undo import Undo
from ..._user_line import real_frame, wraps_operations
from ..host.replaced import replace_here

wraps_operations(__file__)

Compare = Callable[[Any, Any], bool]  # of Python's `operator`

_PUSHES = frozenset(
    ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_DEREF")
) | {"LOAD_GLOBAL", "LOAD_NAME"}
_IDLE = frozenset(("CACHE", "EXTENDED_ARG", "NOP", "PRECALL"))


def is_compared_at_once(frame: FrameType, *, on_the_left: bool = False) -> bool:
    """Return whether what a function returns to this frame is only compared there, as in `draw.item() < self.rate`.

    C code reads a float without asking it. So the frame must have called `item` itself, and the bytecode behind the
    call must take the number off the stack in a comparison, before any other code can have it; `on_the_left`, so that
    no other class's comparison comes first.
    """
    instructions = [each for each in dis.get_instructions(frame.f_code) if each.opname not in _IDLE]
    ran = sum(each.offset <= frame.f_lasti for each in instructions)
    if not _is_call_of_item(instructions[max(0, ran - 2) : ran]):
        return False
    above = 0  # values on the stack above the number
    for instruction in instructions[ran:]:
        name = instruction.opname
        if name == "COMPARE_OP":
            return above == 1 or (above == 0 and not on_the_left)
        calls = "NULL" in instruction.argrepr  # the beginning of a call
        if name in _PUSHES and not calls:
            above += 1
        elif name.startswith("BINARY_") and above >= 2:
            above -= 1
        elif name != "LOAD_ATTR" or not above or calls:
            return False
    return False


def _is_call_of_item(instructions: Sequence[dis.Instruction]) -> bool:
    """Return whether these two are `.item()`, and not a call of another function that calls it."""
    found = [(each.opname, each.argval) for each in instructions]
    return found in ([(name, "item"), ("CALL", 0)] for name in ("LOAD_METHOD", "LOAD_ATTR"))


class ComparedNumber(float):
    """A float whose comparisons are made by a function, which gets the comparison and the other operand."""

    answer: Callable[[Compare, Any], bool]

    def _compare(self, compare: Compare, other: Any) -> bool:
        return self.answer(compare, other)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(ComparedNumber, f"__{_name}__", partialmethod(ComparedNumber._compare, getattr(operator, _name)))


def ask_for_truths(undo: Undo, device: torch.device) -> None:
    """Have code that compares numbers or whole tensors of this device ask `Tensor.__bool__` for the result.

    So do `x.item() > 3`, `torch.equal` and `torch.allclose`, until that is undone. Numbers are compared as Python does,
    which rounds none of them.
    """

    def item(original: Callable[..., Any], tensor: Tensor) -> Any:
        exact = _EXACT.get(tensor.dtype)
        if exact is None or not is_here(tensor) or tensor.numel() != 1 or _is_seen_by_others():
            return original(tensor)
        if not is_compared_at_once(real_frame(), on_the_left=True):
            return original(tensor)
        with without_torch_function():
            now = tensor.detach().to(exact, copy=True)  # the other operand may be code that changes it

        def answer(compare: Compare, other: Any) -> bool:
            is_whole = type(other) in (bool, int) and abs(other) <= _MOST_EXACT
            if is_whole or (type(other) is float and exact is torch.float64):
                with without_torch_function():
                    truth = compare(now, other)
                return bool(truth)
            return compare(original(tensor), other)

        number = ComparedNumber("nan")
        number.answer = answer
        return number

    def equal(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) != 2 or not all(map(is_here, given)) or len({(each.dtype, each.shape) for each in given}) > 1:
            return original(*args, **kwargs)
        # A tensor that has nan in it equals itself.
        if storage_address(given[0]) == storage_address(given[1]) or _is_seen_by_others():
            return original(*args, **kwargs)
        with without_torch_function():
            truth = (given[0].detach() == given[1].detach()).all()
        return bool(truth)

    def allclose(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if len(given) != 2 or not all(map(is_here, given)) or _is_seen_by_others():
            return original(*args, **kwargs)
        with torch.no_grad(), without_torch_function():
            truth = torch.isclose(*args, **kwargs).all()
        return bool(truth)

    def is_here(tensor: Any) -> bool:
        return is_plain(tensor) and tensor.device.type == device.type

    replace_here(undo, Tensor, "item", item)
    for owner in (torch, Tensor):
        replace_here(undo, owner, "equal", equal)
        replace_here(undo, owner, "allclose", allclose)


def _is_seen_by_others() -> bool:
    """Return whether a function mode of the user's is entered, which sees each call that is made."""
    modes = (mode for mode in function_modes() if not isinstance(mode, DeviceContext))
    return any(not type(mode).__module__.startswith("ampkit.") for mode in modes)


def is_plain(tensor: Any) -> bool:
    """Return whether this is a tensor of no subclass of the user's, with a memory that is its own or a part of one."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested


# Dtypes that have all numbers of others. Of uint64 and complex numbers there is none.
_EXACT = {
    **dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8), torch.int64),
}
_MOST_EXACT = 1 << 53  # up to which float64 has all whole numbers
