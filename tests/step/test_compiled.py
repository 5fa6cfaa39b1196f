"""`graphed_step(compile=...)`: what is compiled, the same bits captured and uncaptured, and what follows a failure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import (
    ENGINES,
    OPTIMIZERS,
    allow_inductor_warnings,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    marked_line,
    training_state,
)
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit
from ampkit._torch import compile as torch_compile

Engine = tuple[str, str]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU Inductor compiles C++, which takes seconds. AOTAutograd before it does all but that."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(
            torch_compile, "inductor", lambda: lambda graph, inputs, config_patches: aot_eager(graph, inputs)
        )


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
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("fast")
@allow_inductor_warnings
def test_captured_as_uncaptured(engine: Engine, case: str) -> None:
    """R11: a captured compiled step has the bits of the same compiled step uncaptured, dropout included."""
    with deterministic():
        eager, plain = trajectory(engine, "off", **CASES[case])
        graphed, step = trajectory(engine, engine[1], **CASES[case])
    assert_same(eager, graphed)
    assert (plain.replays, step.replays > 0) == (0, True)
    for each in (plain, step):
        assert any("forward and backward" in line and line.startswith("compiled") for line in each.report().compiled)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", ["default", pytest.param("max", marks=pytest.mark.cuda)])
@pytest.mark.slow
@allow_inductor_warnings
def test_with_inductor(engine: Engine, mode: str) -> None:
    """R11: with Inductor's own kernels a captured step has the bits of the uncaptured one, and nearly eager's losses.

    Compiled code rounds at other places. A bfloat16 has 8 bits, so that a rounding moves a logit by up to 2**-9 of
    itself. The logits here are below 2, three layers round, and the loss has a slope of at most 2 in them: 2 * 2 * 3 *
    2**-9 is below 0.03. Dropout is off, because Inductor draws other random numbers.
    """
    options: dict[str, Any] = {"max_norm": 1.0, "dropout": 0.0}
    with deterministic():
        eager, _ = trajectory(engine, "off", compile=mode, **options)
        graphed, step = trajectory(engine, engine[1], compile=mode, **options)
        uncompiled, _ = trajectory(engine, "off", compile=None, **options)
    assert_same(eager, graphed)
    assert step.replays == 2
    assert step.report().compile_s > 0
    for (ours, _), (theirs, _) in zip(graphed, uncompiled, strict=True):
        assert abs(ours["loss"].item() - theirs["loss"].item()) < 0.03


@pytest.mark.usefixtures("fast")
def test_a_rate_that_changes_compiles_nothing_again() -> None:
    """R11: a scheduler that sets another rate in each step costs no compilation."""
    _, step = trajectory(("cpu", "emulate"), "emulate", schedule=True, sizes=(8,) * 3)
    first = step._window._step.compiler.graphs
    _, step = trajectory(("cpu", "emulate"), "emulate", schedule=True, sizes=(8,) * 10)
    assert step._window._step.compiler.graphs == first > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fast")
@allow_inductor_warnings
def test_working_weights(engine: Engine) -> None:
    """R11: compiled code gets the copies of weights: it casts no weight itself. The uncaptured step has them."""
    seen: list[set[torch.dtype]] = []

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
        seen.append({param.dtype for param in model.head.parameters()})
        return F.cross_entropy(model(images), labels) * boost

    for graph in ("off", engine[1]):
        seen.clear()
        trajectory(engine, graph, loss_fn=loss_fn)
        assert seen[0] == {torch.float32}, "the first call is not compiled"
        assert seen[1:], "the function was traced"
        assert all(dtypes == {torch.bfloat16} for dtypes in seen[1:])


def broken_loss(model: nn.Module, images: Tensor, labels: Tensor, boost: Tensor) -> Tensor:
    logits = model(images)
    torch._dynamo.graph_break()  # HERE broken_loss
    return F.cross_entropy(logits, labels) * boost


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("fast")
@allow_inductor_warnings
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
    assert step._window._step.compiler.graphs == 2 + (step.report().compiled[0].count("update"))


class Failing:
    """A backend that cannot compile."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any, config_patches: Any) -> Any:
        self.calls += 1
        raise NotImplementedError("no kernel for this GPU")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_failing_compilation_falls_back(engine: Engine, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: one warning says why, nothing of the failed call is left, and the steps have the bits of uncompiled ones."""
    monkeypatch.setattr(torch_compile, "inductor", lambda: Failing() if at == "forward" else fails_backward)
    with deterministic():
        eager, _ = trajectory(engine, "off", compile=None, on_failure="parts")
        with pytest.warns(ampkit.AmpkitWarning, match=r"not compiled: .*no kernel for this GPU") as caught:
            graphed, step = trajectory(engine, engine[1], on_failure="parts")
    assert_same(eager, graphed)
    assert len([each for each in caught if "forward and backward" in str(each.message)]) == 1
    assert step.replays == 2
    assert any("no kernel for this GPU" in line for line in step.report().compiled)


def fails_backward(graph: Any, inputs: Any, config_patches: Any) -> Any:
    """Compile forward, and fail in the compilation of the backward, which comes behind the forward."""
    from torch._dynamo.backends.common import aot_autograd

    def refuse(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no kernel for this GPU")

    return aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=refuse)(graph, inputs)


@pytest.mark.parametrize("at", ["forward", "backward"])
def test_a_failing_compilation_raises(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R11: with on_failure="raise" it is a CaptureError, and the call has done nothing."""
    monkeypatch.setattr(torch_compile, "inductor", lambda: Failing() if at == "forward" else fails_backward)
    model = make_net("cpu")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = ampkit.graphed_step(
        boosted_loss, model, optimizer, policy="bfloat16", graph="emulate", compile="default", on_failure="raise"
    )
    batch = make_batches("cpu", [8])[0]
    step(*batch)
    before = training_state(model, optimizer, step.scaler)
    with pytest.raises(ampkit.CaptureError, match="no kernel for this GPU"):
        step(*batch)
    assert_same(before, training_state(model, optimizer, step.scaler))


@pytest.mark.usefixtures("fast")
def test_an_error_of_the_loss_is_the_users() -> None:
    """R11: an exception that the loss raises comes out as it is, without a warning, and the next call compiles."""
    fails = []

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        if fails:
            raise KeyError("mine")
        return model(x).square().mean()

    model = nn.Linear(4, 4)
    step = ampkit.graphed_step(
        loss_fn, model, OPTIMIZERS["adamw"](model.parameters()), graph="emulate", compile="default"
    )
    x = torch.ones(2, 4)
    step(x)
    fails.append(1)
    with pytest.raises(KeyError, match="mine"):
        step(x)
    fails.clear()
    for _ in range(4):
        step(x)
    assert step.replays > 0
    assert any(line.startswith("compiled: forward and backward") for line in step.report().compiled)


@allow_inductor_warnings
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
