"""How far apart two tensors are: equal bits, signal-to-noise ratio in decibels, units in the last place."""

import math

import torch
from torch import Tensor


def distance(a: Tensor, b: Tensor) -> tuple[bool, float, float]:
    """Return whether two tensors are equal bit by bit, their SQNR in dB, and their largest distance in ulp.

    See `ComparedTensor` for what the numbers mean. Sync: waits for the device.

    Args:
        a: any tensor.
        b: a tensor of the same shape on the same device.
    """
    a, b = (each if each.layout is torch.strided else each.to_dense() for each in (a, b))
    a, b = (torch.view_as_real(each) if each.is_complex() else each for each in (a, b))
    same_dtype = a.dtype is b.dtype
    if same_dtype and torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))):  # sync
        return True, math.inf, 0.0
    if not a.numel():
        return False, math.inf, 0.0
    dtype = coarser(a.dtype, b.dtype)
    a, b = a.double(), b.double()
    finite = a.isfinite() & b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool((~finite & ~same).any()):  # sync
        return False, -math.inf, math.inf
    a, b = a.where(finite, 0.0), b.where(finite, 0.0)
    ulp = _ulp(torch.maximum(a.abs(), b.abs()), dtype)
    error, unit = a - b, 1.0
    if bool(error.isinf().any()):  # sync; the difference is too large for float64, half of it is not
        error, unit = a / 2 - b / 2, 0.5
    ulps = (error.abs() / ulp).max().item() / unit  # sync
    noise = _decibels(error)
    return False, math.inf if noise == -math.inf else _decibels(a * unit) - noise, ulps


def _decibels(values: Tensor) -> float:
    """Return `20 log10` of the 2-norm, also where squares leave float64; -inf for zeros. Sync: waits for the device."""
    largest = values.abs().max().item()  # sync
    if largest == 0:
        return -math.inf
    return 20 * (math.log10(largest) + math.log10((values / largest).norm().item()))  # sync


def _ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unit in the last place that float64 magnitudes have in a format; `compare` has the definition."""
    if not dtype.is_floating_point:
        return torch.ones_like(magnitude)
    info = torch.finfo(dtype)  # eps is 2 ** (1 - p), smallest_normal is 2 ** e_min
    exponent = torch.frexp(magnitude).exponent - 1  # frexp has mantissas in [0.5, 1)
    power = torch.ldexp(torch.ones_like(magnitude), exponent)
    return power.clamp_min(info.smallest_normal) * info.eps


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the dtype of lower precision. It is an integer one only if both are."""
    a, b = (dtype.to_real() if dtype.is_complex else dtype for dtype in (a, b))
    return max((a, b), key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else -1.0)
