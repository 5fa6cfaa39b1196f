"""Memory of a CUDA device that belongs to no tracked tensor: workspaces of libraries, and pools of CUDA graphs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..._torch.tensors.tensors import storage_address


@dataclass(eq=False)
class UntrackedMemory:
    """Reads from the statistics of a CUDA device what the results of operations do not account for.

    Args:
        device: with its index.
    """

    _device: torch.device
    _allocated: int = 0  # where the operation began
    _tracked: int = 0
    _pool_segments: list[tuple[int, int]] = field(default_factory=list)  # address and size

    def begin_operation(self, tracked: int) -> bool:
        """Read the statistics before an operation. Return False, and do nothing, where it is being captured.

        In a capture, all memory comes from the graph's pool, which `read_pools` counts.

        Args:
            tracked: the bytes of all tracked memory now.
        """
        if torch.cuda.is_current_stream_capturing():
            return False
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocated, self._tracked = torch.cuda.memory_allocated(self._device), tracked
        return True

    def end_operation(self, tracked: int) -> tuple[int, int]:
        """Return the untracked bytes that the operation has kept, and those that it took only while it ran.

        Args:
            tracked: the bytes of all tracked memory now, with the results of the operation.
        """
        now = torch.cuda.memory_allocated(self._device)
        kept = now - self._allocated - (tracked - self._tracked)
        return kept, torch.cuda.max_memory_allocated(self._device) - max(now, self._allocated)

    def read_pools(self) -> int:
        """Return the bytes of all segments that belong to pools of CUDA graphs."""
        self._pool_segments = [
            (segment["address"], segment["total_size"])
            for segment in torch.cuda.memory_snapshot(include_traces=False)
            if tuple(segment["segment_pool_id"]) != (0, 0) and segment["device"] == self._device.index
        ]
        return sum(size for _, size in self._pool_segments)

    def in_pool(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the pool of a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            return True
        address = storage_address(tensor)
        return any(start <= address < start + size for start, size in self._pool_segments)
