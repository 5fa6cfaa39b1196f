"""What lies beside what each call rewrites: the other entries of a list or dict, and what is in them, still count."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ENGINES, deterministic
from tape import taped
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]

LIST: list[Any] = []
DICT: dict[Any, Any] = {}


class Base:
    """Has a number that is read through its child."""

    scale = 1.0


class Child(Base):
    """Reads it."""

    def up(self) -> float:
        return super().scale


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("p",)

    def __init__(self) -> None:
        self.p = 1.0


class Net(nn.Module):
    """A layer, and containers with two entries."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.values: list[Any] = [None, None]
        self.table: dict[Any, Any] = {}
        self.config = SimpleNamespace(values=[None, None])


# What holds the entries, and the keys of the one that calls rewrite and the one that they read.
PLACES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "global list": (lambda net: LIST, 0, 1),
    "global dict": (lambda net: DICT, "a", "b"),
    "global dict by number": (lambda net: DICT, 0, 1),
    "list of a module": (lambda net: net.values, 0, 1),
    "dict of a module": (lambda net: net.table, "a", "b"),
    "dict of a module by number": (lambda net: net.table, 0, 1),
    "list of an object": (lambda net: net.config.values, 0, 1),
}
# How what calls read is made, how they read it, and what the loop puts there, or changes in it.
READ: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "number": (lambda: 1.0, lambda value: value, lambda value: 3.0),
    "text": (lambda: "a", lambda value: 1.0 if value == "a" else 3.0, lambda value: "b"),
    "tensor": (lambda: torch.ones(4), lambda value: value, lambda value: torch.full_like(value, 3.0)),
    "memory": (lambda: torch.ones(4), lambda value: value, lambda value: with_memory(value)),
    "object": (lambda: SimpleNamespace(p=1.0), lambda value: value.p, lambda value: vars(value).update(p=3.0)),
    "slots": (Slotted, lambda value: value.p, lambda value: setattr(value, "p", 3.0)),
    "list": (lambda: [1.0], lambda value: value[0], lambda value: value.__setitem__(0, 3.0)),
    "dict": (lambda: {"p": 1.0}, lambda value: value["p"], lambda value: value.update(p=3.0)),
    "class": (Child, lambda value: value.up(), lambda value: setattr(Base, "scale", 3.0)),
}


def with_memory(tensor: Tensor) -> None:
    tensor.data = torch.full_like(tensor, 3.0)


def rewritten(way: str, was: Any, y: Tensor) -> Any:
    mean = y.detach().mean(0)
    if way == "average":
        return mean if was is None else 0.5 * was + mean
    return mean if way == "tensor" else len(y)


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("way", "sizes"), [("tensor", "4" * 26), ("average", "4466" * 6), ("number", "4466" * 6)])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.quick(24)
def test_what_is_beside_counts(engine: Engine, place: str, read: str, way: str, sizes: str) -> None:
    """W2: where the loop changes it, the next call computes with it."""
    held, first, second = PLACES[place]
    make, value_of, change = READ[read]

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        one, other = first, second
        table = held(net)
        y: Tensor = net.fc(x) * value_of(table[other])
        table[one] = rewritten(way, table[one], y)
        return y.square().mean()

    def losses(graph: str) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        Base.scale, LIST[:] = 1.0, [None, None]
        DICT.clear()
        net = Net().to(engine[0])
        found = make()
        found = found.to(engine[0]) if isinstance(found, Tensor) else found
        table = held(net)
        table[first], table[second] = None, found
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6, fused=True)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph)
        generator, losses = torch.Generator().manual_seed(1), list[float]()
        for i, size in enumerate(map(int, sizes)):
            if i == 9 and (new := change(table[second])) is not None:
                table[second] = new
            losses.append(step(torch.randn(size, 4, generator=generator).to(engine[0])).loss.item())
        Base.scale = 1.0
        return losses, step

    with deterministic():
        expected, _ = losses("off")
        with taped() if engine[0] == "cpu" else nullcontext():
            found, step = losses(engine[1])
    assert found == expected
    if way != "number":  # which is compared, and is that of the other size in turn
        assert step.replays >= 3, step.report()
