"""Training by Lightning's DDPStrategy, one process per rank, for test_lightning.py: what was trained, and the end.

    python tests/support/lightning_ddp.py --graph emulate --accumulate 3       two ranks, their rows as JSON

Without LOCAL_RANK in its environment the script starts the ranks itself, and ends them where they do not end in time.
"""

import argparse
import hashlib
import json
import logging
import os
import sys
import warnings
from typing import Any

import ddp_train
import lightning.pytorch as pl
import torch
from harness import bits, deterministic
from lightning_harness import HooksAmidAStep, Net, adamw, fused, halving, loader, precision
from ports import free_port

from ampkit._capture.ranks.job_end import keep_process_groups
from ampkit.lightning import AmpkitCallback


def launch(*options: str) -> list[dict[str, Any]]:
    """Run this script with `options` on two ranks, and return the JSON row that each printed last, in order.

    Raises:
        JobError: see `ddp_train.Started.rows`.
    """
    with started(*options) as job:
        return job.rows()


def started(*options: str) -> ddp_train.Started:
    """Start this script with `options` on two ranks."""
    more = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    on_cpu = "cuda" not in options
    return ddp_train.Started(*options, script=__file__, forked=on_cpu, modules=["lightning.pytorch"], more=more)


def checksum(module: torch.nn.Module) -> str:
    """Return a checksum of all parameters; buffers are each rank's own."""
    digest = hashlib.sha256()
    for _, param in module.named_parameters():
        digest.update(bits(param).numpy())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graph", default="none", help="none: without ampkit")
    parser.add_argument("--kind", default="32-true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--verify", type=int, default=0)
    parser.add_argument("--raise-at", type=int, help="global step at which every rank raises an error")
    parser.add_argument("--one-rank-counts", action="store_true", help="the second rank does what a graph would not")
    args = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="lightning")

    class Raises(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == args.raise_at:
                raise KeyError("a mistake of the user")

    class Ends(pl.Callback):
        """Without ampkit, gloo's threads and the end of the process may wait for each other: a race of torch's own."""

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            keep_process_groups(trainer.strategy.model, [trainer.strategy.model.process_group])

    class Counts(Net):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if args.one_rank_counts and self.global_rank == 1:
                self.seen += 1
            return super().training_step(batch, batch_idx)

    hooks = HooksAmidAStep()
    callback = (
        None
        if args.graph == "none"
        else AmpkitCallback(
            graph=args.graph, verify=args.verify, on_failure="eager" if args.one_rank_counts else "raise"
        )
    )
    trainer = pl.Trainer(
        strategy="ddp",
        devices=2,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        callbacks=[hooks, Raises(), Ends(), *([callback] if callback else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **precision(args.kind, args.device),
    )
    torch.manual_seed(3)
    module = Counts(fused if args.device == "cuda" else adamw, halving, "step")
    failed = False
    with deterministic():
        torch.manual_seed(4 + trainer.global_rank)
        try:
            trainer.fit(module, loader(args.device, batches=22))
        except KeyError:
            failed = True
    report = None if callback is None else callback.report()
    row = {
        "rank": trainer.global_rank,
        "weights": checksum(module),
        "global_step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "hooks": dict(hooks.counts),
        "scale": trainer.scaler.get_scale() if getattr(trainer, "scaler", None) else None,
        "replays": report.replays if report else 0,
        "failure": report.failure if report else None,
        "failed": failed,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main()
    else:
        for line in launch(*sys.argv[1:]):
            print(json.dumps(line))
