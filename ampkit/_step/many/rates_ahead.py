"""The learning rates of a launch: schedulers are stepped ahead of it, and its graph reads the rates from tables."""

import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeGuard

from torch import Tensor
from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler

from ..._capture.host.constants import are_same, is_plain
from ..._optimizer.param_groups import CapturableGroups, RateTable
from ..._torch.tensors.modules import is_of_torch
from ..._undo import Undo
from ..schedule import Schedule


def may_step_ahead(scheduler: object) -> TypeGuard[LRScheduler]:
    """Return whether a scheduler may be stepped before the steps are done: none of them changes what it reads.

    It is of one of torch's own classes, and functions that the user has given it, as to `LambdaLR`, read only numbers
    and functions that read no more. Another one may read tensors, or write to some.
    """
    kind = type(scheduler)
    return issubclass(kind, LRScheduler) and is_of_torch(kind) and all(map(_is_fixed, vars(scheduler).values()))


def _is_fixed(value: Any, within: frozenset[int] = frozenset()) -> bool:
    """Return whether this is no function, or one that reads numbers alone. Functions `within` are being looked at."""
    if isinstance(value, LRScheduler):
        return may_step_ahead(value)
    if isinstance(value, (list, tuple)):
        return all(_is_fixed(each, within) for each in value)
    if isinstance(value, partial):
        return all(_is_fixed(each, within) for each in (value.func, *value.args, *value.keywords.values()))
    if not callable(value) or is_of_torch(value) or isinstance(value, type | BuiltinFunctionType):
        return not isinstance(value, Module)
    if not isinstance(value, FunctionType):
        return False
    read = inspect.getclosurevars(value)
    values = (*read.nonlocals.values(), *read.globals.values(), *(value.__defaults__ or ()))
    return id(value) in within or all(_is_read_alone(each, within | {id(value)}) for each in values)


def _is_read_alone(value: Any, within: frozenset[int]) -> bool:
    """Return whether a function may read this: numbers, texts, modules of Python's or torch's, functions like it."""
    if isinstance(value, (list, tuple)):
        return all(_is_read_alone(each, within) for each in value)
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in {*sys.stdlib_module_names, "numpy", "torch"}
    return is_plain(value) and not isinstance(value, Tensor) and _is_fixed(value, within)


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
            self._tables[counts] = RateTables([*self._all_groups], tables)  # there may be more of them later
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
