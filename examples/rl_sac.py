"""Soft actor-critic swings up pendulums: simulator, replay buffer and learner on the device, two launches a round.

    python examples/rl_sac.py                              on a GPU, or a CPU without graphs
    python examples/rl_sac.py --graph emulate --rounds 20  what a CPU can show: calls go through the engine, no faster

Each round does 16 updates on batches that are drawn from all steps so far, and moves all pendulums by one step. The
buffer knows on the device how full it is. As a number of Python's that would be another graph in each round.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

BATCH, UPDATES, DISCOUNT = 256, 16, 0.99
STARTS = 20  # steps at random ahead of the first update


class Pendulums(nn.Module):
    """Many pendulums, pushed by a torque from -1 to 1. One that has run for 200 steps begins anew somewhere else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("angle", torch.rand(count) * 2 * math.pi)  # 0 is upright
        self.register_buffer("speed", torch.zeros(count))
        self.register_buffer("age", torch.randint(200, (count,)))

    def observe(self) -> Tensor:
        """Return what a policy sees: (count, 3)."""
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed], -1)

    def step(self, torque: Tensor) -> Tensor:
        """Move by 0.05 s; return rewards."""
        angle = (self.angle + math.pi) % (2 * math.pi) - math.pi
        reward = -(angle**2 + 0.1 * self.speed**2 + 0.004 * torque**2)
        self.speed.add_(0.05 * (15 * self.angle.sin() + 6 * torque)).clamp_(-8, 8)
        self.angle.add_(0.05 * self.speed)
        return reward

    def restart(self) -> None:
        """Let old pendulums begin anew."""
        self.age.add_(1)
        old = self.age >= 200
        self.angle.copy_(torch.where(old, torch.rand_like(self.angle) * 2 * math.pi, self.angle))
        self.speed.copy_(torch.where(old, 0.0, self.speed))
        self.age.copy_(torch.where(old, 0, self.age))


class ReplayBuffer(nn.Module):
    """The last steps of all pendulums. `filled` and `cursor` are tensors, so that graphs read them as they are."""

    def __init__(self, capacity: int, width: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, width))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    def add(self, rows: Tensor) -> None:
        """Overwrite the oldest rows."""
        places = (self.cursor + torch.arange(len(rows), device=rows.device)) % len(self.rows)
        self.rows.index_copy_(0, places, rows)
        self.cursor.copy_((self.cursor + len(rows)) % len(self.rows))
        self.filled.copy_((self.filled + len(rows)).clamp(max=len(self.rows)))

    def draw(self, *shape: int) -> Tensor:
        """Return places of rows that are filled, drawn at random."""
        return (torch.rand(shape, device=self.rows.device) * self.filled).long()


def mlp(first: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, last))


class SAC:
    """Actor, two critics with targets, and a temperature. An update is a plain function of the places of a batch."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        device = buffer.rows.device
        self.buffer, self.actor = buffer, mlp(3, 2).to(device)
        self.critics, self.targets = (nn.ModuleList(mlp(4, 1) for _ in range(2)).to(device) for _ in range(2))
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_temperature = nn.Parameter(torch.zeros((), device=device))  # of no module
        self.of_critics = torch.optim.Adam(self.critics.parameters(), lr=1e-3, fused=True)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=3e-4, fused=True)
        self.of_temperature = torch.optim.Adam([self.log_temperature], lr=1e-3, fused=True)

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return torques that are drawn, and the logarithm of their density."""
        mean, log_std = self.actor(observation).chunk(2, -1)
        log_std = log_std.clamp(-5, 2)
        noise = torch.randn_like(mean)
        torque = torch.tanh(mean + log_std.exp() * noise)
        density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - torch.log(1 - torque**2 + 1e-6)
        return torque, density.sum(-1, keepdim=True)

    def value(self, critics: nn.ModuleList, observation: Tensor, torque: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat([observation, torque], -1)
        return critics[0](pair), critics[1](pair)

    def update(self, places: Tensor) -> dict[str, Tensor]:
        """Move critics, actor, temperature and targets by one batch; return losses."""
        now, torque, reward, later = self.buffer.rows[places].split([3, 1, 1, 3], -1)
        with torch.no_grad():
            next_torque, density = self.act(later)
            best = torch.min(*self.value(self.targets, later, next_torque))
            wanted = reward + DISCOUNT * (best - self.log_temperature.exp() * density)
        of_critics = sum(F.mse_loss(value, wanted) for value in self.value(self.critics, now, torque))
        self.descend(self.of_critics, of_critics)

        drawn, density = self.act(now)
        of_actor = (
            self.log_temperature.exp().detach() * density - torch.min(*self.value(self.critics, now, drawn))
        ).mean()
        self.descend(self.of_actor, of_actor)

        of_temperature = -(self.log_temperature.exp() * (density.detach() - 1)).mean()
        self.descend(self.of_temperature, of_temperature)
        with torch.no_grad():
            torch._foreach_lerp_([*self.targets.parameters()], [*self.critics.parameters()], 0.005)
        return {"critics": of_critics, "actor": of_actor, "temperature": self.log_temperature.exp()}

    def descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; print and return the mean reward of each tenth of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--pendulums", type=int, default=64)
    parser.add_argument("--graph", choices=["auto", "emulate", "off"], default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    graph = "off" if args.graph == "auto" and args.device == "cpu" else args.graph

    torch.manual_seed(0)
    pendulums = Pendulums(args.pendulums).to(args.device)
    buffer = ReplayBuffer(100_000, 8).to(args.device)
    sac = SAC(buffer)

    @ampkit.graphed(modules=(pendulums, buffer), graph=graph)
    def collect(at_random: bool) -> Tensor:
        """Move all pendulums by one step, at random or by the policy; return the mean reward."""
        with torch.no_grad():
            now = pendulums.observe()
            torque = torch.rand_like(now[:, :1]) * 2 - 1 if at_random else sac.act(now)[0]
            reward = pendulums.step(torque.squeeze(-1))
            buffer.add(torch.cat([now, torque, reward[:, None], pendulums.observe()], -1))
            pendulums.restart()
            return reward.mean()

    update = ampkit.graphed(graph=graph)(sac.update)  # optimizers, networks and the temperature are found
    rewards: list[float] = []
    waiting: list[Tensor] = []
    for _ in range(STARTS):
        collect(at_random=True)
    for i in range(args.rounds):
        losses = update.scan(buffer.draw(UPDATES, BATCH))
        waiting.append(collect(at_random=False))
        if (i + 1) % max(1, args.rounds // 10) == 0:
            rewards.append(torch.stack(waiting).mean().item())  # the only line that waits for the device
            waiting = []
            print(f"round {i + 1}: reward {rewards[-1]:.3f}, critics {losses['critics'].mean().item():.3f}")
    print(update.report())
    return rewards


if __name__ == "__main__":
    main()
