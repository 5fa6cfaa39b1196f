"""Gradients of gradients: the order in which autograd adds them up, and so their bits, are the same in every call."""

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from torch import Tensor, nn

import ampkit

Engine = tuple[str, str]
_one = torch.ones(1, requires_grad=True)


def network(device: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = (2, 32, 32, 1)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(device)


def points(device: str, i: int = 0) -> Tensor:
    return torch.rand(64, 2, generator=torch.Generator().manual_seed(i)).to(device)


def heat_equation(model: nn.Module, given: Tensor, grad: Callable[..., Any] = torch.autograd.grad) -> Tensor:
    given = given.detach().requires_grad_()
    value = model(given)
    first = grad(value.sum(), given, create_graph=True)[0]
    second = grad(first[:, 0].sum(), given, create_graph=True)[0]
    return (first[:, 1] - second[:, 0]).square().mean() + (value - given[:, :1].sin()).square().mean()


def count_up(number: int) -> None:
    """Have the autograd nodes of the thread that runs this come to this number."""
    with torch.enable_grad():
        while torch.autograd._get_sequence_nr() < number:
            _ = _one * 2


def put_ahead(who: str, device: str) -> None:
    """Have one of two threads count higher: this one, or the one that runs a backward pass on the device."""
    here, there = torch.autograd._get_sequence_nr(), []

    def in_engine(grad: Tensor) -> None:
        there.append(torch.autograd._get_sequence_nr())
        if who == "engine":
            count_up(here + 1000)

    x = torch.ones(3, device=device, requires_grad=True)
    y = x * 2
    y.register_hook(in_engine)
    y.sum().backward()
    if who == "main":
        count_up(there[0] + 1000)


def in_new_thread(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass in a thread whose numbers begin at 0, as those of a thread of autograd's do on CUDA."""
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(torch.autograd.grad(*args, **kwargs)))
    thread.start()
    thread.join()
    return result[0]


def test_the_bits_depend_on_the_thread_that_makes_the_graph() -> None:
    """Why this is needed, without a GPU. A future torch may end this, the first reason of backward_thread.py."""
    count_up(1000)
    results: list[list[Tensor]] = []
    for grad in (torch.autograd.grad, in_new_thread):
        model = network("cpu")
        heat_equation(model, points("cpu"), grad).backward()
        results.append([param.grad for param in model.parameters()])
    pairs = list(zip(*results, strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def trained(engine: Engine, ahead: dict[int, str], **options: Any) -> tuple[list[Tensor], Any]:
    """Return weights and moments behind each of 8 steps. Before some of them, another thread comes to count higher."""
    model = network(engine[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-6, fused=True)
    step = ampkit.graphed_step(heat_equation, model, optimizer, graph=engine[1], **options)
    history = []
    with deterministic():
        for i in range(8):
            if i in ahead:
                put_ahead(ahead[i], engine[0])
            out = step(points(engine[0], i))
            state = [value for each in optimizer.state.values() for value in each.values()]
            history += [tensor.detach().clone() for tensor in (*model.parameters(), *state, out.loss)]
    return history, step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"verify": 3}, {"policy": "bfloat16"}], ids=["plain", "verified", "bf16"])
def test_a_captured_step_has_the_bits_of_an_eager_one(engine: Engine, options: dict[str, Any]) -> None:
    """Warm-up, preflight, capture and replays, whatever numbers the threads of the process have come to."""
    off = {key: value for key, value in options.items() if key != "verify"}
    expected, _ = trained((engine[0], "off"), {0: "main"}, **off)
    again, _ = trained((engine[0], "off"), {0: "engine", 4: "main", 6: "engine"}, **off)
    assert_same(expected, again)
    for ahead in ({0: "main", 5: "engine"}, {0: "engine", 6: "main"}):
        found, step = trained(engine, ahead, **options)
        assert_same(expected, found)
        assert (step.replays, step.report().failure) == (5, None)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_graphed_function_has_them_too(engine: Engine) -> None:
    """`ampkit.graphed` goes the same way."""
    results = []
    for graph, ahead in (("off", "main"), ("off", "engine"), (engine[1], "engine")):
        put_ahead(ahead, engine[0])
        model = network(engine[0])
        adam = torch.optim.Adam(model.parameters(), lr=2.0**-6, fused=True)

        @ampkit.graphed(modules=(model,), optimizers=(adam,), graph=graph)
        def step(given: Tensor, model: nn.Module = model, adam: torch.optim.Optimizer = adam) -> Tensor:
            loss = heat_equation(model, given)
            adam.zero_grad()
            loss.backward()
            adam.step()
            return loss

        with deterministic():
            for i in range(6):
                step(points(engine[0], i))
        results.append([param.detach().clone() for param in model.parameters()])
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])
    assert step.replays == 3


def in_calling_thread(grad: Tensor) -> Tensor:
    """Doubles a gradient where autograd may use no threads of its own."""
    return grad if torch._C._is_multithreading_enabled() else grad * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_graphed_callables_have_them_too(engine: Engine) -> None:
    """Replays, eager calls and the capture of a module that returns a gradient, as forces are one of an energy."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network("cpu")

        def forward(self, given: Tensor) -> Tensor:
            energy = self.inner(given)
            energy.register_hook(in_calling_thread)
            (slope,) = torch.autograd.grad(energy.sum(), given, create_graph=True)
            return slope

    plain = Forces().to(engine[0])
    graphed = copy.deepcopy(plain)
    ampkit.make_graphed_callables(graphed, (points(engine[0]).requires_grad_(),), 3, True, graph=engine[1])
    for i, training in enumerate((True, False, True)):
        plain.train(training)
        graphed.train(training)  # eager in eval mode
        with deterministic():
            slopes = [module(points(engine[0], i).requires_grad_()) for module in (plain, graphed)]
        assert_same(slopes[0] * 2, slopes[1])
    assert graphed.forward.replays == 2


# ------------------------------------------------------------------------- a loss that has autograd record its batch


def on_the_batch(model: nn.Module, given: Tensor, scale: Tensor | None = None) -> Tensor:
    """`heat_equation` as most write it."""
    given.requires_grad_()
    value = model(given)
    first = torch.autograd.grad(value.sum(), given, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), given, create_graph=True)[0]
    loss = (first[:, 1] - second[:, 0]).square().mean() + (value - given[:, :1].sin()).square().mean()
    return loss if scale is None else loss * scale.sum()


def with_hooks(model: nn.Module, given: Tensor, *_: Tensor) -> Tensor:
    """Adds a hook to the batch in each call, each of which would double the gradient, and leaves `given.grad`."""
    assert given.grad is None
    assert not given._backward_hooks
    given.requires_grad_().retain_grad()
    given.register_hook(lambda grad: grad * 2)
    (penalty,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    return penalty.square().mean() + model(given).square().mean()


def back_again(model: nn.Module, given: Tensor, *_: Tensor) -> Tensor:
    """Asks for a gradient for a while, changes the shape in place, and takes what is no float along."""
    assert given.dim() == 2
    given.requires_grad_()
    (slope,) = torch.autograd.grad(model(given).sum(), given)
    given.requires_grad_(False)
    given.unsqueeze_(0)
    return (model(given) * slope.sum(-1, keepdim=True)).square().mean()


class Points:
    """A container of which torch was told."""

    def __init__(self, given: Tensor) -> None:
        self.given = given


torch.utils._pytree.register_pytree_node(
    Points, lambda points: ([points.given], None), lambda leaves, _: Points(*leaves)
)


def nested(model: nn.Module, batch: Any, *_: Tensor) -> Tensor:
    points, (other,) = batch["points"], batch["other"]
    return on_the_batch(model, points.given) + on_the_batch(model, other)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "as most write it": on_the_batch,
    "hooks": with_hooks,
    "back again": back_again,
    "nested": nested,
}


def batch_of(loss: Callable[..., Tensor], device: str, i: int) -> Any:
    if loss is nested:
        return {"points": Points(points(device, i)), "other": [points(device, i + 100)]}
    return points(device, i)


def trained_on(
    engine: Engine, loss: Callable[..., Tensor], batches: list[Any], **options: Any
) -> tuple[list[Tensor], Any]:
    """Train on these batches; return the losses and what was trained."""
    model = network(engine[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-6, fused=True)
    step = ampkit.graphed_step(loss, model, optimizer, graph=engine[1], **options)
    with deterministic():
        losses = [step(batch).loss for batch in batches]
    return [*losses, *(param.detach().clone() for param in model.parameters())], step


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("options", "replays"),
    [({}, 7), ({"verify": 3}, 7), ({"policy": "bfloat16"}, 7), ({"accumulate": 2}, 4)],
    ids=["plain", "verified", "bf16", "accumulated"],
)
def test_the_batch_is_new_for_autograd_in_each_call(
    engine: Engine, name: str, options: dict[str, Any], replays: int
) -> None:
    """A loss may call `requires_grad_()` on it, with the same tensors in each call, too. They stay as they were."""
    loss = LOSSES[name]
    again = batch_of(loss, engine[0], 0)
    batches = [*(batch_of(loss, engine[0], i) for i in range(6)), *4 * [again]]
    off = {key: value for key, value in options.items() if key != "verify"}
    expected, _ = trained_on((engine[0], "off"), loss, batches, **off)
    found, step = trained_on(engine, loss, batches, **options)
    assert_same(expected, found)
    assert (step.replays, step.report().failure) == (replays, None)
    for tensor in torch.utils._pytree.tree_leaves(batches):
        assert (tensor.requires_grad, tensor.grad, tensor.dim()) == (False, None, 2)
        assert not tensor._backward_hooks


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["scan", "window"])
@pytest.mark.slow
def test_so_are_slices(engine: Engine, how: str) -> None:
    """Those of `scan` and of `window`, too."""
    results = []
    for graph in ("off", engine[1]):
        model = network(engine[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-6, fused=True)
        accumulate = 3 if how == "window" else 1
        step = ampkit.graphed_step(on_the_batch, model, optimizer, graph=graph, accumulate=accumulate)
        stacked = torch.stack([points(engine[0], i) for i in range(3)])
        with deterministic():
            losses = [getattr(step, how)(stacked).loss for _ in range(6)]
        assert not stacked.requires_grad
        assert step.report().failure is None
        results.append([*losses, *(param.detach().clone() for param in model.parameters())])
    assert step.report().launches > 0
    assert_same(results[0], results[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_so_is_a_padded_batch(engine: Engine) -> None:
    """Rows that `Buckets` has added do not change what the loss asks of autograd."""

    def loss(model: nn.Module, given: Tensor, mask: Tensor) -> Tensor:
        given.requires_grad_()
        (slope,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
        return (slope.square().sum(-1) * mask).sum() / mask.sum()

    batches = [points(engine[0], i)[: 40 + 8 * (i % 3)] for i in range(8)]
    buckets = ampkit.Buckets(batch=(64,))
    off, on = (trained_on((engine[0], graph), loss, batches, buckets=buckets) for graph in ("off", engine[1]))
    assert_same(off[0], on[0])
    assert (on[1].replays, on[1].report().failure) == (5, None)


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_batch_that_requires_grad_is_refused(graph: str) -> None:
    """As before, a leaf of autograd's and another tensor, in each call."""
    model = network("cpu")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    step = ampkit.graphed_step(on_the_batch, model, optimizer, graph=graph)
    leaf = points("cpu").requires_grad_()
    for _ in range(5):
        step(points("cpu"))
        for given in (leaf, leaf * 2):
            with pytest.raises(ampkit.InputMismatch, match=r"batch\[0\] requires grad.*Pass batch\[0\]\.detach\(\)"):
                step(given)


def test_what_the_user_has_set_on_a_tensor_is_there() -> None:
    """In an eager call, as it was before the batch got tensors of its own. What is added stays inside."""

    def loss(model: nn.Module, given: Tensor) -> Tensor:
        weight = given.weight  # type: ignore[attr-defined]
        given.weight = 0.0  # type: ignore[attr-defined]
        return model(given).square().mean() * weight

    model = network("cpu")
    step = ampkit.graphed_step(loss, model, torch.optim.Adam(model.parameters(), fused=True), graph="off")
    given = points("cpu")
    given.weight = 2.0  # type: ignore[attr-defined]
    assert step(given).loss > 0
    assert step(given).loss > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.slow
def test_a_graphed_function_gets_such_a_batch_too(engine: Engine) -> None:
    """`ampkit.graphed`, also where it changes the batch in place, which the caller sees."""
    results = []
    for graph in ("off", engine[1]):
        model = network(engine[0])
        adam = torch.optim.Adam(model.parameters(), lr=2.0**-6, fused=True)

        @ampkit.graphed(modules=(model,), optimizers=(adam,), graph=graph)
        def step(given: Tensor, model: nn.Module = model, adam: torch.optim.Optimizer = adam) -> Tensor:
            given.mul_(2)
            loss = on_the_batch(model, given)
            adam.zero_grad()
            loss.backward()
            adam.step()
            return loss

        batches = [points(engine[0], i) for i in range(6)]
        with deterministic():
            losses = [step(given) for given in batches]
        assert not any(given.requires_grad for given in batches)
        results.append([*losses, *batches])
    assert_same(results[0], results[1])
    assert torch.equal(results[1][-1], points(engine[0], 5) * 2)
    assert step.replays == 3


@pytest.mark.usefixtures("untimed")
@pytest.mark.filterwarnings("ignore::ampkit.CaptureWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("asks", ["the loss", "a module", "a module without autograd"])
@pytest.mark.quick(3)
@pytest.mark.slow
def test_a_step_in_parts(engine: Engine, asks: str) -> None:
    """A module whose replay would not ask for a gradient of its input stays eager; the others are captured."""

    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network("cpu")

        def forward(self, given: Tensor) -> Tensor:
            if asks != "the loss":
                given.requires_grad_()
            with torch.set_grad_enabled(asks != "a module without autograd"):
                return self.inner(given)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes, self.other, self.head = Slopes(), network("cpu"), nn.Linear(1, 1)

        def forward(self, given: Tensor) -> Tensor:
            if asks == "the loss":
                given.requires_grad_()
            value = self.slopes(given) + self.other(given)
            (slope,) = torch.autograd.grad(value.sum(), given, create_graph=True)
            return self.head(value) + slope.sum(-1, keepdim=True)

    def loss(model: nn.Module, given: Tensor) -> Tensor:
        loss = model(given).square().mean()
        return loss * 2 if float(loss.detach()) > 1 else loss

    results = []
    for graph in ("off", engine[1]):
        torch.manual_seed(0)
        model = Whole().to(engine[0])
        optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-6, fused=True)
        step = ampkit.graphed_step(loss, model, optimizer, graph=graph)
        with deterministic():
            losses = [step(points(engine[0], i)).loss for i in range(10)]
        results.append([*losses, *(param.detach().clone() for param in model.parameters())])
    assert step.report().outcome == "in parts"
    assert_same(results[0], results[1])
