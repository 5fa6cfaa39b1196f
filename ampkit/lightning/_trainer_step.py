"""One batch of a Lightning Trainer as one call of the engine: which part of a step it is, and what comes back."""

import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._capture.engine import Engine
from .._capture.options import Options
from .._capture.ranks import Ranks
from .._capture.report import Report
from .._capture.state import TrainingState
from .._capture.variation import Part
from .._errors import AmpkitWarning, InputMismatch
from .._optimizer.scaler import GradScaler
from .._step.observer import Observer
from .._step.training_step import Phase, StepOutput, TrainingStep
from .._step.window import NoStepError, Window
from .._torch.tree import tree_flatten
from ..lightning import _log_calls as calls
from ._host_state import BatchIndex, HostReads, HostWrites


class Clip(NamedTuple):
    """How gradients are clipped: to a norm over all, to a magnitude of each element, or not at all."""

    norm: float | None
    value: float | None


class Place(NamedTuple):
    """Where a batch stands, as Lightning says.

    Attributes:
        first: it begins a window of batches whose gradients are summed.
        last: the optimizer steps behind it.
        divisor: its loss is divided by this before backward.
        epoch: the number of the epoch.
    """

    first: bool
    last: bool
    divisor: int
    epoch: int


class _TrainerPhase(NamedTuple):
    """The part of an engine's key that is neither input nor state."""

    phase: Phase
    divisor: int
    host: tuple[tuple[str, Hashable], ...]  # what training_step may read, by name

    def parts(self) -> list[Part]:
        """Return what messages name if it varies from call to call."""
        read = [Part(f"self.{name}", value, _IN_A_BUFFER) for name, value in self.host]
        return [*self.phase.parts(), Part("accumulate_grad_batches", self.divisor, _SAME_WINDOW), *read]


class NoLossError(NoStepError):
    """`training_step` returned no loss that a step can be made of; Lightning knows what to do with it."""

    def __init__(self, output: Any, logged: list[calls.LogCall]) -> None:
        super().__init__("training_step returned no loss")
        self.output = output
        self.logged = logged


class TrainerStep:
    """Calls a `training_step` with the whole step that follows from it, eagerly or as a graph.

    Args:
        forward: `forward(batch, *rest)` calls `training_step` as Lightning does, with wrappers and precision.
        module: the LightningModule.
        model: what Lightning wrapped it in, or the module itself.
        optimizer: the only one.
        reads: what `training_step` reads on the host.
        device: where parameters and batches are.
        scaler: enabled or not.
        clip: how to clip.
        options: of the engine.
        observer: measures in some of the steps; None if nothing does.
        give_up: called with the reason when no call will be captured any more; issues a warning, or raises.

    Attributes:
        grad_norm: norm of the unscaled gradients of the last window before clipping, None where it was not computed.
        stepped: whether the last call did a backward, which Lightning must not do again.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        module: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        reads: HostReads,
        *,
        device: torch.device,
        scaler: GradScaler,
        clip: Clip,
        options: Options,
        observer: Observer | None,
        give_up: Callable[[str], None],
    ) -> None:
        self._forward = forward
        self._module = module
        self._reads = reads
        self._captures = options.graph != "off"
        self._watched = options.warmup if self._captures else 0  # calls that are still looked at closely
        self._give_up = give_up
        self._ranks = Ranks(model, device)
        self._step = TrainingStep(
            self._loss,
            module,
            optimizer,
            policy=None,
            scaler=scaler,
            max_norm=clip.norm,
            max_value=clip.value,
            accumulate=1,  # the loss arrives divided
            after_step=None,
            ranks=self._ranks,
            device=device,
            capturable=True,
            observer=observer,
        )
        self._engine = Engine(
            self._run,
            TrainingState({"model": module}, [optimizer], scaler, own=self._step.gradients, rates=[self._step.groups]),
            device=device,
            options=options,
            ranks=self._ranks,
            blocker="",
            name="AmpkitCallback",
            captured=self._run_captured,
            watching=self._step.watching,
            one_argument=True,
        )
        self._window = Window(self._micro_batch, self._engine.run, self._step, size=0)
        self._rest: tuple[Any, ...] = ()
        self._divisor = 1
        self._host: tuple[tuple[str, Hashable], ...] = ()
        self._numbers: dict[Hashable, float] = {}  # that were logged
        self._problem = ""  # found in the calls that are looked at
        self._eager = ""  # why no call is captured any more
        self._device = device
        self._constants: dict[float, Tensor] = {}  # on the device, by their value
        self._advised = device.type != "cuda"  # elsewhere no read waits
        self.grad_norm: Tensor | None = None
        self.stepped = False

    @property
    def replays(self) -> int:
        """How many batches were a graph launch."""
        return self._engine.replays

    def report(self) -> Report:
        """Return graphs, replays, eager steps and why so far. Waits for the device."""
        skipped = self._step.scaler.skipped
        report = self._engine.report(0 if skipped is None else int(skipped.item()))  # sync
        return replace(report, failure=self._eager) if self._eager else report

    def close(self) -> None:
        """Release the graphs."""
        self._engine.close()

    def __call__(self, place: Place, batch: Any, *rest: Any) -> Any:
        """Do the part of a step that belongs to this batch; return what `training_step` returned, detached.

        Its calls of `self.log` are made behind it. Sync: none.
        """
        return self._engine.turn.take(self._do, place, batch, *rest)

    def _do(self, place: Place, batch: Any, *rest: Any) -> Any:
        self._rest, self.stepped = rest, False
        if place.first:
            self._window.restart()
        self._window.size = self._window.count + 1 if place.last else 0
        self._divisor, self._host = place.divisor, self._reads.values(place.epoch)
        try:
            out = self._window.run((batch,), {})
        except NoLossError as none:
            return self._without_step(none, place)
        if place.last:
            self.grad_norm = out.grad_norm
        self.stepped = True
        ((template, tensors),) = out.aux.items()
        output, logged = template.filled(tensors)
        self._log(logged)
        return output

    def _log(self, logged: list[calls.LogCall]) -> None:
        for name, value, args, kwargs in logged:
            if isinstance(value, (bool, int, float)):
                value = self._on_device(value)
            if not self._advised and isinstance(value, Tensor) and (kwargs.get("prog_bar") or (args and args[0])):
                self._advised = True
                warnings.warn(_READ_BY_THE_BAR.format(name), AmpkitWarning, stacklevel=2)
            self._module.log(name, value, *args, **kwargs)  # type: ignore[operator]  # a LightningModule's

    def _on_device(self, value: float) -> Tensor:
        """Return a number as the tensor that Lightning would make of it, which waits for the device, made once."""
        tensor = self._constants.get(value)
        if tensor is None:
            default = torch.get_default_dtype()
            dtype = default if default in (torch.float32, torch.float64) else torch.float32
            tensor = torch.tensor(value, dtype=dtype, device=self._device)
            if len(self._constants) < _MAX_CONSTANTS:
                self._constants[value] = tensor
        return tensor

    # ------------------------------------------------------------------------------------------------- what is called

    def _micro_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase
    ) -> tuple[StepOutput, tuple[int, ...]]:
        """Do what the window asks for."""
        place, batch = _TrainerPhase(phase, self._divisor, self._host), args[0]
        return self._watch(place, batch) if self._watched else self._call(place, batch)

    def _call(self, place: _TrainerPhase, batch: Any) -> tuple[StepOutput, tuple[int, ...]]:
        if self._captures and self._reads.problem:
            self._stay_eager(self._reads.problem)
        if not self._eager:
            try:
                return self._engine((batch,), {}, place)  # type: ignore[no-any-return]  # what the step returns
            except InputMismatch as error:
                self._stay_eager(_not_comparable(batch) or str(error))
        if self._captures:
            self._ranks.decide(wants=False, can=True, settled=True)  # others may vote in this call
        return self._engine.run("cannot be captured", lambda: self._run(place, batch))  # type: ignore[no-any-return]  # what `_run` returns

    def _run(self, place: _TrainerPhase, batch: Any) -> tuple[StepOutput, tuple[int, ...]]:
        return self._step(place.phase, batch, divisor=place.divisor)

    def _run_captured(self, place: _TrainerPhase, batch: Any) -> tuple[StepOutput, tuple[int, ...]]:
        return self._step.captured(place.phase, batch, divisor=place.divisor)

    def _loss(self, model: nn.Module, batch: Any, divisor: int) -> tuple[Tensor, dict[calls.Template, list[Tensor]]]:
        with calls.recorded(self._module) as logged:
            output = self._forward(batch, *self._rest)
        loss = calls.loss_in(output)
        if loss is None:
            raise NoLossError(output, logged)
        template = calls.Template((dict(output) if isinstance(output, Mapping) else output, logged))
        loss = loss.reshape(())
        return loss / divisor if divisor > 1 else loss, {template: template.take_tensors()}

    def _without_step(self, none: NoLossError, place: Place) -> Any:
        """Do what Lightning does where there is no loss: no backward, and a step on what the window has so far."""
        self._stay_eager("training_step returned no loss, which is a decision of the host that a graph would freeze.")
        if place.last and none.output is None and not self._step.scaler.is_enabled():
            self._window.flush("training_step returned None")
        if place.last:
            self._window.restart()
        self._log(none.logged)
        return none.output

    # --------------------------------------------------------------------------------------------- a closer look at it

    def _watch(self, place: _TrainerPhase, batch: Any) -> tuple[StepOutput, tuple[int, ...]]:
        """Call, and find out whether this `training_step` computes all it does from its batch."""
        self._watched -= 1
        self._problem = self._problem or _not_comparable(batch)
        index = BatchIndex(self._rest[0]) if self._rest and self._reads.reads_index else None
        if index is not None:
            self._rest = (index, *self._rest[1:])
        with HostWrites(self._module) as writes:
            out, held = self._call(place, batch)
        if index is not None and index.used:
            self._problem = self._problem or _USES_INDEX
        self._problem = self._problem or writes.problem or self._changed_number(out, batch)
        if self._watched == 0 and not self._ranks.agree(not self._problem):
            self._stay_eager(self._problem or self._ranks.other_found)
        return out, held

    def _changed_number(self, out: StepOutput, batch: Any) -> str:
        """Return what is wrong with the numbers that were logged: between equal batches a graph would repeat them."""
        ((template, tensors),) = out.aux.items()
        shapes = tuple(leaf.shape for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
        for name, value in calls.numbers(template.filled(tensors)[1]).items():
            before = self._numbers.setdefault((name, shapes), value)
            if before != value:
                return (
                    f"self.log({name!r}, {value!r}) in training_step: it was {before!r} before, and a graph would "
                    "repeat one of them. Log a tensor, or log it in on_train_batch_end."
                )
        return ""

    def _stay_eager(self, reason: str) -> None:
        if not self._eager:
            self._eager = reason
            self._engine.close()
            if self._captures:
                self._give_up(reason)


_IN_A_BUFFER = "Keep what training_step reads in a buffer, and change that in place."
_SAME_WINDOW = "Keep accumulate_grad_batches the same."
_MAX_CONSTANTS = 64  # a number that is another one in each eager step must not fill the memory
_READ_BY_THE_BAR = (
    "AmpkitCallback: self.log({0!r}, ..., prog_bar=True) makes Lightning read the value on every batch, so that each "
    "one waits for the device, even if no bar is shown. Leave prog_bar out, or pass on_step=False, on_epoch=True."
)
_USES_INDEX = (
    "training_step computes with batch_idx, of which a graph would freeze one value. Do what depends on it in "
    "on_train_batch_start or on_train_batch_end, or count batches in a buffer."
)
_COMPARABLE = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _not_comparable(batch: Any) -> str:
    """Return which leaf of a batch cannot be told from another one, "" if there is none."""
    for leaf in tree_flatten(batch)[0]:
        if not isinstance(leaf, _COMPARABLE):
            return (
                f"the batch holds a {type(leaf).__name__}, into which a graph cannot look. Make it a tuple, list, dict "
                "or named tuple of tensors, in the collate_fn of the DataLoader."
            )
    return ""
