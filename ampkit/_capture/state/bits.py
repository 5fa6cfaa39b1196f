"""The bits of a tensor, by which two tensors are compared exactly."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..._torch.tensors.tensors import sparse_indices, sparse_values


def real(tensor: Tensor) -> Tensor:
    """Return a tensor of real numbers with the same values: one of complex numbers gets a dimension of size 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def bits(tensor: Tensor) -> Tensor:
    """Return all bytes of the elements, as a tensor of uint8 with one dimension. It may share the tensor's memory."""
    return real(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)


_Parts = dict[str, Callable[[Tensor], Tensor]]
_COMPRESSED_BY_ROW: _Parts = {"row offsets": Tensor.crow_indices, "column indices": Tensor.col_indices}
_COMPRESSED_BY_COLUMN: _Parts = {"column offsets": Tensor.ccol_indices, "row indices": Tensor.row_indices}
_INDICES: dict[torch.layout, _Parts] = {
    torch.sparse_coo: {"indices": sparse_indices},
    torch.sparse_csr: _COMPRESSED_BY_ROW,
    torch.sparse_bsr: _COMPRESSED_BY_ROW,
    torch.sparse_csc: _COMPRESSED_BY_COLUMN,
    torch.sparse_bsc: _COMPRESSED_BY_COLUMN,
}


def dense_parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the dense tensors that have the bits of a tensor, by what they are of it; "" if it is itself dense.

    A sparse tensor has indices and values, a nested one its components, a quantized one integers and what they stand
    for. Sync: the number of components of a nested tensor is read. Aliasing: they may share the tensor's memory.
    """
    if tensor.is_nested:
        return {f"component {i}": part for i, part in enumerate(tensor.unbind())}
    if tensor.is_quantized:
        return {"integers": tensor.int_repr(), "values": tensor.dequantize()}
    if tensor.layout in _INDICES:
        values = sparse_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
        parts = {name: part(tensor) for name, part in _INDICES[tensor.layout].items()}
        return {"shape": torch.tensor(tensor.shape), **parts, "values": values}
    return {"": tensor if tensor.layout is torch.strided else tensor.to_dense()}
