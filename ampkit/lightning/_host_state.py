"""What a `training_step` reads and changes on the host, where a replay runs no Python: seen before it is captured."""

import dis
import inspect
from collections.abc import Hashable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from .._capture.inputs import Constant

_IN_A_HOOK = "Do it in a hook that fires after each replay, such as on_train_batch_end."
# What Lightning changes between two batches on the host.
_MOVING = {
    "global_step": "Count in a buffer: self.register_buffer('step', torch.zeros(())), self.step += 1.",
    "optimizers": "Log the learning rate with LearningRateMonitor.",
    "lr_schedulers": "Log the learning rate with LearningRateMonitor.",
    "callback_metrics": _IN_A_HOOK,
    "logged_metrics": _IN_A_HOOK,
    "logger": f"Use self.log. {_IN_A_HOOK}",
    "loggers": f"Use self.log. {_IN_A_HOOK}",
}
_SCALARS = (bool, int, float, complex, str, type(None))
_CONTAINERS = (list, dict, set)
_MAX_CHANGES = 16  # in as many calls: one more will follow


class HostReads:
    """The names in the code of `training_step` and of the methods that it leads to, and what they stand for now.

    Args:
        module: the LightningModule.
        base: `LightningModule`, whose own methods are not looked into.

    Attributes:
        problem: what a replay would never see change, "" if nothing.
        reads_index: whether the code of `training_step` uses its argument batch_idx, if only to pass it on.
    """

    def __init__(self, module: nn.Module, base: type) -> None:
        self._module = module
        named = _named_in(type(module), "training_step", base)
        moving = next((name for name in _MOVING if name in named), None)
        self.problem = (
            "" if moving is None else f"{named[moving]} reads self.{moving}, whose value a graph would freeze."
        )
        if moving is not None:
            self.problem += f" {_MOVING[moving]}"
        self._reads_epoch = "current_epoch" in named
        self._attributes = [name for name in named if name not in _OWN]
        self._last: tuple[tuple[str, Hashable], ...] = ()
        self._changes = 0
        self.reads_index = _loads_argument(type(module), 1)

    def values(self, epoch: int) -> tuple[tuple[str, Hashable], ...]:
        """Return what the code may read now, by name: numbers, strings and tensors among the module's attributes."""
        held = vars(self._module)
        found: list[tuple[str, Hashable]] = [("current_epoch", epoch)] if self._reads_epoch else []
        for name in self._attributes:
            if name in held and isinstance(held[name], (Tensor, *_SCALARS)):
                found.append((name, _value(held[name])))
        self._changes = self._changes + 1 if self._last and self._last != tuple(found) else 0
        self._last, before = tuple(found), self._last
        if self._changes >= _MAX_CHANGES:
            name = next(name for (name, new), (_, old) in zip(found, before, strict=False) if new != old)
            self.problem = (
                f"training_step reads self.{name}, which changes with every batch: a graph would freeze it. "
                "Make it a buffer, and change that in place."
            )
        return self._last


_OWN = {"training"}  # part of what the engine tells graphs apart by


def _value(held: Any) -> Hashable:
    return _Identity(held) if isinstance(held, Tensor) else Constant(type(held), held)


class _Identity:
    """Compares by identity, and keeps what it compares alive so that its address is not given to another object."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class HostWrites:
    """Context that looks at what one run of `training_step` leaves changed on the host. Sees the module's attributes
    that are numbers, strings, tensors and containers, and the metrics of torchmetrics in it.

    Attributes:
        problem: what a replay would not do, "" if nothing was changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.problem = ""

    def __enter__(self) -> "HostWrites":
        self._metrics = _metric_counts(self._module)
        self._attributes = _sizes(self._module)
        return self

    def __exit__(self, *_: object) -> None:
        metrics, attributes = _metric_counts(self._module), _sizes(self._module)
        updated = [name for name, count in metrics.items() if count != self._metrics.get(name, 0)]
        changed = [name for name, size in attributes.items() if size != self._attributes.get(name, size)]
        if updated:
            self.problem = (
                f"training_step updates self.{updated[0]}, a metric of torchmetrics, which counts on the host. Return "
                "what it needs (return {'loss': loss, 'preds': preds}) and update and log it in on_train_batch_end."
            )
        elif changed:
            self.problem = (
                f"training_step changes self.{changed[0]} on the host, which a replay would not do. {_IN_A_HOOK}"
            )


def _metric_counts(module: nn.Module) -> dict[str, int]:
    """Return how often each metric below the module was updated, by its path."""
    counts = ((path, getattr(part, "update_count", None)) for path, part in module.named_modules())
    return {path: count for path, count in counts if isinstance(count, int)}


def _sizes(module: nn.Module) -> dict[str, Any]:
    """Return the module's attributes that are numbers, strings or tensors, and the lengths of its containers."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, _CONTAINERS) and not name.startswith("_"):
            found[name] = len(value)
        elif isinstance(value, (Tensor, *_SCALARS)) and not name.startswith("_"):
            found[name] = _value(value)
    return found


# ------------------------------------------------------------------------------------------------------------ batch_idx


class BatchIndex(int):
    """A batch_idx that notices that something is computed with it.

    It takes part in arithmetic, comparison, formatting and hashing of Python, and in most operations of torch. What
    reads the number behind its back goes unnoticed: `torch.full`, `torch.tensor`, an index into a list.

    Attributes:
        used: whether anything was.
    """

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, BatchIndex):
                value.used = True
        plain = {name: _plain(value) for name, value in kwargs.items()}
        return func(*map(_plain, args), **plain)


def _plain(value: Any) -> Any:
    return int.__int__(value) if isinstance(value, BatchIndex) else value


def _noticed(name: str) -> Any:
    method = getattr(int, name)

    def noticed(self: BatchIndex, *args: Any) -> Any:
        self.used = True
        return method(self, *args)

    return noticed


_ARITHMETIC = "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor"
_OTHERS = "eq ne lt le gt ge bool int float index neg pos abs invert round hash repr str format"
for _name in (*_OTHERS.split(), *_ARITHMETIC.split(), *(f"r{word}" for word in _ARITHMETIC.split())):
    setattr(BatchIndex, f"__{_name}__", _noticed(f"__{_name}__"))


# -------------------------------------------------------------------------------------------------------- reading code


def _named_in(cls: type, method: str, base: type) -> dict[str, str]:
    """Return every attribute that a method reads, or a method that it may call of the same object, with who does."""
    classes = [parent for parent in cls.__mro__ if parent not in base.__mro__]
    named: dict[str, str] = {}
    left, seen = [method], {method}
    while left:
        name = left.pop()
        for function in filter(None, (_function(vars(parent).get(name)) for parent in classes)):
            for word in _attributes(function.__code__):
                named.setdefault(word, function.__qualname__)
                if word not in seen:
                    seen.add(word)
                    left.append(word)
    return named


def _function(member: Any) -> Any:
    """Return the function behind a method, a property or a decorated function, None if there is none."""
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if not callable(member):
        return None
    member = inspect.unwrap(member)
    return member if hasattr(member, "__code__") else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _attributes(code: CodeType) -> Iterator[str]:
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                yield instruction.argval


def _loads_argument(cls: type, position: int) -> bool:
    """Return whether the code of `training_step` has its argument at this position in an expression, or may have."""
    function = _function(getattr(cls, "training_step", None))
    if function is None:
        return True
    code: CodeType = function.__code__
    arguments = code.co_varnames[1 : code.co_argcount]  # without self
    if len(arguments) <= position:
        return bool(code.co_flags & inspect.CO_VARARGS)
    return arguments[position] in {*code.co_cellvars, *_loaded(code)}


def _loaded(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if "LOAD_FAST" in instruction.opname:
            names = instruction.argval
            yield from names if isinstance(names, tuple) else (names,)  # two in one since Python 3.13
