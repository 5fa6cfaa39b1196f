"""How many bytes an allocation takes: what was asked for on a CPU, what torch's caching allocator gives on CUDA."""

import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch

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


class Allocator:
    """An allocator that takes exactly what a storage asks for, as the CPU's does."""

    def allocate(self, key: int, size: int) -> int:
        """Return the bytes that a new storage takes.

        Args:
            key: identifies the storage until it is freed.
            size: the bytes that it asks for.
        """
        return size

    def free(self, key: int) -> None:
        """Take back the memory of a storage."""

    def workspace(self, func: Any, in_backward: bool) -> int:
        """Return the bytes that an operation takes for a library and never gives back."""
        return 0


class RoundingAllocator(Allocator):
    """An allocator that rounds up to whole blocks. It stands for the one of a CUDA device that is there.

    What that takes beyond this is read from the device's statistics: see `UntrackedMemory`.
    """

    def allocate(self, key: int, size: int) -> int:
        """Return the size in whole blocks."""
        return _whole(size, BLOCK)


@dataclass(eq=False)
class _MemoryBlock:
    """A piece of a segment. Small and large pieces never lie in the same segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "_MemoryBlock | None" = None
    behind: "_MemoryBlock | None" = None


class CachingAllocator(Allocator):
    """A simulation of torch's caching allocator: one device, one stream, default settings.

    A storage takes the block that it lies in, which may be up to 1 MiB larger than what it asked for.
    `torch.cuda.memory_allocated` counts in the same way.

    Attributes:
        reserved: bytes of all segments, as `torch.cuda.memory_reserved` counts.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._used: dict[int, _MemoryBlock] = {}
        self._free_sizes: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # size and address, by `small`
        self._free_blocks: dict[int, _MemoryBlock] = {}  # by address
        self._with_workspace: set[bool] = set()

    def allocate(self, key: int, size: int) -> int:
        """Give a storage the smallest free block that is large enough, and split off what is worth it."""
        if size == 0:
            return 0
        size = _whole(size, BLOCK)
        small = size <= SMALL
        sizes = self._free_sizes[small]
        i = bisect_left(sizes, (size, 0))  # of several that are as large, the one at the lowest address
        if i < len(sizes):
            block = self._free_blocks[sizes[i][1]]
            self._remove_free(block)
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
                self._remove_free(side)
                block, second = sorted((side, block), key=lambda part: part.address)
                block.size += second.size
                block.behind = second.behind
                if second.behind is not None:
                    second.behind.before = block
        self._add_free(block)

    def workspace(self, func: Any, in_backward: bool) -> int:
        """Take cuBLAS's workspace when a thread first calls it. Backward runs in a thread of its own."""
        if func.overloadpacket.__name__ not in _GEMM or in_backward in self._with_workspace:
            return 0
        self._with_workspace.add(in_backward)
        return self.allocate(-1 - in_backward, cublas_workspace())  # no storage has a negative key

    def _add_free(self, block: _MemoryBlock) -> None:
        block.free = True
        self._free_blocks[block.address] = block
        insort(self._free_sizes[block.small], (block.size, block.address))

    def _remove_free(self, block: _MemoryBlock) -> None:
        block.free = False
        del self._free_blocks[block.address]
        sizes = self._free_sizes[block.small]
        del sizes[bisect_left(sizes, (block.size, block.address))]


def _whole(size: int, unit: int) -> int:
    """Return a size rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit
