"""Policy(ops=...): which calls a rule casts, in which dtype, and the same in eager, compiled and captured runs."""

import contextlib
import operator
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from families import every
from harness import DEVICES, ENGINES, assert_same, deterministic
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy

LOW = [torch.float16, torch.bfloat16]


# Every way to write one operation. Each is a function of a float32 matrix.
SPELLINGS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "softmax": [
        lambda x: F.softmax(x, -1),
        lambda x: torch.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: torch.special.softmax(x, -1),
        nn.Softmax(-1),
    ],
    "layer_norm": [
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: torch.layer_norm(x, list(x.shape[-1:])),
        lambda x: nn.LayerNorm(x.shape[-1], elementwise_affine=False)(x),
    ],
    "add": [lambda x: x + x, lambda x: 1 + x, lambda x: x.add(x), lambda x: torch.add(x, x), lambda x: x.__add__(1)],
    "sub": [lambda x: x - x, lambda x: 1 - x, lambda x: torch.subtract(x, x), lambda x: torch.rsub(x, x)],
    "div": [lambda x: x / x, lambda x: 1 / x, lambda x: x.true_divide(x), lambda x: torch.divide(x, x)],
    "pow": [lambda x: x**2, lambda x: 2**x, lambda x: x.pow(2), lambda x: torch.pow(2, x)],
    "matmul": [lambda x: x @ x.T, lambda x: torch.matmul(x, x.T), lambda x: torch.linalg.matmul(x, x.T)],
    "sigmoid": [torch.sigmoid, F.sigmoid, lambda x: x.sigmoid(), nn.Sigmoid(), torch.special.expit],
    "cat": [lambda x: torch.cat([x, x]), lambda x: torch.concat((x, x)), lambda x: torch.cat(tensors=[x, x])],
    "einsum": [lambda x: torch.einsum("ij,kj->ik", x, x), lambda x: torch.einsum("ij,kj->ik", [x, x])],
    "dropout": [lambda x: F.dropout(x, 0.5, True), nn.Dropout(), lambda x: torch.dropout(x, 0.5, True)],
    "pad": [lambda x: F.pad(x, (1, 1))],
    "hardswish": [F.hardswish, nn.Hardswish()],
    "linalg_norm": [torch.linalg.norm],
    "norm": [torch.norm, lambda x: x.norm()],
    "neg": [lambda x: -x, torch.neg, torch.negative],
}
CASES = [pytest.param(name, i, id=f"{name}-{i}") for name, calls in SPELLINGS.items() for i in range(len(calls))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "i"), CASES)
def test_a_rule_covers_every_spelling(name: str, i: int, device: str) -> None:
    """A11: a name stands for the operation as a function, a method, an operator and in a module."""
    call, x = SPELLINGS[name][i], torch.rand(4, 4, device=device) + 0.1
    policy = Policy(ops={name: "float16"})
    assert call(x).dtype is torch.float32
    with policy.autocast(device):
        assert call(x).dtype is torch.float16
    assert call(x).dtype is torch.float32


@pytest.mark.parametrize("product", [F.grouped_mm, torch._grouped_mm])
def test_a_rule_for_products_of_groups(product: Any) -> None:
    """A11: torch lists neither spelling as one that modes see, and autocast has no rule (pytorch/pytorch#174763)."""
    policy = Policy(compute="bfloat16", ops={F.grouped_mm: "bfloat16"})
    assert policy.ops == (("grouped_mm", torch.bfloat16),)
    x, weight = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 16, requires_grad=True)
    with policy.autocast("cpu"):
        out = product(x, weight, offs=torch.tensor([3, 8], dtype=torch.int32))
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


@pytest.mark.parametrize(("name", "i"), every(5, CASES))
@pytest.mark.sampled(2)
def test_a_rule_covers_every_spelling_when_compiled(name: str, i: int, fresh_dynamo: None) -> None:
    """A11: torch.compile sees the same calls, also where it looks below the Python function."""
    call, x = SPELLINGS[name][i], torch.rand(4, 4) + 0.1
    compiled = torch.compile(lambda y: call(y), backend="eager", fullgraph=True)
    with Policy(ops={name: "float16"}).autocast("cpu"):
        assert compiled(x).dtype is torch.float16
    assert compiled(x).dtype is torch.float32


@pytest.mark.parametrize(
    "key", [F.softmax, torch.softmax, torch.Tensor.softmax, "softmax", "F.softmax", "torch.nn.functional.softmax"]
)
def test_a_function_stands_for_its_operation(key: Any) -> None:
    """Function, method, name and dotted name are one key: torch.compile does not keep them apart either."""
    assert Policy(ops={key: "float16"}).ops == (("softmax", torch.float16),)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("__add__", "add"),
        (operator.attrgetter("__rsub__")(torch.Tensor), "sub"),
        (torch.special.expit, "sigmoid"),
        ("linalg.norm", "linalg_norm"),
        (torch.linalg.norm, "linalg_norm"),
        ("torch.fft.fft", "fft_fft"),
        (torch.concat, "cat"),
        (torch.true_divide, "div"),
    ],
)
def test_aliases(key: Any, name: str) -> None:
    """What torch documents as an alias is the operation itself; linalg and fft keep their prefix."""
    assert Policy(ops={key: "float16"}).ops == ((name, torch.float16),)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("sofmax", r"Policy\(ops=\{'sofmax': ...\}\): .* Did you mean 'softmax'"),
        ("torch.nn.functional.layernorm", "Did you mean 'layer_norm'"),
        ("my.softmax", "Did you mean 'softmax'"),
        ("add_", "works in place, so a cast would make it write into a copy. Give 'add' a rule"),
        (torch.Tensor.mul_, "works in place"),
        ("__iadd__", "works in place.* Give 'add' a rule instead"),
        (nn.LayerNorm, "is a module: give it a rule in Policy.modules=...."),
        (len, "no function or Tensor method of torch"),
        (3, "no function or Tensor method of torch"),
        ("dtype", "no function or Tensor method of torch"),
    ],
)
def test_unknown_operation(key: Any, says: str) -> None:
    """A key that is no operation is a ValueError that names close ones."""
    with pytest.raises(ValueError, match=says):
        Policy(ops={key: "float16"})


def test_every_operation_can_have_a_rule() -> None:
    """Whatever the name, the rule can be made and entered; names of ATen's autocast lists are among them."""
    names: set[str] = set()
    for function in torch.overrides.get_testing_overrides():
        with contextlib.suppress(ValueError):  # of one that works in place, or that is no operation
            names |= dict(Policy(ops={function: "float32"}).ops).keys()
    assert len(names) > 600
    with Policy(ops=dict.fromkeys(names, "float32")).autocast("cpu"):
        assert (torch.ones(2, dtype=torch.float16) + 1).dtype is torch.float32
    assert {"linear", "conv2d", "baddbmm", "layer_norm", "rms_norm", "cdist", "prelu", "index_put"} <= names
    assert not [name for name in names if name.startswith("_") or name.endswith("_")]


def test_wrong_values_and_contradictions() -> None:
    """A wrong dtype lists the legal ones; one operation cannot have two."""
    with pytest.raises(ValueError, match=r"\{'add': 'float8'\}.*float32, float16, bfloat16, promote"):
        Policy(ops={"add": "float8"})
    with pytest.raises(ValueError, match=r"float16 and promote for 'add'"):
        Policy(ops={"add": "float16", torch.add: "promote"})
    assert Policy(ops={"add": "float16", torch.add: torch.float16}).ops == (("add", torch.float16),)
    with pytest.raises(ValueError, match=r"expected a dict of rules"):
        Policy(ops="add")  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("around", ["float32", "float16", "bfloat16"])
def test_autocast_does_not_recast(device: str, around: str) -> None:
    """A11: a rule wins over autocast's own for its float32, its lower-precision and its widest-type operations."""
    x = torch.rand(4, 4, device=device)
    rules = {"softmax": "float16", "linear": "float32", "addcmul": "bfloat16", "mse_loss": "bfloat16"}
    with Policy(compute=around, ops=rules).autocast(device):
        assert F.softmax(x, -1).dtype is torch.float16
        assert F.linear(x.half(), x.bfloat16()).dtype is torch.float32
        assert torch.addcmul(x, x.half(), x).dtype is torch.bfloat16
        assert F.mse_loss(x, x).dtype is torch.bfloat16
        assert torch.mm(x, x).dtype is Policy.parse(around).compute, "without a rule autocast is as it was"


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_those_of_inputs_cast_by_hand(device: str) -> None:
    """A11: bitwise the operation on cast inputs, for results and for gradients in the input's dtype."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    with Policy(compute="bfloat16", ops={"layer_norm": "float16"}).autocast(device):
        out = F.layer_norm(x, (8,), weight)
    got = torch.autograd.grad(out.float().square().sum(), (x, weight))
    by_hand = F.layer_norm(x.half(), (8,), weight.half())
    expected = torch.autograd.grad(by_hand.float().square().sum(), (x, weight))
    assert_same(out, by_hand)
    assert_same(got, expected)
    assert got[0].dtype is torch.float32


@pytest.mark.parametrize(
    ("dtypes", "widest"),
    [
        ((torch.float16, torch.float16), torch.float16),
        ((torch.bfloat16, torch.float32), torch.float32),
        ((torch.float16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.int64), torch.float16),
        ((torch.int64, torch.int64), torch.int64),
        ((torch.float16, torch.float64), torch.float64),
    ],
)
def test_promote(dtypes: tuple[torch.dtype, torch.dtype], widest: torch.dtype) -> None:
    """A11: "promote" casts to the widest floating input; integers and float64 are none of its business."""
    left, right = (torch.ones(3, dtype=dtype) for dtype in dtypes)
    seen: list[torch.dtype] = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.add:
                seen.extend(arg.dtype for arg in args)
            return func(*args, **(kwargs or {}))

    with Spy(), Policy(compute="bfloat16", ops={torch.add: "promote"}).autocast("cpu"):
        assert torch.add(left, right).dtype is widest
    floats = [dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16, torch.float32)]
    common = torch.float32 if len(set(floats)) == 2 else (floats or [None])[0]
    assert seen == [common if dtype in floats else dtype for dtype in dtypes]


class Two(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("rule", ["float16", "promote"])
def test_named_tuples_and_results_of_torch(rule: str, backend: str | None, fresh_dynamo: None) -> None:
    """Sequences that are made of fields, or by torch, go into a ruled operation like plain ones."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack(Two(x, x * 2)), torch.stack(torch.aminmax(x))

    run = call if backend is None else torch.compile(call, backend=backend)
    x = torch.rand(3)
    with Policy(ops={"stack": rule}).autocast("cpu"):
        found = run(x)
    dtype = torch.float16 if rule == "float16" else torch.float32
    assert {part.dtype for part in found} == {dtype}
    assert torch.equal(found[0], torch.stack([x, x * 2]).to(dtype))


def test_promote_makes_a_list_one_dtype() -> None:
    """A11: tensors in containers are inputs too, and a residual branch may be wider than the trunk."""
    low, high = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    with Policy(compute="bfloat16", ops={"cat": "promote", "bmm": "promote"}).autocast("cpu"):
        assert torch.cat([low, low]).dtype is torch.bfloat16
        assert torch.cat([low, high]).dtype is torch.float32
        assert torch.bmm(low.view(1, 1, 2), high.view(1, 2, 1)).dtype is torch.float32


def test_promote_takes_what_autocast_refuses() -> None:
    """A3: the other low precision is an error in autocast's widest-type operations; "promote" makes it float32."""
    pair = [torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]
    with (
        Policy(compute="bfloat16", ops={"softmax": "float16"}).autocast("cpu"),
        pytest.raises(RuntimeError, match=r"Unexpected floating ScalarType"),
    ):
        torch.cat(pair)
    with Policy(compute="bfloat16", ops={"cat": "promote"}).autocast("cpu"):
        assert torch.cat(pair).dtype is torch.float32


def test_only_floating_tensors_of_the_device_are_cast() -> None:
    """A7: integers, float64 and tensors of another device type stay; float64 beside low precision is torch's error."""
    policy = Policy(ops={"add": "float16", "linear": "float16", "embedding": "float16", "softmax": "float16"})
    one = torch.ones(2, 2)
    with policy.autocast("cpu"):
        assert torch.add(one.double(), 1).dtype is torch.float64
        assert torch.add(one.int(), 1).dtype is torch.int32
        assert torch.add(one, one.double()).dtype is torch.float64
        assert F.embedding(torch.tensor([0, 1]), one).dtype is torch.float16
        assert torch.softmax(one.to("meta"), -1).dtype is torch.float32
        with pytest.raises(RuntimeError, match=r"same dtype"):
            F.linear(one, one.double())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.add_(1),
        lambda x: operator.iadd(x, 1),
        lambda x: torch.add(x, 1, out=x),
        lambda x: F.relu(x, inplace=True),
        lambda x: F.relu(x, True),
        lambda x: nn.ReLU(inplace=True)(x),
        lambda x: F.dropout(x, 0.5, True, True),
        lambda x: F.embedding(torch.tensor([0]), x, None, 0.1),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_that_write_into_an_input_are_left_alone(
    call: Callable[[Tensor], Tensor], compiled: bool, fresh_dynamo: None
) -> None:
    """A cast copy would swallow the write, so such calls run as they are, as under autocast."""
    torch.manual_seed(1)
    x, expected = torch.randn(4, 4), torch.randn(4, 4)
    expected.copy_(x)
    torch.manual_seed(2)
    call(expected)
    run = torch.compile(call, backend="eager", fullgraph=True) if compiled else call
    torch.manual_seed(2)
    with Policy(ops=dict.fromkeys(("add", "relu", "dropout", "embedding"), "float16")).autocast("cpu"):
        assert run(x).dtype is torch.float32
    assert_same(x, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keywords", [False, True])
def test_batch_norm_keeps_its_statistics(device: str, keywords: bool) -> None:
    """Running statistics are written into their tensors: only the input is cast, and they are updated in float32."""
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    x = torch.randn(16, 3, device=device)
    with Policy(compute="bfloat16", ops={"batch_norm": "float16"}).autocast(device):
        if keywords:
            out = F.batch_norm(input=x, running_mean=mean, running_var=var, training=True)
        else:
            out = F.batch_norm(x, mean, var, training=True)
    assert out.dtype is torch.float16
    torch.testing.assert_close(mean, 0.1 * x.half().float().mean(0))


def test_rules_belong_to_their_thread() -> None:
    """A11: another thread, running at the same time, has no rules."""
    seen = []

    def other() -> None:
        seen.append(torch.softmax(torch.ones(2), -1).dtype)

    with Policy(ops={"softmax": "float16"}).autocast("cpu"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        seen.append(torch.softmax(torch.ones(2), -1).dtype)
    assert seen == [torch.float32, torch.float16]


def test_scope_ends_with_an_exception_and_nests() -> None:
    """The inner policy's rule wins, and after an error nothing is left behind."""
    x = torch.ones(2)
    outer, inner = Policy(ops={"softmax": "float16", "exp": "float16"}), Policy(ops={"softmax": "bfloat16"})
    with outer.autocast("cpu"):
        with pytest.raises(KeyError), inner.autocast("cpu"):
            raise KeyError
        with inner.autocast("cpu"):
            assert torch.exp(x).dtype is torch.float16, "without a rule of its own the outer one's holds"
        assert torch.softmax(x, -1).dtype is torch.float16
    assert torch.softmax(x, -1).dtype is torch.float32


def test_a_policy_without_rules_is_plain_autocast() -> None:
    """No mode, no cost: what comes back is torch's own context."""
    assert type(Policy.parse("bfloat16").autocast("cpu")) is torch.autocast


def test_survives_pickling() -> None:
    """A policy that came from another process has its rules."""
    policy = pickle.loads(pickle.dumps(Policy(ops={"softmax": "float16"})))
    assert policy == Policy(ops={"softmax": "float16"})
    with policy.autocast("cpu"):
        assert torch.softmax(torch.ones(2), -1).dtype is torch.float16


def test_decorates_a_function() -> None:
    """As torch.autocast does, the context also works as a decorator."""

    @Policy(ops={"softmax": "float16"}).autocast("cpu")
    def run(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    assert [run(torch.ones(2)).dtype for _ in range(2)] == [torch.float16] * 2


def network(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    hidden = F.layer_norm(x @ weight, weight.shape[-1:])
    return hidden, torch.softmax(hidden, -1), hidden + x, F.linear(hidden, weight)


def assert_near(got: Any, expected: Any) -> None:
    for left, right in zip(got, expected, strict=True):
        assert left.dtype is right.dtype
        assert (left - right).norm() < 0.02 * right.norm()


POLICIES = [
    Policy(compute="bfloat16", ops={"softmax": "float16", "layer_norm": "float32", "add": "promote"}),
    Policy(compute="bfloat16", ops={"softmax": "bfloat16", "linear": "float32"}),
    Policy(compute="bfloat16"),
]


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("eager", "cpu"),
        ("aot_eager", "cpu"),
        # Half a minute of C++. test_module_rules.py has a case with Inductor that is no seed.
        pytest.param("inductor", "cpu", marks=[pytest.mark.slow, pytest.mark.seeds]),
        pytest.param("eager", "cuda", marks=pytest.mark.cuda),
        pytest.param("aot_eager", "cuda", marks=pytest.mark.cuda),
        pytest.param("inductor", "cuda", marks=[pytest.mark.cuda, pytest.mark.slow]),
    ],
)
def test_compiled_code_never_serves_the_old_policy(backend: str, device: str, fresh_dynamo: None) -> None:
    """A11: one compiled function, policies alternating: dtypes, results and gradients are eager's each time."""
    runs = 0

    def counted(graph: Any, inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(network, backend=counted, fullgraph=True)
    x = torch.randn(8, 8, device=device, requires_grad=True)
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    for policy in (*POLICIES, *POLICIES[::-1], POLICIES[0]):
        with policy.autocast(device):
            got, expected = compiled(x, weight), network(x, weight)
        assert [out.dtype for out in got] == [out.dtype for out in expected], policy
        grads = [
            torch.autograd.grad(sum(out.float().square().sum() for out in outs), (x, weight))
            for outs in (got, expected)
        ]
        if backend == "inductor":  # keeps more bits between fused operations
            assert_near(got, expected)
        else:
            assert_same(got, expected)
        assert_near(*grads)  # summed in another order
    assert runs == len(POLICIES), "one compilation for each policy"


def test_uncompiled_code_below_a_compiled_call_does_not_compile_the_mode(fresh_dynamo: None) -> None:
    """A graph break in a loop leaves the function to Python, where dynamo would begin to compile at the mode."""

    def network(x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = torch.softmax(x, -1)
        return x

    runs: list[Any] = []
    compiled = torch.compile(network, backend=lambda graph, inputs: runs.append(graph) or graph.forward)
    with POLICIES[0].autocast("cpu"):
        assert compiled(torch.randn(2, 4, requires_grad=True)).dtype is torch.float16
    assert not runs


def test_compiled_code_knows_the_device_type(fresh_dynamo: None) -> None:
    """A11: a rule for CUDA tensors leaves the CPU's alone, also in code that was compiled for the CPU's rule."""
    policy, x = Policy(ops={"softmax": "float16"}), torch.ones(2)
    compiled = torch.compile(lambda x: torch.softmax(x, -1), backend="eager", fullgraph=True)
    for device_type in ("cpu", "cuda", "cpu"):
        with policy.autocast(device_type):
            assert compiled(x).dtype is (torch.float16 if device_type == "cpu" else torch.float32)


def test_context_inside_of_compiled_code(fresh_dynamo: None) -> None:
    """A11: the policy may also be entered by the function that is compiled."""
    policies = [POLICIES[0], POLICIES[1]]

    def run(x: Tensor, which: int) -> Tensor:
        with policies[which].autocast("cpu"):
            return torch.softmax(x, -1)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert [compiled(torch.ones(2), i).dtype for i in (0, 1, 0)] == [torch.float16, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_captured_steps_follow_the_rules(engine: tuple[str, str], compiled: bool, fresh_dynamo: None) -> None:
    """A11: a step replays what eager computes, bit by bit, and the rules show in the dtypes."""
    device, graph = engine
    policy = Policy(compute="bfloat16", ops={"softmax": "float16", "layer_norm": "float32", "add": "promote"})

    def run(graph: str) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1), nn.Linear(8, 8)).to(device)
        if compiled:
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        seen: dict[str, torch.dtype] = {}

        def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
            out = model(x)
            seen.update(out=out.dtype, softmax=torch.softmax(x, -1).dtype, norm=F.layer_norm(out, (8,)).dtype)
            return (out + x).square().mean(), out

        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy=policy, graph=graph, on_failure="raise")
        made = torch.Generator().manual_seed(1)
        outs = [step(torch.randn(4, 8, generator=made).to(device))._asdict() for _ in range(6)]
        assert seen == {"out": torch.bfloat16, "softmax": torch.float16, "norm": torch.float32}
        assert step.replays == (0 if graph == "off" else 3)
        return outs, model.state_dict()

    with deterministic():
        assert_same(run("off"), run(graph))


@pytest.mark.parametrize("device", DEVICES)
def test_checkpointing_recomputes_under_the_rules(device: str) -> None:
    """A9: the recomputation runs outside of the policy's context unless it is told to enter it."""
    policy = Policy(compute="bfloat16", ops={"softmax": "float16"})
    x = torch.randn(4, 4, device=device, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return torch.softmax(x @ x, -1).float().square()

    def again() -> tuple[Any, Any]:
        return nullcontext(), policy.autocast(device)

    with policy.autocast(device):
        plain, saved = block(x).sum(), checkpoint(block, x, use_reentrant=False, context_fn=again).sum()
    assert_same(torch.autograd.grad(saved, x), torch.autograd.grad(plain, x))


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(SPELLINGS)), st.sampled_from(["float16", "bfloat16", "float32", "promote"]))
)
def test_text_form(ops: dict[str, str]) -> None:
    """parse(str(policy)) == policy, and the order in which rules were given does not matter."""
    policy = Policy(compute="bfloat16", ops=ops)
    assert Policy.parse(str(policy)) == policy == Policy(compute="bfloat16", ops=dict(reversed(ops.items())))
    assert hash(Policy.parse(str(policy))) == hash(policy)
