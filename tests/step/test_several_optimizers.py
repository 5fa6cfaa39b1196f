"""Several optimizers in one step: one loss scale, one norm over all gradients, schedulers of their own."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, leave_out_inductor, training_state
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    """Matrices for Muon, and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.inner(x)))
        return out

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        matrices = [param for param in self.inner.parameters() if param.dim() == 2]
        return matrices, [param for param in self.parameters() if all(param is not each for each in matrices)]


def muon_and_adamw(net: Net) -> Optimizers:
    matrices, rest = net.split()
    return [torch.optim.Muon(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(rest, lr=3e-3, fused=True)]


def muon_and_sgd(net: Net) -> Optimizers:
    matrices, rest = net.split()
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def adamw_and_sgd(net: Net) -> Optimizers:
    matrices, rest = net.split()
    return [torch.optim.AdamW(rest, lr=3e-3, fused=True), torch.optim.SGD(matrices, lr=0.1, momentum=0.9, fused=True)]


def with_adafactor(net: Net) -> Optimizers:
    matrices, rest = net.split()
    return [torch.optim.AdamW(rest, lr=3e-3, fused=True), torch.optim.Adafactor(matrices, lr=0.01)]


MADE: dict[str, Callable[[Net], Optimizers]] = {
    "muon, adamw": muon_and_adamw,
    "muon, sgd": muon_and_sgd,
    "adamw, sgd": adamw_and_sgd,
    "adamw, adafactor": with_adafactor,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"policy": "float16", "max_norm": 0.5},
    "accumulated": {"policy": "bfloat16", "accumulate": 2, "max_norm": 0.3},
    "compiled": {"policy": "float16", "accumulate": 2, "max_norm": 0.5, "compile": "default"},
    "all": {"policy": "float16", "accumulate": 2, "after_step": lambda net: net.head.bias.clamp_(-0.1, 0.1)},
}
CALLS = 24


def loss_fn(net: Net, x: Tensor, y: Tensor, boost: Tensor) -> Tensor:
    return F.cross_entropy(net(x).float(), y) * boost


def batch(device: str, i: int, boost: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(i)
    x, y = torch.randn(6, 8, generator=made), torch.randint(3, (6,), generator=made)
    return x.to(device), y.to(device), torch.tensor(boost).to(device)


def schedulers(optimizers: Optimizers) -> list[Any]:
    first, second = optimizers
    rise = torch.optim.lr_scheduler.LambdaLR(first, lambda i: min(1.0, (i + 1) / 4))
    return [rise, torch.optim.lr_scheduler.ExponentialLR(second, 0.9)]


def trained(engine: Engine, name: str, options: dict[str, Any], graph: str) -> tuple[list[Any], ampkit.GraphedStep]:
    torch.manual_seed(0)
    net = Net().to(engine[0])
    optimizers = MADE[name](net)
    step = ampkit.graphed_step(loss_fn, net, optimizers, scheduler=schedulers(optimizers), graph=graph, **options)
    history = []
    for i in range(CALLS):
        overflows = options.get("policy") == "float16" and i in (2, 15)
        out = step(*batch(engine[0], i, math.inf if overflows else 1.0))
        states = [training_state(net, optimizer, step.scaler) for optimizer in optimizers]
        history.append([out, *states])
    step.flush()
    return [*history, training_state(net, optimizers[0], step.scaler)], step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.sampled(6)
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_bits_of_eager_steps(engine: Engine, name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: also under schedules, skipped steps and accumulation; whole, unless one of them cannot be captured."""
    if engine[0] == "cpu":
        leave_out_inductor(monkeypatch)
    is_taped = engine[0] == "cpu" and options != "compiled"  # a tape sees no compiled code
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        expected, _ = trained(engine, name, OPTIONS[options], "off")
        with taped() if is_taped else nullcontext():
            found, step = trained(engine, name, OPTIONS[options], engine[1])
    assert_same(found, expected)
    report = step.report()
    assert report.failure is None
    assert report.outcome == ("in parts" if "adafactor" in name else "whole")
    assert report.replays >= 8
    assert report.skipped == (2 if OPTIONS[options].get("policy") == "float16" else 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bits_of_a_loop_of_torch_alone(engine: Engine) -> None:
    """R5: without clipping and loss scale, at constant rates that float32 holds."""
    ends = []
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        for graphed in (False, True):
            torch.manual_seed(0)
            net = Net().to(engine[0])
            matrices, rest = net.split()
            muon = torch.optim.Muon(matrices, lr=2.0**-6)
            optimizers: Optimizers = [muon, torch.optim.AdamW(rest, lr=2.0**-9, fused=True)]
            step = ampkit.graphed_step(loss_fn, net, optimizers, graph=engine[1]) if graphed else None
            for i in range(12):
                if step is not None:
                    step(*batch(engine[0], i))
                    continue
                loss_fn(net, *batch(engine[0], i)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append(list(net.state_dict().values()))
    assert_same(*ends)
    assert step is not None
    assert step.report().outcome == "whole"


@pytest.mark.parametrize("engine", ENGINES)
def test_one_norm_over_all_gradients(engine: Engine) -> None:
    """R5: it is that of `clip_grad_norm_` over all parameters of the model, in the model's order."""
    torch.manual_seed(0)
    net = Net().to(engine[0])
    optimizers = adamw_and_sgd(net)
    step = ampkit.graphed_step(loss_fn, net, optimizers, max_norm=0.25, graph=engine[1])
    for i in range(6):
        loss_fn(net, *batch(engine[0], i)).backward()
        expected = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        found = step(*batch(engine[0], i)).grad_norm
        assert found is not None
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_scan_and_window_with_several_optimizers(engine: Engine) -> None:
    """R5: they leave the bits of single calls."""
    for many in ("scan", "window"):
        ends = []
        for graph in ("off", engine[1]):
            torch.manual_seed(0)
            net = Net().to(engine[0])
            optimizers = muon_and_adamw(net)
            step = ampkit.graphed_step(
                loss_fn, net, optimizers, scheduler=schedulers(optimizers), accumulate=2, graph=graph
            )
            with deterministic(), warnings.catch_warnings():
                warnings.simplefilter("ignore", ampkit.AmpkitWarning)
                for i in range(12):
                    pair = zip(batch(engine[0], 2 * i), batch(engine[0], 2 * i + 1), strict=True)
                    getattr(step, many)(*map(torch.stack, pair))
            ends.append(list(net.state_dict().values()))
        assert_same(*ends)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_that_has_no_gradients_at_first(engine: Engine) -> None:
    """R5: nothing is decided before each of them has stepped."""
    ends = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Net().to(engine[0])
        step = ampkit.graphed_step(loss_fn, net, muon_and_sgd(net), graph=graph)
        with deterministic(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)
            for i in range(16):
                net.inner.requires_grad_(i >= 4)
                step(*batch(engine[0], i))
        ends.append(list(net.state_dict().values()))
    assert_same(*ends)
    assert step.report().outcome == "whole"


def test_what_cannot_be() -> None:
    """R9: the message names the argument, what came and what to do."""
    net = Net()
    matrices, rest = net.split()
    adamw = torch.optim.AdamW(rest, fused=True)
    with pytest.raises(ValueError, match=r"optimizer\[1\]\): param_groups\[0\] holds 2 parameters that another optim"):
        ampkit.graphed_step(loss_fn, net, [adamw, torch.optim.SGD([*matrices, *rest[:2]], fused=True)])
    with pytest.raises(ValueError, match=r"expected a torch.optim.Optimizer, .*, or a list of them"):
        ampkit.graphed_step(loss_fn, net, [])
    with pytest.raises(ValueError, match=r"optimizer\[0\]"):
        ampkit.graphed_step(loss_fn, net, [net.parameters(), adamw])  # type: ignore[list-item]
    other = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(net.parameters()))
    with pytest.raises(ValueError, match=r"scheduler=ConstantLR\): it was made for another SGD"):
        ampkit.graphed_step(loss_fn, net, [adamw], scheduler=[other])
    with pytest.raises(NotImplementedError, match="this arithmetic takes one optimizer so far, not 2"):
        ampkit.graphed_step(
            loss_fn, net, [adamw, torch.optim.SGD(matrices, fused=True)], arithmetic="torch", graph="off"
        )
