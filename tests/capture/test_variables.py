"""Variables outside of the modules, which a graph holds as constants: a change between two calls is noticed."""

import cProfile
import functools
import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import forks
import numpy
import pytest
import torch
from families import few
from harness import ENGINES, assert_same, deterministic
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._step.training_step import TrainingStep

Engine = tuple[str, str]


class Config:
    """What a class holds that is used as it is."""

    gain = 1.0
    unread = 0


@dataclass(frozen=True)
class Frozen:
    """A configuration that is replaced."""

    slope: float = 0.1


# Each world sets these anew.
ALPHA: float = 1.0
MODE = "mean"
ARGS: Any = None
OTHERS = WEIGHTS = {"l1": 1.0}
LAYERS = [1.0]
FROZEN = Frozen()
ACTIVATION: Any = F.relu
MASK = torch.ones(4)
DROP: Any = nn.Identity()
METER: Any = None
CALLS, UNREAD = 0, 0
PROXY: Any = None
TEACHER: Any = None
CRITERION: Any = None
PRIOR: Any = None
ARRAY: Any = None
SEEN: list[int] = []
HISTORY: dict[str, float] = {}


def of(config: Any, x: Tensor) -> Tensor:
    return x * config.gain + config.shifts["first"]


class World:
    """A model, a loss function that reads variables of many kinds, and their values."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
        inner = SimpleNamespace(gain=1.0, shifts={"first": 0.5}, unread=0)
        globals().update(ALPHA=1.0, MODE="mean", FROZEN=Frozen(), ACTIVATION=F.relu, CALLS=0, UNREAD=0)
        globals().update(ARGS=SimpleNamespace(beta=1.0, inner=inner, config=Config(), unread=0))
        globals().update(WEIGHTS={"l1": 1.0, "deep": {"l2": 0.5}}, OTHERS={"a": 1.0}, LAYERS=[1.0, 2.0])
        globals().update(MASK=torch.ones(4, device=device), DROP=nn.Dropout(0.5), SEEN=[], HISTORY={})
        globals().update(METER=SimpleNamespace(total=0.0, count=0))
        self.factor, self.table = 1.0, {"exponent": 2.0}
        power, table = 1.0, self.table

        def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
            global CALLS
            CALLS += 1
            SEEN.append(CALLS)
            HISTORY["calls"] = CALLS
            METER.total, METER.count = METER.total + 1.0, METER.count + 1
            args = ARGS
            out = DROP(model(x)) * ALPHA + args.beta * MASK
            out = of(args.inner, out) * args.config.gain
            out = ACTIVATION(out) * WEIGHTS["l1"] * WEIGHTS["deep"]["l2"] * LAYERS[1] + F.leaky_relu(out, FROZEN.slope)
            for other in OTHERS.values():
                out = out * other
            out = out.abs() ** power + out.abs() ** table["exponent"]
            return out.mean() if MODE == "mean" else out.sum()

        def set_power(value: float) -> Callable[[], object]:
            nonlocal power
            before, power = power, value
            return lambda: set_power(before)

        self.loss_fn, self.set_power = loss_fn, set_power

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.loss_fn(model, x) * self.factor * self.table["exponent"]


Change = Callable[[World], object]


def put(owner: Any, key: Any, value: Any) -> Callable[[], object]:
    """Put a value into a table, or into an object as its attribute. Return what undoes that."""
    table = vars(owner) if isinstance(owner, (SimpleNamespace, type)) else owner
    had, before = key in table if isinstance(table, dict) else True, None
    if not isinstance(owner, (dict, list)):
        before = getattr(owner, key, None)
        setattr(owner, key, value)
        return lambda: setattr(owner, key, before) if had else delattr(owner, key)
    before = table[key] if had else None
    table[key] = value
    return lambda: table.__setitem__(key, before) if had else table.pop(key)


CHANGES: dict[str, Callable[[World], Callable[[], object]]] = {
    "number": lambda world: put(globals(), "ALPHA", 0.5),
    "minus zero": lambda world: put(globals(), "ALPHA", -0.0),
    "text": lambda world: put(globals(), "MODE", "sum"),
    "function": lambda world: put(globals(), "ACTIVATION", F.gelu),
    "tensor": lambda world: put(globals(), "MASK", MASK * 0.5),
    "attribute": lambda world: put(ARGS, "beta", 0.5),
    "another object": lambda world: put(globals(), "ARGS", SimpleNamespace(**vars(ARGS) | {"beta": 0.25})),
    "attribute of an argument": lambda world: put(ARGS.inner, "gain", 3.0),
    "entry of an argument": lambda world: put(ARGS.inner.shifts, "first", 3.0),
    "attribute of a class": lambda world: put(Config, "gain", 0.5),
    "hides one of the class": lambda world: put(ARGS.config, "gain", 0.5),
    "frozen": lambda world: put(globals(), "FROZEN", Frozen(0.3)),
    "entry": lambda world: put(WEIGHTS, "l1", 0.25),
    "entry of an entry": lambda world: put(WEIGHTS["deep"], "l2", 0.25),
    "entry of a list": lambda world: put(LAYERS, 1, 0.25),
    "entry in a loop": lambda world: put(OTHERS, "a", 0.25),
    "new entry in a loop": lambda world: put(OTHERS, "b", 0.25),
    "p of a dropout": lambda world: put(DROP, "p", 0.1),
    "of the function around": lambda world: world.set_power(1.5),
    "entry of the function around": lambda world: put(world.table, "exponent", 1.5),
}


def train(world: World, graph: str, changes: list[Change], loss_fn: Any = None) -> tuple[Any, TrainingStep]:
    """Make six steps, then six more behind each change. Return state and losses behind each step, and the step."""
    device = next(world.model.parameters()).device
    optimizer = torch.optim.SGD(world.model.parameters(), lr=0.01, momentum=0.9, fused=True)
    step = ampkit.graphed_step(loss_fn or world.loss_fn, world.model, optimizer, graph=graph, host_writes="ignore")
    made = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    found = []
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        for change in [lambda world: None, *changes]:
            change(world)
            for _ in range(6):
                loss = step(torch.randn(8, 4, generator=made).to(device)).loss
                found.append((loss.clone(), {key: value.clone() for key, value in world.model.state_dict().items()}))
    return found, step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", few(CHANGES, ("number", "attribute of an argument", "of the function around")))
def test_a_change_is_noticed(change: str, engine: Engine) -> None:
    """R7: the steps behind a change are those of an eager loop. With the old value the first graph is used again."""
    device, graph = engine
    results = []
    for mode in ("off", graph):
        undo: list[Callable[[], object]] = []
        changes: list[Change] = [
            lambda world, undo=undo: undo.append(CHANGES[change](world)),  # type: ignore[misc]
            lambda world, undo=undo: undo.pop()(),  # type: ignore[misc]
        ]
        found, step = train(World(device), mode, changes)
        results.append(found)
    assert_same(*results)
    report = step.report()
    assert (report.captures, report.graphs, report.replays) == (2, 2, 3 + 3 + 6), report


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_a_change(engine: Engine) -> None:
    """What the step does not read, or changes itself; equal values in other objects; a tensor written in place."""
    device, graph = engine
    changes: list[Change] = [
        lambda world: put(globals(), "UNREAD", 1),
        lambda world: put(ARGS, "unread", 1),
        lambda world: put(ARGS, "another", 1),
        lambda world: put(Config, "unread", 1),
        lambda world: put(ARGS.inner, "unread", 1),
        lambda world: put(WEIGHTS, "unread", 1),
        lambda world: LAYERS.append(3.0),
        lambda world: put(globals(), "ALPHA", float("1.0")),
        lambda world: put(globals(), "FROZEN", Frozen()),
        lambda world: put(globals(), "WEIGHTS", {"l1": 1.0, "deep": {"l2": 0.5}}),
        lambda world: (put(globals(), "ALPHA", 3.0), put(globals(), "ALPHA", 1.0)),
        lambda world: MASK.fill_(0.5),
        lambda world: put(globals(), "CALLS", 1000),
        lambda world: SEEN.clear(),
        lambda world: HISTORY.clear(),
        lambda world: put(METER, "total", 0.0),
    ]
    expected, _ = train(World(device), "off", changes)
    found, step = train(World(device), graph, changes)
    assert_same(expected, found)
    assert (step.report().captures, step.report().replays) == (1, len(found) - 3)


def test_odd_values_are_left_alone() -> None:
    """A weak proxy whose object is gone, an entry that is gone, a name that is gone: the step says what is wrong."""
    world, gone = World("cpu"), {0.5}
    globals().update(PROXY=weakref.proxy(gone))
    del gone

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (LAYERS[1] if MODE else PROXY) * ALPHA

    _, step = train(world, "emulate", [lambda world: put(globals(), "ALPHA", 0.5)], loss_fn)
    assert step.captures == 2
    with deterministic():
        LAYERS.clear()
        with pytest.raises(IndexError, match="list index out of range"):
            step(torch.ones(8, 4))
        LAYERS.extend([1.0, 2.0])
        step(torch.ones(8, 4))
        alpha = globals().pop("ALPHA")
        with pytest.raises(NameError, match="ALPHA"):
            step(torch.ones(8, 4))
        globals()["ALPHA"] = alpha
        step(torch.ones(8, 4))
    assert step.replays == 3 + 3 + 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_objects_that_nothing_is_read_of(engine: Engine) -> None:
    """R7: a teacher, a loss module, a distribution and an array, each replaced by another one."""
    device, graph = engine

    def teacher(factor: float) -> nn.Module:
        made = nn.Linear(4, 4).to(device).requires_grad_(False)
        nn.init.constant_(made.weight, factor)
        return made

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x) - TEACHER(x) * float(ARRAY[0])
        return CRITERION(out, torch.zeros_like(out)) - PRIOR.log_prob(out).mean()

    def setting(**values: Callable[[], Any]) -> Change:
        return lambda world: globals().update({name: value() for name, value in values.items()})

    def normal(scale: float) -> Any:
        mean, deviation = torch.zeros((), device=device), torch.full((), scale, device=device)
        return torch.distributions.Normal(mean, deviation, validate_args=False)

    results = []
    for mode in ("off", graph):
        torch.manual_seed(3)
        setting(
            TEACHER=lambda: teacher(1.0),
            CRITERION=nn.MSELoss,
            PRIOR=lambda: normal(1.0),
            ARRAY=lambda: numpy.array([1.0, 2.0]),
        )(World(device))
        changes = [
            setting(TEACHER=lambda: teacher(0.5)),
            setting(CRITERION=lambda: nn.SmoothL1Loss(beta=0.5)),
            setting(CRITERION=lambda: nn.SmoothL1Loss(beta=0.25)),
            setting(PRIOR=lambda: normal(2.0)),
            setting(ARRAY=lambda: numpy.array([0.5, 2.0])),
        ]
        found, step = train(World(device), mode, changes, loss_fn)
        results.append(found)
    assert_same(*results)
    assert (step.report().captures, step.report().replays) == (6, 6 * 3), step.report()


def test_a_method_reads_its_object() -> None:
    """R7: an object that has the loss function as a method, which ampkit calls."""
    results = []
    for graph in ("off", "emulate"):
        world = World("cpu")
        changes: list[Change] = [
            lambda world: setattr(world, "factor", 0.5),
            lambda world: world.table.update(exponent=3.0),
            lambda world: setattr(world, "model", world.model),
        ]
        found, step = train(world, graph, changes, world.loss)
        results.append(found)
    assert_same(*results)
    assert (step.report().captures, step.report().replays) == (3, 3 * 3 + 6)


def weighted(model: nn.Module, x: Tensor, config: Any = Config(), *, weights: Any) -> Tensor:  # noqa: B008
    return model(x).square().mean() * config.scale * weights["l1"]


@pytest.mark.slow
def test_arguments_that_are_bound() -> None:
    """R7: those of `functools.partial`, and those that a function has by default."""
    default = weighted.__defaults__[0]  # type: ignore[index]
    results = []
    for graph in ("off", "emulate"):
        default.scale, config, weights = 1.0, SimpleNamespace(scale=1.0), {"l1": 1.0}
        first = functools.partial(weighted, weights=weights)
        second = functools.partial(weighted, config=config, weights=weights)
        found = []
        for loss_fn, owner in ((first, default), (second, config)):
            changes: list[Change] = [
                lambda world, owner=owner: setattr(owner, "scale", 0.5),  # type: ignore[misc]
                lambda world, weights=weights: weights.update(l1=weights["l1"] / 2),  # type: ignore[misc]
            ]
            made, step = train(World("cpu"), graph, changes, loss_fn)
            found.append(made)
        results.append(found)
        assert graph == "off" or (step.captures, step.replays) == (3, 3 * 3)
    assert_same(*results)


@pytest.mark.slow
def test_functions_that_the_garbage_collector_does_not_see() -> None:
    """Behind `gc.freeze`, variables of functions around `loss_fn`, and around what it calls, are found still."""
    world = World("cpu")
    scale = 1.0

    def inner(out: Tensor) -> Tensor:
        return out * scale

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return inner(world.loss_fn(model, x))

    def set_scale(world: World) -> None:
        nonlocal scale
        scale = 0.5

    gc.freeze()
    try:
        changes: list[Change] = [set_scale, lambda world: world.set_power(1.5)]
        _, step = train(world, "emulate", changes, functools.partial(loss_fn))
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as it was, see conftest.py
    assert step.captures == 3


@pytest.mark.slow
def test_a_partial_is_replaced() -> None:
    """R7: a function with other arguments."""
    results = []
    for graph in ("off", "emulate"):
        change: Change = lambda world: put(globals(), "ACTIVATION", functools.partial(F.leaky_relu, negative_slope=0.2))  # noqa: E731
        world = World("cpu")
        globals()["ACTIVATION"] = functools.partial(F.leaky_relu, negative_slope=0.1)
        found, step = train(world, graph, [change])
        results.append(found)
    assert_same(*results)
    assert step.captures == 2


def test_the_warning_names_it() -> None:
    """Once: as it is written in the code, with both values, and what to write instead."""
    world = World("cpu")
    _, step = train(world, "emulate", [])
    ARGS.inner.gain, WEIGHTS["deep"]["l2"] = 2.0, 0.25
    says = (
        r"the variable ARGS\.inner\.gain changed from 1\.0 to 2\.0, the variable WEIGHTS\['deep'\]\['l2'\] changed "
        r"from 0\.5 to 0\.25.* is in a tensor, which is passed to the step"
    )
    with deterministic(), pytest.warns(ampkit.CaptureWarning, match=says):
        step(torch.ones(8, 4))
    ARGS.inner.gain = 3.0
    with deterministic():
        step(torch.ones(8, 4))


@pytest.mark.slow
def test_a_number_that_changes_in_each_call() -> None:
    """R9: nothing is captured until that stops, and a warning names the variable."""
    world = World("cpu")
    step = ampkit.graphed_step(
        world.loss_fn,
        world.model,
        torch.optim.SGD(world.model.parameters(), lr=0.1),
        graph="emulate",
        host_writes="ignore",
    )

    def change() -> None:
        for i in range(40):
            globals()["ALPHA"] = 1.0 + i
            step(torch.ones(8, 4))

    with pytest.warns(ampkit.CaptureWarning, match="the variable ALPHA") as caught:
        change()
    assert any("the variable ALPHA kept changing (it was 32.0, then 33.0" in str(warning.message) for warning in caught)
    assert step.captures == 0
    for _ in range(26):  # calls are looked at less and less often meanwhile
        step(torch.ones(8, 4))
    assert step.captures == 1
    assert step.replays >= 3


class Reads(nn.Module):
    """Has a line that no graph can hold between two parts that one can."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Softplus())]
        self.first, self.last = nn.Sequential(*layers[:4], Scaled()), nn.Sequential(*layers[4:])
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.last(out) * (2.0 if float(out.sum().detach()) > -math.inf else 1.0)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * ALPHA


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_step_in_parts(engine: Engine) -> None:
    """R4: parts are captured again for what they read, and not for what the lines between them read."""
    device, graph = engine
    changes: list[Change] = [
        lambda world: put(globals(), "ALPHA", 0.5),
        *[lambda world: put(ARGS, "beta", ARGS.beta + 0.5)] * 3,
    ]
    results = []
    for mode in ("off", graph):
        world = World(device)
        world.model = Reads(device)  # type: ignore[assignment]
        found, step = train(world, mode, changes, lambda model, x: (model(x) * ARGS.beta).square().mean())
        results.append(found)
    assert_same(*results)
    report = step.report()
    assert report.eager["looking for modules to capture"] == 2 * 2
    assert (report.replays, report.in_parts) == (0, len(found) - 2 * (3 + 2)), report


@pytest.mark.parametrize("engine", ENGINES)
def test_a_graphed_function(engine: Engine) -> None:
    """R7: what a function under `ampkit.graphed` reads."""
    device, graph = engine
    results = []
    for mode in ("off", graph):
        world = World(device)
        optimizer = torch.optim.SGD(world.model.parameters(), lr=0.1, fused=True)

        @ampkit.graphed(modules=(world.model,), optimizers=(optimizer,), graph=mode, host_writes="ignore")
        def train_step(x: Tensor, model: Any = world.model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).square().mean() * ALPHA
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = []
        with deterministic(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)
            for i in range(12):
                globals()["ALPHA"] = 1.0 if i < 6 else 0.5
                losses.append(train_step(torch.ones(8, 4, device=device)).clone())
        results.append(losses)
    assert_same(*results)
    assert train_step.report().captures == 2


class Average:
    """An exponential moving average, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        self.decay = 0.5
        self.kept = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept, param in zip(self.kept, model.parameters(), strict=True):
            kept.lerp_(param, 1 - self.decay)


@pytest.mark.slow
def test_after_step_reads_its_object() -> None:
    """R7: the decay of an average that is updated in `after_step`."""
    results = []
    for graph in ("off", "emulate"):
        model = World("cpu").model
        average = Average(model)
        step = ampkit.graphed_step(
            lambda model, x: model(x).square().mean(),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            graph=graph,
            after_step=average.update,
            host_writes="ignore",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)
            for i in range(12):
                average.decay = 0.5 if i < 6 else 0.75
                step(torch.ones(8, 4))
        results.append(average.kept)
    assert_same(*results)
    assert step.captures == 2


@pytest.mark.slow
def test_what_was_replaced_is_freed() -> None:
    """Earlier settings are remembered, and keep no tensor alive; behind `close` nothing is."""
    world = World("cpu")
    mask = weakref.ref(MASK)
    _, step = train(world, "emulate", [lambda world: put(globals(), "MASK", torch.ones(4)) and None])
    gc.collect()
    assert step.report().captures == 2
    assert mask() is None
    inner = weakref.ref(ARGS.config)
    step.close()
    globals()["ARGS"] = None
    assert inner() is None


def test_a_module_that_was_never_initialized() -> None:
    """R7: one without `super().__init__()`, which has no parts, can be read of."""
    globals()["CRITERION"] = criterion = nn.Module.__new__(Criterion)
    criterion.__dict__["scale"] = 2.0
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(
        lambda model, x: model(x).mean() * CRITERION.__dict__["scale"],
        model,
        optimizer,
        graph="emulate",
        host_writes="ignore",
    )
    for _ in range(5):
        step(torch.ones(2, 4))
    assert (step.captures, step.replays) == (1, 2)


class Criterion(nn.Module):
    """Is called by the loss function, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale, self.inner, self.seen = 0, 1.0, nn.ReLU(), {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["calls"] += 1
        return self.inner(x).mean() * self.scale * min(self.calls, self.seen["calls"], 1)


def test_a_module_that_is_no_part_of_the_model_counts_its_calls() -> None:
    """R7: what the step changes in it is left out from the first call on, and what it reads is compared."""
    globals()["CRITERION"] = criterion = Criterion()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(
        lambda model, x: CRITERION(model(x)), model, optimizer, graph="emulate", host_writes="ignore"
    )
    for _ in range(8):
        step(torch.ones(2, 4))
    assert (step.captures, step.replays) == (1, 5)
    criterion.scale = 2.0
    with pytest.warns(ampkit.CaptureWarning, match=r"CRITERION\.scale changed from 1\.0 to 2\.0"):
        step(torch.ones(2, 4))


def test_code_of_installed_packages_is_not_looked_at() -> None:
    """Their variables are not those of the user. `step.close()` captures again."""
    world = World("cpu")
    package = ModuleType("package")
    source = "alpha = 1.0\ndef loss_fn(model, x):\n    return model(x).square().mean() * alpha\n"
    exec(compile(source, "/lib/site-packages/package/losses.py", "exec"), vars(package))
    _, step = train(world, "emulate", [lambda world: setattr(package, "alpha", 0.5)], package.loss_fn)
    assert (step.captures, step.replays) == (1, 12 - 3)


@pytest.mark.slow
def test_code_of_a_command() -> None:
    """`python -c` has no file."""
    code = "\n".join(
        [
            "import ampkit, torch",
            "scale, model = 1.0, torch.nn.Linear(2, 2)",
            "loss_fn = lambda model, x: model(x).square().mean() * scale",
            "step = ampkit.graphed_step(loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1), graph='emulate')",
            "for i in range(12): scale = 1.0 + i // 6; step(torch.ones(2, 2))",
            "print(step.captures)",
        ]
    )
    ran = forks.run_code(f"import warnings; warnings.simplefilter('ignore')\n{code}")
    assert ran.stdout == "2\n", ran.stderr


def test_under_another_profiler() -> None:
    """Before Python 3.12 there is one profiler at a time. Under another one nothing tells what the step reads."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        _, step = train(World("cpu"), "emulate", [lambda world: put(globals(), "ALPHA", 0.5)])
    finally:
        profiler.disable()
    assert step.captures == (2 if sys.version_info >= (3, 12) else 1)
