"""What steps in parts reserve on a GPU, beside eager ones: each row and way in a process of its own.

    PYTHONPATH=. python tests/benchmarks/parts_memory.py                    on a GPU, all rows
    PYTHONPATH=. python tests/benchmarks/parts_memory.py --rows vit dit --together 4

Models of public sizes with random weights, and a line in the middle that reads a number (`.item()`), so that modules
are captured by themselves. bfloat16, fused AdamW. MiB that torch's allocator holds of the device: behind 30 calls, and
at the peak of the calls before (in parts, the captures are among these). Milliseconds per step, of 20 more; processes
that run together disturb these.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

WAYS = ("torch", "eager", "parts")
CALLS, TIMED = 30, 20
MIB = 2**20


class Reads(nn.Module):
    """Modules one after the other, with a number that is read behind each."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for i, part in enumerate(self.parts):
            x = part(x)
            if i + 1 < len(self.parts):
                x = x / max(x.detach().float().abs().mean().item(), 1e-3)
        return x


def conv(channels: int, out: int) -> nn.Module:
    layers = (nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(out), nn.GELU())
    return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.GELU())


def layer(width: int, dropout: float = 0.0) -> nn.Module:
    heads = width // 64
    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)


def layers(width: int, number: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(*(layer(width, dropout) for _ in range(number)))


def resnet(name: str) -> nn.Module:
    parts = list(getattr(torchvision.models, name)(num_classes=10).children())
    return Reads(nn.Sequential(*parts[:6]), nn.Sequential(*parts[6:-1], nn.Flatten(), parts[-1]))


class Mean(nn.Module):
    """The mean over the positions, and a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean(1))
        return out


def speech() -> nn.Module:
    into = (nn.Conv1d(80, 512, 3, 2, 1), nn.GELU(), nn.Conv1d(512, 512, 3, 2, 1), nn.GELU())
    return Reads(nn.Sequential(*into, Transposed(), layers(512, 3, 0.1)), nn.Sequential(layers(512, 3, 0.1), Mean(512)))


class Transposed(nn.Module):
    """Channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def mlp() -> nn.Module:
    half = [part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.GELU())]
    again = [part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.GELU())]
    return Reads(nn.Sequential(*half), nn.Sequential(*again, nn.Linear(2048, 10)))


ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cifar": (lambda: Reads(conv(3, 64), nn.Sequential(conv(64, 256), conv(256, 256), nn.AdaptiveMaxPool2d(1),
              nn.Flatten(), nn.Linear(256, 10))), (1024, 3, 32, 32)),
    "resnet18": (lambda: resnet("resnet18"), (128, 3, 128, 128)),
    "resnet50": (lambda: resnet("resnet50"), (64, 3, 128, 128)),
    "vit": (lambda: Reads(layers(768, 4, 0.1), nn.Sequential(layers(768, 4, 0.1), Mean(768))), (32, 196, 768)),
    "dit": (lambda: Reads(*(layer(384) for _ in range(12)), Mean(384)), (64, 64, 384)),
    "gpt2": (lambda: Reads(layers(768, 6, 0.1), nn.Sequential(layers(768, 6, 0.1), Mean(768))), (8, 512, 768)),
    "speech": (speech, (16, 80, 1200)),
    "mlp": (mlp, (4096, 2048)),
}  # fmt: skip


def measure(row: str, way: str) -> dict[str, Any]:
    """Train in this process; return MiB, milliseconds and the outcome."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    make, shape = ROWS[row]
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(shape, device="cuda"), torch.randint(10, shape[:1], device="cuda")

    def plain(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    step: Any = plain
    if way != "torch":
        graph = "off" if way == "eager" else "auto"
        loss_fn: Any = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="bfloat16", graph=graph)
    for _ in range(CALLS):
        step(x, y)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED):
        step(x, y)
    torch.cuda.synchronize()
    return {
        "MiB": torch.cuda.memory_reserved() / MIB,
        "peak": torch.cuda.max_memory_reserved() / MIB,
        "ms": 1e3 * (time.perf_counter() - start) / TIMED,
        "outcome": step.report().outcome if way == "parts" else "",
    }


def in_process(row: str, way: str) -> dict[str, Any]:
    """Return what `measure` does in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, "--one", row, way]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if out.returncode:
        raise RuntimeError(f"{row} {way}: {out.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(out.stdout.splitlines()[-1])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--together", type=int, default=1, help="processes at a time")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "WAY"), help="measure here, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)

    with ThreadPoolExecutor(args.together) as pool:
        cases = [(row, way) for row in args.rows for way in WAYS]
        results = pool.map(in_process, *zip(*cases, strict=True))
        for row in args.rows:
            torch_way, eager, parts = (next(results) for _ in WAYS)
            print(
                f"{row:10s} torch {torch_way['MiB']:6.0f} MiB, eager {eager['MiB']:6.0f}, {parts['outcome']} "
                f"{parts['MiB']:6.0f} ({parts['MiB'] / eager['MiB']:.2f}x; at the peak {parts['peak']:.0f}); "
                f"ms {torch_way['ms']:.1f}, {eager['ms']:.1f}, {parts['ms']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
