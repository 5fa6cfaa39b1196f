"""What `graphed` finds in calls behind the first one, and beside what is declared: the idioms of CleanRL's learners."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from tape import taped
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ampkit

Engine = tuple[str, str]
CALLS = 24


class Learner:
    """SAC as CleanRL writes it, but for its size: a temperature that is a tensor, a target that follows by `.data`.

    Its actor and its temperature move only in calls that say so.
    """

    def __init__(self, device: str, temperature: Callable[[Tensor], Tensor] = Tensor.requires_grad_) -> None:
        torch.manual_seed(0)
        self.q, self.target, self.actor = (nn.Linear(n, 1).to(device) for n in (4, 4, 3))
        self.log_alpha = temperature(torch.zeros(1, device=device))
        params = [[*self.q.parameters()], [*self.actor.parameters()], [self.log_alpha]]
        self.q_opt, self.a_opt, self.alpha_opt = self.all = [torch.optim.Adam(p, 1e-2, fused=True) for p in params]

    def update(self, x: Tensor, moves: bool) -> tuple[Tensor, ...]:
        """Do an update with observations of shape (batch, 3)."""
        now = torch.cat([x, self.actor(x).detach()], 1)
        with torch.no_grad():
            wanted = x.sum(1, keepdim=True) + self.target(now) - self.log_alpha.exp() * self.actor(x)
        losses = [(self.q(now) - wanted).square().mean()]
        self.q_opt.zero_grad()
        losses[0].backward()
        self.q_opt.step()
        if moves:
            action = self.actor(x)
            losses.append((self.log_alpha.exp().detach() * action - self.q(torch.cat([x, action], 1))).mean())
            self.a_opt.zero_grad()
            losses[1].backward()
            self.a_opt.step()
            losses.append((self.log_alpha.exp() * losses[0].detach()).sum())
            self.alpha_opt.zero_grad()
            losses[2].backward()
            self.alpha_opt.step()
        for param, followed in zip(self.q.parameters(), self.target.parameters(), strict=True):
            followed.data.copy_(0.05 * param.data + 0.95 * followed.data)
        return tuple(losses)

    def state(self) -> list[Any]:
        """Return the bits of all that it changes."""
        params = [*(p for m in (self.q, self.target, self.actor) for p in m.parameters()), self.log_alpha]
        moments = [value for each in self.all for param in params for value in each.state.get(param, {}).values()]
        grads = [None if param.grad is None else bits(param.grad) for param in params]
        return [*map(bits, [*(p.detach() for p in params), *moments]), grads]


DECLARED: dict[str, Callable[[Learner], dict[str, Any]]] = {
    "nothing": lambda _: {},
    "optimizers": lambda self: {"optimizers": (self.a_opt, self.alpha_opt)},
    "some": lambda self: {"modules": (self.q,), "optimizers": (self.q_opt,)},
    "both": lambda self: {"modules": (self.q, self.actor), "optimizers": tuple(self.all)},
    "no module": lambda _: {"modules": ()},
}


def run(device: str, graph: str | None, first: int, every: int, declared: str = "nothing", **options: Any) -> Any:
    """Return the function and what it leaves in calls of which every so-manieth one moves the actor."""
    learner = Learner(device)
    made = ampkit.graphed(graph=graph, **DECLARED[declared](learner), **options) if graph else lambda function: function
    function, drawn, found = made(learner.update), torch.Generator().manual_seed(1), []
    for i in range(CALLS):
        moves = i >= first and (i - first) % every == 0
        losses = function(torch.randn(8, 3, generator=drawn).to(device), moves)
        found.append([[bits(loss.detach()) for loss in losses], learner.state()])
    return function, found


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_delayed_update(engine: Engine, first: int, declared: str) -> None:
    """Both kinds of call are captured, whichever comes first, and leave the bits of the loop, gradients among them."""
    device, graph = engine
    with deterministic():
        _, expected = run(device, None, first, 2)
        function, found = run(device, graph, first, 2, declared, on_failure="raise")
        assert_same(found, expected)
        assert function.captures == 2
        assert function.replays >= CALLS - 9


@pytest.mark.parametrize("declared", ["nothing", "some"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_that_comes_when_there_is_a_graph(engine: Engine, declared: str) -> None:
    """The graph that was there is made anew, since what it belongs to has grown. Bits are those of the loop."""
    device, graph = engine
    with deterministic():
        _, expected = run(device, None, 8, 3)
        function, found = run(device, graph, 8, 3, declared, on_failure="raise")
        assert_same(found, expected)
        assert function.replays >= CALLS - 13


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_tape_replays(first: int) -> None:
    """A tape freezes what a CUDA graph freezes."""
    _, expected = run("cpu", None, first, 2)
    with taped():
        function, found = run("cpu", "emulate", first, 2, on_failure="raise")
    assert_same(found, expected)
    assert function.captures == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_scans(engine: Engine) -> None:
    """Scans of calls that step an optimizer more than earlier ones, whose rates are tensors of their own."""
    device, graph = engine
    results = []
    for way in ("off", graph):
        learner, drawn, found = Learner(device), torch.Generator().manual_seed(1), []
        function = ampkit.graphed(graph=way)(learner.update)
        for i in range(8):
            for optimizer in learner.all:
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + i)
            batch = torch.randn(16, 8, 3, generator=drawn).to(device)
            found.append([*map(bits, function.scan(batch, i in (2, 4, 6, 7))), learner.state()])
        results.append(found)
    assert function.report().launches >= 4
    assert_same(results[1], results[0])


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_temperature(engine: Engine, kind: Callable[[Tensor], Tensor]) -> None:
    """A leaf that an optimizer holds is a parameter, whatever its class."""
    device, graph = engine
    results = []
    for way in ("off", graph):
        learner = Learner(device, kind)
        function = ampkit.graphed(graph=way, on_failure="raise")(learner.update)
        for i in range(8):
            function(torch.full((8, 3), 1 + i / 8, device=device), True)
        results.append(learner.state())
    assert function.replays == 4
    assert_same(results[1], results[0])


FOLLOWS: dict[str, Callable[[list[Any], list[Any]], object]] = {
    "data": lambda q, t: [b.data.copy_(0.1 * a.data + 0.9 * b.data) for a, b in zip(q, t, strict=True)],
    "part of data": lambda q, t: [b.data[:1].lerp_(a.data[:1], 0.1) for a, b in zip(q, t, strict=True)],
    "detach": lambda q, t: [b.detach().lerp_(a.detach(), 0.1) for a, b in zip(q, t, strict=True)],
    "out": lambda q, t: [torch.lerp(b.data, a.data, 0.1, out=b.data) for a, b in zip(q, t, strict=True)],
    "foreach": lambda q, t: torch._foreach_lerp_([b.data for b in t], [a.data for a in q], 0.1),
}
MOVES: dict[str, Callable[[list[Any], list[Any]], object]] = {
    "assigned": lambda q, t: [setattr(b, "data", 0.1 * a.data + 0.9 * b.data) for a, b in zip(q, t, strict=True)],
    "vector": lambda q, t: vector_to_parameters(0.1 * parameters_to_vector(q) + 0.9 * parameters_to_vector(t), t),
}


def following(
    device: str, graph: str, follow: Callable[[list[Any], list[Any]], object], declares: bool = False, **options: Any
) -> Any:
    """Return a function whose target follows a network, and the bits of both behind some calls."""
    torch.manual_seed(0)
    q, target = nn.Linear(4, 4).to(device), nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(q.parameters(), lr=0.125, fused=True)

    def update(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = target(x)
        loss = (q(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            follow([*q.parameters()], [*target.parameters()])
        return loss

    declared: dict[str, Any] = {"modules": (q, target), "optimizers": (optimizer,)} if declares else {}
    function = ampkit.graphed(graph=graph, **declared, **options)(update)
    found = [bits(function(torch.full((3, 4), 1 + i / 8, device=device))) for i in range(12)]
    return function, [found, *map(bits, (*q.state_dict().values(), *target.state_dict().values()))]


@pytest.mark.parametrize("follow", FOLLOWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_that_follows_in_place(engine: Engine, follow: str) -> None:
    """Such writes raise no version of the parameter. They are found where they happen, by the memory."""
    device, graph = engine
    _, expected = following(device, "off", FOLLOWS[follow])
    function, found = following(device, graph, FOLLOWS[follow], on_failure="raise")
    assert_same(found, expected)
    assert function.replays == 8
    if graph == "emulate":
        with taped():
            assert_same(following(device, graph, FOLLOWS[follow])[1], expected)


@pytest.mark.parametrize("declares", [False, True])
@pytest.mark.parametrize("follow", MOVES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_that_gets_other_memory(engine: Engine, follow: str, declares: bool) -> None:
    """A graph would read the old memory: the warning says so, and calls have the bits of the loop."""
    device, graph = engine
    _, expected = following(device, "off", MOVES[follow])
    says = "moved to other memory" if declares else r"target\(x\)` - reads a tensor .* got other memory \(tensor\.data"
    with taped(), pytest.warns(ampkit.CaptureWarning, match=says):
        function, found = following(device, graph, MOVES[follow], declares)
    assert_same(found, expected)
    assert function.replays == 0


# ------------------------------------------------------------------------------------------------- what is not captured


@pytest.mark.parametrize("engine", ENGINES)
def test_an_optimizer_that_no_graph_can_hold(engine: Engine) -> None:
    """It steps in every other call. These are eager, and the line is named; the other calls have their graph."""
    device, graph = engine
    results = []
    for way in ("off", graph):
        learner = Learner(device)
        learner.alpha_opt = torch.optim.LBFGS([learner.log_alpha], lr=0.125, max_iter=1)

        def update(x: Tensor, moves: bool, learner: Learner = learner) -> Tensor:
            loss = learner.q(torch.cat([x, learner.actor(x).detach()], 1)).square().mean()
            learner.q_opt.zero_grad()
            loss.backward()
            learner.q_opt.step()
            if moves:
                learner.log_alpha.grad = loss.detach().reshape(1)
                learner.alpha_opt.step(lambda: loss.detach())
            return loss

        function = ampkit.graphed(graph=way)(update)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(16):
                function(torch.full((8, 3), 1 + i / 8, device=device), i % 2 == 1)
        results.append([learner.state()])
    assert "LBFGS has no form that a graph can hold" in str(caught[0].message)
    assert function.replays >= 4
    assert_same(results[1], results[0])


def test_an_optimizer_that_each_call_makes() -> None:
    """A replay would step the one of the capture."""
    results = []
    for way in ("off", "emulate"):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)

        def update(x: Tensor, model: nn.Module = model) -> Tensor:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        function = ampkit.graphed(modules=(model,), graph=way)(update)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(8):
                function(torch.full((3, 4), 1 + i / 8))
        results.append(bits(model.weight.detach()))
    assert r"over parameters of another one. If each call makes one" in str(caught[0].message)
    assert function.replays == 0
    assert_same(results[1], results[0])


# ---------------------------------------------------------------------------------------------------------- the report


def test_what_the_report_calls_things() -> None:
    """Modules by the function's variables; the reason first; modules in others with the same reason by their number."""
    torch.manual_seed(0)
    critic = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    small = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD([*critic.parameters(), *small.parameters()], lr=0.125, fused=True)

    @ampkit.graphed(graph="emulate")
    def update(x: Tensor) -> Tensor:
        loss = critic(small(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if float(loss.detach()) > 1e-9:
            optimizer.step()
        return loss

    with pytest.warns(ampkit.CaptureWarning, match="done in parts: critic gets graphs of its own"):
        [update(torch.full((3, 4), 1 + i / 8)) for i in range(14)]
    first, *lines = update.report().split
    assert first.startswith("cannot be captured: ")
    assert "captured by itself: critic" in lines
    assert "eager: small, and 2 in it: it has fewer than 6 kernels" in lines


def test_lines_that_calls_wait_for() -> None:
    """A distribution checks its arguments: each line is named, and what to write instead once."""
    actor = nn.Linear(4, 4)

    @ampkit.graphed(graph="emulate", on_failure="raise")
    def act(x: Tensor) -> Tensor:
        with torch.no_grad():
            normal = torch.distributions.Normal(actor(x), 1.0, validate_args=True)
            return normal.log_prob(normal.sample())

    for _ in range(6):
        act(torch.ones(3, 4))
    (line,) = act.report().waits
    assert "`normal = torch.distributions.Normal(actor(x), 1.0, validate_args=True)`, " in line
    assert line.count("validate_args=False") == 1
    assert f"  {line}" in str(act.report()).splitlines()


@pytest.mark.parametrize("steps_within", [True, False])
def test_a_module_that_is_found_later_and_only_read(steps_within: bool) -> None:
    """R5: graphs that were captured before it was found do not know which gradients are compared from then on."""

    def train(graph: str) -> list[Any]:
        torch.manual_seed(0)
        nets, targets = ([nn.Linear(4, 2) for _ in range(2)] for _ in range(2))
        params = [param for net in nets for param in net.parameters()]
        optimizer = torch.optim.Adam(params, 1e-2, fused=True)

        def update(x: Tensor, kind: int) -> Tensor:
            loss = (nets[kind](x) - targets[kind](x).detach() - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if steps_within:
                optimizer.step()
            return loss

        function = ampkit.graphed(optimizers=(optimizer,), graph=graph)(update)
        history: list[Any] = []
        for i in range(CALLS):
            loss = function(torch.randn(8, 4), 0 if i < 5 else i % 2)
            if not steps_within:
                optimizer.step()
            grads = [None if param.grad is None else bits(param.grad) for param in params]
            history.append([bits(loss), *map(bits, params), grads])
        return history

    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.AmpkitWarning)
        expected = train("off")
        with taped():
            found = train("emulate")
    assert_same(found, expected)
