"""Copies of what a call writes before it asks the device something: a replay that gets another answer is undone."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..._torch.device.rnn_dropout import put_back
from ..._torch.tensors.modes import without_dispatch_modes, without_torch_function
from ..._torch.tensors.tensors import foreach_copy_, storage_address
from .overlaps import memory_of
from .snapshot import all_generators
from .state import TrainingState


def written_early(
    state: TrainingState,
    written: Set[str],
    early_at: Set[int],
    seen_at: Set[int],
    early: Mapping[int, torch.UntypedStorage],
) -> list[Tensor]:
    """Return the tensors that a call writes by a moment: those of the state, and others that were there before.

    Args:
        state: what the call may change.
        written: the paths of what it changes.
        early_at: where operations have written by then, also those that raise no version, as through `.data`.
        seen_at: where operations have written in all of the call. What was changed elsewhere may have been changed
            early, by a kernel that is no operation.
        early: what is no state, was there before the call, and was written by then, by address.
    """
    found = [*map(whole, early.values())]
    for path, tensor in memory_of(state).items():
        address = storage_address(tensor)
        if address in early_at or (path in written and address not in seen_at):
            found.append(tensor)
    return found


def whole(storage: torch.UntypedStorage) -> Tensor:
    """Return all bytes of some memory. Aliasing: the memory itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Backup:
    """Copies of some tensors and of the states of generators, made in front of each replay of a graph.

    Args:
        tensors: what the graph writes before a question.
        state: that they are of. An emulated graph may have put other tensors into places that a graph does not touch.
        generators: those beside torch's default ones.
    """

    def __init__(self, tensors: Sequence[Tensor], state: TrainingState, generators: Sequence[torch.Generator]) -> None:
        self._carried = state.carried
        # By dtype: torch copies tensors of several dtypes one by one.
        self._kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self.add(tensors)
        self._generators = all_generators(generators)
        self._random: list[Tensor] = []

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Copy these, too."""
        for tensor in tensors:
            here, copies = self._kinds.setdefault((tensor.dtype, tensor.device), ([], []))
            here.append(tensor.detach())
            copies.append(torch.empty_like(here[-1]))

    def save(self) -> None:
        """Copy. Sync: none."""
        self._random = [generator.get_state() for generator in self._generators]
        self._put_back = self._carried.putting_back()
        self._copy([(copies, here) for here, copies in self._kinds.values()])

    def restore(self) -> None:
        """Put all back, in place. Sync: none."""
        self._put_back()
        self._copy([*self._kinds.values()])
        for generator, state in zip(self._generators, self._random, strict=True):
            put_back(generator, state)

    @staticmethod
    def _copy(kinds: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
        with torch.no_grad(), without_dispatch_modes(), without_torch_function():
            for to, source in kinds:
                foreach_copy_(to, source)
