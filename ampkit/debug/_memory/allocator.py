"""What a storage costs on a CUDA device that is not there: torch's caching allocator, and cuBLAS's workspaces."""

import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import torch

from .categories import BLOCK, Sizes

# Of c10/cuda/CUDACachingAllocator.h, in bytes.
_SMALL = 1 << 20  # kSmallSize: up to here, blocks come from small segments
_SMALL_SEGMENT = 2 << 20  # kSmallBuffer
_MEDIUM = 10 << 20  # kMinLargeAlloc: from here on, a block gets a segment of its size
_MEDIUM_SEGMENT = 20 << 20  # kLargeBuffer
_ROUND = 2 << 20  # kRoundLarge

# Operations that take a cuBLAS handle.
_GEMM = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_addmm_activation", "linear", "dot", "vdot"}


def cublas_workspace() -> int:
    """Return the bytes that cuBLAS keeps per stream and thread: what ATen/cuda/CublasHandlePool.cpp asks for.

    Without a device, those of a Hopper GPU.
    """
    config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    if config.startswith(":"):
        numbers = [int(part) for part in config[1:].split(":")]
        return sum(kib * count for kib, count in zip(numbers[::2], numbers[1::2], strict=True)) << 10
    here = torch.cuda.is_available()
    hopper = not here or torch.cuda.get_device_capability() == (9, 0)
    return 4096 * 8 << 10 if hopper else (4096 * 2 + 16 * 8) << 10


@dataclass(eq=False)
class _Block:
    """A piece of a segment. Small and large pieces never lie in one segment."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: "_Block | None" = None
    behind: "_Block | None" = None


class Allocator(Sizes):
    """The caching allocator of one device and one stream, with its defaults, on addresses that mean nothing.

    A storage takes the block that it lies in, which may be up to 1 MiB more than it asked for: so
    `torch.cuda.memory_allocated` counts.

    Attributes:
        reserved: bytes of all segments, as `torch.cuda.memory_reserved` counts.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._used: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # size and address, by `small`
        self._blocks: dict[int, _Block] = {}  # that are free, by address
        self._with_workspace: set[bool] = set()

    def taken(self, key: int, size: int) -> int:
        """Give out a block."""
        if size == 0:
            return 0
        size = -(-size // BLOCK) * BLOCK
        small = size <= _SMALL
        block = self._best(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= BLOCK if small else left > _SMALL:
            rest = _Block(block.address + size, left, small, before=block, behind=block.behind)
            if rest.behind is not None:
                rest.behind.before = rest
            block.behind, block.size = rest, size
            self._give_back(rest)
        self._used[key] = block
        return block.size

    def freed(self, key: int) -> None:
        """Take a block back, and join it with what is free beside it."""
        block = self._used.pop(key, None)
        if block is None:
            return
        for side in (block.before, block.behind):
            if side is not None and side.free:
                self._take(side)
                block = self._joined(*sorted((side, block), key=lambda part: part.address))
        self._give_back(block)

    def beside(self, func: Any, in_backward: bool) -> int:
        """Take the workspace of cuBLAS where a thread first calls it: backward runs in one of its own."""
        if func.overloadpacket.__name__ not in _GEMM or in_backward in self._with_workspace:
            return 0
        self._with_workspace.add(in_backward)
        return self.taken(-1 - in_backward, cublas_workspace())

    def _best(self, size: int, small: bool) -> _Block | None:
        """Return the smallest free block that is large enough, of those the one with the lowest address."""
        sizes = self._free[small]
        i = bisect_left(sizes, (size, 0))
        if i == len(sizes):
            return None
        block = self._blocks[sizes[i][1]]
        self._take(block)
        return block

    def _segment(self, size: int, small: bool) -> _Block:
        whole = _SMALL_SEGMENT if small else _MEDIUM_SEGMENT if size < _MEDIUM else -(-size // _ROUND) * _ROUND
        block = _Block(self.reserved, whole, small)
        self.reserved += whole
        return block

    def _give_back(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _take(self, block: _Block) -> None:
        block.free = False
        del self._blocks[block.address]
        sizes = self._free[block.small]
        del sizes[bisect_left(sizes, (block.size, block.address))]

    @staticmethod
    def _joined(first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.behind = second.behind
        if second.behind is not None:
            second.behind.before = first
        return first
