"""How to be told that a process group ends."""

from collections.abc import Callable

import torch

from .guard import private


class _Communicator:
    """What `destroy_process_group` takes for another communicator: it calls `finalize` before it ends the backends."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.finalize = callback


def call_before_process_group_ends(callback: Callable[[], None]) -> None:
    """Have `torch.distributed.destroy_process_group()` call this first, when it destroys the default group.

    torch has no hook for this. To replace the function would not help, because code that ran
    `from torch.distributed import destroy_process_group` earlier would still call the old one.
    """
    comms = private(torch.distributed.distributed_c10d, "_world").comms
    if not any(comm.finalize is callback for comm in comms if isinstance(comm, _Communicator)):
        comms.append(_Communicator(callback))
