"""What a step returns and logs: split into tensors, which each replay computes, and values that never change.

The calls of `self.log` are recorded at capture, and made after each replay with that replay's tensors.
"""

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._capture.graph.cache import Rebuilt
from .._errors import AmpkitWarning
from .._torch.tensors.tree import tree_flatten
from .._undo import Undo, replace
from ._host_state import HOOK_BEHIND

_MAX_CONSTANTS = 64  # eager steps may log a new number each time, which must not fill the memory
_READ_BY_THE_BAR = (
    "AmpkitCallback: self.log({0!r}, ..., prog_bar=True) makes Lightning read the value on every batch, so that each "
    "one waits for the device, even if no bar is shown. Leave prog_bar out, or pass on_step=False, on_epoch=True."
)


class LogCall(NamedTuple):
    """One call of `self.log`."""

    name: str
    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Template:
    """A pytree without its tensors, to be filled with those of another replay. A dict key, compared by identity."""

    def __init__(self, tree: Any) -> None:
        self._rebuilt = Rebuilt(tree)
        self.filled = self._rebuilt.with_tensors  # returns the pytree with an iterator's tensors in place of its own

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors and forget them: they are memory of a graph, which the template may outlive."""
        tensors, self._rebuilt.tensors = self._rebuilt.tensors, []
        return tensors

    def __repr__(self) -> str:
        return "training_step"


@contextmanager
def recorded(module: nn.Module, forwarder: "LogForwarder") -> Iterator[list[LogCall]]:
    """Context in which `module.log` only appends to the list that the context yields.

    Lightning's own `log` must not be captured: it replaces the tensors in which it sums, so means over an epoch would
    be wrong without any message. A tensor is cloned, as Lightning does, since the step may change it later. The
    forwarder makes the calls if the step reads what it has logged: see `catch_up`.
    """
    recorder = _LogRecorder(forwarder)
    with Undo() as undo:
        replace(undo, module, "log", recorder)
        yield recorder.calls


def catch_up(module: nn.Module) -> None:
    """Make the calls of `module.log` that were recorded so far: the step is about to read what Lightning has of them.

    Nothing that reads it is captured.
    """
    recorder = vars(module).get("log")
    if isinstance(recorder, _LogRecorder) and recorder.calls:
        calls = recorder.calls[:]
        recorder.calls.clear()
        del vars(module)["log"]
        try:
            recorder.forwarder(calls)
        finally:
            vars(module)["log"] = recorder


@dataclass(eq=False)
class _LogRecorder:
    forwarder: "LogForwarder"
    calls: list[LogCall] = field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Lightning's own log is not traced either
    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        value = value.detach().clone() if isinstance(value, Tensor) else value
        self.calls.append(LogCall(name, value, args, kwargs))


@dataclass(eq=False)
class LogForwarder:
    """Makes recorded calls of `module.log`, after the step."""

    _module: nn.Module
    _device: torch.device
    on_step: bool  # whether Lightning takes the value of each batch if `self.log` does not say
    _constants: dict[float, Tensor] = field(default_factory=dict)  # on the device, by the number that they contain
    _warned: bool = False

    def __call__(self, log_calls: list[LogCall]) -> None:
        """Call `module.log`; warn once if Lightning will read the value from the device for each batch."""
        for name, value, args, kwargs in log_calls:
            if isinstance(value, (bool, int, float)):
                # The tensor that Lightning makes of a number. Made once only, since the copy waits for the device.
                tensor = self._constants.get(value)
                if tensor is None:
                    default = torch.get_default_dtype()
                    dtype = default if default in (torch.float32, torch.float64) else torch.float32
                    tensor = torch.tensor(value, dtype=dtype, device=self._device)
                    if len(self._constants) < _MAX_CONSTANTS:
                        self._constants[value] = tensor
                value = tensor
            warns = not self._warned and self._device.type == "cuda"  # elsewhere reading a value waits for nothing
            if warns and isinstance(value, Tensor) and self._is_read_by_the_bar(*args, **kwargs):
                self._warned = True
                warnings.warn(_READ_BY_THE_BAR.format(name), AmpkitWarning, stacklevel=2)
            self._module.log(name, value, *args, **kwargs)  # type: ignore[operator]  # a LightningModule's

    def _is_read_by_the_bar(
        self, prog_bar: bool = False, logger: bool | None = None, on_step: bool | None = None, *_: Any, **__: Any
    ) -> bool:
        """Return whether Lightning reads the value of each batch. Takes the arguments of `self.log` after the value."""
        return prog_bar and (self.on_step if on_step is None else on_step)


@dataclass(eq=False)
class LoggedNumbers:
    """Finds a Python number that a step logs with several values, because a graph would log one of them each time."""

    _method: str  # the name of the step
    _values: dict[Hashable, float] = field(default_factory=dict)

    def problem(self, log_calls: list[LogCall], batch: Any, phase: Hashable = None) -> str:
        """Return which number was logged with another value for a batch of these shapes, in this phase, before."""
        shapes = tuple(leaf.shape for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
        for name, value, _, _ in log_calls:
            if not isinstance(value, (bool, int, float)):
                continue
            before = self._values.setdefault((name, shapes, phase), value)
            if before != value:
                return (
                    f"self.log({name!r}, {value!r}) in {self._method}: it was {before!r} in an earlier step, and "
                    "a graph would log the same one each time. Log a tensor, or log it in "
                    f"{HOOK_BEHIND[self._method]}."
                )
        return ""
