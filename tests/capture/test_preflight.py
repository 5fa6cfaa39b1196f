"""Preflight: every line that a graph cannot hold is named in one step, and the step is what it is without."""

import contextlib
import functools
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    DEVICES,
    ENGINES,
    VERSION,
    WAITS,
    assert_same,
    custom_backward,
    deterministic,
    line_of,
    make_batches,
    make_net,
    marked_line,
    no_sync,
    training_state,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit._capture.preflight import preflight as _preflight
from ampkit._capture.preflight.preflight import Finding, Preflight, describe

CPU = torch.device("cpu")
Step = Callable[[], Any]

# As the engine does it: in a frame of ampkit's, so that nothing around the step is taken for the user's code.
_ENGINE = """
import torch

def engine(preflight, step):
    with preflight:
        return step()

def masked_product(x, mask):
    torch.masked.prod(x, 1, mask=mask).sum().backward()
"""
_scope: dict[str, Any] = {}
exec(compile(_ENGINE, str(Path(ampkit.__file__).with_name("_engine_of_a_test.py")), "exec"), _scope)
engine: Callable[[Preflight, Step], Any] = _scope["engine"]
masked_product: Callable[[Tensor, Tensor], None] = _scope["masked_product"]


@pytest.fixture(autouse=True)
def host_random_numbers() -> Iterator[None]:
    """Seed the sources of random numbers that are not torch's, and leave them as they were."""
    before, numpy_before = random.getstate(), np.random.get_state()
    random.seed(3)
    np.random.seed(3)
    yield
    random.setstate(before)
    np.random.set_state(numpy_before)


def found(step: Step, device: torch.device | str = CPU, generators: Sequence[torch.Generator] = ()) -> list[Finding]:
    """Return what the preflight finds in a step."""
    preflight = Preflight(torch.device(device), generators)
    engine(preflight, step)
    return preflight.findings


marked = functools.partial(marked_line, __file__)


# -------------------------------------------------------------------------------------------- what a graph cannot hold


def item(x: Tensor) -> Tensor:
    x.sum().item()  # HERE item
    return x


def converted(x: Tensor) -> Tensor:
    return x * float(x.detach().mean())  # HERE converted


def compared(x: Tensor) -> Tensor:
    if x.mean() > 9:  # HERE compared
        return -x
    return x


def formatted(x: Tensor) -> Tensor:
    text = f"{x.detach().mean():.3f}"  # HERE formatted
    return x * len(text)


def printed(x: Tensor) -> Tensor:
    str(x)  # HERE printed
    return x


def listed(x: Tensor) -> Tensor:
    return x * x.detach().sum(0).tolist()[0]  # HERE listed


def as_numpy(x: Tensor) -> Tensor:
    return x * float(x.detach().cpu().numpy()[0, 0])  # HERE as_numpy


def as_array(x: Tensor) -> Tensor:
    return x * float(np.asarray(x.detach().cpu()).sum())  # HERE as_array


def tensor_of_tensors(x: Tensor) -> Tensor:
    total = x.detach().sum()
    return x * torch.tensor([total, total], device=x.device).sum()  # HERE tensor_of_tensors


def new_tensor_of_tensors(x: Tensor) -> Tensor:
    total = x.detach().sum()
    return x * x.new_tensor((total, 1.0)).sum()  # HERE new_tensor_of_tensors


ON_THE_HOST = {
    listed: ".tolist() waits for the device to read a tensor",
    as_numpy: ".numpy() waits for the device to read a tensor",
    as_array: ".numpy() waits for the device to read a tensor",
    tensor_of_tensors: "tensor() of a list of tensors waits for the device to read each of them",
    new_tensor_of_tensors: "new_tensor() of a list of tensors waits for the device to read each of them",
}


def nonzero(x: Tensor) -> Tensor:
    x.nonzero()  # HERE nonzero
    return x


def where(x: Tensor) -> Tensor:
    torch.where(x > 0)  # HERE where
    return x


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        torch.where(x > 0)[0].sum().item()  # HERE inference
    return x


def boolean_mask(x: Tensor) -> Tensor:
    return x[x > 0]  # HERE boolean_mask


def masked_assignment(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y[y > 0] = y[y > 0].exp()  # HERE masked_assignment
    return x * y


def masked_select(x: Tensor) -> Tensor:
    return x.masked_select(x > 0)  # HERE masked_select


def unique(x: Tensor) -> Tensor:
    x.detach().unique()  # HERE unique
    return x


def equal(x: Tensor) -> Tensor:
    torch.equal(x, x + 1)  # HERE equal
    return x


def counted(x: Tensor) -> Tensor:
    y = torch.arange(3, device=x.device).bincount()  # HERE counted
    return x * y.sum()


def aligned_by_numbers(x: Tensor) -> Tensor:
    logs, labels = x.log_softmax(1).unsqueeze(1), torch.ones(1, 2, dtype=torch.long, device=x.device)
    return F.ctc_loss(logs, labels, (4,), (2,))  # HERE aligned_by_numbers


def aligned_by_tensors(x: Tensor) -> Tensor:
    logs, labels = x.log_softmax(1).unsqueeze(1), torch.ones(1, 2, dtype=torch.long, device=x.device)
    lengths = [torch.full((1,), length, device=x.device) for length in (4, 2)]
    return F.ctc_loss(logs, labels, *lengths)  # HERE aligned_by_tensors


def aligned_by_cudnn(x: Tensor) -> Tensor:
    labels = torch.ones(2, dtype=torch.int32, device=x.device)
    lengths = [torch.full((1,), length, device=x.device, dtype=torch.int32) for length in (4, 2)]
    return F.ctc_loss(x.log_softmax(1).unsqueeze(1), labels, *lengths)  # HERE aligned_by_cudnn


def repeated(x: Tensor) -> Tensor:
    y = x.detach()[0].repeat_interleave(torch.arange(len(x[0]), device=x.device))  # HERE repeated
    return x * y.mean()


def backward_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * float(grad.isfinite().all()))  # HERE backward_hook
    return y


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / max(x.detach().norm().item(), 1.0)  # HERE module


def module(x: Tensor) -> Tensor:
    return nn.Sequential(nn.Identity(), nn.Sequential(Norm()))(x)


def library(x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, 1.0, validate_args=True).log_prob(x)  # HERE library


def product(x: Tensor) -> Tensor:
    return (1 + x * 1e-2).prod()  # HERE product


def products(x: Tensor) -> Tensor:
    return (1 + x * 1e-2).cumprod(1)  # HERE products


def filled(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, x.mean())  # HERE filled


def block(x: Tensor) -> Tensor:
    scale = float(x.detach().abs().max())  # HERE checkpointed
    return (x / scale).sin()


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=True)


def python_random(x: Tensor) -> Tensor:
    sign = random.choice([-1, 1])
    return x * sign  # HERE python_random


def numpy_random(x: Tensor) -> Tensor:
    scale = float(np.random.rand())
    return x * scale  # HERE numpy_random


KINDS: dict[Callable[[Tensor], Tensor], str] = {
    item: "read a value",
    converted: "read a value",
    compared: "read a value",
    formatted: "read a value",
    printed: "prints a tensor",
    nonzero: "nonzero waits for the device: the shape of its result",
    where: "nonzero waits for the device: the shape of its result",
    inference: "where waits for the device: the shape of its result",
    boolean_mask: "a boolean mask as an index",
    masked_assignment: "a boolean mask as an index",
    masked_select: "masked_select waits for the device",
    unique: "unique",
    equal: "equal waits for the device",
    counted: "bincount waits for the device",
    aligned_by_numbers: "ctc_loss waits for the device: it handles the lengths on the host",
    aligned_by_tensors: "ctc_loss waits for the device: it handles the lengths on the host",
    aligned_by_cudnn: "ctc_loss waits for the device: it handles the lengths on the host",
    repeated: "repeat_interleave waits for the device",
    backward_hook: "read a value",
    custom_backward: "read a value",
    module: "read a value",
    library: "read a value (.item(), float(tensor), `if tensor:`), in torch/distributions/distribution.py:",
    product: "ProdBackward0 looks at values on the host, in its backward",
    products: "CumprodBackward0 looks at values on the host, in its backward",
    filled: "MaskedFillBackward1 looks at values on the host, in its backward",
    checkpointed: "read a value",
    python_random: "draws from Python's random",
    numpy_random: "draws from numpy.random",
}


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def run(kinds: Sequence[Callable[[Tensor], Tensor]], device: str) -> dict[str, Any]:
    """Do a step that is made of these kinds; return its results and all states of random numbers."""
    x = torch.randn(4, 6, device=device, requires_grad=True)
    loss = torch.stack([F.dropout(kind(x)).sum() for kind in kinds]).sum()
    loss.backward()
    assert x.grad is not None
    numpy_state = np.random.get_state(legacy=False)["state"]
    return {
        "step": [loss.detach(), x.grad],
        "torch": [torch.get_rng_state(), torch.rand(3, device=device)],
        "python": random.getstate(),
        "numpy": (numpy_state["key"].tobytes(), numpy_state["pos"]),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_x2_every_kind_is_named(kind: Callable[[Tensor], Tensor], device: str) -> None:
    """X2: each kind is found once, at its line. For a built-in backward that is the line of the forward."""
    seed()
    findings = found(lambda: run([kind], device), device)
    assert {finding.line for finding in findings} == {line_of(kind)}
    assert any(KINDS[kind] in finding.what for finding in findings)
    assert all(finding.advice.endswith(".") and finding.count >= 1 for finding in findings)


ADVICE = {
    unique: "count in a tensor of known size (index_add_)",
    counted: "torch.zeros(n, device=x.device).index_add_(0, x, weights)",
    equal: "(a == b).all()",
    aligned_by_numbers: "ampkit.make_graphed_callables",
    aligned_by_tensors: "ampkit.make_graphed_callables",
    aligned_by_cudnn: "ampkit.make_graphed_callables",
    boolean_mask: "torch.where or masked_fill",
    nonzero: "torch.where or masked_fill",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ADVICE, ids=lambda kind: kind.__name__)
def test_the_advice_is_for_this_operation(kind: Callable[[Tensor], Tensor], device: str) -> None:
    """X2: operations whose result's shape depends on data are not all masks; CTC has one finding for all that waits."""
    findings = found(lambda: run([kind], device), device)
    assert len({finding.advice for finding in findings}) == 1
    assert ADVICE[kind] in findings[0].advice
    assert not findings[0].graph_only
    if "ctc" in findings[0].what:
        assert len(findings) == 1


@pytest.mark.parametrize("kind", ON_THE_HOST, ids=lambda kind: kind.__name__)
def test_reads_without_an_operation(kind: Callable[[Tensor], Tensor]) -> None:
    """X2: on a CPU, reads that run no operation are named by their line: the functions that read are replaced."""
    before = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "new_tensor")}
    findings = found(lambda: run([kind], "cpu"))
    assert [finding.line for finding in findings] == [line_of(kind)]
    assert ON_THE_HOST[kind] in findings[0].what
    assert not findings[0].graph_only
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert "tolist" not in vars(torch.Tensor)


def test_host_data_is_no_read() -> None:
    """Lists of numbers, a tensor of a tensor, and what prints are not taken for reads of tensors in lists."""
    x = torch.ones(2)

    def step() -> None:
        torch.tensor([1.0, 2.0])
        torch.as_tensor(x)
        torch.tensor(3)
        torch.stack([x, x])

    assert found(step) == []
    assert [finding.what for finding in found(lambda: str(x))] == ["prints a tensor, which reads it"]


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ON_THE_HOST, ids=lambda kind: kind.__name__)
def test_reads_on_a_device_keep_their_line(kind: Callable[[Tensor], Tensor]) -> None:
    """X2: the same lines are named where the tensors are on CUDA, by what CUDA reports."""
    engine(preflight := Preflight(torch.device("cuda")), lambda: run([kind], "cuda"))
    assert line_of(kind) in {finding.line for finding in preflight.findings}


@pytest.mark.parametrize("device", DEVICES)
def test_g2_all_in_one_step_and_the_same_bits(device: str) -> None:
    """G2: one step finds every line; loss, gradients and random numbers are those of a step without."""
    seed()
    expected = run([*KINDS], device)
    seed()
    preflight = Preflight(torch.device(device))
    assert_same(expected, engine(preflight, lambda: run([*KINDS], device)))
    assert {finding.line for finding in preflight.findings} == {line_of(kind) for kind in KINDS}
    text = describe(preflight.findings)
    assert text.startswith(f"{len(KINDS)} lines of the step cannot be captured:\n")
    assert all(f"\n  {line_of(kind)} - " in text for kind in KINDS)


class Plain(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [product, products, filled])
def test_formulas_that_a_mode_would_change(kind: Callable[[Tensor], Tensor], device: str) -> None:
    """Some of torch's backward formulas have other bits under a dispatch mode. The preflight avoids that."""

    def grad() -> Tensor:
        torch.manual_seed(1)
        x = torch.randn(61, 67, device=device).requires_grad_()
        return torch.autograd.grad(kind(x).sin().sum(), x)[0]

    expected = grad()
    assert torch.equal(engine(Preflight(torch.device(device)), grad), expected)
    changed = kind is products and VERSION >= (2, 12)  # cumprod has one formula there
    if device == "cpu" and not changed:  # if this fails, torch has changed, and the node need not step aside
        with Plain():
            assert not torch.equal(grad(), expected)


def test_a_draw_behind_the_last_operation() -> None:
    """A draw is found also if no operation follows. Then it has no line."""
    (finding,) = found(lambda: random.random())
    assert (finding.line, finding.count) == ("", 1)
    assert "draws from Python's random" in finding.what


def test_a_draw_between_two_operations_of_a_backward() -> None:
    """A hook that draws and calls no operation: the line is that of the operation whose backward comes next."""
    x = torch.ones(3, requires_grad=True)

    def step() -> None:
        out = x.sin()  # HERE drawn_in_its_backward
        out.register_hook(lambda grad: None if random.random() < 2 else grad)
        out.cos().sum().backward()

    (finding,) = found(step)
    assert finding.line == marked("drawn_in_its_backward")


def test_counts_and_order() -> None:
    """The same thing on the same line is one finding with a count; findings are in order of their first time."""
    x = torch.ones(3)

    def step() -> None:
        for _ in range(3):
            x.sum().item()  # HERE thrice
        x.nonzero()  # HERE then
        for _ in range(2):
            boolean_mask(x)

    assert [(f.line, f.count) for f in found(step)] == [
        (marked("thrice"), 3),
        (marked("then"), 1),
        (marked("boolean_mask"), 2),
    ]


def test_description() -> None:
    """The text has a heading and a line per finding, also for one that has no line of the user's."""
    assert describe([]) == ""
    one = Finding("train.py:3: `x.item()`", "reads", "Keep it.", 1)
    assert describe([one]) == "1 line of the step cannot be captured:\n  train.py:3: `x.item()` - reads. Keep it."
    two = Finding("", "reads, in torch/optim/adam.py:7", "Use fused=True.", 4)
    assert describe([one, two]).splitlines()[0] == "2 lines of the step cannot be captured:"
    assert describe([two]).splitlines()[1] == "  reads, in torch/optim/adam.py:7 (4 times). Use fused=True."


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the clock that the preflight reads in the test."""
    clock = Clock()
    monkeypatch.setattr(_preflight, "time", clock)
    return clock


class SlowProduct(torch.autograd.Function):
    """A function in place of a built-in autograd node that runs without the preflight's mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.clock.now += 0.25
        return grad, None


def test_time_is_measured_around_what_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of operations, of replaced functions and of nodes that run without the mode are added up."""
    problem = _preflight.Problem("a slow node", "Leave it out.")
    slow = "SlowProductBackward"
    monkeypatch.setattr(_preflight, "problem_of", lambda node: problem if node.name() == slow else None)
    original = torch._tensor_str._str

    def slow_print(*args: Any, **kwargs: Any) -> str:
        clock.now += 0.5
        return original(*args, **kwargs)

    monkeypatch.setattr(torch._tensor_str, "_str", slow_print)

    @torch.library.custom_op("ampkit_tests::wait", mutates_args=(), tags=[torch.Tag.data_dependent_output])
    def wait(x: Tensor, seconds: float) -> float:
        clock.now += seconds
        return seconds

    x = torch.ones(3, requires_grad=True)

    def step() -> None:
        for seconds in (1.0, 2.0):
            wait(x.detach(), seconds)  # HERE waiting
        str(x.detach())  # HERE printing
        clock.now += 100.0
        SlowProduct.apply(x, clock).sum().backward()  # HERE slow_node
        random.random()
        torch.zeros(3)  # HERE drawing

    findings = found(step)
    assert [(finding.line, finding.count, finding.ms) for finding in findings] == [
        (marked("waiting"), 2, 3000.0),
        (marked("printing"), 1, 500.0),
        (marked("slow_node"), 1, 250.0),
        (marked("drawing"), 1, None),
    ]
    assert [finding.graph_only for finding in findings] == [False, False, False, True]


def test_time_of_an_operation_that_comes_late_is_not_known() -> None:
    """`torch.tensor` is dispatched only as an operation that comes after its copy, so its time is not measured."""
    copied = torch.empty(1, device="meta")

    def step() -> None:
        torch.ops.aten.lift_fresh(copied)  # HERE late
        torch.ones(3).to("meta")  # HERE in_time

    late, in_time = found(step, "meta")
    assert (late.line, late.ms, late.graph_only) == (marked("late"), None, False)
    assert in_time.line == marked("in_time")
    assert in_time.ms is not None


def test_what_only_a_graph_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait: copies of pinned memory that do not block, draws on the host. A wait on the same line outweighs that."""
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: len(tensor) == 3)

    def step() -> None:
        torch.ones(3).to("meta")  # HERE pinned
        torch.rand(3)  # HERE host_random
        for size in (3, 4):
            torch.ones(size).to("meta")  # HERE either

    assert [(finding.line, finding.graph_only, finding.ms is None) for finding in found(step, "meta")] == [
        (marked("pinned"), True, True),
        (marked("host_random"), True, True),
        (marked("either"), True, True),
        (marked("either"), False, False),
    ]


# ----------------------------------------------------------------------------------------------- what it leaves alone


class Usual(nn.Module):
    """Convolution, BatchNorm, dropout, attention, an index, a fill or a factor on the host is no finding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("cpu")
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(2)[:, :, :8]
        with sdpa_kernel(SDPBackend.MATH):  # on CUDA the others are not deterministic
            attended, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        attended = attended[:, torch.arange(2, device=images.device)]
        table = torch.zeros(5, 8, device=images.device)
        table[0] = 1.5
        table[table < 0] = 0.0  # a fill: nothing has to be counted
        with torch.inference_mode():  # in which modes see compositions as a whole
            images.repeat_interleave(2, 0).to(torch.float64)
        return self.net(images) + (attended.mean() + table.mean()) * torch.tensor(0.5)


def train(device: str, preflights: int) -> tuple[dict[str, Any], list[Finding]]:
    """Do three steps in mixed precision, the last of them under this many preflights; return the state and findings."""
    torch.manual_seed(0)
    model = Usual().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = ampkit.GradScaler(device, init_scale=1024.0)
    findings: list[Finding] = []

    def step(images: Tensor, labels: Tensor, boost: Tensor) -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels) * boost
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad()

    for i, batch in enumerate(make_batches(device, [4, 4, 4])):
        if i == 2 and preflights:
            findings = found(lambda batch=batch: step(*batch), device)
        else:
            step(*batch)
    return training_state(model, optimizer, scaler), findings


@pytest.mark.parametrize("device", DEVICES)
def test_a_clean_step_has_no_findings(device: str) -> None:
    """Nothing is found in a step with the usual layers, and it leaves the same bits in parameters, moments, buffers."""
    with deterministic():
        expected, _ = train(device, 0)
        state, findings = train(device, 1)
    assert findings == []
    assert_same(expected, state)


def test_host_counts_of_torchs_optimizers_are_no_finding() -> None:
    """On the CPU, torch's optimizers read their step count from a CPU tensor; that is no reading of the device."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        float(model.weight.detach().sum())  # HERE after_step

    step()
    assert [finding.line for finding in found(step)] == [marked("after_step")]
    model.weight.grad = torch.ones(3, 3)
    assert found(optimizer.step) == []


def seeded(x: Tensor) -> None:
    torch.manual_seed(5)  # HERE seeded


def seeded_by_an_earlier_name(x: Tensor) -> None:
    seed_by_an_earlier_name(5)  # HERE seeded_by_an_earlier_name


def seeded_on_the_device(x: Tensor) -> None:
    torch.cuda.manual_seed(5)  # HERE seeded_on_the_device


def seeded_on_all_devices(x: Tensor) -> None:
    torch.cuda.manual_seed_all(torch.initial_seed())  # HERE seeded_on_all_devices


def seeded_anew(x: Tensor) -> None:
    torch.seed()  # HERE seeded_anew


def seeded_in_a_fork(x: Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())  # HERE seeded_in_a_fork


def set_to_a_state(x: Tensor) -> None:
    torch.set_rng_state(BEFORE)  # HERE set_to_a_state


def seeded_behind_a_fork(x: Tensor) -> None:
    with torch.random.fork_rng(devices=[]):
        F.dropout(x)
    torch.default_generator.manual_seed(torch.initial_seed())
    F.dropout(x)  # HERE seeded_behind_a_fork


def seeded_by_its_method(x: Tensor) -> None:
    torch.default_generator.manual_seed(torch.initial_seed())
    F.dropout(x)  # HERE seeded_by_its_method


seed_by_an_earlier_name = torch.manual_seed
BEFORE = torch.get_rng_state()
SEEDING = (
    seeded, seeded_by_an_earlier_name, seeded_on_the_device, seeded_on_all_devices, seeded_anew, seeded_in_a_fork,
    set_to_a_state, seeded_behind_a_fork, seeded_by_its_method,
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SEEDING, ids=lambda kind: kind.__name__)
def test_what_sets_a_generator_is_named(kind: Callable[[Tensor], None], device: str) -> None:
    """G5: a seed that is set in the step is one finding, on its line: a capture would leave it out in silence."""
    x = torch.rand(3, device=device)

    def step() -> None:
        F.dropout(x)
        kind(x)
        F.dropout(x)

    step()
    torch.rand(1)  # between two steps, as a loader draws
    engine(preflight := Preflight(torch.device(device)), step)
    (finding,) = preflight.findings
    assert finding.line == marked_line(__file__, kind.__name__)
    assert "sets a generator of random numbers, which a replay would leave out" in finding.what
    assert "Seed before the first step" in finding.advice
    assert finding.graph_only
    assert torch.manual_seed is seed_by_an_earlier_name  # put back


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_of_the_step_may_be_put_back(device: str) -> None:
    """A9: a fork of the generators and checkpointing read a state and put it back, which torch captures."""
    x = torch.rand(3, device=device, requires_grad=True)

    def step() -> None:
        with torch.random.fork_rng([0] if device == "cuda" else []):
            F.dropout(x)
        state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
        F.dropout(x)
        torch.cuda.set_rng_state(state) if device == "cuda" else torch.set_rng_state(state)
        for reentrant in (False, True):
            checkpoint(lambda x: F.dropout(x.sin()), x, use_reentrant=reentrant).sum().backward()

    engine(preflight := Preflight(torch.device(device)), step)
    assert preflight.findings == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_seeds_stays_eager(engine: tuple[str, str]) -> None:
    """G5: with a seed set in each step, dropout's mask is the same in each, as it is eagerly."""
    device, graph = engine
    model = nn.Linear(4, 4).to(device)

    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        mask = F.dropout(torch.ones_like(x))
        return (model(x) * mask).square().mean(), mask

    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph)
    x = torch.ones(32, 4, device=device)
    masks = [step(x).aux for _ in range(3)]
    with pytest.warns(ampkit.CaptureWarning, match=r"torch\.manual_seed\(\) sets a generator of random numbers"):
        masks += [step(x).aux for _ in range(3)]
    assert step.replays == 0
    assert_same([masks[0]] * 6, masks)


@pytest.mark.cuda
def test_generators_of_the_device_that_are_set_back() -> None:
    """G5: methods of a generator set its seed or state where no function of torch is called."""
    known = torch.Generator("cuda")
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    before = default.get_state()
    x = torch.rand(3, device="cuda")

    def drawn() -> None:
        torch.rand(3, device="cuda", generator=known)
        F.dropout(x)

    for change in (
        lambda: known.manual_seed(known.initial_seed()),
        lambda: default.manual_seed(default.initial_seed()),
        lambda: default.set_state(before),
        lambda: torch.cuda.set_rng_state(before),
        lambda: known.seed(),
    ):
        drawn()
        preflight = Preflight(torch.device("cuda"), [known])
        engine(preflight, lambda change=change: (drawn(), change(), drawn()))
        (finding,) = preflight.findings
        assert "sets a generator of random numbers" in finding.what


def test_callers_are_not_blamed() -> None:
    """Code of torch or ampkit that waits names a line of the user's only if that line belongs to the step."""
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    clip = functools.partial(nn.utils.clip_grad_norm_, [weight], 1.0, error_if_nonfinite=True)
    assert found(clip) == []
    (finding,) = found(lambda: clip())  # HERE caller
    assert finding.line == marked("caller")
    assert "in torch/nn/utils/clip_grad.py:" in finding.what
    x = torch.ones(2, 3, requires_grad=True)
    assert found(functools.partial(masked_product, x, x.detach() > 0)) == []  # nor callers of what made a node
    (finding,) = found(lambda: masked_product(x, x.detach() > 0))  # HERE made
    assert finding.line == marked("made")


@pytest.mark.parametrize("device", DEVICES)
def test_fused_attention_is_no_finding(device: str) -> None:
    """Its kernels return the state of random numbers on the host, unless a capture runs; nothing waits for that."""
    q = torch.randn(2, 4, 16, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    assert found(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward(), device) == []


def test_copies_and_host_draws() -> None:
    """X2: copies from the host are named, blocking or not. A number on the host as a factor is no copy.

    The meta device stands for CUDA: tensors can be copied to it, not from it.
    """
    static = torch.empty(3, device="meta")

    def step() -> None:
        torch.ones(3).to("meta")  # HERE to
        static.copy_(torch.ones(3), non_blocking=True)  # HERE copy
        torch.ones(3).to(static)  # HERE like
        torch._foreach_copy_([static, static], [torch.ones(3), static])  # HERE foreach
        static[torch.tensor([0, 1])]  # HERE index
        torch.rand(3)  # HERE draw
        F.dropout(torch.ones(3))  # HERE dropout

    findings = found(step, "meta")
    names = ["to", "copy", "like", "foreach", "index", "draw", "dropout"]
    assert [finding.line for finding in findings] == [marked(name) for name in names]
    assert {f.what for f in findings[:5]} == {"copies from pageable host memory to the device"}
    assert {f.what for f in findings[5:]} == {"draws random numbers on the host, which a graph would freeze"}


def test_the_host_may_do_as_it_likes() -> None:
    """Work on the host alone, and what only makes a tensor elsewhere or uses a number, is no finding."""
    static = torch.empty(3, device="meta")

    def step() -> None:
        numbers = torch.arange(4.0)
        str(numbers), numbers.sum().item(), numbers[numbers > 1], numbers.unique()
        static * numbers[1], static.add_(numbers[2]), static.fill_(numbers[3])
        torch.empty_like(static, device="cpu"), torch.zeros_like(numbers, device="meta")
        static[:1].copy_(static[1:2]), torch.empty(0).to("meta"), torch.rand(3, device="meta")

    assert found(step, "meta") == []


def test_a_list_as_an_index() -> None:
    """torch copies it to the device. Before torch 2.15, modes do not see that; on CUDA the wait is seen."""
    static = torch.empty(3, device="meta")
    seen = [finding.what for finding in found(lambda: static[[0, 1]], "meta")]
    assert seen == (["copies from pageable host memory to the device"] if VERSION >= (2, 15) else [])


# -------------------------------------------------------------------------------------------- what it leaves as it was


def settings() -> dict[str, Any]:
    """Return what the preflight changes for a while."""
    on_cuda = torch.cuda.is_available()
    return {
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "threads": torch._C._is_multithreading_enabled(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "filters": list(warnings.filters),
        "show": warnings.showwarning,
        "print": torch._tensor_str._str,
        "engine": (torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward),
        "synchronize": torch._C._cuda_synchronize if on_cuda else None,
        "classes": (torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize),
        "sync debug mode": torch.cuda.get_sync_debug_mode() if on_cuda else None,
    }


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise LookupError("a mistake of the user")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("anomaly", [False, True])
def test_settings_are_restored(device: str, anomaly: bool) -> None:
    """Modes, filters, functions and debug settings are as before, also after an error, which passes as it is."""
    x = torch.ones(3, device=device, requires_grad=True)
    with torch.autograd.set_detect_anomaly(anomaly, check_nan=False):
        before = settings()
        changed: dict[str, Any] = {}
        found(lambda: changed.update(settings()), device)
        assert (changed["threads"], changed["anomaly"], changed["modes"]) == (False, (True, False), 1)
        assert settings() == before
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(LookupError, match=r"^a mistake of the user$") as raised:
                found(lambda: Failing.apply(x).sum().backward(), device)
        # Anomaly mode warns of where the failing node was made: the user's does, the preflight's does not.
        assert [str(warning.message)[:33] for warning in caught] == ["Error detected in FailingBackward"] * anomaly
        assert raised.value.__context__ is None
        assert settings() == before


def resize() -> None:
    torch.add(torch.ones(3), 1, out=torch.empty(1))  # HERE resize


def test_warnings_of_the_step_reach_the_user() -> None:
    """Under the user's filters, at the user's line, while the step runs: torch's own and those of Python code."""

    def step() -> None:
        for _ in range(2):
            resize()
            warnings.warn("mine", UserWarning, stacklevel=1)  # HERE warning

    for action, count in (("always", 2), ("default", 1), ("ignore", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            assert found(step) == []
        lines = [f"{warning.filename}:{warning.lineno}:" for warning in caught]
        assert lines == [marked(name).partition(" ")[0] for name in ("resize", "warning")] * count
    with pytest.raises(UserWarning, match="An output with one or more elements was resized"):
        found(step)


def test_waits_that_only_cuda_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: a wait that torch warns of is named with its operation, in forward, hooks and backward, and counted once.

    Another warning of torch's stands for the one of the sync debug mode, which needs a device.
    """
    monkeypatch.setattr(_preflight, "_WAIT", "An output with one or more elements was resized|called a synchronizing")

    class Resizing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            torch.mul(grad, 2, out=torch.empty(1))  # HERE resizing_backward
            return grad

    def step() -> None:
        resize()
        torch.ops.aten.add.out(torch.ones(3), torch.ones(3), out=torch.empty(1))  # HERE raw
        torch.nonzero(torch.ones(3), out=torch.empty(1, dtype=torch.int64))  # HERE named
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)  # HERE stream
        y = Resizing.apply(torch.ones(3, requires_grad=True))
        y.register_hook(lambda grad: torch.sub(grad, 1, out=torch.empty(1)))  # HERE resizing_hook
        y.sum().backward()

    findings = found(step)
    assert [(finding.line, finding.what.partition(":")[0], finding.count) for finding in findings] == [
        (marked("resize"), "add waits for the device", 1),
        (marked("raw"), "add waits for the device", 1),
        (marked("named"), "nonzero waits for the device", 1),
        (marked("stream"), "waits for the device", 1),
        (marked("resizing_hook"), "sub waits for the device", 1),
        (marked("resizing_backward"), "mul waits for the device", 1),
    ]


def test_the_users_anomaly_mode() -> None:
    """Anomaly mode reads every gradient, and one finding says so. It still raises if it sees nan."""
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        (finding,) = found(lambda: (x * 2).sum().backward())
        assert finding.what == "torch.autograd.detect_anomaly() reads every gradient on the host"
        warned = pytest.warns(UserWarning, match="Error detected in SqrtBackward0")
        with warned, pytest.raises(RuntimeError, match="returned nan values"):
            found(lambda: (x * 0).sqrt().mul(0).sum().backward())


# ------------------------------------------------------------------------------------------------- other parts of torch


@pytest.mark.parametrize("warm", [True, False])
def test_compiled_code_stays_compiled(warm: bool) -> None:
    """Compiled code runs under the preflight, is not compiled again, and what is new is compiled then and there."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    linear = nn.Linear(3, 3)

    @torch.compile(backend=counter)
    def loss_fn(x: Tensor) -> Tensor:
        return F.gelu(linear(x)).sum()

    def step() -> tuple[Tensor, ...]:
        loss = loss_fn(torch.ones(2, 3))
        return (loss.detach(), *torch.autograd.grad(loss, list(linear.parameters())))

    expected = step() if warm else None
    preflight = Preflight(CPU)
    under = engine(preflight, step)
    assert counter.frame_count == 1
    assert preflight.findings == []
    assert_same(expected or step(), under)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_compiled_code_is_what_runs() -> None:
    """A dispatch mode of the usual kind would have torch run the original function, with other bits."""
    torch._dynamo.reset()

    def halved(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return lambda *args: [out / 2 for out in graph(*args)]

    function = torch.compile(lambda x: x + 1, backend=halved)
    x = torch.ones(3)
    assert torch.equal(function(x), x)
    preflight = Preflight(CPU)
    assert torch.equal(engine(preflight, lambda: function(x)), x)
    torch._dynamo.reset()


def test_a_graph_break_is_named() -> None:
    """If a compiled function falls back to Python to read a value, the finding has the user's line."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def loss_fn(x: Tensor) -> Tensor:
        y = x * 2
        scale = y.sum().item()  # HERE graph_break
        return y / scale

    x = torch.ones(3)
    loss_fn(x)
    assert [finding.line for finding in found(lambda: loss_fn(x))] == [marked("graph_break")]
    torch._dynamo.reset()


def test_generated_code_is_not_the_users() -> None:
    """A finding in code that torch.compile wrote (a graph or a file of inductor's) has the user's line.

    A compiled function as a whole has one, the first.
    """
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)  # HERE graph
    def places(x: Tensor) -> Tensor:
        return x.nonzero() + 1

    scope: dict[str, Any] = {"__name__": "torch._inductor.runtime.compile_tasks.cab"}
    exec(compile("def call(x):\n    return x.sum().item()", "/tmp/torchinductor_me/ab/cab.py", "exec"), scope)
    x = torch.ones(3)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        places(x)
        assert [finding.line for finding in found(lambda: places(x))] == [marked("graph")]
    assert [finding.line for finding in found(lambda: scope["call"](x))] == [marked("file")]  # HERE file
    torch._dynamo.reset()


def test_function_transforms_and_fake_tensors() -> None:
    """Transforms of torch.func work under it; tensors without data are not looked at."""
    x = torch.arange(6.0).reshape(2, 3)
    expected = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    def step() -> Tensor:
        with FakeTensorMode():
            fake = torch.ones(3)
            str(fake), fake.cuda().sum() if torch.cuda.is_available() else fake.sum()
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

    preflight = Preflight(CPU)
    assert torch.equal(engine(preflight, step), expected)
    assert preflight.findings == []


def test_a_context_around_the_users_lines() -> None:
    """Entered by the user, directly or through other contexts, it names the lines of the block, not of its callers."""
    x = torch.ones(3)

    @contextlib.contextmanager
    def entered() -> Iterator[Preflight]:
        with Preflight(CPU) as preflight:
            yield preflight

    with Preflight(CPU) as direct:
        x.sum().item()  # HERE direct
    with entered() as through_generator:
        x.sum().item()  # HERE generator
    with contextlib.ExitStack() as stack:
        through_stack = stack.enter_context(Preflight(CPU))
        x.sum().item()  # HERE stack
    for name, preflight in (("direct", direct), ("generator", through_generator), ("stack", through_stack)):
        assert [finding.line for finding in preflight.findings] == [marked(name)]


def test_other_threads_are_not_watched() -> None:
    """A thread of the user's own, which a capture does not hold either, may read what it likes."""
    x = torch.ones(3, requires_grad=True)

    def work() -> None:
        str(x), x.sum().item(), str(torch.ones(3, device="meta"))
        (x * 2).prod().backward()

    def step() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert found(step) == []
    assert found(step, "meta") == []


# ---------------------------------------------------------------------------------------------------------- on a device


def to_host(x: Tensor) -> None:
    x.detach().cpu()  # HERE to_host


def to_pinned(x: Tensor) -> None:
    PINNED["out"].copy_(x.detach(), non_blocking=True)  # HERE to_pinned


def to_device_pinned(x: Tensor) -> None:
    PINNED["in"].to("cuda", non_blocking=True)  # HERE to_device_pinned


def index_list(x: Tensor) -> None:
    x[[0, 1]]  # HERE index_list


def tolist(x: Tensor) -> None:
    x.tolist()  # HERE tolist


def checked_inverse(x: Tensor) -> None:
    torch.linalg.inv(x.detach()[:4, :4] + 9 * torch.eye(4, device="cuda"))  # HERE checked_inverse


def host_draw(x: Tensor) -> None:
    torch.rand(3)  # HERE host_draw


def other_generator(x: Tensor) -> None:
    torch.rand(3, device="cuda", generator=OTHER["generator"])  # HERE other_generator


PINNED: dict[str, Tensor] = {}
OTHER: dict[str, torch.Generator] = {}
ON_DEVICE: dict[Callable[[Tensor], None], str] = {
    to_host: "copies from the device to pageable host memory",
    to_pinned: "copies from the device to pinned host memory",
    to_device_pinned: "copies from pinned host memory to the device",
    **WAITS,
    index_list: "copies from pageable host memory to the device",
    tolist: "copies from the device to pageable host memory",
    checked_inverse: "waits for the device",
    host_draw: "draws random numbers on the host",
    other_generator: "draws from a CUDA generator that the graph does not know",
}


@pytest.fixture
def on_device() -> Iterator[Tensor]:
    """Give what `ON_DEVICE` works on, and a tensor for it."""
    PINNED.update(out=torch.empty(4, 6).pin_memory(), **{"in": torch.ones(5).pin_memory()})
    OTHER.update(generator=torch.Generator("cuda").manual_seed(1))
    yield torch.randn(4, 6, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    PINNED.clear()
    OTHER.clear()


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ON_DEVICE, ids=lambda kind: kind.__name__)
def test_x2_every_kind_on_a_device(kind: Callable[[Tensor], None], on_device: Tensor) -> None:
    """X2: copies both ways, pageable and pinned, blocking or not, waits, and random numbers, at the user's line."""
    kind(on_device)
    findings = found(lambda: kind(on_device), "cuda")
    assert {finding.line for finding in findings} == {line_of(kind)}
    assert any(ON_DEVICE[kind] in finding.what for finding in findings)


@pytest.mark.cuda
def test_g2_all_of_a_device_in_one_step(on_device: Tensor) -> None:
    """G2: one step finds all of them, and drops no warning of another kind."""

    def step() -> None:
        for kind in ON_DEVICE:
            kind(on_device)
        warnings.warn("mine", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="^mine$") as caught:
        findings = found(step, "cuda")
    assert len(caught) == 1
    assert [*dict.fromkeys(finding.line for finding in findings)] == [line_of(kind) for kind in ON_DEVICE]


@pytest.mark.cuda
def test_a_known_generator_is_no_finding(on_device: Tensor) -> None:
    """A generator that the graph will know may be drawn from, and so may the default one by name."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]

    def step() -> None:
        other_generator(on_device)
        torch.rand(3, device="cuda", generator=default)

    assert found(step, "cuda", [OTHER["generator"]]) == []


@pytest.mark.cuda
def test_torchs_own_line_is_named_where_there_is_no_other() -> None:
    """On a device, what waits in torch's code alone is a finding without a line, which says where."""
    weight = torch.ones(3, device="cuda", requires_grad=True)
    weight.grad = torch.ones(3, device="cuda")
    (finding,) = found(functools.partial(nn.utils.clip_grad_norm_, [weight], 1.0, error_if_nonfinite=True), "cuda")
    assert finding.line == ""
    assert "in torch/nn/utils/clip_grad.py:" in finding.what


@pytest.mark.cuda
def test_it_never_waits_itself() -> None:
    """A whole step in mixed precision under it raises nothing where every wait for the device raises."""
    model = make_net("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = ampkit.GradScaler("cuda", init_scale=1024.0)

    def step(images: Tensor, labels: Tensor, boost: Tensor) -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(images), labels) * boost
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        optimizer.zero_grad()

    first, second, third = make_batches("cuda", [8, 8, 8])
    step(*first)
    with no_sync():
        assert found(lambda: step(*second), "cuda") == []
    assert found(lambda: step(*third), "cuda") == []


def test_no_line_of_ampkit_is_named() -> None:
    """G2: in a graphed step, whose forward is watched for working weights too, the user's line stands alone."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).mean()
        return loss * 2 if float(loss.detach()) > 100 else loss  # waits

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", graph="emulate")
    for _ in range(4):
        step(torch.ones(2, 4))
    with pytest.warns(ampkit.CaptureWarning, match="# waits` - waits for the device") as caught:
        step(torch.ones(2, 4))  # two calls have shown that no module is worth a capture
    assert "ampkit/_" not in str(caught[0].message)
