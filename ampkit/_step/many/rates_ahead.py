"""The learning rates of a launch: schedulers are stepped ahead of it, and its graph reads the rates from tables."""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..._capture.host.constants import are_same
from ..._optimizer.param_groups import CapturableGroups, RateTable
from ..._undo import Undo
from ..schedule import Schedule


@dataclass(frozen=True, eq=False)
class RateTables:
    """What the graph of a launch reads its rates from: a table per optimizer."""

    groups: Sequence[CapturableGroups]
    tables: Sequence[RateTable]

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Context for one of the steps, which reads its own rates."""
        with ExitStack() as stack:
            for groups, table in zip(self.groups, self.tables, strict=True):
                stack.enter_context(groups.reading(table.rows[step]))
            yield


class RatesAhead:
    """The rates of the steps of one launch.

    Args:
        groups: the param groups of each optimizer.
        most: how many steps a launch does at most.
    """

    def __init__(self, groups: Sequence[CapturableGroups], most: int) -> None:
        self._all_groups, self._most = groups, most
        self._tables: dict[tuple[int, ...], RateTables] = {}  # by the numbers of param groups
        self._entries: list[dict[str, Any]] = []  # of the param groups, before the schedulers were stepped ahead
        self._rates: list[list[Any]] = []  # by step and param group

    def tables(self) -> RateTables:
        """Return what the graph of a launch reads from, with the param groups that there are now."""
        counts = tuple(len(groups.param_groups) for groups in self._all_groups)
        if counts not in self._tables:
            tables = [groups.table(self._most) for groups in self._all_groups]
            self._tables[counts] = RateTables(self._all_groups, tables)
        return self._tables[counts]

    def step(self, schedules: Sequence[Schedule], steps: int) -> int:
        """Step the schedulers ahead, and write the rates of so many steps to the tables. Sync: none.

        Return how many steps have their rates now: fewer if a scheduler changes more than rates. Then it was stepped as
        often.
        """
        tables, param_groups = self.tables().tables, self._param_groups()
        # With copies of lists of numbers, which may change in place.
        self._rates, self._entries = (
            [],
            [
                {key: [*value] if type(value) is list and key != "params" else value for key, value in group.items()}
                for group in param_groups
            ],
        )
        for table in tables:
            table.begin()
        count, at_once = 0, 1 if schedules else steps
        while count < steps and all(map(_only_rate_differs, self._entries, param_groups)):
            for groups, table in zip(self._all_groups, tables, strict=True):
                table.add([group.get("lr") for group in groups.param_groups], at_once)
            now = [group.get("lr") for group in param_groups]
            # A scheduler changes a tensor in place.
            self._rates.append([rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in now])
            for schedule in schedules:
                schedule.step()
            count += at_once
        for table in tables:
            table.write()
        return count

    @contextmanager
    def one_by_one(self) -> Iterator[Callable[[int], None]]:
        """Context for steps that are made by single calls after all. It yields what sets the rates of a step."""
        param_groups = self._param_groups()

        def put(step: int) -> None:
            for group, values, rate in zip(param_groups, self._entries, self._rates[step], strict=True):
                group.update(values)
                group.update({"lr": rate} if "lr" in group else {})

        with Undo() as undo:
            for group in param_groups:
                undo.note(group.update, dict(group))
            yield put

    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for groups in self._all_groups for group in groups.param_groups]


def _only_rate_differs(before: dict[str, Any], group: dict[str, Any]) -> bool:
    """Return whether a param group has the entries that it had, learning rates aside."""
    if [*before] != [*group]:
        return False
    changed = [
        key for key, same in zip(group, map(operator.is_, before.values(), group.values()), strict=True) if not same
    ]
    return all(key in ("lr", "initial_lr") or are_same(before[key], group[key]) for key in changed)
