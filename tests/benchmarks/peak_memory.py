"""Peak memory of a training loop with torch's AMP and of `graphed_step`, each in a process of its own.

    python tests/benchmarks/peak_memory.py                      ResNet-50, ViT-B/16 and GPT-2; eager, graphed, and
                                                                graphed without segments that grow
    python tests/benchmarks/peak_memory.py --models gpt2-like --ways amp graphed expandable no-split no-working

MiB. "reserved" is what the allocator holds of the device at the peak of all steps, warm-up and capture included;
"later" is what it holds behind them; "holes" are free parts of segments then that belong to no pool of a graph and
cannot be given back, since another part of the segment is in use. Ways:

    amp         torch.autocast, clip_grad_norm_ and fused optimizer, eager
    graphed     graphed_step
    plain       graphed_step without segments that grow, neither in the capture nor in eager calls before it
    expandable  PYTORCH_ALLOC_CONF=expandable_segments:True for the whole process
    no-split    the graph's pool is a torch.cuda.MemPool(no_split=True)
    no-working  without working weights
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

MODELS = {"resnet50": ("float16", 32), "vit_b_16": ("bfloat16", 32), "gpt2-like": ("bfloat16", 8)}
WAYS = ("amp", "graphed", "plain", "expandable", "no-split", "no-working")
STEPS = 8
MIB = 2**20


def measure(model: str, way: str, batch: int, policy: str) -> dict[str, float]:
    """Train for some steps in this process; return MiB by name."""
    import torch

    import ampkit
    from ampkit._commands.bench.cases import CASES

    warnings.filterwarnings("ignore", category=UserWarning)
    switch(way)
    case = CASES[model](batch, seed=0, count=2)
    net = case.model.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    batches = [tuple(part.cuda() for part in batch) for batch in case.batches]
    step: Any = None
    if way == "amp":
        dtype = getattr(torch, policy)
        scaler = torch.amp.GradScaler("cuda", enabled=policy == "float16")

        def train(*batch: Any) -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = case.loss_fn(net, *batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    else:
        train = step = ampkit.graphed_step(case.loss_fn, net, optimizer, policy=policy, max_norm=1.0)
    static = torch.cuda.memory_allocated()
    for i in range(STEPS):
        train(*batches[i % 2])
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    report = None if step is None else step.report()
    assert report is None or report.captures == 1, report
    return {
        "before": static / MIB,
        "allocated": stats["allocated_bytes.all.peak"] / MIB,
        "reserved": stats["reserved_bytes.all.peak"] / MIB,
        "later": stats["reserved_bytes.all.current"] / MIB,
        "holes": holes(torch.cuda.memory_snapshot(include_traces=False)) / MIB,
        "graph": 0.0 if report is None else report.bytes / MIB,
    }


def switch(way: str) -> None:
    """Change ampkit as this way says."""
    import torch

    from ampkit._capture.graph import pool
    from ampkit._capture.graph.graph import Pool
    from ampkit._step.working_weights import WorkingWeights

    if way == "plain":
        pool.allocator_settings = lambda: ("", True)  # in this process only: as if the user had chosen segments
    elif way == "no-working":
        WorkingWeights.in_place = lambda self, kept=None: nullcontext()  # type: ignore[method-assign, assignment]
    elif way == "no-split":
        enter = Pool.enter

        def in_whole_segments(self: Pool, graph: Any) -> Any:
            enter(self, graph)
            self._own = torch.cuda.MemPool(no_split=True)  # type: ignore[attr-defined]  # kept alive here
            self._handle = self._own.id  # type: ignore[attr-defined]
            return self._handle

        Pool.enter = in_whole_segments  # type: ignore[method-assign]


def holes(segments: list[dict[str, Any]]) -> int:
    """Return the free bytes in segments that are in use, those of graphs aside."""
    own = [segment for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own if segment["allocated_size"])


def in_process(model: str, way: str, batch: int | None) -> str:
    """Measure in a process of its own; return a line of the table."""
    policy, usual = MODELS[model]
    environment = {**os.environ}
    if way == "expandable":
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, "--one", model, way, str(batch or usual), policy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    title = f"{model:10} {way:11}"
    if done.returncode:
        return f"{title} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return title + "".join(f"{name:>11} {value:7.0f}" for name, value in found.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--at-once", type=int, default=3, help="processes; they count their memory each by itself")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        model, way, batch, policy = args.one
        print(json.dumps(measure(model, way, int(batch), policy)))
        return
    jobs = [(model, way) for model in args.models for way in args.ways]
    with ThreadPoolExecutor(args.at_once) as pool:
        for line in pool.map(lambda job: in_process(*job, args.batch), jobs):
            print(line, flush=True)


if __name__ == "__main__":
    main()
