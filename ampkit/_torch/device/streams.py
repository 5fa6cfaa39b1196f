"""The current CUDA stream: its address, and whether it is being captured."""

import functools
from collections.abc import Callable

import torch

from ..guard import private

_NAME = "_cuda_isCurrentStreamCapturing"
# capturing_builtin(): the function that `torch.cuda.is_current_stream_capturing` calls.
capturing_builtin: Callable[[], Callable[[], bool]] = functools.partial(private, torch.cuda.graphs, _NAME)
# replace_capturing_builtin(function) has it call this one. Code that imported it by name is reached too.
replace_capturing_builtin: Callable[[Callable[[], bool]], None] = functools.partial(setattr, torch.cuda.graphs, _NAME)
# A torch that was built without CUDA has neither of the two bindings in this file, and no streams.
_capturing: Callable[[], bool] | None = getattr(torch._C, _NAME, None)


def is_capturing() -> bool:
    """Return whether work that is launched now becomes part of a CUDA graph.

    It is the truth even while ampkit answers user code otherwise (`replace_capturing_builtin`).
    """
    return _capturing is not None and torch.cuda.is_initialized() and _capturing()


# raw_stream(device index): the address of the current stream, 0 for the default one. It makes no Stream object.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
