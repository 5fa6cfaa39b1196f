"""What calls leave in attributes, variables, dicts and lists, as `self.last_attention = weights` or `self.ran = True`.

No replay would leave it. The tensor of the capture is memory of the graph, which its replays fill. So it is kept, and
a replay puts it where the call would have put its own. So it does with numbers, of which it is compared what was there.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import chain
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._torch.tensors.modules import hook_tables, is_module, module_tables, parts_of
from ..._torch.tensors.tensors import is_tensor
from ..._torch.tensors.tree import tensors_in
from .calls import KEPT_ELSEWHERE, is_looked_into
from .code import Scope, given_before
from .constants import ABSENT, anew, are_equal, are_same, is_of_numbers
from .objects import File, Reach, Slots, any_name, holders
from .roots import Root


class LeftTensors:
    """What modules, and the variables of the functions that a step calls, hold before a capture.

    Args:
        modules: those that the step may call.
        functions: those of the user's that ampkit calls in a step.
        roots: further variables that code reads or sets, see `Root`.
        values: what these lead to.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Iterable[Any],
        roots: Iterable[Root] = (),
        values: Iterable[Any] = (),
    ) -> None:
        hooks = [hook for module in modules for table in hook_tables(module) for hook in table.values()]
        values = [*values, *(value for function in (*functions, *hooks) for _, value in given_before(function))]
        variables: dict[int, tuple[Any, dict[str, None]]] = {}  # cells, and the dicts of global variables with names
        for function in Reach([*functions, *modules, *hooks]):
            values += chain.from_iterable(map(gc.get_referents, function.__closure__ or ()))
            values += [function.__globals__.get(name) for name in function.__code__.co_names]
            variables.update((id(cell), (cell, {})) for cell in function.__closure__ or ())
            names = dict.fromkeys(function.__code__.co_names)
            variables.setdefault(id(function.__globals__), (function.__globals__, {}))[1].update(names)
        for root in roots:
            names = {} if root.scope is Scope.ENCLOSING else {root.name: None}
            if root.scope is not Scope.ARGUMENT:
                variables.setdefault(id(root.owner), (root.owner, {}))[1].update(names)
        seen: set[int] = set()
        held = [each.table for value in values for each in holders(value, any_name, seen, all_entries=True)]
        for module in modules:
            inside = (value for name, value in vars(module).items() if name not in KEPT_ELSEWHERE)
            held += chain.from_iterable((each.table for each in holders(value, any_name, seen)) for value in inside)
        beside = [part for value in values if is_module(value) for part in parts_of(value)]
        held += chain.from_iterable((vars(part), module_tables(part)[1]) for part in beside)
        tables = [*map(vars, modules), *(table for table in held if isinstance(table, (dict, list, Slots)))]
        self._files = [table for table in held if isinstance(table, File)]
        self._before = [(table, dict(_entries(table))) for table in tables]
        self._variables = [(table, list(names), dict(_entries(table, names))) for table, names in variables.values()]
        self._left_alone = {id(vars(module)) for module in modules if not is_looked_into(module)}

    def fitting(self, copied: Set[int]) -> tuple[Callable[[], bool] | None, bool]:
        """Return what tells whether a replay would find what the call has found; None if there is nothing to look at.

        Return also whether no call behind the one that was captured can find it, since that has changed it.

        Lists must be as long as they were, in which it has left something. What it has put elsewhere, or copied to
        there (`copied` are ids), must be where it was, and so must what lies in several places, for it may have put it
        into each of them again.
        """
        taken = self.taken()
        lengths = {id(table): (table, len(before)) for table, before in self._before if isinstance(table, list)}
        lists = [lengths[key] for key in dict.fromkeys(id(table) for table, *_ in taken) if key in lengths]
        now = Counter(id(tensor) for _, _, tensor in self.tensors())
        moved = copied | {id(value) for _, _, value in taken} | {each for each, count in now.items() if count > 1}
        entries = ((table, key, value) for table, before in self._before for key, value in before.items())
        places = [each for each in entries if is_tensor(each[-1]) and id(each[-1]) in moved]

        def fits() -> bool:
            if any(list.__len__(table) != length for table, length in lists):
                return False
            return all(entry(table, key) is value for table, key, value in places)

        put_there = {(id(table), key) for table, key, _ in taken}
        is_lost = any((id(table), key) in put_there for table, key, _ in places)
        return fits if lists or places else None, is_lost

    def contents(self) -> list[Any]:
        """Return all that they hold now, and how far their files have been written, or read."""
        tables = [table.owner if isinstance(table, Slots) else table for table, _ in self._before]
        variables = (value for table, names, _ in self._variables for _, value in _entries(table, names))
        return [*gc.get_referents(*tables), *variables, *map(File.read, self._files)]

    def hold_others(self, before: list[Any]) -> bool:
        """Return whether they hold something else than `contents` returned before: another number, or object."""
        now = self.contents()
        return len(now) != len(before) or not all(map(are_same, before, now))

    def tensors(self) -> Iterator[tuple[Any, Any, Tensor]]:
        """Yield the tensors that they hold now: the dict or list, the key, and the tensor."""
        for table in (table for table, _ in self._before if not isinstance(table, Slots)):
            yield from ((table, key, value) for key, value in _entries(table) if is_tensor(value))

    def taken(self) -> list[tuple[Any, Any, Any]]:
        """Return what holds something else now that has tensors in it, or nothing but numbers.

        That is the dict, list or cell, the key, and the value, `ABSENT` if it is gone.
        """
        known = {id(table) for table, _ in self._before}
        left = [*self.new(), *self._numbers()]
        made = ((table, key, is_tensor(value) or id(value) in known, value) for table, key, value, _ in left)
        return [(table, key, value if is_as_it_is else _Remade(value)) for table, key, is_as_it_is, value in made]

    def _numbers(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield the same as `new`, of what holds numbers now, or nothing, and did not hold the same before."""
        tables = [(table, None, before) for table, before in self._before if id(table) not in self._left_alone]
        for table, names, before in (*tables, *self._variables):
            now = dict(_entries(table, names))
            for key in {**before, **now} if not isinstance(table, list) else now:
                was, value = before.get(key, ABSENT), now.get(key, ABSENT)
                if is_of_numbers(value) and not are_equal(was, value):
                    yield table, key, value, was

    def new(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield what holds something else now that has tensors in it: table, key, and value, and what was there."""
        for table, before in self._before:
            for key, value in _entries(table):
                was = before.get(key, ABSENT)
                if value is not was and tensors_in(value):
                    yield table, key, value, was

    def put_back(self) -> None:
        """Put back what was in the places of tensors and numbers that came since."""
        changed = [*self.new(), *self._numbers()]
        put([(table, key, was) for table, key, _, was in changed if not isinstance(table, list)])
        lists = {id(table) for table, *_ in changed if isinstance(table, list)}
        for table, before in self._before:
            if isinstance(table, list) and id(table) in lists:
                list.__setitem__(table, slice(None), list(before.values()))


def moves(was: Any, now: Any) -> bool:
    """Return whether a call has moved a tensor within what it has put in a place, as `last = last[1:] + [new]` does."""
    before, after = tensors_in(was), tensors_in(now)
    stays = {i for i, tensor in enumerate(after) if i < len(before) and tensor is before[i]}
    return any(tensor is old for i, tensor in enumerate(after) if i not in stays for old in before)


def put(left: list[tuple[Any, Any, Any]]) -> None:
    """Put tensors and numbers where a call has left them. A list that it has made is another one each time."""
    for table, key, given in left:
        value = anew(given.value) if type(given) is _Remade else given
        if isinstance(table, list):
            if key < list.__len__(table):
                list.__setitem__(table, key, value)
        elif isinstance(table, dict):
            dict.pop(table, key, None) if value is ABSENT else dict.__setitem__(table, key, value)
        else:
            owner, name = (table.owner, key) if isinstance(table, Slots) else (table, "cell_contents")
            object.__delattr__(owner, name) if value is ABSENT else object.__setattr__(owner, name, value)


class _Remade(NamedTuple):
    """What a call has made, and the next call makes again."""

    value: Any


def entry(table: Any, key: Any) -> Any:
    """Return what is in a place of a dict, a list or slots, None if it is gone."""
    if isinstance(table, dict):
        return dict.get(table, key)
    return table[key] if (key in table if isinstance(table, Slots) else key < len(table)) else None


def _entries(table: Any, names: Iterable[str] | None = None) -> list[tuple[Any, Any]]:
    if type(table) is CellType:
        return [("", value) for value in gc.get_referents(table)]
    names = table.names() if isinstance(table, Slots) else names
    if names is not None:
        return [(name, table[name]) for name in names if name in table]
    return list(dict.items(table) if isinstance(table, dict) else enumerate(table))
