"""What a step that cannot be captured costs beside a loop written with torch alone.

    python tests/benchmarks/eager_step.py                      layers of three sizes, float16, clipped
    python tests/benchmarks/eager_step.py --device cpu --rounds 3    does it run

Both loops read their loss on the host, so that the step stays eager. They take turns in one process.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampkit

SIZES = {"small": (256, 8, 64), "middle": (4096, 24, 2048), "large": (8192, 24, 4096)}  # width, layers, batch
CPU_SIZES = {"small": (64, 4, 8)}
CALLS = 20  # per round


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).float().square().mean()
    float(loss.detach())  # sync: what cannot be captured
    return loss


def layers(width: int, count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(count) for part in (nn.Linear(width, width), nn.ReLU())])


def plain(width: int, count: int, device: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], object]:
    model = layers(width, count).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def graphed(width: int, count: int, device: str, dtype: torch.dtype) -> Callable[[Tensor, Tensor], object]:
    model = layers(width, count).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    policy = str(dtype).removeprefix("torch.")
    graph = "auto" if device == "cuda" else "emulate"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ampkit.CaptureWarning)
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy=policy, max_norm=1.0, graph=graph)
        x = torch.randn(2, width, device=device)
        for _ in range(6):
            step(x, x)
    assert step.replays == 0, "the step is captured, so it shows nothing"
    return step


def measured(step: Callable[[Tensor, Tensor], object], x: Tensor, y: Tensor) -> float:
    """Return the milliseconds of one call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        step(x, y)
    if x.is_cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    rows: list[dict[str, Any]] = []
    for name, (width, count, batch) in (SIZES if args.device == "cuda" else CPU_SIZES).items():
        x, y = (torch.randn(batch, width, device=args.device) for _ in range(2))
        steps = {"torch": plain(width, count, args.device, dtype), "ampkit": graphed(width, count, args.device, dtype)}
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for round_ in range(args.rounds + 1):
            for kind, step in steps.items():
                ms = measured(step, x, y)
                if round_:  # the first is a warm-up
                    times[kind].append(ms)
        torchs, ours = (statistics.median(found) for found in times.values())
        spreads = [max(found) - min(found) for found in times.values()]
        rows.append({"size": name, "torch_ms": torchs, "ampkit_ms": ours, "spread_ms": spreads})
        print(
            f"{name:<7} torch {torchs:8.3f} ms (spread {spreads[0]:.3f})   ampkit, eager {ours:8.3f} ms "
            f"(spread {spreads[1]:.3f})   {1000 * (ours - torchs):+7.0f} us, {ours / torchs - 1:+.1%}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
