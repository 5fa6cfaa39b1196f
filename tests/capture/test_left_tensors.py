"""Tensors that each call leaves somewhere on the host: behind a replay they are those of its graph."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from tape import taped
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
STATE: dict[str, Any] = {}


class Block(nn.Module):
    """Leaves a tensor in an attribute, in a dict, in a list, and in a tuple and an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.last: Any = None
        self.by_name: dict[str, Tensor] = {}
        self.in_order: list[Any] = [None, None]
        self.pair: Any = ()
        self.held = SimpleNamespace(loss=None)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x)
        self.last = h.sum(1)
        self.by_name["mean"] = h.mean()
        self.in_order[0] = h.amax(1)
        self.pair = (h.amin(1), h.abs().mean(1))
        self.held.loss = self.last.square().mean()
        return h


def left_in(model: Any, features: dict[str, Tensor]) -> list[Tensor]:
    block = model[0]
    found = [block.last, block.by_name["mean"], block.in_order[0], *block.pair, block.held.loss, STATE["out"]]
    return [tensor.detach().clone() for tensor in (*found, features["hook"])]


def train(engine: Engine, graph: str, between: Callable[[Any], None] = lambda model: None) -> tuple[Any, Any]:
    """Train on batches of two sizes in turn. Return what each call left, and the step."""
    device, _ = engine
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.Linear(4, 2)).to(device)
    features: dict[str, Tensor] = {}

    def keep(module: nn.Module, args: Any, out: Tensor) -> None:
        features["hook"] = out.mean(0)

    model[1].register_forward_hook(keep)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        STATE["out"] = out.sum(1)
        return out.square().mean() + model[0].held.loss  # type: ignore[index]

    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph)
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(20):
        step(torch.randn(2 + i % 2, 4, generator=generator).to(device))
        found.append(left_in(model, features))
        between(model)
    return found, step


@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_those_of_the_call(engine: Engine) -> None:
    """W1: with a graph for each of two shapes, an attribute is never that of the other graph."""
    with deterministic():
        expected, _ = train(engine, "off")
        with taped() if engine[0] == "cpu" else nullcontext():
            found, step = train(engine, engine[1])
    assert_same(found, expected)
    assert (step.captures, step.replays) == (2, 20 - 6)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_cleared_between_calls_comes_back(engine: Engine) -> None:
    """W1: users read such a tensor and delete it, or shorten a list."""

    def clear(model: Any) -> None:
        model[0].last = None
        model[0].in_order[:] = [None, None]
        STATE.clear()

    with deterministic():
        expected, _ = train(engine, "off", clear)
        with taped() if engine[0] == "cpu" else nullcontext():
            found, step = train(engine, engine[1], clear)
    assert_same(found, expected)
    assert step.replays > 8


def test_a_mask_that_is_compared_stays() -> None:
    """A tensor that is made once for each shape, and read, belongs to the key: no replay puts another one there."""

    class Masked(nn.Module):
        mask: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None or self.mask.shape[0] < x.shape[0]:
                self.mask = torch.ones(x.shape[0], 1)
            out: Tensor = self.fc(x) * self.mask[: x.shape[0]]
            return out

    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5)
    step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, graph="emulate")
    with taped():
        for i in range(20):
            step(torch.ones(2 + i % 2, 4))
    assert step.captures == 2
    assert step.replays > 8


# Sizes of batches: with a ragged last one per epoch, and those that lengths are sorted into.
ORDERS = ("446644664466446644664466", "4444444464444", "44444444666666664444", "464646464646464646", "6444444444444")


class Keeps(nn.Module):
    """Leaves a detached tensor in an attribute."""

    last: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x)
        self.last = h.detach().sum(1)
        return h.square().mean()


@pytest.mark.parametrize("sizes", ORDERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_one_of_another_size_is_not_left_over(engine: Engine, sizes: str) -> None:
    """W1: a replay behind an eager call of another size leaves its own, and either size is captured."""
    device, _ = engine

    def found(graph: str) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = Keeps().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(lambda model, x: model(x), model, optimizer, graph=graph)
        generator, left = torch.Generator().manual_seed(1), []
        for size in map(int, sizes):
            step(torch.randn(size, 4, generator=generator).to(device))
            left.append(model.last.clone())
        return left, step

    with deterministic():
        expected, _ = found("off")
        with taped() if engine[0] == "cpu" else nullcontext():
            now, step = found(engine[1])
    assert_same(now, expected)
    assert step.replays == len(sizes) - 3 * sum(sizes.count(size) > 3 for size in "46") - (sizes.count("6") == 1)


BESIDE: list[Any] = [None, None]


@pytest.mark.parametrize("change", ["other memory", "another tensor"])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_lies_beside_what_each_call_leaves(engine: Engine, change: str) -> None:
    """W2: a list with a tensor that calls read and one that they leave. Behind another one there is another graph."""
    device, graph = engine
    first, second = 0, 1

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = net(x) * BESIDE[first]
        BESIDE[second] = y.detach().mean(0)
        return y.square().mean()

    def losses(graph: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        BESIDE[:] = [torch.ones(4, device=device), None]
        net = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph)
        found = []
        for i in range(30):
            if i == 6 and change == "other memory":
                BESIDE[0].data = torch.full((4,), 0.5, device=device)
            elif i == 6:
                BESIDE[0] = torch.full((4,), 0.5, device=device)
            found.append(step(torch.ones(2, 4, device=device)).loss.item())
        return found, step

    with deterministic():
        expected, _ = losses("off")
        with taped() if device == "cpu" else nullcontext():
            found, step = losses(graph)
    assert found == expected
    assert step.captures == 2
    assert step.replays >= 8
