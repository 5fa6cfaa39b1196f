"""Fake tensors, which have no data, and autocast for CUDA without a CUDA device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor

from ..._undo import Undo, replace
from ..guard import private

# Makes a `torch._subclasses.FakeTensorMode`: tensors that are made within it have no data.
fake_tensor_mode: Callable[..., Any] = private(fake_tensor, "FakeTensorMode")
_FAKE: type = private(fake_tensor, "FakeTensor")
_LIMITS = tuple(
    private(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
)
# Words in the messages of errors that kernels raise when there is no device or no data.
_NO_DEVICE = ("NVIDIA", "CUDA", "cuda devices", "hasPrimaryContext", "data pointer", "storage")


def is_limit_of_fake_tensors(error: Exception) -> bool:
    """Return whether an error came because there is no data or no device, and not because the code is wrong."""
    if isinstance(error, _LIMITS):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_DEVICE)


@contextmanager
def autocast_without_cuda() -> Iterator[None]:
    """Context in which `torch.autocast("cuda")` works without a CUDA device. Outside it switches itself off there."""
    common = private(torch.cuda.amp, "common")
    private(common, "amp_definitely_not_available")
    with Undo() as undo:
        replace(undo, common, "amp_definitely_not_available", lambda: False)
        replace(undo, torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        yield


def is_fake(kind: type) -> bool:
    """Return whether tensors of this class are fake, that is without data."""
    return issubclass(kind, _FAKE)
