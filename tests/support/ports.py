"""Scripts with ranks: a port for the store of their job, and a job of two processes."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    It is below those that the kernel gives to sockets without a number (32768 to 60999 on Linux). NCCL opens many of
    these, and one of them may be taken between this call and the start of the store.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def printed_by_two_ranks(script: Path, *args: str, folders: Sequence[Path], begins: str, **env: str) -> str:
    """Run a script of this folder in two processes on the CPU; return the line of its output that `begins` so.

    It imports from the repository, from this folder and from `folders`.
    """
    paths = map(str, (script.parents[2], script.parent, *folders))
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    done = subprocess.run(
        [*command, str(script), *args],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith(begins))
