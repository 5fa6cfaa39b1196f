"""Jobs of several ranks in which one rank ends as it should not, or the group does: how do the others end, and when?

    python tests/support/rank_ends.py --jobs 20    each kind of end 20 times with gloo, one line per kind
    python tests/support/rank_ends.py --jobs 5 --together 10 --device cuda    with NCCL, on two GPUs

The ranks are forks of this process, which has imported torch once and has not touched a GPU. They leave as scripts do:
by falling off the end, through atexit and the interpreter's finalization, or by an error that nobody catches.
"""

import argparse
import faulthandler
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch._dynamo  # imported later, by the first optimizer of each rank, it would take each a second
import torch.distributed as dist
from ports import free_port
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampkit
from ampkit._capture.graph.graph import EmulatedGraph
from ampkit._capture.ranks import heartbeat, held_up

CALLS = 22  # of which DDP needs 5 to warm up with NCCL
EVENT = 17  # the call in which it happens: all ranks have a graph
MARGIN_S = 30.0  # for a busy machine; the rank that is to fail says when
HANGS_S = 90.0


class Kind(NamedTuple):
    """One way to end.

    Attributes:
        codes: the exit codes of rank 1, and of the others; None stands for any but 0.
        reason: what each of the others says, "" if nothing.
    """

    codes: tuple[int | None, int | None]
    reason: str = ""


FAILED = "rank 1 ended: {}"
KINDS = {
    "normal": Kind((0, 0)),
    "forgotten": Kind((0, 0)),
    "default group": Kind((0, 0)),
    "own group": Kind((0, 0)),
    "own group, step dropped": Kind((0, 0)),
    "exception": Kind((1, None), FAILED.format("ValueError: a mistake of the user")),
    "exception, group destroyed": Kind((1, None), FAILED.format("ValueError: a mistake of the user")),
    "killed": Kind((-signal.SIGKILL, None), "the process of rank 1 is gone"),
    "first killed": Kind((-signal.SIGKILL, None), "rank 0 "),
    "out of memory": Kind((1, None), FAILED.format("OutOfMemoryError: CUDA out of memory")),
    "fewer batches": Kind((0, None), "rank 1 has ended"),
    "killed, others in Python": Kind((-signal.SIGKILL, 1), " stops, because the process of rank 1 is gone"),
    "killed, others elsewhere": Kind((-signal.SIGKILL, 1), "the process of rank 1 is gone"),
    "other shape": Kind((0, 0)),
    "cannot capture": Kind((0, 0), "another rank found that its step cannot be captured"),
    "raises in its capture": Kind((0, 0), "the capture failed on another rank"),
}


def happens_to(kind: str) -> int:
    """Return the rank that something happens to."""
    return 0 if kind == "first killed" else 1


class Job:
    """One rank of a job.

    Args:
        kind: how it ends.
        rank: which one this is.
        device: where it trains.
        sharded: whether under fully_shard, not under DistributedDataParallel.
    """

    def __init__(self, kind: str, rank: int, device: torch.device, sharded: bool) -> None:
        self.kind, self.rank, self.device = kind, rank, device
        self.here = rank == happens_to(kind)
        # By call. What large arrays hold is not compared from call to call.
        self.begun = numpy.zeros(100 + CALLS, dtype=bool)
        self.group = dist.new_group() if kind.startswith("own group") else None
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        if sharded:
            fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
        elif device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                model = DistributedDataParallel(model, device_ids=[device], process_group=self.group)
        else:
            model = DistributedDataParallel(model, process_group=self.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        graph = "auto" if device.type == "cuda" else "emulate"
        after = self.after_step if "others" in kind else None
        if self.here and kind == "raises in its capture" and graph == "emulate":
            EmulatedGraph.capture = self.fail  # it calls nothing
        self.step: Any = ampkit.graphed_step(self.loss_fn, model, optimizer, graph=graph, after_step=after)

    def loss_fn(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if self.here and self.kind == "cannot capture":
            loss.item()
        if self.here and self.kind == "raises in its capture" and self.capturing():
            raise ValueError("a mistake of the user")
        if self.here and self.kind == "out of memory" and self.begun[self.event()]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return loss

    def after_step(self, model: nn.Module) -> None:
        """Wait for ever, on other ranks than the one that is to be killed, and behind its last collective."""
        waits = self.begun[EVENT - 1] and not self.here
        while waits and self.kind == "killed, others in Python":
            time.sleep(0.01)
        if waits and self.kind == "killed, others elsewhere":
            os.read(os.pipe()[0], 1)  # where no exception of Python comes

    def fail(self, *_: object) -> None:
        raise ampkit.CaptureError("a mistake of the user")

    def capturing(self) -> bool:
        return self.device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing()

    def event(self) -> int:
        # With a real graph, loss_fn runs in eager calls alone.
        return 2 if self.kind == "out of memory" and self.device.type == "cuda" else EVENT

    def train(self) -> None:
        """Call the step, and have happen what is to."""
        calls = EVENT if self.kind == "fewer batches" and self.here else CALLS
        for call in range(calls):
            self.begun[call] = True
            if call == self.event() and self.here:
                self.happen()
            rows = 3 if self.kind == "other shape" and self.here and call in (5, EVENT) else 2
            out = self.step(torch.randn(rows, 8).to(self.device))
            if call % 4 == 0:
                out.loss.item()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def happen(self) -> None:
        """Do to this rank what its job is for."""
        say("now")
        if "killed" in self.kind:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind.startswith("exception"):
            raise ValueError("a mistake of the user")

    def end(self) -> None:
        """Destroy a group, by its name, or leave that to ampkit."""
        if self.kind == "own group, step dropped":
            del self.step
        if self.kind.startswith("own group"):
            dist.destroy_process_group(self.group)
        if self.kind not in ("forgotten", "fewer batches"):
            dist.destroy_process_group(dist.group.WORLD if self.kind == "default group" else None)


def say(word: str) -> None:
    """Print a word of this script's with the time."""
    print(f"@{word} {time.monotonic()}", file=sys.stderr, flush=True)


def be_rank(args: argparse.Namespace, kind: str, rank: int, folder: str) -> None:
    """Train, and end as this rank of such a job."""
    out = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    device = torch.device(args.device, rank if args.device == "cuda" else None)
    if args.device == "cuda":
        torch.cuda.set_device(device)
    store: Any
    if args.store == "tcp":
        store = dist.TCPStore("127.0.0.1", args.port, args.ranks, is_master=rank == 0)
    else:
        store = dist.FileStore(f"{folder}/store", args.ranks)
    options = {"device_id": device} if args.device == "cuda" else {}
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo", store=store, rank=rank, world_size=args.ranks, **options
    )
    job = Job(kind, rank, device, args.sharded)
    try:
        job.train()
        say("trained")
        job.end()
    finally:
        if kind == "exception, group destroyed" and sys.exc_info()[1] is not None:
            dist.destroy_process_group()


class Started:
    """A job that runs.

    Args:
        args: of the command line.
        kind: how it ends.
        folder: for its store, and for what its ranks write.
    """

    def __init__(self, args: argparse.Namespace, kind: str, folder: str) -> None:
        self.kind, self.folder = kind, folder
        self.ended: dict[int, tuple[int, float]] = {}  # exit codes and times by rank
        self.start = time.monotonic()
        self.pids = []
        args.port = free_port() if args.store == "tcp" else 0
        for rank in range(args.ranks):
            pid = os.fork()
            if pid == 0:
                raise InRank(lambda rank=rank: be_rank(args, kind, rank, folder))
            self.pids.append(pid)

    def is_over(self) -> bool:
        """Return whether all ranks have ended; kill those that hang."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
                elif time.monotonic() - self.start > HANGS_S:
                    os.kill(pid, signal.SIGKILL)
        return len(self.ended) == len(self.pids)

    def problem(self) -> str:
        """Return what went wrong, "" if the job ended as it should."""
        kind = KINDS[self.kind]
        written = [Path(f"{self.folder}/{rank}").read_text() for rank in range(len(self.pids))]
        here = happens_to(self.kind)
        for rank, text in enumerate(written):
            wanted, code = kind.codes[rank != here], self.ended[rank][0]
            if code != wanted if wanted is not None else code in (0, -signal.SIGKILL):
                return f"rank {rank} ended with {code}, not {'an error' if wanted is None else wanted}\n{text[-3000:]}"
            if rank != here and kind.reason not in text:
                return f"rank {rank} does not say {kind.reason!r}\n{text[-3000:]}"
            if "terminate called" in text or "Fatal Python error" in text:
                return f"rank {rank} crashed at its end\n{text[-3000:]}"
        bound = 3 * heartbeat.LOOK_S + heartbeat.HELD_UP_S + held_up.LAST_RESORT_S  # as docs/distributed.md says
        if self.seconds() > bound + MARGIN_S:
            return f"it took {self.seconds():.1f} s\n{written}"
        return ""

    def seconds(self) -> float:
        """Return how long the last rank lived after what happened to one, or after the training."""
        written = "".join(Path(f"{self.folder}/{rank}").read_text() for rank in range(len(self.pids)))
        times = [float(found) for found in re.findall(r"@\w+ (\S+)", written)]
        return max(ended for _, ended in self.ended.values()) - min(times, default=self.start)


class InRank(BaseException):
    """Raised in a fork, to leave what the parent does."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work


def run_all(args: argparse.Namespace) -> int:
    """Run the jobs, some of them at a time. Return how many did not end well."""
    gc.freeze()  # at its end each rank looks through all objects, of which most are torch's
    waiting = [kind for kind in args.kinds for _ in range(args.jobs)]
    running: list[Started] = []
    problems: dict[str, list[str]] = {kind: [] for kind in args.kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
    folder = tempfile.mkdtemp()  # not as a context, which the ranks would leave, too
    count = 0
    while waiting or running:
        while waiting and len(running) < args.together:
            count += 1
            os.mkdir(f"{folder}/{count}")
            running.append(Started(args, waiting.pop(0), f"{folder}/{count}"))
        for job in [job for job in running if job.is_over()]:
            running.remove(job)
            problems[job.kind].append(job.problem())
            seconds[job.kind].append(job.seconds())
            say_kind(job.kind, problems[job.kind], seconds[job.kind], args.jobs)
        time.sleep(0.02)
    shutil.rmtree(folder)
    return sum(1 for found in problems.values() for problem in found if problem)


def say_kind(kind: str, problems: list[str], seconds: list[float], jobs: int) -> None:
    """Print what was wrong with the last job of a kind, and how many ended well, if all have ended."""
    if problems[-1]:
        print(f"{kind}: {problems[-1]}", flush=True)
    if len(problems) == jobs:
        print(f"{kind}: {problems.count('')} of {jobs}, at most {max(seconds):.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20, help="of each kind")
    parser.add_argument("--together", type=int, default=4, help="jobs that run at a time")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--store", choices=["file", "tcp"], default="tcp", help="of the process group")
    parser.add_argument("--sharded", action="store_true", help="train under fully_shard")
    parser.add_argument("--held-up", type=float, default=heartbeat.HELD_UP_S, help="seconds, to try it in less time")
    args = parser.parse_args()
    heartbeat.HELD_UP_S, held_up.LAST_RESORT_S = args.held_up, min(args.held_up, held_up.LAST_RESORT_S)
    start = time.monotonic()
    failed = run_all(args)
    jobs = args.jobs * len(args.kinds)
    print(f"{jobs - failed} of {jobs} jobs ended as they should, in {time.monotonic() - start:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    work = None
    try:
        code = main()
    except InRank as fork:
        work = fork.work
    if work is None:
        sys.exit(code)
    work()  # outside of the handler: at its end a rank is in no exception
