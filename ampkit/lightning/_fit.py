"""One `trainer.fit` with ampkit's step: what it replaces in the Trainer, who does each batch, and how all is restored.

Only public names of Lightning are replaced.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.amp import grad_scaler as upstream

from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._capture.graph.kernel_names import KernelTable
from .._capture.graph.report import Report
from .._capture.ranks.ranks import Ranks
from .._capture.ranks.shards import free_whole_parameters
from .._errors import AmpkitWarning
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import torch_class
from .._precision.module_rules import ModuleRules, why_not_applied
from .._precision.policy import Policy
from .._step.optimizer_place import place_of
from .._torch.optimizers import supports_amp_scaling
from .._torch.tensors.tree import tree_flatten
from .._user_line import users_level
from ._gradient_reads import GradientUses
from ._host_state import HostReads
from ._limits import SEVERAL_RANKS, why_not_optimizer, why_not_parameters
from ._measurements import FitMeasurements
from ._precision import plugin_for
from ._statistics import StatisticsReader, TrainingStatistics
from ._trainer_reads import TrainerReads
from ._trainer_step import BatchPlace, Clip, TrainerStep, read_compile

_IN_THE_BAR = {
    "loss_scale": "scale",
    "skipped_steps": "skipped",
    "grad_norm": "grad_norm",
    "samples_per_second": "samples/s",
    "replay_share": "replays",
}


class FitStep(Protocol):
    """What does the batches of a fit."""

    grad_norm: Tensor | None

    @property
    def engine(self) -> Engine:
        """What does the calls."""

    def report(self) -> Report:
        """Return graphs, replays, and eager steps with reasons, so far. Waits for the device."""


class Fit:
    """Replaces precision plugin, training step and progress-bar metrics of a Trainer; `end` puts the originals back."""

    steps_in_module = False  # whether training_step steps the optimizers itself

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        policy: Policy | None,
        scaler: GradScaler | None,
        options: Options,
        compile: str | None,
        measurements: FitMeasurements,
        give_up: Callable[[str], None],
        *,
        logs: bool,
    ) -> None:
        strategy = trainer.strategy
        self._trainer, self._module, self._measurements = trainer, module, measurements
        self._options, self._compile, self._give_up = options, compile, give_up
        self._logs = logs  # whether the statistics go to the loggers
        self._host_reads = HostReads(module)
        several_ranks = isinstance(strategy, SEVERAL_RANKS)  # one of them cannot turn to Lightning's step by itself
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        self._gradient_uses = GradientUses(module, callbacks, strict=several_ranks or options.on_failure == "raise")
        # Whether Lightning does the steps until the first optimizer step is over, so that hooks before it find the
        # gradients that they may use. With several ranks always: such a hook may exist on one of them only.
        self.first_step_by_lightning = several_ranks or bool(self._gradient_uses.hooks_before_step)
        self.device = strategy.root_device
        self._step: FitStep | None = None
        self._step_made_for: tuple[Any, ...] = ()
        self._in_bar: dict[str, float | str] = {}
        self.policy = policy
        self.statistics = StatisticsReader(self.device, trainer.world_size)
        self.problem = ""  # why Lightning does all steps from now on, if that was found after the fit began
        self.closure_problem: str | None = None  # the same, by the optimizer's first step; None before
        self.in_optimizer_step = False  # which Lightning enters for the last batch of a window
        self.backward_done = False  # by ampkit, for the current batch, so that Lightning's must do nothing
        self._window_ended = False
        self._lightning_plugin = strategy.precision_plugin
        self._lightning_scaler: upstream.GradScaler | None = getattr(self._lightning_plugin, "scaler", None)
        lightning = self._lightning_scaler
        if scaler is None and isinstance(lightning, GradScaler):
            scaler = lightning
        elif scaler is None:
            scaler = GradScaler(self.device.type, enabled=lightning is not None and lightning.is_enabled())
            if lightning is not None and scaler.is_enabled():
                scaler.load_state_dict(lightning.state_dict())
        self.scaler = scaler
        self._plugin = plugin_for(self, self._lightning_plugin)
        strategy.precision_plugin = self._plugin
        self._lightning_step = strategy.training_step
        vars(strategy)["training_step"] = self._training_step
        self._bar = trainer.progress_bar_callback
        if self._bar is not None:
            self._lightning_metrics = self._bar.get_metrics
            vars(self._bar)["get_metrics"] = lambda *args: {**self._lightning_metrics(*args), **self._in_bar}

    def end(self) -> None:
        """Put everything back and release the graphs."""
        self._trainer.strategy.precision_plugin = self._lightning_plugin
        vars(self._trainer.strategy).pop("training_step", None)
        self._gradient_uses.restore_hooks()
        if self._bar is not None:
            vars(self._bar).pop("get_metrics", None)
        policy = self.policy
        if policy is not None and policy.modules:
            rules = ModuleRules(policy.modules, policy.params, policy.output)
            if not why_not_applied(self._module, rules):
                policy.remove(self._module)
        # What asks the device comes last: an error of the device may be why the fit ends.
        self._give_scaler_back()
        if self._step is not None:
            self._step.engine.close()

    def _give_scaler_back(self) -> None:
        lightning = self._lightning_scaler
        if lightning is not None and lightning is not self.scaler and self.scaler.is_enabled():
            lightning.load_state_dict(self.scaler.state_dict())
        if isinstance(self._plugin, MixedPrecision):
            self._plugin.scaler = self._lightning_scaler

    def kernel_tables(self) -> list[KernelTable]:
        """Return the names of the kernels of all graphs so far."""
        return [] if self._step is None else self._step.engine.kernel_tables() or []

    def report(self) -> Report:
        """Return what happened to the batches so far. Waits for the device."""
        report = Report() if self._step is None else self._step.report()
        return replace(report, failure=self.problem) if self.problem else report

    def prepare_step(self) -> bool:
        """Return whether ampkit does the step of this batch. If it does, its `TrainerStep` exists from here on."""
        trainer = self._trainer
        if self.closure_problem is None:
            # A first step by Lightning shows what an optimizer that is not torch's does with its closure.
            self.closure_problem, foreign = "", torch_class(trainer.optimizers[0]) is None
            self.first_step_by_lightning = self.first_step_by_lightning or foreign
        self.first_step_by_lightning = self.first_step_by_lightning and not _lightning_refuses_to_clip(trainer)
        begins_window = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0  # Lightning calls zero_grad
        if self._gradient_uses.after_captured_step and begins_window and not self.problem:
            self._leave_to_lightning(self._gradient_uses.problem)
        if self.problem or self.first_step_by_lightning:
            return False
        made_for = (trainer.optimizers[0], trainer.strategy.model, _clip(trainer))
        if made_for != self._step_made_for:
            self._make_step(*made_for)
            self._step_made_for = made_for
        return not self.problem

    def _make_step(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, clip: Clip) -> None:
        if self._step is not None:
            self._step.engine.close()
        uses = self._gradient_uses
        free_whole_parameters(self._module)  # of a validation
        ranks = Ranks(model, self.device, captured=self._options.graph != "off")
        agreed = ranks.agree(not uses.problem)
        problem = (
            ("" if agreed else uses.problem or Ranks.other_found)
            or why_not_optimizer(optimizer)
            or self.closure_problem
            or why_not_parameters(self._trainer, self._module, optimizer)
        )
        not_with_optimizer, place = place_of([optimizer], self.scaler, self._options, ranks)
        if problem := problem or not_with_optimizer:
            self._leave_to_lightning(problem)
            self._give_up(f"{problem} Lightning trains without ampkit.")
            return
        if uses.gradients_exist and uses.hooks_before_step:
            hooks = ", ".join(uses.hooks_before_step)
            message = f"AmpkitCallback: from now on, {hooks} will be called after the optimizer's step, not before it."
            warnings.warn(message, AmpkitWarning, stacklevel=users_level())
        uses.gradients_exist = False
        uses.strict = uses.strict or _lightning_refuses_to_clip(self._trainer)
        self._step = TrainerStep(
            self._lightning_step,
            lambda: self._trainer.strategy.precision_plugin.train_step_context(),
            read_compile(self._compile, self._host_reads),
            self._module,
            ranks,
            optimizer,
            self._host_reads,
            TrainerReads(self._trainer, self._module, self._host_reads, "training_step"),
            device=self.device,
            scaler=self.scaler,
            clip=clip,
            options=self._options,
            observer=self._measurements.observer(self._module),
            place=place,
            give_up=lambda text: self._give_up(f"{text} Training goes on eagerly."),
        )

    def _leave_to_lightning(self, problem: str) -> None:
        self.problem, self.backward_done = problem, False
        self._gradient_uses.restore_hooks()
        self._give_scaler_back()
        if self._step is not None:
            self._step.engine.close()

    def _training_step(self, *args: Any) -> Any:
        """Take the place of `Strategy.training_step`."""
        if self._window_ended:
            self.read_statistics()
        samples = _batch_size(args[0])
        output, counts = self._batch(*args)
        if counts and self.statistics.interval_start is None:
            self.statistics.start_timing()
        elif counts:
            self.statistics.samples += samples
            self.statistics.batches += 1
        return output

    def _batch(self, *args: Any) -> tuple[Any, bool]:
        """Do the step of a batch. Return what `training_step` returned, and whether figures count it."""
        self.backward_done = False
        # In an optimizer step the precision plugin has asked already.
        if not self.in_optimizer_step and not self.prepare_step():
            self._window_ended = False
            return self._lightning_step(*args), False
        assert isinstance(self._step, TrainerStep)  # made by prepare_step
        trainer, steps_optimizer = self._trainer, self.in_optimizer_step
        window = trainer.accumulate_grad_batches
        place = BatchPlace(trainer.fit_loop.batch_idx % window == 0, steps_optimizer, window, trainer.current_epoch)
        if steps_optimizer and self._measurements.steps_before_recording is not None:
            with self._measurements.recording(self._module, trainer.optimizers[0], args[0]):
                output = self._step(place, *args)
        else:
            output = self._step(place, *args)
        self.backward_done = self._step.backward_done
        self._window_ended = steps_optimizer
        return output, True

    @property
    def steps_done(self) -> int:
        """The steps so far that figures are counted by: those of the optimizer."""
        return self._trainer.global_step

    def read_statistics(self) -> None:
        """Every `log_every_n_steps`, start new statistics and log the previous ones.

        To be called once behind each optimizer step: before the next batch, or before validation or the end of the
        epoch, whose time does not count.
        """
        ended, self._window_ended = self._window_ended, False
        trainer: Any = self._trainer  # some of its attributes are declared nowhere
        every = trainer.log_every_n_steps
        if not ended or self._step is None or self.problem or not every or self.steps_done % every:
            return
        if (self._logs and trainer.loggers) or self._bar is not None:
            step = self.steps_done - 1  # the number under which Lightning logs the metrics of this step
            replayed, calls = self._step.engine.counts()
            numbers = {"graph_replays": float(replayed), "replay_share": replayed / max(1, calls)}
            numbers.update(self._measurements.figures(self.device))
            self.log(self.statistics.start(step, self.scaler, self._step.grad_norm, numbers))

    def log(self, arrived: Sequence[TrainingStatistics]) -> None:
        """Give statistics to the progress bar, and to the loggers if they are to have them."""
        for step, values in arrived:
            self._in_bar = {short: values[name] for name, short in _IN_THE_BAR.items() if name in values}
            self._in_bar["replays"] = f"{values['replay_share']:.0%}"
            for logger in self._trainer.loggers if self._logs else ():
                logger.log_metrics({f"ampkit/{name}": value for name, value in values.items()}, step=step)


def _batch_size(batch: Any) -> int:
    """Return the samples in a batch: the first dimension of its first tensor that has one."""
    found = batch
    while type(found) in (list, tuple) and found:  # as most batches are; to flatten others takes longer
        found = found[0]
    if type(found) is Tensor and found.dim():
        return found.shape[0]
    leaves = (leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim())
    first = next(leaves, None)
    return 1 if first is None else first.shape[0]


def _clip(trainer: Trainer) -> Clip:
    limit = trainer.gradient_clip_val
    if limit is None or limit <= 0:
        return Clip(None, None)
    return Clip(None, float(limit)) if trainer.gradient_clip_algorithm == "value" else Clip(float(limit), None)


def _lightning_refuses_to_clip(trainer: Trainer) -> bool:
    """Return whether Lightning itself would raise when it clips the gradients of this optimizer."""
    unscales = supports_amp_scaling(trainer.optimizers[0])
    return unscales and isinstance(trainer.strategy.precision_plugin, MixedPrecision) and _clip(trainer) != (None, None)
