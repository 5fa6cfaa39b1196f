"""Which cases of a large family `make test` runs: a few that stand for the rest, which are slow."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the cases as parameters, all but the quick ones with the mark `slow`."""
    return [_param(case, quick=case in quick) for case in cases]


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters, all but the first and each `step`-th behind it with the mark `slow`."""
    return [_param(case, quick=i % step == 0) for i, case in enumerate(cases)]


def _param(case: Any, *, quick: bool) -> Any:
    marks = () if quick else (pytest.mark.slow,)
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=(*case.marks, *marks))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
