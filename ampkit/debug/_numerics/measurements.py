"""What is computed of one tensor, on its device, and where the statistics of a step are kept and added up."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._precision.float8 import count_float8
from ..._torch.tensors.modes import without_dispatch_modes
from ..._torch.tensors.tensors import (
    foreach_add_,
    foreach_copy_,
    foreach_maximum_,
    foreach_norm,
    is_functorch_wrapped,
    version,
)

BINS = 256  # one for each value of float32's 8 exponent bits; float16 and bfloat16 convert to float32 exactly
BIAS = 127  # of float32's exponent: bin e holds the exponent e - 127; bin 0 holds zeros and float32's subnormals
NONFINITE = BINS - 1  # the bin of inf and nan
# Columns of the buffer, behind the counts by exponent.
LARGEST = BINS  # the largest magnitude, inf or nan if a value is
MAGNITUDE = BINS + 1  # for a parameter: the largest magnitude of its values, inf or nan if one is
FLOAT8 = BINS + 2  # the first of three: how many values were cast to float8, became zero by that, were beyond its range
_COLUMNS = BINS + 5
# Tensors that are recognized when they come again: the output of a module is often the input of the next one. Few
# tensors are measured between the two.
_REMEMBERED = 4


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor has floating-point values to look at: it is dense, plain, not packed and not empty."""
    if (
        tensor.dtype is torch.float4_e2m1fn_x2
        or type(tensor) not in (Tensor, nn.Parameter)
        or is_functorch_wrapped(tensor)
        or tensor.is_nested
    ):
        return False
    plain = tensor.layout is torch.strided and not tensor.is_inference()
    return plain and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 0


def measure(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many values of a tensor have which exponent, and its largest magnitude: inf or nan if a value is.

    The tensor is read in three passes: cast, count, norm. The result is deterministic, and all of it can be captured:
    only integers are counted, and no size depends on data. float64 is rounded to float32 first.

    The counts are on CUDA int32 of shape (512,), by sign and exponent, else int64 of shape (256,), by exponent. The
    largest magnitude has shape (), and is in float32, or in the tensor's own dtype if that is float16 or bfloat16.
    Memory: four bytes per element. Sync: none.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # In the order of its memory, in which it is not copied if it fills that without gaps, in any layout.
    flat = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)
    floats = flat.to(torch.float32)
    bits = floats.view(torch.int32)
    if bits.is_cuda:
        # Read as integers, floats are in the order of their exponents, with 2**23 integers to each exponent. histc
        # computes the bin of an integer in int64 (ATen/native/cuda/SummaryOps.cu), as
        # (bits + 2**31) * 512 // (2**32 - 1), which is the exponent of each value.
        counts = torch.histc(bits, 2 * BINS, -(2**31), 2**31 - 1)
    else:
        exponents = bits.bitwise_right_shift(23).bitwise_and_(BINS - 1).long()
        ones = torch.ones((), dtype=torch.int64).expand_as(exponents)
        # Not bincount: torch marks the shape of its result as dependent on data, and the preflight reports that.
        counts = torch.zeros(BINS, dtype=torch.int64).scatter_add_(0, exponents, ones)
    source = floats if flat.dtype.itemsize != 2 else flat
    return counts, torch.linalg.vector_norm(source, torch.inf)


class MeasuredTensor(NamedTuple):
    """What one row of the statistics is about."""

    name: str  # the module, or the parameter
    what: str  # see `NumericsRow`
    module: str  # the module, or the one that holds the parameter


class DeviceStatistics:
    """The statistics of one step, in one buffer on the device, whose address never changes.

    Attributes:
        buffer: float64, which counts exactly up to 2**53. It has a row for each `MeasuredTensor`, and the columns are
            counts by exponent, `LARGEST`, `MAGNITUDE` and those from `FLOAT8` on. One more row holds the loss scale, 0
            if there is none.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.buffer = torch.zeros(rows + 1, _COLUMNS, dtype=torch.float64, device=device)
        self._counts = self.buffer[:, :BINS].unbind()
        self._largest = self.buffer[:, LARGEST].unbind()
        self._magnitudes = self.buffer[:, MAGNITUDE].unbind()
        self._float8 = self.buffer[:, FLOAT8:].unbind()

    def add(self, rows: Sequence[int], counts: Sequence[Tensor], largest: Sequence[Tensor]) -> None:
        """Add what `measure` returned to these rows, which must be distinct. A dozen kernels for a hundred rows."""
        if not rows:
            return
        # On CUDA there are 256 counts of negative values before those of positive ones.
        both_signs = torch.stack(list(counts)).view(len(rows), -1, BINS).sum(1).double()
        foreach_add_([self._counts[row] for row in rows], list(both_signs.unbind()))
        for dtype in {maximum.dtype for maximum in largest}:  # a stack of mixed dtypes would cast them one by one
            chosen = [i for i, maximum in enumerate(largest) if maximum.dtype is dtype]
            maxima = torch.stack([largest[i] for i in chosen]).double()
            foreach_maximum_([self._largest[rows[i]] for i in chosen], list(maxima.unbind()))

    def add_float8(self, rows: Sequence[int], counts: Sequence[Tensor]) -> None:
        """Add what `count_float8` returned to these rows, which must be distinct."""
        if rows:
            foreach_add_([self._float8[row] for row in rows], list(torch.stack(list(counts)).double().unbind()))

    def set_magnitudes(self, rows: Sequence[int], params: Sequence[Tensor]) -> None:
        """Write the largest magnitudes of some parameters to their rows, inf or nan if an element is.

        Memory: four bytes per element of parameters in eight-bit formats, for which torch has no norm.
        """
        if rows:
            wide = [param.float() if param.dtype.itemsize == 1 else param for param in params]
            norms = torch.stack(foreach_norm(wide, torch.inf)).double()
            foreach_copy_([self._magnitudes[row] for row in rows], list(norms.unbind()))

    def add_up(self, first: int, group: Any) -> None:
        """Make the rows from `first` on, which are of parts of tensors, those of the whole tensors.

        All processes of the group, which have the parts, call this in the same steps. Sync: none. Two all_reduces.
        """
        rows = self.buffer[first:-1]
        counts = rows[:, :BINS].contiguous()
        torch.distributed.all_reduce(counts, group=group)
        rows[:, :BINS].copy_(counts)
        maxima = rows[:, BINS:]
        largest = torch.where(maxima < torch.inf, maxima, torch.inf)  # a maximum may leave out nan
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        maxima.copy_(largest)

    def set_scale(self, scale: Tensor) -> None:
        """Write what gradients are multiplied by, a tensor of shape ()."""
        self.buffer[-1, 0].copy_(scale)


@dataclass(eq=False)
class AsyncCopies:
    """Copies from the device to the host, in the order in which they were started."""

    pending: deque[tuple[int, Tensor, torch.cuda.Event | None]] = field(default_factory=deque)

    def start(self, number: int, source: Tensor) -> None:
        """Start a copy, which gets this number. Sync: none. On the CPU it has arrived at once."""
        if not source.is_cuda:
            self.pending.append((number, source.clone(), None))
            return
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        event = torch.cuda.current_stream(source.device).record_event()
        self.pending.append((number, host, event))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """Return the copies that have arrived since the last call, with their numbers; all of them after a `wait`."""
        arrived = []
        while self.pending:
            number, host, event = self.pending[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self.pending.popleft()
            arrived.append((number, host))
        return arrived


@dataclass(eq=False)
class Measurements:
    """Measures tensors while a micro-batch or a step runs, and adds the results to the statistics when that ends."""

    _statistics: DeviceStatistics
    _measured: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _float8: dict[int, Tensor] = field(default_factory=dict)
    _recent: deque[tuple[object, Tensor, tuple[Tensor, Tensor]]] = field(
        default_factory=lambda: deque(maxlen=_REMEMBERED)
    )
    # Of the tensor that was measured last for a row, by row, in the order in which rows were first measured.
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    closed: bool = False  # whether it has ended, so that nothing is measured any more

    def add(self, row: int, tensor: Tensor | None, *, replace: bool = False) -> None:
        """Measure a tensor, and add the result to what its row has, or `replace` that. Three kernels. Sync: none."""
        device = self._statistics.buffer.device
        if self.closed or tensor is None or not is_measurable(tensor) or tensor.device != device:
            return
        # Selective checkpointing would take these operations for the model's.
        with torch.no_grad(), without_dispatch_modes():
            tensor = tensor.detach()
            layout = None if tensor.is_contiguous() else (tensor.shape, tensor.stride())
            # Equal for two tensors of the same elements in the same memory, which nobody changed.
            identity = tensor.data_ptr(), tensor.numel(), tensor.dtype, version(tensor), layout
            result = next((result for known, _, result in self._recent if known == identity), None)
            if result is None:
                result = measure(tensor)
                # The tensor is kept too, so that its memory cannot be given to another tensor.
                self._recent.append((identity, tensor, result))
            counts, largest = result
            if row in self._measured and not replace:
                before = self._measured[row]
                counts, largest = before[0] + counts, torch.maximum(before[1], largest)
        self._measured[row] = counts, largest
        self.dtypes[row] = tensor.dtype

    def add_float8(self, row: int, recipe: str, what: str, tensor: Tensor) -> None:
        """Count what a tensor loses in float8, see `count_float8`. Thirty kernels at most. Sync: none."""
        device = self._statistics.buffer.device
        if not self.closed and is_measurable(tensor) and tensor.device == device:
            with torch.no_grad(), without_dispatch_modes():
                counts = count_float8(recipe, what, tensor.detach())
                self._float8[row] = self._float8[row] + counts if row in self._float8 else counts

    def add_part(self, row: int, part: Tensor) -> None:
        """Do the same with this process's part of a tensor, which may be empty."""
        if part.numel():
            self.add(row, part)
        elif not self.closed:  # what `measure` would return, of no elements
            device = self._statistics.buffer.device
            size, dtype = (2 * BINS, torch.int32) if device.type == "cuda" else (BINS, torch.int64)
            self._measured[row] = torch.zeros(size, dtype=dtype, device=device), torch.zeros((), device=device)
            self.dtypes[row] = part.dtype

    def close(self) -> None:
        """Add everything that was measured to the statistics."""
        self.closed = True
        with torch.no_grad():
            counts, largest = zip(*self._measured.values(), strict=True) if self._measured else ((), ())
            self._statistics.add(list(self._measured), counts, largest)
            self._statistics.add_float8(list(self._float8), list(self._float8.values()))
        self._recent.clear()

    def discard(self) -> None:
        """Forget everything that was measured."""
        self.closed = True
        self._recent.clear()
