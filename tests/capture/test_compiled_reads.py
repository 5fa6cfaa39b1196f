"""What code reads that the user has compiled: Python calls none of its functions, and it holds numbers as constants."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import leave_out_inductor
from torch import Tensor, nn

import ampkit

# Each test sets these anew.
ALPHA = BETA = 1.0
CONFIG: Any = None


class Offset:
    """An object with a method that the compiled function calls."""

    def __init__(self) -> None:
        self.offset = 1.0

    def of(self, x: Tensor) -> Tensor:
        return x + self.offset


class Model(nn.Module):
    """Reads an attribute of its own, a global variable, and the rate of a dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.gain, self.calls = nn.Linear(4, 2), nn.Dropout(0.5), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)) * self.gain * ALPHA


def called(x: Tensor) -> Tensor:
    return x * BETA


def given(config: Any, x: Tensor) -> Tensor:
    return x * config.scale


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss = given(CONFIG.inner, called(model(x).square().mean()))
    if CONFIG.inner.bound:
        loss = loss + CONFIG.inner.unread
    return CONFIG.offset.of(loss)


Change = Callable[[Model], object]
CHANGES: dict[str, Change] = {
    "global variable of a module": lambda model: globals().update(ALPHA=2.0),
    "global variable of a function that is called": lambda model: globals().update(BETA=2.0),
    "what a function is given": lambda model: setattr(CONFIG.inner, "scale", 2.0),
    "of the object of a method": lambda model: setattr(CONFIG.offset, "offset", 2.0),
    "another object": lambda model: setattr(CONFIG, "inner", SimpleNamespace(scale=2.0, bound=False, unread=0.0)),
    "behind a condition": lambda model: setattr(CONFIG.inner, "bound", True),
    "attribute of a module": lambda model: setattr(model, "gain", 2.0),
    "rate of a dropout": lambda model: setattr(model.drop, "p", 0.1),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compiled code is made anew, and a number that has changed is a constant of the next code, too.

    Otherwise dynamo reads it by `.item()` from a tensor, which the preflight refuses where the step is on a CPU.
    """
    torch._dynamo.reset()
    inner = SimpleNamespace(scale=1.0, bound=False, unread=0.0)
    globals().update(ALPHA=1.0, BETA=1.0, CONFIG=SimpleNamespace(inner=inner, offset=Offset()))
    with torch._dynamo.config.patch(specialize_float=True):
        yield
    torch._dynamo.reset()


def make_step(way: str, model: Model) -> Any:
    """Return a step with a part that torch.compile has compiled."""
    parts: tuple[Any, Any] = loss_fn, model
    if way == "the loss":
        parts = torch.compile(loss_fn, backend="eager"), model
    elif way == "the module":
        parts = loss_fn, torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    else:
        compiled = torch.compile(loss_fn, backend="eager")
        parts = (lambda model, x: compiled(model, x)), model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return ampkit.graphed_step(*parts, optimizer, graph="emulate")


def train(step: Any, calls: int) -> None:
    for _ in range(calls):
        step(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore::ampkit.AmpkitWarning")
@pytest.mark.parametrize("way", ["the loss", "the module", "in place", "within the loss"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.sampled(8)
@pytest.mark.quick(2)
def test_a_change_is_noticed(change: str, way: str) -> None:
    """R7: another value of what compiled code holds as a constant is another graph."""
    step = make_step(way, model := Model())
    train(step, 8)
    assert (step.captures, step.replays) == (1, 5)
    CHANGES[change](model)
    train(step, 5)
    assert (step.captures, step.replays) == (2, 7)


@pytest.mark.slow
def test_code_that_was_compiled_before() -> None:
    """R7: the functions in it are found, though nothing is compiled while the step is watched."""
    model = Model()
    compiled = torch.compile(loss_fn, backend="eager")
    compiled(model, torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(lambda model, x: compiled(model, x), model, optimizer, graph="emulate")
    train(step, 8)
    CONFIG.inner.scale = 2.0
    with pytest.warns(ampkit.CaptureWarning, match=r"CONFIG\.inner\.scale changed from 1\.0 to 2\.0"):
        train(step, 5)
    assert (step.captures, step.replays) == (2, 7)


class Trainer:
    """Keeps the results of its calls, and an average behind each step."""

    def __init__(self, model: Model) -> None:
        self.model, self.outputs = model, list[Any]()
        self.average = [param.detach().clone() for param in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        self.step = ampkit.graphed_step(
            loss_fn, model, optimizer, after_step=self.after_step, compile="default", graph="emulate"
        )

    def __call__(self) -> None:
        self.outputs.append(self.step(torch.ones(2, 4)))

    def after_step(self, model: nn.Module) -> None:
        torch._foreach_lerp_(self.average, list(model.parameters()), 0.1)


@pytest.mark.slow
def test_a_method_behind_the_step_is_no_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """W2: what other methods of its object read, such as a list that grows, is no matter to the compiled loss."""
    leave_out_inductor(monkeypatch)
    trainer = Trainer(Model())
    for _ in range(10):
        trainer()
    assert (trainer.step.captures, trainer.step.replays) == (1, 7)


def test_a_counter_of_a_compiled_module() -> None:
    """A number that no code of the step reads makes no graph of its own."""
    step = make_step("the module", model := Model())
    for _ in range(8):
        model.calls += 1
        train(step, 1)
    assert (step.captures, step.replays) == (1, 5)


def largest(model: nn.Module, x: Tensor) -> Tensor:
    weight = max(WEIGHTED, key=lambda each: each.weight).weight
    return model(x).square().mean() * weight


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    @property
    def scaled(self) -> float:
        return self.weight * ALPHA

    @staticmethod
    def power(x: Tensor) -> Tensor:
        return x * CONFIG.inner.scale

    @classmethod
    def shifted(cls, x: Tensor) -> Tensor:
        return x + cls.shift

    shift = 1.0


def by_other_ways(model: nn.Module, x: Tensor) -> Tensor:
    y = Weighted.power(Weighted.shifted(model(x).square().mean())) * WEIGHTED[0].scaled
    for function in FUNCTIONS:
        y = function(y)
    return y


WEIGHTED = [Weighted(1.0), Weighted(2.0)]
FUNCTIONS: Any = [lambda y: y * BETA]


@pytest.mark.filterwarnings("ignore::ampkit.AmpkitWarning")
@pytest.mark.slow
def test_compiled_code_without_a_hash() -> None:
    """Dynamo puts a dict among its constants for the argument `key`; the step does not end with an error by that."""
    WEIGHTED[:] = [Weighted(1.0), Weighted(2.0)]
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(torch.compile(largest, backend="eager"), model, optimizer, graph="emulate")
    train(step, 8)
    WEIGHTED[1].weight = 3.0
    train(step, 5)
    assert step.captures == 2


@pytest.mark.filterwarnings("ignore::ampkit.AmpkitWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda: setattr(Weighted, "shift", 2.0),
        lambda: setattr(CONFIG.inner, "scale", 2.0),
        lambda: setattr(WEIGHTED[0], "weight", 2.0),
        lambda: globals().update(ALPHA=2.0),
        lambda: globals().update(BETA=2.0),
        lambda: FUNCTIONS.append(lambda y: y * 2.0),
    ],
    ids=["class method", "static method", "property", "in a property", "function of a list", "one function more"],
)
@pytest.mark.quick(3)
def test_functions_that_compiled_code_calls(change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: methods of classes, properties, functions in a list: Python calls none of them once they are compiled."""
    WEIGHTED[:], FUNCTIONS[:] = [Weighted(1.0)], [lambda y: y * BETA]
    monkeypatch.setattr(Weighted, "shift", 1.0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(torch.compile(by_other_ways, backend="eager"), model, optimizer, graph="emulate")
    train(step, 8)
    change()
    train(step, 5)
    assert step.captures == 2
