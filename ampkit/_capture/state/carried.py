"""Tensors of modules that calls put others in place of: they are changed in place instead."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.tensors.tensors import storage_address
from .bound import Cell, cells


class _Place(NamedTuple):
    """A place of a tensor, and what was there."""

    cell: Cell
    old: Tensor


class Carried:
    """Has calls change tensors in place that they would replace, as in `self.center = 0.9 * self.center + x.mean()`.

    A graph reads the memory of the old tensor. So the new one is copied into that at the end of the call, eager or in
    the graph, and the old one is put back. Whoever keeps the old tensor sees its values change. No gradient flows from
    one call to the next: eager steps cannot have one either, as each frees its autograd graph.

    Args:
        modules: whose tensors these are, by the name in messages.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._known: dict[str, Cell] = {}

    def places(self) -> dict[str, _Place]:
        """Return all places of tensors as they are now, by path."""
        found = cells(self._modules, (), {}, computed=True)
        return {cell.path: _Place(cell, cell.table[cell.key]) for cell in found}

    def learn(self, before: Mapping[str, _Place], is_read: Callable[[Tensor], bool]) -> list[Tensor]:
        """Take note of what a call has replaced, and put it back now. Return the tensors that are back.

        Args:
            before: what `places` has returned before the call.
            is_read: returns whether the call has read a tensor. One with a gradient that no call reads, as a weight
                that each forward computes, needs no copy.
        """
        rebound = {}
        for path, (cell, new) in self.places().items():
            place = before.get(path)
            if place is not None and _fits(place.old, new) and (not new.requires_grad or is_read(place.old)):
                rebound[path] = _Place(cell, place.old)
        while rebound:
            # A tensor that something else has now, as a buffer for the last but one, keeps its values.
            others = {storage_address(new) for path, (_, new) in self.places().items() if path not in rebound}
            kept = [path for path, place in rebound.items() if storage_address(place.old) in others]
            if not kept:
                break
            rebound = {path: place for path, place in rebound.items() if path not in kept}
        _put_back([*rebound.values()])
        self._known.update((path, place.cell) for path, place in rebound.items())
        return [place.old for place in rebound.values()]

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Context of a call. An error leaves what the call has left."""
        before = [_Place(cell, cell.table[cell.key]) for cell in self._known.values() if cell.key in cell.table]
        yield
        _put_back([place for place in before if _fits(place.old, place.cell.table.get(place.cell.key))])


def _fits(old: object, new: object) -> bool:
    """Return whether a tensor was replaced by another one of its layout, in memory of its own."""
    if new is old or type(new) is not Tensor or type(old) is not Tensor:
        return False
    if any(tensor.layout is not torch.strided or tensor.is_inference() for tensor in (new, old)):
        return False
    same = (new.shape, new.stride(), new.dtype, new.device) == (old.shape, old.stride(), old.dtype, old.device)
    return same and storage_address(new) != storage_address(old)


def _put_back(places: Sequence[_Place]) -> None:
    """Copy what is in these places into the tensors that were there before, and put these back. Sync: none."""
    with torch.no_grad():
        olds = {storage_address(place.old) for place in places}
        news = [place.cell.table[place.cell.key] for place in places]
        news = [new.clone() if storage_address(new) in olds else new for new in news]  # two may have changed places
        for (cell, old), new in zip(places, news, strict=True):
            kept = old.detach() if old.requires_grad else old
            kept.copy_(new)
            cell.table[cell.key] = kept
