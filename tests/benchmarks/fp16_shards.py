"""float16 against bfloat16 under fully_shard: tokens per second of a Llama, with ampkit and with torch's own loop.

    python tests/benchmarks/fp16_shards.py                       1.1 billion parameters on two GPUs
    python tests/benchmarks/fp16_shards.py --small --device cpu  a tiny one with gloo and emulated graphs

Model, batch and optimizer are those of many_gpus.py: each block and the rest under fully_shard, with
MixedPrecisionPolicy (gradients reduced in float32), clipping to norm 1, fused AdamW, one batch that stays on the
device. With float16 there is a loss scale. The rows of a loop are printed as soon as it is measured: the tokens of all
ranks per second of the slowest rank, the median over repeats and the least and most of them. The dtypes take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))  # ranks are started by path, and have only this folder

from ddp_train import join
from many_gpus import MAX_NORM, seconds, slowest
from many_gpus_models import MODELS, SMALL, Model, loss_fn

import ampkit
from ampkit._commands.bench.process import clean_up, fast_kernels

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LOOPS = ("graphed", "torch")
WARM_UP = 24  # calls: the loss scale settles, and ranks vote in each of ampkit's first 16 replays


class Training:
    """A model that is trained in one dtype by one loop.

    Args:
        model: what is trained.
        loop: one of `LOOPS`.
        dtype: the name of the dtype of gathered weights.
        device: this rank's.
    """

    def __init__(self, model: Model, loop: str, dtype: str, device: torch.device) -> None:
        net: Any = model.on(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        low = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
        for block in net.blocks:
            fully_shard(block, mesh=mesh, mp_policy=low)
        self.net = fully_shard(net, mesh=mesh, mp_policy=low)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        scaler = ampkit.GradScaler if loop == "graphed" else torch.amp.GradScaler
        self.scaler: Any = scaler(device.type, 2.0**12, enabled=dtype == "float16")
        self.step: Any = None
        if loop == "graphed":
            graph = "auto" if device.type == "cuda" else "emulate"
            self.step = ampkit.graphed_step(
                loss_fn,
                self.net,
                self.optimizer,
                scaler=self.scaler,
                max_norm=MAX_NORM,
                graph=graph,
                on_failure="raise",
            )

    def __call__(self, inputs: Tensor, labels: Tensor) -> None:
        """Do one step."""
        if self.step is not None:
            self.step(inputs, labels)
            return
        self.scaler.scale(loss_fn(self.net, inputs, labels)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Free the graphs."""
        if self.step is not None:
            self.step.close()


def tokens_per_second(model: Model, loop: str, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Return, by dtype, the tokens of all ranks per second of the slowest, of each repeat. The dtypes take turns."""
    batch = model.batch(device, dist.get_rank())
    tokens = batch[0].numel() * dist.get_world_size()
    trainings = {dtype: Training(model, loop, dtype, device) for dtype in DTYPES}
    calls = {dtype: partial(training, *batch) for dtype, training in trainings.items()}
    for call in calls.values():
        seconds(call, WARM_UP, device)
    (each,) = slowest([seconds(calls["bfloat16"], 3, device) / 3], device)
    count = max(3, int(0.5 / each))
    rates: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for _ in range(repeats):
        for dtype, call in calls.items():
            (taken,) = slowest([seconds(call, count, device) / count], device)
            rates[dtype].append(tokens / taken)
    for training in trainings.values():
        training.close()
    return rates


def measure(args: argparse.Namespace, device: torch.device) -> None:
    """Print the rows of each loop, and how its dtypes compare."""
    model = (SMALL if args.small else MODELS)["llama"]
    for loop in args.loops:
        start = time.monotonic()
        rates = tokens_per_second(model, loop, device, args.repeats)
        clean_up(device)
        medians = {dtype: statistics.median(values) for dtype, values in rates.items()}
        for dtype, values in rates.items():
            say(
                f"{loop:<8} {dtype:<9} {medians[dtype]:9.0f} {f'({min(values):.0f} to {max(values):.0f})':>20} tokens/s"
            )
        ratio = medians["float16"] / medians["bfloat16"]
        say(f"{loop:<8} float16 / bfloat16: {ratio:.4f}, measured in {time.monotonic() - start:.1f} s")


def say(line: str) -> None:
    """Print a line of the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        return start(argv, args.ranks)
    if args.device == "cpu":
        torch.set_num_threads(1)
    device = join(args.device)
    with warnings.catch_warnings(), fast_kernels(device):
        warnings.simplefilter("ignore")
        measure(args, device)
    dist.destroy_process_group()
    return 0


def start(argv: Sequence[str], ranks: int) -> int:
    """Run this script once per rank, on the output of this process. Return the first exit code that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        of_rank = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        shared = {**os.environ, "WORLD_SIZE": str(ranks), "STORE": f"{folder}/store"}
        command = [sys.executable, __file__, *argv]
        processes = [subprocess.Popen(command, env={**shared, **own}) for own in of_rank]
        codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
