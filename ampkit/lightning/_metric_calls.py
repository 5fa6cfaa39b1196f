"""Metrics of torchmetrics in a step: their calls are noted while Python runs it, and made behind it, also of a replay.

A metric counts on the host and replaces the tensors in which it sums, which no replay would do. What it gets are copies
of tensors of the step. What a call returns is known behind the step only. The step may log it. Anything else that it
does with it has all calls so far made at once, so that each value is there; such a step is not captured.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import BootStrapper

from .._capture.keys.containers import own_batch
from .._errors import CaptureError
from .._torch.device.streams import is_capturing
from .._torch.tensors.modes import without_dispatch_modes
from .._torch.tensors.tree import tree_flatten, tree_unflatten
from .._undo import Undo, replace

_METHODS = ("forward", "update", "compute", "reset")
_CONTAINERS = (list, tuple, dict)


class MetricCall(NamedTuple):
    """One call of a metric."""

    number: int  # of the metric calls in the step
    metric: nn.Module  # a Metric or a MetricCollection
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool  # whether gradients were on, as the next two
    autocast: bool
    autocast_dtype: torch.dtype

    def make(self, device: torch.device, context: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Make the call, within the context of the step."""
        autocast = torch.autocast(device.type, self.autocast_dtype, self.autocast)
        with context(), autocast, torch.set_grad_enabled(self.grad):
            return getattr(self.metric, self.method)(*self.args, **self.kwargs)


class MetricResult(NamedTuple):
    """Stands for what a metric call returns, where it is logged."""

    number: int


@dataclass(eq=False)
class MetricCalls:
    """Notes the calls of a module's metrics in one run of its step.

    `note` is called with each of them, and `make_all` to make those that were noted, at once. `results` is given what
    they return, by their numbers.
    """

    _device: torch.device
    _note: Callable[[MetricCall], None]
    _make_all: Callable[[], None]
    results: dict[int, Any]
    _number: int = 0
    _makes: bool = False
    is_open: bool = True  # whether calls are noted

    def replace_methods(self, undo: Undo, module: nn.Module) -> None:
        """Have calls noted. What draws random numbers is left alone: behind the step it would draw others."""
        undo.note(setattr, self, "is_open", False)
        for metric in _metrics_of(module):
            if not isinstance(metric, BootStrapper):
                for method in _METHODS:
                    if hasattr(metric, method):
                        replace(undo, metric, method, self._noting(metric, method, getattr(metric, method)))

    def _noting(self, metric: nn.Module, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if self._makes:
                return original(*args, **kwargs)
            number, self._number = self._number, self._number + 1
            kind = self._device.type
            modes = torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            args, kwargs = _cloned(own_batch(all_made((args, kwargs))))
            self._note(MetricCall(number, metric, method, args, kwargs, *modes))
            if method not in ("forward", "compute"):
                return None
            return MetricValue.of(self, number) if isinstance(metric, Metric) else MetricValues(self, number)

        return noting

    def has(self, number: int) -> bool:
        """Return whether what a call has returned is there, or can be made now."""
        return self.is_open or number in self.results

    def result(self, number: int) -> Any:
        """Return what a call has returned. It is made now if it was not, and all before it."""
        if number not in self.results:
            if is_capturing() or not self.is_open:
                raise CaptureError(
                    "the step uses the value of a metric, which is computed behind a replay. Log it, or use it in "
                    "on_train_batch_end."
                )
            self._makes = True
            try:
                self._make_all()
            finally:
                self._makes = False
        return self.results[number]


class MetricValue(Tensor):
    """What a call of a metric returns. Whatever is done with it is done with the value itself, a tensor or not.

    It is a tensor that is empty, as torch's own code would crash on what only says that it is one.
    """

    metric_calls: MetricCalls
    number: int

    @staticmethod
    def of(calls: MetricCalls, number: int) -> "MetricValue":
        """Return what stands for the value of this call."""
        with without_dispatch_modes():
            value = _EMPTY.as_subclass(MetricValue)
        value.metric_calls, value.number = calls, number
        return value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_flatten((args, kwargs or {}))[0]
        if not all(leaf.metric_calls.has(leaf.number) for leaf in leaves if type(leaf) is MetricValue):
            # It is looked at before it can be made.
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # of torch
        made, kwargs = all_made((args, kwargs or {}))
        if made and is_value(args[0]) and not isinstance(made[0], Tensor):
            return getattr(made[0], func.__name__)(*made[1:], **kwargs)
        return func(*made, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(made(self), name)


class MetricValues(Mapping[str, Any]):
    """What a call of a collection of metrics returns: their values by name."""

    def __init__(self, calls: MetricCalls, number: int) -> None:
        self.metric_calls, self.number = calls, number

    def __getitem__(self, name: str) -> Any:
        return made(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(made(self))

    def __len__(self) -> int:
        return len(made(self))

    def __repr__(self) -> str:
        return repr(made(self))


_EMPTY = torch.empty(0)


def made(value: MetricValue | MetricValues) -> Any:
    """Return the value itself."""
    return value.metric_calls.result(value.number)


def is_value(leaf: Any) -> bool:
    """Return whether this is a value that a metric has returned, without asking for it."""
    return type(leaf) in (MetricValue, MetricValues)


def all_made(tree: Any) -> Any:
    """Return a tree with values in place of what stands for them."""
    leaves, structure = tree_flatten(tree)
    if not any(map(is_value, leaves)):
        return tree
    return tree_unflatten([made(leaf) if is_value(leaf) else leaf for leaf in leaves], structure)


def _cloned(tree: Any) -> Any:
    """Return a tree with copies of its tensors, since the step may change them later."""
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def _metrics_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the metrics in a module and in its lists and dicts, without those that are a part of another one."""
    inside = [value for value in vars(module).values() if isinstance(value, _CONTAINERS)]
    parts = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
    to_search, seen = [module, *(part for part in parts if isinstance(part, nn.Module))], set[nn.Module]()
    while to_search:
        part = to_search.pop()
        if part in seen:
            continue
        seen.add(part)
        if isinstance(part, (Metric, MetricCollection)):
            yield part
        else:
            to_search += part.children()
