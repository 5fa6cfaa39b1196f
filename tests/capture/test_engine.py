"""The engine around a step: a graph per layout and which one goes, guards, inputs, verification, teardown."""

import gc
import itertools
import random
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    ENGINES,
    OPTIMIZERS,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    training_state,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit
from ampkit._capture.compare.verify import Comparisons, Verdict, Verifier
from ampkit._capture.ranks.ranks import Ranks
from ampkit._capture.state.state import TrainingState

Engine = tuple[str, str]

ALONE = Ranks(None, torch.device("cpu"))


def make(engine: Engine, graph: str | None = None, **options: Any) -> tuple[ampkit.GraphedStep, Any, Any]:
    model = options.pop("model", None) or make_net(engine[0])
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    options = {"policy": "float32", "on_failure": "raise", "graph": graph or engine[1], **options}
    return (
        ampkit.graphed_step(options.pop("loss_fn", boosted_loss), model, optimizer, **options, host_writes="ignore"),
        model,
        optimizer,
    )


def layouts(step: ampkit.GraphedStep) -> list[int]:
    """Return the batch sizes that have a graph, the least recently used first."""
    return [int(graph.layout[1:].split(",")[0]) for graph in step.report().per_graph]


# ----------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_layouts_called_alternately(engine: Engine) -> None:
    """G10, G4: three shapes share one pool. In changing order, every call leaves eager's bits."""

    def run(graph: str) -> list[Any]:
        step, model, optimizer = make(engine, graph, policy="float16")
        sizes = [(16, 5, 9)[(i * i + i // 5) % 3] for i in range(60)]
        torch.manual_seed(5)
        history = []
        for batch in make_batches(engine[0], sizes, overflow_at=(30, 41)):
            out = step(*batch)
            history.append((out._asdict(), training_state(model, optimizer, step.scaler)))
        if graph != "off":
            assert (step.captures, step.replays) == (3, 60 - 9)
        return history

    with deterministic():
        assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", ["dtype", "stride", "tree", "constant"])
@pytest.mark.quick(2)
def test_another_layout_is_another_graph(engine: Engine, change: str) -> None:
    """G10: a changed dtype, stride, tree or constant has a warm-up and a capture of its own; the first graph stays."""

    def loss_fn(model: nn.Module, x: Tensor, more: Any = None, scale: float = 1.0) -> Tensor:
        return model(x.float()).square().mean() * scale + (0.0 if more is None else more["y"].mean())

    torch.manual_seed(0)
    step, _, _ = make(engine, model=nn.Linear(6, 6).to(engine[0]), loss_fn=loss_fn)
    x = torch.randn(6, 6, device=engine[0])
    other: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "dtype": ((x.double(),), {}),
        "stride": ((x.t(),), {}),
        "tree": ((x, {"y": x}), {}),
        "constant": ((x,), {"scale": 2.0}),
    }
    args, kwargs = other[change]
    for _ in range(4):
        step(x)
    for _ in range(4):
        step(*args, **kwargs)
    step(x)
    assert (step.captures, step.replays) == (2, 3)
    assert step.report().eager == {"warm-up": 6}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_least_recently_used_graph_goes(engine: Engine) -> None:
    """G10: with more shapes than max_graphs, the least recently used graph is dropped. Its shape is captured again."""
    step, _, _ = make(engine, max_graphs=2)
    for size in (4, 4, 4, 4, 6, 6, 6, 6, 4, 8, 8, 8):
        step(*make_batches(engine[0], [size])[0])
    assert layouts(step) == [6, 4]
    step(*make_batches(engine[0], [8])[0])
    assert layouts(step) == [4, 8]
    report = step.report()
    assert (report.captures, report.evictions, report.graphs) == (3, 1, 2)
    for _ in range(6):  # twice the warm-up, so that shapes that take turns are not captured in every round
        step(*make_batches(engine[0], [6])[0])
    assert step.captures == 3
    with pytest.warns(ampkit.CaptureWarning, match="dropped to make room for others is captured again.*max_graphs"):
        step(*make_batches(engine[0], [6])[0])
    assert layouts(step) == [8, 6]
    assert step.report().eager == {"warm-up": 9, "warm-up again: its graph made room for another": 6}


@pytest.mark.slow
def test_a_budget_below_one_graph() -> None:
    """A layout whose graph alone is over memory_budget trains eagerly, others that fit are captured."""
    step, _, _ = make(("cpu", "emulate"), memory_budget=4096)
    small, large = make_batches("cpu", [2, 64])
    for _ in range(4):
        step(*small)
    for _ in range(3):
        step(*large)
    with pytest.warns(ampkit.CaptureWarning, match=r"its graph takes \d+ bytes, memory_budget is 4096"):
        step(*large)
    for _ in range(4):
        step(*large)
        step(*small)
    report = step.report()
    assert layouts(step) == [2]
    assert report.bytes <= 4096
    assert sum(count for reason, count in report.eager.items() if "memory_budget" in reason) == 5


@pytest.mark.cuda
def test_memory_budget_on_the_device() -> None:
    """G10: pool and buffers stay within the budget: graphs and their pool are dropped, and steps stay right."""

    def run(graph: str, budget: int | None, sizes: list[int]) -> tuple[list[Any], ampkit.Report]:
        step, model, optimizer = make(("cuda", graph), memory_budget=budget)
        torch.manual_seed(5)
        history = []
        for batch in make_batches("cuda", sizes):
            step(*batch)
            if budget is not None:
                assert step.report().bytes <= budget
            history.append(training_state(model, optimizer, step.scaler))
        return history, step.report()

    with deterministic():
        sizes = [256] * 6 + [512] * 6 + [256, 512] * 6
        eager, _ = run("off", None, sizes)
        free, report = run("auto", None, sizes)
        assert_same(eager, free)
        assert report.graphs == 2
        alone = run("auto", None, [512] * 4)[1].bytes
        assert alone < report.bytes
        within, report = run("auto", alone, sizes)
        assert_same(eager, within)
        assert report.graphs == 1
        assert report.evictions > 0


# ------------------------------------------------------------------------------------------------------------ guards


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_settings_that_change_back_find_their_graph(engine: Engine) -> None:
    """train(), eval() and the caller's autocast have a graph each, captured once however often they alternate."""
    step, model, _ = make(engine, policy=None)
    batch = make_batches(engine[0], [8])[0]
    for _ in range(4):
        step(*batch)
    model.eval()
    with pytest.warns(ampkit.CaptureWarning, match="train/eval mode"):
        step(*batch)
    for _ in range(3):
        step(*batch)
    assert (step.captures, step.replays) == (2, 2)
    for i in range(6):
        model.train(i % 2 == 0)
        step(*batch)
    with torch.autocast(engine[0], dtype=torch.bfloat16):
        for _ in range(4):
            step(*batch)
    step(*batch)
    assert (step.captures, step.replays) == (3, 2 + 6 + 1 + 1)


# ------------------------------------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_changed_in_place(engine: Engine) -> None:
    """G11: if loss_fn changes a batch in place, the caller's tensors change, in replays as in eager calls."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5).add_(1)
        return F.mse_loss(model(x), y)

    def run(graph: str) -> list[Tensor]:
        torch.manual_seed(0)
        step, _, _ = make(engine, graph, model=nn.Linear(4, 4).to(engine[0]), loss_fn=loss_fn)
        x, y = torch.ones(2, 4, device=engine[0]), torch.zeros(2, 4, device=engine[0])
        history = []
        for _ in range(8):
            history += [step(x, y).loss, x.clone(), y.clone()]
        assert step.replays == (5 if graph != "off" else 0)
        return history

    assert_same(run("off"), run(engine[1]))


def test_memory_that_two_inputs_share() -> None:
    """G11: a tensor that is passed twice has two buffers. If the step changes one of them in place, it is an error."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, change: bool) -> Tensor:
        if change:
            x.add_(0.5)
        return F.mse_loss(model(x), y)

    step, _, _ = make(("cpu", "emulate"), model=nn.Linear(4, 4), loss_fn=loss_fn)
    for _ in range(6):
        x = torch.ones(2, 4)
        step(x, x, change=False)
    for _ in range(6):
        step(torch.ones(2, 4), torch.ones(2, 4), change=True)
    with pytest.raises(
        ampkit.InputMismatch, match=r"batch\[0\], which the step changes .*memory as batch\[1\].*clone\(\)"
    ):
        step(x, x, change=True)
    with pytest.raises(ampkit.InputMismatch, match="lies in the same memory"):
        step(x, x.view(-1).view(2, 4), change=True)
    assert torch.equal(x, torch.ones(2, 4))
    both, calls = torch.ones(2, 2, 4), step.replays
    step(both[0], both[1], change=True)  # side by side
    assert (step.replays, both[:, 0, 0].tolist()) == (calls + 1, [1.5, 1.0])


def test_what_a_batch_held_is_not_kept() -> None:
    """A batch may contain other objects of the user's in each call. A step that is closed keeps none of them alive."""

    class Held:
        pass

    step, _, _ = make(("cpu", "emulate"), model=nn.Linear(4, 4), loss_fn=lambda m, x, y, held: F.mse_loss(m(x), y))
    alive = []
    for _ in range(6):
        held = Held()
        alive.append(weakref.ref(held))
        step(torch.ones(2, 4), torch.ones(2, 4), held)
    del held
    step.close()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 6


@pytest.mark.slow
def test_warm_up_again_is_of_what_was_warm() -> None:
    """G8: after a change of settings, the warm-up of a new input is counted as its first one."""
    step, model, _ = make(("cpu", "emulate"), on_failure="eager")
    for batch in make_batches("cpu", [8] * 5):
        step(*batch)
    model.eval()
    with pytest.warns(ampkit.CaptureWarning, match="train/eval mode"):
        step(*make_batches("cpu", [8])[0])
    for batch in make_batches("cpu", [8] * 4 + [6] * 5):
        step(*batch)
    assert step.report().eager == {"warm-up": 6, "warm-up again: train/eval mode or requires_grad changed": 3}


@pytest.mark.parametrize("engine", ENGINES)
def test_odd_things_inside_a_step(engine: Engine) -> None:
    """G11: a step may make constants, resize a tensor, write to overlapping views and ignore inputs."""

    def loss_fn(model: nn.Module, x: Tensor, unused: Tensor) -> Tensor:
        ramp = torch.arange(4.0, device=x.device).flip(0) + torch.full((), 2.0, device=x.device)
        grown = torch.empty(0, device=x.device)
        with torch.no_grad():
            grown.resize_(x.shape).copy_(x * 3)
            windows = torch.zeros(x.shape[0] + 1, 4, device=x.device)
            first, second = windows[:-1], windows[1:]  # they overlap
            first.add_(x)
            second.add_(first.clone())
        return (model(ramp + windows[1:]) * grown).square().mean()

    def run(graph: str) -> list[Any]:
        torch.manual_seed(0)
        step, model, optimizer = make(engine, graph, model=nn.Linear(4, 4).to(engine[0]), loss_fn=loss_fn)
        x = torch.arange(12.0, device=engine[0]).reshape(3, 4) / 12
        history = []
        for i in range(8):
            out = step(x + i, torch.empty(0, device=engine[0]))
            history.append((out.loss, training_state(model, optimizer, step.scaler)))
        assert step.replays == (5 if graph != "off" else 0)
        return history

    with deterministic():
        assert_same(run("off"), run(engine[1]))


@pytest.mark.cuda
def test_a_scalar_on_the_host_is_refused() -> None:
    """G11: a 0-dim CPU tensor in the batch would be frozen into the graph: InputMismatch with the remedy."""
    step, _, _ = make(("cuda", "auto"), loss_fn=lambda m, x, s: (m(x) * s).mean(), model=nn.Linear(4, 4).cuda())
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[1\] is on cpu, but the model is on cuda:0. Move it with"):
        step(torch.ones(2, 4, device="cuda"), torch.tensor(2.0))


@pytest.mark.parametrize("graph", ["off", None])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_param_group_that_goes(engine: Engine, graph: str | None) -> None:
    """The parameters of a removed group no longer change. The others get a new graph, and eager calls go on too."""
    model = make_net(engine[0])
    groups = [{"params": model.conv.parameters()}, {"params": model.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1, fused=True)
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="float32", graph=graph or engine[1], host_writes="ignore"
    )
    batches = make_batches(engine[0], [8] * 10)
    for batch in batches[:5]:
        step(*batch)
    del optimizer.param_groups[1]
    frozen, moving = model.head.weight.detach().clone(), model.conv.weight.detach().clone()
    with pytest.warns(ampkit.CaptureWarning, match="added or removed") if graph is None else nullcontext():
        for batch in batches[5:]:
            step(*batch)
    assert torch.equal(model.head.weight, frozen)
    assert not torch.equal(model.conv.weight, moving)
    assert step.captures == (2 if graph is None else 0)


def _begin_anew(optimizer: torch.optim.Optimizer) -> None:
    for kept in optimizer.state.values():
        kept.update({name: torch.zeros_like(value) for name, value in kept.items() if name != "step"})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("says", "change"), [("cleared", lambda o: o.state.clear()), ("another tensor", _begin_anew)])
def test_moments_that_begin_anew(says: str, change: Callable[[Any], None], engine: Engine) -> None:
    """R5: the next steps are those of an eager loop. No graph uses the old moments."""

    def run(graph: str | None) -> Any:
        step, model, optimizer = make(engine, graph)
        torch.manual_seed(5)
        for i, batch in enumerate(make_batches(engine[0], [8] * 14)):
            if i == 6:
                change(optimizer)
            with pytest.warns(ampkit.CaptureWarning, match=says) if i == 6 and graph is None else nullcontext():
                step(*batch)
        assert step.captures == (2 if graph is None else 0)
        return training_state(model, optimizer, step.scaler)

    with deterministic():
        assert_same(run("off"), run(None))


@pytest.mark.parametrize("engine", ENGINES)
def test_scripted_modules_are_refused(engine: Engine) -> None:
    """A torch.jit.ScriptModule hides its parameters' places; the message says what to pass instead."""
    with pytest.warns((FutureWarning, DeprecationWarning), match=r"torch\.jit\.script"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(ampkit.CaptureError, match=r"model\.0 is a torch\.jit\.ScriptModule.*Pass the module itself"):
        make(engine, model=nn.Sequential(scripted).to(engine[0]))


# ------------------------------------------------------------------------------------------------------ verification


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_verify_passes_and_changes_nothing(engine: Engine, policy: str) -> None:
    """With verify=3 a right step is found right three times, and the trajectory is the same bit by bit."""

    def run(graph: str, verify: int) -> list[Any]:
        step, model, optimizer = make(engine, graph, policy=policy, verify=verify, accumulate=2)
        torch.manual_seed(5)
        history = []
        for batch in make_batches(engine[0], [8] * 16, overflow_at=(7,)):
            out = step(*batch)
            history.append((out._asdict(), training_state(model, optimizer, step.scaler)))
        assert step.replays == (10 if graph != "off" else 0)
        said = step.report().verified
        if not verify:
            assert said is None
        else:
            assert said is not None
            assert re.fullmatch(r"3 replays compared with .* \(up to \d\d tensors each: .*\); bit for bit equal", said)
            assert f"  verify: {said}" in str(step.report())
        return history

    with deterministic():
        assert_same(run("off", 0), run(engine[1], 3))


class Counting(nn.Module):
    """A model that depends on something that a replay does not see, or that no module declares."""

    def __init__(self, kind: str, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.kind = kind
        self.holder = [torch.zeros((), device=device)]  # in a list: no attribute, no buffer
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.kind == "host":
            return self.linear(x) * self.calls
        self.holder[0].mul_(0.5).add_(x.mean())
        return self.linear(x) * self.holder[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "host",
            r"(model\.linear\.weight|output\.output\.loss) is not what eager computes: it differs by .*on the host",
        ),
        ("undeclared", r"writes to a tensor of shape \(\) and dtype torch.float32 that it does not declare.*buffer of"),
    ],
)
def test_verify_finds_what_a_replay_misses(engine: Engine, kind: str, says: str) -> None:
    """A Python counter or a tensor outside of the modules is named. Then calls are eager, or it raises."""
    x = torch.ones(2, 4, device=engine[0])
    # An emulated graph runs the Python code again. Deterministic algorithms tell it from a kernel that makes noise.
    emulated = deterministic() if engine[1] == "emulate" else nullcontext()
    with emulated:
        for on_failure in ("eager", "raise"):
            torch.manual_seed(0)
            model = Counting(kind, engine[0]).to(engine[0])
            step, _, _ = make(
                engine, model=model, loss_fn=lambda m, x: m(x).square().mean(), verify=1, on_failure=on_failure
            )
            for _ in range(3):
                step(x)
            assert step.report().verified == "no replay was compared so far"
            if on_failure == "raise":
                with pytest.raises(ampkit.CaptureError, match=says):
                    step(x)
            else:
                with pytest.warns(ampkit.CaptureWarning, match=says):
                    step(x)
                step(x)
                assert (step.replays, step.report().graphs) == (1, 0)
                assert any(reason.startswith("verify: ") for reason in step.report().eager)
            assert re.search(
                f"1 replay compared with .*; the last one differed: .*{says}", step.report().verified or ""
            )
    if kind == "undeclared":
        torch.testing.assert_close(model.holder[0].cpu(), torch.tensor(1.875))  # four steps, not five


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_verify_raises_for_was_done(accumulate: int) -> None:
    """If `verify` raises, window and schedule have gone on, and the next call is the next step."""

    def run(graph: str) -> tuple[Any, float, list[str]]:
        torch.manual_seed(0)
        model = Counting("undeclared", "cpu")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        options = {"on_failure": "raise", "accumulate": accumulate, "scheduler": scheduler, "graph": graph}
        verify = 2 * (graph == "emulate")
        step = ampkit.graphed_step(
            lambda m, x: m(x).square().mean(),
            model,
            optimizer,
            policy="float32",
            verify=verify,
            **options,
            host_writes="ignore",
        )
        raised = []
        for _ in range(8):
            try:
                step(torch.ones(2, 4))
            except ampkit.CaptureError as error:
                raised.append(str(error))
        return model.state_dict(), optimizer.param_groups[0]["lr"], raised

    (expected, rate, _), (ours, same_rate, raised) = run("off"), run("emulate")
    assert (len(raised), same_rate) == (1, rate)
    assert raised[0].endswith("This step was done, as eager computes it.")
    torch.testing.assert_close(ours, expected)


def test_bits_that_verify_measures_as_equal() -> None:
    """Other bits are a difference, also in imaginary parts, integers beyond 2**53 and the sign of zero."""
    module = nn.Module()
    kinds = {
        "complex": (torch.tensor([1.0 + 2.0j]), torch.tensor([1.0 + 3.0j])),
        "integer": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
        "zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    }
    for left, right in kinds.values():
        verdict = Verifier(TrainingState({"m": module}, []), (), ALONE).compare(left.clone, right.clone)
        assert "output is not what eager computes" in verdict.problem


def sparse(indices: list[int], values: Tensor, size: int = 4) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([indices], device=values.device), values, (size,))


OTHER_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda x: sparse([3, 0], x[0, :2]),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((1, 2)),
    "bsc": lambda x: x.to_sparse_bsc((1, 2)),
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # prototypes, says torch
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_verify_compares_other_layouts(layout: str) -> None:
    """Aux of another layout passes where it is right; where one value differs, its part is named."""
    make_other = OTHER_LAYOUTS[layout]
    torch.manual_seed(0)
    step, _, _ = make(
        ("cpu", "emulate"),
        model=nn.Linear(4, 4),
        loss_fn=lambda m, x: ((y := m(x)).square().mean(), make_other(y.detach())),
        verify=2,
        on_failure="raise",
    )
    x = torch.randn(2, 4)
    for _ in range(6):
        out = step(x)
    assert step.replays == 3
    assert out.aux.layout is make_other(x).layout
    other = x + torch.eye(2, 4)
    verdict = Verifier(TrainingState({}, []), (), ALONE).compare(lambda: make_other(x), lambda: make_other(other))
    named = {"mkldnn": "output", "nested": "output (component 0)", "jagged": "output (component 0)"}
    named["quantized"] = "output (integers)"
    assert f"{named.get(layout, 'output (values)')} is not what eager computes" in verdict.problem


def test_verify_compares_where_sparse_values_are() -> None:
    """The same values at other places, and in a larger tensor, are a difference."""
    values = torch.ones(2)
    others = {"indices": sparse([0, 2], values), "shape": sparse([0, 1], values, 5)}
    for part, other in others.items():
        ours = sparse([0, 1], values)
        verdict = Verifier(TrainingState({}, []), (), ALONE).compare(ours.clone, other.clone)
        assert f"output ({part}) is not what eager computes" in verdict.problem


@pytest.mark.slow
def test_compiled_code_runs_on_behind_verify(fresh_dynamo: None) -> None:
    """If torch has once refused to run compiled code under a mode, it never runs that code again."""
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    model = make_net("cpu").eval()
    compiled = torch.compile(model, backend=backend)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = ampkit.graphed_step(
        lambda m, x, y, _: F.cross_entropy(m(x), y),
        compiled,
        optimizer,
        policy="float32",
        verify=2,
        graph="emulate",
        host_writes="ignore",
    )
    counts = []
    for batch in make_batches("cpu", [8] * 8):
        before = len(calls)
        step(*batch)
        counts.append(len(calls) - before)
    assert min(counts) >= 1
    assert step.replays == 5


class Noisy:
    """A step on one buffer. Its last bits have noise, and the host chooses a factor."""

    def __init__(self, noise: float, host: Callable[[], float]) -> None:
        self.module = nn.Module()
        self.module.register_buffer("total", torch.zeros(4))
        self.state = TrainingState({"model": self.module}, [])
        self.rng = random.Random(0)
        self.noise, self.host, self.replays = noise, host, 0

    def replay(self) -> Tensor:
        self.replays += 1
        return self.add(1.0)  # what the host said at the capture

    def eager(self) -> Tensor:
        return self.add(self.host())

    def add(self, value: float) -> Tensor:
        total = self.module.get_buffer("total")
        return total.add_(torch.full((4,), value) * (1 + self.noise * self.rng.uniform(-1, 1))).clone()


COUNTER, CLOCK, NUMPY = itertools.count(2), itertools.count(), np.random.default_rng(0)


@pytest.mark.parametrize(
    ("host", "noise", "right"),
    [
        (lambda: 1.0, 1e-6, True),
        (lambda: 1.0, 1e-1, True),
        (lambda: float(next(COUNTER)), 1e-6, False),
        (lambda: 1.0 + NUMPY.random(), 1e-6, False),
        (lambda: 1.0 + 1e-3 * next(CLOCK), 1e-6, False),  # the first eager step agrees with the capture
        (lambda: float(next(COUNTER)), 0.0, False),
    ],
    ids=["noise", "much noise", "counter", "random numbers of numpy", "clock", "counter without noise"],
)
def test_verify_tells_noise_of_kernels_from_state_of_the_host(
    host: Callable[[], float], noise: float, right: bool
) -> None:
    """A difference as large as between replays is allowed. A larger one comes from the host."""
    step = Noisy(noise, host)
    verdict = Verifier(step.state, (), ALONE).compare(step.replay, step.eager)
    assert bool(verdict.problem) == (not right), verdict
    assert bool(verdict.noise) == bool(noise)
    if not right:
        assert re.match(r"output is not what eager computes: .*and 1 more tensors do\..* on the host", verdict.problem)
    assert step.replays <= (3 if right else 9)


def test_verify_looks_for_the_host_tensor_by_tensor() -> None:
    """Noise in one tensor does not excuse a difference in another tensor that is equal in all replays."""
    module, rng, counter = nn.Module(), random.Random(0), itertools.count(2)
    module.register_buffer("noisy", torch.zeros(4))
    module.register_buffer("counted", torch.zeros(4))

    def step(value: float) -> None:
        module.get_buffer("noisy").fill_(rng.random())
        module.get_buffer("counted").fill_(value)

    verifier = Verifier(TrainingState({"model": module}, []), (), ALONE)
    verdict = verifier.compare(lambda: step(1.0), lambda: step(1.0 + 1e-6 * next(counter)))
    assert verdict.problem.startswith("model.counted is not what eager computes")
    assert verdict.noise.startswith("replays differ from each other by up to")
    assert "(model.noisy)" in verdict.noise
    compared = Comparisons()
    compared.note(verdict._replace(problem=""))
    compared.note(Verdict(None, tensors=2))
    compared.note(Verdict(None, skipped="there is no memory"))
    assert str(compared).startswith("2 replays compared with eager calls from the same state (up to 2 tensors each: ")
    assert "; equal, 1 of them within what replays differ from each other by; 1 not compared" in str(compared)


def test_verify_allows_no_difference_under_deterministic_algorithms() -> None:
    """If torch refuses kernels that make noise, no difference is excused; if it only warns of them, noise is."""
    step = Noisy(1e-6, lambda: 1.0)
    with deterministic():
        verdict = Verifier(step.state, (), ALONE).compare(step.replay, step.eager)
        assert "is not what eager computes" in verdict.problem
        assert (verdict.noise, step.replays) == ("", 1)
        torch.use_deterministic_algorithms(True, warn_only=True)
        verdict = Verifier(step.state, (), ALONE).compare(step.replay, step.eager)
        assert (verdict.problem, bool(verdict.noise)) == ("", True)


def sum_by_atomics(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
    """A loss whose last bits depend on the order in which threads of the device come."""
    return torch.zeros(4, 4, device="cuda").index_add_(0, index, model(x)).square().mean()


@pytest.mark.cuda
def test_verify_allows_the_noise_of_replays() -> None:
    """Kernels that add in any order differ from themselves: the comparison says so and allows for it."""
    torch.manual_seed(0)
    x, index = torch.randn(1 << 16, 4, device="cuda"), torch.randint(4, (1 << 16,), device="cuda")
    step, _, _ = make(("cuda", "auto"), model=nn.Linear(4, 4).cuda(), loss_fn=sum_by_atomics, verify=2)
    for _ in range(3):
        step(x, index)
    with pytest.warns(ampkit.CaptureWarning, match="verify: replays differ from each other by up to .* deterministic"):
        step(x, index)
    step(x, index)
    assert step.report().graphs == 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["counter", "random numbers of numpy"])
def test_verify_finds_state_of_the_host_behind_noise(kind: str) -> None:
    """Kernels that add in any order do not excuse a Python counter, nor a host's generator that nothing watches."""
    torch.manual_seed(0)
    counter, rng = itertools.count(1), np.random.default_rng(0)
    x, index = torch.randn(1 << 16, 4, device="cuda"), torch.randint(4, (1 << 16,), device="cuda")

    def loss_fn(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        return sum_by_atomics(model, x, index) * (next(counter) if kind == "counter" else 1.0 + rng.random())

    step, _, _ = make(("cuda", "auto"), model=nn.Linear(4, 4).cuda(), loss_fn=loss_fn, verify=1, on_failure="eager")
    for _ in range(3):
        step(x, index)
    with pytest.warns(ampkit.CaptureWarning) as told:
        step(x, index)
    said = [str(one.message) for one in told]
    # Whichever looks first: the comparison of the capture with a warm-up call, or `verify`.
    assert any("is not what eager computes" in text for text in said) or not step.report().captures, said
    assert step.report().graphs == 0


# -------------------------------------------------------------------------------------------------------- after_step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_average_of_the_weights_is_captured(engine: Engine, accumulate: int) -> None:
    """`after_step` may update torch's AveragedModel. It is called once per optimizer step and leaves torch's bits."""

    def run(graph: str) -> tuple[Any, Any, Any]:
        model = make_net(engine[0])
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        by_hand = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        step, _, _ = make(
            engine, graph, model=model, after_step=averaged.update_parameters, accumulate=accumulate, verify=1
        )
        torch.manual_seed(5)
        for i, batch in enumerate(make_batches(engine[0], [8] * 12)):
            step(*batch)
            if (i + 1) % accumulate == 0:
                by_hand.update_parameters(model)
        assert step.replays == ({1: 9, 2: 6}[accumulate] if graph != "off" else 0)
        return averaged.state_dict(), by_hand.state_dict(), model.state_dict()

    with deterministic():
        averaged, by_hand, model = run(engine[1])
        assert_same(dict(averaged), dict(by_hand))
        assert_same(dict(averaged), dict(run("off")[0]))
        assert not torch.equal(averaged["module.head.weight"], model["head.weight"])
        assert averaged["n_averaged"] == 12 // accumulate


@pytest.mark.parametrize("engine", ENGINES)
def test_a_constraint_on_weights(engine: Engine) -> None:
    """`after_step` may be any function of the model, called without gradients. This one keeps weights within a box."""

    def clamp(model: Any) -> None:
        model.head.weight.clamp_(-0.01, 0.01)

    step, model, _ = make(engine, after_step=clamp)
    for batch in make_batches(engine[0], [8] * 6):
        step(*batch)
        assert model.head.weight.abs().max() <= 0.01
    assert step.replays == 3


# ---------------------------------------------------------------------------------------------------------- teardown


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_a_context(engine: Engine) -> None:
    """Leaving the with block releases the graphs; the step goes on if it is called again."""
    step, _, _ = make(engine)
    batches = make_batches(engine[0], [8] * 4)
    with step as same:
        assert same is step
        for batch in batches:
            step(*batch)
        assert step.report().graphs == 1
    assert (step.report().graphs, step.report().bytes) == (0, 0)
    step(*batches[0])
    assert step.report().eager == {"warm-up": 4}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_is_collected(engine: Engine) -> None:
    """No reference cycle keeps a step, its graphs or its model alive: the last reference releases them at once."""
    gc.collect()
    gc.disable()
    try:
        step, model, _ = make(engine)
        for batch in make_batches(engine[0], [8] * 4):
            step(*batch)
        gone = [weakref.ref(step), weakref.ref(model)]
        del step, model, _
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
