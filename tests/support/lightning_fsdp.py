"""Training by Lightning's ModelParallelStrategy (FSDP2), one process per rank, for test_lightning_fsdp.py.

    python tests/support/lightning_fsdp.py --device cuda  every case on two GPUs, with one line per case and rank
    python tests/support/lightning_fsdp.py --device cpu --cases clip resume  two of them with gloo, emulated graphs

Without RANK in its environment the script starts the ranks itself. It also runs under torchrun.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from ddp_train import ENDS, launch
from fsdp_train import Block, local
from harness import deterministic
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_harness import RATE, HooksAmidAStep, loader, precision
from rank_script import rows_of, run_rank, same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import ampkit
from ampkit.lightning import AmpkitCallback

BATCHES = 12  # per epoch: whole windows of one, two and three


class Case(NamedTuple):
    """One way to train.

    Attributes:
        model: which module, see `MODULES`.
        kind: the precision of the Trainer.
        low: whether `MixedPrecisionPolicy` computes in bfloat16.
        optimizer: which one, see `OPTIMIZERS`.
        trainer: further arguments of the Trainer.
        accumulate: batches per optimizer step.
        whole: whether a checkpoint is one file with whole tensors.
        resume: who trains before the checkpoint, and who after it, "" for nobody: "ampkit" or "lightning".
        validate: whether there is a validation behind every fourth batch.
        plain: whether Lightning without the callback has the same bits.
        options: of the callback.
        refused: what the message says if Lightning trains.
    """

    model: str = "blocks"
    kind: str = "32-true"
    low: bool = False
    optimizer: str = "fused"
    trainer: dict[str, Any] = {}  # noqa: RUF012 - never changed
    accumulate: int = 1
    whole: bool = False
    resume: tuple[str, str] = ("", "")
    validate: bool = False
    plain: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    refused: str = ""


# torch cannot train parameters that fully_shard has first gathered in inference mode.
CHECKED = {"num_sanity_val_steps": 2, "inference_mode": False}
RULES = ampkit.Policy(compute="bfloat16", modules={nn.LayerNorm: "float32"})
NORM, VALUE = {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
CASES = {
    "float32": Case(),
    "clip": Case(low=True, trainer=NORM, accumulate=3, plain=False),
    "clip values": Case(low=True, trainer=VALUE, accumulate=3),
    "clip, not fused": Case(optimizer="capturable", trainer=NORM),
    "bf16-mixed": Case(kind="bf16-mixed", validate=True),
    "bf16-true": Case(kind="bf16-true"),
    "16-mixed": Case(kind="16-mixed", trainer=NORM, accumulate=2, plain=False),
    "behind": Case(optimizer="sgd", trainer=NORM, options={"on_failure": "parts"}),
    "validation": Case(low=True, validate=True),
    "sanity check": Case(low=True, validate=True, trainer=CHECKED),
    "itself": Case("itself", low=True, validate=True),
    "rules": Case(kind="bf16-mixed", plain=False, options={"policy": RULES}),
    "verify": Case(low=True, options={"verify": 3}),
    "verify 16-mixed": Case(kind="16-mixed", trainer=NORM, accumulate=2, plain=False, options={"verify": 3}),
    "numerics": Case(kind="16-mixed", trainer=NORM, plain=False, options={"numerics": 3}),
    "memory": Case(low=True, options={"memory": True}),
    "counts": Case("counts", refused="another rank found"),
    "gradients": Case("gradients", refused="Gradients.on_before_optimizer_step uses gradients"),
    "columns": Case("columns", optimizer="one by one", refused="net.0.up.weight is a DTensor placed as"),
    "kept gathered": Case("kept gathered", refused="set_reshard_after_backward(False) was called"),
    "resume": Case(low=True, accumulate=2, resume=("ampkit", "ampkit")),
    "resume from Lightning": Case(low=True, resume=("lightning", "ampkit")),
    "resume by Lightning": Case(low=True, resume=("ampkit", "lightning")),
    "resume whole": Case(low=True, accumulate=2, whole=True, resume=("ampkit", "ampkit")),
    "resume whole from Lightning": Case(low=True, whole=True, resume=("lightning", "ampkit")),
    "resume whole by Lightning": Case(low=True, whole=True, resume=("ampkit", "lightning")),
}
# On GPUs: each precision and way to clip, what measures and validates, one refusal and one checkpoint of each kind.
ON_GPUS = (
    *("clip", "bf16-mixed", "16-mixed", "behind", "validation", "verify 16-mixed", "numerics", "counts", "resume"),
    "resume whole by Lightning",
)


# -------------------------------------------------------------------------------------------------------------- modules


class Sharded(pl.LightningModule):
    """A transformer of two blocks on 16 numbers, split by `configure_model`, as Lightning's documentation writes it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.net = nn.Sequential(Block(16, 2), Block(16, 2), nn.LayerNorm(16), nn.Linear(16, 4))

    def configure_model(self) -> None:
        if hasattr(self.net, "unshard"):
            return  # Lightning may call this hook again
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": low if self.case.low else MixedPrecisionPolicy(),
        }
        for block in self.net[:2]:
            fully_shard(block, **options)
        fully_shard(self.net, **options)

    def logits(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(torch.stack([x, x.flip(-1)], -2).repeat(1, 1, 2))[:, -1]
        return result.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.logits(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.logits(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.case.optimizer](self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class Itself(Sharded):
    """A module that is the root of what is split, and is called as a module."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "unshard"):
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        return super().logits(x)

    def logits(self, x: Tensor) -> Tensor:
        result: Tensor = self(x)
        return result


class Counts(Sharded):
    """A module whose second rank does what a graph would leave out."""

    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 1:
            self.seen += 1
        return super().training_step(batch, batch_idx)


class Gradients(Sharded):
    """A module with a hook that uses gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found = [param.grad is not None for param in self.parameters()]


class Columns(Sharded):
    """A module under tensor parallelism alone."""

    def configure_model(self) -> None:
        for block in self.net[:2]:
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


class KeptGathered(Sharded):
    """A module with a setting of fully_shard that a graph cannot follow."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.set_reshard_after_backward(False)


MODULES: dict[str, Callable[[Case], pl.LightningModule]] = {
    "blocks": Sharded,
    "itself": Itself,
    "counts": Counts,
    "gradients": Gradients,
    "columns": Columns,
    "kept gathered": KeptGathered,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, lr=RATE, fused=True),
    "capturable": lambda params: torch.optim.AdamW(params, lr=RATE, capturable=torch.cuda.is_available()),
    "one by one": lambda params: torch.optim.AdamW(params, lr=RATE, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.9),
}


# ------------------------------------------------------------------------------------------------------------- training


class Run(NamedTuple):
    """What came of a `fit`, or of two of which the second goes on from the checkpoint of the first."""

    trainer: pl.Trainer
    module: pl.LightningModule
    hooks: HooksAmidAStep
    callback: AmpkitCallback | None
    checkpoint: str
    messages: list[str]

    def state(self) -> dict[str, Any]:
        """Return all by which two runs are compared; of a sharded tensor this rank's part."""
        optimizer = self.trainer.optimizers[0]
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        named: dict[str, Any] = dict(self.module.named_parameters())
        names = {param: name for name, param in named.items()}
        for param, kept in optimizer.state.items():
            named.update({f"{names[param]}.{key}": value for key, value in kept.items() if isinstance(value, Tensor)})
        named.update(self.trainer.callback_metrics)
        scaler = self.trainer.scaler
        return {
            **{name: local(tensor).detach().clone() for name, tensor in named.items()},
            "rates": [group["lr"] for group in optimizer.param_groups],
            "global step": self.trainer.global_step,
            "hooks": dict(self.hooks.counts),
            "scale": scaler.get_scale() if scaler else None,
        }


def fit(case: Case, device: torch.device, graph: str, folder: Path, epochs: int = 2, resume: str | None = None) -> Run:
    """Train, without the callback if `graph` is "none"."""
    on_failure = {"on_failure": "eager" if case.refused else "raise"}
    callback = None if graph == "none" else AmpkitCallback(graph=graph, **{**on_failure, **case.options})
    hooks, saved = HooksAmidAStep(), ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=0)
    ranks = dist.get_world_size()
    columns = ranks if case.model == "columns" else 1
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(
            data_parallel_size=ranks // columns,
            tensor_parallel_size=columns,
            save_distributed_checkpoint=not case.whole,
        ),
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=ranks,
        max_epochs=epochs,
        accumulate_grad_batches=case.accumulate,
        callbacks=[hooks, *([saved] if any(case.resume) else []), *([callback] if callback else [])],
        logger=False,
        enable_checkpointing=any(case.resume),
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=4 if case.validate else None,
        **{"num_sanity_val_steps": 0, **case.trainer, **precision(case.kind, device.type)},
    )
    torch.manual_seed(3 if resume is None else 99)
    module = MODULES[case.model](case)
    torch.manual_seed(4 + dist.get_rank())
    batches = loader(device.type, BATCHES * ranks), loader(device.type, 3 * ranks, seed=1) if case.validate else None
    with deterministic(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *batches, ckpt_path=resume)
    messages = [str(w.message) for w in caught if issubclass(w.category, ampkit.AmpkitWarning)]
    return Run(trainer, module, hooks, callback, saved.last_model_path, messages)


def train(case: Case, device: torch.device, graph: str) -> Run:
    """Train two epochs; with `resume`, the second one by another Trainer, from a checkpoint."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    if not any(case.resume):
        return fit(case, device, graph, Path(folder[0]))
    # Without graphs nobody is Lightning's: the reference of both ways is the same.
    first, second = (graph if who == "ampkit" or graph in ("off", "none") else "none" for who in case.resume)
    before = fit(case, device, first, Path(folder[0]), epochs=1)
    return fit(case, device, second, Path(folder[0]), resume=before.checkpoint)


def compare(case: Case, device: torch.device, graph: str) -> dict[str, Any]:
    """Train with a graph and without, and return where the two differ, with the counts of the first."""
    start = time.monotonic()
    reference = train(case, device, "off").state()
    alone = train(case, device, "none").state() if case.plain else {}
    run = train(case, device, graph)
    report = None if run.callback is None else run.callback.report()
    ours = run.state()
    return {
        "differ": differences(reference, ours),
        "differ from Lightning": differences(alone, ours),
        "messages": run.messages,
        "replays": report.replays if report else 0,
        "eager": report.eager if report else {},
        "failure": report.failure if report else None,
        "skipped": report.skipped if report else 0,
        "steps": run.trainer.global_step,
        "seconds": round(time.monotonic() - start, 1),
    }


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Return the names of what differs in any bit."""
    return [name for name, value in left.items() if name not in right or not same(value, right[name])]


def same(left: Any, right: Any) -> bool:
    return same_bits(left, right) if isinstance(left, Tensor) else bool(left == right)


def compare_all(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return a row for each case by its name."""
    return rows_of(args.cases or CASES, lambda name: compare(CASES[name], device, args.graph))


# ----------------------------------------------------------------------------------------------------------------- main


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", choices=["auto", "emulate", "off"])
    parser.add_argument("--cases", nargs="*", choices=CASES)
    parser.add_argument("--end", choices=ENDS, default="destroy")
    parser.add_argument("--timeout", type=float, default=240)
    args = parser.parse_args(argv)
    args.graph = args.graph or ("auto" if args.device == "cuda" else "emulate")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if "RANK" not in os.environ:
        print(json.dumps(launch(*argv, timeout=args.timeout, script=__file__), indent=1))
        return
    os.environ["NODE_RANK"] = "0"
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run_rank(partial(compare_all, args), args.device, args.timeout, args.end)


if __name__ == "__main__":
    main(sys.argv[1:])
