"""Where tensors lie in memory, by which kernels choose how they compute; and copies that lie there as well."""

import torch
from torch import Tensor

ALIGNED = 512  # bytes; at such addresses torch's allocator on CUDA puts tensors (c10/cuda/CUDACachingAllocator.cpp)
_ALIGNED_ON_HOST = 64  # c10/core/alignment.h


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor lies where torch could have allocated it."""
    return tensor.data_ptr() % (ALIGNED if tensor.is_cuda else _ALIGNED_ON_HOST) == 0


def empty_like(tensor: Tensor) -> Tensor:
    """Return memory with the same strides, also where these leave gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def own_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, that no other tensor shares memory with, as a graph would read it."""
    with torch.inference_mode(False), torch.no_grad():
        copy = empty_like(tensor)
        once(copy).copy_(once(tensor))
    return copy


def once(tensor: Tensor) -> Tensor:
    """Return a view without expanded dimensions (stride 0), along which all elements lie at one address.

    `copy_` refuses to write to such a dimension.
    """
    if 0 not in tensor.stride():
        return tensor
    sizes = [min(size, 1) if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
