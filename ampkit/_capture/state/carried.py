"""Tensors in modules, objects, dicts and lists that calls put others in place of: they are changed in place."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.tensors.tensors import is_tensor, shares_storage_with_none, storage_address
from ..._undo import Undo
from ..host.host_tensors import is_on_host
from ..host.left_tensors import LeftTensors, entry, put
from .bound import Cell, cells


class _Carry(NamedTuple):
    """A place of a tensor, and the tensor in it."""

    cell: Cell
    tensor: Tensor
    of_module: bool
    with_gradient: bool = False  # whether calls leave it with one, through which no backward goes

    @property
    def place(self) -> tuple[Any, Any, Tensor]:
        """The dict or list, the key, and the tensor."""
        return self.cell.table, self.cell.key, self.tensor


@dataclass(eq=False)
class _Known:
    """What is known of a place."""

    judged: set[Hashable] = field(default_factory=set)  # the layouts of what was there when `learn` has judged it
    is_read: bool = False  # whether calls read the tensor in it
    is_renewed: bool = False  # and then put another one there
    is_output: bool = False  # whether calls leave tensors of several layouts there, and do not read it
    is_replaced: bool = False  # since `forget_replaced`, by a tensor of the layout of ampkit's own
    references: int = 0  # to ampkit's own, when it was last known to lie nowhere else
    is_elsewhere: bool = False  # whether ampkit's own lies in another place, too, which has to keep its values


@dataclass(eq=False)
class Carried:
    """Has calls change tensors in place that they would replace, as in `self.center = 0.9 * self.center + x.mean()`.

    A graph reads the memory of one tensor. So the place gets a tensor of ampkit's own. At the end of a call, eager or
    in the graph, what the call has put there is copied into that one, which is put back. It has no gradient. So a place
    is left alone if a backward goes through its tensor into an earlier call, as `retain_graph=True` lets it.
    """

    _modules: Mapping[str, nn.Module]
    _own: dict[Hashable, _Carry] = field(default_factory=dict)
    _known: defaultdict[Hashable, _Known] = field(default_factory=lambda: defaultdict(_Known))  # by place
    _with_gradient: set[Hashable] = field(default_factory=set)  # places through whose tensors a backward goes
    copied: set[int] = field(default_factory=set)  # ids of what was copied since `forget_replaced`

    def places(self, held: LeftTensors) -> dict[Hashable, _Carry]:
        """Return all places of tensors as they are now: those of modules, and those that variables lead to (`held`)."""
        found = {_key(cell): _Carry(cell, _entry(cell), True) for cell in cells(self._modules, (), {}, computed=True)}
        for table, key, value in held.tensors():
            cell = Cell(f"what calls replace under {key!r}", table, key)
            found.setdefault(_key(cell), _Carry(cell, value, False))
        return found

    def is_output(self, cell: Cell) -> bool:
        """Return whether calls only leave tensors in a place, as far as operations show."""
        key = _key(cell)
        return key in self._known and self._known[key].is_output

    def is_renewed(self, table: Any, key: Any) -> bool:
        """Return whether calls read the tensor in a place, and leave another one for the next call; in a list, any."""
        places = [(id(table), each) for each in (range(len(table)) if isinstance(table, (list, deque)) else [key])]
        return any(place in self._known and self._known[place].is_renewed for place in places)

    def forget(self) -> None:
        """Leave all tensors where they are. No graph may be there that reads one."""
        self._own.clear()
        self._known.clear()

    def forget_replaced(self) -> None:
        """Forget in which places calls have put other tensors, before a call that is to show it."""
        self.copied.clear()
        for known in self._known.values():
            known.is_replaced = False

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of ampkit's own that no module has, by what messages call them."""
        others = (kept for kept in self._own.values() if not kept.of_module)
        return {f"{kept.cell.path} ({i})": kept.tensor for i, kept in enumerate(others)}

    def learn(
        self,
        before: Mapping[Hashable, _Carry],
        held: LeftTensors,
        is_read: Callable[[Tensor], bool],
        device: torch.device,
    ) -> list[tuple[Tensor, Tensor]]:
        """Give places in which a call has replaced a tensor one of ampkit's own. Return what was there, with these.

        Args:
            before: what `places(held)` has returned before the call.
            held: what variables lead to.
            is_read: returns whether the call has read a tensor.
            device: where the call computes. A graph copies nothing on the host.
        """
        now, rebound = self.places(held), dict[Hashable, _Carry]()
        replaced, olds = _replaced(before, now), {storage_address(kept.tensor) for kept in before.values()}
        for key in [key for key, kept in before.items() if is_read(kept.tensor)]:
            self._known[key].is_read, self._known[key].is_output = True, False
        for key in replaced:
            old, kept = before[key].tensor, now[key]
            if self._known[key].is_read and storage_address(old) != storage_address(kept.tensor):
                self._known[key].is_renewed = True
            self._note_output(key, old, kept.cell)
            # Whether a backward goes through a tensor is shown by the call behind that which has made it.
            is_cut = key not in self._with_gradient and (old.grad_fn is not None or not kept.tensor.requires_grad)
            # What no call reads, as a weight that each forward computes, needs no copy. But graphs hold what lies in
            # modules and has no gradient, and a tensor that was moved has to keep its values.
            held_by_graphs = kept.of_module and not kept.tensor.requires_grad
            counts = held_by_graphs or is_read(old) or storage_address(kept.tensor) in olds
            if is_cut and counts and _fits(old, kept.tensor) and not is_on_host(old, device):
                rebound[key] = kept
        # Of what was read and cannot be carried, the next call may have one that can, as of another dtype at first.
        unread = {key for key in replaced if not is_read(before[key].tensor)}
        while rebound:
            # A tensor that something else has got in the call, as a tuple of the last ones, has to keep its values.
            got = {key: kept for key, kept in now.items() if key not in before or before[key].tensor is not kept.tensor}
            others = {storage_address(kept.tensor) for key, kept in got.items() if key not in rebound}
            holders = Counter(storage_address(kept.tensor) for kept in now.values())
            shared = {key for key in rebound if storage_address(before[key].tensor) in others}
            shared |= {key for key, kept in rebound.items() if holders[storage_address(kept.tensor)] > 1}
            if not shared:
                break
            rebound = {key: kept for key, kept in rebound.items() if key not in shared}
            unread -= shared
        for key in rebound.keys() | unread:
            self._known[key].judged.add(_layout(before[key].tensor))
        for key, kept in rebound.items():
            own = kept.tensor.detach().clone()
            self._own[key] = kept._replace(tensor=own, with_gradient=kept.tensor.requires_grad)
            put([self._own[key].place])
            del own  # it counts
            self._known[key].references = _references(self._own[key])
        return [(before[key].tensor, self._own[key].tensor) for key in rebound]

    @contextmanager
    def noting_gradients(self, before: Mapping[Hashable, _Carry]) -> Iterator[None]:
        """Context of a call that `learn` is to judge. It notes through which of these tensors a backward goes."""
        self._with_gradient = noted = set[Hashable]()
        with Undo() as undo:
            for key, kept in before.items():
                if kept.tensor.grad_fn is not None:
                    undo.note(kept.tensor.grad_fn.register_prehook(lambda _, key=key: noted.add(key)).remove)
            yield

    def has_more(self, before: Mapping[Hashable, _Carry], held: LeftTensors) -> bool:
        """Return whether a call has replaced a tensor in a place of which `learn` has judged none.

        So it is where an earlier call has found None there, or has made a tensor of the layout that calls find now.
        """
        now = self.places(held)
        for key in _replaced(before, now):
            layout, judged = _layout(before[key].tensor), self._known[key].judged
            if not judged or (layout not in judged and layout == _layout(now[key].tensor)):
                return True
        return False

    @contextmanager
    def carrying(self, look: Callable[[], LeftTensors]) -> Iterator[None]:
        """Context of a call. An error leaves what the call has left. Sync: none.

        `look` returns what variables lead to now. It is slow, and is called where a tensor may be in two places.
        """
        others: dict[Hashable, object] = {}  # what the places hold in which ampkit's own is not
        for key, kept in self._own.items():
            self._known[key].references = min(self._known[key].references, _references(kept))
            others[key] = None if _entry(kept.cell) is kept.tensor else _entry(kept.cell)
        yield
        pairs: list[tuple[_Carry, Tensor]] = []
        are_alone = True
        for key, kept in [(key, self._own[key]) for key in others if key in self._own]:
            known = self._known[key]
            are_alone = are_alone and not known.is_elsewhere and _references(kept) <= known.references
            new = _entry(kept.cell)
            self._note_output(key, kept.tensor, kept.cell)
            if new is not others[key] and _fits(kept.tensor, new) and kept.with_gradient >= new.requires_grad:
                are_alone = are_alone and getrefcount(new) <= _REFERENCES and shares_storage_with_none(new)
                pairs.append((kept, new))
                known.is_replaced = True
        with torch.no_grad():
            pairs = pairs if are_alone else self._alone(pairs, look())
            own = {storage_address(kept.tensor) for kept, _ in pairs}
            # Two may have changed places.
            pairs = [(kept, new.clone() if storage_address(new) in own else new) for kept, new in pairs]
            for kept, new in pairs:
                kept.tensor.copy_(new)
                self.copied.add(id(new))
            put([kept.place for kept, _ in pairs])

    def _alone(self, pairs: list[tuple[_Carry, Tensor]], held: LeftTensors) -> list[tuple[_Carry, Tensor]]:
        """Return those whose new tensor is in no other place. One of ampkit's own in another place becomes a copy."""
        places = self.places(held)
        holders = Counter(storage_address(each.tensor) for each in places.values())
        pairs = [(kept, new) for kept, new in pairs if holders[storage_address(new)] < 2]
        written = {_key(kept.cell): storage_address(kept.tensor) for kept, _ in pairs}
        others = [each for key, each in places.items() if key not in written and not self._is_own(key, each.tensor)]
        got = [each for each in others if storage_address(each.tensor) in written.values()]
        put([each._replace(tensor=each.tensor.detach().clone()).place for each in got])
        kept_elsewhere = {storage_address(each.tensor) for each in others} - {*written.values()}
        for key, kept in self._own.items():
            known = self._known[key]
            known.is_elsewhere = storage_address(kept.tensor) in kept_elsewhere
            known.references = _references(kept)
        return pairs

    def _is_own(self, key: Hashable, tensor: Tensor) -> bool:
        return key in self._own and self._own[key].tensor is tensor

    def apart(self, output: Tensor) -> Tensor:
        """Return an output in memory that the end of the call does not overwrite. Aliasing: most often it is itself."""
        own = [storage_address(kept.tensor) for kept in self._own.values()]
        return output.clone() if own and storage_address(output) in own else output

    def _note_output(self, key: Hashable, old: Tensor, cell: Cell) -> None:
        """Take note of a place if a call has put a tensor of another layout there, and no operation reads it."""
        new, is_attribute = _entry(cell), "_buffers" in cell.table  # of a module
        if is_attribute and not self._known[key].is_read and is_tensor(new) and _layout(old) != _layout(new):
            self._known[key].is_output = True
            self._own.pop(key, None)

    def putting_back(self) -> Callable[[], None]:
        """Return what puts back the tensors that are in the places now, where a call has ended on its way."""
        now = [kept._replace(tensor=_entry(kept.cell)).place for kept in self._own.values()]
        return lambda: put([place for place in now if place[2] is not None])

    def fitting(self, is_loaded: Callable[[str], bool]) -> Callable[[], bool] | None:
        """Return what has the places hold what a replay needs, for a graph that was just captured.

        It returns False where the loop has put another tensor into a place that calls look at. In one that they only
        write to, a call of another layout may have left its own. None if there is nothing to do. `is_loaded` returns
        whether code of the step reads attributes of a name.
        """
        held = [
            (kept, known, not kept.of_module or known.is_read or is_loaded(kept.cell.key), known.is_replaced)
            for known, kept in ((self._known[key], kept) for key, kept in self._own.items())
            if _entry(kept.cell) is kept.tensor
        ]

        def fits() -> bool:
            for kept, known, is_looked_at, is_written in held:
                if is_written and known.is_elsewhere:
                    return False
                if _entry(kept.cell) is not kept.tensor:
                    if is_looked_at:
                        return False
                    put([kept.place] * is_written)
            return True

        return fits if held else None


REPLACES = (
    "each call replaces a tensor that calls read, in an attribute, a dict or a list, in a way that a graph cannot "
    "follow. Keep it in a buffer, and change that in place (copy_)."
)


_REFERENCES = 3  # to what is in one place alone: that of the place, a variable, and the argument of `getrefcount`


def _references(kept: _Carry) -> int:
    """Return how many references there are to a tensor of ampkit's own; with that of its place, even if it is gone."""
    return getrefcount(kept.tensor) + (_entry(kept.cell) is not kept.tensor)


def _key(cell: Cell) -> Hashable:
    return id(cell.table), cell.key


def _entry(cell: Cell) -> Any:
    """Return what is in a place, None if it is gone."""
    return entry(cell.table, cell.key)


def _replaced(before: Mapping[Hashable, _Carry], now: Mapping[Hashable, _Carry]) -> list[Hashable]:
    """Return the places that hold another tensor than before."""
    return [key for key, kept in now.items() if key in before and before[key].tensor is not kept.tensor]


def _fits(old: Tensor, new: object) -> bool:
    """Return whether a tensor was replaced by another one of its layout, in memory of its own."""
    if new is old or type(new) is not Tensor or type(old) is not Tensor:
        return False
    if any(tensor.layout is not torch.strided or tensor.is_inference() for tensor in (new, old)):
        return False
    return _layout(new) == _layout(old) and storage_address(new) != storage_address(old)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else (), tensor.dtype, tensor.device
