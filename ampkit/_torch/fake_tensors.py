"""Tensors without data, and autocast for a device that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor

from .._undo import Undo
from .guard import private


def fake_tensor_mode(**kwargs: Any) -> Any:
    """Return a new mode in which tensors have everything but data: `torch._subclasses.FakeTensorMode`."""
    return private(fake_tensor, "FakeTensorMode")(**kwargs)


_LIMITS = tuple(
    private(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
)
# In messages of errors that a kernel raises where it finds no device or no data.
_NO_DEVICE = ("NVIDIA", "CUDA", "cuda devices", "hasPrimaryContext", "data pointer", "storage")


def is_limit_of_fake_tensors(error: Exception) -> bool:
    """Return whether an error says that there is no data or no device, not that the code is wrong."""
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_DEVICE)
    return isinstance(error, _LIMITS) or told


@contextmanager
def autocast_without_cuda() -> Iterator[None]:
    """Context in which `torch.autocast("cuda")` works without a CUDA device, where it would switch itself off."""
    common = private(torch.cuda.amp, "common")
    before = private(common, "amp_definitely_not_available"), torch.cuda.is_bf16_supported
    with Undo() as undo:
        undo.note(setattr, common, "amp_definitely_not_available", before[0])
        undo.note(setattr, torch.cuda, "is_bf16_supported", before[1])
        common.amp_definitely_not_available = lambda: False
        torch.cuda.is_bf16_supported = lambda including_emulation=True: True
        yield


def is_fake(kind: type) -> bool:
    """Return whether tensors of this class have everything but data."""
    return issubclass(kind, private(fake_tensor, "FakeTensor"))


def is_mix_of_devices(error: Exception) -> bool:
    """Return whether an operation on fake tensors was given tensors of several devices."""
    text = str(error)
    return "FakeTensor Device Propagation" in text or "found at least two devices" in text  # torch 2.11, 2.15
