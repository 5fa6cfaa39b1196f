"""The current CUDA stream: its address, and whether it is being captured."""

from collections.abc import Callable

import torch

from ..guard import private


def capturing_builtin() -> Callable[[], bool]:
    """Return the function that `torch.cuda.is_current_stream_capturing` calls."""
    found: Callable[[], bool] = private(torch.cuda.graphs, "_cuda_isCurrentStreamCapturing")
    return found


def replace_capturing_builtin(function: Callable[[], bool]) -> None:
    """Have `torch.cuda.is_current_stream_capturing` call this one. Code that imported it by name is reached too."""
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = function  # type: ignore[attr-defined]  # graphs.py imports it


# A torch that was built without CUDA has neither of the two bindings in this file, and no streams.
_capturing: Callable[[], bool] | None = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def is_capturing() -> bool:
    """Return whether work that is launched now becomes part of a CUDA graph.

    It is the truth even while ampkit answers user code otherwise (`replace_capturing_builtin`).
    """
    return _capturing is not None and torch.cuda.is_initialized() and _capturing()


# raw_stream(device index): the address of the current stream, 0 for the default one. It makes no Stream object.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
