"""A sample call for each operation that has an autocast kernel, and the rule that autocast must follow for it.

The rules are written down, not asked for: the suite fails where the dispatcher does something else. They are those of
torch 2.11 (ATen/autocast_mode.h and autocast_mode.cpp) with what later versions changed, checked up to 2.15; the names
are those of the dispatcher, without `aten::`.

- lower: eligible tensors are cast to autocast's dtype.
- float32: eligible tensors are cast to float32.
- float32 dtype argument: computed with `dtype=torch.float32` unless the caller gives a dtype.
- promote: eligible tensors are cast to the widest dtype among them, at least autocast's.
- banned: an error.

Eligible are floating tensors on autocast's device type, except float64.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from harness import VERSION
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ampkit._torch.tensors.operators import ops_with_kernel

KINDS = ["cpu", "cuda"]
LOW = [torch.float16, torch.bfloat16]
N = 8

# fmt: off
RULES: dict[str, dict[str, list[str]]] = {
    "cpu": {
        "lower": [
            "_addmm_activation", "_convolution.deprecated", "_native_multi_head_attention", "addbmm", "addmm",
            "baddbmm", "bmm", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding",
            "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linalg_vecdot",
            "linear", "matmul", "mkldnn_rnn_layer", "mm", "prelu", "scaled_dot_product_attention",
        ],
        "float32": [
            "_grid_sampler_2d_cpu_fallback", "_lu_with_info", "adaptive_avg_pool3d", "adaptive_max_pool3d",
            "avg_pool3d", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cdist", "cholesky",
            "cholesky_inverse", "cholesky_solve", "cosine_embedding_loss", "cross_entropy_loss", "ctc_loss.IntList",
            "ctc_loss.Tensor", "fake_quantize_per_tensor_affine", "fft_fft", "fft_fft2", "fft_fftn", "fft_hfft",
            "fft_ifft", "fft_ifft2", "fft_ifftn", "fft_ihfft", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_rfft",
            "fft_rfft2", "fft_rfftn", "fractional_max_pool2d", "fractional_max_pool3d", "geqrf", "grid_sampler",
            "grid_sampler_2d", "grid_sampler_3d", "hinge_embedding_loss", "huber_loss", "inverse", "kl_div", "l1_loss",
            "linalg_cholesky", "linalg_cholesky_ex", "linalg_cond", "linalg_cond.p_str", "linalg_eig", "linalg_eigh",
            "linalg_eigvals", "linalg_eigvalsh", "linalg_householder_product", "linalg_inv", "linalg_inv_ex",
            "linalg_lstsq", "linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float",
            "linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.tol_tensor", "linalg_qr", "linalg_solve",
            "linalg_svd", "linalg_svdvals", "linalg_tensorinv", "linalg_tensorsolve", "lu_solve",
            "margin_ranking_loss", "max_pool3d", "max_unpool2d", "max_unpool3d", "mse_loss", "multi_margin_loss",
            "multilabel_margin_loss", "multilabel_margin_loss_forward", "nanquantile", "nanquantile.scalar", "nll_loss",
            "nll_loss2d", "orgqr", "ormqr", "pinverse", "poisson_nll_loss", "polar", "prod", "prod.dim_Dimname",
            "prod.dim_int", "qr", "quantile", "quantile.scalar", "reflection_pad1d", "reflection_pad2d",
            "replication_pad1d", "replication_pad2d", "replication_pad3d", "smooth_l1_loss", "soft_margin_loss", "stft",
            "stft.center", "svd", "trace", "triangular_solve", "triplet_margin_loss", "view_as_complex",
        ],
        "promote": ["cat", "index_copy", "index_copy.dimname", "stack"],
    },
    "cuda": {
        "lower": [
            "_convolution", "_convolution.deprecated", "_cudnn_rnn", "_scaled_dot_product_flash_attention",
            "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm",
            "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input",
            "conv_transpose3d.input", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum",
            "gru_cell", "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell", "matmul", "mm", "mv", "prelu",
            "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
        ],
        "float32": [
            "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "acos", "asin",
            "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_embedding_loss", "cosine_similarity", "dist",
            "erfinv", "exp", "expm1", "frobenius_norm.dim", "group_norm", "hinge_embedding_loss", "huber_loss",
            "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "logsumexp", "margin_ranking_loss",
            "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm", "nll_loss", "nll_loss2d",
            "nuclear_norm", "nuclear_norm.dim", "pdist", "poisson_nll_loss", "pow.Scalar", "pow.Tensor_Scalar",
            "pow.Tensor_Tensor", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss",
            "softplus", "tan", "triplet_margin_loss", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
        ],
        "float32 dtype argument": [
            "cumprod", "cumprod.dimname", "cumsum", "cumsum.dimname", "linalg_matrix_norm",
            "linalg_matrix_norm.str_ord", "linalg_vector_norm", "log_softmax.Dimname", "log_softmax.int", "norm.Scalar",
            "norm.ScalarOpt_dim", "norm.names_ScalarOpt_dim", "prod", "prod.dim_Dimname", "prod.dim_int",
            "softmax.Dimname", "softmax.int", "sum", "sum.dim_DimnameList", "sum.dim_IntList",
        ],
        "promote": [
            "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
            "tensordot", "vdot",
        ],
        "banned": ["binary_cross_entropy"],
    },
}
# fmt: on
# What later versions changed in these rules: the operation's rule, or None where there is no such operation any more.
CHANGES: list[tuple[tuple[int, int], str, dict[str, str | None]]] = [
    ((2, 12), "cuda", {"rms_norm": "float32"}),  # pytorch#174824
    *(  # pytorch#173895: no dimension names any more
        ((2, 13), device, {op: None for ops in rules.values() for op in ops if "name" in op.lower()})
        for device, rules in RULES.items()
    ),
    *(((2, 14), device, {"linalg_matrix_sqrth": "float32"}) for device in RULES),  # pytorch#187987
    ((2, 14), "cpu", {"cholesky": None, "qr": None}),  # pytorch#186817, pytorch#186815
]


def _rules(device: str) -> dict[str, str]:
    """Return the rules of the running torch, by operation."""
    rules: dict[str, str | None] = {op: rule for rule, ops in RULES[device].items() for op in ops}
    for version, changed, changes in CHANGES:
        if changed == device and version <= VERSION:
            rules.update(changes)
    return {op: rule for op, rule in rules.items() if rule}


RULE = {device: _rules(device) for device in RULES}

# Each operation that is not exercised on a device, and why. Nothing may be missing without a line here.
_NOT_EXERCISED: dict[str, dict[str, str]] = {
    "cpu": {"index_copy.dimname": "torch has no kernel behind it: index_copy does not support dimension names yet"},
    "cuda": {"norm.names_ScalarOpt_dim": "autocast adds a dtype, and norm with a dtype does not support names yet"},
}
NOT_EXERCISED = {
    device: {op: why for op, why in whys.items() if op in RULE[device]} for device, whys in _NOT_EXERCISED.items()
}
# As it is: for cuDNN's RNNs autocast has float16 written into the code (ATen/cudnn/AutocastRNN.cpp).
ALWAYS_FLOAT16 = {"_cudnn_rnn"}

# What fake CUDA tensors cannot run on a machine without a GPU.
NO_FAKE = {
    **dict.fromkeys(["_convolution", "_convolution.deprecated"], "asks the driver which convolution to choose"),
    **dict.fromkeys(["cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"], "asks cuDNN"),
    **dict.fromkeys(["_thnn_fused_gru_cell", "gru_cell"], "asks the driver for the device"),
    **dict.fromkeys(
        [op for op in RULE["cuda"] if "name" in op.lower() and op not in NOT_EXERCISED["cuda"]],
        "fake tensors have no names",
    ),
}

# Run by the tests so far; the terminal summary counts them (conftest.py).
ran: dict[str, set[str]] = {"cpu": set(), "cuda": set(), "fake cuda": set()}


class Call(NamedTuple):
    """Arguments of an operation: float32 where a tensor is floating."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


class Make:
    """Makes the tensors of one sample: the same ones each time, on any device."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(11)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def unit(self, *shape: int) -> Tensor:
        """Values between 0.1 and 0.9."""
        return torch.rand(shape, generator=self._generator) * 0.8 + 0.1

    def index(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)

    def spd(self, n: int = N) -> Tensor:
        """A symmetric matrix with eigenvalues far from zero, which casting to 8 bits of precision keeps."""
        matrix = self.normal(n, n)
        return matrix @ matrix.T + n * torch.eye(n)

    def named(self, *shape: int) -> Tensor:
        return self.normal(*shape).rename(*"NCHWD"[: len(shape)])

    def complex(self, *shape: int) -> Tensor:
        return torch.complex(self.normal(*shape), self.normal(*shape))


def _conv(m: Make, dims: int, *rest: Any) -> Call:
    return call(m.normal(2, N, *[5] * dims), m.normal(N, N, *[3] * dims), m.normal(N), *rest)


def _convolution(m: Make, *flags: bool) -> Call:
    return _conv(m, 2, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, *flags)


def _cell(m: Make, gates: int, states: int = 1) -> Call:
    hidden = [m.normal(3, N) for _ in range(states)]
    weights = [m.normal(gates * N, N), m.normal(gates * N, N), m.normal(gates * N), m.normal(gates * N)]
    return call(m.normal(3, N), hidden if states > 1 else hidden[0], *weights)


def _gates(m: Make, gates: int) -> Call:
    biases = [m.normal(gates * N) for _ in range(2)]
    return call(m.normal(3, gates * N), m.normal(3, gates * N), m.normal(3, N), *biases)


def _cudnn_lstm(m: Make) -> Call:
    weights = [m.normal(4 * N, N), m.normal(4 * N, N), m.normal(4 * N), m.normal(4 * N)]
    state = (m.normal(1, 3, N), m.normal(1, 3, N))
    # mode 2 is LSTM; no flattened buffer, one layer, no dropout, not training, one direction
    return call(m.normal(5, 3, N), weights, 4, None, *state, 2, N, 0, 1, False, 0.0, False, False, [], None)


def _mkldnn_lstm(m: Make) -> Call:
    weights = [m.normal(4 * N, N), m.normal(4 * N, N), m.normal(4 * N), m.normal(4 * N)]
    state = (m.normal(1, 3, N), m.normal(1, 3, N))
    return call(m.normal(5, 3, N), *weights, *state, False, [], 2, N, 1, True, False, False, False)


def _qkv(m: Make) -> tuple[Tensor, Tensor, Tensor]:
    return m.normal(2, 2, 16, N), m.normal(2, 2, 16, N), m.normal(2, 2, 16, N)


def _attention(m: Make) -> Call:
    x = m.normal(2, 5, N)
    return call(x, x, x, N, 2, m.normal(3 * N, N), m.normal(3 * N), m.normal(N, N), m.normal(N))


def _classes(m: Make) -> Call:
    return call(torch.log_softmax(m.normal(N, 5), 1), m.index(5, N))


def _two(m: Make) -> Call:
    return call(m.normal(N, N), m.normal(N, N))


def _ctc(m: Make, as_tensor: bool) -> Call:
    lengths = torch.tensor([6, 6]), torch.tensor([3, 2])
    probs = torch.log_softmax(m.normal(6, 2, 5), 2)
    return call(probs, m.index(4, 2, 3) + 1, *(lengths if as_tensor else (x.tolist() for x in lengths)))


def _factored(m: Make) -> Call:
    return call(*torch.geqrf(m.normal(N, N)))


def _pooled(m: Make, dims: int) -> Call:
    pool = torch.nn.functional.max_pool2d if dims == 2 else torch.nn.functional.max_pool3d
    values, where = pool(m.normal(1, 2, *[4] * dims), 2, return_indices=True)
    rest = ([4] * dims,) if dims == 2 else ([4] * dims, [2] * dims, [0] * dims)
    return call(values, where, *rest)


def _bilinear(m: Make) -> Call:
    return call(m.normal(3, 4), m.normal(3, 5), m.normal(2, 4, 5), m.normal(2))


def _grid(m: Make, dims: int) -> Call:
    image = m.normal(1, 2, *[5] * dims)
    return call(image, m.unit(1, *[3] * dims, dims) * 2 - 1, 0, 0, False)


def _scatter(m: Make) -> Call:
    index = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    return call(m.normal(3, N), 1, index, m.normal(3, N))  # no index twice: sums in any order are the same


SAMPLES: dict[str, Callable[[Make], Call]] = {
    "_addmm_activation": lambda m: call(m.normal(N), m.normal(N, N), m.normal(N, N), use_gelu=True),
    "_convolution": lambda m: _convolution(m, True),
    "_convolution.deprecated": _convolution,
    "_cudnn_rnn": _cudnn_lstm,
    "_grid_sampler_2d_cpu_fallback": lambda m: _grid(m, 2),
    "_lu_with_info": lambda m: call(m.spd()),
    "_native_multi_head_attention": _attention,
    "_scaled_dot_product_flash_attention": lambda m: call(*_qkv(m)),
    "_thnn_fused_gru_cell": lambda m: _gates(m, 3),
    "_thnn_fused_lstm_cell": lambda m: _gates(m, 4),
    "_upsample_bicubic2d_aa": lambda m: call(m.normal(1, 2, 6, 6), [3, 4], False),
    "_upsample_bilinear2d_aa": lambda m: call(m.normal(1, 2, 6, 6), [3, 4], False),
    "_upsample_nearest_exact1d": lambda m: call(m.normal(1, 2, 6), [9]),
    "_upsample_nearest_exact2d": lambda m: call(m.normal(1, 2, 6, 6), [9, 4]),
    "_upsample_nearest_exact3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [6, 3, 5]),
    "acos": lambda m: call(m.unit(N)),
    "adaptive_avg_pool3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [2, 2, 2]),
    "addbmm": lambda m: call(m.normal(N, N), m.normal(3, N, N), m.normal(3, N, N)),
    "addcdiv": lambda m: call(m.normal(N), m.normal(N), m.unit(N), value=0.5),
    "addcmul": lambda m: call(m.normal(N), m.normal(N), m.normal(N), value=0.5),
    "addmm": lambda m: call(m.normal(N, N), m.normal(N, N), m.normal(N, N), beta=0.5),
    "addmv": lambda m: call(m.normal(N), m.normal(N, N), m.normal(N)),
    "addr": lambda m: call(m.normal(N, N), m.normal(N), m.normal(N)),
    "asin": lambda m: call(m.unit(N)),
    "atan2": lambda m: call(m.normal(N), m.unit(N)),
    "avg_pool3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [2, 2, 2]),
    "baddbmm": lambda m: call(m.normal(3, N, N), m.normal(3, N, N), m.normal(3, N, N)),
    "bilinear": _bilinear,
    "binary_cross_entropy": lambda m: call(m.unit(N, N), m.unit(N, N)),
    "binary_cross_entropy_with_logits": lambda m: call(m.normal(N, N), m.unit(N, N), m.unit(N), m.unit(N)),
    "bmm": lambda m: call(m.normal(3, N, N), m.normal(3, N, N)),
    "cat": lambda m: call([m.normal(2, N), m.normal(3, N)], 0),
    "cdist": lambda m: call(m.normal(3, N), m.normal(4, N)),
    "chain_matmul": lambda m: call([m.normal(N, N) for _ in range(3)]),
    "cholesky": lambda m: call(m.spd()),
    "cholesky_inverse": lambda m: call(torch.linalg.cholesky(m.spd())),
    "cholesky_solve": lambda m: call(m.normal(N, 2), torch.linalg.cholesky(m.spd())),
    "conv1d": lambda m: _conv(m, 1),
    "conv1d.padding": lambda m: _conv(m, 1, [1], "same"),
    "conv2d": lambda m: _conv(m, 2),
    "conv2d.padding": lambda m: _conv(m, 2, [1, 1], "same"),
    "conv3d": lambda m: _conv(m, 3),
    "conv3d.padding": lambda m: _conv(m, 3, [1, 1, 1], "same"),
    "conv_tbc": lambda m: call(m.normal(10, 7, N), m.normal(5, N, N), m.normal(N)),
    "conv_transpose1d": lambda m: _conv(m, 1),
    "conv_transpose2d.input": lambda m: _conv(m, 2),
    "conv_transpose3d.input": lambda m: _conv(m, 3),
    "convolution": lambda m: _conv(m, 2, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "cosh": lambda m: call(m.normal(N)),
    "cosine_embedding_loss": lambda m: call(m.normal(3, N), m.normal(3, N), torch.tensor([1, -1, 1])),
    "cosine_similarity": _two,
    "cross": lambda m: call(m.normal(4, 3), m.normal(4, 3)),
    "cross_entropy_loss": lambda m: call(m.normal(N, 5), m.index(5, N), label_smoothing=0.1),
    "ctc_loss.IntList": lambda m: _ctc(m, False),
    "ctc_loss.Tensor": lambda m: _ctc(m, True),
    "cudnn_convolution": lambda m: call(*_conv(m, 2).args[:2], [0, 0], [1, 1], [1, 1], 1, False, True, True),
    "cudnn_convolution_transpose": lambda m: call(
        *_conv(m, 2).args[:2], [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True
    ),
    "cumprod": lambda m: call(m.normal(3, N), 1),
    "cumprod.dimname": lambda m: call(m.named(3, N), "C"),
    "cumsum": lambda m: call(m.normal(3, N), 1),
    "cumsum.dimname": lambda m: call(m.named(3, N), "C"),
    "dist": lambda m: call(m.normal(N), m.normal(N)),
    "dot": lambda m: call(m.normal(N), m.normal(N)),
    "einsum": lambda m: call("bij,bjk->bik", [m.normal(3, N, N), m.normal(3, N, N)]),
    "erfinv": lambda m: call(m.unit(N)),
    "exp": lambda m: call(m.normal(N)),
    "expm1": lambda m: call(m.normal(N)),
    "fake_quantize_per_tensor_affine": lambda m: call(m.normal(N), 0.1, 0, 0, 255),
    "fft_fft": lambda m: call(m.normal(N)),
    "fft_fft2": lambda m: call(m.normal(N, N)),
    "fft_fftn": lambda m: call(m.normal(N, N)),
    "fft_hfft": lambda m: call(m.normal(N)),
    "fft_ifft": lambda m: call(m.normal(N)),
    "fft_ifft2": lambda m: call(m.normal(N, N)),
    "fft_ifftn": lambda m: call(m.normal(N, N)),
    "fft_ihfft": lambda m: call(m.normal(N)),
    "fft_irfft": lambda m: call(m.normal(N)),
    "fft_irfft2": lambda m: call(m.normal(N, N)),
    "fft_irfftn": lambda m: call(m.normal(N, N)),
    "fft_rfft": lambda m: call(m.normal(N)),
    "fft_rfft2": lambda m: call(m.normal(N, N)),
    "fft_rfftn": lambda m: call(m.normal(N, N)),
    "fractional_max_pool2d": lambda m: call(m.normal(1, 2, 6, 6), [2, 2], [3, 3], m.unit(1, 2, 2)),
    "fractional_max_pool3d": lambda m: call(m.normal(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], m.unit(1, 2, 3)),
    "frobenius_norm.dim": lambda m: call(m.normal(3, N), [1]),
    "geqrf": lambda m: call(m.normal(N, N)),
    "grid_sampler": lambda m: _grid(m, 2),
    "grid_sampler_2d": lambda m: _grid(m, 2),
    "grid_sampler_3d": lambda m: _grid(m, 3),
    "group_norm": lambda m: call(m.normal(3, N, 2), 2, m.normal(N), m.normal(N)),
    "gru_cell": lambda m: _cell(m, 3),
    "hinge_embedding_loss": lambda m: call(m.normal(N, N), torch.ones(N, dtype=torch.int32)),
    "huber_loss": _two,
    "index_copy": lambda m: call(m.normal(5, 3), 0, torch.tensor([4, 0, 2]), m.normal(3, 3)),
    "index_copy.dimname": lambda m: call(m.named(5, 3), "N", torch.tensor([4, 0, 2]), m.named(3, 3)),
    "index_put": lambda m: call(m.normal(5), [torch.tensor([4, 0])], m.normal(2)),
    "inverse": lambda m: call(m.spd()),
    "kl_div": lambda m: call(torch.log(m.unit(N, N)), m.unit(N, N)),
    "l1_loss": _two,
    "layer_norm": lambda m: call(m.normal(3, N), [N], m.normal(N), m.normal(N)),
    "linalg_cholesky": lambda m: call(m.spd()),
    "linalg_cholesky_ex": lambda m: call(m.spd()),
    "linalg_cond": lambda m: call(m.spd()),
    "linalg_cond.p_str": lambda m: call(m.spd(), "fro"),
    "linalg_eig": lambda m: call(m.spd()),
    "linalg_eigh": lambda m: call(m.spd()),
    "linalg_eigvals": lambda m: call(m.spd()),
    "linalg_eigvalsh": lambda m: call(m.spd()),
    "linalg_householder_product": _factored,
    "linalg_inv": lambda m: call(m.spd()),
    "linalg_inv_ex": lambda m: call(m.spd()),
    # Driver gels: the CPU's default, gelsy, gives other bits from call to call, also without autocast.
    "linalg_lstsq": lambda m: call(m.normal(N, 3), m.normal(N, 2), driver="gels"),
    "linalg_matrix_norm": lambda m: call(m.normal(3, N), 1),
    "linalg_matrix_norm.str_ord": lambda m: call(m.normal(3, N), "fro"),
    "linalg_matrix_rank": lambda m: call(m.spd(), 1e-3),
    "linalg_matrix_rank.atol_rtol_float": lambda m: call(m.spd(), atol=1e-3),
    "linalg_matrix_rank.atol_rtol_tensor": lambda m: call(m.spd(), atol=torch.tensor(1e-3)),
    "linalg_matrix_rank.tol_tensor": lambda m: call(m.spd(), torch.tensor(1e-3)),
    "linalg_matrix_sqrth": lambda m: call(m.spd()),
    "linalg_multi_dot": lambda m: call([m.normal(N, N) for _ in range(3)]),
    "linalg_qr": lambda m: call(m.normal(N, 3)),
    "linalg_solve": lambda m: call(m.spd(), m.normal(N, 2)),
    "linalg_svd": lambda m: call(m.normal(N, 3)),
    "linalg_svdvals": lambda m: call(m.normal(N, 3)),
    "linalg_tensorinv": lambda m: call(m.spd().reshape(N, 2, 4), 1),
    "linalg_tensorsolve": lambda m: call(m.spd().reshape(N, 2, 4), m.normal(N)),
    "linalg_vecdot": _two,
    "linalg_vector_norm": lambda m: call(m.normal(3, N), 2, [1]),
    "linear": lambda m: call(m.normal(3, N), m.normal(4, N), m.normal(4)),
    "log": lambda m: call(m.unit(N)),
    "log10": lambda m: call(m.unit(N)),
    "log1p": lambda m: call(m.unit(N)),
    "log2": lambda m: call(m.unit(N)),
    "log_softmax.Dimname": lambda m: call(m.named(3, N), "C"),
    "log_softmax.int": lambda m: call(m.normal(3, N), 1),
    "logsumexp": lambda m: call(m.normal(3, N), [1]),
    "lstm_cell": lambda m: _cell(m, 4, states=2),
    "lu_solve": lambda m: call(m.normal(N, 2), *torch.linalg.lu_factor(m.spd())),
    "margin_ranking_loss": lambda m: call(m.normal(N), m.normal(N), torch.ones(N)),
    "matmul": lambda m: call(m.normal(3, 4, N), m.normal(N, 5)),
    "max_pool3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [2, 2, 2]),
    "max_unpool2d": lambda m: _pooled(m, 2),
    "max_unpool3d": lambda m: _pooled(m, 3),
    "mkldnn_rnn_layer": _mkldnn_lstm,
    "mm": _two,
    "mse_loss": _two,
    "multi_margin_loss": lambda m: call(m.normal(N, 5), m.index(5, N)),
    "multilabel_margin_loss": lambda m: call(m.normal(N, 5), m.index(5, N, 5)),
    "multilabel_margin_loss_forward": lambda m: call(m.normal(N, 5), m.index(5, N, 5), 1),
    "mv": lambda m: call(m.normal(N, N), m.normal(N)),
    "nanquantile": lambda m: call(m.normal(3, N), torch.tensor([0.25, 0.5]), 1),
    "nanquantile.scalar": lambda m: call(m.normal(3, N), 0.25, 1),
    "native_layer_norm": lambda m: call(m.normal(3, N), [N], m.normal(N), m.normal(N), 1e-5),
    "nll_loss": _classes,
    # Reduction 0: on CUDA the reduced forms add with atomics.
    "nll_loss2d": lambda m: call(torch.log_softmax(m.normal(2, 5, 3, 3), 1), m.index(5, 2, 3, 3), None, 0),
    "norm.Scalar": lambda m: call(m.normal(3, N), 2),
    "norm.ScalarOpt_dim": lambda m: call(m.normal(3, N), 2, [1]),
    "norm.names_ScalarOpt_dim": lambda m: call(m.named(3, N), 2, ["C"]),
    "nuclear_norm": lambda m: call(m.normal(3, N)),
    "nuclear_norm.dim": lambda m: call(m.normal(2, 3, N), [1, 2]),
    "orgqr": _factored,
    "ormqr": lambda m: call(*_factored(m).args, m.normal(N, N)),
    "pdist": lambda m: call(m.normal(4, N)),
    "pinverse": lambda m: call(m.spd()),
    "poisson_nll_loss": lambda m: call(m.normal(N, N), m.unit(N, N), True, False, 1e-8, 1),
    "polar": lambda m: call(m.unit(N), m.normal(N)),
    "pow.Scalar": lambda m: call(1.7, m.normal(N)),
    "pow.Tensor_Scalar": lambda m: call(m.unit(N), 1.7),
    "pow.Tensor_Tensor": lambda m: call(m.unit(N), m.normal(N)),
    "prelu": lambda m: call(m.normal(3, N), m.normal(N)),
    "prod": lambda m: call(m.normal(N)),
    "prod.dim_Dimname": lambda m: call(m.named(3, N), "C"),
    "prod.dim_int": lambda m: call(m.normal(3, N), 1),
    "qr": lambda m: call(m.normal(N, 3)),
    "quantile": lambda m: call(m.normal(3, N), torch.tensor([0.25, 0.5]), 1),
    "quantile.scalar": lambda m: call(m.normal(3, N), 0.25, 1),
    "reciprocal": lambda m: call(m.unit(N)),
    "reflection_pad1d": lambda m: call(m.normal(2, N), [1, 2]),
    "reflection_pad2d": lambda m: call(m.normal(2, N, N), [1, 2, 3, 1]),
    "renorm": lambda m: call(m.normal(3, N), 2, 0, 1.0),
    "replication_pad1d": lambda m: call(m.normal(2, N), [1, 2]),
    "replication_pad2d": lambda m: call(m.normal(2, N, N), [1, 2, 3, 1]),
    "replication_pad3d": lambda m: call(m.normal(2, 4, 4, 4), [1, 2, 3, 1, 1, 1]),
    "rms_norm": lambda m: call(m.normal(3, N), [N], m.normal(N)),
    "rnn_relu_cell": lambda m: _cell(m, 1),
    "rnn_tanh_cell": lambda m: _cell(m, 1),
    "rsqrt": lambda m: call(m.unit(N)),
    "scaled_dot_product_attention": lambda m: call(*_qkv(m), is_causal=True),
    "scatter_add": _scatter,
    "sinh": lambda m: call(m.normal(N)),
    "smooth_l1_loss": _two,
    "soft_margin_loss": lambda m: call(m.normal(N, N), torch.ones(N, N, dtype=torch.int64)),
    "softmax.Dimname": lambda m: call(m.named(3, N), "C"),
    "softmax.int": lambda m: call(m.normal(3, N), 1),
    "softplus": lambda m: call(m.normal(N)),
    "stack": lambda m: call([m.normal(N), m.normal(N)], 0),
    "stft": lambda m: call(m.normal(2, 32), 8, 4, 8, m.unit(8), return_complex=True),
    "stft.center": lambda m: call(m.normal(2, 32), 8, 4, 8, m.unit(8), return_complex=True),
    "sum": lambda m: call(m.normal(3, N)),
    "sum.dim_DimnameList": lambda m: call(m.named(3, N), ["C"]),
    "sum.dim_IntList": lambda m: call(m.normal(3, N), [1]),
    "svd": lambda m: call(m.normal(N, 3)),
    "tan": lambda m: call(m.unit(N)),
    "tensordot": lambda m: call(m.normal(3, 4), m.normal(4, 5), [1], [0]),
    "trace": lambda m: call(m.normal(N, N)),
    "triangular_solve": lambda m: call(m.normal(N, 2), m.spd().triu()),
    "triplet_margin_loss": lambda m: call(m.normal(3, N), m.normal(3, N), m.normal(3, N)),
    "upsample_bicubic2d": lambda m: call(m.normal(1, 2, 6, 6), [9, 4], False),
    "upsample_bilinear2d": lambda m: call(m.normal(1, 2, 6, 6), [9, 4], False),
    "upsample_linear1d": lambda m: call(m.normal(1, 2, 6), [9], False),
    "upsample_nearest1d": lambda m: call(m.normal(1, 2, 6), [9]),
    "upsample_nearest2d": lambda m: call(m.normal(1, 2, 6, 6), [9, 4]),
    "upsample_nearest3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [6, 3, 5]),
    "upsample_trilinear3d": lambda m: call(m.normal(1, 2, 4, 4, 4), [6, 3, 5], False),
    "vdot": lambda m: call(m.normal(N), m.normal(N)),
    "view_as_complex": lambda m: call(m.normal(N, 2)),
}


def summary() -> Iterator[str]:
    """Yield what was run, a line a device, with the operations that were not."""
    for device, ops in ran.items():
        names = listed(device.removeprefix("fake "))
        missing = [op for op in names if op not in ops]
        if ops:
            yield f"{device}: {len(names) - len(missing)} of {len(names)} (not: {', '.join(missing) or 'none'})"


def listed(device: str) -> list[str]:
    """Return the names of all operations that have an autocast kernel on this device type, from the dispatcher."""
    names = ops_with_kernel(f"Autocast{device.upper()}")
    return sorted(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def exercised(device: str) -> list[str]:
    """Return those that have a rule and a sample."""
    return [op for op in listed(device) if op in RULE[device] and op in SAMPLES and op not in NOT_EXERCISED[device]]


def sample(op: str, place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Call:
    """Return the sample call of an operation, each tensor put where `place` puts it."""
    return mapped(SAMPLES[op](Make()), place)


def overload(op: str) -> Any:
    """Return the operation itself, below every spelling of it in Python."""
    name, _, variant = op.partition(".")
    if "name" in variant.lower():  # torch.ops takes no named tensors
        return getattr(torch._C._VariableFunctions, name)
    return getattr(getattr(torch.ops.aten, name), variant or "default")


def mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree with each tensor changed. Tuples, lists and dicts are trees."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = [mapped(part, change) for part in tree]
        return type(tree)._make(parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors(part)


def eligible(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast by hand as autocast casts: the eligible tensors."""
    return mapped(tree, lambda tensor: tensor.to(dtype) if eligible(tensor) else tensor)


def inputs_of(op: str, dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> Call:
    """Return the sample call, its arguments in these dtypes by turns."""
    call = sample(op, lambda tensor: tensor.to(device))
    args = [cast(arg, dtypes[i % len(dtypes)]) for i, arg in enumerate(call.args)]
    return Call(tuple(args), cast(call.kwargs, dtypes[0]))


def outcome(run: Any) -> tuple[Any, str]:
    """Return what a call returns, or the first line of what it raises."""
    torch.manual_seed(0)
    try:
        return run(), ""
    except RuntimeError as err:
        return None, str(err).partition("\n")[0]


@contextmanager
def fake_cuda(low: torch.dtype) -> Iterator[None]:
    """Autocast for CUDA on fake tensors, also where `torch.autocast("cuda")` refuses because there is no GPU."""
    before = torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", low)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.set_autocast_dtype("cuda", before)
            torch.clear_autocast_cache()


def on_fake_cuda(call: Call) -> Call:
    return mapped(call, lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
