"""What a captured step reads from `optimizer.param_groups`: the learning rate as a tensor on the device, and flags."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Adadelta, Optimizer, RMSprop

from .._errors import AmpkitWarning, CaptureError
from .._torch.device.streams import is_capturing
from .._torch.optimizers import step_hooks
from .._torch.tensors.modes import without_dispatch_modes
from .._torch.tensors.tensors import version
from .._undo import Undo, replace
from .step_kind import STEP_HOOKS, makes_rate_tensors

_REPLACED = ("lr", "capturable", "foreach")  # entries of a group that have other values during the step


class RatesOnDevice(Protocol):
    """What a step computes of its rates, in tensors, see `RateProgram`."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that steps read."""

    def refresh(self) -> None:
        """Bring the tensors up to date."""

    def applied(self) -> AbstractContextManager[None]:
        """Return the context of a step."""


@dataclass
class _Rate:
    """The learning rate of a group."""

    tensor: Tensor  # what the step reads
    filled: float | None = None  # the number that was written into it last, None if that is not known


class RateTable:
    """A tensor with a row per step and a column per param group.

    Attributes:
        rows: the rate of each group, by step: tensors of shape () in the memory of the table.
    """

    def __init__(self, steps: int, groups: int, device: torch.device, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            self._table = torch.zeros(steps, groups, _APART // dtype.itemsize, dtype=dtype, device=device)
            self.rows: list[list[Tensor]] = [[self._table[i, j, 0] for j in range(groups)] for i in range(steps)]
        self._filled: list[list[float]] = []  # what the first rows have; [] if that is not known
        self._new: list[list[float]] = []
        self._on_device = False  # whether a rate of the new rows was copied on the device

    def begin(self) -> None:
        """Begin with new rates for the first steps."""
        self._new, self._on_device = [], False

    def add(self, rates: Sequence[float | Tensor | None], steps: int = 1) -> None:
        """Add the rates of the next steps. A tensor on the device is copied now, as it may change later. Sync: none."""
        done = len(self._new)
        if all(type(rate) is float for rate in rates):
            self._new += [[*rates]] * steps  # type: ignore[list-item]  # floats
            return
        numbers = [_NO_NUMBER] * len(rates)
        for j, rate in enumerate(rates):
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._on_device, self._filled = True, []
                self._table[done : done + steps, j, 0].copy_(rate.detach().reshape(()).expand(steps))
            elif rate is not None:
                numbers[j] = float(rate)
        self._new += [numbers] * steps

    def write(self) -> None:
        """Bring the table up to date with the rates that were added: one copy, none if nothing changed. Sync: none."""
        if self._on_device:  # some of the rates are there already
            for row, numbers in zip(self.rows, self._new, strict=False):
                for cell, number in zip(row, numbers, strict=True):
                    if number is not _NO_NUMBER:
                        cell.fill_(number)
        elif self._filled[: len(self._new)] != self._new:
            rest, self._filled = self._filled[len(self._new) :], []
            on_cuda = self._table.is_cuda
            apart = self._table.shape[2]
            cells = [[[rate] * apart for rate in row] for row in self._new]
            with without_dispatch_modes():
                # In new pinned memory each time: the copy of the last rates may not have been done yet.
                rates = torch.tensor(cells, dtype=self._table.dtype, device="cpu", pin_memory=on_cuda)
                self._table[: len(self._new)].copy_(rates, non_blocking=True)
            self._filled = self._new + rest  # after the copy, because an interrupt may come between the two


_IN_PLACE = (
    "it changes group['lr'] of an optimizer in place, and there is another tensor in its place during the step. Change "
    "the tensor that the optimizer was given, or the rate behind the call."
)
_APART = 16  # bytes from one rate to the next: compiled code copies an input that is less aligned (inductor, ALIGNMENT)
_NO_NUMBER = float("nan")  # stands for a rate that is None, or on the device


def has_numbers(optimizer: Optimizer) -> bool:
    """Return whether all rates of an optimizer are plain numbers of Python's."""
    return all(type(group.get("lr")) in (int, float) for group in optimizer.param_groups)


class CapturableGroups:
    """The param groups of an optimizer in the form that a CUDA graph needs. They have this form during a step only.

    `group["lr"]` stays as the user made it: schedulers, checkpoints and assignments see a float and need no device.
    During a step it is a tensor of shape () on the device, and `refresh` writes a changed float into that tensor before
    the step. (A graph would hold a float as a constant: when the rate was set to 0 later, a replay still moved the
    parameter by 1.0.) A group without a rate, or whose rate is None, is left alone: its optimizer computes the rate
    itself.

    On CUDA the loops of RMSprop and Adadelta (`foreach=False`) would read that tensor on the host in every step. Their
    foreach kernels do not, so these run instead, and a warning says so once.

    With `holds_numbers`, a rate that is a number stays one, which a graph holds as a constant, and as float64.

    Attributes:
        device: of the parameters.
        program: what the step computes of its rates, if it cannot read them from tensors itself; None if it can.
        drop_program: called in front of a call whose rates are no numbers any more, which no program can have.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device, *, holds_numbers: bool = False) -> None:
        self._optimizer, self._holds_numbers = optimizer, holds_numbers
        self.device: torch.device = device
        # CUDA kernels read the rate as float32. CPU kernels take any dtype, and a Python float is a float64.
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64
        if makes_rate_tensors(optimizer):
            self._dtype = optimizer.param_groups[0]["lr"].dtype
        self._rates: list[_Rate] = []
        self._given: Sequence[Tensor] | None = None  # what steps read in place of these
        self.program: RatesOnDevice | None = None
        self.drop_program: Callable[[], object] = bool
        if device.type == "cuda" and any(map(self._reads_rate, optimizer.param_groups)):
            name = type(optimizer).__name__
            warnings.warn(
                f"{name}(foreach=False) reads its learning rate on the host, which a graph cannot hold: the step runs "
                f"its foreach kernels, which may differ in the last bit. Write {name}(..., foreach=True).",
                AmpkitWarning,
                stacklevel=4,
            )

    def _reads_rate(self, group: dict[str, Any]) -> bool:
        """Return whether the step turns a tensor rate into a float: `param.add_(..., alpha=-lr)` in torch 2.11."""
        return isinstance(self._optimizer, (RMSprop, Adadelta)) and group.get("foreach") is False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, as the user has them."""
        return self._optimizer.param_groups

    def refresh(self) -> None:
        """Bring the tensors up to date with `group["lr"]`. One kernel per group whose rate changed; no sync."""
        if self.program is not None:
            if not has_numbers(self._optimizer):
                self.drop_program()
            else:
                self.program.refresh()
            return
        groups = self._optimizer.param_groups
        del self._rates[len(groups) :]
        for i, group in enumerate(groups):
            if i == len(self._rates):
                with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
                    self._rates.append(_Rate(torch.empty((), dtype=self._dtype, device=self.device)))
            rate = group.get("lr")
            if rate is None:
                continue
            if isinstance(rate, Tensor) and rate.device.type != "cpu":
                self._rates[i].filled = None
                self._rates[i].tensor.copy_(rate.detach().reshape(()))
            elif float(rate) != self._rates[i].filled:
                self._rates[i].tensor.fill_(float(rate))
                self._rates[i].filled = float(rate)  # after the fill, because an interrupt may come between the two

    def given_tensors(self) -> list[Tensor]:
        """Return the rates that the user has made as tensors. Aliasing: the live tensors."""
        return [rate for group in self._optimizer.param_groups if isinstance(rate := group.get("lr"), Tensor)]

    def table(self, steps: int) -> RateTable:
        """Return a table for the rates of this many steps."""
        return RateTable(steps, len(self._optimizer.param_groups), self.device, self._dtype)

    def read_tensors(self) -> bool:
        """Return whether every step reads its rates from tensors, see `applied`."""
        takes = (group.get("lr") is None or self._takes_tensor(group) for group in self._optimizer.param_groups)
        return self.program is None and all(takes)

    def _takes_tensor(self, group: dict[str, Any]) -> bool:
        """Return whether torch takes a tensor rate: on the CPU in a loop or a fused kernel, not in a foreach kernel."""
        if self._holds_numbers and not all(isinstance(each.get("lr"), Tensor) for each in self._optimizer.param_groups):
            return False
        return self.device.type == "cuda" or not group.get("foreach")

    @contextmanager
    def reading(self, rates: Sequence[Tensor]) -> Iterator[None]:
        """Context for a step that reads its rates from these tensors: one of shape () per group."""
        with Undo() as undo:
            replace(undo, self, "_given", rates)
            yield

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a step reads its learning rates from. Aliasing: the live tensors."""
        if self.program is not None:
            return self.program.tensors()
        return [rate.tensor for rate in self._rates] if self._given is None else list(self._given)

    def _changed(self, given: float | Tensor, now: Tensor) -> float | Tensor:
        """Return the rate that a group has behind a step that has changed it in place. Waits, if it is a number."""
        if is_capturing():
            raise CaptureError(_IN_PLACE)
        if not isinstance(given, Tensor):
            return float(now.item())
        with torch.no_grad():
            return given.copy_(now)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context for a step: groups have a tensor learning rate, and the flag that Adam must have to be captured."""
        groups = self._optimizer.param_groups
        on_cuda = self.device.type == "cuda"
        if is_capturing() and step_hooks(self._optimizer):  # registered after `why_not_capturable` was asked
            raise CaptureError(f"{type(self._optimizer).__name__} {STEP_HOOKS}")
        if self.program is not None:
            with self.program.applied():
                yield
            return
        for state in self._optimizer.state.values() if on_cuda else ():
            # Step counts that were made or loaded without the flag are on the host. They are float32 either way.
            if isinstance(step := state.get("step"), Tensor) and step.device != self.device:
                state["step"] = step.to(self.device)
        given: list[dict[str, Any]] = [{k: group[k] for k in _REPLACED if k in group} for group in groups]
        with Undo() as undo:
            for group, values in zip(groups, given, strict=True):
                undo.note(group.update, values)
            rates = self.tensors()
            for i, group in enumerate(groups):
                if group.get("lr") is not None and self._takes_tensor(group):
                    group["lr"] = rates[i]
                if on_cuda and self._reads_rate(group):
                    group["foreach"] = True
                # Torch refuses the flag on the CPU, where nothing needs it.
                if "capturable" in group and on_cuda and (group.get("fused") or not self._holds_numbers):
                    group["capturable"] = True
            put = [group.get("lr") for group in groups]
            counts = [version(rate) if isinstance(rate, Tensor) else 0 for rate in put]
            yield
            for group, values, old, count in zip(groups, given, put, counts, strict=False):
                if group.get("lr") is not old:
                    values.pop("lr", None)  # the step itself has set another one, which stays
                elif isinstance(old, Tensor) and old is not values["lr"] and version(old) != count:
                    values["lr"] = self._changed(values["lr"], old)
