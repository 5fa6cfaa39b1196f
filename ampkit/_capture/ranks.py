"""The votes of the processes of one job on whether to capture."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.sharding import ShardedModules
from .job_end import Closable, close_before_end, keep_process_group
from .layouts import WARM_UP
from .reducers import Reducers
from .shards import shard_groups

WARMUP_DDP = 5  # the second call lays out DDP's buckets, which waits, and the third from the end is the preflight


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
        reducers: what averages their gradients.
        shards: the modules of the model that `fully_shard` has wrapped.
        several: whether there are other ranks.
        captured: as given.
        together: whether all ranks replay, or capture and replay, in this call. Known in calls with a vote only.
    """

    other_found = "another rank found that its step cannot be captured; the message there says why."
    other_differs = "on another rank a replay is not what eager computes; the message there says where."
    other_failed = "the capture failed on another rank; the message there says why."

    def __init__(self, model: nn.Module | None, device: torch.device, *, captured: bool = False) -> None:
        modules = () if model is None else model.modules()
        self.wrappers: list[nn.parallel.DistributedDataParallel] = [
            module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self.reducers: Reducers = Reducers(self.wrappers)
        self.shards: ShardedModules = ShardedModules(nn.Module() if model is None else model)
        self.captured = captured
        self._model = model
        self.several: bool = bool(self._groups())
        for wrapper in self.wrappers:
            keep_process_group(wrapper)
        self._device = device
        self.together = not self.several
        self._calls = self._votes = self._quiet = 0

    def _groups(self) -> list[Any]:
        """Return process groups that connect the ranks. Nothing of ampkit but `job_end` keeps them: see there."""
        if self.wrappers:
            return [self.wrappers[0].process_group]
        # Not `self._model and`: a model may have a length, or raise where torch.compile's wrapper asks for one.
        return [] if self._model is None else shard_groups(self._model)

    def warm_up(self, wanted: int, on_cuda: bool) -> tuple[int, str]:
        """Return how many eager calls come before a capture, and what they are counted under.

        Args:
            wanted: as many as the user asks for.
            on_cuda: whether graphs are not emulated.
        """
        if on_cuda and self.wrappers and wanted < WARMUP_DDP:
            return WARMUP_DDP, f"{WARM_UP} (DistributedDataParallel needs {WARMUP_DDP} calls)"
        return max(2, wanted), WARM_UP  # two at least: one under the preflight, and the rehearsal

    @functools.cached_property
    def problem(self) -> str:
        """Why no step of the model can be captured; "" if it can. What is so in the first call counts."""
        return self.reducers.why_not_captured()

    def decide(self, wants: bool, can: bool, settled: bool, *, replays: bool = False) -> tuple[bool, bool]:
        """Return whether all ranks want to capture in this call, and whether all can. To be called in every call.

        If all ranks begin with it, and may capture later, `reducers` are prepared for that.

        Args:
            wants: whether this rank wants to.
            can: whether this rank knows of no reason against it.
            settled: whether this rank has nothing to capture, and nothing to compare, in this call.
            replays: whether this rank replays a graph in this call.

        Sync: waits for the device if there is a vote.
        """
        if not self.several:
            return wants, can
        self._calls += 1
        self.together = False
        if (self._quiet >= _QUIET or self._votes >= _EAGER_VOTES) and self._calls % _EVERY:
            return False, True
        self._votes += 1
        begins = self._votes == 1 and not (settled or replays)
        all_want, all_can, all_settled, all_begin, all_replay = self._all(wants, can, settled, begins, replays)
        self.together = all_want or all_replay
        self._quiet = self._quiet + 1 if all_settled else 0
        if all_begin and all_can:
            self.reducers.prepare()
        return all_want, all_can

    def agree(self, yes: bool) -> bool:
        """Return whether every rank says yes, in a call in which all of them ask. Waits for the device."""
        return self._all(yes)[0] if self.several else yes

    def _all(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        for group in self._groups():  # the least of the first group's ranks, then the least of these
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group)
        return list(map(bool, votes.tolist()))  # sync

    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place, as `DistributedDataParallel` does in a backward.

        `fully_shard` has averaged them in each backward.
        """
        if self.wrappers and gradients:
            group = self.wrappers[0].process_group
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
