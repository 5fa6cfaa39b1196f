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
import tempfile
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
from torch.nn.parallel import DistributedDataParallel

import ampkit

# Where the wrapped model lives when the job ends, and whether the process group is destroyed before.
HOW = ("local", "global", "cycle", "no-destroy", "global-no-destroy")
KEPT: list[Any] = []
TIMEOUT = 60.0  # seconds; a job takes one, on a machine with much else to do 25


def job(rank: int, store: str, how: str, slow_release: bool) -> None:
    """Train three steps under DistributedDataParallel and end like a script does, right behind a collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, graph="emulate")
    for _ in range(3):
        step(torch.randn(2, 8))
    if how.startswith("global"):
        KEPT.append((model, step))
    if how == "cycle":
        model.itself = [model]
    many = 3000 if slow_release else 3
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
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spin:
            process.kill()
            process.wait()


def start(how: str, slow_release: bool, folder: str) -> list[int] | None:
    """Fork two ranks and return their process ids; None in a rank, whose work is done and which is to end."""
    store, ranks = os.path.join(folder, "store"), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            job(rank, store, how, slow_release)
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
    parser.add_argument("--how", choices=HOW, nargs="+", default=HOW)
    parser.add_argument("--slow-release", action="store_true", help="make sure that gloo waits for Python's lock")
    args = parser.parse_args()
    gc.freeze()  # or each rank would look through torch's half a million objects, when it collects and at its end
    ends: Counter[tuple[str, bool]] = Counter()
    with busy(args.busy):
        for k in range(args.jobs):
            how = args.how[k % len(args.how)]
            with tempfile.TemporaryDirectory() as folder:
                ranks = start(how, args.slow_release, folder)
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
