"""Which steps of a training are measured, what is kept of them, and how it is reported."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ..._arguments import check_at_least, check_instance
from ..._optimizer.scaler import GradScaler
from ..._text import size_text
from .findings import NumericsFinding, NumericsRow, Reading, advice, safe_scale
from .sites import Sites, unwrapped
from .statistics import Arrivals, Tally, Telemetry


def numerics(model: nn.Module, *, every: int = 100, scaler: TorchGradScaler | None = None) -> "Numerics":
    """Return what measures the numbers of a model in every so many training steps, on the device, without a wait.

    Measured are inputs and outputs of leaf modules (and of others with parameters of their own), the gradients that
    come to their outputs and that they hand on to their inputs, and the gradients of parameters: largest finite
    magnitude, values that are not finite, zeros, and how many values have which exponent.

    Give it to a captured step, whose observed steps are then graphs of their own::

        watch = ampkit.debug.numerics(model)
        step = ampkit.graphed_step(loss_fn, model, optimizer, policy="float16", numerics=watch)
        for batch in loader:
            step(*batch)
        print(watch.report())

    or write it into a loop of your own::

        with ampkit.debug.numerics(model, every=1, scaler=scaler) as watch:
            for batch in loader:
                ...  # forward, backward, scaler.step(optimizer), scaler.update()
                watch.step()

    Observed are the steps 0, `every`, 2 * `every` and so on, and each one that begins when the host has learned that
    an earlier one was skipped for an overflow: an overflow that persists is found a step or two later, with nothing
    but the count of skipped steps, 8 bytes, copied in the steps between. Where several processes train together they
    must observe the same steps, so that only the regular ones are. In a loop of your own, calls in eval mode without
    gradients (validation under `torch.no_grad()`) are left out.

    Args:
        model: a `DistributedDataParallel` gives the names without `module.`. Parts that are `torch.compile(module)` are
            measured from outside, and by the gradients of their parameters. What is called within `torch.func` (vmap,
            grad) and nested tensors are not measured. An `nn.TransformerEncoder` in eval mode leaves torch's fused
            path where it is measured, as with any hook on it.
        every: steps from one observed step to the next, at least 1.
        scaler: in a loop of your own, the scaler, torch's or ampkit's, that says by what gradients are multiplied and
            which steps are skipped. A captured step uses its own.

    Returns:
        A `Numerics`. Nothing is measured until it is given to a step or entered.

    Raises:
        ValueError: an argument that cannot work; a module that was compiled in place.
    """
    check_instance("numerics", "model", model, nn.Module, "a torch.nn.Module")
    check_at_least("numerics", "every", every, 1, "the number of steps from one that is observed to the next")
    if scaler is not None:
        check_instance("numerics", "scaler", scaler, TorchGradScaler, "a torch.amp.GradScaler, or None")
    return Numerics(model, every, scaler)


@dataclass(frozen=True)
class NumericsReport:
    """What was found in the observed steps so far.

    Attributes:
        steps: optimizer steps so far.
        observed: those of them that were observed.
        step: the last observed one, None if there was none.
        scale: the loss scale in it, 1.0 where there is none.
        safe_scale: the largest power of two that would have kept every gradient of the observed steps finite in
            float16; inf if all were zero, None if each of these steps overflowed.
        first_overflow: where a step first computed a value that is not finite, so that a gradient became so too.
        first_underflow: at whose backward gradients in float16 first vanished.
        advice: what to do, with the code to write.
        rows: statistics of the last observed step, in the order of time.
        never_called: modules that no observed step called in Python: unused, or inside compiled code.
        compiled: modules that were measured from outside.
        bytes: of the buffer on the device.
    """

    steps: int
    observed: int
    step: int | None
    scale: float
    safe_scale: float | None
    first_overflow: NumericsFinding | None
    first_underflow: NumericsFinding | None
    advice: tuple[str, ...]
    rows: tuple[NumericsRow, ...]
    never_called: tuple[str, ...]
    compiled: tuple[str, ...]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that `json` takes. JSON has no inf: a `safe_scale` of inf is None there."""
        named = {"first_overflow": self.first_overflow, "first_underflow": self.first_underflow}
        findings = {name: None if found is None else found._asdict() for name, found in named.items()}
        safe = None if self.safe_scale == math.inf else self.safe_scale
        return {**asdict(self), **findings, "safe_scale": safe, "rows": [row._asdict() for row in self.rows]}

    def table(self, rows: int | None = None) -> str:
        """Return a text table of the statistics in the order of time, of all rows or of the worst ones."""
        shown = self.rows
        if rows is not None and len(shown) > rows:
            worst = sorted(shown, key=lambda row: (row.nonfinite > 0, row.fraction_fading), reverse=True)[:rows]
            shown = tuple(row for row in shown if row in worst)
        width = max([len(row.name) for row in shown], default=6)
        head = f"{'name':{width}}  what         dtype      largest    not finite  zeros   subnormal  flushed in fp16"
        lines = [
            f"{row.name:{width}}  {row.what:11}  {row.dtype:8}  {_largest(row):>10}  {row.nonfinite:10d}  "
            f"{row.zeros / row.count:6.1%}  {row.subnormal / row.count:9.1%}  {row.flushed / row.count:6.1%}"
            for row in shown
        ]
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        if self.step is None:
            return f"numerics: {self.steps} steps, none of them observed."
        safe = "not known, all observed steps overflowed" if self.safe_scale is None else f"{self.safe_scale:g}"
        lines = [
            f"numerics: {self.observed} of {self.steps} steps observed, the last one step {self.step}; "
            f"loss scale {self.scale:g}, largest safe one {safe}; {size_text(self.bytes)} on the device",
            *(str(found) for found in (self.first_overflow, self.first_underflow) if found is not None),
            *(f"advice: {line}" for line in self.advice),
        ]
        if self.compiled:
            lines.append(f"compiled, measured from outside: {', '.join(self.compiled)}")
        if self.never_called:
            lines.append(f"never called, or inside compiled code: {', '.join(self.never_called[:8])}")
        return "\n".join([*lines, f"step {self.step}, the worst rows of {len(self.rows)}:", self.table(_SHOWN)])


class Numerics:
    """Measures a model in some of its training steps. Made by `numerics`; an `Observer` of a captured step.

    A context manager for a loop of your own. What it has found outlives the context.
    """

    def __init__(self, model: nn.Module, every: int, scaler: TorchGradScaler | None) -> None:
        self._model = model
        self._every = every
        self._scaler = scaler
        self._sites = Sites(model)
        self._telemetry: Telemetry | None = None  # made where the parameters are
        self._snapshots, self._skips = Arrivals(), Arrivals()
        self._order: list[int] = []  # rows, as steps measured them
        self._dtypes: dict[int, torch.dtype] = {}
        self._step = 0
        self._observes = False  # the step that is under way
        self._observed = 0
        self._skipped: float | None = None  # the highest count that the host knows; a scaler may have one already
        self._alarmed = False  # the next step is to be observed
        self._loop: ExitStack | None = None  # of a loop of the user's own
        self._tally: Tally | None = None  # of its step
        self._attached = False
        self._last: Reading | None = None
        self._harmless: set[int] = set()
        self._overflowed: Reading | None = None  # the first one
        self._underflow: NumericsFinding | None = None
        self._largest: float | None = None  # unscaled gradient

    # ------------------------------------------------------------------------------------------ what a step calls

    def attach(self, model: nn.Module, device: torch.device) -> None:
        """See `Observer`."""
        if unwrapped(model) is not unwrapped(self._model):
            raise ValueError("graphed_step(numerics): it was made for another model. Use ampkit.debug.numerics(model).")
        if self._loop is not None or self._attached:
            raise ValueError("graphed_step(numerics): it is in use already. Make one for each step.")
        self._attached = True
        self._allocate(device)

    def _allocate(self, device: torch.device) -> None:
        if self._telemetry is None or self._telemetry.buffer.device != device:
            self._telemetry = Telemetry(len(self._sites.rows), device)

    def tensors(self) -> dict[str, Tensor]:
        """See `Observer`."""
        assert self._telemetry is not None  # made by attach
        return {"the statistics of ampkit.debug.numerics": self._telemetry.buffer}

    def begin(self) -> bool:
        """See `Observer`."""
        self._take()
        self._observes = self._step % self._every == 0 or self._alarmed
        if self._observes:
            self._alarmed = False
            assert self._telemetry is not None  # made by attach, or on entry
            self._telemetry.clear()
        return self._observes

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See `Observer`."""
        assert self._telemetry is not None  # made by attach
        tally = Tally(self._telemetry)
        try:
            with self._sites.measuring(tally):
                yield
            self._close(tally)
        finally:
            tally.discard()

    def gradients(self, scale: Tensor | None) -> None:
        """See `Observer`."""
        assert self._telemetry is not None  # made by attach
        tally = Tally(self._telemetry)
        self._sites.measure_gradients(tally)
        self._sites.measure_parameters(self._telemetry)
        if scale is not None:
            self._telemetry.set_scale(scale)
        self._close(tally)

    def stepped(self, skipped: Tensor | None) -> None:
        """See `Observer`."""
        if self._observes:
            assert self._telemetry is not None  # made by attach, or on entry
            self._snapshots.start(self._step, self._telemetry.buffer)
            self._observes = False
        if skipped is not None and not len(self._skips) and not _among_others():
            self._skips.start(self._step, skipped)
        self._step += 1

    def _close(self, tally: Tally) -> None:
        """Add what was measured, and learn when each row is, from a step that ran in Python."""
        tally.close()
        self._order = [*(row for row in self._order if row not in tally.dtypes), *tally.sequence]
        self._dtypes.update(tally.dtypes)

    # ------------------------------------------------------------------------------------- a loop of the user's own

    def __enter__(self) -> "Numerics":
        if self._attached:
            raise ValueError("numerics: a captured step measures with it. Make another one for a loop of your own.")
        devices = {param.device for param in self._model.parameters()}
        if len(devices) != 1:
            raise ValueError(f"numerics(model): expected parameters on one device, found them on {len(devices)}.")
        self._allocate(devices.pop())
        self._begin_in_loop()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_in_loop(finished=False)
        self._observes = False

    def step(self, scaler: TorchGradScaler | None = None) -> None:
        """End a step of a loop of your own, behind `scaler.update()`. Sync: none.

        Args:
            scaler: as in `numerics`, for those who make the scaler later. In a first step that is skipped, the scale
                is then taken for what it became.
        """
        if self._loop is None:
            raise ValueError(
                "Numerics.step(): it ends a step within `with numerics(model, ...) as watch:`. A graphed_step that was "
                "given a Numerics needs no call."
            )
        known = self._scaler is not None
        self._scaler = scaler or self._scaler
        if self._observes and not known:
            self._note_scale()
        self._end_in_loop(finished=True)
        self.stepped(_count_of_skips(self._scaler, self._device))
        self._begin_in_loop()

    @property
    def _device(self) -> torch.device:
        assert self._telemetry is not None  # made on entry
        return self._telemetry.buffer.device

    def _begin_in_loop(self) -> None:
        self._loop = ExitStack()
        if self.begin():
            assert self._telemetry is not None  # made on entry
            self._tally = Tally(self._telemetry)
            self._loop.enter_context(self._sites.measuring(self._tally, only_training=True, parameters=True))
            self._note_scale()
            self._sites.measure_parameters(self._telemetry)

    def _note_scale(self) -> None:
        if self._scaler is not None:
            assert self._telemetry is not None  # made on entry
            self._telemetry.set_scale(self._scaler.scale(torch.ones((), device=self._device)))

    def _end_in_loop(self, *, finished: bool) -> None:
        if self._loop is not None:
            self._loop.close()
        if self._tally is not None:
            if finished:
                self._close(self._tally)
            self._tally.discard()
        self._loop = self._tally = None

    # ------------------------------------------------------------------------------------------------------ results

    def _take(self, *, wait: bool = False) -> None:
        """Look at what has arrived on the host."""
        for _, count in self._skips.take(wait=wait):
            self._alarmed |= self._skipped is not None and float(count) > self._skipped
            self._skipped = float(count)
        for step, buffer in self._snapshots.take(wait=wait):
            assert self._telemetry is not None  # it has sent this
            snapshot = self._telemetry.snapshot(step, buffer)
            self._learn(Reading(snapshot, self._sites.rows, self._sites.parameters, self._order, self._dtypes))

    def _learn(self, reading: Reading) -> None:
        self._observed += 1
        self._last = reading
        if reading.overflowed():
            self._overflowed = self._overflowed or reading
        else:
            self._harmless |= reading.nonfinite()
            self._largest = max(self._largest or 0.0, reading.largest_unscaled_gradient())
            self._underflow = self._underflow or reading.first_underflow()

    def figures(self) -> dict[str, float]:
        """Return a few numbers of the last observed step that has arrived, for a logger; {} before. Sync: none.

        All are finite: there is no `safe_scale` where each step overflowed, nor where all gradients were zero.
        """
        self._take()
        if self._last is None:
            return {}
        largest, nonfinite, flushed = self._last.gradients_of_parameters()
        return {
            "step": float(self._last.step),
            "scale": self._last.scale,
            "largest_gradient": largest,
            "nonfinite_gradients": nonfinite,
            "flushed_in_float16": flushed,
            **({"safe_scale": safe_scale(self._largest)} if self._largest else {}),
        }

    def report(self) -> NumericsReport:
        """Return what was found so far. Waits for the device, if a copy is under way."""
        self._take(wait=True)
        last, safe = self._last, None if self._largest is None else safe_scale(self._largest)
        # Now, for good steps since then may have shown which tensors hold inf by intent, as a mask does.
        overflow = None if self._overflowed is None else self._overflowed.first_overflow(self._harmless)
        scale = 1.0 if last is None else last.scale
        rows = () if last is None else tuple(last.rows())
        called = {row.name for row in rows if row.what != "gradient"}
        modules = dict.fromkeys(row.name for row in self._sites.rows if row.what != "gradient")
        return NumericsReport(
            steps=self._step,
            observed=self._observed,
            step=None if last is None else last.step,
            scale=scale,
            safe_scale=safe,
            first_overflow=overflow,
            first_underflow=self._underflow,
            advice=tuple(
                advice(
                    overflow,
                    self._underflow,
                    scale,
                    safe,
                    persists=last is not None and last.overflowed(),
                    root=self._sites.root,
                )
            ),
            rows=rows,
            never_called=tuple(name for name in modules if last is not None and name not in called),
            compiled=tuple(self._sites.compiled),
            bytes=0 if self._telemetry is None else self._telemetry.buffer.nbytes,
        )


def _count_of_skips(scaler: TorchGradScaler | None, device: torch.device) -> Tensor | None:
    """Return a tensor on the device that is larger after a step was skipped; None without a scaler that skips."""
    if scaler is None or not scaler.is_enabled():
        return None
    if isinstance(scaler, GradScaler):
        return scaler.skipped
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return -scale  # torch's own scaler counts nothing, but backs off


def _among_others() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


_SHOWN = 24  # rows in the text of a report


def _largest(row: NumericsRow) -> str:
    return f"{'>=' if row.nonfinite else ''}{row.largest:.3e}"
