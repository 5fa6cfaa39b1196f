"""Draws of the host that only feed comparisons: each outcome is a graph of its own, or an eager step."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, training_state
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
Decide = Callable[[float], bool]

DECISIONS: dict[str, Decide] = {
    "rand([]) < p": lambda p: bool(torch.rand([]) < p),
    "p > rand(1)": lambda p: bool(p > torch.rand(1)),
    "not rand(()) >= p": lambda p: not torch.rand(()) >= p,
    "bernoulli": lambda p: bool(torch.bernoulli(torch.tensor(p))),
    "bernoulli of full": lambda p: bool(torch.bernoulli(torch.full((), p)) == 1),
    "uniform_": lambda p: bool(torch.empty([]).uniform_(0, 1) < p),
    "randint": lambda p: torch.randint(0, 10, ()).item() < 10 * p,
    "randn": lambda p: bool(torch.randn(2).abs().sum() < p),
    "any": lambda p: (torch.rand(2) < p / 2).any().item(),
}


class Layers(nn.Module):
    """A stack of layers of which each may be skipped, as transformers does it."""

    def __init__(self, rate: float, layers: int = 4, decide: Decide | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(6, 3)
        self.rate = rate
        self.decide = decide or DECISIONS["rand([]) < p"]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.decide(self.rate):
                continue
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.last(x)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    return F.cross_entropy(logits, y), {"mean": logits.mean()}


class Twins:
    """The same training with graphs and without, each with its own state of the CPU generator."""

    def __init__(self, engine: Engine, make: Callable[[], nn.Module], loss: Any = loss_fn, **options: Any) -> None:
        device, graph = engine
        self.device = device
        self.sides = []
        torch.manual_seed(11)
        model = make().to(device)
        for kind in (graph, "off"):
            mine = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2, fused=True)
            step = ampkit.graphed_step(loss, mine, optimizer, graph=kind, **options)
            self.sides.append((mine, optimizer, step))
        self.random = [random_state(device), random_state(device)]

    @property
    def step(self) -> ampkit.GraphedStep:
        return self.sides[0][2]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(number)
        x, y = torch.randn(5, 6, generator=made), torch.randint(3, (5,), generator=made)
        return x.to(self.device), y.to(self.device)

    def call(self, number: int, between: Callable[[], object] = lambda: None, **named: Any) -> None:
        """Do one step on each side, and compare all that there is."""
        outs, states = [], []
        for side, (model, optimizer, step) in enumerate(self.sides):
            set_random_state(self.random[side])
            between()
            outs.append(step(*self.batch(number), **named))
            states.append(training_state(model, optimizer, step.scaler))
            self.random[side] = random_state(self.device)
        where = f"call {number}"
        for name in ("loss", "aux", "skipped", "grad_norm"):
            assert_same(getattr(outs[0], name), getattr(outs[1], name), f"{where}: {name}")
        assert_same(states[0], states[1], where)


def random_state(device: str) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


@pytest.mark.parametrize("engine", ENGINES)
def test_one_graph_serves_all_calls_if_no_layer_is_ever_dropped(engine: Engine) -> None:
    """R3: `rand < 0.0` is never true. The CPU generator moves on in each replay as in an eager step."""
    twins = Twins(engine, lambda: Layers(0.0), on_failure="raise")
    for number in range(10):
        twins.call(number)
    report = twins.step.report()
    assert (report.graphs, report.captures, report.replays) == (1, 1, 7)
    assert report.eager == {"warm-up": 3}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_each_outcome_is_a_graph_or_an_eager_step(engine: Engine, rate: float) -> None:
    """R3: losses, state and generators are those of the eager step in each of 60 calls."""
    twins = Twins(engine, lambda: Layers(rate), max_graphs=5)
    for number in range(60):
        twins.call(number)
    report = twins.step.report()
    assert 1 < report.graphs <= 5
    assert report.replays > 10
    print(report)
