"""What the step of a module reads and changes on the host: checked before a capture, for a replay runs no Python."""

import dis
import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partialmethod
from types import CodeType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from .._capture.host.code import codes_in
from .._capture.keys.inputs import Constant
from .._capture.keys.key import Part
from .._capture.preflight.uncapturable import Problem
from .._capture.state.walk import Objects
from .._text import CONSTANTS
from .._torch.tensors.tree import tree_flatten

# The hook that Lightning calls after each replay of a step.
HOOK_BEHIND = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
}
_IN_A_HOOK = "Do it in a hook that is called after each replay, such as {0}."
_COUNT = (
    "What is to be done every N steps belongs in {0}; self.log may be called in each step, for "
    "Trainer(log_every_n_steps=N) decides what the loggers get. To compute with the number, count in a buffer: "
    "self.register_buffer('step', torch.zeros(())), self.step += 1."
)
_RATE = "Log the learning rate with LearningRateMonitor."
# Attributes that Lightning changes on the host between two batches, and what to write instead of reading them.
ADVICE = {
    **dict.fromkeys(("global_step", "total_batch_idx"), _COUNT),
    "is_last_batch": _IN_A_HOOK,
    **dict.fromkeys(("optimizers", "lr_schedulers", "lr_scheduler_configs"), _RATE),
    **dict.fromkeys(("callback_metrics", "logged_metrics", "progress_bar_metrics"), _IN_A_HOOK),
    **dict.fromkeys(("logger", "loggers"), f"Use self.log. {_IN_A_HOOK}"),
}
_IN_A_BUFFER = "Make it a buffer, and change the buffer in place."
_CONTAINERS = (list, dict, set)
_COMPARABLE = (Tensor, *CONSTANTS, torch.dtype, torch.device)


def changing_values(module: LightningModule) -> list[str]:
    """Return the names in `ADVICE`. The optimizers do not change where `training_step` steps them itself."""
    return [name for name in ADVICE if module.automatic_optimization or name != "optimizers"]


class HostReads:
    """What a step and the methods it calls read of the Trainer, found in their bytecode.

    The engine compares the attributes of the LightningModule, as those of all modules. The methods that it has from
    Lightning are not searched.
    """

    def __init__(self, module: LightningModule, method: str = "training_step") -> None:
        self.readers: dict[str, str] = {}  # by attribute, which of the functions reads it
        readers = self.readers
        self.strings: set[str] = set()  # the constants in these functions
        # The functions that the step may call are those whose name it reads, and so on, itself first. An attribute of
        # any object counts, since bytecode does not say whose it is. A name means the method that the object has; in a
        # function that says `super()` or names a class, also the next one, or the one of that class.
        classes = [parent for parent in type(module).__mro__ if parent not in LightningModule.__mro__]
        to_search, seen = [(0, method)], set[tuple[int, str]]()
        while to_search:
            start, name = to_search.pop()
            at = next((i for i in range(start, len(classes)) if name in vars(classes[i])), None)
            if at is None or (at, name) in seen:
                continue
            seen.add((at, name))
            function = _function(vars(classes[at])[name])
            if function is None:
                continue
            codes = (function.__code__, *codes_in(function.__code__))
            self.strings.update(each for code in codes for each in code.co_consts if isinstance(each, str))
            named = {each for code in codes for each in (*code.co_names, *code.co_freevars)}
            starts = [i for i, parent in enumerate(classes) if i == 0 or parent.__name__ in named]
            if "__class__" in named:
                starts.append(at + 1)
            for attribute in dict.fromkeys(_attributes(function.__code__)):
                readers.setdefault(attribute, function.__qualname__)
                to_search += [(each, attribute) for each in starts]
        self.problem: Problem | None = None  # a value that is read, that changes in every call and would be frozen
        changing = next((name for name in changing_values(module) if name in readers), None)
        if changing is not None:
            frozen = f"{readers[changing]} reads self.{changing}, and a graph would freeze its value"
            self.problem = Problem(frozen, ADVICE[changing].format(HOOK_BEHIND[method]), graph_only=True)
        self._module = module
        self.reads_epoch = "current_epoch" in readers  # the number of the epoch
        self._reads_hparams = "hparams" in readers
        step = _function(getattr(type(module), method, None))
        self.reads_index = True  # whether the code of the step uses its argument batch_idx, if only to pass it on
        if step is not None:
            code: CodeType = step.__code__
            arguments = code.co_varnames[1 : code.co_argcount]  # those by position, without self
            loaded = [each.argval for each in dis.get_instructions(code) if "LOAD_FAST" in each.opname]
            # Since Python 3.13 one instruction may load two.
            names = [name for found in loaded for name in (found if isinstance(found, tuple) else (found,))]
            in_varargs = bool(code.co_flags & inspect.CO_VARARGS)
            self.reads_index = arguments[1] in {*code.co_cellvars, *names} if len(arguments) > 1 else in_varargs

    def parts(self, epoch: int) -> list[Part]:
        """Return the number of the epoch and the hyperparameters with their names, if the code reads them."""
        found: list[tuple[str, Any]] = [("current_epoch", epoch)] if self.reads_epoch else []
        hparams = self._module.hparams if self._reads_hparams else None
        if isinstance(hparams, dict):
            found += [(f"hparams.{name}", value) for name, value in hparams.items()]
        kept = [(name, value) for name, value in found if isinstance(value, (Tensor, *CONSTANTS))]
        return [Part(f"self.{name}", _comparable(value), _IN_A_BUFFER) for name, value in kept]

    def watch_index(self, args: tuple[Any, ...]) -> "tuple[tuple[Any, ...], BatchIndex | None]":
        """Return the arguments behind the batch for a call that is watched, and the batch_idx among them if it is."""
        if not args or not self.reads_index:
            return args, None
        index = BatchIndex(args[0])
        return (index, *args[1:]), index


def _comparable(value: Any) -> Hashable:
    """Return a key that compares numbers and strings by type and value, tensors by identity."""
    return Objects([value]) if isinstance(value, Tensor) else Constant.for_value(value)


@dataclass(eq=False)
class HostWrites:
    """Context that finds what one run of a step changes on the host, and whether it computes with batch_idx.

    It compares the module's attributes that are numbers, strings, tensors and containers before and after, and counts
    the updates of torchmetrics' metrics in it.
    """

    _module: nn.Module  # a LightningModule
    _index: "BatchIndex | None"  # which the step got, if it is watched
    _method: str = "training_step"
    problem: str = ""  # what a replay would do in another way, and what to write instead; "" if there is nothing

    def __enter__(self) -> "HostWrites":
        self._metrics, self._attributes = _host_values(self._module)
        return self

    def __exit__(self, *_: object) -> None:
        metrics, attributes = _host_values(self._module)
        updated = [name for name, count in metrics.items() if count != self._metrics.get(name, 0)]
        changed = [name for name, value in attributes.items() if value != self._attributes.get(name, value)]
        hook = HOOK_BEHIND[self._method]
        if self._index is not None and self._index.used:
            self.problem = (
                f"{self._method} computes with batch_idx, and a graph would freeze its value. Do what depends on it in "
                f"{hook.replace('_end', '_start')} or {hook}, or count batches in a buffer."
            )
        elif updated:
            self.problem = (
                f"{self._method} updates self.{updated[0]}, a metric of torchmetrics, while it runs: it uses the value "
                "that the metric returns, or the metric draws random numbers. A value that is only logged needs no "
                f"update before the step has ended. Or return the metric's inputs, and update it in {hook}."
            )
        elif changed:
            advice = _IN_A_HOOK.format(hook)
            self.problem = f"{self._method} changes self.{changed[0]} on the host, and a replay would not. {advice}"


def _host_values(module: nn.Module) -> tuple[dict[str, int], dict[str, Any]]:
    """Return how often each metric in a module, its lists and dicts was updated, by path; and its public attributes
    that are numbers, strings or tensors, and the lengths of its containers, by name."""
    parts, attributes = list(module.named_modules()), dict[str, Any]()
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if isinstance(value, (list, tuple)):
            parts += ((f"{name}[{i}]", part) for i, part in enumerate(value))
        elif isinstance(value, dict):
            parts += ((f"{name}[{key!r}]", part) for key, part in value.items())
        if isinstance(value, _CONTAINERS):
            attributes[name] = len(value)
        elif isinstance(value, (Tensor, *CONSTANTS)):
            attributes[name] = _comparable(value)
    counts = ((path, getattr(part, "update_count", None)) for path, part in parts if isinstance(part, nn.Module))
    return {path: count for path, count in counts if isinstance(count, int)}, attributes


def not_comparable(batch: Any) -> str:
    """Return which leaf of a batch cannot be compared with that of another batch, "" if there is none."""
    kind = _unseen(batch)
    return kind and (
        f"the batch contains a {kind}, and ampkit cannot see the tensors in it. Make it a tuple, list, dict or named "
        "tuple of tensors, in the collate_fn of the DataLoader."
    )


def not_returnable(output: Any, method: str) -> str:
    """Return which leaf of what a step returned may contain tensors that ampkit does not see, "" if there is none."""
    kind = _unseen(output)
    return kind and (
        f"{method} returns a {kind}, and ampkit cannot see the tensors in it. Return a tensor, or a tuple, list, dict "
        "or named tuple of tensors."
    )


def _unseen(tree: Any) -> str:
    """Return the name of the type of the first leaf that may contain tensors, "" if there is none."""
    return next((type(leaf).__name__ for leaf in tree_flatten(tree)[0] if not isinstance(leaf, _COMPARABLE)), "")


class BatchIndex(int):
    """A batch_idx that notices when something is computed with it.

    It notices Python's arithmetic, comparison, formatting and hashing, and most operations of torch. It does not notice
    C code that reads the number directly: `torch.full`, `torch.tensor`, an index into a list.
    """

    used = False

    def _use(self, method: Callable[..., Any], *args: Any) -> Any:
        self.used = True
        return method(self, *args)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = []
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, BatchIndex):
                value.used = True
            plain.append(int.__int__(value) if isinstance(value, BatchIndex) else value)
        return func(*plain[: len(args)], **dict(zip(kwargs or (), plain[len(args) :], strict=True)))


_ARITHMETIC = "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor"
_OTHERS = "eq ne lt le gt ge bool int float index neg pos abs invert round hash repr str format"
for _name in (*_OTHERS.split(), *_ARITHMETIC.split(), *(f"r{word}" for word in _ARITHMETIC.split())):
    setattr(BatchIndex, f"__{_name}__", partialmethod(BatchIndex._use, getattr(int, f"__{_name}__")))


def _function(member: Any) -> Any:
    """Return the Python function of a method, a property or a decorated function, None if there is none."""
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if not callable(member):
        return None
    member = inspect.unwrap(member)
    return member if hasattr(member, "__code__") else None


def _attributes(code: CodeType) -> Iterator[str]:
    for part in (code, *codes_in(code)):
        for instruction in dis.get_instructions(part):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                yield instruction.argval
