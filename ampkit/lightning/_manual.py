"""Manual optimization: a `training_step` that calls backward and steps the optimizers itself, captured as a whole.

ampkit writes no part of such a step. It is a function that changes its module and its optimizers, as `ampkit.graphed`
captures it. What Lightning does on the host with each optimizer step, such as to count it for `global_step`, is noted
while Python runs the step, and done behind each call: behind a replay, too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._errors import CaptureError, InputMismatch
from .._optimizer.scaler import GradScaler
from .._step.graphed import GraphedFunction
from .._step.training_step import Phase
from .._torch.tensors.modules import live_objects
from .._undo import Undo, replace
from ._fit import Fit
from ._host_state import HostReads, HostWrites, not_comparable, not_returnable
from ._limits import AROUND_STEP, why_not_module, why_not_optimizer, why_not_parameters
from ._log_calls import Call, HostCall, LogForwarder, LoggedNumbers, Template, recorded
from ._metric_calls import all_made
from ._trainer_reads import TrainerReads
from ._trainer_step import LEFT_EAGER

_STOPPED = "training_step raises StopIteration, and whether it does is decided on the host. Return None instead."
_SCHEDULES = "training_step steps a learning-rate scheduler, and a replay would not. Step it in on_train_batch_end."


class ManualFit(Fit):
    """A `Fit` whose batches are calls of a `ManualStep`."""

    steps_in_module = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gradient_uses.restore_hooks()  # gradients are there, for all hooks
        self._batches = 0  # so far, of all epochs

    @property
    def steps_done(self) -> int:
        """The batches so far. How many optimizer steps each of them is, is the module's own."""
        return self._batches

    def _batch(self, *args: Any) -> tuple[Any, bool]:
        step = None if self.problem else self._manual_step()
        if step is None:
            return self._lightning_step(*args), False
        try:
            output = step.call_batch(self._trainer.current_epoch, *args)
        finally:
            if step.problem:
                self._leave(step.problem)
        self._batches, self._window_ended = self._trainer.fit_loop.total_batch_idx + 1, True
        return output, True

    def _manual_step(self) -> "ManualStep | None":
        """Return what does the batches. None if that is Lightning, as it is for the rest of the fit."""
        trainer, module, step = self._trainer, self._module, self._step
        made_for = (*trainer.optimizers, trainer.strategy.model)
        if made_for == self._step_made_for:
            assert isinstance(step, ManualStep)  # as it is made here
            return step
        if step is not None:
            step.engine.close()
        problems = [why_not_optimizer(each) or why_not_parameters(trainer, module, each) for each in trainer.optimizers]
        if problem := why_not_module(module, trainer.strategy) or next(filter(None, problems), ""):
            self._leave(problem)
            return None
        self._step_made_for = made_for
        self._step = made = ManualStep(trainer, module, self._lightning_step, self.scaler, self._options)
        return made

    def _leave(self, problem: str) -> None:
        self._leave_to_lightning(problem)
        self._give_up(f"{problem} Lightning trains without ampkit.")


class ManualStep(GraphedFunction):
    """Calls `training_step`, with all that it does to module and optimizers, eagerly or as a graph.

    `forward(batch, *rest)` calls it as Lightning does, with precision.
    """

    grad_norm: Tensor | None = None  # training_step clips by itself

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        forward: Callable[..., Any],
        scaler: GradScaler,
        options: Options,
    ) -> None:
        self._module, self._forward = module, forward
        self._host_reads = HostReads(module)
        self._trainer_reads = TrainerReads(trainer, module, self._host_reads, "training_step")
        self._numbers = LoggedNumbers("training_step")
        device = trainer.strategy.root_device
        self._forwarder = LogForwarder(
            module, device, True, lambda: trainer.strategy.precision_plugin.forward_context()
        )
        self._schedulers = _schedulers_of(trainer.optimizers)
        self._further_args: tuple[Any, ...] = ()  # of training_step, after the batch
        self._noted: list[Call] = []  # when Python last ran the step
        self._found = ""  # when Python last ran the step: what a replay would do in another way
        self.problem = ""  # why Lightning must do all further batches, "" if ampkit may
        used = scaler if scaler.is_enabled() else None
        names: dict[str, Any] = {"name": "AmpkitCallback", "paths": ["self"], "eager": LEFT_EAGER}
        super().__init__(self._recorded, [module], trainer.optimizers, used, device, options, **names)

    @property
    def engine(self) -> Engine:
        """What does the calls."""
        assert self._engine is not None  # made with a device
        return self._engine

    def call_batch(self, epoch: int, batch: Any, *further_args: Any) -> Any:
        """Do the step of this batch. Return what `training_step` returned, detached.

        Its calls of `self.log`, and what Lightning does on the host around each optimizer step, are done after it, in
        their order. Sync: none.
        """
        engine = self.engine
        self._further_args, self._noted, self._found = further_args, [], ""
        self._phase = Phase(last=True, accumulated=(), others=tuple(self._host_reads.parts(epoch)))
        replays = engine.replays
        try:
            outputs = self(batch)
        except InputMismatch as error:
            self.problem = not_comparable(batch) or str(error)
            return self._forward(batch, *further_args)
        except StopIteration:  # with which Lightning goes on
            self._forwarder(self._noted)
            self.problem = _STOPPED
            raise
        ((template, tensors),) = outputs.items()
        output, calls = template.filled(iter(tensors))
        self._forwarder(calls)
        if engine.replays == replays and not engine.refusal:
            self.problem = not_comparable(batch) or self._found
            if not self._trainer_reads.noticed:  # where Python runs in each call, it logs the right number
                self.problem = self.problem or self._numbers.problem(calls, batch, self._phase)
        return output

    def _recorded(self, batch: Any) -> dict[Template, list[Tensor]]:
        """Call the step, and note what a replay would not do."""
        self._further_args, index = self._host_reads.watch_index(self._further_args)
        with (
            HostWrites(self._module, index) as writes,
            recorded(self._module, self._forwarder) as self._noted,
            self._steps_noted(),
            self._trainer_reads.watching(),
        ):
            output = all_made(self._forward(batch, *self._further_args))
        self._found = self._found or writes.problem or not_returnable(output, "training_step")
        template = Template((output, self._noted))
        return {template: template.take_tensors()}

    @contextmanager
    def _steps_noted(self) -> Iterator[None]:
        """Context in which Lightning counts and times no optimizer step: it is noted that it has to."""
        found: Any = self._module.optimizers()
        with Undo() as undo:
            for optimizer in found if isinstance(found, list) else [found]:
                for name in AROUND_STEP:
                    replace(undo, optimizer, name, partial(self._noted.append, HostCall(getattr(optimizer, name))))
            for scheduler in self._schedulers:
                replace(undo, scheduler, "step", partial(self._schedule, undo, scheduler, scheduler.step))
            yield

    def _schedule(
        self, undo: Undo, scheduler: LRScheduler, step: Callable[..., object], *args: Any, **kwargs: Any
    ) -> None:
        """Take the place of a scheduler's step: in the call of a step, rates are tensors, which it must not get."""

        def refuse(*_: Any, **__: Any) -> None:
            raise CaptureError(f"AmpkitCallback: {_SCHEDULES} An optimizer has stepped after it, with the old rate.")

        self._found = self._found or _SCHEDULES
        self._noted.append(HostCall(partial(step, *args, **kwargs)))
        replace(undo, scheduler.optimizer, "step", refuse)


def _schedulers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return all schedulers of these optimizers, also those that only the module knows."""
    known = set(map(id, optimizers))
    return [scheduler for scheduler in live_objects(LRScheduler) if id(getattr(scheduler, "optimizer", None)) in known]
