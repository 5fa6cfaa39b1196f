"""The caching allocator of CUDA memory: its settings, its history, captures that it takes for unfinished."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .guard import private


def drop_capture_from_allocator(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the caching allocator that a capture that failed is over.

    `CUDAGraph.capture_end` raises before it does so itself (ATen/cuda/CUDAGraph.cpp). Left alone, the allocator takes
    the capture for unfinished and never again frees a block that `record_stream` marked: 20 x 64 MiB measured as lost.
    """
    assert device.index is not None
    private(torch._C, "_cuda_endAllocateToPool")(device.index, pool)
    private(torch._C, "_cuda_releasePool")(device.index, pool)


def allocator_settings() -> tuple[str, bool]:
    """Return what the allocator of CUDA memory was last configured with, and whether its segments are expandable.

    The text is PYTORCH_ALLOC_CONF, or what was set since. An option that it does not name may keep its value.
    """
    found = private(torch._C, "_cuda_memorySnapshot")((0, 0, False))["allocator_settings"]
    return str(found["PYTORCH_CUDA_ALLOC_CONF"]), bool(found["expandable_segments"])


def set_allocator_settings(settings: str) -> None:
    """Configure the allocator of CUDA memory, for what it takes from now on."""
    private(torch._C, "_accelerator_setAllocatorSettings")(settings)


def clear_cublas_workspaces() -> None:
    """Give back the memory that cuBLAS keeps per stream and thread. It takes new memory when it is called again."""
    private(torch._C, "_cuda_clearCublasWorkspaces")()


@contextmanager
def allocator_history(entries: int) -> Iterator[None]:
    """Context in which the CUDA allocator keeps its last events, with the Python stack of each allocation."""
    torch.cuda.init()  # an allocator that does not exist yet would miss the request
    if private(torch._C, "_cuda_isHistoryEnabled")():  # whoever began it decides what is kept, and for how long
        yield
        return
    record = private(torch.cuda.memory, "_record_memory_history")
    record("all", context="alloc", stacks="python", max_entries=entries)
    try:
        yield
    finally:
        record(None)


def allocator_snapshot() -> dict[str, Any]:
    """Return the CUDA allocators' segments with their blocks, and the history that was kept. Allocates nothing there.

    What it holds is documented at `torch.cuda.memory._snapshot`. pytorch.org/memory_viz shows it once it is pickled.
    """
    snapshot: dict[str, Any] = private(torch.cuda.memory, "_snapshot")()
    return snapshot


def allocator_pages(snapshot: dict[str, Any]) -> dict[str, str]:
    """Return torch's own HTML pages of a snapshot, by name. Each loads its script from a network when it is opened."""
    viz = private(torch.cuda, "_memory_viz")
    return {"trace": private(viz, "trace_plot")(snapshot), "segments": private(viz, "segment_plot")(snapshot)}
