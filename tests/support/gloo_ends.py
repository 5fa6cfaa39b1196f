"""Two-process jobs over gloo, started and ended many times under load: does each end, and with exit code 0?

    python tests/support/gloo_ends.py --jobs 200 --busy 2    how many jobs of each kind ended well, one line per kind
    python tests/support/gloo_ends.py --jobs 15 --slow-release    the race: gloo waits for Python's lock at the end

The ranks are forks of this process, which has imported torch once, so that a job takes a second. They leave as scripts
do: by falling off the end, through atexit and the interpreter's finalization.
"""

import argparse
import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo  # imported later, by the first optimizer of each rank, it would take each a second
import torch.distributed as dist
import torch.distributed.nn  # imported later, its default arguments would keep the process group alive
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ampkit

# Where the wrapped model lives when the job ends, and whether the process group is destroyed before.
HOW = ("local", "global", "cycle", "no-destroy", "global-no-destroy")
HOW_SHARDED = tuple(f"sharded-{how}" for how in HOW)
KEPT: list[Any] = []
TIMEOUT = 60.0  # seconds; a job takes one, on a machine with much else to do 25


def job(rank: int, port: int, prefix: str, how: str, slow_release: bool) -> None:
    """Train three steps under DistributedDataParallel, or `fully_shard`, and end right behind a collective."""
    torch.set_num_threads(1)
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    del store
    sharded = how.startswith("sharded-")
    how = how.removeprefix("sharded-")
    model: Any = fully_shard(nn.Linear(8, 4)) if sharded else DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, graph="emulate")
    for _ in range(3):
        step(torch.randn(2, 8))
    if how.startswith("global"):
        KEPT.append((model, step))
    if how == "cycle":
        model.itself = [model]
    many = 3000  # tensors, each of which gloo's thread needs Python's lock for
    parts = [[torch.zeros(2) for _ in range(many)] for _ in range(2)]
    if slow_release:
        sys.setswitchinterval(1e6)  # Python gives its lock away only where a call releases it
    group = dist.group.WORLD
    group.allgather_coalesced(parts, [torch.ones(2) for _ in range(many)]).wait()
    del parts, group
    if not how.endswith("no-destroy"):
        dist.destroy_process_group()


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Context in which some processes beside this one keep a core busy each."""
    parent = os.getpid()
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spin if os.getpid() == parent else ():  # the ranks leave this context as well
            process.kill()
            process.wait()


@contextmanager
def stored() -> Iterator[int]:
    """Context in which a process has a store that outlives the ranks. Return its port.

    A file would hold a rank up at its end, if the other one has removed it.
    """
    parent = os.getpid()
    result, port = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port, str(store.port).encode())
        os.close(port)
        signal.pause()
    os.close(port)
    with open(result) as file:
        found = int(file.read())
    try:
        yield found
    finally:
        if os.getpid() == parent:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def start(how: str, slow_release: bool, port: int, prefix: str) -> list[int] | None:
    """Fork two ranks and return their process ids; None in a rank, whose work is done and which is to end."""
    ranks = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            job(rank, port, prefix, how, slow_release)
            gc.collect()  # as it may happen at any time: the model goes, and with it the Reducer of DDP
            return None
        ranks.append(child)
    return ranks


def codes(ranks: list[int]) -> list[int]:
    """Return the exit codes of the ranks; -9 for one that was not over in time and was killed."""
    deadline, found = time.monotonic() + TIMEOUT, {}
    while len(found) < len(ranks):
        for pid in set(ranks) - set(found):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [found[pid] for pid in ranks]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--busy", type=int, default=0, help="processes beside the jobs that keep a core busy each")
    parser.add_argument("--how", choices=HOW + HOW_SHARDED, nargs="+", default=HOW + HOW_SHARDED)
    parser.add_argument("--slow-release", action="store_true", help="make sure that gloo waits for Python's lock")
    args = parser.parse_args()
    gc.freeze()  # or each rank would look through torch's half a million objects, when it collects and at its end
    ends: Counter[tuple[str, bool]] = Counter()
    with busy(args.busy), stored() as port:
        for k in range(args.jobs):
            how = args.how[k % len(args.how)]
            ranks = start(how, args.slow_release, port, str(k))
            if ranks is None:
                return 0
            result = codes(ranks)
            ends[how, result == [0, 0]] += 1
            if result != [0, 0]:
                print(f"job {k}, {how}: exit codes {result}", flush=True)
    for how in args.how:
        good, bad = ends[how, True], ends[how, False]
        print(f"{how}: {good} of {good + bad} jobs ended with exit code 0 on both ranks")
    failed = sum(count for (_, good), count in ends.items() if not good)
    print(f"{args.jobs - failed} of {args.jobs} jobs ended with exit code 0 on both ranks")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
