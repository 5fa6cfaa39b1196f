"""The settings of torch that decide which kernels run."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..._undo import Undo
from ..guard import private

_choose_attention = private(torch, "_fused_sdp_choice")


def settle_attention_priority(device: torch.device) -> None:
    """Have torch decide now in which order it tries attention kernels on this device.

    The first attention on a device can change that order for the process: cuDNN comes first on Hopper
    (ATen/native/transformers/cuda/sdp_utils.cpp). This asks torch for its choice and runs no attention kernel.
    """
    tokens = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
    _choose_attention(tokens, tokens, tokens)


_MATMUL, _CUDNN = "torch.backends.cuda.matmul.", "torch.backends.cudnn."
_BINDINGS = {
    f"{_MATMUL}allow_fp16_reduced_precision_reduction": "_get_cublas_allow_fp16_reduced_precision_reduction",
    f"{_MATMUL}allow_bf16_reduced_precision_reduction": "_get_cublas_allow_bf16_reduced_precision_reduction",
    f"{_MATMUL}allow_fp16_accumulation": "_get_cublas_allow_fp16_accumulation",
    "torch.backends.cuda.preferred_blas_library()": "_get_blas_preferred_backend",
    "torch.backends.cuda.preferred_linalg_library()": "_get_linalg_preferred_backend",
    f"{_CUDNN}enabled": "_get_cudnn_enabled",
    f"{_CUDNN}benchmark": "_get_cudnn_benchmark",
    f"{_CUDNN}deterministic": "_get_cudnn_deterministic",
    "torch.are_deterministic_algorithms_enabled()": "_get_deterministic_algorithms",
    "torch.is_deterministic_algorithms_warn_only_enabled()": "_get_deterministic_algorithms_warn_only",
    "torch.utils.deterministic.fill_uninitialized_memory": "_get_deterministic_fill_uninitialized_memory",
    "torch.backends.cuda.flash_sdp_enabled()": "_get_flash_sdp_enabled",
    "torch.backends.cuda.mem_efficient_sdp_enabled()": "_get_mem_efficient_sdp_enabled",
    "torch.backends.cuda.math_sdp_enabled()": "_get_math_sdp_enabled",
    "torch.backends.cuda.cudnn_sdp_enabled()": "_get_cudnn_sdp_enabled",
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()": "_get_math_sdp_allow_fp16_bf16_reduction",
    "the priority of attention kernels (torch.nn.attention.sdpa_kernel)": "_get_sdp_priority_order",
}
# Some builds of torch lack these. A setting that does not exist cannot change, so it needs no reader.
_OPTIONAL_BINDINGS = {
    f"{_CUDNN}benchmark_limit": "_cuda_get_cudnn_benchmark_limit",
    "the use of FlashAttention 3": "_get_fa3_sdp_enabled",
    "the use of an attention kernel from outside of torch": "_get_overrideable_sdp_enabled",
    "the number of multiprocessors that matmul leaves free": "_get_sm_carveout_experimental",
}
if torch.version.hip is not None:
    _OPTIONAL_BINDINGS["torch.backends.cuda.preferred_rocm_fa_library()"] = "_get_rocm_fa_preferred_backend"
    _OPTIONAL_BINDINGS["torch.backends.miopen.immediate"] = "_get_miopen_immediate"

private(parametrize, "_cache_enabled")
_fp32_precision = private(torch._C, "_get_fp32_precision_getter")
_optional = {name: getattr(torch._C, binding, None) for name, binding in _OPTIONAL_BINDINGS.items()}
# torch 2.11 has it: the name under which another implementation took the place of torch's flash attention.
_optional["torch.nn.attention.current_flash_attention_impl()"] = getattr(
    torch.nn.attention, "current_flash_attention_impl", None
)
# A function to read each setting that decides which kernels run, by the setting's public name. Every call of a step
# looks at them all, so they are C functions where torch has one.
# `allow_tf32` and `torch.get_float32_matmul_precision` are not among them: reading them raises an error once
# `fp32_precision` was set, and what they set shows in `fp32_precision`.
_read_settings: dict[str, Callable[[], Any]] = {
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
    "torch.backends.cuda.matmul.fp32_precision": functools.partial(_fp32_precision, "cuda", "matmul"),
    "torch.backends.cudnn.conv.fp32_precision": functools.partial(_fp32_precision, "cuda", "conv"),
    "torch.backends.cudnn.rnn.fp32_precision": functools.partial(_fp32_precision, "cuda", "rnn"),
    # How many of these contexts are entered. Within one, a parametrization is computed once for all its uses.
    "torch.nn.utils.parametrize.cached()": functools.partial(getattr, parametrize, "_cache_enabled"),
    "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled,
    "torch.backends.opt_einsum.enabled": private(torch.backends.opt_einsum, "_get_enabled"),
    "torch.backends.opt_einsum.strategy": private(torch.backends.opt_einsum, "_get_strategy"),
    **{name: private(torch._C, binding) for name, binding in _BINDINGS.items()},
    **{name: read for name, read in _optional.items() if read is not None},
}


SETTINGS: tuple[str, ...] = tuple(_read_settings)
# Every call of a step looks at them all. To compare the enums of torch's C++ code takes longer than to read all other
# settings, so a caller compares their numbers. `int` looks up by name what the function of C below `value` does.
_ENUMS = ("torch.backends.cuda.preferred_blas_library()", "torch.backends.cuda.preferred_linalg_library()")
_values = [vars(type(_read_settings[name]())).get("value") for name in _ENUMS]
ENUM_READERS: tuple[tuple[Callable[[], Any], Callable[[Any], int]], ...] = tuple(
    [
        (_read_settings[name], (value.fget if isinstance(value, property) else None) or int)
        for name, value in zip(_ENUMS, _values, strict=True)
    ]
)
PLAIN_READERS: tuple[Callable[[], Any], ...] = tuple(
    [read for name, read in _read_settings.items() if name not in _ENUMS]
)


def settings() -> list[Any]:
    """Return the values of all settings that decide which kernels run, in the order of `SETTINGS`."""
    return [read() for read in _read_settings.values()]


_set_fill = private(torch._C, "_set_deterministic_fill_uninitialized_memory")


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """Context in which deterministic algorithms do not fill new memory. A graph would fill it again in each replay."""
    with Undo() as undo:
        undo.note(_set_fill, _read_settings["torch.utils.deterministic.fill_uninitialized_memory"]())
        _set_fill(False)
        yield
