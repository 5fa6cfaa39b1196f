"""Steps that ask the device questions, as people write them: what becomes of the graph, are they eager's bits, times.

    PYTHONPATH=. python tests/benchmarks/decisions.py                              on a GPU
    PYTHONPATH=. python tests/benchmarks/decisions.py --device cpu                 with emulated graphs, in a minute
    PYTHONPATH=. python tests/benchmarks/decisions.py --rows "PPO, Normal" rk4     rows that have this in their names

Each row makes 32 calls, each with another batch, once with `graph="off"` and once with default flags, from one seed and
under deterministic algorithms. Losses, errors that were raised, parameters, buffers and random state are compared bit
by bit. In one call a label is out of range, and the observations of PPO by hand are not finite: the loop catches the
error and goes on. Then a loop in torch alone, `graph="off"` and the graph take turns on one batch. Milliseconds per
step between two waits for the device: the median of the repeats, the smallest and the largest. An emulated graph calls
the step again, so its time says nothing of a GPU's.

Reinforcement learning has the sizes of CleanRL for HalfCheetah, on random transitions. PPO by hand and the steps with
labels and a mask compute in bfloat16, the others in float32. Nothing is downloaded. A row without its library says so.
"""

import argparse
import copy
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import questions
import torch
import zoo_small
from models import State, differing, repeatable
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal, TanhTransform, TransformedDistribution
from torch.nn import functional as F

import ampkit
from ampkit._capture.engine.cuts import RehearsedCuts

CALLS, BAD_CALL = 32, 20
REPEATS = 5
SECONDS = {"cuda": 0.2, "cpu": 0.05}  # of steps per repeat
OBSERVED, ACTIONS, CLASSES = 17, 6, 10
Batch = Callable[[int], tuple[Any, ...]]  # makes that of a call
TORCH = "torch"  # the way without ampkit; the other ones are values of `graph`
ANSWERS = "questions to the device: "  # what stands before them in the layout of a graph
INSTALL = "pip install 'torchrl==0.13.3' torchdiffeq"


class Case(NamedTuple):
    """A step, with all that it changes."""

    step: Callable[..., Any]
    model: nn.Module
    batch: Batch  # of a call


def one_loss(way: str, loss_fn: Callable[..., Tensor], model: nn.Module, batch: Batch, **flags: Any) -> Case:
    """Return the case of a step with one loss and one optimizer; `flags` are those of `graphed_step`."""
    optimizer = adam(model)
    if way != TORCH:
        return Case(ampkit.graphed_step(loss_fn, model, optimizer, graph=way, **flags), model, batch)
    device, low = next(model.parameters()).device.type, "policy" in flags

    def step(*batch: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            loss = loss_fn(model, *batch)
        loss.backward()
        if "max_norm" in flags:
            nn.utils.clip_grad_norm_(model.parameters(), flags["max_norm"])
        optimizer.step()

    return Case(step, model, batch)


def function(way: str, update: Callable[..., Any], model: nn.Module, optimizers: Sequence[Any], batch: Batch) -> Case:
    """Return the case of a step that is not one loss and one optimizer."""
    wrap = ampkit.graphed(modules=(model,), optimizers=optimizers, graph="off" if way == TORCH else way)
    return Case(update if way == TORCH else wrap(update), model, batch)


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*parts[:-1])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=3e-4, fused=True)


def drawn(call: int, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    made = torch.Generator().manual_seed(call)
    return [torch.randn(shape, generator=made).to(device) for shape in shapes]


# ----------------------------------------------------------------------------------------------- reinforcement learning


class Agent(nn.Module):
    """An actor of a normal or a categorical distribution, and a critic of states."""

    def __init__(self, is_discrete: bool) -> None:
        super().__init__()
        self.actor, self.critic = (mlp(OBSERVED, 64, 64, out, activation=nn.Tanh) for out in (ACTIONS, 1))
        self.log_std, self.is_discrete = nn.Parameter(torch.zeros(ACTIONS)), is_discrete

    def policy(self, states: Tensor) -> Distribution:
        out = self.actor(states).float()
        return Categorical(logits=out) if self.is_discrete else Normal(out, self.log_std.exp())


def ppo_loss(agent: Any, states: Tensor, actions: Tensor, before: Tensor, gains: Tensor, returns: Tensor) -> Tensor:
    policy = agent.policy(states)
    logs, entropy = policy.log_prob(actions), policy.entropy()
    if not agent.is_discrete:
        logs, entropy = logs.sum(-1), entropy.sum(-1)
    ratio, gains = (logs - before).exp(), (gains - gains.mean()) / (gains.std() + 1e-8)
    clipped = torch.min(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
    values = agent.critic(states).float().squeeze(-1)
    return 0.5 * F.mse_loss(values, returns) - clipped - 0.01 * entropy.mean()


def ppo(way: str, device: str, is_discrete: bool) -> Case:
    agent = Agent(is_discrete).to(device)

    def batch(call: int) -> tuple[Tensor, ...]:
        states, actions, *others = drawn(call, device, (64, OBSERVED), (64, ACTIONS), (64,), (64,), (64,))
        actions = actions.argmax(-1) if is_discrete else actions
        with torch.no_grad():
            before = agent.policy(states).log_prob(actions)
        before = (before if is_discrete else before.sum(-1)) + 0.1 * others[0]
        return states * (float("nan") if call == BAD_CALL else 1), actions, before, *others[1:]

    return one_loss(way, ppo_loss, agent, batch, policy="bfloat16", max_norm=0.5)


class Critic(nn.Module):
    """The value of an action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(OBSERVED + ACTIONS, 256, 256, 1)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:
        value: Tensor = self.net(torch.cat([states, actions], -1))
        return value


class SoftActorCritic(nn.Module):
    """An actor of tanh-squashed normal distributions, two critics and their targets, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp(OBSERVED, 256, 256, 2 * ACTIONS)
        self.critics = nn.ModuleList([Critic(), Critic()])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.temperature = nn.ParameterList([torch.zeros(1)])

    def act(self, states: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(states).chunk(2, -1)
        policy = TransformedDistribution(Normal(mean, log_std.clamp(-5, 2).exp()), TanhTransform(cache_size=1))
        actions = policy.rsample()
        return actions, policy.log_prob(actions).sum(-1, keepdim=True)


def least(critics: Any, states: Tensor, actions: Tensor) -> Tensor:
    return torch.min(critics[0](states, actions), critics[1](states, actions))


def sac(way: str, device: str) -> Case:
    model = SoftActorCritic().to(device)
    optimizers = [adam(part) for part in (model.critics, model.actor, model.temperature)]

    def stepped(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def update(states: Tensor, actions: Tensor, rewards: Tensor, following: Tensor) -> tuple[Tensor, ...]:
        alpha = model.temperature[0].exp().detach()
        with torch.no_grad():
            chosen, logs = model.act(following)
            wanted = rewards + 0.99 * (least(model.targets, following, chosen) - alpha * logs)
        errors = [F.mse_loss(critic(states, actions), wanted) for critic in model.critics]
        losses = [stepped(errors[0] + errors[1], optimizers[0])]
        chosen, logs = model.act(states)
        losses += [stepped((alpha * logs - least(model.critics, states, chosen)).mean(), optimizers[1])]
        losses += [stepped(-(model.temperature[0].exp() * (logs.detach() - ACTIONS)).mean(), optimizers[2])]
        with torch.no_grad():
            torch._foreach_lerp_([*model.targets.parameters()], [*model.critics.parameters()], 0.005)
        return tuple(losses)

    def batch(call: int) -> tuple[Tensor, ...]:
        states, actions, *others = drawn(call, device, (256, OBSERVED), (256, ACTIONS), (256, 1), (256, OBSERVED))
        return states, actions.tanh(), *others

    return function(way, update, model, optimizers, batch)


def torchrl_policy() -> Any:
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.modules import ProbabilisticActor, TanhNormal

    net = nn.Sequential(mlp(OBSERVED, 64, 64, 2 * ACTIONS, activation=nn.Tanh), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(module, ["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)


def torchrl_ppo(way: str, device: str) -> Case:
    from tensordict import TensorDict
    from torchrl.modules import ValueOperator
    from torchrl.objectives import ClipPPOLoss

    policy = torchrl_policy()
    model = ClipPPOLoss(policy, ValueOperator(mlp(OBSERVED, 64, 64, 1, activation=nn.Tanh), ["observation"])).to(device)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        losses = model(batch)
        total: Tensor = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        return total

    def batch(call: int) -> tuple[Any, ...]:
        states, gains, returns = drawn(call, device, (64, OBSERVED), (64, 1), (64, 1))
        with torch.no_grad():
            seen = policy(TensorDict({"observation": states}, 64))
        return (seen.update({"advantage": gains, "value_target": returns}),)

    return one_loss(way, loss_fn, model, batch, max_norm=0.5)


def torchrl_sac(way: str, device: str) -> Case:
    from tensordict import TensorDict
    from torchrl.modules import ValueOperator
    from torchrl.objectives import SACLoss, SoftUpdate

    critic = ValueOperator(Critic(), ["observation", "action"])
    model = SACLoss(torchrl_policy(), critic, target_entropy=-ACTIONS, num_qvalue_nets=2).to(device)
    optimizer, targets = adam(model), SoftUpdate(model, eps=0.995)

    def update(batch: Any) -> Tensor:
        losses = model(batch)
        loss: Tensor = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        targets.step()
        return loss.detach()

    def batch(call: int) -> tuple[Any, ...]:
        states, actions, rewards, seen = drawn(call, device, (256, OBSERVED), (256, ACTIONS), (256, 1), (256, OBSERVED))
        ends = {"done": rewards > 2, "terminated": rewards > 2}
        following = {"observation": seen, "reward": rewards, **ends}
        return (TensorDict({"observation": states, "action": actions.tanh(), "next": following}, 256, device=device),)

    return function(way, update, model, [optimizer], batch)


# ------------------------------------------------------------------------------------------------------ the other rows


def rk4(way: str, device: str, is_argument: bool) -> Case:
    from torchdiffeq import odeint

    times = torch.linspace(0, 1, 5, device=device)

    def loss_fn(model: nn.Module, state: Tensor, path: Tensor, moments: Tensor = times) -> Tensor:
        return F.mse_loss(odeint(model, state, moments, method="rk4"), path)

    def batch(call: int) -> tuple[Tensor, ...]:
        return *drawn(call, device, (64, 4), (5, 64, 4)), *[times] * is_argument

    return one_loss(way, loss_fn, zoo_small.Field().to(device), batch)


def labels(way: str, device: str) -> Case:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if y.max() >= CLASSES:
            raise ValueError("a label is out of range")
        return F.cross_entropy(model(x), y)

    def batch(call: int) -> tuple[Tensor, ...]:
        x, scores = drawn(call, device, (64, 256), (64, CLASSES))
        return x, scores.argmax(-1) + CLASSES * (call == BAD_CALL)

    return one_loss(way, loss_fn, mlp(*[256] * 16, CLASSES).to(device), batch, policy="bfloat16")


def masked(way: str, device: str) -> Case:
    shape = questions.MODELS["transformer"][1 if device == "cuda" else 2]

    def loss_fn(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return ((model(x, mask).float() - x).square().mean(-1) * mask).mean()

    def batch(call: int) -> tuple[Tensor, ...]:
        padding = shape[1] // 4 if call % 3 == 2 else 0
        mask = torch.arange(shape[1], device=device) < shape[1] - padding
        return *drawn(call, device, shape), mask.expand(shape[:2]).contiguous()

    return one_loss(way, loss_fn, questions.Encoder(questions.INPUT).to(device), batch, policy="bfloat16")


ROWS: dict[str, Callable[[str, str], Case]] = {
    "PPO, Normal": partial(ppo, is_discrete=False),
    "PPO, Categorical": partial(ppo, is_discrete=True),
    "SAC, tanh of Normal": sac,
    "torchdiffeq rk4, times as an argument": partial(rk4, is_argument=True),
    "torchdiffeq rk4, times of the script": partial(rk4, is_argument=False),
    "labels.max() >= classes": labels,
    "mask.all() in a transformer": masked,
    # TorchRL switches validate_args off in the whole process.
    "TorchRL ClipPPOLoss": torchrl_ppo,
    "TorchRL SACLoss": torchrl_sac,
}

# ------------------------------------------------------------------------------------------------------- measuring


@contextmanager
def counted_cuts() -> Iterator[list[int]]:
    """Note at how many places each graph is cut that is captured meanwhile, or replayed if it is emulated."""
    found: list[int] = []
    original = RehearsedCuts.cutting

    def cutting(cuts: RehearsedCuts, *args: Any) -> Any:
        found.append(len(cuts.answers))
        return original(cuts, *args)

    RehearsedCuts.cutting = cutting
    try:
        yield found
    finally:
        RehearsedCuts.cutting = original


def made(row: str, way: str, device: str) -> Case:
    torch.manual_seed(0)
    return ROWS[row](way, device)


def trained(case: Case, device: str) -> tuple[State, list[str]]:
    """Return what CALLS calls have led to, and the errors that they raised."""
    torch.manual_seed(1)
    state: State = {}
    errors = []
    for call in range(CALLS):
        try:
            out = case.step(*case.batch(call))
        except ValueError as error:
            errors.append(f"{type(error).__name__} in call {call}: {str(error).splitlines()[0]}")
            continue
        losses = out if isinstance(out, tuple) and not hasattr(out, "loss") else [getattr(out, "loss", out)]
        state |= {f"loss {i} of call {call}": loss.detach().clone() for i, loss in enumerate(losses)}
    state["random state"] = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    tensors = *case.model.named_parameters(), *case.model.named_buffers()
    state |= {name: tensor.detach() for name, tensor in tensors}
    return {name: tensor for name, tensor in state.items() if tensor.numel()}, errors


def milliseconds(row: str, graph: str, device: str) -> dict[str, list[float]]:
    """Return the times of a step in each repeat, per way; the ways take turns."""
    cases = {way: made(row, way, device) for way in (TORCH, "off", graph)}
    batches = {way: case.batch(0) for way, case in cases.items()}  # TorchRL writes into its own

    def seconds(way: str, count: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            cases[way].step(*batches[way])
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for way in cases:
        seconds(way, 16)  # warm-up calls, and the capture
    counts = {way: max(3, int(SECONDS[device] / (seconds(way, 5) / 5))) for way in cases}
    found: dict[str, list[float]] = {way: [] for way in cases}
    for _ in range(REPEATS):
        for way, count in counts.items():
            found[way].append(1e3 * seconds(way, count) / count)
    return found


def measured(row: str, graph: str, device: str) -> str:
    """Return the line of a row, and what ampkit has said."""
    with repeatable(True):
        case = made(row, "off", device)
        expected, raised = trained(case, device)
        with counted_cuts() as cuts, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case = made(row, graph, device)
            state, errors = trained(case, device)
    report = case.step.report()
    outcome = f"{report.outcome}, {report.graphs} graph(s)" + f": {report.failure}" * bool(report.failure)
    if report.graphs:
        asked = report.per_graph[-1].layout.partition(ANSWERS)[2].count(", ") + 1
        outcome += f", {asked - cuts[-1]} question(s) asked ahead, cut {cuts[-1]} times"
    names = differing(state, expected)
    bits = "equal" if not names and errors == raised else f"DIFFER in {names[:3] or (errors, raised)}"
    text = f"{outcome}; {report.replays} replays and {report.in_parts} in parts of {CALLS} calls; bits {bits}"
    text += "".join(f"; {error}" for error in errors)
    text += f"; told from call {report.told_since} on that it is captured" * (report.told_since is not None)
    text += "; A LOSS IS NOT FINITE" * (not all(state[name].isfinite().all() for name in state if name[:4] == "loss"))
    times = milliseconds(row, graph, device)
    shown = [f"{way} {statistics.median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f})" for way, ms in times.items()]
    said = sorted({str(each.message) for each in caught if issubclass(each.category, ampkit.AmpkitWarning)})
    return "\n  ".join([f"{text}; ms: {', '.join(shown)}", *said])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", choices=["auto", "emulate"], help="by default emulate on a CPU")
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    args = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
    warnings.simplefilter("ignore")
    graph = args.graph or ("auto" if args.device == "cuda" else "emulate")
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__, f"graph={graph!r}")
    for row in ROWS:
        if not any(part in row for part in args.rows):
            continue
        start = time.perf_counter()
        try:
            text = measured(row, graph, args.device)
        except ImportError as error:
            text = f"{error.name} is not installed: {INSTALL}"
        except Exception as error:  # the other rows go on
            text = f"{type(error).__name__}: {error}"
        print(f"{row}: {text}  [{time.perf_counter() - start:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
