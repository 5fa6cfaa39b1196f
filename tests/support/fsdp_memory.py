"""What a training step under fully_shard takes, recorded on several ranks, for test_forecast_sharded.py.

    python tests/support/fsdp_memory.py --device cuda  every case on two GPUs: the peak of each rank in MiB
    python tests/support/fsdp_memory.py --device cpu --cases float32 odd  two of them with gloo

Without RANK in its environment the script starts the ranks itself.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ddp_train import launch
from fsdp_train import Block, Tied
from rank_script import rows_of, run_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit.debug._memory.allocator import BLOCK as BLOCK
from ampkit.debug._memory.allocator import cublas_workspace as cublas_workspace

STEPS = 2
LOW = torch.bfloat16


class Case(NamedTuple):
    """One way to train.

    Attributes:
        model: which model, see `MODELS`.
        reshard: as in `fully_shard(reshard_after_forward=...)`.
        dtype: of `MixedPrecisionPolicy(param_dtype=...)`.
        reduce: of `MixedPrecisionPolicy(reduce_dtype=...)`.
        optimizer: its name.
        options: of the optimizer.
        copies: how many ranks have the same shards (HSDP).
        policy: of ampkit, for autocast around the loss.
    """

    model: str = "blocks"
    reshard: bool | int = True
    dtype: torch.dtype | None = None
    reduce: torch.dtype | None = None
    optimizer: str = "AdamW"
    options: dict[str, Any] = {"fused": True}  # noqa: RUF012 - never changed
    copies: int = 1
    policy: str | None = None


SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}
CASES = {
    "float32": Case(),
    "float32, not resharded": Case(reshard=False),
    "bfloat16": Case(dtype=LOW, reduce=torch.float32),
    "bfloat16, not resharded": Case(reshard=False, dtype=LOW, reduce=torch.float32),
    "bfloat16, also reduced": Case(dtype=LOW),
    "sgd": Case(optimizer="SGD", options=SGD),
    "sgd, bfloat16": Case(dtype=LOW, reduce=torch.float32, optimizer="SGD", options=SGD),
    "adamw by default": Case(options={}),
    "odd": Case("odd"),
    "odd, bfloat16, not resharded": Case("odd", False, dtype=LOW, reduce=torch.float32),
    "checkpoints": Case("checkpoints", dtype=LOW, reduce=torch.float32),
    "frozen": Case("frozen"),
    "tied": Case("tied"),
    "transformer": Case("transformer", dtype=LOW, reduce=torch.float32),
    "policy": Case(policy="bfloat16"),
    "copies": Case(copies=2),
}
FOUR_RANKS = {
    "resharded to two": Case(reshard=2),
    "two copies": Case(dtype=LOW, reduce=torch.float32, copies=2),
}
ON_GPUS = {
    "large": Case("large", dtype=LOW, reduce=torch.float32),
    "large, not resharded": Case("large", False),
    "large, sgd": Case("large", optimizer="SGD", options=SGD, policy="bfloat16"),
}
ALL = {**CASES, **FOUR_RANKS, **ON_GPUS}


# --------------------------------------------------------------------------------------------------------------- models


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def blocks() -> nn.Module:
    return nn.Sequential(*(perceptron(16) for _ in range(3)), nn.Linear(16, 5))


def odd() -> nn.Module:
    # 15 and 1 rows: the last shards of two ranks are shorter, or empty.
    return nn.Sequential(nn.Sequential(nn.Linear(16, 15), nn.GELU()), nn.Sequential(nn.Linear(15, 1)), nn.Linear(1, 3))


class Checkpoints(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(perceptron(16) for _ in range(3)), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


def tied() -> nn.Module:
    model = Tied()
    for block in model.blocks:
        block.dropout = 0.0  # which has another kernel on CUDA
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "blocks": blocks,
    "odd": odd,
    "checkpoints": Checkpoints,
    "frozen": blocks,
    "tied": tied,
    "transformer": lambda: nn.Sequential(*(Block(16, 2, dropout=0.0) for _ in range(2)), nn.Linear(16, 5)),
    "large": lambda: nn.Sequential(*(Block(1024, 16, dropout=0.0) for _ in range(6)), nn.Linear(1024, 256)),
}
SHAPES = {"transformer": (8, 12, 16), "tied": (8, 12), "large": (4, 512, 1024)}


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def parts(case: Case, device: torch.device | str = "cpu") -> tuple[nn.Module, Tensor]:
    """Return the whole model of a case, and a batch."""
    torch.manual_seed(3)
    model: nn.Module = MODELS[case.model]().to(device)
    if case.model == "frozen":
        model[0].requires_grad_(False)
    return model, torch.randn(SHAPES.get(case.model, (64, 16))).to(device)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), **case.options)
    return made


def shard(case: Case, device_type: str, model: Any) -> None:
    """Put each block and the whole model under fully_shard, as people write it."""
    policy = MixedPrecisionPolicy(param_dtype=case.dtype, reduce_dtype=case.reduce)
    options: dict[str, Any] = {"reshard_after_forward": case.reshard, "mp_policy": policy}
    if case.copies > 1:
        shape = (case.copies, dist.get_world_size() // case.copies)
        options["mesh"] = init_device_mesh(device_type, shape, mesh_dim_names=("copies", "shards"))
    for block in list(model)[:-1] if isinstance(model, nn.Sequential) else model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


# ------------------------------------------------------------------------------------------------------------ recording


def waits_for_gloo(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that returns when gloo's threads hold none of its tensors, which may be later than its end.

    Otherwise a rank on a busy machine would free them at another time in each run.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        before = [references(tensor) for tensor in tensors]
        result = collective(*args, **kwargs)
        deadline = time.monotonic() + 10
        while any(references(x) > n for x, n in zip(tensors, before, strict=True)) and time.monotonic() < deadline:
            time.sleep(0.001)
        return result

    return call


def references(tensor: Tensor) -> int:
    """Return how many references C++ has to a tensor and to its memory."""
    return int(tensor._use_count() + torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def recorded(case: Case, device: torch.device) -> dict[str, Any]:
    """Return the profile of this rank's first steps as a dict, on CUDA with the peak of a further step.

    Torch's allocator counts the latter, with no mode around the step: `allocated`, in bytes above what was there
    before.
    """
    on_cuda = device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated(device) if on_cuda else 0
    model, x = parts(case, device)
    shard(case, device.type, model)
    optimizer = optimizer_of(case, model)
    policy = ampkit.Policy.parse(case.policy or "float32")

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with policy.autocast(device.type):
            loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()

    row = ampkit.debug.memory(step, x, model=model, optimizer=optimizer, steps=STEPS).to_dict()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        step(x)
        row["allocated"] = torch.cuda.max_memory_allocated(device) - before
    return row


def record_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a profile for each case by its name."""
    if device.type == "cpu":
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            setattr(dist, name, waits_for_gloo(getattr(dist, name)))
    names = args.cases or (ON_GPUS if device.type == "cuda" else CASES)
    return rows_of(names, lambda name: recorded(ALL[name], device), hidden=["times_ms", "series", "marks", "holders"])


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=ALL)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=240)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        rows = launch(*argv, ranks=args.ranks, timeout=args.timeout, script=__file__)
        for rank, row in enumerate(rows):
            for name, result in row.items():
                peak = max(map(sum, zip(*result["series"].values(), strict=True)))
                counted = f", {result['allocated'] / 2**20:.3f} by torch" if "allocated" in result else ""
                print(f"rank {rank}, {name}: peak {peak / 2**20:.3f} MiB{counted}")
        return 0
    run_rank(partial(record_all, args), args.device, args.timeout, "destroy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
