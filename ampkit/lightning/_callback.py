"""How a captured step gets into a Lightning Trainer: what takes the place of what, by public names, and is put back."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp import grad_scaler as upstream

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError("ampkit.lightning needs Lightning. Run: pip install 'ampkit[lightning]'") from error

from .._capture.options import Options
from .._capture.ranks import Ranks
from .._capture.report import Report
from .._errors import AmpkitWarning, CaptureError, CaptureWarning
from .._optimizer.scaler import GradScaler
from .._precision.module_rules import ModuleRules, why_not_applied
from .._precision.policy import Policy, read_policy
from .._torch.optimizers import supports_amp_scaling
from .._torch.tree import tree_flatten
from ..debug._memory.profile import MemoryProfile
from ..debug._numerics.numerics import Numerics
from ._gradient_reads import GradientUses
from ._host_state import HostReads
from ._limits import why_not, why_not_optimizer, why_not_parameters
from ._precision import StepPrecision, plugin_for
from ._statistics import Meter, Reading
from ._trainer_step import Clip, Place, TrainerStep
from ._watch import Watch


class AmpkitCallback(Callback):
    """Runs the training step of a Lightning Trainer as one CUDA graph: `Trainer(callbacks=[AmpkitCallback()])`.

    Forward, backward, loss scale, clipping and optimizer are captured; hooks, `self.log`, `global_step`, schedulers,
    checkpoints and accumulation stay Lightning's. Where a model or a Trainer does something that a graph cannot hold,
    such as a hook that uses gradients, a warning says what, and training goes on without one.

    Args:
        policy: None takes that of `Trainer(precision=...)`. One that is given must have the same dtypes; its rules for
            operations and modules hold in training and validation while `fit` runs.
        graph: "auto": a CUDA graph if the model is on CUDA. "emulate": the same engine without a graph, on any device.
            "off": eager, with ampkit's loss scale and clipping.
        scaler: loss scale with a rule of its own. None makes one where Lightning has one ("16-mixed").
        warmup: eager steps per input layout before it is captured.
        max_graphs: how many graphs are kept.
        memory_budget: bytes that all graphs may take together, None without limit.
        verify: compare the first so many replays with eager steps, bit by bit.
        on_failure: "eager": if nothing can be captured, or nothing is because the batch or a setting was new in each of
            32 calls, warn and go on. "raise": raise `CaptureError`.
        numerics: measure what `ampkit.debug.numerics` does once in this many optimizer steps. None measures nothing.
        memory: record who holds the memory in one of the eager steps at the beginning, as `ampkit.debug.memory` does.

    Raises:
        ValueError: an argument that cannot work, or in `fit` a policy that differs from the Trainer's precision.

    Loss scale, skipped steps, gradient norm (where there is a loss scale or clipping), samples per second and graph
    replays go to the progress bar and to every logger each `log_every_n_steps`, as of one such interval before: so
    nothing waits for the device. With `numerics` and `memory` their figures go to the loggers too, under
    `ampkit/numerics/` and `ampkit/memory/`.

    """

    def __init__(
        self,
        policy: Policy | str | None = None,
        *,
        graph: str = "auto",
        scaler: GradScaler | None = None,
        warmup: int = 3,
        max_graphs: int = 16,
        memory_budget: int | None = None,
        verify: int = 0,
        on_failure: str = "eager",
        numerics: int | None = None,
        memory: bool = False,
    ) -> None:
        options = Options(graph, warmup, on_failure, verify, (), max_graphs, memory_budget)
        self._options = options.checked("AmpkitCallback")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(f"AmpkitCallback(scaler={type(scaler).__name__}): pass an ampkit.GradScaler.")
        self._policy = read_policy("AmpkitCallback", policy)
        self._scaler = scaler
        self._watches = functools.partial(Watch, numerics, memory, None if graph == "off" else warmup)
        self._watch = self._watches()
        self._fit: _Fit | None = None
        self._last_report: Callable[[], Report] = lambda: _nothing_captured(None)

    @property
    def numerics(self) -> Numerics | None:
        """What measures the numbers of the `fit` that runs or ran last, None without."""
        return self._watch.numerics

    @property
    def memory(self) -> MemoryProfile | None:
        """Who held the memory in a step of the `fit` that runs or ran last; None without, and before that step."""
        return self._watch.profile

    def report(self) -> Report:
        """Return graphs, replays, eager steps and why, of the `fit` that runs or ran last. Waits for the device."""
        return self._last_report()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put ampkit's step into the Trainer, when `fit` begins."""
        if stage != "fit":
            return
        if isinstance(trainer.strategy.precision_plugin, StepPrecision):
            raise ValueError("Trainer(callbacks=[...]): there are two AmpkitCallbacks. Pass one.")
        if self._options.verify and isinstance(trainer.strategy, DDPStrategy):
            raise NotImplementedError(
                "AmpkitCallback(verify=...): ranks that compare and repeat steps on their own would wait for each "
                "other for ever. Verify on one device."
            )
        plugin = trainer.strategy.precision_plugin
        problem = why_not(trainer, pl_module, plugin)
        if problem:
            self._last_report = lambda: _nothing_captured(problem)
            self._give_up(f"{problem} Training goes on as Lightning does it.")
            return
        _check_policy(self._policy, plugin)
        self._watch = self._watches()
        self._fit = _Fit(trainer, pl_module, self._policy, self._scaler, self._options, self._watch, self._give_up)
        self._last_report = self._fit.report

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put back what was there before, when `fit` ends."""
        if self._fit is not None:
            report = self._fit.report()
            self._last_report = lambda: report  # with the graphs that are released now
            self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put back what was there before: Lightning calls no `teardown` after an error."""
        self._leave()

    def _leave(self) -> None:
        if self._fit is not None:
            self._fit.leave()
            self._fit = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count samples; every `log_every_n_steps` write a reading."""
        if self._fit is not None:
            self._fit.on_batch_end(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the time of validation out of the samples per second."""
        if self._fit is not None:
            self._fit.meter.restart()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the time between epochs out of the samples per second."""
        if self._fit is not None:
            self._fit.meter.restart()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the last reading."""
        if self._fit is not None:
            self._fit.write(self._fit.meter.finish())

    def _give_up(self, text: str) -> None:
        if self._options.graph == "off":
            return
        if self._options.on_failure == "raise":
            raise CaptureError(f"AmpkitCallback: {text}")
        warnings.warn(f"AmpkitCallback: {text}", CaptureWarning, stacklevel=3)


# ----------------------------------------------------------------------------------------------- what is put into a fit


class _Fit:
    """What is changed in a Trainer from `setup` to `teardown`, and the step that it trains by.

    Attributes:
        policy: of the user, None if there is none.
        scaler: takes the place of Lightning's.
        meter: takes the readings.
        problem: why Lightning does everything, which showed late; "" while it does not.
        looking: Lightning does the first step, so that hooks between backward and step find the gradients they may use.
        in_optimizer_step: Lightning is within the optimizer's step, which it enters for the last batch of a window.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        policy: Policy | None,
        scaler: GradScaler | None,
        options: Options,
        watch: Watch,
        give_up: Callable[[str], None],
    ) -> None:
        strategy = trainer.strategy
        self._trainer = trainer
        self._module = module
        self._options = options
        self._watch = watch
        self._give_up = give_up
        self._reads = HostReads(module, LightningModule)
        several = isinstance(strategy, DDPStrategy)  # one of several ranks cannot turn to Lightning's step by itself
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        self._uses = GradientUses(module, callbacks, strict=several or options.on_failure == "raise")
        self.looking = several or bool(self._uses.amid)  # callbacks of one rank alone may have such hooks
        self.device = strategy.root_device
        self._step: TrainerStep | None = None
        self._made_for: tuple[Any, ...] = ()
        self._shown: dict[str, float] = {}
        self.policy = policy
        self.meter = Meter(self.device, trainer.world_size)
        self.problem = ""
        self.in_optimizer_step = False
        self._ended_window = False
        # What is put in the place of what.
        self._lightning_plugin = strategy.precision_plugin
        self._lightning_scaler: upstream.GradScaler | None = getattr(self._lightning_plugin, "scaler", None)
        self.scaler = _scaler_for(scaler, self._lightning_scaler, self.device)
        self._plugin = plugin_for(self, self._lightning_plugin)
        strategy.precision_plugin = self._plugin
        self._lightning_step = strategy.training_step
        vars(strategy)["training_step"] = self._training_step
        self._bar = trainer.progress_bar_callback
        if self._bar is not None:
            self._lightning_metrics = self._bar.get_metrics
            vars(self._bar)["get_metrics"] = self._bar_metrics

    def leave(self) -> None:
        """Put everything back and release the graphs."""
        self._trainer.strategy.precision_plugin = self._lightning_plugin
        vars(self._trainer.strategy).pop("training_step", None)
        self._uses.leave()
        if self._bar is not None:
            vars(self._bar).pop("get_metrics", None)
        if self.policy is not None and self.policy.modules and not why_not_applied(self._module, _rules(self.policy)):
            self.policy.remove(self._module)
        # Last what asks the device, which may be the reason why the fit has ended.
        self._give_scaler_back()
        if self._step is not None:
            self._step.close()

    def _give_scaler_back(self) -> None:
        lightning = self._lightning_scaler
        if lightning is not None and lightning is not self.scaler and self.scaler.is_enabled():
            lightning.load_state_dict(self.scaler.state_dict())
        if isinstance(self._plugin, MixedPrecision):
            self._plugin.scaler = self._lightning_scaler

    def report(self) -> Report:
        """Return what happened to the batches so far."""
        report = _nothing_captured(None) if self._step is None else self._step.report()
        return replace(report, failure=self.problem) if self.problem else report

    # ------------------------------------------------------------------------------------------------------ one batch

    @property
    def plain(self) -> bool:
        """Whether Lightning does everything."""
        return bool(self.problem)

    @property
    def stepped(self) -> bool:
        """Whether the batch under way had its backward, so that Lightning's must do nothing."""
        return not self.plain and self._step is not None and self._step.stepped

    def begin(self) -> bool:
        """Return whether ampkit does the step of this batch, having made what does it."""
        trainer = self._trainer
        self.looking = self.looking and not _refuses_to_clip(trainer)
        if self._uses.late and self._begins_window and not self.plain:
            self._leave_to_lightning(self._uses.problem)
        if self.plain or self.looking:
            return False
        made_for = (trainer.optimizers[0], trainer.strategy.model, _clip(trainer))
        if made_for != self._made_for:
            self._make(*made_for)
            self._made_for = made_for
        return not self.plain

    @property
    def _begins_window(self) -> bool:
        """Whether Lightning calls zero_grad for this batch."""
        return bool(self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches == 0)

    def _make(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, clip: Clip) -> None:
        if self._step is not None:
            self._step.close()
        agreed = Ranks(model, self.device).agree(not self._uses.problem)
        problem = (
            ("" if agreed else self._uses.problem or Ranks.other_found)
            or why_not_optimizer(optimizer)
            or why_not_parameters(self._module, optimizer, self.device)
        )
        if problem:
            self._leave_to_lightning(problem)
            self._give_up(f"{problem} Training goes on as Lightning does it.")
            return
        if self._uses.there and self._uses.amid:
            message = f"AmpkitCallback: {', '.join(self._uses.amid)}: called as ever, but from now on behind the step."
            warnings.warn(message, AmpkitWarning, stacklevel=2)
        self._uses.there = False
        self._uses.strict = self._uses.strict or _refuses_to_clip(self._trainer)
        assert model is not None  # Lightning sets it up before the first batch
        self._step = TrainerStep(
            self._lightning_step,
            self._module,
            model,
            optimizer,
            self._reads,
            device=self.device,
            scaler=self.scaler,
            clip=clip,
            options=self._options,
            observer=self._watch.observer(self._module),
            give_up=lambda text: self._give_up(f"{text} Training goes on eagerly."),
        )

    def _leave_to_lightning(self, problem: str) -> None:
        self.problem = problem
        self._uses.leave()
        self._give_scaler_back()
        if self._step is not None:
            self._step.close()

    def _training_step(self, *args: Any) -> Any:
        """Take the place of `Strategy.training_step`."""
        self._ended_window = self.in_optimizer_step
        if not self.begin():
            return self._lightning_step(*args)
        assert self._step is not None  # made by begin
        trainer = self._trainer
        every = trainer.accumulate_grad_batches
        place = Place(self._begins_window, self.in_optimizer_step, every, trainer.current_epoch)
        with self._watch.recording(self._module, trainer.optimizers[0], args[0], place.last):
            return self._step(place, *args)

    # ------------------------------------------------------------------------------------------------------- readings

    def on_batch_end(self, batch: Any) -> None:
        """Count the samples of a batch; every so many steps take a reading and write the one before."""
        if self._step is None or self.plain:
            return
        self.meter.count(_size(batch))
        trainer: Any = self._trainer  # some of its attributes are declared nowhere
        every = trainer.log_every_n_steps
        shown = trainer.loggers or self._bar is not None
        if shown and every and self._ended_window and trainer.global_step % every == 0:
            step = trainer.global_step - 1  # the number that Lightning logs metrics of this step under
            numbers = {"graph_replays": float(self._step.replays), **self._watch.figures(self.device)}
            self.write(self.meter.take(step, self.scaler, self._step.grad_norm, numbers))

    def write(self, reading: Reading | None) -> None:
        """Give a reading to the loggers and to the progress bar."""
        if reading is None:
            return
        self._shown = {short: reading.values[name] for name, short in _IN_THE_BAR.items() if name in reading.values}
        for logger in self._trainer.loggers:
            logger.log_metrics({f"ampkit/{name}": value for name, value in reading.values.items()}, step=reading.step)

    def _bar_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """Take the place of `ProgressBar.get_metrics`."""
        return {**self._lightning_metrics(trainer, module), **self._shown}


_IN_THE_BAR = {
    "loss_scale": "scale",
    "skipped_steps": "skipped",
    "grad_norm": "grad_norm",
    "samples_per_second": "samples/s",
    "graph_replays": "replays",
}


def _scaler_for(given: GradScaler | None, lightning: upstream.GradScaler | None, device: torch.device) -> GradScaler:
    """Return the given scaler, or one with the state of Lightning's; disabled where there is neither."""
    if given is not None:
        return given
    if isinstance(lightning, GradScaler):
        return lightning
    scaler = GradScaler(device.type, enabled=lightning is not None and lightning.is_enabled())
    if lightning is not None and scaler.is_enabled():
        scaler.load_state_dict(lightning.state_dict())
    return scaler


def _clip(trainer: Trainer) -> Clip:
    limit = trainer.gradient_clip_val
    if limit is None or limit <= 0:
        return Clip(None, None)
    return Clip(None, float(limit)) if trainer.gradient_clip_algorithm == "value" else Clip(float(limit), None)


def _refuses_to_clip(trainer: Trainer) -> bool:
    """Return whether Lightning, by itself, would refuse to clip the gradients of this optimizer."""
    unscales = supports_amp_scaling(trainer.optimizers[0])
    return unscales and isinstance(trainer.strategy.precision_plugin, MixedPrecision) and _clip(trainer) != (None, None)


def _size(batch: Any) -> int:
    """Return how many samples a batch holds: the length of its first tensor."""
    leaves = (leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and leaf.dim())
    first = next(leaves, None)
    return 1 if first is None else first.shape[0]


def _check_policy(policy: Policy | None, plugin: Precision) -> None:
    if policy is None:
        return
    trainers = Policy.parse(str(plugin.precision))
    if (policy.params, policy.compute, policy.output) != (trainers.params, trainers.compute, trainers.output):
        raise ValueError(
            f"AmpkitCallback(policy={str(policy)!r}) and Trainer(precision={plugin.precision!r}), which is "
            f"{str(trainers)!r}, disagree. Give one of them, or the same dtypes in both."
        )


def _rules(policy: Policy) -> ModuleRules:
    return ModuleRules(policy.modules, policy.params, policy.output)


def _nothing_captured(reason: str | None) -> Report:
    return Report(0, 0, 0, 0, {}, 0, (), 0, reason)
