"""Where tensors lie in memory, by which kernels choose how they compute; and copies that lie there as well."""

import torch
from torch import Tensor

from .spans import span

ALIGNED = 512  # bytes; at such addresses torch's allocator on CUDA puts tensors (c10/cuda/CUDACachingAllocator.cpp)
_ALIGNED_ON_HOST = 64  # c10/core/alignment.h
_READ_AT_ONCE = 64  # bytes


def place_of(tensor: Tensor) -> int:
    """Return what kernels may ask about a tensor's address. It is 0 if torch could have allocated the tensor there.

    They ask which power of two divides it, and how far it is to the next address that so many bytes divide as a thread
    reads at once. These are 64 at most (aten/src/ATen/native/cuda/Reduce.cuh, `input_vectorized_thread_reduce_impl`).
    """
    rest = tensor.data_ptr() % (ALIGNED if tensor.is_cuda else _ALIGNED_ON_HOST)
    return rest % _READ_AT_ONCE or rest & -rest


def empty_like(tensor: Tensor, place: int = 0) -> Tensor:
    """Return memory with the same strides, also where these leave gaps, and with this `place_of`."""
    if not place:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    start, stop = span(tensor)
    memory = torch.empty(place + stop - start, dtype=torch.uint8, device=tensor.device).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(memory, place // tensor.itemsize, tensor.shape, tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Return whether a clone has the same strides."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


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
