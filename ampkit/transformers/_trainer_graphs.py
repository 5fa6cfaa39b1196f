"""One micro-batch of a Trainer as one call of a graphed step, and what the Trainer finds of it behind the call."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._capture.graph.report import Report
from .._errors import AmpkitError
from .._optimizer.scaler import GradScaler
from .._step.graphed import graphed
from .._step.graphed_step import graphed_step
from .._step.window import Place
from .._torch.optimizers import note_step, supports_amp_scaling
from .._undo import Undo


class _KeepsLoss:
    """Takes the place of `accelerator.backward`, and keeps the loss that it is called with."""

    value: Tensor | None = None

    def __call__(self, loss: Tensor, **_: Any) -> None:
        self.value = loss


class _AsItIs:
    """Takes the place of `_prepare_inputs`: the batch is prepared once, before the call."""

    def __call__(self, inputs: Any) -> Any:
        return inputs


class _NotSplit:
    """Takes the place of `_prepare_context_parallel_inputs`."""

    def __call__(self, model: nn.Module, inputs: Any) -> tuple[Callable[[], Any], Any]:
        return nullcontext, inputs


class _OptimizerStep:
    """Takes the place of the `step` of accelerate's optimizer, and does nothing where the graph has stepped."""

    _wrapped_by_lr_sched = True  # as schedulers of torch want it

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._own, self._plain = optimizer, vars(optimizer).get("step"), optimizer.step
        self.done: bool = False  # whether the graph has stepped
        optimizer.step = self

    def __call__(self, closure: Any = None) -> Any:
        if not self.done:
            return self._plain(closure)
        self.done = False
        note_step(self._optimizer)
        return None

    def end(self) -> None:
        """Give the optimizer its own method back."""
        del self._optimizer.step
        if self._own is not None:
            self._optimizer.step = self._own


_PREPARED, _NOT_SPLIT = _AsItIs(), _NotSplit()  # objects, as ampkit takes a function of its own for one that hides


def prepared(trainer: Any, model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """Do what the Trainer does before a forward, and return the arguments of the call that does the rest.

    The last one is the number of micro-batches by which the Trainer may divide the loss. As it is an argument, each
    number has graphs of its own.
    """
    _reduce_gradients(model)
    model.train()  # before the call, because train and eval mode have graphs of their own
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    inputs = trainer._prepare_inputs(inputs)
    return dict(inputs), type(inputs), trainer.current_gradient_accumulation_steps


def _reduce_gradients(model: Any) -> None:
    """Have `fully_shard` reduce gradients in each micro-batch: the Trainer has it do so in the last one only.

    A graph adds up shards, and no whole gradients. Behind each call the Trainer sets the same.
    """
    set_sync: Callable[[bool], None] | None = getattr(model, "set_requires_gradient_sync", None)
    if set_sync is not None:
        set_sync(True)


def replace_within_call(undo: Undo, trainer: Any, **of_accelerator: Any) -> None:
    """Have the Trainer's `training_step` take the batch as it is, and replace methods of its accelerator."""
    of_trainer = {"_prepare_inputs": _PREPARED, "_prepare_context_parallel_inputs": _NOT_SPLIT}
    for owner, methods in ((trainer, of_trainer), (trainer.accelerator, of_accelerator)):
        for name, method in methods.items():
            undo.note(vars(owner).pop, name, None)
            setattr(owner, name, method)


class GradientGraphs:
    """Calls the Trainer's `training_step` as a graph, and leaves the gradients in `param.grad` for the Trainer.

    Attributes:
        has_gradients: False, as the Trainer can go on without graphs behind each call.
        several: False, as there is one process.
    """

    has_gradients: bool = False
    several: bool = False

    def __init__(
        self, trainer: Any, model: nn.Module, training_step: Callable[..., Tensor], options: Mapping[str, Any]
    ) -> None:
        self._trainer, self._model, self._training_step = trainer, model, training_step
        self._function = graphed(modules=(model,), **options)(self._call)

    def __call__(self, inputs: Any, num_items_in_batch: Any) -> Any:
        """Do forward and backward of this micro-batch. Return what `training_step` returned."""
        arguments = prepared(self._trainer, self._model, inputs)
        with Undo() as undo:
            replace_within_call(undo, self._trainer)
            return self._function(num_items_in_batch, *arguments)

    def _call(self, num_items_in_batch: Any, inputs: dict[str, Any], kind: type, micro_batches: int) -> Tensor:
        return self._training_step(self._model, inputs if kind is dict else kind(inputs), num_items_in_batch)

    def is_outdated(self) -> bool:
        """Return False: the Trainer clips."""
        return False

    def report(self) -> Report:
        """Return graphs, replays, and eager calls with reasons, so far. Waits for the device."""
        return self._function.report()

    def end(self) -> None:
        """Release the graphs."""
        self._function.close()


class TrainerGraphs:
    """Calls the Trainer's `training_step`, and does backward and optimizer step with it, eagerly or as a graph.

    `training_step` is the one behind the mixin. In a call the accelerator's `backward` keeps the loss only, and the
    batch is not prepared again. Behind a call that has stepped the optimizer, the Trainer's own call of
    `optimizer.step` does nothing.

    Attributes:
        grad_norm: norm of the unscaled gradients of the last optimizer step before clipping.
        has_gradients: whether there are gradients of micro-batches whose optimizer step is to come.
        several: whether there are several processes.
    """

    def __init__(
        self, trainer: Any, model: nn.Module, training_step: Callable[..., Tensor], options: Mapping[str, Any]
    ) -> None:
        self._trainer, self._model, self._training_step = trainer, model, training_step
        self._accelerator, self._optimizer, self._args = trainer.accelerator, trainer.optimizer, trainer.args
        self._max_norm = max_norm = self._args.max_grad_norm
        _reduce_gradients(model)
        self._trainers_scaler = own = self._accelerator.scaler
        self._scaler = GradScaler(self._args.device.type, enabled=own is not None)
        if own is not None:
            self._scaler.load_state_dict(own.state_dict())
        self._step = graphed_step(
            self._loss,
            model,
            self._optimizer.optimizer,
            scaler=self._scaler,
            max_norm=max_norm if max_norm is not None and max_norm > 0 else float("inf"),
            **options,
        )
        self.grad_norm: Tensor | None = None
        self.has_gradients: bool = False
        self.several: bool = self._accelerator.num_processes > 1
        # A class with a training_step of its own gets each loss as it is.
        is_mixins = type(trainer).training_step.__module__.startswith(f"{__package__}.")
        self._filters = self._args.logging_nan_inf_filter and is_mixins
        # accelerate takes a step for one that was not skipped if torch's scaler calls `step`, as it does where the
        # optimizer skips by itself (fused=True). The Trainer then steps the schedule.
        self._reads_skipped = own is not None and not supports_amp_scaling(self._optimizer.optimizer)
        self._loss_seen = _KeepsLoss()
        self._optimizer_step = _OptimizerStep(self._optimizer)
        if own is not None:
            self._set_scaler(self._scaler)

    def __call__(self, inputs: Any, num_items_in_batch: Any) -> Tensor:
        """Do what belongs to this micro-batch. Return what `training_step` returned, filtered as by the Trainer."""
        arguments = prepared(self._trainer, self._model, inputs)
        last = bool(self._accelerator.sync_gradients)
        with Undo() as undo:
            replace_within_call(undo, self._trainer, backward=self._loss_seen)
            out = self._step._call_at(Place(False, last, ()), num_items_in_batch, *arguments)
        self.has_gradients = not last
        if last:
            self._has_stepped(out.grad_norm, out.skipped)
        return self._filtered(out.aux)

    def _loss(
        self, model: nn.Module, num_items_in_batch: Any, inputs: dict[str, Any], kind: type, micro_batches: int
    ) -> tuple[Tensor, Tensor]:
        """Return the loss to call backward on, and what `training_step` returned."""
        self._loss_seen.value = None
        returned = self._training_step(model, inputs if kind is dict else kind(inputs), num_items_in_batch)
        loss, self._loss_seen.value = self._loss_seen.value, None
        if loss is None:
            raise AmpkitError(
                "GraphedTrainerMixin: training_step called no accelerator.backward(loss), which it has to call once."
            )
        return loss, returned

    def _has_stepped(self, grad_norm: Tensor | None, skipped: Tensor) -> None:
        self.grad_norm = grad_norm
        if self._reads_skipped:
            self._optimizer._is_overflow = bool(skipped.item())  # sync: the Trainer does not step the schedule then
        self._optimizer_step.done = True

    def take_grad_norm(self) -> Tensor | None:
        """Return the norm, when the loss of the last micro-batch is counted."""
        if self._filters:
            self._args.logging_nan_inf_filter = True  # for what follows, such as saving the arguments
        return self.grad_norm

    def _filtered(self, loss: Tensor) -> Tensor:
        """Return what the Trainer is to add to the sum of losses that it logs: for one not finite, the mean so far.

        It would wait for each loss to see whether it is finite.
        """
        if not self._filters:
            return loss
        trainer = self._trainer
        self._args.logging_nan_inf_filter = False
        mean = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean)

    def is_outdated(self) -> bool:
        """Return whether a callback has set another `max_grad_norm`, so that graphs must be made anew."""
        return self._args.max_grad_norm != self._max_norm and not self.has_gradients

    def report(self) -> Report:
        """Return graphs, replays, and eager steps with reasons, so far. Waits for the device."""
        return self._step.report()

    def end(self) -> None:
        """Release the graphs, and give the Trainer its own loss scale back."""
        if self._filters:
            self._args.logging_nan_inf_filter = True
        self._optimizer_step.end()
        if self._trainers_scaler is not None:
            self._trainers_scaler.load_state_dict(self._scaler.state_dict())
            self._set_scaler(self._trainers_scaler)
        self._step.close()

    def _set_scaler(self, scaler: Any) -> None:
        self._accelerator.scaler = self._optimizer.scaler = scaler
