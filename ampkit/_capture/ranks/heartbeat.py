"""How ranks learn that another one is gone, and why: a thread of each process looks at the store of the process group.

NCCL's watchdog does not see the work of a replay. If a rank is killed, raises, or has fewer batches, a replay of the
others would wait for it for ever. So each rank says on the store why it ends, and each watches the next one. On one
machine the kernel tells whether a process lives. Of a process elsewhere the thread sees only whether it still beats.

A rank that is gone hurts nobody who does not need it: the first rank may go on to write a checkpoint. So the thread
reports it, and the next call of the step raises. Only a rank that waits, in a call or for its device, is interrupted.
"""

import faulthandler
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ..._errors import AmpkitError
from ..._torch.ranks.distributed import own_store
from ..._user_line import user_line
from .held_up import EndedWait, Waiting, started
from .peer_process import PeerProcess, address

LOOK_S = 1.0  # between two looks at the store; 1000 ranks then ask it some 4000 times per second
BEAT_LOOKS = 5  # a store on a file grows with each beat
HELD_UP_S = 10.0  # a rank that others wait for may be slower by a moment; what is left of its last step takes no longer
# A Python thread cannot beat while some extension keeps Python's lock, as unpickling a large list does for a minute.
# torch waits 600 s for an eager collective of NCCL.
SILENCE_S = 300.0
_STORE_TIMEOUT = timedelta(seconds=5)  # for one connection
# A thread that comes back from C while the interpreter is being finalized aborts the process: see `job_end`.
_PROBE_S = 2.0
_FIRST_S, _FIRST_LOOKS = 0.05, 20  # the processes are to know each other soon
_MOST_LOOKS_OFF = 32  # between two connections to a store that does not answer


@dataclass(eq=False)
class Peer:
    """Another rank."""

    rank: int  # its number in the job
    process: PeerProcess | None = None  # where it runs; None until it has said so
    left: bool = False  # whether it has said that it ends
    silent_s: float = 0.0  # how long it has not beaten
    beat: bytes = b""  # the last one that was seen


class Heartbeat:
    """Tells the other ranks of a process group that this one lives, and learns of those that do not.

    Args:
        store: a client of its own.
        rank: of this process in the job.
        ranks: of the group, in order.
    """

    def __init__(self, store: Any, rank: int, ranks: list[int]) -> None:
        self.lost = ""  # why no call of a step can succeed any more
        self.waiting = Waiting()  # what the steps of this process wait for
        self._store, self._rank = store, rank
        here = ranks.index(rank)
        self._others = [Peer(other) for other in (*ranks[here + 1 :], *ranks[:here])]
        self._first = next((peer for peer in self._others if peer.rank == ranks[0]), None)
        self._silent = self._left = ""
        self._word: str | None = None  # why this rank ends; "" if without an error
        self._looks = self._pause = self._off_for = 0  # the last two: looks without a connection
        self._off_s = 0.0
        self._ended_wait: EndedWait | None = None
        self._stopped = False
        self._wake, self._told, self._said = threading.Event(), threading.Event(), threading.Event()
        self._process_id = os.getpid()
        self._thread = started("ampkit-heartbeat", self._run)

    # ----------------------------------------------------------------------------------- from the thread that trains

    def begin_call(self) -> None:
        """Take note of a call that begins. Sync: none; the store is not asked.

        Raises:
            AmpkitError: another rank is gone, and says why if it could.
        """
        self.waiting.calls += 1
        self.waiting.thread = threading.get_ident()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise an `AmpkitError` if another rank is gone."""
        if self.lost:
            raise AmpkitError(f"rank {self._rank} stops, because {self.lost}")

    def end(self, error: BaseException | None) -> None:
        """Tell the other ranks that this one ends, and why. Waits for the store, not for a rank.

        If the error may come from the loss of another rank, that one is looked for first.
        """
        if self._stopped or self.waiting.ending or os.getpid() != self._process_id:  # of a fork, which is no rank
            return
        follows = isinstance(error, RuntimeError) and not isinstance(error, (AmpkitError, torch.OutOfMemoryError))
        if follows:
            self._told.wait(3 * LOOK_S)
        self.waiting.ending = True
        if error is None or self.lost:
            self._word = ""
        elif follows and self._left:
            self._word = f"{self._left}, while rank {self._rank} needs it"
            print(f"ampkit, rank {self._rank}: {self._word}", file=sys.stderr, flush=True)
        else:
            text, line = (str(error).strip().splitlines() or [""])[0], user_line(error)
            said = f"{type(error).__name__}{f': {text}' if text else ''}{f' (at {line})' if line else ''}"
            self._word = f"rank {self._rank} ended: {said}"
        self._wake.set()
        self._said.wait(_STORE_TIMEOUT.total_seconds())
        if self._word and self._rank == 0:
            self._thread.join(2 * LOOK_S)  # the store may be in this process, and the others are to read the reason

    def stop(self) -> bool:
        """End the thread. Return whether another rank is lost."""
        if os.getpid() == self._process_id and not self._stopped:
            self._stopped = True
            self._wake.set()
            self._thread.join(_STORE_TIMEOUT.total_seconds())
            if self.waiting.probe is not None:
                self.waiting.probe.join(_PROBE_S)  # or less, if the device answers
            if self._ended_wait is not None:
                self._ended_wait.join()
                faulthandler.cancel_dump_traceback_later()
        return bool(self.lost)

    # --------------------------------------------------------------------------------------------- from its own thread

    def _run(self) -> None:
        while not self._stopped:
            try:
                if self._off_for:
                    self._reconnect()
                elif not self._looks:
                    self._store.set(f"address {self._rank}", address())
                if not self._off_for:
                    self._look()
            except RuntimeError:  # of the connection
                self._pause = self._off_for = min(2 * self._pause or 1, _MOST_LOOKS_OFF)
            if self._off_for and self._word is not None:
                self._said.set()  # as far as it can be
            self._interrupt()
            if self._wake.wait(LOOK_S if self._looks > _FIRST_LOOKS else min(LOOK_S, _FIRST_S)):
                self._wake.clear()
        for peer in self._others:
            if peer.process is not None:
                peer.process.close()

    def _look(self) -> None:
        if self._word is not None and not self._said.is_set():
            if self._word:
                self._store.compare_set("lost", "", self._word)
            self._store.set(f"end {self._rank}", self._word)
            self._said.set()
        if self._looks % BEAT_LOOKS == 0:
            self._store.set(f"beat {self._rank}", str(self._looks))
        self._looks += 1
        if not self.lost and self._store.check(["lost"]):
            self._learn(self._store.get("lost").decode())
        self._silent = ""
        for peer in self._watched():
            self._watch(peer)

    def _watched(self) -> list[Peer]:
        """Return the next rank that has not left, and the first one, whose process mostly has the store."""
        following = next((peer for peer in self._others if not peer.left), None)
        both = dict.fromkeys((following, self._first))  # each once
        return [peer for peer in both if peer is not None and not peer.left]

    def _watch(self, peer: Peer) -> None:
        store, rank = self._store, peer.rank
        if peer.process is None:
            if not store.check([f"address {rank}"]):
                return  # it has not come to its first call yet
            peer.process = PeerProcess(store.get(f"address {rank}").decode())
        has_died = peer.process.has_ended()  # before its last word is looked for
        if store.check([f"end {rank}"]):
            peer.left = True
            if word := store.get(f"end {rank}").decode():
                self._publish(word)
            self._left = self._left or f"rank {rank} has ended"
            self._told.set()
        elif has_died:
            peer.left = True
            self._publish(_DIED.format(rank))
        elif not peer.process.known and store.check([f"beat {rank}"]):
            beat = store.get(f"beat {rank}")
            # The looks are counted: a suspended machine has none, and a clock may have gone on.
            peer.silent_s = peer.silent_s + LOOK_S if beat == peer.beat else 0.0
            peer.beat = beat
            if peer.silent_s >= SILENCE_S:
                self._silent = _SILENT.format(rank, SILENCE_S)

    def _reconnect(self) -> None:
        """Try a new connection, after ever more looks, as long as nobody is gone who may have had the store."""
        self._off_s += LOOK_S
        if self._off_s >= SILENCE_S:
            self._silent = _NO_STORE.format(SILENCE_S)
        died = [each.rank for each in self._watched() if each.process is not None and each.process.has_ended()]
        if died:
            self._left = f"rank {died[0]} has ended, and the store of the process group with it"
            self._told.set()
        elif self._off_for > 1:
            self._off_for -= 1
        elif self._word is None:  # one that ends needs it no more
            self._store = self._store.clone()
            self._pause = self._off_for = 0
            self._off_s = 0.0

    def _publish(self, text: str) -> None:
        """Tell all ranks why one is lost, unless they know a reason."""
        try:
            self._store.compare_set("lost", "", text)
            text = self._store.get("lost").decode()
        finally:
            self._learn(text)

    def _learn(self, text: str) -> None:
        if self._word:
            return  # this rank has ended of itself
        self.lost = text
        self._told.set()
        print(f"ampkit, rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def _interrupt(self) -> None:
        """If this rank waits for one that is gone, end its wait. If it does so no more, let it live."""
        reason = self.lost or self._silent or self._left
        if not reason:
            self.waiting.since = None  # there is nobody to wait for in vain
            return
        waited = self.waiting.seconds()
        if waited >= HELD_UP_S and self._ended_wait is None:
            text = reason if self.lost else f"{reason}, while rank {self._rank} waits for it"
            if not self.lost:
                try:
                    self._publish(text)
                except RuntimeError:
                    self._off_for = self._off_for or 1  # the store does not answer; this rank knows the reason
            thread = None if self.waiting.ending else self.waiting.thread
            self._ended_wait = EndedWait(f"rank {self._rank} stops, because {text}", thread)
        elif self._ended_wait is not None and not waited and not self.waiting.ending:
            faulthandler.cancel_dump_traceback_later()


_DIED = (
    "the process of rank {} is gone and has not said why: something killed it (the system does where memory runs out), "
    "or it left by os._exit()"
)
_SILENT = "rank {} has not been heard of for {:.0f} s: its machine is down or cut off"
_NO_STORE = "the store of the process group has not answered for {:.0f} s"

_heartbeats: dict[str, Heartbeat] = {}  # by the name of the group; the group itself would outlive the job's end
_started: Counter[str] = Counter()  # how many there were for each name


def heartbeat_of(group: Any) -> Heartbeat | None:
    """Return the heartbeat of this process in a group, started by the first call. None if the group has no store."""
    name = group.group_name
    if name not in _heartbeats:
        distributed = torch.distributed
        # A group of the same name, made later, may have the same store.
        store = own_store(group, f"ampkit/heartbeat/{_started[name]}", _STORE_TIMEOUT)
        if store is None or distributed.get_backend(group) == "fake":
            return None
        _started[name] += 1
        _heartbeats[name] = Heartbeat(store, distributed.get_rank(), distributed.get_process_group_ranks(group))
    return _heartbeats[name]


def end_heartbeats(error: BaseException | None, name: str | None = None) -> None:
    """Tell the other ranks that this one ends, or leaves the group of this name, and why."""
    for known, heartbeat in list(_heartbeats.items()):
        if name in (None, known):
            heartbeat.end(error)


def stop_heartbeats(name: str | None = None) -> bool:
    """End the threads, or that of the group of this name. Return whether a rank is lost."""
    names = [known for known in _heartbeats if name in (None, known)]
    return any([_heartbeats.pop(known).stop() for known in names])
