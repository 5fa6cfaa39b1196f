"""Which steps of a training are observed, and what is remembered of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ..._arguments import check_at_least, check_instance
from ..._capture.ranks.ranks import several_processes
from ..._capture.ranks.shards import free_whole_parameters, is_sharded, shard_groups
from ..._optimizer.scaler import GradScaler
from .findings import NumericsFinding, ObservedStep
from .hooks import ModelHooks, unwrapped
from .measurements import AsyncCopies, DeviceStatistics, Measurements
from .report import NumericsReport, advice, safe_scale


def numerics(model: nn.Module, *, every: int = 100, scaler: TorchGradScaler | None = None) -> "Numerics":
    """Return an object that measures the numbers of a model in some training steps, without waiting for the device.

    It measures the inputs and outputs of leaf modules (and of others with parameters of their own), the gradients of
    their outputs, the gradients that they pass back to their inputs, and the gradients of parameters. Of each it knows
    the largest finite magnitude, how many values are not finite, how many are zero, and how many have which exponent.
    Of a Linear layer that computes in float8 it knows how many values of its input, its weight and the gradient of its
    output become zero by that; see `NumericsRow`.

    Give it to a captured step; the observed steps then get graphs of their own::

        watch = ampkit.debug.numerics(model)
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="float16", numerics=watch)
        for batch in loader:
            step(*batch)
        print(watch.report())

    Or use it in a loop of your own::

        with ampkit.debug.numerics(model, every=1, scaler=scaler) as watch:
            for batch in loader:
                ...  # forward, backward, scaler.step(optimizer), scaler.update()
                watch.step()

    The observed steps are 0, `every`, 2 * `every` and so on. When the host learns that a step was skipped for an
    overflow, it also observes the next one. So an overflow that persists is found a step or two later, and in the steps
    between only the count of skipped steps, 8 bytes, is copied to the host. Where several processes train together they
    must observe the same steps, so they observe only the regular ones. In a loop of your own, calls in eval mode
    without gradients (validation under `torch.no_grad()`) are left out.

    Args:
        model: the model. For a `DistributedDataParallel`, names are without `module.`. Parts that
            `torch.compile(module)` returned are measured from outside, and by the gradients of their parameters. Calls
            within `torch.func` (vmap, grad) and nested tensors are not measured. Of a model under `fully_shard`, the
            gradients of parameters are measured whole, and all else on this rank's batch. While it is measured, an
            `nn.TransformerEncoder` in eval mode does not take torch's fused path, as with any hook on it.
        every: the number of steps from one observed step to the next, at least 1.
        scaler: for a loop of your own, torch's or ampkit's scaler. It tells by what gradients are multiplied, and which
            steps are skipped. A captured step uses its own scaler.

    Returns:
        A `Numerics`. It measures nothing until it is given to a step, or entered as a context manager.

    Raises:
        ValueError: an argument is wrong, or a module was compiled in place.
    """
    check_instance("numerics", "model", model, nn.Module, "a torch.nn.Module")
    free_whole_parameters(model)
    check_at_least("numerics", "every", every, 1, "the number of steps from one that is observed to the next")
    if scaler is not None:
        check_instance("numerics", "scaler", scaler, TorchGradScaler, "a torch.amp.GradScaler, or None")
    return Numerics(model, every, scaler)


class Numerics:
    """Measures a model in some of its training steps. Made by `numerics`; an `Observer` of a captured step.

    In a loop of your own it is a context manager. What it has found is still there after the context.
    """

    def __init__(self, model: nn.Module, every: int, scaler: TorchGradScaler | None) -> None:
        self._model = model
        self._every = every
        self._scaler = scaler
        self._hooks = ModelHooks(model)
        self._statistics: DeviceStatistics | None = None  # made where the parameters are
        self._statistics_copies, self._skip_count_copies = AsyncCopies(), AsyncCopies()
        self._order: list[int] = []  # rows, in the order in which steps measured them
        self._dtypes: dict[int, torch.dtype] = {}
        self._step = 0
        self._observes = False  # the step that is under way
        self._observed = 0
        self._skip_count: float | None = None  # the last one that the host knows; a resumed scaler may start above 0
        self._observe_next = False  # because a step was skipped
        self._loop_hooks: ExitStack | None = None  # in a loop of the user's own, while a step is under way
        self._loop_measurements: Measurements | None = None  # in a loop of the user's own, of an observed step
        self._attached = False
        self._last: ObservedStep | None = None
        self._harmless: set[int] = set()  # rows that were not finite in a step whose gradients were finite
        self._first_overflowed: ObservedStep | None = None
        self._last_overflowed: ObservedStep | None = None
        self._first_underflow: NumericsFinding | None = None
        self._largest_gradient: float | None = None  # unscaled

    # ------------------------------------------------------------------------------------------ what a step calls

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """See `Observer`."""
        if unwrapped(model) is not unwrapped(self._model):
            raise ValueError("graphed_step(numerics): it was made for another model. Use ampkit.debug.numerics(model).")
        if self._loop_hooks is not None or self._attached:
            raise ValueError("graphed_step(numerics): it is in use already. Make one for each step.")
        if is_sharded(model) and self._hooks.parameters_were_replaced():
            raise ValueError(
                "graphed_step(numerics): it was made before fully_shard, which replaces the parameters. Make it "
                "afterwards."
            )
        self._attached = True
        self._allocate(device)

    def _allocate(self, device: torch.device) -> None:
        if self._statistics is None or self._statistics.buffer.device != device:
            self._statistics = DeviceStatistics(len(self._hooks.tensors), device)

    @property
    def _on_device(self) -> DeviceStatistics:
        assert self._statistics is not None  # made by attach, or on entry
        return self._statistics

    def tensors(self) -> dict[str, Tensor]:
        """See `Observer`."""
        return {"the statistics of ampkit.debug.numerics": self._on_device.buffer}

    def begin(self) -> bool:
        """See `Observer`."""
        self._take_copies()
        self._observes = self._step % self._every == 0 or self._observe_next
        if self._observes:
            self._observe_next = False
            self._on_device.buffer.zero_()
        return self._observes

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See `Observer`."""
        measurements = Measurements(self._on_device)
        try:
            with self._hooks.measuring(measurements):
                yield
            self._close(measurements)
        finally:
            measurements.discard()

    def gradients(self, scale: Tensor | None) -> None:
        """See `Observer`."""
        measurements = Measurements(self._on_device)
        self._hooks.measure_gradients(measurements)
        self._hooks.measure_parameters(self._on_device)
        if scale is not None:
            self._on_device.set_scale(scale)
        self._close(measurements)
        if split_over := shard_groups(self._model):
            self._on_device.add_up(self._hooks.first_parameter, split_over[0])

    def stepped(self, skipped: Tensor | None) -> None:
        """See `Observer`."""
        if self._observes:
            self._statistics_copies.start(self._step, self._on_device.buffer)
            self._observes = False
        if skipped is not None and not self._skip_count_copies.pending and not several_processes():
            self._skip_count_copies.start(self._step, skipped)
        self._step += 1

    def observe_next(self) -> bool:
        """See `Observer`."""
        self._observe_next = not several_processes()
        return self._observe_next

    def first_nonfinite(self, since: int) -> str:
        """See `Observer`."""
        self._take_copies(wait=True)
        kept = (self._first_overflowed, self._last_overflowed)
        step = next((step for step in kept if step is not None and step.step >= since), None)
        return "" if step is None else str(step.first_overflow(self._harmless))

    def _close(self, measurements: Measurements) -> None:
        """Add what was measured to the statistics, and remember the order: a replay runs no Python that tells it."""
        measurements.close()
        self._order = [*(row for row in self._order if row not in measurements.dtypes), *measurements.dtypes]
        self._dtypes.update(measurements.dtypes)

    # ------------------------------------------------------------------------------------- a loop of the user's own

    def __enter__(self) -> "Numerics":
        if self._attached:
            raise ValueError("numerics: a captured step measures with it. Make another one for a loop of your own.")
        if is_sharded(self._model):
            raise NotImplementedError(
                "numerics: in a loop of your own, the gradients of fully_shard are not measured. Write the step with "
                "ampkit.graphed_step(..., numerics=ampkit.debug.numerics(model)), if you like with graph='off'."
            )
        devices = {param.device for param in self._model.parameters()}
        if len(devices) != 1:
            raise ValueError(
                f"numerics(model): expected parameters on one device, found them on {len(devices)}. Use "
                "model.to(device)."
            )
        self._allocate(devices.pop())
        self._begin_in_loop()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_in_loop(finished=False)
        self._observes = False

    def step(self, scaler: TorchGradScaler | None = None) -> None:
        """End a step of a loop of your own, after `scaler.update()`. Sync: none.

        Args:
            scaler: as in `numerics`, for a scaler that is made later. If the first step is skipped, the loss scale that
                is reported for it is the one after that step.
        """
        if self._loop_hooks is None:
            raise ValueError(
                "Numerics.step(): it ends a step within `with numerics(model, ...) as watch:`. A graphed_step that was "
                "given a Numerics needs no call."
            )
        known = self._scaler is not None
        self._scaler = scaler or self._scaler
        if self._observes and not known:
            self._note_scale()
        self._end_in_loop(finished=True)
        self.stepped(_skip_count(self._scaler, self._on_device.buffer.device))
        self._begin_in_loop()

    def _begin_in_loop(self) -> None:
        self._loop_hooks = ExitStack()
        if self.begin():
            self._loop_measurements = Measurements(self._on_device)
            hooks = self._hooks.measuring(self._loop_measurements, in_loop=True)
            self._loop_hooks.enter_context(hooks)
            self._note_scale()
            self._hooks.measure_parameters(self._on_device)

    def _note_scale(self) -> None:
        if self._scaler is not None:
            one = torch.ones((), device=self._on_device.buffer.device)
            self._on_device.set_scale(self._scaler.scale(one))

    def _end_in_loop(self, *, finished: bool) -> None:
        if self._loop_hooks is not None:
            self._loop_hooks.close()
        if self._loop_measurements is not None:
            if finished:
                self._close(self._loop_measurements)
            self._loop_measurements.discard()
        self._loop_hooks = self._loop_measurements = None

    # ------------------------------------------------------------------------------------------------------ results

    def _take_copies(self, *, wait: bool = False) -> None:
        """Take note of what has arrived on the host."""
        for _, count in self._skip_count_copies.take(wait=wait):
            self._observe_next |= self._skip_count is not None and float(count) > self._skip_count
            self._skip_count = float(count)
        for step, buffer in self._statistics_copies.take(wait=wait):
            seen = ObservedStep(step, buffer, self._hooks, self._order, self._dtypes)
            self._observed += 1
            self._last = seen
            if seen.overflowed:
                self._first_overflowed, self._last_overflowed = self._first_overflowed or seen, seen
            else:
                self._harmless |= seen.nonfinite_rows
                self._largest_gradient = max(self._largest_gradient or 0.0, seen.largest_unscaled_gradient())
                self._first_underflow = self._first_underflow or seen.first_underflow()

    def figures(self) -> dict[str, float]:
        """Return a few numbers for a logger, of the last observed step that has arrived; {} before that. Sync: none.

        All are finite. So there is no `safe_scale` if every step overflowed, or if all gradients were zero. There is
        `flushed_in_float8` if something was cast to it: the share of all these values that became zero.
        """
        self._take_copies()
        if self._last is None:
            return {}
        largest, nonfinite, flushed = self._last.gradients_of_parameters()
        in_float8 = self._last.flushed_in_float8()
        return {
            "step": float(self._last.step),
            "scale": self._last.scale,
            "largest_gradient": largest,
            "nonfinite_gradients": nonfinite,
            "flushed_in_float16": flushed,
            **({} if in_float8 is None else {"flushed_in_float8": in_float8}),
            **({"safe_scale": safe_scale(self._largest_gradient)} if self._largest_gradient else {}),
        }

    def report(self) -> NumericsReport:
        """Return what was found so far. Waits for the device if a copy is under way."""
        self._take_copies(wait=True)
        last, safe = self._last, None if self._largest_gradient is None else safe_scale(self._largest_gradient)
        # Only now: later steps may have shown which tensors hold inf on purpose, as a mask does.
        overflowed = self._first_overflowed
        overflow = None if overflowed is None else overflowed.first_overflow(self._harmless)
        scale = 1.0 if last is None else last.scale
        persists = last is not None and last.overflowed
        rows = () if last is None else tuple(last.rows())
        called = {row.name for row in rows if row.what != "gradient"}
        modules = dict.fromkeys(tensor.name for tensor in self._hooks.tensors if tensor.what != "gradient")
        return NumericsReport(
            steps=self._step,
            observed=self._observed,
            step=None if last is None else last.step,
            scale=scale,
            safe_scale=safe,
            first_overflow=overflow,
            first_underflow=self._first_underflow,
            advice=tuple(advice(overflow, self._first_underflow, scale, safe, persists, self._hooks.root)),
            rows=rows,
            never_called=tuple(name for name in modules if last is not None and name not in called),
            compiled=tuple(self._hooks.compiled),
            bytes=0 if self._statistics is None else self._statistics.buffer.nbytes,
        )


def _skip_count(scaler: TorchGradScaler | None, device: torch.device) -> Tensor | None:
    """Return a tensor on the device that grows when a step is skipped; None without a scaler that skips."""
    if scaler is None or not scaler.is_enabled():
        return None
    if isinstance(scaler, GradScaler):
        return scaler.skipped
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return -scale  # torch's own scaler counts nothing, but it lowers the scale
