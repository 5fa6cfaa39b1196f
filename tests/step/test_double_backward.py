"""Gradients of gradients: the order in which autograd adds them up, and so their bits, are the same in every call."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import DEVICES, ENGINES, assert_same, deterministic
from torch import Tensor, nn

import ampkit
from ampkit._torch.graph_order import make_graphs_here
from ampkit._undo import Undo

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
    """Why this is needed, without a GPU. A future torch may end this; then graph_order.py can go."""
    count_up(1000)
    results: list[list[Tensor]] = []
    for grad in (torch.autograd.grad, in_new_thread):
        model = network("cpu")
        heat_equation(model, points("cpu"), grad).backward()
        results.append([param.grad for param in model.parameters()])
    pairs = list(zip(*results, strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


@pytest.mark.parametrize("device", DEVICES)
def test_such_passes_run_in_the_calling_thread(device: str) -> None:
    """Within the context nodes have numbers of this thread; behind it, also after an error, torch is as before."""
    before = torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward
    x = torch.ones(3, device=device, requires_grad=True)
    threads: list[int] = []

    def square(created: bool) -> Tensor:
        y = x * x * x
        y.register_hook(lambda grad: threads.append(threading.get_ident()))
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=created)
        return grad

    def calls() -> None:
        with Undo() as undo:
            make_graphs_here(undo)
            with Undo() as inner:
                make_graphs_here(inner)
                newest = square(True).grad_fn._sequence_nr()
            again = square(True).grad_fn._sequence_nr()
            assert newest < again < torch.autograd._get_sequence_nr()
            assert threads == 2 * [threading.get_ident()]
            assert torch._C._is_multithreading_enabled()
            square(False)
            assert (threads[2] == threading.get_ident()) is (device == "cpu")
            raise LookupError("a mistake of the user")

    with pytest.raises(LookupError):
        calls()
    assert before == (torch.autograd._engine_run_backward, torch.autograd.graph._engine_run_backward)
    square(True)
    assert (threads[3] == threading.get_ident()) is (device == "cpu")


def test_other_threads_are_left_alone() -> None:
    """A backward pass of another thread runs where torch runs it, also while a step is under way."""
    seen: list[bool] = []

    def other() -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * x
        y.register_hook(lambda grad: seen.append(torch._C._is_multithreading_enabled()))
        torch.autograd.grad(y.sum(), x, create_graph=True)

    with Undo() as undo:
        make_graphs_here(undo)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        other()
    assert seen == [True, False]


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
