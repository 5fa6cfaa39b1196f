"""A step that is never captured: it does nothing that only a graph needs."""

import warnings
from typing import Any

import pytest
import torch
from harness import ENGINES
from torch import Tensor, nn

import ampkit


class Counting(nn.Module):
    """A linear layer with a buffer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.linear(x)


def reads_its_loss(model: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """Return a loss, having read it on the host, and the buffer itself."""
    loss = model(x).square().mean()
    float(loss.detach())
    return loss, model.calls


def refused(engine: tuple[str, str], loss_fn: Any = reads_its_loss) -> tuple[ampkit.GraphedStep, nn.Module, Tensor]:
    """Return a step whose capture the preflight has refused."""
    device, graph = engine
    model = Counting().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph, on_failure="eager")
    x = torch.ones(2, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        for _ in range(5):
            step(x)
    assert step.report().eager == {"warm-up": 3, "cannot be captured": 2}
    return step, model, x


@pytest.mark.parametrize("engine", ENGINES)
def test_no_key_is_made(engine: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: nobody looks at the state, which decides about graphs only."""
    step, _, x = refused(engine)
    monkeypatch.setattr(step._engine._state, "generation", None)
    step(x)
    assert step.report().eager["cannot be captured"] == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_batch_is_checked_all_the_same(engine: tuple[str, str]) -> None:
    """What a graph could not take is refused eagerly too, so that a loop does not depend on whether it is captured."""
    step, _, x = refused(engine)
    with pytest.raises(ampkit.InputMismatch, match=r"batch\[0\] requires grad"):
        step(x.clone().requires_grad_())


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_are_tensors_of_their_own(engine: tuple[str, str]) -> None:
    """A later step overwrites no output of an earlier one, though the loss function returns a buffer."""
    step, model, x = refused(engine)
    counts = [step(x).aux for _ in range(3)]
    assert [float(count) for count in counts] == [6.0, 7.0, 8.0]
    assert float(model.calls) == 8.0


@pytest.mark.parametrize("engine", ENGINES)
def test_the_learning_rate_is_the_present_one(engine: tuple[str, str]) -> None:
    """R5: a step that is refused reads the rate of each call."""
    step, model, x = refused(engine)
    step._window._step.groups._optimizer.param_groups[0]["lr"] = 0.0
    before = model.linear.weight.detach().clone()
    step(x)
    assert torch.equal(before, model.linear.weight)


@pytest.mark.cuda
def test_it_runs_on_the_stream_of_the_caller() -> None:
    """Warm-up calls run on the capture stream, calls of a refused step on the caller's, so that nothing waits."""
    streams: list[torch.cuda.Stream] = []

    def notes_its_stream(model: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
        streams.append(torch.cuda.current_stream())
        return reads_its_loss(model, x)

    step, _, x = refused(("cuda", "auto"), notes_its_stream)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(x)
    torch.cuda.current_stream().wait_stream(side)
    assert streams[0] != torch.cuda.current_stream()
    assert streams[-2] == torch.cuda.current_stream()
    assert streams[-1] == side
