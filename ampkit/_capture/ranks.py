"""The votes of the processes of one job on whether to capture."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.sharding import ShardedModules
from .._undo import Undo
from .job_end import Closable, close_before_end, keep_process_group
from .shards import shard_group

WARMUP_DDP = 12  # DDP rebuilds its buckets after the first step and samples timings up to the 11th


class Together(Enum):
    """What a rank does with several calls that it was given at once.

    Attributes:
        LAUNCH: all of them, by one graph that there is.
        CAPTURE: capture this graph now, as all ranks do.
        CALLS: one by one. All ranks do, and vote in each call.
        CALLS_ALONE: one by one, and vote in none of them, because other ranks may launch.
    """

    LAUNCH = "launch"
    CAPTURE = "capture"
    CALLS = "calls"
    CALLS_ALONE = "calls alone"


class _Votes:
    """When ranks vote: in every call at first, later in few. All ranks count the same calls."""

    def __init__(self) -> None:
        self._calls = self._votes = self._quiet = 0

    def are_due(self, always: bool = False) -> bool:
        """Return whether to vote in this call. To be asked once in every call."""
        self._calls += 1
        if not always and (self._quiet >= _QUIET or self._votes >= _EAGER_VOTES) and self._calls % _EVERY:
            return False
        self._votes += 1
        return True

    def note(self, settled: bool) -> None:
        """Take note of whether all ranks had nothing to capture in a call with a vote."""
        self._quiet = self._quiet + 1 if settled else 0


class Ranks:
    """The processes that train one model together, or the only one.

    Ranks vote in every call at first. Once all of them had nothing to capture in `_QUIET` votes in a row, they vote in
    every `_EVERY`th call only, because a graph may have been dropped. All of them count the same calls. If one rank
    voted for a reason of its own, such as a short batch, it would wait for the others for ever.

    Several calls at once are another matter, with votes of its own: a rank that launches them votes in none of them.

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
        self._votes, self._votes_together = _Votes(), _Votes()
        self._voting: bool | None = None  # in each call, in none; None: as `_votes` says

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

        Sync: waits for the device if there is a vote.
        """
        if not self.several:
            return wants, can
        if self._voting is False or not self._votes.are_due(always=self._voting is True):
            return False, True
        all_want, all_can, all_settled = self._all(wants, can, settled)
        self._votes.note(all_settled)
        return all_want, all_can

    def decide_together(self, has: bool, ready: bool, settled: bool) -> Together:
        """Return what this rank does with several calls that every rank was given at once.

        A launch and single calls communicate alike, so that some ranks may launch while others make the calls, as long
        as these do not vote.

        Args:
            has: whether this rank has a graph of these calls.
            ready: whether it has none, and may capture one now.
            settled: whether it has nothing to capture in these calls.

        Sync: waits for the device if there is a vote.
        """
        alone = Together.LAUNCH if has else Together.CALLS_ALONE
        if not self.several:
            return Together.CAPTURE if ready else alone
        if not self._votes_together.are_due():
            return alone
        all_ready, all_either, all_settled = self._all(ready, has or ready, settled)
        self._votes_together.note(all_settled)
        if all_ready:
            return Together.CAPTURE
        return alone if all_either else Together.CALLS

    @contextmanager
    def voting(self, always: bool) -> Iterator[None]:
        """Context of calls in which the ranks vote each time, or never."""
        with Undo() as undo:
            undo.note(setattr, self, "_voting", None)
            self._voting = always
            yield

    def agree(self, yes: bool) -> bool:
        """Return whether every rank says yes, in a call in which all of them ask. Waits for the device."""
        return self._all(yes)[0] if self.several else yes

    def _all(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._group())
        return list(map(bool, votes.tolist()))  # sync

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
