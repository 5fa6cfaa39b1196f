"""What `nonfinite=` costs a captured step.

    python tests/benchmarks/nonfinite_cost.py                             on a GPU: milliseconds per step, and bits
    python tests/benchmarks/nonfinite_cost.py --device cpu --rounds 2     does it run

Each model is trained in bfloat16 without a guard, and with each kind of guard. The steps take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from eager_optimizers import Net
from torch import Tensor, nn

import ampkit

GUARDS = (None, "skip", "stop")
STEPS = 20  # per round, between two waits for the device


def mlp(width: int) -> nn.Module:
    layers = [layer for _ in range(16) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


# Many small tensors; a few large ones; a transformer of 25 million parameters.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP of 256": (lambda: mlp(256), lambda: torch.randn(64, 256)),
    "MLP of 2048": (lambda: mlp(2048), lambda: torch.randn(512, 2048)),
    "transformer": (lambda: Net(512, 8), lambda: torch.randint(1000, (16, 256))),
}


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def measured(name: str, device: str, rounds: int, max_norm: float | None) -> dict[str, Any]:
    """Return medians of milliseconds per step by guard, and whether all have left the same weights."""
    make, make_batch = MODELS[name]
    batch, steps, models = make_batch().to(device), {}, []
    for guard in GUARDS:
        torch.manual_seed(0)
        model = make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        options: dict[str, Any] = {"graph": "auto" if device == "cuda" else "emulate", "max_norm": max_norm}
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", nonfinite=guard, **options)
        for _ in range(6):
            step(batch)
        steps[str(guard)] = step
        models.append(model)
    times: dict[str, list[float]] = {guard: [] for guard in steps}
    for _ in range(rounds):
        for guard, step in steps.items():
            torch.accelerator.synchronize() if device == "cuda" else None
            start = time.perf_counter()
            for _ in range(STEPS):
                step(batch)
            torch.accelerator.synchronize() if device == "cuda" else None
            times[guard].append((time.perf_counter() - start) / STEPS * 1e3)
    weights = [[param.detach() for param in model.parameters()] for model in models]
    same = all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))
    return {"same bits": same, **{guard: round(statistics.median(found), 4) for guard, found in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in args.models:
        for max_norm in (None, 1.0):
            row = measured(name, args.device, args.rounds, max_norm)
            print(json.dumps({"model": name, "max_norm": max_norm, **row}), flush=True)


if __name__ == "__main__":
    main()
