"""The memory that the operations of a call use, write to and make; of tensors on the host, what a replay would miss."""

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor

from ..._torch.compiler_code import calls_from_compiled_code
from ..._torch.tensors.operators import LIFT_FRESH, OperationCall
from ..._torch.tensors.tensors import storage_address
from ..._user_line import is_users_call, real_frame, running_line, wraps_operations
from ..host.host_tensors import is_on_host

wraps_operations(__file__)


@dataclass(eq=False)
class Use:
    """How a call used memory that was there before it."""

    tensor: "weakref.ref[Tensor]"  # a tensor in that memory
    address: int  # of the memory
    line: str  # the user's line that used it first
    by_user: bool  # whether that line used it itself, and not through ampkit, a backward or compiled code
    written: bool = False  # whether an operation wrote to it
    is_lost: bool = False  # whether it is no longer where it was

    @property
    def is_replaced(self) -> bool:
        """Whether the tensor is gone, or lies in other memory now, as one behind `tensor.data = ...` does.

        A storage without memory is no other one: `fully_shard` frees what it has gathered, and knows its tensors.
        """
        tensor = self.tensor()
        return self.is_lost or tensor is None or storage_address(tensor) not in (self.address, 0)


@dataclass(eq=False)
class Touched:
    """Notes memory that operations use, unless its address is known or it was made by one of them.

    A global hook on modules would not do, because code that torch.compile compiles meanwhile would contain the hook.
    """

    _known: set[int]
    _device: torch.device
    _made: set[int] = field(default_factory=set)
    # By address, with the user's line that used it first. Numbers of C++ code are such tensors for a moment.
    _on_host: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict)
    _read: set[int] = field(default_factory=set)
    _written_on_host: dict[int, str] = field(default_factory=dict)
    uses: dict[int, Use] = field(default_factory=dict)  # of each other memory, by its address
    written: set[int] = field(default_factory=set)  # addresses of all memory that operations have written to
    nested: bool = False  # whether there was a nested tensor
    lost: set[int] = field(default_factory=set)  # addresses of what is no longer where it was before the call

    def __call__(self, call: OperationCall) -> None:
        """Note the memory that an operation has used, written to and made."""
        given = set(call.given_at)
        if call.op in (LIFT_FRESH, torch.ops.aten.resize_.default):  # what torch.tensor has just made, or a new size
            self._made |= given
        for i, address in enumerate(call.given_at):
            tensor = call.given[i]  # which a zip would hold, see `_is_held`
            self.nested = self.nested or tensor.is_nested
            if address in self._made:
                continue
            is_new = is_on_host(tensor, self._device) and address not in self._on_host
            if is_new and is_users_call(real_frame(), wrapped=True):
                self._on_host[address] = weakref.ref(tensor), running_line(real_frame())
            if address and address not in self._known and address not in self.uses:
                frame = real_frame()
                # In the first run of compiled code torch puts a mode of its own around it, which lets others see its
                # operations. Their buffers come from an allocator that no mode sees.
                by_user = is_users_call(frame, wrapped=True) and not calls_from_compiled_code(frame)
                if by_user and tensor.numel() == 1 and tensor.device.type == "cpu":
                    by_user = _is_held(tensor, (call, call.given, call.kwargs, call.made, call.written))
                self.uses[address] = Use(weakref.ref(tensor), address, running_line(frame), by_user)
        for tensor, address in zip(call.written, call.written_at, strict=True):
            if is_on_host(tensor, self._device):
                self._written_on_host.setdefault(address, running_line(real_frame()))
            if (use := self.uses.get(address)) is not None:
                use.written = True
        self.written.update(filter(None, call.written_at))
        self._read |= given.difference(call.written_at)
        self._made |= set(call.made_at) - given

    def made(self, tensor: Tensor) -> None:
        """Note memory that no operation has made."""
        self._made.add(storage_address(tensor))

    def on_host(self, others: set[int]) -> tuple[list[tuple[Tensor, str]], list[str]]:
        """Return the tensors on the host that were there before and still are, and were only read, with the lines.

        Beside them, the lines that write to tensors on the host which were there before, and which other lines read.
        Tensors at the addresses `others` are left out.
        """
        left = self._written_on_host.keys() | others
        found = ((known(), line) for address, (known, line) in self._on_host.items() if address not in left)
        changed = self._on_host.keys() & self._read - others
        lines = [line for address, line in self._written_on_host.items() if address in changed]
        return [(tensor, line) for tensor, line in found if tensor is not None], lines

    def take_for_each_other(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Take what was done with the first tensor of each pair for what was done with the second one."""
        for old, new in pairs:
            if (use := self.uses.pop(storage_address(old), None)) is not None:
                use.tensor, use.address = weakref.ref(new), storage_address(new)
                self.uses[use.address] = use

    def has_read(self, tensor: Tensor) -> bool:
        """Return whether an operation has read this tensor."""
        return storage_address(tensor) in self._read

    def made_in_call(self, tensor: Tensor) -> bool:
        """Return whether an operation has made this tensor."""
        return storage_address(tensor) in self._made

    def wrote(self, tensor: Tensor) -> bool:
        """Return whether an operation has made this tensor, or written to it."""
        address = storage_address(tensor)
        return address in self._made or (address in self.uses and self.uses[address].written)


def _is_held(tensor: Tensor, given: Sequence[object]) -> bool:
    """Return whether Python code keeps a tensor, other than in these objects, and in local variables.

    Where it does not, C++ code has made it of a number, as `torch.tensor` in a function of TorchScript does, which no
    mode sees.
    """
    held: list[object] = [tensor]
    while held:
        known = [held, *given]
        held = [
            holder
            for holder in gc.get_referrers(*held)
            if not isinstance(holder, FrameType) and not any(holder is each for each in known)
        ]
        if not all(isinstance(holder, tuple) for holder in held):  # these pass arguments on, or are kept themselves
            return True
    return False


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory that tensors lie in."""
    return set(map(storage_address, tensors))
