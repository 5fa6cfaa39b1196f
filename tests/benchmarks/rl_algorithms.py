"""Learners of SAC, PPO, TD3 and DQN, as CleanRL writes them: written anew from the papers, batches on the device."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OBSERVATIONS, ACTIONS = 17, 6  # of HalfCheetah
DISCOUNT = 0.99


def mlp(sizes: tuple[int, int], width: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return two hidden layers between these sizes."""
    first, last = sizes
    middle = nn.Linear(width, width)
    return nn.Sequential(nn.Linear(first, width), activation(), middle, activation(), nn.Linear(width, last))


class Learner:
    """Networks, their optimizers, and the update that a batch makes.

    Attributes:
        modules: all that an update changes or reads.
        optimizers: all that it steps.
        losses: the names of the methods that compute losses, for torch.compile.
        adam: what `torch.optim.Adam` gets, beside parameters and rate.
    """

    modules: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    losses: tuple[str, ...]

    def __init__(self, device: str, adam: str) -> None:
        on_cuda = device == "cuda"
        kinds: dict[str, dict[str, Any]] = {
            "foreach": {},
            "capturable": {"capturable": on_cuda},
            "fused": {"fused": True, "capturable": on_cuda},
        }
        self.device, self.adam = device, kinds[adam]
        self._rates_on_device = on_cuda and adam != "foreach"

    def optimizer(self, rate: float, *modules: nn.Module, **options: Any) -> torch.optim.Adam:
        """Return Adam over the parameters of these modules. Where it may be captured, its rate is a tensor."""
        lr: Any = torch.tensor(rate, device=self.device) if self._rates_on_device else rate
        params = [param for module in modules for param in module.parameters()]
        return torch.optim.Adam(params, lr=lr, **self.adam, **options)

    def update(self, *batch: Any) -> tuple[Tensor, ...]:
        """Do an update; return losses."""
        raise NotImplementedError

    @staticmethod
    def batch(device: str) -> tuple[Tensor, ...]:
        """Return a batch of the replay buffer: observations, actions, rewards, next observations, ends."""
        size = 256
        observations, later = torch.randn(2, size, OBSERVATIONS, device=device)
        actions = torch.rand(size, ACTIONS, device=device) * 2 - 1
        return observations, actions, torch.randn(size, 1, device=device), later, torch.zeros(size, 1, device=device)

    def descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
        """Do a step on this loss; return it."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


def follow(targets: list[nn.Module], networks: list[nn.Module], share: float = 0.005) -> None:
    """Move the target networks a little towards the networks."""
    kept = [param for target in targets for param in target.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(kept, [param for network in networks for param in network.parameters()], share)


def twins(device: str, width: int) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Return two critics, and their targets."""
    critics, targets = (
        nn.ModuleList(mlp((OBSERVATIONS + ACTIONS, 1), width) for _ in range(2)).to(device) for _ in range(2)
    )
    targets.load_state_dict(critics.state_dict())
    return critics, targets


class SAC(Learner):
    """Soft actor-critic with two critics and a temperature that is learned."""

    losses = ("critic_loss", "actor_loss", "temperature_loss")

    def __init__(self, device: str, adam: str, width: int | None = None) -> None:
        super().__init__(device, adam)
        width = width or 256
        self.actor = mlp((OBSERVATIONS, 2 * ACTIONS), width).to(device)
        self.critics, self.targets = twins(device, width)
        self.temperature = nn.ParameterDict({"log": nn.Parameter(torch.zeros(1))}).to(device)
        self.of_critics = self.optimizer(1e-3, self.critics)
        self.of_actor, self.of_temperature = self.optimizer(3e-4, self.actor), self.optimizer(1e-3, self.temperature)
        self.modules = self.actor, self.critics, self.targets, self.temperature
        self.optimizers = self.of_critics, self.of_actor, self.of_temperature

    def act(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions that are drawn, and the logarithm of their density."""
        mean, log_std = self.actor(observations).chunk(2, -1)
        log_std = -5 + 3.5 * (torch.tanh(log_std) + 1)
        noise = torch.randn_like(mean)
        actions = torch.tanh(mean + log_std.exp() * noise)
        log_density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - torch.log(1 - actions**2 + 1e-6)
        return actions, log_density.sum(-1, keepdim=True)

    def critic_loss(self, now: Tensor, actions: Tensor, rewards: Tensor, later: Tensor, ends: Tensor) -> Tensor:
        with torch.no_grad():
            next_actions, log_density = self.act(later)
            pair = torch.cat([later, next_actions], -1)
            value = torch.min(self.targets[0](pair), self.targets[1](pair))
            value = rewards + (1 - ends) * DISCOUNT * (value - self.temperature["log"].exp() * log_density)
        pair = torch.cat([now, actions], -1)
        return F.mse_loss(self.critics[0](pair), value) + F.mse_loss(self.critics[1](pair), value)

    def actor_loss(self, now: Tensor) -> Tensor:
        actions, log_density = self.act(now)
        pair = torch.cat([now, actions], -1)
        value = torch.min(self.critics[0](pair), self.critics[1](pair))
        return (self.temperature["log"].exp().detach() * log_density - value).mean()

    def temperature_loss(self, now: Tensor) -> Tensor:
        with torch.no_grad():
            _, log_density = self.act(now)
        return (-self.temperature["log"].exp() * (log_density - ACTIONS)).mean()

    def update(self, *batch: Tensor) -> tuple[Tensor, ...]:
        of_critics = self.descend(self.of_critics, self.critic_loss(*batch))
        self.critics.requires_grad_(False)
        of_actor = self.descend(self.of_actor, self.actor_loss(batch[0]))
        self.critics.requires_grad_(True)
        self.descend(self.of_temperature, self.temperature_loss(batch[0]))
        follow([self.targets], [self.critics])
        return of_critics, of_actor


class PPO(Learner):
    """A minibatch of proximal policy optimization: clipped objective, clipped value, clipped norm."""

    losses = ("loss",)

    def __init__(self, device: str, adam: str, width: int | None = None) -> None:
        super().__init__(device, adam)
        width = width or 64
        actor, critic = (mlp((OBSERVATIONS, size), width, nn.Tanh) for size in (ACTIONS, 1))
        parts = {"actor": actor, "critic": critic, "std": nn.ParameterList([torch.zeros(1, ACTIONS)])}
        self.net = nn.ModuleDict(parts).to(device)
        self.adam_of_all = self.optimizer(3e-4, self.net, eps=1e-5)
        self.modules, self.optimizers = (self.net,), (self.adam_of_all,)

    def loss(self, *batch: Tensor) -> Tensor:
        now, actions, before, advantages, returns, values = batch
        policy = torch.distributions.Normal(self.net["actor"](now), self.net["std"][0].exp(), validate_args=False)
        ratio = (policy.log_prob(actions).sum(-1) - before).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        of_policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        value = self.net["critic"](now).view(-1)
        clipped = values + (value - values).clamp(-0.2, 0.2)
        return of_policy + 0.25 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()

    def update(self, *batch: Tensor) -> tuple[Tensor, ...]:
        self.adam_of_all.zero_grad()
        loss = self.loss(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.adam_of_all.step()
        return (loss.detach(),)

    @staticmethod
    def batch(device: str) -> tuple[Tensor, ...]:
        """Return a minibatch: observations, actions, log-densities, advantages, returns, values."""
        sizes = ((OBSERVATIONS,), (ACTIONS,), (), (), (), ())
        return tuple(torch.randn(64, *size, device=device) for size in sizes)


class TD3(Learner):
    """Twin delayed deterministic policy gradient. Every second call moves the actor, which an argument says."""

    losses = ("critic_loss", "actor_loss")

    def __init__(self, device: str, adam: str, width: int | None = None) -> None:
        super().__init__(device, adam)
        width = width or 256
        self.actor, self.target = (mlp((OBSERVATIONS, ACTIONS), width).to(device) for _ in range(2))
        self.target.load_state_dict(self.actor.state_dict())
        self.critics, self.targets = twins(device, width)
        self.of_critics, self.of_actor = self.optimizer(3e-4, self.critics), self.optimizer(3e-4, self.actor)
        self.modules = self.actor, self.target, self.critics, self.targets
        self.optimizers = self.of_critics, self.of_actor

    def critic_loss(self, now: Tensor, actions: Tensor, rewards: Tensor, later: Tensor, ends: Tensor) -> Tensor:
        with torch.no_grad():
            noise = (torch.randn_like(actions) * 0.2).clamp(-0.5, 0.5)
            pair = torch.cat([later, (self.target(later).tanh() + noise).clamp(-1, 1)], -1)
            value = rewards + (1 - ends) * DISCOUNT * torch.min(self.targets[0](pair), self.targets[1](pair))
        pair = torch.cat([now, actions], -1)
        return F.mse_loss(self.critics[0](pair), value) + F.mse_loss(self.critics[1](pair), value)

    def actor_loss(self, now: Tensor) -> Tensor:
        return -self.critics[0](torch.cat([now, self.actor(now).tanh()], -1)).mean()

    def update(self, *batch: Any) -> tuple[Tensor, ...]:
        *tensors, moves_actor = batch
        losses = [self.descend(self.of_critics, self.critic_loss(*tensors))]
        if moves_actor:
            losses.append(self.descend(self.of_actor, self.actor_loss(tensors[0])))
            follow([self.targets, self.target], [self.critics, self.actor])
        return tuple(losses)


class DQN(Learner):
    """Deep Q-learning with a target network that follows."""

    losses = ("loss",)

    def __init__(self, device: str, adam: str, width: int | None = None) -> None:
        super().__init__(device, adam)
        self.net, self.target = (mlp((OBSERVATIONS, ACTIONS), width or 120).to(device) for _ in range(2))
        self.target.load_state_dict(self.net.state_dict())
        self.adam_of_net = self.optimizer(2.5e-4, self.net)
        self.modules, self.optimizers = (self.net, self.target), (self.adam_of_net,)

    def loss(self, now: Tensor, actions: Tensor, rewards: Tensor, later: Tensor, ends: Tensor) -> Tensor:
        with torch.no_grad():
            value = rewards + (1 - ends) * DISCOUNT * self.target(later).amax(-1, keepdim=True)
        chosen = actions.argmax(-1, keepdim=True)
        return F.mse_loss(value, self.net(now).gather(1, chosen))

    def update(self, *batch: Tensor) -> tuple[Tensor, ...]:
        loss = self.descend(self.adam_of_net, self.loss(*batch))
        follow([self.target], [self.net])
        return (loss,)
