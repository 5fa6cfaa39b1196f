"""Values that a step reads and that change between two calls, one of each kind: replays call no Python here."""

import collections
import ctypes
import dataclasses
import datetime
import enum
import functools
import multiprocessing
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import PurePath
from typing import Any

import pytest
import torch
from harness import ENGINES, deterministic
from tape import taped
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
SETTINGS: Any = types.ModuleType("settings_of_a_test")
SETTINGS.__file__ = __file__
VALUE: Any = None


class Kind(enum.Enum):
    CE = 1
    KL = 2


class Key:
    pass


class Numbers(list[float]):
    pass


class Names(set[str]):
    pass


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Single:
    _one: Any = None

    def __new__(cls) -> "Single":
        if cls._one is None:
            cls._one = super().__new__(cls)
            cls._one.scale = 1.0
        return cls._one


class Lazy:
    raw = 1.0

    @functools.cached_property
    def scale(self) -> float:
        return self.raw


class Base:
    scale = 1.0

    def get(self) -> float:
        return 1.0


class Child(Base):
    def up(self) -> float:
        return super().scale


class Other(Base):
    def get(self) -> float:
        return 3.0


def by_default(x: float = 1.0, *, y: float = 1.0) -> float:
    return x * y


def import_module() -> float:
    import settings_of_a_test  # type: ignore[import-not-found]

    return settings_of_a_test.scale


def import_name() -> float:
    from settings_of_a_test import scale

    return scale


def matched(value: Any) -> float:
    match value:
        case Config(scale=found):
            return found
    raise AssertionError


def made(value: Any, /, **attributes: Any) -> Any:
    """Return an object with these attributes."""
    for name, found in attributes.items():
        setattr(value, name, found)
    return value


def renew(function: Any, value: float) -> None:
    """Give a function other code, as IPython's autoreload does."""
    function.__code__ = (lambda: 1.0).__code__ if value == 1.0 else (lambda: 3.0).__code__


def one() -> float:
    return 1.0


KEY = Key()
# How a value is made, how the step reads it, how it changes, from 1 to 3.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], object]]] = {
    "dict by Enum": (lambda: {Kind.CE: 1.0}, lambda w: w[Kind.CE], lambda w: w.update({Kind.CE: 3.0})),
    "dict by class": (lambda: {int: 1.0}, lambda w: w[int], lambda w: w.update({int: 3.0})),
    "dict by object": (lambda: {KEY: 1.0}, lambda w: w[KEY], lambda w: w.update({KEY: 3.0})),
    "dict by pair": (lambda: {(1, "a"): 1.0}, lambda w: w[1, "a"], lambda w: w.update({(1, "a"): 3.0})),
    "class of lists": (lambda: Numbers([1.0]), lambda w: w[0], lambda w: w.__setitem__(0, 3.0)),
    "class of sets": (Names, lambda w: 3.0 if "a" in w else 1.0, lambda w: w.add("a")),
    "objects in a set": (lambda: {Base()}, lambda w: sum(o.scale for o in w), lambda w: made(next(iter(w)), scale=3.0)),
    "import": (lambda: made(SETTINGS, scale=1.0), lambda w: import_module(), lambda w: made(SETTINGS, scale=3.0)),
    "import a name": (lambda: made(SETTINGS, scale=1.0), lambda w: import_name(), lambda w: made(SETTINGS, scale=3.0)),
    "singleton": (lambda: made(Single(), scale=1.0), lambda w: Single().scale, lambda w: made(Single(), scale=3.0)),
    "vars": (Config, lambda w: sum(vars(w).values()), lambda w: w.__init__(3.0)),
    "astuple": (Config, lambda w: dataclasses.astuple(w)[0], lambda w: w.__init__(3.0)),
    "match": (Config, matched, lambda w: w.__init__(3.0)),
    "cached property": (Lazy, lambda w: w.scale, lambda w: made(w, raw=3.0).__dict__.pop("scale", None)),
    "defaultdict": (lambda: collections.defaultdict(lambda: 1.0), lambda w: w["a"], lambda w: w.update(a=3.0)),
    "partial": (lambda: functools.partial(by_default, x=1.0), lambda w: w(), lambda w: w.keywords.update(x=3.0)),
    "class": (Base, lambda w: w.get(), lambda w: made(w, __class__=Other)),
    "super": (lambda: made(Base, scale=1.0) and Child(), lambda w: w.up(), lambda w: made(Base, scale=3.0)),
    "defaults": (
        lambda: made(by_default, __defaults__=(1.0,)),
        lambda w: by_default(),
        lambda w: made(by_default, __defaults__=(3.0,)),
    ),
    "defaults by name": (
        lambda: by_default.__kwdefaults__.update(y=1.0),
        lambda w: by_default(),
        lambda w: by_default.__kwdefaults__.update(y=3.0),
    ),
    "code": (lambda: renew(one, 1.0), lambda w: one(), lambda w: renew(one, 3.0)),
    "date": (
        lambda: types.SimpleNamespace(day=datetime.date(2000, 1, 1)),
        lambda w: float(w.day.day),
        lambda w: made(w, day=datetime.date(2000, 1, 3)),
    ),
    "path": (
        lambda: types.SimpleNamespace(file=PurePath("a")),
        lambda w: len(w.file.name),
        lambda w: made(w, file=PurePath("abc")),
    ),
    "multiprocessing.Value": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda w: w.value,
        lambda w: made(w, value=3.0),
    ),
    "ctypes": (lambda: ctypes.c_double(1.0), lambda w: w.value, lambda w: made(w, value=3.0)),
    "order of a dict": (
        lambda: {"a": 1.0, "b": 3.0},
        lambda w: next(iter(w.values())),
        lambda w: w.update(a=w.pop("a")),
    ),
    "attribute of a tensor": (
        lambda: made(torch.ones(2), scale=1.0),
        lambda w: w.scale,
        lambda w: made(w, scale=3.0),
    ),
    "method of a dict": (lambda: {"a": 1.0}.get, lambda w: w("a"), lambda w: w.__self__.update(a=3.0)),
    "lr of another optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0),
        lambda w: w.param_groups[0]["lr"],
        lambda w: w.param_groups[0].update(lr=3.0),
    ),
}
TENSORS: dict[str, Callable[[Tensor], object]] = {
    "data": lambda w: made(w, data=torch.full((2,), 3.0, device=w.device)),
    "set_": lambda w: w.set_(torch.full((2,), 3.0, device=w.device)),
    "strides": lambda w: made(w, data=torch.tensor([[3.0, 9.0], [3.0, 9.0]], device=w.device)[:, 0]),
}


@pytest.fixture(autouse=True)
def module_with_settings() -> Iterator[None]:
    sys.modules["settings_of_a_test"] = SETTINGS
    yield
    del sys.modules["settings_of_a_test"]


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
