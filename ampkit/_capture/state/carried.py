"""Tensors in modules, objects, dicts and lists that calls put others in place of: they are changed in place."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.tensors.tensors import storage_address
from ..._undo import Undo
from ..host.host_tensors import is_on_host
from ..host.left_tensors import LeftTensors, put
from .bound import Cell, cells


class _Carry(NamedTuple):
    """A place of a tensor, and the tensor in it."""

    cell: Cell
    tensor: Tensor
    of_module: bool


@dataclass(eq=False)
class Carried:
    """Has calls change tensors in place that they would replace, as in `self.center = 0.9 * self.center + x.mean()`.

    A graph reads the memory of one tensor. So the place gets a tensor of ampkit's own. At the end of a call, eager or
    in the graph, what the call has put there is copied into that one, which is put back. It has no gradient. So a place
    is left alone if a backward goes through its tensor into an earlier call, as `retain_graph=True` lets it.
    """

    _modules: Mapping[str, nn.Module]
    _own: dict[Hashable, _Carry] = field(default_factory=dict)
    _judged: set[Hashable] = field(default_factory=set)
    _with_gradient: set[Hashable] = field(default_factory=set)  # places through whose tensors a backward goes

    def places(self, held: LeftTensors) -> dict[Hashable, _Carry]:
        """Return all places of tensors as they are now: those of modules, and those that variables lead to (`held`)."""
        found = {_key(cell): _Carry(cell, _entry(cell), True) for cell in cells(self._modules, (), {}, computed=True)}
        for table, key, value in held.tensors():
            cell = Cell(f"what calls replace under {key!r}", table, key)
            found.setdefault(_key(cell), _Carry(cell, value, False))
        return found

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
        for key in replaced:
            old, kept = before[key].tensor, now[key]
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
            shared = {key for key in rebound if storage_address(before[key].tensor) in others}
            if not shared:
                break
            rebound = {key: kept for key, kept in rebound.items() if key not in shared}
            unread -= shared
        self._judged |= rebound.keys() | unread
        for key, kept in rebound.items():
            self._own[key] = kept._replace(tensor=kept.tensor.detach().clone())
            put([(kept.cell.table, kept.cell.key, self._own[key].tensor)])
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

        So it is where an earlier call has found None there, as behind a reset of a hidden state.
        """
        return not self._judged.issuperset(_replaced(before, self.places(held)))

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Context of a call. An error leaves what the call has left. Sync: none."""
        present = self._present()
        yield
        pairs = [(kept, new) for kept in present if _fits(kept.tensor, new := _entry(kept.cell))]
        with torch.no_grad():
            own = {storage_address(kept.tensor) for kept, _ in pairs}
            # Two may have changed places.
            pairs = [(kept, new.clone() if storage_address(new) in own else new) for kept, new in pairs]
            for kept, new in pairs:
                kept.tensor.copy_(new)
            put([(kept.cell.table, kept.cell.key, kept.tensor) for kept, _ in pairs])

    def putting_back(self) -> Callable[[], None]:
        """Return what puts the tensors of ampkit's own back into their places, where a call has ended on its way."""
        present = self._present()
        return lambda: put([(kept.cell.table, kept.cell.key, kept.tensor) for kept in present])

    def _present(self) -> list[_Carry]:
        """Return the places that have a tensor of ampkit's own. In others, it was replaced since."""
        return [kept for kept in self._own.values() if _entry(kept.cell) is kept.tensor]


def _key(cell: Cell) -> Hashable:
    return id(cell.table), cell.key


def _entry(cell: Cell) -> Any:
    """Return what is in a place, None if it is gone."""
    if isinstance(cell.table, dict):
        return dict.get(cell.table, cell.key)
    return cell.table[cell.key] if cell.key < len(cell.table) else None


def _replaced(before: Mapping[Hashable, _Carry], now: Mapping[Hashable, _Carry]) -> list[Hashable]:
    """Return the places that hold another tensor than before."""
    return [key for key, kept in now.items() if key in before and before[key].tensor is not kept.tensor]


def _fits(old: Tensor, new: object) -> bool:
    """Return whether a tensor was replaced by another one of its layout, in memory of its own."""
    if new is old or type(new) is not Tensor or type(old) is not Tensor:
        return False
    if any(tensor.layout is not torch.strided or tensor.is_inference() for tensor in (new, old)):
        return False
    same = (new.shape, new.stride(), new.dtype, new.device) == (old.shape, old.stride(), old.dtype, old.device)
    return same and storage_address(new) != storage_address(old)
