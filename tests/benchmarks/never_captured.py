"""What a step costs in which something is new in each call, and what the calls before a capture cost.

    PYTHONPATH=. python tests/benchmarks/never_captured.py                  on a GPU
    PYTHONPATH=. python tests/benchmarks/never_captured.py --device cpu     with emulated graphs

One model (20 linear layers of 256, LayerNorm, GELU), 64 samples, fused AdamW. What is new: an argument, the weight
decay, the batch size, or a buffer that the step rebinds. Then DINO (a small vision transformer and its teacher, a
center, another weight decay in each call) and a detector (torchvision's RetinaNet with resnet18, images of another
size in each call). The calls of the step and those of the same step with graph="off" take turns: the median of the
calls from 40 on beside that one's, and how many of its calls the first 40 have taken more than its own 40 beside them
(of these the very first one, in which CUDA loads its kernels, counts as the median).

Then the calls before a capture, of steps that consist of many small operations, as multiples of an eager call.
"""

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

SMALL = ("nothing", "an argument", "weight decay", "the batch size", "a buffer")
NEW = (*SMALL, "DINO", "a detector")
CALLS, SETTLED = {**dict.fromkeys(NEW, 160), "a detector": 80}, 40
_MOMENTUM = 0.9


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


def classify(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
    return F.cross_entropy(model(x), y)


def rebind(model: Any, x: Tensor, y: Tensor, number: int) -> Tensor:
    model.mean = model.mean * _MOMENTUM + x.mean() * (1 - _MOMENTUM)
    return F.cross_entropy(model(x), y) + model.mean


class Dino(nn.Module):
    """A student, its teacher, and the center of the teacher's outputs (Caron et al., 2021), for vectors as patches."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(192, 3, 768, dropout=0.0, activation="gelu", batch_first=True)
        parts = [nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Flatten(), nn.Linear(16 * 192, 256)]
        self.student = nn.Sequential(*parts)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(256))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = self.teacher(x)
            target = ((out - self.center) / 0.04).softmax(-1)
            self.center = self.center * _MOMENTUM + out.mean(0) * (1 - _MOMENTUM)
        return -(target * (self.student(x.flip(1)) / 0.1).log_softmax(-1)).sum(-1).mean()


def follow(model: Any, x: Tensor, y: Tensor, number: int) -> Tensor:
    loss: Tensor = model(x)
    with torch.no_grad():
        torch._foreach_lerp_([*model.teacher.parameters()], [*model.student.parameters()], 1 - 0.996)
    return loss


def detect(model: nn.Module, x: Tensor, y: Tensor, number: int) -> Tensor:
    boxes = torch.stack([y.float(), y.float(), y.float() + 30, y.float() + 30], 1)
    targets = [{"boxes": boxes[i : i + 1], "labels": y[i : i + 1] + 1} for i in range(len(y))]
    return sum(model(list(x), targets).values(), torch.zeros((), device=x.device))


def made(new: str, device: str) -> tuple[nn.Module, Any]:
    """Return the model, and its loss function."""
    torch.manual_seed(0)
    if new == "DINO":
        return Dino().to(device), follow
    if new == "a detector":
        from zoo_models import small_retinanet

        return small_retinanet().to(device), detect
    model = layers(device)
    if new == "a buffer":
        model.register_buffer("mean", torch.zeros((), device=device))
    return model, rebind if new == "a buffer" else classify


def batch(new: str, i: int, device: str) -> tuple[Tensor, Tensor, int]:
    size = 64 + (i if new == "the batch size" else 0)
    shape: tuple[int, ...] = (size, 256)
    if new == "DINO":
        shape = (64, 16, 192)
    if new == "a detector":
        size, shape = 2, (2, 3, 96 + i, 128)
    y = torch.randint(4, (size,), device=device)
    return torch.randn(shape, device=device), y, i if new == "an argument" else 0


def trained(new: str, graphs: list[str], device: str) -> list[list[float]]:
    """Return the milliseconds of each call, for each way to use graphs. The ways take turns."""
    pairs = [made(new, device) for _ in graphs]
    models = [model for model, _ in pairs]
    loss_fn = pairs[0][1]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models]
    ways = zip(models, optimizers, graphs, strict=True)
    steps = [ampkit.graphed_step(loss_fn, model, optimizer, graph=graph) for model, optimizer, graph in ways]
    found: list[list[float]] = [[] for _ in graphs]
    for i in range(CALLS[new]):
        x, y, number = batch(new, i, device)
        for step, optimizer, times in zip(steps, optimizers, found, strict=True):
            if new in ("weight decay", "DINO"):
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
    parser.add_argument("--new", nargs="+", choices=NEW, default=SMALL)
    parser.add_argument("--operations", nargs="+", type=int, default=[100, 1000])
    args = parser.parse_args()
    warnings.simplefilter("ignore", ampkit.CaptureWarning)
    graph = "auto" if args.device == "cuda" else "emulate"
    print(torch.cuda.get_device_name() if args.device == "cuda" else "cpu", torch.__version__)
    trained("nothing", ["off"], args.device)
    before_capture(10, graph, args.device)  # what a process does once
    gc.collect()
    gc.freeze()  # so that no call waits for a collection of all that torch has made, which any loop does now and then
    print(f"{'new in each call':16s} {'eager, ms':>9s} {'from 40 on':>11s} {'more before':>12s}")
    for new in args.new:
        off, found = trained(new, ["off", graph], args.device)
        ms = statistics.median(off[SETTLED:])
        more = (sum(found[:SETTLED]) - sum(off[1:SETTLED])) / ms - 1
        print(f"{new:16s} {ms:9.2f} {statistics.median(found[SETTLED:]) / ms:10.2f}x {more:12.0f}", flush=True)
    for operations in args.operations:
        calls, ms = before_capture(operations, graph, args.device)
        words = ", ".join(f"{name} {call / ms:.0f}" for name, call in zip(_NAMES, calls, strict=True))
        print(f"{operations} operations, {ms:.2f} ms: {words} eager calls", flush=True)


_NAMES = ("preflight", "rehearsal", "capture")

if __name__ == "__main__":
    main()
