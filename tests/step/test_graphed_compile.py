"""`graphed(compile=...)`: modules that a function calls are compiled, with the same bits captured and uncaptured."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import (
    ENGINES,
    assert_same,
    bits,
    deterministic,
)
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Agent(nn.Module):
    """Two networks that a function calls by themselves, and a layer that both share."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.actor = nn.Sequential(nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))

    def value(self, x: Tensor) -> Tensor:
        return self.critic(self.stem(x)).squeeze(1)


class Learner:
    """An update of an actor and a critic, and of an average that is declared as a module, too."""

    def __init__(self, device: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.agent, self.target = (Agent(**options).to(device) for _ in range(2))
        self.target.requires_grad_(False)
        self.optimizers = tuple(
            torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
            for module in (nn.ModuleList([self.agent.stem, self.agent.critic]), self.agent.actor)
        )
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]
        self.scaler = ampkit.GradScaler(device, init_scale=64.0, growth_interval=4)
        self.modules = (self.agent, self.target)
        self.device = device

    def update(self, x: Tensor, actions: Tensor, boost: Tensor) -> tuple[Tensor, Tensor]:
        """Step both optimizers, under one loss scale, and move the average."""
        critic_steps, actor_steps = self.optimizers
        with torch.autocast(self.device, torch.bfloat16):
            with torch.no_grad():
                wanted = self.target.value(x) * 0.9 + 1.0
            critic_loss = F.mse_loss(self.agent.value(x), wanted) * boost
        critic_steps.zero_grad()
        self.scaler.scale(critic_loss).backward()
        self.scaler.step(critic_steps, max_norm=1.0)
        with torch.autocast(self.device, torch.bfloat16):
            actor_loss = F.cross_entropy(self.agent.actor(self.agent.stem(x).detach()), actions)
        actor_steps.zero_grad()
        self.scaler.scale(actor_loss).backward()
        self.scaler.step(actor_steps)
        self.scaler.update()
        with torch.no_grad():
            for slow, quick in zip(self.target.parameters(), self.agent.parameters(), strict=True):
                slow.lerp_(quick, 0.1)
        return critic_loss, actor_loss

    def batch(self, i: int, size: int = 8) -> tuple[Tensor, ...]:
        """Return the arguments of call i; the fifth one overflows."""
        made = torch.Generator().manual_seed(i)
        x, actions = torch.randn(size, 6, generator=made), torch.randint(3, (size,), generator=made)
        return x.to(self.device), actions.to(self.device), torch.tensor(float("inf") if i == 5 else 1.0).to(self.device)

    def state(self) -> list[Any]:
        """Return all that a call may change."""
        tensors = [bits(value) for module in self.modules for value in module.state_dict().values()]
        moments = [bits(value) for each in self.optimizers for state in each.state.values() for value in state.values()]
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        return [tensors, moments, rates, self.scaler.state_dict(), bits(torch.rand(2, device=self.device))]


SIZES = (8, 8, 8, 8, 8, 8, 5, 5, 5, 5, 8, 5, 8, 5)


def trajectory(
    device: str, graph: str, *, finds: bool = False, sizes: Sequence[int] = SIZES, dropout: float = 0.2, **options: Any
) -> tuple[list[Any], ampkit.GraphedFunction]:
    """Return what each call returned and left, and the function."""
    learner = Learner(device, dropout=dropout)
    state: dict[str, Any] = {} if finds else {"modules": learner.modules, "optimizers": learner.optimizers}
    options = {"compile": "default", "on_failure": "raise", **options}
    function = ampkit.graphed(**state, scaler=learner.scaler, scheduler=learner.schedulers, graph=graph, **options)(
        learner.update
    )
    torch.manual_seed(3)
    found = [([*function(*learner.batch(i, size))], learner.state()) for i, size in enumerate(sizes)]
    return found, function


PARTS = "modules[0].critic, modules[0].actor, modules[1].critic"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("finds", [False, True])
@pytest.mark.usefixtures("fast")
def test_captured_as_uncaptured(engine: Engine, finds: bool) -> None:
    """A graph has the bits of the same compiled calls uncaptured: two layouts, dropout, an overflow, a schedule."""
    device, graph = engine
    with deterministic():
        eager, plain = trajectory(device, "off", finds=finds)
        graphed, function = trajectory(device, graph, finds=finds)
    assert_same(graphed, eager)
    assert (plain.replays, function.replays) == (0, len(SIZES) - 2 * 3 - finds)
    for each in (plain, function):
        (line,) = each.report().compiled
        assert line.startswith("compiled: forward and backward of ")
        assert line.endswith(", for 2 layout(s) of the arguments")
        names = line.removeprefix("compiled: forward and backward of ").split(", for")[0].split(", ")
        assert sorted(name.split(".")[-1] for name in names) == ["actor", "critic", "critic"]
        assert each.report().compile_s > 0


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("finds", [False, True])
def test_plain_loop(finds: bool) -> None:
    """With a compiler that changes no bit, compiled calls are those of a plain loop with nothing compiled."""
    with deterministic():
        compiled, _ = trajectory("cpu", "emulate", finds=finds)
        learner = Learner("cpu")
        torch.manual_seed(3)
        for i, size in enumerate(SIZES):
            outs = learner.update(*learner.batch(i, size))
            for scheduler in learner.schedulers:
                scheduler.step()
            assert_same(([*outs], learner.state()), compiled[i], f"call {i}")


@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        (("cpu", "emulate"), "default"),
        pytest.param(("cuda", "auto"), "default", marks=pytest.mark.cuda),
        pytest.param(("cuda", "auto"), "max", marks=pytest.mark.cuda),
    ],
)
@pytest.mark.slow
def test_with_inductor(engine: Engine, mode: str) -> None:
    """Inductor's kernels leave the same bits captured and uncaptured, and nearly the losses of eager code.

    A bfloat16 has 8 bits. Two layers round at other places, so that a loss of up to 3 moves by less than 0.05.
    """
    device, graph = engine
    with deterministic():
        eager, _ = trajectory(device, "off", compile=mode, dropout=0.0, sizes=SIZES[:6])
        graphed, function = trajectory(device, graph, compile=mode, dropout=0.0, sizes=SIZES[:6])
        uncompiled, _ = trajectory(device, "off", compile=None, dropout=0.0, sizes=SIZES[:6])
    assert_same(graphed, eager)
    assert function.replays == 3
    for (ours, _), (theirs, _) in zip(graphed[:5], uncompiled[:5], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert abs(one - other) < 0.05


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("verify", [0, 3])
def test_scan(verify: int) -> None:
    """Launches of several calls run the compiled code, too, with the rates of each call."""
    lengths = (6, 20, 4)
    with deterministic():
        expected, _ = trajectory("cpu", "off", sizes=(8,) * sum(lengths), dropout=0.0)  # which draws in between
        learner = Learner("cpu", dropout=0.0)
        known: dict[str, Any] = {"modules": learner.modules, "optimizers": learner.optimizers, "scaler": learner.scaler}
        function = ampkit.graphed(
            **known,
            scheduler=learner.schedulers,
            compile="default",
            graph="emulate",
            verify=verify,
            on_failure="raise",
        )(learner.update)
        torch.manual_seed(3)
        done = 0
        for length in lengths:
            batches = [learner.batch(done + i) for i in range(length)]
            outs = function.scan(*map(torch.stack, zip(*batches, strict=True)))
            done += length
            singles = [out for out, _ in expected[done - length : done]]
            wanted = [torch.stack(column) for column in zip(*singles, strict=True)]
            assert_same([*outs], wanted, f"outputs of scan {length}")
            assert_same(learner.state()[:4], expected[done - 1][1][:4], f"state behind scan {length}")
    assert function.report().launches > 0
