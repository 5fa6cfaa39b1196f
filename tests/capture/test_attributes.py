"""Plain attributes of modules, which a graph holds as constants: a change between two calls is noticed."""

import cProfile
import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import few
from harness import ENGINES, assert_same, deterministic
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]


class Net(nn.Module):
    """A model that computes with many kinds of attributes."""

    shift = 0.0

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)
        self.scale = 1.0
        self.powers: tuple[int, ...] = (1, 2)
        self.residual = True
        self.activation: Callable[[Tensor], Tensor] = F.relu
        self.mask = torch.ones(4, device=device)
        self.kept: float | None = None
        self.calls, self.unread = 0, 0
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.activation(self.norm(self.first(x)))
        out = self.drop(out) * getattr(self, "scale") + self.shift  # noqa: B009 - as generic code reads it
        out = sum((out**power for power in self.powers), out * 0 if self.kept is None else out * self.kept)
        out = self.last((out + x if self.residual else out) * self.mask)
        return out.square().mean()


def train(model: nn.Module, device: str, graph: str, changes: list[Callable[[Any], object]]) -> tuple[Any, Any]:
    """Make six steps, then six more behind each change. Return state and losses behind each step, and the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = ampkit.graphed_step(lambda model, x: model(x), model, optimizer, graph=graph, host_writes="ignore")
    made = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    found = []
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        for change in [lambda model: None, *changes]:
            change(model)
            for _ in range(6):
                loss = step(torch.randn(8, 4, generator=made).to(device))
                found.append((loss.loss.clone(), {key: value.clone() for key, value in model.state_dict().items()}))
    return found, step


def set_to(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        made = value(model) if isinstance(value, type(set_to)) and value.__name__ == "<lambda>" else value
        setattr(model.get_submodule(owner), name, made)

    return change


CHANGES: dict[str, tuple[str, Any]] = {
    "momentum of a batch norm": ("norm.momentum", 0.5),
    "no statistics": ("norm.track_running_stats", False),
    "p of a dropout": ("drop.p", 0.1),
    "number by getattr": ("scale", 0.5),
    "minus zero": ("scale", -0.0),
    "not a number": ("scale", math.nan),
    "hides one of the class": ("shift", 1.0),
    "tuple": ("powers", (1, 3)),
    "bool": ("residual", False),
    "function": ("activation", F.gelu),
    "from None": ("kept", 2.0),
    "tensor": ("mask", lambda model: torch.full_like(model.mask, 0.5)),
    "forward": ("first.forward", lambda model: lambda x: F.linear(x, model.first.weight)),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", few(CHANGES, ("p of a dropout", "hides one of the class", "tensor")))
def test_a_change_is_noticed(change: str, engine: Engine) -> None:
    """R7: the steps behind a change are those of an eager loop. With the old value the first graph is used again."""
    device, graph = engine
    path, value = CHANGES[change]
    before: list[Any] = []

    def note_and_set(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        before.append(vars(model.get_submodule(owner)).get(name))
        set_to(path, value)(model)

    def set_back(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        if before[-1] is None and name != "kept":
            delattr(model.get_submodule(owner), name)
        else:
            setattr(model.get_submodule(owner), name, before[-1])

    changes = [note_and_set, set_back]
    expected, _ = train(Net(device), device, "off", changes)
    found, step = train(Net(device), device, graph, changes)
    assert_same(expected, found)
    report = step.report()
    assert (report.captures, report.graphs, report.replays) == (2, 2, 3 + 3 + 6), report


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_a_change(engine: Engine) -> None:
    """An attribute that the step does not read, or changes itself; an equal value; another value that is put back."""
    device, graph = engine
    changes = [
        set_to("unread", 3),
        set_to("calls", 100),
        set_to("another", 1),
        set_to("scale", float("1.0")),
        set_to("powers", tuple([1, 2])),
        lambda model: (set_to("scale", 3.0)(model), set_to("scale", 1.0)(model)),
    ]
    found, step = train(Net(device), device, graph, changes)
    assert (step.report().captures, step.report().replays) == (1, len(found) - 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["seed", "index", "outputs", "pattern", "name", "lines"])
@pytest.mark.quick(3)
def test_only_what_the_step_itself_calls_reads(engine: Engine, name: str) -> None:
    """W2: functions of Python's library that torch and ampkit call read these names, but of no object of the step's."""
    device, graph = engine
    found, step = train(Net(device), device, graph, [set_to(name, k) for k in range(8)])
    assert (step.report().captures, step.report().replays) == (1, len(found) - 3)


class Configured(nn.Module):
    """A model that computes with what is in its configuration."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = SimpleNamespace(power=2.0, unread=0)
        self.config = SimpleNamespace(scale=1.0, inner=inner, unread=0, calls=0, activation=F.relu)
        self.settings: dict[str, Any] = {"shift": 0.5, "deep": {"factor": 2.0}, "unread": 0}
        self.by_layer = {0: 1.0, 1: 0.5}
        self.powers = [1, 2]
        self.seen: list[int] = []
        self.kept: list[Tensor] = []
        self.meter = SimpleNamespace(total=0.0, count=0)
        self.first = Part(self.config)
        self.last = nn.Linear(4, 2)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        self.config.calls += 1
        self.seen.append(len(self.seen))
        out = self.config.activation(self.first(x)) * self.settings["deep"]["factor"] + self.settings["shift"]
        out = sum((out**power for power in self.powers), out * self.settings.get("extra", 0.0))
        for factor in self.by_layer.values():
            out = out * factor
        return self.last(out).square().mean()


class Part(nn.Module):
    """Shares the configuration of the model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.linear = config, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.config.scale).abs() ** self.config.inner.power


INSIDE: dict[str, Callable[[Any], Any]] = {
    "object": lambda model: setattr(model.config, "scale", 0.5),
    "object in an object": lambda model: setattr(model.config.inner, "power", 3.0),
    "another object in it": lambda model: setattr(model.config, "inner", SimpleNamespace(power=1.5)),
    "function in an object": lambda model: setattr(model.config, "activation", F.gelu),
    "another configuration of a part": lambda model: setattr(
        model.first, "config", SimpleNamespace(scale=0.25, inner=SimpleNamespace(power=1.0))
    ),
    "dict": lambda model: model.settings.update(shift=1.5),
    "dict in a dict": lambda model: model.settings["deep"].update(factor=0.5),
    "new entry": lambda model: model.settings.update(extra=1.0),
    "list": lambda model: model.powers.__setitem__(1, 3),
    "longer list": lambda model: model.powers.append(3),
    "numbers as keys": lambda model: model.by_layer.update({1: 0.25}),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", few(INSIDE, ("object in an object", "new entry", "longer list")))
def test_a_change_inside_is_noticed(change: str, engine: Engine) -> None:
    """R7: what objects, dicts and lists hold that modules have as attributes, and that the step reads by name."""
    device, graph = engine
    expected, _ = train(Configured(device), device, "off", [INSIDE[change]])
    found, step = train(Configured(device), device, graph, [INSIDE[change]])
    assert_same(expected, found)
    report = step.report()
    assert (report.captures, report.graphs, report.replays) == (2, 2, 3 + 3), report


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_no_change_inside(engine: Engine) -> None:
    """What the step does not read, or changes itself; equal values in other objects; tensors in a list; a meter."""
    device, graph = engine

    def meter(model: Any) -> None:
        model.meter.total, model.meter.count = model.meter.total + 1.0, model.meter.count + 1

    changes: list[Callable[[Any], Any]] = [
        lambda model: setattr(model.config, "unread", 1),
        lambda model: setattr(model.config.inner, "unread", 1),
        lambda model: setattr(model.config, "calls", 100),
        lambda model: model.settings.update(unread=1),
        lambda model: model.seen.clear(),
        lambda model: model.kept.append(torch.ones(2)),
        lambda model: setattr(model, "powers", [1, 2]),
        lambda model: setattr(model, "settings", {"shift": 0.5, "deep": {"factor": 2.0}}),
        meter,
    ]
    found, step = train(Configured(device), device, graph, changes)
    assert (step.report().captures, step.report().replays) == (1, len(found) - 3)


class Odd:
    """Answers to any attribute, and has none."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_odd_objects_are_left_alone() -> None:
    """A weak proxy whose object is gone, an object that refuses its attributes, one that contains itself."""
    model: Any = Configured("cpu")
    gone = {0.5}
    model.proxy, model.odd = weakref.proxy(gone), Odd()
    model.config.itself, model.config.model = model.config, model
    del gone
    _, step = train(model, "cpu", "emulate", [INSIDE["object"]])
    assert step.report().captures == 2


@pytest.mark.slow
def test_the_warning_names_what_is_inside() -> None:
    """By the path at which the step reads it."""
    model = Configured("cpu")
    step = ampkit.graphed_step(
        lambda model, x: model(x),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        graph="emulate",
        host_writes="ignore",
    )
    x = torch.ones(8, 4)
    for _ in range(5):
        step(x)
    model.settings["deep"]["factor"] = 3.0
    model.config.inner.power = 1.0
    says = (
        r"model\.config\.inner\.power changed from 2\.0 to 1\.0.*model\.settings\['deep'\]\['factor'\] .* 2\.0 to 3\.0"
    )
    with pytest.warns(ampkit.AmpkitWarning, match=says):
        step(x)


class Reads(nn.Module):
    """Has a line that no graph can hold between two parts that one can."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 4), nn.Softplus())
        self.last = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4))
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.last(out).square().mean() * (2.0 if float(out.sum().detach()) > -math.inf else 1.0)


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_step_in_parts(engine: Engine) -> None:
    """R4: an attribute that a captured part reads has changed: the parts are captured again, and have the new value."""
    device, graph = engine
    changes = [set_to("first.1.momentum", 0.5), set_to("first.2.beta", 2.0), lambda model: None, lambda model: None]
    expected, _ = train(Reads(device), device, "off", changes)
    found, step = train(Reads(device), device, graph, changes)
    assert_same(expected, found)
    report = step.report()
    assert report.eager["looking for modules to capture"] == 2 * 3
    assert (report.replays, report.in_parts) == (0, len(expected) - 5 * 3), report


@pytest.mark.slow
def test_a_tensor_that_was_replaced_is_freed() -> None:
    """Earlier settings are remembered, and keep no tensor alive."""
    old = []

    def replace(model: Any) -> None:
        old.append(weakref.ref(model.mask))
        model.mask = model.mask.clone()

    _, step = train(Net("cpu"), "cpu", "emulate", [replace, replace])
    gc.collect()
    assert step.report().captures == 3
    assert [mask() for mask in old] == [None, None]


def test_the_warning_names_it() -> None:
    """Once: the attribute with both values, and what to write instead."""
    model = Net("cpu")
    step = ampkit.graphed_step(
        lambda model, x: model(x),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        graph="emulate",
        host_writes="ignore",
    )
    x = torch.ones(8, 4)
    for _ in range(5):
        step(x)
    model.drop.p = 0.1
    says = r"the attribute model\.drop\.p changed from 0\.5 to 0\.1\. .* buffer .* in place \(fill_\)"
    with pytest.warns(ampkit.AmpkitWarning, match=says):
        step(x)
    model.drop.p = 0.2
    step(x)


@pytest.mark.slow
def test_a_number_that_changes_in_each_call_ends_the_capture() -> None:
    """R9: no graph is captured any more, and a warning says so."""
    model = Net("cpu")
    step = ampkit.graphed_step(
        lambda model, x: model(x),
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        graph="emulate",
        host_writes="ignore",
    )

    def train() -> None:
        for i in range(40):
            model.scale = 1.0 + i
            step(torch.ones(8, 4))

    with pytest.warns(ampkit.AmpkitWarning) as caught:
        train()
    texts = [str(warning.message) for warning in caught]
    assert any("the attribute model.scale kept changing (it was 32.0, then 33.0" in text for text in texts), texts
    assert step.report().captures == 0


def test_under_another_profiler() -> None:
    """Python has one profiler at a time. The methods of the modules tell then what is read."""
    model = Net("cpu")
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        _, step = train(model, "cpu", "emulate", [set_to("norm.momentum", 0.5)])
    finally:
        profiler.disable()
    assert step.report().captures == 2
    assert sys.getprofile() is None


class Weighted(nn.Module):
    """Reads a dict of its own in one of the ways in which no constant in the code names the entries."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4), read
        self.names = list(KEYS)
        self.weights = dict.fromkeys(KEYS, 1.0)
        self.inside = SimpleNamespace(weights=dict.fromkeys(KEYS, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.read(self)).square().mean()


KEYS = ("one", "other")
WHOLE: dict[str, Callable[[Any], Any]] = {
    "values": lambda net: sum(net.weights.values()),
    "items": lambda net: sum(weight for _, weight in net.weights.items()),
    "keys": lambda net: sum(net.weights[key] for key in net.weights),
    "names": lambda net: sum(net.weights[name] for name in net.names),
    "get": lambda net: sum(net.weights.get(name, 0.0) for name in net.names),
    "in an object": lambda net: sum(net.inside.weights.values()),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("read", WHOLE.values(), ids=WHOLE)
def test_entries_that_no_constant_names(engine: Engine, read: Callable[[Any], Any]) -> None:
    """W2: `for name, weight in self.weights.items()`: a weight that the loop sets makes another graph."""
    device, graph = engine

    def change(net: Any) -> None:
        net.weights[KEYS[1]] = net.inside.weights[KEYS[1]] = 3.0

    def losses(graph: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        return train(Weighted(read).to(device), device, graph, [change])

    expected, _ = losses("off")
    found, step = losses(graph)
    assert_same(found, expected)
    assert step.captures == 2


class Agent:
    """An object whose methods have another name for it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.gain = model, 1.0

    def loss(agent, model: nn.Module, x: Tensor) -> Tensor:  # noqa: N805
        out: Tensor = model(x).square().mean() * agent.gain
        return out

    def __call__(this, model: nn.Module, x: Tensor) -> Tensor:  # noqa: N805
        out: Tensor = model(x).square().mean() * this.gain
        return out


@pytest.mark.parametrize("called", [False, True])
def test_an_object_that_is_not_called_self(called: bool) -> None:
    """W2: an attribute of a method's object counts, whatever its first argument is called."""
    found = []
    for graph in ("off", "emulate"):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        agent = Agent(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
        step = ampkit.graphed_step(agent if called else agent.loss, model, optimizer, graph=graph)
        with taped(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            losses = []
            for i in range(20):
                agent.gain = 1.0 if i < 8 else 2.0
                losses.append(step(torch.ones(3, 4)).loss)
        found.append(losses)
    assert step.replays >= 12
    assert_same(found[1], found[0])
