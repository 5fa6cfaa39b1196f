"""GraphedStep.scan: K calls in one, with the bits of K single calls, in ceil(K / 16) launches (scenario R11)."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import some
from harness import (
    ENGINES,
    Compiled,
    assert_same,
    boosted_loss,
    deterministic,
    leave_out_inductor,
    make_batches,
    make_net,
    training_state,
)
from stacks import (
    SCHEDULES,
    Blend,
    Engine,
    Momentum,
    Run,
    of_singles,
    sgd,
    stack,
    steps_eagerly,
    two_rates,
    with_constants,
    writes_to_its_batch,
)
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

import ampkit

MORE = [pytest.mark.slow, pytest.mark.seeds]
LENGTHS = [1, pytest.param(33, marks=pytest.mark.slow), *(pytest.param(n, marks=MORE) for n in (5, 16, 20))]


@contextmanager
def warnings_of_evictions() -> Iterator[None]:
    """Let the step say that it captures again what made room."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "graphed_step: a graph that was dropped", ampkit.CaptureWarning)
        yield


def check(engine: Engine, lengths: Sequence[int], overflow_at: tuple[int, ...] = (), **options: Any) -> Run:
    """Assert that scans leave after each of them what single eager calls leave; 0 stands for a single call."""
    device = engine[0]
    batches = make_batches(device, [4] * sum(max(1, length) for length in lengths), overflow_at)
    with deterministic():
        history: list[Any] = []
        eager, left = Run(engine, "off", **options), iter(batches)
        for length in lengths:
            outs = [eager.step(*next(left)) for _ in range(max(1, length))]
            history.append((of_singles(outs) if length else outs[0], eager.state()))
        run, left = Run(engine, **options), iter(batches)
        for i, length in enumerate(lengths):
            given = [next(left) for _ in range(max(1, length))]
            out = run.step.scan(*stack(given)) if length else run.step(*given[0])
            assert_same((out, run.state()), history[i], f"after {length} calls, number {i}: (outputs, state)")
    assert eager.step.skipped == run.step.skipped
    return run


# ---------------------------------------------------------------------------------------------------------------- bits

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, clip": {"policy": "bfloat16", "max_norm": 0.5},
    "float16": {"policy": "float16", "max_norm": 1.0},
    "clip, average": {"max_norm": 0.05, "average": True},
    "norm": {"max_norm": float("inf"), "schedule": SCHEDULES["step"]},
    **{f"schedule: {name}": {"schedule": schedule} for name, schedule in SCHEDULES.items()},
    "float16, all": {"policy": "float16", "max_norm": 1.0, "average": True, "schedule": SCHEDULES["one cycle"]},
    "accumulate": {"accumulate": 3, "max_norm": 1.0, "schedule": SCHEDULES["step"], "average": True},
    "float16, accumulate": {"policy": "float16", "accumulate": 2, "max_norm": 1.0},
    "accumulate many": {"accumulate": 20, "schedule": SCHEDULES["lambda"]},
    "verify": {"verify": 3, "policy": "bfloat16", "schedule": SCHEDULES["step"]},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", some(CASES, quick=("float16, all",), slow=("accumulate", "verify")))
def test_equals_single_calls(engine: Engine, case: str) -> None:
    """R11: K steps per launch have the bits of K calls: state, outputs, random numbers; with overflows, if scaled."""
    options = CASES[case]
    overflow_at = (2, 21, 22, 37, 50) if "float16" in case else ()
    lengths = (20, 33, 16, 5, 1, 0, 20, 0, 33) if case == "accumulate many" else (20, 33, 5, 1, 0, 16)
    run = check(engine, lengths, overflow_at, **options)
    report = run.step.report()
    assert report.launches > 0
    assert report.failure is None
    assert (run.step.skipped >= 4) == ("float16" in case.split(","))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_call_a_scan_of_one_length(engine: Engine, length: int) -> None:
    """R11: from the first call on, warm-up included."""
    count = 6 if length == 1 else 3
    run = check(engine, [length] * count, policy="bfloat16", max_norm=1.0, schedule=SCHEDULES["step"])
    assert run.step.report().eager == {"warm-up": 3}
    assert (run.step.report().launches > 0) == (length > 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rate", ["tensor", "tensor on the host"])
@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.slow
def test_rates_that_are_tensors(engine: Engine, rate: str, scheduled: bool) -> None:
    """A scheduler writes in place to a tensor rate: each step reads what it was then. So do two groups."""
    optimizer = two_rates(engine[0] if rate == "tensor" else "cpu")
    run = check(engine, (20, 9, 33), optimizer=optimizer, schedule=SCHEDULES["lambda"] if scheduled else None)
    assert run.step.report().launches == 4  # 16, behind the single calls of the first; 9; 16, 16, and a single call


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_after_step_changes(engine: Engine) -> None:
    """R11: such a schedule on the device makes calls one by one, because a launch reads all rates ahead."""
    device, graph = engine
    results = []
    for scans in (False, True):
        torch.manual_seed(3)
        model, rate = nn.Linear(4, 1).to(device), torch.tensor(0.125, device=device)
        step = ampkit.graphed_step(
            lambda model, x: model(x).square().mean(),
            model,
            torch.optim.AdamW(model.parameters(), lr=rate, fused=True),
            after_step=lambda _, rate=rate: rate.mul_(0.75),
            graph=graph,
        )
        x = torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(1)).to(device)
        with deterministic():
            losses = step.scan(x).loss if scans else torch.stack([step(each).loss for each in x])
        results.append((losses, model.weight.detach(), rate))
    assert_same(results[1], results[0], "(losses, weight, rate)")
    assert (step.report().launches, step.replays) == (0, 37)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_the_user_changes(engine: Engine) -> None:
    """Between two scans, without a scheduler."""
    batches = make_batches(engine[0], [4] * 60)
    with deterministic():
        states = []
        for graph in ("off", engine[1]):
            run = Run(engine, graph)
            for i in range(0, 60, 20):
                run.optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
                run.step.scan(*stack(batches[i : i + 20]))
            states.append(run.state())
    assert_same(*states)
    assert run.step.report().launches > 2


# ------------------------------------------------------------------------------------------------------------ launches


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accumulate", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 16))])
@pytest.mark.slow
@pytest.mark.sampled(3)
def test_launches(engine: Engine, accumulate: int) -> None:
    """R11: ceil(K / 16) launches and no capture for any K once two short lengths were seen, with whole windows."""
    run = Run(engine, accumulate=accumulate, schedule=SCHEDULES["step"])
    batches = stack(make_batches(engine[0], [4] * 16 * 6))

    def scan(windows: int) -> int:
        before = run.launches
        run.step.scan(*(column[: windows * accumulate] for column in batches))
        return run.launches - before

    for windows in (6, 6, 6, 2, 3):
        scan(windows)
    if accumulate == 1:
        scan(20)
    captures = run.step.captures
    for windows in range(1, 96 // accumulate + 1, 5):
        assert scan(windows) <= math.ceil(windows * accumulate / 16)
    assert run.step.captures == captures
    report = run.step.report()
    assert report.eager == {"warm-up": 3 * min(accumulate, 3)}
    assert report.scanned >= report.launches > 0
    assert "launches of scan" in str(report)
    assert sum(graph.replays for graph in report.per_graph) == run.launches
    run.step.close()
    assert run.step.report().graphs == 0
    scan(5)
    assert run.step.captures > captures


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_are_the_callers(engine: Engine) -> None:
    """No later scan overwrites them, and changing them changes nothing."""
    run = Run(engine, max_norm=1.0)
    batches = stack(make_batches(engine[0], [4] * 20))
    run.step.scan(*batches)
    out = run.step.scan(*batches)
    before = pytree.tree_map_only(Tensor, torch.clone, tuple(out))
    run.step.scan(*batches)
    assert_same(tuple(out), before)
    pytree.tree_map_only(Tensor, torch.zero_, tuple(out))
    again = run.step.scan(*batches)
    assert again.loss.all()


# ------------------------------------------------------------------------------------------------- calls one by one


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rate", ["float", pytest.param("tensor", marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_a_momentum_that_changes_now_and_then(engine: Engine, rate: str) -> None:
    """A graph holds the momentum as a constant. A scheduler of the user's is not stepped ahead: calls are single."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = sgd(params)
        if rate == "tensor":
            made.param_groups[0]["lr"] = torch.tensor(0.05, device=engine[0])
        return made

    with pytest.warns(ampkit.CaptureWarning, match="momentum"):
        run = check(engine, (20, 33, 0, 33, 20), schedule=Momentum, optimizer=optimizer)
    assert run.step.report().launches == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_momentum_that_changes_in_each_step(engine: Engine) -> None:
    """OneCycleLR cycles the momentum unless it is told not to: no call is ever captured, as without scan."""
    with pytest.warns(ampkit.CaptureWarning, match="cycle_momentum=False"):
        run = check(
            engine,
            (20, 5),
            schedule=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200),
            optimizer=sgd,
            on_failure="eager",
        )
    assert run.launches == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scheduler_that_is_not_torchs(engine: Engine) -> None:
    """It may change what the step reads, so it is not stepped ahead."""
    batches = make_batches(engine[0], [4] * 40)
    with deterministic():
        states = []
        for graph in ("off", engine[1]):
            model = make_net(engine[0])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            step = ampkit.graphed_step(boosted_loss, model, optimizer, scheduler=Blend(optimizer, model), graph=graph)
            torch.manual_seed(5)
            if graph == "off":
                for batch in batches:
                    step(*batch)
            else:
                step.scan(*stack(batches[:20]))
                step.scan(*stack(batches[20:]))
            states.append(training_state(model, optimizer, step.scaler))
    assert_same(*states)
    assert (step.report().launches, step.replays) == (0, 37)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_an_open_window_and_a_short_end(engine: Engine) -> None:
    """Single micro-batches, scans that are no whole windows, flush: as single calls."""
    run = check(engine, (20, 0, 20, 0, 0, 31, 1, 5, 20), accumulate=3, max_norm=1.0, schedule=SCHEDULES["step"])
    assert run.step.report().launches > 3
    with deterministic():
        run.step.flush()
        out = run.step.scan(*stack(make_batches(engine[0], [4] * 7)))
    assert out.loss.shape == out.skipped.shape == (7,)
    assert out.grad_norm is not None
    assert out.grad_norm.shape == (2,)


@pytest.mark.parametrize("graph", ["off", "emulate"])
@pytest.mark.slow
def test_without_graphs(graph: str) -> None:
    """With graph="off", and with an optimizer that is not captured, the calls are made one by one."""
    options: dict[str, Any] = {"on_failure": "parts", "max_norm": 1.0}
    if graph == "emulate":
        options["optimizer"] = lambda params: torch.optim.Adamax(params, lr=1e-2)
    run = check(("cpu", graph), (20, 5), **options)
    assert run.step.report().launches == 0 or graph == "emulate"


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_behind_the_graphs(engine: Engine) -> None:
    """`on_failure="parts"`: forward and backward of each call are a graph, and the optimizer steps behind it."""
    with pytest.warns(ampkit.CaptureWarning, match="hook"):
        run = check(engine, (20, 5), optimizer=steps_eagerly, on_failure="parts")
    assert (run.step.report().launches, run.step.replays) == (0, 22)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.quick(2)
def test_an_optimizer_with_constant_numbers(engine: Engine, scheduled: bool) -> None:
    """It joins the graphs after a few steps, and scans launch it. With a scheduler its rate would be a constant."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=False, foreach=False)

    schedule = SCHEDULES["step"] if scheduled else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = check(engine, (20, 33, 0, 5), optimizer=optimizer, on_failure="parts", schedule=schedule)
    assert (run.step.report().launches > 0) == (not scheduled)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_buckets_and_numerics(engine: Engine) -> None:
    """Padded and observed calls are made one by one, as by single calls."""

    def masked(model: nn.Module, images: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()

    batches = [batch[:2] for batch in make_batches(engine[0], [5] * 20)]
    with deterministic():
        states: list[Any] = []
        for scans in (False, True):
            model = make_net(engine[0])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            numerics = ampkit.debug.numerics(model, every=4)
            step = ampkit.graphed_step(
                masked, model, optimizer, buckets=ampkit.Buckets(batch=(8,)), numerics=numerics, graph=engine[1]
            )
            torch.manual_seed(5)
            losses = step.scan(*stack(batches)).loss if scans else torch.stack([step(*b).loss for b in batches])
            states.append((losses, training_state(model, optimizer, step.scaler), step.replays, step.captures))
            assert step.report().launches == 0
    assert_same(*states)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_that_is_changed_in_place(engine: Engine) -> None:
    """Calls that write to their batch are made one by one, and the stack has what they wrote."""
    batches = make_batches(engine[0], [4] * 12)
    run = Run(engine, loss_fn=writes_to_its_batch)
    images, labels, boost = stack(batches)
    run.step.scan(images, labels, boost)
    run.step.scan(images, labels, boost)
    assert_same(boost, torch.full_like(boost, 4.0))
    assert run.step.report().launches == 0
    assert run.step.replays == 21


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_betas_in_a_list_that_change_in_place(engine: Engine) -> None:
    """As they come out of a JSON file: a change of one number in the list is another graph, too."""

    class Betas(lr_scheduler.LRScheduler):
        def get_lr(self) -> list[float]:
            if self.last_epoch == 21:
                self.optimizer.param_groups[0]["betas"][0] = 0.5
            return [group["lr"] for group in self.optimizer.param_groups]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params, lr=2.0**-7, fused=True)
        made.param_groups[0]["betas"] = [0.9, 0.99]
        return made

    with pytest.warns(ampkit.CaptureWarning, match="betas"):
        run = check(engine, (20, 20, 33), schedule=Betas, optimizer=optimizer)
    assert run.step.report().launches == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_compiled_code(engine: Engine, fresh_dynamo: None) -> None:
    """Slices of a stack are no other inputs to compiled code than single batches: nothing is compiled again."""
    model = make_net(engine[0])
    compiled = Compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def loss_fn(_: nn.Module, *batch: Tensor) -> Any:
        return boosted_loss(compiled.module, *batch)

    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=engine[1], on_failure="raise", host_writes="ignore")
    batches = make_batches(engine[0], [4] * 20)
    for batch in batches[:5]:
        step(*batch)
    for _ in range(2):
        step.scan(*stack(batches))
    assert compiled.compiles == 1
    assert step.report().launches == 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", [pytest.param("bfloat16", marks=pytest.mark.seeds), "float16"])
@pytest.mark.slow
def test_a_compiled_step(engine: Engine, policy: str, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: with `compile=`, scans have the bits of single calls of that compiled step, with a schedule too."""
    if engine[0] == "cpu":
        leave_out_inductor(monkeypatch)
    overflow_at = (21,) if policy == "float16" else ()
    run = check(
        engine, (20, 33, 5), overflow_at, compile="default", policy=policy, max_norm=1.0, schedule=SCHEDULES["step"]
    )
    report = run.step.report()
    assert report.launches == 4
    assert any("update" in line for line in report.compiled)


@pytest.mark.parametrize("engine", ENGINES)
# The nodes belong to the stream that the wrapper was made under, as they must for a capture.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_ranks(engine: Engine, tmp_path: Path) -> None:
    """The steps of a DistributedDataParallel model are made one by one."""
    dist.init_process_group(
        "gloo" if engine[0] == "cpu" else "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = make_net(engine[0])
        with torch.cuda.stream(torch.cuda.Stream()) if engine[0] == "cuda" else nothing():
            ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = ampkit.graphed_step(boosted_loss, ddp, optimizer, graph=engine[1])
        out = step.scan(*stack(make_batches(engine[0], [4] * 20)))
        assert out.loss.shape == (20,)
        assert step.report().launches == 0
        assert step.replays > 0
        step.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_settings_that_change(engine: Engine) -> None:
    """Graphs of another mode, or of memory that was replaced, are not launched. The old mode finds its graphs again."""
    batches = make_batches(engine[0], [4] * 20)
    with deterministic():
        states = []
        for graph in ("off", engine[1]):
            run = Run(engine, graph, on_failure="eager")
            for action in ("", "eval", "", "train", "", "load", ""):
                if action == "load":
                    run.optimizer.load_state_dict(run.optimizer.state_dict())
                elif action:
                    run.model.train(action == "train")
                if graph == "off":
                    run.step.scan(*stack(batches))
                elif action in ("eval", "load"):
                    with pytest.warns(ampkit.CaptureWarning) if action == "eval" else nothing():
                        run.step.scan(*stack(batches))
                else:
                    run.step.scan(*stack(batches))
            states.append(run.state())
    assert_same(*states)
    assert run.step.report().launches >= 8


# --------------------------------------------------------------------------------------------------- errors, refusals


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("graph", ["", "off"])
def test_what_is_no_stack(engine: Engine, graph: str) -> None:
    """The message names the argument, what came, and what to write. Nothing is done."""
    run = Run(engine, graph or None, schedule=SCHEDULES["step"])
    images, labels, boost = stack(make_batches(engine[0], [4] * 20))
    run.step.scan(images, labels, boost)
    before = run.state()
    for given, message in (
        ((images, labels[:5], boost), r"batch\[1\] has shape \(5, 4\), which is for 5 steps, but batch\[0\]"),
        ((images, labels, boost[0]), r"batch\[2\] has shape \(\), and needs a leading dimension.*expand"),
        ((images[:0], labels[:0], boost[:0]), r"batch\[0\] has shape \(0, 4, 3, 8, 8\), which is for 0 steps"),
        ((), "the inputs have no tensor"),
        ((1, {"a": None}), "the inputs have no tensor"),
        ((images.to_sparse(), labels, boost), r"batch\[0\] has layout"),
        ((images, labels, boost.requires_grad_(True)), r"batch\[2\] requires grad"),
        ((images, labels, boost.detach(), {1, 2}), r"batch\[3\] is a set"),
    ):
        with pytest.raises(ampkit.InputMismatch, match=message):
            run.step.scan(*given)
        boost = boost.detach()
    with pytest.raises(ampkit.InputMismatch, match=r"batch\['labels'\] has shape \(5, 4\)"):
        run.step.scan(images, labels=labels[:5])
    assert_same(run.state(), before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_constants_and_shared_tensors(engine: Engine) -> None:
    """What is no tensor goes to every call. What all calls share has no memory of its own in the stack."""
    batches = [batch[:2] for batch in make_batches(engine[0], [4] * 40)]
    weight = torch.tensor(1.5, device=engine[0])
    with deterministic():
        states: list[Any] = []
        for scans in (False, True):
            run = Run(engine, engine[1] if scans else "off", loss_fn=with_constants)
            for part in (batches[:20], batches[20:]):
                if scans:
                    out = run.step.scan({"data": stack(part)}, weight.expand(20), twice=True)
                else:
                    out = of_singles([run.step({"data": [*batch]}, weight, twice=True) for batch in part])
            states.append((out, run.state()))
    assert_same(*states)
    assert run.step.report().launches == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stack_in_the_memory_of_the_state(engine: Engine) -> None:
    """A graph would read copies of a parameter that the step changes. Refused before the schedule moves on."""

    def loss_fn(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
        return (model(images).mean(0) - target).square().mean()

    run = Run(engine, loss_fn=loss_fn, schedule=SCHEDULES["step"])
    images = torch.randn(8, 4, 3, 8, 8, device=engine[0])
    run.step.scan(images, torch.zeros(8, 10, device=engine[0]))
    before = run.state()
    with pytest.raises(ampkit.InputMismatch, match=r"model\.head\.bias, which the step changes"):
        run.step.scan(images, run.model.head.bias.detach().expand(8, 10))
    assert_same(run.state(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_of_the_users(engine: Engine) -> None:
    """It comes out of the call that it is raised in. The calls before were done, and a note says how many."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("a mistake of the user")
        return boosted_loss(model, *batch)

    calls: list[int] = []
    run = Run(engine, loss_fn=loss_fn, schedule=SCHEDULES["step"], host_writes="ignore")
    with pytest.raises(KeyError, match="a mistake of the user") as caught:
        run.step.scan(*stack(make_batches(engine[0], [4] * 8)))
    assert getattr(caught.value, "__notes__", ["2 of 8"])[0].count("2 of 8")
    assert run.scheduler.last_epoch == 2
    run.step.scan(*stack(make_batches(engine[0], [4] * 8)))
    assert run.scheduler.last_epoch == 10


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on_failure", ["eager", "raise"])
@pytest.mark.quick(2)
def test_calls_that_differ_within_a_series(engine: Engine, on_failure: str) -> None:
    """A number that the host changes after a while: single graphs hold it unnoticed, a series shows it."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        calls.append(1)
        loss, aux = boosted_loss(model, *batch)
        return loss * (1.0 if len(calls) < 12 else 2.0), aux

    calls: list[int] = []
    run = Run(engine, loss_fn=loss_fn, on_failure=on_failure, host_writes="ignore")
    batches = stack(make_batches(engine[0], [4] * 24))
    if on_failure == "raise":
        with pytest.raises(ampkit.CaptureError, match=r"loss \* \(1.0 if len"):
            run.step.scan(*batches)
    else:
        with pytest.warns(ampkit.CaptureWarning, match=r"loss \* \(1.0 if len.*Each call is a launch of its own"):
            run.step.scan(*batches)
        assert run.step.replays >= 5
        assert run.step.report().graphs == 1
    assert run.step.report().launches <= 1


@pytest.mark.slow
def test_a_launch_that_is_wrong_is_found() -> None:
    """`verify` compares launches of several steps, too: here a replay computes with another factor."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        loss, aux = boosted_loss(model, *batch)
        return loss * factor[0], aux

    factor = [torch.ones(())]
    run = Run(("cpu", "emulate"), loss_fn=loss_fn, verify=2, warmup=2, on_failure="raise")
    batches = stack(make_batches("cpu", [4] * 20))
    run.step.scan(*batches)
    graph = next(iter(run.step._engine._cache.multi_step.values())).graphs[16]._graph
    replay = graph.replay
    graph.replay = lambda: (factor[0].mul_(1.5), replay(), factor[0].fill_(1.0))[1]  # type: ignore[method-assign]
    with pytest.raises(ampkit.CaptureError, match=r"verify: .*This step was done, as eager computes it"):
        run.step.scan(*batches)
    run.step.scan(*batches)
    assert run.step.report().failure is not None


@pytest.mark.slow
def test_several_layouts() -> None:
    """At most `max_graphs` layouts keep their series. A layout that comes back captures again, with the same bits."""
    left, right = (stack(make_batches("cpu", [size] * 20)) for size in (4, 3))
    with deterministic():
        states = []
        for graph in ("off", "emulate"):
            run = Run(("cpu", graph), max_graphs=1, on_failure="eager", warmup=2)
            for batches in (left, right, right, left, left, right):
                with warnings_of_evictions():
                    run.step.scan(*batches)
            states.append(run.state())
    assert_same(*states)
    report = run.step.report()
    assert report.launches > 4
    assert report.graphs <= 1 + 2
