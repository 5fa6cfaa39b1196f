"""Small tensors on the host that a step on another device reads: a graph holds their values as constants."""

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..._torch.tensors.tensors import storage_address, storage_of
from .constants import HostConstant

MOST_BYTES = 1 << 16  # of one; more are data
_MOST = 256


@dataclass(frozen=True, eq=False)
class HostValues:
    """The bytes of tensors on the host. Two are equal if the tensors that both looked at have the same bytes."""

    found: dict[int, bytes]  # by the address of the memory
    lines: dict[int, str]  # the user's line that reads it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostValues) and not self.changed(other)

    def __hash__(self) -> int:
        return hash(HostValues)

    def changed(self, new: "HostValues") -> list[str]:
        """Return the lines that read what has changed."""
        return [self.lines[key] for key, old in self.found.items() if new.found.get(key, old) != old]


@dataclass(eq=False)
class HostTensors:
    """Tensors on the host whose values are compared from call to call.

    CUDA kernels may take a tensor without dimensions from the host, and read it when they are launched. A replay would
    go on with the value that it had in the capture, though the tensor was changed in place since.
    """

    # By address, each with the line that reads it. They are kept, so that the addresses stay theirs.
    _memory: dict[int, tuple[torch.UntypedStorage, str]] = field(default_factory=dict)

    def note(self, tensors: Iterable[tuple[Tensor, str]]) -> None:
        """Compare these tensors from now on, which the lines read."""
        for tensor, line in tensors:
            storage, address = storage_of(tensor), storage_address(tensor)
            if storage is not None and address and storage.nbytes() <= MOST_BYTES and len(self._memory) < _MOST:
                self._memory.setdefault(address, (storage, line))

    def constants(self) -> Iterator[HostConstant]:
        """Yield a row for each of them."""
        for storage, line in self._memory.values():
            place, _, source = line.partition(": ")
            yield HostConstant(f"a tensor on the host in {source}", f"{storage.nbytes()} bytes", place)

    def forget(self) -> None:
        """Compare nothing any more."""
        self._memory = {}

    def bytes_now(self) -> list[bytes]:
        """Return what the tensors hold."""
        return [ctypes.string_at(storage.data_ptr(), storage.nbytes()) for storage, _ in self._memory.values()]

    def values(self) -> HostValues:
        """Return the same, with what belongs to it."""
        lines = {address: line for address, (_, line) in self._memory.items()}
        return HostValues(dict(zip(self._memory, self.bytes_now(), strict=True)), lines)


def is_on_host(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on the host, while the step computes on another device."""
    return tensor.device.type == "cpu" != device.type
