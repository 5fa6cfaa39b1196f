"""GPT-2 with Muon for its matrices and AdamW for the rest, each under a schedule: bits, and milliseconds.

    PYTHONPATH=. python tests/benchmarks/several_optimizers.py                        GPT-2 124M on a GPU
    PYTHONPATH=. python tests/benchmarks/several_optimizers.py --device cpu --tiny    does it run

Four micro-batches per optimizer step, bfloat16, the norm over all gradients clipped to 1. First the losses and weights
of `graphed_step` beside those with graph="off", bit by bit, under deterministic algorithms. Then milliseconds per
optimizer step, the median over repeats (least to most): torch's own loop, graph="off", graph="auto", and that with
compile="default"; of a micro-batch in the middle of its window, waited for; and the share of the update: what a step
takes beyond four of these.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import ampkit
from tests.benchmarks.models import CASES, MAX_NORM, TINY_CASES, Case, differing, loss_fn, repeatable

ACCUMULATE, CHECKED, REPEATS = 4, 10, 5
WAYS: dict[str, dict[str, Any]] = {
    "graph='off'": {"graph": "off"},
    "graphed_step": {},
    "compile='default'": {"compile": "default"},
}


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices within the blocks, and AdamW for all else."""
    matrices = [param for name, param in model.named_parameters() if param.dim() == 2 and ".h." in name]
    inside = set(matrices)
    rest = [param for param in model.parameters() if param not in inside]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4, fused=True)]


def schedules_of(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Return a linear rise and a cosine for each."""
    rise = [torch.optim.lr_scheduler.LinearLR(each, 0.1, total_iters=100) for each in optimizers]
    fall = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 1000) for each in optimizers]
    return [torch.optim.lr_scheduler.ChainedScheduler(list(pair)) for pair in zip(rise, fall, strict=True)]


def made(case: Case, device: str, options: dict[str, Any]) -> tuple[nn.Module, ampkit.GraphedStep]:
    """Return a model and its step."""
    model = case.model(device)
    optimizers = optimizers_of(model)
    step = ampkit.graphed_step(
        loss_fn,
        model,
        optimizers,
        scheduler=schedules_of(optimizers),
        policy="bfloat16",
        max_norm=MAX_NORM,
        accumulate=ACCUMULATE,
        **options,
    )
    return model, step


def trained(case: Case, device: str, graph: str) -> tuple[dict[str, Any], ampkit.Report]:
    """Return the losses and the weights behind some optimizer steps."""
    model, step = made(case, device, {"graph": graph})
    torch.manual_seed(5)
    losses = [step(*case.batch(device, seed)).loss for seed in range(ACCUMULATE * CHECKED)]
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    report = step.report()
    step.close()
    return {"losses": torch.stack(losses), **state}, report


def torchs(case: Case, device: str) -> Callable[[], object]:
    """Return one optimizer step of torch's own loop."""
    model = case.model(device)
    optimizers = optimizers_of(model)
    schedules, batch = schedules_of(optimizers), case.batch(device, 0)

    def step() -> None:
        for _ in range(ACCUMULATE):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = loss_fn(model, *batch) / ACCUMULATE
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return step


def ours(
    case: Case, device: str, options: dict[str, Any]
) -> tuple[Callable[[], object], Callable[[], float], Callable[[], ampkit.Report]]:
    """Return an optimizer step; what makes one and returns the milliseconds of its second micro-batch; the report."""
    _, step = made(case, device, options)
    batch = case.batch(device, 0)

    def whole() -> None:
        for _ in range(ACCUMULATE):
            step(*batch)

    def one() -> float:
        """Return the milliseconds of a micro-batch that does not end its window."""
        step(*batch)
        wait(device)
        start = time.perf_counter()
        step(*batch)
        wait(device)
        found = 1e3 * (time.perf_counter() - start)
        for _ in range(ACCUMULATE - 2):
            step(*batch)
        return found

    return whole, one, step.report


def wait(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str, steps: int) -> list[float]:
    """Return milliseconds per optimizer step, of each repeat."""
    for _ in range(3 * steps // 2):
        step()
    found = []
    for _ in range(REPEATS):
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        found.append(1e3 * (time.perf_counter() - start) / steps)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ways", nargs="+", choices=["torch", *WAYS], default=["torch", *WAYS])
    parser.add_argument("--unchecked", action="store_true", help="leave out the comparison of bits")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    case, device = (TINY_CASES if args.tiny else CASES)["gpt2"], args.device
    graph = "auto" if device == "cuda" else "emulate"
    print(torch.cuda.get_device_name() if device == "cuda" else "cpu", torch.__version__, flush=True)
    if not args.unchecked:
        with repeatable(strict=True):
            (expected, _), (found, report) = trained(case, device, "off"), trained(case, device, graph)
        print(f"{report.outcome}, {report.replays} replays, differing: {differing(found, expected)[:3]}", flush=True)
    steps = 12
    print(f"{'way':20s} {'ms per optimizer step':>28s} {'a micro-batch':>14s} {'the update':>11s}")
    if "torch" in args.ways:
        rows = timed(torchs(case, device), device, steps)
        print(f"{'torch':20s} {rows[REPEATS // 2]:9.2f} ({rows[0]:.2f} to {rows[-1]:.2f})", flush=True)
    for name, options in WAYS.items():
        if name not in args.ways:
            continue
        whole, one, report_of = ours(case, device, {"graph": graph, **options})
        rows = timed(whole, device, steps)
        middle, batch_ms = rows[REPEATS // 2], statistics.median(one() for _ in range(9))
        share = 1 - ACCUMULATE * batch_ms / middle
        print(
            f"{name:20s} {middle:9.2f} ({rows[0]:.2f} to {rows[-1]:.2f}) {batch_ms:14.2f} {100 * share:10.1f}%",
            flush=True,
        )
        if name != "graph='off'" and report_of().outcome != "whole":
            print(report_of())


if __name__ == "__main__":
    main()
