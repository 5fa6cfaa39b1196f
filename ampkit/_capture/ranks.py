"""What the processes of one job must decide together: whether to capture."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .job_end import Closable, close_before_end, keep_process_group

WARMUP_DDP = 12  # DDP rebuilds its buckets after the first step and samples timings up to the 11th


class Ranks:
    """The processes that train one model together, or the only one.

    They vote in the same calls, counted from the first: in each, until `_QUIET` in a row found nothing to decide, and
    then now and then, as a graph may have been dropped. A vote that depended on what one rank sees, such as a short
    batch, would wait for ever for the others.

    Args:
        model: if it is or holds a `DistributedDataParallel`, the ranks of its process group.
        device: where NCCL can reduce a flag.
    """

    other_found = "another rank found that its step cannot be captured; the message there says why."
    other_failed = "the capture failed on another rank; the message there says why."

    def __init__(self, model: nn.Module | None, device: torch.device) -> None:
        modules = () if model is None else model.modules()
        self.wrappers = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
        self.warmup = WARMUP_DDP if self.wrappers else 1
        for wrapper in self.wrappers:
            keep_process_group(wrapper)
        self._device = device
        self._calls = self._votes = self._quiet = 0

    def decide(self, wants: bool, can: bool, settled: bool) -> tuple[bool, bool]:
        """Return whether all ranks want to capture in this call, and whether all can. To be called in every call.

        Args:
            wants: whether this rank would.
            can: whether it knows of no reason against.
            settled: whether it has nothing to capture in this call.

        Sync: waits for the device where there is a vote.
        """
        if not self.wrappers:
            return wants, can
        self._calls += 1
        if (self._quiet >= _QUIET or self._votes >= _EAGER_VOTES) and self._calls % _EVERY:
            return False, True
        self._votes += 1
        all_want, all_can, all_settled = self._all(wants, can, settled)
        self._quiet = self._quiet + 1 if all_settled else 0
        return all_want, all_can

    def agree(self, yes: bool) -> bool:
        """Return whether every rank says yes, in a call in which all of them ask. Waits for the device."""
        return self._all(yes)[0] if self.wrappers else yes

    def _all(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self.wrappers[0].process_group)
        return list(map(bool, votes.tolist()))  # sync

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place, as `DistributedDataParallel` does in a backward."""
        if self.wrappers and gradients:
            group = self.wrappers[0].process_group
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat /= torch.distributed.get_world_size(group)
            torch.distributed.all_reduce(flat, group=group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def close_before_end(self, graphs: Closable) -> None:
        """See to it that the graphs are given up before the process group is."""
        if self.wrappers:
            close_before_end(graphs)


_QUIET = 16  # more than there are places in a window of micro-batches, mostly
_EAGER_VOTES = 256  # ranks whose batches always differ never come to rest
_EVERY = 61  # prime, so that each place of a window has its turn


def _is_sharded(param: Tensor) -> bool:
    """Return whether a parameter is a DTensor, as `fully_shard` makes it."""
    tensors = sys.modules.get("torch.distributed.tensor")  # whoever made a DTensor has imported it, which takes long
    return tensors is not None and isinstance(param, tensors.DTensor)


def why_not_sharded(module: nn.Module) -> str:
    """Return why parameters that `fully_shard` split over processes are not captured; "" if there are none."""
    for name, param in module.named_parameters():
        if _is_sharded(param):
            return (
                f"parameter {name} is a {type(param).__name__}: gradient norm, overflow check and the ranks' votes are "
                "not implemented for parameters that fully_shard split. Use DistributedDataParallel, or pass "
                "graph='off'."
            )
    return ""
