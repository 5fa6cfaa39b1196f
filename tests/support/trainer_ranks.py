"""Two processes that train with DDP by a Trainer: whether its bits are those of the Trainer without ampkit.

    torchrun --nproc-per-node=2 tests/support/trainer_ranks.py FOLDER

Prints a line of JSON on rank 0: for each case how many calls were replayed, why nothing was captured, and what differs.
"""

import json
import os
import sys
import warnings
from typing import Any

import torch
import transformers
from harness import assert_same
from models import repeatable
from trainer_setups import graphed, taken_for_installed, trained

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "one micro-batch": {"gradient_accumulation_steps": 1, "ddp_find_unused_parameters": None},
    "looks for unused parameters": {"ddp_find_unused_parameters": None},
}
EACH = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False, "num_train_epochs": 6, "eval_strategy": "no"}


def main() -> None:
    os.chdir(sys.argv[1])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = {}
    for name, options in CASES.items():
        with repeatable(strict=True), taken_for_installed():
            trainer, state = trained(graphed(transformers.Trainer, graph="emulate"), "cpu", **{**EACH, **options})
            _, plain = trained(transformers.Trainer, "cpu", **{**EACH, **options})
        report = trainer.graph_report()
        try:
            assert_same(state, plain)
            differs = ""
        except AssertionError as error:
            differs = str(error)
        rows[name] = {"replays": report.replays, "failure": report.failure or "", "differs": differs}
    if torch.distributed.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
