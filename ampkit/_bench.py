"""Honest timing: the same training step written three ways, measured in one process on the same batches."""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchScaler
from torch.nn import functional as F

from ._errors import AmpkitError
from ._graph import CudaGraph, Pool
from ._policy import Policy
from ._prefetch import prefetch
from ._scaler import GradScaler
from ._step import graphed_step

MAX_NORM = 1.0
# The first step must not overflow: torch's own scaler would go on from uninitialised momentum (see seed_momentum).
INIT_SCALE = 1024.0
WARM_UP_STEPS = 20  # capture after 3, the rest lets cudnn.benchmark and the clocks settle
Steps = Callable[[int], Tensor]  # does that many training steps and returns the last loss


class NoDeviceError(AmpkitError):
    """There is nothing to measure here."""


@dataclass(frozen=True)
class Timing:
    """One variant. Times in milliseconds per step: median, fastest and slowest of the repeats."""

    variant: str
    ms: float
    fastest: float
    slowest: float
    loss: float

    def row(self, base: float) -> str:
        """Return a line of the table; `base` is the time that ratios refer to."""
        spread = f"[{self.fastest:.3f}, {self.slowest:.3f}]"
        return f"{self.variant:<22} {self.ms:8.3f}  {spread:<18} {base / self.ms:6.2f}x  {self.loss:9.4f}"


class HostBatches:
    """Four pinned batches of random images and labels, cycled: a data loader that costs nothing."""

    def __init__(self, case: "Case", batch: int) -> None:
        made = torch.Generator().manual_seed(0)
        self._batches = []
        for _ in range(4):
            images = torch.randn(batch, *case.image, generator=made)
            if images.dim() == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.randint(case.classes, (batch,), generator=made)
            self._batches.append((images.pin_memory(), labels.pin_memory()))

    def take(self, n: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `n` batches."""
        return (self._batches[i % len(self._batches)] for i in range(n))


@dataclass(frozen=True)
class Case:
    """What is trained: model, image shape, classes."""

    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    classes: int


def _resnet(name: str, classes: int, small: bool) -> nn.Module:
    try:
        import torchvision
    except ImportError as error:
        raise ImportError("The ResNets of this benchmark need torchvision: pip install torchvision") from error
    model: Any = getattr(torchvision.models, name)(num_classes=classes)
    if small:  # the CIFAR stem of He et al. 2016, section 4.2: no stride and no pooling before the first block
        model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    hidden = [layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(512, 10))


CASES = {
    "mlp": Case(_mlp, (512,), 10),
    "resnet18-cifar": Case(lambda: _resnet("resnet18", 10, True), (3, 32, 32), 10),
    "resnet50": Case(lambda: _resnet("resnet50", 1000, False), (3, 224, 224), 1000),
}


def run(
    models: list[str], batch_sizes: list[int], policy: Policy, repeats: int, json_path: Path | None, plot: Path | None
) -> None:
    """Print a table for every model and batch size: torch AMP, bare capture, graphed_step.

    All three do dynamic loss scaling (if `policy` needs it) and SGD with momentum on equal weights and batches. torch
    AMP and graphed_step also clip to norm 1 and follow a cosine schedule, with their input coming from pinned host
    memory; the bare capture does none of the three, so it is what the kernels alone cost.

    Raises:
        NoDeviceError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise NoDeviceError("there is no CUDA device to measure.")
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {policy}, median of {repeats} repeats")
    results = []
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for name, batch in itertools.product(models, batch_sizes):
            print(f"\n{name}, batch {batch}\n{'variant':<22} {'ms/step':>8}  {'spread':<18} {'vs AMP':>7}  {'loss':>9}")
            timings: list[Timing] = []
            for variant, make in VARIANTS.items():
                _progress(f"{variant} ...")
                timings.append(_measure(variant, make(CASES[name], batch, policy, device), repeats))
                _progress("")
                print(timings[-1].row(timings[0].ms))
            results.append({"model": name, "batch": batch, "timings": [asdict(timing) for timing in timings]})
    setting = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "policy": str(policy)}
    figures = {**setting, "date": time.strftime("%Y-%m-%d"), "repeats": repeats, "results": results}
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
    if plot is not None:
        draw(figures, plot)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw one panel of bars per model and batch size: milliseconds per step, whiskers from fastest to slowest repeat.

    Args:
        figures: what `--json` writes.
        path: the image file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'ampkit[plots]'") from error
    results = figures["results"]
    figure = Figure(figsize=(3.6 * len(results), 3.8), dpi=120, layout="constrained")
    figure.suptitle(
        f"Time of a training step, {figures['gpu']}, torch {figures['torch']}, {figures['date']}", fontsize=11
    )
    for axes, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        timings = result["timings"]
        names, times = [timing["variant"] for timing in timings], [timing["ms"] for timing in timings]
        whiskers = [[t["ms"] - t["fastest"] for t in timings], [t["slowest"] - t["ms"] for t in timings]]
        axes.bar(names, times, yerr=whiskers, capsize=4, color=["tab:gray", "tab:blue", "tab:green"])
        for i, ms in enumerate(times):
            axes.text(
                i, ms + whiskers[1][i], f"{ms:.2f} ms\n{times[0] / ms:.1f}x", ha="center", va="bottom", fontsize=9
            )
        axes.set_ylim(0, 1.25 * max(t["slowest"] for t in timings))
        axes.set_title(f"{result['model']}, batch {result['batch']}", fontsize=10)
        axes.set_ylabel("ms per step, median")
        axes.tick_params(axis="x", labelsize=8)
    figure.savefig(path)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _measure(variant: str, steps: Steps, repeats: int) -> Timing:
    steps(WARM_UP_STEPS)
    n = max(10, min(300, int(0.3 / _seconds(steps, 10) * 10)))  # about 0.3 s a repeat
    times = sorted(_seconds(steps, n) / n * 1e3 for _ in range(repeats))
    return Timing(variant, statistics.median(times), times[0], times[-1], float(steps(1)))


def _seconds(steps: Steps, n: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    steps(n)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _parts(case: Case, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.build().to(device)
    # fused for all of them: with torch's default a bare capture would have to read the device.
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)


def _torch_amp(case: Case, batch: int, policy: Policy, device: torch.device) -> Steps:
    """The loop of torch's AMP examples, with torch's default (foreach) optimizer."""
    torch.manual_seed(0)
    model = case.build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = TorchScaler("cuda", INIT_SCALE, enabled=policy.needs_scaling)
    scheduler = _schedule(optimizer)
    batches = HostBatches(case, batch)

    def steps(n: int) -> Tensor:
        for images, labels in prefetch(batches.take(n), device):
            optimizer.zero_grad()
            with policy.autocast("cuda"):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        return loss.detach()

    return steps


def _bare_capture(case: Case, batch: int, policy: Policy, device: torch.device) -> Steps:
    """Forward, backward, scaled fused step, captured by hand; the same batch again and again."""
    model, optimizer = _parts(case, device)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)
    scaler = TorchScaler("cuda", INIT_SCALE, enabled=policy.needs_scaling)
    scaler.scale(torch.zeros((), device=device))  # makes the scale outside the capture
    images, labels = (part.to(device) for part in next(HostBatches(case, batch).take(1)))

    def body() -> Tensor:
        optimizer.zero_grad()
        with policy.autocast("cuda"):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    optimizer.zero_grad()
    graph = CudaGraph(stream, Pool())
    graph.capture(body)

    def steps(n: int) -> Tensor:
        for _ in range(n):
            loss: Tensor = graph.replay()
        return loss

    return steps


def _graphed(case: Case, batch: int, policy: Policy, device: torch.device) -> Steps:
    """`ampkit.graphed_step` with everything on."""
    model, optimizer = _parts(case, device)
    step = graphed_step(
        lambda model, images, labels: F.cross_entropy(model(images), labels),
        model,
        optimizer,
        policy=policy,
        scaler=GradScaler("cuda", INIT_SCALE, enabled=policy.needs_scaling),
        max_norm=MAX_NORM,
        scheduler=_schedule(optimizer),
        on_failure="raise",
    )
    batches = HostBatches(case, batch)

    def steps(n: int) -> Tensor:
        for images, labels in prefetch(batches.take(n), device):
            loss = step(images, labels).loss
        return loss

    return steps


VARIANTS: dict[str, Callable[[Case, int, Policy, torch.device], Steps]] = {
    "torch AMP, eager": _torch_amp,
    "bare capture": _bare_capture,
    "graphed_step": _graphed,
}
