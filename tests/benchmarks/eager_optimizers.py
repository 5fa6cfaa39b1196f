"""What a captured forward and backward saves if the optimizer has to step eagerly behind them.

    python tests/benchmarks/eager_optimizers.py                       on a GPU: bits and milliseconds
    python tests/benchmarks/eager_optimizers.py --device cpu --rounds 2    does it run

A transformer is trained in bfloat16 by torch alone, by ampkit without a graph, and by ampkit. The three take turns.
"""

import argparse
import importlib
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


class SignMomentum(torch.optim.Optimizer):
    """An optimizer as users write it: a loop, numbers on the host, new tensors."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state["momentum"] = state.get("momentum", 0.0) * 0.9 + param.grad * 0.1
                param.add_(state["momentum"].sign(), alpha=-group["lr"] / state["step"] ** 0.5)


def _class(module: str, name: str) -> Callable[..., torch.optim.Optimizer]:
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "torch Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-3),
    "torch Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
    "torch Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-3),
    "timm Lion": lambda model: _class("timm.optim", "Lion")(model.parameters(), lr=1e-4),
    "timm Lamb": lambda model: _class("timm.optim", "Lamb")(model.parameters(), lr=1e-3),
    "timm AdamP": lambda model: _class("timm.optim", "AdamP")(model.parameters(), lr=1e-3),
    "timm Adafactor": lambda model: _class("timm.optim", "Adafactor")(model.parameters(), lr=1e-3),
    "transformers Adafactor": lambda model: _class("transformers.optimization", "Adafactor")(
        model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False
    ),
    "written by hand": lambda model: SignMomentum(model.parameters(), lr=1e-4),
}


class Net(nn.Module):
    """A transformer encoder over tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Callable[[Tensor], object]:
    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_fn(model, tokens)
        loss.backward()
        optimizer.step()

    return step


def measured(step: Callable[[Tensor], object], batches: list[Tensor]) -> float:
    """Return the milliseconds of one call."""
    if batches[0].is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for tokens in batches:
        step(tokens)
    if batches[0].is_cuda:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / len(batches)


def compared(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return bits and times of one optimizer."""
    random = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 1000, (8, 65), generator=random).to(args.device) for _ in range(5)]
    steps: dict[str, Any] = {}
    models = {}
    for kind in ("torch", "eager", "parts"):
        torch.manual_seed(0)
        models[kind] = model = Net(args.width, args.layers).to(args.device)
        optimizer = OPTIMIZERS[name](model)
        if kind == "torch":
            steps[kind] = plain(model, optimizer, args.device)
        else:
            graph = "off" if kind == "eager" else "auto" if args.device == "cuda" else "emulate"
            steps[kind] = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", graph=graph)
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for round_ in range(args.rounds + 2):
        for kind, step in steps.items():
            ms = measured(step, batches)
            if round_ > 1:  # the first two are warm-ups, with the capture
                times[kind].append(ms)
    report = steps["parts"].report()
    bits = {
        kind: all(map(torch.equal, models[kind].parameters(), models["parts"].parameters()))
        for kind in ("torch", "eager")
    }
    steps["parts"].close()
    row = {"optimizer": name, "outcome": report.outcome, "replays": report.replays, "equal": bits}
    for kind, found in times.items():
        row[kind] = {"ms": statistics.median(found), "spread": max(found) - min(found)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--optimizers", nargs="*", default=[*OPTIMIZERS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    rows = []
    for name in args.optimizers:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                row = compared(name, args)
            except ImportError as error:
                print(f"{name:<24}{error}", flush=True)
                continue
        rows.append(row)
        times = "   ".join(
            f"{kind} {row[kind]['ms']:7.3f} ms (spread {row[kind]['spread']:.3f})"
            for kind in ("torch", "eager", "parts")
        )
        bits = ", ".join(f"{'equal' if same else 'DIFFERS'} to {kind}" for kind, same in row["equal"].items())
        print(f"{name:<24}{row['outcome']:<10}{bits}   {times}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
