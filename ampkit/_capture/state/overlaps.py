"""Arguments in the memory of the state: refused if the step changes that memory, because a graph reads copies."""

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.tensors.modes import without_dispatch_modes, without_torch_function
from ..._torch.tensors.tensors import storage_address, version
from ..keys.inputs import StaticInputs
from ..keys.spans import Spans, has_memory
from .bits import bits
from .state import TrainingState


@dataclass(eq=False)
class Writes:
    """Which tensors of the state the calls of one layout change, by path."""

    known: bool = False  # whether a call was noted
    _paths: set[str] = field(default_factory=set)
    _copies: "list[_FlagCopy]" = field(default_factory=list)

    @contextmanager
    def noted(self, state: TrainingState) -> Iterator[None]:
        """Context for an eager call. It notes the tensors of the state that the call changes or makes. Sync: none."""
        before = {path: (tensor, _version(tensor)) for path, tensor in memory_of(state).items()}
        # torch does not raise the version of running statistics when batch_norm writes them, so values are compared.
        with without_dispatch_modes(), without_torch_function(), torch.no_grad():  # modes of the user's see nothing
            values: dict[str, Tensor] = {}
            for path, (tensor, _) in before.items():
                # Those of buffers, unless one is as large as a cache.
                small = has_memory(tensor) and tensor.untyped_storage().nbytes() <= _MAX_COMPARED
                if small and not isinstance(tensor, nn.Parameter) and not path.startswith("optimizer["):
                    values[path] = bits(tensor).clone()
        yield
        flags: dict[torch.device, dict[str, Tensor]] = {}
        with without_dispatch_modes(), without_torch_function(), torch.no_grad():
            for path, tensor in memory_of(state).items():
                was, number = before.get(path, (None, None))
                if was is not tensor or number is None or number != _version(tensor):
                    self._paths.add(path)
                elif path in values:
                    differs = (values.pop(path) != bits(tensor)).any()
                    flags.setdefault(tensor.device, {})[path] = differs
            for device, found in flags.items():
                copied, arrived = torch.stack(list(found.values())), None
                if device.type == "cuda":
                    pinned = torch.empty(len(found), dtype=torch.bool, pin_memory=True)
                    copied, arrived = pinned.copy_(copied, non_blocking=True), torch.cuda.Event()
                    arrived.record(torch.cuda.current_stream(device))
                self._copies.append(_FlagCopy(list(found), copied, device, arrived))
        self.known = True

    def note_addresses(self, state: TrainingState, written: Set[int]) -> None:
        """Take note of the memory that operations of a call have written to: through `.data` no version is raised."""
        self._paths |= {path for path, tensor in memory_of(state).items() if storage_address(tensor) in written}

    def paths(self) -> set[str]:
        """Return the paths of the tensors that the calls have changed so far. Waits for the device."""
        for copy in self._copies:
            if copy.arrived is not None and not copy.arrived.query():
                torch.cuda.synchronize(copy.device)
            with without_dispatch_modes(), without_torch_function(), torch.no_grad():
                self._paths |= {path for path, is_set in zip(copy.paths, copy.flags, strict=True) if bool(is_set)}
        self._copies = []
        return self._paths


class _FlagCopy(NamedTuple):
    """A copy of flags to the host, under way. To read them one by one is an error if the user has forbidden waits."""

    paths: list[str]
    flags: Tensor
    device: torch.device  # that they are copied from
    arrived: torch.cuda.Event | None  # None if they are on the host anyway


def keep_apart(inputs: StaticInputs, state: TrainingState, changed: set[str]) -> None:
    """Have arguments refused that share memory with the state, if the step changes that memory.

    The state keeps its addresses as long as the graph may be replayed. `changed` has the paths of what the step
    changes, as far as that is known.
    """
    inputs.keep_apart(_written(state, changed), Spans(memory_of(state)))


def may_change(state: TrainingState, writes: Writes | None) -> Spans:
    """Return the memory of the state that an eager call may change: all, unless calls like it were noted in `writes`.

    Sync: waits for the device if what a call has changed was not asked for before.
    """
    return _written(state, writes.paths()) if writes is not None and writes.known else Spans(memory_of(state))


def _written(state: TrainingState, changed: set[str]) -> Spans:
    tensors = memory_of(state)
    stepped = {param for optimizer in state.optimizers for group in optimizer.param_groups for param in group["params"]}
    # `Writes` does not find what an optimizer changes through `.data`.
    written = {path for path, tensor in tensors.items() if tensor in stepped and tensor.requires_grad} | changed
    return Spans({path: tensor for path, tensor in tensors.items() if path in written})


def memory_of(state: TrainingState) -> dict[str, Tensor]:
    """Return all tensors of the state by path, with the gradients that are there when the step begins."""
    tensors: dict[str, Tensor] = dict(state.tensors())
    if not state.finds_gradients:
        return tensors
    gradients = {f"{path}.grad": tensor.grad for path, tensor in tensors.items() if tensor.is_leaf}
    return tensors | {path: gradient for path, gradient in gradients.items() if gradient is not None}


def _version(tensor: Tensor) -> int | None:
    """Return the number of changes in place so far, None if torch does not count them for this tensor."""
    return None if tensor.is_inference() else version(tensor)


_MAX_COMPARED = 2**26  # bytes
