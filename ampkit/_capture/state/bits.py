"""The bits of a tensor, by which two tensors are compared exactly."""

import torch
from torch import Tensor


def real(tensor: Tensor) -> Tensor:
    """Return a tensor of real numbers with the same values: one of complex numbers gets a dimension of size 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def bits(tensor: Tensor) -> Tensor:
    """Return all bytes of the elements, as a tensor of uint8 with one dimension. It may share the tensor's memory."""
    return real(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
