"""Settings of the process during a capture: no garbage collection, no recompilation, memory segments that grow."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..._torch.compile import fail_on_recompile
from ..._torch.device.allocator import allocator_settings, set_allocator_settings
from ..._undo import Undo


@dataclass(eq=False)
class _SharedChange:
    """A temporary change of the process that several threads may want: the first makes it, the last undoes it."""

    _make: Callable[[Undo], None]  # notes how to undo the change, and makes it
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _users: set[object] = field(default_factory=set)
    _undo: Undo = field(default_factory=Undo)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the change is made."""
        with Undo() as undo:
            user = object()
            undo.note(self._leave, user)
            with self._lock:
                first = not self._users
                self._users.add(user)
                if first:
                    self._make(self._undo)
            yield

    def _leave(self, user: object) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users:
                self._undo.undo()


def _stop_collection(undo: Undo) -> None:
    if gc.isenabled():
        undo.note(gc.enable)
        gc.disable()


# A cycle that is collected during a capture may free tensors, or a graph, which a capture does not allow. To collect
# before the capture would prevent that as well, but takes 0.1 s and more.
no_collection = _SharedChange(_stop_collection)

# torch.compile's stance is one for the whole process.
no_recompile = _SharedChange(fail_on_recompile)


# By default the allocator takes segments of 20 MiB, or of one block's size, and never joins free memory of two
# segments. In one segment that grows, a ResNet-50 (b32, float16) takes 1388 MiB on an H100 instead of 1632, a ResNet-18
# (b64) 172 either way, ViT-B/16 (b32) 2246 instead of 2366, a GPT-2 (b16) 3764 instead of 3790; the milliseconds are
# the same. For eager calls before a capture, it gives back what they have freed, though a part of the segment is in
# use. At its peak the process then holds 1982 MiB (ResNet-50), 3776 (ViT-B/16) and 3920 (GPT-2, b8) on an H200, with
# torch's segments 2358, 4084 and 4428, and torch's own eager AMP 2006, 3722 and 3836 (tests/benchmarks/peak_memory.py).
@dataclass(eq=False)
class _Growth:
    """Whether the allocator takes segments that grow."""

    _possible: bool | None = None  # not known before the first try

    def begin(self, undo: Undo) -> None:
        """Have the allocator take segments that grow, unless the user has said which kind to take.

        Not where processes talk to each other: NCCL registers the memory that it finds in a capture, takes it for one
        allocation, and hangs (pytorch#158029).
        """
        talks = torch.distributed.is_available() and torch.distributed.is_initialized()
        # On systems other than Linux, torch warns that it cannot (c10/cuda/CUDAAllocatorConfig.h).
        if self._possible is False or talks or sys.platform != "linux":
            return
        settings, expandable = allocator_settings()
        chosen = expandable or "expandable_segments" in settings or "backend" in settings
        if chosen or torch.cuda.get_allocator_backend() != "native":
            return
        rest = settings.strip(" ,")
        rest = f"{rest}," if rest else ""
        # An option that a text leaves out keeps its value or gets its default, so that undoing takes two texts.
        undo.note(set_allocator_settings, settings)
        undo.note(set_allocator_settings, f"{rest}expandable_segments:False")
        try:
            set_allocator_settings(f"{rest}expandable_segments:True")
        except ValueError:  # torch accepts the text, but not with an option appended
            undo.forget()
            set_allocator_settings(settings)
            return
        if self._possible is None and torch.cuda.is_initialized():
            # WSL2 cannot map memory (pytorch#192330), nor can some virtual GPUs, as an allocation finds out.
            try:
                with torch.cuda.use_mem_pool(torch.cuda.MemPool()):  # in which there is no memory yet
                    torch.empty(1, device="cuda")
                self._possible = True
            except RuntimeError as error:
                self._possible = "CUDA driver error" not in str(error) or "out of memory" in str(error)
            if not self._possible:
                undo.undo()


growing_segments = _SharedChange(_Growth().begin)
