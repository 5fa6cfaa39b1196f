"""`before_step` and `after_step`: code in front of the optimizer and behind it; `stepped`; windows that end early."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic, leave_out_inductor, training_state
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ampkit

Engine = tuple[str, str]
Before = Callable[[nn.Module], object]
OVERFLOWS = (7, 15)  # micro-batches


class Net(nn.Module):
    """Two layers, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.inner(self.first(x))))
        return out


def adaptive(net: nn.Module) -> None:
    """Clip each gradient by the norm of its parameter (AGC)."""
    for param in net.parameters():
        if param.grad is not None:
            most = param.norm().clamp(min=1e-3) * 0.1
            param.grad.mul_((most / param.grad.norm().clamp(min=1e-6)).clamp(max=1.0))


def cancels(net: nn.Module) -> None:
    """Have one layer stay as it is."""
    net.get_submodule("first").weight.grad = None  # type: ignore[assignment]


def replaces(net: nn.Module) -> None:
    """Put another tensor in a gradient's place."""
    for param in net.parameters():
        if param.grad is not None:
            param.grad = param.grad.sign() * 0.1


def counts(net: nn.Module) -> None:
    """Write to a buffer, a part of another one, and a weight."""
    net.get_buffer("seen").add_(1.0)
    net.get_buffer("largest")[1:3].copy_(torch.stack([p.grad.abs().max() for p in net.parameters()])[:2])  # type: ignore[union-attr]
    net.get_submodule("last").weight.mul_(0.99)  # type: ignore[operator]


def noisy(net: nn.Module) -> None:
    """Add noise to each gradient."""
    for param in net.parameters():
        if param.grad is not None:
            param.grad.add_(torch.randn_like(param.grad), alpha=0.01)


def rebinds(net: nn.Module) -> None:
    """Give gradients other memory."""
    for param in net.parameters():
        if param.grad is not None:
            param.grad.data = param.grad * 0.5


def swaps(net: nn.Module) -> None:
    """Exchange two gradients."""
    one, two = net.get_submodule("first").bias, net.get_submodule("inner").bias
    one.grad, two.grad = two.grad, one.grad  # type: ignore[union-attr]


def transposes(net: nn.Module) -> None:
    """Put gradients of another layout in their place."""
    for param in net.parameters():
        if param.grad is not None and param.dim() == 2:
            param.grad = param.grad.t().contiguous().t()


def normalizes(net: nn.Module) -> None:
    """Write to running statistics, which the schema of the operation does not say."""
    net.get_submodule("norm")(torch.ones(4, 3, device=net.get_buffer("seen").device) * net.get_submodule("last").bias)


BEFORE: list[Before] = [adaptive, cancels, replaces, counts, noisy, rebinds, swaps, transposes, normalizes]
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "fused": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
    "behind the graph": lambda net: torch.optim.Adafactor(net.parameters(), lr=1e-2),
    "several": lambda net: [
        torch.optim.SGD(net.get_submodule("first").parameters(), lr=0.1, momentum=0.9, fused=True),
        torch.optim.AdamW([*list(net.parameters())[2:]], lr=1e-2, fused=True),
    ],
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    with deterministic(), taped() if request.param[0] == "cpu" else nullcontext():
        yield request.param


def batches(device: str, count: int, overflows: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        x = torch.randn(4, 8, generator=made) * (math.inf if i in overflows else 1.0)
        found.append((x.to(device), torch.randint(3, (4,), generator=made).to(device)))
    return found


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def trained(
    engine: Engine,
    before: Before,
    kind: str = "fused",
    calls: int = 20,
    overflows: tuple[int, ...] = (),
    **options: Any,
) -> tuple[list[Any], ampkit.GraphedStep]:
    """Return what each call returned, and the state behind it."""
    device, graph = engine
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = OPTIMIZERS[kind](net)
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        step = ampkit.graphed_step(loss_fn, net, optimizer, before_step=before, graph=graph, **options)
        history = []
        for x, y in batches(device, calls, overflows):
            out = step(x, y)
            state = [training_state(net, each, step.scaler) for each in several]
            history.append((out.loss, out.grad_norm, out.skipped, torch.tensor(out.stepped), state))
    return history, step


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", BEFORE, ids=lambda before: before.__name__)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_norm": 0.1}, {"policy": "float16", "overflows": OVERFLOWS}, {"accumulate": 2, "max_norm": 0.1}],
    ids=str,
)
def test_replays_leave_the_bits_of_eager_steps(
    engine: Engine, before: Before, kind: str, options: dict[str, Any]
) -> None:
    """G3: what `before_step` does to gradients and tensors is in the graph, whatever the optimizer."""
    expected, _ = trained((engine[0], "off"), before, kind, **options)
    history, step = trained(engine, before, kind, **options)
    assert step.report().failure is None
    assert step.replays >= 10
    assert_same(history, expected)


@pytest.mark.parametrize("graph", ["off", "emulate"])
@pytest.mark.parametrize("before", [adaptive, cancels, replaces], ids=lambda before: before.__name__)
def test_as_in_a_loop_of_torch(before: Before, graph: str) -> None:
    """G3: it stands where a loop has it, between `backward` and `clip_grad_norm_`."""
    found = []
    for loop in (False, True):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        step = ampkit.graphed_step(loss_fn, net, optimizer, before_step=before, graph=graph)
        for x, y in batches("cpu", 10):
            if not loop:
                step(x, y)
                continue
            optimizer.zero_grad()
            loss_fn(net, x, y).backward()
            with torch.no_grad():
                before(net)
            optimizer.step()
        found.append([bits(param) for param in net.parameters()])
    assert_same(found[0], found[1])


def test_the_norm_is_that_of_the_changed_gradients(engine: Engine) -> None:
    """G3: clipping and `grad_norm` come behind it."""

    def small(net: nn.Module) -> None:
        for param in net.parameters():
            assert param.grad is not None
            param.grad.fill_(0.5)

    history, _ = trained(engine, small, max_norm=10.0)
    count = sum(param.numel() for param in Net().parameters())
    assert all(float(norm) == pytest.approx(0.5 * math.sqrt(count)) for _, norm, *_ in history)


@pytest.mark.parametrize("graph", ["off", "emulate"])
@pytest.mark.parametrize("before", [counts, normalizes], ids=lambda before: before.__name__)
def test_a_skipped_step_puts_back_what_it_changed(graph: str, before: Before) -> None:
    """G3: with a loss scale, buffers and weights are those from before the step that overflowed."""
    history, _ = trained(("cpu", graph), before, policy="float16", overflows=OVERFLOWS)
    for i in OVERFLOWS:
        assert history[i][2]
        was, now = ({key: value for key, value in history[j][4][0].items() if "scale" not in key} for j in (i - 1, i))
        assert_same(now, was)


@pytest.mark.parametrize("plain", ENGINES)
@pytest.mark.parametrize("way", ["scan", "window"])
def test_in_one_launch(plain: Engine, way: str) -> None:
    """G3: K steps, or the micro-batches of a step, in one launch."""
    device, graph = plain
    found = []
    for one_by_one in (True, False):
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        accumulate = 4 if way == "window" else 1
        step = ampkit.graphed_step(
            loss_fn, net, optimizer, before_step=counts, graph=graph, accumulate=accumulate, max_norm=0.1
        )
        data = batches(device, 40)
        if one_by_one:
            stepped = [step(x, y).stepped for x, y in data]
            assert stepped == [(i + 1) % accumulate == 0 for i in range(40)]
        else:
            for i in range(0, 40, 4):
                x, y = (torch.stack(each) for each in zip(*data[i : i + 4], strict=True))
                out = getattr(step, way)(x, y)
                assert out.stepped == (True if way == "window" else (True,) * 4)
        found.append(training_state(net, optimizer, step.scaler))
    assert_same(found[1], found[0])


def test_with_compiled_code(monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> None:
    """G3: the update stays as it is then, and the report says why."""
    leave_out_inductor(monkeypatch)
    expected, _ = trained(("cpu", "off"), adaptive)
    history, step = trained(("cpu", "emulate"), adaptive, compile="default")
    assert "before_step" in str(step.report())
    assert_same([each[0] for each in history], [each[0] for each in expected])


@pytest.mark.parametrize("kind", ["fused", "behind the graph"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_after_every_third_step(engine: Engine, kind: str, accumulate: int) -> None:
    """G3: steps with and without `after_step` have graphs of their own; skipped steps count."""
    found = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Net().to(engine[0])
        optimizer = OPTIMIZERS[kind](net)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)
            step = ampkit.graphed_step(
                loss_fn,
                net,
                optimizer,
                policy="float16",
                accumulate=accumulate,
                after_step=lambda net: net.get_buffer("seen").add_(1.0),
                after_every=3,
                graph=graph,
            )
            history = []
            for i, (x, y) in enumerate(batches(engine[0], 48, OVERFLOWS)):
                step(x, y)
                history.append((net.get_buffer("seen").clone(), training_state(net, optimizer, step.scaler)))
                assert history[-1][0] == (i + 1) // accumulate // 3
        found.append(history)
    assert step.report().failure is None
    assert step.replays >= 20
    assert kind != "fused" or step.report().graphs == (2 if accumulate == 1 else 3)
    assert_same(found[1], found[0])


@pytest.mark.parametrize("way", ["scan", "window"])
def test_after_every_third_step_of_a_stack(way: str) -> None:
    """G3: `scan` and `window` make their calls one by one then."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    step = ampkit.graphed_step(
        loss_fn,
        net,
        optimizer,
        accumulate=2 if way == "window" else 1,
        after_step=lambda net: net.get_buffer("seen").add_(1.0),
        after_every=3,
        graph="emulate",
    )
    data = batches("cpu", 48)
    for i in range(0, 48, 2):
        getattr(step, way)(*(torch.stack(each) for each in zip(*data[i : i + 2], strict=True)))
    assert net.get_buffer("seen") == (8 if way == "window" else 16)
    step.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_window_with_an_after_step_behind_it(engine: Engine) -> None:
    """G3: it stays one launch, and `after_step` is called once behind that, also after a `flush`."""
    found = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Net().to(engine[0])
        optimizer = OPTIMIZERS["fused"](net)
        seen: list[float] = []
        options: dict[str, Any] = {"after_step": lambda net, seen=seen: seen.append(net.inner.bias.sum().item())}
        step = ampkit.graphed_step(loss_fn, net, optimizer, accumulate=2, graph=graph, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            data = batches(engine[0], 40)
            for i in range(0, 32, 2):
                step.window(*(torch.stack(each) for each in zip(*data[i : i + 2], strict=True)))
            step(*data[32])
            step.flush()
            before = step.report().launches
            for i in range(34, 40, 2):
                step.window(*(torch.stack(each) for each in zip(*data[i : i + 2], strict=True)))
        found.append((training_state(net, optimizer, step.scaler), seen))
    report = step.report()
    assert (report.launches - before, len(seen)) == (3, 20), str(report)
    assert report.micro_batches is not None
    assert report.micro_batches[1] + report.scanned == 20
    assert_same(found[1], found[0])


@pytest.mark.parametrize("kind", ["counter", "read", "list"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"policy": "float16"}, {"after_every": 3}], ids=str)
def test_an_after_step_that_cannot_be_captured(engine: Engine, kind: str, options: dict[str, Any]) -> None:
    """G3: it costs only itself: the step is one graph, and it is called behind that, once per optimizer step."""
    found = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Net().to(engine[0])
        optimizer = OPTIMIZERS["fused"](net)
        seen: list[float] = []

        def follow(net: nn.Module, seen: list[float] = seen) -> None:
            if kind == "counter":
                net.calls = getattr(net, "calls", 0) + 1  # type: ignore[assignment]
                net.get_buffer("seen").fill_(net.calls)
            elif kind == "read":
                seen.append(float(net.get_buffer("seen")))
            else:
                seen.append(1.0)
            net.get_buffer("seen").add_(0.5)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ampkit.AmpkitWarning)
            step = ampkit.graphed_step(loss_fn, net, optimizer, after_step=follow, graph=graph, **options)
            history = []
            for x, y in batches(engine[0], 36):
                step(x, y)
                history.append((net.get_buffer("seen").clone(), len(seen), training_state(net, optimizer, step.scaler)))
        found.append(history)
    assert step.replays >= 20, str(step.report())
    assert step.report().failure is None
    assert "test_before_step.py" in str(step.report().eager_after_step)
    assert_same(found[1], found[0])


def ramped(average: list[Tensor], params: list[Tensor], count: Tensor) -> None:
    """Average with a decay that grows, computed on the host, in a line that the passed function only leads to."""
    decay = min(0.99, (1 + float(count)) / (10 + float(count)))
    torch._foreach_lerp_(average, params, 1 - decay)


def counts_on(optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    """Count in an attribute of the optimizer: what is said of that names no line."""
    optimizer.calls = getattr(optimizer, "calls", 0) + 1  # type: ignore[attr-defined]


class StepsRates:
    """Steps a learning-rate scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def __call__(self, net: nn.Module) -> None:
        self.scheduler.step()


def reads_loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same loss, with a line that cannot be captured."""
    loss = loss_fn(net, x, y)
    assert loss.item() > 0
    return loss


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["average", "lambda", "scheduler", "attribute"])
@pytest.mark.parametrize("loss", [loss_fn, reads_loss])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.usefixtures("untimed")
def test_lines_that_after_step_leads_to(engine: Engine, kind: str, loss: Callable[..., Tensor]) -> None:
    """G3: whatever it calls, it costs only itself. All else is captured: the step, or, with such a loss, its update."""
    if engine[0] == "cuda" and kind == "lambda" and loss is reads_loss:
        pytest.xfail("the count of an AveragedModel lies on the host, and what a lambda leads to is compared")
    found = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        net = Net().to(engine[0])
        optimizer = OPTIMIZERS["fused"](net)
        average = AveragedModel(net, multi_avg_fn=ramped)
        follow: Callable[[nn.Module], object] = average.update_parameters
        if kind == "lambda":
            follow = lambda net, average=average: average.update_parameters(net)  # noqa: E731
        elif kind == "scheduler":
            follow = StepsRates(optimizer)
        elif kind == "attribute":
            follow = partial(counts_on, optimizer)
        # With a tape, the capture is not compared with the call before it, which shows the number in the lambda's code.
        frozen = engine[0] == "cpu" and kind != "lambda"
        with warnings.catch_warnings(record=True) as caught, deterministic(), taped() if frozen else nullcontext():
            warnings.simplefilter("always")
            step = ampkit.graphed_step(loss, net, optimizer, after_step=follow, graph=graph)
            history = []
            for x, y in batches(engine[0], 24):
                step(x, y)
                averaged = [*map(bits, average.state_dict().values())]
                history.append((training_state(net, optimizer, step.scaler), averaged))
        found.append(history)
    report = step.report()
    assert report.failure is None
    assert kind == "attribute" or "test_before_step.py" in str(report.eager_after_step)
    if loss is loss_fn:
        assert (report.outcome, report.captures > 0, step.replays >= 10) == ("whole", True, True), str(report)
    else:
        assert (report.outcome, report.updates) == ("in parts", 1), str(report)
    told = [str(each.message) for each in caught if each.category is ampkit.CaptureWarning]
    assert [text.endswith("which has all else of the step.") for text in told].count(True) == 1
    assert_same(found[1], found[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1, 2])
def test_what_after_step_finds_behind_a_graph(engine: Engine, size: int) -> None:
    """G3: whether the step was skipped, and the norm, as eager steps do; what reads gradients stays where they are."""
    found = []
    for graph, reads in [("off", False), (engine[1], False), ("off", True), (engine[1], True)]:
        torch.manual_seed(0)
        net = Net().to(engine[0])
        scaler = ampkit.GradScaler(engine[0], init_scale=64.0)
        seen: list[Any] = []

        def follow(net: nn.Module, scaler: Any = scaler, seen: list[Any] = seen) -> None:
            seen.append((float(scaler.found_inf), float(scaler.grad_norm)))

        def reading(net: nn.Module, seen: list[Any] = seen) -> None:
            seen.append(sum(float(param.grad.norm()) for param in net.parameters() if param.grad is not None))

        options = {"scaler": scaler, "max_norm": 1.0, "after_step": reading if reads else follow, "accumulate": size}
        frozen = engine[0] == "cpu" and not reads and size == 1
        with warnings.catch_warnings(), deterministic(), taped() if frozen and graph != "off" else nullcontext():
            warnings.simplefilter("ignore", ampkit.CaptureWarning)
            step = ampkit.graphed_step(loss_fn, net, OPTIMIZERS["fused"](net), graph=graph, **options)
            for i, (x, y) in enumerate(batches(engine[0], 24)):
                step(x * math.inf if i == 15 else x, y)
        found.append((seen, step.report()))
    for (expected, _), (got, _) in zip(found[::2], found[1::2], strict=True):
        assert len(got) == 24 // size
        assert str(got) == str(expected)  # nan is a norm, too
    assert sum(overflow for overflow, _ in found[1][0]) == 1
    assert found[1][1].eager_after_step
    assert not found[3][1].eager_after_step


def test_a_loss_that_cannot_be_captured_leaves_after_step_in_its_graph(engine: Engine) -> None:
    """G3: lines of `loss_fn` alone do not move `after_step`, which is captured with the update."""
    torch.manual_seed(0)
    net = Net().to(engine[0])
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    options: dict[str, Any] = {"after_step": average.update_parameters, "graph": engine[1]}
    step = ampkit.graphed_step(reads_loss, net, OPTIMIZERS["fused"](net), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        for x, y in batches(engine[0], 16):
            step(x, y)
    report = step.report()
    assert (report.outcome, report.updates, report.eager_after_step) == ("in parts", 1, None), str(report)


def test_a_message_made_of_others_has_one_full_stop(engine: Engine) -> None:
    """G3: why neither the loss nor the update is captured, each as a message of its own says it."""
    net = Net().to(engine[0])
    options: dict[str, Any] = {"before_step": lambda net: net.get_buffer("seen").item(), "graph": engine[1]}
    step = ampkit.graphed_step(reads_loss, net, OPTIMIZERS["fused"](net), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(engine[0], 16):
            step(x, y)
    told = [str(each.message) for each in caught if each.category is ampkit.CaptureWarning]
    assert told[-1].endswith("after the step. Training goes on eagerly.")
    assert not [text for text in (*told, str(step.report())) if "step.. " in text or "step..\n" in text]


@pytest.mark.parametrize("divide", ["accumulate", "actual"])
def test_the_end_of_a_short_window(engine: Engine, divide: str) -> None:
    """G3: `flush(divide="actual")` steps on the mean over the micro-batches that there were."""
    device, graph = engine
    found = []
    for loop in (False, True):
        torch.manual_seed(0)
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph, accumulate=4)
        for _ in range(3):
            data = batches(device, 6)
            for i, (x, y) in enumerate(data):
                if not loop:
                    out = step(x, y)
                    assert out.stepped is (i == 3)
                    continue
                count = 4 if i < 4 or divide == "accumulate" else 2
                (loss_fn(net, x, y) / count).backward()
                if i in (3, 5):
                    optimizer.step()
                    optimizer.zero_grad()
            if not loop:
                step.flush(divide=divide)
        found.append([param.detach() for param in net.parameters()])
    # Two micro-batches: a half of the sum, or twice a quarter of each. Both are exact.
    assert_same(found[0], found[1])


def test_wrong_use() -> None:
    """R11: what cannot work is named."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="before_step"):
        ampkit.graphed_step(loss_fn, net, optimizer, before_step=3)  # type: ignore[arg-type]
    step = ampkit.graphed_step(loss_fn, net, optimizer, graph="off", accumulate=2)
    with pytest.raises(ValueError, match="divide"):
        step.flush(divide="mean")
    with pytest.raises(ValueError, match="after_every"):
        ampkit.graphed_step(loss_fn, net, optimizer, after_step=lambda net: None, after_every=0)
