"""Values that a step reads and that change between two calls, one of each kind: replays call no Python here."""

import collections
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, deterministic
from host_reads import CASES, made
from tape import taped
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
VALUE: Any = None
TENSORS: dict[str, Callable[[Tensor], object]] = {
    "data": lambda w: made(w, data=torch.full((2,), 3.0, device=w.device)),
    "set_": lambda w: w.set_(torch.full((2,), 3.0, device=w.device)),
    "strides": lambda w: made(w, data=torch.tensor([[3.0, 9.0], [3.0, 9.0]], device=w.device)[:, 0]),
}


def losses(engine: Engine, graph: str, read: Callable[[Any], Any], change: Callable[[Any], object]) -> Any:
    """Train with `VALUE`, change it, and train on. Return the losses, the replays and what the warnings said."""
    device, _ = engine
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6, fused=True)
    step = ampkit.graphed_step(lambda net, x: net(x).square().mean() * read(VALUE), net, optimizer, graph=graph)
    x = torch.ones(2, 4, device=device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [step(x).loss.item() for _ in range(6)]
        change(VALUE)
        found += [step(x).loss.item() for _ in range(6)]
    return found, step.replays, [str(each.message) for each in said if issubclass(each.category, ampkit.AmpkitWarning)]


def check(engine: Engine, make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], object]) -> None:
    """Check that a change is noticed, said, and that there are replays before and behind it."""
    global VALUE
    with deterministic():
        VALUE = make()
        eager, _, _ = losses(engine, "off", read, change)
        assert eager[6] / eager[5] > 1.5  # that there is something to notice
        VALUE = make()
        with taped() if engine[0] == "cpu" else nullcontext():
            found, replays, said = losses(engine, engine[1], read, change)
    assert found == eager
    assert replays >= 4, said
    assert any("changed" in each for each in said), said


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.quick(3)
def test_a_change_is_noticed(kind: str, engine: Engine) -> None:
    """W2: a replay with the old value would be silently wrong."""
    check(engine, *CASES[kind])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", TENSORS)
def test_other_memory_of_a_tensor_is_noticed(kind: str, engine: Engine) -> None:
    """W2: a tensor of no module is the same object, and its values are elsewhere."""
    check(engine, lambda: torch.ones(2, device=engine[0]), lambda w: w.sum(), TENSORS[kind])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale()

    def scale(self) -> float:
        return 1.0


@pytest.mark.parametrize("way", ["code", "method"])
def test_code_of_a_model_that_is_reloaded(way: str) -> None:
    """W2: autoreload gives methods other code in place; others put another function into the class."""
    model, first = Model(), Model.scale
    code = first.__code__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = ampkit.graphed_step(lambda model, x: model(x).sum(), model, optimizer, graph="emulate")
    x = torch.ones(2, 4)
    with taped():
        before = [step(x).loss.item() for _ in range(6)][-1]
        try:
            if way == "code":
                first.__code__ = (lambda self: 3.0).__code__
            else:
                Model.scale = lambda self: 3.0  # type: ignore[method-assign]
            with pytest.warns(ampkit.CaptureWarning, match=r"the method test_values_noticed\.Model\.scale changed"):
                after = [step(x).loss.item() for _ in range(6)]
        finally:
            first.__code__ = code
            Model.scale = first  # type: ignore[method-assign]
    assert after == pytest.approx([3 * before] * 6)
    assert step.captures == 2


def test_what_the_first_call_fills_is_compared() -> None:
    """W2: an entry that only the first call has made is a setting from then on; one that each call changes is not."""
    table: Any = collections.defaultdict(lambda: 1.0)
    made_again: Any = {"last": None}

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        made_again["last"] = object()
        return model(x).sum() * table["a"]

    model = nn.Linear(4, 4)
    step = ampkit.graphed_step(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.0), graph="emulate")
    for _ in range(8):
        step(torch.ones(2, 4))
    assert (step.captures, step.replays) == (1, 3)
    table["a"] = 3.0
    with pytest.warns(ampkit.CaptureWarning, match=r"table\['a'\] changed from 1.0 to 3.0"):
        step(torch.ones(2, 4))
