"""Trainers of transformers for tests: a small GPT-2, with `GraphedTrainerMixin` and without."""

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import bits
from torch import Tensor

from ampkit import _user_line
from ampkit._capture.host import calls, objects, roots
from ampkit.transformers import GraphedTrainerMixin

RATE = 2**-10  # float32 represents it exactly, so that a step on CUDA has the bits of a loop with a Python float


@contextmanager
def taken_for_installed() -> Iterator[None]:
    """Take transformers and accelerate for installed packages, in whatever folder they are."""
    is_users_file = _user_line.is_users_file
    specs = map(importlib.util.find_spec, ("transformers", "accelerate"))
    homes = tuple(str(Path(spec.origin).parent) for spec in specs if spec is not None and spec.origin is not None)

    def is_users(filename: str) -> bool:
        return is_users_file(filename) and not filename.startswith(homes)

    with ExitStack() as stack:
        for module in (_user_line, calls, objects, roots):
            stack.enter_context(mock.patch.object(module, "is_users_file", is_users))
        yield


def graphed(base: type, **options: Any) -> type:
    """Return this Trainer with the mixin in front of it."""
    return type(f"Graphed{base.__name__}", (GraphedTrainerMixin, base), {"graph_options": options})


def texts() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (22, 12), generator=made)
    mask = (torch.arange(12) < 9).long()  # each batch has padding, so that attention takes one kernel in all of them
    return [{"input_ids": row, "attention_mask": mask, "labels": row.where(mask > 0, -100)} for row in ids]


def trainer_of(kind: type, device: str, callbacks: Any = (), by_tokens: bool = True, **options: Any) -> Any:
    """Return a Trainer of a small GPT-2 with dropout: 11 batches in each of two epochs, two per optimizer step."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "max_grad_norm": 0.0,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": False,
        **copy.deepcopy(options),  # transformers changes what it is given
    }
    import transformers

    sizes = {"vocab_size": 64, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 12}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False)
    )
    arguments = transformers.TrainingArguments("output", **chosen)
    data = texts()
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[*callbacks])
    trainer.model_accepts_loss_kwargs = by_tokens
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def state_of(trainer: Any) -> dict[str, Any]:
    """Return the bits of all that was trained, and what was logged."""
    state: dict[str, Any] = {name: bits(tensor) for name, tensor in trainer.model.state_dict().items()}
    for i, values in enumerate(trainer.optimizer.state.values()):
        state |= {f"{key} of parameter {i}": bits(torch.as_tensor(value)) for key, value in values.items()}
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")
    history = [{name: row[name] for name in logged if name in row} for row in trainer.state.log_history]
    rates = trainer.lr_scheduler.state_dict()["_last_lr"]
    return {**state, "logged": history, "rates": rates, "random numbers": bits(torch.rand(4))}


def trained(kind: type, device: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    trainer = trainer_of(kind, device, **options)
    trainer.train()
    return trainer, state_of(trainer)
