"""Reference cycles that keep tensors alive are found and told in the user's names; the collector is left as it was."""

import functools
import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import debug


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return `test_cycles.py:12: source` of the only line of a function that has this text."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [(first + i, line.strip()) for i, line in enumerate(lines) if text in line]
    return f"test_cycles.py:{found[0]}: `{found[1]}`"


def endings(lines: tuple[str, ...]) -> list[str]:
    return [line.rpartition("/")[2] for line in lines]


@pytest.fixture(autouse=True)
def same_collector() -> Iterator[None]:
    before = gc.isenabled(), gc.get_debug(), list(map(id, gc.garbage))
    yield
    assert (gc.isenabled(), gc.get_debug(), list(map(id, gc.garbage))) == before


class Trainer:
    """Keeps what it saw, and closes over itself."""

    def __init__(self) -> None:
        self.history = [None, None, None, torch.zeros(64, 3)]

    def fit(self) -> None:
        def log() -> int:
            return len(self.history)

        self.callbacks = [log]


def test_closure():
    """M3: an object whose callback closes over it."""

    def run() -> None:
        Trainer().fit()

    found = debug.cycles(run)
    (cycle,) = found.found
    assert cycle.holds == "Trainer.history -> list[3] -> Tensor (64, 3) float32 cpu, 768 B"
    log = "function Trainer.fit.<locals>.log"
    assert cycle.loop == f"Trainer.callbacks -> list[0] -> {log} closure cell 'self' -> Trainer"
    assert endings(cycle.lines) == [line_of(Trainer.fit, "def log")]
    assert "weakref" in cycle.advice
    assert (cycle.bytes, cycle.tensors, cycle.count) == (found.bytes, found.tensors, 1) == (768, 1, 1)


def keep_error() -> None:
    big = torch.zeros(256)
    try:
        raise ValueError(str(big.shape))
    except ValueError as error:
        kept = error
    print(kept)


def test_traceback():
    """M3: a local that holds an exception, whose traceback holds the frame with all its locals."""
    (cycle,) = debug.cycles(keep_error).found
    assert cycle.loop.split(" -> ") in (
        ["frame of keep_error local 'kept'", "ValueError.__traceback__", "traceback.tb_frame", "frame of keep_error"],
        ["ValueError.__traceback__", "traceback.tb_frame", "frame of keep_error local 'kept'", "ValueError"],
    )
    assert cycle.holds == "frame of keep_error local 'big' -> Tensor (256,) float32 cpu, 1.0 KiB"
    assert endings(cycle.lines) == [line_of(keep_error, "raise")]
    assert "del error" in cycle.advice


class Node:
    """One of two that know each other."""

    def __init__(self, size: int) -> None:
        self.values = {"loss": torch.zeros(size)}
        self.other: Node | None = None


def make_pair(size: int = 8) -> tuple[Node, Node]:
    left, right = Node(size), Node(size + 1)
    left.other, right.other = right, left
    return left, right


def test_object_graph():
    """M3: two objects that know each other. Where no function is involved, the class says where to look."""
    (cycle,) = debug.cycles(make_pair).found
    assert cycle.loop == "Node.other -> Node.other -> Node"
    assert cycle.holds == "Node.values -> dict['loss'] -> Tensor (9,) float32 cpu, 36 B"
    assert endings(cycle.lines) == [line_of(Node, "def __init__")]
    assert (cycle.bytes, cycle.tensors) == (4 * 8 + 4 * 9, 2)


def test_none_planted():
    """M3: tensors that are freed by reference counting are no finding, nor are cycles without a tensor."""

    def step() -> None:
        model = nn.Linear(3, 3)
        model(torch.ones(2, 3)).sum().backward()
        cycle: list[object] = []
        cycle.append(cycle)

    found = debug.cycles(step)
    assert (found.found, found.bytes, found.tensors) == ((), 0, 0)
    assert str(found) == "No reference cycle keeps a tensor alive."


def test_what_has_another_owner_is_left_out():
    """The weights of a model in use are not the cycle's fault; a tensor that only the cycle holds is."""
    model = nn.Linear(100, 100)

    def step(with_tensor: bool) -> None:
        left, right = make_pair()
        left.values, right.values = {"loss": model.weight}, {}
        if with_tensor:
            right.values = {"small": torch.zeros(2)}

    assert not debug.cycles(step, False).found
    (cycle,) = debug.cycles(step, with_tensor=True).found
    assert cycle.holds == "Node.values -> dict['small'] -> Tensor (2,) float32 cpu, 8 B"
    assert (cycle.bytes, cycle.tensors) == (8, 1)


def test_equal_cycles_are_one_entry():
    def steps() -> None:
        for _ in range(5):
            make_pair()
        make_pair(100)

    found = debug.cycles(steps)
    assert [(cycle.count, cycle.tensors, cycle.bytes) for cycle in found.found] == [(1, 2, 804), (5, 10, 340)]
    text = str(found)
    assert text.startswith("6 reference cycle(s) keep 1.1 KiB in 12 tensor(s) until gc.collect() runs:\n\n804 B in 2")
    assert "340 B in 10 tensor(s) (5 of this kind): Node.other -> Node.other -> Node\n  holds Node.values" in text


def test_views_of_one_memory_count_once():
    def step() -> None:
        left, right = make_pair(50)
        right.values["loss"] = left.values["loss"][3:]

    found = debug.cycles(step)
    assert (found.bytes, found.tensors) == (200, 1)


def test_frees_the_garbage():
    refs = []

    def step() -> None:
        refs.append(weakref.ref(make_pair()[0].values["loss"].untyped_storage()))
        pair = make_pair()
        pair[0].values["mark"] = Mark()
        refs.append(weakref.ref(pair[0].values["mark"]))

    class Mark:
        pass

    assert len(debug.cycles(step).found) == 1
    assert refs[1]() is None
    assert not [thing for thing in gc.get_objects() if type(thing) is Node]


def test_a_loss_keeps_its_graph():
    """M3: what autograd saved for a loss is freed with it, and counted; the weights of a model in use are not."""
    model, x = nn.Linear(100, 100), torch.ones(50, 100)

    def step(backward: bool) -> None:
        left, _ = make_pair()
        loss = model(x).exp().sum()
        left.values["loss"] = loss
        if backward:
            loss.backward()

    first, second = debug.cycles(step, False), debug.cycles(step, True)
    saved = 4 * 50 * 100  # the result of exp
    assert (first.bytes, first.tensors) == (saved + 4 + 4 * 9, 3)
    assert (second.bytes, second.tensors) == (4 + 4 * 9, 2)  # backward frees it
    assert first.found[0].holds == "Node.values -> dict['loss'] -> Tensor () float32 cpu, 4 B, with its autograd graph"


def test_a_model_keeps_its_gradients():
    """M3: a gradient is not seen by the collector, yet it is freed with its parameter."""

    def step() -> None:
        model = Model()
        model.layer(torch.ones(3, 30)).sum().backward()

    assert debug.cycles(step).bytes == 2 * 4 * (30 * 2 + 2)


class Slotted:
    """No dict."""

    __slots__ = ("me", "tensor")


class Model(nn.Module):
    """Refers to itself by a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(30, 2)
        self.run = self.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Keeps(torch.autograd.Function):
    """Stores its output on ctx, where save_for_backward belongs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.out = x * 2
        return ctx.out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def plant_slots() -> None:
    it = Slotted()
    it.me, it.tensor = it, torch.zeros(5)


def plant_partial() -> None:
    kept: list[Any] = [torch.zeros(5)]
    kept.append(functools.partial(print, kept))


def plant_class() -> None:
    class Local:
        tensor = torch.zeros(5)

    Local()


def plant_tensor() -> None:
    tensor: Any = torch.zeros(5)
    tensor.me = tensor


def plant_default() -> None:
    def recur(again: Any = None, tensor: Tensor = torch.zeros(5)) -> None:  # noqa: B008
        recur(again)


def plant_long() -> None:
    first = last = Node(1)
    for _ in range(40):
        last.other = Node(1)
        last = last.other
    last.other = first


@pytest.mark.parametrize(
    ("plant", "loop", "holds"),
    [
        (plant_slots, r"Slotted\.me -> Slotted", r"Slotted\.tensor -> Tensor \(5,\) float32 cpu, 20 B"),
        (plant_partial, r"partial\.args -> tuple\[0\] -> list\[1\] -> partial", r"partial.* -> list\[0\] -> Tensor .*"),
        (plant_class, r"class Local\..* -> class Local", r"class Local\.tensor -> Tensor \(5,\) .*"),
        (plant_tensor, r"Tensor .* 20 B\.me -> Tensor .*", r"Tensor \(5,\) float32 cpu, 20 B"),
        (
            plant_default,
            r"function plant.*recur closure cell 'recur' -> function .*",
            r".*recur default.* -> Tensor .*",
        ),
        (plant_long, r"(Node\.other -> ){6}\(30 more\)( -> Node\.other){5} -> Node", r"Node\.values -> .*"),
        (
            Model,
            r"Model\.run -> method\.__self__ -> Model",
            r"Model\.layer -> Linear\.weight -> Parameter \(2, 30\) .*",
        ),
        (
            lambda: Keeps.apply(torch.zeros(5, requires_grad=True)),
            r"KeepsBackward\.out -> Tensor .*\.grad_fn -> KeepsBackward|Tensor .*\.grad_fn -> KeepsBackward\.out -> .*",
            r"(KeepsBackward\.out -> )?Tensor \(5,\) .*",
        ),
    ],
)
def test_names(plant, loop, holds):
    """M3: references of every kind have a name."""
    cycle = debug.cycles(plant).found[0]
    assert re.fullmatch(loop, cycle.loop), cycle.loop
    assert re.fullmatch(holds, cycle.holds), cycle.holds
    assert "no name" not in str(cycle)


def test_collector_is_left_as_it_was():
    """Enabled or not, its flags, its list; also where the user collects within, and where the code raises."""

    def fail() -> None:
        make_pair()
        gc.collect()
        raise KeyError

    kept = [1]
    gc.garbage.append(kept)
    gc.disable()
    gc.set_debug(gc.DEBUG_UNCOLLECTABLE)
    try:
        found = debug.cycles()
        with pytest.raises(KeyError), found:
            fail()
        assert (gc.isenabled(), gc.get_debug(), gc.garbage) == (False, gc.DEBUG_UNCOLLECTABLE, [kept])
        assert gc.garbage[0] is kept
    finally:
        gc.enable()
        gc.set_debug(0)
        gc.garbage.remove(kept)
    assert found.bytes == 68


def test_older_garbage_is_not_reported():
    make_pair()
    with debug.cycles() as found:
        pass
    assert not found.found


def test_hostile_objects():
    """Nothing of the user's is called on the way: no repr, no comparison, no attribute access."""

    class Hostile:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        def __repr__(self) -> str:
            raise RuntimeError

        def __hash__(self) -> int:
            return 0

    def plant() -> None:
        it = Hostile()
        it.held = {it: torch.zeros(5)}

    (cycle,) = debug.cycles(plant).found
    assert cycle.holds == "Hostile.held -> dict[Hostile] -> Tensor (5,) float32 cpu, 20 B"
    assert cycle.loop == "Hostile.held -> dict key -> Hostile"


@pytest.mark.slow
def test_a_long_chain():
    """A chain of twenty thousand lists neither recurses nor takes long."""

    def plant() -> None:
        first: list[Any] = [torch.zeros(3)]
        last = first
        for _ in range(20_000):
            last = [last]
        first.append(last)

    (cycle,) = debug.cycles(plant).found
    assert cycle.loop.startswith("list[1] -> list[0] -> list[0] -> ")
    assert "more)" in cycle.loop
    assert cycle.holds == "list[0] -> Tensor (3,) float32 cpu, 12 B"
