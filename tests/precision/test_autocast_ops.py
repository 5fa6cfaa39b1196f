"""Every operation with an autocast kernel, called through the dispatcher and by its Python spellings, bit by bit."""

import operator
from typing import Any

import autocast_samples as samples
import pytest
import torch
from autocast_samples import (
    KINDS,
    LOW,
    NO_FAKE,
    NOT_EXERCISED,
    RULE,
    Call,
    fake_cuda,
    inputs_of,
    on_fake_cuda,
    outcome,
)
from harness import DEVICES, NO_PRIMITIVE, VERSION, bits, deterministic, onednn_computes_in
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

pytestmark = [
    pytest.mark.filterwarnings("ignore:Named tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:RNN module weights:UserWarning"),  # the sample has no flat buffer
    # From torch 2.15 what the C++ below `torch.ops` warns of is a Python warning; before, it was printed.
    pytest.mark.filterwarnings(r"ignore:torch\.\w+ is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim:UserWarning"),
]

OPS = [
    pytest.param(device, op, marks=[pytest.mark.cuda] if device == "cuda" else [], id=f"{device}-{op}")
    for device in KINDS
    for op in samples.exercised(device)
    if RULE[device][op] != "banned"
]
FAKE_OPS = [op for op in samples.exercised("cuda") if op not in NO_FAKE and RULE["cuda"][op] != "banned"]

# How many of the outputs are results; the rest is memory that the kernel reserves, and random-number state.
RESULTS = {"_cudnn_rnn": 3, "_scaled_dot_product_flash_attention": 2}
ONEDNN_LSTM = "mkldnn_rnn_layer"  # only oneDNN computes it; for all else on the CPU, torch has kernels of its own


def by_hand(op: str, rule: str, call: Call, low: torch.dtype) -> Any:
    """Run without autocast what autocast should have run."""
    if rule == "float32 dtype argument":
        return with_dtype(op)(*call.args, **call.kwargs, dtype=torch.float32)
    used = {samples.eligible(x) and x.dtype for x in samples.tensors(call)}
    to = low if rule == "lower" or (rule == "promote" and torch.float32 not in used) else torch.float32
    call = samples.cast(call, torch.float16 if op in samples.ALWAYS_FLOAT16 else to)
    return samples.overload(op)(*call.args, **call.kwargs)


def with_dtype(op: str) -> Any:
    """Return the form of the operation that takes a dtype."""
    other = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
    if op == "norm.ScalarOpt_dim":
        return lambda x, p, dim, dtype: samples.overload(other[op])(x, p, dim, False, dtype=dtype)
    return samples.overload(other.get(op, op))


def results(op: str, output: Any) -> list[Tensor]:
    found = list(samples.tensors(output))
    return found[: RESULTS.get(op, len(found))]


def plain_bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if VERSION < (2, 13):
        tensor = tensor.rename(None)
    return bits(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)


def assert_equal(got: list[Tensor], want: list[Tensor], what: str) -> None:
    assert [x.dtype for x in got] == [x.dtype for x in want], what
    assert got, what
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape, what
        assert torch.equal(plain_bits(x), plain_bits(y)), what


def inputs_under(rule: str, low: torch.dtype) -> list[tuple[torch.dtype, ...]]:
    kinds = [(torch.float32,), (low,), (torch.float32, low), (low, torch.float32)]
    other = torch.float16 if low is torch.bfloat16 else torch.bfloat16
    return kinds if rule == "promote" else [*kinds, (other,), (other, torch.float32)]


@pytest.mark.parametrize(("device", "op"), OPS)
@pytest.mark.quick(4)
def test_equals_the_cast_by_hand(device, op):
    """A1, A2, A3: values and dtypes are, bit by bit, those of the same operation on inputs cast by hand."""
    rule, kernels = RULE[device][op], 0
    for low in LOW:
        for dtypes in inputs_under(rule, low):
            call = inputs_of(op, dtypes, device)
            with torch.no_grad():
                want, refused = outcome(lambda call=call, low=low: by_hand(op, rule, call, low))
                with torch.autocast(device, dtype=low):
                    got, error = outcome(lambda call=call: samples.overload(op)(*call.args, **call.kwargs))
            assert error == refused, f"{low}, inputs {dtypes}"
            if not refused:
                kernels += 1
                assert_equal(results(op, got), results(op, want), f"{low}, inputs {dtypes}")
            elif op == ONEDNN_LSTM:
                assert NO_PRIMITIVE in refused
                assert not onednn_computes_in(low)
    if op == ONEDNN_LSTM and not kernels:
        pytest.skip("oneDNN has no LSTM kernel for float16 or bfloat16 on this CPU")
    assert kernels, "there is no kernel in either dtype"
    samples.ran[device].add(op)


def gradients(op: str, call: Call, hand: torch.dtype | None) -> list[Tensor]:
    """Return the gradients of float32 inputs through the operation, each cast in the graph where a dtype is given."""
    leaves: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        if not samples.eligible(x):
            return x
        leaves.append(x.detach().clone().requires_grad_())
        return leaves[-1] if hand is None else leaves[-1].to(hand)

    call = samples.mapped(call, leaf)
    outputs = results(op, samples.overload(op)(*call.args, **call.kwargs))
    first = outputs[0]  # differentiable in each of them
    weight = torch.arange(first.numel(), device=first.device).reshape(first.shape) % 5
    return list(torch.autograd.grad((first.float() * weight).sum(), leaves, allow_unused=True))


@pytest.mark.parametrize(
    ("device", "op"), [param for param in OPS if RULE[param.values[0]][param.values[1]] == "lower"]
)
@pytest.mark.parametrize("low", LOW)
def test_gradients_equal_those_of_the_cast_by_hand(device, op, low):
    """A1: backward, called outside autocast, gives float32 gradients: bit by bit those of casts written by hand."""
    call = inputs_of(op, (torch.float32,), device)
    with deterministic():
        want, refused = outcome(lambda: gradients(op, call, torch.float16 if op in samples.ALWAYS_FLOAT16 else low))

        def run() -> list[Tensor]:
            with torch.autocast(device, dtype=low):
                return gradients(op, call, None)

        got, error = outcome(run)
    assert error == refused
    if not refused:
        assert_equal([x for x in got if x is not None], [x for x in want if x is not None], op)
        assert {x.dtype for x in got if x is not None} == {torch.float32}


def test_lower_ops_compute_in_both_dtypes():
    """A1: what the comparison above cannot tell from a refusal: an LSTM lacks the dtypes that oneDNN lacks."""
    missing = set()
    for op in samples.exercised("cpu"):
        for low in LOW if RULE["cpu"][op] == "lower" else []:
            call = inputs_of(op, (torch.float32,))
            with torch.no_grad(), torch.autocast("cpu", dtype=low):
                got, error = outcome(lambda call=call, op=op: samples.overload(op)(*call.args, **call.kwargs))
            missing |= {(op, low)} if error else set()
            assert error or {x.dtype for x in results(op, got)} == {low}
    assert missing <= {(ONEDNN_LSTM, low) for low in LOW if not onednn_computes_in(low)}


@pytest.mark.parametrize("device", KINDS)
def test_no_op_is_missed(device):
    """A5: each operation that the dispatcher lists is exercised, or named with the reason; at least 95% are."""
    listed, exercised = samples.listed(device), samples.exercised(device)
    assert set(listed) == set(RULE[device]), "torch has other autocast kernels than RULES"
    assert set(listed) == set(samples.SAMPLES) & set(RULE[device]), "without a sample"
    assert set(listed) - set(exercised) == set(NOT_EXERCISED[device])
    assert all(NOT_EXERCISED[device].values())
    assert len(exercised) >= 0.95 * len(listed)


@pytest.mark.parametrize("device", KINDS)
def test_op_table_reads_the_same_rules(device):
    """A5: the rules that ampkit.op_table reads off the dispatcher are those that the calls here follow."""
    rules = ampkit.op_table(device).rules.items()
    of_torch = {op: rule for op, rule in rules if op.startswith("aten::")}  # torchvision's too, once it is imported
    assert of_torch == {f"aten::{op}": rule for op, rule in RULE[device].items()}


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_exercised_still_cannot_be(device):
    """A5: the day that one of them works, its line in the list must go."""
    for op in NOT_EXERCISED[device]:
        call = samples.sample(op, lambda x: x.to(device))
        with torch.autocast(device, dtype=torch.bfloat16):
            assert outcome(lambda call=call, op=op: samples.overload(op)(*call.args, **call.kwargs))[1]


# On a machine without a GPU: the rules of CUDA, on fake CUDA tensors.


@pytest.mark.parametrize("op", FAKE_OPS)
@pytest.mark.quick(3)
def test_dtypes_on_fake_cuda_tensors(op):
    """A1, A2, A3: the dtypes of CUDA's rules, without a GPU."""
    rule = RULE["cuda"][op]
    for low in LOW:
        for dtypes in inputs_under(rule, low):
            call = inputs_of(op, dtypes)
            widest = torch.float32 in {x.dtype for x in samples.tensors(call)}
            want = low if rule == "lower" or (rule == "promote" and not widest) else torch.float32
            with fake_cuda(low):
                call = on_fake_cuda(call)
                got = results(op, samples.overload(op)(*call.args, **call.kwargs))
            assert got[0].device.type == "cuda"
            assert got[0].dtype is want, f"{low}, inputs {dtypes}"
    samples.ran["fake cuda"].add(op)


def test_fake_cuda_leaves_few_out():
    """A2: what only a GPU can run is named with the reason, and is less than an eighth of the list."""
    assert set(NO_FAKE) <= set(samples.exercised("cuda"))
    assert len(NO_FAKE) < len(samples.listed("cuda")) / 8


@pytest.mark.parametrize("low", LOW)
def test_binary_cross_entropy_on_fake_cuda_tensors(low):
    """A6: refused under CUDA autocast, and the message says what to use instead."""
    with fake_cuda(low):
        x, y = (torch.empty(4, device="cuda") for _ in range(2))
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, y)
        with pytest.raises(RuntimeError, match="BCEWithLogitsLoss"):
            nn.BCELoss()(x.half(), y.half())
        assert F.binary_cross_entropy_with_logits(x.half(), y.half()).dtype is torch.float32
    samples.ran["fake cuda"].add("binary_cross_entropy")


@pytest.mark.cuda
@pytest.mark.parametrize("low", LOW)
def test_binary_cross_entropy_on_cuda(low):
    """A6: the same on a GPU, and fine once autocast is off."""
    x, y = (torch.rand(4, device="cuda") for _ in range(2))
    with torch.autocast("cuda", dtype=low):
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, y)
        with torch.autocast("cuda", enabled=False):
            assert F.binary_cross_entropy(x, y).dtype is torch.float32
        assert F.binary_cross_entropy_with_logits(x, y).dtype is torch.float32
    samples.ran["cuda"].add("binary_cross_entropy")


# The Python spellings of the same operations.

NAMESPACES = {"torch": torch, "Tensor": Tensor, "functional": F, "special": torch.special}
PREFIXES = {"linalg_": torch.linalg, "fft_": torch.fft}
# Spellings that take the operation's arguments in another way.
OTHER_ARGUMENTS: dict[str, Any] = {
    "functional.binary_cross_entropy_with_logits": lambda f, x, y, w, p: f(x, y, weight=w, pos_weight=p),
    "torch.chain_matmul": lambda f, matrices: f(*matrices),
    "torch.tensordot": lambda f, x, y, dims_x, dims_y, **kwargs: f(x, y, dims=(dims_x, dims_y), **kwargs),
}
NOT_SPELLED = {
    ("pow.Scalar", "Tensor.pow"),  # its first argument is a number
    ("softmax.Dimname", "special.softmax"),  # take no names
    ("log_softmax.Dimname", "special.log_softmax"),
}


def spellings(op: str) -> dict[str, Any]:
    """Return the public functions and methods that have the operation's name."""
    base = op.partition(".")[0]
    owners = [(base, space, owner) for space, owner in NAMESPACES.items()]
    owners += [(base.removeprefix(p), p.strip("_"), owner) for p, owner in PREFIXES.items() if base.startswith(p)]
    return {
        f"{space}.{name}": getattr(owner, name)
        for name, space, owner in owners
        if hasattr(owner, name) and not base.startswith("_") and (op, f"{space}.{name}") not in NOT_SPELLED
    }


def spelled(name: str, function: Any, call: Call, **kwargs: Any) -> Any:
    kwargs = {**call.kwargs, **kwargs}
    if name in OTHER_ARGUMENTS:
        return OTHER_ARGUMENTS[name](function, *call.args, **kwargs)
    return function(*call.args, **kwargs)


SPELLED = [
    pytest.param(device, op, name, marks=[pytest.mark.cuda] if device == "cuda" else [], id=f"{device}-{op}-{name}")
    for device in KINDS
    for op in samples.exercised(device)
    for name in spellings(op)
    if RULE[device][op] != "banned"
]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of spellings that torch deprecates
@pytest.mark.parametrize(("device", "op", "name"), SPELLED)
@pytest.mark.quick(4)
def test_spelling(device, op, name):
    """A5: functional, linalg, special and method spellings follow the rule too, bit by bit."""
    rule, low, function = RULE[device][op], torch.bfloat16, spellings(op)[name]
    if op == ONEDNN_LSTM and not onednn_computes_in(low):
        pytest.skip("oneDNN has no LSTM kernel for bfloat16 on this CPU")
    call = inputs_of(op, (torch.float32,) if rule == "lower" else (low,), device)
    cast = samples.cast(call, low if rule in ("lower", "promote") else torch.float32)
    with torch.no_grad():
        torch.manual_seed(0)
        want = (
            spelled(name, function, call, dtype=torch.float32)
            if rule == "float32 dtype argument"
            else spelled(name, function, cast)
        )
        torch.manual_seed(0)
        with torch.autocast(device, dtype=low):
            got = spelled(name, function, call)
    assert_equal(results(op, got), results(op, want), name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in FAKE_OPS for name in spellings(op)])
@pytest.mark.quick(4)
def test_spelling_on_fake_cuda_tensors(op, name):
    """A5: the same spellings under the rules of CUDA, without a GPU."""
    rule, low = RULE["cuda"][op], torch.bfloat16
    call = inputs_of(op, (torch.float32,) if rule == "lower" else (low,))
    with fake_cuda(low):
        got = list(samples.tensors(spelled(name, spellings(op)[name], on_fake_cuda(call))))
    assert got[0].dtype is (low if rule in ("lower", "promote") else torch.float32)


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(8, device=x.device) % 8)


# Operators and functions that reach an operation of another name: what autocast runs them in, on the CPU and on CUDA.
# None: in the dtype of the input.
OTHER_NAMES: dict[str, tuple[Any, str | None, str | None]] = {
    "x @ x": (lambda x: x @ x, "lower", "lower"),
    "operator.matmul": (lambda x: operator.matmul(x, x), "lower", "lower"),
    "x.__rmatmul__": (lambda x: x.__rmatmul__(x), "lower", "lower"),
    "torch.linalg.matmul": (lambda x: torch.linalg.matmul(x, x), "lower", "lower"),
    "torch.linalg.multi_dot": (lambda x: torch.linalg.multi_dot([x, x, x]), "lower", "lower"),
    "torch.einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), "lower", "lower"),
    "torch.inner": (lambda x: torch.inner(x, x), "lower", None),  # tensordot, by the widest input
    "torch.nn.functional.linear": (lambda x: F.linear(x, x), "lower", "lower"),
    "torch.special.softmax": (lambda x: torch.special.softmax(x, 1), None, "float32"),
    "torch.special.expm1": (torch.special.expm1, None, "float32"),
    "torch.nn.functional.log_softmax": (lambda x: F.log_softmax(x, 1), None, "float32"),
    "torch.nn.functional.cross_entropy": (cross_entropy, "float32", "float32"),
    "torch.nn.functional.normalize": (lambda x: F.normalize(x), None, "float32"),
    "torch.linalg.norm": (torch.linalg.norm, None, "float32"),
    "torch.norm": (torch.norm, None, "float32"),
    "x ** 2": (lambda x: x**2, None, "float32"),
    "2 ** x": (lambda x: 2**x, None, "float32"),
    "x.__pow__": (lambda x: x.__pow__(1.5), None, "float32"),
    "torch.nn.functional.layer_norm": (lambda x: F.layer_norm(x, (8,)), None, "float32"),
    "torch.nn.functional.gelu": (F.gelu, None, None),
    "torch.relu": (torch.relu, None, None),
    "torch.sum": (torch.sum, None, "float32"),
    "torch.mean": (torch.mean, None, None),
    "torch.sigmoid": (torch.sigmoid, None, None),
}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names(name, low):
    """A5: operators, and functions that reach an operation of another name, on the CPU and on fake CUDA tensors."""
    function, cpu, cuda = OTHER_NAMES[name]
    x = samples.Make().normal(8, 8)
    for rule, cuda_too in ((cpu, False), (cuda, True)):
        given = x if rule == "lower" else x.to(low)
        if cuda_too:
            with fake_cuda(low):
                got = function(torch.empty(8, 8, dtype=given.dtype, device="cuda"))
        else:
            with torch.autocast("cpu", dtype=low):
                got = function(given)
            want = function(given.to(torch.float32 if rule == "float32" else low))
            assert_equal([got], [want], name)
        assert got.dtype is (torch.float32 if rule == "float32" else low)


@pytest.mark.cuda
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_on_cuda(name, low):
    """A5: the same on a GPU. Values are compared where the same kernel can be had by hand."""
    function, _, rule = OTHER_NAMES[name]
    x = samples.Make().normal(8, 8).cuda()
    given = x if rule == "lower" else x.to(low)
    with torch.autocast("cuda", dtype=low):
        got = function(given)
    assert got.dtype is (torch.float32 if rule == "float32" else low)
    if rule == "lower":
        assert_equal([got], [function(given.to(low))], name)


def modules() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(2)
    return {
        "Linear": (nn.Linear(8, 8), (4, 8)),
        "Bilinear": (nn.Bilinear(8, 8, 4), (4, 8)),
        "Conv1d": (nn.Conv1d(8, 8, 3), (2, 8, 9)),
        "Conv2d": (nn.Conv2d(8, 8, 3, groups=2, padding=1), (2, 8, 9, 9)),
        "Conv3d": (nn.Conv3d(8, 8, 3, stride=2), (2, 8, 5, 5, 5)),
        "ConvTranspose1d": (nn.ConvTranspose1d(8, 8, 3), (2, 8, 9)),
        "ConvTranspose2d": (nn.ConvTranspose2d(8, 8, 3, stride=2), (2, 8, 5, 5)),
        "ConvTranspose3d": (nn.ConvTranspose3d(8, 8, 3), (2, 8, 4, 4, 4)),
        "PReLU": (nn.PReLU(8), (4, 8)),
        "RNNCell": (nn.RNNCell(8, 8), (4, 8)),
        "LSTMCell": (nn.LSTMCell(8, 8), (4, 8)),
        "GRUCell": (nn.GRUCell(8, 8), (4, 8)),
        "RNN": (nn.RNN(8, 8), (5, 4, 8)),
        "LSTM": (nn.LSTM(8, 8), (5, 4, 8)),
        "GRU": (nn.GRU(8, 8), (5, 4, 8)),
        "MultiheadAttention": (nn.MultiheadAttention(8, 2), (5, 4, 8)),
    }


MODULES = list(modules())
CUDNN_MODULES = {"RNN", "LSTM", "GRU"}  # in float16 on CUDA, under bfloat16 too: see ALWAYS_FLOAT16
# As it is: autocast has no kernel for these cells on the CPU, where the gates are low and the state stays float32.
FLOAT32_MODULES = {"cpu": {"Bilinear", "LSTMCell", "GRUCell", "GRU"}, "cuda": {"Bilinear"}}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", MODULES)
def test_module(device, low, name):
    """A1: modules (convolutions, RNN cells and layers, attention) equal the same module and input cast by hand."""
    module, shape = modules()[name]
    module = module.to(device)
    x = samples.Make().normal(*shape).to(device)
    args = (x,) * {"Bilinear": 2, "MultiheadAttention": 3}.get(name, 1)
    with torch.no_grad():
        with torch.autocast(device, dtype=low):
            got, error = outcome(lambda: module(*args))
        used = torch.float16 if device == "cuda" and name in CUDNN_MODULES else low
        want, refused = outcome(lambda: module.to(used)(*samples.cast(args, used)))
    assert not refused
    if error:  # by hand a kernel of torch's own runs; autocast always takes oneDNN's, which not every CPU has
        assert (device, name) == ("cpu", "LSTM")
        assert not onednn_computes_in(low)
        assert NO_PRIMITIVE in error
    elif name in FLOAT32_MODULES[device]:
        assert {x.dtype for x in samples.tensors(got)} == {torch.float32}
    elif (device, name) == ("cuda", "MultiheadAttention"):  # softmax inside runs in float32, by hand it does not
        assert got[0].dtype is low
    else:
        assert_equal(list(samples.tensors(got)), list(samples.tensors(want)), name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("mask", ["none", "causal", "float"])
def test_attention(device, low, mask):
    """A1: scaled_dot_product_attention, masked too: forward and gradients equal those on inputs cast by hand."""
    make = samples.Make()
    q, k, v = (make.normal(2, 2, 16, 8).to(device).requires_grad_() for _ in range(3))
    bias = make.normal(16, 16).to(device) if mask == "float" else None

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=mask == "causal")
        return [out, *torch.autograd.grad(out.float().sum(), (q, k, v))]

    by_hand = [x.detach().to(low).requires_grad_() for x in (q, k, v)]
    with deterministic():
        with torch.autocast(device, dtype=low):
            got = attend(q, k, v, bias)
        want = attend(*by_hand, bias if bias is None else bias.to(low))
    assert got[0].dtype is low
    assert_equal(got, [want[0], *(grad.float() for grad in want[1:])], mask)


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_in_place(device):
    """A5: autocast leaves in-place and out= forms alone: the caller chose the dtype of the result."""
    make = samples.Make()
    x, y, out = (make.normal(8, 8).to(device) for _ in range(3))
    low = x.bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(torch.mm(x, y, out=out), by_hand_mm(x, y))
        assert torch.equal(out.clone().addmm_(x, y), torch.addmm(out, x, y, out=torch.empty_like(out)))
        assert low.clone().exp_().dtype is torch.bfloat16
        with pytest.raises(RuntimeError):
            x.clone().addmm_(low, y)


def by_hand_mm(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return torch.mm(x, y)


@pytest.mark.parametrize("device", DEVICES)
def test_a_dtype_that_the_caller_gives(device):
    """A2: the operations that take a dtype keep the caller's."""
    x = samples.Make().normal(8, 8).to(device).half()
    with torch.autocast(device, dtype=torch.float16):
        for function in (torch.sum, torch.prod, torch.linalg.vector_norm):
            assert function(x, dtype=torch.float64).dtype is torch.float64
        for function in (torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod):
            assert function(x, 1, dtype=torch.float64).dtype is torch.float64
        assert torch.sum(x, dtype=torch.float16).dtype is torch.float16
