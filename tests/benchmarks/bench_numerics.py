"""What ampkit.debug.numerics costs a captured step, in the mean over all steps, and that nothing waits in between.

    python tests/benchmarks/bench_numerics.py                 ResNet-18 (CIFAR stem), batch 64, float16, every=100
    python tests/benchmarks/bench_numerics.py --device cpu --batch 4 --every 5 --rounds 2    does it run

Two steps of equal models take turns: one without numerics and one with. A round is `--every` steps, one of them
observed, timed between two waits for the device. Within a round, on a GPU, a wait of the host is an error.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_lightning import resnet18, sgd
from torch.nn import functional as F

import ampkit

CAPTURED = 5  # observed steps until they are replays: three are eager, one is captured, one to spare


def make(device: torch.device, batch: int, every: int | None) -> tuple[Callable[[], object], ampkit.GraphedStep]:
    """Return a function that does one step on a batch of its own, and the step."""
    torch.manual_seed(0)
    model = resnet18().to(device)
    images = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=device)
    step = ampkit.graphed_step(
        lambda net, x, y: F.cross_entropy(net(x), y),
        model,
        sgd(model.parameters(), fused=True),
        policy="float16",
        max_norm=1.0,
        numerics=None if every is None else ampkit.debug.numerics(model, every=every),
        graph="auto" if device.type == "cuda" else "emulate",
    )
    return lambda: step(images, labels), step


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Return milliseconds per step."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True
    plain, _ = make(device, args.batch, None)
    watched, step = make(device, args.batch, args.every)
    for _ in range(CAPTURED * args.every):
        watched()
    for _ in range(10):
        plain()
    times: dict[str, list[float]] = {"plain": [], "watched": []}
    for _ in range(args.rounds):
        times["plain"].append(timed(plain, args.every, device))
        times["watched"].append(timed(watched, args.every, device))
    (ms, spread), (watched_ms, watched_spread) = (
        (statistics.median(found), max(found) - min(found)) for found in times.values()
    )
    report = step.report()
    row = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "every": args.every,
        "ms": ms,
        "ms_with_numerics": watched_ms,
        "slower": watched_ms / ms - 1,
        "ms_more_per_observed_step": (watched_ms - ms) * args.every,
        "graphs": report.graphs,
        "eager": report.eager,
    }
    print(f"{row['device']}, torch {row['torch']}, batch {args.batch}, every {args.every} steps, {args.rounds} rounds")
    print(f"without numerics {ms:.3f} ms (spread {spread:.3f}), with {watched_ms:.3f} ms (spread {watched_spread:.3f})")
    print(f"in the mean {row['slower']:+.1%}; an observed step takes {row['ms_more_per_observed_step']:.2f} ms more")
    print(report)
    if args.json:
        args.json.write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
