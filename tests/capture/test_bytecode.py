"""Which variables the bytecode of functions reads, and what of them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ampkit._capture.bytecode import Read, Scope, codes_in, reads

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


CASES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "number": (lambda x: x * ALPHA, {"ALPHA"}),
    "attribute": (lambda x: x * CONFIG.loss.scale, {"CONFIG.loss.scale"}),
    "method": (lambda x: CONFIG.loss.of(x), {"CONFIG.loss.of"}),
    "two of one": (lambda x: CONFIG.first + CONFIG.second, {"CONFIG.first", "CONFIG.second"}),
    "argument of a call": (lambda x: abs(CONFIG.loss), {"abs", "CONFIG.loss"}),
    "argument": (passed, {"config.loss.weights", "config.loss.weights['l1']", "config.scale", "len"}),
    "assigned twice": (assigned_twice, {"CONFIG.first", "CONFIG.second"}),
    "written to": (written_to, {"CONFIG", "LAYERS[0]"}),
    "comprehension": (comprehension, {"CONFIG.inner", "CONFIG.inner.scale", "ALPHA"}),
    "keys": (keys, {"TABLE['a']['b']", "LAYERS[-1]", "TABLE", "LAYERS"}),
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
        "config.kept": Scope.ARGUMENT,
        "config.kept.factor": Scope.ARGUMENT,
        "scale": Scope.ENCLOSING,
        "inner.gain": Scope.ENCLOSING,
        "ALPHA": Scope.GLOBAL,
    }
    assert [code.co_name for code in codes_in(function.__code__)] == ["<lambda>"]


def test_a_bare_argument_is_no_expression() -> None:
    """Its value comes with the call."""
    assert reads((lambda x, y: x + y).__code__) == {}
    assert next(iter(reads((lambda x: x.T).__code__)))[:2] == Read(Scope.ARGUMENT, "x")[:2]
