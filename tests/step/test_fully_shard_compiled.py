"""graphed_step(compile=...) under fully_shard: the bits of the same compiled step uncaptured, and what fails.

What trains runs in processes of its own, one per rank (fsdp_compiled.py). One start of the ranks does many cases.
"""

import gc
import json
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsdp_compiled
import pytest
import torch
import torch.distributed as dist
from harness import COMPILER, leave_out_inductor, marked_line
from rank_cases import Cases, Rows, cases_of
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ampkit

FAST = ("loss fails",)  # on one rank; on the other all is compiled
ON_CPU = tuple(name for name in fsdp_compiled.CASES if name not in fsdp_compiled.ON_GPUS_ALONE)
IN_NET = ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]  # what is compiled of fsdp_compiled.Net, beside the loss


on_cpu = cases_of(fsdp_compiled.__file__, "cpu", FAST, 240)
others_on_cpu = cases_of(fsdp_compiled.__file__, "cpu", [name for name in ON_CPU if name not in FAST], 900)
on_gpus = cases_of(fsdp_compiled.__file__, "cuda", fsdp_compiled.ON_GPUS, 240)


def check(name: str, rows: Rows) -> None:
    """Assert that a captured compiled case left the bits of the uncaptured one, and says what was compiled."""
    case = fsdp_compiled.CASES[name]
    for rank, row in enumerate(rows):
        assert "error" not in row, row["error"]
        assert row["differ"] == []
        assert json.dumps(row["norms"]) == json.dumps(rows[0]["norms"])  # as text for its nan
        assert row["late"] == 0  # compilations in the last calls
        assert row["left behind"] == []  # on the user's modules
        assert row["skipped"] == len(case.overflows)
        assert row["compile_s"] > 0
        assert row["replays"] > 0
        assert any("not compiled: update, since all ranks share the norm" in line for line in row["compiled"])
        if case.event.endswith("fails"):
            check_failed(case.event, rank, row)
        elif case.model == "break":
            (message,) = row["messages"]
            place = marked_line(fsdp_compiled.__file__, "break")
            assert place in message
            assert any(line.startswith("graph break: ") and place in line for line in row["compiled"])
        else:
            hooked = case.event == "exception"  # by a hook, which makes another graph
            assert ["hooks of modules and parameters" in text for text in row["messages"]] == [True] * hooked
            assert not any(line.startswith("graph break") for line in row["compiled"])
            assert f"of the loss, {FIRST_PARTS[case.model]}" in row["compiled"][0]


# By model: what comes behind the loss in the report.
FIRST_PARTS = {
    "blocks": "0, 1, for",
    "grouped": "0, 1, for",
    "whole": "the model, for",
    "many": "0, 1, ..., 9 (11 parts), for",
    "tied": "blocks.0, blocks.1, for",
    "stem": "blocks.0, blocks.1, ..., head (6 parts), for",
    "checkpoints": "blocks.0, blocks.1, ..., head (6 parts), for",
}


def check_failed(event: str, rank: int, row: dict[str, Any]) -> None:
    """Assert that rank 1 names what it could not compile, and has compiled the rest."""
    reason = "since torch.compile failed: NotImplementedError: no kernel for this GPU"
    failed = {
        "loss fails": ["the loss"],
        "all fails": ["stem, blocks.0, blocks.1, ..., the loss (6 parts)"],  # the loss goes on behind the model
    }.get(event, [", ".join(IN_NET)])
    assert [message.split(": ", 1)[1] for message in row["messages"]] == [
        f"not compiled: {parts}, {reason}. Training goes on, and this part of the step is not compiled."
        for parts in failed * rank
    ]
    compiled = [line for line in row["compiled"] if line.startswith("compiled: ")]
    assert len(compiled) == (0 if event == "all fails" and rank else 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST)
def test_captured_as_uncaptured(on_cpu: Cases, case: str) -> None:
    """R11, R12: parameters, optimizer state, losses, norms and scale are those of the compiled step without a graph."""
    check(case, on_cpu[case])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in ON_CPU if name not in FAST])
def test_more_cases(others_on_cpu: Cases, case: str) -> None:
    """R11, R12: policies, resharding, checkpoints of activations, graph breaks, and a compiler that fails on a rank."""
    check(case, others_on_cpu[case])


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", fsdp_compiled.ON_GPUS)
def test_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """R11, R12: the same by Inductor, with NCCL's collectives in the graph."""
    check(case, on_gpus[case])


# ------------------------------------------------------------------------------------------------- a process by itself


@pytest.fixture
def mesh(tmp_path: Path, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh of this process alone, in which AOTAutograd compiles."""
    leave_out_inductor(monkeypatch)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(dropout)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(8, 1))


def sharded(mesh: Any, dropout: float = 0.0) -> nn.Module:
    made = model(dropout)
    for part in (made[0], made[1], made):
        fully_shard(part, mesh=mesh)
    return made


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def losses(net: nn.Module, calls: int = 5, **options: Any) -> tuple[list[float], ampkit.GraphedStep]:
    """Return the losses of so many calls with one batch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    step = ampkit.graphed_step(loss_fn, net, optimizer, **{"on_failure": "raise", "graph": "emulate", **options})
    return [step(torch.ones(2, 8)).loss.item() for _ in range(calls)], step


@pytest.mark.slow
def test_it_is_the_training_of_the_uncompiled_step(mesh: Any) -> None:
    """R11, R12: the losses of a step without compile, of a model that draws no random numbers."""
    expected, _ = losses(sharded(mesh))
    compiled, step = losses(sharded(mesh), compile="default")
    assert compiled == pytest.approx(expected, rel=1e-6)
    assert step.replays == 2
    assert step.report().compiled[0] == "compiled: forward and backward of the loss, 0, 1, for 1 layout(s) of the batch"


def test_a_failing_compilation_raises_in_the_next_call(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11, R12: with on_failure="raise" the call that compiles is finished, as on all ranks; the next one raises."""

    def refuse(graph: Any, inputs: Any, config_patches: Any) -> Any:
        raise NotImplementedError("no kernel for this GPU")

    monkeypatch.setattr(COMPILER, lambda: refuse)
    net = sharded(mesh)
    _, step = losses(net, calls=2, compile="default")
    before = [param.to_local().clone() for param in net.parameters()]
    with pytest.raises(
        ampkit.CaptureError, match=r"not compiled: 0, 1, the loss, since torch.compile failed.*no kernel"
    ):
        step(torch.ones(2, 8))
    assert all(map(torch.equal, before, [param.to_local() for param in net.parameters()]))


def test_what_a_failing_compilation_has_begun_is_undone(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11, R12: with the draws and buffers before a graph break, the losses of a step without compile."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1)
            x = nn.functional.dropout(x, 0.5) + self.seen
            torch._dynamo.graph_break()
            return self.linear(x).tanh()

    def noisy(net: nn.Module, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        out = net(x + noise) - 2 * net(x)
        return (out * noise + torch.rand_like(noise)).square().mean()

    def only_before_the_break(graph: Any, inputs: Any, config_patches: Any) -> Any:
        calls = [node.target for node in graph.graph.nodes if node.op != "placeholder"]
        if any(getattr(call, "__name__", call) in ("linear", "square") for call in calls):
            raise NotImplementedError("no kernel for this GPU")
        return aot_eager(graph, inputs)

    monkeypatch.setattr(COMPILER, lambda: only_before_the_break)
    found = []
    for options in ({}, {"compile": "default"}):
        torch.manual_seed(3)
        net = nn.Sequential(Counts(), nn.Linear(8, 1))
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        made: list[Any] = []
        net.register_forward_hook(lambda *_, made=made: made.append(1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)
            step = ampkit.graphed_step(noisy, net, optimizer, graph="off", **options)
            torch.manual_seed(5)
            found.append([step(torch.ones(2, 8)).loss.item() for _ in range(4)])
        assert net[0].seen.item() == len(made) == 8  # two in each call: no parameters are gathered once more
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert sum("not compiled" in line for line in step.report().compiled) >= 2
    assert step.report().compiled[0].startswith("not compiled: 0, the loss")


@pytest.mark.slow
def test_a_step_that_is_dropped_is_freed(mesh: Any) -> None:
    """R11, R12: neither compiled code nor the model's modules keep a step alive."""
    net = sharded(mesh)
    _, step = losses(net, compile="default")
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None
    compiled, _ = losses(net, compile="default")  # no module has anything of the first step
    assert compiled[-1] < compiled[0]


def test_models_that_no_graph_holds_are_not_compiled(mesh: Any) -> None:
    """R12: compile refuses what a capture refuses, and SyncBatchNorm, with graph="off" too."""
    unmanaged = model()
    fully_shard(unmanaged[0], mesh=mesh)
    with pytest.raises(
        NotImplementedError, match=r"compile='default'\): parameter 1.0.weight is not managed by fully_"
    ):
        losses(unmanaged, compile="default", graph="off")
    synchronized = nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8))
    fully_shard(synchronized, mesh=mesh)
    with pytest.raises(NotImplementedError, match="SyncBatchNorm exchanges messages"):
        losses(synchronized, compile="default")
