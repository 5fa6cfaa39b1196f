"""`ampkit.graphed()` without `modules=`: what the function changes is found in its first call, in all modes."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from rl_algorithms import DQN, PPO, SAC, TD3, Learner
from tape import taped
from torch import Tensor, nn

import ampkit
from ampkit._step import found_state

Engine = tuple[str, str]
MANY = 14  # calls


def run(
    made: Callable[[], Any], batch: Callable[[int], Any], graph: str | None, scans: bool = False, **options: Any
) -> Any:
    """Return outputs and state behind some calls of `made()`, which returns a function and what it changes."""
    function, tensors = made()
    graphed: Any = function if graph is None else ampkit.graphed(graph=graph, **options)(function)
    torch.manual_seed(1)
    if scans:
        columns = zip(*map(batch, range(MANY)), strict=True)
        outputs = graphed.scan(*(torch.stack(each) if isinstance(each[0], Tensor) else each[0] for each in columns))
        outputs = [[each[i] for each in outputs] for i in range(MANY)]
    else:
        outputs = [[out.detach().clone() for out in graphed(*batch(i))] for i in range(MANY)]
    return graphed, [outputs, {name: bits(tensor) for name, tensor in tensors().items()}, torch.rand(2)]


def learner_of(algorithm: type[Learner], device: str) -> Callable[[], Any]:
    """Return what makes a learner of small networks."""

    def made() -> Any:
        torch.manual_seed(0)
        learner: Any = algorithm(device, "fused", 8)  # type: ignore[call-arg]  # of each algorithm

        def tensors() -> dict[str, Tensor]:
            found = {f"{i}.{k}": v for i, m in enumerate(learner.modules) for k, v in m.state_dict().items()}
            for i, optimizer in enumerate(learner.optimizers):
                for number, state in optimizer.state_dict()["state"].items():
                    found |= {f"{i}.{number}.{name}": value for name, value in state.items()}
            return found

        return learner.update, tensors

    return made


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("algorithm", [SAC, PPO, DQN, TD3])
def test_learners(engine: Engine, algorithm: type[Learner], counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks, targets, a temperature and optimizers are found; bits are those of the plain loop, also by a scan.

    Foreach kernels on CUDA raise no version, so target networks that are moved by them are found by the calls.
    """
    device, graph = engine
    if not counted:
        monkeypatch.setattr(found_state, "version", lambda _: 0)
    generator = torch.Generator().manual_seed(3)
    batches = [
        [torch.rand(t.shape, generator=generator).to(device) for t in algorithm.batch("cpu")] for _ in range(MANY)
    ]

    def batch(i: int) -> list[Any]:
        return [*batches[i], *([True] if algorithm is TD3 else [])]

    made = learner_of(algorithm, device)
    with deterministic():
        _, expected = run(made, batch, None)
        found, result = run(made, batch, graph, on_failure="raise")
        assert_same(result, expected)
        assert found.report().eager == {"warm-up": 4}  # the first call finds
        assert found.replays == MANY - 4
        assert_same(run(made, batch, "off")[1], expected)
        scanned, result = run(made, batch, graph, scans=True, on_failure="raise")
        assert_same(result, expected)
        assert scanned.report().eager == {"warm-up": 4}


def with_loose_parameter() -> Any:
    """Return a function with a parameter of no module, in closure, whose optimizer steps; and a frozen teacher."""
    torch.manual_seed(0)
    model, teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)
    log_alpha = nn.Parameter(torch.zeros(()))
    optimizers = [
        torch.optim.SGD(p, lr=0.125, momentum=0.5, fused=True) for p in (list(model.parameters()), [log_alpha])
    ]

    def update(x: Tensor) -> tuple[Tensor, ...]:
        losses = []
        for optimizer in optimizers:
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(x)
            loss = ((model(x) - wanted).square().mean() - 1) * log_alpha.exp()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return tuple(losses)

    def tensors() -> dict[str, Tensor]:
        momenta = [state["momentum_buffer"] for each in optimizers for state in each.state.values()]
        return {**model.state_dict(), "alpha": log_alpha.detach(), **{f"m{i}": each for i, each in enumerate(momenta)}}

    return update, tensors


@pytest.mark.parametrize("way", ["emulate", "off", "tape"])
def test_a_loose_parameter(way: str) -> None:
    """It is trained by an optimizer, and belongs to no module."""
    _, expected = run(with_loose_parameter, lambda i: [torch.full((3, 4), 1 + i / 8.0)], None)
    if way == "tape":
        with taped():
            graphed, found = run(with_loose_parameter, lambda i: [torch.full((3, 4), 1 + i / 8.0)], "emulate")
    else:
        graphed, found = run(with_loose_parameter, lambda i: [torch.full((3, 4), 1 + i / 8.0)], way)
    assert_same(found, expected)
    assert graphed.replays == (0 if way == "off" else MANY - 4)


def with_a_later_parameter(kind: Callable[[Tensor], Tensor]) -> Any:
    """Return a function, a model, a tensor of no module that only its second param group has, and an optimizer."""
    torch.manual_seed(0)
    model, extra = nn.Linear(4, 4), kind(torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

    def update(x: Tensor, keeps: bool) -> Tensor:
        loss = model(x).square().mean() - 1
        if len(optimizer.param_groups) > 1:
            loss = loss * extra.exp()
        loss.backward()
        optimizer.step()
        if not keeps:
            optimizer.zero_grad()
        return loss.detach()

    return update, model, extra, optimizer


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("declares", [False, True])
@pytest.mark.parametrize("kind", [nn.Parameter, lambda value: value.requires_grad_()])
def test_a_parameter_of_no_module_that_comes_later(
    kind: Callable[[Tensor], Tensor], declares: bool, keeps: bool
) -> None:
    """It is captured with it, and its gradient is that of the loop: one that is left, and one that the loop makes."""
    results = []
    for graph in (None, "emulate"):
        function, model, extra, optimizer = with_a_later_parameter(kind)
        if graph is not None:
            declared: Any = {"modules": (model,), "optimizers": (optimizer,)} if declares else {}
            function = ampkit.graphed(graph=graph, **declared)(function)
        found: list[Any] = []
        with taped(), pytest.warns(ampkit.CaptureWarning, match="a param group was added") if graph else nullcontext():
            for i in range(20):
                if i == 6:
                    optimizer.add_param_group({"params": [extra]})
                if i > 12 and i % 3 == 0:
                    (extra * i).backward()
                found.append(function(torch.full((3, 4), 1 + i / 8.0), keeps).clone())
                found += [bits(extra.detach()), None if extra.grad is None else bits(extra.grad)]
        results.append(found)
        assert graph is None or function.replays >= 8
    assert_same(results[1], results[0])


@pytest.mark.parametrize("declares", [False, True])
def test_a_tensor_of_no_module_whose_gradient_the_function_uses(declares: bool) -> None:
    """No optimizer holds it, so that nothing would notice a gradient that the loop gives it: eager, with its line."""
    results = []
    for graph in (None, "emulate"):
        torch.manual_seed(0)
        model, extra = nn.Linear(4, 4), torch.zeros((), requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

        def update(
            x: Tensor, model: nn.Module = model, extra: Tensor = extra, optimizer: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x).square().mean() - 1) * extra.exp()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                extra.sub_(extra.grad * 0.125)  # type: ignore[operator]  # it has one
            extra.grad = None
            return loss.detach()

        options: dict[str, Any] = {"modules": (model,), "optimizers": (optimizer,)} if declares else {}
        function: Any = update if graph is None else ampkit.graphed(graph=graph, **options)(update)
        found: list[Any] = []
        says = "belongs to no declared module, and the function reads or clears its gradient"
        with taped(), pytest.warns(ampkit.CaptureWarning, match=says) if graph else nullcontext():
            for i in range(14):
                if i > 8:
                    (extra * i).backward()
                found += [function(torch.full((3, 4), 1 + i / 8.0)).clone(), bits(extra.detach())]
        results.append(found)
        assert graph is None or function.replays == 0
    assert_same(results[1], results[0])


@pytest.mark.parametrize("graph", ["emulate", "off"])
def test_a_step_whose_optimizer_gets_a_parameter_of_no_module(graph: str) -> None:
    """`graphed_step` clears the gradients of its model alone, so it refuses that parameter as when it is made."""
    _, model, extra, optimizer = with_a_later_parameter(nn.Parameter)
    step = ampkit.graphed_step(
        lambda model, x: model(x).square().mean() * (extra.exp() if len(optimizer.param_groups) > 1 else 1),
        model,
        optimizer,
        graph=graph,
    )
    for _ in range(5):
        step(torch.ones(3, 4))
    optimizer.add_param_group({"params": [extra]})
    before = bits(model.weight)
    with (
        pytest.warns(ampkit.CaptureWarning, match="a param group was added") if graph != "off" else nullcontext(),
        pytest.raises(ValueError, match=r"a parameter of shape \(\) that is not the model's.*No optimizer step"),
    ):
        step(torch.ones(3, 4))
    assert_same(bits(model.weight), before)
    model.extra = extra
    extra.grad = None
    for _ in range(5):
        step(torch.ones(3, 4))
    assert extra.item() != 0


@pytest.mark.parametrize("kind", ["fused SGD", "Adafactor"])
@pytest.mark.parametrize("graph", ["emulate", "off"])
def test_a_parameter_of_no_module_whose_gradient_comes_later(graph: str, kind: str) -> None:
    """`graphed_step` refuses it in the call in front of which it has got one, replays too."""
    _, model, extra, optimizer = with_a_later_parameter(nn.Parameter)
    if kind == "Adafactor":
        optimizer = torch.optim.Adafactor(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, graph=graph)
        step(torch.ones(3, 4))
        optimizer.add_param_group({"params": [extra]})
        for _ in range(12):
            step(torch.ones(3, 4))
    assert step.replays > 5 or graph == "off"
    (extra * 3).backward()
    with pytest.raises(ValueError, match=r"a parameter of shape \(\) that is not the model's.*No optimizer step"):
        step(torch.ones(3, 4))


def test_a_gradient_that_a_function_reads_of_a_tensor_that_it_does_not_use() -> None:
    """The variable that leads to it is named."""
    model, held = nn.Linear(4, 4), torch.zeros(4, requires_grad=True)

    @ampkit.graphed(modules=(model,), graph="emulate")
    def act(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = model(x)
            return out if held.grad is None else out + held.grad

    with pytest.warns(ampkit.CaptureWarning, match="the variable held - uses a tensor that belongs to no declared"):
        assert [act(torch.ones(3, 4)).grad_fn for _ in range(8)] == [None] * 8
    assert act.replays == 0


def test_a_rate_that_a_scheduler_changes() -> None:
    """A found optimizer reads its rate from a tensor: the graph follows a number that changes."""

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        def update(x: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return (loss,)

        return update, scheduler, model

    results = []
    for graph in (None, "emulate"):
        update, scheduler, model = made()
        function: Any = update if graph is None else ampkit.graphed(graph=graph, on_failure="raise")(update)
        with taped():
            losses = []
            for i in range(10):
                losses.append(function(torch.full((3, 4), 1 + i / 8.0))[0].detach().clone())
                scheduler.step()
        results.append((losses, bits(model.weight)))
        assert graph is None or function.replays == 6
    assert_same(results[1], results[0])


def test_an_evaluation() -> None:
    """It changes nothing, so nothing is found. Weights that are replaced are noticed, as those of a declared module."""
    model = nn.Linear(4, 2)

    @ampkit.graphed(graph="emulate", on_failure="raise")
    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    x = torch.ones(3, 4)
    with taped():
        for i in range(12):
            if i == 8:
                model.weight = nn.Parameter(torch.ones(2, 4))
            with pytest.warns(ampkit.CaptureWarning, match="weight was replaced") if i == 8 else nullcontext():
                out = evaluate(x)
            assert torch.equal(out, model(x).detach())
    assert evaluate.replays == 4 + 1


class Agent(nn.Module):
    """A module with a part on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.elsewhere = nn.Linear(4, 1), nn.Linear(4, 1, device="meta")


def test_a_part_of_a_module_that_cannot_be_declared() -> None:
    """The largest modules that are whole on the device are found."""

    def made() -> Any:
        torch.manual_seed(0)
        agent = Agent()

        def update(x: Tensor) -> tuple[Tensor, ...]:
            loss = agent.model(x).square().mean()
            with torch.no_grad():
                agent.model.weight.mul_(0.875)
            return (loss.detach(),)

        return update, agent.model.state_dict

    results = [run(made, lambda i: [torch.full((3, 4), i / 8.0)], graph)[1] for graph in (None, "emulate")]
    assert_same(*results)


# ------------------------------------------------------------------------------------------------- what is not captured


def test_an_optimizer_that_steps_later() -> None:
    """TD3's first call moves no actor. What moves it is found in the call that does, and bits are those of the loop."""
    results = []
    batches = [torch.rand(t.shape, generator=torch.Generator().manual_seed(3)) for t in TD3.batch("cpu")]
    for graph in ("off", "emulate"):
        torch.manual_seed(0)
        learner = TD3("cpu", "fused", 8)
        function = ampkit.graphed(graph=graph, on_failure="raise")(learner.update)
        torch.manual_seed(1)
        for i in range(14):
            function(*batches, i % 2 == 1)
        results.append([bits(param.detach()) for module in learner.modules for param in module.parameters()])
    assert function.captures == 2
    assert_same(results[1], results[0])


def test_what_is_found_and_cannot_be_used() -> None:
    """Parameters on two devices: one warning, and eager calls with the bits of the loop."""

    def made() -> Any:
        weight, other = (torch.ones(4, requires_grad=True, device=device) for device in ("cpu", "meta"))
        optimizer = torch.optim.SGD([weight, other], lr=0.125)

        def update(x: Tensor) -> tuple[Tensor, ...]:
            optimizer.zero_grad()
            loss = (x @ weight).square().mean()
            loss.backward()
            optimizer.step()
            return (loss,)

        return update, lambda: {"weight": weight.detach()}

    _, expected = run(made, lambda i: [torch.full((3, 4), i / 8.0)], None)
    with pytest.warns(ampkit.CaptureWarning, match="expected parameters and buffers on one device, found"):
        graphed, found = run(made, lambda i: [torch.full((3, 4), i / 8.0)], "emulate")
    assert_same(found, expected)
    assert graphed.replays == 0


def test_an_error_in_the_first_call() -> None:
    """Nothing is found by it. The next call is the first one."""
    model = nn.Linear(4, 2)
    calls = []

    @ampkit.graphed(graph="emulate", on_failure="raise", host_writes="ignore")
    def step(x: Tensor) -> Tensor:
        calls.append(0)
        if len(calls) == 1:
            raise RuntimeError("the first")
        return model(x).detach()

    with pytest.raises(RuntimeError, match="the first"):
        step(torch.ones(3, 4))
    for _ in range(6):
        step(torch.ones(3, 4))
    assert step.report().eager["warm-up"] == 4


@pytest.mark.parametrize("graph", ["off", "emulate"])
def test_a_rate_that_the_first_call_changes(graph: str) -> None:
    """What the function does to `group["lr"]` behind its step is done to the user's rate, in call 1, too."""
    found = []
    for way in (None, graph):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def update(
            x: Tensor, model: nn.Linear = model, optimizer: Any = optimizer, scheduler: Any = scheduler
        ) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss

        called: Any = update if way is None else ampkit.graphed(graph=way, host_writes="ignore")(update)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            called(torch.ones(3, 4))
        found.append((model.weight.detach().clone(), float(optimizer.param_groups[0]["lr"])))
    assert found[0][1] == 0.25
    assert_same(found[1], found[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("declared", [False, True])
def test_a_gradient_that_is_left_to_a_loose_tensor(engine: Engine, declared: bool) -> None:
    """Its optimizer steps outside of the function: a replay would leave it none, so the line is named."""
    device, graph = engine
    found = []
    for way in ("off", graph):
        torch.manual_seed(0)
        model, alpha = nn.Linear(4, 2).to(device), nn.Parameter(torch.zeros((), device=device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
        outside = torch.optim.SGD([alpha], lr=0.125, fused=True)

        def update(x: Tensor, model: nn.Linear = model, optimizer: Any = optimizer, alpha: Any = alpha) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * alpha.exp()
            loss.backward()
            optimizer.step()
            return loss

        options: dict[str, Any] = {"modules": (model,), "optimizers": (optimizer,)} if declared else {}
        called = ampkit.graphed(graph=way, **options)(update)
        with warnings.catch_warnings(record=True) as caught, taped() if device == "cpu" else nullcontext():
            warnings.simplefilter("always")
            for _ in range(10):
                outside.zero_grad()
                called(torch.ones(3, 4, device=device))
                outside.step()
        found.append([alpha.detach().clone(), model.weight.detach().clone()])
    assert "leaves it a gradient" in str(caught[0].message)
    assert_same(found[1], found[0])
