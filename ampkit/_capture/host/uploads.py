"""Constants of the host that a step copies to the device: uploaded once, and copied on the device from then on.

`torch.tensor(0.0, device=...)` and `self.window.to(device)` copy a few numbers from the host to the device per call. A
graph cannot wait for such a copy. Where the numbers are made of what is compared from call to call, of literals and of
shapes alone, they are the same in each call that finds the graph. So they are uploaded once, outside of captures. In
the call under the preflight, in the rehearsal and in the capture a copy on the device takes the place of the upload.
Each call of a graph makes that copy anew: user code may write to the result, as to any tensor of its own.

`x[:, [-2]]` and `x[cpu_index]` copy indices in torch's C++ code, and `Tensor.__getitem__` cannot be replaced. There a
dispatch mode sees the operations and gives them the constants: the preflight, which is one already, and in the
rehearsal and the capture of steps with such copies a mode of their own. Other steps are captured without a mode.

Uploads are found by their content. If a capture is given other numbers than the calls before, it finds none and fails.

What is made of something else keeps its line a finding of the preflight: random numbers, lists of more than 64 numbers,
and tensors that were there before and are too large to compare, or that the step changes. So does a mask on the host as
an index: torch counts there what it selects.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._errors import CaptureError
from ..._torch.compiler_code import is_compiling
from ..._torch.tensors.modes import WatchingMode, enter, show_copies_of_numbers, without_modes
from ..._torch.tensors.operators import INDEXING, LIFT_FRESH, LIST_READS, TO_COPY, OperationCall, kind_of
from ..._torch.tensors.tensors import storage_address, storage_of
from ..._undo import Undo, replace
from ..._user_line import real_frame, running_line, wraps_operations
from .constants import MOST_ENTRIES
from .host_tensors import MOST_BYTES, HostTensors
from .replaced import replace_here

wraps_operations(__file__)

_Content = tuple[torch.dtype, torch.Size, tuple[int, ...], bytes]


@dataclass(eq=False)
class Provenance:
    """Tells what the tensors on the host are made of, within one call. It is called with each operation."""

    # By address: of which tensors that were there before this memory was made, None if it is of no constants.
    _made: dict[int, frozenset[int] | None] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)  # so that no address is used again
    _before: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # what was there before, and who reads it
    used: set[int] = field(default_factory=set)  # the addresses of those uploaded, or from which uploads were made
    in_operations: bool = False  # whether operations got constants, see `Uploads.operands`

    def __call__(self, call: OperationCall) -> None:
        """Take note of what an operation has made, or written, on the host."""
        given = call.given
        made = [tensor for tensor in call.made if tensor.is_cpu]
        written = [tensor for tensor in call.written if tensor.is_cpu]
        if not made and not written:
            return
        if call.op is LIFT_FRESH and call.given_at[0] not in self._made:  # by code in C++
            self.note(given[0], frozenset() if given[0].numel() <= MOST_ENTRIES else None)
            return
        sources = [self.of(tensor) for tensor in given]
        varies = call.kind.draws or None in sources
        of = frozenset[int]().union(*filter(None, sources))
        for tensor in written:
            address = storage_address(tensor)
            # What was there before, and is changed now, is state.
            self.note(tensor, None if varies or address in self._before else of)
        for tensor in made:
            if storage_address(tensor) not in self._made:
                self.note(tensor, None if varies else of)

    def note(self, tensor: Tensor, of: frozenset[int] | None) -> None:
        """Take note of a tensor that was just made. `of` is as `of(tensor)` returns it."""
        if tensor.device.type == "cpu" and (address := storage_address(tensor)):
            self._alive.append(storage_of(tensor))
            self._made[address] = of

    def of(self, tensor: Tensor) -> frozenset[int] | None:
        """Return of which tensors that were there before a tensor was made, None if it is not made of constants."""
        address, storage = storage_address(tensor), storage_of(tensor)
        if address in self._made:
            return self._made[address]
        if tensor.device.type != "cpu" or storage is None or storage.nbytes() > MOST_BYTES:
            return None if address else frozenset()
        self._before.setdefault(address, (tensor, running_line(real_frame())))
        return frozenset((address,))

    def end(self) -> list[tuple[Tensor, str]]:
        """Return what is to be compared from now on: tensors that were there before, with the lines that read them."""
        self._alive.clear()
        return [self._before[address] for address in self.used]


@dataclass(eq=False)
class Uploads:
    """The constants of a step that are on its device, and calls in which copies of them take the place of uploads.

    Args:
        device: where the step computes.
        host_tensors: gets the tensors on the host whose values were uploaded.
    """

    _device: torch.device
    _host_tensors: HostTensors
    _uploaded: dict[_Content, Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _provenance: Provenance | None = None
    _captures: bool = False

    @property
    def learns(self) -> bool:
        """Whether there is anything to upload."""
        return self._device.type != "cpu"

    @contextmanager
    def learning(self, provenance: Provenance) -> Iterator[None]:
        """Context for a call in which constants are uploaded. `provenance` is called with each operation."""
        if not self.learns:
            yield
            return
        try:
            with Undo() as undo:
                replace(undo, self, "_provenance", provenance)
                self._copy_constants(undo, in_operations=True)
                yield
        finally:
            self._host_tensors.note(provenance.end())

    @contextmanager
    def in_place(self, *, in_operations: bool, captures: bool = False) -> Iterator[None]:
        """Context for a call in which copies take the place of uploads, also `in_operations` if so. None is added.

        It is an error if a call that `captures` copies another constant.
        """
        if not self._uploaded:
            yield
            return
        with Undo() as undo:
            replace(undo, self, "_captures", captures)
            self._copy_constants(undo, in_operations)
            if in_operations:
                enter(undo, _OperandsMode(self))
            yield

    def _copy_constants(self, undo: Undo, in_operations: bool) -> None:
        """Have copies take the place of uploads, until that is undone."""
        if in_operations:
            show_copies_of_numbers(undo)
        for owner, name, copied in _COPYING:
            replace_here(undo, owner, name, functools.partial(copied, self))

    def has(self, tensor: Tensor) -> bool:
        """Return whether this is one of the constants."""
        return bool(self._uploaded) and any(tensor is each for each in self._uploaded.values())

    def is_here(self, device: Any) -> bool:
        """Return whether this is the device of the step, as an argument of torch's names it."""
        if not isinstance(device, (str, int, torch.device)):
            return False
        found = torch.device(device)
        if found.type != self._device.type or found.index is not None:
            return found == self._device
        return found.type != "cuda" or self._device.index in (None, torch.cuda.current_device())

    def constant(self, tensor: Any) -> Tensor | None:
        """Return the constant on the device that has the values of a tensor on the host; None if it is no constant."""
        if not _is_plain(tensor):
            return None
        of = self._provenance.of(tensor) if self._provenance is not None else frozenset[int]()
        if of is None:
            return None
        content = content_of(tensor)
        if content not in self._uploaded:
            if self._captures:
                raise CaptureError(_OTHERS.format(running_line(real_frame())))
            size = len(content[-1])
            if self._provenance is None or size > _MOST_EACH or self._bytes + size > _MOST_IN_ALL:
                return None
            with without_modes(), torch.inference_mode(False), torch.no_grad():  # pinned, for the host is not to wait
                self._uploaded[content] = _move(tensor.clone().pin_memory(), self._device, non_blocking=True)
            self._bytes += size
        if self._provenance is not None:
            self._provenance.used |= of
        return self._uploaded[content]

    def operands(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of an operation, with constants on the device in place of what it copies there."""
        if self._provenance is None and not self._uploaded:
            return args
        if op is TO_COPY and self.is_here(kwargs.get("device")):
            return self._operand(args[0]), *args[1:]
        if kind_of(op).name not in INDEXING or not self.is_here(args[0].device):
            return args
        indices, value = args[1], args[2:3]
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return args
        if value and value[0].dim() == 0:  # of another shape it must be on the device
            value = (self._operand(value[0]),)
        return args[0], [*map(self._operand, indices)], *value, *args[3:]

    def _operand(self, tensor: Any) -> Any:
        found = None if is_compiling() else self.constant(tensor)
        if found is None:
            return tensor
        if self._provenance is not None:
            self._provenance.in_operations = True
        return found

    def note(self, made: Any, data: Any) -> None:
        """Take note of a tensor on the host that was just made of Python's numbers."""
        if self._provenance is not None and isinstance(made, Tensor) and not isinstance(data, Tensor):
            self._provenance.note(made, frozenset() if _count(data) <= MOST_ENTRIES else None)


class _OperandsMode(WatchingMode):
    """Has operations get constants in place of tensors on the host, see `Uploads.operands`.

    Bits stay the same: the preflight names the loss that has another form under a mode.
    """

    def __init__(self, uploads: Uploads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in torch
        self._uploads = uploads

    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return op(*self._uploads.operands(op, args, kwargs), **kwargs)


def _moved(uploads: Uploads, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the place of `Tensor.to` and `Tensor.cuda`, of a tensor that may be on the host."""
    device = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
    device = device.device if isinstance(device, Tensor) else device
    if device is None and original.__name__ == "cuda":
        device = "cuda"
    found = uploads.constant(args[0]) if uploads.is_here(device) else None
    return original(*args, **kwargs) if found is None else original(found.clone(), *args[1:], **kwargs)


def _written(uploads: Uploads, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the place of `Tensor.copy_`."""
    found = uploads.constant(args[1]) if len(args) > 1 and uploads.is_here(args[0].device) else None
    return original(*args, **kwargs) if found is None else original(args[0], found, *args[2:], **kwargs)


def _made(place: int, uploads: Uploads, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take the place of `torch.tensor` and its kin, which get what they make a tensor of at this place."""
    data = args[place] if len(args) > place else kwargs.get("data", kwargs.get("obj"))
    device = kwargs.get("device")
    if device is None:
        kept = args[0] if place else data
        device = kept.device if isinstance(kept, Tensor) else torch.get_default_device()
    if not uploads.is_here(device):
        result = original(*args, **kwargs)
        uploads.note(result, data)
        return result
    if len(args) > place + 1 or (_count(data) > MOST_ENTRIES and not _is_plain(data)):
        return original(*args, **kwargs)
    gets_gradient = kwargs.get("requires_grad", False)
    host = original(*args, **{**kwargs, "device": "cpu", **({"requires_grad": False} if gets_gradient else {})})
    uploads.note(host, data)
    found = uploads.constant(host)
    return original(*args, **kwargs) if found is None else found.clone().requires_grad_(gets_gradient)


_move = Tensor.to  # which is replaced
# What copies to the device: owner, name, and what takes its place. `Tensor.__getitem__` copies lists and indices, too,
# but it cannot be replaced: once that is undone, C code takes each tensor for a sequence (CPython inherits `sq_item`
# when a class is made, and not again), and torch.tensor([scalar]) fails. See `Uploads.operands`.
_COPYING: Sequence[tuple[Any, str, Callable[..., Any]]] = (
    (Tensor, "to", _moved),
    (Tensor, "cuda", _moved),
    (Tensor, "copy_", _written),
    *[(owner, name, functools.partial(_made, place)) for owner, name, place in LIST_READS],
)
_MOST_EACH, _MOST_IN_ALL = 16 << 20, 256 << 20  # bytes
_OTHERS = (
    "{0} copies numbers from the host to the device that are others than in the calls before. Pass them to the step in "
    "a tensor, or make them on the device"
)


def _is_plain(tensor: Any) -> bool:
    """Return whether this is a tensor on the host that an upload copies bit by bit, and that gets no gradient."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
    )


def content_of(tensor: Tensor) -> _Content:
    """Return what tells a tensor on the host from others: its layout and its bytes."""
    flat = tensor.contiguous()
    content = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
    return tensor.dtype, tensor.shape, tensor.stride(), content


def _count(data: Any) -> float:
    """Return how many numbers these are that a tensor is made of; infinity if it is made of something else."""
    if isinstance(data, (bool, int, float, complex)):
        return 1
    if type(data) in (list, tuple):
        return sum(map(_count, data)) if len(data) <= MOST_ENTRIES else math.inf
    size = getattr(data, "size", None)  # of an array or a number of numpy
    return size if type(size) is int and hasattr(data, "__array_interface__") else math.inf
