"""The callback that users pass to a Trainer: its arguments, its hooks, and when ampkit's step goes in and out."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("ampkit.lightning needs Lightning. Run: pip install 'ampkit[lightning]'") from error

from .._arguments import check_choice, check_flag, wrong
from .._capture.engine.options import Options
from .._capture.graph.kernel_names import KernelTable
from .._capture.graph.report import Report
from .._errors import CaptureError, CaptureWarning
from .._optimizer.scaler import GradScaler
from .._precision.float8 import chooses
from .._precision.policy import Policy, read_policy
from .._step.compile.compile_choice import COMPILE, check_compile
from .._user_line import users_level
from ..debug._memory.profile import MemoryProfile
from ..debug._numerics.numerics import Numerics
from ._evaluation import STEP_OF, STEPS, Evaluation
from ._fit import Fit
from ._limits import SEVERAL_RANKS, why_not
from ._manual import ManualFit
from ._measurements import FitMeasurements
from ._precision import StepPrecision


class AmpkitCallback(Callback):
    """Runs the training step of a Lightning Trainer as one CUDA graph: `Trainer(callbacks=[AmpkitCallback()])`.

    Forward, backward, loss scale, clipping and optimizer are captured. Hooks, `self.log`, `global_step`, schedulers,
    checkpoints and accumulation stay Lightning's. With `automatic_optimization=False` the whole `training_step` is
    captured, with the steps of the optimizers in it. Where a model or a Trainer does something that a graph cannot
    contain, such as a hook that uses gradients, a warning names it, and training goes on without a graph.

    Args:
        policy: None takes the dtypes of `Trainer(precision=...)`. A policy that you pass must have the same dtypes. Its
            rules for operations and modules then apply to training and validation while `fit` runs.
        graph: "auto" uses a CUDA graph if the model is on CUDA. "emulate" runs the same engine without a graph, on any
            device. "off" trains eagerly, with ampkit's loss scale and clipping.
        scaler: a loss scaler with settings of your own. None makes one if Lightning has one ("16-mixed"), with its
            settings; if Lightning's has methods of its own, Lightning trains without ampkit, with a warning.
        warmup: eager steps per input layout before it is captured.
        max_graphs: the callback keeps at most this many graphs.
        memory_budget: bytes that all graphs may take together. None sets no limit.
        verify: as for `graphed_step`.
        on_failure: as for `graphed_step`.
        annotate: note which module each kernel belongs to, for `ampkit.debug.name_kernels(trace, callback)`.
        host_writes, cuts: as for `graphed_step`.
        numerics: measure what `ampkit.debug.numerics` does, once in this many optimizer steps. None measures nothing.
        memory: record what takes the memory in one of the first eager steps, as `ampkit.debug.memory` does.
        compile: "default" or "max" has torch.compile compile `training_step`, its backward, and the update of the
            parameters, as `graphed_step(compile=...)` does. Then `warmup` is at least 3. None compiles nothing.
        validate: "auto" captures `validation_step` and `test_step` too, in `fit`, `validate` and `test`, on one device.
            They return and log the same bits. What a replay would leave out, such as an attribute that the step
            changes, is found in the warm-up as in training, and Lightning then calls the step as always. Their graphs
            have a memory pool of their own. False leaves validation and test to Lightning.
        log: whether the figures below go to the loggers. The progress bar shows them in any case.

    Raises:
        ValueError: if an argument cannot work, or, in `fit`, if the policy differs from the Trainer's precision, or if
            something is compiled already that `compile` is to compile.
        NotImplementedError: for `compile` with `numerics`, with `memory`, or, in `fit`, with several processes. In
            `fit`, for each of the three with `automatic_optimization=False`.

    Every `log_every_n_steps`, the progress bar and every logger get the loss scale, the number of skipped steps, the
    gradient norm (if there is a loss scale or clipping), samples per second, milliseconds per batch, graph replays and
    their share of all batches. They are written one interval late or later, so that nothing waits for the device. With
    `numerics` and `memory` their figures go to the loggers too, under `ampkit/numerics/` and `ampkit/memory/`.
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
        verify: int | str = 0,
        on_failure: str = "parts",
        annotate: bool = False,
        host_writes: str | Sequence[str] = "name",
        cuts: bool = True,
        numerics: int | None = None,
        memory: bool = False,
        validate: str | bool = "auto",
        log: bool = True,
        compile: str | None = None,
    ) -> None:
        self._options = Options(
            graph=graph,
            warmup=warmup,
            on_failure=on_failure,
            verify=verify,
            max_graphs=max_graphs,
            memory_budget=memory_budget,
            annotate=annotate,
            host_writes=host_writes,
            cuts=cuts,
        ).checked("AmpkitCallback")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ValueError(f"AmpkitCallback(scaler={type(scaler).__name__}): pass an ampkit.GradScaler.")
        if validate is not False and validate != "auto":
            raise wrong("AmpkitCallback", "validate", validate, "'auto' or False")
        check_flag("AmpkitCallback", "log", log)
        self._validate, self._log = validate, log
        self._policy = read_policy("AmpkitCallback", policy)
        if self._policy is not None and self._policy.rounding is not None:
            raise NotImplementedError(
                f"AmpkitCallback(policy={str(self._policy)!r}): the rounding of parameters is for graphed_step so far. "
                "Leave rounding out."
            )
        self._scaler = scaler
        if compile is not None:
            check_choice("AmpkitCallback", "compile", compile, COMPILE)
            if numerics is not None or memory:
                raise NotImplementedError(
                    f"AmpkitCallback(compile={compile!r}, numerics=..., memory=...): compiled code has no modules that "
                    "could be measured. Pass compile=None while you measure."
                )
        self._compile = compile
        captured_after = None if graph == "off" else warmup
        self._measures = numerics is not None or memory
        self._new_measurements = functools.partial(FitMeasurements, numerics, memory, captured_after)
        self._measurements = self._new_measurements()
        self._fit: Fit | None = None
        self._last_tables: list[KernelTable] = []
        self._evaluation: Evaluation | None = None
        self._last_reports: dict[str, Callable[[], Report]] = {}

    @property
    def numerics(self) -> Numerics | None:
        """The measurements of numbers in the current or last `fit`. None if `numerics` was not passed."""
        return self._measurements.numerics

    @property
    def memory(self) -> MemoryProfile | None:
        """The memory of one step of the current or last `fit`. None without `memory=True`, and before that step."""
        return self._measurements.memory_profile

    def report(self, step: str = "training_step") -> Report:
        """Return graphs, replays, and eager steps with reasons, of the current or last `fit`. Waits for the device.

        Args:
            step: "training_step"; or "validation_step" or "test_step", of the current or last `fit`, `validate` or
                `test`. The batches of Lightning's sanity check are not counted.
        """
        check_choice("AmpkitCallback.report", "step", step, ("training_step", *STEPS))
        return self._last_reports.get(step, Report)()

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return what `ampkit.debug.name_kernels` reads, of the current or last `fit`. None without `annotate=True`."""
        if not self._options.annotate:
            return None
        return self._last_tables if self._fit is None else self._fit.kernel_tables()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put ampkit's steps into the Trainer when `fit`, `validate` or `test` begins."""
        strategy = trainer.strategy
        is_replaced = any(name in vars(strategy) for name in STEPS)
        if is_replaced or isinstance(strategy.precision_plugin, StepPrecision):
            raise ValueError("Trainer(callbacks=[...]): there are two AmpkitCallbacks. Pass one.")
        if self._validate and stage in STEP_OF:  # first, for it looks at the plugin that a fit replaces
            name = STEP_OF[stage]
            self._evaluation = Evaluation(trainer, pl_module, name, self._options, self._give_up)
            self._last_reports[name] = self._evaluation.report
        if stage != "fit":
            return
        plugin = strategy.precision_plugin
        problem = why_not(trainer, pl_module, plugin, self._compile, self._scaler)
        if problem:
            self._last_reports["training_step"] = lambda: Report(failure=problem)
            self._give_up(f"{problem} Lightning trains without ampkit.")
            return
        if (policy := self._policy) is not None:
            trainers = Policy.parse(str(plugin.precision))
            if (policy.params, policy.compute, policy.output) != (trainers.params, trainers.compute, trainers.output):
                raise ValueError(
                    f"AmpkitCallback(policy={str(policy)!r}) and Trainer(precision={plugin.precision!r}), which is "
                    f"{str(trainers)!r}, disagree. Pass one of them, or the same dtypes in both."
                )
            if any(chooses(rule) for _, rule in policy.modules):
                raise ValueError(
                    f"AmpkitCallback(policy={str(policy)!r}): only graphed_step chooses the layers that compute in "
                    "float8. Name them, as its step.policy does: modules={'blocks.*.mlp': 'float8'}."
                )
        if self._compile is not None and isinstance(strategy, SEVERAL_RANKS):
            raise NotImplementedError(
                f"AmpkitCallback(compile={self._compile!r}) does not work with several processes. Pass compile=None, "
                "and compile the networks in your module: self.net = torch.compile(self.net)."
            )
        if not pl_module.automatic_optimization and (self._measures or self._compile is not None):
            raise NotImplementedError(
                "AmpkitCallback(numerics=..., memory=..., compile=...) needs automatic optimization. Leave them out, "
                "and compile the networks in your module: self.net = torch.compile(self.net)."
            )
        check_compile("AmpkitCallback", self._compile, pl_module, pl_module.training_step, None)
        self._measurements = self._new_measurements()
        self._fit = (Fit if pl_module.automatic_optimization else ManualFit)(
            trainer,
            pl_module,
            self._policy,
            self._scaler,
            self._options,
            self._compile,
            self._measurements,
            self._give_up,
            logs=self._log,
        )
        self._last_reports["training_step"] = self._fit.report

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the Trainer its own steps back."""
        # Reports are made before the graphs that they count are released.
        ended = [] if self._fit is None else ["training_step"]
        ended += [] if self._evaluation is None else [STEP_OF[stage]]
        for step in ended:
            self._last_reports[step] = functools.partial(replace, self._last_reports[step]())
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the Trainer its own steps back: Lightning calls no `teardown` after an error."""
        self._end()

    def _end(self) -> None:
        if self._evaluation is not None:
            self._evaluation.end()
            self._evaluation = None
        if self._fit is not None:
            self._last_tables = self._fit.kernel_tables()
            self._fit.end()
            self._fit = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the statistics of the step before."""
        if self._fit is not None:
            self._fit.read_statistics()

    on_train_epoch_end = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude the time of validation, or between epochs, from the samples per second."""
        if self._fit is not None:
            self._fit.statistics.interval_start = None  # until the end of the next batch

    on_train_epoch_start = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last statistics."""
        if self._fit is not None:
            self._fit.log(self._fit.statistics.finish())

    def _give_up(self, text: str) -> None:
        """Warn that steps are not captured, or raise: what `on_failure` asks for."""
        if self._options.graph == "off":
            return
        if self._options.on_failure == "raise":
            raise CaptureError(f"AmpkitCallback: {text}")
        warnings.warn(f"AmpkitCallback: {text}", CaptureWarning, stacklevel=users_level())
