"""What a user calls on a step: a call per batch, several in one, and what the step tells of itself."""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._arguments import check_choice
from .._batches.padding import Padding
from .._capture.engine.engine import Engine
from .._capture.graph.kernel_names import KernelTable
from .._capture.graph.report import Report
from .._capture.graph.timing import Clock, milliseconds
from .._optimizer.scaler import GradScaler
from .._precision.policy import Policy
from .arguments import Scheduler
from .compile.float8_choice import Float8Chooser
from .graph_owner import GraphOwner
from .many.scan import Scan
from .many.slices import Slices
from .many.whole_window import SHORT, WholeWindow
from .schedule import Schedule
from .training_step import PartOfStep, Phase, StepOutput, TrainingStep
from .window import Place, Window, warn_of_stop


class GraphedStep(GraphOwner):
    """One training step, or one micro-batch of it, per call. Made by `graphed_step`.

    A context manager: leaving it closes the step.
    """

    _engine: Engine
    _why_not_copied = (
        "its graphs belong to this process and to these tensors. Copy or save model, optimizer and scaler "
        "(state_dict), and make a step of the copies with graphed_step."
    )

    def __init__(
        self,
        step: TrainingStep,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        accumulate: int,
        schedulers: Sequence[Scheduler],
        padding: Padding | None,
        float8: Float8Chooser,
    ) -> None:
        guard = step.guard if step.guard is not None and step.guard.stops else None
        self._scaler, self._stops = step.scaler, guard is not None
        self._engine = engine
        self._turn = engine.turn
        self._compiled = step.compiled
        call = engine if padding is None else partial(_with_or_without_graph, engine, step, padding)
        call = partial(step.gathered, call) if step.ranks.sharded else call
        schedules = [Schedule(scheduler) for scheduler in schedulers]

        def after() -> None:
            for schedule in schedules:
                schedule.step()

        self._window = Window(call, engine.run, step, accumulate, after if schedules else None)
        slices = Slices(self._window, accumulate)
        self._scan = Scan(engine, step, slices, optimizers, schedules, padding)
        self._whole_window = WholeWindow(engine, step, slices, padding)
        self._padding, self._float8, self._chosen_call = padding, float8, call
        if float8.pending:
            self._window.call = self._first_call
        if guard is not None:
            weakref.finalize(self, warn_of_stop, guard, accumulate)  # at the end of the process at the latest
        self._metrics = StepMetrics(engine, step.scaler, Clock(step.device if step.device.type == "cuda" else None))

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do one step with this batch; with `accumulate`, one micro-batch of it.

        Args:
            *args: passed on to `loss_fn` behind the model: trees of tensors on the model's device, and of hashable
                constants. A constant is part of the layout: another value is another layout.
            **kwargs: passed on to `loss_fn` too, trees of the same kinds.

        Raises:
            InputMismatch: the batch does not fit the arguments of `loss_fn`, such as a tuple that was not unpacked. Or
                a leaf of it cannot be an argument: a tensor is on another device, is sparse, belongs to a subclass or
                requires grad; a tensor shares memory with another one, or with the state, and the step changes one of
                the two in place; a constant is not hashable.
            ValueError: the loss is not a floating tensor of shape () that requires grad, or aux has a leaf that is
                neither a tensor nor None, or an optimizer has got a parameter that is not the model's and has a
                gradient. No optimizer step was done. Or the model has lazy modules that were never called; nothing was
                done.
            CaptureError: with `on_failure="raise"`, the step cannot be captured, and was not done; or `verify` found a
                difference, and the step was done eagerly.
            NonfiniteError: with `nonfinite="stop"`, a gradient of an earlier step was not finite. Nothing was done.

        An exception out of `loss_fn` ends the window. The gradients accumulated so far are dropped, because they may
        have a part of this micro-batch.

        Sync: none. Aliasing: the batch is copied, and written back to only where `loss_fn` changes it in place; the
        outputs belong to the caller. What `loss_fn` returns is copied tensor by tensor, in eager calls too. So a view
        of an input, or of another output, is returned as a tensor of its own.
        """
        return self._turn.call(self._window.run if self._padding is None else self._run_padded, args, kwargs)

    def _first_call(self, *args: Any) -> PartOfStep:
        part: PartOfStep = self._float8.first_call(self._chosen_call, *args)
        self._go_on_with_choice()
        return part

    def _go_on_with_choice(self) -> None:
        self._engine.close()  # what it has seen so far are the calls of another model
        self._window.call = self._chosen_call

    def _run_padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepOutput:
        assert self._padding is not None  # or there is nothing to pad
        return self._window.run(*self._padding.batch(args, kwargs))

    def _call_at(self, place: Place, *args: Any) -> StepOutput:
        """Do one micro-batch, for a loop that decides itself where windows end."""
        return self._turn.call(self._window.run, args, {}, place)

    def scan(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do K calls with one call: `loss_fn` gets the slices 0 to K - 1 of each tensor along its dimension 0.

        It leaves the bits that K single calls with these slices leave: parameters, optimizer, loss scale, learning
        rates, averages, random numbers. Up to 16 calls are one graph launch, so that K calls take ceil(K / 16)
        launches. With `accumulate=N` a launch does whole windows, ceil(16 / N) at most. `step` and `step.scan` may be
        mixed, also within a window.

        The first calls of a layout are made one by one, until they have graphs of their own. In a scan that begins with
        such calls, only launches of full length may follow; the rest is made one by one. A launch captures its length
        if there is no graph for it yet. When a second length below the full one comes, all lengths are captured in that
        call. After that no scan of this layout captures anything, whatever K is.

        In these cases calls are made one by one: nothing is captured; there are `numerics` or several processes; the
        optimizer steps behind the graphs; `loss_fn` changes its batch in place; the scheduler is no `LRScheduler` of
        torch; a hyperparameter other than the learning rate changes; a learning rate is a tensor, which `after_step`
        may change; a call completes an open window, or is one of the last, which do not make up a whole window.

        Args:
            *args: trees of tensors of shape (K, ...) on the model's device, and of hashable constants that all K calls
                get. Pass what all calls share as `x.expand(K, *x.shape)`.
            **kwargs: trees of the same kinds.

        Returns:
            A `StepOutput`: loss of shape (K,); aux with a new leading dimension K in each tensor; `skipped` of shape
            (K,); `grad_norm` of shape (K,), or None. With `accumulate=N` only the calls that step the optimizer have a
            norm, and `grad_norm` has one entry for each of these.

        Raises:
            InputMismatch: the leading dimensions differ, one is 0, a tensor has shape () or there is no tensor; then
                nothing was done. A slice cannot be the batch of a call, see `__call__`.
            ValueError: as for `__call__`; or the aux of two calls have different shapes. Then all calls were done.
            CaptureError: as for `__call__`.

        An error in call i comes out as it would from `step`. Calls before it were done; since Python 3.11 a note of the
        error says how many. The scheduler is stepped ahead of a launch, so an interrupt may leave it up to 16 steps
        ahead.

        Sync: only the calls that capture wait for the device. Aliasing: as for `__call__`. Memory: buffers for 16
        batches, beside those of the single calls.
        """
        return self._turn.call(self._scan.run, args, kwargs)

    def window(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Do one optimizer step with one call: `loss_fn` gets the N slices of each tensor along its dimension 0.

        It leaves the bits that N single calls with these micro-batches leave, N = `accumulate`, and is one graph
        launch. The calls of the first windows of a layout are made one by one, until each has a graph of its own; the
        window after these captures. `step`, `step.scan` and `step.window` may be mixed between windows.

        A window of fewer micro-batches, such as the last one of an epoch, is done as by that many calls and `flush()`:
        each loss stays divided by `accumulate`, and the optimizer steps eagerly.

        The calls are made one by one if nothing is captured, if the host decides by random draws, if `loss_fn` changes
        its batch in place, and with `after_every`. An optimizer that steps behind the graphs does so behind the launch,
        and so is `after_step` called, where it cannot be captured.

        Args:
            *args: trees of tensors of shape (N, ...) on the model's device, and of hashable constants that all calls
                get. Pass what all calls share as `x.expand(N, *x.shape)`. A loader's batch of N times B samples is
                split without a copy by `x.unflatten(0, (-1, B))`.
            **kwargs: trees of the same kinds.

        Returns:
            A `StepOutput`: loss of shape (N,); aux with a new leading dimension N in each tensor; `grad_norm` and
            `skipped` of the optimizer step, of shape ().

        Raises:
            InputMismatch: the leading dimensions differ, one is 0, a tensor has shape () or there is no tensor; then
                nothing was done. A slice cannot be the batch of a call, see `__call__`.
            ValueError: more than N micro-batches; nothing was done. Else as for `__call__`; or the aux of two
                micro-batches have different shapes. Then the step was done.
            AmpkitError: micro-batches of an optimizer step were given to `step` already. Nothing was done.
            CaptureError: as for `__call__`.

        Any error of a micro-batch drops the gradients of those before it, so that the next window begins anew; since
        Python 3.11 a note of the error says how many these were.

        With `DistributedDataParallel` or `fully_shard`, every rank must call `window` with equally many micro-batches.

        Sync: only the calls that capture wait for the device, and votes of several ranks. Aliasing: as for `__call__`.
        Memory: buffers for N micro-batches, beside those of the single calls.
        """
        return self._turn.call(self._whole_window.run, args, kwargs)

    def flush(self, divide: str = "accumulate") -> None:
        """End a window that is short, such as the last one of an epoch: step the optimizer on what it has so far.

        The step is eager, and counted as such. Nothing is done if the window is empty. Sync: none.

        Args:
            divide: "accumulate": each loss stays divided by `accumulate`, as in Lightning and in loops that write
                `(loss / accumulate).backward()`. "actual": by the number of micro-batches that there were, as in the
                Trainer of transformers. The gradients are multiplied by `accumulate / number` for that.

        Raises:
            ValueError: `divide` is neither.
            NonfiniteError: with `nonfinite="stop"`, a gradient of this or an earlier step was not finite. Then this
                waits for the device.
        """
        check_choice("flush", "divide", divide, ("accumulate", "actual"))
        self._turn.call(partial(self._window.flush, actual=divide == "actual"), SHORT)
        if self._stops:
            self._turn.call(self._window.look_now, again=True)

    def report(self) -> Report:
        """Return graphs, replays, eager steps and why, bytes, skipped steps so far. Waits for the device."""
        padding = () if self._padding is None else self._padding.report()
        said: dict[str, Any] = {"padding": padding, "float8": self._float8.report(), "stopped": self._window.stopped()}
        said["micro_batches"] = self._window.micro_batches()
        return replace(self._engine.report(self.skipped), **said, **self._compiled())

    def choose_buckets(self, batches: Iterable[Any]) -> None:
        """With `buckets="auto"`, choose the sizes now, from batches such as those of a loader, in place of watching.

        Reads 200 batches at most. The items of a tuple or list are taken as arguments of the step, those of a dict as
        keyword arguments. Nothing is computed, so they may be on any device. The random numbers of torch's default
        generator, of Python and of numpy are put back. With several ranks, all must call it, and get rank 0's sizes.

        Args:
            batches: any iterable, such as the `DataLoader` of the loop. A loop over it begins anew, but a generator
                object, and a loader with a generator of its own, go on where this has left them.

        Raises:
            ValueError: the step has no `buckets="auto"`, or there are fewer than 8 batches.
            InputMismatch: a batch cannot be padded, see `Buckets.pad_batch`.

        Sync: waits for other ranks.
        """
        if self._padding is None:
            raise ValueError("choose_buckets: the step pads nothing. Make it with graphed_step(..., buckets='auto').")
        self._turn.call(self._padding.look_ahead, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what of the step outlives it, in dicts, lists and numbers, beside model, optimizer, scaler and
        scheduler, which have a `state_dict` of their own: with `buckets="auto"` the sizes of batches, and which layers
        compute in float8 if that was chosen by timing.

        Raises:
            NonfiniteError: with `nonfinite="stop"`, training has stopped, and no error has said so.

        Sync: none, except with `nonfinite="stop"`.
        """
        if self._stops:
            self._turn.call(self._window.look_now, again=False)
        buckets = {} if self._padding is None else {"buckets": self._padding.state_dict()}
        layers = self._float8.state_dict()
        return {**buckets, "float8": layers} if layers else buckets

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on to pad, and to compute in float8, as the step did that `state_dict` is of. All ranks must load it.

        With `nonfinite="stop"` steps change the weights again. An open window of micro-batches is dropped, and skipped
        steps are counted anew.

        Raises:
            ValueError: it is of a step whose batches were padded in another way, or of a model with other layers under
                float8 rules, or this device has no float8.
        """
        if self._float8.load_state_dict(state_dict.get("float8", {})):
            self._turn.call(self._go_on_with_choice)
        state = state_dict.get("buckets", {})
        if self._padding is not None:
            self._padding.load_state_dict(state)
        elif state:
            raise ValueError("load_state_dict: the state is of a step with buckets='auto', and this one pads nothing.")
        if self._stops:
            self._turn.call(self._window.go_on)

    def close(self) -> None:
        """Release the graphs and their memory. A later call warms up and captures again. Waits for the device.

        It also waits for a call of another thread to end. A window of micro-batches goes on where it was. The graphs
        are released as well when the object is garbage-collected.

        Raises:
            NonfiniteError: with `nonfinite="stop"`, training has stopped, and no error has said so. The graphs are
                released.
        """
        super().close()
        self._window.look_now(again=False)

    def __exit__(self, *raised: object) -> None:
        # An error that leaves the context is not replaced by another one.
        super().close() if any(raised) else self.close()

    def kernel_tables(self) -> list[KernelTable] | None:
        """Return what `ampkit.debug.name_kernels` reads: the kernels of each graph. None without `annotate=True`."""
        return self._engine.kernel_tables()

    def metrics(self) -> dict[str, Tensor | float]:
        """Return figures for a logger, by name. What is not known is left out.

        - `loss_scale`: float32, shape (), on the device. Without a loss scale it is left out.
        - `skipped_steps`: how many optimizer steps were skipped so far, int64, shape (), on the device. It is left out
          without a loss scale and `nonfinite=`.
        - `grad_norm`: norm of the unscaled gradients of the last optimizer step before clipping, shape (), on the
          device. It is left out if no norm was computed: without a loss scale and `max_norm`.
        - `replay_share`: the share of the calls so far that were replayed, a float from 0 to 1.
        - `ms_per_step`: milliseconds per call between two calls of `metrics`, a float: with `accumulate` per
          micro-batch, with `scan` and `window` per slice. It contains all that the loop does in between. On CUDA it is
          the time that passed on the current stream, measured with two events. It is that of the newest interval that
          the device has completed, so it may be older than the tensors. It is left out until there is one.

        Read the tensors as late as you can, such as at the next call of `metrics`: `.item()` waits for the device.

        Sync: none. Aliasing: the tensors are copies, which later steps do not change.
        """
        return self._turn.call(self._metrics.figures)

    @property
    def policy(self) -> Policy | None:
        """The policy, once it is chosen by timing with a rule for each layer that computes in float8."""
        return self._float8.policy

    @property
    def scaler(self) -> GradScaler:
        """The gradient scaler; where the policy needs none, a disabled one, or with `nonfinite=` one that skips."""
        return self._scaler

    @property
    def skipped(self) -> int:
        """How many optimizer steps were skipped. Waits for the device."""
        skipped = self._scaler.skipped
        return 0 if skipped is None else int(skipped.item())  # sync


def _with_or_without_graph(
    engine: Engine, step: TrainingStep, padding: Padding, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase
) -> Any:
    """Do the part of a step that belongs to the batch that was padded last."""
    if padding.why_eager:
        return engine.without_graph(padding.why_eager, step.plain, args, kwargs, phase)
    return engine(args, kwargs, phase)


@dataclass(eq=False)
class StepMetrics:
    """Reads the figures of a step, and measures the time per call from one reading to the next."""

    _engine: Engine
    _scaler: GradScaler
    _clock: Clock
    _past: tuple[Any, int] | None = None  # the newest mark of a reading that the device has reached, and calls
    _ahead: deque[tuple[Any, int]] = field(default_factory=deque)  # the later ones
    _ms: float | None = None

    def figures(self) -> dict[str, Tensor | float]:
        """Return the figures by name, see `GraphedStep.metrics`. To be called in the step's turn. Sync: none."""
        figures: dict[str, Tensor | float] = {}
        known = self._scaler.tensors() if self._scaler.is_enabled() else {}
        if "scale" in known:
            figures["loss_scale"] = known["scale"].clone()
        if "skipped" in known:
            figures["skipped_steps"] = known["skipped"].long()  # counted in float64, so that this is a copy
        if self._scaler.grad_norm is not None:
            figures["grad_norm"] = self._scaler.grad_norm.clone()
        replayed, calls = self._engine.counts()
        figures["replay_share"] = replayed / max(calls, 1)
        # Mark this reading, and take the time between the two newest that the device has reached.
        self._ahead.append((self._clock.now(), calls))
        while self._ahead and self._clock.is_past(self._ahead[0][0]):
            before, self._past = self._past, self._ahead.popleft()
            if before is not None and self._past[1] > before[1]:
                self._ms = milliseconds(before[0], self._past[0]) / (self._past[1] - before[1])
        if self._ms is not None:
            figures["ms_per_step"] = self._ms
        return figures
