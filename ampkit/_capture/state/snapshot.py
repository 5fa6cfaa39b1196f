"""A copy of all that a call may change, so that the call can be undone or made again."""

import random
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch.device.rnn_dropout import put_back
from ..._torch.tensors.tensors import local_shard, version
from .state import TrainingState
from .walk import Walk


class Snapshot:
    """A copy of the state, of the random-number generators, and of a batch; and the modes of the modules.

    Args:
        state: what is copied.
        generators: the generators beside torch's default ones.
        leaves: of the batch; tensors among them that were changed in place are restored too.
        on_host: whether the random numbers of Python and of numpy are restored as well.
        constant: the ids of tensors of the state that are not copied, because the call does not change them.
    """

    def __init__(
        self,
        state: TrainingState,
        generators: Sequence[torch.Generator],
        leaves: Sequence[Any] = (),
        *,
        on_host: bool = False,
        constant: Collection[int] = (),
    ) -> None:
        self._state = state
        self._walk = Walk(state.modules)
        self._flags = self._walk.flags()
        self._live = state.tensors()
        changed = {path: tensor for path, tensor in self._live.items() if id(tensor) not in constant}
        self._values = {path: local_shard(tensor).detach().clone() for path, tensor in changed.items()}
        self._gradients = self._walk.gradients() if state.finds_gradients else []
        self._generators = all_generators(generators)
        self._random = [generator.get_state() for generator in self._generators]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._given = [(leaf, leaf.detach().clone(), version(leaf)) for leaf in tensors]
        self._numpy: Any = sys.modules.get("numpy.random")
        self._of_python = random.getstate() if on_host else None
        self._of_numpy = self._numpy.get_state() if on_host and self._numpy is not None else None

    def restore(self) -> None:
        """Put everything back, in place."""
        self._state.rebind(self._live)
        self._walk.put_back(self._flags)
        self._walk.set_gradients(self._gradients)
        with torch.no_grad():
            for path, before in self._values.items():
                local_shard(self._live[path]).copy_(before)
            for leaf, before, number in self._given:
                if version(leaf) != number:
                    leaf.copy_(before)
        for generator, state in zip(self._generators, self._random, strict=True):
            put_back(generator, state)
        if self._of_python is not None:
            random.setstate(self._of_python)
        if self._of_numpy is not None:
            self._numpy.set_state(self._of_numpy)


def all_generators(generators: Sequence[torch.Generator]) -> list[torch.Generator]:
    """Return torch's default generators, that of the CPU first, and these."""
    on_cuda = list(torch.cuda.default_generators) if torch.cuda.is_available() else []
    return [torch.default_generator, *on_cuda, *generators]
