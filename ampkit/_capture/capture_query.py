"""What user code is told when it asks whether its stream is being captured: what the eager call was told."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._torch.streams import capturing_builtin, replace_capturing_builtin
from .._undo import Undo

# Libraries take another branch in a capture (transformers/masking_utils.py builds another mask and so reaches another
# attention kernel): the graph would hold another step than the eager one. torch's own callers must know the truth: the
# optimizers' health check, SyncBatchNorm, symmetric memory. So must ampkit's.
_TOLD_THE_TRUTH = ("torch", "ampkit")


class _Captures(threading.local):
    """How many captures this thread is in, and how many calls whose operations are, or stand for, those of a graph."""

    inside = 0
    recorded = 0  # captures, emulated ones too, and the eager calls that they are compared with


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
    """Context of a capture on this stream, of which `torch.cuda.is_current_stream_capturing()` tells user code nothing.

    Other threads are told the truth of their own streams. The stream decides, not the thread alone, for checkpointing
    calls user code again on autograd's threads.
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
    """Take the place of what `torch.cuda.is_current_stream_capturing` calls, however its callers got hold of that."""
    if not _is_capturing():
        return False
    # In the capturing thread also a stream that was forked off is part of the capture.
    ours = captures.inside > 0 or torch.cuda.current_stream().cuda_stream in _streams.copy().values()
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return not ours or caller.partition(".")[0] in _TOLD_THE_TRUTH
