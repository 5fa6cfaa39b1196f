"""Two processes that train with accelerate's FSDP 2, by its own loop and by `graphed_step`: replays, and bits.

    torchrun --nproc-per-node=2 tests/support/accelerate_ranks.py [--device cuda]

Prints a line of JSON on rank 0. On a CPU, where accelerate would take DDP, it is told that this is FSDP.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from harness import bits, deterministic
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

ACCUMULATE, CALLS = 2, 28


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Loop:
    """A small net and its optimizer, as accelerate has prepared them, and batches of this rank."""

    def __init__(self, device: str) -> None:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
        self.accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATE)
        if device == "cpu":
            self.accelerator.state.distributed_type, self.accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.model, self.optimizer = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=2**-7, fused=True)
        )
        made = torch.Generator().manual_seed(1 + self.accelerator.process_index)
        batches = [(torch.randn(8, 16, generator=made), torch.randint(4, (8,), generator=made)) for _ in range(CALLS)]
        self.batches = [(x.to(self.accelerator.device), y.to(self.accelerator.device)) for x, y in batches]

    def call(self, x: Tensor, y: Tensor) -> Tensor:
        with self.accelerator.accumulate(self.model):
            loss = loss_fn(self.model, x, y)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def run(self, call: Callable[..., Tensor]) -> list[Tensor]:
        """Return the losses, and this rank's part of the weights behind them."""
        losses = [call(*batch) for batch in self.batches]
        shards: list[Any] = list(self.model.parameters())
        return [bits(each) for each in (*losses, *(shard.to_local() for shard in shards))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with deterministic():
        plain = Loop(args.device)
        expected = plain.run(plain.call)
        loop = Loop(args.device)
        graph = "auto" if args.device == "cuda" else "emulate"
        step = ampkit.graphed_step(loss_fn, loop.model, loop.optimizer.optimizer, accumulate=ACCUMULATE, graph=graph)
        found = loop.run(lambda *batch: step(*batch).loss)
    row = {
        "model": type(loop.model).__name__,
        "replays": step.report().replays,
        "equal": all(map(torch.equal, found, expected)),
    }
    rows: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rows, row)
    if loop.accelerator.is_main_process:
        print(json.dumps(rows), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
