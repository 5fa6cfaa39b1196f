"""The end of a process group."""

from collections.abc import Callable

import torch

from .guard import private


class _LastCall:
    """What `destroy_process_group` takes for one more communicator, which it finalizes before all backends."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.finalize = callback


def call_before_process_group_ends(callback: Callable[[], None]) -> None:
    """Have `torch.distributed.destroy_process_group()` of the default group call this first.

    There is no hook. A wrapped function would miss `from torch.distributed import destroy_process_group`.
    """
    comms = private(torch.distributed.distributed_c10d, "_world").comms
    if not any(comm.finalize is callback for comm in comms if isinstance(comm, _LastCall)):
        comms.append(_LastCall(callback))
