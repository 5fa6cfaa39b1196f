"""The caching allocator of CUDA memory: its settings, its history, and a capture that failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..guard import private


def drop_capture_from_allocator(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the caching allocator that a failed capture is over.

    `CUDAGraph.capture_end` raises before it tells the allocator (ATen/cuda/CUDAGraph.cpp). The allocator would go on as
    if the capture were running, and would never free a block again that `record_stream` marked. 20 blocks of 64 MiB
    were lost that way in a measurement.
    """
    assert device.index is not None
    private(torch._C, "_cuda_endAllocateToPool")(device.index, pool)
    private(torch._C, "_cuda_releasePool")(device.index, pool)


def allocator_settings() -> tuple[str, bool]:
    """Return the text that the allocator of CUDA memory was last configured with, and whether segments can expand.

    The text is that of PYTORCH_ALLOC_CONF, or of a later call. An option that it does not name may keep its old value.
    """
    found = private(torch._C, "_cuda_memorySnapshot")((0, 0, False))["allocator_settings"]
    return str(found["PYTORCH_CUDA_ALLOC_CONF"]), bool(found["expandable_segments"])


def set_allocator_settings(settings: str) -> None:
    """Configure the allocator of CUDA memory. Memory that it holds already stays as it is."""
    private(torch._C, "_accelerator_setAllocatorSettings")(settings)


def clear_cublas_workspaces() -> None:
    """Free the memory that cuBLAS keeps for each stream and thread. It allocates again when it is called next."""
    private(torch._C, "_cuda_clearCublasWorkspaces")()


@contextmanager
def allocator_history(entries: int) -> Iterator[None]:
    """Context in which the CUDA allocator keeps its last events, with the Python stack of each allocation.

    A history that somebody else has begun is left as it is.
    """
    torch.cuda.init()  # an allocator that does not exist yet would miss the request
    if private(torch._C, "_cuda_isHistoryEnabled")():
        yield
        return
    record = private(torch.cuda.memory, "_record_memory_history")
    record("all", context="alloc", stacks="python", max_entries=entries)
    try:
        yield
    finally:
        record(None)


# allocator_snapshot(): the segments of the CUDA allocators with their blocks, and the history that was kept.
# `torch.cuda.memory._snapshot` documents the format. pytorch.org/memory_viz shows a pickled snapshot. Nothing is
# allocated on a device for it.
allocator_snapshot: Callable[[], dict[str, Any]] = private(torch.cuda.memory, "_snapshot")


def allocator_pages(snapshot: dict[str, Any]) -> dict[str, bytes]:
    """Return torch's own HTML pages of a snapshot, by file name. A browser needs the network to show them."""
    viz = private(torch.cuda, "_memory_viz")
    trace, segments = private(viz, "trace_plot")(snapshot), private(viz, "segment_plot")(snapshot)
    return {"trace.html": trace.encode(), "segments.html": segments.encode()}
