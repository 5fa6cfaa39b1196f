"""How the host reads the device without waiting: copies are started, and looked at once they have arrived."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class AsyncCopies:
    """Copies from the device to the host, in the order in which they were started."""

    _pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, number: int, source: Tensor) -> None:
        """Start a copy, which gets this number. Sync: none. On the CPU it has arrived at once."""
        if not source.is_cuda:
            self._pending.append((number, source.clone(), None))
            return
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(source.device))
        self._pending.append((number, host, event))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """Return the copies that have arrived since the last call, with their numbers.

        Args:
            wait: wait for the device, and return all of them.
        """
        arrived = []
        while self._pending:
            number, host, event = self._pending[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._pending.popleft()
            arrived.append((number, host))
        return arrived
