"""GraphedStep.window: an optimizer step over N micro-batches in one launch, with the bits of N calls (scenario R12)."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from families import some
from harness import (
    ENGINES,
    WARMUP_DDP,
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
from torch.utils import _pytree as pytree

import ampkit

WHOLE = -1  # in place of a number of micro-batches: all of a window by single calls
Make = Callable[..., Run]


def of_window(outs: Sequence[ampkit.StepOutput]) -> ampkit.StepOutput:
    """Return what `window` must return for calls that returned these."""
    return of_singles(outs)._replace(grad_norm=outs[-1].grad_norm, skipped=outs[-1].skipped, stepped=True)


def of_short_window(run: Run, batches: Sequence[Sequence[Tensor]]) -> ampkit.StepOutput:
    """Do these calls and flush the window; return what `window` must return."""
    before = run.step.skipped
    outs = [run.step(*batch) for batch in batches]
    run.step.flush()
    skipped = torch.tensor(run.step.skipped > before, device=run.device)
    return of_window(outs)._replace(grad_norm=run.step.scaler.grad_norm, skipped=skipped)


def check(engine: Engine, sizes: Sequence[int], overflow_at: tuple[int, ...] = (), **options: Any) -> Run:
    """Assert that windows of these sizes leave, after each of them, what single eager calls leave."""
    count = options.setdefault("accumulate", 4)
    numbers = [count if size == WHOLE else size for size in sizes]
    batches = make_batches(engine[0], [4] * sum(numbers), overflow_at)
    with deterministic():
        eager, left = Run(engine, "off", **options), iter(batches)
        history: list[Any] = []
        for number in numbers:
            given = [next(left) for _ in range(number)]
            out = of_short_window(eager, given) if number < count else of_window([eager.step(*b) for b in given])
            history.append((out, eager.state()))
        run, left = Run(engine, **options), iter(batches)
        for i, (size, number) in enumerate(zip(sizes, numbers, strict=True)):
            given = [next(left) for _ in range(number)]
            before = run.launches
            if size == WHOLE:
                out = of_window([run.step(*batch) for batch in given])
            else:
                out = run.step.window(*stack(given))
            assert_same((out, run.state()), history[i], f"after window {i} of {size}: (outputs, state)")
            run.last_launches = run.launches - before
    assert eager.step.skipped == run.step.skipped
    return run


# ---------------------------------------------------------------------------------------------------------------- bits

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, clip": {"policy": "bfloat16", "max_norm": 0.5},
    "float16": {"policy": "float16", "max_norm": 1.0},
    "norm, average": {"max_norm": float("inf"), "average": True, "accumulate": 3},
    "schedule": {"schedule": SCHEDULES["lambda"], "accumulate": 2},
    "float16, all": {"policy": "float16", "max_norm": 1.0, "average": True, "schedule": SCHEDULES["one cycle"]},
    "many": {"accumulate": 20, "schedule": SCHEDULES["step"]},
    "one": {"accumulate": 1, "max_norm": 1.0},
    "verify": {"verify": 12, "policy": "bfloat16", "schedule": SCHEDULES["step"], "accumulate": 3},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", some(CASES, quick=("float16, all",), slow=("norm, average", "verify")))
def test_equals_single_calls(engine: Engine, case: str) -> None:
    """R12: a window has the bits of N calls: state, outputs, random numbers, with overflows, from the first one on."""
    options = CASES[case]
    count = options.get("accumulate", 4)
    overflow_at = (2, 21, 25, 38) if "float16" in case else ()
    run = check(engine, [count] * 9 + [WHOLE] + [count] * 2, overflow_at, **options)
    report = run.step.report()
    assert run.last_launches == 1
    assert report.failure is None
    assert report.launches == report.scanned == (0 if count == 1 else 7)  # behind 3 to warm up, and one to capture
    assert (run.step.skipped >= 3) == ("float16" in case.split(","))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_launches(engine: Engine) -> None:
    """R12: exactly one launch per optimizer step, and no more capture. Report and metrics count it."""
    run = Run(engine, accumulate=4, schedule=SCHEDULES["step"])
    batches = stack(make_batches(engine[0], [4] * 4))
    for _ in range(5):
        run.step.window(*batches)
    captures = run.step.captures
    assert captures == 4  # the first call, those in the middle, the last one, all of them
    for _ in range(10):
        before = run.launches
        run.step.window(*batches)
        assert run.launches == before + 1
    report = run.step.report()
    assert run.step.captures == captures
    assert report.eager == {"warm-up": 3 + 3 + 3}
    assert (report.launches, report.scanned) == (11, 11)
    assert str(report).startswith("16 micro-batches (4 optimizer steps): 7 replayed, 9 eager, 0 skipped; ")
    assert "; then 11 optimizer steps in 11 launches of scan or window" in str(report)
    assert sum(graph.replays for graph in report.per_graph) == run.launches
    assert run.step.metrics()["replay_share"] == (15 * 4 - 9) / (15 * 4)
    assert run.scheduler.last_epoch == 15
    run.step.close()
    assert run.step.report().graphs == 0
    for _ in range(6):
        run.step.window(*batches)
    assert run.step.captures == 2 * captures


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["float32", "float16"])
@pytest.mark.sampled(2)
def test_a_short_window(engine: Engine, policy: str) -> None:
    """The last one of an epoch: as by single calls and `flush`. Norm and skip are those of the flush."""
    overflow_at = (25,) if policy == "float16" else ()
    run = check(engine, [4, 4, 4, 4, 4, 4, 2, 4, 1, 4], overflow_at, policy=policy, max_norm=1.0)
    report = run.step.report()
    assert report.eager["flush of a short window"] == 2
    assert report.launches == 4
    with deterministic():
        out = run.step.window(*stack(make_batches(engine[0], [4] * 3)))
    assert out.loss.shape == out.aux["correct"].shape == (3,)
    assert out.grad_norm is not None
    assert out.grad_norm.shape == out.skipped.shape == ()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.quick(2)
def test_outputs_are_the_callers(engine: Engine, size: int) -> None:
    """No later window overwrites them, and changing them changes nothing."""
    run = Run(engine, max_norm=1.0, accumulate=4, policy="float16")
    batches = stack(make_batches(engine[0], [4] * 4))
    for _ in range(6):
        run.step.window(*batches)
    out = run.step.window(*(column[:size] for column in batches))
    before = pytree.tree_map_only(Tensor, torch.clone, tuple(out))
    run.step.window(*batches)
    assert_same(tuple(out), before)
    pytree.tree_map_only(Tensor, torch.zero_, tuple(out))
    again = run.step.window(*batches)
    assert again.loss.all()
    assert not again.skipped


# ------------------------------------------------------------------------------------------- schedulers, optimizers


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rate", ["tensor", "tensor on the host"])
@pytest.mark.slow
@pytest.mark.seeds
def test_rates_that_are_tensors(engine: Engine, rate: str) -> None:
    """Each window reads what the scheduler has written there."""
    optimizer = two_rates(engine[0] if rate == "tensor" else "cpu")
    run = check(engine, [2] * 9, accumulate=2, optimizer=optimizer, schedule=SCHEDULES["lambda"])
    assert run.step.report().launches == 5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.seeds
def test_a_momentum_that_changes_now_and_then(engine: Engine) -> None:
    """The window of the change is the first with the new number, which takes another graph."""
    with pytest.warns(ampkit.CaptureWarning, match="momentum"):
        run = check(engine, [2] * 40, accumulate=2, schedule=Momentum, optimizer=sgd)
    assert run.step.report().launches >= 26


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.seeds
def test_a_scheduler_that_is_not_torchs(engine: Engine) -> None:
    """It is stepped behind the launch, so it may change what the step reads."""
    batches = make_batches(engine[0], [4] * 20)
    with deterministic():
        states = []
        for graph in ("off", engine[1]):
            model = make_net(engine[0])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            step = ampkit.graphed_step(
                boosted_loss, model, optimizer, scheduler=Blend(optimizer, model), accumulate=2, graph=graph
            )
            torch.manual_seed(5)
            for i in range(0, 20, 2):
                step.window(*stack(batches[i : i + 2]))
            states.append(training_state(model, optimizer, step.scaler))
    assert_same(*states)
    assert step.report().launches == 6


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["float32", "float16"])
# On CUDA the scaler says that an optimizer with hooks is skipped by the host.
@pytest.mark.filterwarnings("ignore:GradScaler.step.* has step hooks:ampkit.AmpkitWarning")
@pytest.mark.quick(2)
def test_an_optimizer_behind_the_graphs(engine: Engine, policy: str) -> None:
    """`on_failure="parts"`: all forwards and backwards are one launch, and the optimizer steps behind it."""
    with pytest.warns(ampkit.CaptureWarning, match="hook"):
        run = check(
            engine,
            [3] * 8,
            (19,) if policy == "float16" else (),
            optimizer=steps_eagerly,
            on_failure="parts",
            accumulate=3,
            policy=policy,
            max_norm=1.0,
            schedule=SCHEDULES["step"],
        )
    assert (run.step.report().launches, run.last_launches) == (4, 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.seeds
def test_an_optimizer_with_constant_numbers(engine: Engine) -> None:
    """It joins the graphs after a few steps; windows launch it then."""

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=False, foreach=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        run = check(engine, [2] * 14, accumulate=2, optimizer=optimizer, on_failure="parts")
    assert run.last_launches == 1
    assert run.step.report().eager_optimizer is None


# ------------------------------------------------------------------------------------------------ what goes with it


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("stacked", ["window", "scan"])
@pytest.mark.quick(2)
def test_buckets(engine: Engine, stacked: str) -> None:
    """Each micro-batch is padded as a single call pads it; windows of one bucket share a graph."""

    def masked(model: nn.Module, images: Tensor, labels: Tensor, *, mask: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()

    sizes = (5, 8, 6, 8, 7, 8, 5, 8)
    windows = [[batch[:2] for batch in make_batches(engine[0], [size] * 2)] for size in sizes]
    with deterministic():
        states: list[Any] = []
        for together in (False, True):
            model = make_net(engine[0]).to(memory_format=torch.channels_last)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            step = ampkit.graphed_step(
                masked, model, optimizer, accumulate=2, buckets=ampkit.Buckets(batch=(8,)), graph=engine[1]
            )
            torch.manual_seed(5)
            losses = []
            for window in windows:
                images = [batch[0].to(memory_format=torch.channels_last) for batch in window]
                labels = [batch[1] for batch in window]
                if together:
                    losses.append(getattr(step, stacked)(torch.stack(images), torch.stack(labels)).loss)
                else:
                    losses.append(torch.stack([step(*batch).loss for batch in zip(images, labels, strict=True)]))
            states.append((losses, training_state(model, optimizer, step.scaler)))
        assert_same(*states)
    assert step.report().launches == 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_numerics(engine: Engine) -> None:
    """Windows in which an observer measures have graphs of their own. It sees what it sees in single calls."""
    batches = make_batches(engine[0], [4] * 40)
    with deterministic():
        states: list[Any] = []
        for together in (False, True):
            model = make_net(engine[0])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            numerics = ampkit.debug.numerics(model, every=2)
            step = ampkit.graphed_step(
                boosted_loss, model, optimizer, accumulate=2, numerics=numerics, graph=engine[1], on_failure="raise"
            )
            torch.manual_seed(5)
            for i in range(0, 40, 2):
                if together:
                    step.window(*stack(batches[i : i + 2]))
                else:
                    for batch in batches[i : i + 2]:
                        step(*batch)
            states.append((training_state(model, optimizer, step.scaler), str(numerics.report())))
    assert_same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    assert step.report().launches == 20 - 2 * 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_that_is_changed_in_place(engine: Engine) -> None:
    """Calls that write to their batch are made one by one, and the stack has what they wrote."""
    run = Run(engine, loss_fn=writes_to_its_batch, accumulate=2)
    images, labels, boost = stack(make_batches(engine[0], [4] * 2))
    for _ in range(7):
        run.step.window(images, labels, boost)
    assert_same(boost, torch.full_like(boost, 2.0**7))
    assert (run.step.report().launches, run.step.replays) == (0, 8)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.seeds
def test_constants_and_shared_tensors(engine: Engine) -> None:
    """What is no tensor goes to every call. What all calls share has no memory of its own in the stack."""
    batches = [batch[:2] for batch in make_batches(engine[0], [4] * 18)]
    weight = torch.tensor(1.5, device=engine[0])
    with deterministic():
        states: list[Any] = []
        for together in (False, True):
            run = Run(engine, engine[1] if together else "off", loss_fn=with_constants, accumulate=3)
            outs = []
            for i in range(0, 18, 3):
                part = batches[i : i + 3]
                if together:
                    outs.append(run.step.window({"data": stack(part)}, weight.expand(3), twice=True))
                else:
                    singles = [run.step({"data": [*batch]}, weight, twice=True) for batch in part]
                    outs.append(of_window(singles))
            states.append((outs, run.state()))
    assert_same(*states)
    assert run.step.report().launches == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_view_of_a_larger_batch(engine: Engine) -> None:
    """A loader's batch of N times B samples, split without a copy, as the docs write it."""
    (batch,) = make_batches(engine[0], [12])
    images, labels = batch[0].unflatten(0, (3, 4)), batch[1].unflatten(0, (3, 4))
    with deterministic():
        states = []
        for graph in ("off", engine[1]):
            run = Run(engine, graph, accumulate=3)
            for _ in range(6):
                run.step.window(images, labels, torch.ones(3, device=engine[0]))
            states.append(run.state())
    assert_same(*states)
    assert run.step.report().launches == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
@pytest.mark.seeds
def test_settings_that_change(engine: Engine) -> None:
    """Graphs of another mode, or of memory that was replaced, are not launched. The old mode finds its graph again."""
    batches = stack(make_batches(engine[0], [4] * 2))
    with deterministic():
        states = []
        for graph in ("off", engine[1]):
            run = Run(engine, graph, on_failure="eager", accumulate=2)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ampkit.CaptureWarning)
                for action in ("", "eval", "train", "rate", "load"):
                    if action in ("eval", "train"):
                        run.model.train(action == "train")
                    elif action == "rate":
                        run.optimizer.param_groups[0]["lr"] = 0.003
                    elif action == "load":
                        run.optimizer.load_state_dict(run.optimizer.state_dict())
                    for _ in range(6):
                        run.step.window(*batches)
            states.append(run.state())
    assert_same(*states)
    assert run.step.report().launches == 2 + 2 + 6 + 6 + 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["bfloat16", pytest.param("float16", marks=pytest.mark.seeds)])
@pytest.mark.slow
def test_a_compiled_step(engine: Engine, policy: str, fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: with `compile=`, windows have the bits of single calls of that compiled step."""
    if engine[0] == "cpu":
        leave_out_inductor(monkeypatch)
    overflow_at = (13,) if policy == "float16" else ()
    run = check(
        engine, [2] * 9, overflow_at, compile="default", policy=policy, max_norm=1.0, accumulate=2,
        schedule=SCHEDULES["step"],
    )  # fmt: skip
    assert run.last_launches == 1


@pytest.mark.slow
def test_host_draws() -> None:
    """R3: which graphs serve the calls is known only when they draw, so they are made one by one."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        loss, aux = boosted_loss(model, *batch)
        return (2 * loss if torch.rand(()) < 0.5 else loss), aux

    run = check(("cpu", "emulate"), [2] * 16, loss_fn=loss_fn, accumulate=2)
    assert run.step.report().launches == 0
    assert run.step.replays > 6


@pytest.mark.parametrize(("graph", "on_failure"), [("off", "eager"), ("emulate", "eager"), ("emulate", "parts")])
def test_without_graphs(graph: str, on_failure: str) -> None:
    """With graph="off", and where nothing is captured whole, the calls are made one by one, and counted as such."""

    def reads(model: nn.Module, *batch: Tensor) -> Any:
        loss, aux = boosted_loss(model, *batch)
        loss.item()
        return loss, aux

    reason = "graph='off'"
    with nothing() if graph == "off" else pytest.warns(ampkit.CaptureWarning, match=r"loss.item\(\)"):
        run = check(("cpu", graph), [2] * 5 + [1], accumulate=2, on_failure=on_failure, loss_fn=reads)
    report = run.step.report()
    assert run.launches == 0
    assert sum(report.eager.values()) + report.in_parts == 12
    assert (reason in report.eager) == (graph == "off")


# --------------------------------------------------------------------------------------------------------------- ranks


@contextmanager
def one_rank(device: str, folder: Path) -> Iterator[None]:
    """Context in which this process is the only one of a process group."""
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fits", [True, False])
# The nodes belong to the stream that the wrapper was made under, as they must for a capture.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.slow
def test_ranks(engine: Engine, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R12: windows of a DistributedDataParallel model are one launch. If that fails, no rank tries it again."""
    device = engine[0]
    batches = stack(make_batches(device, [4] * 3))
    with one_rank(device, tmp_path):
        model = make_net(device)
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nothing():
            ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        step = ampkit.graphed_step(boosted_loss, ddp, optimizer, graph=engine[1], accumulate=3)
        cache = step._engine._cache
        if not fits:
            monkeypatch.setattr(cache, "over_budget", lambda: bool(cache.multi_step))
        for _ in range((3 if device == "cpu" else WARMUP_DDP) + 1):
            step.window(*batches)
        assert step.captures == 3
        with nothing() if fits else pytest.warns(ampkit.CaptureWarning, match="several calls in one graph: .*budget"):
            step.window(*batches)
        for _ in range(8):
            step.window(*batches)
        assert step.report().launches == (9 if fits else 0)
        assert step.captures == (4 if fits else 4 + 3)  # the budget dropped the graphs of the calls, too
        monkeypatch.undo()
        other = stack(make_batches(device, [3] * 3))
        for _ in range(14):
            step.window(*other)
        assert (step.report().launches > 9) == fits
        assert step.replays > 0
        step.close()


# ----------------------------------------------------------------------------------------------------- errors, failures


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("graph", ["", "off"])
def test_what_is_no_window(engine: Engine, graph: str) -> None:
    """The message names the argument, what came, and what to write. Nothing is done."""
    run = Run(engine, graph or None, schedule=SCHEDULES["step"], accumulate=4)
    images, labels, boost = stack(make_batches(engine[0], [4] * 8))
    for _ in range(6):
        run.step.window(images[:4], labels[:4], boost[:4])
    before = run.state()
    for given, message in (
        ((images[:4], labels[:3], boost[:4]), r"window: batch\[1\] has shape \(3, 4\), .*3 micro-batches, but"),
        ((images[:4], labels[:4], boost[0]), r"window: batch\[2\] has shape \(\), .*entry per micro-batch.*expand"),
        ((images[:0], labels[:0], boost[:0]), r"window: .* which is for 0 micro-batches"),
        (({"a": None},), "window: the inputs have no tensor"),
        ((images[:4].to_sparse(), labels[:4], boost[:4]), r"batch\[0\] has layout"),
    ):
        with pytest.raises(ampkit.InputMismatch, match=message):
            run.step.window(*given)
    with pytest.raises(
        ValueError,
        match=r"window: batch\[0\] has shape \(8, 4, 3, 8, 8\), which is for 8 micro-batches, but .*accumulate=4\. "
        r"Pass at most 4, make the step with accumulate=8, or call step\.scan",
    ):
        run.step.window(images, labels, boost)
    assert_same(run.state(), before)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_open_window(engine: Engine) -> None:
    """Micro-batches that were given to the step are neither lost nor counted twice."""
    run = Run(engine, accumulate=3)
    batches = make_batches(engine[0], [4] * 3)
    run.step(*batches[0])
    before = run.state()
    with pytest.raises(ampkit.AmpkitError, match=r"1 of 3 micro-batches .*the other 2, or call step.flush\(\)"):
        run.step.window(*stack(batches))
    assert_same(run.state(), before)
    run.step.flush()
    run.step.window(*stack(batches))
    assert run.step.report().eager == {"warm-up": 4, "flush of a short window": 1}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("error", [KeyError("a mistake of the user"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.quick(2)
def test_an_error_of_the_users(engine: Engine, error: BaseException) -> None:
    """It comes out, the gradients of the window are dropped, and the next window begins anew."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return boosted_loss(model, *batch)

    calls: list[int] = []
    run = Run(engine, loss_fn=loss_fn, schedule=SCHEDULES["step"], accumulate=4, host_writes="ignore")
    batches = stack(make_batches(engine[0], [4] * 4))
    parameters = [param.detach().clone() for param in run.model.parameters()]
    with pytest.raises(type(error)) as caught:
        run.step.window(*batches)
    if isinstance(error, KeyError):
        assert getattr(caught.value, "__notes__", ["first 2 of 4"])[0].count("first 2 of 4")
    assert_same([param.detach() for param in run.model.parameters()], parameters)
    assert run.scheduler.last_epoch == 0
    assert all(param.grad is None for param in run.model.parameters())
    for _ in range(6):
        run.step.window(*batches)
    assert run.scheduler.last_epoch == 6
    assert run.step.report().launches > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_micro_batch_that_is_refused(engine: Engine) -> None:
    """It ends the window like any other error, though the step alone would wait for another micro-batch."""

    def loss_fn(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
        return (model(images).mean(0) - target).square().mean()

    run = Run(engine, loss_fn=loss_fn, accumulate=2, on_failure="eager")
    # 512 bytes from row to row: an unaligned slice would be copied first, and share nothing.
    rows, others = (torch.zeros(2, 128, device=engine[0])[:, :10] for _ in range(2))
    run.model.head.bias.data = rows[1]  # what the step changes is the second micro-batch's
    images = torch.randn(2, 4, 3, 8, 8, device=engine[0])
    for _ in range(3):
        run.step.window(images, others)
    with pytest.raises(ampkit.InputMismatch, match=r"model\.head\.bias, which the step changes") as caught:
        run.step.window(images, rows)
    assert getattr(caught.value, "__notes__", ["first 1 of 2"])[0].count("first 1 of 2")
    assert (run.step._window.count, run.step._window.accumulated) == (0, ())
    for _ in range(2):
        run.step.window(images, others)
    assert run.step.report().launches > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on_failure", ["eager", "raise"])
@pytest.mark.quick(2)
def test_calls_that_differ_within_a_window(engine: Engine, on_failure: str) -> None:
    """A number that the host changes after a while: single graphs hold it unnoticed, the graph of a window shows it."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        calls.append(1)
        loss, aux = boosted_loss(model, *batch)
        return loss * (1.0 if len(calls) not in changes else 2.0), aux

    calls: list[int] = []
    changes = numpy.zeros(100, dtype=int)  # what large arrays hold is not compared from call to call
    run = Run(engine, loss_fn=loss_fn, on_failure=on_failure, accumulate=5, host_writes="ignore")
    batches = stack(make_batches(engine[0], [4] * 5))
    for _ in range(4):
        run.step.window(*batches)
    changes += range(len(calls) + 3, len(calls) + 103)  # in the middle of the window that is captured
    if on_failure == "raise":
        with pytest.raises(ampkit.CaptureError, match=r"loss \* \(1.0 if len"):
            run.step.window(*batches)
    else:
        with pytest.warns(ampkit.CaptureWarning, match=r"loss \* \(1.0 if len.*Each call is a launch of its own"):
            run.step.window(*batches)
    assert run.step.report().launches <= 1
    assert run.step._window.count == 0


def multiplied(factor: Tensor) -> Callable[..., Any]:
    """Return a loss function with a factor that no step declares."""

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        loss, aux = boosted_loss(model, *batch)
        return loss * factor, aux

    return loss_fn


def replay_wrongly(captured: Any, factor: Tensor) -> None:
    """Have each replay of a graph compute with another factor."""
    graph = captured._graph
    replay = graph.replay
    graph.replay = lambda: (factor.mul_(1.5), replay(), factor.fill_(1.0))[1]


def test_a_launch_that_is_wrong_is_found() -> None:
    """`verify` compares launches of windows, too: here a replay computes with another factor."""

    factor = torch.ones(())
    run = Run(
        ("cpu", "emulate"), loss_fn=multiplied(factor), verify=9, warmup=2, accumulate=2, schedule=SCHEDULES["step"]
    )
    batches = stack(make_batches("cpu", [4] * 2))
    for _ in range(4):
        run.step.window(*batches)
    replay_wrongly(next(iter(run.step._engine._cache.multi_step.values())).graphs[1], factor)
    with pytest.raises(ampkit.CaptureError, match=r"verify: .*This step was done, as eager computes it"):
        run.step.window(*batches)
    assert run.scheduler.last_epoch == 5
    run.step.window(*batches)
    assert run.step.report().failure is not None


@pytest.mark.slow
def test_a_call_that_is_wrong_is_found() -> None:
    """Where `verify` finds that in one of the calls, the others are done all the same, and then it raises."""

    factor = torch.ones(())
    run = Run(
        ("cpu", "emulate"), loss_fn=multiplied(factor), verify=9, warmup=2, accumulate=3, schedule=SCHEDULES["step"]
    )
    batches = stack(make_batches("cpu", [4] * 3))
    for _ in range(3):
        run.step.window(*batches)
    _, captured = next(iter(run.step._engine._cache))
    replay_wrongly(captured, factor)
    run.step._engine._multi_step.given_up = True
    with pytest.raises(ampkit.CaptureError, match=r"verify: .*This step was done, as eager computes it"):
        run.step.window(*batches)
    assert run.scheduler.last_epoch == 4
    assert run.step._window.count == 0
    run.step.window(*batches)


@pytest.mark.slow
@pytest.mark.seeds
def test_several_layouts() -> None:
    """At most `max_graphs` layouts keep the graph of their windows. One that comes back captures again."""
    left, right = (stack(make_batches("cpu", [size] * 2)) for size in (4, 3))
    with deterministic():
        states = []
        for graph in ("off", "emulate"):
            run = Run(("cpu", graph), max_graphs=2, on_failure="eager", warmup=2, accumulate=2)
            for batches in (left, right, left):
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "graphed_step: a graph that was dropped", ampkit.CaptureWarning)
                    for _ in range(6):
                        run.step.window(*batches)
            states.append(run.state())
    assert_same(*states)
    assert run.step.report().launches == 3 + 3 + 6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stack_in_the_memory_of_the_state(engine: Engine) -> None:
    """A graph would read copies of a parameter that the step changes. Refused, and nothing is done or counted."""

    def loss_fn(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
        return (model(images).mean() - target).square().mean()

    run = Run(engine, loss_fn=loss_fn, schedule=SCHEDULES["step"], accumulate=2)
    rows = run.model.head.weight.detach()[:2]
    images = torch.randn(2, 4, 3, 8, 8, device=engine[0])
    for _ in range(6):
        run.step.window(images, torch.zeros_like(rows))
    before = run.state()
    with pytest.raises(ampkit.InputMismatch, match=r"model\.head\.weight, which the step changes"):
        run.step.window(images, rows)
    assert_same(run.state(), before)
    assert run.step.report().launches == 2
    run.step.window(images, torch.zeros_like(rows))
    assert run.step.report().launches == 3


@pytest.mark.slow
def test_other_layouts_now_and_then() -> None:
    """Launches count as replays: where most windows are launched, nothing is said of rare ones that are not."""

    def loss_fn(model: nn.Module, *batch: Any) -> Any:
        return boosted_loss(model, *batch[:3])

    run = Run(("cpu", "emulate"), loss_fn=loss_fn, accumulate=2)
    batches = stack(make_batches("cpu", [4] * 2))
    for i in range(20):
        for _ in range(6):
            run.step.window(*batches, -1)
        run.step.window(*batches, i)
    report = run.step.report()
    assert report.failure is None
    assert report.launches == 20 * 6 - 4


@pytest.mark.slow
def test_windows_as_long_as_a_launch_of_scan() -> None:
    """With 16 micro-batches and more, scan launches one window at a time, too. Its graph is another one."""
    run = check(("cpu", "emulate"), [20] * 6, accumulate=20, schedule=SCHEDULES["step"])
    batches = make_batches("cpu", [4] * 40)
    with deterministic():
        for _ in range(2):
            out = run.step.scan(*stack(batches))
            assert out.loss.shape == (40,)
            assert out.skipped.shape == (40,)
            out = run.step.window(*stack(batches[:20]))
            assert out.skipped.shape == ()
    assert run.step.report().launches == 2 + 2 * 3


@pytest.mark.slow
def test_a_window_within_scans() -> None:
    """Scan, window and single calls may follow each other; each finds its own graphs."""
    batches = make_batches("cpu", [4] * 66)
    with deterministic():
        states = []
        for together in (False, True):
            run = Run(("cpu", "emulate" if together else "off"), accumulate=3, schedule=SCHEDULES["step"])
            left = iter(batches)
            for how, count in (("window", 3), ("scan", 15), ("", 3), ("window", 3), ("scan", 18), ("window", 3)):
                given = [next(left) for _ in range(count)]
                if how and together:
                    getattr(run.step, how)(*stack(given))
                else:
                    for batch in given:
                        run.step(*batch)
            states.append(run.state())
    assert_same(*states)
    report = run.step.report()
    assert (report.launches, report.scanned) == (3, 1 + 6 + 1)
