"""What eager calls of a step do on the host and no replay would: change numbers of optimizers, read what changes."""

import builtins
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..._text import CONSTANTS
from ..._undo import Undo
from ..._user_line import is_in_users_file, real_frame, running_line, wraps_operations
from ..host.constants import are_same
from ..host.objects import File, FileClass
from ..host.replaced import replace_here
from ..state.state import TrainingState
from .host_values import receive
from .uncapturable import Problem

wraps_operations(__file__)


@dataclass(eq=False)
class HostChanges:
    """Looks for what eager calls of a step change or read on the host, and no replay would.

    Args:
        state: its optimizers.
        may_stop: returns whether an attribute of these, given its name, may stay as it is in a replay.
    """

    _state: TrainingState
    _may_stop: Callable[[str], bool]
    _problems: list[str] = field(default_factory=list)
    _reads: dict[str, str] = field(default_factory=dict)  # by what is read and where, the problem
    _printing: list[str] = field(default_factory=list)

    @contextmanager
    def watching(self, *, is_first: bool) -> Iterator[None]:
        """Context for an eager call. If it `is_first`, it may set numbers that later calls find as they set them."""
        self._problems, self._reads = [], {}
        before = self._numbers()
        with Undo() as undo:
            # What a first call reads is ignored: later calls may read what it has kept of that.
            receive(undo, (lambda *_: None) if is_first else self._on_read)
            kinds = [LRScheduler]
            for kind in kinds:  # grows below
                kinds += [child for child in kind.__subclasses__() if child not in kinds]
                if "step" in vars(kind):
                    replace_here(undo, kind, "step", self._step_scheduler)
            if not is_first:  # which may say what it sets up
                for owner, name in ((builtins, "print"), (logging.Logger, "handle")):
                    replace_here(undo, owner, name, self._print)
            yield
        after = self._numbers()
        changed = [name for name, old in before.items() if name in after and not are_same(old, after[name])]
        if changed and not is_first and not self._problems:
            self._problems.append((_NUMBER if "param_groups[" in changed[0] else _ATTRIBUTE).format(changed[0]))

    def added_to(self, problem: str) -> str:
        """Return a problem with what was found, and forget that."""
        # The preflight may have found the same reads.
        problems = [*self._problems, *(text for what, text in self._reads.items() if what not in problem)]
        self._problems, self._reads = [], {}
        return "\n".join(dict.fromkeys([*problem.splitlines(), *problems]))

    def take_printing(self) -> str:
        """Return in words which line has printed or logged something, "" if none; then forget it."""
        printing, self._printing = self._printing, []
        return _PRINTS.format(printing[0]) if printing else ""

    def _print(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the place of a function that prints or logs."""
        frame: FrameType | None = real_frame()
        while frame is not None and frame.f_code.co_filename == _LOGGING:
            frame = frame.f_back
        if frame is not None and is_in_users_file(frame):  # not by torch
            self._printing.append(running_line(frame))
        return original(*args, **kwargs)

    def _on_read(self, problem: Problem, line: str) -> None:
        what = f"{line} - {problem.what}" if line else problem.what
        self._reads[what] = f"{what}. {problem.advice}"

    def _step_scheduler(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        line = running_line(real_frame())
        self._problems.append(_SCHEDULER.format(f"{line} - " if line else ""))
        return original(*args, **kwargs)

    def _numbers(self) -> dict[str, Any]:
        """Return the entries of all param groups by name, and what counts among the optimizers' attributes.

        These are numbers, the lengths of lists, dicts and sets, and positions in files.
        """
        declared = self._state.optimizers
        optimizers = [(f"optimizers[{k}]." if len(declared) > 1 else "", each) for k, each in enumerate(declared)]
        found: dict[str, Any] = {}
        for prefix, optimizer in optimizers:  # grows below
            for i, group in enumerate(optimizer.param_groups):
                found.update((f"{prefix}param_groups[{i}][{key!r}]", group[key]) for key in group if key != "params")
            for name, value in vars(optimizer).items():
                is_known = name in _of_torch() or any(value is known for _, known in optimizers)
                if is_known or self._may_stop(f"{prefix}{name}"):
                    continue
                if isinstance(value, Optimizer):  # one around which this one is
                    optimizers.append((f"{prefix}{name}.", value))
                elif type(value) in (list, dict, set):
                    found[f"{prefix}{name}"] = len(value)
                elif issubclass(type(value), FileClass):
                    found[f"{prefix}{name}"] = File(value).read()
                elif isinstance(value, CONSTANTS) and value is not None:
                    found[f"{prefix}{name}"] = value
        return found


@functools.cache  # and not when ampkit is imported: the first optimizer imports dynamo
def _of_torch() -> frozenset[str]:
    """Return the attributes of each optimizer: its state is the step's, and schedulers mark that it has stepped."""
    return frozenset((*vars(Optimizer([nn.Parameter(torch.empty(0))], {})), "_opt_called", "_step_count"))


_LOGGING = logging.Logger.handle.__code__.co_filename
_PRINTS = "{0} - prints or logs something, which a replay does not do. Say it behind the call."
_SCHEDULER = (
    "{0}steps a learning-rate scheduler, which a replay would not do. Step it behind each call, or pass it as "
    "graphed_step(scheduler=...)."
)
_ATTRIBUTE = (
    "the step changes the attribute {0} of its optimizer on the host, which a replay would not do. Count in a tensor "
    "on the device. Pass host_writes='ignore' if it may stop."
)
_NUMBER = (
    "the step changes {0} of its optimizer on the host, which a replay would not do. Change it between two calls, or "
    "by a scheduler."
)
