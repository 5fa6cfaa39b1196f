"""Rates on the device, for optimizers that compute with them on the host: under a schedule, they are in the graph."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from tape import taped
from torch import Tensor, nn

import ampkit
from ampkit._optimizer.rate_program import RateProgram
from ampkit._optimizer.rollback import StepChanges

Engine = tuple[str, str]
Update = Callable[[Tensor, Tensor, Any, dict[str, Any]], object]


class Written(torch.optim.Optimizer):
    """Moves each parameter by a function of it, its gradient, the rate and the group."""

    def __init__(self, params: Any, update: Update) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.01})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, group["lr"], group)


def decayed(param: Tensor, grad: Tensor, lr: Any, group: dict[str, Any]) -> None:
    param.mul_(1 - lr * group["weight_decay"])
    param.add_(grad.sign(), alpha=-lr * math.sqrt(max(param.shape)))


def foreach(param: Tensor, grad: Tensor, lr: Any, group: dict[str, Any]) -> None:
    torch._foreach_mul_([param], 1 - lr * group["weight_decay"])
    torch._foreach_add_([param], [grad], alpha=-lr)


# How a step may use its rate so that a graph can have it in tensors.
TAKEN: dict[str, Update] = {
    "alpha": lambda p, g, lr, _: p.add_(g, alpha=-lr),
    "alpha of a difference": lambda p, g, lr, _: p.sub_(g, alpha=lr / 3),
    "alpha, not in place": lambda p, g, lr, _: p.copy_(torch.add(p, g, alpha=-(lr**2))),
    "a factor": lambda p, g, lr, _: p.sub_(lr * g),
    "a factor in front": lambda p, g, lr, _: p.add_(g * -lr),
    "a weight": lambda p, g, lr, _: p.lerp_(g, abs(lr) * 0.1),
    "a sum": lambda p, g, lr, _: p.sub_((g + lr) - lr),
    "decay": decayed,
    "foreach": foreach,
}
# And so that it cannot: the reason, in part.
LEFT: dict[str, tuple[Update, str]] = {
    "compared": (lambda p, g, lr, _: p.add_(g, alpha=-(lr if lr > 0.05 else 0.05)), "decides by it on the host"),
    "a function in C": (lambda p, g, lr, _: p.add_(g, alpha=-math.sqrt(lr)), "has other last bits"),
    "converted": (lambda p, g, lr, _: p.add_(g, alpha=-float(lr)), "converts it there"),
    "a value": (lambda p, g, lr, _: p.addcmul_(g, g.sign(), value=-lr), "passes what it computes of it to addcmul_"),
    "divided": (lambda p, g, lr, _: p.add_(g, alpha=-(lr // 0.03) * 0.1), "decides by it on the host"),
    "looked up": (lambda p, g, lr, _: p.add_(g, alpha={0.1: -0.1}.get(lr, -0.2)), "decides by it on the host"),
    "a class": (lambda p, g, lr, _: p.add_(g, alpha=-{float: lr}[type(lr)]), "raises"),
}


def tried(device: str, update: Update, *, groups: int = 1) -> RateProgram:
    """Return the program of an optimizer whose steps were tried; parameters and rates are asserted to be as before."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(n, 3, device=device)) for n in (4, 5, 7)]
    optimizer = Written([{"params": params[i::groups], "lr": 0.1 / (1 + i)} for i in range(groups)], update)
    for param in params:
        param.grad = torch.randn_like(param)
    before = [param.detach().clone() for param in params]
    program = RateProgram(optimizer, torch.device(device))
    with deterministic():
        program.try_out([param.detach() for param in params])
    assert_same([param.detach() for param in params], before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 / (1 + i) for i in range(groups)]
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)
    return program


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", TAKEN)
def test_what_tensors_can_stand_for(engine: Engine, how: str) -> None:
    """R5: such a step has the same bits with its rates in tensors."""
    program = tried(engine[0], TAKEN[how], groups=2)
    assert program.why == ""
    assert program.tensors()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", LEFT)
def test_what_no_tensor_can_stand_for(engine: Engine, how: str) -> None:
    """R5: the program says why."""
    update, why = LEFT[how]
    try:
        found = tried(engine[0], update).why
    except KeyError as error:  # an error of the step's, behind which all is as before
        found = f"raises: {error}"
    assert why in found


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02)


def loop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, foreach=False, nesterov=True, momentum=0.8)


def groups_of(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.SGD([{"params": [first], "lr": 0.3}, {"params": others}], lr=0.1, weight_decay=0.1)


def trained(
    engine: Engine,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    graph: str,
    policy: str = "float32",
    dtype: torch.dtype = torch.float32,
    before: Callable[[int, Any], object] = lambda i, optimizer: None,
) -> tuple[list[Any], ampkit.GraphedStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(engine[0], dtype)
    optimizer = make(model.parameters())
    # It begins at a rate of 0.
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, i / 8) * 0.9**i)
    options: dict[str, Any] = {"scheduler": rise, "graph": graph}
    options |= {"policy": policy} if dtype is torch.float32 else {}
    step = ampkit.graphed_step(lambda net, x: net(x.to(dtype)).float().square().mean(), model, optimizer, **options)
    history = []
    for i in range(20):
        before(i, optimizer)
        out = step(torch.full((2, 8), math.inf if policy == "float16" and i == 11 else 0.1 * i, device=engine[0]))
        history.append([out.loss, *(param.detach().clone() for param in model.parameters())])
    return history, step


def compared(engine: Engine, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Any:
    """Assert that replays, which call no Python here either, have the bits of eager steps; return the report."""
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = trained(engine, make, graph="off", **options)
        with taped() if engine[0] == "cpu" else nullcontext():
            found, step = trained(engine, make, graph=engine[1], **options)
    assert_same(found, expected)
    return step.report()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [sgd, muon, loop, groups_of])
@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_a_graph_reads_what_is_computed_of_the_rate(engine: Engine, make: Any, policy: str) -> None:
    """R5: under a schedule the step is whole, and has the bits of numbers."""
    report = compared(engine, make, policy=policy)
    assert (report.outcome, report.eager_optimizer, report.graphs) == ("whole", None, 1)
    assert report.replays >= 12


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_of_low_precision(engine: Engine) -> None:
    """R5: a number is not rounded to them, a tensor would be. So the optimizer steps behind the graph."""
    report = compared(engine, sgd, dtype=torch.bfloat16)
    assert "steps parameters of low precision" in str(report.eager_optimizer)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [torch.tensor, np.float32])
def test_a_rate_that_is_no_number_any_more(engine: Engine, kind: Any) -> None:
    """R5: torch computes otherwise with it. The optimizer leaves the graph before the next step."""

    def change(i: int, optimizer: Any) -> None:
        if i >= 12:
            optimizer.param_groups[0]["lr"] = kind(0.1 * 0.9**i)

    report = compared(engine, muon, before=change)
    assert "its learning rate" in str(report.eager_optimizer)


@pytest.mark.parametrize("engine", ENGINES)
def test_weight_decay_changes_once(engine: Engine) -> None:
    """R5: what is computed of the rate then is other numbers, in tensors of their own, and another graph."""

    def change(i: int, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.2 if i >= 12 else 0.1

    report = compared(engine, muon, before=change)
    assert (report.outcome, report.graphs) == ("whole", 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_code_that_is_not_torchs(engine: Engine) -> None:
    """R5: nobody knows what it does with its rate. It is in the graph while its rate stays, and behind it then."""
    report = compared(engine, lambda params: Written(params, decayed))
    assert "is not torch's" in str(report.eager_optimizer)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scheduled", [False, True])
def test_scan_with_such_an_optimizer(engine: Engine, scheduled: bool) -> None:
    """R5: calls of a scan are made one by one where the rate changes between them."""
    ends = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).to(engine[0])
        optimizer = sgd(model.parameters())
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
        loss_fn = lambda net, x: net(x).square().mean()  # noqa: E731
        step = ampkit.graphed_step(loss_fn, model, optimizer, scheduler=decay, graph=graph)
        with deterministic():
            for i in range(5):
                optimizer.param_groups[0]["lr"] *= 1.0 if scheduled else 0.5
                step.scan(torch.full((4, 2, 8), 0.1 * i, device=engine[0]))
        ends.append([*model.parameters()])
    assert_same(*ends)
    assert step.report().outcome == "whole"


def test_what_was_tried_is_undone() -> None:
    """R5: parameters, gradients, state and rates are as before, also where the step raises in between."""
    param = nn.Parameter(torch.arange(4.0))
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    changes = StepChanges(wanted=True)
    for _ in range(3):
        param.grad = torch.ones(4)
        changes.watch(optimizer, optimizer.step)
    kept = [param.detach(), param.grad, optimizer.state[param]["momentum_buffer"]]
    before = [tensor.detach().clone() for tensor in kept]
    changed = changes.known(optimizer)
    assert changed is not None
    program = RateProgram(optimizer, torch.device("cpu"))
    program.try_out(changed)
    assert program.why == ""
    assert_same(kept, before)

    calls = iter(range(3))
    original = optimizer.step

    def breaks(*args: Any) -> Any:
        original(*args)
        if next(calls) == 1:
            raise KeyboardInterrupt

    optimizer.step = breaks  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        RateProgram(optimizer, torch.device("cpu")).try_out(changed)
    assert_same(kept, before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert type(optimizer.param_groups[0]["lr"]) is float
