"""What holds for the process while a graph is captured: which segments of memory it takes, what must not happen."""

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from ._torch import allocator_settings, fail_on_recompile, set_allocator_settings


class _Overlapping:
    """Context of something that holds for the process, and that threads may be in at the same time: the first of them
    makes it so, the last one undoes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._inside = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._undo.enter_context(self._make())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._undo.close()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# A cycle freed in mid-capture would free its tensors, or a graph, into it. A collection before the capture would do as
# well, but takes 0.1 s and more.
no_collection = _Overlapping(_without_collection)


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

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Context in which a pool takes one segment that grows, unless the user has said which kind to take.

        Not where processes talk to each other: NCCL registers the memory that it finds in a capture, takes it for one
        allocation, and hangs (pytorch#158029).
        """
        settings = None if self._impossible or _excluded() else _changeable_settings()
        if settings is None:
            yield
            return
        rest = settings.strip(" ,")
        rest = f"{rest}," if rest else ""
        try:
            set_allocator_settings(f"{rest}expandable_segments:True")
        except ValueError:  # torch took the text, but not with more behind it
            set_allocator_settings(settings)
            yield
            return
        self._tried = True
        try:
            yield
        finally:
            # What a text leaves out keeps its value, or gets its default, by option: so first off, then as it was.
            set_allocator_settings(f"{rest}expandable_segments:False")
            set_allocator_settings(settings)

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
growing_segments = _Overlapping(growth.context)
