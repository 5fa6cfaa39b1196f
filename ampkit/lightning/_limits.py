"""The fits whose training step ampkit leaves to Lightning: why, and what to write instead."""

import inspect

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.amp import grad_scaler as upstream
from torch.nn.parameter import is_lazy

from .._capture.ranks.shards import is_sharded, why_not_sharded
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import broken_kernel, why_not_called
from .._torch.compile import cudagraphs_of_its_own
from ._gradient_reads import BEFORE_STEP
from ._host_state import HostReads

# Every private name of Lightning that is used, with the reason. A test fails if Lightning removes one.
PRIVATE_NAMES = {
    "DDPStrategy._ddp_comm_state": "communication hooks with state (PowerSGD, post-local SGD) count steps on the host",
    "LightningOptimizer._on_before_step": "counts and times the steps that training_step makes, on the host",
    "LightningOptimizer._on_after_step": "the same",
    "LightningModule._current_fx_name": "the hook in which self.log is called",
}
HOOK = "_current_fx_name"
AROUND_STEP = ("_on_before_step", "_on_after_step")  # attributes of a LightningOptimizer, in this order
SEVERAL_RANKS = (DDPStrategy, ModelParallelStrategy)  # strategies whose ranks decide together
# Methods of a module that are parts of the step, and what to write instead of overriding them.
_PARTS_OF_STEP = {
    "optimizer_step": "For a warm-up of the learning rate use a scheduler with interval='step'.",
    "backward": "Return the loss whose gradient you want.",
    "configure_gradient_clipping": "Use Trainer(gradient_clip_val=..., gradient_clip_algorithm=...).",
    "optimizer_zero_grad": "Leave it out: gradients are None before each backward.",
}


def why_not(
    trainer: Trainer, module: LightningModule, plugin: Precision, compile: str | None, scaler: GradScaler | None
) -> str:
    """Return why ampkit cannot do the steps of this fit and what to write instead, "" if it can.

    The plugin is the Trainer's own. The scaler is the user's, and takes the place of the plugin's if there is one.
    """
    if problem := _why_not_strategy(trainer.strategy):
        return problem
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    if not module.automatic_optimization and (problem := _why_not_manual(trainer.strategy, module, callbacks)):
        return problem
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
        return (
            f"Trainer(precision={plugin.precision!r}), {type(plugin).__name__}: ampkit supports "
            "32-true, bf16-mixed, 16-mixed, bf16-true and 16-true."
        )
    if scaler is None and (problem := _why_not_scaler(getattr(plugin, "scaler", None))):
        return problem
    name = type(module).__name__
    for hook, advice in _PARTS_OF_STEP.items():
        if module.automatic_optimization and is_overridden(hook, module):
            return f"{name}.{hook} changes what a step does, and a replay would not call it. {advice}"
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        return f"{name}.training_step takes its batches from dataloader_iter. Write training_step(self, batch)."
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        return "StochasticWeightAveraging ends with an epoch without backward. Use EMAWeightAveraging."
    # Compiled code tells nobody what it reads of the Trainer.
    read = None if compile is None else HostReads(module).problem
    return "" if read is None else f"{read.what}. {read.advice}"


def _why_not_manual(strategy: Strategy, module: LightningModule, callbacks: list[Callback]) -> str:
    """Return why a `training_step` that steps the optimizers itself cannot be captured, "" if it can."""
    if isinstance(strategy, SEVERAL_RANKS):
        return (
            f"automatic_optimization is False, and with {type(strategy).__name__} ampkit captures only steps that "
            "Lightning writes. Use one device."
        )
    for callback in callbacks:
        name = next((name for name in BEFORE_STEP if is_overridden(name, callback)), None)
        if name is not None:
            return (
                f"automatic_optimization is False, so {type(callback).__name__}.{name} is called in training_step, and "
                "a replay would not call it. Use on_train_batch_end."
            )
    reads = HostReads(module)
    if (reader := reads.readers.get("lr_schedulers")) is not None:
        return f"{reader} reads self.lr_schedulers(), and a replay steps none. Step them in on_train_batch_end."
    if (reader := reads.readers.get("param_groups")) is not None and "lr" in reads.strings:
        return (
            f"{reader} reads param_groups, and 'lr' may be set there, which a replay would not do. Set learning rates "
            "in on_train_batch_start, and log them with LearningRateMonitor."
        )
    return ""


def _why_not_scaler(scaler: object) -> str:
    """Return why ampkit's scaler cannot take the place of the Trainer's: that one does something else.

    The older spellings of torch.amp.GradScaler are subclasses of it that change no method.
    """
    if scaler is None or isinstance(scaler, GradScaler):
        return ""
    what = "is no torch.amp.GradScaler"
    if isinstance(scaler, upstream.GradScaler):
        methods = {name: value for name, value in vars(upstream.GradScaler).items() if inspect.isfunction(value)}
        changed = (
            name
            for name, method in methods.items()
            if not name.startswith("__") and getattr(getattr(scaler, name), "__func__", None) is not method
        )
        if (name := next(changed, "")) == "":
            return ""
        what = f"has a method {name} of its own"
    return (
        f"the Trainer's loss scale, {type(scaler).__name__}, {what}, which a replay would not call. Pass "
        "AmpkitCallback(scaler=ampkit.GradScaler(...)): it has min_scale, max_scale and hysteresis."
    )


def _why_not_strategy(strategy: Strategy) -> str:
    name, kind = type(strategy).__name__, type(strategy)
    if (
        not isinstance(strategy, (SingleDeviceStrategy, *SEVERAL_RANKS))
        or strategy.handles_gradient_accumulation
        or kind.training_step is not Strategy.training_step
        or kind.backward is not Strategy.backward
        or kind.optimizer_step not in (Strategy.optimizer_step, DDPStrategy.optimizer_step)
        or strategy.root_device.type not in ("cpu", "cuda")
    ):
        return (
            f"{name} has a training step of its own. Use one device, Trainer(strategy='ddp'), or "
            "Trainer(strategy=ModelParallelStrategy(...)) with fully_shard in configure_model."
        )
    if getattr(strategy, "_ddp_comm_state", None) is not None:
        return f"{name}(ddp_comm_state=...): this communication hook counts steps on the host. Leave it out."
    return ""


def why_not_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return why ampkit cannot step this optimizer, "" if it can."""
    if not any(group["params"] for group in optimizer.param_groups):
        return "configure_optimizers returned no optimizer with parameters."
    return why_not_called(optimizer) or broken_kernel(optimizer)


def why_not_parameters(trainer: Trainer, module: LightningModule, optimizer: torch.optim.Optimizer) -> str:
    """Return why ampkit cannot train these parameters, "" if it can. Those that are split must not be gathered."""
    if problem := why_not_sharded(module) or why_not_module(module, trainer.strategy):
        return problem
    known = set(module.parameters())
    if any(param not in known for group in optimizer.param_groups for param in group["params"]):
        return "the optimizer has parameters that do not belong to the module. Make them parameters of the module."
    return ""


def why_not_module(module: LightningModule, strategy: Strategy) -> str:
    """Return why no step of this module can be captured with this strategy, "" if it can."""
    if is_sharded(module) and not isinstance(strategy, ModelParallelStrategy):
        return (
            f"its parameters are split over processes (fully_shard), and {type(strategy).__name__} does not know of "
            "that. Use Trainer(strategy=ModelParallelStrategy(...)), and call fully_shard in configure_model."
        )
    device = strategy.root_device
    for name, param in module.named_parameters():
        if is_lazy(param):
            return (
                f"parameter {name} has no shape yet, because a lazy module makes it when it is first called. Call the "
                "module once with a batch before trainer.fit."
            )
        if param.device != device:
            return f"parameter {name} is on {param.device}, not on {device}, and a graph runs on one device."
    if cudagraphs_of_its_own(module):
        return "the model is compiled with CUDA graphs of its own. Compile it in the default mode."
    return ""
