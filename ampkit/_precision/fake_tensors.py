"""How a model runs on fake tensors, which have no data, also for CUDA on a machine without a GPU."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._torch.tensors.fake_tensors import autocast_without_cuda, fake_tensor_mode
from .._torch.tensors.modules import module_tables
from .._torch.tensors.operators import has_kernel, kernels, op_overload
from .._torch.tensors.tree import tree_flatten
from .._undo import Undo, replace


def can_save_for_backward(device_type: str) -> bool:
    """Return whether autograd can build a graph over fake tensors of this device type.

    A torch that was built without CUDA (2.13.0+cpu) ends the process when the first node of a graph on CUDA is made:
    C++ throws "PyTorch is not linked with support for cuda devices", and nothing catches it.
    """
    return device_type != "cuda" or torch.backends.cuda.is_built()


@contextmanager
def fake_device(device_type: str) -> Iterator[None]:
    """Context in which new tensors have no data, and CUDA operations and autocast work without a CUDA device.

    Gradients are on if they were on before and `can_save_for_backward` allows it.

    Attention asks the device which kernel to use. Without a device it is replaced, for the whole process, by a function
    that uses what a recent GPU would use. So no other thread may run this operation in the meantime.
    """
    grad = torch.is_grad_enabled()
    with Undo() as undo, ExitStack() as stack:
        undo.note(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path is one operation, which has no fake kernel
        # It would log the traceback of errors that are raised anyway.
        replace(undo, logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
        if device_type == "cuda" and not torch.cuda.is_available():
            stack.enter_context(autocast_without_cuda())
            stack.enter_context(kernels({"scaled_dot_product_attention": _attention}, ("AutogradCUDA", "CUDA")))
        if device_type == "cuda":
            missing = {name: fn for name, fn in _WITHOUT_META.items() if not has_kernel(f"aten::{name}", "Meta")}
            stack.enter_context(kernels(missing, ("Meta",)))
        # In inference mode, dispatch modes would see `linear` and `to`, not the operations that they consist of.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad and can_save_for_backward(device_type)))
        stack.enter_context(fake_tensor_mode(allow_non_fake_inputs=True))
        stack.enter_context(_RecurrentOnCudnn())
        yield


def fake_copy(tree: Any, device_type: str, dtype: torch.dtype | None = None) -> Any:
    """Return a deep copy in which every tensor, also in modules, is a fake one. Call it within `fake_device`.

    Tensors may be on any device, also on meta, and their values are not read. A module's tensors that are neither
    parameters nor buffers stay on their device, as with `nn.Module.to`, unless that is meta. `dtype` is for floating
    tensors; None keeps their dtypes.
    """
    memo: dict[int, Any] = {}  # for copy.deepcopy: what takes the place of an object, by its id

    def add(part: Any, stay: bool) -> None:
        for tensor in tree_flatten(part)[0]:
            if not isinstance(tensor, Tensor) or id(tensor) in memo:
                continue
            if nn.parameter.is_lazy(tensor):
                raise ValueError(
                    "a lazy module has no parameters yet. Call the model once, on meta tensors for instance."
                )
            stays = stay and tensor.device.type != "meta"
            device = tensor.device if stays else torch.device(device_type)
            kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            grad = tensor.requires_grad and can_save_for_backward(device.type)
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=kept, device=device)
            parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, grad) if parameter else fake.requires_grad_(grad)

    for leaf in tree_flatten(tree)[0]:
        add(leaf, stay=False)
        for module in leaf.modules() if isinstance(leaf, nn.Module) else ():
            add(module_tables(module)[:2], stay=False)
        for module in leaf.modules() if isinstance(leaf, nn.Module) else ():
            add(vars(module), stay=True)
    return copy.deepcopy(tree, memo)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run the attention kernel that an H100 would run: flash, else the memory-efficient one, else the plain formula."""
    size = query.size(-1)
    scale = 1 / math.sqrt(size) if scale is None else scale
    low = query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() != 4 or not (low or query.dtype is torch.float32):
        return op_overload("aten::_scaled_dot_product_attention_math")(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is None and low and size == value.size(-1) and size <= 256:
        padded = [F.pad(tensor, (0, -size % 8)) if size % 8 else tensor for tensor in (query, key, value)]
        flash = op_overload("aten::_scaled_dot_product_flash_attention")
        attended = flash(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return attended[..., :size] if size % 8 else attended
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            keep = torch.scalar_tensor(0.0, dtype=query.dtype, device=attn_mask.device)
            attn_mask = torch.where(attn_mask, keep, torch.full_like(keep, -math.inf))
        keys = attn_mask.size(-1)
        if keys % 8:  # the kernel reads aligned rows
            attn_mask = F.pad(attn_mask, (0, 8 - keys % 8))[..., :keys]
        attn_mask = attn_mask.expand(*query.shape[:3], keys)
    if enable_gqa:
        key, value = (tensor.repeat_interleave(query.size(1) // tensor.size(1), 1) for tensor in (key, value))
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return op_overload("aten::_scaled_dot_product_efficient_attention")(
        query, key, value, attn_mask, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


def _recurrent_backward(
    input: Tensor, weights: list[Tensor], stride: int, buffer: Tensor, hidden: Tensor, cell: Tensor | None, *more: Any
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Return gradients of input, states and weights, in the shapes of _cudnn_rnn_backward."""
    of_cell = None if cell is None else torch.empty_like(cell)
    of_weights = [torch.empty_like(weight) for weight in weights]
    return torch.empty_like(input), torch.empty_like(hidden), of_cell, of_weights


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hidden: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the next state, and a workspace for backward that is five times as large (ATen/native/cuda/RNN.cu)."""
    return torch.empty_like(hidden), hidden.new_empty(hidden.size(0), 5 * hidden.size(1))


def _gru_cell_backward(
    grad: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return gradients of the two kinds of gates, of the state, and of the biases."""
    gates = 3 * (workspace.size(1) // 5)
    of_gates = [workspace.new_empty(workspace.size(0), gates) for _ in range(2)]
    of_biases = [workspace.new_empty(gates) if has_bias else None for _ in range(2)]
    return of_gates[0], of_gates[1], torch.empty_like(grad), of_biases[0], of_biases[1]


# Fake tensors find shapes by meta kernels. torch 2.11 has none for these CUDA operations.
_WITHOUT_META: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn_backward": _recurrent_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}

_LSTM = 2  # these numbers are cuDNN's cudnnRNNMode_t
_RECURRENT = {torch.rnn_relu: 0, torch.rnn_tanh: 1, torch.lstm: _LSTM, torch.gru: 3}


class _RecurrentOnCudnn(TorchFunctionMode):
    """Calls cuDNN's operation for recurrent layers on CUDA.

    torch's own functions first ask cuDNN how to lay out the weights, and read the weights' addresses.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (input, hx, weights, ...); the variant for packed sequences has (data, batch_sizes, hx, weights, ...).
        if func in _RECURRENT and args[0].device.type == "cuda" and isinstance(args[2], list):
            return _recurrent(_RECURRENT[func], *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _recurrent(
    mode: int,
    input: Tensor,
    hx: Any,  # a tensor, of lstm two
    weights: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    hidden, cell = hx if mode == _LSTM else (hx, None)
    size = hidden.size(-1) if cell is None else cell.size(-1)
    projected = hidden.size(-1) if hidden.size(-1) != size else 0
    stride = (4 if has_biases else 2) + bool(projected)  # how many weights a layer has
    # Autocast casts to float16 even if it is set to bfloat16: ATen/cudnn/AutocastRNN.cpp says kHalf.
    if torch.is_autocast_enabled("cuda"):
        input, hidden, *weights = (tensor.to(torch.float16) for tensor in (input, hidden, *weights))
        cell = cell if cell is None else cell.to(torch.float16)
    # On a GPU the weights lie in this buffer, and backward wants it. Here it is empty: the weights count by themselves.
    buffer = torch.empty(0, dtype=torch.uint8, device=input.device)
    with torch.autocast("cuda", enabled=False):
        output, hidden, cell, _, _ = op_overload("aten::_cudnn_rnn")(
            input, weights, stride, buffer, hidden, cell, mode, size, projected, num_layers, batch_first, dropout,
            train, bidirectional, [], None,
        )  # fmt: skip
    return (output, hidden, cell) if mode == _LSTM else (output, hidden)
