"""Tensors that a step makes where there is none, or where a longer batch needs a longer one."""

import collections
import warnings
from typing import Any

import pytest
import torch
from harness import ENGINES, assert_same, deterministic
from torch import Tensor, nn

import ampkit

CACHE: Tensor | None = None


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] + 1.0


class Attribute(nn.Module):
    """Keeps the cache as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or self.cache.shape[0] < x.shape[1]:
            self.cache: Tensor | None = positions(x)
        return self.layer(x) * self.cache[: x.shape[1]]

    def double(self) -> None:
        assert self.cache is not None
        self.cache = self.cache * 2


class Variable(nn.Module):
    """Keeps the cache as a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        globals().update(CACHE=None)

    def forward(self, x: Tensor) -> Tensor:
        global CACHE
        if CACHE is None or CACHE.shape[0] < x.shape[1]:
            CACHE = positions(x)
        out: Tensor = self.layer(x) * CACHE[: x.shape[1]]
        return out

    def double(self) -> None:
        global CACHE
        assert CACHE is not None
        CACHE = CACHE * 2


class Late(nn.Module):
    """Replaces a tensor in each call, which another method reads, as people do for a further loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        self.cache: Tensor | None = self.layer(x)
        return self.read()

    def read(self) -> Tensor:
        assert self.cache is not None
        return self.cache * 0.5

    def double(self) -> None:
        self.cache = None


DOUBLE = 0  # in place of a length
GROWS = [3] * 6 + [5] * 6 + [3] * 6 + [5] * 3
SEQUENCES = {
    "replaced": [3] * 6 + [DOUBLE] + [3] * 6,
    "grows": GROWS,
    "in turns": [3] * 6 + [5, 3] * 8,
    "grows in turns": [3] * 6 + [5, 3, 7, 3, 5, 9] * 8,
    "replaced in turns": [3] * 6 + [5, 3] * 8 + [DOUBLE] + [3, 5] * 6,
}
# Captures. Each growth takes one for the length and one for each that had a graph.
CAPTURES = {"replaced": 2, "grows": 3, "in turns": 3, "grows in turns": 5, "replaced in turns": 5}


def train(kind: type[Any], lengths: list[int], engine: tuple[str, str]) -> tuple[list[Any], Any]:
    device, graph = engine
    torch.manual_seed(0)
    model = kind().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    step = ampkit.graphed_step(lambda model, x: model(x).square().mean(), model, optimizer, graph=graph)
    made, found = torch.Generator().manual_seed(1), []
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for length in lengths:
            if length == DOUBLE:
                model.double()
                continue
            if device == "cuda":
                torch.full((length, 1), float("nan"), device=device)  # takes the memory of what was freed
            loss = step(torch.randn(2, length, 4, generator=made).to(device)).loss
            found.append((loss.clone(), {key: value.clone() for key, value in model.state_dict().items()}))
    return found, step


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Attribute, Variable])
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.quick(4)
@pytest.mark.sampled(2)
def test_a_cache_is_compared(sequence: str, kind: type[nn.Module], engine: tuple[str, str]) -> None:
    """R7: a graph never reads a cache that was replaced, by the step itself or by others. It may be freed."""
    lengths = SEQUENCES[sequence]
    expected, _ = train(kind, lengths, (engine[0], "off"))
    found, step = train(kind, lengths, engine)
    assert_same(expected, found)
    assert step.report().captures == CAPTURES[sequence], step.report()
    assert step.replays > len(found) / 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.quick(3)
def test_what_each_call_replaces_is_no_cache(sequence: str, engine: tuple[str, str]) -> None:
    """R7: it is not compared, also where several lengths are warmed up in turns."""
    lengths = SEQUENCES[sequence]
    expected, _ = train(Late, lengths, (engine[0], "off"))
    found, step = train(Late, lengths, engine)
    assert_same(expected, found)
    assert step.report().captures == len({*lengths} - {DOUBLE})
    assert step.replays >= len(found) - 3 * step.report().captures - 3


SCALES: "collections.defaultdict[str, float]" = collections.defaultdict(lambda: 1.0)


class Scaled(nn.Module):
    """Reads a number that its first call puts into a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * SCALES["x"]
        out: Tensor = self.second(hidden + self.second.weight.abs().mean())
        return out


@pytest.mark.parametrize("engine", ENGINES)
def test_in_parts(engine: tuple[str, str]) -> None:
    """W2: what the first call has filled is compared in a step that is done in parts, too, which has no rehearsal."""

    def trained(graph: str) -> tuple[list[Tensor], Any]:
        SCALES.clear()
        torch.manual_seed(0)
        net = Scaled().to(engine[0])
        optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-5)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()  # reads its rate on the host
            return loss.detach()

        step = ampkit.graphed(modules=(net,), optimizers=(optimizer,), graph=graph)(train)
        made = torch.Generator().manual_seed(1)
        losses = []
        for i in range(20):
            losses.append(step(torch.randn(2, 4, generator=made).to(engine[0])))
            if i == 12:
                SCALES["x"] = 3.0
        report = step.report()
        step.close()
        return losses, report

    with warnings.catch_warnings(), deterministic():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = trained("off")
        losses, report = trained(engine[1])
    assert sum(part.replays for part in report.parts) > 0
    assert all(constant.not_compared == "" for constant in report.constants if "SCALES" in constant.path)
    assert any("SCALES['x'] changed" in reason for reason in report.eager)
    assert_same(losses, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_put_into_a_dict(engine: tuple[str, str]) -> None:
    """W2: an entry that is gone stays gone when calls look for it, also where reading it would make it anew."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        SCALES.setdefault("x", 0.25)
        loss: Tensor = (model(x) * SCALES["x"]).square().mean()
        return loss

    def trained(graph: str) -> tuple[list[Tensor], int]:
        SCALES.clear()
        torch.manual_seed(0)
        net = nn.Linear(4, 4).to(engine[0])
        step = ampkit.graphed_step(loss_fn, net, torch.optim.SGD(net.parameters(), lr=0.5, fused=True), graph=graph)
        losses = []
        for i in range(16):
            if i == 9:
                SCALES.clear()
            losses.append(step(torch.ones(2, 4, device=engine[0])).loss.clone())
        step.close()
        return losses, step.replays

    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        expected, _ = trained("off")
        losses, replays = trained(engine[1])
    assert replays > 4
    assert_same(losses, expected)
