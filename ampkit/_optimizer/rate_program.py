"""Learning rates on the device, for optimizers that compute with them on the host: `p.add_(d, alpha=-lr)`.

A graph would hold such a number as a constant. So a step gets, in place of its rate, a number that notes what is
computed of it (`1 - lr * weight_decay`). Where an operation of torch takes one, it gets a tensor on the device in its
place. Before each step the same is computed of the present rates on the host, in Python's own arithmetic, and written
into these tensors. `x.add_(y, alpha=number)` takes no tensor: `x.addcmul_(y, tensor)` rounds as often.

Whether that leaves the bits that numbers leave is not believed, but tried, on the optimizer's own tensors. Only code of
torch's own is given such numbers. That of others might keep them, decide by them in calls that nobody tries, or count
its calls in places that nobody can put back.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from .._errors import CaptureError
from .._torch.device.streams import is_capturing
from .._torch.tensors.modes import enter, without_dispatch_modes
from .._torch.tensors.tensors import foreach_addcmul_, foreach_copy_
from .._torch.tensors.tree import tree_flatten, tree_unflatten
from .._undo import Undo
from .device_step import as_integers
from .rollback import Reachable
from .step_kind import gradients


class _RateOf(NamedTuple):
    """Stands for the rate of the n-th param group."""

    group: int


class _Computed(NamedTuple):
    """Stands for what is computed of rates and constants."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _value(formula: Any, rates: Sequence[float]) -> Any:
    if type(formula) is _RateOf:
        return rates[formula.group]
    if type(formula) is _Computed:
        return formula.function(*[_value(each, rates) for each in formula.arguments])
    return formula


def _number(formula: Any, rates: Sequence[float]) -> float:
    try:
        return float(_value(formula, rates))
    except ArithmeticError:  # of a step that computed otherwise, in earlier calls
        return math.nan


class RateNumber(float):
    """A number that is computed of learning rates. Code that compares or converts it would freeze that in a graph."""

    formula: Any
    program: "RateProgram"

    def __reduce__(self) -> Any:
        """Copies, and what checkpoints have, are plain numbers."""
        return float, (float.__pos__(self),)

    @classmethod
    def made(cls, value: float, formula: Any, program: "RateProgram") -> "RateNumber":
        """Return a number that stands for this formula."""
        number = cls(value)
        number.formula, number.program = formula, program
        return number


def _arithmetic(function: Callable[..., Any], *, reflected: bool) -> Callable[..., Any]:
    def compute(self: RateNumber, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        given = (*others, self) if reflected else (self, *others)
        plain = [float.__pos__(each) if isinstance(each, float) else each for each in given]
        formulas = tuple(each.formula if type(each) is RateNumber else each for each in given)
        return RateNumber.made(function(*plain), _Computed(function, formulas), self.program)

    return compute


def _reading(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def read(self: RateNumber, *others: Any) -> Any:
        self.program.why = self.program.why or "decides by it on the host, or converts it there"
        return original(self, *others)

    return read


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(RateNumber, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
    setattr(RateNumber, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("neg", "abs"):
    setattr(RateNumber, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "float", "int", "trunc", "round", "floor", "ceil"),
    *("floordiv", "rfloordiv", "mod", "rmod", "divmod", "rdivmod", "format", "repr", "str"),
):
    setattr(RateNumber, f"__{_name}__", _reading(f"__{_name}__"))


class _Filled(NamedTuple):
    formula: Any
    cell: Tensor  # of shape (), in the table


class RateProgram:
    """What an optimizer's step computes of its rates on the host, and the tensors that have the results.

    Args:
        optimizer: its groups have numbers as rates.
        device: of its parameters.

    Attributes:
        why: why a graph cannot have the rates in tensors, in words that follow the optimizer's name; "" if it can.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self.why: str = ""
        self._slots: dict[tuple[str, torch.dtype], _Filled] = {}
        self._tables: dict[torch.dtype, Tensor] = {}
        self._filled: dict[torch.dtype, list[float]] = {}
        self._rates: list[float] = self._now()

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that steps read. Aliasing: the live tensors."""
        return list(self._tables.values())

    def refresh(self) -> None:
        """Bring the tensors up to date with the rates of the groups: one copy if they have changed. Sync: none."""
        self._fill(self._now())

    def _fill(self, rates: list[float]) -> None:
        self._rates = rates
        for dtype, table in self._tables.items():
            formulas = [slot.formula for (_, kind), slot in self._slots.items() if kind is dtype]
            values = [_number(formula, rates) for formula in formulas]
            if values != self._filled.get(dtype):
                self._filled.pop(dtype, None)  # an interrupt may come between the two
                with without_dispatch_modes(), torch.no_grad():
                    # In new pinned memory each time: the copy of the last values may not have been done yet.
                    new = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=table.is_cuda)
                    table[: len(values)].copy_(new, non_blocking=True)
                self._filled[dtype] = values

    @contextmanager
    def applied(self, rates: Sequence[float] | None = None) -> Iterator[None]:
        """Context for a step, which takes its rates from the tensors. `rates` are those that Python code sees."""
        groups = self._optimizer.param_groups
        given = [group["lr"] for group in groups]
        shown = [float(rate) for rate in (given if rates is None else rates)]
        with Undo() as undo:
            for i, group in enumerate(groups):
                undo.note(group.__setitem__, "lr", given[i])
                group["lr"] = RateNumber.made(shown[i], _RateOf(i), self)
            enter(undo, _OnDevice(self))
            yield

    def run(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch with tensors in place of what is computed of the rates."""
        name = getattr(function, "__name__", "")
        leaves, tree = tree_flatten((args, kwargs))
        like = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        number = kwargs.get("alpha")
        if like is not None and type(number) is RateNumber and name in _SCALED_SUMS and len(args) == 2:
            factor: Any = -number if "sub" in name else number  # of the same class
            slot = self._cell(factor, like)
            if name.startswith("_foreach"):
                foreach_addcmul_(args[0], args[1], [slot] * len(args[0]))
                return None
            return (args[0].addcmul_ if name.endswith("_") else args[0].addcmul)(args[1], slot)
        if like is None or name not in _TAKING_TENSORS or type(number) is RateNumber:
            if is_capturing():
                raise CaptureError(f"{type(self._optimizer).__name__} passes what it computes of its rate to {name}")
            self.why = self.why or f"passes what it computes of it to {name}"
            return function(*args, **kwargs)
        leaves = [self._cell(leaf, like) if type(leaf) is RateNumber else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, tree)
        return function(*args, **kwargs)

    def _cell(self, number: RateNumber, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
        key = repr(number.formula), dtype
        if key not in self._slots:
            if is_capturing():
                raise CaptureError(f"{type(self._optimizer).__name__} computes something else of its rate in each step")
            table = self._tables.get(dtype)
            if table is None:
                with torch.inference_mode(False):
                    table = self._tables[dtype] = torch.zeros(_MOST, dtype=dtype, device=self._device)
            count = sum(kind is dtype for _, kind in self._slots)
            if count == _MOST:
                self.why = f"computes more than {_MOST} numbers of it"
                return torch.full((), float.__pos__(number), dtype=dtype, device=self._device)
            self._slots[key] = _Filled(number.formula, table[count])
            self._filled.pop(dtype, None)
            self._fill(self._rates)
        return self._slots[key].cell

    def try_out(self, changed: Sequence[Tensor]) -> None:
        """Find out whether steps leave the bits that they leave with numbers. If not, `why` says so.

        Steps are made at three rates, with and without the tensors, and undone. `changed` is what a step changes beside
        the gradients. Waits for the device. It takes as much memory again as two copies of `changed` and the gradients.
        """
        optimizer, given = self._optimizer, self._now()
        tensors = [*changed, *gradients(optimizer)]
        before, reached = [tensor.clone() for tensor in tensors], Reachable(optimizer)
        first = [rate or _SMALL for rate in given]
        for scale in (1.0, 0.37, 1.7):
            with Undo() as undo, torch.no_grad():
                undo.note(foreach_copy_, tensors, before)
                for table in (vars(optimizer), *optimizer.param_groups, *optimizer.state.values()):
                    undo.note(_put_back, table, dict(table))
                for group, rate in zip(optimizer.param_groups, first, strict=True):
                    group["lr"] = scale * rate
                optimizer.step()
                expected = [tensor.clone() for tensor in tensors]
                foreach_copy_(tensors, before)
                self.refresh()
                with self.applied(first):  # Python code sees the rates that it would have seen in a capture
                    optimizer.step()
                pairs = zip(expected, tensors, strict=True)
                if not all(torch.equal(as_integers(old), as_integers(new)) for old, new in pairs):
                    self.why = self.why or "has other last bits with a rate on the device"
                for group, rate in zip(optimizer.param_groups, given, strict=True):
                    group["lr"] = rate
                self.why = self.why or reached.changed_to(Reachable(optimizer))
            if self.why:
                break
        self.refresh()


def _put_back(table: Any, entries: dict[Any, Any]) -> None:
    for key in table.keys() - entries.keys():
        del table[key]
    table.update(entries)


class _OnDevice(TorchFunctionMode):
    """Has operations take tensors in place of what is computed of rates."""

    def __init__(self, program: RateProgram) -> None:
        super().__init__()
        self._program = program

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        if any(type(leaf) is RateNumber and leaf.program is self._program for leaf in leaves):
            return self._program.run(func, args, kwargs)
        return func(*args, **kwargs)  # numbers of another optimizer are for its own mode


_MOST = 256  # numbers per dtype
_SMALL = 1e-3  # in place of a rate of 0, which shows nothing
_SCALED_SUMS = frozenset(("add", "add_", "sub", "sub_", "_foreach_add_", "_foreach_sub_"))
# Operations of two operands, the second one a number or a tensor.
_TAKING_TENSORS = frozenset(
    f"{start}{name}{end}"
    for start in ("", "_foreach_")
    for name in ("add", "div", "lerp", "mul", "sub")
    for end in ("", "_")
) | {f"__{start}{name}__" for start in ("", "i", "r") for name in ("add", "mul", "sub", "truediv")}
