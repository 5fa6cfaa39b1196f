"""What a step returns and logs: split into tensors, which each replay computes, and values that never change.

The calls of `self.log`, and others that belong on the host, are recorded at capture, and made after each replay with
that replay's tensors.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from .._capture.graph.cache import Rebuilt
from .._errors import AmpkitWarning
from .._torch.tensors.tree import tree_flatten
from .._undo import Undo, replace
from .._user_line import users_level
from ._host_state import HOOK_BEHIND
from ._limits import HOOK
from ._metric_calls import MetricCall, MetricCalls, MetricResult, is_value

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
    hook: str | None  # of the module in which it is made, by which Lightning keeps what is logged
    of_dict: bool = False  # whether it is `self.log_dict(value)`, without a name


class HostCall(NamedTuple):
    """One call of something else that is made on the host, without a tensor."""

    function: Callable[[], object]


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


Call = LogCall | HostCall | MetricCall


@contextmanager
def recorded(module: nn.Module, forwarder: "LogForwarder", *, metrics: bool = True) -> Iterator[list[Call]]:
    """Context in which `module.log` only appends to the list that the context yields, and so do the module's metrics.

    Lightning's own `log` must not be captured: it replaces the tensors in which it sums, so means over an epoch would
    be wrong without any message. A tensor is cloned, as Lightning does, since the step may change it later. The
    forwarder makes the calls if the step reads what it has logged: see `catch_up`. Others may append to the list, too.
    """
    recorder = _LogRecorder(forwarder, module)
    forwarder.results = results = dict[int, Any]()
    with Undo() as undo:
        replace(undo, module, "log", recorder)
        if metrics:
            replace(undo, module, "log_dict", recorder.log_dict)
            made = MetricCalls(forwarder.device, recorder.calls.append, lambda: catch_up(module), results)
            made.replace_methods(undo, module)
        yield recorder.calls


def catch_up(module: nn.Module) -> None:
    """Make the calls that were recorded so far: the step is about to read what they lead to.

    Nothing that reads it is captured.
    """
    recorder = vars(module).get("log")
    if isinstance(recorder, _LogRecorder) and recorder.calls:
        calls = recorder.calls[:]
        recorder.calls.clear()
        with Undo() as undo:
            for name in ("log", "log_dict"):
                if name in vars(module):
                    undo.note(setattr, module, name, vars(module)[name])
                    del vars(module)[name]
            recorder.forwarder(calls)


@dataclass(eq=False)
class _LogRecorder:
    forwarder: "LogForwarder"
    _module: Any  # a LightningModule
    calls: list[Call] = field(default_factory=list)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Lightning's own log is not traced either
    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self._append(name, value, args, kwargs, of_dict=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Take the place of `module.log_dict`, which calls `log` for each value of a dict."""
        if is_value(dictionary) or isinstance(dictionary, MetricCollection):
            self._append("", dictionary, args, kwargs, of_dict=True)
        else:
            type(self._module).log_dict(self._module, dictionary, *args, **kwargs)

    def _append(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_dict: bool) -> None:
        if is_value(value):
            value = MetricResult(value.number)
        elif isinstance(value, Tensor):
            value = value.detach().clone()
        self.calls.append(LogCall(name, value, args, kwargs, getattr(self._module, HOOK), of_dict))


@dataclass(eq=False)
class LogForwarder:
    """Makes recorded calls of `module.log`, and others, after the step.

    Metrics are called within the context: that of the Trainer's precision.
    """

    _module: Any  # a LightningModule
    device: torch.device
    on_step: bool  # whether Lightning takes the value of each batch if `self.log` does not say
    _context: Callable[[], AbstractContextManager[Any]]
    results: dict[int, Any] = field(default_factory=dict)  # what metrics have returned since a step was last recorded
    _constants: dict[float, Tensor] = field(default_factory=dict)  # on the device, by the number that they contain
    _warned: bool = False

    def __call__(self, calls: list[Call]) -> None:
        """Make the calls; warn once if Lightning will read a value that is logged from the device for each batch."""
        results = self.results
        for call in calls:
            if isinstance(call, HostCall):
                call.function()
            elif isinstance(call, MetricCall):
                results[call.number] = call.make(self.device, self._context)
            else:
                value = results[call.value.number] if isinstance(call.value, MetricResult) else call.value
                if call.hook == getattr(self._module, HOOK):
                    self._log(value, call)
                    continue
                with Undo() as undo:
                    replace(undo, self._module, HOOK, call.hook)
                    self._log(value, call)

    def _log(self, value: Any, call: LogCall) -> None:
        name, args, kwargs = call.name, call.args, call.kwargs
        if call.of_dict:
            self._module.log_dict(value, *args, **kwargs)
            return
        if isinstance(value, (bool, int, float)):
            # The tensor that Lightning makes of a number. Made once only, since the copy waits for the device.
            tensor = self._constants.get(value)
            if tensor is None:
                default = torch.get_default_dtype()
                dtype = default if default in (torch.float32, torch.float64) else torch.float32
                tensor = torch.tensor(value, dtype=dtype, device=self.device)
                if len(self._constants) < _MAX_CONSTANTS:
                    self._constants[value] = tensor
            value = tensor
        warns = not self._warned and self.device.type == "cuda"  # elsewhere reading a value waits for nothing
        if warns and isinstance(value, Tensor) and self._is_read_by_the_bar(*args, **kwargs):
            self._warned = True
            warnings.warn(_READ_BY_THE_BAR.format(name), AmpkitWarning, stacklevel=users_level())
        self._module.log(name, value, *args, **kwargs)

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

    def problem(self, calls: list[Call], batch: Any, phase: Hashable = None) -> str:
        """Return which number was logged with another value for a batch of these shapes, in this phase, before."""
        shapes = tuple(leaf.shape for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor))
        for name, value, *_ in (call for call in calls if isinstance(call, LogCall)):
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
