"""graphed_step under DistributedDataParallel: the bits of eager training on every rank, one decision, a clean end.

What trains runs in processes of its own, one per rank (ddp_train.py), so that a hang is a failure and not the end of
the test run.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import ddp_train
import forks
import gloo_ends
import pytest
import torch
import torch.distributed as dist
from harness import WARMUP_DDP
from rank_cases import Cases, Rows, cases_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ampkit


def launch(*options: str, forked: bool = True, timeout: float = 120) -> Rows:
    """Train on two ranks on the CPU."""
    return ddp_train.launch("--device", "cpu", *options, forked=forked, timeout=timeout)


def runs(rows: Rows, graph: str) -> Rows:
    """Return the results of each rank in a run of this kind. Assert that all ranks have the same weights."""
    assert all("error" not in row for row in rows), rows
    found = [row[graph] for row in rows]
    assert all(run["parameters"] == found[0]["parameters"] for run in found), "the ranks have different weights"
    assert found[0]["losses"] != found[1]["losses"]  # of batches of their own
    return found


def assert_equal_runs(rows: Rows, graph: str, reference: str = "off") -> Rows:
    """Assert that on every rank the run of this kind has all the bits of the reference; return its rows."""
    graphed = runs(rows, graph)
    for run, eager in zip(graphed, runs(rows, reference), strict=True):
        for what in ("losses", "parameters", *(["state"] if reference != "torch" else [])):
            assert run[what] == eager[what], what
    return graphed


OVERFLOWS = ["--policy", "float16", "--overflows", "1", "9"]


@pytest.mark.parametrize(
    ("options", "accumulate"),
    [
        pytest.param([], 1, id="float32"),
        pytest.param(
            ["--policy", "bfloat16", "--max-norm", "0.5"],
            3,
            id="bfloat16-clip",
            marks=[pytest.mark.slow, pytest.mark.ranks],
        ),
        pytest.param(
            [*OVERFLOWS, "--max-norm", "0.5"], 3, id="float16-clip-overflow-on-one-rank", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_train_the_bits_of_eager(options: list[str], accumulate: int) -> None:
    """L4: over windows and overflows, weights are equal on both ranks, and all state is that of eager DDP."""
    options = ["--graph", "emulate", "off", "--accumulate", str(accumulate), *options]
    rows = launch(*options)
    for run in assert_equal_runs(rows, "emulate"):
        assert (run["captures"], run["replays"]) == (accumulate, 18 - 3 * accumulate)
        assert run["skipped"] == (2 if "float16" in options else 0)
        assert run["messages"] == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [OVERFLOWS], ids=["overflows"])  # a short window below has the rest
@pytest.mark.ranks
def test_equals_ddp_written_with_torch(options: list[str]) -> None:
    """L4: without clipping, which ampkit does in the optimizer's kernel, the bits are those of torch's DDP loop."""
    rows = launch("--graph", "emulate", "torch", *options)
    assert_equal_runs(rows, "emulate", "torch")


@pytest.mark.slow
def test_a_short_window_is_reduced() -> None:
    """`flush` averages over the ranks what the micro-batches before it left to each: the weights stay equal."""
    rows = launch("--graph", "emulate", "off", "torch", "--accumulate", "3", "--calls", "17", "--flush")
    assert_equal_runs(rows, "emulate")
    assert_equal_runs(rows, "emulate", "torch")


SHORT = ["--policy", "float16", "--overflows", "1", "17", "--max-norm", "0.5", "--end", "nothing"]
WINDOWS = {
    "plain": ["--accumulate", "3", "--calls", "30"],
    "overflows-short": ["--accumulate", "3", "--calls", "32", *SHORT],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param("plain", marks=pytest.mark.ranks), "overflows-short"])
def test_windows(case: str) -> None:
    """R12: `window` makes an optimizer step one launch on each rank, with one reduction, as N calls do."""
    rows = launch("--graph", "emulate", "off", "--windows", *WINDOWS[case])
    short = case != "plain"
    for run in assert_equal_runs(rows, "emulate"):
        assert (run["captures"], run["launches"], run["replays"]) == (4, 6, 3 + 2 * short)
        assert run["skipped"] == 2 * short
        assert run["messages"] == []


@pytest.mark.slow
@pytest.mark.ranks
def test_windows_of_another_size_on_one_rank() -> None:
    """R12: where one rank has a graph and the other makes its calls one by one, they communicate alike."""
    odd = [str(call) for window in (2, 10, 11, 34, 35) for call in (2 * window, 2 * window + 1)]
    rows = launch("--graph", "emulate", "off", "--windows", "--accumulate", "2", "--calls", "80", "--odd-calls", *odd)
    first, second = assert_equal_runs(rows, "emulate")
    assert first["launches"] == 40 - 5 - 2  # 10 and 11 with a vote: all make the calls one by one
    assert second["launches"] == first["launches"] - 2  # 34 and 35 without: this rank alone
    assert first["messages"] == second["messages"] == []


@pytest.mark.slow
@pytest.mark.ranks
def test_one_rank_cannot_capture() -> None:
    """L4: a blocking line on rank 1 keeps both ranks eager; rank 1 names the line, rank 0 says that it was another."""
    source = Path(ddp_train.__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, start=1) if text.endswith("# BLOCKS"))
    rows = launch("--graph", "emulate", "off", "--failing-rank", "1")
    first, second = assert_equal_runs(rows, "emulate")
    for run in (first, second):
        assert run["replays"] == run["captures"] == 0
        assert list(run["eager"].values()) == [3, 15]
    assert first["eager"] == second["eager"]
    assert ["another rank" in message for message in first["messages"]] == [True]
    assert [f"ddp_train.py:{line}" in message for message in second["messages"]] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [["2"], ["1", "3", "4", "5", "7"]],
    ids=["in the warm-up", "often enough to be captured"],
)
@pytest.mark.sampled(2)
def test_a_batch_of_another_size_on_one_rank(calls: list[str]) -> None:
    """L4: a short batch on rank 1 alone, before or after the capture, neither hangs nor changes a bit."""
    rows = launch("--graph", "emulate", "off", "--odd-calls", *calls, timeout=45)
    assert all(run["replays"] > 0 for run in assert_equal_runs(rows, "emulate"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["imported", "nothing"])
@pytest.mark.ranks
def test_a_job_ends(how: str) -> None:
    """L4: with a graph alive, both ranks exit with 0, also if the user forgets close(), or the process group too."""
    for row in launch("--model", "mlp", "--graph", "emulate", "--end", how, forked=False):
        assert row["emulate"]["replays"] == 15


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--slow-release"], ["--busy", "2"]],
    ids=["while gloo waits for Python's lock", "under load"],
)
@pytest.mark.parametrize(
    ("jobs", "how"),
    [("5", gloo_ends.HOW_SHARDED), ("6", gloo_ends.HOW[:3]), ("4", gloo_ends.HOW[3:])],
    ids=["fully_shard", "group destroyed", "group not destroyed"],
)
@pytest.mark.sampled(6)
def test_jobs_end(jobs: str, how: tuple[str, ...], options: list[str]) -> None:
    """R10: jobs end with 0 wherever the model lives, destroyed group or not. (`gloo_ends.py --jobs 200 --busy 2`: 200.)

    In the second, gloo's threads still want Python's lock when the process group goes: of three such jobs one hung.
    Under `fully_shard`, 12 of 30 jobs aborted at exit before ampkit ended gloo's threads there, too.
    """
    run = forks.run([gloo_ends.__file__, "--jobs", jobs, "--how", *how, *options], timeout=400)
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert run.stdout.endswith(f"{jobs} of {jobs} jobs ended with exit code 0 on both ranks\n")


@pytest.mark.slow
def test_a_job_that_fails_or_hangs_is_seen() -> None:
    """The tests above would notice a rank that ends with an error, and one that does not end in time."""
    with pytest.raises(ddp_train.JobError, match=r"(?s)rank 0: exit 1\n.*Policy.*rank 1: exit 1\n"):
        launch("--policy", "float7")
    with pytest.raises(ddp_train.JobError, match="rank 0: late"):
        launch(timeout=0.1, forked=False)


LATE = """
import os, time, ddp_train, rank_script, torch.distributed as dist

def sleeps_for_ever():
    time.sleep(1000)

def row(name):
    if name == "late" and dist.get_rank() == 1:
        sleeps_for_ever()
    dist.barrier()
    return {"rank": dist.get_rank()}

ddp_train.join("cpu")
rank_script.rows_of(["early", "late"], row)
"""


@pytest.mark.slow
@pytest.mark.parametrize("forked", [True, False], ids=["forks", "processes"])
@pytest.mark.sampled(2)
def test_where_ranks_are_late_their_stacks_are_shown(tmp_path: Path, forked: bool) -> None:
    """R10: where one waits and where the other sleeps; the case before has its rows, and a later one is not tried."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    folders = Path(ddp_train.__file__).parent, Path(ampkit.__file__).parents[1]
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    with ddp_train.Started(script=str(script), timeout=30, forked=forked, more=path) as started:
        assert started["early"] == [{"rank": 0}, {"rank": 1}]
        started.end_by(time.monotonic() + 1)
        with pytest.raises(
            ddp_train.JobError, match=r"(?s)rank 0: late.* in barrier.*rank 1: late.* in sleeps_for_ever"
        ):
            started["late"]
        with pytest.raises(ddp_train.JobError, match="the ranks ended before"):
            started["later"]


# ------------------------------------------------------------------------------------------------------- on two GPUs

on_gpus = cases_of(ddp_train.__file__, "cuda", ddp_train.ON_GPUS, 240)


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ["resnet50, overflows", "resnet50, accumulate"])
def test_resnet50_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """L4: a captured float16 step with NCCL, scaler and clip inside has the bits of eager DDP, on both ranks."""
    for run in assert_equal_runs(on_gpus[case], "auto"):
        assert run["failure"] is None
        assert run["messages"] == []
        assert run["replays"] == (22 if "accumulate" in case else 15)
        # The scale starts where the first gradients overflow by themselves; as often as in eager, for `state` has it.
        assert run["skipped"] >= (2 if "overflows" in case else 0)


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ["windows", "windows of another size"])
def test_windows_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """R12: `window` is one launch with one reduction in it, while the other rank may make its calls one by one."""
    first, second = assert_equal_runs(on_gpus[case], "auto")
    assert first["launches"] == 50 - WARMUP_DDP - 1  # one to capture the calls
    assert second["launches"] == first["launches"] - (case != "windows")
    assert first["messages"] == second["messages"] == []


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ["another size in the warm-up", "another size after the capture"])
def test_a_batch_of_another_size_on_one_gpu(on_gpus: Cases, case: str) -> None:
    """L4: a short batch on rank 1 alone neither hangs nor changes a bit: a replay and an eager step exchange alike."""
    assert all(run["replays"] > 0 for run in assert_equal_runs(on_gpus[case], "auto"))


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", ["blocks on one rank", "raises on one rank"])
def test_one_gpu_cannot_capture(on_gpus: Cases, case: str) -> None:
    """L4: a line of rank 1 that blocks, or raises in the capture alone, keeps both eager, with the bits of eager."""
    first, second = assert_equal_runs(on_gpus[case], "auto")
    for run in (first, second):
        assert run["replays"] == run["captures"] == 0
        assert list(run["eager"].values()) == [5, 13]
    assert first["eager"] == second["eager"]
    assert ["another rank" in message for message in first["messages"]] == [True]
    assert ["ddp_train.py:" in message for message in second["messages"]] == [True]


# ------------------------------------------------------------------------------------------------------- fully_shard


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def sharded(process_group: None) -> nn.Module:
    """A model whose parameters are DTensors."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.parametrize(("policy", "max_norm"), [("float32", None), ("bfloat16", 1.0)])
def test_sharded_parameters_train_eagerly(sharded: nn.Module, policy: str, max_norm: float | None) -> None:
    """With graph="off" the step trains a model under fully_shard as a loop written with torch does."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    plain.load_state_dict({name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()})

    def train(model: nn.Module) -> ampkit.GraphedStep:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = ampkit.graphed_step(
            lambda m, x: m(x).square().mean(), model, optimizer, policy=policy, max_norm=max_norm, graph="off"
        )
        for _ in range(3):
            step(x)
        return step

    train(plain)
    assert train(sharded).report().eager == {"graph='off'": 3}
    for mine, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), other)
