"""Copies of what a call writes before it asks the device something: a replay that gets another answer is undone."""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..._torch.device.rnn_dropout import put_back
from ..._torch.tensors.modes import without_dispatch_modes, without_torch_function
from ..._torch.tensors.tensors import foreach_copy_, storage_address
from ..._undo import Undo
from .overlaps import memory_of, version_of
from .snapshot import all_generators
from .state import TrainingState


class EarlyWrites:
    """Finds which tensors of the state an eager call has written by a moment. To be made in front of the call.

    Args:
        state: what the call may change.
        undo: at its end, no step of an optimizer is noticed any more.
    """

    def __init__(self, state: TrainingState, undo: Undo) -> None:
        self._state = state
        self._before = {path: version_of(tensor) for path, tensor in memory_of(state).items()}
        self._stepped: set[Optimizer] = set()
        self._early: set[str] = set()
        self._counted: set[str] = set()
        undo.note(register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.add(optimizer)).remove)

    def note(self) -> None:
        """Take note that the moment is now, or later."""
        # Of an optimizer all: it may change it through `.data`, which raises no version.
        params = {param for optimizer in self._stepped for group in optimizer.param_groups for param in group["params"]}
        kept = [optimizer.state.get(param, {}).values() for optimizer in self._stepped for param in params]
        stepped = {id(value) for values in kept for value in values} | set(map(id, params))
        self._early |= {path for path, tensor in memory_of(self._state).items() if id(tensor) in stepped}
        self._early |= self._changed()

    def end(self) -> None:
        """Take note that the call is over. Replays that are undone, and the user's code, write the same tensors."""
        self._counted = self._changed()

    def tensors(self, written: set[str], early_at: Set[int]) -> list[Tensor]:
        """Return the tensors that were written by then.

        Args:
            written: the paths of what such calls change. Of these torch does not count all writes, as those of
                `batch_norm` to its running statistics: what was written without a count may have been written early.
            early_at: where operations have written by then. Those that write through `.data` raise no version.
        """
        early = self._early | (written - self._counted)
        tensors = memory_of(self._state).items()
        return [tensor for path, tensor in tensors if path in early or storage_address(tensor) in early_at]

    def _changed(self) -> set[str]:
        now = memory_of(self._state).items()
        return {
            path for path, tensor in now if self._before.get(path) is None or version_of(tensor) != self._before[path]
        }


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
        kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for tensor in tensors:
            here, copies = kinds.setdefault((tensor.dtype, tensor.device), ([], []))
            here.append(tensor.detach())
            copies.append(torch.empty_like(here[-1]))
        self._kinds = [*kinds.values()]
        self._generators = all_generators(generators)
        self._random: list[Tensor] = []

    def save(self) -> None:
        """Copy. Sync: none."""
        self._random = [generator.get_state() for generator in self._generators]
        self._put_back = self._carried.putting_back()
        self._copy([(copies, here) for here, copies in self._kinds])

    def restore(self) -> None:
        """Put all back, in place. Sync: none."""
        self._put_back()
        self._copy(self._kinds)
        for generator, state in zip(self._generators, self._random, strict=True):
            put_back(generator, state)

    @staticmethod
    def _copy(kinds: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
        with torch.no_grad(), without_dispatch_modes(), without_torch_function():
            for to, source in kinds:
                foreach_copy_(to, source)
