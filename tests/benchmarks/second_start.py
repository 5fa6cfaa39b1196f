"""Seconds from the first call of a compiled GPT-2 to its first replay, in a first process and in a second one.

    PYTHONPATH=. python tests/benchmarks/second_start.py                        GPT-2 124M on a GPU
    PYTHONPATH=. python tests/benchmarks/second_start.py --device cpu --tiny    does it run

The first process begins with empty caches of Inductor and of its kernels, the second one finds what the first has left
on the disk. The ways: `graphed_step(compile="default")`, and torch.compile(mode="reduce-overhead") of model and loss
beside fused AdamW, whose start is over when a call takes no longer than twice the fastest. Of each, what torch says of
its own phases: dynamo with all it calls, AOTAutograd with all it calls, Inductor with all it calls.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import ampkit
from tests.benchmarks.models import CASES, MAX_NORM, TINY_CASES, loss_fn

WAYS = ("ampkit", "reduce-overhead")
MOST_CALLS = 40
# The names by which torch._dynamo.utils.compilation_time_metrics keeps the seconds of each phase; each has the next.
PHASES = {
    "dynamo": "_compile.compile_inner",
    "AOTAutograd": "create_aot_dispatcher_function",
    "Inductor": "compile_fx_inner",
}


def start(way: str, device: str, tiny: bool) -> dict[str, Any]:
    """Train in this process until the start is over; return seconds and counters."""
    warnings.simplefilter("ignore")
    case = (TINY_CASES if tiny else CASES)["gpt2"]
    model, batch = case.model(device), case.batch(device, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    begun = time.perf_counter()
    if way == "ampkit":
        graph = "auto" if device == "cuda" else "emulate"
        options: dict[str, Any] = {"policy": "bfloat16", "max_norm": MAX_NORM, "compile": "default", "graph": graph}
        step: Any = ampkit.graphed_step(loss_fn, model, optimizer, **options)
    else:
        step = by_hand(model, optimizer, device)
    calls: list[float] = []
    over = begun
    for _ in range(MOST_CALLS):
        before = time.perf_counter()
        step(*batch)
        if device == "cuda":
            torch.cuda.synchronize()
        calls.append(time.perf_counter() - before)
        print(f"  {way}: call {len(calls)} took {calls[-1]:.1f} s", file=sys.stderr, flush=True)
        if way == "ampkit" and step.report().replays:
            over = time.perf_counter()
            break
    if way != "ampkit":
        slow = max(i for i, seconds in enumerate(calls) if seconds > 2 * min(calls))
        over = begun + sum(calls[: slow + 1])
    from torch._dynamo.utils import compilation_time_metrics, counters

    phases = {phase: sum(compilation_time_metrics.get(name, [0.0])) for phase, name in PHASES.items()}
    found = {key: dict(counters[key]) for key in ("aot_autograd", "inductor")}
    return {"seconds": over - begun, "calls": calls, **phases, "counters": found}


def by_hand(model: Any, optimizer: Any, device: str) -> Callable[..., None]:
    """Return a step whose model and loss are compiled with CUDA graphs of Inductor's own."""
    mode = "reduce-overhead" if device == "cuda" else "default"

    def loss_of(*batch: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return loss_fn(model, *batch)

    compiled: Any = torch.compile(loss_of, mode=mode)

    def step(*batch: Any) -> None:
        optimizer.zero_grad()
        compiled(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--one", choices=WAYS, help="start here, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(start(args.one, args.device, args.tiny)))
        return
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__, flush=True)
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            command = [sys.executable, __file__, "--one", way, "--device", args.device, *["--tiny"] * args.tiny]
            for process in ("first", "second"):
                ran = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True)
                if ran.returncode:
                    break  # its error has been printed
                found = json.loads(ran.stdout.splitlines()[-1])
                phases = ", ".join(f"{phase} {found[phase]:.1f}" for phase in PHASES)
                slow = ", ".join(f"{i}: {seconds:.1f}" for i, seconds in enumerate(found["calls"]) if seconds > 0.5)
                print(f"{way:16} {process:7} {found['seconds']:6.1f} s, of it {phases}; slow calls {slow}", flush=True)
                print(f"{'':24} {found['counters']}", flush=True)


if __name__ == "__main__":
    main()
