"""Tensors in modules, objects, dicts and lists that calls put others in place of: they are changed in place."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.tensors.modes import without_dispatch_modes, without_torch_function
from ..._torch.tensors.tensors import is_tensor, storage_address
from ..._undo import Undo
from ..host.host_tensors import is_on_host
from ..host.left_tensors import LeftTensors, put
from .bound import Cell, cells


class _Carry(NamedTuple):
    """A place of a tensor, and the tensor in it."""

    cell: Cell
    tensor: Tensor
    of_module: bool

    @property
    def place(self) -> tuple[Any, Any, Tensor]:
        """The dict or list, the key, and the tensor."""
        return self.cell.table, self.cell.key, self.tensor


@dataclass(eq=False)
class Carried:
    """Has calls change tensors in place that they would replace, as in `self.center = 0.9 * self.center + x.mean()`.

    A graph reads the memory of one tensor. So the place gets a tensor of ampkit's own. At the end of a call, eager or
    in the graph, what the call has put there is copied into that one, which is put back. It has no gradient. So a place
    is left alone if a backward goes through its tensor into an earlier call, as `retain_graph=True` lets it.

    Attributes:
        own: those of ampkit's own, by place and layout: calls on batches of another size may carry another one there.
    """

    _modules: Mapping[str, nn.Module]
    own: dict[tuple[Hashable, Hashable], _Carry] = field(default_factory=dict)
    _judged: set[Hashable] = field(default_factory=set)
    _read: set[Hashable] = field(default_factory=set)  # places whose tensors calls read
    _renewed: set[Hashable] = field(default_factory=set)  # those in which they put another one then
    # Attributes of modules that no call reads, and calls leave tensors of several layouts in: see `LeftTensors`.
    _outputs: set[Hashable] = field(default_factory=set)
    _with_gradient: set[Hashable] = field(default_factory=set)  # places through whose tensors a backward goes

    def places(self, held: LeftTensors) -> dict[Hashable, _Carry]:
        """Return all places of tensors as they are now: those of modules, and those that variables lead to (`held`)."""
        found = {_key(cell): _Carry(cell, _entry(cell), True) for cell in cells(self._modules, (), {}, computed=True)}
        for table, key, value in held.tensors():
            cell = Cell(f"what calls replace under {key!r}", table, key)
            found.setdefault(_key(cell), _Carry(cell, value, False))
        return found

    def is_output(self, cell: Cell) -> bool:
        """Return whether calls only leave tensors in a place, so that it is no state."""
        return _key(cell) in self._outputs

    def is_renewed(self, table: Any, key: Any) -> bool:
        """Return whether calls read the tensor in a place, and leave another one for the next call."""
        return (id(table), key) in self._renewed

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of ampkit's own that no module has, by what messages call them."""
        others = (kept for kept in self.own.values() if not kept.of_module)
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
        self._read |= {key for key, kept in before.items() if is_read(kept.tensor)}
        self._outputs -= self._read
        replaced, olds = _replaced(before, now), {storage_address(kept.tensor) for kept in before.values()}
        for key in replaced:
            old, kept = before[key].tensor, now[key]
            if key in self._read and storage_address(old) != storage_address(kept.tensor):
                self._renewed.add(key)
            # Whether a backward goes through a tensor is shown by the call behind that which has made it.
            is_cut = key not in self._with_gradient and (old.grad_fn is not None or not kept.tensor.requires_grad)
            # What no call reads, as a weight that each forward computes, needs no copy. But graphs hold what lies in
            # modules and has no gradient, and a tensor that was moved has to keep its values.
            held_by_graphs = kept.of_module and not kept.tensor.requires_grad
            counts = held_by_graphs or is_read(old) or storage_address(kept.tensor) in olds
            if is_cut and counts and _fits(old, kept.tensor) and not is_on_host(old, device):
                rebound[key] = kept
            self._note_output(key, old, kept)
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
            rebound[key] = own = kept._replace(tensor=kept.tensor.detach().clone())
            self.own[key, _layout(own.tensor)] = own
            put([own.place])
        return [(before[key].tensor, own.tensor) for key, own in rebound.items()]

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
        yield
        pairs = [(kept, new) for kept in self.own.values() if _fits(kept.tensor, new := _entry(kept.cell))]
        with torch.no_grad():
            own = {storage_address(kept.tensor) for kept, _ in pairs}
            # Two may have changed places.
            pairs = [(kept, new.clone() if storage_address(new) in own else new) for kept, new in pairs]
            for kept, new in pairs:
                kept.tensor.copy_(new)
            put([kept.place for kept, _ in pairs])
        for (key, _), kept in [*self.own.items()]:
            self._note_output(key, kept.tensor, kept._replace(tensor=_entry(kept.cell)))

    def _note_output(self, key: Hashable, old: Tensor, new: _Carry) -> None:
        """Take note of a place if a call has put a tensor of another layout there, and none reads it."""
        is_attribute = "_buffers" in new.cell.table  # of a module
        if is_attribute and key not in self._read and is_tensor(new.tensor) and _layout(old) != _layout(new.tensor):
            self._outputs.add(key)
            self.own = {each: kept for each, kept in self.own.items() if each[0] != key}

    def settle(self) -> None:
        """Take over the values of tensors that were put into the places since, as a state that is reset. Sync: none.

        To be called in front of each call. A tensor of another layout, or with a gradient, stays where it is.
        """
        for kept in self.own.values():
            found = _entry(kept.cell)
            if _fits(kept.tensor, found) and not found.requires_grad:
                with torch.no_grad(), without_dispatch_modes(), without_torch_function():
                    kept.tensor.copy_(found)
                put([kept.place])

    def putting_back(self) -> Callable[[], None]:
        """Return what puts back the tensors that are in the places now, where a call has ended on its way."""
        now = [kept._replace(tensor=_entry(kept.cell)).place for kept in self.own.values()]
        return lambda: put([place for place in now if place[2] is not None])

    def present(self) -> Callable[[], bool] | None:
        """Return what puts back those of ampkit's own that are in their places now, for a graph that writes to them.

        It returns False, and does nothing, where calls read what is in such a place now, which is something else. None
        if there are none.
        """
        present = [kept for kept in self.own.values() if _entry(kept.cell) is kept.tensor]

        def put_back() -> bool:
            others = [kept for kept in present if _entry(kept.cell) is not kept.tensor]
            if any(_key(kept.cell) in self._read for kept in others):
                return False
            put([kept.place for kept in others])
            return True

        return put_back if present else None


REPLACES = (
    "each call replaces a tensor that calls read, in an attribute, a dict or a list, in a way that a graph cannot "
    "follow. Keep it in a buffer, and change that in place (copy_)."
)


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
    return _layout(new) == _layout(old) and storage_address(new) != storage_address(old)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else (), tensor.dtype, tensor.device
