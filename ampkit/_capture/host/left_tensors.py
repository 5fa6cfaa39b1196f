"""Tensors that each call leaves in attributes, dicts and lists, as `self.last_attention = weights` does.

No replay would leave one. The tensor of the capture is memory of the graph, which its replays fill. So it is kept, and
a replay puts it where the call would have put its own.
"""

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..._torch.tensors.modules import hook_tables, is_module, module_tables, parts_of
from ..._torch.tensors.tensors import is_tensor
from ..._torch.tensors.tree import tensors_in
from .calls import KEPT_ELSEWHERE
from .code import given_before
from .constants import ABSENT, are_same
from .objects import File, Reach, any_name, holders


class LeftTensors:
    """What modules, and the variables of the functions that a step calls, hold before a capture.

    Args:
        modules: those that the step may call.
        functions: those of the user's that ampkit calls in a step.
        compared: the ids of tensors that calls compare. What reads one of them is right for that tensor alone.
    """

    def __init__(self, modules: Sequence[nn.Module], functions: Iterable[Any], compared: Collection[int]) -> None:
        self._compared = compared
        hooks = [hook for module in modules for table in hook_tables(module) for hook in table.values()]
        values = [value for function in (*functions, *hooks) for _, value in given_before(function)]
        for function in Reach([*functions, *modules, *hooks]):
            values += chain.from_iterable(map(gc.get_referents, function.__closure__ or ()))
            values += [function.__globals__.get(name) for name in function.__code__.co_names]
        seen: set[int] = set()
        held = [each.table for value in values for each in holders(value, any_name, seen, all_entries=True)]
        for module in modules:
            inside = (value for name, value in vars(module).items() if name not in KEPT_ELSEWHERE)
            held += chain.from_iterable((each.table for each in holders(value, any_name, seen)) for value in inside)
        beside = [part for value in values if is_module(value) for part in parts_of(value)]
        held += chain.from_iterable((vars(part), module_tables(part)[1]) for part in beside)
        tables = [*map(vars, modules), *(table for table in held if isinstance(table, (dict, list)))]
        self._files = [table for table in held if isinstance(table, File)]
        self._before = [(table, dict(_entries(table))) for table in tables]

    def contents(self) -> list[Any]:
        """Return all that they hold now, and how far their files have been written, or read."""
        return [*gc.get_referents(*[table for table, _ in self._before]), *map(File.read, self._files)]

    def hold_others(self, before: list[Any]) -> bool:
        """Return whether they hold something else than `contents` returned before: another number, or object."""
        now = self.contents()
        return len(now) != len(before) or not all(map(are_same, before, now))

    def tensors(self) -> Iterator[tuple[Any, Any, Tensor]]:
        """Yield the tensors that they hold now: the dict or list, the key, and the tensor."""
        for table, _ in self._before:
            yield from ((table, key, value) for key, value in _entries(table) if is_tensor(value))

    def taken(self) -> list[tuple[Any, Any, Any]]:
        """Return what holds something else now that has tensors in it: the dict or list, the key, and the value."""
        return [(table, key, value) for table, key, value, was in self.new() if id(was) not in self._compared]

    def new(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield what holds something else now that has tensors in it: table, key, and value, and what was there."""
        for table, before in self._before:
            for key, value in _entries(table):
                was = before.get(key, ABSENT)
                if value is not was and tensors_in(value):
                    yield table, key, value, was

    def put_back(self) -> None:
        """Put back what was in the places of tensors that came since."""
        for table, key, _, was in [*self.new()]:
            if was is not ABSENT:
                put([(table, key, was)])
            elif isinstance(table, dict):
                dict.pop(table, key)


def moves(was: Any, now: Any) -> bool:
    """Return whether a call has moved a tensor within what it has put in a place, as `last = last[1:] + [new]` does."""
    before, after = tensors_in(was), tensors_in(now)
    stays = {i for i, tensor in enumerate(after) if i < len(before) and tensor is before[i]}
    return any(tensor is old for i, tensor in enumerate(after) if i not in stays for old in before)


def put(left: list[tuple[Any, Any, Any]]) -> None:
    """Put tensors where a call has left them."""
    for table, key, value in left:
        if isinstance(table, dict):
            dict.__setitem__(table, key, value)
        elif key < list.__len__(table):
            list.__setitem__(table, key, value)


def _entries(table: Any) -> list[tuple[Any, Any]]:
    return list(dict.items(table) if isinstance(table, dict) else enumerate(table))
