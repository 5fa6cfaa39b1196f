"""Validation and test with captured steps: what ampkit replaces in a Trainer, which batches it does, how that ends."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from .._capture.engine.options import Options
from .._capture.graph.report import Report
from ._evaluation_step import EvaluationStep
from ._limits import why_not_module

# The step that Lightning calls in a stage of the Trainer, beside `training_step`.
STEP_OF = {"fit": "validation_step", "validate": "validation_step", "test": "test_step"}
STEPS = ("validation_step", "test_step")


class Evaluation:
    """Replaces `validation_step` or `test_step` of a Trainer's strategy; `end` puts the original back.

    To be made before anything else of the Trainer is replaced. `give_up` is called with the reason if the step is left
    to Lightning. It issues a warning, or raises.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, name: str, options: Options, give_up: Callable[[str], None]
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._name = name
        self._options = options
        self._give_up = give_up
        self._step: EvaluationStep | None = None
        self._why_not = _why_not_in(trainer, name, options)
        self._lightning_step = getattr(trainer.strategy, name)
        if not self._why_not:
            vars(trainer.strategy)[name] = self._call

    def end(self) -> None:
        """Put the step back and release the graphs."""
        vars(self._trainer.strategy).pop(self._name, None)
        if self._step is not None:
            self._step.close()

    def report(self) -> Report:
        """Return what happened to the batches so far. Waits for the device."""
        report = Report(0, 0, 0, 0, {}, 0, (), 0, None) if self._step is None else self._step.report()
        return replace(report, failure=self._why_not) if self._why_not else report

    def _call(self, *args: Any) -> Any:
        """Take the place of `Strategy.validation_step` or `Strategy.test_step`."""
        # In the sanity check a step may do something else, and there are few batches.
        if self._why_not or self._trainer.sanity_checking:
            return self._lightning_step(*args)
        if self._step is None:
            problem, name = why_not_module(self._module, self._trainer.strategy), self._name
            if "dataloader_iter" in inspect.signature(getattr(self._module, name)).parameters:
                kind = type(self._module).__name__
                problem = f"{kind}.{name} takes its batches from dataloader_iter. Write {name}(self, batch)."
            if problem:
                self._leave_to_lightning(problem)
                return self._lightning_step(*args)
            self._step = EvaluationStep(
                self._lightning_step,
                name,
                self._module,
                self._trainer,
                device=self._trainer.strategy.root_device,
                options=self._options,
                give_up=self._leave_to_lightning,
            )
        return self._step(self._trainer.current_epoch, *args)

    def _leave_to_lightning(self, problem: str) -> None:
        self._why_not = problem
        self._give_up(
            f"{problem} Lightning calls {self._name} without a graph from here on. AmpkitCallback(validate=False) "
            "leaves all of validation and test to Lightning."
        )


def _why_not_in(trainer: Trainer, step: str, options: Options) -> str:
    """Return why this Trainer does not let the step be captured, "" if it does."""
    strategy, plugin = trainer.strategy, trainer.strategy.precision_plugin
    if options.graph == "off":
        return "graph='off'"
    name, kind = type(strategy).__name__, type(strategy)
    if not isinstance(strategy, SingleDeviceStrategy) or strategy.root_device.type not in ("cpu", "cuda"):
        return f"{name}: validation and test are captured on one device only."
    if problem := options.why_not_on(strategy.root_device):
        return problem
    if getattr(kind, step) is not getattr(Strategy, step):
        return f"{name} has a {step} of its own."
    if type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
        return f"Trainer(precision={plugin.precision!r}), {type(plugin).__name__}, is not supported."
    return ""
