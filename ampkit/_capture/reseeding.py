"""Which generators of random numbers a step sets to a seed or a state: a graph draws on instead."""

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch.modes import without_torch_function


class GeneratorWatch:
    """Notices that a generator was set to another seed or state, as draws never set it.

    A graph leaves such a call out: a capture ignores a seed that the generator has already, and a replay runs no Python
    code. A state that the step has read itself may be put back, as `torch.random.fork_rng` and activation checkpointing
    do: torch captures that.

    Of the host's generator it notices a fresh seed alone. `setters` has the functions that set one to a state.

    Args:
        device: where the step computes.
        generators: CUDA generators beside the default one that a graph would know.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator]) -> None:
        on_device = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
        self._generators = [torch.default_generator, *on_device, *generators]
        self._last = self._start = [_state_of(generator) for generator in self._generators]
        self._read: set[bytes] = set()  # states that the step has read

    def was_set(self) -> bool:
        """Return whether one was set, other than by draws, since the last look."""
        before, self._last = self._last, [_state_of(generator) for generator in self._generators]
        looked_at = zip(self._generators, before, self._last, self._start, strict=True)
        return any(now != old and _is_set_back(generator, old, now, start) for generator, old, now, start in looked_at)

    def reads(self, state: object) -> None:
        """Remember a state that the step has read."""
        if isinstance(state, Tensor):
            self._read.add(_bytes(state))

    def may_be_put_back(self, states: Any) -> bool:
        """Return whether the step has read these states itself: one, or one per device."""
        states = [states] if isinstance(states, Tensor) else states
        return isinstance(states, (tuple, list)) and all(
            isinstance(state, Tensor) and _bytes(state) in self._read for state in states
        )


def _is_set_back(generator: torch.Generator, old: bytes, now: bytes, start: bytes) -> bool:
    """Return whether a change of state was no draw."""
    if generator.device.type != "cuda":
        # Compiled code and other threads may have drawn, so that any other state could come from draws.
        return now == _state_of(torch.Generator().manual_seed(generator.initial_seed()))
    seed, offset = now[:8], int.from_bytes(now[8:], "little")
    before, at_start = (int.from_bytes(state[8:], "little") for state in (old, start))
    # It may go back to a place within this step, where the step may have read its state.
    return seed != old[:8] or (offset < before and (offset < at_start or not offset))


def _state_of(generator: torch.Generator) -> bytes:
    return _bytes(generator.get_state())


def _bytes(state: Tensor) -> bytes:
    """Return what is in a state. No operation, so that no mode sees it."""
    with without_torch_function():
        return ctypes.string_at(state.data_ptr(), state.numel() * state.element_size())


def setters() -> Iterator[tuple[str, Any, str]]:
    """Yield the functions that set generators: what they are called, the owner and the name callers look them up by."""
    for name in ("manual_seed", "seed", "set_rng_state"):
        yield from ((f"torch.{name}()", owner, name) for owner in (torch, torch.random))
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"):
        yield from ((f"torch.cuda.{name}()", owner, name) for owner in (torch.cuda, torch.cuda.random))


def getters() -> Iterator[tuple[Any, str]]:
    """Yield the functions that read the state of generators: the owner and the name callers look them up by."""
    yield from ((owner, "get_rng_state") for owner in (torch, torch.random, torch.cuda, torch.cuda.random))
