"""`graphed(buckets=...)`: arguments padded to a few sizes, with the bits of a plain loop that pads by hand."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, bits, deterministic
from tape import taped
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

Engine = tuple[str, str]
BUCKETS = ampkit.Buckets(batch=(4, 8), length=(6, 10), pad={"batch[1]": -100})
SIZES = [(3, 5), (4, 6), (2, 6), (3, 6), (7, 9), (4, 3), (8, 10), (5, 7), (6, 10), (9, 4), (1, 1), (8, 8), (4, 2)]


class Tagger:
    """Classifies tokens; the padding has no part in its loss."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def update(self, tokens: Tensor, tags: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Do a step; return the loss and the number of right answers."""
        logits = self.model(tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="none", ignore_index=-100)
        loss = (losses * mask.flatten()).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), ((logits.argmax(2) == tags) & mask).sum()

    def batch(self, i: int, sizes: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the arguments of call i."""
        made = torch.Generator().manual_seed(i)
        tokens = torch.randint(11, sizes or SIZES[i], generator=made)
        return tokens.to(self.device), (tokens % 3).to(self.device)

    def state(self) -> list[Any]:
        """Return all that a call changes."""
        moments = [bits(value) for state in self.optimizer.state.values() for value in state.values()]
        return [[bits(param) for param in self.model.parameters()], moments]


def padded(tagger: Tagger) -> Callable[..., Any]:
    """Return the update of a loop that pads by itself."""

    def call(*batch: Tensor) -> Any:
        args, kwargs = BUCKETS.pad_batch(batch, {})
        return tagger.update(*args, **kwargs)

    return call


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("finds", [False, True])
def test_plain_loop(engine: Engine, finds: bool) -> None:
    """All sizes go through a graph per bucket; what is larger stays as it is."""
    device, graph = engine
    with deterministic(), taped() if device == "cpu" else nullcontext():
        tagger = Tagger(device)
        plain = padded(tagger)
        order = [*range(len(SIZES))] * 4
        expected = [([*plain(*tagger.batch(i))], tagger.state()) for i in order]
        for mode in ("off", graph):
            tagger = Tagger(device)
            state: dict[str, Any] = {} if finds else {"modules": (tagger.model,), "optimizers": (tagger.optimizer,)}
            update = ampkit.graphed(**state, buckets=BUCKETS, graph=mode, on_failure="raise")(tagger.update)
            for step, i in enumerate(order):
                assert_same(([*update(*tagger.batch(i))], tagger.state()), expected[step], f"{mode}, call {step}")
            assert update.captures == (0 if mode == "off" else 3)  # two buckets, and the larger one


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("finds", [False, True])
def test_scan(engine: Engine, finds: bool) -> None:
    """A stack is padded as its slices are."""
    device, graph = engine
    lengths = (6, 5, 16)
    with deterministic():
        tagger = Tagger(device)
        plain = padded(tagger)
        expected = []
        for length in lengths:
            outs = [plain(*tagger.batch(i, (3, 5))) for i in range(length)]
            expected.append(([torch.stack(column) for column in zip(*outs, strict=True)], tagger.state()))
        tagger = Tagger(device)
        state: dict[str, Any] = {} if finds else {"modules": (tagger.model,), "optimizers": (tagger.optimizer,)}
        update = ampkit.graphed(**state, buckets=BUCKETS, graph=graph, on_failure="raise")(tagger.update)
        for length, wanted in zip(lengths, expected, strict=True):
            batches = [tagger.batch(i, (3, 5)) for i in range(length)]
            outs = update.scan(*map(torch.stack, zip(*batches, strict=True)))
            assert_same(([*outs], tagger.state()), wanted, f"{length} calls")
    assert update.report().launches == 2


def test_wrong_use() -> None:
    """What cannot be padded is refused, with what to write."""
    tagger = Tagger("cpu")
    make = ampkit.graphed(modules=(tagger.model,), optimizers=(tagger.optimizer,), buckets=BUCKETS, graph="off")

    def without(tokens: Tensor, tags: Tensor) -> None: ...

    with pytest.raises(ValueError, match=r"graphed\(buckets=...\): without has no argument 'mask'.*without\(..., \*,"):
        make(without)
    with pytest.raises(ampkit.InputMismatch, match="no tensor of 1 or more dimensions"):
        make(tagger.update)(torch.tensor(1.0), 3)
    with pytest.raises(ValueError, match=r"graphed\(buckets=Buckets\(batch='auto'.*Pass sizes"):
        ampkit.graphed(buckets="auto")  # type: ignore[arg-type]  # of graphed_step alone
    with pytest.raises(ValueError, match=r"graphed\(buckets=8\): expected ampkit.Buckets"):
        ampkit.graphed(buckets=8)  # type: ignore[arg-type]  # that is the mistake
