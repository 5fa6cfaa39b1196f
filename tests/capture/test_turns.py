"""Streams and threads: calls of graphed functions are made one at a time, and their work is done in that order."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import ENGINES
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit._capture.graph import turns as _turns

Engine = tuple[str, str]

# Where other threads are in the middle of something, a capture cannot be compared with an eager call, which is said.
pytestmark = pytest.mark.filterwarnings("ignore:.*the capture cannot be compared:ampkit.CaptureWarning")


@pytest.fixture(autouse=True)
def switching() -> Iterator[None]:
    """Have threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(*functions: Callable[[], Any]) -> None:
    """Call functions at the same time, each in a thread of its own, and raise what the first of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> None:
        try:
            start.wait(60)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def make_step(engine: Engine, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, ampkit.GraphedStep]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(engine[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer, ampkit.graphed_step(loss_fn, model, optimizer, graph=engine[1], **options)


# -------------------------------------------------------------------------------------------------- threads, one step


@pytest.mark.parametrize("accumulate", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("graph", ["on", "off"])
@pytest.mark.parametrize("engine", ENGINES)
def test_threads_on_one_step(engine: Engine, graph: str, accumulate: int) -> None:
    """R6: four threads, 30 calls each with one batch: the bits of 120 calls in one thread, none of them lost."""
    device = engine[0]
    engine = engine if graph == "on" else (device, "off")
    x, y = torch.randn(8, 4, device=device), torch.randn(8, 2, device=device)

    def train(threads: int) -> list[Tensor]:
        model, optimizer, step = make_step(engine, accumulate=accumulate, policy="bfloat16")

        def calls() -> None:
            for _ in range(120 // threads):
                step(x, y)
                step.report()

        in_threads(*[calls] * threads)
        if device == "cuda":
            torch.cuda.synchronize()
        counts = {float(state["step"]) for state in optimizer.state.values()}
        assert counts == {120 / accumulate}
        assert step.replays + sum(step.report().eager.values()) == 120
        return [param.detach().cpu() for param in model.parameters()]

    torch.testing.assert_close(train(4), train(1), rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_on_one_function(engine: Engine) -> None:
    """R6: each thread gets the outputs of its own inputs, though the graph has but one place for an input."""
    device, graph = engine
    model = nn.Linear(64, 64).to(device)

    @ampkit.graphed(modules=(model,), graph=graph, on_failure="raise")
    def forward(x: Tensor) -> Tensor:
        if device == "cpu":
            time.sleep(1e-4)  # lets another thread run between the copy of the input and its use
        for _ in range(8):
            x = torch.tanh(x)
        return x

    def caller(number: int) -> Callable[[], None]:
        def calls() -> None:
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                for i in range(40):
                    x = torch.full((16, 64), number + i / 40, device=device)
                    expected = x
                    for _ in range(8):
                        expected = torch.tanh(expected)
                    torch.testing.assert_close(forward(x), expected)

        return calls

    in_threads(*[caller(number) for number in range(4)])
    # Rehearsals may have to wait for a moment in which no other thread is in the middle of something.
    assert forward.replays >= 160 - 3 - 2 * 8
    assert forward.report().graphs == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_on_two_functions(engine: Engine) -> None:
    """R6: two functions that were made in one thread, each called in a thread and on a stream of its own."""
    device, graph = engine
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(512, 64).to(device).requires_grad_(False)
        made.append((model, ampkit.graphed(modules=(model,), graph=graph, on_failure="raise")(model.forward)))

    def caller(model: nn.Module, forward: Any) -> Callable[[], None]:
        def calls() -> None:
            with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
                for i in range(40):
                    x = torch.full((16, 512), i / 40, device=device)
                    torch.testing.assert_close(forward(x), model(x))

        return calls

    in_threads(*[caller(*pair) for pair in made])
    assert all(forward.replays >= 37 - 2 * 8 and forward.report().graphs == 1 for _, forward in made)


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_on_one_callable(engine: Engine) -> None:
    """R6: forward and backward of one graphed module in three threads: each call's own gradients, replayed or eager."""
    device, graph = engine
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    plain.load_state_dict(model.state_dict())
    ampkit.make_graphed_callables(model, (torch.randn(4, 8, device=device, requires_grad=True),), graph=graph)

    def caller(number: int) -> Callable[[], None]:
        def calls() -> None:
            with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
                for i in range(20):
                    x = torch.full((4, 8), number + i / 20, device=device).requires_grad_()
                    (found,) = torch.autograd.grad(model(x).sum(), x)
                    (expected,) = torch.autograd.grad(plain(x).sum(), x)
                    torch.testing.assert_close(found, expected)

        return calls

    in_threads(*[caller(number) for number in range(3)])
    graphed: Any = model.forward
    assert graphed.replays + sum(graphed.eager.values()) == 60


def test_a_callable_that_another_thread_captures() -> None:
    """R6: during a capture the module has other parameters, which would get a call's gradients. So it is an error."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        waits = False

        def forward(self, x: Tensor) -> Tensor:
            if self.waits and threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(60)
            return super().forward(x)

    model = Slow(4, 2)
    ampkit.make_graphed_callables(model, (torch.randn(3, 4),), graph="emulate")
    model.waits = True
    thread = threading.Thread(target=lambda: model(torch.randn(5, 4)), daemon=True)
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(ampkit.AmpkitError, match="while another thread captures it"):
            model(torch.randn(3, 4))
    finally:
        go_on.set()
        thread.join(60)
    model(torch.randn(3, 4)).sum().backward()


# ------------------------------------------------------------------------------------------------------------- nesting


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_calls_itself(engine: Engine) -> None:
    """R6: it is an error, not a deadlock. Then this thread and others can call the step again."""
    device, graph = engine
    torch.manual_seed(0)
    model, nested = nn.Linear(4, 2).to(device), True

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        if nested:
            step(x)
        return model(x).square().sum()

    step = ampkit.graphed_step(loss_of, model, torch.optim.SGD(model.parameters(), 0.1, fused=True), graph=graph)
    x = torch.randn(3, 4, device=device)
    for _ in range(2):
        with pytest.raises(ampkit.AmpkitError, match="graphed_step was called from inside itself"):
            step(x)
    nested = False
    for _ in range(3):
        step(x)
    in_threads(lambda: step(x))
    assert step.replays == 1


def test_one_function_within_another() -> None:
    """R6: two graphed functions may be nested as they are eagerly, also where both run in two threads."""
    model = nn.Linear(4, 4).requires_grad_(False)
    inner = ampkit.graphed(modules=(model,), graph="emulate", on_failure="raise")(lambda x: model(x))
    outer = ampkit.graphed(modules=(model,), graph="emulate", on_failure="raise")(lambda x: inner(x) * 2)

    def calls() -> None:
        for i in range(30):
            x = torch.full((2, 4), float(i))
            torch.testing.assert_close(outer(x), model(x) * 2)
            torch.testing.assert_close(inner(x), model(x))

    in_threads(calls, calls)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
def test_one_function_within_the_capture_of_another() -> None:
    """R6: a graph cannot hold a graph: the outer one says so and stays eager, with right values."""
    model = nn.Linear(4, 4, device="cuda").requires_grad_(False)
    inner = ampkit.graphed(modules=(model,))(lambda x: model(x))
    outer = ampkit.graphed(modules=(model,))(lambda x: inner(x) * 2)
    for i in range(8):
        x = torch.full((2, 4), float(i), device="cuda")
        torch.testing.assert_close(outer(x), model(x) * 2)
    assert "within the capture of another graphed function" in str(outer.report().failure)
    assert inner.replays > 0


def test_a_step_within_a_capture() -> None:
    """R6: what a nested call raises there."""
    _, _, step = make_step(("cpu", "emulate"))
    with _turns.within_capture(), pytest.raises(ampkit.AmpkitError, match="within the capture of another"):
        step(torch.randn(3, 4), torch.randn(3, 2))
    step(torch.randn(3, 4), torch.randn(3, 2))


def test_a_call_in_a_backward_does_not_wait() -> None:
    """R6: a call may wait for an autograd thread. If that thread called the step, it would wait for the call."""
    model = nn.Linear(4, 4).requires_grad_(False)
    inside, go_on = threading.Event(), threading.Event()

    @ampkit.graphed(modules=(model,), graph="emulate")
    def slow(x: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return model(x)

    other = ampkit.graphed(modules=(model,), graph="emulate")(lambda x: model(x))
    thread = threading.Thread(target=lambda: slow(torch.ones(2, 4)), daemon=True)
    thread.start()
    leaf = torch.ones(2, 4, requires_grad=True)
    leaf.register_hook(lambda grad: other(grad))
    try:
        assert inside.wait(60)
        with pytest.raises(ampkit.AmpkitError, match="was called in a backward pass"):
            leaf.sum().backward()
    finally:
        go_on.set()
        thread.join(60)
    leaf.sum().backward()
    torch.testing.assert_close(leaf.grad, model(torch.ones(2, 4)))


def test_an_interrupt_gives_the_turn_back() -> None:
    """R8: Ctrl-C within a call leaves a step that this thread and others can call."""
    model, stop = nn.Linear(4, 2), True

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        if stop:
            raise KeyboardInterrupt
        return model(x).square().sum()

    step = ampkit.graphed_step(loss_of, model, torch.optim.SGD(model.parameters(), 0.1, fused=True), graph="emulate")
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(3, 4))
    stop = False
    step(torch.ones(3, 4))
    in_threads(lambda: step(torch.ones(3, 4)))


# ------------------------------------------------------------------------------------------------------------- streams


class FakeStream:
    """Notes which streams it was told to wait for."""

    def __init__(self, address: int, log: list[tuple[int, int]]) -> None:
        self.address = address
        self._log = log

    def wait_stream(self, other: "FakeStream") -> None:
        self._log.append((self.address, other.address))


def test_a_stream_waits_where_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6: the new stream waits for the last one, the default stream (0) like any other; nothing while it stays."""
    log: list[tuple[int, int]] = []
    streams = {address: FakeStream(address, log) for address in (0, 7, 8)}
    current, looked = [0], [0]

    def current_stream(device: torch.device) -> FakeStream:
        looked[0] += 1
        return streams[current[0]]

    monkeypatch.setattr(_turns, "raw_stream", lambda index: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    order = _turns.StreamOrder(torch.device("cuda", 0))
    for address in (7, 7, 7, 0, 0, 8, 7, 7):
        current[0] = address
        order.follow()
    assert log == [(0, 7), (8, 0), (7, 8)]
    assert looked[0] == 4, "while the stream stays, it is not even looked up"


def heavy(x: Tensor, weight: Tensor) -> Tensor:
    """A millisecond of matrix products, then one that cuBLAS splits over a workspace."""
    for _ in range(24):
        x = torch.tanh(x @ weight)
    return x[:32] @ x.t()[:, :32]


def inputs(count: int) -> list[Tensor]:
    made = [torch.randn(1024, 1024, device="cuda") for _ in range(count)]
    torch.cuda.synchronize()
    return made


@pytest.mark.cuda
@pytest.mark.parametrize("first", [0, 1, 5])
def test_one_function_on_two_streams(first: int) -> None:
    """R6: calls from two streams in turn, warm-up included: the eager result of each input, bit by bit."""
    model = nn.Linear(1024, 1024, bias=False, device="cuda").requires_grad_(False)
    graphed = ampkit.graphed(modules=(model,), on_failure="raise")(lambda x: heavy(x, model.weight))
    batches = inputs(24)
    expected = [heavy(x, model.weight) for x in batches]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for i, x in enumerate(batches):
        with torch.cuda.stream(streams[i % 2 if i >= first else 0]):
            found.append(graphed(x))
    torch.cuda.synchronize()
    assert graphed.replays == 21
    for i, (out, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(out, right), f"call {i}"


@pytest.mark.cuda
@pytest.mark.parametrize("threads", [False, True])
def test_two_functions_on_two_streams(threads: bool) -> None:
    """R6: two functions at once, each on a stream of its own, share what cuBLAS keeps: right values in both."""
    made = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Linear(1024, 1024, bias=False, device="cuda").requires_grad_(False)
        graphed = ampkit.graphed(modules=(model,), on_failure="raise")(lambda x, model=model: heavy(x, model.weight))
        batches = inputs(20)
        expected = [heavy(x, model.weight) for x in batches]
        made.append((graphed, batches, expected, torch.cuda.Stream(), []))
    torch.cuda.synchronize()

    def call(graphed: Any, batches: Any, expected: Any, stream: Any, found: list[Tensor], i: int) -> None:
        with torch.cuda.stream(stream):
            found.append(graphed(batches[i]))

    def all_calls(one: Any) -> Callable[[], None]:
        return lambda: [call(*one, i) for i in range(20)] and None

    if threads:
        in_threads(*map(all_calls, made))
    else:
        for i in range(20):
            for one in made:
                call(*one, i)
    torch.cuda.synchronize()
    for graphed, _, expected, _, found in made:
        assert graphed.replays == 17
        assert all(map(torch.equal, found, expected))


@pytest.mark.cuda
def test_a_step_on_two_streams() -> None:
    """R6: training calls from two streams in turn leave the bits of the same calls from one; a learning rate that
    changes in each call is not written while the last replay reads it."""

    def train(streams: list[torch.cuda.Stream]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        step = ampkit.graphed_step(
            loss_fn, model, optimizer, policy="float16", max_norm=1.0, accumulate=2, on_failure="raise"
        )
        batches = [(torch.randn(256, 512, device="cuda"), torch.randn(256, 512, device="cuda")) for _ in range(4)]
        torch.cuda.synchronize()
        for i in range(40):
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + i)
            with torch.cuda.stream(streams[i % len(streams)]):
                step(*batches[i % 4])
        torch.cuda.synchronize()
        assert step.replays > 20
        return [param.detach().cpu() for param in model.parameters()]

    expected = train([torch.cuda.Stream()])
    found = train([torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.cuda
def test_a_step_and_callables_on_two_streams() -> None:
    """R6: what make_graphed_callables made runs beside a graphed function without sharing anything with it."""
    model = nn.Linear(1024, 1024, bias=False, device="cuda").requires_grad_(False)
    graphed = ampkit.graphed(modules=(model,), on_failure="raise")(lambda x: heavy(x, model.weight))
    plain = nn.Linear(1024, 1024, bias=False, device="cuda")
    part = ampkit.make_graphed_callables(lambda x, w: heavy(x, w), (inputs(1)[0], plain.weight.detach()))
    batches, streams = inputs(16), [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = [(heavy(x, model.weight), heavy(x, plain.weight.detach())) for x in batches]
    torch.cuda.synchronize()
    found = []
    for x in batches:
        with torch.cuda.stream(streams[0]):
            one = graphed(x)
        with torch.cuda.stream(streams[1]):
            found.append((one, part(x, plain.weight.detach())))
    torch.cuda.synchronize()
    assert part.replays == 16
    for (one, other), (right, too) in zip(found, expected, strict=True):
        assert torch.equal(one, right)
        assert torch.equal(other, too)
