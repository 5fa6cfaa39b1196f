"""Steps with a line that no graph can hold: the largest modules without such a line, and the update, are captured."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic, training_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import ampkit

Engine = tuple[str, str]
WIDTH = 16


class Block(nn.Module):
    """Eight kernels or more. Its input is used twice, and the weight of `first` too."""

    def __init__(self, inputs: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(inputs), nn.Linear(inputs, inputs), nn.Linear(inputs, inputs)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(F.gelu(self.first(self.norm(x))))
        return x + self.dropout(torch.tanh(self.second(F.gelu(hidden))))


class Reads(nn.Module):
    """An `.item()` between two blocks, which is the factor of an eager dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = Block(), Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        factor = hidden.detach().float().abs().mean().item()
        return self.head(self.decoder(F.dropout(hidden, 0.1) * factor))


def classified(model: nn.Module, x: Tensor, y: Tensor, boost: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(x)
    return F.cross_entropy(logits.float(), y) * boost, {"correct": (logits.argmax(1) == y).sum()}


class Shared(Reads):
    """The decoder is the encoder, and its weight is used by an eager line, too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, self.encoder.first.weight)[:, :3]


class Masked(Reads):
    """A boolean mask over nodes, as in a graph network."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        kept = hidden.detach().float().mean(1) > -0.5
        hidden = hidden.index_put((kept.nonzero().squeeze(1),), self.decoder.second(hidden[kept]))
        return self.head(self.decoder(hidden))


class Detects(Reads):
    """A head that takes the rows that score best, and runs a module on as many as there are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        scores = self.head(hidden).float().sigmoid().amax(1)
        best = (scores.detach() >= scores.detach().median()).nonzero().squeeze(1)
        extra = self.decoder(hidden[best]).mean(0)
        return self.head(hidden + extra) * scores[:, None]


class Solver(nn.Module):
    """Runge-Kutta with four calls of one module per step, and an assert on a tensor, as torchdiffeq has it."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3, device=x.device)
        assert (times[1:] > times[:-1]).all(), "t must be increasing"
        for _ in range(1):
            k1 = self.field(x)
            k2 = self.field(x + 0.5 * k1)
            k3 = self.field(x + 0.5 * k2)
            k4 = self.field(x + k3)
            x = x + (k1 + 2 * k2 + 2 * k3 + k4) / 6
        return self.head(x)


class Checkpointed(Reads):
    """One block is computed again in the backward, and another one has a checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.encoder, x, use_reentrant=False)
        factor = hidden.detach().float().abs().mean().item()
        return self.head(self.decoder(self.inner(hidden) * factor))


class Later(Reads):
    """The input of a block is used behind it, in a step whose loss is above a threshold only."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.head.weight.T @ self.head.weight) + x
        hidden = self.encoder(x)
        if hidden.detach().float()[0, 0].item() > 0:
            hidden = hidden + 0.3 * x + 0.1 * x.sin()
        return self.head(self.decoder(hidden))


class Pair(nn.Module):
    """Two outputs, of which one is in the loss in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.block(x)
        return {"hidden": hidden, "other": [torch.sigmoid(self.other(hidden)), None]}


class Sometimes(Reads):
    """An output of a module is used only where the host says so."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Pair()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.encoder(x)
        hidden = outputs["hidden"]
        if hidden.detach().float()[0, 0].item() > 0:
            hidden = hidden * outputs["other"][0]
        return self.head(self.decoder(hidden))


class Buffers(Reads):
    """BatchNorm in a captured part, whose buffer an eager line reads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        factor = 1 + self.encoder[1].running_var.mean().item()
        return self.head(self.decoder(hidden / factor))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "item": Reads,
    "shared": Shared,
    "mask": Masked,
    "nonzero": Detects,
    "solver": Solver,
    "checkpoint": Checkpointed,
    "later": Later,
    "sometimes": Sometimes,
    "buffers": Buffers,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"policy": "float16", "max_norm": 0.5},
    "accumulated": {"policy": "bfloat16", "accumulate": 3, "max_norm": 0.1},
}


def batch(device: str, i: int, boost: float = 1.0, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(i)
    x, y = torch.randn(size, WIDTH, generator=random), torch.randint(3, (size,), generator=random)
    return x.to(device), y.to(device), torch.tensor(boost).to(device)


class Run:
    """A model that is trained, with an average of it."""

    def __init__(
        self, engine: Engine, make: Callable[[], nn.Module], loss_fn: Any = classified, **options: Any
    ) -> None:
        torch.manual_seed(3)
        self.device = engine[0]
        self.model = make().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.step = ampkit.graphed_step(
            loss_fn,
            self.model,
            self.optimizer,
            scheduler=torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9),
            after_step=self.averaged.update_parameters,
            graph=engine[1],
            **options,
        )
        torch.manual_seed(5)

    def steps(self, numbers: range, overflows: tuple[int, ...] = (), **options: Any) -> Iterator[Any]:
        for i in numbers:
            out = self.step(*batch(self.device, i, math.inf if i in overflows else 1.0, **options))
            state = training_state(self.model, self.optimizer, self.step.scaler)
            yield out, {**state, **{name: value.clone() for name, value in self.averaged.state_dict().items()}}


def compared(engine: Engine, make: Callable[[], nn.Module], calls: int = 13, **options: Any) -> ampkit.GraphedStep:
    """Assert that a run has the bits of an eager one; return its step."""
    overflows = (1, 8, 9) if options.get("policy") == "float16" else ()
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected = list(Run((engine[0], "off"), make, **options).steps(range(calls), overflows))
        run = Run(engine, make, **options)
        for i, found in enumerate(run.steps(range(calls), overflows)):
            assert_same(found, expected[i], f"call {i}")
    return run.step


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are small: where a GPU shows them to be slower in parts, they stay in parts all the same."""
    monkeypatch.setattr("ampkit._step.split.TIMES", False)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("model", MODELS)
def test_the_bits_of_eager_steps(engine: Engine, model: str, options: dict[str, Any]) -> None:
    """R4: losses, parameters, state, scale, average and random numbers are those of eager steps after each call."""
    calls = 24 if "accumulate" in options else 13
    report = compared(engine, MODELS[model], calls, **options).report()
    if model == "shared" and "policy" in options:
        # Autocast casts the weight once for all of its uses, and their gradients are added in low precision.
        assert (report.outcome, report.in_parts) == ("eager", 0)
        assert "a gradient gets into it through a tensor that is no output of it" in str(report)
        return
    assert (report.outcome, report.failure, report.replays) == ("in parts", None, 0)
    assert report.in_parts + sum(report.eager.values()) == calls
    assert report.in_parts >= 6
    assert any(part.replays == report.in_parts for part in report.parts)
    assert "the update of the parameters is one graph" in report.split
