"""Compiled training under fully_shard, one process per rank, for test_fully_shard_compiled.py.

    python tests/support/fsdp_compiled.py --device cuda  every case on two GPUs, with one line per case and rank
    python tests/support/fsdp_compiled.py --device cpu --cases blocks stem  two of them with gloo, emulated graphs

Without RANK in its environment the script starts the ranks itself. On the CPU AOTAutograd compiles, without Inductor.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ddp_train import ENDS, KEPT, launch
from fsdp_train import CALLS, LOW, Block, Case, Job, Tied, calls, mesh_options
from rank_script import differences, rows_of, run_rank
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit._torch import compile as torch_compile

INDUCTOR = torch_compile.inductor

CASES = {
    "blocks": Case("blocks", dtype=LOW, max_norm=0.5),
    "many": Case("many", dtype=LOW, max_norm=0.5),
    "whole": Case("whole", False, dtype=LOW, max_norm=0.5),
    "grouped": Case("grouped", True, dtype=LOW, max_norm=0.5, average=True),
    "policy": Case("blocks", policy="bfloat16", max_norm=0.5, accumulate=2),
    "float16": Case("stem", policy="float16", max_norm=0.5, overflows=(1, 7)),
    "float16 weights": Case("stem", dtype=torch.float16, policy="float16", max_norm=0.5, overflows=(2, 6)),
    "tied": Case("tied", dtype=LOW),
    "windows": Case("blocks", dtype=LOW, max_norm=0.5, accumulate=3, event="windows"),
    "scan": Case("blocks", dtype=LOW, event="scan"),
    "stem": Case("stem", dtype=LOW, max_norm=0.5),
    "checkpoints": Case("checkpoints", True, dtype=LOW, max_norm=0.5),
    "break": Case("break", dtype=LOW, max_norm=0.5),
    "other size": Case("blocks", dtype=LOW, max_norm=0.5, event="other size"),
    "evaluation": Case("blocks", dtype=LOW, max_norm=0.5, event="evaluation"),
    "verify": Case("blocks", dtype=LOW, max_norm=0.5, verify=3),
    "copies": Case("blocks", dtype=LOW, max_norm=0.5, copies=2),
    "exception": Case("blocks", dtype=LOW, max_norm=0.5, event="exception"),
    "forward fails": Case("stem", dtype=LOW, max_norm=0.5, event="forward fails"),
    "backward fails": Case("stem", dtype=LOW, max_norm=0.5, event="backward fails"),
    "loss fails": Case("stem", dtype=LOW, max_norm=0.5, event="loss fails"),
    "all fails": Case("stem", policy="float16", max_norm=0.5, accumulate=2, event="all fails"),
    "max": Case("blocks", dtype=LOW, max_norm=0.5, event="max"),
}
ON_GPUS_ALONE = ("max",)
# On GPUs, where Inductor compiles: each kind of model and of call once. Compilers that fail are also shown on a CPU.
ON_GPUS = (
    *("blocks", "grouped", "float16 weights", "windows", "scan", "tied", "checkpoints", "break", "verify"),
    *("backward fails", "max"),
)


# --------------------------------------------------------------------------------------------------------------- models


class Numbered(nn.Module):
    """A layer that computes with its number, so that it is compiled by itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x)) / self.number


class Stem(nn.Module):
    """Two layers, with a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return F.dropout(self.second(F.gelu(self.first(x))), 0.1) * (1 + self.seen / 64).to(x.dtype)


class Net(nn.Module):
    """A stem that only the whole model's `fully_shard` splits, blocks, and a head."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.stem, self.blocks = Stem(), nn.ModuleList(Block(16, 2) for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 5))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        out: Tensor = self.head(x)
        return out


class Breaking(Block):
    """A block with a line that ends a graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.norm1(x))
        torch._dynamo.graph_break()  # HERE break
        return super().forward(x)


def in_blocks() -> nn.Module:
    return nn.Sequential(*(Block(16, 2) for _ in range(2)), nn.LayerNorm(16), nn.Linear(16, 5))


MODELS: dict[str, Callable[[], Any]] = {
    "blocks": in_blocks,
    "grouped": in_blocks,
    "whole": in_blocks,
    "many": lambda: nn.Sequential(*(Numbered(i + 1) for i in range(10)), nn.Linear(16, 5)),
    "tied": Tied,
    "stem": Net,
    "checkpoints": lambda: Net(checkpoints=True),
    "break": lambda: nn.Sequential(Breaking(16, 2), nn.Linear(16, 5)),
}


def sharded(case: Case, device: torch.device, seed: int) -> nn.Module:
    """Return the model of a case, each block and the rest under fully_shard."""
    torch.manual_seed(seed)
    model = MODELS[case.model]().to(device)
    options = mesh_options(case, device)
    for part in list(model.modules()) if case.model != "whole" else ():
        if isinstance(part, (Block, Numbered)):
            fully_shard(part, **options)
    if case.model == "grouped":
        fully_shard([model[-2], model[-1]], **options)
    return fully_shard(model, **options)


# ------------------------------------------------------------------------------------------------------------- training


def loss_fn(model: nn.Module, x: Tensor, boost: Tensor) -> Tensor:
    """Draw random numbers before the model is called and behind it."""
    noise = 1 + torch.rand_like(boost) / 8
    out = model(x).float() * boost * noise
    loss: Tensor = F.dropout(out, 0.1).square().mean()
    return loss


class CompiledJob(Job):
    """One rank's model, batches and compiled step."""

    def __init__(self, case: Case, device: torch.device, graph: str) -> None:
        super().__init__(case, device, graph, model=sharded(case, device, seed=3))

    def _step(self, graph: str) -> Any:
        case = self.case
        return ampkit.graphed_step(
            loss_fn,
            self.model,
            self.optimizer,
            policy=None if case.policy is None else self.policy,
            scaler=self.scaler,
            max_norm=case.max_norm,
            accumulate=case.accumulate,
            after_step=self.after_step if case.average else None,
            verify=case.verify,
            graph=graph,
            compile="max" if case.event == "max" else "default",
            on_failure="parts" if graph == "off" or case.event.endswith("fails") else "raise",
        )

    def compilations(self) -> int:
        """Return how many graphs were compiled so far."""
        return int(self.step._window._step.compiler.graphs)

    def left_behind(self) -> list[str]:
        """Return the names of modules that have something of the step, outside of its calls."""
        return [
            name
            for name, module in self.model.named_modules()
            if "forward" in vars(module) or vars(module).get("_compiled_call_impl") is not None
        ]


def train(case: Case, device: torch.device, graph: str) -> tuple[CompiledJob, int]:
    """Train; return the job at its end, and how many graphs were compiled in the last calls, all of which were seen."""
    job, counted = CompiledJob(case, device, graph), 0
    for call in range(calls(case)):
        if call == calls(case) - 2:
            counted = job.compilations()
        if case.event == "evaluation" and call == CALLS // 2:
            job.evaluate(call)
        job(call)
    return job, job.compilations() - counted


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train with a graph and without, and return where the two differ, with the counts of the first."""
    start = time.monotonic()
    reference, _ = train(case, device, "off")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job, late = train(case, device, graph)
    report = job.step.report()
    row = {
        "differ": differences(reference, job),
        "norms": [out[2].tolist() for out in job.outputs if len(out) == 3],
        "messages": [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)],
        "compiled": list(report.compiled),
        "late": late,
        "left behind": job.left_behind(),
        **{name: getattr(report, name) for name in ("captures", "replays", "launches", "skipped", "compile_s")},
        "seconds": round(time.monotonic() - start, 1),
    }
    for one in (reference, job):
        one.step.close()
    return row


# ------------------------------------------------------------------------------------------------------------ compilers


def refuse(*_: Any) -> Any:
    raise NotImplementedError("no kernel for this GPU")


def of_a_layer(graph: Any) -> bool:
    return any(node.target is F.linear for node in graph.graph.nodes)


def compiler_of(case: Case, device: torch.device) -> Callable[[], Any]:
    """Return what gives ampkit the compiler of a case: one that fails on rank 1, or Inductor, or a quick one."""
    fails = case.event.removesuffix(" fails") if case.event.endswith(" fails") and dist.get_rank() == 1 else ""
    if not fails and device.type == "cuda":
        return INDUCTOR

    def compile(graph: Any, inputs: Any, config_patches: Any) -> Any:
        if fails == "all" or (fails and of_a_layer(graph) is (fails != "loss")):
            backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=refuse)
            return backend(graph, inputs) if fails == "backward" else refuse()
        return aot_eager(graph, inputs)

    return lambda: compile


def compare_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a row for each case by its name."""

    def row(name: str) -> dict[str, Any]:
        torch.use_deterministic_algorithms(True, warn_only=not CASES[name].verify)
        torch_compile.inductor = compiler_of(CASES[name], device)
        torch._dynamo.reset()
        return compare(CASES[name], device, "auto" if device.type == "cuda" else "emulate")

    names = args.cases or [name for name in CASES if device.type == "cuda" or name not in ON_GPUS_ALONE]
    try:
        return rows_of(names, row, hidden=["norms"])
    finally:
        KEPT.clear()


# ----------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--end", choices=ENDS, default="destroy")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=400)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        rows = launch(*argv, ranks=args.ranks, timeout=args.timeout, script=__file__)
        for rank, row in enumerate(rows):
            for name, result in row.items():
                print(f"rank {rank}, {name}: {json.dumps({k: v for k, v in result.items() if v and k != 'norms'})}")
        return 0
    run_rank(partial(compare_all, args), args.device, args.timeout, args.end)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
