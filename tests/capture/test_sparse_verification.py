"""`verify="sparse"`: few replays of all are compared with eager calls; replays call no Python here."""

import ctypes
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, training_state
from tape import taped
from torch import Tensor, nn

import ampkit
from ampkit._capture.compare.schedule import SPARSE, ComparisonSchedule
from ampkit._capture.compare.verify import Verifier

Engine = tuple[str, str]
MORE = [pytest.mark.slow, pytest.mark.seeds]


def net_of(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=2.0**-6, fused=True)


def batch_of(device: str) -> Tensor:
    return torch.linspace(-1.0, 1.0, 32, device=device).reshape(4, 8)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with deterministic(), taped() if request.param[0] == "cpu" else nullcontext():
        yield request.param


def test_which_replays_are_compared() -> None:
    """W6: the first replay of each graph, then that of the 16th, 256th, 4096th, each 50,000th call; or the first n."""
    schedule = ComparisonSchedule(SPARSE)
    compared = []
    for call in range(1, 160_001):
        schedule.count()
        if schedule.is_due(is_first=call in (1, 100)):
            compared.append(call)
            schedule.note()
    assert compared == [1, 16, 100, 256, 4096, 50_000, 100_000, 150_000]
    first = ComparisonSchedule(2)
    due = []
    for _ in range(4):
        first.count()
        due.append(first.is_due(is_first=True))
        if due[-1]:
            first.note()
    assert due == [True, True, False, False]


def test_a_comparison_that_cannot_be_made_waits() -> None:
    """Where ranks do not vote in the call that is due, they compare in the next one in which they do."""
    schedule = ComparisonSchedule(SPARSE)
    schedule.count()
    schedule.note()
    for _ in range(15 + 40):
        schedule.count()
    assert schedule.is_due()
    schedule.note()
    assert not schedule.is_due()


def test_the_whole_step_is_compared_in_these_calls(engine: Engine) -> None:
    """W6: the function is called in the warm-up, in the capture, and in the calls that are compared; the bits stay."""
    device, graph = engine
    calls = 0

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return net(x).square().mean()

    def train(verify: int | str, graph: str) -> tuple[Any, list[int], Any]:
        net = net_of(device)
        optimizer = optimizer_of(net)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph, verify=verify, host_writes="ignore")
        called = []
        for call in range(1, 300):
            before = calls
            step(batch_of(device))
            called += [call] * (calls > before)
        return training_state(net, optimizer, step.scaler), called, step.report()

    state, called, report = train("sparse", graph)
    assert called == [1, 2, 3, 4, 19, 259]  # the first replay is that of the call of the capture
    assert report.replays == 296
    assert report.failure is None
    assert_same(state, train(0, "off")[0])


def flipped(value: float, bit: int) -> float:
    """Return a number of float32 with another bit."""
    number = ctypes.c_float(value)
    word = ctypes.cast(ctypes.pointer(number), ctypes.POINTER(ctypes.c_uint32))
    word.contents.value ^= 1 << bit
    return number.value


CONSTANTS = (0.75, 1.5, -0.3, 0.05, 1.1)  # each of them decides about bits: some activations are beyond 0.05


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(seed, marks=MORE) for seed in range(15, 100))])
@pytest.mark.quick(5)
def test_a_flipped_bit_of_a_constant_is_found(engine: Engine, seed: int) -> None:
    """W6: a high bit of a number that a graph holds is another one: the next comparison finds it; bits are eager's."""
    device, graph = engine
    rng = random.Random(seed)
    place, bit = rng.randrange(len(CONSTANTS)), rng.randrange(18, 30)

    def train(graph: str, wrong_in: int) -> tuple[list[float], Any, Any]:
        net, calls = net_of(device), 0

        def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            numbers = list(CONSTANTS)
            if calls == wrong_in:
                numbers[place] = flipped(numbers[place], bit)
            a, b, c, d, e = numbers
            h = net(x * a + 0.1)
            return (torch.tanh(h * b) * c + h.clamp(-d, d) * e).square().mean()

        optimizer = optimizer_of(net)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph, verify="sparse", host_writes="ignore")
        losses = [step(batch_of(device)).loss.item() for _ in range(24)]
        return losses, training_state(net, optimizer, step.scaler), step.report()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        found, state, report = train(graph, wrong_in=4)
    assert report.replays == 1
    assert "is not what eager computes" in report.failure
    losses, expected, _ = train("off", wrong_in=0)
    assert found == losses
    assert_same(state, expected)


def test_a_later_difference_is_found_by_the_next_comparison(engine: Engine) -> None:
    """W6: a number that nobody compares changes behind the first comparison; that in the 16th call finds it."""
    device, graph = engine
    number = ctypes.c_float(1.0)  # read where no watch of objects sees it
    address = ctypes.addressof(number)

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean() * (ctypes.c_float * 1).from_address(address)[0]

    net = net_of(device)
    step = ampkit.graphed_step(loss_fn, net, optimizer_of(net), graph=graph, verify="sparse")
    for _ in range(10):
        step(batch_of(device))
    number.value = 3.0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(12):
            step(batch_of(device))
    assert any("verify: " in str(each.message) and "not what eager computes" in str(each.message) for each in said)
    assert step.replays == 16


def test_without_memory_nothing_is_compared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """W6: a check for which there is no memory is left out, which is said once; the step is that of the replay."""
    device, graph = engine

    def train(graph: str) -> tuple[Any, Any]:
        net = net_of(device)
        optimizer = optimizer_of(net)
        step = ampkit.graphed_step(lambda net, x: net(x).square().mean(), net, optimizer, graph=graph, verify="sparse")
        for _ in range(24):
            step(batch_of(device))
        return training_state(net, optimizer, step.scaler), step.report()

    expected, _ = train("off")
    monkeypatch.setattr(Verifier, "_has_room", lambda self, pool_bytes: False)
    with pytest.warns(ampkit.CaptureWarning, match="there is no memory to compare a replay") as said:
        state, report = train(graph)
    assert (len(said), report.replays, report.failure) == (1, 21, None)
    assert_same(state, expected)


def test_a_comparison_that_runs_out_of_memory_is_undone(engine: Engine) -> None:
    """W6: an eager call that finds no memory behind its forward leaves nothing: the state is that of one replay."""
    device, graph = engine

    def train(graph: str, fails_in: int) -> tuple[Any, Any]:
        net, calls = net_of(device), 0

        def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            loss = net(x).square().mean()
            if calls == fails_in:
                net[0].bias.data.fill_(1.0)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        optimizer = optimizer_of(net)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph, verify="sparse", host_writes="ignore")
        for _ in range(24):
            step(batch_of(device))
        return training_state(net, optimizer, step.scaler), step.report()

    expected, _ = train("off", 0)
    with pytest.warns(ampkit.CaptureWarning, match="there is no memory to compare a replay"):
        state, report = train(graph, 5)
    assert (report.replays, report.failure) == (21, None)
    assert_same(state, expected)


def test_no_kernel_is_blamed_under_emulation() -> None:
    """W6: an emulated graph calls the function again: where two calls differ, that is no noise of kernels."""
    number = (ctypes.c_float * 1)(1.0)
    address = ctypes.addressof(number)

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        here = (ctypes.c_float * 1).from_address(address)
        here[0] *= 1.5
        return net(x).square().mean() * here[0]

    net = net_of("cpu")
    step = ampkit.graphed_step(
        loss_fn, net, optimizer_of(net), graph="emulate", verify="sparse", host_writes="ignore", on_failure="eager"
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            step(batch_of("cpu"))
    text = " ".join(str(each.message) for each in said)
    assert step.report().failure is not None
    assert "kernels" not in text, text


@pytest.mark.parametrize("verify", ["often", -1, 1.5, True])
def test_other_values_are_refused(verify: Any) -> None:
    """An error names the argument and what it may be."""
    net = net_of("cpu")
    with pytest.raises(ValueError, match=r"graphed_step\(verify=.*'sparse'"):
        ampkit.graphed_step(
            lambda net, x: net(x).square().mean(), net, optimizer_of(net), graph="emulate", verify=verify
        )
