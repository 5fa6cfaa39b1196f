"""The votes of the processes of one job on whether to capture."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.sharding import ShardedModules
from .heartbeat import Heartbeat, heartbeat_of
from .job_end import Closable, close_before_end, keep_process_group, tell_end
from .shards import shard_group
from .turns import Turn

WARMUP_DDP = 12  # DDP rebuilds its buckets after the first step and samples timings up to the 11th


class Ranks:
    """The processes that train one model together, or the only one.

    Ranks vote in every call at first. Once all of them had nothing to capture in `_QUIET` votes in a row, they vote in
    every `_EVERY`th call only, because a graph may have been dropped. All of them count the same calls. If one rank
    voted for a reason of its own, such as a short batch, it would wait for the others for ever.

    Args:
        model: its ranks are those of the process group of a `DistributedDataParallel` in it, or of the one over which
            `fully_shard` has split its parameters. If it has neither, there is one rank.
        device: where the votes are reduced.
        captured: whether graphs are made, which do not follow some settings of `fully_shard`.

    Attributes:
        wrappers: the `DistributedDataParallel` modules of the model.
        shards: the modules of the model that `fully_shard` has wrapped.
        several: whether there are other ranks.
        captured: as given.
        warmup: how many eager calls they need before a capture.
    """

    other_found = "another rank found that its step cannot be captured; the message there says why."
    other_failed = "the capture failed on another rank; the message there says why."

    def __init__(self, model: nn.Module | None, device: torch.device, *, captured: bool = False) -> None:
        modules = () if model is None else model.modules()
        self.wrappers: list[nn.parallel.DistributedDataParallel] = [
            module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self.shards: ShardedModules = ShardedModules(nn.Module() if model is None else model)
        self.captured = captured
        self._model = model
        self.several: bool = self._group() is not None
        self.warmup = WARMUP_DDP if self.wrappers else 1
        for wrapper in self.wrappers:
            keep_process_group(wrapper)
        self._device = device
        self._calls = self._votes = self._quiet = 0
        self._turns: list[Turn] = []
        self._heartbeat: Heartbeat | None = None

    def watched(self, turn: Turn) -> Turn:
        """Return the same. Its calls end if they wait for a rank that is gone."""
        if self.several:
            self._turns.append(turn)
            if self._heartbeat is not None:
                self._heartbeat.waiting.turns.append(turn)
        return turn

    def _group(self) -> Any:
        """Return the process group of the ranks. Nothing of ampkit but `job_end` keeps it: see there."""
        if self.wrappers:
            return self.wrappers[0].process_group
        # Not `self._model and`: a model may have a length, or raise where torch.compile's wrapper asks for one.
        return None if self._model is None else shard_group(self._model)

    def decide(self, wants: bool, can: bool, settled: bool) -> tuple[bool, bool]:
        """Return whether all ranks want to capture in this call, and whether all can. To be called in every call.

        Args:
            wants: whether this rank wants to.
            can: whether this rank knows of no reason against it.
            settled: whether this rank has nothing to capture in this call.

        Raises:
            AmpkitError: another rank is gone.

        Sync: waits for the device if there is a vote.
        """
        if not self.several:
            return wants, can
        if not self._calls:
            self._start_heartbeat()
        if self._heartbeat is not None:
            self._heartbeat.begin_call()
        self._calls += 1
        if (self._quiet >= _QUIET or self._votes >= _EAGER_VOTES) and self._calls % _EVERY:
            return False, True
        self._votes += 1
        all_want, all_can, all_settled = self._all(wants, can, settled)
        self._quiet = self._quiet + 1 if all_settled else 0
        return all_want, all_can

    def agree(self, yes: bool) -> bool:
        """Return whether every rank says yes, in a call in which all of them ask. Waits for the device."""
        return self._all(yes)[0] if self.several else yes

    def _all(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._group())
        decided = list(map(bool, votes.tolist()))  # sync
        if self._heartbeat is not None:
            self._heartbeat.raise_if_lost()  # or the vote was aborted, and decides nothing
        return decided

    def _start_heartbeat(self) -> None:
        """Begin to tell the other ranks that this one lives, in the first call in which they vote."""
        tell_end()
        self._heartbeat = heartbeat_of(self._group())
        if self._heartbeat is not None:
            self._heartbeat.waiting.turns.extend(self._turns)

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place, as `DistributedDataParallel` does in a backward.

        `fully_shard` has averaged them in each backward.
        """
        if self.wrappers and gradients:
            group = self._group()
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat /= torch.distributed.get_world_size(group)
            torch.distributed.all_reduce(flat, group=group)
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def close_before_end(self, graphs: Closable) -> None:
        """Have the graphs released before the process group is destroyed."""
        if self.several:
            close_before_end(graphs)


_QUIET = 16  # mostly more than a window has micro-batches
_EAGER_VOTES = 256  # votes; ranks whose batches always differ would vote in every call for ever
_EVERY = 61  # prime, so that the votes fall on every micro-batch of a window in turn


def several_processes() -> bool:
    """Return whether this process belongs to a job of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
