"""What calls leave in attributes, variables, dicts and lists, as `self.last_attention = weights` or `self.ran = True`.

No replay would leave it. The tensor of the capture is memory of the graph, which its replays fill. So it is kept, and
a replay puts it where the call would have put its own. So it does with all else, and of numbers it is compared what
was there.
"""

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..._torch.tensors.modules import hook_tables, is_module, module_tables, parts_of
from ..._torch.tensors.tensors import is_tensor, storage_address
from ..._torch.tensors.tree import tensors_in
from .calls import KEPT_ELSEWHERE, differing, is_looked_into
from .code import given_before
from .constants import (
    ABSENT,
    anew,
    are_equal,
    are_same,
    is_closed,
    is_of_numbers,
    is_plain,
    names_in,
    own_table,
    place_of,
)
from .objects import SET_BY_REPLAYS, File, Reach, Slots, any_name, holders, restoring


class LeftTensors:
    """What modules, and the variables of the functions that a step calls, hold before a capture.

    Args:
        modules: those that the step may call.
        functions: those of the user's that ampkit calls in a step.
        places: of further variables that code reads or sets: the dict or cell that they are in, and the key.
        values: what these lead to, with their names.
        may_stop: returns whether a number may stay as it is in a replay, by its name.
        may_grow: whether a list may stay as long as a call leaves it, where each call makes it longer.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        functions: Iterable[Any],
        places: Iterable[tuple[Any, Any]] = (),
        values: Iterable[tuple[str, Any]] = (),
        *,
        may_stop: Callable[[str], bool] | None = None,
        may_grow: bool = False,
    ) -> None:
        self._may_stop, self._may_grow = may_stop or (lambda _: False), may_grow
        hooks = [hook for module in modules for table in hook_tables(module) for hook in table.values()]
        values = [*values, *chain.from_iterable(map(given_before, (*functions, *hooks)))]
        variables: dict[int, tuple[Any, dict[Any, None]]] = {}  # cells, and the dicts of global variables with names
        self._names: dict[int, str] = {}  # of entries that have none themselves, by the identity of what they are in
        for function in Reach([*functions, *modules, *hooks]):
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            values += [(name, value) for name, cell in cells.items() for value in gc.get_referents(cell)]
            values += [(name, function.__globals__.get(name)) for name in function.__code__.co_names]
            variables.update((id(cell), (cell, {"": None})) for cell in cells.values())
            self._names |= {id(cell): name for name, cell in cells.items()}
            names = dict.fromkeys(function.__code__.co_names)
            variables.setdefault(id(function.__globals__), (function.__globals__, {}))[1].update(names)
        for table, key in places:
            variables.setdefault(id(table), (table, {}))[1][key] = None
        seen: set[int] = set()
        named = [(name, each) for name, value in values for each in holders(value, any_name, seen, all_entries=True)]
        for module in modules:
            inside = [(name, value) for name, value in vars(module).items() if name not in KEPT_ELSEWHERE]
            named += [(name, each) for name, value in inside for each in holders(value, any_name, seen)]
        self._names |= {id(each.table): names_in(f"{name}{each.path}")[-1] for name, each in named}
        held = [each for _, each in named]
        held += chain.from_iterable(holders(kind, any_name, seen) for kind in set(map(type, modules)))
        beside = [part for _, value in values if is_module(value) for part in parts_of(value)]
        tables = [*map(vars, modules), *(each.table for each in held if isinstance(each.table, SET_BY_REPLAYS))]
        tables += chain.from_iterable((vars(part), module_tables(part)[1]) for part in beside)
        self._files = [each.table for each in held if isinstance(each.table, File)]
        self._before = [(table, dict(_entries(table))) for table in tables]
        self._variables = [(table, list(names), dict(_entries(table, names))) for table, names in variables.values()]
        self._left_alone = {id(vars(module)) for module in modules if not is_looked_into(module)}
        self._restore = [restore for each in held if (restore := restoring(each)) is not None]

    def fitting(
        self, taken: list[tuple[Any, Any, Any]], copied: Set[int], used: Set[int], left_out: Mapping[str, bool]
    ) -> tuple[Callable[[], bool] | None, bool]:
        """Return what tells whether a replay would find what the call has found; None if there is nothing to look at.

        Return also whether no call behind the one that was captured can find it, since that has changed it.

        - Lists, dicts and objects in which it has left something (`taken`, see there) must be where they were, and
          lists as long as they were.
        - Tensors that it has used (`used` are addresses), and what it has put elsewhere, or copied to there (`copied`
          are ids), must be where it was, in the same memory. So must what lies in several places, for it may have put
          it into each of them again.
        - Of places that are not compared, those with the names in `left_out`, numbers must be the same if it may have
          set them again, or if code reads the name, which `left_out` tells. Then there must be none where it has found
          a tensor or an object.
        """
        changed = {(id(table), key) for table, key, _ in taken}
        lengths = {id(table): len(before) for table, before in self._before}
        lists = [(table, lengths[id(table)]) for table, key, _ in taken if key is _ALL]
        now = Counter(id(tensor) for table, _, tensor in self.tensors() if id(table) not in self._left_alone)
        moved = {id(tensor) for _, _, value in taken for tensor in tensors_in(value)} | copied
        moved |= {each for each, count in now.items() if count > 1}

        def has_to_stay(value: Any) -> bool:
            tensors = tensors_in(value) if type(value) in (tuple, Tensor) else []
            return not used.isdisjoint(map(storage_address, tensors)) or (is_tensor(value) and id(value) in moved)

        found = [(table, key, value) for table, before in self._before for key, value in before.items()]
        places = [each for each in found if has_to_stay(each[2])]
        memory = [(tensor, place_of(tensor)) for _, _, value in places for tensor in tensors_in(value)]
        found += [(table, key, value) for table, _, before in self._variables for key, value in before.items()]
        written = {id(table.owner if isinstance(table, Slots) else table) for table, *_ in taken}
        numbers, no_numbers = [], []
        for table, key, value in found:
            name = key if isinstance(key, str) and key else self._names.get(id(table), "")
            if not (is_plain(value) or written.isdisjoint([id(value), id(own_table(value))])):
                places += [(table, key, value)] * (entry(table, key) is value)  # a replay puts something into it
            elif not is_of_numbers(value):
                no_numbers += [(table, key)] * (left_out.get(name, False) and type(value) not in _CONTAINERS)
            elif name in left_out:
                is_free = not left_out[name] and not changed.isdisjoint([(id(table), key), (id(table), _ALL)])
                numbers += [(table, key, anew(value, frozenset(), {}))] * (not is_free)

        def are_there() -> bool:
            return all(entry(table, key) is value for table, key, value in places)

        def fits() -> bool:
            if any(len(table) != length for table, length in lists):
                return False
            if any(is_of_numbers(entry(table, key)) for table, key in no_numbers):
                return False
            if not all(are_equal(entry(table, key), value) for table, key, value in numbers):
                return False
            if any(place_of(tensor) != place for tensor, place in memory):  # after `tensor.data = ...`
                return False
            return are_there()

        return fits if lists or places or numbers or no_numbers else None, not are_there()

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
        for table in (table for table, _ in self._before if isinstance(table, (dict, list))):
            yield from ((table, key, value) for key, value in _entries(table) if is_tensor(value))

    def memory(self) -> set[int]:
        """Return the addresses of the tensors that they hold now, also in tuples and variables."""
        tables = [*((table, None) for table, _ in self._before), *((table, each) for table, each, _ in self._variables)]
        values = [value for table, names in tables for _, value in _entries(table, names)]
        return set(map(storage_address, tensors_in([value for value in values if type(value) in (tuple, Tensor)])))

    def taken(self) -> list[tuple[Any, Any, Any]]:
        """Return what holds something else now: the dict, cell or slots, the key, and the value.

        It is `ABSENT` if there is none any more, and of a list or deque all that is in it.
        """
        known = frozenset(id(table) for table, _ in self._before)
        left = ((table, key, value) for table, key, value, _ in self._counting())
        return [(table, key, value if is_plain(value) else _Remade(value, known)) for table, key, value in left]

    def _counting(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield what holds something else now, but for what may stay as it is."""
        for table, key, value, was in self._changed():
            may_stay = id(table) in self._left_alone or self._may_stop(str(key))
            if self._may_grow and key is _ALL and len(value) != len(was):
                continue
            if tensors_in(value) or not may_stay:
                yield table, key, value, was

    def new(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield what holds something else now that has tensors in it: table, key, and value, and what was there."""
        yield from (each for each in self._changed() if _has_tensors(each[2]))

    def _changed(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        tables = ((table, None, before) for table, before in self._before)
        for table, names, before in (*tables, *self._variables):
            now = dict(_entries(table, names))
            changed = ((table, key, value, was) for key, was, value in differing(before, now))
            if not isinstance(table, (list, deque)):
                yield from changed
            elif any(True for _ in changed):
                yield table, _ALL, list(now.values()), list(before.values())

    def put_back(self) -> None:
        """Put back what was there."""
        put([(table, key, was) for table, key, _, was in [*self._counting()]])

    def restore(self) -> None:
        """Put back what replays do not set: class attributes, sets, arrays."""
        for restore in self._restore:
            restore()


def moves(was: Any, now: Any) -> bool:
    """Return whether a call has moved a tensor within what it has put in a place, as `last = last[1:] + [new]` does."""
    before, after = tensors_in(was), tensors_in(now)
    stays = {i for i, tensor in enumerate(after) if i < len(before) and tensor is before[i]}
    return any(tensor is old for i, tensor in enumerate(after) if i not in stays for old in before)


def put(left: list[tuple[Any, Any, Any]]) -> None:
    """Put tensors and numbers where a call has left them. A list that it has made is another one each time."""
    made: dict[int, Any] = {}  # by the identity of what it is a copy of
    for table, key, given in left:
        value = anew(given.value, given.known, made) if type(given) is _Remade else given
        if key is _ALL:
            if isinstance(table, list):
                list.__setitem__(table, slice(None), value)
            else:
                table.clear()
                table.extend(value)
        elif isinstance(table, dict):
            dict.pop(table, key, None) if value is ABSENT else dict.__setitem__(table, key, value)
        elif isinstance(table, (list, deque)):
            if key < len(table):
                table[key] = value
        else:
            owner, name = (table.owner, key) if isinstance(table, Slots) else (table, "cell_contents")
            object.__delattr__(owner, name) if value is ABSENT else object.__setattr__(owner, name, value)


class _Remade(NamedTuple):
    """What a call has put in a place. Lists and dicts that it has made, the next call makes again."""

    value: Any
    known: frozenset[int]  # ids of those that were there before


def entry(table: Any, key: Any) -> Any:
    """Return what is in a place of a dict, a list, slots or a cell, None if it is gone."""
    if isinstance(table, dict):
        return dict.get(table, key)
    if type(table) is CellType:
        return next(iter(gc.get_referents(table)), None)
    return table[key] if (key in table if isinstance(table, Slots) else key < len(table)) else None


def _entries(table: Any, names: Iterable[Any] | None = None) -> list[tuple[Any, Any]]:
    if type(table) is CellType:
        return [("", value) for value in gc.get_referents(table)]
    names = table.names() if isinstance(table, Slots) else names
    if isinstance(table, dict) and names is not None:
        return [(name, dict.__getitem__(table, name)) for name in names if dict.__contains__(table, name)]
    if names is not None:
        return [(name, table[name]) for name in names if name in table]
    return list(dict.items(table) if isinstance(table, dict) else enumerate(table))


def _has_tensors(value: Any) -> bool:
    """Return whether there are tensors in a value, also in an object."""
    if is_plain(value) or is_closed(value):
        return bool(tensors_in(value))
    inside = (each.table for each in holders(value, any_name, set(), all_entries=True))
    tables = [table for table in inside if isinstance(table, SET_BY_REPLAYS)]
    return bool(tensors_in(value)) or any(tensors_in([each for _, each in _entries(table)]) for table in tables)


_CONTAINERS = (dict, list, set, deque)
_ALL = object()  # in place of a key: all that is in a list
