"""Fixtures that have a script train its cases on several ranks: one start of the ranks for all tests of a file."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ddp_train
import pytest

Rows = list[dict[str, Any]]  # of one case, one per rank
Cases = ddp_train.Started  # has them by name


def cases_of(
    script: str, device: str, names: Iterable[str], seconds: float, ranks: int = 2, modules: Sequence[str] = ()
) -> Any:
    """Return a fixture, which starts the ranks and has what comes of each case by its name, as soon as it has ended.

    So a test ends with its case, while the next ones train. Cases that no selected test asks for are left out. On the
    CPU the ranks are forks of a process that has imported torch.

    Args:
        script: which one trains.
        device: "cpu" or "cuda".
        names: of the cases.
        seconds: how long all of them may take together.
        ranks: how many processes train.
        modules: what the script imports besides and takes long.
    """

    @pytest.fixture(scope="module")
    def rows_by_case(request: pytest.FixtureRequest) -> Iterator[Cases | None]:
        selected = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
        values = {value for item in selected for value in item.callspec.params.values() if isinstance(value, str)}
        chosen = [name for name in names if name in values]
        if not chosen:  # the test that is selected does not look at them
            yield None
            return
        options = ("--device", device, "--timeout", str(seconds), "--cases", *chosen)
        how: dict[str, Any] = {"forked": device == "cpu", "modules": modules}
        with ddp_train.Started(*options, ranks=ranks, timeout=seconds, script=script, **how) as started:
            yield started
            if not request.session.testsfailed:
                started.rows()  # they end well, too

    return rows_by_case
