"""Images per second of a Lightning Trainer without ampkit, with it, and of the loop below it; and where the rest goes.

    python tests/benchmarks/bench_lightning.py                 ResNet-18 (CIFAR stem), batch 64, 16-mixed, clipped
    python tests/benchmarks/bench_lightning.py --device cpu --steps 5 --batch 8 --repeats 2    does it run

All three train on one batch that is on the device already, in one process, one after another: what is timed is the
step and the loop around it. Times are medians over blocks of steps, each between two waits for the device.
"""

import argparse
import cProfile
import json
import logging
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchvision
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit
from ampkit.lightning import AmpkitCallback

WARM_UP = 20
PROFILED = 50


def resnet18() -> nn.Module:
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(memory_format=torch.channels_last)


def sgd(params: Any, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)


class Module(pl.LightningModule):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.net, self.fused = resnet18(), fused

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters(), self.fused)


class Same:
    """The same batch so many times."""

    def __init__(self, batch: tuple[Tensor, Tensor], times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch for _ in range(self.times))


class Clock:
    """Takes the time of blocks of steps behind a warm-up: of all of it, and of the host alone in a short block."""

    def __init__(self, steps: int, repeats: int, cuda: bool) -> None:
        self.steps, self.repeats, self.cuda = steps, repeats, cuda
        self.short = min(30, steps)  # so few that no queue of the driver fills up
        self.count = 0
        self.block: list[float] = []  # seconds per step
        self.host: list[float] = []
        self.profile = cProfile.Profile()

    @property
    def total(self) -> int:
        return WARM_UP + self.repeats * (self.steps + self.short) + PROFILED

    def sync(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def tick(self) -> None:
        """Call behind each step."""
        self.count += 1
        done, round_ = self.count - WARM_UP, self.steps + self.short
        if done == self.repeats * round_:
            self._end_host()
            self.sync()
            self.profile.enable()
        elif self.count == self.total:
            self.profile.disable()
        elif 0 <= done < self.repeats * round_:
            if done % round_ == 0:
                if done:
                    self._end_host()
                self.start = self.sync()
            elif done % round_ == self.steps:
                self.block.append((self.sync() - self.start) / self.steps)
                self.start = time.perf_counter()

    def _end_host(self) -> None:
        self.host.append((time.perf_counter() - self.start) / self.short)

    @property
    def per_step(self) -> float:
        return statistics.median(self.block)

    @property
    def host_per_step(self) -> float:
        return statistics.median(self.host)


class Ticks(pl.Callback):
    """Ticks where a batch begins: behind all that the one before took."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.begun = clock, False

    def on_train_batch_start(self, *args: Any) -> None:
        if self.begun:
            self.clock.tick()
        self.begun = True


def lightning(args: argparse.Namespace, batch: tuple[Tensor, Tensor], callback: AmpkitCallback | None) -> Clock:
    clock = Clock(args.steps, args.repeats, args.device == "cuda")
    cuda = args.device == "cuda"
    precision: dict[str, Any] = {"precision": "16-mixed"}
    if not cuda:
        precision = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    trainer = pl.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=1.0,
        callbacks=[Ticks(clock), *([callback] if callback else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        benchmark=True,
        **precision,
    )
    torch.manual_seed(0)
    # Lightning does not clip the gradients of a fused optimizer.
    trainer.fit(Module(fused=callback is not None), Same(batch, clock.total + 1))
    return clock


def raw(args: argparse.Namespace, batch: tuple[Tensor, Tensor], graph: str) -> Clock:
    clock = Clock(args.steps, args.repeats, args.device == "cuda")
    torch.manual_seed(0)
    model = resnet18().to(args.device)

    def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    optimizer = sgd(model.parameters(), fused=True)
    with ampkit.graphed_step(loss_fn, model, optimizer, policy="float16", max_norm=1.0, graph=graph) as step:
        for _ in range(clock.total):
            step(*batch)
            clock.tick()
    return clock


def items(clock: Clock, key: Callable[[Any], float], count: int = 14) -> list[tuple[float, str]]:
    """Return the functions that take most of the host's time, in microseconds per step, as the profiler slows it."""
    found = []
    for (file, line, name), row in pstats.Stats(clock.profile).stats.items():  # type: ignore[attr-defined]
        where = "/".join(Path(file).parts[-2:]) + f":{line} {name}" if line else name
        found.append((key(row) / PROFILED * 1e6, where))
    return sorted(found, reverse=True)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
    torch.backends.cudnn.benchmark = True
    graph = "auto" if args.device == "cuda" else "emulate"
    images = torch.randn(args.batch, 3, 32, 32).to(args.device, memory_format=torch.channels_last)
    batch = (images, torch.randint(10, (args.batch,)).to(args.device))

    callback = AmpkitCallback(graph=graph, on_failure="raise")
    clocks = {"raw graphed_step loop": raw(args, batch, graph), "Lightning": lightning(args, batch, None)}
    clocks["Lightning with AmpkitCallback"] = lightning(args, batch, callback)
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"ResNet-18, CIFAR stem, batch {args.batch}, 16-mixed, gradient_clip_val=1.0, {device}")
    print(f"torch {torch.__version__}, Lightning {pl.__version__}; median of {args.repeats} x {args.steps} steps")
    print("SGD with momentum; not fused in Lightning alone, which clips no gradients of a fused optimizer\n")
    for name, clock in clocks.items():
        rate, host = args.batch / clock.per_step, clock.host_per_step * 1e3
        print(f"{name:31} {rate:9.0f} images/s  {clock.per_step * 1e3:7.3f} ms/step  of it the host {host:7.3f} ms")
    ours, alone, below = (
        clocks[n].per_step for n in ("Lightning with AmpkitCallback", "Lightning", "raw graphed_step loop")
    )
    print(f"\nwith AmpkitCallback: {alone / ours:.2f} times Lightning alone")
    print(f"Lightning's loop on top of the raw loop: {(ours - below) * 1e3:.3f} ms/step")
    print(callback.report())
    profiled = clocks["Lightning with AmpkitCallback"]
    print("\nmicroseconds per step under cProfile (which slows Python), in the function itself:")
    for microseconds, where in items(profiled, lambda row: row[2]):
        print(f"  {microseconds:8.1f}  {where}")
    print("and with what it calls:")
    for microseconds, where in items(profiled, lambda row: row[3], 24):
        print(f"  {microseconds:8.1f}  {where}")
    if args.json:
        rows = {
            name: {"ms": clock.per_step * 1e3, "host_ms": clock.host_per_step * 1e3} for name, clock in clocks.items()
        }
        args.json.write_text(json.dumps({"device": device, "batch": args.batch, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
