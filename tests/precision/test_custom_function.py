"""custom_fwd and custom_bwd: torch's contract, and what torch's lacks."""

import collections
import dataclasses
import inspect
import re
import threading
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness import DEVICES, ENGINES, assert_same, bits
from torch import Tensor
from torch.autograd import Function

import ampkit

ROOT = Path(__file__).parents[2]
LOW = [torch.float16, torch.bfloat16]


def both(kind, **options):
    """Return the decorators of torch and of ampkit, with the same arguments as far as torch has them."""
    return [
        (torch.amp.custom_fwd(device_type=kind, **options), torch.amp.custom_bwd(device_type=kind)),
        (ampkit.custom_fwd(**options), ampkit.custom_bwd),
        (ampkit.custom_fwd(device_type=kind, **options), torch.amp.custom_bwd(device_type=kind)),
        (torch.amp.custom_fwd(device_type=kind, **options), ampkit.custom_bwd()),
    ]


DECORATORS = ["torch", "ampkit", "ampkit forward, torch backward", "torch forward, ampkit backward"]


def make_matmul(fwd, bwd, seen):
    """Return a Function that multiplies two matrices and notes under which autocast."""

    class Matmul(Function):
        @staticmethod
        @fwd
        def forward(ctx, a, b):
            seen.append(("forward", torch.is_autocast_enabled(a.device.type), a.dtype, b.dtype))
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            kind = grad.device.type
            seen.append(("backward", torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), grad.dtype))
            return grad.mm(b.t()), a.t().mm(grad)

    return Matmul


def make_matmul_with_setup(amp_fwd, seen, bwd=ampkit.custom_bwd):
    class Matmul(Function):
        @staticmethod
        @amp_fwd
        def forward(a, b):
            seen.append(("forward", torch.is_autocast_enabled(a.device.type), a.dtype, b.dtype))
            return a.mm(b)

        @staticmethod
        @amp_fwd
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            seen.append(("backward", torch.is_autocast_enabled(grad.device.type), a.dtype, grad.dtype))
            return grad.mm(b.t()), a.t().mm(grad)

    return Matmul


def matrices(device, dtype=torch.float32, **kwargs):
    made = torch.Generator().manual_seed(5)
    return [torch.randn(4, 4, generator=made).to(device, dtype).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("which", range(4), ids=DECORATORS)
def test_backward_runs_under_the_autocast_of_forward(device, low, which):
    """A10: autocast is on inside forward and backward alike, though backward is called outside."""
    seen = []
    matmul = make_matmul(*both(device)[which], seen)
    a, b = matrices(device)
    with torch.autocast(device, dtype=low):
        out = matmul.apply(a, b)
    out.float().sum().backward()
    assert seen == [
        ("forward", True, torch.float32, torch.float32),
        ("backward", True, low, low),
    ]
    assert out.dtype is low
    ones = torch.ones(4, 4, device=device, dtype=low)
    assert torch.equal(a.grad, ones.mm(b.detach().to(low).t()).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", range(4), ids=DECORATORS)
def test_no_op_outside_autocast(device, which):
    """A10: outside autocast nothing is cast, and backward stays outside even where it is called inside."""
    seen = []
    matmul = make_matmul(*both(device, cast_inputs=torch.float16)[which], seen)
    a, b = matrices(device)
    out = matmul.apply(a, b)
    with torch.autocast(device, dtype=torch.bfloat16):
        out.sum().backward()
    assert [(where, on) for where, on, *_ in seen] == [("forward", False), ("backward", False)]
    assert out.dtype is a.grad.dtype is torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", range(4), ids=DECORATORS)
def test_cast_inputs(device, to, which):
    """A10: cast_inputs casts and switches autocast off inside forward and backward; gradients have the input dtype."""
    seen = []
    matmul = make_matmul(*both(device, cast_inputs=to)[which], seen)
    a, b = matrices(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = matmul.apply(a, b)
        out.float().sum().backward()
    assert [item[:2] for item in seen] == [("forward", False), ("backward", False)]
    assert seen[0][2:] == (to, to)
    assert out.dtype is to
    assert a.grad.dtype is torch.float32
    assert torch.equal(out.detach(), a.detach().to(to).mm(b.detach().to(to)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", range(2), ids=DECORATORS[:2])
def test_cast_inputs_leaves_other_tensors_alone(device, which):
    """A10: float64, integer and bool tensors are not cast, nor tensors of another device type."""
    seen = []

    class Look(Function):
        @staticmethod
        @both(device, cast_inputs=torch.float16)[which][0]
        def forward(ctx, *inputs):
            seen.extend(value.dtype for value in inputs)
            return inputs[0].clone()

    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
    inputs = [torch.ones(2, device=device).to(dtype) for dtype in dtypes]
    with torch.autocast(device, dtype=torch.float16):
        Look.apply(*inputs, torch.ones((), device="cpu" if device == "cuda" else "meta"))
    assert seen == [torch.float16, torch.float16, *dtypes[2:], torch.float32]


class Pair(NamedTuple):
    left: Tensor
    right: object


class Bag(dict):
    """A dict with an attribute."""

    tag = ""


@dataclasses.dataclass
class Batch:
    images: Tensor
    labels: Tensor
    scale: float = 2.0
    derived: object = dataclasses.field(init=False, default=None)


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Batch
    more: tuple


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


def make_tree(device):
    def x():
        return torch.ones(2, device=device)

    bag = Bag(x=x())
    bag.tag = "kept"
    missing = collections.defaultdict(list, {"x": x()})
    batch = Batch(x(), torch.ones(2, dtype=torch.int64, device=device))
    batch.derived = [x()]
    return {
        "tuple": (x(), x().double(), "text", None, 3),
        "list": [x(), [x()]],
        "named": Pair(x(), {"deep": x()}),
        "bag": bag,
        "missing": missing,
        "ordered": collections.OrderedDict(b=x(), a=x()),
        "dataclass": batch,
        "frozen": Frozen(batch, (x(),)),
        "slotted": Slotted(x()),
        "set": {x()},
        "packed": torch.nn.utils.rnn.pack_sequence([x()]),
        "proxy": types.MappingProxyType({"x": x()}),
    }


def cast_by(decorate, value, device):
    """Return what a forward decorated so gets for this argument."""
    got = []

    @decorate
    def forward(ctx, x, value):
        got.append(value)
        return x.clone()

    look = type("Look", (Function,), {"forward": staticmethod(forward)})
    with torch.autocast(device, dtype=torch.bfloat16):
        look.apply(torch.ones(2, device=device), value)
    return got[0]


@pytest.mark.parametrize("device", DEVICES)
def test_cast_inputs_reaches_into_containers(device):
    """A10: tuples, lists, sets, dicts, their subclasses, namedtuples, dataclasses (frozen too) keep their type."""
    low = torch.bfloat16
    tree = make_tree(device)
    got = cast_by(ampkit.custom_fwd(cast_inputs=low), tree, device)
    assert [got["tuple"][0].dtype, got["tuple"][1].dtype, *got["tuple"][2:]] == [low, torch.float64, "text", None, 3]
    assert got["list"][0].dtype is got["list"][1][0].dtype is low
    assert type(got["named"]) is Pair
    assert got["named"].left.dtype is got["named"].right["deep"].dtype is low
    assert type(got["bag"]) is Bag
    assert (got["bag"].tag, got["bag"]["x"].dtype) == ("kept", low)
    assert (got["missing"]["x"].dtype, got["missing"]["new"]) == (low, [])
    assert type(got["ordered"]) is collections.OrderedDict
    assert list(got["ordered"]) == ["b", "a"]
    batch = got["dataclass"]
    assert type(batch) is Batch
    assert (batch.images.dtype, batch.labels.dtype, batch.scale, batch.derived[0].dtype) == (low, torch.int64, 2.0, low)
    assert type(got["frozen"]) is Frozen
    assert got["frozen"].inner.images.dtype is got["frozen"].more[0].dtype is low
    assert got["slotted"].x.dtype is low
    assert next(iter(got["set"])).dtype is low
    assert type(got["packed"]) is torch.nn.utils.rnn.PackedSequence
    assert got["packed"].data.dtype is low
    assert got["proxy"]["x"].dtype is low
    assert tree["tuple"][0].dtype is tree["dataclass"].images.dtype is torch.float32, (
        "the caller's own are as they were"
    )


@pytest.mark.parametrize("which", range(2), ids=DECORATORS[:2])
def test_containers_as_torch_casts_them(which):
    """A10: where torch's own custom_fwd knows the container, ampkit's gives the same."""
    x = torch.ones(2)
    fwd = both("cpu", cast_inputs=torch.bfloat16)[which][0]
    got = cast_by(fwd, {"a": [x, (x, "text")], "b": {"c": x.double()}}, "cpu")
    assert (got["a"][0].dtype, got["a"][1][0].dtype, got["b"]["c"].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
    )
    assert [type(got), type(got["a"]), type(got["a"][1])] == [dict, list, tuple]
    assert [item.dtype for item in cast_by(fwd, iter([x, x]), "cpu")] == [torch.bfloat16] * 2


def test_what_needs_no_cast_is_not_copied():
    """A10: a container without an eligible tensor is the caller's own object, not rebuilt."""
    for value in (
        {"x": torch.ones(2, dtype=torch.int64)},
        Batch(torch.ones(2).double(), torch.ones(2).double()),
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
        Bag,
        Batch,
    ):
        assert cast_by(ampkit.custom_fwd(cast_inputs=torch.bfloat16), value, "cpu") is value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast_inputs", [None, torch.float32])
def test_setup_context(device, cast_inputs):
    """A10: a forward without ctx works, and nothing is written onto the user's tensors."""
    seen = []
    matmul = make_matmul_with_setup(ampkit.custom_fwd(cast_inputs=cast_inputs), seen)
    a, b = (x.detach().to(torch.float16).requires_grad_() for x in matrices(device))
    before = dict(vars(a))
    with torch.autocast(device, dtype=torch.float16):
        out = matmul.apply(a, b)
        out.sum().backward()
    used = cast_inputs or torch.float16
    assert seen == [("forward", cast_inputs is None, used, used), ("backward", cast_inputs is None, used, used)]
    assert vars(a) == before
    assert a.grad.dtype is torch.float16


def test_torch_writes_onto_the_tensor():
    """A10: torch's decorator does: the day it no longer does, the page on custom functions must say so."""
    x = torch.ones(2, requires_grad=True)

    class Double(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    Double.apply(x)
    assert hasattr(x, "_fwd_used_autocast")


def test_setup_context_without_decorator():
    """A10: a setup_context that is not decorated is an error that says what to do."""

    class Double(Function):
        @staticmethod
        @ampkit.custom_fwd
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad):
            return grad * 2

    out = Double.apply(torch.ones(2, requires_grad=True))
    with pytest.raises(ampkit.AmpkitError, match=r"Double.backward.*setup_context"):
        out.sum().backward()


def make_nested(seen):
    """Return a Function whose forward and backward call another one, under the autocast of another dtype."""
    inner = make_matmul_with_setup(ampkit.custom_fwd, seen)

    class Outer(Function):
        @staticmethod
        @ampkit.custom_fwd
        def forward(x, w, low):
            with torch.enable_grad(), torch.autocast(x.device.type, dtype=low):
                y = inner.apply(x.detach().requires_grad_(), w)
            return y.detach().to(x.dtype)

        @staticmethod
        @ampkit.custom_fwd
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs[:2])

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            kind = x.device.type
            ctx.ran_under = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            seen.append(ctx.ran_under)
            return grad @ w.t(), None, None

    return Outer


@pytest.mark.parametrize("device", DEVICES)
def test_nested_calls(device):
    """A10: a Function called inside another one's forward, under another autocast, does not mix up either's state."""
    seen = []
    outer = make_nested(seen)
    a, b = matrices(device)
    outs = []
    for low, other in [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]:
        with torch.autocast(device, dtype=low):
            outs.append(outer.apply(a, b, other))
    outside = outer.apply(a, b, torch.float16)
    seen.clear()
    for out in (outs[1], outside, outs[0]):
        out.sum().backward()
    assert [enabled for enabled, _ in seen] == [True, False, True]
    assert [seen[0][1], seen[2][1]] == [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("device", DEVICES)
def test_threads(device):
    """A10: threads that run the same Function under different autocasts at once get their own state back."""
    seen = {}

    class Note(Function):
        @staticmethod
        @ampkit.custom_fwd
        def forward(x, key):
            barrier.wait(timeout=60)
            return x * 2

        @staticmethod
        @ampkit.custom_fwd
        def setup_context(ctx, inputs, output):
            barrier.wait(timeout=60)
            ctx.key = inputs[1]

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad):
            kind = grad.device.type
            seen[ctx.key] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            return grad * 2, None

    outs = {}

    def work(key, enabled, low):
        with torch.autocast(device, dtype=low, enabled=enabled):
            for i in range(20):
                outs[key, i] = Note.apply(torch.ones(2, device=device, requires_grad=True), (key, i))

    jobs = [(0, True, torch.float16), (1, True, torch.bfloat16), (2, False, torch.bfloat16)]
    barrier = threading.Barrier(len(jobs))
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in outs.values():
        out.sum().backward()
    assert len(seen) == 60
    assert {seen[0, i] for i in range(20)} == {(True, torch.float16)}
    assert {seen[1, i] for i in range(20)} == {(True, torch.bfloat16)}
    assert {seen[2, i][0] for i in range(20)} == {False}


def make_two_outputs(options, with_setup):
    """Return a Function of two outputs, the second not differentiable. Its backward wants forward's own dtypes."""
    grads = []

    class Two(Function):
        if with_setup:

            @staticmethod
            @ampkit.custom_fwd(**options)
            def forward(a, b):
                return a.mm(b), a.detach() * 2

            @staticmethod
            @ampkit.custom_fwd(**options)
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)
                ctx.mark_non_differentiable(output[1])
        else:

            @staticmethod
            @ampkit.custom_fwd(**options)
            def forward(ctx, a, b):
                ctx.save_for_backward(a, b)
                out, noted = a.mm(b), a.detach() * 2
                ctx.mark_non_differentiable(noted)
                return out, noted

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad, _):
            grads.append(grad.dtype)
            a, b = ctx.saved_tensors
            return grad.mm(b.t().to(grad.dtype)), a.t().to(grad.dtype).mm(grad)

    return Two, grads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast_inputs", [None, torch.bfloat16])
@pytest.mark.parametrize("with_setup", [False, True])
def test_cast_outputs(device, cast_inputs, with_setup):
    """A10: cast_outputs equals a cast behind the Function: values, gradients, marks."""
    plain, _ = make_two_outputs({"cast_inputs": cast_inputs}, with_setup)
    ours, grads = make_two_outputs({"cast_inputs": cast_inputs, "cast_outputs": torch.float32}, with_setup)
    results = []
    for function, after in ((plain, lambda x: x.float()), (ours, lambda x: x)):
        a, b = matrices(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            out, noted = (after(x) for x in function.apply(a, b))
        assert out.dtype is noted.dtype is torch.float32
        assert not noted.requires_grad
        assert not vars(out)
        (out * torch.arange(4, device=device)).sum().backward()
        results.append((out, noted, a.grad, b.grad))
    assert grads == [torch.bfloat16]
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert ours.apply(*matrices(device))[0].dtype is torch.float32
    a, b = matrices(device, torch.float16)
    assert ours.apply(a, b)[0].dtype is torch.float16, "a no-op outside autocast"


def test_cast_outputs_of_other_kinds():
    """A10: integer and float64 outputs stay, a namedtuple stays one, a lone output stays alone."""

    class Several(Function):
        @staticmethod
        @ampkit.custom_fwd(cast_outputs=torch.float32)
        def forward(ctx, x, which):
            low = x.to(torch.bfloat16)
            return {"pair": Pair(low, "text"), "mixed": (low.double(), low.long(), None), "one": low}[which]

    x = torch.ones(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair, mixed, one = (Several.apply(x, which) for which in ("pair", "mixed", "one"))
    assert pair[0].dtype is torch.float32
    assert (mixed[0].dtype, mixed[1].dtype, mixed[2]) == (torch.float64, torch.int64, None)
    assert one.dtype is torch.float32


def test_cast_outputs_in_place():
    """A10: an output that forward changed in place cannot be another dtype: ValueError naming the argument."""

    class InPlace(Function):
        @staticmethod
        @ampkit.custom_fwd(cast_outputs=torch.float32)
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="cast_outputs"):
        InPlace.apply(torch.ones(2, dtype=torch.bfloat16))


class Cube(Function):
    """Its second derivative exists only through what it saved."""

    @staticmethod
    @ampkit.custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @ampkit.custom_bwd
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class CubeWithSetup(Function):
    @staticmethod
    @ampkit.custom_fwd(cast_inputs=torch.float32)
    def forward(x):
        return x**3

    @staticmethod
    @ampkit.custom_fwd(cast_inputs=torch.float32)
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @ampkit.custom_bwd
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [Cube, CubeWithSetup])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_double_backward(device, function, dtype):
    """A10: second derivatives reach the inputs, also through the cast that cast_inputs made."""
    x = torch.tensor([1.0, 2.0, -3.0], device=device, dtype=dtype, requires_grad=True)
    with torch.autocast(device, dtype=torch.float16):
        y = function.apply(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(first.detach(), 3 * x.detach() ** 2)
    assert torch.equal(second, 6 * x.detach())
    assert function.apply(x.detach()).dtype is dtype


def test_double_backward_under_autocast():
    """A10: without cast_inputs the backward's own operations are recorded, in autocast's dtype."""
    matmul = make_matmul(ampkit.custom_fwd, ampkit.custom_bwd, [])
    got = []
    for function in (matmul.apply, torch.mm):
        a, b = matrices("cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(a, b)
        grads = torch.autograd.grad((out.float() ** 2).sum(), (a, b), create_graph=True)
        sum((grad**2).sum() for grad in grads).backward()
        got.append((a.grad, b.grad))
    for ours, plain in zip(*got, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, plain, rtol=2**-6, atol=2**-4)


def test_double_backward_through_a_replaced_output():
    """A10: a saved output that cast_outputs replaced would lose a derivative: an error instead."""

    class Exp(Function):
        @staticmethod
        @ampkit.custom_fwd(cast_outputs=torch.float32)
        def forward(ctx, x):
            y = x.exp().to(torch.bfloat16)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Exp.apply(x)
    with pytest.raises(ampkit.AmpkitError, match="cast_outputs"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"cast_inputs": torch.float32, "cast_outputs": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("with_setup", [False, True])
def test_in_a_captured_step(engine, options, with_setup):
    """A10: a model with a custom function trains in graphed_step as it does eagerly, bit by bit."""
    device, graph = engine
    function = make_silent(options, with_setup)
    trained = []
    for way in ("off", graph):
        torch.manual_seed(6)
        model = torch.nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = ampkit.graphed_step(
            lambda model, x: function.apply(model(x), model.weight).float().square().mean(),
            model,
            optimizer,
            policy="bfloat16",
            graph=way,
        )
        x = matrices(device)[0].detach()
        losses = [step(x).loss for _ in range(6)]
        assert way == "off" or step.replays == 3
        trained.append([bits(tensor) for tensor in [*model.parameters(), *losses]])
    assert_same(*trained)


@pytest.mark.sampled(2)
# torch._dynamo makes an instance itself, also for a plain Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("with_setup", [False, True])
@pytest.mark.parametrize("options", [{}, {"cast_inputs": torch.float32}, {"cast_outputs": torch.float32}], ids=str)
def test_compiled(options, with_setup):
    """A10: traced whole by torch.compile, with the same values and gradients."""
    torch.compiler.reset()
    function = make_silent(options, with_setup)

    def run(a, b):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function.apply(a, b)

    results = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        a, b = matrices("cpu")
        out = call(a, b)
        out.float().sum().backward()
        assert set(vars(out).values()) <= {None}
        results.append((out.detach(), a.grad, b.grad))
    for x, y in zip(*results, strict=True):
        assert x.dtype is y.dtype
        assert torch.equal(x, y)
    torch.compiler.reset()


CONTAINERS = {
    "list": lambda y: [y, [1, None]],
    "tuple": lambda y: (y, "text", 2.5, torch.float32, y.device, y.shape),
    "dict": lambda y: {"y": y},
    "OrderedDict": lambda y: collections.OrderedDict(y=y),
    "namedtuple": lambda y: Pair(y, 3),
    "dataclass": lambda y: Slim(y),
}


@dataclasses.dataclass
class Slim:
    y: Tensor


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.quick(3)
def test_compiled_with_a_container(container):
    """A10: containers among the inputs are cast in a compiled function too."""
    torch.compiler.reset()
    wrap = CONTAINERS[container]

    class Scale(Function):
        @staticmethod
        @ampkit.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x, held):
            if container in ("dict", "OrderedDict"):
                y = held["y"]
            else:
                y = held.y if container == "dataclass" else held[0]
            ctx.save_for_backward(y)
            return x * y

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    def run(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Scale.apply(x, wrap(y))

    x, y = (z.detach().bfloat16() for z in matrices("cpu"))
    x.requires_grad_()
    got = torch.compile(run, backend="aot_eager", fullgraph=True)(x, y)
    assert got.dtype is torch.float32
    assert torch.equal(got, run(x, y))
    got.sum().backward()
    assert torch.equal(x.grad, y)
    torch.compiler.reset()


def make_silent(options, with_setup):
    class Matmul(Function):
        if with_setup:

            @staticmethod
            @ampkit.custom_fwd(**options)
            def forward(a, b):
                return a.mm(b)

            @staticmethod
            @ampkit.custom_fwd(**options)
            def setup_context(ctx, inputs, output):
                ctx.save_for_backward(*inputs)
        else:

            @staticmethod
            @ampkit.custom_fwd(**options)
            def forward(ctx, a, b):
                ctx.save_for_backward(a, b)
                return a.mm(b)

        @staticmethod
        @ampkit.custom_bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            return grad.mm(b.t()), a.t().mm(grad)

    return Matmul


@pytest.mark.parametrize("decorators", [both("cpu")[0], both("cpu")[1]], ids=DECORATORS[:2])
def test_either_order_with_staticmethod(decorators):
    """A10: custom_fwd above or below staticmethod."""
    fwd, bwd = decorators

    class Above(Function):
        @fwd
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @bwd
        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Above.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))


def test_transforms():
    """A10: torch.func's transforms, which need setup_context."""

    class Cubed(CubeWithSetup):
        generate_vmap_rule = True

    x = torch.tensor([1.0, 2.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.func.grad(lambda x: Cubed.apply(x).sum())(x), 3 * x**2)
        assert torch.equal(torch.func.vmap(Cubed.apply)(x), x**3)
        assert torch.equal(torch.func.vmap(torch.func.grad(Cubed.apply))(x), 3 * x**2)


def test_meta_tensors():
    """A10: on a device without autocast the decorators do nothing."""
    a = torch.ones(2, 2, device="meta", requires_grad=True)
    cubed = Cube.apply(a)
    assert (cubed.device.type, cubed.dtype) == ("meta", torch.float32)
    cubed.sum().backward()
    assert a.grad.shape == (2, 2)


def test_a_stand_in_for_ctx():
    """A10: forward called by hand with a stand-in for ctx, as some libraries do for inference."""

    class StandIn:
        def save_for_backward(self, *tensors):
            self.saved_tensors = tensors

    ctx = StandIn()
    x = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Cube.forward(ctx, x).dtype is torch.float32
    assert torch.equal(Cube.backward(ctx, torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.parametrize("name", ["custom_fwd", "custom_bwd"])
def test_accepts_the_arguments_of_torch(name):
    """A10: each argument of torch's, with the same name, kind and at least its default."""
    ours = inspect.signature(getattr(ampkit, name)).parameters
    for key, parameter in inspect.signature(getattr(torch.amp, name)).parameters.items():
        assert ours[key].kind is parameter.kind


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: ampkit.custom_fwd(device_type=torch.device("cpu")), "device_type"),
        (lambda: ampkit.custom_fwd(device_type="gpu"), "device_type='gpu'"),
        (lambda: ampkit.custom_fwd(device_type="meta"), "device_type='meta'"),
        (lambda: ampkit.custom_bwd(device_type="gpu"), "device_type='gpu'"),
        (lambda: ampkit.custom_fwd(cast_inputs="float16"), "cast_inputs='float16'"),
        (lambda: ampkit.custom_fwd(cast_inputs=torch.int32), "cast_inputs=torch.int32"),
        (lambda: ampkit.custom_fwd(cast_outputs=torch.complex64), "cast_outputs=torch.complex64"),
        (lambda: ampkit.custom_fwd("cuda"), "fwd='cuda'"),
        (lambda: ampkit.custom_bwd("cuda"), "bwd='cuda'"),
        (lambda: ampkit.custom_fwd(lambda ctx, n: torch.ones(n))(None, 3), "device_type="),
    ],
)
def test_wrong_use(call, names):
    """A10: ValueError naming the argument."""
    with pytest.raises(ValueError, match=re.escape(names)):
        call()


@pytest.mark.cuda
def test_device_type_of_mixed_inputs():
    """A10: a CPU scalar beside CUDA tensors does not decide."""
    matmul = make_matmul(ampkit.custom_fwd, ampkit.custom_bwd, seen := [])
    a, b = matrices("cuda")

    class Scaled(Function):
        @staticmethod
        @ampkit.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, scale, x):
            seen.append((scale.dtype, x.dtype))
            return x * scale

    with torch.autocast("cuda", dtype=torch.bfloat16):
        matmul.apply(a, b)
        Scaled.apply(torch.ones((), dtype=torch.float16), a.detach().bfloat16())
    assert seen[1] == (torch.float16, torch.float32)


def test_no_deprecated_spelling():
    """A10: nothing of torch.cuda.amp and torch.cpu.amp is used anywhere, but where it is replaced by ampkit's."""
    names = "autocast|GradScaler|custom_fwd|custom_bwd"
    exempt = (Path(__file__).name, "upstream.py")
    deprecated = re.compile(rf"torch\.(cuda|cpu)\.amp\.({names})\b|from torch\.(cuda|cpu)\.amp import")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("ampkit", "docs", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md"} and "_build" not in path.parts and path.name not in exempt
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if deprecated.search(line)
    ]
    assert not found
