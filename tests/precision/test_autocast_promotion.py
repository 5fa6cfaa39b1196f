"""Autocast and type promotion: widest-type operations, those with promotion of their own, and what is left alone."""

import itertools
from typing import Any

import autocast_samples as samples
import pytest
import torch
from autocast_samples import KINDS, LOW, RULE, Call, fake_cuda, inputs_of, on_fake_cuda, outcome
from harness import DEVICES, bits, onednn_computes_in

pytestmark = [
    pytest.mark.filterwarnings("ignore:Named tensors:UserWarning"),
    # From torch 2.15 what the C++ below `torch.ops` warns of is a Python warning; before, it was printed.
    pytest.mark.filterwarnings(r"ignore:torch\.\w+ is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim:UserWarning"),
]

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGRAL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
# Complex numbers of two float16, and in torch 2.14 of two bfloat16 too, which were complex64 before: few kernels.
HALF_COMPLEX = [torch.complex32, getattr(torch, "bcomplex32", torch.complex32)]
DTYPES = INTEGRAL + FLOATING + COMPLEX
PAIRS = list(itertools.product(DTYPES, DTYPES))


def per_device(rules: tuple[str, ...]) -> list[Any]:
    """Return (device, op) for the operations of these rules, with CUDA's marked."""
    return [
        pytest.param(device, op, marks=[pytest.mark.cuda] if device == "cuda" else [], id=f"{device}-{op}")
        for device in KINDS
        for op in samples.exercised(device)
        if RULE[device][op] in rules
    ]


WIDEST = per_device(("promote",))
FAKE_WIDEST = [op for op in samples.exercised("cuda") if RULE["cuda"][op] == "promote"]


def floating_leaves(call: Call) -> int:
    return sum(samples.eligible(x) for x in samples.tensors(call))


def in_dtypes(op: str, dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> Call:
    """Return the sample call with its floating tensors, one after the other, in these dtypes."""
    turns = itertools.cycle(dtypes)
    call = samples.sample(op, lambda x: x.to(device))
    return samples.mapped(call, lambda x: x.to(next(turns)) if samples.eligible(x) else x)


def widest(dtypes: tuple[torch.dtype, ...], low: torch.dtype) -> torch.dtype:
    return torch.float32 if torch.float32 in dtypes else low


def combinations(low: torch.dtype, leaves: int) -> list[tuple[torch.dtype, ...]]:
    return list(itertools.product((low, torch.float32), repeat=min(leaves, 3)))


@pytest.mark.parametrize(("device", "op"), WIDEST)
@pytest.mark.parametrize("low", LOW)
def test_widest(device, op, low):
    """A3: every combination of low and float32 inputs promotes to the widest, bit by bit as cast by hand."""
    function = samples.overload(op)
    for dtypes in combinations(low, floating_leaves(samples.sample(op))):
        call = in_dtypes(op, dtypes, device)
        with torch.autocast(device, dtype=low):
            got = function(*call.args, **call.kwargs)
        hand = samples.cast(call, widest(dtypes, low))
        want = function(*hand.args, **hand.kwargs)
        assert got.dtype is want.dtype is widest(dtypes, low)
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(("device", "op"), WIDEST)
@pytest.mark.parametrize("low", LOW)
def test_widest_refuses_another_low_dtype(device, op, low):
    """A3: a low-precision dtype other than autocast's is an error that names the dtype as the problem.

    As it is: torch looks no further once it has met a float32 tensor, and then everything runs in float32.
    """
    other = LOW[1 - LOW.index(low)]
    for dtypes in [(other,), (other, torch.float32), (low, other)]:
        call = in_dtypes(op, dtypes, device)
        with torch.autocast(device, dtype=low), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            samples.overload(op)(*call.args, **call.kwargs)
    call = in_dtypes(op, (torch.float32, other), device)
    with torch.autocast(device, dtype=low):
        assert samples.overload(op)(*call.args, **call.kwargs).dtype is torch.float32


@pytest.mark.parametrize("op", FAKE_WIDEST)
@pytest.mark.parametrize("low", LOW)
def test_widest_on_fake_cuda_tensors(op, low):
    """A3: the same rules of CUDA, without a GPU."""
    function, other = samples.overload(op), LOW[1 - LOW.index(low)]
    with fake_cuda(low):
        for dtypes in combinations(low, floating_leaves(samples.sample(op))):
            call = on_fake_cuda(in_dtypes(op, dtypes))
            assert function(*call.args, **call.kwargs).dtype is widest(dtypes, low)
        call = on_fake_cuda(in_dtypes(op, (other,)))
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            function(*call.args, **call.kwargs)


# Operations that promote by themselves: autocast leaves them to torch's table.

BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(torch.ones_like(x, dtype=torch.bool), x, y),
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "x.add": lambda x, y: x.add(y),
    "x.mul": lambda x, y: x.mul(y),
}
COMPARE = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "x == y": lambda x, y: x == y,
    "x < y": lambda x, y: x < y,
    "x.__ge__": lambda x, y: x.__ge__(y),
}
JOIN = {"cat": lambda x, y: torch.cat([x, y]), "stack": lambda x, y: torch.stack([x, y])}
UNDEFINED = {
    "sub": lambda x, y: torch.bool in (x, y),
    "x - y": lambda x, y: torch.bool in (x, y),
    "floor_divide": lambda x, y: x.is_complex or y.is_complex or x is y is torch.bool,
    "remainder": lambda x, y: x.is_complex or y.is_complex or x is y is torch.bool,
    "maximum": lambda x, y: x.is_complex or y.is_complex,
    **dict.fromkeys(
        ["lt", "le", "gt", "ge", "x < y", "x.__ge__"], lambda x, y: x.is_complex or y.is_complex
    ),  # complex numbers have no order
}


def values(dtype: torch.dtype, device: str, ndim: int = 1) -> torch.Tensor:
    numbers = torch.tensor([1.0, 2.0, 3.0] if ndim else 2.0)
    return numbers.to(dtype).to(device)


def promoted(name: str, x: torch.Tensor, y: torch.Tensor) -> torch.dtype:
    """Return the dtype that torch's table gives."""
    if name in COMPARE:
        return torch.bool
    dtype = torch.result_type(x, y)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return torch.get_default_dtype() if whole and name in ("div", "x / y") else dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*BINARY, *COMPARE])
def test_built_in_promotion(device, name):
    """A4: arithmetic and comparison follow torch.result_type in all dtype pairs, under autocast as without."""
    function, undefined = {**BINARY, **COMPARE}[name], UNDEFINED.get(name, lambda x, y: False)
    done = 0
    for (a, b), (m, n) in itertools.product(PAIRS, [(1, 1), (1, 0), (0, 1)]):
        x, y = values(a, device, m), values(b, device, n)
        if undefined(a, b) or torch.result_type(x, y) in HALF_COMPLEX:
            continue
        want = function(x, y)
        assert want.dtype is promoted(name, x, y), f"{a}, {b}"
        for low in LOW:
            with torch.autocast(device, dtype=low):
                got = function(x, y)
            assert got.dtype is want.dtype, f"{a}, {b} under {low}"
            assert torch.equal(got, want), f"{a}, {b} under {low}"
        done += 1
    assert done >= 3 * (len(DTYPES) - 2) ** 2 - 3 * 36


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["add_", "mul_", "sub_"])
def test_promotion_in_place(device, name):
    """A4: in place the left side keeps its dtype, or torch refuses: autocast changes neither."""
    for (a, b), low in itertools.product(PAIRS, LOW):
        x, y = values(a, device), values(b, device)
        if UNDEFINED.get(name.rstrip("_"), lambda a, b: False)(a, b) or torch.result_type(x, y) in HALF_COMPLEX:
            continue
        with torch.autocast(device, dtype=low):
            got, error = outcome(lambda x=x, y=y: getattr(x.clone(), name)(y))
        assert bool(error) != torch.can_cast(torch.result_type(x, y), a), f"{a}, {b}"
        assert error or got.dtype is a


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [True, 2, 2.5, 1 + 2j])
def test_promotion_with_a_python_number(device, number):
    """A4: a number beside a tensor raises the kind of the dtype at most, not its width."""
    for dtype in DTYPES:
        x = values(dtype, device)
        want = torch.result_type(x, number)
        for low in LOW if want not in HALF_COMPLEX else []:
            with torch.autocast(device, dtype=low):
                assert (x * number).dtype is (number * x).dtype is want
                assert (x == number).dtype is torch.bool


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", JOIN)
@pytest.mark.parametrize("low", LOW)
def test_join(device, name, low):
    """A4: cat and stack follow torch.promote_types in all pairs; on the CPU they are widest-type operations besides."""
    other = LOW[1 - LOW.index(low)]
    for a, b in PAIRS:
        x, y = values(a, device), values(b, device)
        with torch.autocast(device, dtype=low):
            got, error = outcome(lambda x=x, y=y: JOIN[name](x, y))
        if device == "cpu" and (a is other or (b is other and a is not torch.float32)):
            assert "Unexpected floating ScalarType" in error, f"{a}, {b}"
        else:
            assert not error
            assert got.dtype is torch.promote_types(a, b), f"{a}, {b}"
            assert torch.equal(got, JOIN[name](x, y)), f"{a}, {b}"


# float64 and integers.

LOWER = per_device(("lower",))
OTHERS = per_device(("float32", "float32 dtype argument", "promote"))
# Kernels that do not exist in float64.
NO_FLOAT64 = {"mkldnn_rnn_layer", "_scaled_dot_product_flash_attention", "_grid_sampler_2d_cpu_fallback"}
# As it is: these take float64 beside another dtype also without autocast.
PROMOTE_FLOAT64 = {"conv_tbc"}
# As it is: torch's own kernels behind these take a bias of another dtype, also without autocast. oneDNN's refuse it.
BIAS_UNCHECKED = {
    "_convolution.deprecated",
    "conv1d.padding",
    "conv2d.padding",
    "conv3d.padding",
    "conv_transpose1d",
    "conv_transpose2d.input",
}
# cuDNN's RNN does not look at the dtype of every argument.
UNCHECKED = {"_cudnn_rnn"}


def all_float64(op: str, device: str) -> Call:
    return samples.sample(op, lambda x: (x.double() if samples.eligible(x) else x).to(device))


@pytest.mark.parametrize(("device", "op"), LOWER + OTHERS)
@pytest.mark.quick(4)
def test_float64_is_left_alone(device, op):
    """A7: with float64 inputs every operation does under autocast what it does without."""
    call = all_float64(op, device)
    function = samples.overload(op)
    with torch.no_grad():
        want, refused = outcome(lambda: function(*call.args, **call.kwargs))
        with torch.autocast(device, dtype=torch.bfloat16):
            got, error = outcome(lambda: function(*call.args, **call.kwargs))
    assert error == refused
    assert not refused or op in NO_FLOAT64
    for x, y in zip(samples.tensors(got), samples.tensors(want), strict=True):
        assert x.dtype is y.dtype
        assert x.dtype not in (torch.bfloat16, torch.float32, torch.complex64)


def with_one_float64(op: str, last: bool, device: str) -> Call:
    """Return the sample call with the first or the last floating tensor in float64."""
    call = samples.sample(op, lambda x: x.to(device))
    found = [x for x in samples.tensors(call) if samples.eligible(x)]
    chosen = found[-1 if last else 0]
    return samples.mapped(call, lambda x: x.double() if x is chosen else x)


@pytest.mark.parametrize(("device", "op"), LOWER)
@pytest.mark.parametrize("last", [False, True])
def test_float64_mixed_in_raises(device, op, last):
    """A7: float64 in a lower-precision operation is not cast to fit: the error is that of float64 beside bfloat16."""
    if op in UNCHECKED:
        pytest.skip("the kernel takes what it gets")
    call, function = with_one_float64(op, last, device), samples.overload(op)
    low = samples.cast(call, torch.bfloat16)
    with torch.no_grad():
        want, refused = outcome(lambda: function(*low.args, **low.kwargs))
        with torch.autocast(device, dtype=torch.bfloat16):
            got, error = outcome(lambda: function(*call.args, **call.kwargs))
    assert error == refused
    if last and device == "cpu" and op in BIAS_UNCHECKED:  # the last tensor is the bias
        assert bool(error) is onednn_computes_in(torch.bfloat16)
    else:
        assert error or op in PROMOTE_FLOAT64 or device == "cuda", "some kernels of CUDA take a bias of another dtype"
    assert [x.dtype for x in samples.tensors(got)] == [x.dtype for x in samples.tensors(want)]


PRODUCTS = {
    "mm": lambda x, y: torch.mm(x, y),
    "matmul": lambda x, y: x @ y,
    "mv": lambda x, y: torch.mv(x, y[0]),
    "bmm": lambda x, y: torch.bmm(x[None], y[None]),
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "linear": lambda x, y: torch.nn.functional.linear(x, y),
    "addmm": lambda x, y: torch.addmm(x, x, y),
    "conv1d": lambda x, y: torch.nn.functional.conv1d(x[None], y[None]),
    "conv2d": lambda x, y: torch.nn.functional.conv2d(x[None, None], y[None, None]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_float64_beside_float32_in_a_product(device, name):
    """A7: with float64 on one side, products and convolutions raise; with float64 on both, they are float64."""
    x = samples.Make().normal(8, 8).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for pair in ((x.double(), x), (x, x.double())):
            with pytest.raises(RuntimeError):
                PRODUCTS[name](*pair)
        got = PRODUCTS[name](x.double(), x.double())
    assert torch.equal(got, PRODUCTS[name](x.double(), x.double()))
    assert got.dtype is torch.float64


@pytest.mark.parametrize("device", DEVICES)
def test_integers_are_left_alone(device):
    """A7: integer and bool tensors are never cast."""
    x = torch.arange(1, 5, device=device)
    for low in LOW:
        with torch.autocast(device, dtype=low):
            for function in (torch.sum, torch.prod, lambda x: torch.cumsum(x, 0), lambda x: x**2):
                assert function(x).dtype is torch.int64
            assert torch.exp(x).dtype is torch.float32, "by torch's own promotion"
            assert torch.cat([x, x]).dtype is torch.stack([x, x]).dtype is torch.int64
            assert (x > 2).sum().dtype is torch.int64
            assert torch.nn.functional.one_hot(x).dtype is torch.int64


@pytest.mark.parametrize("op", ["mm", "matmul", "bmm", "addmm", "addbmm", "baddbmm"])
def test_integer_products(op):
    """A7: integer products stay integer, with the values they have without autocast. (CUDA has no such kernels.)"""
    call = samples.sample(op, lambda x: (x * 4).long())
    call = Call(call.args, {})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = samples.overload(op)(*call.args)
    assert got.dtype is torch.int64
    assert torch.equal(got, samples.overload(op)(*call.args))


@pytest.mark.parametrize("device", DEVICES)
def test_complex_is_left_alone(device):
    """A7: complex products are complex."""
    make = samples.Make()
    x = make.complex(8, 8).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = x @ x
    assert got.dtype is torch.complex64
    assert torch.equal(torch.view_as_real(got), torch.view_as_real(x @ x))


@pytest.mark.parametrize("low", LOW)
def test_other_device_is_left_alone(low):
    """A7: autocast of one device type does not touch tensors of another."""
    x = torch.ones(4, 4)
    with fake_cuda(low):
        y = torch.empty(4, 4, device="cuda")
        z = torch.empty(4, 4)
        assert (y @ y).dtype is low
        assert (z @ z).dtype is torch.float32
    with torch.autocast("cpu", dtype=low):
        assert (x @ x).dtype is low
    assert inputs_of("mm", (torch.float32,)).args[0].dtype is torch.float32
