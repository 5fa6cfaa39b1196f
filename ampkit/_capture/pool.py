"""What holds for the process while a graph is captured: which segments of memory it takes, what must not happen."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .._torch.allocator import allocator_settings, set_allocator_settings
from .._torch.compile import fail_on_recompile
from .._undo import Undo


class _Overlapping:
    """Something that holds for the process, and that threads may ask for at the same time: the first of them makes it
    so, the last one undoes it.

    Args:
        make: makes it so, having noted how to undo that.
    """

    def __init__(self, make: Callable[[Undo], None]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._undo = Undo()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which it holds."""
        with Undo() as undo:
            holder = object()
            undo.note(self._leave, holder)
            with self._lock:
                first = not self._holders
                self._holders.add(holder)
                if first:
                    self._make(self._undo)
            yield

    def is_held(self) -> bool:
        """Return whether somebody has asked for it."""
        return bool(self._holders)

    def _leave(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._undo.undo()


def _stop_collection(undo: Undo) -> None:
    if gc.isenabled():
        undo.note(gc.enable)
        gc.disable()


# A cycle freed in mid-capture would free its tensors, or a graph, into it. A collection before the capture would do as
# well, but takes 0.1 s and more.
no_collection = _Overlapping(_stop_collection)


# torch.compile's stance is of the process.
no_recompile = _Overlapping(fail_on_recompile)


# By itself the allocator takes segments of 20 MiB, or of one block's size, and never joins what lies in two. In one
# that grows a ResNet-50 (b32, float16) takes 1388 MiB on an H100 instead of 1632, a ResNet-18 (b64) 172 either way,
# ViT-B/16 (b32) 2246 instead of 2366, a GPT-2 (b16) 3764 instead of 3790; the milliseconds are the same.
class _Growth:
    """Whether pools take one segment that grows."""

    def __init__(self) -> None:
        self._tried = False
        self._impossible = False

    def begin(self, undo: Undo) -> None:
        """Have pools take one segment that grows, unless the user has said which kind to take.

        Not where processes talk to each other: NCCL registers the memory that it finds in a capture, takes it for one
        allocation, and hangs (pytorch#158029).
        """
        settings = None if self._impossible or _excluded() else _changeable_settings()
        if settings is None:
            return
        rest = settings.strip(" ,")
        rest = f"{rest}," if rest else ""
        # What a text leaves out keeps its value, or gets its default, by option: so first off, then as it was.
        undo.note(set_allocator_settings, settings)
        undo.note(set_allocator_settings, f"{rest}expandable_segments:False")
        try:
            set_allocator_settings(f"{rest}expandable_segments:True")
        except ValueError:  # torch took the text, but not with more behind it
            undo.forget()
            set_allocator_settings(settings)
        else:
            self._tried = True

    def gave_up(self, error: BaseException | None) -> bool:
        """Return whether a capture failed since this machine cannot map memory. Then no segment grows from now on.

        WSL2 cannot (pytorch#192330), nor can some virtual GPUs. torch finds out at the first allocation.
        """
        text = str(error)
        if not self._tried or "CUDA driver error" not in text or "out of memory" in text:
            return False
        self._impossible = True  # for every thread that is told so, the first or not
        return True


def _excluded() -> bool:
    talks = torch.distributed.is_available() and torch.distributed.is_initialized()
    # Elsewhere than on Linux torch warns that it cannot (c10/cuda/CUDAAllocatorConfig.h).
    return talks or sys.platform != "linux" or torch.cuda.get_allocator_backend() != "native"


def _changeable_settings() -> str | None:
    """Return the settings of the allocator, None if they say which segments to take."""
    settings, expandable = allocator_settings()
    return None if expandable or "expandable_segments" in settings or "backend" in settings else settings


growth = _Growth()
growing_segments = _Overlapping(growth.begin)
