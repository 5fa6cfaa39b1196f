"""Statistics of tensors: what is computed on the device, where it is kept, how the host reads it without waiting."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..._torch.modes import without_dispatch_modes
from ..._torch.tensors import foreach_add_, foreach_copy_, foreach_maximum_, foreach_norm, is_functorch_wrapped, version

BINS = 256  # by the 8 exponent bits of float32, into which float16 and bfloat16 go exactly
BIAS = 127  # a value in bin e has the exponent e - 127; bin 0 holds zeros, and float32's and bfloat16's subnormals
NONFINITE = BINS - 1  # the bin of inf and nan
LARGEST = BINS  # column: the largest magnitude, inf or nan if a value is
MAGNITUDE = BINS + 1  # column: of a parameter, the largest magnitude of its values, inf or nan included
_REMEMBERED = 4  # tensors that are known again: one is another module's input right after it was an output


class Row(NamedTuple):
    """What one row of statistics is of.

    Attributes:
        name: of the module, or of the parameter.
        what: "input", "output", "grad_output" or "grad_input" of a module, or "gradient" of a parameter.
        module: name of the module; of a parameter, of the module that holds it.
    """

    name: str
    what: str
    module: str


class Snapshot(NamedTuple):
    """The statistics of one optimizer step, on the host.

    Attributes:
        step: its number.
        values: float64, one row per `Row`; columns are counts by exponent, then `LARGEST` and `MAGNITUDE`.
        scale: what gradients were multiplied by.
    """

    step: int
    values: Tensor
    scale: float


class Telemetry:
    """The rows of one model, in one buffer on the device at an address that never changes.

    Args:
        rows: how many there are.
        device: where the measured tensors are.

    Attributes:
        buffer: float64, which counts exactly to 2**53. The last row holds the loss scale, 0 where there is none.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.buffer = torch.zeros(rows + 1, BINS + 2, dtype=torch.float64, device=device)
        self._counts = self.buffer[:, :BINS].unbind()
        self._largest = self.buffer[:, LARGEST].unbind()
        self._magnitudes = self.buffer[:, MAGNITUDE].unbind()
        self._scale = self.buffer[rows, 0]

    def clear(self) -> None:
        """Begin anew. Sync: none."""
        self.buffer.zero_()

    def add(self, rows: Sequence[int], counts: Sequence[Tensor], largest: Sequence[Tensor]) -> None:
        """Add what `measure` returned to these rows, each of which comes once. A dozen kernels for a hundred rows."""
        if not rows:
            return
        # On CUDA there are 256 counts of negative values before those of positive ones.
        both_signs = torch.stack(list(counts)).view(len(rows), -1, BINS).sum(1).double()
        foreach_add_([self._counts[row] for row in rows], list(both_signs.unbind()))
        for dtype in {maximum.dtype for maximum in largest}:  # they would be stacked one by one if they were mixed
            chosen = [i for i, maximum in enumerate(largest) if maximum.dtype is dtype]
            maxima = torch.stack([largest[i] for i in chosen]).double()
            foreach_maximum_([self._largest[rows[i]] for i in chosen], list(maxima.unbind()))

    def set_magnitudes(self, rows: Sequence[int], params: Sequence[Tensor]) -> None:
        """Put the largest magnitudes of some parameters in their rows; inf or nan if an element is.

        Memory: four bytes per element of those in eight-bit formats, of which torch has no norm.
        """
        if rows:
            wide = [param.float() if param.dtype.itemsize == 1 else param for param in params]
            norms = torch.stack(foreach_norm(wide, torch.inf)).double()
            foreach_copy_([self._magnitudes[row] for row in rows], list(norms.unbind()))

    def set_scale(self, scale: Tensor) -> None:
        """Note what gradients are multiplied by, a tensor of shape ()."""
        self._scale.copy_(scale)

    def snapshot(self, step: int, buffer: Tensor) -> Snapshot:
        """Return what a copy of the buffer on the host says."""
        return Snapshot(step, buffer[:-1], float(buffer[-1, 0]) or 1.0)


class Tally:
    """Measures tensors of one micro-batch, and adds them to the telemetry at its end.

    Attributes:
        dtypes: of what was measured last for a row.
        closed: whether the micro-batch is over, so that nothing is measured any more.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._measured: dict[int, tuple[Tensor, Tensor]] = {}
        self._recent: deque[tuple[object, Tensor, tuple[Tensor, Tensor]]] = deque(maxlen=_REMEMBERED)
        self.dtypes: dict[int, torch.dtype] = {}
        self.closed = False

    @property
    def sequence(self) -> list[int]:
        """The rows in the order in which they were first measured."""
        return list(self._measured)

    def add(self, row: int, tensor: Tensor, *, instead: bool = False) -> None:
        """Measure a tensor; sum with what this row has already, or take it `instead`. Three kernels; sync: none."""
        if self.closed or not is_measurable(tensor) or tensor.device != self._telemetry.buffer.device:
            return
        # Selective checkpointing would take these operations for the model's.
        with torch.no_grad(), without_dispatch_modes():
            counts, largest = self._measure(tensor.detach())
            if row in self._measured and not instead:
                before = self._measured[row]
                counts, largest = before[0] + counts, torch.maximum(before[1], largest)
        self._measured[row] = counts, largest
        self.dtypes[row] = tensor.dtype

    def _measure(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        identity = _identity(tensor)
        for known, _, result in self._recent:
            if known == identity:
                return result
        result = measure(tensor)
        # The tensor is kept too: its memory must not become another one's.
        self._recent.append((identity, tensor, result))
        return result

    def close(self) -> None:
        """Add all that was measured to the telemetry."""
        self.closed = True
        with torch.no_grad():
            counts, largest = zip(*self._measured.values(), strict=True) if self._measured else ((), ())
            self._telemetry.add(list(self._measured), counts, largest)
        self._recent.clear()

    def discard(self) -> None:
        """Forget all that was measured."""
        self.closed = True
        self._recent.clear()


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor has floating values that can be looked at: it is dense, plain, not packed, not empty."""
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
    """Return how many values of a tensor have which exponent, and the largest magnitude, inf or nan if a value is.

    Args:
        tensor: one that `is_measurable`, on any device. float64 is rounded to float32 first.

    Returns:
        Counts: on CUDA int32 of shape (512,), by sign and exponent, else int64 of shape (256,). The largest
        magnitude: shape (), in float32, or the tensor's own dtype if that is float16 or bfloat16.

    Three passes: cast, count, norm. Deterministic, and legal in a capture: what is counted are integers, and no size
    depends on data. Memory: four bytes per element. Sync: none.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    flat = _in_memory_order(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    floats = flat.to(torch.float32)
    bits = floats.view(torch.int32)
    if bits.is_cuda:
        # As integers the bits are in the order of exponents, 2**23 to each, and histc computes bins of integers in
        # int64 (ATen/native/cuda/SummaryOps.cu): (bits + 2**31) * 512 // (2**32 - 1), the exponent of each value.
        counts = torch.histc(bits, 2 * BINS, -(2**31), 2**31 - 1)
    else:
        exponents = bits.bitwise_right_shift(23).bitwise_and_(BINS - 1).long()
        ones = torch.ones((), dtype=torch.int64).expand_as(exponents)
        # Not bincount, whose shape depends on data by what torch says of it, which the preflight repeats.
        counts = torch.zeros(BINS, dtype=torch.int64).scatter_add_(0, exponents, ones)
    source = floats if flat.dtype.itemsize != 2 else flat
    return counts, torch.linalg.vector_norm(source, torch.inf)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension; without a copy where they fill their memory, in whatever layout."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).reshape(-1)


def _identity(tensor: Tensor) -> object:
    """Return what is equal for two tensors that have the same elements in the same memory, unchanged."""
    layout = None if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, version(tensor), layout


class Arrivals:
    """Copies from the device to the host that nobody waits for."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, number: int, source: Tensor) -> None:
        """Start a copy, which gets this number. Sync: none; on the CPU it is there at once."""
        if not source.is_cuda:
            self._under_way.append((number, source.clone(), None))
            return
        host = torch.empty_like(source, device="cpu", pin_memory=True)
        host.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(source.device))
        self._under_way.append((number, host, event))

    def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
        """Return what has arrived by now, in order, with its number. With `wait`, all of it: waits for the device."""
        arrived = []
        while self._under_way:
            number, host, event = self._under_way[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            self._under_way.popleft()
            arrived.append((number, host))
        return arrived
