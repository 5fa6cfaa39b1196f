"""DistributedDataParallel as people write it: the bits of eager training on every rank, and what is refused by name.

What trains runs in processes of its own, one per rank (ddp_cases.py). One start of the ranks does many cases, because a
start takes long.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ddp_cases
import pytest
import torch
import torch.distributed as dist
from harness import COMPILER
from rank_cases import Cases, Rows, cases_of
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ampkit
from ampkit._capture.ranks.ranks import WARMUP_DDP, Ranks
from ampkit._capture.ranks.reducers import Reducers
from ampkit._torch.ranks import reducer as torch_reducer

CPU = torch.device("cpu")
FAST = ("plain", "static, unused", "wrapped hook", "accumulate", "float16 as torch", "PowerSGD", "second step")
COMPILED = tuple(name for name, case in ddp_cases.CASES.items() if case.compile)
COMPILED_ON_CPU = tuple(name for name in COMPILED if not ddp_cases.CASES[name].gpu)
UNCOMPILED = tuple(name for name in ddp_cases.CASES if name not in COMPILED)
OTHERS = tuple(name for name in UNCOMPILED if not ddp_cases.CASES[name].gpu and name not in FAST)
on_cpu = cases_of(ddp_cases.__file__, "cpu", FAST, 180)
others_on_cpu = cases_of(ddp_cases.__file__, "cpu", OTHERS, 300)
compiled_on_cpu = cases_of(ddp_cases.__file__, "cpu", COMPILED_ON_CPU, 400)
on_gpus = cases_of(ddp_cases.__file__, "cuda", ddp_cases.ON_GPUS, 240)
ON_ONE_GPU = ("find unused, all used", "find unused, bfloat16")
on_one_gpu = cases_of(ddp_cases.__file__, "cuda", ON_ONE_GPU, 120, ranks=1)


def check(name: str, rows: Rows, device: str = "cpu") -> None:
    """Assert that a case left the bits of eager steps on each rank, and was captured unless it says that it is not."""
    case = ddp_cases.CASES[name]
    warmup = 3 if device == "cpu" else WARMUP_DDP + bool(case.ddp.get("static_graph"))
    kinds = 2 if case.event == "second step" or case.numerics else 1  # of calls that have graphs of their own
    for rank, row in enumerate(rows):
        # Calls of another layout, or that wait for one.
        odd = {"other size": 1 + rank, "other sizes": 2}.get(case.event, 0)
        assert "error" not in row, row["error"]
        assert row["differ"] == [] or case.event == "differs"  # each comparison counts as two calls there
        assert row["differ from torch"] == []
        assert row["weights"] == rows[0]["weights"]
        stops = case.nonfinite == "stop"
        assert row["skipped"] == (0 if stops else len(case.overflows))  # counted anew since it has stopped
        if case.refused or ddp_cases.is_stale(case, device):
            assert row["replays"] == (case.event == "differs")
            assert (case.refused or "torch.cuda.stream(torch.cuda.Stream())") in row["messages"][0]
        else:
            assert row["replays"] == ddp_cases.calls(case) - warmup * case.accumulate * kinds - odd - stops
            assert row["messages"] == row["torch warns"] == []
            assert bool(row["working"]) == (case.policy is not None and case.ddp != ddp_cases.FIND)
    if case.event == "differs":
        assert "on another rank a replay is not what eager computes" in rows[0]["messages"][0]
        assert "output.output.loss is not what eager" in rows[1]["messages"][0]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST)
def test_ranks_train_the_bits_of_eager(on_cpu: Cases, case: str) -> None:
    """L4: parameters, optimizer state, buffers, losses, norms and scale under DDP are those of eager, and of torch."""
    check(case, on_cpu[case])


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_more_cases(others_on_cpu: Cases, case: str) -> None:
    """L4: arguments of DDP, communication hooks, policies, a model that was trained before, one that is evaluated."""
    check(case, others_on_cpu[case])


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in ddp_cases.ON_GPUS if name in UNCOMPILED])
def test_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """L4: the same with NCCL in the graph, for models that were made on the default stream."""
    check(case, on_gpus[case], "cuda")


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("case", ON_ONE_GPU)
def test_on_one_gpu(on_one_gpu: Cases, case: str) -> None:
    """L4: one rank exchanges with itself, and its Reducer copies its bitmap of used parameters in each backward."""
    check(case, on_one_gpu[case], "cuda")


def check_compiled(name: str, rows: Rows, device: str = "cpu") -> None:
    """Assert that a captured compiled case left the bits of the uncaptured one, and equal weights on all ranks."""
    case = ddp_cases.CASES[name]
    warmup = 3 if device == "cpu" else WARMUP_DDP
    for rank, row in enumerate(rows):
        assert "error" not in row, row["error"]
        assert row["differ"] == []
        assert row["weights"] == rows[0]["weights"]
        assert row["skipped"] == rows[0]["skipped"] >= len(case.overflows)
        odd = len(ddp_cases.ODD_CALLS) if case.event == "other size" else 0
        assert row["replays"] <= ddp_cases.calls(case) - warmup * case.accumulate - odd * rank
        assert row["replays"] > 0
        assert not any(line.startswith("graph break") for line in row["compiled"])
        failed = case.event == "fails" and rank == 1
        assert [("no kernel for this GPU" in message) for message in row["messages"]] == [True] * failed
        assert row["compiled"][0].startswith("not compiled: forward" if failed else "compiled: forward and backward")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED_ON_CPU)
def test_compiled(compiled_on_cpu: Cases, case: str) -> None:
    """R11, L4: the bits of the compiled step under DDP, whose buckets are exchanged within the compiled backward."""
    check_compiled(case, compiled_on_cpu[case])


@pytest.mark.cuda
@pytest.mark.multigpu
@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in ddp_cases.ON_GPUS if name in COMPILED])
def test_compiled_on_two_gpus(on_gpus: Cases, case: str) -> None:
    """R11, L4: the same by Inductor, with NCCL in the graph."""
    check_compiled(case, on_gpus[case], "cuda")


# ---------------------------------------------------------------------------------------------------- in one process


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of this process alone."""
    if "case" in request.fixturenames:  # of ranks that are started
        yield
        return
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def step_of(ddp: nn.Module, **options: Any) -> ampkit.GraphedStep:
    params = [param for param in ddp.parameters() if param.requires_grad]
    return ampkit.graphed_step(
        loss_fn, ddp, torch.optim.AdamW(params, fused=True), graph="emulate", **options, host_writes="ignore"
    )


def delayed() -> DistributedDataParallel:
    model = net()
    later = [("0.weight", model[0].weight)]
    return DistributedDataParallel(model, delay_all_reduce_named_params=later, param_to_hook_all_reduce=model[2].weight)


def with_hook(state: Any, hook: Callable[..., Any]) -> Callable[[], DistributedDataParallel]:
    def made() -> DistributedDataParallel:
        ddp = DistributedDataParallel(net())
        ddp.register_comm_hook(state, hook)
        return ddp

    return made


def with_optimizer_in_backward() -> DistributedDataParallel:
    model = net()
    for param in model.parameters():
        param._in_backward_optimizers = []  # type: ignore[attr-defined]  # as torch's apply_optimizer_in_backward does
    return DistributedDataParallel(model)


def with_mixed_precision() -> DistributedDataParallel:
    ddp = DistributedDataParallel(net())
    ddp.mixed_precision = _MixedPrecision(torch.bfloat16)  # in its constructor it makes streams, also without a GPU
    return ddp


def power_sgd() -> DistributedDataParallel:
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return with_hook(powerSGD_hook.PowerSGDState(None), hook)()


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(delayed, "Leave out delay_all_reduce_named_params", id="delayed"),
        pytest.param(with_optimizer_in_backward, "Make an ordinary optimizer", id="optimizer in backward"),
        pytest.param(power_sgd, "default_hooks.bf16_compress_hook", id="PowerSGD within a wrapper"),
        pytest.param(with_hook({"calls": 0}, ddp_cases.halves), "has a state of type dict", id="a hook with a state"),
        pytest.param(with_mixed_precision, "pass policy='bfloat16'", id="mixed precision"),
    ],
)
@pytest.mark.quick(3)
def test_what_a_graph_cannot_hold_is_refused(made: Callable[[], DistributedDataParallel], words: str) -> None:
    """L4: the message names what cannot be captured, and what to write instead."""
    step = step_of(made(), on_failure="raise")
    with pytest.raises(ampkit.CaptureError, match="DistributedDataParallel: ") as raised:
        step(torch.ones(3, 4))
    assert words in str(raised.value)
    assert "pass graph='off'" in str(raised.value)


def test_unused_parameters_are_named() -> None:
    """L4: under find_unused_parameters=True, where a step has used some only, on whatever rank; all are captured."""
    found = step_of(DistributedDataParallel(net(), find_unused_parameters=True), on_failure="raise")
    for _ in range(5):
        found(torch.ones(3, 4))
    assert found.replays == 2
    model = nn.Sequential(nn.Linear(16, 16), ddp_cases.Unused())
    step = step_of(DistributedDataParallel(model, find_unused_parameters=True), on_failure="raise")
    for _ in range(3):
        step(torch.ones(3, 16))
    with pytest.raises(ampkit.CaptureError, match=r"such as 1\.unused\.weight \(2 in all\).* pass static_graph=True"):
        step(torch.ones(3, 16))
    assert model[1].unused.weight.grad is None
    assert step.replays == 0


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(delayed, "Leave out delay_all_reduce_named_params", id="delayed"),
        pytest.param(with_optimizer_in_backward, "Make an ordinary optimizer", id="optimizer in backward"),
        pytest.param(with_mixed_precision, "pass policy='bfloat16'", id="mixed precision"),
        pytest.param(lambda: nn.Sequential(net(), nn.SyncBatchNorm(2)), "Use BatchNorm", id="SyncBatchNorm"),
    ],
)
def test_what_is_not_compiled_is_refused(made: Callable[[], nn.Module], words: str) -> None:
    """R11, L4: before any call, since a rank that compiles does a forward and backward by itself."""
    with pytest.raises(
        NotImplementedError, match=r"graphed_step\(compile='default'\): .*Or pass compile=None"
    ) as raised:
        step_of(made(), compile="default")
    assert words in str(raised.value)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("policy", "copies"), [pytest.param(None, 0, marks=pytest.mark.seeds), ("bfloat16", 1)])
@pytest.mark.slow
def test_compiled_code_ends_where_buckets_do(monkeypatch: pytest.MonkeyPatch, policy: str | None, copies: int) -> None:
    """R11, L4: a bucket of gradients is exchanged while the rest of the backward runs; no line is blamed for that."""
    compiled = []

    def compile(graph: Any, inputs: Any, config_patches: Any) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(COMPILER, lambda: compile)
    ddp = DistributedDataParallel(ddp_cases.wide(), bucket_cap_mb=1)
    bucket_bytes, forward = ddp.bucket_bytes_cap, ddp.forward
    step = step_of(ddp, policy=policy, compile="default", on_failure="raise")
    for _ in range(5):
        step(torch.ones(3, 16))
    assert step.replays == 2
    assert len(compiled) == 3 + 1 + copies  # parts of the module, the loss, the copies of the weights
    assert step.report().compiled[0] == "compiled: forward and backward, for 1 layout(s) of the batch"
    assert [line for line in step.report().compiled if "graph break" in line] == []
    assert (ddp.bucket_bytes_cap, ddp.forward, ddp.module._compiled_call_impl) == (bucket_bytes, forward, None)


def test_uneven_inputs_are_refused() -> None:
    """L4: a replay does not tell the other ranks that this one has a batch, as model.join() needs it."""
    ddp = DistributedDataParallel(net())
    with ddp.join(), pytest.raises(ampkit.CaptureError, match="Give all ranks as many batches"):
        step_of(ddp, on_failure="raise")(torch.ones(3, 4))


@pytest.mark.parametrize("graph", ["emulate", "off"])
def test_a_static_graph_does_not_accumulate(graph: str) -> None:
    """L4: torch fails an internal assertion there; here it is an error that says what to write."""
    ddp = DistributedDataParallel(net(), static_graph=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"graphed_step\(accumulate=2\): .*Leave out static_graph"):
        ampkit.graphed_step(loss_fn, ddp, optimizer, accumulate=2, graph=graph, host_writes="ignore")


def test_the_new_reducer_has_the_settings_of_the_old_one() -> None:
    """L4: static graph, bucket sizes, views and hook are carried over, and nothing calls the old Reducer any more."""
    calls: list[dist.GradBucket] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket)
        return default_hooks.allreduce_hook(state, bucket)

    ddp = DistributedDataParallel(net(), static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=2)
    ddp.register_comm_hook(None, hook)
    before = ddp._get_ddp_logging_data()
    for _ in range(2):
        loss_fn(ddp, torch.ones(3, 4)).backward()
    calls.clear()
    Reducers([ddp]).prepare()
    assert ddp._get_ddp_logging_data() == before
    loss_fn(ddp, torch.ones(3, 4)).backward()
    assert len(calls) == 1
    assert len(ddp._comm_hooks) == 1


def test_built_in_hooks_are_carried_over() -> None:
    """L4: a hook that is written in C++ is known from the log only."""
    ddp = DistributedDataParallel(net())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    Reducers([ddp]).prepare()
    assert ddp._get_ddp_logging_data()["comm_hook"] == "BuiltinCommHookType.FP16_COMPRESS"
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def test_a_reducer_is_made_anew_once() -> None:
    """L4: graphs of another step refer to the buckets of the Reducer, so a later step does not replace it."""
    ddp = DistributedDataParallel(net())
    first = step_of(ddp)
    made = ddp.reducer
    first(torch.ones(3, 4))
    assert ddp.reducer is not made
    made = ddp.reducer
    first(torch.ones(3, 4))
    step_of(ddp)(torch.ones(3, 4))
    assert ddp.reducer is made


def test_a_kept_autograd_graph_is_named() -> None:
    """L4: a loss of an earlier step keeps the nodes of the old stream; should a capture fail, the message says so."""
    ddp = DistributedDataParallel(net())
    kept = loss_fn(ddp, torch.ones(3, 4))
    reducers = Reducers([ddp])
    reducers.prepare()
    assert "keeps the autograd graph of an earlier step alive, as its loss does (parameter 0.weight)" in reducers.advice
    assert "with torch.cuda.stream(torch.cuda.Stream())" in reducers.advice
    assert kept.requires_grad
    other = DistributedDataParallel(net())
    loops: list[Any] = [loss_fn(other, torch.ones(3, 4))]
    loops.append(loops)  # which only the garbage collector frees
    del loops
    reducers = Reducers([other])
    reducers.prepare()
    assert reducers.advice == ""
    assert reducers.moved


def test_a_reducer_of_other_parameters_is_left() -> None:
    """L4: with a parameter frozen since, a new Reducer would not average it any more if it is trained later."""
    ddp = DistributedDataParallel(net())
    ddp.module[0].weight.requires_grad_(False)
    made, reducers = ddp.reducer, Reducers([ddp])
    reducers.prepare()
    assert ddp.reducer is made
    assert "other parameters require gradients than when it was made" in reducers.advice


def test_a_backward_that_has_raised_is_forgotten() -> None:
    """L4: after a capture that fails amid a backward, the next eager step exchanges all gradients again."""
    ddp = DistributedDataParallel(net())
    reducers = Reducers([ddp])
    for _ in range(3):
        loss_fn(ddp, torch.ones(3, 4)).backward()
        assert reducers.idle
    expected = [param.grad.clone() / 3 for param in ddp.parameters() if param.grad is not None]
    ddp.zero_grad()

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    hook = ddp.module[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss_fn(ddp, torch.ones(3, 4)).backward()
    hook.remove()
    ddp.zero_grad()
    assert not reducers.idle
    reducers.reset()
    loss_fn(ddp, torch.ones(3, 4)).backward()
    assert reducers.idle
    for param, grad in zip(ddp.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_clocks_are_stopped() -> None:
    """L4: after that, no step reads the times that DDP measures in its first ten steps."""
    ddp = DistributedDataParallel(net())
    loss_fn(ddp, torch.ones(3, 4)).backward()
    loss_fn(ddp, torch.ones(3, 4)).backward()
    measured = ddp._get_ddp_logging_data()["iteration"]
    assert measured == 1
    torch_reducer.stop_clocks(ddp)
    for _ in range(3):
        loss_fn(ddp, torch.ones(3, 4)).backward()
    assert ddp._get_ddp_logging_data()["iteration"] == measured


def test_the_warm_up_is_as_long_as_ddp_needs() -> None:
    """L4: warmup=3 is enough to write; the report says why the warm-up is longer."""
    ranks = Ranks(DistributedDataParallel(net()), CPU)
    assert ranks.warm_up(3, on_cuda=True) == (5, "DistributedDataParallel needs 5 calls")
    assert ranks.warm_up(8, on_cuda=True) == (8, "")
    assert ranks.warm_up(3, on_cuda=False) == (3, "")
    assert Ranks(net(), CPU).warm_up(1, on_cuda=True) == (2, "")


def test_functions_under_graphed_are_captured() -> None:
    """L4: a function that the user has written with DDP in it."""
    ddp = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)

    @ampkit.graphed(
        modules=(ddp,), optimizers=(optimizer,), graph="emulate", verify=2, on_failure="raise", host_writes="ignore"
    )
    def train(x: Tensor) -> Tensor:
        loss = loss_fn(ddp, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(6):
        train(torch.ones(3, 4))
    assert train.report().replays == 3


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_an_evaluation_may_come_first(context: Callable[[], Any], find: bool) -> None:
    """L4: the Reducer is made anew in whatever mode the first call is, and trains later."""
    ddp = DistributedDataParallel(net(), find_unused_parameters=find)

    @ampkit.graphed(modules=(ddp,), graph="emulate", on_failure="raise", host_writes="ignore")
    def evaluate(x: Tensor) -> Tensor:
        return loss_fn(ddp, x)

    with context():
        for _ in range(5):
            evaluate(torch.ones(3, 4))
    assert evaluate.report().replays == 2
    step = step_of(ddp, on_failure="raise")
    for _ in range(5):
        step(torch.ones(3, 4))
    assert step.replays == 2


@pytest.mark.parametrize("accumulate", [1, 3])
def test_buffers_are_broadcast_once_per_window(accumulate: int) -> None:
    """L4: in its first micro-batch, also behind an evaluation, and though a replay leaves DDP as it was."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    ddp = DistributedDataParallel(model)
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(ddp.require_forward_param_sync))
    step = step_of(ddp, accumulate=accumulate)
    for i in range(8 * accumulate):
        if i in (2 * accumulate, 7 * accumulate):
            ddp.require_forward_param_sync = False  # as an evaluation leaves it
        if i == 4 * accumulate:
            ddp.require_forward_param_sync = True
        step(torch.randn(4, 4, generator=torch.Generator().manual_seed(i)))
    assert step.replays > 0
    assert seen == ([True] + [False] * (accumulate - 1)) * 8


def test_buffers_are_broadcast_in_a_graphed_function() -> None:
    """L4: an evaluation between the calls does not change what a call records."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    seen: list[bool] = []
    ddp.module.register_forward_pre_hook(lambda *_: seen.append(ddp.require_forward_param_sync))
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=True)

    @ampkit.graphed(modules=(ddp,), optimizers=(optimizer,), graph="emulate", host_writes="ignore")
    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(ddp, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(7):
        ddp.require_forward_param_sync = i % 2 == 0
        train(torch.randn(4, 4, generator=torch.Generator().manual_seed(i)))
    eager = sum(train.report().eager.values())
    assert seen[:eager] == [True] * eager
