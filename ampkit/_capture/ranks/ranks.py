"""The votes of the processes of one job on whether to capture."""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..._errors import AmpkitError
from ..._torch.ranks.sharding import ShardedModules
from ..graph.turns import Turn
from .heartbeat import Heartbeat, heartbeat_of
from .job_end import keep_process_groups, tell_end
from .reducers import Reducers
from .shards import shard_groups

WARMUP_DDP = 5  # the second call lays out DDP's buckets, which waits, and the third from the end is the preflight


class Together(Enum):
    """What a rank does with several calls that it was given at once."""

    LAUNCH = "launch"  # all of them, by one graph that there is
    CAPTURE = "capture"  # this graph now, as all ranks do
    CALLS = "calls"  # one by one; all ranks do, and vote in each call
    CALLS_ALONE = "calls alone"  # one by one, voting in none of them, because other ranks may launch


@dataclass(eq=False)
class _Votes:
    """When ranks vote: in every call at first, later in few. All ranks count the same calls."""

    _calls: int = 0
    count: int = 0  # of votes
    _quiet: int = 0

    def are_due(self, always: bool = False) -> bool:
        """Return whether to vote in this call. To be asked once in every call."""
        self._calls += 1
        if not always and (self._quiet >= _QUIET or self.count >= _EAGER_VOTES) and self._calls % _EVERY:
            return False
        self.count += 1
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

    If the host decides by random draws, or by questions about the input, ranks may decide differently. NCCL wants all
    ranks to launch graphs of the same collective capture ("Using NCCL with CUDA Graphs" in its user guide). So in such
    steps the outcomes on all ranks together choose the graph, and the ranks exchange them at the beginning of each
    call.

    Args:
        model: its ranks are those of the process group of a `DistributedDataParallel` in it, or of the one over which
            `fully_shard` has split its parameters. If it has neither, there is one rank.
        device: where the votes are reduced.
        captured: whether graphs are made, which do not follow some settings of `fully_shard`.

    Attributes:
        wrappers: the `DistributedDataParallel` modules of the model; `reducers` averages their gradients.
        shards: the modules of the model that `fully_shard` has wrapped; `sharded` says whether there are any.
        several: whether there are other ranks.
        voting: whether the ranks vote in each call (True), in none (False), or in those that are due (None).
        together: whether all ranks replay, or capture and replay, in this call. Known in calls with a vote only.
        decides: whether this rank does so. Then all exchange outcomes from their next vote on.
        exchanges: whether every call begins with `outcome_of_all`, because a rank has told that it does.
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
        self.sharded: bool = len(self.shards) > 0
        self.captured = captured
        self._model = model
        self.several: bool = bool(self._groups())
        for wrapper in self.wrappers:
            keep_process_groups(wrapper, [wrapper.process_group])
        if model is not None and self.sharded:
            keep_process_groups(model, self._groups())
        self._device = device
        self.together: bool = not self.several
        self._votes, self._votes_together = _Votes(), _Votes()
        self.voting: bool | None = None
        self.exchanges: bool = False
        self.decides: bool = False
        self._exchanged = self._all_know = False  # in this call
        self._turns: list[Turn] = []
        self._heartbeats: list[Heartbeat] | None = None  # one for each group; None before the first call

    def watched(self, turn: Turn) -> Turn:
        """Return the same. Its calls end if they wait for a rank that is gone."""
        if self.several:
            self._turns.append(turn)
            for heartbeat in self._heartbeats or ():
                heartbeat.waiting.turns.append(turn)
        return turn

    def _groups(self) -> list[Any]:
        """Return process groups that connect the ranks. Nothing of ampkit but `job_end` keeps them: see there."""
        if self.wrappers:
            return [self.wrappers[0].process_group]
        # Not `self._model and`: a model may have a length, or raise where torch.compile's wrapper asks for one.
        return [] if self._model is None else shard_groups(self._model)

    def gather(self, name: str) -> None:
        """Give the modules their sharded parameters, if `fully_shard` has wrapped them.

        Raises:
            ValueError: `fully_shard` has got a setting that a graph cannot follow. It calls the function by this name.
        """
        if self.captured and (problem := self.shards.why_not_captured()):
            raise ValueError(f"{name}, fully_shard: {problem} Or pass graph='off'.")
        self.shards.gather()

    def warm_up(self, wanted: int, on_cuda: bool) -> tuple[int, str]:
        """Return how many eager calls come before a capture, and why more than the user wanted; "" if not."""
        needed = WARMUP_DDP + any(ddp.static_graph for ddp in self.wrappers)  # whose buckets are laid out a call later
        if on_cuda and self.wrappers and wanted < needed:
            return needed, f"DistributedDataParallel needs {needed} calls"
        return max(2, wanted), ""  # two at least: one under the preflight, and the rehearsal

    def decide(self, wants: bool, can: bool, settled: bool, *, replays: bool = False) -> tuple[bool, bool]:
        """Return whether all ranks want to capture in this call, and whether all can. To be called in every call.

        If all ranks begin with it, and may capture later, `reducers` are prepared for that.

        Args:
            wants: whether this rank wants to. If it decides by outcomes, all ranks must know theirs, too.
            can: whether this rank knows of no reason against it.
            settled: whether this rank has nothing to capture, and nothing to compare, in this call.
            replays: whether this rank replays a graph in this call.

        Raises:
            AmpkitError: another rank is gone.

        Sync: waits for the device if there is a vote.
        """
        if not self.several:
            return wants, can
        if self.exchanges and not self._exchanged:
            self.outcome_of_all(())
        wants = wants and (self._all_know or not self.decides)
        self._exchanged = self._all_know = False
        self._begin_call()
        self.together = False
        if self.voting is False or not self._votes.are_due(always=self.voting is True):
            return False, True
        begins = self._votes.count == 1 and not (settled or replays)
        votes = self._all(wants, can, settled, begins, replays, not self.decides)
        all_want, all_can, all_settled, all_begin, all_replay, none_decides = votes
        self.exchanges = self.exchanges or not none_decides
        self.together = all_want or all_replay
        self._votes.note(all_settled)
        if all_begin and all_can:
            self.reducers.prepare()
        return all_want, all_can

    def outcome_of_all(self, outcomes: Hashable) -> int | None:
        """Return a number that stands for the outcomes on all ranks, None if one of them does not know its own.

        Raises:
            AmpkitError: another rank is gone; or the last backward has left out parameters, so that no gradients were
                averaged. Torch would raise in its next forward, which a replay does not call.

        Sync: waits for the device, if ranks exchange outcomes.
        """
        if not self.exchanges or self.voting is False:  # others may launch several calls at once
            return None
        if not self.reducers.idle:
            raise AmpkitError(
                "DistributedDataParallel: the last step had no gradients for some parameters, as with layerdrop, where "
                "the host leaves out layers by random draws. So no rank has averaged them. Torch needs "
                "find_unused_parameters=True for that, and steps that leave out any are eager."
            )
        self._exchanged = True
        named = repr((torch.distributed.get_rank(), outcomes)).encode()
        mine = int.from_bytes(hashlib.blake2b(named, digest_size=_DIGEST).digest(), "big")
        total = torch.tensor([mine, outcomes is None], dtype=torch.int64, device=self._device)
        for group in self._groups():
            torch.distributed.all_reduce(total, group=group)
        digest, unknown = total.tolist()  # sync
        self._raise_if_lost()
        self._all_know = not unknown
        return None if unknown else int(digest)

    def decide_together(self, has: bool, ready: bool, settled: bool) -> Together:
        """Return what this rank does with several calls that every rank was given at once.

        A launch and single calls communicate alike, so that some ranks may launch while others make the calls, as long
        as these do not vote.

        Args:
            has: whether this rank has a graph of these calls.
            ready: whether it has none, and may capture one now.
            settled: whether it has nothing to capture in these calls.

        Raises:
            AmpkitError: another rank is gone.

        Sync: waits for the device if there is a vote.
        """
        alone = Together.LAUNCH if has else Together.CALLS_ALONE
        if not self.several:
            return Together.CAPTURE if ready else alone
        self._begin_call()
        if not self._votes_together.are_due():
            return alone
        all_ready, all_either, all_settled = self._all(ready, has or ready, settled)
        self._votes_together.note(all_settled)
        if all_ready:
            return Together.CAPTURE
        return alone if all_either else Together.CALLS

    def agree(self, yes: bool) -> bool:
        """Return whether every rank says yes, in a call in which all of them ask. Waits for the device."""
        return self._all(yes)[0] if self.several else yes

    def of_first(self, value: Any) -> Any:
        """Return the value that the first rank gives, in a call in which all of them give one.

        Raises:
            AmpkitError: another rank is gone.

        Sync: waits for the device, if there are other ranks.
        """
        if not self.several:
            return value
        self._begin_call()
        given = [value]
        for group in self._groups():  # that of the first rank in the first group, then of the first of these
            torch.distributed.broadcast_object_list(
                given, torch.distributed.get_global_rank(group, 0), group=group, device=self._device
            )
        self._raise_if_lost()
        return given[0]

    @property
    def is_first(self) -> bool:
        """Whether `of_first` returns what this rank gives."""
        return all(torch.distributed.get_rank(group) == 0 for group in self._groups())

    def _all(self, *flags: bool) -> list[bool]:
        votes = torch.tensor(flags, dtype=torch.int32, device=self._device)
        for group in self._groups():  # the least of the first group's ranks, then the least of these
            torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=group)
        decided = list(map(bool, votes.tolist()))  # sync
        self._raise_if_lost()
        return decided

    def _raise_if_lost(self) -> None:
        """Raise an `AmpkitError` if another rank is gone. Then a vote was aborted, and decides nothing."""
        for heartbeat in self._heartbeats or ():
            heartbeat.raise_if_lost()

    def _begin_call(self) -> None:
        """Tell the other ranks from the first call on that this one lives. Raise an error if one of them is gone."""
        if self._heartbeats is None:
            tell_end()
            self._heartbeats = [beat for beat in map(heartbeat_of, self._groups()) if beat is not None]
            for heartbeat in self._heartbeats:
                heartbeat.waiting.turns.extend(self._turns)
        for heartbeat in self._heartbeats:
            heartbeat.begin_call()

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


_DIGEST = 6  # bytes of a rank's number: the sum over 32768 ranks fits into 63 bits
_QUIET = 16  # mostly more than a window has micro-batches
_EAGER_VOTES = 256  # votes; ranks whose batches always differ would vote in every call for ever
_EVERY = 61  # prime, so that the votes fall on every micro-batch of a window in turn


def several_processes() -> bool:
    """Return whether this process belongs to a job of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
