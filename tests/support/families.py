"""Which cases of a large family `make test` and `make test-all` run: a few that stand for the rest."""

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the cases as parameters, all but the quick ones with the mark `slow`, every other one of these `seeds`."""
    return _params(cases, lambda _, case: case in quick)


def some(cases: Iterable[str], quick: Container[str], slow: Container[str]) -> list[Any]:
    """Return the cases as parameters: those that stand for the rest quick or slow, all others `seeds`."""
    marks = [pytest.mark.slow, pytest.mark.seeds]
    return [pytest.param(case, marks=[] if case in quick else marks[: 1 if case in slow else 2]) for case in cases]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters, the first and each `step`-th behind it quick, the others marked as by `few`."""
    return _params(cases, lambda i, _: i % step == 0)


def _params(cases: Iterable[Any], quick: Callable[[int, Any], bool]) -> list[Any]:
    params, slow = [], 0
    for i, case in enumerate(cases):
        behind = not quick(i, case)
        if not isinstance(case, type(pytest.param())):
            case = pytest.param(*(case if isinstance(case, tuple) else (case,)))
        marks = [pytest.mark.slow] * behind + [pytest.mark.seeds] * (behind and slow % 2)
        slow += behind
        params.append(pytest.param(*case.values, id=case.id, marks=(*case.marks, *marks)))
    return params
