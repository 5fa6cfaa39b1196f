"""What is computed of one tensor, on its device: how many values have which exponent, and the largest magnitude."""

import torch
from torch import Tensor, nn

from ..._torch.tensors.tensors import is_functorch_wrapped

BINS = 256  # one for each value of float32's 8 exponent bits; float16 and bfloat16 convert to float32 exactly
BIAS = 127  # of float32's exponent: bin e holds the exponent e - 127; bin 0 holds zeros and float32's subnormals
NONFINITE = BINS - 1  # the bin of inf and nan


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


def nothing_measured(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what `measure` would of a tensor on this device without elements."""
    on_cuda = device.type == "cuda"
    counts = torch.zeros(2 * BINS if on_cuda else BINS, dtype=torch.int32 if on_cuda else torch.int64, device=device)
    return counts, torch.zeros((), device=device)
