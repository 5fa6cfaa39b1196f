"""State that a call reads and then replaces by a tensor of the same layout; replays call no Python here."""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from tape import TapedGraph, taped
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with deterministic(), taped() if request.param[0] == "cpu" else nullcontext():
        yield request.param


class Net(nn.Module):
    """A layer, and what it keeps from call to call; `update` replaces some of that, and returns a tensor of (4,)."""

    def __init__(self, update: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("center", torch.ones(4))
        self.last, self.hidden = torch.zeros(4), None
        self.update = update

    def _apply(self, fn: Any, recurse: bool = True) -> "Net":
        super()._apply(fn, recurse)
        self.last = fn(self.last)
        return self

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return (y * self.update(self, y.detach().mean(0))).square().mean()


def buffer(net: Any, x: Tensor) -> Tensor:
    net.mean = 0.9 * net.mean + 0.1 * x
    return net.mean + 1.0


def attribute(net: Any, x: Tensor) -> Tensor:
    net.last = 0.5 * net.last + x
    return net.last


def none_at_first(net: Any, x: Tensor) -> Tensor:
    net.hidden = x if net.hidden is None else 0.3 * net.hidden + 0.7 * x
    return net.hidden


def several(net: Any, x: Tensor) -> Tensor:
    return buffer(net, x) * attribute(net, x) + none_at_first(net, x)


def last_but_one(net: Any, x: Tensor) -> Tensor:
    net.last = net.mean
    net.mean = 0.9 * net.mean + 0.1 * x
    return net.last - 2.0 * net.mean


def change_places(net: Any, x: Tensor) -> Tensor:
    net.mean, net.center = net.center, net.mean + 0.1 * x
    return net.mean + 2.0 * net.center


def never_read(net: Any, x: Tensor) -> Tensor:
    net.last = x * 3.0
    return x + 1.0


def rolls(net: Any, x: Tensor) -> Tensor:
    net.mean = torch.roll(net.mean, 1)
    net.mean[0] = x[0]
    return net.mean + 1.0


def with_a_gradient(net: Any, x: Tensor) -> Tensor:
    net.last = net.last.detach() * 0.5 + net.fc.bias
    return net.last


def none_at_first_with_a_gradient(net: Any, x: Tensor) -> Tensor:
    before = x if net.hidden is None else net.hidden.detach()
    net.hidden = before * 0.5 + net.fc.bias
    return net.hidden


UPDATES = [buffer, attribute, none_at_first, several, last_but_one, change_places, never_read, rolls, with_a_gradient]
UPDATES += [none_at_first_with_a_gradient]


def trained(engine: Engine, graph: str, update: Callable[[Any, Tensor], Tensor], way: str, **options: Any) -> Any:
    """Return losses, states and what the net keeps behind each call; and the report."""
    torch.manual_seed(0)
    net = Net(update).to(engine[0])
    optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-6, fused=True)
    step: Any
    if way == "graphed":

        @ampkit.graphed(modules=(net,), optimizers=(optimizer,), graph=graph, **options)
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x)
            loss.backward()
            optimizer.step()
            return loss

    else:
        accumulate = 2 if way == "accumulate" else 1
        step = ampkit.graphed_step(lambda net, x: net(x), net, optimizer, graph=graph, accumulate=accumulate, **options)
    made, found = torch.Generator().manual_seed(1), []
    for _ in range(16):
        out = step(torch.randn(3, 4, generator=made).to(engine[0]))
        kept = {name: None if value is None else value.clone() for name, value in keeps(net).items()}
        found.append((out if way == "graphed" else out.loss, copy.deepcopy(net.state_dict()), kept))
    return found, step.report()


def keeps(net: Any) -> dict[str, Tensor | None]:
    return {"mean": net.mean, "center": net.center, "last": net.last, "hidden": net.hidden}


@pytest.mark.parametrize("way", ["step", "accumulate", "graphed"])
@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_state_that_is_replaced_is_captured(engine: Engine, update: Callable[[Any, Tensor], Tensor], way: str) -> None:
    """W1: recurrent state, centers and averages that a call replaces: each call finds what eager would find."""
    eager, _ = trained(engine, "off", update, way)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, report = trained(engine, engine[1], update, way, on_failure="raise")
    assert_same(found, eager)
    assert report.replays >= 8


def grows(net: Any, x: Tensor) -> Tensor:
    net.last = torch.cat([net.last, x[:1]])
    return x + net.last.sum()


@pytest.mark.parametrize("update", [grows], ids=lambda update: update.__name__)
def test_what_cannot_be_carried_is_named(engine: Engine, update: Callable[[Any, Tensor], Tensor]) -> None:
    """W1: a tensor of another shape in each call: a message, and eager's bits."""
    eager, _ = trained(engine, "off", update, "step")
    with pytest.warns(ampkit.CaptureWarning):
        found, report = trained(engine, engine[1], update, "step")
    assert_same([losses for losses, *_ in found], [losses for losses, *_ in eager])
    assert report.outcome != "whole"


@pytest.mark.parametrize("first", ["None", "zeros"])
# The kept graph has nodes of the warm-up, which runs on a stream of its own.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_a_backward_into_earlier_calls_is_named(engine: Engine, first: str) -> None:
    """W1: where `retain_graph=True` lets gradients flow through the state, a copy of it would cut them off."""
    device, graph = engine

    def through(net: Any, x: Tensor) -> Tensor:
        y = net.fc.bias + x
        net.hidden = y if net.hidden is None else 0.3 * torch.tanh(net.hidden) + y
        return net.hidden

    def trained_with(graph: str) -> tuple[list[tuple[float, Tensor]], Any]:
        torch.manual_seed(0)
        net = Net(through).to(device)
        net.hidden = None if first == "None" else torch.zeros(4, device=device)

        @ampkit.graphed(modules=(net,), graph=graph)
        def step(x: Tensor) -> Tensor:
            net.zero_grad()
            loss: Tensor = net(x)
            loss.backward(retain_graph=True)
            return loss

        made, found = torch.Generator().manual_seed(1), []
        for _ in range(10):
            loss = step(torch.randn(3, 4, generator=made).to(device)).item()
            found.append((loss, net.fc.bias.grad.clone()))
        return found, step.report()

    expected, _ = trained_with("off")
    with pytest.warns(ampkit.CaptureWarning, match="reads a tensor that is no argument"):
        found, report = trained_with(graph)
    assert_same(found, expected)
    assert report.replays == 0


def test_the_tensor_stays_the_same_one(engine: Engine) -> None:
    """W1: the place holds one tensor from the first call on, which each call changes; a state_dict has its values."""
    net = Net(buffer).to(engine[0])
    step = ampkit.graphed_step(
        lambda net, x: net(x), net, torch.optim.SGD(net.parameters(), lr=2.0**-6, fused=True), graph=engine[1]
    )
    given, tensors, seen = net.mean, [], []
    for _ in range(8):
        step(torch.ones(3, 4, device=engine[0]))
        tensors.append(net.mean)
        seen.append(net.state_dict()["mean"].clone())
    assert step.replays == 5
    assert len({*map(id, tensors)}) == 1
    assert not given.any()  # whoever has kept the one from before the training finds its values
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(seen))


class Centred:
    """A criterion beside the model, an object, that replaces its own tensor in each call, as DINO's does."""

    def __init__(self, device: str) -> None:
        self.center = torch.zeros(4, device=device)

    def __call__(self, out: Tensor) -> Tensor:
        self.center = self.center * 0.9 + 0.1 * out.detach().mean(0)
        return (out - self.center).square().mean()


class CentredModule(nn.Module):
    """The same as a module with a buffer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4, device=device))

    forward = Centred.__call__


KEPT: dict[str, Any] = {}


def in_a_dict(out: Tensor) -> Tensor:
    KEPT["center"] = KEPT["center"] * 0.9 + 0.1 * out.detach().mean(0)
    return (out - KEPT["center"]).square().mean()


def in_a_list(out: Tensor) -> Tensor:
    bank = KEPT["bank"]
    bank[0], bank[1] = bank[1], out.detach().mean(0)
    return (out - bank[0] + 0.5 * bank[1]).square().mean()


@pytest.mark.parametrize("replaces", [False, True], ids=["", "replaced between"])
@pytest.mark.parametrize("kind", ["object", "module", "dict", "list"])
def test_beside_the_model(engine: Engine, kind: str, replaces: bool) -> None:
    """W1: the same in a criterion, a dict or a list; one that is replaced between two calls is noticed."""
    device, graph = engine

    def losses(graph: str) -> tuple[list[float], list[Tensor], Any]:
        torch.manual_seed(0)
        KEPT.update(center=torch.zeros(4, device=device), bank=[torch.zeros(4, device=device) for _ in range(2)])
        net = nn.Linear(4, 4).to(device)
        criterion: Any = {"object": Centred, "module": CentredModule}.get(kind, lambda _: None)(device)
        criterion = criterion or {"dict": in_a_dict, "list": in_a_list}[kind]
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(lambda net, x: criterion(net(x)), net, optimizer, graph=graph)
        generator, found, kept = torch.Generator().manual_seed(1), [], []
        for call in range(24):
            if call == 10 and replaces:
                new = torch.full((4,), 3.0, device=device)
                if kind in ("object", "module"):
                    criterion.center = new
                else:
                    KEPT.update(center=new, bank=[new.clone(), new.clone()])
            found.append(step(torch.randn(2, 4, generator=generator).to(device)).loss.item())
            center = KEPT["center"] if kind == "dict" else KEPT["bank"][0] if kind == "list" else criterion.center
            kept.append(center.clone())
        return found, kept, step

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)  # that something was replaced
        expected, centers, _ = losses("off")
        found, kept, step = losses(graph)
    assert found == expected
    assert_same(kept, centers)
    assert step.replays >= (16 if replaces else 20), (step.replays, step.report().failure)


class Fading:
    """A criterion with a number in a tensor on the host, which it replaces in each call."""

    def __init__(self) -> None:
        self.weight = torch.ones(())

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.weight = self.weight * 0.75
        return model(x).square().mean() * self.weight


class FadingPair(Fading):
    """The same with the tensor in a tuple, which is replaced with it."""

    def __init__(self) -> None:
        self.weights = (torch.ones(()), 0.75)

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.weights = (self.weights[0] * self.weights[1], self.weights[1])
        return model(x).square().mean() * self.weights[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is .*deprecated")
def test_a_number_that_torchscript_makes_a_tensor_of_is_no_state(engine: Engine) -> None:
    """W1: no code of Python keeps it (transformers' DeBERTa). One that is kept and replaced is never stale."""
    device, graph = engine

    @torch.jit.script
    def root(x: Tensor) -> Tensor:
        return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float32) * 3)

    def losses(graph: str, loss_fn: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph)
        return [step(torch.ones(2, 4, device=device)).loss.item() for _ in range(8)], step

    def rooted(net: nn.Module, x: Tensor) -> Tensor:
        return (net(x) / root(x)).square().mean()

    found, step = losses(graph, rooted)
    assert found == losses("off", rooted)[0]
    assert step.replays == 5
    for kind in (Fading, FadingPair):
        with pytest.warns(ampkit.CaptureWarning):
            found, step = losses(graph, kind())
        assert found == losses("off", kind())[0]
        assert step.replays == 0


def kept_in_attribute(net: Any, state: Any = None) -> Any:
    net.state, before = state, getattr(net, "state", None)
    return before


def kept_in_dict(net: Any, state: Any = None) -> Any:
    kept = vars(net).setdefault("kept", {})
    kept["state"], before = state, kept.get("state")
    return before


def kept_in_list(net: Any, state: Any = None) -> Any:
    kept = vars(net).setdefault("kept", [None])
    kept[0], before = state, kept[0]
    return before


class Recurrent(nn.Module):
    """Reads a state of a row per sample and replaces it, by itself or in a tuple."""

    def __init__(self, exchange: Callable[..., Any], in_tuple: bool) -> None:
        super().__init__()
        self.fc, self.exchange, self.in_tuple = nn.Linear(4, 4), exchange, in_tuple

    def put(self, state: Tensor) -> Any:
        return self.exchange(self, (state, 0.5) if self.in_tuple else state)

    def forward(self, x: Tensor) -> Tensor:
        before = self.exchange(self)
        y: Tensor = torch.tanh(self.fc(x) + 0.5 * (before[0] if self.in_tuple else before))
        self.put(y.detach())
        return y.square().mean()


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("exchange", [kept_in_attribute, kept_in_dict, kept_in_list])
@pytest.mark.parametrize(
    "sizes", ["44664466446644664466", "4444444464444", "46464646464646464", "44446666444466664444"]
)
def test_a_state_that_is_reset_with_the_size_is_read(
    engine: Engine, sizes: str, exchange: Callable[..., Any], in_tuple: bool
) -> None:
    """W1: as between documents in truncated backpropagation. What is reset is read, or the step is not captured."""

    def losses(graph: str) -> list[float]:
        torch.manual_seed(0)
        net = Recurrent(exchange, in_tuple).to(engine[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(lambda net, x: net(x), net, optimizer, graph=graph)
        generator, found, before = torch.Generator().manual_seed(1), [], 0
        for i, size in enumerate(map(int, sizes)):
            if size != before or i == 17:
                net.put(torch.randn(size, 4, generator=generator).to(engine[0]))
            before = size
            found.append(step(torch.randn(size, 4, generator=generator).to(engine[0])).loss.item())
        return found

    assert losses(engine[1]) == losses("off")


def test_a_capture_that_fails_leaves_what_was_there() -> None:
    """W1: the eager call behind it reads that, in a dict as in an attribute."""
    fails = [False]

    class Fails(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            if fails[0]:
                raise ampkit.CaptureError("as in a capture")
            return loss

    capture = TapedGraph.capture

    def failing(*args: Any) -> None:
        fails[0] = True
        try:
            capture(*args)
        finally:
            fails[0] = False

    def losses(exchange: Callable[..., Any], graph: str) -> list[float]:
        torch.manual_seed(0)
        net = Fails(exchange, in_tuple=False)
        net.put(torch.zeros(2, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5, fused=True)
        step = ampkit.graphed_step(lambda net, x: net(x), net, optimizer, graph=graph)
        return [step(torch.ones(2, 4)).loss.item() for _ in range(8)]

    for exchange in (kept_in_attribute, kept_in_dict, kept_in_list):
        expected = losses(exchange, "off")
        with taped(), mock.patch.object(TapedGraph, "capture", failing), pytest.warns(match="as in a capture"):
            assert losses(exchange, "emulate") == expected


def exchanged(net: Any) -> tuple[Any, Any]:
    net.a, net.b = torch.zeros(4), torch.ones(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        mean = y.detach().mean(0)
        net.a, net.b = 0.5 * net.a + mean, 0.25 * net.b - mean
        return (y * (net.a + 2.0 * net.b)).square().mean()

    def between(i: int) -> None:
        if i == 6:
            net.a, net.b = net.b, net.a

    return loss_fn, between


def put_by_the_loop(value: Any) -> Callable[[Any], tuple[Any, Any]]:
    def make(net: Any) -> tuple[Any, Any]:
        net.a = torch.zeros(4)

        def loss_fn(net: Any, x: Tensor) -> Tensor:
            y = net.fc(x)
            if len(x) == 4:
                net.a = y.detach().sum(0)
            return y.square().mean()

        def between(i: int) -> None:
            if i == 9:
                net.a = value

        return loss_fn, between

    return make


def made_in_the_first_call(net: Any) -> tuple[Any, Any]:
    net.a = torch.zeros(0)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        mean = y.detach().mean(0)
        net.a = mean if net.a.numel() == 0 else 0.5 * net.a + mean
        return (y * net.a).square().mean()

    return loss_fn, lambda i: None


def made_anew_for_each_size(net: Any) -> tuple[Any, Any]:
    net.a = None

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        if net.a is None or net.a.shape[0] != x.shape[0]:
            net.a = torch.zeros(x.shape[0], 4)
        y = torch.tanh(net.fc(x) + net.a)
        net.a = y.detach()
        return y.square().mean()

    return loss_fn, lambda i: None


def the_last_but_one(net: Any) -> tuple[Any, Any]:
    net.a, net.b = torch.zeros(4), torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        net.b, net.a = net.a, y.detach().sum(1)
        return y.square().mean()

    return loss_fn, lambda i: None


def two_names(net: Any) -> tuple[Any, Any]:
    net.a, net.b = torch.zeros(4), torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        net.a.mul_(0.5)
        factor = net.b + 1.0
        net.a = net.b = y.detach().mean(0) + net.a
        return (y * (factor + net.a)).square().mean()

    return loss_fn, lambda i: None


def of_the_loop(net: Any) -> tuple[Any, Any]:
    net.a, buffer = torch.zeros(4), torch.ones(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        read = net.a * 1.0
        if len(x) == 4:
            net.a = 0.5 * net.a + y.detach().mean(0)
        return (y * read).square().mean()

    def between(i: int) -> None:
        if i == 8:
            net.a = buffer
        elif i > 8:
            buffer.add_(1.0)

    return loss_fn, between


def kept_beside(net: Any) -> tuple[Any, Any]:
    net.a, net.b = torch.zeros(4), torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        if len(x) == 6:
            net.b = net.a
        net.a = 0.5 * net.a + y.detach().mean(0)
        return (y * (net.a + net.b)).square().mean()

    return loss_fn, lambda i: None


def kept_by_the_other_size(net: Any) -> tuple[Any, Any]:
    net.a, net.b = torch.zeros(4), torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        if len(x) == 6:
            loss = (y * (1.0 + net.b)).square().mean()
            net.b = net.a
            return loss
        net.a = 0.5 * net.a + y.detach().mean(0)
        return (y * net.a).square().mean()

    return loss_fn, lambda i: None


def rotating(net: Any) -> tuple[Any, Any]:
    net.a = [torch.zeros(4), torch.zeros(4)]

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        net.a = [*net.a[1:], y.detach().mean(0)]
        return (y * (1.0 + net.a[0] + net.a[1])).square().mean()

    return loss_fn, lambda i: None


def part_of_a_bank(net: Any) -> tuple[Any, Any]:
    net.b, net.a = torch.ones(4), torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        net.b.mul_(0.9).add_(y.detach().mean(0))
        before = net.a.sum() + 1.0
        net.a = net.b[:]
        return (y * before).square().mean()

    return loss_fn, lambda i: None


def two_names_in_some_calls(net: Any) -> tuple[Any, Any]:
    net.a, net.b = torch.zeros(4), torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        mean = y.detach().mean(0)
        net.a.mul_(0.5)
        factor = net.b + 1.0
        if len(x) == 6:
            net.a = net.b = mean + net.a
        else:
            net.a, net.b = net.a + mean, 0.5 * net.b + 2.0 * mean
        return (y * (factor + net.a)).square().mean()

    return loss_fn, lambda i: None


def returned(net: Any) -> tuple[Any, Any]:
    net.a = torch.zeros(4)

    def loss_fn(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, before = net.fc(x), net.a
        net.a = 0.5 * before + y.detach().mean(0)
        return (y * net.a).square().mean(), before

    return loss_fn, lambda i: None


def by_a_name(net: Any) -> tuple[Any, Any]:
    net.a, name = torch.zeros(4), "a"

    def loss_fn(net: Any, x: Tensor) -> Tensor:
        y = net.fc(x)
        setattr(net, name, 0.5 * getattr(net, name) + y.detach().mean(0))
        return (y * getattr(net, name)).square().mean()

    def between(i: int) -> None:
        if i in (7, 9):
            net.a = torch.full((1,), 2.0)

    return loss_fn, between


@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize(
    ("make", "sizes", "captured"),
    [
        (exchanged, "4" * 10, True),
        (put_by_the_loop(None), "444446666666", True),
        (put_by_the_loop(torch.full((7,), 5.0)), "444446666666", True),
        (made_in_the_first_call, "4" * 8, True),
        (made_anew_for_each_size, "4646464646464444", False),
        (made_anew_for_each_size, "4446664466446644", True),
        (the_last_but_one, "46" * 10, False),
        (the_last_but_one, "4466446644", False),
        (the_last_but_one, "4444444666644", True),
        (kept_beside, "44464444", True),
        (kept_by_the_other_size, "4466446644664466", False),
        (kept_by_the_other_size, "44446444444644", True),
        (rotating, "46" * 8, False),
        (part_of_a_bank, "4" * 8, False),
        (two_names_in_some_calls, "4466446644", True),
        (two_names, "4" * 8, False),
        (of_the_loop, "444446666666", True),
        (by_a_name, "4" * 12, True),
        (returned, "4" * 8, True),
    ],
)
@pytest.mark.parametrize("scans", [False, True])
def test_what_the_loop_and_the_code_may_do_to_it(make: Any, sizes: str, captured: bool, scans: bool) -> None:
    """W1: places behind each call, and the losses, are eager's, also where nothing can be captured."""
    if scans and len(set(sizes)) > 1:
        pytest.skip("a scan has batches of one size")

    def found(graph: str) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        net = nn.Module()
        net.fc = nn.Linear(4, 4)
        loss_fn, between = make(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-6, fused=True)
        step = ampkit.graphed_step(loss_fn, net, optimizer, graph=graph)
        generator, found = torch.Generator().manual_seed(1), []
        for i, size in enumerate(map(int, sizes)):
            between(i)
            x = torch.randn(2, size, 4, generator=generator)
            out = step.scan(x) if scans and i > 4 else step(x[0])
            left = [copy.deepcopy(vars(net).get(name)) for name in ("a", "b")]
            found.append([out.loss, out.aux, left])
        return found, step

    expected, _ = found("off")
    with deterministic(), taped():
        now, step = found("emulate")
    assert_same(now, expected)
    assert (step.replays > 0) is captured
