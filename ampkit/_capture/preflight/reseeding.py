"""Generators of random numbers that a step sets to a seed or a state, which a replay would not do."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._torch.tensors.operators import call_from_binding
from .host_random import memory_reader


class GeneratorWatch:
    """Notices that a generator was set to another seed or state, in a way that draws never change it.

    A replay does not do that: a capture ignores a seed that the generator has already, and a replay runs no Python
    code. But a step may put back a state that it has read itself, as `torch.random.fork_rng` and activation
    checkpointing do. Torch captures that.

    On the host's generator only a fresh seed is noticed. `setters` has the functions that set it to a state.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator]) -> None:
        on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        self._generators = [torch.default_generator, *on_device, *generators]
        self._last = self._start = [_bytes(generator.get_state()) for generator in self._generators]
        self._read: set[bytes] = set()  # states that the step has read

    def was_set(self) -> bool:
        """Return whether a generator was set, other than by draws, since the last call of this function."""
        before, self._last = self._last, [_bytes(generator.get_state()) for generator in self._generators]
        looked_at = zip(self._generators, before, self._last, self._start, strict=True)
        return any(now != old and _is_set_back(generator, old, now, start) for generator, old, now, start in looked_at)

    def reads(self, state: object) -> None:
        """Remember a state that the step has read."""
        if isinstance(state, Tensor):
            self._read.add(_bytes(state))

    def may_be_put_back(self, states: Any) -> bool:
        """Return whether the step has read these states itself: one state, or one per device."""
        states = [states] if isinstance(states, Tensor) else states
        return isinstance(states, (tuple, list)) and all(
            isinstance(state, Tensor) and _bytes(state) in self._read for state in states
        )


def _is_set_back(generator: torch.Generator, old: bytes, now: bytes, start: bytes) -> bool:
    """Return whether no draw can have changed the state like this."""
    if generator.device.type != "cuda":
        # Compiled code and other threads may have drawn, so any state but that of a fresh seed may come from draws.
        return now == _bytes(torch.Generator().manual_seed(generator.initial_seed()).get_state())
    # `get_offset` would raise in a capture, which a module of `make_graphed_callables` may begin.
    seed, offset = now[:8], int.from_bytes(now[8:], "little")
    before, at_start = (int.from_bytes(state[8:], "little") for state in (old, start))
    # It may go back to an offset that it had within this step, as the step may have read that state.
    return seed != old[:8] or (offset < before and (offset < at_start or not offset))


def _bytes(state: Tensor) -> bytes:
    """Return the bytes of a state, a row of bytes, without anything that a mode or a recorder of ampkit's would see."""
    return memory_reader(call_from_binding(_data_ptr, (), (state,), {}), call_from_binding(_numel, (), (state,), {}))()


_data_ptr, _numel = Tensor.data_ptr, Tensor.numel


def setters() -> Iterator[tuple[str, Any, str]]:
    """Yield the functions that set generators: their name in messages, and owner and attribute to replace them."""
    for name in ("manual_seed", "seed", "set_rng_state"):
        yield from ((f"torch.{name}()", owner, name) for owner in (torch, torch.random))
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"):
        yield from ((f"torch.cuda.{name}()", owner, name) for owner in (torch.cuda, torch.cuda.random))


def getters() -> Iterator[tuple[Any, str]]:
    """Yield the functions that read the state of generators: owner and attribute to replace them."""
    yield from ((owner, "get_rng_state") for owner in (torch, torch.random, torch.cuda, torch.cuda.random))
