"""What calls leave on the host beside tensors: numbers, texts, None, lists. Replays leave it, or there are none."""

from collections.abc import Callable, Iterator
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

OTHERS: dict[str, Any] = {}  # a dict of the module that the step is in
KIND = ""  # and a variable of it


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with deterministic(), taped() if request.param[0] == "cpu" else nullcontext():
        yield request.param


class Net(nn.Module):
    """A layer, and what `write` changes."""

    def __init__(self, write: Callable[["Net", Tensor], object]) -> None:
        super().__init__()
        self.fc, self.write = nn.Linear(4, 4), write
        self.kind: Any = ""
        self.table: dict[str, Any] = {}
        self.values: list[Any] = []
        self.config = SimpleNamespace(kind="")
        self.first: Tensor = torch.zeros(4)
        self.second: Tensor = torch.ones(4)  # on the host

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        self.write(self, x)
        return y.square().mean()


class Way:
    """How a step writes, what the loop does beside it, and what there is to be seen."""

    def __init__(self, write: Callable[[Any, Tensor], object], touch: Callable[[Any], object], sees: Any) -> None:
        self.write, self.touch, self.sees = write, touch, sees


def in_attribute(net: Any, x: Tensor) -> None:
    net.kind = f"of {len(x)}"


def in_dict(net: Any, x: Tensor) -> None:
    net.table["kind"] = len(x)


def in_object(net: Any, x: Tensor) -> None:
    net.config.kind = x.shape


def in_another_module(net: Any, x: Tensor) -> None:
    OTHERS["kind"] = len(x)


def in_a_global_variable(net: Any, x: Tensor) -> None:
    global KIND
    KIND = f"of {len(x)}"


def reset_the_variable(net: Any) -> None:
    global KIND
    KIND = "reset"


def nothing_there(net: Any, x: Tensor) -> None:
    net.kind = None


def a_flag(net: Any, x: Tensor) -> None:
    net.kind = True


def a_new_list(net: Any, x: Tensor) -> None:
    net.values = []
    net.values.append(len(x))


def a_list_that_is_cleared(net: Any, x: Tensor) -> None:
    net.values.clear()
    net.values.append(x.detach().sum())


def an_entry_that_goes(net: Any, x: Tensor) -> None:
    net.table.pop("gone", None)


def another_tensor_in_an_attribute(net: Any, x: Tensor) -> None:
    net.first = net.second


def another_tensor_in_a_dict(net: Any, x: Tensor) -> None:
    net.table["first"] = net.second


def to_and_fro(net: Any, x: Tensor) -> None:
    net.kind, net.table["before"] = len(x), net.kind


def setting(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda net: setattr(net, name, value())


def attribute(name: str) -> Callable[[Any], Any]:
    return lambda net: getattr(net, name)


WAYS = {
    "attribute": Way(in_attribute, setting("kind", lambda: "reset"), attribute("kind")),
    "dict": Way(in_dict, lambda net: net.table.update(kind="reset"), lambda net: dict(net.table)),
    "object": Way(in_object, lambda net: vars(net.config).update(kind=0), lambda net: net.config.kind),
    "another module": Way(in_another_module, lambda net: OTHERS.update(kind=-1), lambda net: dict(OTHERS)),
    "global": Way(in_a_global_variable, reset_the_variable, lambda net: KIND),
    "none": Way(nothing_there, setting("kind", lambda: [1]), attribute("kind")),
    "flag": Way(a_flag, setting("kind", lambda: False), attribute("kind")),
    "new list": Way(a_new_list, lambda net: net.values.clear(), lambda net: list(net.values)),
    "cleared list": Way(a_list_that_is_cleared, lambda net: net.values.clear(), lambda net: list(net.values)),
    "entry": Way(an_entry_that_goes, lambda net: net.table.update(gone=1), lambda net: dict(net.table)),
    "another tensor": Way(another_tensor_in_an_attribute, setting("first", lambda: torch.ones(2)), attribute("first")),
    "another in a dict": Way(
        another_tensor_in_a_dict, lambda net: net.table.update(first=torch.ones(2)), lambda net: dict(net.table)
    ),
    "to and fro": Way(to_and_fro, setting("kind", lambda: 0), lambda net: (net.kind, dict(net.table))),
}
SIZES = {"one size": "4" * 24, "two sizes": "46" * 15}


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize(("start", "period"), [(0, 1), (0, 2), (9, 3), (99, 1)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.quick(12)
def test_what_calls_leave_is_there(engine: Engine, way: Way, sizes: str, start: int, period: int) -> None:
    """W1, W2: behind each call the host has what it has behind eager ones, whatever the loop puts there in between."""

    def history(graph: str) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        OTHERS.clear()
        reset_the_variable(None)
        net = Net(way.write).to(engine[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-7, fused=True)
        step = ampkit.graphed_step(lambda net, x: net(x), net, optimizer, graph=graph)
        generator, found = torch.Generator().manual_seed(1), list[Any]()
        for i, size in enumerate(map(int, sizes)):
            if i >= start and i % period == 0:
                way.touch(net)
            loss = step(torch.randn(size, 4, generator=generator).to(engine[0])).loss
            found.append((loss.item(), seen(way.sees(net))))
        return found, step

    found, step = history(engine[1])
    assert found == history("off")[0]
    if (start, period) == (99, 1):  # the loop touches nothing
        assert step.replays >= len(sizes) // 2, step.report()


def seen(value: Any) -> Any:
    """Return a value with numbers in place of tensors."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: seen(entry) for key, entry in value.items()}
    return list(map(seen, value)) if isinstance(value, list) else value
