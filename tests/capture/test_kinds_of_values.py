"""Numbers that are no Python floats or ints, and arrays of them: a change of one that a step reads is noticed."""

import array
import copy
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit._capture.host.objects import any_name, holders, restoring

CONFIG = SimpleNamespace()
READ: dict[type, Callable[[Any, Tensor], Any]] = {
    slice: lambda value, out: out[:, value].sum(),
    range: lambda value, out: len(value),
    bytearray: lambda value, out: sum(value),
    array.array: lambda value, out: sum(value),
    numpy.ndarray: lambda value, out: float(value.sum().astype(float) if value.dtype.kind == "m" else value.sum()),
}
# A value, another one, and the first one once more as another object.
REPLACED: dict[str, tuple[Any, Any, Any]] = {
    "float32": (numpy.float32(1), numpy.float32(2), numpy.float32(1)),
    "float64": (numpy.float64(1), numpy.float64(2), numpy.float64(1)),
    "int64": (numpy.int64(1), numpy.int64(2), numpy.int64(1)),
    "zero": (numpy.float32(0), numpy.float32(-0.0), numpy.float32(0)),
    "nan": (numpy.float32("nan"), numpy.float32(1), numpy.float32("nan")),
    "bool": (numpy.bool_(True), numpy.bool_(False), numpy.bool_(True)),
    "dtype": (numpy.int32(1), numpy.int64(1), numpy.int32(1)),
    "Decimal": (Decimal("1.5"), Decimal("2.5"), Decimal("1.5")),
    "Fraction": (Fraction(1, 2), Fraction(1, 3), Fraction(1, 2)),
    "slice": (slice(0, 2), slice(0, 3), slice(0, 2)),
    "range": (range(2), range(3), range(2)),
    "array": (numpy.array([1.0, 2.0]), numpy.array([1.0, 3.0]), numpy.array([1.0, 2.0])),
    "array of another shape": (numpy.ones((2, 1)), numpy.ones((1, 2)), numpy.ones((2, 1))),
    "array of another dtype": (numpy.ones(2), numpy.ones(2, "float32"), numpy.ones(2)),
    "array without dimensions": (numpy.array(1.0), numpy.array(2.0), numpy.array(1.0)),
    "bytes": (bytearray(b"ab"), bytearray(b"ac"), bytearray(b"ab")),
    "array of Python": (array.array("f", [1]), array.array("f", [2]), array.array("f", [1])),
}


class Model(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.inner, self.value = nn.Linear(4, 4), value

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def read(value: Any, out: Tensor) -> Any:
    return READ.get(type(value), lambda value, out: float(value))(value, out)


class Run:
    """A step that reads a value: an attribute of its model, or of an object in a global variable.

    Attributes:
        step: the step.
    """

    def __init__(self, place: str, value: Any) -> None:
        model = Model(value)
        self._owner: Any = model if place == "attribute" else CONFIG
        CONFIG.value = value

        def of_model(model: Any, x: Tensor) -> Tensor:
            return model(x).square().mean() * read(model.value, x)

        def of_config(model: Any, x: Tensor) -> Tensor:
            return model(x).square().mean() * read(CONFIG.value, x)

        loss = of_model if place == "attribute" else of_config
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10, fused=True)
        self.step = ampkit.graphed_step(loss, model, optimizer, graph="emulate")

    def put(self, value: Any) -> None:
        self._owner.value = value

    def graphs(self) -> int:
        """Make calls until one is replayed. Return how many graphs there are."""
        before = self.step.replays
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            while self.step.replays == before:
                self.step(torch.ones(2, 4))
        return self.step.captures


@pytest.mark.parametrize("place", ["attribute", "variable"])
@pytest.mark.parametrize(("first", "second", "again"), REPLACED.values(), ids=REPLACED)
@pytest.mark.quick(4)
def test_a_value_is_replaced(first: Any, second: Any, again: Any, place: str) -> None:
    """R7: another value is another graph; an equal one has the graph that is there."""
    run = Run(place, first)
    assert run.graphs() == 1
    run.put(second)
    assert run.graphs() == 2
    run.put(again)
    assert run.graphs() == 2


IN_PLACE: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "array": (numpy.array([1.0, 2.0]), lambda value: value.fill(3.0)),
    "array without dimensions": (numpy.array(1.0), lambda value: value.fill(3.0)),
    "bytes": (bytearray(b"ab"), lambda value: value.extend(b"c")),
    "array of Python": (array.array("f", [1]), lambda value: value.append(2)),
}


@pytest.mark.parametrize("place", ["attribute", "variable"])
@pytest.mark.parametrize(("value", "change"), IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.quick(4)
def test_numbers_in_memory_change_in_place(value: Any, change: Callable[[Any], object], place: str) -> None:
    """R7: what is in a small array is compared in each call."""
    run = Run(place, value[...].copy() if isinstance(value, numpy.ndarray) else value[:])
    assert run.graphs() == 1
    change(run._owner.value)
    assert run.graphs() == 2
    assert run.graphs() == 2


NOT_LOOKED_INTO: dict[str, tuple[Any, Any]] = {
    "more than 64 numbers": (numpy.ones(100), numpy.full(100, 2.0)),
    "times": (numpy.array([1, 2], "m8[s]"), numpy.array([1, 3], "m8[s]")),
    "objects": (numpy.array([1, 2], object), numpy.array([1, 3], object)),
}


@pytest.mark.parametrize("place", ["attribute", "variable"])
@pytest.mark.parametrize(("first", "second"), NOT_LOOKED_INTO.values(), ids=NOT_LOOKED_INTO)
def test_an_array_is_compared_as_a_whole(first: Any, second: Any, place: str) -> None:
    """Of large arrays, and of those that hold no numbers, only which one it is."""
    run = Run(place, first)
    assert run.graphs() == 1
    run.put(second)
    assert run.graphs() == 2


def test_an_array_that_the_step_changes() -> None:
    """What the step itself counts in an array is no change between calls. A replay would not count it, so it is named.

    W2
    """
    model = nn.Linear(4, 4)
    seen = numpy.zeros(2)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen[0] += 1
        return model(x).square().mean() * (1.0 if seen[0] else 2.0)

    step = ampkit.graphed_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), graph="emulate")
    with pytest.warns(ampkit.CaptureWarning, match="the variable seen is changed by each call"):
        results = [step(torch.ones(2, 4)) for _ in range(8)]
    assert step.captures == 0
    assert seen[0] == len(results)


ARRAYS = [numpy.ones(2), numpy.ones(2, "float16"), numpy.array(["a", "b"]), numpy.ones(2, ">i4"), bytearray(b"ab")]


@pytest.mark.parametrize("first", [*ARRAYS, array.array("f", [1, 2])], ids=repr)
def test_an_array_is_put_back(first: Any) -> None:
    """W1: behind a capture that failed. One that cannot be written to, and so was not, raises no error."""
    value, fixed = copy.copy(first), numpy.broadcast_to(numpy.ones(1), (2,))
    tables = [held for owner in (value, fixed) for held in holders(owner, any_name, set())]
    restores = [restore for held in tables if (restore := restoring(held)) is not None]
    value[0] = 3
    assert bytes(value) != bytes(first)
    for restore in restores:
        restore()
    assert (len(tables), bytes(value)) == (2, bytes(first))


def test_the_warning_has_the_values() -> None:
    run = Run("variable", numpy.array([1.0, 2.0]))
    run.graphs()
    run.put(numpy.array([1.0, 3.0]))
    with pytest.warns(
        ampkit.CaptureWarning, match=r"CONFIG\.value changed from \(1\.0, 2\.0, 'float64.+to \(1\.0, 3\.0, "
    ):
        run.step(torch.ones(2, 4))
