"""Objects whose classes raise, or do something of their own, where ampkit looks for what a step reads of them."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit

ODD: Any = None


class NoModule:
    scale = 2.0


NoModule.__module__ = None  # type: ignore[assignment]


class OwnTable:
    scale = 2.0

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("has none")


class OwnModules(nn.Module):
    scale = 2.0

    def modules(self) -> Any:
        raise RuntimeError("not told")

    def forward(self, x: Tensor) -> Tensor:
        return x


class Missing(dict[str, float]):
    def __missing__(self, key: str) -> float:
        self[key] = 5.0
        return 5.0


class OwnDict(dict[str, float]):
    def __contains__(self, key: object) -> bool:
        raise RuntimeError("not told")

    __len__ = items = keys = copy = __contains__  # type: ignore[assignment]


class Equal:
    scale = 2.0

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]
    __bool__ = __len__ = __eq__  # type: ignore[assignment]


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__mro__", "__module__", "__dict__"):
            raise RuntimeError(f"not told: {name}")
        return super().__getattribute__(name)


class OfMeta(metaclass=Meta):
    scale = 2.0


class Attributes:
    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            return 2.0
        raise RuntimeError(f"not told: {name}")


class Late(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"not told: {name}")


class Unnamed(int):
    def __repr__(self) -> str:
        raise RuntimeError("has no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    __hash__ = int.__hash__


def late() -> ModuleType:
    made = Late("late")
    made.scale = 2.0  # type: ignore[attr-defined]
    return made


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "no module": (NoModule, lambda odd: odd.scale),
    "own __dict__": (OwnTable, lambda odd: odd.scale),
    "own modules": (OwnModules, lambda odd: odd.scale),
    "makes entries": (lambda: Missing(a=2.0), lambda odd: odd["a"]),
    "own dict": (lambda: OwnDict(a=2.0), lambda odd: odd["a"]),
    "own comparison": (Equal, lambda odd: odd.scale),
    "own class": (OfMeta, lambda odd: odd.scale),
    "class": (lambda: OfMeta, lambda odd: odd.scale),
    "own attributes": (Attributes, lambda odd: odd.scale),
    "late module": (late, lambda odd: odd.scale),
}


class Net(nn.Module):
    def __init__(self, odd: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        vars(self)["odd"] = odd

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self.odd)


def train(model: nn.Module, loss_fn: Any, graph: str = "emulate", calls: int = 6) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph)
    for _ in range(calls):
        step(torch.ones(2, 4))
    return step


@pytest.mark.parametrize("where", ["variable", "attribute"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.quick(4)
def test_the_step_runs(case: str, where: str) -> None:
    """R7: the step is captured as with any other object, and none of its code is called by ampkit."""
    make, read = CASES[case]
    globals().update(ODD=make())
    if where == "attribute":
        step = train(Net(ODD, read), lambda model, x: model(x).square().mean())
    else:
        step = train(nn.Linear(4, 4), lambda model, x: model(x).square().mean() * read(ODD))
    assert step.replays == 3


def test_an_entry_that_is_gone_is_not_made() -> None:
    """R7: a dict that makes its entries is only read. Behind `clear` the step makes the entry, as in an eager loop."""
    globals().update(ODD=Missing(a=2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        step = train(nn.Linear(4, 4), lambda model, x: model(x).square().mean() * ODD["a"])
        ODD.clear()
        step.report()
        assert dict(ODD) == {}
        step(torch.ones(2, 4))
    assert dict(ODD) == {"a": 5.0}


def test_numbers_of_a_class_of_their_own() -> None:
    """R7: they are compared as the numbers that they are."""
    model = Net({1: Unnamed(2)}, lambda odd: int(odd[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        step = train(model, lambda model, x: model(x).square().mean())
        for value, captures in ((2, 1), (3, 2)):
            model.odd[1] = Unnamed(value)
            for _ in range(4):
                step(torch.ones(2, 4))
            assert step.captures == captures


def test_what_cannot_be_looked_at_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """R7: where an object raises nevertheless, no change would be noticed. So the step stays eager, and says why."""

    def fail(code: Any) -> Any:
        raise RuntimeError("has no text")

    monkeypatch.setattr("ampkit._capture.host.roots.reads", fail)
    reason = (
        r"An object that the step reads \(read in .*test_odd_objects.py:\d+.*\) raises .* RuntimeError: has no text"
    )
    with pytest.warns(ampkit.CaptureWarning, match=reason):
        step = train(nn.Linear(4, 4), lambda model, x: model(x).square().mean() * 2.0)
    assert step.replays == 0
    assert "has no text" in step.report().failure
    assert "not in parts: it cannot be told what the modules read" in str(step.report())
