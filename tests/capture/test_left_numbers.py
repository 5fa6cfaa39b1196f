"""What calls leave on the host beside tensors: numbers, texts, None, lists. Replays leave it, or there are none."""

import contextvars
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from harness import ENGINES, deterministic
from tape import taped
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]

OTHERS: dict[str, Any] = {}  # a dict of the module that the step is in
KIND = ""  # and a variable of it
LAST: Any = None  # and another one, for a tensor
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("context", default=0)
ARRAY = numpy.zeros(2)


class Settings:
    """What is set is an attribute of the class."""

    training = False


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("kind", "last")

    def __init__(self) -> None:
        self.kind, self.last = 0, None


@dataclasses.dataclass(frozen=True)
class Frozen:
    """An object that is replaced as a whole."""

    size: int = 0


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with deterministic(), taped() if request.param[0] == "cpu" else nullcontext():
        yield request.param


class Net(nn.Module):
    """A layer, and what `write` changes."""

    turns = False

    def __init__(self, write: Callable[["Net", Tensor], object]) -> None:
        super().__init__()
        self.fc, self.write = nn.Linear(4, 4), write
        self.kind: Any = ""
        self.table: dict[str, Any] = {}
        self.values: list[Any] = []
        self.config = SimpleNamespace(kind="")
        self.recent: deque[Any] = deque([0, 0], maxlen=2)
        self.slotted, self.frozen = Slotted(), Frozen()
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
        # What replays do not set, lists of tensors that move on, and where code asks what it has found.
        self.is_refused = write in (
            a_text_or_a_tensor,
            in_a_class,
            in_the_class_of_the_model,
            a_tensor_in_a_deque,
            in_a_context,
            in_an_array,
        )


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


def in_a_class(net: Any, x: Tensor) -> None:
    Settings.training = not Settings.training


def in_the_class_of_the_model(net: Any, x: Tensor) -> None:
    type(net).turns = not type(net).turns


def in_a_deque(net: Any, x: Tensor) -> None:
    net.recent.append(len(x))


def a_tensor_in_a_deque(net: Any, x: Tensor) -> None:
    net.recent.append(x.detach().sum())


def in_a_context(net: Any, x: Tensor) -> None:
    CONTEXT.set(1 - CONTEXT.get())


def in_an_array(net: Any, x: Tensor) -> None:
    ARRAY[0] = 1 - ARRAY[0]


def in_slots(net: Any, x: Tensor) -> None:
    net.slotted.kind, net.slotted.last = len(x), x.detach().sum()


def in_a_function(net: Any, x: Tensor) -> None:
    in_a_function.kind = len(x)  # type: ignore[attr-defined]


def in_a_frozen_object(net: Any, x: Tensor) -> None:
    net.frozen = dataclasses.replace(net.frozen, size=len(x))


def a_list_in_two_places(net: Any, x: Tensor) -> None:
    net.values = net.table["values"] = [len(x)]


def a_list_that_is_full(net: Any, x: Tensor) -> None:
    if len(net.values) >= 2:
        net.values.clear()
    net.values.append(1)


def a_tensor_in_a_variable(net: Any, x: Tensor) -> None:
    global LAST
    LAST = x.detach().sum()


def by_keyword(net: Any, x: Tensor) -> None:
    net.table.update(size=len(x), phase="train")


def a_number_or_a_tensor(net: Any, x: Tensor) -> None:
    net.table["found"] = len(x) if len(x) == 4 else x.detach().sum()


def a_text_or_a_tensor(net: Any, x: Tensor) -> None:
    if len(x) == 4:
        net.table["was_text"] = isinstance(net.kind, str)
    net.kind = x.detach().sum() if len(x) == 4 else "text"


def none_or_a_tensor_in_a_list(net: Any, x: Tensor) -> None:
    if not net.values:
        net.values = [None]
    net.table["was"] = net.values[0] is None
    net.values[0] = x.detach().sum() if len(x) == 4 else None


def functions_take_turns(net: Any, x: Tensor) -> None:
    net.kind, net.table["other"] = net.table.get("other", torch.tanh), net.kind or torch.relu


def reset_all(net: Any) -> None:
    """Put back what lies beside the model."""
    global LAST
    LAST, Settings.training, ARRAY[:] = None, False, 0
    CONTEXT.set(0)
    in_a_function.kind = 0  # type: ignore[attr-defined]
    Net.turns = False


def setting(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda net: setattr(net, name, value())


def attribute(name: str) -> Callable[[Any], Any]:
    return lambda net: getattr(net, name)


WAYS = {
    "attribute": Way(in_attribute, setting("kind", lambda: "reset"), attribute("kind")),
    "dict": Way(in_dict, lambda net: net.table.update(kind="reset"), lambda net: dict(net.table)),
    "object": Way(in_object, lambda net: vars(net.config).update(kind=0), lambda net: net.config.kind),
    "dict replaced": Way(in_dict, setting("table", lambda: {"kind": 0}), lambda net: dict(net.table)),
    "object replaced": Way(in_object, setting("config", lambda: SimpleNamespace(kind="")), lambda net: net.config.kind),
    "list replaced": Way(a_list_that_is_cleared, setting("values", lambda: [torch.zeros(())]), attribute("values")),
    "slots replaced": Way(in_slots, setting("slotted", Slotted), lambda net: [net.slotted.kind, net.slotted.last]),
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
    "class": Way(in_a_class, reset_all, lambda net: Settings.training),
    "class of the model": Way(in_the_class_of_the_model, reset_all, lambda net: net.turns),
    "deque": Way(in_a_deque, lambda net: net.recent.append(-1), lambda net: list(net.recent)),
    "tensors in a deque": Way(a_tensor_in_a_deque, lambda net: net.recent.append(-1), lambda net: list(net.recent)),
    "context": Way(in_a_context, reset_all, lambda net: CONTEXT.get()),
    "array": Way(in_an_array, reset_all, lambda net: ARRAY.tolist()),
    "slots": Way(
        in_slots, lambda net: setattr(net.slotted, "kind", 0), lambda net: [net.slotted.kind, net.slotted.last]
    ),
    "function": Way(in_a_function, reset_all, lambda net: getattr(in_a_function, "kind", 0)),
    "frozen": Way(in_a_frozen_object, setting("frozen", Frozen), lambda net: net.frozen.size),
    "two places": Way(
        a_list_in_two_places,
        lambda net: net.values.append(9),
        lambda net: [net.values, net.values is net.table.get("values")],
    ),
    "full": Way(a_list_that_is_full, lambda net: net.values.append(1), lambda net: list(net.values)),
    "tensor in a variable": Way(a_tensor_in_a_variable, reset_all, lambda net: LAST),
    "keyword": Way(by_keyword, lambda net: net.table.update(phase="test"), lambda net: dict(net.table)),
    "number or tensor": Way(a_number_or_a_tensor, lambda net: net.table.clear(), lambda net: dict(net.table)),
    "text or tensor": Way(a_text_or_a_tensor, setting("kind", lambda: 1), lambda net: [net.kind, dict(net.table)]),
    "none or tensor": Way(
        none_or_a_tensor_in_a_list, lambda net: net.values.clear(), lambda net: [list(net.values), dict(net.table)]
    ),
    "functions": Way(functions_take_turns, setting("kind", lambda: None), lambda net: str(net.kind)),
    "to and fro": Way(to_and_fro, setting("kind", lambda: 0), lambda net: (net.kind, dict(net.table))),
}
SIZES = {"one size": "4" * 24, "two sizes": "46" * 15, "now and then": "444446" * 5, "in pairs": "4466" * 6}


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
        reset_all(None)
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
    is_regular = sizes in (SIZES["one size"], SIZES["two sizes"])
    if (start, period) == (99, 1) and is_regular and not way.is_refused:  # the loop touches nothing
        assert step.replays >= len(sizes) // 2, step.report()


def seen(value: Any) -> Any:
    """Return a value with numbers in place of tensors."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: seen(entry) for key, entry in value.items()}
    return list(map(seen, value)) if isinstance(value, list) else value


def in_a_list(net: Any, h: Tensor | None = None) -> Any:
    if h is not None:
        net.values = [h]
    return net.values[0] if net.values else None


def in_an_object(net: Any, h: Tensor | None = None) -> Any:
    if h is not None:
        net.config = SimpleNamespace(h=h)
    return getattr(net.config, "h", None)


def in_a_tuple(net: Any, h: Tensor | None = None) -> Any:
    if h is not None:
        net.kind = (h, 1.0)
    return net.kind[0] if net.kind else None


def in_a_variable(net: Any, h: Tensor | None = None) -> Any:
    global LAST
    if h is not None:
        LAST = h
    return LAST


class Remembers(Net):
    """Reads what it has put into something new in the last call."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).mean(0)
        before = self.write(self)  # type: ignore[call-arg]
        h = h if before is None else h + 0.25 * before
        self.write(self, h.detach())
        loss: Tensor = h.square().mean()
        return loss


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("holds", [False, True], ids=["", "held by the loop"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("way", [in_a_list, in_an_object, in_a_tuple, in_a_variable])
def test_what_is_read_is_that_of_the_last_call(engine: Engine, way: Any, sizes: str, holds: bool) -> None:
    """W1: a state in something that each call makes anew, with calls of another size in between."""

    def losses(graph: str) -> list[float]:
        torch.manual_seed(0)
        reset_all(None)
        net = Remembers(way).to(engine[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(lambda net, x: net(x), net, optimizer, graph=graph)
        generator, found, held = torch.Generator().manual_seed(1), list[float](), list[Any]()
        for size in map(int, sizes):
            found.append(step(torch.randn(size, 4, generator=generator).to(engine[0])).loss.item())
            held += [way(net)] * holds
        return found

    assert losses(engine[1]) == losses("off")
