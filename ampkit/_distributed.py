"""What the processes of one job must do together: decide whether to capture, and let go of graphs before they end."""

import atexit
import weakref
from typing import Protocol

import torch
from torch import Tensor, nn

from ._torch import call_before_process_group_ends

WARMUP_DDP = 12  # DDP rebuilds its buckets after the first step and samples timings up to the 11th


class Closable(Protocol):
    """What holds graphs."""

    def close(self) -> None:
        """Give them up."""


class Ranks:
    """The processes that train one model together, or the only one.

    Args:
        model: if it is or holds a `DistributedDataParallel`, the ranks of its process group.
        device: where NCCL can reduce a flag.
    """

    other_found = "another rank found a line that cannot be captured; the message there names it."
    other_failed = "the capture failed on another rank; the message there says why."

    def __init__(self, model: nn.Module | None, device: torch.device) -> None:
        modules = () if model is None else model.modules()
        self.wrappers = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
        self.warmup = WARMUP_DDP if self.wrappers else 1
        self._device = device

    def agree(self, yes: bool) -> bool:
        """Return whether every rank says yes. Waits for the others, and for the device."""
        if not self.wrappers:
            return yes
        flag = torch.tensor(int(yes), device=self._device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=self.wrappers[0].process_group)
        return bool(flag.item())  # sync

    def close_before_end(self, graphs: Closable) -> None:
        """See to it that the graphs are given up before the process group is.

        `destroy_process_group` waits for ever where a graph still holds work of NCCL's communicator (torch 2.11).
        """
        if self.wrappers:
            if not _open:
                call_before_process_group_ends(_close_all)
                atexit.register(_close_all)
            _open.add(graphs)


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def _close_all() -> None:
    for graphs in list(_open):
        graphs.close()
    _open.clear()


def why_not_sharded(name: str, param: Tensor) -> str:
    """Return why a parameter that is sharded over processes cannot be captured."""
    return (
        f"parameter {name} is a {type(param).__name__}: fully_shard gathers and frees parameters in every step on "
        "streams of its own, and a capture of that has not been shown to be exact. Use DistributedDataParallel, or "
        "pass graph='off'."
    )
