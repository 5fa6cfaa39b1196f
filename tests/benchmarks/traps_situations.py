"""What tests/benchmarks/traps.py trains: twelve situations of a training loop, each with a model and batches."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

CALLS, ROWS, FEATURES, CLASSES = 40, 32, 16, 4
RATE = 2**-4  # float32 represents it and its halves exactly, so a rate in a tensor changes no bit


class Net(nn.Module):
    """Two residual blocks; what is special about a situation is in the blocks or in `begin`."""

    def __init__(self, block: Callable[[], nn.Module], begin: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.begin, self.calls = begin, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(self.begin(self, x))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def layers(kind: type[nn.Sequential] = nn.Sequential, *more: nn.Module) -> nn.Module:
    return kind(nn.Linear(64, 128), nn.GELU(), *more, nn.Linear(128, 64))


def unchanged(net: Any, x: Tensor) -> Tensor:
    return x


def rewrites(net: Any, x: Tensor) -> Tensor:
    return x.mul_(0.75)


def counts(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return x * min(1.0, net.calls / 32)


def seeds(net: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.dropout(x, 0.2)


class Situation:
    """A model, its batches, and a call: the backward of one batch, and the update behind it."""

    accumulate = 1  # calls per update
    set_to_none = True  # how gradients are cleared behind an update
    window = False  # whether ampkit gets all calls of an update at once
    scheduled = False  # whether the rate is halved every 8 updates
    rows: Sequence[int] = (ROWS,)  # of batches, in turn
    epochs = 1  # how often the same tensors come again

    def __init__(
        self,
        block: Callable[[], nn.Module] = layers,
        begin: Callable[[nn.Module, Tensor], Tensor] = unchanged,
        **changes: Any,
    ) -> None:
        self.net = partial(Net, block, begin)
        vars(self).update(changes)

    def modules(self) -> list[nn.Module]:
        return [self.net()]

    def samples(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the arguments of each module, as make_graphed_callables wants them."""
        return [(batch[0].clone(),)]

    def batches(self, device: str) -> list[tuple[Tensor, ...]]:
        numbers = torch.Generator().manual_seed(1)
        sizes = [self.rows[i % len(self.rows)] for i in range(CALLS // self.epochs)]
        once = [self.batch(rows, numbers) for rows in sizes]
        return [tuple(part.to(device) for part in batch) for batch in once] * self.epochs

    def batch(self, rows: int, numbers: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(rows, FEATURES, generator=numbers), torch.randint(CLASSES, (rows,), generator=numbers)

    def optimizers(self, modules: Sequence[nn.Module]) -> list[SGD]:
        return [SGD(module.parameters(), lr=RATE, momentum=0.9, fused=True) for module in modules]

    def schedulers(self, optimizers: Sequence[SGD]) -> list[StepLR]:
        return [StepLR(each, step_size=8, gamma=0.5) for each in optimizers if self.scheduled]

    def loss(self, net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    def backward(self, nets: Sequence[Any], optimizers: Sequence[SGD], *batch: Tensor) -> None:
        (self.loss(nets[0], *batch) / self.accumulate).backward()

    def update(self, optimizers: Sequence[SGD], clear: bool = True) -> None:
        for optimizer in optimizers:
            optimizer.step()
            if clear:
                optimizer.zero_grad(set_to_none=self.set_to_none)


class FourForwards(Situation):
    """A batch is a stack of four: four calls of the model, and one backward of their mean."""

    def samples(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        return [(batch[0][0].clone(),)]

    def batch(self, rows: int, numbers: torch.Generator) -> tuple[Tensor, ...]:
        pairs = [super(FourForwards, self).batch(rows, numbers) for _ in range(4)]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def loss(self, net: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = [net(each) for each in x]
        return torch.stack([F.cross_entropy(output, each) for output, each in zip(outputs, y, strict=True)]).mean()


class Adversarial(Situation):
    """A generator and a critic, each with an optimizer. A call steps the critic, and then the generator."""

    def modules(self) -> list[nn.Module]:
        return [nn.Sequential(nn.Linear(n, 64), nn.GELU(), nn.Linear(64, m)) for n, m in ((8, FEATURES), (FEATURES, 1))]

    def samples(self, batch: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        return [(batch[1].clone(),), (batch[0].clone().requires_grad_(),)]

    def batch(self, rows: int, numbers: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(rows, FEATURES, generator=numbers), torch.randn(rows, 8, generator=numbers)

    def backward(self, nets: Sequence[Any], optimizers: Sequence[SGD], *batch: Tensor) -> None:
        (generator, critic), (real, noise) = nets, batch
        fake = generator(noise)
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        F.softplus(-critic(fake)).mean().backward()

    def update(self, optimizers: Sequence[SGD], clear: bool = True) -> None:
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


SITUATIONS: dict[str, tuple[str, Situation]] = {
    "accumulation": ("accumulation: four calls, one update", Situation(accumulate=4)),
    "zeroed": (
        "accumulation with `zero_grad(set_to_none=False)`",
        Situation(accumulate=4, set_to_none=False, window=True),
    ),
    "forwards": ("accumulation: four forwards, one backward", FourForwards()),
    "checkpointing": ("activation checkpointing", Situation(partial(layers, Checkpointed))),
    "dropout": ("dropout", Situation(lambda: layers(nn.Sequential, nn.Dropout(0.2)))),
    "rate": ("a learning rate that changes", Situation(scheduled=True)),
    "batchnorm": ("`BatchNorm`, warm-up included", Situation(lambda: layers(nn.Sequential, nn.BatchNorm1d(128)))),
    "rewritten": ("a model that changes its input in place", Situation(begin=rewrites, epochs=5)),
    "shapes": ("a smaller last batch", Situation(rows=(ROWS, ROWS, ROWS, 20))),
    "counter": ("a counter of Python in the model", Situation(begin=counts)),
    "seed": ("a model that sets its own seed", Situation(begin=seeds)),
    "optimizers": ("two models, two optimizers", Adversarial()),
}
