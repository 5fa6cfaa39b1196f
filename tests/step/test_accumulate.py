"""graphed_step(accumulate=N): windows of micro-batches, short ones, clipping and skipping over the whole of one."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from harness import (
    ENGINES,
    OPTIMIZERS,
    assert_same,
    boosted_loss,
    deterministic,
    make_batches,
    make_net,
    training_state,
)
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
RATE = 2.0**-7  # in float32, as the step reads it, exactly what it is in Python


def make(engine: Engine, graph: str | None = None, **options: Any) -> tuple[ampkit.GraphedStep, nn.Module, Any]:
    model = make_net(engine[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    options = {"policy": "float32", "on_failure": "raise", "graph": graph or engine[1], **options}
    return ampkit.graphed_step(options.pop("loss_fn", boosted_loss), model, optimizer, **options), model, optimizer


@pytest.mark.parametrize("engine", ENGINES)
def test_equals_a_loop_written_with_torch(engine: Engine) -> None:
    """Bit by bit `(loss / N).backward()` N times, one optimizer step, and a short window that is flushed."""
    batches = make_batches(engine[0], [8] * 20)
    with deterministic():
        step, model, optimizer = make(engine, accumulate=3)
        torch.manual_seed(5)
        for i, batch in enumerate(batches):
            step(*batch)
            if i == 12:
                step.flush()
        state = training_state(model, optimizer, step.scaler)
        assert step.replays > 5

        reference = make_net(engine[0])
        optimizer = torch.optim.AdamW(reference.parameters(), lr=RATE, fused=True)
        torch.manual_seed(5)
        micro = 0
        for i, batch in enumerate(batches):
            loss, _ = boosted_loss(reference, *batch)
            (loss / 3).backward()
            micro += 1
            if micro == 3 or i == 12:
                optimizer.step()
                optimizer.zero_grad()
                micro = 0
    assert_same(training_state(reference, optimizer, step.scaler), state)


def test_sparse_gradients() -> None:
    """Sparse gradients add up over a window as in torch's loop, and are never captured."""

    def make_model() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.EmbeddingBag(20, 4, sparse=True)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    batches = [torch.randint(20, (3, 5), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    model, optimizer = make_model()
    step = ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, accumulate=3, graph="off")
    expected, reference = make_model()
    for i, batch in enumerate(batches):
        step(batch)
        (expected(batch).square().mean() / 3).backward()
        if i % 3 == 2:
            reference.step()
            reference.zero_grad()
    torch.testing.assert_close(model.weight, expected.weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_overflow_skips_the_whole_window(engine: Engine) -> None:
    """S1: after an overflow in one replayed micro-batch, only the scale has changed, and the next window is clean."""
    step, model, _ = make(engine, policy="float16", accumulate=2, max_norm=1.0)
    batches = make_batches(engine[0], [8] * 14, overflow_at=(10,))
    for batch in batches[:10]:
        step(*batch)
    scale, before = step.scaler.get_scale(), {name: p.detach().clone() for name, p in model.named_parameters()}
    outs = [step(*batch) for batch in batches[10:12]]
    assert [bool(out.skipped) for out in outs] == [False, True]
    assert_same(before, {name: p.detach() for name, p in model.named_parameters()})
    assert step.scaler.get_scale() == scale / 2
    out = [step(*batch) for batch in batches[12:]][-1]
    assert not out.skipped
    assert out.grad_norm is not None
    assert out.grad_norm.isfinite()
    assert step.replays == 8


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_micro_batch_returns(engine: Engine) -> None:
    """The loss is the micro-batch's own, the norm is the window's, and the scheduler is stepped once per window."""
    step, model, optimizer = make(engine, accumulate=4, max_norm=float("inf"), loss_fn=constant_loss)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step._window.after = scheduler.step
    x = torch.ones(2, device=engine[0])
    for i in range(20):
        before = model.head.bias.detach().sum()
        out = step(x * (i % 4 + 1))
        assert float(out.loss.detach()) == pytest.approx(float((i % 4 + 1) * before), rel=1e-5)
        assert (out.grad_norm is None) == (i % 4 != 3)
        assert all(param.grad is None for param in model.parameters())
    assert scheduler.get_last_lr() == [RATE * 0.5**5]
    assert out.grad_norm is not None
    torch.testing.assert_close(out.grad_norm.cpu(), torch.tensor(10**0.5 * 2.5))  # d/db of the mean of 1, 2, 3, 4 times
    assert step.report().eager == {"warm-up": 9}  # the two in the middle share a graph


def constant_loss(model: Any, x: Tensor) -> Tensor:
    return model.head.bias.sum() * x.mean()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_parameters_with_a_gradient_in_some_micro_batches_only(engine: Engine) -> None:
    """A layer that only some micro-batches use gets their gradients, whichever comes first, and none from others."""

    def loss_fn(model: Any, x: Tensor, both: bool) -> Tensor:
        return model[0](x).square().mean() + (model[1](x).square().mean() if both else 0.0)

    def run(graph: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).to(engine[0])
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        step = ampkit.graphed_step(loss_fn, model, optimizer, accumulate=2, graph=graph, on_failure="raise", warmup=2)
        x = torch.arange(8.0, device=engine[0]).reshape(2, 4) / 8
        history = []
        for i in range(32):
            out = step(x + i, both=bool((i // 2) & 1 if i % 2 else (i // 4) & 1))
            history.append((out.loss, training_state(model, optimizer, step.scaler)))
        assert step.replays == (20 if graph != "off" else 0)
        return history

    with deterministic():
        assert_same(run("off"), run(engine[1]))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_ends_the_window(engine: Engine) -> None:
    """An exception of loss_fn comes out. Its window is dropped, since gradients may have a part of the micro-batch."""
    fail = numpy.zeros(100)  # what large arrays hold is not compared from call to call

    def loss_fn(model: nn.Module, *batch: Tensor) -> Any:
        if fail[0]:
            raise KeyError("a mistake of the user")
        return boosted_loss(model, *batch)

    step, model, _ = make(engine, loss_fn=loss_fn, accumulate=2)
    batches = make_batches(engine[0], [8] * 3)
    step(*batches[0])
    fail[0] = 1
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(KeyError, match="a mistake of the user"):
        step(*batches[1])
    fail[0] = 0
    step(*batches[2])
    assert_same(before, {name: p.detach() for name, p in model.named_parameters()})
    with pytest.raises(ampkit.InputMismatch):
        step(batches[0][0].to_sparse(), *batches[0][1:])
    step(*batches[1])  # the second of its window
    assert not torch.equal(before["head.weight"], model.head.weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_flush_of_an_empty_window_does_nothing(engine: Engine) -> None:
    """flush may be called after every epoch, whether or not the last window was short."""
    step, model, optimizer = make(engine, accumulate=2)
    step.flush()
    for batch in make_batches(engine[0], [8] * 4):
        step(*batch)
    before = training_state(model, optimizer, step.scaler)
    step.flush()
    assert_same(before, training_state(model, optimizer, step.scaler))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_closing_within_a_window(engine: Engine) -> None:
    """Accumulated gradients outlive the graphs, because they are in no pool."""
    with deterministic():
        histories = []
        for close in (False, True):
            step, model, optimizer = make(engine, accumulate=3)
            torch.manual_seed(5)
            for i, batch in enumerate(make_batches(engine[0], [8] * 30)):
                if close and i == 16:
                    step.close()
                step(*batch)
            assert step.captures == (6 if close else 3)
            histories.append(training_state(model, optimizer, step.scaler))
    assert_same(*histories)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_the_report_says_which_micro_batch_a_graph_has(engine: Engine) -> None:
    """Graphs of one layout differ in the micro-batch that they are for, and the report tells them apart."""
    step, _, _ = make(engine, accumulate=3)
    for batch in make_batches(engine[0], [8] * 15):
        step(*batch)
    words = {graph.layout.rpartition("; ")[2] for graph in step.report().per_graph}
    assert words == {"first micro-batch", "a middle micro-batch", "last micro-batch"}

    ordinary, _, _ = make(engine)
    for batch in make_batches(engine[0], [8] * 5):
        ordinary(*batch)
    assert [";" in graph.layout for graph in ordinary.report().per_graph] == [False]


def squared(net: nn.Module, x: Tensor) -> Tensor:
    return net(x.to(net[0].weight.dtype)).float().square().mean()  # type: ignore[index]  # nn.Sequential


Change = Callable[[nn.Sequential, torch.optim.Optimizer], object]


def trained(net: nn.Sequential, rate: float, calls: int, at: int, change: Change, graph: str | None) -> list[Tensor]:
    """Return the parameters behind windows of two calls; one call comes after a change. Without `graph`, by torch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, fused=True)
    step = None if graph is None else ampkit.graphed_step(squared, net, optimizer, accumulate=2, graph=graph)
    x = torch.ones(2, net[0].in_features)
    for i in range(calls):
        if i == at:
            change(net, optimizer)
        if step is not None:
            step(x)
            continue
        (squared(net, x) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in net.parameters()]


@pytest.mark.filterwarnings("ignore:.*Each such change takes 3 eager steps:ampkit.CaptureWarning")
@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_layers_that_change_places_within_a_window(graph: str) -> None:
    """An accumulated gradient belongs to its parameter, wherever that is in the model by now."""

    def swap(net: nn.Sequential, _: torch.optim.Optimizer) -> None:
        net[0], net[1] = net[1], net[0]

    def run(graph: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        return trained(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), 0.5, 4, 3, swap, graph)

    assert_same(run(graph), run(None))


def give_another_head(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net[1] = nn.Linear(16, 6)
    optimizer.param_groups[0]["params"][2:] = net[1].parameters()


@pytest.mark.filterwarnings("ignore:.*Each such change takes 3 eager steps:ampkit.CaptureWarning")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda net, _: net.double(), id="another dtype"),
        pytest.param(give_another_head, id="another head"),
    ],
)
@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_parameters_that_change_between_windows(graph: str, change: Change) -> None:
    """Gradients are accumulated in memory that is like them, also where the parameters were others before."""

    def run(graph: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        return trained(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), 0.1, 8, 4, change, graph)

    assert_same(run(graph), run(None))


def _mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


DIVIDED_TWICE: dict[str, Callable[..., Any]] = {
    "a mean": lambda model, x: _mean(model, x) / 4,
    "in place, with aux": lambda model, x: (_mean(model, x).div_(4.0), x),
    "a sum of means": lambda model, x: (_mean(model, x) + 0.5 * _mean(model, x)).div(4),
    "a loss of torch's": lambda model, x: nn.functional.mse_loss(model(x), x) / 4,
    "a product": lambda model, x: 0.25 * _mean(model, x),
}
DIVIDED_ONCE: dict[str, Callable[..., Any]] = {
    "as it is": _mean,
    "by another number": lambda model, x: _mean(model, x) / 3,
    "by no number at all": lambda model, x: _mean(model, x) * 0.0,
    "a product of a sum": lambda model, x: 0.25 * model(x).square().mean(1).sum(),
    "by a tensor": lambda model, x: _mean(model, x) / (0 * x + 4).mean(0, keepdim=True).sum(),
    "a sum over the 4 samples": lambda model, x: model(x).square().mean(1).sum() / len(x),
    "sums of torch's": lambda model, x: (nn.functional.mse_loss(model(x), x, reduction="sum") + 1) / 4,
    "divided in front": lambda model, x: (model(x) / 4).square().mean(),
}


def accumulated(loss_fn: Callable[..., Any], accumulate: int, graph: str | None) -> Tensor:
    """Return a weight behind 24 calls of a step, or of the same loop."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    step = None if graph is None else ampkit.graphed_step(loss_fn, model, optimizer, accumulate=accumulate, graph=graph)
    for i in range(24):
        x = torch.full((4, 4), i / 16.0)
        if step is not None:
            step(x)
            continue
        returned = loss_fn(model, x)
        ((returned[0] if isinstance(returned, tuple) else returned) / accumulate).backward()
        if i % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach()


@pytest.mark.parametrize("graph", ["emulate", "off"])
@pytest.mark.parametrize("kind", DIVIDED_TWICE)
def test_a_loss_that_is_divided_twice(kind: str, graph: str) -> None:
    """It is said once, and changes nothing. With `accumulate=1`, and where the two numbers differ, nothing is said."""
    loss_fn = DIVIDED_TWICE[kind]
    with pytest.warns(ampkit.AmpkitWarning, match=r"accumulate=4\): loss_fn divides its loss by 4") as said:
        weight = accumulated(loss_fn, 4, graph)
    assert len(said) == 1
    assert_same(weight, accumulated(loss_fn, 4, None))
    for accumulate in (1, 2):
        assert_same(accumulated(loss_fn, accumulate, graph), accumulated(loss_fn, accumulate, None))


@pytest.mark.parametrize("kind", DIVIDED_ONCE)
def test_a_loss_that_is_not_divided_twice(kind: str) -> None:
    """Nothing is said of another division: warnings are errors."""
    loss_fn = DIVIDED_ONCE[kind]
    assert_same(accumulated(loss_fn, 4, "emulate"), accumulated(loss_fn, 4, None))
