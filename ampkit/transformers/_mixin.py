"""What users put in front of a Trainer of transformers: its options, and when ampkit's step goes in and out."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from .._capture.graph.report import Report
from .._errors import CaptureError, CaptureWarning, InputMismatch
from .._user_line import users_level
from ._limits import read_options, reads_gradients, why_not
from ._trainer_graphs import GradientGraphs, TrainerGraphs


class GraphedTrainerMixin:
    """Runs the optimizer steps of a `transformers.Trainer` as CUDA graphs.

    ::

        class MyTrainer(GraphedTrainerMixin, Trainer): ...

    Trainers that are made from Trainer, such as those of TRL, take it in the same way. It stands in front of them.

    The graph of the last micro-batch of an optimizer step contains all that `training_step` does, the `compute_loss` of
    your class included, and backward, loss scale, clipping and optimizer. The graphs of the other micro-batches end
    with backward. The loop, callbacks, the schedule, logging, evaluation, saving and resuming stay the Trainer's. Where
    a training does something that a graph cannot contain, a warning names it, and the Trainer trains as always.

    The bits are those of the Trainer, but for what docs/capture.md says of clipping and of the learning rate on CUDA.
    A callback could read gradients, or weights before the optimizer steps, if it has `on_pre_optimizer_step`,
    `on_optimizer_step` or `on_substep_end`. Then forward and backward alone are captured, on one device. Elsewhere
    `param.grad` is None behind each call.

    With `logging_nan_inf_filter`, which is the default, the Trainer waits for each loss to see whether it is finite.
    Here it is filtered on the device, unless your class has a `training_step` of its own. With a loss scale (fp16) and
    an optimizer that is not fused, the host waits once per optimizer step to learn whether it was skipped: the schedule
    is not stepped then.

    Attributes:
        graph_options: options of `graphed_step` as a dict, which your class may set: `graph`, `warmup`, `verify`,
            `on_failure`, `generators`, `max_graphs`, `memory_budget`, `capturing`, `annotate`, `host_writes`, `cuts`,
            `arithmetic` and `compile`. Other ones are told by `TrainingArguments`. `capturing` is False if it is not
            set, since `compute_loss` may count on the host, and "auto" may call it twice for a batch.

    Raises:
        ValueError: for another option, or a class that puts Trainer in front; in `train`, for a value that cannot be.
        CaptureError: in `train`, with `graph_options = {"on_failure": "raise"}`, if steps cannot be captured.
    """

    graph_options: ClassVar[Mapping[str, Any]] = {}
    _graphs: TrainerGraphs | GradientGraphs | None = None  # of the training that is under way
    _left_to_trainer: bool = False  # whether this training is
    _last_report: Report | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(GraphedTrainerMixin)]
        trainers = [base.__name__ for base in before if "_inner_training_loop" in vars(base)]
        if trainers:
            raise ValueError(
                f"{cls.__name__}: {trainers[-1]} stands in front of GraphedTrainerMixin, so nothing would be captured. "
                f"Write class {cls.__name__}(GraphedTrainerMixin, {trainers[-1]})."
            )

    def graph_report(self) -> Report:
        """Return graphs, replays, and eager steps with reasons, of the current or last `train`. Waits for the device.

        Raises:
            ValueError: nothing was trained yet.
        """
        if self._graphs is not None:
            return self._graphs.report()
        if self._last_report is None:
            raise ValueError("GraphedTrainerMixin.graph_report(): there was no training step yet. Call train() before.")
        return self._last_report

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Do the part of an optimizer step that belongs to this batch. Return the loss. Sync: see the class."""
        plain: Any = super()
        if self._graphs is not None and self._graphs.is_outdated():
            self._end()
        if self._graphs is None and not self._left_to_trainer:
            self._begin(model, plain.training_step)
        if self._graphs is not None:
            try:
                return self._graphs(inputs, num_items_in_batch)
            except InputMismatch as error:  # nothing was done
                if self._graphs.has_gradients or self._graphs.several:
                    raise
                self._leave_to_trainer(str(error))
        loss: Tensor = plain.training_step(model, inputs, num_items_in_batch)
        return loss

    def _begin(self, model: nn.Module, training_step: Any) -> None:
        """Capture what follows. Here the Trainer has made model and optimizer, and has loaded a checkpoint."""
        options = read_options(self)
        reader = reads_gradients(self)
        problem = why_not(self, model, reader)
        if not problem:
            try:
                if not reader:
                    self._graphs = TrainerGraphs(self, model, training_step, options)
                else:
                    options = {name: value for name, value in options.items() if name not in ("arithmetic", "compile")}
                    self._graphs = GradientGraphs(self, model, training_step, options)
            except (NotImplementedError, ValueError) as error:  # of this model, or this optimizer
                problem = str(error)
        if problem:
            self._leave_to_trainer(problem)
        elif reader:
            text = f"GraphedTrainerMixin: {reader} Forward and backward are captured, and the Trainer does the rest."
            self._warn(text)

    def _leave_to_trainer(self, problem: str) -> None:
        self._end()
        self._left_to_trainer, self._last_report = True, Report(failure=problem)
        self._warn(f"GraphedTrainerMixin: {problem} The Trainer trains without ampkit.")

    def _warn(self, text: str) -> None:
        if self.graph_options.get("on_failure") == "raise":
            raise CaptureError(text)
        warnings.warn(text, CaptureWarning, stacklevel=users_level())

    def _end(self) -> None:
        """Give the Trainer its own optimizer and loss scale back."""
        if self._graphs is not None:
            graphs, self._graphs = self._graphs, None
            self._last_report = graphs.report()
            graphs.end()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        self._left_to_trainer = False
        try:
            return plain._inner_training_loop(*args, **kwargs)
        finally:
            self._end()

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Return the norm of the gradients, which the step has clipped."""
        plain: Any = super()
        return self._graphs.grad_norm if isinstance(self._graphs, TrainerGraphs) else plain._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        plain: Any = super()
        if isinstance(self._graphs, TrainerGraphs):
            return self._graphs.take_grad_norm()
        return plain._get_grad_norm(model, grad_norm)
