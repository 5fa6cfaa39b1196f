"""Which schedulers `scan` steps ahead of a launch: only those that nothing in the steps can reach."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler

import ampkit
from ampkit._step.many.rates_ahead import may_step_ahead

Engine = tuple[str, str]
WARM_UP, KNOWN, HELD = 10, torch.ones(()), SimpleNamespace(factor=1.0)


def rise(step: int, over: int = WARM_UP) -> float:
    return min(1.0, (step + 1) / over)


def both(step: int) -> float:
    return rise(step) * 0.5 * (1 + math.cos(step / WARM_UP))


class Falls(lr_scheduler.ExponentialLR):
    """A scheduler of the user's, which may do anything in its `step`."""


AHEAD: dict[str, Callable[[Optimizer], object]] = {
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=200, cycle_momentum=False),
    "several": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 10)], [5]
    ),
    "of a rate that is a tensor": lambda o: lr_scheduler.LambdaLR(
        SGD([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1)), both
    ),
    "of a function": lambda o: lr_scheduler.LambdaLR(o, both),
    "of a part": lambda o: lr_scheduler.LambdaLR(o, partial(rise, over=7)),
    "of a builtin function": lambda o: lr_scheduler.MultiplicativeLR(o, math.cos),
}
NOT_AHEAD: dict[str, Callable[[Optimizer], object]] = {
    "of another class": lambda o: Falls(o, 0.9),
    "reads a tensor": lambda o: lr_scheduler.LambdaLR(o, lambda step: float(KNOWN) / (1 + step)),
    "reads an object": lambda o: lr_scheduler.LambdaLR(o, lambda _: HELD.factor),
    "within another": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9), Falls(o, 0.9)]),
}


@pytest.mark.parametrize(("name", "ahead"), [*((n, True) for n in AHEAD), *((n, False) for n in NOT_AHEAD)])
def test_which_may_be_stepped_ahead(name: str, ahead: bool) -> None:
    """Those of torch, with functions of numbers alone."""
    made = (AHEAD if ahead else NOT_AHEAD)[name](SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    assert may_step_ahead(made) is ahead


class Net(nn.Module):
    """A layer, and a sum of losses that the rate depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("total", torch.zeros(()))


class Writes(lr_scheduler.ExponentialLR):
    """Writes to a buffer of the net in each step."""

    def __init__(self, net: Net, optimizer: Optimizer) -> None:
        super().__init__(optimizer, 0.9)
        self.net = net

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if "net" in vars(self):
            self.net.total.mul_(0.9)


SCHEDULERS: dict[str, Callable[[Net, Optimizer], Any]] = {
    "reads a buffer": lambda net, o: lr_scheduler.LambdaLR(o, lambda _: 1.0 / (1.0 + float(net.total))),
    "writes to a buffer": Writes,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_state_of_the_step(engine: Engine, name: str) -> None:
    """Such a scheduler is stepped behind each call, and a scan leaves what single calls do."""
    found = []
    for graph, scans in (("off", False), (engine[1], True)):
        torch.manual_seed(0)
        net = Net().to(engine[0])
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
        function = ampkit.graphed(
            modules=(net,), optimizers=(optimizer,), scheduler=SCHEDULERS[name](net, optimizer), graph=graph
        )(partial(train, net, optimizer))
        x = torch.randn(40, 8, 4, generator=torch.Generator().manual_seed(1)).to(engine[0])
        losses = function.scan(x) if scans else torch.stack([function(each) for each in x])
        found.append((losses, net.state_dict(), optimizer.param_groups[0]["lr"]))
    assert_same(found[1][:2], found[0][:2])
    assert float(found[0][2]) == float(found[1][2])


def train(net: Net, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = net.layer(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        net.total.add_(loss.detach())
    return loss.detach()
