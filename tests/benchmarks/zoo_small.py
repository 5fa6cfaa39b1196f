"""The rows of tests/benchmarks/zoo.py that a few lines write: recurrent nets, graphs, equations, a GAN, diffusion.

Layers and solvers are those of torch, torch_geometric and torchdiffeq, with their default flags.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_models import CLASSES, LEARNING_RATE, Batch, Row, Training, classify, images

import ampkit


class Recurrent(nn.Module):
    """A classifier of sequences, with dropout between its two recurrent layers."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent = kind(16, 32, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        logits: Tensor = self.head(self.recurrent(sequences)[0][:, -1])
        return logits


def sequences(made: torch.Generator) -> Batch:
    return {"images": torch.randn(8, 12, 16, generator=made), "labels": torch.randint(CLASSES, (8,), generator=made)}


class Convolutional(nn.Module):
    """A graph network that is called with the nodes and the edges."""

    def __init__(self, name: str) -> None:
        super().__init__()
        from torch_geometric import nn as layers

        self.net = getattr(layers, name)(16, 32, num_layers=2, out_channels=CLASSES, dropout=0.1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        logits: Tensor = self.net(nodes, edges)
        return logits


def a_graph(made: torch.Generator) -> Batch:
    return {
        "nodes": torch.randn(64, 16, generator=made),
        "edges": torch.randint(64, (2, 256), generator=made),
        "labels": torch.randint(CLASSES, (64,), generator=made),
    }


def classify_nodes(model: nn.Module, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(nodes, edges), labels)


class Field(nn.Module):
    """The right hand side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        slope: Tensor = self.net(state)
        return slope


def trajectory(made: torch.Generator) -> Batch:
    times = torch.linspace(0, 1, 5)
    return {"state": torch.randn(8, 4, generator=made), "times": times, "path": torch.randn(5, 8, 4, generator=made)}


def solve(method: str) -> Callable[..., Tensor]:
    def loss(model: nn.Module, state: Tensor, times: Tensor, path: Tensor) -> Tensor:
        from torchdiffeq import odeint

        return F.mse_loss(odeint(model, state, times, method=method), path)

    return loss


def heat_equation(model: nn.Module, points: Tensor) -> Tensor:
    points = points.detach().requires_grad_()
    value = model(points)
    first = torch.autograd.grad(value.sum(), points, create_graph=True)[0]
    second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0]
    return (first[:, 1] - second[:, 0]).square().mean() + (value - points[:, :1].sin()).square().mean()


class UNet(nn.Module):
    """A noise predictor with one level, attention at its bottom, and an embedding of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(1000, 32)
        self.into = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, 2, 1))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up = nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.ConvTranspose2d(32, 32, 4, 2, 1))
        self.out = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        high = self.into(noisy) + self.time(times)[:, :, None, None]
        low = self.down(high)
        tokens = low.flatten(2).transpose(1, 2)
        low = low + self.attention(tokens, tokens, tokens, need_weights=False)[0].transpose(1, 2).reshape(low.shape)
        guess: Tensor = self.out(torch.cat([high, self.up(low)], 1))
        return guess


def denoise(model: nn.Module, images: Tensor) -> Tensor:
    times = torch.randint(1000, images.shape[:1], device=images.device)
    noise = torch.randn_like(images)
    share = torch.cos(times / 1000 * torch.pi / 2)[:, None, None, None]
    return F.mse_loss(model(share * images + (1 - share**2).sqrt() * noise, times).float(), noise)


def small_gan() -> nn.Module:
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 16))
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    return nn.ModuleDict({"generator": generator, "critic": critic})


def train_gan(model: nn.Module, policy: str, options: dict[str, Any]) -> Training:
    generator, critic = model.get_submodule("generator"), model.get_submodule("critic")
    adam_g, adam_c = (torch.optim.Adam(part.parameters(), lr=LEARNING_RATE) for part in (generator, critic))

    @ampkit.graphed(modules=(generator, critic), optimizers=(adam_g, adam_c), **options)
    def step(real: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(real.device.type, dtype=getattr(torch, policy)):
            fake = generator(torch.randn(real.shape[0], 8, device=real.device))
            loss_c = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        adam_c.zero_grad()
        loss_c.backward()
        adam_c.step()
        with torch.autocast(real.device.type, dtype=getattr(torch, policy)):
            loss_g = F.softplus(-critic(fake)).mean()
        adam_g.zero_grad()
        loss_g.backward()
        adam_g.step()
        return loss_c, loss_g

    return Training(step, {"model": model}, [adam_g, adam_c])


def speech(made: torch.Generator) -> Batch:
    labels = torch.randint(1, CLASSES, (4, 5), generator=made)
    return {"sounds": torch.randn(4, 8, 40, generator=made), "labels": labels}


def align(lengths: Callable[[int, int, torch.device], Any]) -> Callable[..., Tensor]:
    """Return a CTC loss to which the lengths are given as this makes them: (number, value, device)."""

    def loss(model: nn.Module, sounds: Tensor, labels: Tensor) -> Tensor:
        words = model(sounds).permute(2, 0, 1).log_softmax(2)
        given = (
            lengths(len(labels), words.shape[0], labels.device),
            lengths(len(labels), labels.shape[1], labels.device),
        )
        return F.ctc_loss(words.float(), labels, *given)

    return loss


def recognizer() -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 32, 5, padding=2), nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(32, CLASSES, 1))


class Words(nn.Module):
    """A bag of words whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32, sparse=True), nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(tokens).mean(1))
        return logits


def bags(made: torch.Generator) -> Batch:
    tokens = torch.randint(64, (8, 6), generator=made)
    return {"images": tokens, "labels": torch.randint(CLASSES, (8,), generator=made)}


def small_rows() -> dict[str, Row]:
    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def points(made: torch.Generator) -> Batch:
        return {"points": torch.rand(64, 2, generator=made)}

    def real(made: torch.Generator) -> Batch:
        return {"real": torch.randn(16, 16, generator=made)}

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    as_tensors = align(lambda number, value, device: torch.full((number,), value, device=device))
    as_numbers = align(lambda number, value, device: (value,) * number)
    exact: dict[str, Any] = {"policy": "float32"}
    return {
        "torch/LSTM": Row("torch", lambda: Recurrent(nn.LSTM), sequences, classify),
        "torch/GRU": Row("torch", lambda: Recurrent(nn.GRU), sequences, classify),
        "torch/PINN": Row("torch", mlp, points, heat_equation, **exact, note="float32 for its second derivatives"),
        "torch/diffusion UNet": Row("torch", UNet, lambda made: {"images": images(16)(made)["images"]}, denoise),
        "torch/GAN": Row("torch", small_gan, real, classify, start=train_gan, note="ampkit.graphed, two optimizers"),
        "torch/CTC, lengths in tensors": Row("torch", recognizer, speech, as_tensors),
        "torch/CTC, lengths in a tuple": Row("torch", recognizer, speech, as_numbers),
        "torch/Embedding(sparse=True)": Row("torch", Words, bags, classify, sgd, note="SGD"),
        "torch_geometric/GCN": Row("torch_geometric", lambda: Convolutional("GCN"), a_graph, classify_nodes),
        "torch_geometric/GAT": Row("torch_geometric", lambda: Convolutional("GAT"), a_graph, classify_nodes),
        "torchdiffeq/rk4": Row("torchdiffeq", Field, trajectory, solve("rk4"), **exact, note="float32 for the solver"),
        "torchdiffeq/dopri5": Row(
            "torchdiffeq", Field, trajectory, solve("dopri5"), **exact, note="float32 for the solver"
        ),
    }


ROWS = small_rows()
