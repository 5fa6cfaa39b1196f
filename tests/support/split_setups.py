"""Random training set-ups with a line that cannot be captured, in a random module of a random model."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import setups
import torch
from setups import Layout, Setup, StepTraining, draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16

# ----------------------------------------------------------------------------------- lines that cannot be captured


def read(x: Tensor) -> Tensor:
    return x * (1 + 0.1 * x.detach().float().abs().mean().clamp(max=2.0).item())


def branch(x: Tensor) -> Tensor:
    return x * 1.5 if x.detach().float().mean() > 0 else x


def rows(x: Tensor) -> Tensor:
    kept = (x.detach().float().mean((1, 2)) > -1e30).nonzero().squeeze(1)
    return x[kept]


def masked(x: Tensor) -> Tensor:
    return x + 0.01 * x[x.detach() > 0].mean()


def drawn(x: Tensor) -> Tensor:
    return x * (0.5 + random.random())


LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "item": read,
    "if": branch,
    "nonzero": rows,
    "mask": masked,
    "random": drawn,
}

# --------------------------------------------------------------------------------------------------------- modules


def nothing(x: Tensor) -> Tensor:
    return x


class Layer(nn.Module):
    """A module that may have a line in it that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.line: Callable[[Tensor], Tensor] = nothing


class Perceptron(Layer):
    """LayerNorm, two linear layers and dropout; its input is used twice, and its first weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.line(self.first(F.gelu(self.first(self.norm(x)))))
        return x + self.dropout(self.second(F.gelu(hidden)))


class Gate(Layer):
    """Two layers take the input itself, which is mostly float32: autocast casts it for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.line(F.silu(self.gate(x)) * self.up(x).tanh()))


class Convolution(Layer):
    """Convolution, BatchNorm and dropout, with an own buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
        self.back, self.dropout = nn.Conv1d(WIDTH, WIDTH, 1), nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.shape[0])
        hidden = self.line(F.relu(self.norm(self.conv(x.transpose(1, 2)))))
        return torch.tanh(self.dropout(self.back(hidden))).transpose(1, 2).contiguous()


class Attention(Layer):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.line(x))


class Outputs(Layer):
    """Gives a dict of three outputs: one that is used, one that is used in part, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.line(torch.sigmoid(self.left(self.norm(x))))
        return {"hidden": hidden * x, "mean": F.gelu(self.right(hidden)).mean(1), "more": [hidden.exp(), None]}


class Line(nn.Module):
    """A module that is the line."""

    line: Callable[[Tensor], Tensor] = staticmethod(nothing)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class Flat(nn.Module):
    """An `nn.Sequential` of small modules, one of which may be the line. Neighbours are captured together then."""

    def __init__(self) -> None:
        super().__init__()
        half = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        other = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.net = nn.Sequential(*half, nn.Linear(WIDTH, WIDTH), nn.GELU(), Line(), *other, nn.Sigmoid())

    @property
    def line(self) -> Callable[[Tensor], Tensor]:
        return self.net[6].line

    @line.setter
    def line(self, line: Callable[[Tensor], Tensor]) -> None:
        self.net[6].line = line

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


KINDS: dict[str, Any] = {
    "flat": Flat,
    "perceptron": Perceptron,
    "gate": Gate,
    "convolution": Convolution,
    "attention": Attention,
    "outputs": Outputs,
}


class Net(nn.Module):
    """Random modules, one after the other; each may be called several times, shared, checkpointed or skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.pick = pick = random.Random(torch.initial_seed())
        self.layers = nn.ModuleList([KINDS[pick.choice(list(KINDS))]() for _ in range(pick.randint(2, 4))])
        self.order = [pick.randrange(len(self.layers)) if pick.random() < 0.3 else i for i in range(len(self.layers))]
        self.how = [pick.choice(("plain", "plain", "skip", "twice", "checkpoint")) for _ in self.order]
        self.line = LINES[pick.choice(list(LINES))]
        self.bad = pick.randrange(-1, len(self.order))  # behind which layer the line is; -1: before all
        inside = pick.random() < 0.4 and self.bad >= 0
        if inside:
            self.layers[self.order[self.bad]].line, self.line = self.line, nothing
        self.tied = pick.random() < 0.5
        self.head = nn.Linear(WIDTH, setups.CLASSES)
        del self.pick

    @staticmethod
    def sample(layout: Layout, made: torch.Generator) -> Tensor:
        return torch.randn(layout.batch, layout.length, WIDTH, generator=made)

    def called(self, i: int, x: Tensor) -> Tensor:
        out = self.layers[i](x)
        if isinstance(out, dict):
            out = out["hidden"] + out["mean"][:, None]
        return out

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = x * 1.0
        if self.bad < 0:
            x = self.line(x)
        for place, (i, how) in enumerate(zip(self.order, self.how, strict=True)):
            before = x
            if how == "checkpoint":
                x = checkpoint(self.called, i, x, use_reentrant=False)
            else:
                x = self.called(i, x)
            if how == "twice":
                x = self.called(i, x)
            if how == "skip" or branch:
                x = x + 0.5 * before
            if place == self.bad:
                x = self.line(x)
        logits = self.head(x.mean(1))
        if self.tied:  # a weight that is used outside of its module, too
            weight = next(iter(self.layers[0].parameters()))
            logits = logits + 0.1 * weight.float().mean()
        return logits


setups.MODELS["split"] = Net


def draw_split(seed: int, device: str) -> Setup:
    """Return the set-up of this seed."""
    setup, pick = draw(seed, device), random.Random(-seed - 7)
    bad = "!" * (setup.policy == "float16")
    more = ["A" + bad * (pick.random() < 0.1) for _ in range(setup.accumulate * pick.randint(5, 8))]
    # The slow part are the calls under the preflight: two for each layout and each place in the window.
    script = tuple(action.replace("C", "B") for action in setup.script)
    accumulate = min(setup.accumulate, 2)
    return replace(setup, model="split", script=(*script, *more), accumulate=accumulate, verify=0, by_hand=False)


class SplitTraining(StepTraining):
    """Trained in parts."""

    on_failure = "parts"


totals: dict[str, Counter[str]] = defaultdict(Counter)  # by device: calls whole, in parts and eager, and differences


def count(device: str, report: Any) -> None:
    """Count the calls of a run."""
    totals[device].update(
        {
            "set-ups": 1,
            "set-ups in parts": int(bool(report.in_parts)),
            "whole": report.replays,
            "in parts": report.in_parts,
            "eager": sum(report.eager.values()),
        }
    )


def summary() -> list[str]:
    """Return a line for each device on which set-ups were run."""
    return [
        f"{device}: {counter['set-ups']} set-ups ({counter['set-ups in parts']} in parts), {counter['differences']} "
        f"differences; calls: {counter['whole']} whole, {counter['in parts']} in parts, {counter['eager']} eager"
        for device, counter in totals.items()
    ]
