"""Rates on the device, for optimizers that compute with them on the host: under a schedule, they are in the graph."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

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
    "kept": (lambda p, g, lr, group: (group.update(last=lr), p.add_(g, alpha=-lr)), "on the host"),
    "a class": (lambda p, g, lr, _: p.add_(g, alpha=-{float: lr}[type(lr)]), "raises with its rate in a tensor"),
}


def trained(
    engine: Engine, update: Update, *, graph: str, policy: str = "float32", groups: int = 1, calls: int = 20
) -> tuple[list[Any], ampkit.GraphedStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(engine[0])
    params = list(model.parameters())
    optimizer = Written([{"params": params[i::groups]} for i in range(groups)], update)
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (1 + i)
    # It begins at a rate of 0.
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, i / 8) * 0.9**i)
    step = ampkit.graphed_step(
        lambda net, x: net(x).square().mean(), model, optimizer, scheduler=rise, graph=graph, policy=policy
    )
    history = []
    for i in range(calls):
        out = step(torch.full((2, 8), math.inf if policy == "float16" and i == 11 else 0.1 * i, device=engine[0]))
        history.append([out.loss, *(param.detach().clone() for param in params)])
    return history, step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize(("policy", "groups"), [("float32", 1), ("float16", 2)])
def test_a_graph_reads_what_is_computed_of_the_rate(engine: Engine, how: str, policy: str, groups: int) -> None:
    """R5: under a schedule the step is whole, and has the bits of numbers; replays call no Python here either."""
    with deterministic(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, _ = trained(engine, TAKEN[how], graph="off", policy=policy, groups=groups)
        with taped() if engine[0] == "cpu" else nullcontext():
            found, step = trained(engine, TAKEN[how], graph=engine[1], policy=policy, groups=groups)
    assert_same(found, expected)
    report = step.report()
    assert (report.outcome, report.eager_optimizer, report.graphs) == ("whole", None, 1)
    assert report.replays >= 12
    assert not [warning for warning in caught if issubclass(warning.category, ampkit.CaptureWarning)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", LEFT)
def test_a_rate_that_no_tensor_can_stand_for(engine: Engine, how: str) -> None:
    """R5: the optimizer steps behind the graph, and the report says why; nothing is left of what was tried."""
    update, why = LEFT[how]
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = trained(engine, update, graph="off")
        found, step = trained(engine, update, graph=engine[1])
    assert_same(found, expected)
    report = step.report()
    assert report.outcome == "in parts"
    assert why in str(report.eager_optimizer)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scheduled", [False, True])
def test_scan_with_such_an_optimizer(engine: Engine, scheduled: bool) -> None:
    """R5: calls of a scan are made one by one where the rate changes between them."""
    ends = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).to(engine[0])
        optimizer = Written(model.parameters(), decayed)
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
