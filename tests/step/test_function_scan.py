"""`scan` of an `ampkit.graphed` function: K calls in one, with the bits of K single calls of a plain loop."""

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from rl_algorithms import DQN, PPO, SAC, TD3, Learner
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
LENGTHS = (6, 20, 33, 5, 1, 0, 16)  # of scans; 0 stands for a single call


def state_of(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Return all that a call may change, with the random state behind it."""
    tensors = {f"{i}.{name}": bits(value) for i, m in enumerate(modules) for name, value in m.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters()]
    states = [
        {f"{number}.{name}": bits(value) if isinstance(value, Tensor) else value for name, value in state.items()}
        for optimizer in optimizers
        for number, state in optimizer.state_dict()["state"].items()
    ]
    device = next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))
    return [tensors, gradients, states, torch.rand(2, device=device)]


def stacked(batches: Sequence[Sequence[Any]]) -> list[Any]:
    """Return one stack of batches, whose constants are those of the first."""
    columns = zip(*batches, strict=True)
    return [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]


def check(
    made: Callable[[], tuple[Callable[..., Any], Sequence[nn.Module], Sequence[torch.optim.Optimizer]]],
    batches: Callable[[int], Sequence[Any]],
    engine: Engine,
    lengths: Sequence[int] = LENGTHS,
    **options: Any,
) -> ampkit.GraphedFunction:
    """Assert that scans leave, and return, what single calls of the plain function do."""
    history = []
    with deterministic():
        plain, modules, optimizers = made()
        torch.manual_seed(1)
        rest = iter(range(sum(max(1, length) for length in lengths)))
        for length in lengths:
            outs = [plain(*batches(next(rest))) for _ in range(max(1, length))]
            together = [torch.stack(column) for column in zip(*outs, strict=True)] if length else [*outs[0]]
            history.append((together, state_of(modules, optimizers)))
        function, modules, optimizers = made()
        graphed = ampkit.graphed(modules=modules, optimizers=optimizers, graph=engine[1], **options)(function)
        torch.manual_seed(1)
        rest = iter(range(sum(max(1, length) for length in lengths)))
        for i, length in enumerate(lengths):
            given = [batches(next(rest)) for _ in range(max(1, length))]
            outs = graphed.scan(*stacked(given)) if length else graphed(*given[0])
            assert_same(([*outs], state_of(modules, optimizers)), history[i], f"scan {i} of {length}")
    return graphed


def small(algorithm: type[Learner], device: str) -> Any:
    """Return what makes a learner of small networks: its update, modules and optimizers."""

    def made() -> Any:
        torch.manual_seed(0)
        learner: Any = algorithm(device, "fused", 8)  # type: ignore[call-arg]  # of each algorithm
        return learner.update, learner.modules, learner.optimizers

    return made


def batch_of(algorithm: type[Learner], device: str) -> Callable[[int], tuple[Any, ...]]:
    """Return what makes the batch of a call. TD3's actor moves in none, or in all."""
    generator = torch.Generator().manual_seed(3)
    shapes = [tensor.shape for tensor in algorithm.batch("cpu")]
    kept = [[torch.rand(shape, generator=generator).to(device) for shape in shapes] for _ in range(5)]
    return lambda i: (*kept[i % 5], *([True] if algorithm is TD3 else []))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [SAC, PPO, DQN, TD3])
def test_learners(engine: Engine, algorithm: type[Learner]) -> None:
    """Losses, weights, targets, moments, gradients and random numbers are those of a plain loop."""
    device = engine[0]
    function = check(small(algorithm, device), batch_of(algorithm, device), engine, on_failure="raise")
    report = function.report()
    # 6: 3 warm-up calls, then a capture and 2 replays. 20 and 33: 16 + 4 and 16 + 16 + 1. 5. 1 and 0. 16.
    assert (report.launches, report.scanned) == (6, 16 + 4 + 32 + 5 + 16)
    assert report.replays == 3 + 1 + 1 + 1
    assert report.failure is None


def test_verified() -> None:
    """Launches are compared with eager calls."""
    function = check(small(PPO, "cpu"), batch_of(PPO, "cpu"), ("cpu", "emulate"), (4, 3, 16), verify=3)
    assert function.report().launches == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_scale(engine: Engine) -> None:
    """The scale follows overflows within a launch; skipped steps are counted."""
    device = engine[0]
    scalers = []

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, fused=True)
        scaler = ampkit.GradScaler(device, init_scale=256.0, growth_interval=3)
        scalers.append(scaler)

        def update(x: Tensor, boost: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = model(x).square().mean() * boost
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return (loss.detach(),)

        return (lambda: (update, [model], [optimizer]))()

    def batch(i: int) -> tuple[Tensor, Tensor]:
        boost = float("inf") if i in (2, 9, 10) else 1.0
        return torch.full((3, 4), i / 8.0, device=device), torch.tensor(boost, device=device)

    results = []
    for graph in ("off", engine[1]):
        update, modules, optimizers = made()
        function = ampkit.graphed(modules=modules, optimizers=optimizers, scaler=scalers[-1], graph=graph)(update)
        losses = []
        with deterministic():
            for start, end in ((0, 6), (6, 12), (12, 30)):
                given = [batch(i) for i in range(start, end)]
                alone = [function(*each)[0] for each in given] if graph == "off" else None
                losses.append(function.scan(*stacked(given))[0] if alone is None else torch.stack(alone))
        results.append((losses, state_of(modules, optimizers), scalers[-1].state_dict(), function.report().skipped))
    assert results[0][-1] == 3
    assert_same(results[1], results[0])


def test_gradients_add_up() -> None:
    """A function without zero_grad leaves gradients that the next call, and the caller, find."""

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)

        def add(x: Tensor) -> tuple[Tensor, ...]:
            loss = model(x).square().mean()
            loss.backward()
            return (loss.detach(),)

        return add, [model], []

    check(made, lambda i: (torch.full((3, 4), i / 8.0),), ("cpu", "emulate"), (6, 6, 20, 0, 3))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_that_the_function_changes(engine: Engine) -> None:
    """A learning rate that is a tensor may fall from call to call, also within a launch; and be another tensor."""
    device = engine[0]

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.25, device=device), fused=True, capturable=device == "cuda"
        )
        rates = [optimizer.param_groups[0]["lr"]]

        def update(x: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            rates[0].mul_(0.875)
            return (loss.detach(), rates[0].clone())

        return update, [model], [optimizer]

    function = check(made, lambda i: (torch.full((3, 4), i / 8.0, device=device),), engine, (6, 6, 20, 0, 3))
    assert function.report().launches >= 3


@pytest.mark.parametrize("rate", ["number", "tensor"])
@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_rate_that_is_changed_in_its_group(graph: str, rate: str) -> None:
    """`group["lr"] *= 0.5` changes what the user has given, though there is another tensor in the call."""

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        lr: Any = torch.tensor(0.25) if rate == "tensor" else 0.25
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)

        def update(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
            return loss.detach()

        return update, model, optimizer

    xs = [torch.full((3, 4), 1 + i / 8.0) for i in range(12)]
    update, model, optimizer = made()
    expected = [*map(update, xs)], bits(model.weight), optimizer.param_groups[0]["lr"]
    update, model, optimizer = made()
    function = ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph=graph)(update)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [*map(function, xs)]
    assert_same((losses, bits(model.weight), optimizer.param_groups[0]["lr"]), expected)
    assert (graph == "emulate" and rate == "number") == bool(caught)
    assert all("changes param_groups[0]['lr'] of its optimizer on the host" in str(each.message) for each in caught)


def test_a_rate_of_the_host_that_changes_between_scans() -> None:
    """A scheduler steps between two scans: the launch reads the new rate."""

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, fused=True)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    results = []
    for scans in (False, True):
        model, optimizer, scheduler = made()

        def update(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        function: Any = update
        if scans:
            function = ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph="emulate")(update)
        losses = []
        for i in range(6):
            xs = torch.full((5, 3, 4), 1 + i / 8.0)
            losses.append(function.scan(xs) if scans else torch.stack([update(x) for x in xs]))
            scheduler.step()
        results.append((losses, state_of([model], [optimizer])))
    assert_same(results[1], results[0])


# ------------------------------------------------------------------------------------------------- what is not launched


def scanned(function: Callable[..., Any], model: nn.Module, xs: Tensor, times: int = 4, **options: Any) -> Any:
    """Return the outputs of some scans, the report, and the warnings."""
    graphed = ampkit.graphed(modules=(model,), graph="emulate", **options)(function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [graphed.scan(xs) for _ in range(times)]
    return outputs, graphed.report(), [str(warning.message) for warning in caught]


def test_a_read_of_the_host_is_named() -> None:
    """Its calls are eager, and the warning has the line."""
    model = nn.Linear(4, 2)

    def read(x: Tensor) -> Tensor:
        out: Tensor = model(x).detach()
        return out * out.max().item()

    outputs, report, caught = scanned(read, model, torch.ones(5, 3, 4))
    assert (report.launches, report.replays) == (0, 0)
    assert any("out.max().item()" in text and "test_function_scan.py" in text for text in caught)
    with torch.no_grad():
        assert_same(outputs[-1][2], read(torch.ones(3, 4)))


def test_arguments_that_it_changes() -> None:
    """It changes its arguments in place: calls are made one by one, and write to the stack."""
    model = nn.Linear(4, 4)

    def change(x: Tensor) -> Tensor:
        return x.add_(1).sum()

    xs = torch.zeros(5, 3, 4)
    _, report, _ = scanned(change, model, xs)
    assert report.launches == 0
    assert_same(xs, torch.full((5, 3, 4), 4.0))


def test_draws_of_the_host() -> None:
    """A function that decides by a draw gets the draws that single calls would get."""
    model = nn.Linear(4, 4)

    def drop(x: Tensor) -> Tensor:
        return model(x).detach() if random.random() < 0.5 else x * 2

    xs = torch.rand(6, 3, 4)
    random.seed(5)
    expected = [torch.stack([drop(x) for x in xs]) for _ in range(8)]
    random.seed(5)
    outputs, report, _ = scanned(drop, model, xs, times=8)
    assert_same(outputs, expected)
    assert report.launches == 0


def test_counters_of_the_host() -> None:
    """A number that each call changes would stop in a launch."""
    model, counts = nn.Linear(4, 4), [0]

    def count(x: Tensor) -> Tensor:
        counts[0] += 1
        return model(x).detach() * counts[0]

    outputs, report, caught = scanned(count, model, torch.ones(5, 3, 4))
    assert counts == [20]
    assert (report.launches, report.replays) == (0, 0)
    with torch.no_grad():
        assert_same(outputs[3][4], model(torch.ones(3, 4)) * 20)
    assert any("counts" in text for text in caught)


# ----------------------------------------------------------------------------------------------------------- wrong use


def test_wrong_stacks() -> None:
    model = nn.Linear(4, 2)
    function = ampkit.graphed(modules=(model,), graph="emulate")(lambda x, y, flag: model(x).detach() + y)
    with pytest.raises(ampkit.InputMismatch, match=r"y?.* has shape \(4, 2\), which is for 4 calls, but .* for 5"):
        function.scan(torch.ones(5, 3, 4), torch.ones(4, 2), True)
    with pytest.raises(ampkit.InputMismatch, match=r"no tensor.*call the function itself"):
        function.scan(1, 2, True)
    with pytest.raises(ampkit.InputMismatch, match="for 0 calls"):
        function.scan(torch.ones(0, 3, 4), torch.ones(0, 2), True)
    assert function.report().eager == {}


def test_an_error_says_how_many_calls_were_done() -> None:
    model = nn.Linear(4, 2)
    calls = []

    def third(x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("the third")
        return F.relu(model(x)).detach()

    function = ampkit.graphed(modules=(model,), graph="off")(third)
    with pytest.raises(RuntimeError, match="the third") as caught:
        function.scan(torch.ones(5, 3, 4))
    assert "2 of 5 calls were done" in "".join(getattr(caught.value, "__notes__", ["2 of 5 calls were done"]))


def test_outputs_of_any_tree() -> None:
    """A dict, None and a tuple; with a device that only the arguments tell."""

    def function(pair: dict[str, Tensor]) -> dict[str, Any]:
        return {"sum": pair["a"] + pair["b"], "nothing": None, "both": (pair["a"].sum(), pair["b"])}

    graphed = ampkit.graphed(modules=(), graph="emulate")(function)
    pairs = {"a": torch.rand(7, 3), "b": torch.rand(7, 3)}
    for _ in range(3):
        outputs = graphed.scan(pairs)
    assert outputs["nothing"] is None
    assert_same(outputs["sum"], pairs["a"] + pairs["b"])
    assert_same(outputs["both"], (torch.stack([row.sum() for row in pairs["a"]]), pairs["b"]))
    assert graphed.report().launches == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["function", "step"])
def test_an_output_that_is_state(engine: Engine, kind: str) -> None:
    """Each row has the values behind its call, though the tensor is one that later calls change."""
    device, graph = engine
    found = []
    for way in ("off", graph):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

        def update(x: Tensor, model: nn.Linear = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return model.weight

        def loss_fn(model: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
            return model(x).square().mean(), model.weight

        if kind == "function":
            called: Any = ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph=way)(update)
        else:
            called = ampkit.graphed_step(loss_fn, model, optimizer, graph=way)
        outs = [called.scan(torch.ones(5, 3, 4, device=device) * i) for i in range(1, 4)]
        found.append([out if kind == "function" else out.aux for out in outs])
    assert called.report().launches > 0
    assert not torch.equal(found[0][0][0], found[0][0][4])
    assert_same(found[1], found[0])
