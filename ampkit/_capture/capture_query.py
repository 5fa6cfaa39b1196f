"""The answer to user code that asks whether its stream is being captured: the same as in an eager call."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._torch.streams import capturing_builtin, replace_capturing_builtin
from .._undo import Undo

# Libraries take another branch in a capture: transformers/masking_utils.py builds another mask, and another attention
# kernel runs. So the graph would not do what the eager step does. Torch needs the true answer (health check of the
# optimizers, SyncBatchNorm, symmetric memory), and so does ampkit.
_TOLD_THE_TRUTH = ("torch", "ampkit")


class _Captures(threading.local):
    """Counts the captures that are under way in this thread, and calls whose operations are recorded."""

    inside = 0
    recorded = 0  # these captures, emulated ones, and the eager calls that captures are compared with


captures = _Captures()
_streams: dict[object, int] = {}  # the handles of the streams of ampkit's captures that are under way
_lock = threading.Lock()
_is_capturing = capturing_builtin()


@contextmanager
def recording() -> Iterator[None]:
    """Context of a capture, or of the eager call that one is compared with."""
    with Undo() as undo:
        undo.note(setattr, captures, "recorded", captures.recorded)
        captures.recorded += 1
        yield


@contextmanager
def hidden_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context of a capture on this stream, in which `torch.cuda.is_current_stream_capturing()` is False for user code.

    Other threads get the true answer for their own streams. The answer depends on the stream as well as on the thread,
    because checkpointing calls user code again on autograd's threads.
    """
    with Undo() as undo:
        capture = object()
        undo.note(_end, capture)
        undo.note(setattr, captures, "inside", captures.inside)
        with _lock:
            _streams[capture] = stream.cuda_stream
            replace_capturing_builtin(_answer)
        captures.inside += 1
        with recording():
            yield


def _end(capture: object) -> None:
    with _lock:
        _streams.pop(capture, None)
        if not _streams:
            replace_capturing_builtin(_is_capturing)


def _answer() -> bool:
    """Answer in place of the builtin that `torch.cuda.is_current_stream_capturing` calls."""
    if not _is_capturing():
        return False
    # In the thread that captures, other streams that wait for the capturing one are captured too.
    ours = captures.inside > 0 or torch.cuda.current_stream().cuda_stream in _streams.copy().values()
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return not ours or caller.partition(".")[0] in _TOLD_THE_TRUTH
