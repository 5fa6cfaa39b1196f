"""What code costs the host, counted: a count is the same on a busy machine, where a time is not."""

import gc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts the functions of torch that are called, attributes of tensors included."""

    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def instructions() -> Iterator[list[int]]:
    """Count the bytecode instructions that run, into the one element of a list."""
    count = [0]

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes = True
        count[0] += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
