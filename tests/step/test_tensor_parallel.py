"""Models under parallelize_module alone: refused by the parameter and its placement, and trained with graph="off"."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import ampkit

PAIR: dict[str, ParallelStyle] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
NORM: dict[str, ParallelStyle] = {"0": SequenceParallel(use_local_output=True)}


@pytest.fixture(autouse=True)
def process_group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parallel(plan: dict[str, ParallelStyle]) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        pytest.param(PAIR, r"parameter (0\.)?1\.weight is a DTensor placed as \(Shard\(dim=0\),\)", id="linears"),
        pytest.param(NORM, r"parameter (0\.)?0\.weight is a DTensor placed as \(Replicate\(\),\)", id="norm"),
    ],
)
def test_tensor_parallelism_alone_is_refused(plan: dict[str, ParallelStyle], words: str) -> None:
    """R12: of a step and of a function; the message names the parameter, its placement, and what to write."""
    model = parallel(plan)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    instead = r".*Split the model with fully_shard instead\. Or pass graph='off'"
    with pytest.raises(NotImplementedError, match=words + instead):
        ampkit.graphed_step(loss_fn, model, optimizer, graph="emulate")
    with pytest.raises(NotImplementedError, match=words + instead):
        ampkit.graphed(modules=(model,), optimizers=(optimizer,), graph="emulate")(lambda x: loss_fn(model, x))


def test_it_trains_eagerly() -> None:
    """R12: with graph="off" as the message says, and with the bits of torch's loop."""
    models = [parallel(PAIR), parallel(PAIR)]
    alone, optimizer = (torch.optim.SGD(model.parameters(), lr=0.125) for model in models)
    step = ampkit.graphed_step(loss_fn, models[1], optimizer, graph="off")
    for i in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        loss_fn(models[0], x).backward()
        alone.step()
        alone.zero_grad()
        step(x)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(getattr(ours, "_local_tensor", ours), getattr(theirs, "_local_tensor", theirs))
