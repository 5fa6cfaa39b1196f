"""One batch of a Lightning Trainer as one call of the engine: the arguments, the result, and when to stay eager."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from .._capture.engine.engine import Engine
from .._capture.engine.options import Options
from .._capture.graph.report import Report
from .._capture.keys.key import Part
from .._capture.ranks.ranks import Ranks
from .._errors import AmpkitWarning, InputMismatch
from .._optimizer.scaler import GradScaler
from .._optimizer.step_kind import torch_class
from .._step.compile.compile_choice import warmup_of
from .._step.compile.compiled import CompiledTrainingStep
from .._step.graphed_step import session_of
from .._step.observer import Observer
from .._step.optimizer_place import OptimizerPlace
from .._step.training_step import PartOfStep, Phase, TrainingStep
from .._step.window import NoStepError, Place, Window
from .._user_line import users_level
from . import _log_calls
from ._host_state import HostReads, HostWrites, not_comparable
from ._metric_calls import all_made
from ._trainer_reads import TrainerReads

# Modules that a step in parts leaves to Python.
LEFT_EAGER: dict[type[nn.Module], str] = {
    LightningModule: "a LightningModule may call self.log, which a replay would leave out"
}


class Clip(NamedTuple):
    """How gradients are clipped: to a global norm, each element to a magnitude, or, if both are None, not at all."""

    norm: float | None
    value: float | None


class BatchPlace(NamedTuple):
    """The place of a batch in a window, which is the batches whose gradients are summed for one optimizer step."""

    first: bool  # whether the batch begins the window
    last: bool  # whether the optimizer steps after this batch
    divisor: int  # the loss is divided by this before backward
    epoch: int  # the number of the epoch


class NoLossError(NoStepError):
    """`training_step` returned no loss to call backward on. Lightning gets its output and decides what to do."""

    def __init__(self, output: Any, log_calls: list[_log_calls.Call]) -> None:
        super().__init__("training_step returned no loss")
        self.output = output
        self.log_calls = log_calls


class CompiledBatchStep(CompiledTrainingStep):
    """A compiled step whose loss function compiles a part of itself.

    The loss function gets `call` in a call that is compiled: `call(function, module, args, {})` calls
    `function(module, *args)` as compiled code. `self.log` ends a graph there, as its calls are noted by Python.
    """

    intended = (*CompiledTrainingStep.intended, "_LogRecorder")

    def _call_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layout = self._layout
        if layout is None or layout.problem:
            return super()._call_loss(args, kwargs)
        return self._loss_fn(self._model, *args, **kwargs, call=self._compiled_loss(layout))


def training_step_of(module: nn.Module, *args: Any) -> Any:
    """Return what `training_step` returns. This is what is compiled."""
    return module.training_step(*args)  # type: ignore[operator]  # a LightningModule's


def read_compile(compile: str | None, host_reads: HostReads) -> str | None:
    """Return what to compile with. It is None, with a warning, if `training_step` uses the number of the batch."""
    if compile is not None and host_reads.reads_index:
        warnings.warn(
            f"AmpkitCallback(compile={compile!r}): training_step uses batch_idx, and each number would be compiled by "
            "itself, so nothing is compiled. Leave batch_idx out, or count batches in a buffer.",
            AmpkitWarning,
            stacklevel=users_level(),
        )
        return None
    return compile


class TrainerStep:
    """Calls `training_step`, and does backward and optimizer step with it, eagerly or as a graph.

    `forward(batch, *rest)` calls `training_step` as Lightning does, with wrappers and precision; `context` returns the
    context in which it does so. The ranks are those of the wrapper that Lightning put around the module, such as DDP,
    or of the module itself. `give_up` is called with the reason when no further call will be captured. It issues a
    warning, or raises.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        context: Callable[[], AbstractContextManager[Any]],
        compile: str | None,
        module: nn.Module,
        ranks: Ranks,
        optimizer: torch.optim.Optimizer,
        host_reads: HostReads,
        trainer_reads: TrainerReads,
        *,
        device: torch.device,
        scaler: GradScaler,
        clip: Clip,
        options: Options,
        observer: Observer | None,
        place: OptimizerPlace,
        give_up: Callable[[str], None],
    ) -> None:
        self._module, self._forward, self._context = module, forward, context
        self._ranks, self._give_up = ranks, give_up
        make: Callable[..., TrainingStep] = TrainingStep
        if compile is not None:
            options = replace(options, warmup=warmup_of(options.warmup, compile))
            raises = options.on_failure == "raise"
            make = partial(CompiledBatchStep, compile=compile, name="AmpkitCallback", raises=raises, generators=())
        self._host_reads, self._trainer_reads = host_reads, trainer_reads
        self._captures = options.graph != "off"
        self._calls_to_check = options.warmup if self._captures else 0
        self._step = step = make(
            self._loss,
            module,
            [optimizer],
            policy=None,
            scaler=scaler,
            max_norm=clip.norm,
            max_value=clip.value,
            accumulate=1,  # `_loss` divides
            after_step=None,
            ranks=ranks,
            device=device,
            capturable=[not place.behind],
            place=place,
            observer=observer,
            around=trainer_reads.watching if self._captures else nullcontext,
        )
        takes_closure = torch_class(optimizer) is None and "closure" in signature(optimizer.step).parameters
        if takes_closure and not scaler.is_enabled():
            # As from Lightning, without a loss scale. Forward and backward have been done: see `ClosureUses`.
            step.closure = (lambda: None,)
        state, name = step.state({"model": module}), "AmpkitCallback"
        self.engine = Engine(
            session_of(step, state, module, options, name, compile=compile, one_argument=True, eager=LEFT_EAGER)
        )
        self._log = _log_calls.LogForwarder(module, device, True, context)
        self._further_args: tuple[Any, ...] = ()  # of training_step, after the batch
        self._window = Window(self._guarded_call, self.engine.run, step, 1)
        self._divisor = 1  # of the loss
        self._logged_numbers = _log_calls.LoggedNumbers("training_step")
        self._problem = ""  # found in the calls that are checked
        self._why_eager = ""  # why no further call is captured
        self.grad_norm: Tensor | None = None  # of the last window, unscaled, before clipping; None if not computed
        self.backward_done = False  # whether the last call did a backward, so that Lightning must not do it again

    def report(self) -> Report:
        """Return graphs, replays, and eager steps with reasons, so far. Waits for the device."""
        skipped = self._step.scaler.skipped
        report = self.engine.report(0 if skipped is None else int(skipped.item()))  # sync
        report = replace(report, **self._step.compiled())
        return replace(report, failure=self._why_eager) if self._why_eager else report

    def __call__(self, place: BatchPlace, batch: Any, *further_args: Any) -> Any:
        """Do the part of the step that belongs to this batch. Return what `training_step` returned, detached.

        Its calls of `self.log` are made after the step. Sync: none.
        """
        if self._ranks.sharded:
            self._ranks.gather("AmpkitCallback")  # the engine compares the parameters with those of the last call
        self._further_args, self.backward_done, self._divisor = further_args, False, place.divisor
        divisor = Part("accumulate_grad_batches", place.divisor, "Keep accumulate_grad_batches the same.")
        in_window = Place(place.first, place.last, (*self._host_reads.parts(place.epoch), divisor))
        try:
            try:
                out = self.engine.turn.call(self._window.run, (batch,), {}, in_window)
            except InputMismatch as error:
                self._stay_eager(not_comparable(batch) or str(error))
                out = self.engine.turn.call(self._window.run, (batch,), {}, in_window)
        except NoLossError as none:
            return self.engine.turn.call(self._without_loss, none, place.last)
        if place.last:
            self.grad_norm = out.grad_norm
        self.backward_done = True
        ((template, tensors),) = out.aux.items()
        output, log_calls = template.filled(iter(tensors))
        self._log(log_calls)
        return output

    def _guarded_call(self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> PartOfStep:
        """Take the place of the engine while calls are checked, and once no further call will be captured."""
        batch = args[0]
        if not self._calls_to_check:
            return self._call_or_stay_eager(phase, batch)
        # In the warm-up, the result of `training_step` must depend on its batch and tensors only.
        self._calls_to_check -= 1
        self._problem = self._problem or not_comparable(batch)
        self._further_args, index = self._host_reads.watch_index(self._further_args)
        with HostWrites(self._module, index) as writes:
            part = self._call_or_stay_eager(phase, batch)
        ((template, tensors),) = part.output.aux.items()
        log_calls = template.filled(iter(tensors))[1]
        self._problem = self._problem or writes.problem
        if not self._trainer_reads.noticed:  # where Python runs in each call, it logs the right number
            self._problem = self._problem or self._logged_numbers.problem(log_calls, batch)
        if self._problem and not self._ranks.several:
            self._calls_to_check = 0
        if self._calls_to_check == 0:
            if not self._ranks.agree(not self._problem):
                self._stay_eager(self._problem or self._ranks.other_found)
            elif not self._why_eager:
                self._window.call = self.engine
        return part

    def _call_or_stay_eager(self, phase: Phase, batch: Any) -> PartOfStep:
        if not self._why_eager:
            try:
                return self.engine((batch,), {}, phase)  # type: ignore[no-any-return]  # what the step returns
            except InputMismatch as error:
                self._stay_eager(not_comparable(batch) or str(error))
        if self._captures:
            self._ranks.decide(wants=False, can=True, settled=True)  # other ranks may vote in this call
        return self.engine.run("cannot be captured", lambda: self._step.whole(phase, batch))  # type: ignore[no-any-return]  # what the step returns

    def _loss(
        self, model: nn.Module, batch: Any, call: Callable[..., Any] | None = None
    ) -> tuple[Tensor, dict[_log_calls.Template, list[Tensor]]]:
        with _log_calls.recorded(self._module, self._log, metrics=call is None) as log_calls:
            if call is None:
                output = self._forward(batch, *self._further_args)
            else:  # as the strategy does, with compiled code in its innermost call
                with self._context():
                    output = call(training_step_of, self._module, (batch, *self._further_args), {})
            output = all_made(output)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise NoLossError(output, log_calls)  # for which Lightning skips the step, or raises an error
        template = _log_calls.Template((dict(output) if isinstance(output, Mapping) else output, log_calls))
        loss = loss.reshape(())
        return loss / self._divisor if self._divisor > 1 else loss, {template: template.take_tensors()}

    def _without_loss(self, none: NoLossError, last: bool) -> Any:
        """Do as Lightning does without a loss: no backward, but an optimizer step if the window has gradients."""
        self._stay_eager(
            "training_step returned no loss for this batch. Whether it does is decided on the host, and a graph would "
            "freeze that decision. Return the loss for every batch, times 0 for those that must not count."
        )
        if last and none.output is None and not self._step.scaler.is_enabled():
            self._window.flush("training_step returned None")
        self._log(none.log_calls)
        return none.output

    def _stay_eager(self, reason: str) -> None:
        if not self._why_eager:
            self._why_eager = reason
            self._window.call = self._guarded_call
            self.engine.close()
            if self._captures:
                self._give_up(reason)
