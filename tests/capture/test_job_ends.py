"""Ends of jobs on two GPUs, by what wraps the model and by what the user forgets: both ranks exit with 0.

An end needs a start of the ranks of its own. All start together, so that this takes as long as one.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import ddp_train
import fsdp_train
import pytest

Jobs = dict[tuple[str, str], ddp_train.Started]

SCRIPTS = {
    "DDP": (ddp_train.__file__, "--model", "mlp"),
    "fully_shard": (fsdp_train.__file__, "--cases", "float32"),
}
# Each end once, and the one that forgets all with both.
ENDS = [
    ("DDP", "close"),
    ("DDP", "imported"),
    ("DDP", "nothing"),
    ("fully_shard", "destroy"),
    ("fully_shard", "nothing"),
]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with ExitStack() as stack:
        started = {}
        for wrapper, how in ENDS:
            script, *options = SCRIPTS[wrapper]
            job = ddp_train.Started("--device", "cuda", *options, "--end", how, timeout=150, script=script)
            started[wrapper, how] = stack.enter_context(job)
        yield started


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "how"), ENDS)
def test_a_job_on_two_gpus_ends(jobs: Jobs, wrapper: str, how: str) -> None:
    """L4, R12: with a graph that holds NCCL's work, both ranks exit with 0, whatever the user forgets."""
    for row in jobs[wrapper, how].rows():
        (run,) = row.values()
        assert run["replays"] > 4
