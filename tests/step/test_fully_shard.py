"""graphed_step under fully_shard: the bits of eager training on every rank, one decision, a clean end.

What trains runs in processes of its own, one per rank (fsdp_train.py), so that a hang is a failure and not the end of
the test run. One start of the ranks does many cases, because a start takes long.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddp_train
import fsdp_train
import pytest
import torch
import torch.distributed as dist
from rank_cases import Cases, Rows, cases_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ampkit

# What `verify` says, by event.
VERIFY_FINDS = {
    "differs": " is not what eager computes",
    "undeclared": "the step writes to a tensor of shape () and dtype torch.float32 that it does not declare",
    "average": "that it does not declare",
}
# Cases in which more than a training step is looked at. They have a start of the ranks of their own, for the time.
LOOKED_AT = tuple(
    name for name, case in fsdp_train.CASES.items() if case.verify or case.numerics or case.event.startswith("graphed")
)
FAST = ("float32", "accumulate float16", "evaluation")
OTHERS = tuple(name for name in fsdp_train.CASES if name not in (*FAST, *LOOKED_AT))
on_cpu = cases_of(fsdp_train.__file__, "cpu", FAST, 180)
others_on_cpu = cases_of(fsdp_train.__file__, "cpu", OTHERS, 400)
looked_at_on_cpu = cases_of(fsdp_train.__file__, "cpu", LOOKED_AT, 300)
four_on_cpu = cases_of(fsdp_train.__file__, "cpu", fsdp_train.FOUR_RANKS, 400, ranks=4)
on_gpus = cases_of(fsdp_train.__file__, "cuda", fsdp_train.ON_GPUS, 240)
four_on_gpus = cases_of(fsdp_train.__file__, "cuda", fsdp_train.FOUR_RANKS, 240, ranks=4)


def check(case: str, rows: Rows, device: str = "cpu") -> None:
    """Assert that a case left the bits of eager steps on each rank, and was captured unless a rank could not."""
    kind = {**fsdp_train.CASES, **fsdp_train.FOUR_RANKS}[case]
    for row in rows:
        assert "error" not in row, row["error"]
        assert row["differ"] == [] or kind.event == "differs"  # each comparison counts as two calls there
        assert row["differ from torch"] == []
        assert json.dumps(row["norms"]) == json.dumps(rows[0]["norms"])  # all ranks have one norm; as text for its nan
    calls = fsdp_train.calls(kind)
    expected = calls - 3 * kind.accumulate * (2 if kind.numerics else 1)
    if kind.event == "windows":  # three to warm up, one to capture the calls; the rest is one launch each
        expected = kind.accumulate
        assert [row["launches"] for row in rows] == [calls - 4] * 2
    expected -= kind.nonfinite == "stop"  # the call that raises
    if kind.event == "scan":
        expected = 2 * calls - 3
    if kind.event.startswith("resume"):
        expected = calls // 2 - 3  # of the new step
    if kind.event == "other size":  # rank 1 makes two calls of its own layout, one of them in the warm-up
        assert [row["replays"] for row in rows] == [expected - 1, expected - 2]
    elif kind.event in VERIFY_FINDS:
        check_found(kind, rows)
    elif kind.event == "waits" or (kind.event == "raises" and device == "cuda"):
        assert [row["replays"] for row in rows] == [0] * len(rows)
        assert "another rank" in rows[0]["messages"][0]
        assert "fsdp_train.py:" in rows[1]["messages"][0]
    else:
        assert [row["replays"] for row in rows] == [expected] * len(rows)
        for row in rows:
            if kind.event == "exception":  # by a hook, which makes another graph
                assert ["hooks of modules and parameters" in message for message in row["messages"]] == [True]
            else:
                assert row["messages"] == [] or kind.behind
    if kind.memory:  # of shards; on a GPU, the allocator's blocks are larger
        for counted, held in (pair for row in rows for pair in row["memory"].values()):
            assert counted == held if device == "cpu" else held <= counted < held + 512 * 64
    if kind.numerics:  # of whole parameters, the same on all ranks
        sizes = {name: param.numel() for name, param in fsdp_train.MODELS[kind.model]().named_parameters()}
        assert {name: count for name, count, *_ in rows[0]["gradients"]} == sizes
        assert all(row["gradients"] == rows[0]["gradients"] for row in rows)
    counted = 0 if kind.nonfinite == "stop" else len(kind.overflows)  # anew, since it has stopped
    assert [row["skipped"] for row in rows] == [counted] * len(rows)
    assert all(row["finite"] for row in rows)


def check_found(kind: fsdp_train.Case, rows: Rows) -> None:
    """Assert that `verify` has found on a rank what a graph would not do, and that all ranks were told."""
    for rank, row in enumerate(rows):
        other = rank == 0 and kind.event == "undeclared"
        expected = "on another rank a replay is not what eager" if other else VERIFY_FINDS[kind.event]
        assert expected in row["messages"][0]
        assert row["replays"] <= kind.verify
        assert row["replays"] == rows[0]["replays"]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST)
def test_ranks_train_the_bits_of_eager(on_cpu: Cases, case: str) -> None:
    """R12: parameters, optimizer state, losses, norms, scale and averages of a sharded model are those of eager."""
    check(case, on_cpu[case])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_more_cases(others_on_cpu: Cases, case: str) -> None:
    """R12: policies, resharding, optimizers, tied, frozen and compiled blocks, resume, ranks that disagree."""
    check(case, others_on_cpu[case])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", LOOKED_AT)
def test_what_looks_at_steps(looked_at_on_cpu: Cases, case: str) -> None:
    """R12: `verify` finds what a graph would not do, on shards too; `numerics`; functions under `ampkit.graphed`."""
    check(case, looked_at_on_cpu[case])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", fsdp_train.FOUR_RANKS)
def test_four_ranks(four_on_cpu: Cases, case: str) -> None:
    """R12: `reshard_after_forward=2`, which gathers among two of the ranks in backward; two copies of two shards."""
    check(case, four_on_cpu[case])


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("case", fsdp_train.FOUR_RANKS)
def test_on_four_gpus(four_on_gpus: Cases, case: str) -> None:
    """R12: the same with NCCL's collectives in the graph."""
    check(case, four_on_gpus[case], "cuda")


def check_other_ranks(folder: Path, device: str, others: tuple[int, ...]) -> None:
    """Assert that what two ranks have saved is, whole, what other numbers of ranks load, and that these train on."""
    options = ("--device", device, "--cases", "bfloat16", "float16", "--timeout", "200")
    script = fsdp_train.__file__
    saved = ddp_train.launch(*options, "--save", str(folder), timeout=200, script=script)
    for ranks in others:
        loaded = ddp_train.launch(*options, "--load", str(folder), ranks=ranks, timeout=200, script=script)
        for row in loaded:
            for case in ("bfloat16", "float16"):
                assert saved[0][case]["replays"] == 3
                assert row[case]["whole"] == saved[0][case]["whole"] == saved[1][case]["whole"]
                assert row[case]["differ"] == []
                assert row[case]["replays"] == 3


@pytest.mark.ranks
@pytest.mark.slow
def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    """R12: parameters, moments and loss scale of two ranks, loaded by one and by four, which then train captured."""
    check_other_ranks(tmp_path, "cpu", (1, 4))


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
def test_a_checkpoint_of_two_gpus_is_loaded_by_one(on_gpus: Cases, tmp_path: Path) -> None:
    """R12: the same with NCCL, while the cases below train, for the time."""
    check_other_ranks(tmp_path, "cuda", (1, 4) if torch.cuda.device_count() >= 4 else (1,))


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", fsdp_train.ON_GPUS)
def test_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """R12: the same with NCCL's collectives in the graph."""
    check(case, on_gpus[case], "cuda")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["imported", "nothing"])
def test_a_job_ends(how: str) -> None:
    """R12: with a graph alive, both ranks exit with 0, also if the user forgets close(), or the process group too."""
    rows = ddp_train.launch(
        "--device", "cpu", "--cases", "float32", "--end", how, timeout=90, script=fsdp_train.__file__
    )
    assert [row["float32"]["replays"] for row in rows] == [fsdp_train.CALLS - 3] * 2


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def refusal(sharded: nn.Module, **options: Any) -> str:
    """Return what the refusal of a model says."""
    optimizer = torch.optim.AdamW([param for param in sharded.parameters() if param.requires_grad], fused=True)
    with pytest.raises(NotImplementedError) as raised:
        ampkit.graphed_step(loss_fn, sharded, optimizer, graph="emulate", **options)
    eager = {**options, "graph": "off"}
    if not options:  # the same step trains eagerly, as the message says
        assert "pass graph='off'" in str(raised.value)
        ampkit.graphed_step(loss_fn, sharded, optimizer, **eager)
    return str(raised.value)


def loss_fn(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def test_a_step_may_be_made_after_an_evaluation(process_group: None) -> None:
    """R12: a forward leaves the parameters of the root whole, and the optimizer has the sharded ones."""
    sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    with torch.no_grad():
        sharded(torch.ones(2, 8))
    assert not isinstance(next(sharded.parameters()), DTensor)
    step = ampkit.graphed_step(loss_fn, sharded, optimizer, graph="emulate", on_failure="raise")
    for _ in range(4):
        step(torch.ones(2, 8))
    assert step.replays == 1


def test_tensor_parallelism_is_refused(process_group: None) -> None:
    """R12: tensor parallelism beside fully_shard is refused by the parameter and the mesh. HSDP is not."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shards", "columns"))
    parallel = parallelize_module(model(), mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["shards"])
    assert "parameter 0.weight is a DTensor on a mesh of 2 dimensions" in refusal(parallel)
    assert "init_device_mesh('cuda', (copies, shards))" in refusal(parallel)
    hybrid = fully_shard(model(), mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "shards")))
    optimizer = torch.optim.AdamW(hybrid.parameters(), fused=True)
    step = ampkit.graphed_step(loss_fn, hybrid, optimizer, graph="emulate", on_failure="raise")
    for _ in range(4):
        step(torch.ones(2, 8))
    assert step.replays == 1


def test_parameters_that_fully_shard_does_not_manage_are_refused(process_group: None) -> None:
    """R12: no gradient of theirs would be averaged: plain ones, and DTensors of tensor parallelism alone."""
    partly = model()
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (1,)))
    assert "parameter 2.weight is not managed by fully_shard" in refusal(partly)
    mesh = init_device_mesh("cpu", (1,))
    parallel, replicated = model(), model()
    for kind, placements in ((parallel, None), (replicated, [Replicate()])):
        for module in (kind[0], kind[2]):
            for name, param in list(module.named_parameters()):
                module.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh, placements)))
    assert isinstance(parallel[0].weight, DTensor)
    assert "only parameters that fully_shard splits" in refusal(replicated)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("set_requires_gradient_sync", "pass accumulate=N"),
        ("set_requires_all_reduce", "pass accumulate=N"),
        ("set_reshard_after_backward", "Leave it True"),
    ],
)
def test_settings_that_a_graph_cannot_follow_are_refused(process_group: None, setting: str, words: str) -> None:
    """R12: settings that leave gathered parameters or gradients behind a step are refused by name."""
    sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (1,)))
    getattr(sharded, setting)(False)
    message = refusal(sharded)
    assert setting in message
    assert words in message
    later = fully_shard(model(), mesh=init_device_mesh("cpu", (1,)))
    step = ampkit.graphed_step(loss_fn, later, torch.optim.AdamW(later.parameters(), fused=True), graph="emulate")
    step(torch.ones(2, 8))
    getattr(later, setting)(False)
    with pytest.raises(ValueError, match=setting):
        step(torch.ones(2, 8))


def test_offloaded_parameters_are_refused(process_group: None) -> None:
    """R12: with a CPUOffloadPolicy the optimizer steps on the CPU."""
    sharded = fully_shard(
        model(), mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )
    assert "Leave out offload_policy" in refusal(sharded)


def test_what_does_not_go_with_sharded_models_is_refused(process_group: None) -> None:
    """R12: numerics of earlier parameters, and numerics in a loop of one's own say what to write instead."""
    mesh = init_device_mesh("cpu", (1,))
    plain = model()
    early = ampkit.debug.numerics(plain)
    sharded = fully_shard(plain, mesh=mesh)
    watch = ampkit.debug.numerics(sharded)
    assert "compile='default', numerics=...)" in refusal(sharded, compile="default", numerics=watch)
    with pytest.raises(NotImplementedError, match=r"numerics: in a loop of your own.*graphed_step"):
        ampkit.debug.numerics(sharded).__enter__()
    optimizer = torch.optim.AdamW(sharded.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"cannot be copied.*shard=wrap, ranks=8.*Or record a step"):
        ampkit.debug.forecast(loss_fn, sharded, optimizer, torch.ones(2, 8), device="cpu")
    for options, words in (({"after_step": print}, "after_step"), ({"before_step": print}, "or nonfinite=")):
        assert words in refusal(sharded, nonfinite="skip", **options)
    muon = torch.optim.Muon([param for param in sharded.parameters() if param.dim() == 2])
    with pytest.raises(NotImplementedError, match="Muon does not step each element by itself"):
        ampkit.graphed_step(loss_fn, sharded, muon, nonfinite="stop", graph="emulate")
    with pytest.raises(ValueError, match="it was made before fully_shard"):
        ampkit.graphed_step(loss_fn, sharded, optimizer, numerics=early, graph="emulate")


def test_functions_of_sharded_models(process_group: None) -> None:
    """R12: `graphed` refuses what `graphed_step` refuses, and an evaluation leaves sharded parameters behind."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shards", "columns"))
    parallel = parallelize_module(model(), mesh["columns"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def evaluate(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = sharded(x)
        return result

    with pytest.raises(NotImplementedError, match=r"graphed\(evaluate\), modules: .*tensor parallelism alone"):
        ampkit.graphed(modules=(parallel,), graph="emulate")(evaluate)
    sharded = fully_shard(model(), mesh=mesh["shards"])
    graphed = ampkit.graphed(modules=(sharded,), graph="emulate", on_failure="raise")(evaluate)
    x = torch.ones(2, 8)
    outputs = [graphed(x) for _ in range(5)]
    assert graphed.replays == 2
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert isinstance(next(sharded.parameters()), DTensor)
    sharded.set_reshard_after_backward(False)
    with pytest.raises(ValueError, match=r"graphed\(evaluate\), fully_shard: set_reshard_after_backward"):
        graphed(x)


def test_the_script_ends_ranks_that_hang(tmp_path: Path) -> None:
    """The tests above would notice a case that fails on a rank, and ranks that do not end in time."""
    assert os.path.exists(fsdp_train.__file__)
    with pytest.raises(ddp_train.JobError, match="rank 0: late"):
        ddp_train.launch("--device", "cpu", timeout=0.1, script=fsdp_train.__file__)
