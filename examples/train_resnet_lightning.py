"""Train a ResNet with a Lightning Trainer, and capture the whole training step as one CUDA graph with one callback.

    python examples/train_resnet_lightning.py                # scikit-learn's handwritten digits: nothing to download
    python examples/train_resnet_lightning.py --no-ampkit    # the same without ampkit, to compare
    python examples/train_resnet_lightning.py --dataset cifar10 --data-path data --model resnet18 --clip-grad 1.0
    python examples/train_resnet_lightning.py --devices 2    # one process per GPU
    torchrun --nproc-per-node=2 examples/train_resnet_lightning.py --strategy fsdp  # each has a part of the parameters
    python examples/train_resnet_lightning.py --help

Data, models, optimizers and their options are those of train_resnet.py, in the same folder. The script differs from one
without ampkit in one line of `main`.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import train_resnet
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.models.resnet import BasicBlock, Bottleneck
from train_resnet import positive, show_summary, weights_sha256

from ampkit.lightning import AmpkitCallback

PRECISIONS = {"32-true": "float32", "16-mixed": "float16", "bf16-mixed": "bfloat16", "bf16-true": "bf16-true"}

# --------------------------------------------------------------------------------------------------------- options


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=train_resnet.HelpFormatter)
    train_resnet.add_data_options(parser.add_argument_group("data"))
    train_resnet.add_model_options(parser.add_argument_group("model"))
    train_resnet.add_optimizer_options(parser.add_argument_group("optimizer and schedule"))
    add_trainer_options(parser.add_argument_group("trainer and results"))
    args = parser.parse_args(argv)
    on_cuda = args.device == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. Use --device cpu.")
    if args.precision == "auto":
        mixed = "16-mixed" if args.strategy == "ddp" else "bf16-mixed"  # ModelParallelStrategy refuses 16-mixed
        args.precision = mixed if on_cuda else "32-true"
    if args.no_ampkit and args.clip_grad is not None and args.precision.endswith("mixed"):
        parser.error(
            "--no-ampkit --clip-grad: in mixed precision Lightning cannot clip the gradients of a fused optimizer."
        )
    if args.model == "auto":
        args.model = "resnet18" if on_cuda else "resnet8"
    train_resnet.choose_optimizer(parser, args)
    if args.workers is None:
        args.workers = 0 if args.dataset in ("digits", "synthetic") else 4
    if args.strategy == "fsdp" and args.devices == 1:
        parser.error("--strategy fsdp: there is one process. Pass --devices 2, or use torchrun.")
    return args


def add_trainer_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-ampkit", action="store_true", help="train without ampkit")
    group.add_argument(
        "--precision",
        choices=["auto", *PRECISIONS],
        default="auto",
        help="precision of the Trainer; auto: on CUDA 16-mixed, or bf16-mixed with --strategy fsdp; elsewhere 32-true",
    )
    group.add_argument("--accumulate", type=positive, default=1, metavar="N", help="batches per optimizer step")
    group.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    group.add_argument(
        "--devices",
        type=positive,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # torchrun sets it
        metavar="N",
        help="processes, each with a GPU of its own",
    )
    train_resnet.add_strategy_option(group)
    group.add_argument("--deterministic", action="store_true", help="use deterministic algorithms only")
    group.add_argument("--seed", type=int, default=0, help="seed of weights and shuffling")
    group.add_argument("--resume", metavar="FILE", help="last.ckpt of an earlier run, which is continued")
    group.add_argument(
        "--output-dir", default="runs/train_resnet_lightning", metavar="DIR", help="folder for checkpoints and metrics"
    )
    group.add_argument("--print-freq", type=positive, default=20, metavar="N", help="steps between two log entries")
    group.add_argument(
        "--json", action="store_true", help="print the summary as one line of JSON, and nothing else to stdout"
    )


# ---------------------------------------------------------------------------------------------------------- module


class ResNet(pl.LightningModule):
    """A ResNet that classifies images."""

    def __init__(self, args: argparse.Namespace, data: train_resnet.Data) -> None:
        super().__init__()
        self.args = args
        self.net = train_resnet.make_model(args, data)

    def configure_model(self) -> None:
        if self.args.strategy == "fsdp":
            mesh = self.device_mesh["data_parallel"]
            for module in self.net.modules():
                if isinstance(module, (BasicBlock, Bottleneck)):
                    fully_shard(module, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.args.label_smoothing)
        self.log_dict({"train_loss": loss, "train_accuracy": accuracy(logits, labels)}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self.net(images)
        metrics = {"test_loss": F.cross_entropy(logits, labels), "test_accuracy": accuracy(logits, labels)}
        self.log_dict(metrics, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = train_resnet.make_optimizer(self.args, self)
        steps = self.trainer.estimated_stepping_batches // self.args.epochs
        scheduler = train_resnet.make_scheduler(self.args, optimizer, steps)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).float().mean()


# ----------------------------------------------------------------------------------------------------------- speed


class Speed(pl.Callback):
    """Measures the speed of the training steps in each epoch, with and without ampkit."""

    def __init__(self) -> None:
        self.images_per_second: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start = self.now()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == trainer.num_training_batches:  # before validation
            images = trainer.num_training_batches * len(batch[0]) * trainer.world_size
            self.images_per_second.append(images / (self.now() - self.start))

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # twice an epoch
        return time.perf_counter()


# ------------------------------------------------------------------------------------------------------------ main


def main(argv: list[str] | None = None) -> None:
    start = time.perf_counter()
    args = parse_args(argv)
    warnings.filterwarnings("ignore", ".*does not have many workers")  # the digits are in memory
    warnings.filterwarnings("ignore", ".*exists and is not empty")  # the folder of an earlier run
    pl.seed_everything(args.seed, verbose=False)
    data = train_resnet.load_data(args)
    module = ResNet(as_in_train_resnet(args), data)
    speed = Speed()
    # -------------------------------------------------------------------------------- the line for ampkit
    callback = AmpkitCallback(graph="auto" if args.device == "cuda" else "off")
    # -----------------------------------------------------------------------------------------------------------
    trainer = pl.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=args.devices,
        strategy=strategy_of(args),
        precision=args.precision,
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip_grad,
        deterministic=args.deterministic,
        benchmark=not args.deterministic,
        callbacks=[
            speed,
            LearningRateMonitor(),
            ModelCheckpoint(args.output_dir, save_last=True),
            *([] if args.no_ampkit else [callback]),
        ],
        logger=CSVLogger(args.output_dir, name="metrics"),
        log_every_n_steps=args.print_freq,
        enable_progress_bar=not args.json,
        enable_model_summary=False,
        inference_mode=args.strategy == "ddp",  # torch cannot train what fully_shard has gathered in inference mode
    )
    loader = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(data.train, shuffle=True, drop_last=True, **loader)  # a graph replays one batch size
    trainer.fit(module, train_loader, DataLoader(data.test, **loader), ckpt_path=args.resume)
    weights = weights_sha256(module.net)  # in all processes
    if trainer.is_global_zero:
        summary = summarize(args, trainer, weights, speed, callback, time.perf_counter() - start)
        if not args.no_ampkit:
            print(callback.report(), file=sys.stderr if args.json else sys.stdout)
        show_summary(args, summary)


def strategy_of(args: argparse.Namespace) -> str | Strategy:
    if args.strategy == "ddp":
        return "ddp" if args.devices > 1 else "auto"
    return ModelParallelStrategy(args.devices, tensor_parallel_size=1, save_distributed_checkpoint=False)


def as_in_train_resnet(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options for make_model of train_resnet.py. The Trainer, not make_model, moves and casts the model."""
    return argparse.Namespace(
        **{**vars(args), "device": "cpu"},
        policy=PRECISIONS["32-true"],
        channels_last=args.device == "cuda" and args.strategy == "ddp",  # fully_shard takes contiguous weights
        torchcompile=None,
    )


def summarize(
    args: argparse.Namespace,
    trainer: pl.Trainer,
    weights: str,
    speed: Speed,
    callback: AmpkitCallback,
    seconds: float,
) -> dict[str, Any]:
    report = callback.report()
    scaler = trainer.scaler
    return {
        "accuracy": float(trainer.callback_metrics["test_accuracy"]),
        "images_per_second": round(statistics.median(speed.images_per_second), 1),
        "skipped_steps": report.skipped,
        "loss_scale": scaler.get_scale() if scaler else 1.0,
        "graph": report.to_dict(),
        "weights_sha256": weights,
        "model": args.model,
        "dataset": args.dataset,
        "precision": args.precision,
        "ampkit": not args.no_ampkit,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "batch_size": args.batch_size,
        "devices": args.devices,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "checkpoint": str(trainer.checkpoint_callback.last_model_path),
    }


if __name__ == "__main__":
    main()
