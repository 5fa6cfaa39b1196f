"""The trainings that ampkit leaves to the Trainer: why, and what to write instead."""

import inspect
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from .._arguments import check_choice
from .._capture.engine.options import Options
from .._step.compile.compile_choice import COMPILE
from .._step.graphed_step import graphed_step

# Every private name of transformers and accelerate that is used, with the reason. A test fails if one is gone.
PRIVATE_NAMES = {
    "Trainer._inner_training_loop": "the graphs end with it, also after an error",
    "Trainer._clip_grad_norm": "the graph clips",
    "Trainer._get_grad_norm": "the graph measures the norm",
    "Trainer._prepare_inputs": "a graph gets tensors that are on the device",
    "Trainer._prepare_context_parallel_inputs": "it does nothing without context parallelism, which is refused",
    "AcceleratedOptimizer._is_overflow": "whether the last step was skipped, for the schedule",
}
_OF_TRAINER = (
    "policy",
    "scaler",
    "max_norm",
    "accumulate",
    "scheduler",
    "buckets",
    "before_step",
    "after_step",
    "after_every",
    "numerics",
    "moments",  # the Trainer may call the optimizer itself, whose own step takes float32
)
_OF_GRADIENTS = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


def read_options(trainer: Any) -> dict[str, Any]:
    """Return the options for `graphed_step` that the class sets. Raise a `ValueError` if one of them cannot be."""
    where, options = f"{type(trainer).__name__}.graph_options", dict(trainer.graph_options)
    keywords = inspect.signature(graphed_step).parameters.values()
    known = [each.name for each in keywords if each.kind is each.KEYWORD_ONLY and each.name not in _OF_TRAINER]
    for name in options:
        if name not in known:
            raise ValueError(
                f"{where} has {name!r}: expected some of {', '.join(known)}. What else graphed_step takes is told by "
                "TrainingArguments."
            )
    values = {each.name: each.default for each in keywords} | options
    check_choice(where, "arithmetic", values["arithmetic"], ("ampkit", "torch"))
    if values["compile"] is not None:
        check_choice(where, "compile", values["compile"], COMPILE)
    Options(**{each.name: values[each.name] for each in fields(Options)}).checked(where)
    # "auto" may make a call twice, and a Trainer may count on the host. Its bits are those of the answer False.
    return {"capturing": False, **options}


def why_not(trainer: Any, model: nn.Module, reader: str) -> str:
    """Return why ampkit can capture nothing of this training and what to write instead, "" if it can.

    `reader` is what `reads_gradients` returned.
    """
    args, accelerator = trainer.args, trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in _DISTRIBUTED:
        return f"{kind} has a training step of its own. Use one GPU, DDP, or FSDP with version 2."
    if args.n_gpu > 1:
        return f"DataParallel trains on {args.n_gpu} GPUs. Use one, or DDP: torchrun --nproc-per-node={args.n_gpu}."
    if accelerator.parallelism_config is not None:
        return "parallelism_config splits a batch or the model. Use DDP, or FSDP with version 2."
    if not isinstance(getattr(trainer.optimizer, "optimizer", None), torch.optim.Optimizer):
        return f"the optimizer is {type(trainer.optimizer).__name__}, which accelerate has not prepared."
    if args.torch_empty_cache_steps is not None:
        return "torch_empty_cache_steps frees memory within a step, and a replay would not. Leave it out."
    if "lomo" in str(args.optim).lower():
        return f"optim={str(args.optim)!r} steps within the backward. Use optim='adamw_torch_fused'."
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        return "sync_each_batch=True averages gradients in each micro-batch. Leave it out."
    accumulates = args.gradient_accumulation_steps > 1 and isinstance(model, DistributedDataParallel)
    if accumulates and (model.find_unused_parameters or model.static_graph):
        return (
            "DDP cannot accumulate in a graph while it looks for unused parameters, or with a static graph. Pass "
            "TrainingArguments(ddp_find_unused_parameters=False)."
        )
    scaler = accelerator.scaler
    if scaler is not None and type(scaler) is not GradScaler:
        return f"the loss scale is a {type(scaler).__name__}, and a replay would not call its methods."
    return reader if accelerator.num_processes > 1 else ""


def reads_gradients(trainer: Any) -> str:
    """Return which code of the user's could read gradients, which are None behind a whole step; "" if there is none."""
    for name in ("_clip_grad_norm", "_get_grad_norm"):
        for owner in type(trainer).__mro__:
            if name in vars(owner) and owner.__module__ not in (__package__ + "._mixin", "transformers.trainer"):
                return f"{owner.__name__}.{name} may read gradients, which no whole step leaves. Use max_grad_norm."
    for callback in trainer.callback_handler.callbacks:
        for name in _OF_GRADIENTS:
            module: str = getattr(getattr(type(callback), name, None), "__module__", "transformers")
            if module.partition(".")[0] != "transformers":
                return (
                    f"{type(callback).__name__}.{name} may read gradients, or weights before the optimizer steps. Use "
                    "on_step_end, behind the step, or leave the callback out."
                )
    return ""
