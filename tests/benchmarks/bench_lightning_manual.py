"""A GAN (manual optimization) and a classifier with torchmetrics in a Lightning Trainer: without ampkit, and with it.

    python tests/benchmarks/bench_lightning_manual.py                 DCGAN and ResNet-18, batch 64, bf16-mixed
    python tests/benchmarks/bench_lightning_manual.py --device cpu --steps 5 --batch 8 --repeats 2    does it run

For each of them: how many batches were replays, whether weights, moments, metrics and `global_step` are equal bit by
bit (under deterministic algorithms), and milliseconds per batch, on one batch that is on the device already.
"""

import argparse
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from bench_lightning import Clock, Same, Ticks, resnet18
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from ampkit.lightning import AmpkitCallback

RATE = 2.0**-12  # float32 represents it exactly
COMPARED = 30  # batches whose bits are compared


def generator(width: int = 64) -> nn.Module:
    def up(before: int, after: int, stride: int = 2) -> list[nn.Module]:
        conv = nn.ConvTranspose2d(before, after, 4, stride, 0 if stride == 1 else 1, bias=False)
        return [conv, nn.BatchNorm2d(after), nn.ReLU()]

    last = nn.ConvTranspose2d(width, 3, 4, 2, 1)
    return nn.Sequential(*up(100, 4 * width, 1), *up(4 * width, 2 * width), *up(2 * width, width), last, nn.Tanh())


def discriminator(width: int = 64) -> nn.Module:
    def down(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2)]

    first = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*first, *down(width, 2 * width), *down(2 * width, 4 * width), nn.Conv2d(4 * width, 1, 4))


class Gan(pl.LightningModule):
    """DCGAN for images of 32x32, two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gen, self.disc = generator(), discriminator()
        self.mean = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        real = batch[0]
        opt_g, opt_d = self.optimizers()
        fake = self.gen(torch.randn(len(real), 100, 1, 1, device=self.device))
        self.toggle_optimizer(opt_d)
        loss_d = F.softplus(self.disc(fake.detach())).mean() + F.softplus(-self.disc(real)).mean()
        opt_d.zero_grad()
        self.manual_backward(loss_d)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.toggle_optimizer(opt_g)
        loss_g = F.softplus(-self.disc(self.gen(torch.randn(len(real), 100, 1, 1, device=self.device)))).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"gen": loss_g, "disc": loss_d}, on_step=True, on_epoch=True)
        self.log("mean", self.mean(loss_d), on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        options = {"lr": RATE, "betas": (0.5, 0.999), "fused": True}
        return [torch.optim.Adam(part.parameters(), **options) for part in (self.gen, self.disc)]


class Classifier(pl.LightningModule):
    """ResNet-18 whose training step updates and logs metrics of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = resnet18()
        # Without checks of the arguments, each of which waits for the device.
        self.accuracy = MulticlassAccuracy(10, validate_args=False)
        self.others = MetricCollection({"f1": MulticlassF1Score(10, validate_args=False)}, prefix="train_")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels)
        self.log("accuracy_now", self.accuracy(logits, labels))
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.others.update(logits, labels)
        self.log_dict(self.others, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE, fused=True)


def trained(
    make: Callable[[], pl.LightningModule], device: str, batches: Any, callbacks: list[pl.Callback], folder: str
) -> pl.Trainer:
    torch.manual_seed(0)
    module = make()
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(1)
    trainer.fit(module, batches)
    return trainer


def state(trainer: pl.Trainer, folder: str) -> list[Any]:
    """Return weights, moments, metrics and the number of steps."""
    file = Path(folder) / "state.ckpt"
    trainer.save_checkpoint(file)
    saved = torch.load(file, map_location="cpu", weights_only=False)
    metrics = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
    return [saved["state_dict"], saved["optimizer_states"], metrics, trainer.global_step]


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.shape == right.shape and left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


def compared(make: Callable[[], pl.LightningModule], device: str, batch: Any, graph: str, folder: str) -> bool:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    ways = ([], [AmpkitCallback(graph=graph, on_failure="raise")])
    runs = [state(trained(make, device, Same(batch, COMPARED), callbacks, folder), folder) for callbacks in ways]
    torch.use_deterministic_algorithms(False)
    return is_same(*runs)


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    graph = "auto" if args.device == "cuda" else "emulate"
    images = torch.randn(args.batch, 3, 32, 32).to(args.device, memory_format=torch.channels_last)
    batch = (images, torch.randint(10, (args.batch,)).to(args.device))
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    print(f"batch {args.batch}, bf16-mixed, {device}; torch {torch.__version__}, Lightning {pl.__version__}")
    print(f"median of {args.repeats} x {args.steps} batches\n")
    for make, title in ((Gan, "GAN, manual optimization"), (Classifier, "ResNet-18 with torchmetrics")):
        with tempfile.TemporaryDirectory() as folder:
            same = compared(make, args.device, batch, graph, folder)
            torch.backends.cudnn.benchmark = True
            times, callback = [], AmpkitCallback(graph=graph, on_failure="raise")
            for callbacks in ([], [callback]):
                clock = Clock(args.steps, args.repeats, args.device == "cuda")
                trained(make, args.device, Same(batch, clock.total + 1), [Ticks(clock), *callbacks], folder)
                times.append(clock.per_step * 1e3)
        report = callback.report()
        print(f"{title}: {times[0]:.3f} ms before, {times[1]:.3f} ms after, {times[0] / times[1]:.2f} times")
        print(f"  bits of {COMPARED} batches {'equal' if same else 'DIFFERENT'}; {report}")


if __name__ == "__main__":
    main()
