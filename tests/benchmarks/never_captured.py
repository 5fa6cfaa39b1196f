"""What a step costs in which something is new in each call, and what the calls before a capture cost.

    PYTHONPATH=. python tests/benchmarks/never_captured.py                  on a GPU
    PYTHONPATH=. python tests/benchmarks/never_captured.py --device cpu     with emulated graphs

One model (20 linear layers of 256, LayerNorm, GELU), 64 samples, fused AdamW. What is new: an argument, the weight
decay, or the batch size. Its calls and those of the same step with graph="off" take turns:
the median of the calls from 40 on beside that one's, and how many of its calls the first 40 have taken more than 40.

Then the calls before a capture, of steps that consist of many small operations, as multiples of an eager call.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

NEW = ("nothing", "an argument", "weight decay", "the batch size")
CALLS, SETTLED = 160, 40


def layers(device: str) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(20) for part in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(256, 4)).to(device)


def timed(call: Callable[[], object], device: str) -> float:
    """Return milliseconds of a call, waited for."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def trained(new: str, graphs: list[str], device: str) -> list[list[float]]:
    """Return the milliseconds of each call, for each way to use graphs. The ways take turns."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
        return F.cross_entropy(model(x), y)

    models = [layers(device) for _ in graphs]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models]
    made = zip(models, optimizers, graphs, strict=True)
    steps = [ampkit.graphed_step(loss_fn, model, optimizer, graph=graph) for model, optimizer, graph in made]
    found: list[list[float]] = [[] for _ in graphs]
    for i in range(CALLS):
        size = 64 + (i if new == "the batch size" else 0)
        x, y = torch.randn(size, 256, device=device), torch.randint(4, (size,), device=device)
        number = i if new == "an argument" else 0
        for step, optimizer, times in zip(steps, optimizers, found, strict=True):
            if new == "weight decay":
                optimizer.param_groups[0]["weight_decay"] = 0.04 + i * 1e-4
            times.append(timed(partial(step, x, y, number), device))
    for step in steps:
        step.close()
    return found


def before_capture(operations: int, graph: str, device: str) -> tuple[list[float], float]:
    """Return the milliseconds of preflight, rehearsal and capture, and those of an eager call."""
    model = nn.Linear(16, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(8, 16, device=device)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        for _ in range(operations // 2):
            hidden = hidden * 1.0001 + 0.0001
        return hidden.square().mean()

    eager = ampkit.graphed_step(loss_fn, model, optimizer, graph="off")
    off = statistics.median([timed(lambda: eager(x), device) for _ in range(9)])
    step = ampkit.graphed_step(loss_fn, model, optimizer, graph=graph)
    calls = [timed(lambda: step(x), device) for _ in range(4)]
    step.close()
    return [calls[0], calls[2], calls[3]], off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new", nargs="+", choices=NEW, default=NEW)
    parser.add_argument("--operations", nargs="+", type=int, default=[100, 1000])
    args = parser.parse_args()
    warnings.simplefilter("ignore", ampkit.CaptureWarning)
    graph = "auto" if args.device == "cuda" else "emulate"
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__)
    trained("nothing", ["off"], args.device)
    before_capture(10, graph, args.device)  # what a process does once
    print(f"{'new in each call':16s} {'eager, ms':>9s} {'from 40 on':>11s} {'more before':>12s}")
    for new in args.new:
        off, found = trained(new, ["off", graph], args.device)
        ms = statistics.median(off[SETTLED:])
        more = sum(found[:SETTLED]) / ms - SETTLED
        print(f"{new:16s} {ms:9.2f} {statistics.median(found[SETTLED:]) / ms:10.2f}x {more:12.0f}", flush=True)
    for operations in args.operations:
        calls, ms = before_capture(operations, graph, args.device)
        words = ", ".join(f"{name} {call / ms:.0f}" for name, call in zip(_NAMES, calls, strict=True))
        print(f"{operations} operations, {ms:.2f} ms: {words} eager calls", flush=True)


_NAMES = ("preflight", "rehearsal", "capture")

if __name__ == "__main__":
    main()
