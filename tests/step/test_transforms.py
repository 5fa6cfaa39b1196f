"""Modules that `torch.func` calls (vmap, grad, jvp, functional_call), beside lines that no graph can hold."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import few
from harness import ENGINES, deterministic, training_state
from split_harness import WIDTH, Block, assert_same_as_eager
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import ampkit

pytestmark = [
    pytest.mark.usefixtures("untimed"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # jvp calls it
]

Engine = tuple[str, str]
Forward = Callable[[nn.Module, Tensor], Tensor]


def samples(block: nn.Module, x: Tensor) -> Tensor:
    return vmap(block, randomness="different")(x)


def mixed(block: nn.Module, x: Tensor) -> Tensor:
    return block(x) + samples(block, x) + block(x)


def slope(block: nn.Module, x: Tensor) -> Tensor:
    return grad(lambda rows: block(rows).square().sum())(x)


def directional(block: nn.Module, x: Tensor) -> Tensor:
    return jvp(block, (x,), (torch.ones_like(x),))[1]


def other_weights(block: nn.Module, x: Tensor) -> Tensor:
    return functional_call(block, {name: 1.5 * param for name, param in block.named_parameters()}, (x,))


def ensemble(block: nn.Module, x: Tensor) -> Tensor:
    """As with `torch.func.stack_module_state`: one call for several sets of weights."""
    stacked = {name: torch.stack([param, 2 * param]) for name, param in block.named_parameters()}
    call = vmap(lambda params: functional_call(block, params, (x,)), randomness="different")
    return call(stacked).sum(0)


def per_sample_gradients(block: nn.Module, x: Tensor) -> Tensor:
    def loss(params: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(block, params, (row,)).square().sum()

    found = vmap(grad(loss), (None, 0), randomness="different")(dict(block.named_parameters()), x)
    return x + sum(each.flatten(1).norm(dim=1, keepdim=True) for each in found.values())


FORWARDS: list[Forward] = [
    samples,
    mixed,
    slope,
    directional,
    other_weights,
    ensemble,
    per_sample_gradients,
]


class Transformed(nn.Module):
    """A block that a transform calls, a line that reads a value, and a block that is called as it is."""

    def __init__(self, call: Forward) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.first.dropout = nn.Dropout(0.2 if call is not slope else 0.0)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.call(self.first, x)
        return self.second(hidden) * (2.0 if float(hidden.detach().abs().max()) > 0.5 else 1.0)


class Within(nn.Module):
    """A module in which a transform calls a block: it can be captured by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(samples(self.block, x))


def train(engine: Engine, make: Callable[[], nn.Module], graph: str) -> tuple[ampkit.GraphedStep, Any]:
    torch.manual_seed(5)
    model = make().to(engine[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    scaler = ampkit.GradScaler(engine[0], enabled=False)
    step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, scaler=scaler, graph=graph)
    drawn = torch.Generator().manual_seed(3)
    losses = [step(torch.randn(4, WIDTH, generator=drawn).to(engine[0])).loss for _ in range(9)]
    return step, [losses, training_state(model, optimizer, scaler)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("call", few(FORWARDS, (mixed, ensemble)), ids=lambda call: call.__name__)
@pytest.mark.sampled(2)
def test_a_module_that_a_transform_calls_stays_eager(engine: Engine, call: Forward) -> None:
    """R4: its calls within the transform are no parts. Its other calls, and the other module, are."""
    step = assert_same_as_eager(engine, lambda graph: train(engine, lambda: Transformed(call), graph))
    report = step.report()
    assert report.outcome == "in parts", str(report)
    replayed = [part.module for part in report.parts if part.replays]
    assert replayed == (["first", "first", "second"] if call is mixed else ["second"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_with_a_transform_in_it_is_captured(engine: Engine) -> None:
    """R4: the transform is a part of its graph."""

    def make() -> nn.Module:
        model = Transformed(lambda block, x: block(x))
        model.first = Within()
        return model

    report = assert_same_as_eager(engine, lambda graph: train(engine, make, graph)).report()
    assert [part.module for part in report.parts if part.replays] == ["first", "second"], str(report)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("call", [samples, slope], ids=lambda call: call.__name__)
def test_a_graphed_callable_that_a_transform_calls(engine: Engine, call: Forward) -> None:
    """Such a call is eager, and the next one outside of a transform replays the graphs."""
    with deterministic():
        torch.manual_seed(5)
        block = Block().to(engine[0]).requires_grad_(True)
        block.dropout.p = 0.0
        x = torch.randn(4, WIDTH, device=engine[0])
        expected = call(block, x).detach()
        ampkit.make_graphed_callables(block, (x.clone(),), graph=engine[1])
        found = call(block, x).detach()
        assert torch.equal(found, expected)
        block(x)
        graphed: Any = block.forward
        assert graphed.eager == {"within a transform of torch.func": 1}
        assert graphed.replays == 1
