"""What `accelerator.prepare` returns works in `graphed_step` and `graphed`, with the bits of accelerate's own loop."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import ENGINES, assert_same, bits
from ports import printed_by_two_ranks
from tape import taped
from torch import Tensor, nn

import ampkit

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Accelerators share what they know, also with those of a Trainer that was tested before."""
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A small net, its optimizer and scheduler as accelerate has prepared them, and fourteen batches."""

    def __init__(self, device: str, precision: str) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=device == "cpu")
        torch.manual_seed(0)
        layers = nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
        self.net = nn.Sequential(*layers)
        fused = torch.optim.AdamW(self.net.parameters(), lr=2**-7, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(fused, 3, gamma=0.5)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.net, fused, schedule)
        made = torch.Generator().manual_seed(1)
        batches = [(torch.randn(8, 16, generator=made), torch.randint(4, (8,), generator=made)) for _ in range(14)]
        self.batches = [(x.to(device), y.to(device)) for x, y in batches]
        torch.manual_seed(5)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = loss_fn(self.model, x, y)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.detach()

    def run(self, step: Any) -> list[Tensor]:
        losses = []
        for x, y in self.batches:
            losses.append(step(x, y))
            self.scheduler.step()
        return [bits(tensor) for tensor in (*losses, *self.net.parameters())]


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("engine", [*ENGINES, ("cpu", "tape")], ids=str)
def test_a_function_of_the_loop(engine: tuple[str, str], wrapped: bool, precision: str) -> None:
    """`backward` and `clip_grad_norm_` of the accelerator are in the graph. The optimizer may be either of the two."""
    device, graph = engine
    tape, graph = (taped(), "emulate") if graph == "tape" else (nullcontext(), graph)
    loop = Loop(device, precision)
    optimizer = loop.optimizer if wrapped else loop.optimizer.optimizer
    step = ampkit.graphed(modules=(loop.model,), optimizers=(optimizer,), graph=graph, on_failure="raise")(loop.step)
    with tape:
        found = loop.run(step)
    assert step.replays == 14 - 3
    plain = Loop(device, precision)
    assert_same(found, plain.run(plain.step))


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_graphed_step(engine: tuple[str, str], wrapped: bool) -> None:
    """The step takes accelerate's optimizer too, and then clips as accelerate does."""
    device, graph = engine
    loop = Loop(device, "bf16")
    optimizer = loop.optimizer if wrapped else loop.optimizer.optimizer
    max_norm = 0.5 if wrapped else None
    step = ampkit.graphed_step(loss_fn, loop.model, optimizer, max_norm=max_norm, graph=graph, on_failure="raise")
    found = loop.run(lambda x, y: step(x, y).loss)
    assert step.replays == 14 - 3
    plain = Loop(device, "bf16")
    if not wrapped:
        plain.accelerator.clip_grad_norm_ = lambda *_: None
    assert_same(found, plain.run(plain.step))


@pytest.mark.slow
@pytest.mark.ranks
def test_fsdp_of_two_processes() -> None:
    """`graphed_step` on what accelerate has sharded (FSDP 2): losses and shards are those of accelerate's loop."""
    script = Path(harness.__file__).parent / "accelerate_ranks.py"
    rows = json.loads(printed_by_two_ranks(script, folders=(), begins="[{", ACCELERATE_USE_FSDP="true"))
    assert rows == [{"model": "FSDPSequential", "replays": 22, "equal": True}] * 2
