"""Muon with matrices of equal shape stacked: its arithmetic beside torch's, and what is compiled."""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import assert_same, leave_out_inductor
from tape import taped
from torch import Tensor, nn

import ampkit
from ampkit._optimizer.update import stacked_muon
from ampkit._optimizer.update.stacked_muon import StackedMuon, can_stack
from ampkit._step.compile.compiled import INDUCTOR_OPTIONS
from ampkit._torch.compile import Compiler

SHAPES = [(24, 40)] * 3 + [(40, 24)] * 2 + [(16, 16), (24, 40)]
STEPS = 4


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile on a CPU, too."""
    monkeypatch.setattr(stacked_muon, "_GAINS_ON", ("cuda", "cpu"))


SETTINGS: dict[str, dict[str, Any]] = {
    "torch's defaults": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0},
    "original, not nesterov": {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8, "weight_decay": 0.3},
    "bfloat16 weights": {"dtype": torch.bfloat16},
    "float64 weights": {"dtype": torch.float64},
    "3 steps, other coefficients": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}


def made(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[list[nn.Parameter], torch.optim.Muon]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    return params, torch.optim.Muon(params, lr=0.05, **settings)


def stacked(optimizer: torch.optim.Optimizer) -> StackedMuon:
    def failed(error: Exception) -> str:
        raise error

    return StackedMuon(optimizer, Compiler(INDUCTOR_OPTIONS["default"]), nullcontext, failed)


def trained(params: list[nn.Parameter], step: Callable[[], object]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        step()
    return [param.detach() for param in params]


def exact(params: list[nn.Parameter], group: dict[str, Any]) -> list[Tensor]:
    """Return the parameters behind the same steps in float64, by the formulas in the docstring of torch.optim.Muon."""
    generator, weights = torch.Generator().manual_seed(1), [param.detach().double() for param in params]
    momenta, (a, b, c) = [torch.zeros_like(weight) for weight in weights], group["ns_coefficients"]
    for _ in range(STEPS):
        for i, (weight, momentum) in enumerate(zip(weights, momenta, strict=True)):
            grad = torch.randn(weight.shape, generator=generator).to(params[i].dtype).double()
            momenta[i] = momentum = group["momentum"] * momentum + (1 - group["momentum"]) * grad
            if group["nesterov"]:
                momentum = group["momentum"] * momentum + (1 - group["momentum"]) * grad
            x = momentum / max(float(momentum.norm()), group["eps"])
            for _ in range(group["ns_steps"]):
                gram = x @ x.mT
                x = a * x + (b * gram + c * gram @ gram) @ x
            rows, columns = weight.shape
            ratio = 0.2 * math.sqrt(max(rows, columns))
            if group["adjust_lr_fn"] != "match_rms_adamw":
                ratio = math.sqrt(max(1, rows / columns))
            weights[i] = weight * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * ratio * x
    return weights


def distance(left: Sequence[Tensor], right: Sequence[Tensor], shape: tuple[int, int]) -> float:
    """Return the norm of the difference of all matrices of this shape."""
    pairs = [(a.detach().double(), b) for a, b in zip(left, right, strict=True) if a.shape == shape]
    return float(torch.stack([(a - b).square().sum() for a, b in pairs]).sum().sqrt())


@pytest.mark.usefixtures("fresh_dynamo", "compiles")
@pytest.mark.parametrize(
    "settings", [name if i < 2 else pytest.param(name, marks=pytest.mark.seeds) for i, name in enumerate(SETTINGS)]
)
@pytest.mark.parametrize("code", ["uncompiled", "graph", pytest.param("compiled", marks=pytest.mark.slow)])
def test_as_close_to_exact_steps_as_torchs(settings: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round 15 products to bfloat16, in other places. So each is a rounding error away from float64, and these are
    as large as each other, but for chance: each error is a sum over hundreds of elements."""
    if code == "graph":
        leave_out_inductor(monkeypatch)
    before, torchs = made(**SETTINGS[settings])
    expected = exact(before, torchs.param_groups[0])
    plain = trained(before, torchs.step)
    params, optimizer = made(**SETTINGS[settings])
    ours = stacked(optimizer)
    if code == "uncompiled":
        ours.problem = "it is left out"
    found = trained(params, ours.step)
    assert ours.used == (code != "uncompiled")
    start = made(**SETTINGS[settings])[0]
    for shape in set(SHAPES):
        theirs, own, moved = (distance(each, expected, shape) for each in (plain, found, start))
        assert 0 < own <= 1.25 * theirs < 0.5 * moved
    momenta = [[state["momentum_buffer"] for state in each.state.values()] for each in (torchs, optimizer)]
    for left, right in zip(*momenta, strict=True):  # in each step, three operations of each are rounded by half an eps
        torch.testing.assert_close(
            left, right, rtol=0, atol=3 * STEPS * torch.finfo(left.dtype).eps * float(left.abs().max())
        )
    assert optimizer.state_dict()["param_groups"] == torchs.state_dict()["param_groups"]


@pytest.mark.usefixtures("fresh_dynamo", "compiles")
def test_two_graphs_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for what comes in front of the products, one behind them; also for other rates, and for split stacks."""
    leave_out_inductor(monkeypatch)
    ends = []
    for most in (2**27, 3 * 24 * 40):  # one stack of 4 matrices, or two of 3 and 1
        monkeypatch.setattr(stacked_muon, "_MOST_ELEMENTS", most)
        params, optimizer = made()
        ours = stacked(optimizer)
        for rate in (0.1, 0.2, 0.3):
            optimizer.param_groups[0]["lr"] = torch.tensor(rate, dtype=torch.float64)
            trained(params, ours.step)
        assert ours._compiler.graphs == 2 * len(set(SHAPES))
        assert ours.text() == "Muon, matrices of 3 shape(s) stacked"
        ends.append([param.detach() for param in params])
    assert_same(*ends)


@pytest.mark.usefixtures("fresh_dynamo", "compiles")
def test_hyperparameters_that_change_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a momentum that warms up: after eight values it is compiled no longer, and is right all the same."""
    leave_out_inductor(monkeypatch)
    ends = []
    for is_ours in (False, True):
        params, optimizer = made(weight_decay=0.0)
        optimizer.param_groups[0]["lr"] = 2.0**-5
        ours = stacked(optimizer)
        for i in range(12):
            optimizer.param_groups[0]["momentum"] = 0.85 + i / 128
            for param in params:
                param.grad = torch.full_like(param, i).add_(param.detach())
            (ours.step if is_ours else optimizer.step)()
        ends.append([param.detach() for param in params])
    assert ours._compiler.graphs == 8 * 3 + 3  # behind the products it stays the same
    torch.testing.assert_close(*ends, rtol=0, atol=12 * 2.0**-5 * 2.0**-8 * 4)  # steps x rate x rounding x 2 norms


@pytest.mark.usefixtures("fresh_dynamo")
def test_not_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gains nothing there; the report says so, and the matrices are stacked all the same."""
    leave_out_inductor(monkeypatch)
    _, report = graphed("emulate", "bfloat16")
    assert report.outcome == "whole"
    assert "not compiled: update of Muon, since that gains nothing on a CPU" in report.compiled


def test_which_muon_is_stacked() -> None:
    """Other code than torch's in a step is called as it is, and so is what torch does in the memory of the momentum."""

    class Mine(torch.optim.Muon):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    params, optimizer = made()
    assert can_stack(optimizer)
    assert not can_stack(Mine(params))
    assert not can_stack(torch.optim.SGD(params))
    assert can_stack(made(torch.bfloat16)[1])
    assert not can_stack(made(torch.bfloat16, nesterov=False)[1])
    optimizer.register_step_post_hook(lambda *_: None)
    assert not can_stack(optimizer)


def test_wrong_hyperparameters() -> None:
    """R9: what torch refuses is refused, with what came and what to write."""
    for wrong in ({"ns_steps": 100}, {"ns_coefficients": (1.0, 2.0)}):
        params, optimizer = made(**wrong)
        with pytest.raises(ValueError, match=r"Muon\(ns_coefficients=.*: expected three coefficients, and at most 99"):
            trained(params, stacked(optimizer).step)


def loss_fn(model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean() * boost
    return loss


def graphed(graph: str, policy: str, **options: Any) -> tuple[list[Any], ampkit.Report]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)), nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = ampkit.graphed_step(
        loss_fn, model, optimizer, policy=policy, scheduler=fall, graph=graph, compile="default", **options
    )
    history: list[Any] = []
    for i in range(12):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        history.append(step(x, torch.tensor(math.inf if policy == "float16" and i in (0, 1, 7) else 1.0)))
        history.append([param.detach().clone() for param in model.parameters()])
        history.append([each["momentum_buffer"].clone() for each in optimizer.state.values()])
    return history, step.report()


@pytest.mark.usefixtures("fresh_dynamo", "compiles")
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("code", ["uncompiled, taped", "graph", pytest.param("compiled", marks=pytest.mark.slow)])
def test_captured_from_the_beginning(policy: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: under a schedule and a loss scale a step has the bits of graph="off", and nothing of it is frozen."""
    if code == "uncompiled, taped":  # a tape sees no compiled code
        monkeypatch.setattr(Compiler, "compiled", lambda self, function, **_: function)
    elif code == "graph":
        leave_out_inductor(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        expected, _ = graphed("off", policy, max_norm=0.5)
        with taped() if code == "uncompiled, taped" else nullcontext():
            found, report = graphed("emulate", policy, max_norm=0.5)
    assert_same(found, expected)
    assert report.outcome == "whole"
    assert report.replays == 9
    assert report.skipped == (3 if policy == "float16" else 0)
    assert "compiled: update (Muon, matrices of 2 shape(s) stacked)" in report.compiled
    assert not any(line.startswith("not compiled") for line in report.compiled)


@pytest.mark.usefixtures("fresh_dynamo", "compiles")
def test_a_failed_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor cannot compile steps uncompiled, with a warning and a line in the report, or is an error."""

    def compiled(self: Compiler, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise RuntimeError("no kernel")

        return call if function is stacked_muon.move else function

    monkeypatch.setattr(Compiler, "compiled", compiled)
    with pytest.warns(
        ampkit.AmpkitWarning, match="not compiled: update of Muon, since torch.compile failed: .*no kern"
    ):
        expected, _ = graphed("off", "bfloat16")
    with pytest.warns(ampkit.AmpkitWarning, match="not compiled: update of Muon"):
        found, report = graphed("emulate", "bfloat16")
    assert_same(found, expected)
    assert report.outcome == "whole"
    assert any(line.startswith("not compiled: update of Muon, since") for line in report.compiled)
    with pytest.raises(ampkit.CaptureError, match="not compiled: update of Muon"):
        graphed("emulate", "bfloat16", on_failure="raise")
