"""Milliseconds of an epoch of training and validation under a Lightning Trainer, with and without captured validation.

    python tests/benchmarks/bench_validation.py                 ResNet-18 (CIFAR stem), batch 64, bf16-mixed; under 60 s
    python tests/benchmarks/bench_validation.py --device cpu --batch 4 --train 3 --val 6 --epochs 3     does it run

Three Trainers, one after another in one process: without ampkit, with `AmpkitCallback(validate=False)`, and with
`AmpkitCallback()`. All of them train and validate on one batch that is on the device already. An epoch is timed between
two waits for the device, and so is the validation in it; what is printed are medians, without the first two epochs, in
which steps are warmed up and captured. The last line says whether the logged metrics of the two callbacks are equal.
"""

import argparse
import logging
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from bench_lightning import Same, resnet18, sgd
from torch import Tensor
from torch.nn import functional as F

from ampkit.lightning import AmpkitCallback

WARM_UP = 2  # epochs


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = resnet18()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters(), fused=True)


class EpochTimes(pl.Callback):
    """Takes the time of each epoch, and of the validation in it."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.epochs: list[float] = []
        self.validations: list[float] = []

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_epoch_start(self, *args: Any) -> None:
        self.epoch = self.now()

    def on_validation_start(self, *args: Any) -> None:
        self.validation = self.now()

    def on_validation_end(self, *args: Any) -> None:
        self.validations.append(self.now() - self.validation)
        self.epochs.append(self.now() - self.epoch)  # Lightning validates at the end of an epoch


def run(args: argparse.Namespace, batch: tuple[Tensor, Tensor], callback: AmpkitCallback | None) -> dict[str, Any]:
    times = EpochTimes(args.device == "cuda")
    trainer = pl.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=1,
        max_epochs=args.epochs,
        precision="bf16-mixed",
        callbacks=[times, *([callback] if callback else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    torch.manual_seed(0)
    trainer.fit(Module(), Same(batch, args.train), Same(batch, args.val))
    report = None if callback is None else callback.report("validation_step")
    return {
        "epoch": 1000 * statistics.median(times.epochs[WARM_UP:]),
        "validation": 1000 * statistics.median(times.validations[WARM_UP:]),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "replays": 0 if report is None else report.replays,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--train", type=int, default=50, help="training batches per epoch")
    parser.add_argument("--val", type=int, default=50, help="validation batches per epoch")
    parser.add_argument("--epochs", type=int, default=9)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.backends.cudnn.deterministic = True  # so that the two callbacks train to the same weights
    images = torch.randn(args.batch, 3, 32, 32, device=args.device).contiguous(memory_format=torch.channels_last)
    batch = images, torch.randint(10, (args.batch,), device=args.device)
    graph = "auto" if args.device == "cuda" else "emulate"
    print(f"torch {torch.__version__}, Lightning {pl.__version__}, {args.train} + {args.val} batches of {args.batch}")
    print(f"{'':36}{'epoch, ms':>12}{'validation, ms':>16}{'ms per batch':>14}{'replays':>9}")
    results = {}
    for name, callback in (
        ("Lightning", None),
        ("AmpkitCallback(validate=False)", AmpkitCallback(graph=graph, validate=False)),
        ("AmpkitCallback()", AmpkitCallback(graph=graph)),
    ):
        row = results[name] = run(args, batch, callback)
        per_batch = row["validation"] / args.val
        print(f"{name:36}{row['epoch']:12.2f}{row['validation']:16.2f}{per_batch:14.3f}{row['replays']:9}", flush=True)
    same = results["AmpkitCallback(validate=False)"]["metrics"] == results["AmpkitCallback()"]["metrics"]
    print(f"logged metrics of the two callbacks are {'equal' if same else 'NOT equal'}")


if __name__ == "__main__":
    main()
