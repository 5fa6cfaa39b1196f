"""Which variables the bytecode of functions reads, and what of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ampkit._capture.host.code import Read, Scope, codes_in, reads

CONFIG: Any = SimpleNamespace()
ALPHA, LAYERS, TABLE = 1.0, [1.0], {"a": {"b": 1.0}}


def written(function: Callable[..., Any]) -> dict[str, Scope]:
    """Return the expressions that a function reads as one writes them, and where their variables are kept."""
    return {read.variable + "".join(map(str, read.parts)): read.scope for read in reads(function.__code__)}


def passed(config: Any, unread: Any) -> Any:
    weights = config.loss.weights
    return weights["l1"] * config.scale + len(unread)


def assigned_twice(x: Any) -> Any:
    config = CONFIG.first
    if x:
        config = CONFIG.second
    return config.scale


def written_to(x: Any) -> None:
    CONFIG.last = x
    TABLE["a"]["b"] = x
    TABLE["c"] = LAYERS[0]
    del TABLE["d"]


def comprehension(x: Any) -> Any:
    config = CONFIG.inner
    return [config.scale * each + ALPHA for each in x]


def keys(x: Any) -> Any:
    return TABLE["a"]["b"] + LAYERS[-1] + TABLE[x] + LAYERS[1:]  # type: ignore[operator]


def added_to(config: Any) -> None:
    config.count += 1
    config.inner = first = CONFIG.loss
    print(first, (second := CONFIG.named).scale, second)


CASES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "number": (lambda x: x * ALPHA, {"ALPHA", "x"}),
    "attribute": (lambda x: x * CONFIG.loss.scale, {"CONFIG.loss.scale", "x"}),
    "method": (lambda x: CONFIG.loss.of(x), {"CONFIG.loss.of", "x"}),
    "two of one": (lambda: CONFIG.first + CONFIG.second, {"CONFIG.first", "CONFIG.second"}),
    "argument of a call": (lambda: abs(CONFIG.loss), {"abs", "CONFIG.loss"}),
    "argument": (passed, {"config.loss.weights['l1']", "config.scale", "len", "unread"}),
    "assigned twice": (assigned_twice, {"CONFIG.first", "CONFIG.second", "x"}),
    "written to": (written_to, {"LAYERS[0]", "x", "CONFIG.last", "TABLE['a']['b']", "TABLE['c']", "TABLE['d']"}),
    "added to": (added_to, {"config.count", "config.inner", "CONFIG.loss", "CONFIG.named", "print"}),
    "comprehension": (comprehension, {"CONFIG.inner.scale", "ALPHA", "x"}),
    "keys": (keys, {"TABLE['a']['b']", "LAYERS[-1]", "TABLE", "LAYERS", "x"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_function_reads(case: str) -> None:
    """R7: the longest expressions, by what the variable of each one is."""
    function, expected = CASES[case]
    assert set(written(function)) == expected


def test_where_variables_are_kept() -> None:
    """In the module, in a function around it, or in the function itself; a function in it is seen from outside."""
    scale, inner = 1.0, SimpleNamespace(gain=1.0)

    def function(config: Any, x: Any) -> Any:
        kept = config.kept

        return (lambda y: y * kept.factor * scale)(x) * inner.gain * ALPHA

    assert written(function) == {
        "x": Scope.ARGUMENT,
        "config.kept.factor": Scope.ARGUMENT,
        "scale": Scope.ENCLOSING,
        "inner.gain": Scope.ENCLOSING,
        "ALPHA": Scope.GLOBAL,
    }
    assert [code.co_name for code in codes_in(function.__code__)] == ["<lambda>"]


def test_an_argument() -> None:
    """As it is, or what is read of it."""
    assert [*reads((lambda x, y: x).__code__)] == [Read(Scope.ARGUMENT, "x")]
    assert next(iter(reads((lambda x: x.T).__code__)))[:2] == Read(Scope.ARGUMENT, "x")[:2]
