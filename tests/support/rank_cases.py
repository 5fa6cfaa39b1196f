"""Fixtures that have a script train its cases on several ranks: one start of the ranks for all tests of a file."""

from collections.abc import Iterable
from typing import Any

import ddp_train
import pytest

Rows = list[dict[str, Any]]  # of one case, one per rank


def cases_of(script: str, device: str, names: Iterable[str], seconds: float, ranks: int = 2) -> Any:
    """Return a fixture, which gives what came of these cases of a script, by name.

    Args:
        script: see `ddp_train.launch_cases`.
        device: "cpu" or "cuda".
        names: of the cases.
        seconds: how long all of them may take together.
        ranks: how many processes train.
    """

    @pytest.fixture(scope="module")
    def rows_by_case() -> dict[str, Rows]:
        return ddp_train.launch_cases(script, device, tuple(names), seconds, ranks)

    return rows_by_case
