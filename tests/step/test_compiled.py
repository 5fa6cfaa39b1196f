"""`graphed_step(compile=...)`: what is compiled, the same bits captured and uncaptured, and what follows a failure."""

import gc
import inspect
import math
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import every, few
from harness import (
    COMPILER,
    ENGINES,
    OPTIMIZERS,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    marked_line,
    training_state,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit
from ampkit._step.compile.compiled import CompiledTrainingStep

Engine = tuple[str, str]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def trajectory(
    engine: Engine,
    graph: str,
    *,
    optimizer: str = "adamw",
    sizes: tuple[int, ...] = (8,) * 5,
    overflow_at: tuple[int, ...] = (),
    schedule: bool = False,
    dropout: float = 0.3,
    loss_fn: Callable[..., Any] = boosted_loss,
    compile: str | None = "default",
    **options: Any,
) -> tuple[list[Any], ampkit.GraphedStep]:
    """Return what each step left and returned."""
    model = make_net(engine[0], dropout=dropout)
    made = OPTIMIZERS[optimizer](model.parameters())
    if schedule:
        options["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    average = None
    if options.pop("ema", False):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        options["after_step"] = average.update_parameters
    options = {"policy": "bfloat16", "on_failure": "raise", **options}
    step = ampkit.graphed_step(loss_fn, model, made, graph=graph, compile=compile, **options)
    torch.manual_seed(5)
    history = []
    for batch in make_batches(engine[0], list(sizes), overflow_at):
        out = step(*batch)
        history.append((out._asdict(), training_state(model, made, step.scaler)))
    if average is not None:
        history.append({name: value.clone() for name, value in average.state_dict().items()})
    assert all(param.dtype is torch.float32 for param in model.parameters())
    return history, step


CASES: dict[str, dict[str, Any]] = {
    "bfloat16, clip, schedule": {"max_norm": 0.1, "schedule": True},
    "float16, overflow, clip": {"policy": "float16", "max_norm": 1.0, "overflow_at": (2, 4), "sizes": (8,) * 6},
    "two layouts": {"sizes": (8, 8, 8, 8, 6, 6, 6, 6, 8, 6), "max_norm": 1.0},
    "accumulate": {"accumulate": 2, "sizes": (8,) * 9, "max_norm": 1.0},
    "average": {"ema": True},
    "momentum": {"optimizer": "sgd", "schedule": True},
    "autocast of the caller": {"policy": None},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", few(CASES, ("float16, overflow, clip", "accumulate")))
@pytest.mark.usefixtures("fast")
@pytest.mark.sampled(4)
def test_captured_as_uncaptured(engine: Engine, case: str) -> None:
    """R11: a captured compiled step has the bits of the same compiled step uncaptured, dropout included."""
    with deterministic():
        eager, plain = trajectory(engine, "off", **CASES[case])
        graphed, step = trajectory(engine, engine[1], **CASES[case])
    assert_same(eager, graphed)
    assert (plain.replays, step.replays > 0) == (0, True)
    for each in (plain, step):
        compiled = [line for line in each.report().compiled if line.startswith("compiled")]
        assert [part in text for part, text in zip(("forward", "update"), compiled, strict=True)] == [True, True]


ON_GPU = pytest.mark.cuda
INDUCTOR = [  # Inductor has no kernels to choose from on a CPU
    pytest.param(("cpu", "emulate"), "default", "bfloat16", marks=pytest.mark.seeds),
    pytest.param(("cpu", "emulate"), "default", "float16"),
    pytest.param(("cuda", "auto"), "default", "bfloat16", marks=ON_GPU),
    pytest.param(("cuda", "auto"), "default", "float16", marks=ON_GPU),
    pytest.param(("cuda", "auto"), "max", "bfloat16", marks=ON_GPU),
    pytest.param(("cuda", "auto"), "max", "float16", marks=ON_GPU),
]


@pytest.mark.cuda
@pytest.mark.slow
def test_kernels_that_are_timed_in_a_watched_call() -> None:
    """Inductor times kernels in the first run of compiled code, which waits; steps in windows watch such a call."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", accumulate=4, compile="default")
    x, y = torch.randn(512, 2048, device="cuda"), torch.arange(512, device="cuda") % 10
    for _ in range(20):
        step(x, y)
    assert step.report().outcome == "whole", str(step.report())


def asking_inductor(when: str, asked: list[str]) -> Callable[..., Any]:
    """Return a compiler that asks the device: `when` it compiles, or in the first run of its code."""

    def ask() -> None:
        asked.append(when)
        flags = torch.ones(4, dtype=torch.bool)
        if flags.all() and flags.sum() > 3 and flags[0].item():
            numbers = torch.tensor([flags.sum(), flags.sum()]), torch.tensor([flags.sum(), 1.0])
            torch.zeros(flags.sum())[flags[:4]].tolist(), flags.nonzero(), numbers

    def compiled(graph: Any, inputs: Any, config_patches: Any) -> Callable[..., Any]:
        made, left = aot_eager(graph, inputs), [ask]
        if when == "while it compiles":
            left.pop()()

        def run(*args: Any) -> Any:
            if left:
                left.pop()()
            return made(*args)

        return run

    return compiled


@pytest.mark.parametrize("when", ["while it compiles", "in the first run"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_what_the_compiler_asks_the_device(when: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor asks what is in constants that it folds, and where it times kernels; later calls ask nothing there."""
    file = f"{Path(torch.__file__).parent}/_inductor/asking.py"
    exec(
        compile(inspect.getsource(asking_inductor), file, "exec"), scope := {**globals(), "__name__": "torch._inductor"}
    )
    asked: list[str] = []
    monkeypatch.setattr(COMPILER, lambda: scope["asking_inductor"](when, asked))
    with deterministic():
        eager, _ = trajectory(("cpu", "emulate"), "off", accumulate=accumulate, sizes=(8,) * 8 * accumulate)
        asked.clear()
        graphed, step = trajectory(("cpu", "emulate"), "emulate", accumulate=accumulate, sizes=(8,) * 8 * accumulate)
    assert_same(eager, graphed)
    assert asked
    assert step.replays >= 4 * accumulate
    assert step.report().outcome == "whole", str(step.report())
    assert "questions" not in str(step.report())


@pytest.mark.parametrize(("engine", "mode", "policy"), INDUCTOR)
@pytest.mark.slow
def test_with_inductor(engine: Engine, mode: str, policy: str) -> None:
    """R11: with Inductor's own kernels a captured step has the bits of the uncaptured one, and nearly eager's losses.

    Compiled code rounds at other places. A bfloat16 has 8 bits, so that a rounding moves a logit by up to 2**-9 of
    itself. The logits here are below 2, three layers round, and the loss has a slope of at most 2 in them: 2 * 2 * 3 *
    2**-9 is below 0.03. Dropout is off, because Inductor draws other random numbers.
    """
    overflow_at = (3,) if policy == "float16" else ()
    options: dict[str, Any] = {"max_norm": 1.0, "dropout": 0.0, "policy": policy, "overflow_at": overflow_at}
    with deterministic():
        eager, _ = trajectory(engine, "off", compile=mode, **options)
        graphed, step = trajectory(engine, engine[1], compile=mode, **options)
        uncompiled, _ = trajectory(engine, "off", compile=None, **options)
    assert_same(eager, graphed)
    assert step.replays == 2
    assert step.report().compile_s > 0
    for (ours, _), (theirs, _) in zip(graphed, uncompiled, strict=True):
        assert ours["skipped"].item() == theirs["skipped"].item()
        if ours["loss"].isfinite():
            assert abs(ours["loss"].item() - theirs["loss"].item()) < 0.03


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("policy", [pytest.param("bfloat16", marks=pytest.mark.seeds), "float16"])
@pytest.mark.slow
def test_later_steps_compile_nothing(policy: str) -> None:
    """R11: neither a scheduler that sets another rate in each step, nor a skipped step, costs a compilation."""
    model = make_net("cpu")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy=policy, max_norm=1.0, scheduler=schedule, graph="off", compile="default"
    )
    graphs = []
    for batch in make_batches("cpu", [8] * 8, overflow_at=(5,)):
        step(*batch)
        graphs.append(step._window._step.compiler.graphs)
    assert graphs[0] == 0 < graphs[1], "the second call compiles"
    assert graphs[1] == graphs[-1]
    assert (step.skipped > 0) == (policy == "float16")


@pytest.mark.parametrize("compile", ["default", pytest.param("max", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_which_reductions_share_a_kernel(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: those of the update do; those of the loss only where block sizes are timed."""
    apart: dict[str, set[bool]] = {"loss": set(), "update": set()}

    def noted(graph: Any, inputs: Any, config_patches: dict[str, Any]) -> Any:
        part = "loss" if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inputs) else "update"
        if {node.target for node in graph.graph.nodes if node.op.startswith("call")} != {"copy_"}:
            apart[part].add(config_patches.get("combo_kernels_pointwise_only", False))
        assert config_patches["combo_kernels"]
        assert set(config_patches) <= set(inductor_config.get_config_copy())
        return aot_eager(graph, inputs)

    monkeypatch.setattr(COMPILER, lambda: noted)
    trajectory(("cpu", "off"), "off", policy="bfloat16", max_norm=1.0, compile=compile)
    assert apart == {"loss": {compile == "default"}, "update": {False}}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fast")
@pytest.mark.filterwarnings("ignore:graphed_step. the variable seen:ampkit.CaptureWarning")  # which is changed, indeed
@pytest.mark.slow
def test_working_weights(engine: Engine) -> None:
    """R11: compiled code gets the copies of weights: it casts no weight itself. The uncaptured step has them."""
    seen: dict[bool, set[torch.dtype]] = {}

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
        seen[torch.compiler.is_compiling()].update({param.dtype for param in model.head.parameters()})
        return F.cross_entropy(model(images), labels) * boost

    for graph in ("off", engine[1]):
        # Compiled code depends on what it finds there, so it is compiled twice: before and behind its first call.
        seen.update({False: set(), True: set()})
        trajectory(engine, graph, loss_fn=loss_fn)
        assert seen == {False: {torch.float32}, True: {torch.bfloat16}}, "the first call is not compiled"


@pytest.mark.usefixtures("fast")
def test_a_loss_that_asks_whether_it_is_compiled_is_compiled_once() -> None:
    """Calls that are watched put other code into torch.compiler.is_compiling, which compiled code does not compare."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2.0 if torch.compiler.is_compiling() else 1.0)

    for accumulate in (1, 4):
        model = nn.Linear(4, 4)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        step = ampkit.graphed_step(
            loss_fn, model, optimizer, graph="emulate", compile="default", accumulate=accumulate, on_failure="raise"
        )
        for _ in range(8 * accumulate):
            step(torch.ones(2, 4))
        made = step._window._step
        assert isinstance(made, CompiledTrainingStep)
        assert made.compiler.graphs == 2  # the loss, and the update
        assert step.replays > 0


@pytest.mark.filterwarnings("ignore:graphed_step. the variable asked:ampkit.CaptureWarning")
@pytest.mark.usefixtures("fast")
def test_another_answer_than_that_of_the_compiler() -> None:
    """A function that is put in the place of `torch.compiler.is_compiling` is called, as by compiled code of torch."""
    model = nn.Linear(4, 4)
    asked: list[Callable[[], bool]] = [torch.compiler.is_compiling]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2.0 if asked[0]() else 1.0)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate", compile="default")
    losses = [step(torch.ones(2, 4)).loss for _ in range(8)]
    asked[0] = bool
    losses += [step(torch.ones(2, 4)).loss for _ in range(8)]
    assert losses[7] == 2 * losses[15]


@pytest.mark.filterwarnings("ignore:graphed_step. hooks of modules:ampkit.CaptureWarning")
@pytest.mark.filterwarnings("ignore:graphed_step.compile=.default... a graph break:ampkit.AmpkitWarning")
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("add", [nn.Module.register_forward_hook, nn.Module.register_full_backward_hook])
def test_a_hook_that_comes_behind_the_compilation(add: Callable[..., Any]) -> None:
    """Compiled code has no guards for hooks: it is compiled anew, and once more as before where the hook has gone."""

    def doubled(module: nn.Module, given: Any, made: Any) -> Any:
        return tuple(2 * each for each in given) if isinstance(made, tuple) else 2 * made

    found = []
    for options in ({"compile": "default", "graph": "emulate"}, {"graph": "off"}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, **options)
        x = torch.ones(2, 4, dtype=torch.float64)
        losses = [step(x).loss for _ in range(6)]
        handle = add(model[2], doubled)
        losses += [step(x).loss for _ in range(6)]
        handle.remove()
        found.append([*losses, *(step(x).loss for _ in range(6))])
    torch.testing.assert_close(*found)


class Scalar(nn.Module):
    """A linear layer and a factor of shape (), in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float64)
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


def groups_of(model: Scalar) -> list[dict[str, Any]]:
    return [{"params": [model.factor], "lr": 3e-3, "weight_decay": 0.0}, {"params": list(model.layer.parameters())}]


UPDATES: dict[str, Callable[[Scalar], torch.optim.Optimizer]] = {
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1, maximize=True, fused=True),
    "adam, not fused": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.8, 0.9)),
    "adamw, two groups": lambda m: torch.optim.AdamW(groups_of(m), lr=1e-2, amsgrad=True, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1, fused=True),
    "sgd, nesterov": lambda m: torch.optim.SGD(groups_of(m), lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd, dampening": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", every(2, UPDATES))
@pytest.mark.usefixtures("fast")
@pytest.mark.sampled(4)
def test_the_update_is_the_optimizers(engine: Engine, name: str, scaled: bool) -> None:
    """R11: parameters, state and norm are the optimizer's own to 12 digits of float64, also in its first steps.

    On CUDA a learning rate is a float32 tensor, which both read. Skipped steps leave all of it as it was. Adam that is
    not fused computes its bias corrections in float32 on CUDA, by another `pow` than compiled code: one of 0.1, as in
    the first step with betas of 0.9, is off by up to 10 * 2**-23 of itself, and the updates of 0.01 with it.
    """
    bound = 1e-6 if (engine[0], name) == ("cuda", "adam, not fused") else 1e-12

    def run(compile: str | None) -> list[Any]:
        torch.manual_seed(0)
        model = Scalar().to(engine[0])
        optimizer = UPDATES[name](model)
        step = ampkit.graphed_step(
            lambda m, x, boost: m(x).square().mean() * boost,
            model,
            optimizer,
            scaler=ampkit.GradScaler(engine[0], 4.0, growth_interval=3, enabled=scaled),
            max_norm=0.5,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            graph=engine[1],
            compile=compile,
        )
        made, history = torch.Generator().manual_seed(1), []
        for i in range(9):
            x = torch.randn(5, 6, generator=made, dtype=torch.float64).to(engine[0])
            boost = torch.tensor(math.inf if scaled and i in (3, 7) else 1.0, device=engine[0])
            out = step(x, boost)
            kept = [value for param in model.parameters() for value in optimizer.state[param].values()]
            history.append([*map(torch.clone, (*model.state_dict().values(), *kept, out.grad_norm))])
        assert (step.report().compile_s or 0) > 0 or compile is None
        assert [line for line in step.report().compiled if "not" in line] == []
        return [history, step.scaler.state_dict(), optimizer.state_dict()["param_groups"]]

    eager, compiled = run(None), run("default")
    assert_same(eager[1:], compiled[1:])
    for theirs, ours in zip(eager[0], compiled[0], strict=True):
        for left, right in zip(theirs, ours, strict=True):
            torch.testing.assert_close(right, left, rtol=bound, atol=bound, equal_nan=True)


RULES: dict[str, dict[str, Any]] = {
    "torch's": {"growth_interval": 2},
    "smallest": {"init_scale": 2.0**-125, "backoff_factor": 0.25},
    "largest": {"init_scale": 2.0**127, "growth_interval": 1},
    "hysteresis": {"hysteresis": 2, "growth_interval": 2},
    "bounds": {"min_scale": 2.0**9, "max_scale": 2.0**11, "init_scale": 2.0**10, "growth_interval": 1},
    "constant": {"dynamic": False},
    "odd factors": {"growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 1},
}


@pytest.mark.parametrize("rule", few(RULES, ("torch's",)))
@pytest.mark.usefixtures("fast")
def test_the_loss_scale_moves_as_always(rule: str) -> None:
    """R11: scale, tracker and counters have the bits of an uncompiled step's, for each kind of rule."""

    def run(compile: str | None) -> list[Any]:
        model = nn.Linear(4, 2)
        scaler = ampkit.GradScaler("cpu", **{"init_scale": 2.0**8, **RULES[rule]})
        step = ampkit.graphed_step(
            lambda m, x, boost: m(x).mean() * boost,
            model,
            OPTIMIZERS["sgd"](model.parameters()),
            scaler=scaler,
            graph="off",
            compile=compile,
        )
        history = []
        for i in range(10):
            out = step(torch.ones(3, 4), torch.tensor(math.inf if i in (1, 2, 6, 7) else 2.0**-20))
            history.append((out.skipped, scaler.state_dict()))
        return history

    assert_same(run(None), run("default"))


def broken_loss(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
    logits = model(images)
    torch._dynamo.graph_break()  # HERE broken_loss
    return F.cross_entropy(logits, labels) * boost


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fast")
@pytest.mark.slow
def test_a_graph_break_is_named(engine: Engine) -> None:
    """R11: one warning has the line of a graph break, the report too, and the rest is compiled and captured."""
    with deterministic():
        with pytest.warns(ampkit.AmpkitWarning, match="a graph break: .*broken_loss") as caught:
            eager, _ = trajectory(engine, "off", loss_fn=broken_loss)
        with pytest.warns(ampkit.AmpkitWarning, match="a graph break"):
            graphed, step = trajectory(engine, engine[1], loss_fn=broken_loss)
    assert_same(eager, graphed)
    assert len(caught) == 1
    line = marked_line(__file__, "broken_loss")
    assert line in str(caught[0].message)
    assert any(entry.startswith(f"graph break: {line}") for entry in step.report().compiled)
    assert step.replays == 2


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("no kernel for this GPU")


def broken_inductor(parts: set[str]) -> Callable[[], Callable[..., Any]]:
    """Return what takes the place of `inductor`, which cannot compile these parts of a step."""

    def compile_fx(graph: Any, inputs: Any, config_patches: Any) -> Any:
        part = "forward" if any(tensor.requires_grad for tensor in inputs if isinstance(tensor, Tensor)) else "update"
        if {node.target for node in graph.graph.nodes if node.op.startswith("call")} == {"copy_"}:
            part = "working weights"
        if part in parts:
            refuse()
        if part == "forward" and "backward" in parts:  # comes behind the forward
            return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=refuse)(graph, inputs)
        return aot_eager(graph, inputs)

    return lambda: compile_fx


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_failing_compilation_falls_back(engine: Engine, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: one warning says why, nothing of the failed call is left, and the steps have the bits of uncompiled ones."""
    monkeypatch.setattr(COMPILER, broken_inductor({part, "update", "working weights"}))
    with deterministic():
        eager, _ = trajectory(engine, "off", compile=None, on_failure="parts")
        with pytest.warns(ampkit.AmpkitWarning, match=r"not compiled: .*no kernel for this GPU") as caught:
            graphed, step = trajectory(engine, engine[1], on_failure="parts")
    assert_same(eager, graphed)
    said = [str(each.message) for each in caught]
    parts = ("forward and backward", "update", "working weights")
    assert [sum(f"not compiled: {name}, since" in text for text in said) for name in parts] == [1, 1, 1]
    assert step.replays == 2
    report = step.report()
    assert len([line for line in report.compiled if "no kernel for this GPU" in line]) == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_forward_that_changes_a_weight_is_undone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: if the backward fails to compile, a weight that the loss function has halved is not halved twice."""
    monkeypatch.setattr(COMPILER, broken_inductor({"backward", "update"}))

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
        with torch.no_grad():
            model.conv.bias.mul_(0.5)
        return F.cross_entropy(model(images), labels) * boost

    with deterministic():
        eager, _ = trajectory(engine, "off", compile=None, loss_fn=loss_fn)
        with pytest.warns(ampkit.AmpkitWarning, match="no kernel for this GPU"):
            graphed, _ = trajectory(engine, engine[1], loss_fn=loss_fn, on_failure="parts")
    assert_same(eager, graphed)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("policy", [pytest.param("bfloat16", marks=pytest.mark.seeds), "float16"])
@pytest.mark.slow
def test_only_the_update_fails(engine: Engine, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: the rest stays compiled, and the optimizer steps on gradients in float32 as without compile=."""
    monkeypatch.setattr(COMPILER, broken_inductor({"update"}))
    histories = []
    with deterministic():
        for graph in ("off", engine[1]):
            with pytest.warns(ampkit.AmpkitWarning, match=r"not compiled: update, .*no kernel for this GPU"):
                history, step = trajectory(engine, graph, policy=policy, max_norm=1.0, on_failure="parts")
            histories.append(history)
    assert_same(*histories)
    kinds = [line.partition(":")[0] for line in step.report().compiled]
    assert kinds == ["compiled", "not compiled"]


@pytest.mark.parametrize("part", few(["working weights", "forward", "backward", "update"], ("backward", "update")))
@pytest.mark.slow
def test_a_failing_compilation_raises(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: with on_failure="raise" it is a CaptureError, and the call that raises has done nothing."""
    monkeypatch.setattr(COMPILER, broken_inductor({part}))
    model = make_net("cpu")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="bfloat16", graph="emulate", compile="default", on_failure="raise"
    )
    batch = make_batches("cpu", [8])[0]
    step(*batch)
    if part == "update":
        step(*batch)  # its forward and backward are done when the update is compiled
    before = training_state(model, optimizer, step.scaler)
    for _ in range(2):
        with pytest.raises(ampkit.CaptureError, match="no kernel for this GPU"):
            step(*batch)
        assert_same(before, training_state(model, optimizer, step.scaler))


@pytest.mark.usefixtures("fast")
@pytest.mark.slow
def test_an_error_of_the_loss_is_the_users() -> None:
    """R11: an exception that the loss raises comes out as it is, without a warning, and the next call compiles."""
    fails = [False] * 65  # what is in a list of more than 64 is not compared from call to call

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if any(fails):
            raise KeyError("mine")
        return model(x).square().mean()

    model = nn.Linear(4, 4)
    step = ampkit.graphed_step(
        loss_fn, model, OPTIMIZERS["adamw"](model.parameters()), graph="emulate", compile="default"
    )
    x = torch.ones(2, 4)
    step(x)
    fails[0] = True
    with pytest.raises(KeyError, match="mine"):
        step(x)
    fails[0] = False
    for _ in range(4):
        step(x)
    assert step.replays > 0
    assert any(line.startswith("compiled: forward and backward") for line in step.report().compiled)


@pytest.mark.usefixtures("fast")
@pytest.mark.slow
def test_verified() -> None:
    """R11: `verify` compares replays with calls of the same compiled code, and finds no difference."""
    _, step = trajectory(("cpu", "emulate"), "emulate", verify=2, sizes=(8,) * 6)
    assert step.replays == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fast")
@pytest.mark.slow
def test_another_mode_another_parameter(engine: Engine) -> None:
    """R11: eval mode and a parameter that is frozen or replaced are compiled by themselves, captured as uncaptured."""

    def run(graph: str) -> list[Any]:
        model = make_net(engine[0])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(boosted_loss, model, optimizer, policy="bfloat16", graph=graph, compile="default")
        history = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)  # each change costs a warm-up
            for i, batch in enumerate(make_batches(engine[0], [8] * 15)):
                if i == 5:
                    model.norm.eval()
                if i == 10:
                    model.norm.train()
                    model.conv.weight.requires_grad_(False)
                    model.head.bias = nn.Parameter(model.head.bias.detach() + 1)
                    optimizer.param_groups[0]["params"][-1] = model.head.bias
                out = step(*batch)
                history.append((out._asdict(), training_state(model, optimizer, step.scaler)))
        return history

    with deterministic():
        assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "name", ["rmsprop", *(pytest.param(name, marks=pytest.mark.seeds) for name in ("muon", "sgd, not fused"))]
)
@pytest.mark.usefixtures("fast")
@pytest.mark.slow
def test_other_optimizers_step_as_without(engine: Engine, name: str) -> None:
    """R11: the report says why an update is not compiled, and forward and backward are compiled all the same."""

    def run(graph: str) -> tuple[list[Any], Any]:
        model = make_net(engine[0])
        optimizer: torch.optim.Optimizer
        if name == "muon":
            optimizer = torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.02)
        elif name == "rmsprop":
            optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        history = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)  # that it steps behind the graph, or by other kernels
            step = ampkit.graphed_step(
                boosted_loss, model, optimizer, policy="bfloat16", max_norm=1.0, graph=graph, compile="default"
            )
            for batch in make_batches(engine[0], [8] * 8):
                out = step(*batch)
                history.append((out._asdict(), training_state(model, optimizer, step.scaler)))
        return history, step

    with deterministic():
        eager, _ = run("off")
        graphed, step = run(engine[1])
    assert_same(eager, graphed)
    assert step.replays > 0
    lines = step.report().compiled
    assert lines[0].startswith("compiled: forward and backward")
    stacked = name == "muon" and engine[0] == "cuda"
    assert stacked or [line for line in lines if line.startswith("not compiled: update")]


@pytest.mark.usefixtures("fast")
@pytest.mark.slow
def test_a_step_that_is_dropped_is_freed() -> None:
    """R11: neither compiled code nor its step is in a cycle that would keep the graphs alive."""
    _, step = trajectory(("cpu", "emulate"), "emulate")
    reference = weakref.ref(step._window._step)
    gc.collect()
    gc.disable()
    try:
        del step
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_the_optimizers_checkpoint_goes_both_ways() -> None:
    """R11: a compiled step goes on from the state of an uncompiled one, and the other way round."""

    def run(first: str | None, then: str | None) -> Any:
        model = make_net("cpu", dropout=0.0)
        state: Any = None
        for compile in (first, then):
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            if state is not None:
                optimizer.load_state_dict(state)
            step = ampkit.graphed_step(boosted_loss, model, optimizer, graph="off", compile=compile)
            for batch in make_batches("cpu", [8] * 4):
                step(*batch)
            state = optimizer.state_dict()
        return state

    both, other, plain = run("default", None), run(None, "default"), run(None, None)
    for state in (both, other):
        assert state["param_groups"] == plain["param_groups"]
        for i, entries in plain["state"].items():
            for name, value in entries.items():
                found = state["state"][i][name]
                assert (found.shape, found.dtype) == (value.shape, value.dtype)
                torch.testing.assert_close(found, value, rtol=0.05, atol=1e-3)


def test_wrong_arguments() -> None:
    """R11: an impossible value, a model that is compiled already, and what is not supported: errors with a remedy."""
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def make(compile: Any, loss_fn: Any = boosted_loss, model: Any = model, **options: Any) -> None:
        ampkit.graphed_step(loss_fn, model, optimizer, compile=compile, **options)

    for value in ("fast", True, 3):
        with pytest.raises(ValueError, match=r"graphed_step\(compile=.*expected one of 'default', 'max'"):
            make(value)
    with pytest.raises(ValueError, match="model is compiled already"):
        make("default", model=torch.compile(model))
    with pytest.raises(ValueError, match="loss_fn is compiled already"):
        make("max", loss_fn=torch.compile(boosted_loss))
    with pytest.raises(NotImplementedError, match="Pass compile=None while you measure"):
        make("default", numerics=ampkit.debug.numerics(model))


def test_an_error_that_says_nothing_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AssertionError of Inductor often has no message: its file and line help to find it among torch's issues."""

    def compile_fx(*_: Any, **__: Any) -> Any:
        torch._check_with(AssertionError, False, lambda: "")

    monkeypatch.setattr(COMPILER, lambda: compile_fx)
    model = nn.Linear(4, 4)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = ampkit.graphed_step(
        lambda m, x: m(x).square().mean(), model, optimizer, graph="emulate", compile="default", on_failure="raise"
    )
    step(torch.ones(2, 4))
    with pytest.raises(ampkit.CaptureError, match=r"torch.compile failed: AssertionError in torch/__init__.py:\d+"):
        step(torch.ones(2, 4))


TERMS: list[SimpleNamespace] = []


class Weights:
    """Has the loss as a method, and counts its calls where nothing is read."""

    def __init__(self) -> None:
        self.gain, self.unread = 1.0, 0

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * sum(term.weight for term in TERMS) * self.gain


@pytest.mark.filterwarnings("ignore::ampkit.AmpkitWarning")
@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_what_the_compiled_loss_reads(fused: bool) -> None:
    """R7: a change is noticed, also if all that earlier calls have shown was forgotten.

    That is so where the optimizer steps behind the graph, as SGD without `fused=True` does, and after `close`.
    """
    TERMS[:] = [SimpleNamespace(weight=1.0), SimpleNamespace(weight=2.0)]
    weights, model, x = Weights(), nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    step = ampkit.graphed_step(weights.loss, model, optimizer, graph="emulate", compile="default")

    def captures(calls: int) -> int:
        before = step.captures
        for _ in range(calls):
            step(x)
            weights.unread += 1
        return step.captures - before

    assert captures(8) == 1
    TERMS[1].weight = 3.0
    assert captures(6) == 1
    step.close()
    assert captures(8) == 1
    weights.gain = 2.0
    assert captures(6) == 1
    TERMS[0].weight = 3.0
    assert captures(6) == 1
    assert any(line.startswith("compiled: forward and backward") for line in step.report().compiled)
