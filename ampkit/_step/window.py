"""The window of micro-batches that make up one optimizer step: how far it is, and what is done at its end."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .._capture.engine.fallback import StepDoneError
from .._capture.keys.key import Part
from .._errors import AmpkitWarning, CaptureError, InputMismatch, NonfiniteError
from .._optimizer.nonfinite import NonfiniteGuard
from .._torch.device.streams import is_capturing
from .training_step import PartOfStep, Phase, StepOutput, TrainingStep


class Place(NamedTuple):
    """Where a micro-batch stands, for a caller that knows."""

    first: bool  # whether it begins a window
    last: bool  # whether the optimizer steps behind it
    parts: tuple[Part, ...]  # what else decides which graph may serve the call


_SPARE = 3  # calls left of the 16 within which a stop raises, where it is known at last: see `NonfiniteGuard.bad_step`


class NoStepError(Exception):
    """The call has done no part of a step, so that the window stays as it was before."""


@dataclass(eq=False)
class Window:
    """Does one micro-batch per call, and knows how far the window is.

    Args:
        call: `call(args, kwargs, phase)` does one micro-batch, eagerly or as a graph. It may be replaced between calls.
        run: `run(reason, fn)` returns what `fn` returns, called eagerly and counted under this reason.
        step: the training step that `call` does a part of.
        size: how many micro-batches a window has, for callers that do not say where one stands.
        after: called behind each optimizer step. It may be replaced as well.

    Attributes:
        count: how many micro-batches the window has so far.
        accumulated: numbers of the parameters that have a gradient from these.
    """

    call: Callable[..., PartOfStep]
    _run: Callable[..., Any]
    _step: TrainingStep
    _size: int
    after: Callable[[], object] | None = None
    count: int = 0
    accumulated: tuple[int, ...] = ()
    _steps: int = 0  # of the optimizer, so far
    _singles: int = 0  # micro-batches that had a call each, so far
    _ended: int = 0  # windows that such a call, or a flush, has ended
    _phase: Phase = field(default_factory=lambda: Phase(True, ()))  # of the last call
    asks: bool = True  # whether a call asks if training has stopped
    _observed: bool | None = None  # whether the observer measures in this window; None before it was asked
    _observes_stopped: bool = False  # whether it measures in a window behind the stop, before an error says so

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        place: Place | None = None,
        call: Callable[..., PartOfStep] | None = None,
    ) -> StepOutput:
        """Do one micro-batch; step the optimizer if it is the last one of the window.

        Without `place` this object knows where it stands. `call` does it in place of `self.call`, and may also do all
        micro-batches of the window at once.

        An exception or an interrupt ends the window, because the accumulated gradients may have a part of this
        micro-batch. Only an exception that says that nothing was done leaves the window as it was.
        """
        if self.asks:
            self.refuse_stopped()
        if place is not None and place.first:
            self._begin()
        last = self.count + 1 == self._size if place is None else place.last
        parts = () if place is None else place.parts
        before, failure = (self.count, self.accumulated, self.observes()), None
        self._step.followed = False
        self._begin()
        try:
            now = last, before[1], before[2], self._follows() or not last, parts
            if self._phase != now:  # mostly it is that of the call before
                self._phase = Phase(*now)
            out, accumulated, prepared = (call or self.call)(args, kwargs, self._phase)
        except StepDoneError as error:
            (out, accumulated, prepared), failure = error.outputs, error
        except (InputMismatch, CaptureError, NoStepError):
            self.count, self.accumulated, self._observed = before
            raise
        # The caller's autocast, if there is one, would go on with casts of weights that this step has changed.
        torch.clear_autocast_cache()
        if accumulated is not None and last:  # the optimizer is no part of the call
            norm, skipped = self._step.finish(self._phase._replace(accumulated=accumulated), prepared)
            out = out._replace(grad_norm=norm, skipped=skipped)
        if last:
            self._stepped(out.grad_norm, out.skipped, self._phase)
        else:
            self.count, self.accumulated, self._observed = before[0] + 1, accumulated or (), before[2]
        if call is None:
            self._singles, self._ended = self._singles + 1, self._ended + last
        if failure is not None:
            raise failure
        return out

    def micro_batches(self) -> tuple[int, int] | None:
        """Return how many had a call each, and how many windows these calls and `flush` ended; None if each is one."""
        return None if self._size == 1 else (self._singles, self._ended)

    def observes(self) -> bool:
        """Return whether the observer measures in the window that is open, or else in the one to come."""
        if self._observed is None:
            self._observed = self._step.observer is not None and self._step.observer.begin()
        return self._observed

    def drop(self) -> None:
        """Drop the gradients accumulated so far, if the window is open."""
        if self.count:
            self._begin()

    def launched(self, grad_norm: Tensor | None, windows: int) -> None:
        """Take note that one launch did this many windows. The scheduler was stepped ahead of it."""
        torch.clear_autocast_cache()
        for _ in range(windows if self._step.scaler.is_enabled() else 1):
            self._told(grad_norm)

    def flush(self, reason: str, *, actual: bool = False) -> tuple[Tensor | None, Tensor] | None:
        """Step the optimizer eagerly on the gradients accumulated so far. The call is counted under this reason.

        With `actual` they become the mean over the micro-batches that there were. Return the gradient norm, and whether
        the step was skipped, see `StepOutput`; None if there was no gradient.
        """
        if not self.count:
            return None
        phase = Phase(True, self.accumulated, bool(self._observed), self._follows())
        factor = self._size / self.count if actual else 1.0
        self._begin()
        self._step.followed = False
        finish = partial(self._step.finish, phase, averaged=False, factor=factor)
        norm, skipped = self._run(reason, finish)
        torch.clear_autocast_cache()
        self._ended += 1
        self._stepped(norm, skipped, phase)
        return norm, skipped

    def refuse_stopped(self, calls: int = 1) -> None:
        """Raise a `NonfiniteError` in front of calls, if it is known that training has stopped.

        If the observer has not found the first layer, one window more is done, which changes no weight: it may be as
        bad, and is observed. So no layer is missed because the device was late.
        """
        guard, observer = self._step.guard, self._step.observer
        if guard is None or (number := guard.bad_step(calls)) is None:
            return
        if self._observes_stopped and self.count:
            return
        may_wait = self.count == 0 and self._size <= _SPARE and not (guard.said or self._observes_stopped)
        if observer is not None and may_wait and not observer.first_nonfinite(number - 1):
            self._observes_stopped = observer.observe_next()
            if self._observes_stopped:
                return
        self._raise_stopped(number)

    def look_now(self, *, again: bool) -> None:
        """Raise it if training has stopped by now, and if no error has said so, or `again`. Waits for the device."""
        guard = self._step.guard
        if guard is not None and (number := guard.bad_step_now()) is not None and (again or not guard.said):
            self._raise_stopped(number)

    def stopped(self) -> str | None:
        """Return in words since when no step has changed a weight; None if they do. Waits for the device."""
        number = None if self._step.guard is None else self._step.guard.bad_step_now()
        return None if number is None else f"a gradient was inf or nan in {_named(number, self._size)}"

    def go_on(self) -> None:
        """Begin anew after a stop."""
        assert self._step.guard is not None  # what has stopped
        self.drop()
        self._step.guard.go_on()
        self._observes_stopped = False

    def _raise_stopped(self, number: int) -> NoReturn:
        assert self._step.guard is not None  # what has stopped
        self._step.guard.said = True
        observer = self._step.observer
        found = "" if observer is None else observer.first_nonfinite(number - 1)
        if found:
            where = f"numerics, which counts from 0, has found the {found}."
        else:
            where = "numerics=ampkit.debug.numerics(model, every=1) names the first layer."
        raise NonfiniteError(
            f"graphed_step(nonfinite='stop'): a gradient was inf or nan in {_named(number, self._size)}, counted from "
            f"1, the first of this object. Weights, optimizer and averages are those before it. {where} To go on, load "
            "a checkpoint and call step.load_state_dict(state), or step.load_state_dict({}) to go on from here."
        )

    def _follows(self) -> bool:
        return (self._steps + 1) % self._step.after_every == 0

    def _begin(self) -> None:
        self.count, self.accumulated, self._observed = 0, (), None

    def _stepped(self, grad_norm: Tensor | None, skipped: Tensor, phase: Phase) -> None:
        self._steps += 1
        if phase.follows and self._step.place.follows_behind:
            scaler = self._step.scaler
            measured = scaler.is_enabled() or self._step.guard is not None
            scaler.grad_norm, scaler.found_inf = grad_norm, skipped.float() if measured else None  # as in an eager step
            self._step.follow(skipped)
        self._told(grad_norm)
        if self.after is not None:
            self.after()

    def _told(self, grad_norm: Tensor | None) -> None:
        scaler, observer = self._step.scaler, self._step.observer
        # A capture leaves tensors there that lie in the memory of one graph. Replays of other graphs do not write them.
        scaler.grad_norm, scaler.found_inf = grad_norm, None
        if scaler.is_enabled():
            scaler.watch_skips()
        if observer is not None:
            observer.stepped(scaler.skipped)


def warn_of_stop(guard: NonfiniteGuard, size: int) -> None:
    """Warn if training has stopped and no error has said so. To be called when there will be no other call.

    `size` is that of the window. Sync: waits for the device.
    """
    # Garbage is collected within captures, too, where nothing can be read. A device that has failed has said so itself.
    if guard.said or is_capturing():
        return
    try:
        number = guard.bad_step_now()
    except RuntimeError:
        return
    if number is not None:
        warnings.warn(
            f"graphed_step(nonfinite='stop'): training ended, and no error has said that a gradient was inf or nan in "
            f"{_named(number, size)}, counted from 1, the first of this object. No step behind it has changed a weight."
            " Call step.flush() behind the last step, and before each checkpoint and log.",
            AmpkitWarning,
            stacklevel=2,
        )


def _named(number: int, size: int) -> str:
    return f"call {number}" if size == 1 else f"optimizer step {number} (accumulate={size})"
