"""What a capture records is compared with the eager call before it; user code does not learn that it is captured."""

import json
import random
import time
import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import torch
from harness import ENGINES, assert_same, deterministic, training_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ampkit
from ampkit._capture.compare import call_record
from ampkit._capture.compare.call_record import first_difference, recorded_call
from ampkit._capture.compare.rehearsal import Rehearsal
from ampkit._capture.graph import capture_query as _capturing
from ampkit._torch.tensors.modes import WatchingMode

Engine = tuple[str, str]
Loss = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers. Between them is what `choose` returns, on the host."""

    def __init__(self, choose: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.banks = nn.ParameterList([torch.full((6,), 1.0), torch.full((6,), 3.0)])
        self.choose = choose
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.choose(self, self.first(x)))


def counter(net: Net, x: Tensor) -> Tensor:
    return x * (1 + 0.1 * net.calls)


def own_generator() -> Callable[[Net, Tensor], Tensor]:
    draws = random.Random(0)
    return lambda net, x: x + draws.random()


def numpy_generator() -> Callable[[Net, Tensor], Tensor]:
    import numpy as np

    draws = np.random.default_rng(0)
    return lambda net, x: x * draws.normal()


def clock(net: Net, x: Tensor) -> Tensor:
    return F.leaky_relu(x, time.perf_counter() % 1)


def rate(net: Net, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5 / net.calls)


def operation(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(x) if net.calls % 2 else torch.sigmoid(x)


def shape(net: Net, x: Tensor) -> Tensor:
    return F.pad(x[:, : 6 - net.calls % 3], (0, net.calls % 3))


def parameter(net: Net, x: Tensor) -> Tensor:
    return x * net.banks[net.calls % 2]


def in_backward(net: Net, x: Tensor) -> Tensor:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.tanh() if net.calls % 2 else grad.sigmoid()

    out: Tensor = Scaled.apply(x)
    return out


VARYING: dict[str, Callable[[], Callable[[Net, Tensor], Tensor]]] = {
    "counter": lambda: counter,
    "random.Random": own_generator,
    "numpy": numpy_generator,
    "clock": lambda: clock,
    "dropout rate": lambda: rate,
    "operation": lambda: operation,
    "shape": lambda: shape,
    "parameter": lambda: parameter,
    "in backward": lambda: in_backward,
}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(net: nn.Module, engine: Engine, graph: str, loss_fn: Loss = square, **options: Any) -> tuple[Any, Any]:
    """Return losses and state after 12 steps, and the step."""
    net = net.to(engine[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph, **options, host_writes="ignore")
    made = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    losses = [step(torch.randn(4, 6, generator=made).to(engine[0])).loss for _ in range(12)]
    return (losses, training_state(net, optimizer, step.scaler)), step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [kind for kind in VARYING if kind != "clock"])
@pytest.mark.quick(4)
def test_what_varies_on_the_host_is_never_frozen(engine: Engine, kind: str) -> None:
    """A number, an operation, a shape or a parameter that the host chooses anew: one warning with the line, and eager
    steps with eager's bits.
    """
    runs = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Net(VARYING[kind]())
        with warnings.catch_warnings(record=True) as caught, deterministic():
            warnings.simplefilter("always")
            result, step = trained(net, engine, graph)
        runs.append((result, step, [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)]))
    (eager, _, none), (graphed, step, messages) = runs
    assert_same(eager, graphed)
    assert none == []
    assert len(messages) == 1
    where = "in ScaledBackward - " if kind == "in backward" else f"{Path(__file__).name}:"
    assert where in messages[0]
    assert "the capture ran" in messages[0]
    assert "eager call before it" in messages[0]
    assert step.report().graphs == 0
    assert step.report().eager["capture failed"] >= 4


@pytest.mark.parametrize("engine", ENGINES)
def test_a_clock_is_noticed(engine: Engine) -> None:
    """The time differs in every call. The message names the operation that it goes into."""
    with pytest.raises(ampkit.CaptureError, match=r"`return F\.leaky_relu\(x, time.*ran .*leaky_relu.*was done"):
        trained(Net(clock), engine, engine[1], on_failure="raise")


@pytest.mark.parametrize("engine", ENGINES)
def test_one_call_that_differs_by_chance_is_forgiven(engine: Engine) -> None:
    """A single difference, such as one by a thread of the user's, only costs another comparison."""
    net = Net(lambda net, x: x + 0.0 * x if net.calls == 3 else x)
    _, step = trained(net, engine, engine[1], on_failure="raise")
    assert (step.report().eager, step.captures, step.replays) == ({"warm-up": 4}, 2, 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_that_stay_are_no_reason(engine: Engine) -> None:
    """A step with dropout, constants, nan, inf, attention or numbered ranges is captured in the fourth call."""

    class Steady(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)
            self.last = nn.Linear(6, 1)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            with torch.profiler.record_function(f"call {self.calls}"):
                x = self.encoder(x[None])[0]
            return self.last(x.masked_fill(x > 100.0, float("-inf")).clamp(max=float("inf")) * 0.5)

    _, step = trained(Steady(), engine, engine[1], policy="bfloat16", max_norm=1.0, on_failure="raise")
    assert (step.captures, step.replays) == (1, 9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_compiled_code_is_compared_by_its_identity(engine: Engine) -> None:
    """Nothing is compiled again for the comparison, and the compiled step is captured."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1)).to(engine[0])
    compiled = torch.compile(net, backend="aot_eager")
    with torch.compiler.set_stance("default"):
        _, step = trained(compiled, engine, engine[1], on_failure="raise")
    assert (step.captures, step.replays) == (1, 9)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_profiler_of_the_users_works(engine: Engine) -> None:
    """The user's profiler records through rehearsal and capture."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        _, step = trained(nn.Linear(6, 1), engine, engine[1], on_failure="raise")
    assert step.replays == 9
    assert any(event.key == "aten::addmm" for event in profiler.key_averages())


@pytest.mark.slow
def test_an_execution_trace_of_the_users_works(tmp_path: Path) -> None:
    """With it nothing can be compared, which is said. In a process with one thread, ampkit's own is gone before."""
    node = alone(_USERS_TRACE, str(tmp_path / "trace.json"))
    assert node.split() == ["captures", "1", "traced", "True"]


# ampkit registers torch's observer for good in a process with several threads, as this one may have.
_USERS_TRACE = """
import json, sys, warnings
import torch, ampkit
from torch import nn

def captures():
    model = nn.Linear(6, 1)
    step = ampkit.graphed_step(
        lambda m, x: m(x).mean(), model, torch.optim.SGD(model.parameters(), fused=True), graph="emulate"
    )
    for _ in range(8):
        step(torch.ones(2, 6))
    return step.captures

captures()
observer = torch.profiler.ExecutionTraceObserver().register_callback(sys.argv[1])
observer.start()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print("captures", captures())
assert any("ExecutionTraceObserver" in str(warning.message) for warning in caught)
observer.stop()
observer.unregister_callback()
print("traced", any(node["name"] == "aten::addmm" for node in json.load(open(sys.argv[1]))["nodes"]))
"""


def alone(code: str, *argv: str) -> str:
    """Run code in a process of its own; return what it printed."""
    run = forks.run_code(code, *argv)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.slow
def test_threads_that_compute_meanwhile_do_not_crash() -> None:
    """Other threads run operations while records begin and end. On 595f9e4 this ended in a segmentation fault."""
    assert alone(_BUSY_THREADS).split() == ["180", "equal"]


_BUSY_THREADS = """
import threading
import torch
from ampkit._capture.compare.call_record import recorded_call, first_difference

ended = False

def compute():
    x = torch.ones(8, 8)
    while not ended:
        (x + x).sum()

threads = [threading.Thread(target=compute) for _ in range(2)]
for thread in threads:
    thread.start()
records = []
for i in range(200):
    try:
        with recorded_call() as recorder:
            torch.ones(3).mul(2).sum()
            i // (i % 10)  # each tenth record is not read
        records.append(recorder.record)
    except ZeroDivisionError:
        pass
ended = True
for thread in threads:
    thread.join()
print(len(records), "equal" if not any(first_difference(records[0], other) for other in records) else "different")
"""


def recorded(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with recorded_call() as recorder:
        call(x)
    assert recorder.record is not None
    return recorder.record


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[:, 1:] * 2,
        lambda x: x[1].sum() + x[:, 0].sum(),
        lambda x: x.narrow(1, 1, 2).unfold(0, 2, 1).sum(),
        lambda x: x.diagonal().cos() + x.unbind(1)[2][:3],
        lambda x: x.as_strided((2, 2), (1, 1)).sum(),
    ],
)
def test_where_a_batch_lies_in_a_larger_tensor_is_no_difference(call: Callable[[Tensor], Any]) -> None:
    """Rows of a data set on the GPU, and the slices of `scan`: a view of them has another storage offset each time."""
    data = torch.randn(12, 3)
    batches = [data[:4], data[4:8], data[8:], data[:4].clone()]
    records = [recorded(call, x) for x in batches]
    assert not any(first_difference(records[0], other) for other in records[1:])


@pytest.mark.parametrize("other", [lambda x: x[:, :2] * 2, lambda x: x.as_strided((4, 2), (3, 1), 2) * 2])
def test_where_a_view_begins_is_a_difference(other: Callable[[Tensor], Any]) -> None:
    """Of the same shape, from another column on."""
    x = torch.randn(12, 3)[4:8]
    found = first_difference(recorded(lambda x: x[:, 1:] * 2, x), recorded(other, x))
    assert "the capture ran aten::" in found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["step", "scan", "window"])
def test_a_step_that_takes_columns_of_rows_of_a_data_set(
    engine: Engine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`data[i : i + n]` as the batch, and `x[:, :-1]` in the loss, as of tokens: captured, with the bits of eager.

    Each operation inside of another one is compared here, too. Emulated graphs leave them out elsewhere.
    """
    monkeypatch.setattr("ampkit._capture.engine.layouts.Rehearsal", lambda lenient: Rehearsal(False))

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x[:, :-1]) - x[:, -1:]).square().mean()

    results = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        data = torch.randn(64, 7).to(engine[0])
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).to(engine[0])
        optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-7, fused=True)
        step = ampkit.graphed_step(
            loss, net, optimizer, graph=graph, accumulate=2 if how == "window" else 1, host_writes="ignore"
        )
        with deterministic():
            if how == "step":
                losses = [step(data[8 * i : 8 * i + 8]).loss for i in range(8)]
            else:
                losses = [getattr(step, how)(data.view(-1, 2, 8, 7)[i]).loss for i in 3 * [*range(4)]]
        results.append([*losses, *net.parameters()])
    assert_same(*results)
    report = step.report()
    assert report.failure is None
    assert (report.replays if how == "step" else report.launches) > 2, report


@pytest.mark.slow
def test_an_operation_across_two_records_does_not_crash() -> None:
    """A thread loads data in a `record_function`, as DataLoader does, from one record to the next: no segmentation
    fault, as on 595f9e4, and each record has what ran in it.
    """
    assert alone(_ACROSS).split() == ["1", "1", "gone"]


_ACROSS = """
import threading
import torch
from torch.autograd.profiler import record_function
from ampkit._capture.compare.call_record import recorded_call
from ampkit._torch.device import execution_trace

entered, leave, left = threading.Event(), threading.Event(), threading.Event()

def load():
    with record_function("enumerate(DataLoader)"):
        entered.set()
        leave.wait()
    for _ in range(20):
        torch.ones(3) + 2
    left.set()

thread = threading.Thread(target=load)
with recorded_call() as first:
    thread.start()
    entered.wait()
    torch.ones(3).mul(2)
with recorded_call() as second:
    torch.ones(3).mul(2)
    leave.set()
    left.wait()
for recorder in (first, second):
    print(sum(op.text.startswith("aten::mul") for op in recorder.record.threads[0]))
thread.join()
with recorded_call():
    torch.ones(3)
print("there" if execution_trace._registered[0].is_registered() else "gone")
"""


def test_a_recorder_leaves_nothing_behind() -> None:
    """Modes, torch's functions and its observer are as they were, behind an error too; a nested one sees nothing."""
    has = torch.overrides.has_torch_function
    with pytest.raises(ZeroDivisionError), recorded_call() as failed:
        torch.ones(2) / (1 // 0)
    assert failed.record is None
    with recorded_call() as outer:
        with recorded_call() as inner:
            torch.ones(2) * 2
        torch.ones(2) + 1
    assert inner.record is None
    assert outer.record is not None
    assert [op.text.partition("(")[0] for op in outer.record.threads[0]].count("aten::mul.Tensor") == 1
    assert torch.overrides.has_torch_function is has
    assert torch.overrides._get_current_function_mode_stack() == []


def test_both_ways_to_read_a_trace_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace as this torch writes it is read by a pattern; another one is decoded as JSON, more slowly."""
    layer = nn.Linear(4, 4)
    with recorded_call() as recorder:
        x = torch.randn(3, 4)[:, 1:].as_strided((3, 2), (4, 1), 1)
        torch.cat([layer(torch.ones(2, 4)), torch.stack([x.new_zeros(4), x.new_ones(4)])], 0).sum().backward()
    assert recorder.record is not None
    quick = call_record._read_entries(recorder.text)
    slow = call_record._decoded_entries(recorder.text)
    assert quick.keys() == slow.keys()
    for i, entry in quick.items():
        assert entry._replace(inputs="") == slow[i]._replace(inputs="")
        assert json.loads(entry.inputs) == json.loads(slow[i].inputs)
    torn = recorder.text.replace('"outputs"', '"results"')  # as of another version
    assert call_record._read_entries(torn).keys() == slow.keys()
    monkeypatch.setattr(call_record, "_decoded_entries", lambda text: {})
    assert call_record._read_entries(recorder.text) == quick


def test_a_difference_names_both_operations() -> None:
    """The message has the line, what the capture ran, and what the eager call did."""

    def record(factor: float, dims: int) -> Any:
        with recorded_call() as recorder:
            x = torch.ones(3, 4).mul(factor)
            x.sum(dims)
        return recorder.record

    assert first_difference(record(2.0, 0), record(2.0, 0)) == ""
    numbers = first_difference(record(2.0, 0), record(3.0, 0))
    assert "`x = torch.ones(3, 4).mul(factor)` - the capture ran torch.Tensor.mul with 3.0" in numbers
    assert numbers.endswith("the eager call before it torch.Tensor.mul with 2.0")
    assert "`x.sum(dims)` - the capture ran aten::sum.dim_IntList(float[3, 4], [1]" in first_difference(
        record(2.0, 0), record(2.0, 1)
    )


class Solving(nn.Linear):
    """Solves a triangular system per sample, as the gated delta rule does (qwen3_5 of transformers)."""

    def forward(self, x: Tensor) -> Tensor:
        system = torch.eye(8, device=x.device) + super().forward(x).unflatten(1, (8, 8)).tril(-1)
        return torch.linalg.solve_triangular(system, x.unsqueeze(-1), upper=False, unitriangular=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_operation_that_makes_addresses_is_no_difference(engine: Engine) -> None:
    """R1: on CUDA it makes those of its matrices by an `arange`, others in each call; replays keep theirs."""
    ends = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Solving(8, 64).to(engine[0])
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        step = ampkit.graphed_step(lambda net, x: net(x).square().mean(), net, optimizer, graph=graph)
        with deterministic():
            for i in range(8):
                made = torch.Generator().manual_seed(i)
                step(torch.randn(300, 8, generator=made).to(engine[0]))
        ends.append([*net.parameters()])
    assert_same(*ends)
    assert (step.replays, step.report().failure) == (5, None)


class _Passing(WatchingMode):
    """Calls each operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [nullcontext, _Passing], ids=["no mode", "mode"])
def test_where_random_state_is_kept_is_no_difference(mode: Callable[[], Any]) -> None:
    """R2: memory-efficient attention keeps it on the host, in a capture on the device; the step may be under a mode."""
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    x, sums = torch.empty(1, 1, 8, 8, device="meta"), torch.empty(1, 1, 8, device="meta")

    def record(device: str, dropout: float = 0.0) -> Any:
        seed = torch.empty((), dtype=torch.int64, device=device)

        def call(x: Tensor) -> None:
            with mode():
                backward(x, x, x, x, None, x, sums, seed, seed, dropout, [True, True, True, False])

        return recorded(call, x)

    assert first_difference(record("cpu"), record("meta")) == ""
    assert "_efficient_attention_backward" in first_difference(record("cpu"), record("meta", dropout=0.5))


class _Chosen(nn.Module):
    """Attention, of whose result a mask selects entries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.first(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.last(out.transpose(1, 2).flatten(2)[mask])


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_in_a_step_that_is_given_numbers(engine: Engine) -> None:
    """D3: what a mask selects is counted ahead. So the rehearsal and the capture are under a dispatch mode."""
    kernel = SDPBackend.EFFICIENT_ATTENTION if engine[0] == "cuda" else SDPBackend.MATH
    ends = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = _Chosen().to(engine[0])
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        step = ampkit.graphed_step(lambda net, x, mask: net(x, mask).square().mean(), net, optimizer, graph=graph)
        made = torch.Generator().manual_seed(1)
        mask = (torch.rand(4, 8, generator=made) > 0.5).to(engine[0])
        with deterministic(), sdpa_kernel(kernel):
            for _ in range(9):
                step(torch.randn(4, 8, 16, generator=made).to(engine[0]), mask)
        ends.append([*net.parameters()])
    assert_same(*ends)
    assert (step.report().failure, step.report().outcome) == (None, "whole")


def test_attention_is_as_fast_under_a_recorder() -> None:
    """nn.TransformerEncoderLayer asks for function modes, and would take slower kernels under one."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad(), recorded_call() as recorder:
        layer(x)
    assert recorder.record is not None
    assert "aten::_transformer_encoder_layer_fwd" in {op.text.partition("(")[0] for op in recorder.record.threads[0]}


@pytest.mark.cuda
def test_the_net_changes_neither_kernels_nor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that was captured while recording has the same kernels, order and bytes as one captured without."""
    found = []
    for seen in (True, True, False):  # the first one may be the first graph of the process
        if not seen:
            monkeypatch.setattr("ampkit._capture.compare.call_record.execution_trace", _no_trace)
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10)
        ).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        step = ampkit.graphed_step(
            lambda m, x: m(x).square().mean(), net, optimizer, policy="float16", max_norm=1.0, host_writes="ignore"
        )
        x = torch.randn(8, 3, 8, 8, device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)  # that nothing could be compared
            for _ in range(20):
                step(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            step(x)
            torch.cuda.synchronize()
        kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found.append((step.report().bytes, kernels))
        assert step.report().graphs == 1
        step.close()
    assert found[1] == found[2]
    assert len(found[1][1]) > 10


def _no_trace() -> Any:
    return nullcontext(SimpleNamespace(begun=False, text=""))


# ---------------------------------------------------------------------------- torch.cuda.is_current_stream_capturing


class Asks(nn.Module):
    """A module that takes another branch in a capture, as transformers does, also when checkpointing calls it again."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.checkpointed = checkpointed

    def branch(self, x: Tensor) -> Tensor:
        asked = asks()
        return torch.tanh(self.inner(x)) if asked else torch.sigmoid(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            hidden = torch.utils.checkpoint.checkpoint(self.branch, x, use_reentrant=False)
        else:
            hidden = self.branch(x)
        return self.last(hidden)


asks = torch.cuda.is_current_stream_capturing  # imported by name, before any capture


@pytest.mark.cuda
@pytest.mark.parametrize("checkpointed", [False, True])
def test_code_that_asks_takes_the_same_branch(checkpointed: bool) -> None:
    """R1: in a capture, user code gets the same answer as in an eager call, so that the graph has eager's bits."""
    runs = []
    for graph in ("off", "auto"):
        torch.manual_seed(0)
        with deterministic():
            result, step = trained(Asks(checkpointed), ("cuda", graph), graph, on_failure="raise")
        runs.append(result)
    assert_same(*runs)
    assert step.replays == 9


@pytest.mark.cuda
def test_torch_and_other_threads_see_the_truth() -> None:
    """R1: during a capture of ampkit's, torch's own modules are told that it runs; after it the question is torch's."""
    told: dict[str, bool] = {}
    torchs = types.ModuleType("torch.something")
    exec("import torch\ndef ask(): return torch.cuda.is_current_stream_capturing()", vars(torchs))

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        told["user"], told["torch"] = asks(), torchs.ask()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            told["side stream"] = asks()
        torch.cuda.current_stream().wait_stream(side)
        return square(model, x)

    before = torch.cuda.graphs._cuda_isCurrentStreamCapturing
    _, step = trained(nn.Linear(6, 1), ("cuda", "auto"), "auto", loss_fn, on_failure="raise")
    assert step.captures == 1
    assert told == {"user": False, "torch": True, "side stream": False}
    assert torch.cuda.graphs._cuda_isCurrentStreamCapturing is before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        told["own"] = asks()
        torch.ones(1, device="cuda").add_(1)
    assert told["own"]


def test_who_is_told_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: the answer depends on the module that asks and on the stream. Here other objects stand for streams."""
    ours, others = types.SimpleNamespace(cuda_stream=1), types.SimpleNamespace(cuda_stream=2)
    current = [ours]
    monkeypatch.setattr(_capturing, "_is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])

    def answers(module: str) -> bool:
        scope: dict[str, Any] = {"__name__": module, "asks": asks}
        exec("def ask(): return asks()", scope)
        return bool(scope["ask"]())

    with _capturing.hidden_capture(ours):  # type: ignore[arg-type]  # it needs no more of a stream
        names = ("model", "transformers.masking_utils", "torch.optim.optimizer", "ampkit._callables.graphed_callable")
        assert [answers(name) for name in names] == [False, False, True, True]
        # What autograd's threads see: they are not the one that captures.
        monkeypatch.setattr(_capturing, "captures", types.SimpleNamespace(answer=None, noting=False))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert answers("model") is False
        current[0] = others
        assert answers("model") is True
        monkeypatch.undo()
