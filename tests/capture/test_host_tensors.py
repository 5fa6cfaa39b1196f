"""Tensors on the host that a step on a GPU computes with: a change in place is noticed, though no kernel reads it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, deterministic, marked_line
from torch import Tensor, nn

import ampkit

GPU = pytest.param(("cuda", "auto"), marks=pytest.mark.cuda)


class Scaled(nn.Module):
    """Has a temperature that is no buffer, so that `to` leaves it on the host, and one in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.temperature, self.read, self.unread = torch.tensor(1.0), torch.tensor([1.0, 1.0]), torch.tensor(1.0)
        self.calls = torch.tensor(0)
        self.register_buffer("gain", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # a replay does not count
        return self.inner(x) * self.temperature * self.gain * self.read[1]


@pytest.fixture(params=[("cpu", "emulate"), GPU])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Without a GPU, tensors without dimensions stand for those on the host."""
    device, graph = request.param
    if device == "cpu":
        monkeypatch.setattr("ampkit._capture.preflight.touched.is_on_host", _is_small)
    return device, graph


def _is_small(tensor: Tensor, device: torch.device) -> bool:
    return tensor.numel() <= 2


def make(
    engine: tuple[str, str], graph: str, kind: type[Scaled] = Scaled, **options: Any
) -> tuple[Scaled, ampkit.GraphedStep]:
    torch.manual_seed(0)
    model = kind().to(engine[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)
    return model, ampkit.graphed_step(lambda m, x: m(x).square().mean(), model, optimizer, graph=graph, **options)


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "factor": lambda model: model.temperature.fill_(0.5),
    "entry": lambda model: model.read.mul_(0.5),
    "by data": lambda model: model.temperature.data.fill_(0.25),
    "by numpy": lambda model: model.temperature.numpy().fill(0.25),
}


@pytest.mark.filterwarnings("ignore::ampkit.AmpkitWarning")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.quick(2)
def test_a_change_in_place_is_noticed(engine: tuple[str, str], change: str) -> None:
    """R7: another value is another graph, with the bits of eager steps; the first value finds the first graph."""
    results = []
    for graph in ("off", engine[1]):
        model, step = make(engine, graph)
        x, losses = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)).to(engine[0]), []
        with deterministic():
            losses += [step(x).loss.clone() for _ in range(6)]
            CHANGES[change](model)
            losses += [step(x).loss.clone() for _ in range(6)]
            model.temperature.fill_(1.0)
            model.read.fill_(1.0)
            losses += [step(x).loss.clone() for _ in range(3)]
        results.append([*losses, *(param.detach().clone() for param in model.parameters())])
    assert_same(*results)
    assert (step.captures, step.replays) == (2, 3 + 3 + 3), step.report()
    assert any("a tensor on the host changed" in reason for reason in step.report().eager)


def test_what_is_not_a_change(engine: tuple[str, str]) -> None:
    """A tensor that the step does not read, one that it changes itself, and learning rates."""
    model, step = make(engine, engine[1])
    x = torch.ones(2, 4, device=engine[0])
    for _ in range(4):
        step(x)
        model.unread += 1
        model.calls += 10
    assert (step.captures, step.report().failure) == (1, None)


def test_the_warning_says_what_to_do(engine: tuple[str, str]) -> None:
    """It names the line, and where the tensor belongs."""
    model, step = make(engine, engine[1])
    x = torch.ones(2, 4, device=engine[0])
    for _ in range(5):
        step(x)
    model.temperature.fill_(0.5)
    says = r"a tensor on the host changed, which is read in .*self\.inner\(x\) \* self\.temperature.*register_buffer"
    with pytest.warns(ampkit.CaptureWarning, match=says):
        step(x)


class Anneals(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.temperature *= 0.5  # HERE anneals
        return super().forward(x)


def test_what_the_step_itself_changes_and_reads(engine: tuple[str, str]) -> None:
    """A replay would not anneal, so the step stays eager. The message names the line."""
    results = []
    for graph in ("off", engine[1]):
        _, step = make(engine, graph, Anneals, on_failure="eager")
        x = torch.ones(2, 4, device=engine[0])
        with deterministic(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ampkit.CaptureWarning)
            results.append([step(x).loss.clone() for _ in range(8)])
    assert_same(*results)
    assert step.captures == 0
    says = f"{marked_line(__file__, 'anneals')} - changes a tensor on the host that the step reads"
    assert any(says in str(warning.message) for warning in caught), [str(w.message) for w in caught]
