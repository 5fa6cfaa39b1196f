"""Validation and test with captured steps: what ampkit replaces in a Trainer, which batches it does, how that ends."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from .._capture.options import Options
from .._capture.ranks import why_not_sharded
from .._capture.report import Report
from .._torch.compile import cudagraphs_of_its_own
from ._evaluation_step import EvaluationStep
from ._host_state import HostReads

STEPS = ("validation_step", "test_step")


class Evaluation:
    """Replaces `validation_step` and `test_step` of a Trainer's strategy; `end` puts the originals back.

    Args:
        trainer: the Trainer, before anything of it was replaced.
        module: the LightningModule.
        options: see `Options`.
        give_up: called with the reason if a step is left to Lightning. It issues a warning, or raises.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, options: Options, give_up: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._options = options
        self._give_up = give_up
        self._steps: dict[str, EvaluationStep] = {}
        self._why_not = dict.fromkeys(STEPS, _why_not_in(trainer, options))
        if any(self._why_not.values()):
            return
        strategy = trainer.strategy
        self._lightning_steps = {name: getattr(strategy, name) for name in STEPS}
        vars(strategy)["validation_step"] = lambda *args: self._call("validation_step", *args)
        vars(strategy)["test_step"] = lambda *args: self._call("test_step", *args)

    def end(self) -> None:
        """Put the steps back and release the graphs."""
        for name in STEPS:
            vars(self._trainer.strategy).pop(name, None)
        for step in self._steps.values():
            step.close()

    def report(self, name: str) -> Report:
        """Return what happened to the batches of a step so far. Waits for the device."""
        report = self._steps[name].report() if name in self._steps else Report(0, 0, 0, 0, {}, 0, (), 0, None)
        return replace(report, failure=self._why_not[name]) if self._why_not[name] else report

    def _call(self, name: str, *args: Any) -> Any:
        """Take the place of `Strategy.validation_step` or `Strategy.test_step`."""
        # In the sanity check a step may do something else, and there are few batches.
        if self._why_not[name] or self._trainer.sanity_checking:
            return self._lightning_steps[name](*args)
        step = self._steps.get(name) or self._make_step(name)
        if step is None:
            return self._lightning_steps[name](*args)
        return step(self._trainer.current_epoch, *args)

    def _make_step(self, name: str) -> EvaluationStep | None:
        if problem := _why_not_captured(self._trainer, self._module, name):
            self._leave_to_lightning(name, problem)
            return None
        self._steps[name] = EvaluationStep(
            self._lightning_steps[name],
            name,
            self._module,
            device=self._trainer.strategy.root_device,
            options=self._options,
            give_up=lambda problem: self._leave_to_lightning(name, problem),
        )
        return self._steps[name]

    def _leave_to_lightning(self, name: str, problem: str) -> None:
        self._why_not[name] = problem
        self._give_up(
            f"{problem} Lightning calls {name} without a graph from here on. AmpkitCallback(validate=False) leaves all "
            "of validation and test to Lightning."
        )


def is_replaced(strategy: Strategy) -> bool:
    """Return whether an `Evaluation` has replaced the steps of this strategy."""
    return any(name in vars(strategy) for name in STEPS)


def _why_not_in(trainer: Trainer, options: Options) -> str:
    """Return why no evaluation of this Trainer is captured, "" if it can be."""
    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    if options.graph == "off":
        return "graph='off'"
    if problem := options.why_not_on(strategy.root_device):
        return problem
    name, kind = type(strategy).__name__, type(strategy)
    if not isinstance(strategy, SingleDeviceStrategy) or strategy.root_device.type not in ("cpu", "cuda"):
        return f"{name}: validation and test are captured on one device only."
    if kind.validation_step is not Strategy.validation_step or kind.test_step is not Strategy.test_step:
        return f"{name} has a validation_step or test_step of its own."
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
        return f"Trainer(precision={plugin.precision!r}), {type(plugin).__name__}, is not supported."
    return ""


def _why_not_captured(trainer: Trainer, module: LightningModule, name: str) -> str:
    """Return why this step of the module cannot be captured, and what to write instead; "" if it can."""
    if "dataloader_iter" in inspect.signature(getattr(module, name)).parameters:
        return f"{type(module).__name__}.{name} takes its batches from dataloader_iter. Write {name}(self, batch)."
    if problem := HostReads(module, LightningModule, name).problem or why_not_sharded(module):
        return problem
    device = trainer.strategy.root_device
    for path, param in module.named_parameters():
        if param.device != device:
            return f"parameter {path} is on {param.device}, not on {device}, and a graph runs on one device."
    if cudagraphs_of_its_own(module):
        return "the model is compiled with CUDA graphs of its own. Compile it in the default mode."
    return ""
