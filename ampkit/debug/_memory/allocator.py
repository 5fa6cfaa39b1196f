"""How many bytes an allocation takes on a CPU and on CUDA, and what a CUDA device has taken for no tensor at all."""

import os
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..._torch.tensors.tensors import storage_address

# From c10/cuda/CUDACachingAllocator.h, in bytes.
BLOCK = 512  # kMinBlockSize: every size is a multiple of it
SMALL = 1 << 20  # kSmallSize: blocks up to here come from small segments; a large block keeps a remainder up to here
_SMALL_SEGMENT = 2 << 20  # kSmallBuffer
_MEDIUM = 10 << 20  # kMinLargeAlloc: from here on, a block gets a segment of its size
_MEDIUM_SEGMENT = 20 << 20  # kLargeBuffer
_ROUND = 2 << 20  # kRoundLarge: a segment made for one block is a multiple of it

# Operations that call cuBLAS, and so take its workspace.
_GEMM = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_addmm_activation", "linear", "dot", "vdot"}
# Bytes of a workspace where CUBLAS_WORKSPACE_CONFIG does not say; from ATen/cuda/CublasHandlePool.cpp.
_WORKSPACE_HOPPER = 4096 * 8 << 10
_WORKSPACE_OTHERS = (4096 * 2 + 16 * 8) << 10


def cublas_workspace() -> int:
    """Return the bytes that cuBLAS keeps for each stream of each thread. Without a device, those of a Hopper GPU."""
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if config.startswith(":"):  # such as ":4096:2:16:8", which is 2 buffers of 4096 KiB and 8 of 16 KiB
        numbers = [int(part) for part in config[1:].split(":")]
        return sum(kib * count for kib, count in zip(numbers[::2], numbers[1::2], strict=True)) << 10
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    return _WORKSPACE_HOPPER if hopper else _WORKSPACE_OTHERS


@dataclass(eq=False)
class Allocator:
    """An allocator that rounds up to whole blocks. With blocks of 1 byte it is the CPU's.

    With `BLOCK` it stands for the allocator of a CUDA device that is there. What that takes beyond this is read from
    the device's statistics: see `UntrackedMemory`.
    """

    block: int = 1  # bytes; every size is rounded up to a multiple of it

    def allocate(self, key: int, size: int) -> int:
        """Return the bytes that a new storage takes which asks for `size`. The key identifies it until it is freed."""
        return _whole(size, self.block)

    def free(self, key: int) -> None:
        """Take back the memory of a storage."""

    def workspace(self, func: Any, in_backward: bool) -> int:
        """Return the bytes that an operation takes for a library and never gives back."""
        return 0


@dataclass(eq=False)
class UntrackedMemory:
    """Reads from the statistics of a CUDA device what belongs to no tracked tensor: workspaces, pools of graphs."""

    _device: torch.device  # with its index
    _is_read: bool  # otherwise nothing is untracked, as on a CPU
    _allocated: int = 0  # where the operation began
    _tracked: int = 0
    _pool_segments: list[tuple[int, int]] = field(default_factory=list)  # address and size

    def begin_operation(self, tracked: int) -> bool:
        """Read the statistics before an operation, when so many bytes are tracked.

        Return False, and do nothing, where nothing is read, and in a capture: there, all memory comes from the graph's
        pool, which `read_pools` counts.
        """
        if not self._is_read or torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated, self._tracked = torch.cuda.memory_allocated(self._device), tracked
        return True

    def end_operation(self, tracked: int) -> tuple[int, int]:
        """Return the untracked bytes that the operation has kept, and those that it took only while it ran.

        The tracked bytes are those with the results of the operation.
        """
        now = torch.cuda.memory_allocated(self._device)
        kept = now - self._allocated - (tracked - self._tracked)
        return kept, torch.cuda.max_memory_allocated(self._device) - max(now, self._allocated)

    def read_pools(self) -> int:
        """Return the bytes of all segments that belong to pools of CUDA graphs."""
        segments = torch.cuda.memory_snapshot(include_traces=False) if self._is_read else ()
        self._pool_segments = [
            (segment["address"], segment["total_size"])
            for segment in segments
            if tuple(segment["segment_pool_id"]) != (0, 0) and segment["device"] == self._device.index
        ]
        return sum(size for _, size in self._pool_segments)

    def in_pool(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the pool of a CUDA graph."""
        if not self._is_read:
            return False
        if torch.cuda.is_current_stream_capturing():
            return True
        address = storage_address(tensor)
        return any(start <= address < start + size for start, size in self._pool_segments)


@dataclass(eq=False)
class _MemoryBlock:
    """A piece of a segment. Small and large pieces never lie in the same segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "_MemoryBlock | None" = None
    behind: "_MemoryBlock | None" = None


_order = attrgetter("size", "address")  # of free blocks: of several that are as large, the lowest address comes first


@dataclass(eq=False)
class CachingAllocator(Allocator):
    """A simulation of torch's caching allocator: one device, one stream, default settings.

    A storage takes the block that it lies in, which may be up to 1 MiB larger than what it asked for.
    `torch.cuda.memory_allocated` counts in the same way.
    """

    reserved: int = 0  # bytes of all segments, as `torch.cuda.memory_reserved` counts
    _used: dict[int, _MemoryBlock] = field(default_factory=dict)
    # By `small`; sorted by `_order`.
    _free: dict[bool, list[_MemoryBlock]] = field(default_factory=lambda: {True: [], False: []})
    _with_workspace: set[bool] = field(default_factory=set)

    def allocate(self, key: int, size: int) -> int:
        """Give a storage the smallest free block that is large enough, and split off what is worth it."""
        if size == 0:
            return 0
        size = _whole(size, BLOCK)
        small = size <= SMALL
        free = self._free[small]
        i = bisect_left(free, (size, 0), key=_order)
        if i < len(free):
            block = free.pop(i)
            block.free = False
        else:
            segment = _SMALL_SEGMENT if small else _MEDIUM_SEGMENT if size < _MEDIUM else _whole(size, _ROUND)
            block = _MemoryBlock(self.reserved, segment, small)
            self.reserved += segment
        left = block.size - size
        if left >= BLOCK if small else left > SMALL:
            rest = _MemoryBlock(block.address + size, left, small, before=block, behind=block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.behind, block.size = rest, size
            self._add_free(rest)
        self._used[key] = block
        return block.size

    def free(self, key: int) -> None:
        """Take a block back, and join it with the free blocks beside it."""
        block = self._used.pop(key, None)
        if block is None:
            return
        for side in (block.before, block.behind):
            if side is not None and side.free:
                free = self._free[side.small]
                del free[bisect_left(free, _order(side), key=_order)]
                side.free = False
                block, second = sorted((side, block), key=lambda part: part.address)
                block.size += second.size
                block.behind = second.behind
                if second.behind is not None:
                    second.behind.before = block
        self._add_free(block)

    def workspace(self, func: Any, in_backward: bool) -> int:
        """Take cuBLAS's workspace when a thread first calls it. In a plain loop, backward runs in one of its own."""
        if func.overloadpacket.__name__ not in _GEMM or in_backward in self._with_workspace:
            return 0
        self._with_workspace.add(in_backward)
        return self.allocate(-1 - in_backward, cublas_workspace())  # no storage has a negative key

    def _add_free(self, block: _MemoryBlock) -> None:
        block.free = True
        insort(self._free[block.small], block, key=_order)


def _whole(size: int, unit: int) -> int:
    """Return a size rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
