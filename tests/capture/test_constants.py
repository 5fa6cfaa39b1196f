"""`step.constants()`: the values of the host that graphs hold, with the lines that read them; and their equality."""

import logging
import math
import weakref
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._capture.host.constants import are_equal, are_same

CONFIG: Any = SimpleNamespace(loss={"l1": 0.5}, calls=0, on=False, unread=2)
MASK = torch.full((4,), 2.0)
SCHEDULE = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
SAID: set[str] = set()
PRIOR = torch.distributions.Normal(0.0, 1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)
        self.scale, self.config, self.debug = 2.0, {"depth": 3, "unread": 1}, False
        self.calls, self.unread = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.debug:
            x = x * self.unread
        return self.drop(self.fc(x)) * self.scale * self.config["depth"]


def make(power: int = 2, **options: Any) -> tuple[Any, Net]:
    """Return a step whose loss reads a little of everything, and its model."""
    model = Net()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        CONFIG.calls += 1
        if CONFIG.on:
            return model(x).sum() * CONFIG.unread
        rate = SCHEDULE.param_groups[0]["lr"] * (1 + len(PRIOR.batch_shape))
        return F.mse_loss(model(x) * MASK, x) * CONFIG.loss["l1"] ** power * rate

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate", **options, host_writes="ignore"), model


def train(step: Any, calls: int = 7) -> None:
    for _ in range(calls):
        step(torch.ones(2, 4))


def line_of(text: str) -> str:
    """Return file and number of the line in this file that has a text."""
    numbers = [number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line]
    return f"{__file__}:{numbers[0]}"


def test_what_is_listed() -> None:
    """R7: each value that the step has read has its path, its value and the line; what is not read has no row."""
    step, _ = make()
    assert step.constants() == ()
    train(step)
    found = {each.path: each for each in step.constants()}
    expected = {
        "model.scale": ("2.0", 'self.config["depth"]'),
        "model.config['depth']": ("3", 'self.config["depth"]'),
        "model.debug": ("False", "if self.debug"),
        "CONFIG.on": ("False", "if CONFIG.on"),
        "CONFIG.loss['l1']": ("0.5", 'CONFIG.loss["l1"] **'),
        "SCHEDULE.param_groups[0]['lr']": ("0.5", 'SCHEDULE.param_groups[0]["lr"] *'),
        "power": ("2", 'CONFIG.loss["l1"] **'),
        "MASK": ("a tensor, float32 [4]", "model(x) * MASK"),
    }
    for path, (value, text) in expected.items():
        assert (found[path].value, found[path].line, found[path].not_compared) == (value, line_of(text), ""), path
    assert found["model.drop.p"].value == "0.1"
    assert "dropout.py:" in found["model.drop.p"].line
    assert found["F"].is_code
    assert not [path for path in found if "unread" in path]
    assert len(found) == len(step.constants())


def test_what_is_not_compared() -> None:
    """R8: a row says why: the step changes it itself, or it is in an object that is not looked into."""
    step, _ = make()
    train(step)
    left = {each.path: each.not_compared for each in step.constants() if each.not_compared}
    assert left == {
        "model.calls": "the step changes it itself",
        "CONFIG.calls": "the step changes it itself",
        "PRIOR.batch_shape": "objects of torch are not looked into",
    }
    assert step.constants().compared == len(step.constants()) - 3


def said_once(logger: logging.Logger, text: str) -> None:
    if text not in SAID and logger.isEnabledFor(logging.DEBUG):
        logger.debug(text)


def test_of_a_logger_its_own_settings_count() -> None:
    """R7: all loggers of the process hang on each other, and there are a thousand of them."""
    parent, model = logging.getLogger("ampkit_test"), Net()
    logger = parent.getChild("child")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        weakref.ref(logger)  # any code may be behind this
        said_once(logger, "a step")
        return model(x).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate", host_writes="ignore")
    train(step)
    found = {each.path for each in step.constants()}
    assert {"logger.level", "logger.parent.level"} <= found
    assert not [path for path in found if "loggerDict" in path]
    parent.setLevel(logging.INFO)
    with pytest.warns(ampkit.AmpkitWarning, match=r"logger\._cache\[10\] changed"):  # what a logger keeps of the levels
        train(step, 5)
    parent.setLevel(logging.NOTSET)


def test_values_are_those_of_now() -> None:
    """The list follows a change, and graphs of the other value are captured."""
    step, model = make()
    train(step)
    model.scale = 0.5
    with pytest.warns(ampkit.AmpkitWarning, match="the attribute model.scale changed from 2.0 to 0.5"):
        train(step, 5)
    assert {each.path: each.value for each in step.constants()}["model.scale"] == "0.5"
    assert step.captures == 2


def test_two_steps_of_one_process_hold_the_same() -> None:
    """R7: what is compared does not depend on what the process did before."""
    first, _ = make()
    train(first)
    second, _ = make()
    train(second)
    CONFIG.calls = 0
    assert [each for each in first.constants() if each.path != "model.calls"] == [
        each for each in second.constants() if each.path != "model.calls"
    ]


def test_few_values_of_a_small_model_are_compared() -> None:
    """R7: the functions of Python's library that ampkit calls itself are no part of the step."""
    model = nn.Linear(4, 4)
    loss_fn: Callable[..., Tensor] = lambda model, x: model(x).sum()  # noqa: E731
    step = ampkit.graphed_step(
        loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1), graph="emulate", host_writes="ignore"
    )
    train(step)
    assert {each.path for each in step.constants()} <= {"model.in_features", "model.out_features"}


def test_a_function_lists_them_too() -> None:
    """`graphed`: the same for a function. Before the first call there is none."""
    model = Net()

    @ampkit.graphed(modules=[model], graph="emulate", host_writes="ignore")
    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x) * CONFIG.loss["l1"]

    assert evaluate.constants() == ()
    for _ in range(5):
        evaluate(torch.ones(2, 4))
    found = {each.path: each.value for each in evaluate.constants()}
    assert found["CONFIG.loss['l1']"] == "0.5"
    assert found["model.scale"] == "2.0"


def test_how_it_prints() -> None:
    """A table with the values; functions and modules in one line. The report counts them."""
    step, _ = make()
    train(step)
    constants, report = step.constants(), step.report()
    head, titles, *rows = str(constants).splitlines()
    assert head == f"{len(constants)} values of the host, {constants.compared} of them compared in each call"
    assert titles.split() == ["path", "value", "read", "in", "not", "compared"]
    assert any(row.split()[:2] == ["model.scale", "2.0"] for row in rows)
    assert rows[-1] == "and functions, classes and modules: F"
    assert report.constants == constants
    assert f"{len(constants)} values of the host are constants, {constants.compared} of them compared" in str(report)
    assert report.to_dict()["constants"] == len(constants)


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__name__"):
            raise RuntimeError("has none")
        return super().__getattribute__(name)


class Kind(metaclass=Nameless):
    scale = 2.0


class Weight(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RuntimeError("is not asked")


KIND, WEIGHT = Kind, torch.ones(4).as_subclass(Weight)


def test_classes_that_answer_nothing_are_listed() -> None:
    """No code of the user's runs for the list."""
    model = nn.Linear(4, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum() * KIND.scale * len([WEIGHT, KIND])

    step = ampkit.graphed_step(
        loss_fn, model, torch.optim.SGD(model.parameters(), lr=0.1), graph="emulate", host_writes="ignore"
    )
    train(step)
    found = {each.path: each.value for each in step.constants()}
    assert (found["KIND.scale"], found["KIND"], found["WEIGHT"]) == ("2.0", "Kind", "a tensor, float32 [4]")
    assert "KIND.scale" in str(step.constants())


class Number(int):
    def __eq__(self, other: object) -> Any:
        return NotImplemented

    __hash__ = int.__hash__


class Odd:
    def __eq__(self, other: object) -> Any:
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


def half() -> float:
    return 0.5


SAME: dict[str, tuple[Any, Any, bool]] = {
    "numbers": (1.5, 3 / 2, True),
    "an int and a float": (1, 1.0, False),
    "an int and a bool": (1, True, False),
    "zeros": (0.0, -0.0, False),
    "nan": (math.nan, float("nan"), True),
    "complex zeros": (complex(0.0, -0.0), complex(0.0, 0.0), False),
    "decimals that are written in two ways": (Decimal("1.0"), Decimal("1.00"), False),
    "texts": ("ab", "".join(["a", "b"]), True),
    "tuples": ((1, (2.0, "a")), (1, (2.0, "a")), True),
    "tuples with zeros": ((0.0,), (-0.0,), False),
    "lists": ([1, 2.0], [1, 2.0], True),
    "lists of other lengths": ([1], [1, 1], False),
    "sets": (frozenset((1, "a")), frozenset(("a", 1)), True),
    "sets with zeros": (frozenset((0.0,)), frozenset((-0.0,)), False),
    "sets with 1 and True": (frozenset((1,)), frozenset((True,)), False),
    "ranges": (range(3), range(0, 3), True),
    "slices": (slice(0, 2), slice(0, 3), False),
    "dtypes": (torch.float32, torch.float, True),
    "devices": (torch.device("cpu"), torch.device("cpu", 0), False),
    "a number whose class compares nothing": (Number(1), Number(1), True),
    "another number of that class": (Number(1), Number(2), False),
    "objects whose class compares nothing": (Odd(), Odd(), False),
    "functions": (half, half, True),
    "tensors": (torch.ones(1), torch.ones(1), False),
}


@pytest.mark.parametrize("case", SAME)
def test_when_two_values_are_the_same(case: str) -> None:
    """There is one definition. An `__eq__` that returns NotImplemented, which is true as a condition, says no."""
    old, now, expected = SAME[case]
    assert are_same(old, now) is expected
    assert are_same(now, old) is expected
    assert are_same(old, old)


def test_when_two_sets_are_equal() -> None:
    """As numbers are: by their kind and the sign of a zero, and nan is equal to nan."""
    assert are_equal({0.5, float("nan")}, {float("nan"), 0.5})
    assert not any(are_equal({old}, {now}) for old, now in ((0.0, -0.0), (1, True), (float("nan"), 0.5)))


def test_an_eq_of_a_builtin_that_knows_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """`NotImplemented` is no equality."""
    assert int.__eq__(1, "1") is NotImplemented  # type: ignore[operator]
    monkeypatch.setattr("ampkit._capture.host.constants._own_kind", lambda value: Odd)
    assert not are_same(1, 2)
